"""The settings of the waypoint commands: recording, supervised training, PPO on top of it, and the comparison.

One flat class a command: `deft.cli` makes the flags from it, and the class is what a run's `config.json` holds.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

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
    """One name or several, each known and given once."""
    names = (names,) if isinstance(names, str) else names
    if isinstance(names, list | tuple):
        for name in names:
            if name not in WAYPOINT_ENVS:
                raise ValueError(f"{shown(name)} is no waypoint environment; one of {quoted(WAYPOINT_ENVS)}")
        if not names or len(set(names)) < len(names):
            raise ValueError(f"{shown(tuple(names))}: give one environment, or several different ones")
    return names


@settings
class PPOConfig:
    """PPO for a residual on the waypoints of a frozen supervised policy."""

    sft_checkpoint: str
    """The supervised policy: `model.pt` of `deft train waypoint-sft`, or its folder. It is loaded, frozen and used."""
    out_dir: OutputPath = "out/rl_delta_ppo_v0"
    """The run folder."""
    env: tuple[str, ...] = ("toy",)
    """`toy`, `driving`, `highway` or `carla`; several are trained in together, each in its share of the copies."""
    num_iterations: Count = 100
    """Rollouts, each followed by an update."""
    batch_size: Count = 64
    """Transitions in a minibatch."""
    lr: Positive = 3e-4
    """Adam's step size."""
    clip_epsilon: Positive = 0.2
    """How far the probability ratio may move from 1."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    gamma: Fraction = 0.99
    """Discount."""
    gae_lambda: Fraction = 0.95
    """Advantage estimation: 0 is one-step TD, 1 is Monte Carlo."""
    num_epochs: Count = 5
    """Passes over each rollout."""
    max_grad_norm: Positive | None = 0.5
    """Gradient clipping."""
    target_kl: Positive | None = None
    """Stop the epochs of an update when its approximate KL passes 1.5 times this."""
    value_warmup: NonNegativeInt = 0
    """Iterations at the start in which the value head learns alone; a policy that is good already loses less then."""
    num_envs: Count | None = None
    """Copies of the environment stepped together; by default 32, and 1 in `carla`."""
    rollout_steps: Count = 16
    """Decisions of a rollout, for each copy."""
    hidden_sizes: tuple[Count, ...] = (64, 64)
    """Hidden layers of the delta head and of the value head."""
    log_std_init: Number = -1.0
    """Log standard deviation of the waypoints at the start, in metres."""
    residual_bound: Positive = 4.0
    """Largest correction of a waypoint's coordinate, in metres."""
    residual_modes: Count = 3
    """Freedom of the correction along the path, an axis: 1 shifts it, 2 turns or stretches it too, 3 bends it, …"""
    residual_start: Fraction = 1.0
    """Share of `residual_bound` that is open at the start; below 1 it opens in equal steps."""
    residual_open_at: Fraction = 0.5
    """Share of training at which it is fully open."""
    kl_coef: NonNegative = 0.0
    """Weight of KL(policy ‖ supervised policy); where `kl_target` is given, its value at the start."""
    kl_target: Positive | None = None
    """Adapt `kl_coef` so that this KL stays near the target."""
    difficulty: Difficulty = "medium"
    """Of the environment."""
    curriculum: Switch = False
    """Start easy and rise to `difficulty`, level by level, as enough episodes succeed."""
    curriculum_success: Fraction = 0.8
    """Share of successes, over the last 100 episodes, at which the next level begins."""
    safety: Switch = False
    """Take back, weights and optimizer, every update that leaves the held-out set worse than the supervised policy."""
    safety_measures: tuple[Literal["collision_rate", "ade"], ...] = ("collision_rate", "ade")
    """Which measures of the held-out set may not be worse."""
    safety_episodes: Count = 64
    """Size of that held-out set, of each environment."""
    eval_interval: NonNegativeInt = 10
    """Iterations between evaluations; 0: at the start and the end alone."""
    eval_episodes: Count = 64
    """Episodes of an evaluation, of each environment."""
    save_interval: NonNegativeInt = 25
    """Iterations between checkpoints; 0: at the end alone."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    seed: Seed = 0
    """One seed, one result."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: Count | None = None
    """Torch's threads; by default OMP_NUM_THREADS, one for a small network, else as many as measure faster."""
    resume: Switch = False
    """Go on from the latest checkpoint in `out_dir`."""
    overwrite: Switch = False
    """Replace a run that is already in `out_dir`."""

    _envs_are_known = field_validator("env", mode="before")(_known_envs)

    @property
    def copies(self) -> int:
        """How many copies there are."""
        return self.num_envs or (1 if self.env == ("carla",) else DEFAULT_COPIES)

    @model_validator(mode="after")
    def _copies_are_enough(self) -> PPOConfig:
        if self.copies < len(self.env):
            raise ValueError(f"num_envs {self.num_envs} is less than one copy for each of {quoted(self.env)}")
        if self.kl_target is not None and self.kl_coef == 0:
            raise ValueError("kl_target needs a kl_coef above 0 to start from")
        return self


