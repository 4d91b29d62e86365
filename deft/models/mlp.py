"""Several MLPs of one shape, batched: the critics of an ensemble, and the networks of several seeds.

Each layer of all networks is one batched matmul. `deft.models.actor_critic` and `deft.models.critics` use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FEW_ROWS = 1024  # up to this many rows autograd is faster than `ReluNetwork`


class BatchedMLP(nn.Module):
    """`num` independent MLPs, ReLU between the layers, optionally with LayerNorm before each ReLU.

    Weights are [num, in, out]; y_n = relu(relu(x_n W_n1 + b_n1) W_n2 + b_n2) … Initialised like torch.nn.Linear,
    uniform in ±1/√in. `dtype` is the type of the matmuls; parameters, inputs, outputs and the last layer are float32:
    bf16 has 8 bits, steps of 2 for values of 300.
    """

    def __init__(
        self,
        num: int,
        in_dim: int,
        hidden_sizes: Sequence[int],
        out_dim: int,
        layer_norm: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        sizes = [in_dim, *hidden_sizes, out_dim]
        self.num, self.layer_norm, self.dtype = num, layer_norm, dtype
        self.weights = nn.ParameterList([_uniform((num, before, after), before) for before, after in pairwise(sizes)])
        self.biases = nn.ParameterList([_uniform((num, 1, after), before) for before, after in pairwise(sizes)])
        norms = hidden_sizes if layer_norm else ()
        self.scales = nn.ParameterList([nn.Parameter(torch.ones(num, 1, size)) for size in norms])
        self.shifts = nn.ParameterList([nn.Parameter(torch.zeros(num, 1, size)) for size in norms])

    def forward(self, x: Tensor, frozen: bool = False, stride: int = 1) -> Tensor:
        """[num, B, out] of x [num, B, in], or of x [M, B, in] where row m serves the m-th num / M networks.

        `frozen`: gradients reach x but not the networks, as an actor's loss through a critic needs; then also every
        `stride`-th network alone.
        """
        if x.shape[0] != self.num and stride == 1:
            x = x.repeat_interleave(self.num // x.shape[0], 0) if x.shape[0] > 1 else x.expand(self.num, -1, -1)
        groups = (self.weights, self.biases, self.scales, self.shifts)
        # Iterating over a ParameterList looks each parameter up by its name, which is slow.
        parameters: list[Any] = [parameter for group in groups for parameter in group._parameters.values()]
        if frozen:
            parameters = [parameter.detach()[::stride] for parameter in parameters]
        if self.layer_norm:
            return self._normalised(x, parameters)
        if self.dtype is torch.float32 and x.shape[1] <= FEW_ROWS:
            depth = len(parameters) // 2
            for weight, bias in zip(parameters[: depth - 1], parameters[depth:-1], strict=True):
                x = torch.baddbmm(bias, x, weight).relu_()
            return torch.baddbmm(parameters[-1], x, parameters[depth - 1])
        return ReluNetwork.apply(self.dtype, x, *parameters)

    def _normalised(self, x: Tensor, parameters: list[Tensor]) -> Tensor:
        depth = len(self.scales)
        weights, biases = parameters[: depth + 1], parameters[depth + 1 : 2 * depth + 2]
        scales, shifts = parameters[2 * depth + 2 : 3 * depth + 2], parameters[3 * depth + 2 :]
        for layer in range(depth):
            x = self._product(biases[layer], x, weights[layer])
            x = functional.relu(torch.addcmul(shifts[layer], functional.layer_norm(x, x.shape[-1:]), scales[layer]))
        return torch.baddbmm(biases[depth], x, weights[depth])

    def _product(self, bias: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        if self.dtype is torch.float32:
            return torch.baddbmm(bias, x, weight)
        return torch.bmm(x.to(self.dtype), weight.to(self.dtype)).float() + bias


class ReluNetwork(torch.autograd.Function):
    """All layers as one autograd node, for many rows and for bf16: fewer passes over the activations.

    The parameters are the weights [num, in, out], then the biases [num, 1, out].
    """

    @staticmethod
    def forward(ctx: Any, dtype: torch.dtype, x: Tensor, *parameters: Tensor) -> Tensor:
        """relu(… relu(x W₁ + b₁) …) W + b, with the last layer in float32."""
        depth = len(parameters) // 2
        last_weight, last_bias = parameters[depth - 1], parameters[-1]
        if dtype is not torch.float32:
            x, parameters = x.to(dtype), tuple(parameter.to(dtype) for parameter in parameters)
        weights, biases = parameters[:depth], parameters[depth:]
        inputs = [x]
        for weight, bias in zip(weights[:-1], biases[:-1], strict=True):
            inputs.append(torch.baddbmm(bias, inputs[-1], weight).relu_())
        ctx.save_for_backward(*inputs, *weights)
        return torch.baddbmm(last_bias, inputs[-1].float(), last_weight)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """∂W = xᵀ δ,  ∂b = Σ δ,  δ ← δ Wᵀ where the unit was on."""
        saved = ctx.saved_tensors
        depth = len(saved) // 2
        inputs, weights = saved[:depth], saved[depth:]
        weight_gradients: list[Tensor | None] = [None] * depth
        bias_gradients: list[Tensor | None] = [None] * depth
        delta = gradients[0].to(inputs[0].dtype)
        ones = delta.new_ones(1, 1, delta.shape[1]).expand(delta.shape[0], -1, -1)
        for layer in reversed(range(depth)):
            if ctx.needs_input_grad[2 + layer]:
                weight_gradients[layer] = torch.bmm(inputs[layer].transpose(1, 2), delta).float()
                # As a matmul: torch.sum over many rows takes six times as long.
                bias_gradients[layer] = torch.bmm(ones, delta).float()
            if layer > 0:
                weight = weights[layer].transpose(1, 2)
                delta = delta * weight if weight.shape[1] == 1 else torch.bmm(delta, weight)
                torch.ops.aten.threshold_backward.grad_input(delta, inputs[layer], 0.0, grad_input=delta)
        x_gradient = torch.bmm(delta, weights[0].transpose(1, 2)).float() if ctx.needs_input_grad[1] else None
        return (None, x_gradient, *weight_gradients, *bias_gradients)


def _uniform(shape: tuple[int, ...], in_dim: int) -> nn.Parameter:
    bound = 1.0 / math.sqrt(in_dim)
    return nn.Parameter(torch.empty(shape).uniform_(-bound, bound))
