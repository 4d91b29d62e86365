"""The three phases in one folder: each from the best of the previous one, resuming after a stop, one report."""

import contextlib
import copy
import json
import shutil

import pytest
from f1_worlds import micro_config
from panning_camera import game_config

from deft.cli import main
from deft.config.loading import to_dict
from deft.errors import InputError, RunError
from deft.evaluation.report import write_report
from deft.runs import checkpoint
from deft.runs.directory import remove_run
from deft.training.phases import all_phases
from deft.training.phases.all_phases import phase_settings, train_all
from deft.training.phases.teacher import TeacherTrainer


def whole_config(folder, model_file, **run):
    config = game_config(folder, **run)
    config.phase = "all"
    config.model.config_file = str(model_file)
    config.training.motion_warmup, config.training.overlap = 0.0, False
    config.all.output_dir = str(folder)
    config.all.teacher_episodes, config.all.student_episodes, config.all.evaluation_episodes = 4, 4, 1
    config.adversarial.iterations = 2
    return config


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "micro.json"
    path.write_text(json.dumps(to_dict(micro_config(condition_init=0.05))))
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory, model_file):
    """Stopped in phase 2 by a failure, and gone on with."""
    folder = tmp_path_factory.mktemp("all") / "run"
    original = all_phases.TRAINERS["student"]

    class Stopped(original):
        def train_round(self):
            if self.episode:
                raise KeyboardInterrupt
            return super().train_round()

    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(all_phases.TRAINERS, "student", Stopped)
        with pytest.raises(KeyboardInterrupt):
            train_all(whole_config(folder, model_file))
    kept = checkpoint.load_part(folder / "teacher" / "best", checkpoint.MODEL)
    assert [path.name for path in checkpoint.list_checkpoints(folder / "student")] == ["checkpoint-2"]
    results = train_all(whole_config(folder, model_file, auto_resume=True))
    return folder, results, kept


def test_every_phase_is_there_and_starts_from_the_best_of_the_last(whole):
    folder, results, kept = whole
    assert checkpoint.list_checkpoints(folder / "teacher")[-1].name == "checkpoint-4"
    assert checkpoint.list_checkpoints(folder / "student")[-1].name == "checkpoint-4"
    assert checkpoint.list_checkpoints(folder / "adversarial")[-1].name == "checkpoint-2"
    for phase in ("teacher", "student", "adversarial"):
        assert (folder / phase / "best" / "model.pt").is_file()
        assert results[phase] == str(folder / phase / "best")
    student = checkpoint.load_part(folder / "student" / "best", checkpoint.MODEL)
    # The teacher was done before the stop, and its world model, bit for bit, is the student's.
    name = "model.world_model.embedding.weight"
    assert kept[name].equal(student[name])
    settings = (folder / "adversarial" / "config.yaml").read_text()
    for phase in ("teacher", "student"):  # by name: the best may be another one day
        assert f"{folder}/{phase}/{(folder / phase / 'best').resolve().name}" in settings


def test_what_is_done_is_not_done_again(whole, model_file, monkeypatch):
    folder, _, _ = whole
    monkeypatch.setattr(all_phases, "TRAINERS", {})
    again = train_all(whole_config(folder, model_file, auto_resume=True))
    assert again["report"] == str(folder / "report.html")


def test_a_phase_that_is_to_be_longer_goes_on_unless_a_later_one_began_from_it(whole, model_file, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder, symlinks=True)
    longer = whole_config(folder, model_file, auto_resume=True)
    longer.all.teacher_episodes = 6
    with pytest.raises(InputError, match="teacher: is done with 4 episodes, and student has started from it"):
        train_all(longer)
    longer.all.teacher_episodes, longer.adversarial.iterations = 4, 3
    train_all(longer)
    assert checkpoint.find_checkpoint(folder / "adversarial").name == "checkpoint-3"
    # 4 updates of the teacher and 3 iterations of 4: the comparison is made anew
    found = json.loads((folder / "comparison.json").read_text())
    best = checkpoint.load_training_state(checkpoint.find_best(folder / "adversarial"))
    assert found["rows"][1]["values"]["updates in all"] == 4 + best["num_updates"]
    assert json.loads((folder / "phases.json").read_text())["adversarial"]["summary"]["iterations"] == 3


def test_a_phase_that_is_replaced_leaves_no_old_evaluation(whole, model_file, tmp_path):
    folder = tmp_path / "teacher"
    shutil.copytree(whole[0] / "teacher", folder, symlinks=True)
    assert (folder / "evaluation.json").is_file()
    remove_run(folder)
    assert not (folder / "evaluation.json").exists()


def test_a_folder_with_a_run_is_not_replaced_by_accident(whole, model_file):
    folder, _, _ = whole
    with pytest.raises(InputError, match="already holds a run"):
        train_all(whole_config(folder, model_file))
    with pytest.raises(InputError, match="is a run of phase teacher"):
        train_all(whole_config(folder / "teacher", model_file))


def test_runs_of_another_kind_are_left_alone(whole, model_file, tmp_path):
    """Neither does `train all` write into the folder of a PPO run, nor a phase into that of the whole."""
    (tmp_path / "config.yaml").write_text("env:\n  id: CartPole-v1\n")
    with pytest.raises(InputError, match="holds a run of another kind"):
        train_all(whole_config(tmp_path, model_file))
    assert (tmp_path / "config.yaml").read_text() == "env:\n  id: CartPole-v1\n"
    config = phase_settings(whole_config(tmp_path / "other", model_file), "teacher", tmp_path)
    config.teacher.output_dir, config.run.auto_resume = str(whole[0]), False
    with pytest.raises(InputError, match="holds a run of `deft train all`"):
        TeacherTrainer(config)


