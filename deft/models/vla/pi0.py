"""`pi0`: π0 as transformers ships it (`PI0ForConditionalGeneration`), from a local folder, behind Deft's interface.

A flow: it is fine-tuned by flow matching, acts by denoising, and PPO and GRPO score the denoising chain (`flow_chain`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft.models.flow_chain import Velocity
from deft.models.vla.denoising import check_at_most
from deft.models.vla.flow import FlowShape, FlowSpec, FlowVLA
from deft.models.vla.pretrained import (
    ImagePreprocessor,
    InstructionTokenizer,
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
class Pi0Spec(FlowSpec, ProprioSpec, PretrainedSpec):
    """The keywords of `Pi0VLA`."""

    chunk_length: int = 10
    proprio_dim: int = 8
    prompt_length: int = 48


class Pi0VLA(FlowVLA):
    """Map images, instruction and proprioception to the first K actions of the model's chunk, and a value.

    Images and instruction run through the vision-language model once; every denoising step uses its keys and values.
    """

    spec_class = Pi0Spec

    def __init__(self, spec: Pi0Spec | None = None, **given: Any) -> None:
        spec = Pi0Spec(**given) if spec is None else spec
        super().__init__(spec)
        config = read_architecture(spec.folder, spec.architecture, "pi0")
        check_at_most("π0", proprio_dim=(spec.proprio_dim, config.max_state_dim))
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
        times = (config.time_sampling_beta_alpha, config.time_sampling_scale, config.time_sampling_offset)
        sizes = (config.chunk_size, config.max_action_dim, config.num_inference_steps)
        self.add_flow(spec, FlowShape("π0", *sizes, *times))
        self.value_head = ValueHead(vlm.text_config.hidden_size + spec.proprio_dim, spec.value_gradient)

    def gathered_layers(self) -> list[nn.Module]:
        """All but those of the language model, whose keys and values have gradients beside the layers' outputs."""
        language = {id(module) for module in self.backbone.model.vlm.language_model.modules()}
        return [layer for layer in super().gathered_layers() if id(layer) not in language]

    def field(self, observations: TensorDictBase) -> tuple[Velocity, Tensor]:
        """The velocity field given an observation, and the features of the value."""
        prefix, state = self._read(observations)
        return self._velocity(prefix, state), prefix[2]

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

        return velocity
