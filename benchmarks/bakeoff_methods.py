"""The methods of the bake-off and what their policies read: the flags of each training, by budget and simulator.

`bakeoff.py` trains them; its documentation is docs/results/bakeoff.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

CHUNK = 4  # env steps per decision, of every method
FLOW, GAUSSIAN = "sft", "sft-gaussian"  # the policies that methods start from, by the names of their runs
Words = list[object]


class Scale(NamedTuple):
    """How large a training is: what the settings of a method depend on."""

    budget: int
    """Env steps of the method itself, without those of the demonstrations."""
    on_warp: bool = False
    """Whether its environments are simulated on MuJoCo Warp: hundreds of them, a step of which takes milliseconds."""
    has_images: bool = True
    """Whether a batch has images: updates then take about ten times as long."""
    num_envs: int | None = None
    """Environments of every method on Warp, instead of the method's own number; for tests."""

    def envs(self, on_cpu: int, on_warp: int) -> int:
        """Return the number of environments."""
        return (self.num_envs or on_warp) if self.on_warp else on_cpu


class Method(NamedTuple):
    """A row of the table: what it is, the policy that it starts from, what it uses, and its flags."""

    words: str
    start: str
    uses: str
    flags: Callable[[Scale], Words]
    needs_data: bool = False
    """Whether batches are mixed with the demonstrations (`prior_data`)."""
    command: str = ""
    """The algorithm; by default the method's name."""
    before: str = ""
    """An algorithm that is trained on the demonstrations first, from the SFT policy."""
    on_warp: bool = True
    """Whether it can be trained on MuJoCo Warp; the scripted expert cannot."""
    most: int | None = None
    """Env steps after which it stops, if the budget is larger."""
    reads_scene: bool = False
    """Whether critics may read the state of the scene (`critic_observation`)."""

    def budget(self, own: int) -> int:
        """Return its env steps of a budget."""
        return own if self.most is None else min(own, self.most)


