"""`openvla`: actions as tokens. The last ids of the vocabulary of a vision-language model are 256 bins of each dim.

The model generates K · A tokens one after another, as OpenVLA does; their log-probs are exact. `load_vla_model` builds
it around any vision-language model that `vlm` accepts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor

from deft import schema
from deft.errors import InputError
from deft.models.vla.interface import Sample
from deft.models.vla.pretrained import PretrainedVLA, ValueHead, read_statistics
from deft.models.vla.spec import PromptedSpec
from deft.models.vla.streams import Statistics
from deft.models.vla.vlm import Trunk

PROMPT = "In: What action should the robot take to {instruction}?\nOut:"
BINS = 256


class ActionTokens(torch.nn.Module):
    """Convert values in [-1, 1] to tokens and back, with the ids of OpenVLA.

    255 bins between 256 edges from −1 to 1; number d = 1 … 256 (the count of edges at or below x) is the id
    `end − d`, and means the centre of bin min(d, 255). The 256th is the token of exactly 1.
    """

    edges: Tensor
    centers: Tensor

    def __init__(self, end: int) -> None:
        super().__init__()
        self.first = end - BINS
        edges = torch.linspace(-1.0, 1.0, BINS)
        self.register_buffer("edges", edges, persistent=False)
        self.register_buffer("centers", (edges[:-1] + edges[1:]) / 2, persistent=False)

    def encode(self, values: Tensor) -> Tensor:
        """Offsets of the ids from the first action token, int64, same shape: 0 (for 1.0) to 255 (for −1)."""
        count = torch.searchsorted(self.edges, values.clamp(-1.0, 1.0).contiguous(), right=True).clamp(1, BINS)
        return BINS - count

    def decode(self, offsets: Tensor) -> Tensor:
        """The centres of the bins of these tokens."""
        return self.centers[(BINS - 1 - offsets).clamp(0, BINS - 2)]


@dataclass(kw_only=True)
class TokenSpec(PromptedSpec):
    """The keywords of `TokenVLA`."""

    prompt: str = PROMPT
    prompt_length: int = 64
    last_token: int | None = None


class TokenVLA(PretrainedVLA):
    """A vision-language model that generates actions as tokens, with a value on the features of its prefix.

    Tokens are sampled and scored among the 256 action tokens only. Statistics (`q01`, `q99` and `mask` of each dim, as
    in OpenVLA's folders) convert [-1, 1] to the environment's units. `last_token` is one more than the last action id,
    by default the size of the vocabulary without its padding.
    """

    keeps_sample = True  # two tokens decode to the highest bin

    spec_class = TokenSpec

    def __init__(self, spec: TokenSpec | None = None, **given: Any) -> None:
        spec = TokenSpec(**given) if spec is None else spec
        super().__init__(spec)
        self.backbone = Trunk(spec)
        if spec.compile:
            self.backbone.compile()
        size = self.backbone.vocabulary - int(self.backbone.config.to_dict().get("pad_to_multiple_of") or 0)
        end = size if spec.last_token is None else spec.last_token
        if not BINS < end <= self.backbone.vocabulary:
            raise InputError(f"last_token {end} must be more than {BINS} and at most {self.backbone.vocabulary}")
        self.tokens = ActionTokens(end)
        self.action_statistics = Statistics(
            spec.action_dim, read_statistics(spec.folder, spec.statistics).get("action"), "action"
        )
        self.value_head = ValueHead(self.backbone.width, spec.value_gradient)
        self.num_tokens = spec.chunk_length * spec.action_dim

    # The interface of a VLA model ------------------------------------------------------------------------------------

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        prefix = self.backbone.embed(observations, self.instructions(observations))
        return self.value_head(_last(self.backbone(prefix), prefix.mask))

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        """Actions, the tokens' log-prob [B], the value [B, 1], and the tokens. Deterministic: the likeliest."""
        prefix = self.backbone.embed(observations, self.instructions(observations))
        hidden, cache = self.backbone.begin(prefix)
        current = _last(hidden, prefix.mask)
        value, mask, is_real = self.value_head(current), prefix.mask, self._real_tokens(action_mask, len(current))
        offsets, log_prob = [], torch.zeros(len(current), device=current.device)
        for index in range(self.num_tokens):
            logs = self._log_probs(current)
            # argmax of log p + Gumbel noise is a sample of p
            noise = 0.0 if deterministic else -torch.empty_like(logs).exponential_().log()
            chosen = torch.where(is_real[:, index], (logs + noise).argmax(-1), BINS // 2)
            offsets.append(chosen)
            log_prob = log_prob + logs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1) * is_real[:, index]
            if index + 1 < self.num_tokens:
                mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
                current = self.backbone.more(self._embed(chosen.unsqueeze(1)), mask, cache)[:, -1]
        drawn = torch.stack(offsets, 1)
        return self._actions(drawn, action_mask), log_prob, value, {schema.TOKENS: drawn}

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each token, [B, K · A]; 0 for padded dims."""
        is_real = self._real_tokens(action_mask, len(actions))
        offsets = self._offsets(actions, is_real) if sample is None else sample[schema.TOKENS]
        prefix = self.backbone.embed(observations, self.instructions(observations))
        hidden = self.backbone(prefix, self._embed(offsets[:, :-1]) if self.num_tokens > 1 else None)
        first = _last(hidden[:, : prefix.mask.shape[1]], prefix.mask)
        before = torch.cat([first.unsqueeze(1), hidden[:, prefix.mask.shape[1] :]], 1)  # the state before each token
        logs = self._log_probs(before)
        chosen = logs.gather(-1, offsets.unsqueeze(-1)).squeeze(-1)
        entropy = -(logs.exp() * logs).sum(-1)
        return chosen * is_real, (entropy * is_real).sum(1), self.value_head(first)

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """Mean of −log π over the tokens of demonstrated chunks: [B]."""
        log_probs, _, _ = self.evaluate_tokens(observations, actions)
        by_step = log_probs.view(-1, self.chunk_length, self.action_dim).sum(2)
        return -(by_step if step_mask is None else by_step * step_mask).sum(1) / self.num_tokens

    # Computation -----------------------------------------------------------------------------------------------------

    def _log_probs(self, hidden: Tensor) -> Tensor:
        """[…, H] → log-probs of the 256 action tokens."""
        return self.backbone.logits(hidden, self.tokens.first)[..., :BINS].log_softmax(-1)

    def _embed(self, offsets: Tensor) -> Tensor:
        return self.backbone.model.get_input_embeddings()(offsets + self.tokens.first)

    def _actions(self, offsets: Tensor, action_mask: Tensor | None) -> Tensor:
        values = self.tokens.decode(offsets).view(-1, self.chunk_length, self.action_dim)
        return self.shaped(self.action_statistics.denormalize(values), action_mask)

    def _offsets(self, actions: Tensor, is_real: Tensor) -> Tensor:
        """Tokens [B, K · A] of actions in the environment's units; the middle token in padded dims."""
        offsets = self.tokens.encode(self.action_statistics.normalize(self.chunk(actions))).flatten(1)
        return torch.where(is_real, offsets, BINS // 2)

    def _real_tokens(self, action_mask: Tensor | None, batch: int) -> Tensor:
        """Mask of the tokens of real dims, bool [B, K · A]."""
        if action_mask is None:
            return torch.ones(batch, self.num_tokens, dtype=torch.bool, device=self.tokens.edges.device)
        return action_mask.repeat(1, self.chunk_length)


def _last(hidden: Tensor, mask: Tensor) -> Tensor:
    """The hidden state of the last real token, [B, H]."""
    index = mask.long().sum(1) - 1
    return hidden[torch.arange(len(hidden), device=hidden.device), index]
