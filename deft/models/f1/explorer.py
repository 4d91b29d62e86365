"""The explorer: an F1 policy trained by PPO. It has its own vision encoder, word embeddings, action expert and memory;
its world model is copied from the teacher and frozen.

`deft.training.phases.explorer_rollouts` collects its rollouts and trains it; phases 2 and 3 create it with
`new_explorer` and load it with `load_explorer`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.f1_settings import ExplorerSettings
from deft.errors import InputError
from deft.models.f1.config import F1Config, read_f1_config
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.model import Context
from deft.models.f1.policy import F1Policy
from deft.models.flow_chain import Velocity, chain_entropy, chain_log_prob, draw_chain
from deft.models.normalization import RewardNormalizer
from deft.models.policy import SAMPLE, SAMPLED_NOISE, Policy
from deft.models.targets import cpu_weights
from deft.models.vla.loading import check_fit, read_weights

EXPLORER_FILE = "explorer.pt"  # beside model.pt in a checkpoint: what an F1 policy does not have
WORLD_MODEL = (
    "tokenizer.",
    "model.experts.generation.",
    "model.world_model.",
    "model.conditioning.",
    "model.motion.",
    "model.memory.to_generation.",
    "model.memory.to_picture.",
)
"""Prefixes of the tensors that predict frames. They are copied from the teacher and not trained here."""
EXPLORER_SEED = 104729  # added to the seed for a new explorer's weights
FIRST_VELOCITY = 0.3  # factor on the output layer of new weights


class ExplorerPolicy(Policy):
    """π(chain | wrist, state, memory) with a value on the action expert's own features.

    An action is the end of a denoising chain x_0 … x_S: x_0 is noise, and noise of a fixed standard deviation is
    added to every Euler step along the learned velocity. The whole chain is stored (`sample`), so that its
    log-prob can be recomputed exactly. Of the 32 dims only those in `action_mask` are used; the others are 0.
    The robot executes `action_scale` times the end of the chain (`executed`); the scale does not affect the
    chain or its log-prob.

    An observation is a TensorDict of `image0` (the wrist's img_t), `frame_tokens` (its codes, [B, L]), `state` and, for
    tasks with a goal, `instruction`. A head camera raises an error. `memory` is [B, layers, hidden], before the step.
    """

    recurrent = True

    action_mask: Tensor
    deviation: Tensor
    initial_deviation: Tensor
    noise_correlation: Tensor
    action_scale: Tensor

    def __init__(self, f1: F1Policy, action_mask: Tensor, settings: ExplorerSettings) -> None:
        super().__init__()
        if f1.model.memory is None:
            raise InputError("the explorer needs a model with a memory (memory_enabled: true)")
        self.f1 = f1
        width = f1.config.action.hidden_size
        self.value_head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 64), nn.SiLU(), nn.Linear(64, 1))
        nn.init.zeros_(self.value_head[-1].weight)  # type: ignore[arg-type]
        self.reward_normalizer = RewardNormalizer()  # values are of returns of unit scale
        self.register_buffer("action_mask", action_mask.bool().clone())
        self.register_buffer("deviation", torch.full((settings.denoising_steps,), float(settings.action_noise)))
        self.register_buffer("initial_deviation", torch.tensor(float(settings.initial_noise)))
        self.register_buffer("noise_correlation", torch.tensor(float(settings.noise_correlation)))
        self.register_buffer("action_scale", torch.tensor(float(settings.action_limit)))
        self.to(f1.device)
        for name, parameter in f1.named_parameters():
            parameter.requires_grad_(not name.startswith((*WORLD_MODEL, "model.language_heads.")))

    @property
    def config(self) -> F1Config:
        """The config of the F1 model."""
        return self.f1.config

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.f1.device

    def parameter_groups(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """Return the trainable parameters: those of the policy, and those of the value and the memory."""
        others: list[nn.Parameter] = []
        policy: list[nn.Parameter] = []
        for name, parameter in self.named_parameters():
            is_other = name.startswith(("value_head.", "f1.model.memory.")) and ".to_action." not in name
            if parameter.requires_grad:
                (others if is_other else policy).append(parameter)
        return policy, others

    def value_only_parameters(self) -> Iterator[nn.Parameter]:
        """Return the parameters of the value head."""
        return self.value_head.parameters()

    def initial_memory(self, num_envs: int) -> Tensor:
        """Zeros [num_envs, layers, hidden]."""
        return self.f1.initial_memory(num_envs).transpose(0, 1).contiguous()

    def draw_noise(self, num_rows: int, before: Tensor | None = None, begins: Tensor | None = None) -> Tensor:
        """x_0 [B, 1, 32] of the next step: ρ · last x_0 + √(1 − ρ²) · new noise; only new noise where it `begins`.

        Its density does not depend on the weights, so its correlation in time does not change the PPO ratio.
        """
        fresh = self.initial_deviation * torch.randn(num_rows, 1, len(self.action_mask), device=self.device)
        if before is None:
            return fresh
        kept = self.noise_correlation * before + (1 - self.noise_correlation.square()).sqrt() * fresh
        return kept if begins is None else torch.where(begins[:, None, None], fresh, kept)

    # -- the policy ----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Add the action [B, 32], its chain (`sample`), log-prob and value, and the memory after the step.

        The chain starts from the `noise` in `sample` (of `draw_noise`), else from new noise. If `deterministic`, the
        Euler steps add no noise.
        """
        seen, memory = self._observation(td), self._memory(td)
        noise = td.get((schema.SAMPLE, schema.NOISE), None)
        if noise is None:
            noise = self.draw_noise(len(memory))
        velocity, features = self._velocity(self.f1.encode_observation(seen), seen[schema.STATE], memory[:, -1])
        chain, log_probs = draw_chain(velocity, self._real(noise), self.deviation, deterministic, self.action_mask)
        td.set(schema.ACTION, chain[:, -1, 0])
        td.set(schema.SAMPLE, TensorDict({schema.CHAIN: chain}, batch_size=td.batch_size))
        td.set(schema.LOG_PROB, log_probs.sum(1))
        td.set(schema.VALUE, self.value_head(features[0]).squeeze(-1))
        _, after = self._step_memory(
            self.f1.frame_features(seen[schema.FRAME_TOKENS])[None],
            seen[schema.STATE][None],
            td[schema.ACTION][None],
            memory.transpose(0, 1),
        )
        td.set(schema.NEXT_MEMORY, after.transpose(0, 1).contiguous())
        return td

    def action_selection(self, deterministic: bool) -> str:
        """Describe the sampling: a flow always starts from random noise."""
        return SAMPLED_NOISE if deterministic else SAMPLE

    def evaluate_actions(self, td: TensorDictBase) -> dict[str, Tensor]:
        """`log_prob`, `entropy` and `value` of stored chains [T, B]; the memory is unrolled over the T steps.

        Also return `remembered`, [T, B, hidden]: the memory's output after each step.
        """
        seen = self._observation(td)
        before, after = self._unroll(seen, td)
        flat = {name: value.flatten(0, 1) for name, value in seen.items()}
        chain = td[schema.SAMPLE][schema.CHAIN].flatten(0, 1)
        velocity, features = self._velocity(self.f1.encode_observation(flat), flat[schema.STATE], before.flatten(0, 1))
        log_prob = chain_log_prob(velocity, chain, self.deviation, self.action_mask).sum(1)
        entropy = chain_entropy(self.deviation[:, None, None], chain[:, 0].shape, self.action_mask)
        return {
            "log_prob": log_prob.view(td.batch_size),
            "entropy": entropy.view(td.batch_size),
            "value": self.value_head(features[0]).view(td.batch_size),
            "remembered": after,
        }

    @torch.no_grad()
    def get_value(self, td: TensorDictBase) -> Tensor:
        """V(observation) [B], from the memory before it."""
        seen, memory = self._observation(td), self._memory(td)
        velocity, features = self._velocity(self.f1.encode_observation(seen), seen[schema.STATE], memory[:, -1])
        noisy = torch.zeros(len(memory), 1, len(self.action_mask), device=self.device)
        velocity(noisy, torch.ones(len(memory), device=self.device))
        return self.value_head(features[0]).squeeze(-1)

    def executed(self, action: Tensor) -> Tensor:
        """Return the executed actions […, 32]: clipped, scaled, zeros in the padding. They are the memory's input."""
        return self._real(action.clamp(-1.0, 1.0)) * self.action_scale

    # -- its parts -----------------------------------------------------------------------------------------------------

    def _real(self, x: Tensor) -> Tensor:
        return x * self.action_mask

    def _observation(self, td: TensorDictBase) -> dict[str, Tensor]:
        """Return the observation's streams; raise an error if it includes a head camera."""
        seen = dict(td[schema.OBSERVATION].items())
        extra = {schema.HEAD_RGB, schema.IMAGE1} & seen.keys()
        if extra:
            raise InputError(
                f"the explorer reads only the wrist camera; remove from its observation: {', '.join(sorted(extra))}"
            )
        return {name: value.to(self.device) for name, value in seen.items()}

    def _memory(self, td: TensorDictBase) -> Tensor:
        memory = td.get(schema.MEMORY, None)
        if memory is None:
            raise InputError("memory cannot be None: it is zeros at an episode's first step (policy.initial_memory)")
        return memory.to(self.device)

    def _velocity(self, context: Context, state: Tensor, memory: Tensor) -> tuple[Velocity, list[Tensor]]:
        """Return the velocity in the real dims, and a list to which each call adds the value's input, [B, C]."""
        features: list[Tensor] = []

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            found, feature = self.f1.model.velocity_and_features(context, state, x, time, memory)
            features.append(feature)
            return self._real(found)

        return velocity, features

    def _step_memory(self, frame: Tensor, state: Tensor, action: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Run the memory for T steps: the output after each step, [T, B, hidden], and the final memory."""
        module = self.f1.model.memory
        assert module is not None
        return module(frame, state, self.executed(action), memory)

    def _unroll(self, seen: dict[str, Tensor], td: TensorDictBase) -> tuple[Tensor, Tensor]:
        """Return the memory before and after each of T steps, [T, B, hidden]; zeros at an episode's first step."""
        memory = self._memory(td)[0].transpose(0, 1).contiguous()
        frame, state = self.f1.frame_features(seen[schema.FRAME_TOKENS]), seen[schema.STATE]
        action = td[schema.ACTION].to(self.device)
        done = (td[schema.NEXT_TERMINATED] | td[schema.NEXT_TRUNCATED]).to(self.device)
        if not bool(done[:-1].any()):
            after, _ = self._step_memory(frame, state, action, memory)
            return torch.cat([memory[-1:], after[:-1]]), after
        befores, afters = [], []
        for t in range(len(state)):
            if t > 0:
                memory = memory * (~done[t - 1]).to(memory.dtype)[None, :, None]
            befores.append(memory[-1])
            remembered, memory = self._step_memory(frame[t : t + 1], state[t : t + 1], action[t : t + 1], memory)
            afters.append(remembered[0])
        return torch.stack(befores), torch.stack(afters)


# -- making, saving, loading -----------------------------------------------------------------------------------------


def new_explorer(teacher: F1Policy, action_mask: Any, settings: ExplorerSettings) -> ExplorerPolicy:
    """Create an explorer with new weights and a copy of the teacher's world model, in float32 for exact ratios."""
    config = read_f1_config(teacher.config)
    config.dtype, config.language_heads = "float32", False  # nothing reads the heads
    # With the teacher's seed its initial weights would equal the teacher's, and so would their memories.
    with torch.random.fork_rng([teacher.device] if teacher.device.type == "cuda" else []):
        torch.manual_seed((torch.initial_seed() + EXPLORER_SEED) % 2**63)
        with torch.device(teacher.device):
            f1 = F1Policy(config)
        explorer = ExplorerPolicy(f1, torch.as_tensor(action_mask), settings)
    copy_world_model(teacher, f1)
    with torch.no_grad():  # small velocities: the first actions follow the noise instead of one fixed direction
        for parameter in f1.model.flow.action_out_proj.parameters():
            parameter.mul_(FIRST_VELOCITY)
    return explorer


def copy_world_model(teacher: F1Policy, f1: F1Policy) -> None:
    """Copy the teacher's world model bit for bit; raise an error that names the keys that do not fit."""
    own, theirs = world_model_weights(f1), world_model_weights(teacher)
    check_fit(own, theirs, Path("the teacher"), "the explorer's world model")
    with torch.no_grad():
        for name, tensor in own.items():
            tensor.copy_(theirs[name])


def world_model_weights(f1: F1Policy) -> dict[str, Tensor]:
    """Return the tensors that predict frames."""
    return {name: tensor for name, tensor in f1.state_dict().items() if name.startswith(WORLD_MODEL)}


def explorer_extras(explorer: ExplorerPolicy) -> dict[str, Tensor]:
    """Return the tensors of an explorer that are not in its F1 policy: the content of `explorer.pt`."""
    return cpu_weights({name: value for name, value in explorer.state_dict().items() if name[:3] != "f1."})


def load_explorer(folder: Path, model_file: Path, device: str | torch.device = "cpu") -> ExplorerPolicy:
    """Load an explorer from `model.pt` and `explorer.pt`, with strict keys; `model_file` is its config."""
    path = folder / EXPLORER_FILE
    if not path.is_file():
        raise InputError(f"{folder} is not a checkpoint of an explorer: it has no {EXPLORER_FILE}")
    extras = read_weights(path)
    for name in ("action_mask", "deviation"):
        if name not in extras:
            raise InputError(f"{path} does not fit ExplorerPolicy: key {name} is missing")
    extras.setdefault("action_scale", torch.tensor(1.0))  # explorers of earlier versions have no scale
    f1 = load_f1_policy(model_file, device, checkpoint_path=folder).policy
    explorer = ExplorerPolicy(f1, extras["action_mask"], ExplorerSettings(denoising_steps=len(extras["deviation"])))
    check_fit(explorer_extras(explorer), extras, path, "ExplorerPolicy")
    explorer.load_state_dict(extras, strict=False)
    return explorer
