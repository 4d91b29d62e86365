"""Settings of the waypoint commands: recording, supervised training, PPO on top of it, and the comparison.

One class per command; a run's `config.json` holds the same settings.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from deft.config import groups
from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    Number,
    OutputPath,
    Positive,
    Switch,
    quoted,
    settings,
)
from deft.errors import shown

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
class DifficultySettings(groups.EnvKwargsSettings):
    """The difficulty of a waypoint environment, and its number of copies."""

    difficulty: Difficulty = "medium"
    """Difficulty of the environment."""
    num_envs: Count | None = None
    """Parallel environments; by default 32 in training, 16 in recordings, and 1 for `carla`."""


@settings
class PPOConfig(
    groups.DirectorySettings,
    groups.RunSettings,
    groups.ViewSettings,
    groups.SaveSettings,
    groups.EvaluationSettings,
    groups.ActorCriticSettings,
    DifficultySettings,
):
    """PPO for a residual on the waypoints of a frozen supervised policy."""

    UNIT = "iterations"

    sft_checkpoint: str
    """Supervised policy: `model.pt` of `deft train waypoint-sft`, or its directory. Its weights are frozen."""
    output_dir = "out/rl_delta_ppo_v0"
    env: tuple[str, ...] = ("toy",)
    """`toy`, `driving`, `highway` or `carla`; several environments share `num_envs`."""
    iterations: Count = 100
    """Rollouts, each followed by one update."""
    n_epochs = 5
    value_warmup = Field(0, description="Iterations at the start that train only the value head.")
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
    eval_freq = Field(10, description="Evaluate every this many iterations; 0: only at the start and the end.")
    eval_episodes = Field(64, description="Episodes per evaluation and environment.")
    save_freq = 25

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
class WaypointSFTConfig(groups.DirectorySettings, groups.RunSettings, groups.ViewSettings, groups.DecaySettings):
    """Supervised training of a waypoint policy on recorded driving."""

    dataset: str
    """Recording made by `deft collect waypoints`."""
    output_dir = Field("out/sft_waypoint_bc_torch_v0", description="Run directory: model, config and metrics.")
    num_epochs: Count = 15
    """Epochs over the recording."""
    batch_size = Field(64, description="Decisions per minibatch.")
    learning_rate = Field(1e-3, description="Initial learning rate of AdamW; it decays to 0 as a cosine.")
    weight_decay = 1e-4
    encoder_dim: Count = 64
    """Width of the camera features."""
    hidden_sizes: tuple[Count, ...] = (64,)
    """Hidden layers of the waypoint head."""
    holdout: Fraction = 0.1
    """Fraction of the episodes held out for validation."""


@settings
class WaypointRecordingConfig(groups.EpisodeSettings, DifficultySettings):
    """Record demonstrations of an environment's scripted driver."""

    out: OutputPath
    """Output file (`.npz`)."""
    env: str = "driving"
    """`toy`, `driving`, `highway` or `carla`."""
    episodes = Field(100, description="Episodes to record.")
    noise: NonNegative = 0.3
    """Standard deviation, in metres, of the noise on the driven waypoints; the recorded plan has none."""
    label_noise: NonNegative = 0.0
    """Standard deviation, in metres, of the noise on the recorded waypoints."""
    overwrite: Switch = False
    """Replace an existing file."""

    @field_validator("env", mode="before")
    @classmethod
    def _env_is_known(cls, name: Any) -> Any:
        return _known_envs(name)[0] if isinstance(name, str) else name


@settings
class CompareConfig(groups.EpisodeSettings):
    """Compare a supervised waypoint policy with the policy that PPO trained from it."""

    sft_checkpoint: str
    """`model.pt` of `deft train waypoint-sft`, or its directory."""
    rl_checkpoint: str
    """`final.pt` or `checkpoint_iter_X.pt` of `deft train waypoint-ppo`, or its directory."""
    env: tuple[str, ...] | None = None
    """Environments; by default those of the PPO run."""
    difficulty: Difficulty | None = None
    """Difficulty of the environment; by default that of the PPO run."""
    episodes = Field(200, description="Held-out episodes, the same for both policies.")
    seed = Field(1_000_000, description="Episode i starts from seed + i; training uses seeds from 2^24 on.")
    out: OutputPath | None = None
    """Directory for `comparison.json` and its plot; by default the PPO run's."""

    @field_validator("env", mode="before")
    @classmethod
    def _envs_are_known(cls, names: Any) -> Any:
        return None if names is None else _known_envs(names)
