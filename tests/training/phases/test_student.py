"""Phase 2: the run folder, resuming, the teacher it is made from, and kill -9."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from explorers import student_config, teacher_policy
from f1_worlds import micro_policy

from deft.config.loading import to_dict
from deft.config.rl_yaml import parse_phase
from deft.errors import InputError
from deft.models.f1.explorer import WORLD_MODEL, load_explorer
from deft.models.f1.loading import load_f1_policy
from deft.runs import checkpoint
from deft.training.phases.student import StudentTrainer, check_mask, load_teacher, train_student

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def teacher():
    return teacher_policy()


@pytest.fixture(scope="module")
def teacher_run(teacher, tmp_path_factory) -> Path:
    """A run folder with the teacher's checkpoint, as `deft train teacher` leaves it."""
    folder = tmp_path_factory.mktemp("teacher")
    weights = teacher.state_dict()
    checkpoint.save_checkpoint(folder, 8, weights, {"phase": "teacher"}, {})
    (folder / "f1_config.json").write_text(json.dumps(to_dict(teacher.config)))
    return folder


def test_outputs_are_as_documented(tmp_path, teacher_run):
    config = student_config(tmp_path, save_every=2, sample_save_every=4, video_save_every=4)
    config.student.teacher_checkpoint = str(teacher_run)
    summary = train_student(config)
    assert (summary["episodes"], summary["updates"]) == (4, 2)
    latest = tmp_path / "checkpoint-4"
    assert {path.name for path in latest.iterdir()} == {
        "model.pt",
        "explorer.pt",
        "training_state.pt",
        "metrics.pt",
        "deft_manifest.json",
    }
    assert (tmp_path / "samples" / "episode_4.png").is_file()
    assert (tmp_path / "videos" / "episode_4.mp4").is_file()
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {"rewards.png"}
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    terms = ("memory", "uncertainty", "error", "error_progress", "uncertainty_progress", "action")
    assert {f"reward/{name}" for name in terms} <= lines[-1].keys()
    assert {"train/reward", "train/memory_divergence", "train/wm_error", "train/wm_uncertainty"} <= lines[-1].keys()
    assert all(line["train/first_ratio_error"] < 1e-4 for line in lines)
    # an F1 checkpoint whose world model is the teacher's, before and after; the rest has learned
    found = load_f1_policy(tmp_path / "f1_config.json", checkpoint_path=latest).policy.state_dict()
    theirs = checkpoint.load_part(teacher_run / "checkpoint-8", "model.pt")
    assert all(torch.equal(found[name], theirs[name]) for name in found if name.startswith(WORLD_MODEL))
    first = load_explorer(tmp_path / "checkpoint-2", tmp_path / "f1_config.json")
    last = load_explorer(latest, tmp_path / "f1_config.json")
    changed = {n for n, value in last.state_dict().items() if not torch.equal(value, first.state_dict()[n])}
    assert any("experts.action" in name for name in changed)
    assert any("value_head" in name for name in changed)


def test_resuming_equals_going_on(tmp_path, teacher):
    """8 episodes at once, and 4, stopped, then 4 more: the same weights, bit for bit."""
    once = StudentTrainer(student_config(tmp_path / "once", num_episodes=8), teacher)
    once.train()
    StudentTrainer(student_config(tmp_path / "twice", num_episodes=4), teacher).train()
    resumed = StudentTrainer(student_config(tmp_path / "twice", num_episodes=8, auto_resume=True), teacher)
    resumed.train()
    assert resumed.episode == 8
    assert resumed.ppo.version == once.ppo.version == 4
    own = once.explorer.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in resumed.explorer.state_dict().items())
    assert torch.equal(resumed.reward.scales.mean, once.reward.scales.mean)
    lines = [(tmp_path / name / "episode_metrics.jsonl").read_text().splitlines() for name in ("once", "twice")]
    rewards = [[json.loads(line)["train/reward"] for line in part] for part in lines]
    assert rewards[0] == rewards[1]


