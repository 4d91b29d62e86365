"""Training from Python: `PPOTrainer(env=env, config=config).train()`, `IQLTrainer(11, 3, config).train(buffer)`.

One class per algorithm, one base for those that learn in an environment, one for those that learn from a dataset.
"""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import trust
from deft.algorithms.offline import OfflineAlgorithm
from deft.config.loading import replace, resolve
from deft.config.settings import OfflineRunConfig, RunConfig
from deft.config.views import OfflineRLConfig, RLConfig
from deft.data.datasets import find_dataset, open_dataset
from deft.data.datasets.dataset import Dataset
from deft.data.streaming import OfflineReplayBuffer
from deft.envs.make import make_another
from deft.envs.vector import VectorEnv
from deft.errors import InputError
from deft.models.policy import Policy
from deft.runs import checkpoint
from deft.runs.policies import build_policy, load_policy_weights
from deft.runs.random_state import seed_everything
from deft.training.offline import OfflineTrainer
from deft.training.offline_run import build_offline_trainer
from deft.training.run import build_trainer
from deft.training.trainer import Trainer

Data: TypeAlias = OfflineReplayBuffer | Dataset | str | Path
Config: TypeAlias = OfflineRLConfig | OfflineRunConfig | None


class _PolicyTrainer:
    """What all of these classes have: a trainer, which one of a dataset gets with the dataset."""

    algorithm_name: ClassVar[str]
    _trainer: Any = None

    def _check_algorithm(self, config: RunConfig | OfflineRunConfig) -> None:
        if config.algorithm.name != self.algorithm_name:
            raise InputError(
                f"algorithm: {type(self).__name__} trains with {self.algorithm_name!r}, the config names "
                f"{config.algorithm.name!r}"
            )

    @property
    def trainer(self) -> Any:
        """The `Trainer` or `OfflineTrainer` that does the work."""
        if self._trainer is None:
            raise InputError(f"{type(self).__name__} has no dataset yet: train(buffer) or prepare(buffer) comes first")
        return self._trainer

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self.trainer.run_dir

    def evaluate(self, num_episodes: int = 10, video: str | Path | None = None) -> dict[str, Any]:
        """`mean_reward`, `std_reward` and the rest over whole episodes in an environment of its own."""
        return self.trainer.evaluate(num_episodes, None if video is None else Path(video))

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint into the run directory, or as the directory `path`."""
        return self.trainer.save(path)

    def close(self) -> None:
        """Free the environments."""
        if self._trainer is not None:
            self._trainer.close()


class OnlineTrainer(_PolicyTrainer):
    """Trains a policy in an environment: an id, a Gymnasium environment, several, or a vector environment.

    `policy` may be a `Policy`, a VLA model with the three methods of `VLAModelInterface`, or any object with
    `get_action(obs, deterministic=False)`; without one, a network is built for the environment's spaces. `critics`: for
    SAC, the trainer that trained the policy (`IQLTrainer`, `CQLTrainer`, …), whose critics it starts from.
    `trust_remote_code` allows modules that files name (a config that was read, the run of `model_path`) to be imported.
    """

    _trainer: Trainer

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
            config = self._default_config()
        run_config = config.to_run_config(env_id) if isinstance(config, RLConfig) else config
        if isinstance(config, RunConfig) and env_id is not None:
            run_config = replace(run_config, **{"env.id": env_id})
        self._check_algorithm(run_config)
        if use_wandb:
            run_config = replace(run_config, **{"logging.use_wandb": True})
        given = None if env is None or isinstance(env, str) else self._environments(env, run_config)
        if critics is not None and not hasattr(critics, "algorithm"):
            raise InputError(f"critics: give the trainer that trained the policy, not {type(critics).__name__}")
        state = None if critics is None else critics.algorithm.state_dict()
        self._trainer = build_trainer(run_config, given, policy, eval_env, state)

    @classmethod
    def _default_config(cls) -> RLConfig | RunConfig:
        """Return the settings of a trainer without a config."""
        return RLConfig(algorithm=cls.algorithm_name)

    @staticmethod
    def _environments(env: Any, config: RunConfig) -> Any:
        """Return the environments to train in, of the environment that a user gave."""
        return env

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self._trainer.policy

    @property
    def global_step(self) -> int:
        """Environment steps trained on so far."""
        return self._trainer.num_timesteps

    def train(self, total_timesteps: int | None = None) -> dict[str, Any]:
        """Train to the configured number of env steps (or to `total_timesteps`); returns a summary."""
        return self._trainer.train(total_timesteps)

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint."""
        self._trainer.load(path)


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