def rollout_steps(scale: Scale, num_envs: int, most: int, chunk: int = CHUNK) -> int:
    """Decisions of an environment in rollouts of `most` env steps, or in shorter ones, at least 25 of a budget."""
    return max(min(most, scale.budget // 25) // (num_envs * chunk), 2)


def rounds(scale: Scale, num_envs: int, most: int, chunk: int = CHUNK) -> Words:
    """The environments and the length of rollouts."""
    return ["--num_envs", num_envs, "--rollout_steps", rollout_steps(scale, num_envs, most, chunk)]


def updates_per_step(scale: Scale) -> float:
    """Updates per env step of the methods with a replay buffer.

    A transition is CHUNK env steps: 0.1 replays it 400 times in batches of 1,024, 0.2 replays it 100 times in batches
    of 128. In the CPU simulator an update takes longer than its five env steps.
    """
    return 0.1 if scale.on_warp else 0.2


def warmup(scale: Scale) -> int:
    """Updates of the critics alone: 5 % of all."""
    return round(0.05 * updates_per_step(scale) * scale.budget)


def replay(scale: Scale) -> Words:
    """What the methods with a replay buffer share."""
    batch = 256 if scale.has_images else 1024 if scale.on_warp else 128
    words: Words = ["--num_envs", scale.envs(8, 256), "--learning_starts", min(2_000, scale.budget // 10)]
    words += ["--updates_per_step", updates_per_step(scale), "--batch_size", batch]
    return [*words, "--gamma", 0.99, "--learning_rate", 3e-4]


# Rewards of an episode sum to about 1, and a chunk has 16 numbers: the entropy of a whole chunk times 1e-3 is about the
# reward of a step. A temperature of 0.01 would make it the larger part of Q.
ENTROPY: Words = ["--alpha_start", 1e-3]


def ppo(scale: Scale) -> Words:
    """PPO on the log-prob of the denoising chain."""
    # On Warp: 256 environments and 4 decisions, as many rollouts of a budget as with 16 environments.
    # Adaptive: with a constant 3e-5, which the KL divergence of this chain allows at first, 80 % of the ratios were
    # clipped later; with the schedule and a divergence of 0.02 20 to 30 %. With 0.02 it was at 47 % after 164,000 env
    # steps, and with 0.1 at 57 %.
    words = [*rounds(scale, scale.envs(16, 256), 4096), "--batch_size", 256, "--n_epochs", 5, "--learning_rate", 3e-5]
    words += ["--learning_rate_schedule", "adaptive", "--desired_kl", 0.1]
    return [*words, "--gamma", 0.99, "--gae_lambda", 0.95, "--entropy_coef", 0, "--value_warmup", 2]


def grpo(scale: Scale) -> Words:
    """GRPO with the return-to-go minus the group's mean."""
    num_envs = scale.envs(32 if scale.budget >= 100_000 else 16, 128)
    words: Words = ["--num_envs", num_envs, "--group_size", min(4, num_envs), "--max_resamples", 0]
    words += ["--advantage", "process", "--no-normalize-std", "--gamma", 0.98, "--kl_coef", 0, "--target_kl", 0.1]
    return [*words, "--clip_range_high", 0.28, "--batch_size", 256, "--n_epochs", 4, "--learning_rate", 3e-5]


def rlpd(scale: Scale) -> Words:
    """SAC with half of every batch from the demonstrations, and an anchor on the SFT policy that decays."""
    # With an anchor of 0.1 that is halved every tenth of the updates, down to 0.001, and a learning rate of 1e-4,
    # success fell from 57 to 22 % in 15,000 env steps: a few thousand transitions do not make critics to follow.
    words = [*replay(scale), "--critic_layer_norm", "--num_critics", 5 if scale.on_warp else 3, "--target_critics", 2]
    words += ["--critic_warmup", warmup(scale), "--policy_learning_rate", 3e-5, *ENTROPY]
    half_life = max(round(updates_per_step(scale) * scale.budget), 1)
    return [*words, "--anchor_coef", 0.3, "--anchor_half_life", half_life, "--anchor_floor", 0.05]


def residual(scale: Scale) -> Words:
    """SAC on a bounded correction of the frozen policy."""
    # With ± 0.3 and a learning rate of 3e-4, success fell from 55 to 30 % in 12,000 env steps.
    words = [*replay(scale), "--critic_layer_norm", "--critic_warmup", warmup(scale), "--policy_learning_rate", 1e-4]
    return [*words, "--residual_scale", 0.1, "--residual_horizon", scale.budget // 5, *ENTROPY]


def dsrl(scale: Scale) -> Words:
    """SAC on the noise of the frozen policy."""
    # With the entropy bonus of SAC, a target of −16 and a temperature of 1e-3, the noise became the same in every
    # episode within 200 updates, before the critics were accurate: success fell by 13 points in two of three seeds.
    words = [*replay(scale), "--critic_layer_norm", "--critic_warmup", warmup(scale), "--noise_bound", 1.5]
    return [*words, "--anchor_coef", 0.02, "--alpha", 0]


def qc_fql(scale: Scale) -> Words:
    """A one-step policy near the flow, which maximises critics of chunks; its network is distilled beforehand."""
    return [*replay(scale), "--normalize_q", "--alpha", DISTILLATION]


# A distance of 0.1 in every number of a chunk costs a tenth of the mean |Q|.
DISTILLATION = 10


def qc(scale: Scale) -> Words:
    """The best of several samples of the flow, by critics of chunks."""
    candidates = 16 if scale.on_warp else 8
    return [*replay(scale), "--policy_extraction", "best_of_n", "--num_candidates", candidates]


def recap(scale: Scale) -> Words:
    """Rounds of episodes, labelled by their advantage, and conditioned imitation."""
    most, updates = (16_384, 400) if scale.on_warp else (4096, 200)
    words = [*rounds(scale, scale.envs(16, 256), most, chunk=1), "--updates_per_round", updates]
    words += ["--value_warmup", 200, "--no-record"]
    return [*words, "--batch_size", 256, "--learning_rate", 3e-4, "--gamma", 0.99]


def dagger(scale: Scale) -> Words:
    """Rounds in which the policy acts up to a random decision, and the expert from there to the end of the episode."""
    # Labels of the states that a chunk of the policy leads to are no plan of the expert: success stayed at 40 %.
    # With 200 updates in rounds of 1,450 env steps it reached 76 %, with 1,000 updates 87 %; with images they take
    # longer.
    num_envs, most = 16, 4096
    updates = 200 if scale.has_images else round(0.7 * num_envs * rollout_steps(scale, num_envs, most, chunk=1))
    words = [*rounds(scale, num_envs, most, chunk=1), "--updates_per_round", updates]
    words += ["--expert_finishes", "--initial_beta", 0.15, "--beta", 1]
    return [*words, "--batch_size", 256, "--learning_rate", 3e-4, "--no-record"]


def iql(scale: Scale) -> Words:
    """Offline: the demonstrations and as many env steps of the SFT policy as the budget allows."""
    words: Words = ["--expectile", 0.8, "--temperature", 3, "--max_weight", 20, "--advantage", "return"]
    words += ["--reward_scaling", "none", "--gamma", 0.99, "--batch_size", 256, "--learning_rate", 3e-4]
    return [*words, "--policy_learning_rate", 1e-4]


DENSE = "dense reward"
DATA = "demonstrations in every batch"
REPLAYED = f"{DENSE}, {DATA}"
LABELS = f"scripted expert finishes episodes, {DATA}"
RECORDED = f"{DENSE}, demonstrations and recorded episodes of the SFT policy"
METHODS = {
    "ppo": Method("PPO", FLOW, DENSE, ppo, reads_scene=True),
    "grpo": Method("GRPO", FLOW, DENSE, grpo),
    "rlpd": Method("RLPD (SAC)", GAUSSIAN, REPLAYED, rlpd, needs_data=True, command="sac", reads_scene=True),
    "residual": Method("residual SAC", FLOW, DENSE, residual, command="sac", reads_scene=True),
    "dsrl": Method("DSRL", FLOW, DENSE, dsrl, reads_scene=True),
    "qc-fql": Method(
        "QC-FQL",
        FLOW,
        REPLAYED,
        qc_fql,
        needs_data=True,
        command="fql-online",
        before="fql",
        reads_scene=True,
    ),
    "qc": Method("QC (best of n)", FLOW, REPLAYED, qc, needs_data=True, command="fql-online"),
    "recap": Method("RECAP", FLOW, REPLAYED, recap, needs_data=True),
    "iql": Method("IQL (offline)", FLOW, RECORDED, iql, needs_data=True, most=200_000, reads_scene=True),
    "dagger": Method("DAgger", FLOW, LABELS, dagger, needs_data=True, on_warp=False, most=100_000),
}


class World(NamedTuple):
    """What a policy reads: the observation of the environment, and the flags of each kind of training."""

    words: str
    observation: str
    acting: str
    """The observation in evaluations."""
    flow: Words
    gaussian: Words
    online: Words
    """Flags of every method in the CPU simulator."""
    methods: dict[str, Words]
    """Further flags of single methods."""
    scene: str = ""
    """The stream with the state of the scene, which critics may read."""


VLA: Words = ["--model", "vla-tiny", "--weight_decay", 1e-2, "--learning_rate", 1e-3, "--batch_size", 64]
MLP: Words = ["--chunk_length", CHUNK, "--learning_rate", 1e-3, "--batch_size", 256]
VISION: Words = ["--vector", "process"]
# The labels of every new scene train the vision encoder, and the reward the layers after it. DAgger, RECAP and QC train
# on labels without a flag; SAC and the methods that freeze the policy do not use them after SFT.
LABELLED: Words = ["--model", "vla-tiny", "--vla-model-config", "freeze_vision=true"]
LABELLED += ["--auxiliary_learning_rate", 1e-3, "--auxiliary_epochs", 2]
OFFLINE_LABELLED: Words = ["--auxiliary_learning_rate", 1e-3, "--position_source", "start"]
WORLDS = {
    "images": World(
        "images and text",
        "images",
        "images",
        [*VLA, "--vla-model-config", "head=flow"],
        [*VLA, "--vla-model-config", "head=gaussian"],
        VISION,
        {},
    ),
    "scene": World(
        "images and text; critics that can read it have the state of the scene in training",
        "privileged",
        "images",
        [*VLA, "--vla-model-config", "head=flow"],
        [*VLA, "--vla-model-config", "head=gaussian"],
        VISION,
        {},
        scene="scene_state",
    ),
    "labels": World(
        "images and text; position labels in training",
        "labelled",
        "images",
        [*VLA, "--vla-model-config", "head=flow", "bottleneck=8"],
        [*VLA, "--vla-model-config", "head=gaussian", "bottleneck=8"],
        VISION,
        {"ppo": LABELLED, "grpo": LABELLED, "iql": OFFLINE_LABELLED},
    ),
    "state": World(
        "the state vector of the simulator (no images, no text)",
        "state",
        "state",
        [*MLP, "--distribution", "flow"],
        [*MLP, "--distribution", "gaussian"],
        [],
        {},
    ),
}
