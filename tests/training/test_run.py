"""The device that a run trains on. No test computes on a GPU: what torch sees is replaced."""

import logging
from types import SimpleNamespace

import gymnasium
import numpy as np
import pytest
import torch
from policies import actor_policy

from deft.config.loading import resolve
from deft.envs.make import make_vector_env as make
from deft.runs.processes import Processes
from deft.training import run as run_module
from deft.training.run import OpenRun, build_trainer

VECTOR, ACTION = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Box(-1, 1, (2,))
IMAGES = gymnasium.spaces.Dict({"rgb": gymnasium.spaces.Box(0, 255, (3, 8, 8), np.uint8)})


@pytest.fixture(autouse=True)
def _one_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def chosen(algorithm, observation=VECTOR, env_device=None, cfg=None, processes=1, **settings):
    """The device of a run whose policy has two layers of 256, which is not moved there."""
    config = resolve({"algorithm": {"name": algorithm, "cfg": cfg or {}}, "env": {"id": "Pendulum-v1"}} | settings)
    group = Processes()
    group.count = processes
    given = torch.device("cuda" if config.device == "auto" else config.device)
    run = OpenRun(config, None, group, given, None, False, False)
    env = SimpleNamespace(observation_space=observation, device=env_device)
    run.choose_online_device(actor_policy(VECTOR, ACTION), env)
    return run.device.type


@pytest.mark.parametrize(
    ("device", "reason", "arguments"),
    [
        ("cpu", "the network is small", {"algorithm": "ppo"}),
        ("cpu", "the network is small", {"algorithm": "grpo"}),
        ("cuda", "observations contain images", {"algorithm": "ppo", "observation": IMAGES}),
        ("cuda", "simulated on the GPU", {"algorithm": "ppo", "env": {"id": "tabletop", "vector": "warp"}}),
        ("cuda", "simulated on the GPU", {"algorithm": "ppo", "env": {"id": "maniskill", "vector": "gpu"}}),
        (
            "cuda",
            "simulated on the GPU",
            {"algorithm": "ppo", "env_device": torch.device("cuda")},
        ),
        ("cpu", "the network is small", {"algorithm": "ppo", "env_device": torch.device("cpu")}),
        ("cuda", "several processes", {"algorithm": "ppo", "processes": 2}),
        # SAC captures its updates as CUDA graphs.
        ("cuda", "captured as a CUDA graph", {"algorithm": "sac"}),
        ("cpu", "the network is small", {"algorithm": "sac", "cfg": {"capture": "off"}}),
        ("cpu", "the network is small", {"algorithm": "sac", "cfg": {"compile": True}}),  # which captures nothing
        ("cuda", "captured as a CUDA graph", {"algorithm": "sac", "cfg": {"batch_size": 32}}),
    ],
)
def test_auto_chooses_by_what_is_trained(device, reason, arguments, caplog):
    with caplog.at_level(logging.INFO, "deft"):
        assert chosen(**arguments) == device
    (line,) = caplog.messages
    assert line.startswith(f"device: auto chose {device}: ")
    assert reason in line


def test_a_device_that_is_given_is_obeyed(caplog):
    with caplog.at_level(logging.INFO, "deft"):
        assert chosen("ppo", device="cuda") == "cuda"
        assert chosen("sac", device="cpu") == "cpu"
    assert not caplog.messages


def test_captures_that_are_asked_for_need_the_gpu():
    """As `capture` on with `device` cpu, `auto` must not choose the CPU for it, however small the network is."""
    assert chosen("sac", cfg={"capture": "on", "batch_size": 32}) == "cuda"


def test_a_small_network_is_built_and_trained_on_the_cpu(tmp_path):
    config = resolve(
        {
            "algorithm": "ppo",
            "env": "CartPole-v1",
            "trainer": {"rollout_steps": 16, "eval_freq": 0},
            "output_dir": str(tmp_path / "run"),
        }
    )
    assert config.device == "auto"
    trainer = build_trainer(config)
    assert trainer.device == torch.device("cpu")
    trainer.close()


def test_training_arguments_are_not_those_of_evaluations(tmp_path, monkeypatch):
    made = []
    monkeypatch.setattr(run_module, "make_vector_env", lambda env, **more: made.append(env) or make(env, **more))
    config = resolve(
        {
            "env": {"id": "reach", "kwargs": {"reward": "sparse"}, "training_kwargs": {"max_episode_steps": 7}},
            "trainer": {"rollout_steps": 8, "total_timesteps": 8, "eval_freq": 8, "eval_episodes": 1},
            "output_dir": str(tmp_path / "run"),
        }
    )
    build_trainer(config).train()
    training, evaluation = made
    assert (training.arguments, training.time_limit) == ({"reward": "sparse"}, 7)
    assert (evaluation.arguments, evaluation.time_limit) == ({"reward": "sparse"}, None)