@settings
class WaypointSFTConfig:
    """Supervised training of a waypoint policy on recorded driving."""

    dataset: str
    """A recording of `deft collect waypoints`."""
    out_dir: OutputPath = "out/sft_waypoint_bc_torch_v0"
    """Where `model.pt`, `config.json` and `train_metrics.json` are written."""
    num_epochs: Count = 15
    """Passes over the recording."""
    batch_size: Count = 64
    """Decisions in a minibatch."""
    lr: Positive = 1e-3
    """AdamW's step size at the start; it falls to 0 as a cosine."""
    weight_decay: NonNegative = 1e-4
    """Decoupled weight decay."""
    encoder_dim: Count = 64
    """Width of the features that the camera encoder gives."""
    hidden_sizes: tuple[Count, ...] = (64,)
    """Hidden layers of the waypoint head."""
    holdout: Fraction = 0.1
    """Share of the episodes that are kept for validation."""
    seed: Seed = 0
    """One seed, one result."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""
    threads: Count | None = None
    """Torch's threads; by default OMP_NUM_THREADS, one for a small network, else as many as measure faster."""
    resume: Switch = False
    """Continue a run in `out_dir` that was stopped."""
    overwrite: Switch = False
    """Replace a model, or a run that was stopped, in `out_dir`."""


@settings
class WaypointRecordingConfig:
    """What to record for supervised training, and where."""

    out: OutputPath
    """The file (`.npz`)."""
    env: str = "driving"
    """`toy`, `driving`, `highway` or `carla`; its scripted driver drives."""
    episodes: Count = 100
    """Whole episodes."""
    noise: NonNegative = 0.3
    """Deviation, in metres, of what is added to the waypoints that are driven; the plan is recorded without it."""
    label_noise: NonNegative = 0.0
    """Deviation, in metres, of the error in the recorded waypoints, as a tracking system has it."""
    difficulty: Difficulty = "medium"
    """Of the environment."""
    num_envs: Count | None = None
    """Copies stepped together; by default 16, and 1 in `carla`."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor."""
    seed: Seed = 0
    """Episode i starts from seed + i."""
    overwrite: Switch = False
    """Replace the file where there is one."""

    @field_validator("env", mode="before")
    @classmethod
    def _env_is_known(cls, name: Any) -> Any:
        return _known_envs(name)[0] if isinstance(name, str) else name


@settings
class CompareConfig:
    """A supervised waypoint policy against the one that PPO made of it, on the same episodes."""

    sft_checkpoint: str
    """`model.pt` of `deft train waypoint-sft`, or its folder."""
    rl_checkpoint: str
    """`final.pt` or a `checkpoint_iter_X.pt` of `deft train waypoint-ppo`, or its folder."""
    env: tuple[str, ...] | None = None
    """The environments; by default those of the PPO run."""
    difficulty: Difficulty | None = None
    """By default that of the PPO run."""
    episodes: Count = 200
    """Held-out episodes, the same for both."""
    seed: Seed = 1_000_000
    """Episode i starts from seed + i; training and its evaluations use seeds from 2^24 on."""
    out: OutputPath | None = None
    """Where the figures (`comparison.json`) and the picture are written; by default the PPO run's folder."""
    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Passed to the environment's constructor, beside those of the PPO run."""
    device: str = "auto"
    """`auto`, `cpu`, `cuda` or `cuda:N`."""

    @field_validator("env", mode="before")
    @classmethod
    def _envs_are_known(cls, names: Any) -> Any:
        return None if names is None else _known_envs(names)
