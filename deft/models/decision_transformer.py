"""The Decision Transformer (Chen et al., 2021): actions as a sequence model of returns-to-go, observations and actions.

`deft.algorithms.decision_transformer` trains it on windows of episodes; evaluation runs it step by step, with a
target return and a cache of keys and values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import gymnasium
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from deft import schema
from deft.config.algorithm_settings import DTSettings
from deft.models.action_scale import ActionScale
from deft.models.encoders import NORMALIZER_EPSILON, ObservationEncoder
from deft.models.mlp import ReluNetwork
from deft.models.policy import MODE, Policy

INITIAL_STD = 0.02
TOKENS_PER_STEP = 3


class TransformerBlock(nn.Module):
    """x ← x + attention(LN x),  x ← x + W₂ relu(W₁ LN x): GPT-2's block with the ReLU of the paper.

    Keys and values have no bias: a key bias would shift all scores of a query equally, and the output bias includes a
    value bias.
    """

    def __init__(self, dim: int, num_heads: int) -> None:
        super().__init__()
        self.dim, self.num_heads = dim, num_heads
        self.scale = 1.0 / math.sqrt(dim // num_heads)
        self.norm_1, self.norm_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.query_key_value = _normal(dim, 3 * dim)
        self.query_bias = nn.Parameter(torch.zeros(dim))
        self.output_weight, self.output_bias = _normal(dim, dim), nn.Parameter(torch.zeros(dim))
        self.hidden_weight, self.hidden_bias = _normal(dim, 4 * dim), nn.Parameter(torch.zeros(4 * dim))
        self.mlp_weight, self.mlp_bias = _normal(4 * dim, dim), nn.Parameter(torch.zeros(dim))

    def forward(
        self, x: Tensor, bias: Tensor, queries: slice = slice(None), masks: Iterator[Tensor] | None = None
    ) -> Tensor:
        """[B, Q, dim]: the positions `queries` of x [B, T, dim], each attending where `bias` [T, T] is not −∞.

        `masks` are the dropout masks: of the attention, then of the two residual branches.
        """
        normed = self.norm_1(x)
        if self.num_heads == 1:
            attended = self._attend_one_head(normed, normed[:, queries], bias[queries], masks)
        else:
            query, key, value = self.project(normed)
            attended = self.attend(query[:, queries], key, value, bias[queries], masks)
        return self.finish(x[:, queries], attended, masks)

    def project(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [B, T, dim] each."""
        query, key, value = _product(normed, self.query_key_value).chunk(3, -1)
        return query + self.query_bias, key, value

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor, masks: Iterator[Tensor] | None = None
    ) -> Tensor:
        """softmax(q kᵀ / √(dim of a head) + bias) v, head by head, through the output projection: [B, Q, dim]."""
        heads = [part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in (query, key, value)]
        scores = torch.matmul(heads[0] * self.scale, heads[1].transpose(2, 3)) + bias
        weights = scores.softmax(-1)
        if masks is not None:
            weights = weights * next(masks).unflatten(0, (-1, self.num_heads))
        return _product(
            torch.matmul(weights, heads[2]).transpose(1, 2).flatten(2), self.output_weight, self.output_bias
        )

    def _attend_one_head(
        self, normed: Tensor, query_inputs: Tensor, bias: Tensor, masks: Iterator[Tensor] | None
    ) -> Tensor:
        """The same for one head, with fewer products: (n W_q + b)(n W_k)ᵀ = (n W_q W_kᵀ + b W_kᵀ) nᵀ, and
        (P n W_v) W_o = (P n)(W_v W_o). The two dim × dim products are small beside one over all tokens."""
        query, key, value = self.query_key_value.chunk(3, -1)
        transposed = key.t() * self.scale
        projected = _product(query_inputs, query @ transposed, self.query_bias @ transposed)
        weights = torch.baddbmm(bias.expand(len(normed), -1, -1), projected, normed.transpose(1, 2)).softmax(-1)
        if masks is not None:
            weights = weights * next(masks)
        return _product(torch.bmm(weights, normed), value @ self.output_weight, self.output_bias)

    def finish(self, x: Tensor, attended: Tensor, masks: Iterator[Tensor] | None = None) -> Tensor:
        """The residual branches: attention, then the MLP."""
        x = _add(x, attended, masks)
        device = x.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else torch.float32
        rows = self.norm_2(x).flatten(0, -2)
        parameters = (self.hidden_weight, self.mlp_weight, self.hidden_bias[None], self.mlp_bias[None])
        branch = ReluNetwork.apply(dtype, rows[None], *(parameter[None] for parameter in parameters))
        return _add(x, branch.view_as(x), masks)


