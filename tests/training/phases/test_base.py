"""What the phases share: a stop within a step of collection and evaluation, and checkpoints before either is made."""

import json
import os
import shutil
import signal

import pytest
import torch
from explorers import student_config, teacher_policy
from f1_worlds import micro_policy, wake
from panning_camera import game_config, panning_config

from deft.envs.f1 import F1RLEnv
from deft.runs import checkpoint
from deft.runs.live import camera_images
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.base import BaseRLTrainer
from deft.training.phases.student import StudentTrainer
from deft.training.phases.teacher import TeacherTrainer

PHASES = ("teacher", "student", "adversarial")
STEPS = {"teacher": 8, "student": 8, "adversarial": 12}
"""Env steps of a round: two episodes of 4 steps; in the game two, and a random one."""


def make(phase: str, folder, resumes: bool = False, **training) -> BaseRLTrainer:
    """A run of two rounds. A resumed one is given no policy: it loads its own."""
    run = {"auto_resume": resumes}
    if phase == "adversarial":
        config = game_config(folder, total_iterations=2, **run)
        config.training.steps_per_episode = 4
        for name, value in training.items():
            setattr(config.training, name, value)
        return AdversarialTrainer(config, None if resumes else wake(micro_policy(condition_init=0.05)))
    settings = {"num_episodes": 4, "steps_per_episode": 4, "scheduler": "constant", **run, **training}
    if phase == "student":
        return StudentTrainer(student_config(folder, explorer={"n_epochs": 1}, **settings), teacher_policy())
    config = panning_config(folder, **settings)
    return TeacherTrainer(config, None if resumes else micro_policy(condition_init=0.05))


def weights(trainer: BaseRLTrainer) -> dict[str, torch.Tensor]:
    found = {f"policy.{name}": value for name, value in trainer.policy.state_dict().items()}
    if isinstance(trainer, AdversarialTrainer | StudentTrainer):
        found |= {f"explorer.{name}": value for name, value in trainer.explorer.state_dict().items()}
    return found


def lines(folder) -> list[dict]:
    """What was logged, without the time."""
    found = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in found]


def assert_same(whole: BaseRLTrainer, resumed: BaseRLTrainer) -> None:
    assert whole.episode == resumed.episode
    own, theirs = weights(whole), weights(resumed)
    assert own.keys() == theirs.keys()
    assert not [name for name in own if not torch.equal(own[name], theirs[name])]
    assert lines(whole.run_dir) == lines(resumed.run_dir)


def signal_in_step(monkeypatch, at: int) -> list[int]:
    """Send the process SIGTERM in the `at`-th step of all environments; counts the steps that are made."""
    step, made = F1RLEnv.step, [0]

    def signalling(self, action):
        made[0] += 1
        if made[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(self, action)

    monkeypatch.setattr(F1RLEnv, "step", signalling)
    return made


@pytest.mark.parametrize("phase", PHASES)
def test_a_signal_ends_collection_within_a_step_and_the_resumed_run_is_the_same(tmp_path, monkeypatch, phase):
    """In the third step of the second round."""
    whole = make(phase, tmp_path / "whole")
    whole.train()
    stopped = make(phase, tmp_path / "half")
    if phase == "adversarial":
        stopped.held_out_loss()  # collects its episodes now, so that the steps below are those of the rounds
    with monkeypatch.context() as patched:
        at = STEPS[phase] + 3
        made = signal_in_step(patched, at)
        with pytest.raises(SystemExit) as ended:
            stopped.train()
    assert (ended.value.code, made[0]) == (143, at)
    first = 1 if phase == "adversarial" else 2
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "half")] == [f"checkpoint-{first}"]
    resumed = make(phase, tmp_path / "half", resumes=True)
    resumed.train()
    assert_same(whole, resumed)


@pytest.mark.parametrize(
    ("phase", "owner", "method", "at"),
    [
        # Two rounds of two episodes of 4 steps in sequences of 4, one a minibatch: the first of two gradient steps.
        ("student", "ppo", "_step", 3),
        ("adversarial", "ppo", "_step", 3),
        ("adversarial", "reward", "learn", 3),  # the first of the second iteration's two batches
    ],
)
def test_a_signal_stops_between_updates_and_the_resumed_run_is_the_same(tmp_path, phase, owner, method, at):
    whole = make(phase, tmp_path / "whole")
    whole.train()
    stopped = make(phase, tmp_path / "half")
    original, made = getattr(getattr(stopped, owner), method), [0]

    def signalling(*given):
        made[0] += 1
        if made[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return original(*given)

    setattr(getattr(stopped, owner), method, signalling)
    with pytest.raises(SystemExit):
        stopped.train()
    assert made == [at]
    assert stopped.partial is not None
    resumed = make(phase, tmp_path / "half", resumes=True)
    resumed.train()
    assert_same(whole, resumed)


@pytest.mark.parametrize("saves", [True, False], ids=["saved before it", "not due to be saved"])
def test_a_signal_ends_the_evaluation_of_a_round_within_a_step(tmp_path, monkeypatch, saves):
    """The game collects its held-out episodes after the first iteration: the signal comes in their third step."""
    settings = {"save_every": int(saves)}
    whole = make("adversarial", tmp_path / "whole", **settings)
    whole.train()
    stopped = make("adversarial", tmp_path / "half", **settings)
    with monkeypatch.context() as patched:
        made = signal_in_step(patched, STEPS["adversarial"] + 3)
        with pytest.raises(SystemExit):
            stopped.train()
    assert made == [STEPS["adversarial"] + 3]
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "half")] == ["checkpoint-1"]
    assert not (tmp_path / "half" / "episode_metrics.jsonl").read_text()
    resumed = make("adversarial", tmp_path / "half", resumes=True, **settings)
    resumed.train()
    assert_same(whole, resumed)


