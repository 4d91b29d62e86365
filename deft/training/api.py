"""Online training from Python: `PPOTrainer(env=env, config=config).train()`; one class per algorithm, one base."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import gymnasium

from deft import trust
from deft.config.loading import replace
from deft.config.settings import RunConfig
from deft.config.views import RLConfig
from deft.envs.make import make_another
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.models.policy import Policy
from deft.training.run import build_trainer
from deft.training.trainer import Trainer


class OnlineTrainer:
    """Trains a policy in an environment: an id, a Gymnasium environment, several, or a vector environment.

    `policy` may be a `Policy`, a VLA model with the three methods of `VLAModelInterface`, or any object with
    `get_action(obs, deterministic=False)`; without one, a network is built for the environment's spaces. `critics`: for
    SAC, the trainer that trained the policy (`IQLTrainer`, `CQLTrainer`, …), whose critics it starts from.
    `trust_remote_code` allows modules that files name (a config that was read, the run of `model_path`) to be imported.
    """

    algorithm_name: ClassVar[str]

    @trust.takes_remote_code
    def __init__(
        self,
        env: str | gymnasium.Env | list[gymnasium.Env] | gymnasium.vector.VectorEnv | VectorEnv | None = None,
        policy: Any = None,
        config: RLConfig | RunConfig | None = None,
        use_wandb: bool = False,
        eval_env: Callable[[], VectorEnv | gymnasium.Env] | VectorEnv | gymnasium.Env | None = None,
        critics: Any = None,
        *,
        trust_remote_code: bool = False,
    ) -> None:
        trust.name(env)
        env_id = env if isinstance(env, str) else _id_of(env)
        if config is None:
            config = RLConfig(algorithm=self.algorithm_name)
        run_config = config.to_run_config(env_id) if isinstance(config, RLConfig) else config
        if isinstance(config, RunConfig) and env_id is not None:
            run_config = replace(run_config, **{"env.id": env_id})
        if run_config.algorithm.name != self.algorithm_name:
            raise InputError(
                f"algorithm: {type(self).__name__} trains with {self.algorithm_name!r}, the config names "
                f"{run_config.algorithm.name!r}"
            )
        if use_wandb:
            run_config = replace(run_config, **{"logging.use_wandb": True})
        given = None if env is None or isinstance(env, str) else self._environments(env, run_config)
        if critics is not None and not hasattr(critics, "algorithm"):
            raise InputError(f"critics: give the trainer that trained the policy, not {type(critics).__name__}")
        state = None if critics is None else critics.algorithm.state_dict()
        self.trainer: Trainer = build_trainer(run_config, given, policy, eval_env, state)

    @staticmethod
    def _environments(env: Any, config: RunConfig) -> Any:
        """Return the environments to train in, of the environment that a user gave."""
        return env

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self.trainer.policy

    @property
    def global_step(self) -> int:
        """Environment steps trained on so far."""
        return self.trainer.num_timesteps

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.trainer.run_dir

    def train(self, total_timesteps: int | None = None) -> dict[str, Any]:
        """Train to the configured number of env steps (or to `total_timesteps`); returns a summary."""
        return self.trainer.train(total_timesteps)

    def evaluate(self, num_episodes: int = 10, video: str | Path | None = None) -> dict[str, Any]:
        """`mean_reward`, `std_reward` and the rest over whole episodes in an environment of its own."""
        return self.trainer.evaluate(num_episodes, None if video is None else Path(video))

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint into the run directory, or as the directory `path`."""
        return self.trainer.save(path)

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint."""
        self.trainer.load(path)

    def close(self) -> None:
        """Free the environments."""
        self.trainer.close()


class PPOTrainer(OnlineTrainer):
    """Proximal policy optimization."""

    algorithm_name = "ppo"


class GRPOTrainer(OnlineTrainer):
    """Group relative policy optimization. A single environment that is given is copied for every member of a group."""

    algorithm_name = "grpo"

    @staticmethod
    def _environments(env: Any, config: RunConfig) -> Any:
        if not isinstance(env, gymnasium.Env):
            return env
        count = config.algorithm.cfg.copies(config.env.num_envs)
        return [env, *(make_another(env) for _ in range(count - 1))]


class SACTrainer(OnlineTrainer):
    """Soft actor-critic."""

    algorithm_name = "sac"


def _id_of(env: Any) -> str | None:
    """Return the id that an environment was created from, if there is one."""
    first = env[0] if isinstance(env, list) and env else env
    return getattr(getattr(first, "spec", None), "id", None)