def test_what_an_older_checkpoint_leads_to_is_saved(tmp_path, teacher):
    """Of checkpoint-2 and checkpoint-4 the older is gone on from, with another loss: checkpoint-4 is the new one."""
    StudentTrainer(student_config(tmp_path, num_episodes=4, save_every=2), teacher).train()
    before = (tmp_path / "checkpoint-4" / "model.pt").read_bytes()
    config = student_config(tmp_path, num_episodes=4, explorer={"memory_loss_weight": 0.0})
    config.run.resume = str(tmp_path / "checkpoint-2")
    again = StudentTrainer(config, teacher)
    again.train()
    assert (tmp_path / "checkpoint-4" / "model.pt").read_bytes() != before
    found = torch.load(tmp_path / "checkpoint-4" / "model.pt", weights_only=True)
    assert all(torch.equal(value, found[name]) for name, value in again.explorer.f1.state_dict().items())


def test_a_learning_rate_that_is_given_anew_holds_and_a_damaged_checkpoint_is_passed_over(tmp_path, teacher):
    """Also under the adaptive schedule, which otherwise continues from its adapted rate."""
    StudentTrainer(student_config(tmp_path, num_episodes=4, save_every=2), teacher).train()
    (tmp_path / "checkpoint-4" / "explorer.pt").write_bytes(b"cut short")

    def resumed(**explorer) -> StudentTrainer:
        config = student_config(tmp_path, num_episodes=4, auto_resume=True, explorer=explorer)
        trainer = StudentTrainer(config, teacher)
        trainer.load(trainer.resume_from)
        trainer.close()
        return trainer

    same, other = resumed(), resumed(learning_rate=7e-3)
    assert same.resume_from.name == "checkpoint-2"
    saved = checkpoint.load_training_state(same.resume_from)["state"]["ppo"]["learning_rate"]
    assert same.ppo.learning_rate == saved
    assert other.ppo.learning_rate == 7e-3 != saved
    assert [group["lr"] for group in other.ppo.optimizer.param_groups] == pytest.approx([7e-4, 7e-3])


def test_another_tokenizer_is_an_error(tmp_path, teacher):
    config = student_config(tmp_path, num_episodes=2)
    config.model.tokenizer_weights = "another"
    with pytest.raises(InputError, match="uses its teacher's tokenizer"):
        StudentTrainer(config, teacher)


def test_an_environment_with_other_actions_is_an_error(tmp_path, teacher):
    made = StudentTrainer(student_config(tmp_path, num_episodes=2), teacher)
    mask = made.explorer.action_mask.clone()
    check_mask(made.explorer, mask.numpy(), tmp_path)
    mask[..., 0] = ~mask[..., 0]
    with pytest.raises(InputError, match="use the control_mode that it was trained with"):
        check_mask(made.explorer, mask.numpy(), tmp_path)
    made.close()


def test_another_way_of_acting_is_refused_and_weights_can_be_loaded(tmp_path, teacher):
    made = StudentTrainer(student_config(tmp_path / "one", num_episodes=2), teacher)
    made.train()
    config = student_config(tmp_path / "three")
    config.student.teacher_checkpoint = str(tmp_path / "one" / "checkpoint-2" / "model.pt")
    with pytest.raises(InputError, match="is of phase student; give weights of"):
        load_teacher(config, torch.device("cpu"))
    with pytest.raises(InputError, match=r"denoising_steps: .*checkpoint-2 was trained with 2, not 3"):
        StudentTrainer(student_config(tmp_path / "one", auto_resume=True, explorer={"denoising_steps": 3}), teacher)
    other = StudentTrainer(student_config(tmp_path / "two", num_episodes=2, seed=5), teacher)
    other.load(tmp_path / "one")
    own = made.explorer.state_dict()
    assert all(torch.equal(value, own[name]) for name, value in other.explorer.state_dict().items())
    assert other.episode == 2
    other.close()


def test_another_teacher_is_refused_when_a_run_goes_on(tmp_path, teacher):
    StudentTrainer(student_config(tmp_path, num_episodes=2), teacher).train()
    other = teacher_policy()
    with torch.no_grad():
        other.model.world_model.start += 1.0
    with pytest.raises(InputError, match=r"not the teacher of .*: model\.world_model\.start differs"):
        StudentTrainer(student_config(tmp_path, auto_resume=True), other)


