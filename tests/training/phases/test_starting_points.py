"""What the phases start from: which checkpoint, tokenizer and folder; and what a resumed run may change."""

import copy
import json
import shutil

import numpy as np
import pytest
import torch
from explorers import explorer_policy, student_config, teacher_policy
from f1_worlds import micro_config
from panning_camera import game_config, panning_config

from deft.config.f1_settings import ExplorerSettings
from deft.config.loading import to_dict
from deft.config.rl_yaml import read_phase_config
from deft.errors import InputError
from deft.models.f1.explorer import new_explorer
from deft.models.f1.policy import F1Policy
from deft.runs import checkpoint
from deft.training.phases.adversarial import AdversarialTrainer, check_tokenizer, set_noise, set_scale, split_batch
from deft.training.phases.base import moved_with
from deft.training.phases.student import StudentTrainer, load_teacher, train_student
from deft.training.phases.teacher import TeacherTrainer


def save_teacher(folder, policy, episode):
    checkpoint.save_checkpoint(folder, episode, policy.state_dict(), {"phase": "teacher"}, {})
    (folder / "f1_config.json").write_text(json.dumps(to_dict(policy.config)))


@pytest.fixture
def teacher_run(tmp_path):
    folder = tmp_path / "teacher"
    folder.mkdir()
    save_teacher(folder, teacher_policy(), 8)
    return folder


# -- which checkpoint ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["run", "best"])
def test_a_student_keeps_the_teacher_that_it_was_made_with(tmp_path, teacher_run, by):
    checkpoint.mark_best(teacher_run, teacher_run / "checkpoint-8")
    given = teacher_run if by == "run" else teacher_run / "best"

    def config(**run):
        made = student_config(tmp_path / "student", num_episodes=run.pop("num_episodes", 2), **run)
        made.student.teacher_checkpoint = str(given)
        return made

    train_student(config())
    written = read_phase_config(tmp_path / "student" / "config.yaml")
    assert written.student.teacher_checkpoint == str(teacher_run / "checkpoint-8")
    later = teacher_policy()
    with torch.no_grad():
        later.model.world_model.output.weight.add_(1.0)
    save_teacher(teacher_run, later, 16)  # the teacher has gone on meanwhile
    checkpoint.mark_best(teacher_run, teacher_run / "checkpoint-16")
    assert train_student(config(num_episodes=4, auto_resume=True))["episodes"] == 4
    again = config(num_episodes=6, auto_resume=True)
    again.student.teacher_checkpoint = str(teacher_run / "checkpoint-16")  # asked for by name
    with pytest.raises(InputError, match="not the teacher of"):
        StudentTrainer(again)


def test_a_game_writes_down_where_it_started(tmp_path, teacher_run):
    config = game_config(tmp_path / "game", total_iterations=1)
    config.adversarial.teacher_checkpoint = str(teacher_run)
    AdversarialTrainer(config).train()
    written = read_phase_config(tmp_path / "game" / "config.yaml")
    assert written.adversarial.teacher_checkpoint == str(teacher_run / "checkpoint-8")
    assert written.adversarial.student_checkpoint is None
    shutil.rmtree(teacher_run)  # what it started from is not needed to resume
    config = game_config(tmp_path / "game", total_iterations=2, auto_resume=True)
    config.adversarial.teacher_checkpoint = str(teacher_run)
    config.adversarial.student_checkpoint = str(tmp_path / "gone")
    assert AdversarialTrainer(config).train()["iterations"] == 2


def test_a_start_that_is_not_there_is_named_by_its_setting(tmp_path):
    config = student_config(tmp_path)
    config.student.teacher_checkpoint = str(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"teacher_checkpoint: .*nowhere: there is no such"):
        load_teacher(config, torch.device("cpu"))
    config = game_config(tmp_path)
    config.adversarial.student_checkpoint = str(tmp_path / "nowhere")
    with pytest.raises(InputError, match=r"student_checkpoint: .*nowhere: there is no such"):
        AdversarialTrainer(config, teacher_policy())


