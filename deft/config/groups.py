"""Settings that several commands share, declared once: the classes of `deft.config` are composed of these groups.

A class that uses a setting with another default assigns it (`gamma = 0.95`), or `Field(0.95, description=…)` with
another help text; the type and the check are those of the declaration. A class that counts in other units than steps
names them in `UNIT`, which the help texts of its frequencies show.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from deft.config.fields import setting_names
from deft.config.validation import (
    Count,
    Fraction,
    NonNegative,
    NonNegativeInt,
    Number,
    OutputPath,
    Place,
    Port,
    Positive,
    Seed,
    Several,
    Switch,
    settings,
)
from deft.errors import shown

Precision = Literal["fp32", "tf32", "bf16"]
AutoPrecision = Literal["auto", "fp32", "tf32", "bf16"]

# ------------------------------------------------------------------------------------------------------------- a run


@settings
class SeedSettings:
    """Seed and device."""

    seed: Seed = 0
    """Seed of every random number generator."""
    device: str = "auto"
    """Device: `auto`, `cpu`, `cuda` or `cuda:N`."""


@settings
class ComputeSettings(SeedSettings):
    """Seed, device and threads of a training run."""

    device = Field(
        "auto",
        description="Device: `auto`, `cpu`, `cuda` or `cuda:N`; `auto` trains on a GPU if there is one, except small "
        "networks in online training.",
    )
    threads: Count | None = None
    """CPU threads of PyTorch; by default OMP_NUM_THREADS, else a number chosen by the size of the network."""


@settings
class ShardSettings(ComputeSettings):
    """Seed, device, threads and sharding of a training run."""

    fsdp: Switch = False
    """Shard weights, gradients and optimizer state over the processes (FSDP); ppo, sft and phase 1."""


@settings
class ResumeSettings:
    """How a run starts where an earlier one exists."""

    resume: Place | None = None
    """Resume from this checkpoint, or from the latest checkpoint of this run directory."""
    auto_resume: Switch = False
    """Resume from the latest checkpoint in `output_dir` if there is one."""
    overwrite: Switch = False
    """Replace an existing run in `output_dir`."""


@settings
class RunSettings(ComputeSettings, ResumeSettings):
    """Directory, seed, device and start of a run."""

    output_dir: OutputPath | None = None
    """Run directory; by default `<algorithm>-<env or dataset>-<time>` in `$OUTPUT_BASE` or `outputs`."""


@settings
class DirectorySettings:
    """The directory of a run that has a fixed default."""

    output_dir: OutputPath = "outputs"
    """Run directory."""


@settings
class SaveSettings:
    """When checkpoints are saved."""

    UNIT: ClassVar[str] = "env steps"

    save_freq: NonNegativeInt = 10_000
    """Save a checkpoint every this many {unit}; 0: only at the end."""


@settings
class CheckpointSettings(SaveSettings):
    """When checkpoints are saved, and how many are kept."""

    keep_checkpoints: Count = 3
    """Keep this many of the latest checkpoints, and the best."""


@settings
class LoggedCheckpoints(CheckpointSettings):
    """When a run of the F1 model logs and saves."""

    log_freq: Count = 10
    """Log metrics every this many {unit}."""


@settings
class EvaluationSettings:
    """When the policy is evaluated during training."""

    UNIT: ClassVar[str] = "env steps"

    eval_freq: NonNegativeInt = 5_000
    """Evaluate every this many {unit}; 0: never."""
    eval_episodes: Count = 10
    """Episodes per evaluation."""


@settings
class ProgressSettings(CheckpointSettings, EvaluationSettings):
    """When a run evaluates, logs and saves."""

    eval_deterministic: Switch = True
    """Evaluate the most likely actions; `--eval-stochastic` evaluates sampled actions."""
    log_freq: NonNegativeInt = 1_000
    """Log metrics every this many {unit}."""


@settings
class PortSettings:
    """Where the live view of a run is served."""

    view_port: Port = 6070
    """Port of the live view on this machine; 0: any free port."""


@settings
class ViewSettings(PortSettings):
    """The live view of a run."""

    view: Switch = False
    """Serve a page with curves, camera images and the log of the run while it trains (extra `view`)."""


@settings
class TakeoverSettings:
    """A person who takes over in the live view."""

    takeover: Switch = False
    """Let a person take over an environment in the live view (`view`); what they do is marked and learned from."""
    takeover_rate: Positive = 10.0
    """Env steps per second while a person watches."""

    @property
    def takes_over(self) -> bool:
        """Whether environments must be shown to a person."""
        return self.takeover


# ---------------------------------------------------------------------------------------------------------- learning


@settings
class LearningSettings:
    """Learning rate and batch size of every kind of training."""

    learning_rate: Positive = 3e-4
    """Learning rate of Adam."""
    batch_size: Count = 64
    """Transitions per minibatch (sequences × steps for recurrent policies)."""


@settings
class DecaySettings(LearningSettings):
    """Training with AdamW."""

    weight_decay: NonNegative = 1e-6
    """Decoupled weight decay (AdamW)."""


@settings
class ClippingSettings(LearningSettings):
    """Training with clipped gradients."""

    max_grad_norm: Positive | None = 0.5
    """Clip the gradient norm to this; none: no clipping."""


@settings
class MicroBatchSettings(LearningSettings):
    """Training with micro-batches."""

    gradient_accumulation: Count = 1
    """Micro-batches per minibatch: the same update with less memory."""


@settings
class CompileSettings:
    """Compilation of the update."""

    compile: Switch = False
    """Compile the update with torch.compile."""


@settings
class DiscountSettings(LearningSettings):
    """Training on discounted rewards."""

    gamma: Fraction = 0.99
    """Discount factor."""


@settings
class PolicyGradientSettings(DiscountSettings, ClippingSettings):
    """Clipped policy gradients over several epochs of each rollout: PPO, GRPO, and PPO of waypoints."""

    n_epochs: Count = 4
    """Epochs per rollout."""
    clip_range: Positive = 0.2
    """Clip the probability ratio to 1 ± this."""
    entropy_coef: NonNegative = 0.01
    """Weight of the entropy bonus."""
    target_kl: Positive | None = None
    """Stop the epochs of an update when the approximate KL divergence exceeds 1.5 × this."""


@settings
class ActorCriticSettings(PolicyGradientSettings):
    """Policy gradients with a value function: PPO, and PPO of waypoints."""

    gae_lambda: Fraction = 0.95
    """λ of generalised advantage estimation: 0 is one-step TD, 1 is Monte Carlo."""
    value_coef: NonNegative = 0.5
    """Weight of the value loss."""
    value_warmup: NonNegativeInt = 0
    """Updates at the start that train only the layers of the value function."""


@settings
class DenoisingSettings:
    """Policies that denoise: a flow, or a diffusion policy."""

    flow_steps: Count = 5
    """Denoising steps of `distribution: flow`."""
    flow_noise: Positive = 0.1
    """Initial standard deviation of the noise in each denoising step of `distribution: flow`, for ppo and grpo."""
    noise_network: Switch = False
    """Let a network set the noise in each denoising step of a flow by the state, for ppo and grpo (ReinFlow)."""
    noise_min: Positive = 0.05
    """Lower bound of the noise in each denoising step, of `noise_network` and of `distribution: diffusion`."""
    noise_max: Positive = 0.2
    """Upper bound of the noise of `noise_network`."""
    diffusion_steps: Several = 20
    """Diffusion steps in the training of `distribution: diffusion`."""
    ddim_steps: Count = 5
    """Denoising steps (DDIM) of `distribution: diffusion`, out of `diffusion_steps`."""
    trained_steps: Count | None = None
    """Last denoising steps that ppo and grpo train; those before use a frozen copy of the network. None: all."""

    def uses(self, name: str, distribution: str | None) -> bool:
        """Return whether a distribution uses one of these settings."""
        of_flow = ["flow_steps", "flow_noise", "noise_network", "trained_steps"]
        of_flow += ["noise_min", "noise_max"] if self.noise_network else []
        of_diffusion = ["diffusion_steps", "ddim_steps", "noise_min", "trained_steps"]
        return name in {"flow": of_flow, "diffusion": of_diffusion}.get(distribution or "", [])


DENOISING_UNUSED = {
    name: f"has no use for it; see --distribution, or --vla-model-config {name}=VALUE for a VLA model"
    for name in setting_names(DenoisingSettings)
}
"""What to do about settings of denoising that a policy does not use."""


@settings
class ImageDatasetSettings:
    """A dataset with images to train a model of the robot's cameras on."""

    dataset: str | None = None
    """Train on this dataset with images (a name or a path) instead of the tabletop."""
    dataset_options: dict[str, Any] = Field(default_factory=dict)
    """Options of the dataset's loader (`skip_missing=true`, `image_size=128`, …), as in `load_dataset`."""
    shift_augmentation: NonNegativeInt = 0
    """Largest random shift of an episode's images, in pixels."""


