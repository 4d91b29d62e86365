"""Settings of the waypoint commands: recording, supervised training, PPO on top of it, and the comparison.

One class per command; a run's `config.json` holds the same settings.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from deft.config.groups import EvaluationSettings, RunSettings, SeedSettings
from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    OutputPath,
    Positive,
    Seed,
    Switch,
    quoted,
    settings,
    shown,
)

WAYPOINT_ENVS = ("toy", "driving", "highway", "carla")
DEFAULT_COPIES = 32
Difficulty = Literal["easy", "medium", "hard"]


def _known_envs(names: Any) -> Any:
    """Return one name or several as a tuple, if each is known and given once."""
    names = (names,) if isinstance(names, str) else names
    if isinstance(names, list | tuple):
        for name in names:
            if name not in WAYPOINT_ENVS:
                raise ValueError(f"{shown(name)} is no waypoint environment; one of {quoted(WAYPOINT_ENVS)}")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{shown(tuple(names))}: give one environment, or several different ones")
    return names


@settings
class PPOConfig(RunSettings, EvaluationSettings):
    """PPO for a residual on the waypoints of a frozen supervised policy."""

    UNIT: ClassVar[str] = "iterations"

    sft_checkpoint: str
    """Supervised policy: `model.pt` of `deft train waypoint-sft`, or its directory. Its weights are frozen."""
    output_dir: OutputPath = "out/rl_delta_ppo_v0"
    """Run directory."""
    env: tuple[str, ...] = ("toy",)
    """`toy`, `driving`, `highway` or `carla`; several environments share `num_envs`."""
    iterations: Count = 100
    """Rollouts, each followed by one update."""
    batch_size: Count = 64
    """Transitions per minibatch."""
    learning_rate: Positive = 3e-4
    """Learning rate of Adam."""
    clip_range: Positive = 0.2
    """Clip the probability ratio to 1 ± this."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    gamma: Fraction = 0.99
    """Discount factor."""
    gae_lambda: Fraction = 0.95
    """λ of generalized advantage estimation."""
    n_epochs: Count = 5
    """Epochs over each rollout."""
    max_grad_norm: Positive | None = 0.5
    """Clip the gradient norm to this; none: no clipping."""
    target_kl: Positive | None = None
    """End the epochs of an update when its approximate KL divergence exceeds 1.5 times this."""
    value_warmup: NonNegativeInt = 0
    """Iterations at the start that train only the value head."""
    num_envs: Count | None = None
    """Parallel environments; by default 32, and 1 for `carla`."""
    rollout_steps: Count = 16
    """Decisions per rollout and environment."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Hidden layers of the delta head and of the value head."""
    log_std_init: Number = -1.0
    """Initial log standard deviation of the waypoints, in metres."""
    residual_bound: Positive = 4.0
    """Largest correction of a waypoint's coordinate, in metres."""
    residual_modes: Count = 3
    """Degrees of freedom of the correction per axis: 1 shifts the path, 2 also rotates or stretches it, 3 bends it."""
    residual_start: Fraction = 1.0
    """Fraction of `residual_bound` that is allowed at the start; below 1 it grows linearly."""
    residual_open_at: Fraction = 0.5
    """Fraction of training after which all of `residual_bound` is allowed."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy ‖ supervised policy); with `kl_target` its initial value."""
    kl_target: Positive | None = None
    """Adapt `kl_coef` to keep that KL divergence near this value."""
    difficulty: Difficulty = "medium"
    """Difficulty of the environment."""
    curriculum: Switch = False
    """Start easy and increase the difficulty up to `difficulty` as episodes succeed."""
    curriculum_success: Fraction = 0.8
    """Success rate over the last 100 episodes at which the next difficulty starts."""
    safety: Switch = False
    """Undo every update that makes the held-out episodes worse than with the supervised policy."""
    safety_measures: tuple[Literal["collision_rate", "ade"], ...] = ("collision_rate", "ade")
    """Measures of the held-out episodes that `safety` compares."""
    safety_episodes: Count = 64
    """Held-out episodes per environment that `safety` plays."""
    eval_freq: NonNegativeInt = 10
    """Evaluate every this many iterations; 0: only at the start and the end."""
    eval_episodes: Count = 64
    """Episodes per evaluation and environment."""
    save_freq: NonNegativeInt = 25
    """Save a checkpoint every this many iterations; 0: only at the end."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""

    _envs_are_known = field_validator("env", mode="before")(_known_envs)

    @property
    def copies(self) -> int:
        """The number of parallel environments."""
        return self.num_envs or (1 if self.env == ("carla",) else DEFAULT_COPIES)

    @model_validator(mode="after")
    def _copies_are_enough(self) -> PPOConfig:
        if self.copies < len(self.env):
            raise ValueError(f"num_envs {self.num_envs} is less than one for each of {quoted(self.env)}")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target needs a kl_coef above 0 to start from")
        return self


@settings
class WaypointSFTConfig(RunSettings):
    """Supervised training of a waypoint policy on recorded driving."""

    dataset: str
    """Recording made by `deft collect waypoints`."""
    output_dir: OutputPath = "out/sft_waypoint_bc_torch_v0"
    """Run directory: `model.pt`, `config.json` and `train_metrics.json`."""
    num_epochs: Count = 15
    """Epochs over the recording."""
    batch_size: Count = 64
    """Decisions per minibatch."""
    learning_rate: Positive = 1e-3
    """Initial learning rate of AdamW; it decays to 0 as a cosine."""
    weight_decay: NonNegative = 1e-4
    """Weight decay of AdamW."""
    encoder_dim: Count = 64
    """Width of the camera features."""
    hidden_sizes: tuple[Count, ...] = (64,)
    """Hidden layers of the waypoint head."""
    holdout: Fraction = 0.1
    """Fraction of the episodes held out for validation."""


@settings
class WaypointRecordingConfig(SeedSettings):
    """Record demonstrations of an environment's scripted driver."""

    out: OutputPath
    """Output file (`.npz`)."""
    env: str = "driving"
    """`toy`, `driving`, `highway` or `carla`."""
    episodes: Count = 100
    """Episodes to record."""
    noise: NonNegative = 0.3
    """Standard deviation, in metres, of the noise on the driven waypoints; the recorded plan has none."""
    label_noise: NonNegative = 0.0
    """Standard deviation, in metres, of the noise on the recorded waypoints."""
    difficulty: Difficulty = "medium"
    """Difficulty of the environment."""
    num_envs: Count | None = None
    """Parallel environments; by default 16, and 1 for `carla`."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor."""
    seed: Seed = 0
    """Episode i starts from seed + i."""
    overwrite: Switch = False
    """Replace an existing file."""

    @field_validator("env", mode="before")
    @classmethod
    def _env_is_known(cls, name: Any) -> Any:
        return _known_envs(name)[0] if isinstance(name, str) else name


@settings
class CompareConfig(SeedSettings):
    """Compare a supervised waypoint policy with the policy that PPO trained from it."""

    sft_checkpoint: str
    """`model.pt` of `deft train waypoint-sft`, or its directory."""
    rl_checkpoint: str
    """`final.pt` or `checkpoint_iter_X.pt` of `deft train waypoint-ppo`, or its directory."""
    env: tuple[str, ...] | None = None
    """Environments; by default those of the PPO run."""
    difficulty: Difficulty | None = None
    """Difficulty of the environment; by default that of the PPO run."""
    episodes: Count = 200
    """Held-out episodes, the same for both policies."""
    seed: Seed = 1_000_000
    """Episode i starts from seed + i; training uses seeds from 2^24 on."""
    out: OutputPath | None = None
    """Directory for `comparison.json` and its plot; by default the PPO run's."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor, added to those of the PPO run."""

    @field_validator("env", mode="before")
    @classmethod
    def _envs_are_known(cls, names: Any) -> Any:
        return None if names is None else _known_envs(names)
