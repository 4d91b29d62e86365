"""The F1 model on prepared tensors: images in -1 … 1, word tokens, frame embeddings, 32-dim states and actions.

`F1Policy` prepares the batches and computes the losses.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deft.models.f1.config import F1Config
from deft.models.f1.experts import Block, Cache, MixtureOfTransformers
from deft.models.f1.heads import ActionConditioning, ActionHead, WorldModelHead, choose
from deft.models.f1.memory import Memory
from deft.models.f1.motion import MotionPrior
from deft.models.f1.vision import VisionTower
from deft.models.f1.vq import MultiScaleTokenizer

ADDED_PARTS = {"memory": Memory, "conditioning": ActionConditioning, "motion": MotionPrior}
"""Parts that the published model lacks; they are initialised without effect."""


@dataclass
class Prefix:
    """The input of the understanding expert."""

    tokens: Tensor  # [B, P, C]
    block: Block


@dataclass
class Condition:
    """The input of the generation expert."""

    tokens: Tensor  # [B, L, C]
    everywhere: Tensor | None = None  # [B, 1, C]: added to every predicted token
    expected: Tensor | None = None  # [B, D, grid, grid]: features predicted by the motion prior


@dataclass
class Context:
    """The attention cache of the other experts, which the action expert attends to."""

    cache: Cache
    block: Block


@dataclass
class PredictedFrame(Context):
    """A predicted frame, and the attention cache that includes it."""

    logits: Tensor  # [B, L, K]
    codes: Tensor  # int64 [B, L]


class F1Model(nn.Module):
    """The understanding, generation and action experts with their input and output layers."""

    def __init__(self, config: F1Config, tokenizer: MultiScaleTokenizer) -> None:
        super().__init__()
        self.config = config
        self._tokenizer = [tokenizer]  # the policy owns it; in a list, so that it is not registered as a submodule here
        width = config.understanding.hidden_size
        self.vision = VisionTower(config.vision, width)
        self.words = nn.Embedding(config.vocab_size, width)
        self.experts = MixtureOfTransformers(config)
        self.world_model = WorldModelHead(config)
        self.flow = ActionHead(config)
        self.memory = Memory(config) if config.memory_enabled else None
        self.conditioning = ActionConditioning(config) if config.condition_on_actions else None
        self.motion = MotionPrior(config) if config.motion_prior else None
        self.language_heads = nn.ModuleDict()
        if config.language_heads:
            for name in ("understanding", "generation", "action"):
                size = getattr(config, name).hidden_size
                self.language_heads[name] = nn.Linear(size, config.vocab_size, bias=False).requires_grad_(False)

    @property
    def tokenizer(self) -> MultiScaleTokenizer:
        """The image tokenizer, whose codes are predicted."""
        return self._tokenizer[0]

    def compile_layers(self, **settings: Any) -> None:
        """Compile the layers of vision tower and experts, with the settings of `torch.compile`.

        Layers of the same shape share the code, so compiling takes a minute instead of an hour. Outputs change only by
        rounding. Copies of the model are not compiled.
        """
        self.experts.compile_layers(**settings)
        for layer in self.vision.layers:
            layer.compile(**settings)

    def understand(self, images: list[tuple[Tensor, Tensor | None]], words: Tensor, word_mask: Tensor | None) -> Prefix:
        """Embed images [B, 3, h, w] with masks bool [B], and words int64 [B, W] with their mask; None masks nothing."""
        parts, blocks = [], []
        for image, mask in images:
            parts.append(self.vision(image))
            size = parts[-1].shape[1]
            blocks.append(Block(size, is_real=None if mask is None else mask[:, None].expand(-1, size)))
        parts.append(self.words(words) * math.sqrt(self.words.embedding_dim))
        blocks.append(Block(words.shape[1], is_real=word_mask))
        return Prefix(torch.cat(parts, 1), Block.join(blocks))

    def condition(
        self,
        history: Tensor,
        memory: Tensor | None = None,
        robot: tuple[Tensor, Tensor, Tensor] | None = None,
        expected: Tensor | None = None,
    ) -> Condition:
        """Build the condition from history embeddings [B, T, L − 1, D], memory [B, hidden] and robot features."""
        head, into_codes = self.world_model, self.config.memory_project_to_vae_dim
        compressed = head.compress(history)
        gated = self.memory.to_generation(memory) if self.memory is not None and memory is not None else None
        if gated is not None and into_codes:
            compressed = compressed + gated
        tokens = head.condition(compressed)
        if gated is not None and not into_codes:
            tokens = tokens + gated
        everywhere = None
        if self.conditioning is not None and robot is not None:
            everywhere = self.conditioning(*robot)
            tokens = tokens + everywhere
        # The last condition token is also the first predicted token.
        first = tokens[:, -1:] + head.position_embeddings(0, 1)
        if self.motion is not None and expected is not None:
            first = first + self.motion.embedding(self.tokenizer.quantize.at_scale(expected, 0))
        return Condition(torch.cat([tokens[:, :-1], first], 1), everywhere, expected)

    def teacher_forced(
        self, prefix: Prefix, condition: Condition, codes: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """Return the logits [B, L, K] of every token, given the true codes [B, L] of the coarser scales.

        `hidden`, bool [B, L − 1]: tokens after the first whose input is replaced by the mask embedding.
        """
        embeddings, residuals = self.tokenizer.embed(codes), None
        if hidden is not None:
            embeddings = torch.where(hidden[..., None], self.world_model.mask_embedding, embeddings)
        if condition.expected is not None:
            residuals = self.tokenizer.residuals(condition.expected, codes)
        tokens = self._frame_tokens(embeddings, 1, condition, None if residuals is None else residuals[:, 1:])
        block = Block.join([prefix.block, self._frame_block(self.config.num_tokens)])
        streams = {"understanding": prefix.tokens, "generation": torch.cat([condition.tokens, tokens], 1)}
        outputs, _ = self.experts(streams, block, {"generation": self.config.num_tokens})
        return self._logits(outputs["generation"], 0, residuals)

    def predict_frame(self, prefix: Prefix, condition: Condition, top_k: int = 1, top_p: float = 1.0) -> PredictedFrame:
        """Predict the next frame scale by scale, each from the predicted coarser codes. `top_k` 1 is greedy."""
        quantize, expected = self.tokenizer.quantize, condition.expected
        block = Block.join([prefix.block, self._frame_block(1)])
        streams = {"understanding": prefix.tokens, "generation": condition.tokens}
        outputs, cache = self.experts(streams, block, {"generation": 1}, keep=True)
        all_logits, all_codes = [], []
        total: Tensor | None = None
        start = 0
        for scale, size in enumerate(self.tokenizer.sizes):
            rest = None
            if expected is not None:
                rest = quantize.at_scale(expected if total is None else expected - total, scale)
            if total is not None:
                tokens = self._frame_tokens(quantize.at_scale(total, scale), start, condition, rest)
                block = Block.join([block, Block(size, (0,))])
                outputs, cache = self.experts({"generation": tokens}, block, {"generation": size}, cache, keep=True)
            all_logits.append(self._logits(outputs["generation"], start, rest))
            all_codes.append(choose(all_logits[-1], top_k, top_p))
            added = quantize.contribution(all_codes[-1], scale)
            total = added if total is None else total + added
            start += size
        return PredictedFrame(cache, block, torch.cat(all_logits, 1), torch.cat(all_codes, 1))

    def context(self, prefix: Prefix) -> Context:
        """Return the context of acting without a predicted frame: the cache of the understanding expert alone."""
        _, cache = self.experts({"understanding": prefix.tokens}, prefix.block, {"understanding": 1}, keep=True)
        return Context(cache, prefix.block)

    def velocity_and_features(
        self, context: Context, state: Tensor, noisy: Tensor, time: Tensor, memory: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ε − a [B, K, A] of noisy actions, and the action expert's output at the state token, [B, C].

        `memory`: [B, hidden], before the step.
        """
        tokens = self.flow.embed(state, noisy, time)
        if self.memory is not None and memory is not None:
            tokens = tokens + self.memory.to_action(memory)
        chunk = noisy.shape[1]
        block = Block.join([context.block, Block(1 + chunk, (0, 1))])  # the state, then the actions
        outputs, _ = self.experts({"action": tokens}, block, {"action": 1 + chunk}, context.cache)
        output = outputs["action"]
        return self.flow.velocity(output[:, 1:]), output[:, 0].float()

    def _frame_tokens(self, summed: Tensor, start: int, condition: Condition, residuals: Tensor | None) -> Tensor:
        """Return the inputs for predicting the tokens from `start` on: the sum of the coarser codes, and conditions."""
        head = self.world_model
        tokens = head.embedding(summed) + head.position_embeddings(start, start + summed.shape[1])
        if condition.everywhere is not None:
            tokens = tokens + condition.everywhere
        if self.motion is not None and residuals is not None:
            tokens = tokens + self.motion.embedding(residuals)
        return tokens

    def _logits(self, output: Tensor, start: int, residuals: Tensor | None) -> Tensor:
        """Return the logits of the tokens from `start` on: the expert's, plus those of the motion prior."""
        logits = self.world_model.logits(output)
        if self.motion is not None and residuals is not None:
            level = self.world_model.level[0, start : start + output.shape[1]]
            logits = logits + self.motion.logits(residuals, level, output, self.tokenizer.quantize)
        return logits

    def _frame_block(self, num_tokens: int) -> Block:
        """The block of the condition and the predicted tokens; the condition's last token is the first of these."""
        before = self.config.num_tokens - 1
        starts = itertools.accumulate(self.tokenizer.sizes, initial=0)
        return Block(before + num_tokens, tuple(before + start for start in starts if start < num_tokens))