# ---------------------------------------------------------------------------------------------------------- episodes


@settings
class EnvKwargsSettings:
    """Arguments of an environment."""

    env_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment's constructor; where a run is played, they are added to its own."""


@settings
class EpisodeSettings(SeedSettings, EnvKwargsSettings):
    """Episodes that a command plays."""

    episodes: Count = 10
    """Episodes to play."""
    seed = Field(0, description="Episode i starts from seed + i.")


@settings
class EnvironmentChoice(EpisodeSettings):
    """The environment in which a policy is played."""

    env: str | None = None
    """Gymnasium id or name of a Deft environment; by default the environment of the run."""
    task: str | None = None
    """Task of the environment; the same as `--env-kwargs task=TASK`."""
    rename_streams: dict[str, str] = Field(default_factory=dict)
    """Rename observation streams of the environment to the names that the policy expects, as NEW_NAME=STREAM."""
    suite_path: Place | None = None
    """Folder with the files of a suite that no package contains, such as the scenes of LIBERO."""
    deterministic: Switch = True
    """Play the most likely actions; `--stochastic` samples actions as in training."""


DEFAULT_CURRICULUM_STEPS = (10_000, 50_000)


@settings
class CurriculumConfig:
    """Difficulty levels of the environment; training calls `set_difficulty(level)` with each in turn."""

    levels: tuple[str | int | Number, ...] = ("easy", "medium", "hard")
    """Arguments of `set_difficulty`, easiest level first."""
    at_steps: tuple[Count, ...] | None = None
    """Env steps at which the second, third, … level starts; by default 10000 and 50000 for three levels."""
    success_rate: Fraction | None = None
    """Start the next level at this success rate over the last `window` episodes; replaces `at_steps`."""
    window: Count = 100
    """Episodes of the current level over which the success rate is computed."""

    @model_validator(mode="after")
    def _levels_have_one_end(self) -> CurriculumConfig:
        if len(self.levels) < 2 or len(set(self.levels)) < len(self.levels):
            raise ValueError(f"levels: at least two different ones are needed, not {shown(list(self.levels))}")
        if self.success_rate is not None:
            if self.at_steps is not None:
                raise ValueError("give at_steps or success_rate, one of them")
            return self
        if self.at_steps is None and len(self.levels) == len(DEFAULT_CURRICULUM_STEPS) + 1:
            object.__setattr__(self, "at_steps", DEFAULT_CURRICULUM_STEPS)  # without validation
        steps = self.at_steps or ()
        if len(steps) != len(self.levels) - 1 or any(first >= second for first, second in pairwise(steps)):
            raise ValueError(
                f"at_steps: {len(self.levels)} levels need {len(self.levels) - 1} growing numbers of steps, not "
                f"{shown(list(steps))}; give --curriculum-at-steps or --curriculum-success-rate"
            )
        return self