def test_a_start_that_its_run_has_pruned_is_said(tmp_path, teacher_run):
    config = student_config(tmp_path)
    config.student.teacher_checkpoint = str(teacher_run / "checkpoint-4")
    with pytest.raises(InputError, match=r"its run has kept only the latest \(keep_checkpoints\)"):
        load_teacher(config, torch.device("cpu"))


def test_a_teacher_that_is_not_finite_is_an_error(tmp_path, teacher_run):
    broken = teacher_policy()
    with torch.no_grad():
        broken.model.world_model.output.weight[0, 0] = float("nan")
    save_teacher(teacher_run, broken, 16)
    config = student_config(tmp_path)
    config.student.teacher_checkpoint = str(teacher_run)
    with pytest.raises(InputError, match=r"world_model\.output\.weight has values that are not finite"):
        load_teacher(config, torch.device("cpu"))


def test_a_game_that_goes_on_keeps_what_it_began_with(tmp_path, teacher_run):
    config = game_config(tmp_path / "game", total_iterations=1)
    config.adversarial.teacher_checkpoint = str(teacher_run)
    AdversarialTrainer(config).train()
    save_teacher(teacher_run, teacher_policy(), 16)
    for number, given in enumerate([None, teacher_run, teacher_run / "checkpoint-16"]):
        config = game_config(tmp_path / "game", total_iterations=2 + number, auto_resume=True)
        config.adversarial.teacher_checkpoint = None if given is None else str(given)
        AdversarialTrainer(config).train()
        written = read_phase_config(tmp_path / "game" / "config.yaml")
        assert written.adversarial.teacher_checkpoint == str(teacher_run / "checkpoint-8")


def test_links_mean_what_they_point_at(tmp_path, teacher_run, monkeypatch):
    (tmp_path / "link").symlink_to(teacher_run)
    (tmp_path / "one").symlink_to(teacher_run / "checkpoint-8")
    monkeypatch.chdir(tmp_path)  # and a relative path stays right from elsewhere
    for name in ("link", "one", "teacher", str(tmp_path / "link")):
        config = student_config(tmp_path / "student", num_episodes=2, overwrite=True)
        config.student.teacher_checkpoint = name
        made = StudentTrainer(config)
        made.close()
        assert made.config.student.teacher_checkpoint == str(teacher_run / "checkpoint-8")


def test_a_start_that_was_moved_with_the_run_is_found(tmp_path):
    (tmp_path / "new" / "teacher" / "checkpoint-8").mkdir(parents=True)
    run, start = tmp_path / "new" / "student", tmp_path / "old" / "teacher" / "checkpoint-8"
    assert moved_with(run, str(start)) == tmp_path / "new" / "teacher" / "checkpoint-8"
    start.mkdir(parents=True)
    assert moved_with(run, str(start)) == start  # where it was comes first


# -- weights and tokenizers ------------------------------------------------------------------------------------------


def test_with_the_teachers_seed_an_explorer_still_has_weights_of_its_own():
    torch.manual_seed(3)
    teacher = F1Policy(micro_config())
    torch.manual_seed(3)
    own = new_explorer(teacher, torch.arange(32) < 2, student_config("x").student.explorer).f1
    theirs = dict(teacher.named_parameters())
    drawn = [name for name in theirs if "memory.gru.weight" in name]
    assert len(drawn) == 4  # two layers
    assert not any(torch.equal(own.get_parameter(name), theirs[name]) for name in drawn)
    torch.manual_seed(3)
    torch.rand(5)  # what was drawn before does not matter, the seed does
    again = new_explorer(teacher, torch.arange(32) < 2, student_config("x").student.explorer).f1
    assert all(torch.equal(one, other) for one, other in zip(own.parameters(), again.parameters(), strict=True))


def test_an_explorer_with_another_tokenizer_is_an_error(tmp_path):
    teacher = teacher_policy()
    explorer = explorer_policy(teacher)
    check_tokenizer(teacher, explorer.f1, tmp_path)
    other = copy.deepcopy(teacher)
    with torch.no_grad():
        other.tokenizer.quantize.embedding.weight[3] += 0.01
    with pytest.raises(InputError, match=r"student_checkpoint: .*tokenizer\.quantize\.embedding\.weight"):
        AdversarialTrainer(game_config(tmp_path), other, explorer)
    larger = teacher_policy(memory_hidden=8)
    larger.tokenizer.load_state_dict(teacher.tokenizer.state_dict())
    with pytest.raises(InputError, match="has memory_hidden 6, the teacher 8"):
        check_tokenizer(larger, explorer.f1, tmp_path)