class TD3Trainer(OnlineTrainer):
    """Twin delayed deep deterministic policy gradient."""

    algorithm_name = "td3"


class CalQLTrainer(OnlineTrainer):
    """Cal-QL's online phase: calibrated CQL on a mix of a dataset and new episodes."""

    algorithm_name = "cal-ql"


class FQLOnlineTrainer(OnlineTrainer):
    """Flow Q-learning and Q-chunking in an environment."""

    algorithm_name = "fql-online"


class _RoundsTrainer(OnlineTrainer):
    """Trains in rounds; its `config` is what `deft.config.loading.resolve` returns for a mapping of settings."""

    @classmethod
    def _default_config(cls) -> RunConfig:
        config: RunConfig = resolve({"algorithm": {"name": cls.algorithm_name}})
        return config


class DAggerTrainer(_RoundsTrainer):
    """DAgger: imitation of an environment's scripted expert on the states that the policy visits."""

    algorithm_name = "dagger"


class RecapTrainer(_RoundsTrainer):
    """RECAP: imitation conditioned on whether an action was an improvement."""

    algorithm_name = "recap"


class OfflineRLTrainer(_PolicyTrainer):
    """Trains a policy on a dataset.

    Vector observations and actions in [-1, 1] are given by their sizes; anything else by `observation_space` and
    `action_space`. `env` is where `evaluate` plays, by default the dataset's own. `trust_remote_code` allows modules to
    be imported that files name: the dataset, the run of `model_path`. Keywords beyond these are settings of the
    algorithm; those in `main_settings` may also follow `config` in their order.
    """

    main_settings: ClassVar[tuple[str, ...]] = ()
    _trainer: OfflineTrainer | None = None

    @trust.takes_remote_code
    def __init__(
        self,
        obs_dim: int | None = None,
        action_dim: int | None = None,
        config: Config = None,
        *main: Any,
        observation_space: gymnasium.Space | None = None,
        action_space: gymnasium.Space | None = None,
        env: str | gymnasium.Env | None = None,
        policy: Policy | None = None,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> None:
        trust.name(env)
        self._trust_remote_code = trust_remote_code
        settings = self._with_main(main, settings)
        if config is None:  # the algorithm's own defaults: a transformer has another batch size and learning rate
            config = resolve({"algorithm": {"name": self.algorithm_name}, "output_dir": OfflineRLConfig.output_dir})
        if isinstance(config, OfflineRLConfig):
            run_config = config.to_run_config(self.algorithm_name, **settings)
        else:
            run_config = replace(config, **{f"algorithm.cfg.{name}": value for name, value in settings.items()})
        self._check_algorithm(run_config)
        self.config = replace(run_config, **{"env.id": env}) if isinstance(env, str) else run_config
        self._env = env if isinstance(env, gymnasium.Env) else None
        seed_everything(self.config.seed)
        self._spaces: tuple[gymnasium.Space, gymnasium.Space] | None = None
        if policy is None:
            self._spaces = (
                observation_space or _box("obs_dim", obs_dim, np.inf),
                action_space or _box("action_dim", action_dim, 1.0),
            )
            policy = build_policy(self.config, *self._spaces)
        self.policy: Policy = policy
        self._dataset: Dataset | None = None
        self._source: Path | None = None
        self._loaded_from: Path | None = None
        self._loaded_step = 0

    def _with_main(self, main: tuple[Any, ...], settings: dict[str, Any]) -> dict[str, Any]:
        """Return the settings with the main ones that followed the config; None leaves one as the config has it."""
        named = dict(zip(self.main_settings, main, strict=False))
        if len(named) < len(main) or named.keys() & settings:
            names = ", ".join(self.main_settings) or "nothing"
            raise TypeError(f"{type(self).__name__}: after config it takes {names}, each once; give others by name")
        given = named | settings
        return {name: one for name, one in given.items() if one is not None or name not in self.main_settings}

    @property
    def algorithm(self) -> OfflineAlgorithm:
        """The algorithm; available once a dataset is given."""
        return self.trainer.algorithm

    @property
    def global_step(self) -> int:
        """Gradient updates so far."""
        return self._loaded_step if self._trainer is None else self._trainer.num_updates

    def train(self, buffer: Data, num_epochs: int | None = None) -> dict[str, Any]:
        """Train on a dataset to the configured number of epochs (or to `num_epochs`); returns a summary.

        Called again with the same dataset, it continues training.
        """
        return self.prepare(buffer).train(num_epochs)

    def prepare(self, buffer: Data) -> OfflineTrainer:
        """Return the trainer for a dataset, before its first update; the existing one for the same dataset."""
        with trust.remote_code(self._trust_remote_code):
            return self._prepare(buffer)

    def _prepare(self, buffer: Data) -> OfflineTrainer:
        source = find_dataset(buffer)[0].resolve() if isinstance(buffer, str | Path) else None
        if self._trainer is not None and source is not None and source == self._source:
            return self._trainer
        dataset = self._load(buffer)
        if self._trainer is not None and self._dataset is not None:
            if self._dataset is dataset:
                return self._trainer
            raise InputError(
                f"train: this {type(self).__name__} trains on {self._dataset.name}; make another one for "
                f"{dataset.name}, from its weights with policy= or model_path"
            )
        name = buffer.source if isinstance(buffer, OfflineReplayBuffer) else buffer
        if isinstance(name, str | Path):
            self.config = replace(self.config, **{"dataset.path": str(name)})  # for who resumes from the command line
        trainer = build_offline_trainer(self.config, dataset, self.policy, self._env, self._spaces)
        if self._loaded_from is not None:
            trainer.load(self._loaded_from)
        self._trainer, self._dataset, self._source = trainer, dataset, source
        return trainer

    def _load(self, buffer: Data) -> Dataset:
        if isinstance(buffer, OfflineReplayBuffer):
            return buffer.dataset
        if isinstance(buffer, Dataset):
            return buffer
        if not isinstance(buffer, str | Path):
            raise InputError(f"train: a dataset, a buffer, a name or a path is trained on, not {type(buffer).__name__}")
        settings = self.config.dataset
        return open_dataset(buffer, {"download": settings.download, **settings.options})

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint; before a dataset is given, the weights are loaded now and the rest by `train`."""
        if self._trainer is not None:
            self._trainer.load(path)
            return
        load_policy_weights(self.policy, path)
        self._loaded_from = Path(path)
        if self._loaded_from.is_dir():  # else weights alone, to act with
            state = checkpoint.load_training_state(checkpoint.find_checkpoint(path))
            self._loaded_step = state.get("num_updates", 0)


class IQLTrainer(OfflineRLTrainer):
    """Implicit Q-learning; main settings `expectile`, `temperature`."""

    algorithm_name = "iql"
    main_settings = ("expectile", "temperature")


class CQLTrainer(OfflineRLTrainer):
    """Conservative Q-learning; main settings `cql_alpha`, `cql_samples`, `min_q_weight`."""

    algorithm_name = "cql"
    main_settings = ("cql_alpha", "cql_samples", "min_q_weight")


class TD3BCTrainer(OfflineRLTrainer):
    """TD3 with behaviour cloning; main settings `alpha`, `noise_clip`, `policy_delay`."""

    algorithm_name = "td3-bc"
    main_settings = ("alpha", "noise_clip", "policy_delay")


class ReBRACTrainer(OfflineRLTrainer):
    """TD3 with separate behaviour cloning penalties; main settings `policy_bc_coef`, `critic_bc_coef`."""

    algorithm_name = "rebrac"
    main_settings = ("policy_bc_coef", "critic_bc_coef")


class FQLTrainer(OfflineRLTrainer):
    """Flow Q-learning; main settings `alpha`, `policy_extraction`."""

    algorithm_name = "fql"
    main_settings = ("alpha", "policy_extraction")


class SFTTrainer(OfflineRLTrainer):
    """Supervised fine-tuning (behaviour cloning)."""

    algorithm_name = "sft"


class DecisionTransformerTrainer(OfflineRLTrainer):
    """Decision Transformer; main settings `context_length`, `n_layer`, `n_head`, `embed_dim`."""

    algorithm_name = "dt"
    main_settings = ("context_length", "n_layer", "n_head", "embed_dim")


def _id_of(env: Any) -> str | None:
    """Return the id that an environment was created from, if there is one."""
    first = env[0] if isinstance(env, list) and env else env
    return getattr(getattr(first, "spec", None), "id", None)


def _box(name: str, dim: int | None, bound: float) -> spaces.Box:
    if dim is None:
        raise InputError(f"{name}: missing; give the sizes, or observation_space and action_space")
    if not isinstance(dim, Integral) or dim < 1:
        raise InputError(f"{name}: {dim!r} is not a size; give a whole number, or observation_space and action_space")
    return spaces.Box(-bound, bound, (dim,), np.float32)
