"""`vlm`: any PaliGemma-style vision-language model of transformers, from a local folder, with an action head.

The model reads images and instruction as in its pretraining, followed by a token for the proprioception, a query for
each action step and one for the value. `openvla` uses the same trunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.vla.interface import Sample, keywords_of
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
from deft.models.vla.spec import PromptedSpec, ProprioSpec
from deft.models.vla.streams import GaussianVLA, Statistics

PROMPT = "{instruction}\n"
PALIGEMMA = "paligemma"
NESTED = ("idefics3", "smolvlm")  # take images as [B, number, 3, h, w]


class Tokens(NamedTuple):
    """Embedded tokens [B, T, H], and which of them are real, bool [B, T]."""

    tokens: Tensor
    mask: Tensor


class Trunk(nn.Module):
    """A vision-language model that embeds images and instructions, and runs embedded tokens.

    `token_type_ids` select the tokens that attend to one another in both directions: for PaliGemma those of type 0,
    images and instruction; for other models that accept them (Gemma 3) those of type 1, images. Attention to all other
    tokens is causal.
    """

    def __init__(self, spec: PromptedSpec) -> None:
        super().__init__()
        config = read_architecture(spec.folder, spec.architecture)
        image_size, text = config.to_dict().get("vision_config", {}).get("image_size"), config.get_text_config()
        if not isinstance(image_size, int):
            raise InputError(
                f"{spec.folder or 'architecture'}: a model of type {config.model_type!r} has no vision_config with an "
                "image_size; use a PaliGemma-style vision-language model"
            )
        self.preprocess = ImagePreprocessor(spec.image_keys, image_size, spec.folder)
        self.tokenize = InstructionTokenizer(
            spec.folder, spec.tokenizer, spec.prompt, spec.prompt_length, text.vocab_size
        )
        auto = transformers_module().AutoModelForImageTextToText
        self.model: Any = build_backbone(auto, config, spec.folder, spec.load_weights, spec.dtype)
        if spec.freeze_vision:
            self._vision().requires_grad_(False)
        add_lora(self.model, spec.lora)
        if spec.gradient_checkpointing:
            checkpoint_layers(self.model)
        self.width: int = text.hidden_size
        self.vocabulary: int = text.vocab_size
        self.config: Any = config
        self._has_types = "token_type_ids" in keywords_of(self.model.model.forward)
        self._first_position = 1 if config.model_type == PALIGEMMA else 0

    def compile(self, **settings: Any) -> None:
        """Compile the forward passes without a cache, with the settings of `torch.compile`.

        Copies of the module (a reference policy, an acting one) are not compiled.
        """
        self.model.model.compile(**settings)
        self._vision().compile(**settings)

    def embed(self, observations: TensorDictBase, instructions: Tensor | None) -> Tokens:
        """Embed the images, then the instruction, as tokens."""
        pixels = self.preprocess(observations)
        batch, cameras = pixels.shape[:2]
        ids, is_word = self.tokenize(instructions, batch, pixels.device)
        features = self._image_features(pixels.flatten(0, 1).to(self.model.dtype))
        features = features.reshape(batch, cameras * features.shape[-2], self.width)
        words = self.model.get_input_embeddings()(ids)
        is_image = torch.ones(features.shape[:2], dtype=torch.bool, device=ids.device)
        return Tokens(torch.cat([features.to(words.dtype), words], 1), torch.cat([is_image, is_word], 1))

    def forward(self, prefix: Tokens, suffix: Tensor | None = None) -> Tensor:
        """Last hidden states [B, T, H], float32, of a prefix and a suffix [B, S, H] with causal attention."""
        tokens, mask = prefix
        if suffix is not None:
            tokens = torch.cat([tokens, suffix.to(tokens.dtype)], 1)
            mask = torch.cat([mask, mask.new_ones(suffix.shape[:2])], 1)
        return self._forward(tokens, mask, prefix.mask.shape[1], None).last_hidden_state.float()

    def begin(self, prefix: Tokens) -> tuple[Tensor, Any]:
        """Run a prefix; return its hidden states and the cache, which `more` extends."""
        cache = transformers_module().DynamicCache(config=self.config.get_text_config())
        output = self._forward(prefix.tokens, prefix.mask, prefix.mask.shape[1], cache)
        return output.last_hidden_state.float(), output.past_key_values

    def more(self, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Run further tokens [B, S, H] and return their hidden states; `mask` covers the cache and these."""
        return self._forward(tokens, mask, 0, cache).last_hidden_state.float()

    def logits(self, hidden: Tensor, first: int) -> Tensor:
        """Logits of the vocabulary from the id `first` on, float32."""
        weight = self.model.get_output_embeddings().weight[first:]
        return (hidden.to(weight.dtype) @ weight.T).float()

    def _forward(self, tokens: Tensor, mask: Tensor, prefix_length: int, cache: Any) -> Any:
        length = tokens.shape[1]
        positions = (mask.long().cumsum(1) - 1).clamp(min=0)[:, -length:] + self._first_position
        keywords: dict[str, Any] = {"past_key_values": cache, "use_cache": cache is not None}
        if self._has_types and prefix_length:
            types = torch.zeros(tokens.shape[:2], dtype=torch.long, device=tokens.device)
            if self.config.model_type == PALIGEMMA:
                types[:, prefix_length:] = 1
            else:
                types[:, : prefix_length - self.tokenize.length] = 1
            keywords["token_type_ids"] = types
        inner = self.model.model  # without its language head
        run = inner if cache is None else inner.forward  # a cache grows, and each length would be compiled anew
        return run(
            inputs_embeds=tokens, attention_mask=mask.long(), position_ids=positions, return_dict=True, **keywords
        )

    def _image_features(self, pixels: Tensor) -> Tensor:
        """[N, 3, size, size] → [N, cells, H]."""
        found = self.model.model.get_image_features(pixels.unsqueeze(1) if self.config.model_type in NESTED else pixels)
        features = found.pooler_output if isinstance(found, transformers_module().utils.ModelOutput) else found
        return torch.stack(list(features)) if isinstance(features, list | tuple) else features

    def _vision(self) -> nn.Module:
        parts = dict(self.model.model.named_children())
        found = parts.get("vision_tower", parts.get("vision_model"))
        if found is None:
            raise InputError(
                f"{type(self.model.model).__name__} has no vision_tower: freeze_vision and compile need one"
            )
        return found