def test_an_evaluation_that_was_logged_after_the_checkpoint_is_logged_once(tmp_path, monkeypatch):
    """As after `kill -9` between the log of an iteration and the next one."""
    made = make("adversarial", tmp_path, save_every=1)
    monkeypatch.setattr(made, "_show_progress", lambda: os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(SystemExit):
        made.train()
    assert [line["step"] for line in lines(tmp_path)] == [1]
    make("adversarial", tmp_path, resumes=True, save_every=1).train()
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


@pytest.mark.parametrize("phase", PHASES)
def test_a_round_is_saved_before_its_samples_are_drawn(tmp_path, monkeypatch, phase):
    every = 1 if phase == "adversarial" else 2
    made = make(phase, tmp_path, save_every=every, sample_save_every=every, video_save_every=every)
    saved = []

    def look(*_) -> None:
        saved.append([path.name for path in checkpoint.list_checkpoints(tmp_path)])

    monkeypatch.setattr(made, "write_sample", look)
    monkeypatch.setattr(made, "write_video", look)
    made.train()
    first, second = f"checkpoint-{every}", f"checkpoint-{2 * every}"
    assert saved == [[first], [first], [first, second], [first, second]]  # a sample and a video each
    cameras = camera_images(made.latest_observation())  # of the live view
    assert "wrist" in cameras
    assert all(images.shape[-1] == 3 and images.any() for images in cameras.values())


def test_a_failed_evaluation_leaves_a_checkpoint_of_its_round(tmp_path, monkeypatch):
    made = make("adversarial", tmp_path, save_every=1)
    monkeypatch.setattr(made, "held_out_loss", lambda: 1 / 0)
    monkeypatch.setattr(made.run, "_save_after_failure", lambda error: None)
    with pytest.raises(ZeroDivisionError):
        made.train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-1"]


def test_a_run_that_stops_before_its_buffer_is_full_again_passes_on_its_state(tmp_path, monkeypatch):
    """A teacher that keeps five episodes is resumed in another folder, stopped while it collects them, and resumed."""
    settings = {"sequential_training": False, "buffer_capacity": 5, "num_episodes": 6}
    whole = make("teacher", tmp_path / "whole", **settings)
    whole.train()
    make("teacher", tmp_path / "first", **{**settings, "num_episodes": 4}).train()

    def second(**changes) -> TeacherTrainer:
        config = panning_config(tmp_path / "second", steps_per_episode=4, scheduler="constant", **settings, **changes)
        return TeacherTrainer(config)

    stopped = second(resume=str(tmp_path / "first"))
    with monkeypatch.context() as patched:
        made = signal_in_step(patched, 6)
        with pytest.raises(SystemExit):
            stopped.train()
    assert made == [6]
    resumed = second(auto_resume=True)
    resumed.train()
    assert all(torch.equal(value, weights(resumed)[name]) for name, value in weights(whole).items())


@pytest.mark.parametrize("phase", PHASES)
def test_a_run_whose_folder_was_removed_is_resumed_and_the_same(tmp_path, phase):
    """Removed after the first of two checkpoints; what is there afterwards evaluates and resumes as the whole run."""
    every = 1 if phase == "adversarial" else 2
    whole = make(phase, tmp_path / "whole", save_every=every)
    whole.train()
    removed = make(phase, tmp_path / "half", save_every=every)
    save = removed.save

    def removing() -> None:
        save()
        if removed.episode == every:
            shutil.rmtree(tmp_path / "half")

    removed.save = removing
    removed.train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "half")] == [f"checkpoint-{2 * every}"]
    names = ("config.yaml", "f1_config.json", "episode_metrics.jsonl")
    assert all((tmp_path / "half" / name).is_file() for name in names)
    resumed = make(phase, tmp_path / "half", resumes=True, save_every=every)
    resumed.train()
    assert_same(whole, resumed)