@settings
class RewardModelConfig:
    """The reward of a trained success classifier, in place of the training environment's."""

    path: Place
    """Use the success classifier of this run of `deft train reward-model` as the reward of training."""
    output: Literal["success", "probability"] = "success"
    """Reward: 1 where the probability of success is above `threshold` and 0 elsewhere, or the probability itself."""
    threshold: Fraction = 0.5
    """Probability above which a frame shows success."""
    terminates: Switch = False
    """Let a predicted success end the episode for the learner; the environment is not reset."""


@settings
class HeldOutSettings:
    """Episodes that are held out of training on a dataset."""

    val_fraction: Annotated[float, Field(ge=0, lt=1)] = 0.05
    """Fraction of the episodes to hold out for `val_loss`; 0: none."""
    early_stopping: NonNegativeInt = 0
    """Stop after this many epochs without a lower `val_loss`; 0: never."""

    @model_validator(mode="after")
    def _something_ends_it(self) -> Self:
        if self.early_stopping and not self.val_fraction:
            raise ValueError(f"early_stopping {self.early_stopping}: needs a val_loss; give val_fraction above 0")
        return self


@settings
class AdvantageConfig:
    """Condition the policy on an indicator of whether an action is an improvement (recap)."""

    guidance: NonNegative = 1.0
    """Weight of the indicator when acting: 1 acts as conditioned, more exaggerates it (classifier-free guidance)."""


@settings
class ResidualConfig:
    """A trained correction of a frozen policy: action = clip(base + scale · residual), in unit actions."""

    scale: Positive
    """Largest correction of an action of the frozen policy of `model_path`, in half ranges of the action space."""
    horizon: NonNegativeInt = 0
    """Env steps over which the probability of using the residual in training grows from 0 to 1; 0: always used."""
    hidden_sizes: tuple[Count, ...] = (256, 256)
    """Widths of the hidden layers of the residual network, its value function and critics."""
    log_std_init: Number = -1.0
    """Initial log standard deviation of the residual, before tanh."""