def test_a_typo_does_not_take_the_folder(model_file, tmp_path):
    config = whole_config(tmp_path, model_file)
    config.environment["world"] = "nonsense"
    for _ in range(2):  # the second time it is not rejected as an existing run
        with pytest.raises(InputError, match="nonsense"):
            train_all(config)


def test_the_page_of_a_viewed_run_is_that_of_all_phases(model_file, tmp_path, monkeypatch):
    served = []

    @contextlib.contextmanager
    def serving(settings, folder):
        served.append((settings.view, folder))
        yield

    def end(settings):
        assert not settings.logging.view  # no server of a phase
        raise KeyboardInterrupt

    monkeypatch.setattr(all_phases, "serving", serving)
    monkeypatch.setattr(TeacherTrainer, "train", lambda trainer: end(trainer.config))
    config = whole_config(tmp_path / "run", model_file)
    config.logging.view, config.logging.view_port = True, 0
    with pytest.raises(KeyboardInterrupt):
        train_all(config)
    assert served == [(True, tmp_path / "run")]


def test_the_report_holds_everything_itself(whole):
    folder, results, _ = whole
    text = (folder / "report.html").read_text()
    assert results["report"] == str(folder / "report.html")
    for section in ("phase-1---teacher", "phase-2---student", "phase-3---adversarial", "before-and-after"):
        assert f'<section id="{section}"' in text
    assert text.count('src="data:video/mp4;base64,') >= 3  # the held-out video of each phase
    assert text.count('src="data:image/png;base64,') >= 3
    for outside in ("http://", "https://", 'src="/', 'src="file'):
        assert outside not in text.replace("http://www.w3.org/2000/svg", "")
    assert "Cross-entropy, nats a code" in text
    found = json.loads((folder / "comparison.json").read_text())
    assert [row["name"] for row in found["rows"]] == ["Phase 1", "Phase 3"]
    # 4 episodes in batches of 2, 6 steps in chunks of 3: 4 updates; phase 3 adds 2 iterations of 2 batches, 8 updates.
    assert [row["values"]["updates in all"] for row in found["rows"]] == [4, 12]


def test_a_report_of_one_phase(whole, tmp_path):
    folder, _, _ = whole
    text = write_report(folder / "student").read_text()
    assert "Phase 2 · Student" in text
    assert "Phase 1 · Teacher" not in text
    assert "Memory divergence" in text
    with pytest.raises(InputError, match="no run in it"):
        write_report(tmp_path)


def test_the_evaluations_compare(whole):
    folder, _, _ = whole
    assert (folder / "student" / "plots" / "rewards.png").is_file()
    student = json.loads((folder / "student" / "evaluation.json").read_text())
    assert student["explorer"]["steps"] == student["random"]["steps"] == 6
    assert {"cells", "wm_error", "memory_divergence"} <= student["explorer"].keys() <= student["untrained"].keys()
    assert student["action_selection"] == "sample"
    game = json.loads((folder / "adversarial" / "evaluation.json").read_text())
    assert set(game["world_model"]) == {"present", "at the start"}
    assert game["cross_entropy"] == game["world_model"]["present"]["cross_entropy"]
    assert "noise" not in game  # that world has no patch of noise


def test_settings_of_a_phase(tmp_path, model_file):
    config = whole_config(tmp_path, model_file)
    config.all.student_minutes = 3.0
    config.model.checkpoint_path = "weights"
    before = copy.deepcopy(config)
    assert phase_settings(config, "teacher", tmp_path).model.checkpoint_path == "weights"
    student = phase_settings(config, "student", tmp_path)
    assert (student.phase, student.training.num_episodes, student.training.max_minutes) == ("student", 4, 3.0)
    assert student.run.auto_resume
    assert student.model.checkpoint_path is None  # it starts from the teacher
    assert phase_settings(config, "adversarial", tmp_path).training.max_minutes is None
    assert config == before


@pytest.mark.parametrize(
    ("command", "message"),
    [
        ("report", "report: give the directories of runs; got none"),
        ("report {tmp}", "no run in it"),
        ("train all --resume {tmp}", "not a folder of `deft train all`"),
        ("train all --num-episodes 3", "--num-episodes"),
        ("train all --output-dir {file}", "is a file; name a folder"),
        ("train adversarial --reward noise", "one of 'progress', 'disagreement', 'error'"),
        (
            "train adversarial --teacher-checkpoint {tmp}/none --output-dir {tmp}/run",
            "no such checkpoint or run folder",
        ),
        ("train adversarial --dataset videos", "--dataset"),
        ("evaluate {whole}", "holds three phases; evaluate one"),
        ("evaluate {whole}/student --random-policy", "--random-policy: a run of phase student"),
        ("evaluate {whole}/student --shuffle-instructions", "--shuffle-instructions: a run of phase student"),
        ("train adversarial --ensemble-size 1", "must be at least 2"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(command, message, whole, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    words = [word.format(tmp=tmp_path, file=tmp_path / "file", whole=whole[0]) for word in command.split()]
    assert main(words) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert message in lines[-1]
    assert lines[-1].startswith("deft: ")


def test_a_game_that_collapses_is_still_evaluated_and_reported(tmp_path, model_file):
    config = whole_config(tmp_path / "run", model_file)
    config.adversarial.reward_floor, config.adversarial.collapse_patience = 1e6, 1
    with pytest.raises(RunError, match="the game is over"):
        train_all(config)
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "run" / "adversarial")] == ["checkpoint-1"]
    page = (tmp_path / "run" / "report.html").read_text()
    assert "The world model, before and after phase 3" in page
    assert "Phase 3 ended early: the game is over" in page
