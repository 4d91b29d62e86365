"""Offline training from Python: `IQLTrainer(obs_dim, action_dim, config).train(buffer)`; one class per algorithm."""

from __future__ import annotations

from numbers import Integral
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import gymnasium
import numpy as np
from gymnasium import spaces

from deft import trust
from deft.algorithms.offline import OfflineAlgorithm
from deft.config.loading import replace, resolve
from deft.config.settings import OfflineRunConfig
from deft.config.views import OfflineRLConfig
from deft.data.datasets import find_dataset, open_dataset
from deft.data.datasets.dataset import Dataset
from deft.data.offline_buffer import OfflineReplayBuffer
from deft.errors import InputError
from deft.models.policy import Policy
from deft.runs import checkpoint
from deft.runs.policies import build_policy, load_policy_weights
from deft.runs.random_state import seed_everything
from deft.training.offline import OfflineTrainer
from deft.training.offline_run import build_offline_trainer

Data: TypeAlias = OfflineReplayBuffer | Dataset | str | Path
Config: TypeAlias = OfflineRLConfig | OfflineRunConfig | None


class OfflineRLTrainer:
    """Trains a policy on a dataset.

    Vector observations and actions in [-1, 1] are given by their sizes; anything else by `observation_space` and
    `action_space`. `env` is where `evaluate` plays, by default the dataset's own. `trust_remote_code` allows modules to
    be imported that files name: the dataset, the run of `model_path`. Keywords beyond these are settings of the
    algorithm.
    """

    algorithm_name: ClassVar[str]

    @trust.takes_remote_code
    def __init__(
        self,
        obs_dim: int | None = None,
        action_dim: int | None = None,
        config: Config = None,
        *,
        observation_space: gymnasium.Space | None = None,
        action_space: gymnasium.Space | None = None,
        env: str | gymnasium.Env | None = None,
        policy: Policy | None = None,
        trust_remote_code: bool = False,
        **settings: Any,
    ) -> None:
        trust.name(env)
        self._trust_remote_code = trust_remote_code
        if config is None:  # the algorithm's own defaults: a transformer has another batch size and learning rate
            config = resolve({"algorithm": {"name": self.algorithm_name}, "output_dir": OfflineRLConfig.output_dir})
        if isinstance(config, OfflineRLConfig):
            run_config = config.to_run_config(self.algorithm_name, **settings)
        else:
            run_config = replace(config, **{f"algorithm.cfg.{name}": value for name, value in settings.items()})
        if run_config.algorithm.name != self.algorithm_name:
            raise InputError(
                f"algorithm: {type(self).__name__} trains with {self.algorithm_name!r}, the config names "
                f"{run_config.algorithm.name!r}"
            )
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
        self._policy = policy
        self._dataset: Dataset | None = None
        self._source: Path | None = None
        self._trainer: OfflineTrainer | None = None
        self._loaded_from: Path | None = None
        self._loaded_step = 0

    @property
    def algorithm(self) -> OfflineAlgorithm:
        """The algorithm; available once a dataset is given."""
        return self._started().algorithm

    @property
    def policy(self) -> Policy:
        """The policy that is trained."""
        return self._policy

    @property
    def global_step(self) -> int:
        """Gradient updates so far."""
        return self._loaded_step if self._trainer is None else self._trainer.num_updates

    @property
    def run_dir(self) -> Path:
        """The run directory."""
        return self._started().run_dir

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
        trainer = build_offline_trainer(self.config, dataset, self._policy, self._env, self._spaces)
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

    def evaluate(self, num_episodes: int = 10, video: str | Path | None = None) -> dict[str, Any]:
        """`mean_reward`, `std_reward`, `normalized_score` and the rest over whole episodes."""
        return self._started().evaluate(num_episodes, None if video is None else Path(video))

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint into the run directory, or as the directory `path`."""
        return self._started().save(path)

    def load(self, path: str | Path) -> None:
        """Resume from a checkpoint; before a dataset is given, the weights are loaded now and the rest by `train`."""
        if self._trainer is None:
            load_policy_weights(self._policy, path)
            self._loaded_from = Path(path)
            if self._loaded_from.is_dir():  # else weights alone, to act with
                state = checkpoint.load_training_state(checkpoint.find_checkpoint(path))
                self._loaded_step = state.get("num_updates", 0)
        else:
            self._trainer.load(path)

    def close(self) -> None:
        """Free the evaluation environment."""
        if self._trainer is not None:
            self._trainer.close()

    def _started(self) -> OfflineTrainer:
        if self._trainer is None:
            raise InputError(f"{type(self).__name__} has no dataset yet: train(buffer) or prepare(buffer) comes first")
        return self._trainer


class IQLTrainer(OfflineRLTrainer):
    """Implicit Q-learning."""

    algorithm_name = "iql"

    def __init__(
        self,
        obs_dim: int | None = None,
        action_dim: int | None = None,
        config: Config = None,
        expectile: float | None = None,
        temperature: float | None = None,
        **more: Any,
    ) -> None:
        super().__init__(obs_dim, action_dim, config, **_given(expectile=expectile, temperature=temperature), **more)


class CQLTrainer(OfflineRLTrainer):
    """Conservative Q-learning."""

    algorithm_name = "cql"

    def __init__(
        self,
        obs_dim: int | None = None,
        action_dim: int | None = None,
        config: Config = None,
        cql_alpha: float | None = None,
        cql_samples: int | None = None,
        min_q_weight: float | None = None,
        **more: Any,
    ) -> None:
        own = _given(cql_alpha=cql_alpha, cql_samples=cql_samples, min_q_weight=min_q_weight)
        super().__init__(obs_dim, action_dim, config, **own, **more)


class TD3BCTrainer(OfflineRLTrainer):
    """TD3 with behaviour cloning."""

    algorithm_name = "td3-bc"

    def __init__(
        self,
        obs_dim: int | None = None,
        action_dim: int | None = None,
        config: Config = None,
        alpha: float | None = None,
        noise_clip: float | None = None,
        policy_delay: int | None = None,
        **more: Any,
    ) -> None:
        own = _given(alpha=alpha, noise_clip=noise_clip, policy_delay=policy_delay)
        super().__init__(obs_dim, action_dim, config, **own, **more)


class SFTTrainer(OfflineRLTrainer):
    """Supervised fine-tuning (behaviour cloning)."""

    algorithm_name = "sft"


class DecisionTransformerTrainer(OfflineRLTrainer):
    """Decision Transformer."""

    algorithm_name = "dt"

    def __init__(
        self,
        obs_dim: int | None = None,
        action_dim: int | None = None,
        config: Config = None,
        context_length: int | None = None,
        n_layer: int | None = None,
        n_head: int | None = None,
        embed_dim: int | None = None,
        **more: Any,
    ) -> None:
        own = _given(context_length=context_length, n_layer=n_layer, n_head=n_head, embed_dim=embed_dim)
        super().__init__(obs_dim, action_dim, config, **own, **more)


def _given(**settings: Any) -> dict[str, Any]:
    """Return the settings that are not None; the others are in the config, or have the algorithm's defaults."""
    return {name: value for name, value in settings.items() if value is not None}


def _box(name: str, dim: int | None, bound: float) -> spaces.Box:
    if dim is None:
        raise InputError(f"{name}: missing; give the sizes, or observation_space and action_space")
    if not isinstance(dim, Integral) or dim < 1:
        raise InputError(f"{name}: {dim!r} is not a size; give a whole number, or observation_space and action_space")
    return spaces.Box(-bound, bound, (dim,), np.float32)
