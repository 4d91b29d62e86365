"""Phases 2 and 3 with all environments in one simulation (`--vector warp`), here on the CPU."""

import importlib.util
import json

import pytest
import torch
from explorers import explorer_policy, teacher_policy

from deft.config.rl_yaml import phase_config
from deft.errors import InputError
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.exploration import make_exploration
from deft.training.phases.explorer_rollouts import ExplorerRollouts, measure, open_envs
from deft.training.phases.student import StudentTrainer
from deft.training.phases.teacher import TeacherTrainer

needs_warp = pytest.mark.skipif(importlib.util.find_spec("mujoco_warp") is None, reason="the extra `warp` is missing")
STEPS = 3


def config(folder, phase, **adversarial):
    """A run of two environments, 16 pixels, three steps an episode."""
    training = {"num_envs": 2, "steps_per_episode": STEPS, "num_episodes": 4, "vector": "warp", "device": "cpu"}
    found = phase_config(
        {
            "phase": phase,
            "training": {**training, "batch_size": 2, "bptt_length": 3, "log_freq": 1, "seed": 0, "overlap": False},
            "environment": {"image_size": 16},
            "logging": {"tensorboard": False},
            "student": {"explorer": {"episodes_per_update": 2, "batch_size": 3, "sequence_length": 3}},
            "adversarial": {"iterations": 2, "wm_warmup": 0, "wm_updates": 1, "random_episodes": 2, **adversarial},
        }
    )
    for section in ("student", "adversarial", "teacher"):
        getattr(found, section).output_dir = str(folder)
    return found


@pytest.fixture(scope="module")
def teacher():
    return teacher_policy()


@needs_warp
def test_a_rollout_stays_on_the_device_and_is_that_of_its_episodes(teacher, tmp_path):
    settings = config(tmp_path, "student")
    exploration = make_exploration(settings, teacher)
    env, steps = open_envs(exploration, 2, vector="warp", device=torch.device("cpu"))
    explorer = explorer_policy(teacher)
    explorer.action_mask.copy_(torch.as_tensor(env.action_mask))
    rollouts = ExplorerRollouts(explorer, env, exploration, steps, 4)  # two rounds
    found = rollouts.collect()
    assert found.rollout.batch_size == (STEPS, 4)
    assert found.contacts == 0
    assert all(isinstance(value, torch.Tensor) for value in found.episodes[3].streams().values())
    assert torch.equal(found.episodes[3].action[1], explorer.executed(found.rollout["action"][1, 3]))
    # column 3 is the second environment's second episode: its frames are those that the explorer saw
    assert torch.equal(found.episodes[3].wrist[:-1], found.rollout["observation", "image0"][:, 3])
    assert not torch.equal(found.episodes[3].wrist[0], found.episodes[1].wrist[0])  # another scene
    assert found.rollout["next", "truncated"].tolist() == [[False] * 4] * (STEPS - 1) + [[True] * 4]
    # what the world model measures of the streams is what it measures of the episodes one by one
    own = measure(teacher, found)
    found.streams = None
    again = measure(teacher, found)
    for name in ("error", "uncertainty", "divergence", "divergence_before", "action_size", "starts"):
        assert torch.allclose(getattr(own, name).float(), getattr(again, name).float(), atol=1e-5), name
    rollouts.close()


@needs_warp
def test_a_student_learns_on_warp(teacher, tmp_path):
    StudentTrainer(config(tmp_path, "student"), teacher).train()
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4]
    assert all(line["train/first_ratio_error"] < 1e-4 for line in lines)
    assert all(line["train/contacts_per_1000"] == 0 for line in lines)


@needs_warp
def test_the_game_is_played_on_warp_and_resumes(teacher, tmp_path):
    settings = config(tmp_path, "adversarial", iterations=1)
    AdversarialTrainer(settings, teacher).train()
    settings = config(tmp_path, "adversarial", iterations=2)
    settings.run.auto_resume = True
    trainer = AdversarialTrainer(settings, teacher)
    trainer.train()
    assert trainer.episode == 2
    assert trainer.num_random == 4
    assert len(trainer.random_episodes) == 4
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert all(line["ppo/first_ratio_error"] < 1e-4 for line in lines)
    assert all(line["train/wm_loss"] > 0 for line in lines)


def test_random_exploration_has_workers(tmp_path):
    with pytest.raises(InputError, match="vector: warp is for the explorers of phases 2 and 3"):
        TeacherTrainer(config(tmp_path, "teacher"))
