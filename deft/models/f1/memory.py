"""A recurrent memory of the episode, and the gates through which the experts read it.

Memory is (layers, batch, hidden): zeros at an episode's first frame, never None. Each step feeds it the frame, the
state and the action of the step. The world model reads it after the step; before acting, when a_t is not known yet,
both experts read what was remembered before the step.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.f1.config import F1Config


class Gate(nn.Module):
    """tanh(g) · W m, to be added to tokens; exactly 0 where g is 0."""

    def __init__(self, hidden: int, width: int, start: float) -> None:
        super().__init__()
        self.projection = nn.Linear(hidden, width)
        self.gate = nn.Parameter(torch.full((width,), start))

    def forward(self, memory: Tensor) -> Tensor:
        """[B, hidden] → [B, 1, width]."""
        return (torch.tanh(self.gate) * self.projection(memory))[:, None]


class Memory(nn.Module):
    """A GRU over the steps of an episode."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        hidden = config.memory_hidden
        frame_size = config.tokenizer.scales[-1] ** 2 * config.tokenizer.code_dim
        self.num_layers = config.memory_num_layers
        self.hidden = hidden
        self.frame = nn.Linear(frame_size, hidden)
        self.state = nn.Linear(config.max_state_dim, hidden)
        self.action = nn.Linear(config.max_action_dim, hidden)
        self.norm = nn.LayerNorm(hidden)
        self.gru = nn.GRU(hidden, hidden, config.memory_num_layers)
        joins = config.tokenizer.code_dim if config.memory_project_to_vae_dim else config.generation.hidden_size
        self.to_generation = Gate(hidden, joins, config.condition_init)
        self.to_action = Gate(hidden, config.action.hidden_size, config.condition_init)

    def zeros(self, batch: int) -> Tensor:
        """The memory at an episode's first frame."""
        weight = self.frame.weight
        return torch.zeros(self.num_layers, batch, self.hidden, device=weight.device, dtype=weight.dtype)

    def check(self, memory: Tensor | None, batch: int) -> Tensor:
        """Refuse a memory that is missing or of another shape."""
        expected = (self.num_layers, batch, self.hidden)
        if memory is None:
            raise InputError(f"memory_state is None; start an episode with zeros {expected} (policy.initial_memory)")
        if tuple(memory.shape) != expected:
            raise InputError(
                f"memory_state has shape {tuple(memory.shape)}; (layers, batch, hidden) is {expected} here"
            )
        return memory

    def forward(
        self, frame: Tensor, state: Tensor, action: Tensor, memory: Tensor, backprop: bool = True
    ) -> tuple[Tensor, Tensor]:
        """T steps at a time: what is remembered after each, [T, B, hidden], and the memory (layers, B, hidden) at last.

        frame [T, B, F], state [T, B, S], action [T, B, A]. Without `backprop`, no gradient passes from a step to the
        one before.
        """
        x = self.norm(torch.tanh(self.frame(frame) + self.state(state) + self.action(action)))
        if backprop:
            return self.gru(x, memory)
        outputs = []
        for step in x:
            output, memory = self.gru(step[None], memory.detach())
            outputs.append(output)
        return torch.cat(outputs), memory