class DecisionTransformerPolicy(ActionScale, Policy):
    """a_t = tanh(head(h_t)), h_t the output at o_t of a causal transformer over (R̂, o, a) of the last steps.

    R̂ is the return-to-go in units of `return_scale`. Every token includes the embedding of its timestep in the episode,
    limited to the length of the dataset's longest episode. Observations are normalised by the dataset's
    statistics. All these are buffers, saved with the weights.

    Acting keeps a window of at most `context_length` steps in `schema.MEMORY`. While it fills, the cached keys and
    values are reused, and a step computes only its own three tokens. When it is full, its oldest `context_slide` steps
    are dropped and the rest is encoded again, because keys of the second layer and above depend on the dropped steps.
    So the action always equals that of a forward pass over the window.
    """

    recurrent = True
    needs_reward = True
    return_scale: Tensor
    target_return: Tensor
    last_timestep: Tensor
    causal: Tensor

    def __init__(
        self,
        observation_space: gymnasium.Space,
        action_space: gymnasium.Space,
        settings: DTSettings | None = None,
        encoder_dim: int = 256,
        normalize_observation: bool = True,
    ) -> None:
        super().__init__()
        settings = settings or DTSettings()
        dim = settings.embed_dim
        self.dim, self.num_heads = dim, settings.n_head
        self.context_length, self.context_slide = settings.context_length, settings.context_slide
        self._given_targets = settings.target_return
        self.set_box(action_space, "the Decision Transformer acts")
        self.encoder = ObservationEncoder(observation_space, encoder_dim, normalize_observation, NORMALIZER_EPSILON)
        self.timestep = _normal(settings.max_episode_length, dim)
        self.return_weight, self.return_bias = _normal(1, dim), nn.Parameter(torch.zeros(dim))
        self.observation_weight = _normal(self.encoder.dim, dim)
        self.observation_bias = nn.Parameter(torch.zeros(dim))
        self.action_weight, self.action_bias = _normal(self.action_dim, dim), nn.Parameter(torch.zeros(dim))
        self.embedding_norm, self.final_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.blocks = nn.ModuleList([TransformerBlock(dim, settings.n_head) for _ in range(settings.n_layer)])
        self.head_weight, self.head_bias = _normal(dim, self.action_dim), nn.Parameter(torch.zeros(self.action_dim))
        self.register_buffer("return_scale", torch.ones(()))
        self.register_buffer("target_return", torch.zeros(()))
        self.register_buffer("last_timestep", torch.tensor(settings.max_episode_length - 1))
        positions = torch.arange(TOKENS_PER_STEP * self.context_length)
        causal = torch.zeros(len(positions), len(positions)).masked_fill_(positions > positions[:, None], -math.inf)
        self.register_buffer("causal", causal, persistent=False)

    @property
    def target_returns(self) -> list[float]:
        """The target returns of an evaluation: those of the settings, or the default target return."""
        return list(self._given_targets or (float(self.target_return),))

    def set_data(self, return_scale: float, target_return: float, longest_episode: int) -> None:
        """Set the dataset's return scale, target return (both in its units) and longest episode."""
        self.return_scale.fill_(return_scale)
        self.target_return.fill_(target_return)
        self.last_timestep.fill_(longest_episode - 1)

    def observe(self, td: TensorDictBase | Mapping[str, Any]) -> None:
        """Update the normalisation with observations."""
        self.encoder.observe(td[schema.OBSERVATION])

    # -- training ------------------------------------------------------------------------------------------------------

    def predict(self, batch: Mapping[Any, Any] | TensorDictBase, masks: Iterator[Tensor] | None = None) -> Tensor:
        """Predict unit actions [B, K, A] for windows [B, K, …], each from the steps up to its own; differentiable.

        Padding is at the end of a window, so no real token attends to it. The last action has no token.
        """
        timestep = torch.minimum(batch[schema.TIMESTEP], self.last_timestep)
        # index_select instead of an embedding, whose gradient synchronises the GPU for large batches.
        time = self.timestep.index_select(0, timestep.flatten()).view(*timestep.shape, self.dim)
        action = self.to_unit(batch[schema.ACTION])
        tokens = torch.stack(
            [
                self._return_token(batch[schema.RETURN_TO_GO], time),
                self._observation_token(batch[schema.OBSERVATION], time),
                self._action_token(action, time),
            ],
            2,
        )
        x = self.embedding_norm(tokens.flatten(1, 2)[:, :-1])
        if masks is not None:
            x = x * next(masks)
        bias = self.causal[: x.shape[1], : x.shape[1]]
        for block in self.blocks[:-1]:
            x = block(x, bias, masks=masks)
        # The last layer computes outputs only at the observation tokens.
        x = self.blocks[-1](x, bias, slice(1, None, TOKENS_PER_STEP), masks)
        return self._head(x)

    def mask_shapes(self, batch_size: int, steps: int) -> list[tuple[int, ...]]:
        """Return the shapes of the dropout masks of one `predict`, in the order of their use."""
        tokens = TOKENS_PER_STEP * steps - 1
        shapes: list[tuple[int, ...]] = [(batch_size, tokens, self.dim)]
        for layer in range(len(self.blocks)):
            queries = steps if layer == len(self.blocks) - 1 else tokens
            shapes += [(batch_size * self.num_heads, queries, tokens)]
            shapes += [(batch_size, queries, self.dim)] * 2
        return shapes

    def to_unit(self, action: Tensor) -> Tensor:
        """Scale actions of the Box to [−1, 1] and flatten them: […, A]."""
        flat = action if len(self.action_shape) == 1 else action.flatten(-len(self.action_shape))
        return super().to_unit(flat)

    # -- acting --------------------------------------------------------------------------------------------------------

    def initial_memory(self, num_envs: int) -> TensorDict:
        """Return an empty window for each environment. Rows of zeros are the first step of an episode.

        Step c of a window has the slots 3c (the action before it), 3c + 1 (R̂) and 3c + 2 (the observation). Slot 0 is
        before the window and is never attended to.
        """
        device, slots = self.timestep.device, TOKENS_PER_STEP * self.context_length
        cache = (num_envs, len(self.blocks), slots, self.dim)
        return TensorDict(
            {
                "count": torch.zeros(num_envs, dtype=torch.int64, device=device),  # steps in the window
                "timestep": torch.zeros(num_envs, dtype=torch.int64, device=device),
                "return_to_go": torch.zeros(num_envs, device=device),
                "action": torch.zeros(num_envs, self.action_dim, device=device),  # the last unit action
                "tokens": torch.zeros(num_envs, slots, self.dim, device=device),
                "keys": torch.zeros(cache, device=device),
                "values": torch.zeros(cache, device=device),
            },
            batch_size=[num_envs],
        )

    def action_selection(self, deterministic: bool) -> str:
        """Describe the sampling: actions are never sampled."""
        return MODE

    @torch.no_grad()
    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        """Choose the action for the return-to-go: the target less the rewards so far. Always deterministic.

        Reads `schema.PREVIOUS_REWARD`. The memory is changed in place and returned as the next memory.
        """
        memory = td[schema.MEMORY]
        count, timestep, first = memory["count"], memory["timestep"], memory["count"] == 0
        left = torch.where(first, self.target_return, memory["return_to_go"] - td[schema.PREVIOUS_REWARD])
        memory["return_to_go"].copy_(left)
        new = self._new_tokens(td[schema.OBSERVATION], memory["action"], left, timestep)

        full = (count == self.context_length).nonzero().squeeze(1)
        filling = (count < self.context_length).nonzero().squeeze(1)
        if len(full):
            dropped = TOKENS_PER_STEP * self.context_slide
            memory["tokens"][full, :-dropped] = memory["tokens"][full, dropped:]
            count[full] -= self.context_slide
        slots = TOKENS_PER_STEP * count[:, None] + torch.arange(TOKENS_PER_STEP, device=count.device)
        memory["tokens"].scatter_(1, slots[:, :, None].expand_as(new), new)
        output = torch.empty(len(new), self.dim, device=new.device)
        if len(filling):
            output[filling] = self._encode_step(new[filling], slots[filling], memory, filling)
        if len(full):
            output[full] = self._encode_window(memory, full)

        unit = self._head(output)
        mask = td.get(schema.ACTION_MASK, None)
        if mask is not None:
            unit = unit * mask
        memory["action"].copy_(unit)
        count += 1
        timestep += 1
        td.set(schema.ACTION, self.from_unit(unit))
        td.set(schema.NEXT_MEMORY, memory)
        return td

    def _new_tokens(self, observation: Any, last_action: Tensor, return_to_go: Tensor, timestep: Tensor) -> Tensor:
        """Return the tokens of the last action, R̂ and the observation, [B, 3, dim]."""
        time = self.timestep[torch.minimum(timestep, self.last_timestep)]
        before = self.timestep[torch.minimum((timestep - 1).clamp(min=0), self.last_timestep)]
        tokens = [
            self._action_token(last_action, before),
            self._return_token(return_to_go, time),
            self._observation_token(observation, time),
        ]
        return self.embedding_norm(torch.stack(tokens, 1))

    def _encode_step(self, new: Tensor, slots: Tensor, memory: TensorDictBase, rows: Tensor) -> Tensor:
        """Return the output [B, dim] at the last of three new tokens; earlier keys and values come from the cache."""
        positions = torch.arange(memory["tokens"].shape[1], device=new.device)
        # Slot 0 is before the window. It attends only to itself, so that its softmax is defined; it is never used.
        visible = (positions <= slots[:, :, None]) & ((positions > 0) | (slots[:, :, None] == 0))
        bias = torch.zeros(visible.shape, device=new.device).masked_fill_(~visible, -math.inf).unsqueeze(1)
        x = new
        for layer, block in enumerate(self.blocks):
            query, key, value = block.project(block.norm_1(x))  # type: ignore[operator]
            memory["keys"][rows[:, None], layer, slots] = key
            memory["values"][rows[:, None], layer, slots] = value
            attended = block.attend(query, memory["keys"][rows, layer], memory["values"][rows, layer], bias)  # type: ignore[operator]
            x = block.finish(x, attended)  # type: ignore[operator]
        return x[:, -1]

    def _encode_window(self, memory: TensorDictBase, rows: Tensor) -> Tensor:
        """Return the output [B, dim] at the last token of windows that dropped steps, from all their tokens."""
        steps = self.context_length - self.context_slide + 1
        x = memory["tokens"][rows, 1 : TOKENS_PER_STEP * steps]
        bias = self.causal[: x.shape[1], : x.shape[1]]
        for layer, block in enumerate(self.blocks):
            if self.context_slide > 1:  # the next steps reuse them
                _, key, value = block.project(block.norm_1(x))  # type: ignore[operator]
                memory["keys"][rows, layer, 1 : TOKENS_PER_STEP * steps] = key
                memory["values"][rows, layer, 1 : TOKENS_PER_STEP * steps] = value
            is_last = layer == len(self.blocks) - 1
            x = block(x, bias, slice(-1, None) if is_last else slice(None))
        return x[:, -1]

    # -- tokens and actions --------------------------------------------------------------------------------------------

    def _return_token(self, return_to_go: Tensor, time: Tensor) -> Tensor:
        return torch.addcmul(time + self.return_bias, (return_to_go / self.return_scale)[..., None], self.return_weight)

    def _observation_token(self, observation: Any, time: Tensor) -> Tensor:
        return _product(self.encoder(observation), self.observation_weight, self.observation_bias) + time

    def _action_token(self, unit: Tensor, time: Tensor) -> Tensor:
        return _product(unit, self.action_weight, self.action_bias) + time

    def _head(self, x: Tensor) -> Tensor:
        return _product(self.final_norm(x), self.head_weight, self.head_bias).float().tanh()


def _normal(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape) * INITIAL_STD)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x W + b over the last dim, as one matrix product for any leading dims."""
    rows = x.reshape(-1, x.shape[-1])
    result = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return result.view(*x.shape[:-1], weight.shape[-1])


def _add(x: Tensor, branch: Tensor, masks: Iterator[Tensor] | None) -> Tensor:
    """Add the residual branch, with dropout."""
    return x + branch if masks is None else torch.addcmul(x, branch.float(), next(masks))
