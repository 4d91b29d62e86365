"""PPO runs that are small enough to test with, and comparisons of two runs."""

import json

import gymnasium
import torch

from deft import PPO, ActorCritic, Trainer
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import LoggingConfig, PolicyConfig
from deft.envs.make import wrap

QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False)


def make_trainer(tmp_path, env=None, num_envs=2, policy=None, algorithm=None, **settings) -> Trainer:
    """PPO in CartPole, or in `env`, with rollouts of 32 steps."""
    torch.manual_seed(0)
    envs = env if env is not None else [gymnasium.make("CartPole-v1") for _ in range(num_envs)]
    vector = wrap(envs)
    made = ActorCritic(vector.observation_space, vector.action_space, PolicyConfig(**(policy or {})))
    ppo = PPO(made, PPOSettings(**{"batch_size": 16, "n_epochs": 2, **(algorithm or {})}))
    defaults = {"buffer_size": 32, "eval_freq": 0, "save_freq": 0, "log_freq": 1}
    return Trainer(made, vector, ppo, **{**defaults, **settings}, output_dir=tmp_path, logging_config=QUIET)


def everything(trainer: Trainer) -> dict[str, torch.Tensor]:
    """All numbers that a run consists of."""
    state = {f"policy.{name}": value for name, value in trainer.policy.state_dict().items()}
    adam = trainer.algorithm.state_dict()["optimizer"]["state"]
    names = ("exp_avg", "exp_avg_sq", "step")
    return state | {f"adam.{index}.{name}": saved[name] for index, saved in adam.items() for name in names}


def assert_equal(first: Trainer, second: Trainer) -> None:
    one, other = everything(first), everything(second)
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def metrics(run_dir) -> list[dict]:
    """What was logged, without the time."""
    lines = [json.loads(line) for line in (run_dir / "episode_metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in lines]