def test_which_teacher(tmp_path, teacher, teacher_run):
    config = student_config(tmp_path)
    config.model.config_file = "small"  # no teacher of this size ships with the package
    with pytest.raises(InputError, match="teacher_checkpoint: missing; give --teacher-checkpoint"):
        load_teacher(config, torch.device("cpu"))
    for path in (teacher_run, teacher_run / "checkpoint-8"):
        config.student.teacher_checkpoint = str(path)
        found = load_teacher(config, torch.device("cpu")).state_dict()
        assert all(torch.equal(value, found[name]) for name, value in teacher.state_dict().items())
    # a file of weights, with the sizes of model.config_file
    model = tmp_path / "model.json"
    model.write_text(json.dumps(to_dict(teacher.config)))
    config.student.teacher_checkpoint = str(teacher_run / "checkpoint-8" / "model.pt")
    config.model.config_file = str(model)
    assert load_teacher(config, torch.device("cpu")).config.memory_hidden == 6
    other = micro_policy(memory_hidden=7)
    torch.save(other.state_dict(), tmp_path / "other.pt")
    config.student.teacher_checkpoint = str(tmp_path / "other.pt")
    with pytest.raises(InputError, match=r"does not fit F1Policy: keys .*model\.memory\."):
        load_teacher(config, torch.device("cpu"))
    config.student.teacher_checkpoint = str(tmp_path / "nowhere")
    with pytest.raises(InputError, match="no such checkpoint"):
        load_teacher(config, torch.device("cpu"))


def test_the_documents_flags(tmp_path):
    for flag in ("--teacher_path", "--teacher_checkpoint", "--teacher-checkpoint"):
        config, _ = parse_phase("student", [flag, "x", "--num_episodes", "5000", "--auto_resume"], "rl_config")
        assert config.student.teacher_checkpoint == "x"
        assert config.training.num_episodes == 5000
    flags = ["--learning-rate", "1e-3", "--memory-divergence-weight", "0.7", "--batch-size", "50"]
    config, _ = parse_phase("student", flags, "rl_config")
    assert config.student.explorer.learning_rate == 1e-3  # PPO's, not that of a world model
    assert config.student.explorer.batch_size == 50
    assert config.training.learning_rate == 2e-3
    assert config.student.rewards.memory_divergence_weight == 0.7
    with pytest.raises(InputError, match="bptt-length: unknown flag"):
        parse_phase("student", ["--bptt-length", "4"], "rl_config")


def command(folder: Path, teacher_run: Path, *flags: str) -> list[str]:
    config = student_config(folder, num_episodes=100_000, save_every=2, keep_checkpoints=2)
    config.student.teacher_checkpoint = str(teacher_run)
    values = {name: value for name, value in to_dict(config).items() if name != "run"}
    (folder.parent / "run.json").write_text(json.dumps(values))
    return [sys.executable, "-m", "deft", "train", "student", "--config", str(folder.parent / "run.json"), *flags]


def test_a_killed_run_goes_on(tmp_path, teacher_run):
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["DEFT_TRUSTED_MODULES"] = "panning_camera"  # named by the file of settings alone
    running = subprocess.Popen(command(folder, teacher_run), env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 90
    while not checkpoint.list_checkpoints(folder) and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.02)
    running.send_signal(signal.SIGKILL)
    _, complaint = running.communicate(timeout=60)
    found, problems = checkpoint.latest_whole_checkpoint(folder)
    assert found is not None, complaint
    assert not problems
    reached = checkpoint.load_training_state(found)["episode"]
    more = [*command(folder, teacher_run), "--auto_resume", "--num_episodes", str(reached + 2), "--json"]
    done = subprocess.run(more, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1])["episodes"] == reached + 2


SCRIPT = """
import sys
from pathlib import Path
import torch
from explorers import student_config, teacher_policy
from deft.training.phases.student import StudentTrainer

folder = Path(sys.argv[1])
trainer = StudentTrainer(student_config(folder / "run", num_episodes=12), teacher_policy())
assert trainer.processes.count == 2
trainer.train()
torch.save(trainer.explorer.state_dict(), folder / f"weights{trainer.processes.rank}.pt")
"""


@pytest.mark.slow
def test_two_processes_keep_equal_parameters(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*launch, str(tmp_path / "train.py"), str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    learned = [name for name in one if not name.startswith("reward_normalizer.")]  # each its own rewards
    assert all(torch.equal(one[name], other[name]) for name in learned)
    assert not torch.equal(one["reward_normalizer.statistics.mean"], other["reward_normalizer.statistics.mean"])
    assert (tmp_path / "run" / "checkpoint-12" / "explorer.pt").is_file()
