"""Wrong calls from Python raise one clear error."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from worlds import Counting

from deft import (
    PPO,
    ActorCritic,
    DatasetWriter,
    PPOTrainer,
    RLConfig,
    RolloutBuffer,
    Trainer,
    VLABuffer,
    load_vla_model,
)
from deft.config.settings import LoggingConfig
from deft.envs.make import wrap
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run

# -- from Python -------------------------------------------------------------------------------------------------------


def trainer_with(tmp_path: Path, env: Any, **settings: Any) -> Trainer:
    vector = wrap(env)
    policy = ActorCritic(vector.observation_space, vector.action_space)
    quiet = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)
    return Trainer(policy, vector, PPO(policy), output_dir=tmp_path / "run", logging_config=quiet, **settings)


CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a name that RLConfig lacks": (lambda _: RLConfig(learning_rat=1e-3), r"learning_rat: .*'learning_rate'"),  # type: ignore[call-arg]
    "text for a number": (lambda _: RLConfig(rollout_steps="many"), r"rollout_steps: 'many' is not a whole number"),  # type: ignore[arg-type]
    "out of range": (lambda _: RLConfig(discount_gamma=2.0), r"discount_gamma: 2\.0 is out of range.*at most 1"),
    "assigned": (lambda _: setattr(RLConfig(), "batch_size", 0), r"batch_size: 0 is out of range.*at least 1"),
    "another algorithm's": (
        lambda path: PPOTrainer("CartPole-v1", config=RLConfig(tau=0.5, output_dir=str(path / "run"))),
        r"tau: 0\.5 .*ppo has no such setting",
    ),
    "no environment": (
        lambda path: PPOTrainer(5, config=RLConfig(output_dir=str(path / "run"))),  # type: ignore[arg-type]
        r"env: int is not an environment; pass a gymnasium\.Env",
    ),
    "environments that differ": (
        lambda _: wrap([Counting(), gymnasium.make("CartPole-v1")]),
        r"environment 1 has observation_space .*, but environment 0 has",
    ),
    "one environment twice": (lambda _: wrap([Counting()] * 2), r"the same environment object was given twice"),
    "the algorithm of another policy": (
        lambda path: Trainer(*(lambda a, b: (a.policy, a.env, b.algorithm))(*_two_trainers(path))),
        r"trains another policy object",
    ),
    "a setting that Trainer lacks": (
        lambda path: trainer_with(path, Counting(), eval_frequency=3),
        r"eval_frequency: unknown setting; did you mean 'eval_freq'",
    ),
    "an empty rollout buffer": (lambda _: RolloutBuffer(4).get(), r"the rollout buffer is empty"),
    "an empty ring": (lambda _: VLABuffer(4).get(), r"VLA buffer with 0 new ones"),
    "actions of another shape": (
        lambda _: _stepped(wrap([Counting(), Counting()]), np.zeros(3, np.int64)),
        r"actions have shape \(3,\); 2 environments .* take \(2,\)",
    ),
    "a step before the reset": (lambda _: wrap(Counting()).step(np.zeros(1, np.int64)), r"before reset\(\)"),
    "a model file that is missing": (
        lambda path: load_vla_model(path / "nowhere.pth", "gpt-vla"),
        r"nowhere\.pth does not exist",
    ),
    "a checkpoint that is missing": (
        lambda path: trainer_with(path, Counting()).load(path / "nowhere"),
        r"nowhere: there is no such checkpoint",
    ),
    "an evaluation of no episodes": (
        lambda path: trainer_with(path, Counting(), eval_env=Counting()).evaluate(0),
        r"num_episodes: 0 is out of range; must be at least 1",
    ),
    "a run's evaluation of no episodes": (
        lambda path: evaluate_run(path / "run", episodes=0),
        r"num_episodes: 0 is out of range; must be at least 1",
    ),
    "a line break in the output path": (
        lambda path: RLConfig(output_dir=f"{path}/a\nb"),
        r"output_dir: the path '.*/a\\nb' holds the control character '\\n'; use a name without it",
    ),
    "a line break in the folder of a run": (
        lambda path: trainer_with(path / "a\nb", Counting()).train(32),
        r"holds the control character",
    ),
    "a control character in a dataset's path": (
        lambda path: DatasetWriter(path / "a\x1b[1mb", format="lerobot", fps=10).close(),
        r"holds the control character '\\x1b'",
    ),
    "evaluation without another environment": (
        lambda path: trainer_with(path, Counting()).evaluate(1),
        r"evaluation needs a separate environment.*pass eval_env",
    ),
}


def _two_trainers(path: Path) -> tuple[Trainer, Trainer]:
    return trainer_with(path, Counting()), trainer_with(path, Counting())


def _stepped(env: Any, actions: np.ndarray) -> Any:
    env.reset(0)
    return env.step(actions)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises_an_error(name: str, tmp_path: Path) -> None:
    call, message = CALLS[name]
    with pytest.raises(InputError, match=message) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Uncopiable(Counting):
    """An environment that holds something that cannot be copied, as a simulator's connection cannot."""

    def __deepcopy__(self, memo: dict[int, object]) -> Uncopiable:
        raise TypeError("cannot copy a connection")


def test_evaluation_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    """An environment without a spec is copied for evaluation; one that cannot be is named before the first step."""
    config = RLConfig(
        rollout_steps=32,
        total_timesteps=64,
        eval_freq=32,
        hidden_sizes=(8,),
        output_dir=str(tmp_path / "run"),
        console_level="CRITICAL",
        tensorboard=False,
        device="cpu",
    )
    trainer = PPOTrainer(Uncopiable(), config=config)
    with pytest.raises(InputError, match=r"\(Uncopiable\) .* pass eval_env"):
        trainer.train()
    assert trainer.global_step == 0
    trainer.close()
    trainer = PPOTrainer(Counting(), config=config)
    trainer.train()
    assert trainer.evaluate(3)["episodes"] == 3
    trainer.close()