# -- which folder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [{"auto_resume": True}, {"overwrite": True}, {}])
def test_a_folder_of_another_phase_is_left_alone(tmp_path, run):
    (tmp_path / "config.yaml").write_text("phase: all\n")
    with pytest.raises(InputError, match="holds a run of `deft train all`"):
        TeacherTrainer(panning_config(tmp_path, **run))
    assert (tmp_path / "config.yaml").read_text() == "phase: all\n"


def test_nor_does_a_run_go_on_into_a_folder_of_another_phase(tmp_path, teacher_run):
    shutil.copytree(teacher_run, tmp_path / "own")
    (tmp_path / "all").mkdir()
    (tmp_path / "all" / "config.yaml").write_text("phase: all\n")
    with pytest.raises(InputError, match="holds a run of `deft train all`"):
        TeacherTrainer(panning_config(tmp_path / "all", resume=str(tmp_path / "own")))


# -- what may change -------------------------------------------------------------------------------------------------


def test_a_game_that_goes_on_keeps_its_noise(tmp_path):
    explorer = explorer_policy()
    set_noise(explorer, game_config(tmp_path), tmp_path, resumes=True)
    with pytest.raises(InputError, match=r"explorer_noise: .* was trained with 1, not 0.5"):
        set_noise(explorer, game_config(tmp_path, explorer_noise=0.5), tmp_path, resumes=True)
    set_noise(explorer, game_config(tmp_path, explorer_noise=0.5), tmp_path)  # of a student's explorer, half
    with pytest.raises(InputError, match=r"explorer_noise: .* was trained with 0.5, not 0.25"):
        set_noise(explorer, game_config(tmp_path, explorer_noise=0.25), tmp_path, resumes=True)


def test_noise_that_float32_cannot_score_is_an_error(tmp_path):
    # 0.4 · 0.02 = 0.008, under 0.01
    with pytest.raises(
        InputError, match=r"explorer_noise: 0.02 of action_noise 0.4 is 0.008; it must be at least 0.01"
    ):
        set_noise(explorer_policy(), game_config(tmp_path, explorer_noise=0.02), tmp_path)
    with pytest.raises(InputError, match="action_noise"):
        ExplorerSettings(action_noise=0.001)


def test_another_bound_than_an_explorer_had_is_said(tmp_path, caplog):
    explorer = explorer_policy()
    set_scale(explorer, 0.15, tmp_path)  # a student's, which had none
    assert not caplog.records
    set_scale(explorer, 1.0, tmp_path)
    assert "was trained with 0.15; this run uses 1" in caplog.text
    assert float(explorer.action_scale) == 1.0


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 32])
@pytest.mark.parametrize("shares", [(0.75, 0.125), (0.5, 0.125), (0.5, 0.5), (0.0, 0.3), (0.7, 0.1)])
def test_shares_of_a_batch_come_true_over_several(size, shares):
    found = np.array([split_batch(number, size, *shares) for number in range(800)])
    assert found.mean(0) / size == pytest.approx(shares, abs=0.005)
    assert (found.sum(1) <= size).all()
    whole = [size * share for share in shares]
    assert (np.abs(found - whole) <= 1 + 1e-6).all()  # never more than one beside it
    if size == 32 and shares == (0.75, 0.125):
        assert (found == [24, 4]).all()  # whole numbers are kept


def test_settings_that_do_nothing_in_a_game_are_named(tmp_path, caplog):
    config = game_config(tmp_path, random_share=0.5, replay_share=0.5, random_episodes=0, wm_warmup=2)
    config.model.checkpoint_path = "elsewhere"
    AdversarialTrainer(config, teacher_policy()).close()
    for part in ("random_share: ignored without", "wm_warmup: 2 of 2 iterations", "model.checkpoint_path: ignored"):
        assert part in caplog.text