@dataclass(kw_only=True)
class VisionLanguageSpec(ProprioSpec, PromptedSpec):
    """The keywords of `VisionLanguageVLA`."""

    prompt: str = PROMPT
    log_std_init: float = -1.0


class VisionLanguageVLA(PretrainedVLA, GaussianVLA):
    """A Gaussian over action chunks, and a value, on a vision-language model.

    A token for the proprioception, K action queries and a value query follow the prefix: new parameters, trained with
    the heads. `lora` trains low-rank adapters instead of the weights, which may then be bfloat16.
    """

    spec_class = VisionLanguageSpec

    def __init__(self, spec: VisionLanguageSpec | None = None, **given: Any) -> None:
        spec = VisionLanguageSpec(**given) if spec is None else spec
        super().__init__(spec)
        self.backbone = Trunk(spec)
        if spec.compile:
            self.backbone.compile()
        known = read_statistics(spec.folder, spec.statistics)
        self.state_statistics = Statistics(spec.proprio_dim, known.get("state"), "state")
        self.action_statistics = Statistics(spec.action_dim, known.get("action"), "action")
        width = self.backbone.width
        self.proprio_projection = nn.Linear(spec.proprio_dim, width)
        scale = self._token_scale()
        self.queries = nn.Parameter(scale * torch.randn(spec.chunk_length + 1, width))
        nn.init.normal_(self.proprio_projection.weight, std=scale / spec.proprio_dim**0.5)
        last = nn.Linear(width, spec.action_dim)
        nn.init.normal_(last.weight, std=0.002)
        nn.init.zeros_(last.bias)
        self.action_head = nn.Sequential(nn.LayerNorm(width), last)
        self.log_std = nn.Parameter(torch.full((spec.chunk_length, spec.action_dim), float(spec.log_std_init)))
        self.value_head = ValueHead(width, spec.value_gradient)

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """−log π of demonstrated chunks, divided by their number of dims: [B]."""
        mean, _ = self.mean_and_value(observations)
        log_probs = self.log_probs(mean, self.action_statistics.normalize(self.chunk(actions)))
        return -self.mean_over_steps(log_probs, step_mask)

    def mean_and_value(self, observations: TensorDictBase, sample: Sample = None) -> tuple[Tensor, Tensor]:
        """Normalised mean actions [B, K, A] and the value [B, 1], in one pass."""
        prefix = self.backbone.embed(observations, self.instructions(observations))
        batch, device = len(prefix.tokens), prefix.tokens.device
        state = self.state_statistics.normalize(self.proprio_vectors(observations, batch, device))
        added = [self.proprio_projection(state).unsqueeze(1), self.queries.expand(batch, -1, -1)]
        hidden = self.backbone(prefix, torch.cat(added, 1))[:, -(self.chunk_length + 1) :]
        return self.action_head(hidden[:, :-1]), self.value_head(hidden[:, -1])

    def _token_scale(self) -> float:
        """The standard deviation of the token embeddings of the model."""
        with torch.no_grad():
            ids = torch.arange(min(512, self.backbone.vocabulary))
            return float(self.backbone.model.get_input_embeddings()(ids).float().std())
