"""`pi0`: π0 as transformers ships it (`PI0ForConditionalGeneration`), from a local folder, behind Deft's interface.

A flow: it is fine-tuned by flow matching, acts by denoising, and PPO and GRPO score the denoising chain (`flow_chain`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from deft import schema
from deft.errors import InputError
from deft.models.flow_chain import (
    Velocity,
    chain_entropy,
    chain_log_prob,
    draw_chain,
    flow_matching_error,
    hold_last,
    integrate,
)
from deft.models.vla.interface import Sample
from deft.models.vla.pretrained import (
    ImagePreprocessor,
    InstructionTokenizer,
    PretrainedVLA,
    ValueHead,
    add_lora,
    build_backbone,
    checkpoint_layers,
    read_architecture,
    read_statistics,
    transformers_module,
)
from deft.models.vla.spec import PretrainedSpec, ProprioSpec
from deft.models.vla.streams import Statistics

PROMPT = "{instruction}\n"
Prefix = tuple[list[tuple[Tensor, Tensor]], Tensor, Tensor]  # keys and values by layer, mask [B, T], features [B, F]


@dataclass(kw_only=True)
class Pi0Spec(ProprioSpec, PretrainedSpec):
    """The keywords of `Pi0VLA`."""

    chunk_length: int = 10
    proprio_dim: int = 8
    prompt_length: int = 48
    num_steps: int | None = None
    flow_noise: float = 0.1
    learn_noise: bool = True


class Pi0VLA(PretrainedVLA):
    """Map images, instruction and proprioception to the first K actions of the model's chunk, and a value.

    Images and instruction run through the vision-language model once; every denoising step uses its keys and values.
    `flow_noise` is σ of each step when actions are sampled (deterministic actions have none); with `learn_noise` it is
    trained. The chain covers the whole chunk of the model and all of its 32 dims; only the executed dims get this noise
    and have a log-prob.
    """

    keeps_sample = True
    starts_from_noise = True

    spec_class = Pi0Spec

    def __init__(self, spec: Pi0Spec | None = None, **given: Any) -> None:
        spec = Pi0Spec(**given) if spec is None else spec
        super().__init__(spec)
        config = read_architecture(spec.folder, spec.architecture, "pi0")
        for name, size, most in (
            ("action_dim", spec.action_dim, config.max_action_dim),
            ("proprio_dim", spec.proprio_dim, config.max_state_dim),
            ("chunk_length", spec.chunk_length, config.chunk_size),
        ):
            if size > most:
                raise InputError(f"{name} {size} is more than this π0 has: {most}")
        if not spec.flow_noise > 0:
            raise InputError(f"flow_noise {spec.flow_noise} must be above 0: without noise a chain has no log-prob")
        vlm = config.vlm_config
        self.preprocess = ImagePreprocessor(spec.image_keys, vlm.vision_config.image_size, spec.folder)
        self.tokenize = InstructionTokenizer(
            spec.folder, spec.tokenizer, PROMPT, spec.prompt_length, vlm.text_config.vocab_size
        )
        known = read_statistics(spec.folder, spec.statistics)
        self.state_statistics = Statistics(spec.proprio_dim, known.get("state"), "state")
        self.action_statistics = Statistics(spec.action_dim, known.get("action"), "action")
        transformers = transformers_module()
        self.backbone = build_backbone(
            transformers.PI0ForConditionalGeneration, config, spec.folder, spec.load_weights, spec.dtype
        )
        if spec.freeze_vision:
            self.backbone.model.vlm.vision_tower.requires_grad_(False)
        add_lora(self.backbone, spec.lora)
        self.gradient_checkpointing = spec.gradient_checkpointing
        if spec.gradient_checkpointing:
            checkpoint_layers(self.backbone.model.vlm.vision_tower)
        self.config: Any = config
        self.num_steps = spec.num_steps or config.num_inference_steps
        self.log_noise = nn.Parameter(
            torch.full((self.num_steps,), math.log(spec.flow_noise)), requires_grad=spec.learn_noise
        )
        self.noise_shape = (config.chunk_size, config.max_action_dim)
        self.value_head = ValueHead(vlm.text_config.hidden_size + spec.proprio_dim, spec.value_gradient)

    @property
    def deviation(self) -> Tensor:
        """σ of each step of the denoising, [S]."""
        return self.log_noise.exp()

    def gathered_layers(self) -> list[nn.Module]:
        """All but those of the language model, whose keys and values have gradients beside the layers' outputs."""
        language = {id(module) for module in self.backbone.model.vlm.language_model.modules()}
        return [layer for layer in super().gathered_layers() if id(layer) not in language]

    # The interface of a VLA model ------------------------------------------------------------------------------------

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        return self.value_head(self._read(observations)[0][2])

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Actions, log-prob of the chain [B], value [B, 1], and the chain. Deterministic: only the first noise."""
        prefix, state = self._read(observations)
        velocity = self._velocity(prefix, state)
        noise = torch.randn((len(state), *(self.noise_shape or ())), device=state.device)
        executed = self._executed(action_mask, state.device)
        chain, log_probs = draw_chain(velocity, noise, self.deviation, deterministic, executed)
        value = self.value_head(prefix[2])
        return self._actions(chain[:, -1], action_mask), log_probs.sum(1), value, {schema.CHAIN: chain}

    def denoise(
        self,
        observations: TensorDictBase,
        noise: Tensor,
        action_mask: Tensor | None = None,
        features: Tensor | None = None,
    ) -> Tensor:
        """The actions that noise [B, chunk_size, max_action_dim] leads to."""
        prefix, state = self._read(observations)
        return self._actions(integrate(self._velocity(prefix, state), noise, self.num_steps), action_mask)

    def evaluate_actions(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A flow's action alone has no log-prob: `evaluate` scores the chain that it came from."""
        raise InputError(
            "π0 has no log-prob of an action alone, only of its denoising chain, which ppo and grpo store: train on a "
            "dataset with sft (flow matching)"
        )

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each step of the denoising, [B, S]."""
        if sample is None:
            raise InputError("π0 scores the denoising chain of an action, and no chain is stored with this action")
        prefix, state = self._read(observations)
        chain, mask = sample[schema.CHAIN], self._executed(action_mask, state.device)
        log_probs = chain_log_prob(self._velocity(prefix, state), chain, self.deviation, mask)
        shape = (len(chain), *chain.shape[2:])
        return log_probs, chain_entropy(self.deviation, shape, mask), self.value_head(prefix[2])

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """The flow-matching error of demonstrated chunks [B, K, A], [B], over the model's chunk of at least K steps.

        Steps beyond K, and those that `step_mask` [B, K] leaves out, are not counted; nor are dims beyond A.
        """
        prefix, state = self._read(observations)
        chunk = self.chunk(actions)
        normalised = self.action_statistics.normalize(chunk if step_mask is None else hold_last(chunk, step_mask))
        steps, dims = self.config.chunk_size, self.config.max_action_dim
        padded = functional.pad(normalised, (0, dims - self.action_dim, 0, steps - self.chunk_length))
        uniform = torch.rand(len(padded), device=padded.device)
        # t = scale · Beta(α, 1) + offset; Beta(α, 1) has the distribution function t^α
        time = self.config.time_sampling_scale * uniform ** (1 / self.config.time_sampling_beta_alpha)
        mask = self._executed(None, padded.device)
        if step_mask is not None:
            mask = mask & functional.pad(step_mask, (0, steps - self.chunk_length)).unsqueeze(-1)
        velocity = self._velocity(prefix, state)
        return flow_matching_error(
            velocity, padded, torch.randn_like(padded), time + self.config.time_sampling_offset, mask
        )

    # Computation -----------------------------------------------------------------------------------------------------

    def inputs(self, observations: TensorDictBase) -> dict[str, Tensor]:
        """The inputs of transformers' π0: images, tokens, masks and the padded state."""
        pixels = self.preprocess(observations)
        batch, cameras, device = len(pixels), pixels.shape[1], pixels.device
        ids, is_word = self.tokenize(self.instructions(observations), batch, device)
        vision = self.config.vlm_config.vision_config
        cells = (vision.image_size // vision.patch_size) ** 2
        images = torch.full((batch, cameras * cells), self.config.vlm_config.image_token_id, device=device)
        state = self.state_statistics.normalize(self.proprio_vectors(observations, batch, device))
        dtype = self.backbone.dtype
        return {
            "input_ids": torch.cat([images, ids], 1),
            "attention_mask": torch.cat([torch.ones_like(images), is_word.long()], 1),
            "pixel_values": pixels.to(dtype),
            "pixel_attention_mask": torch.ones(batch, cameras, dtype=torch.bool, device=device),
            "state": functional.pad(state, (0, self.config.max_state_dim - self.proprio_dim)).to(dtype),
        }

    def _read(self, observations: TensorDictBase) -> tuple[Prefix, Tensor]:
        """Run the vision-language model: its keys and values, the features of the value, and the state."""
        inputs = self.inputs(observations)
        model, mask = self.backbone.model, inputs["attention_mask"]
        embedded = model.embed_prefix(inputs["input_ids"], inputs["pixel_values"], inputs["pixel_attention_mask"])
        output = model.vlm(
            inputs_embeds=embedded,
            attention_mask=mask,
            position_ids=mask.cumsum(-1) - 1,
            token_type_ids=torch.zeros_like(embedded)[:, :, 0],
            use_cache=True,
        )
        cached = [(layer.keys, layer.values) for layer in output.past_key_values.layers]
        hidden = output.last_hidden_state.float()
        pooled = (hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)
        state = inputs["state"]
        features = torch.cat([pooled, state[:, : self.proprio_dim].float()], 1)
        return (cached, mask, features), state

    def _velocity(self, prefix: Prefix, state: Tensor) -> Velocity:
        """The velocity field given the prefix: (x, t) → ε − a."""
        cached, mask, _ = prefix
        cache_class = transformers_module().DynamicCache

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            cache = cache_class()  # a new one: the model appends to it
            for index, (keys, values) in enumerate(cached):
                cache.update(keys, values, index)
            output = self.backbone(
                state=state, noise=x.to(state.dtype), timestep=time, attention_mask=mask, past_key_values=cache
            )
            return output.logits.float()

        if self.gradient_checkpointing and torch.is_grad_enabled():  # recompute each denoising step in backward
            return functools.partial(checkpoint, velocity, use_reentrant=False)
        return velocity

    def _executed(self, action_mask: Tensor | None, device: torch.device) -> Tensor:
        """Mask of the executed steps and dims of the chain, bool, broadcast to [B, chunk, dims]."""
        mask = torch.zeros(1, self.config.chunk_size, self.config.max_action_dim, dtype=torch.bool, device=device)
        mask[:, : self.chunk_length, : self.action_dim] = True
        if action_mask is None:
            return mask
        padding = self.config.max_action_dim - self.action_dim
        return mask & functional.pad(action_mask, (0, padding)).unsqueeze(1)

    def _actions(self, end: Tensor, action_mask: Tensor | None) -> Tensor:
        """The executed part of a chain's end, in the environment's units."""
        executed = end[:, : self.chunk_length, : self.action_dim]
        return self.shaped(self.action_statistics.denormalize(executed), action_mask)
