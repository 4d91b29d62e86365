"""A recurrent memory of the episode, and the gates through which the experts read it.

Memory is (layers, batch, hidden): zeros at an episode's first frame, never None. Each step feeds it the frame, the
state and the action of the step. The world model reads it after the step; before acting, when a_t is not known yet,
both experts read the memory before the step. With a motion prior, the memory also corrects the predicted image: a
region that comes back into view was observed before.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from deft.errors import InputError
from deft.models.f1.config import F1Config

LONGEST = 32  # largest initial time constant of the memory, in steps
CORRECTION_CHANNELS = 64


class Gate(nn.Module):
    """tanh(g) · W m, to be added to tokens; exactly 0 where g is 0."""

    def __init__(self, hidden: int, width: int, start: float) -> None:
        super().__init__()
        self.projection = nn.Linear(hidden, width)
        self.gate = nn.Parameter(torch.full((width,), start))

    def forward(self, memory: Tensor) -> Tensor:
        """[B, hidden] → [B, 1, width]."""
        return (torch.tanh(self.gate) * self.projection(memory))[:, None]


class MemoryCorrection(nn.Module):
    """A correction of the predicted frame's features, decoded from the memory; 0 before training."""

    def __init__(self, config: F1Config) -> None:
        super().__init__()
        code_dim, self.grid = config.tokenizer.code_dim, config.tokenizer.scales[-1]
        self.draw = nn.Linear(config.memory_hidden, code_dim * self.grid**2)
        self.mix = nn.Conv2d(2 * code_dim, CORRECTION_CHANNELS, 3, padding=1)
        self.output = nn.Conv2d(CORRECTION_CHANNELS, code_dim, 3, padding=1)
        for parameter in self.output.parameters():
            nn.init.zeros_(parameter)

    def forward(self, memory: Tensor, expected: Tensor) -> Tensor:
        """[B, hidden] and features [B, D, grid, grid] → [B, D, grid, grid]."""
        drawn = self.draw(memory).unflatten(1, (-1, self.grid, self.grid))
        return self.output(functional.silu(self.mix(torch.cat([expected, drawn.to(expected)], 1))))


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
        self._initialize_update_gate()
        joins = config.tokenizer.code_dim if config.memory_project_to_vae_dim else config.generation.hidden_size
        self.to_generation = Gate(hidden, joins, config.condition_init)
        self.to_action = Gate(hidden, config.action.hidden_size, config.condition_init)
        self.to_picture = MemoryCorrection(config) if config.memory_picture and config.motion_prior else None

    def _initialize_update_gate(self) -> None:
        """Initialise h' = z·h + (1 − z)·n with z = 1 − 1/τ, τ from 2 to `LONGEST` steps: σ(log(τ − 1)) = 1 − 1/τ.

        With PyTorch's default z is ½: after ten steps only a thousandth of an input and of its gradient remains.
        """
        with torch.no_grad():
            for layer in range(self.num_layers):
                bias = getattr(self.gru, f"bias_ih_l{layer}")
                bias[self.hidden : 2 * self.hidden].uniform_(1.0, LONGEST - 1.0).log_()  # gates are r, z, n
                getattr(self.gru, f"bias_hh_l{layer}")[self.hidden : 2 * self.hidden].zero_()

    def zeros(self, batch: int) -> Tensor:
        """Return the memory at an episode's first frame."""
        weight = self.frame.weight
        return torch.zeros(self.num_layers, batch, self.hidden, device=weight.device, dtype=weight.dtype)

    def check(self, memory: Tensor | None, batch: int) -> Tensor:
        """Raise an error if the memory is missing or has another shape."""
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
        """Run T steps: the output after each step, [T, B, hidden], and the final memory (layers, B, hidden).

        frame [T, B, F], state [T, B, S], action [T, B, A]. Without `backprop`, gradients do not
        flow between steps.
        """
        x = self.norm(torch.tanh(self.frame(frame) + self.state(state) + self.action(action)))
        with torch.autocast(x.device.type, enabled=False):  # on GPUs autocast would run the GRU in float16
            x, memory = x.to(self.frame.weight.dtype), memory.to(self.frame.weight.dtype).contiguous()
            if backprop:
                return self.gru(x, memory)
            outputs = []
            for step in x:
                output, memory = self.gru(step[None], memory.detach())
                outputs.append(output)
            return torch.cat(outputs), memory
