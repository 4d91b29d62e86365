"""Acting with a small actor-critic in numpy: the arithmetic of `ActorCritic.act` without the overhead of torch calls.

One observation through a 64-64 network costs about ten microseconds of arithmetic and several hundred of dispatch.
`ActorCritic.act_arrays` uses this class for small networks.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from torch import Tensor, nn

from deft import schema
from deft.models.distributions import HALF_LOG_2PI, ActionHead, CategoricalHead, GaussianHead
from deft.models.encoders import ObservationEncoder, VectorEncoder

MOST_ROWS = 16  # with more environments torch is as fast
ACTIVATIONS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "tanh": np.tanh,
    "relu": lambda x: np.maximum(x, 0.0),
}


class SmallActor:
    """Reads the policy's parameters in place, so it acts with the current weights. Samples from `np.random`."""

    def __init__(
        self, encoder: VectorEncoder, towers: nn.Module, depth: int, head: ActionHead, activation: str
    ) -> None:
        parameters = {name: parameter.detach().numpy() for name, parameter in towers.named_parameters()}
        weights = [parameters[f"weight_{layer}"] for layer in range(depth)]
        biases = [parameters[f"bias_{layer}"][:, 0] for layer in range(depth)]
        self._towers = [
            (
                [(weight[tower], bias[tower]) for weight, bias in zip(weights, biases, strict=True)],
                parameters[f"head_weight_{tower}"],
                parameters[f"head_bias_{tower}"],
            )
            for tower in range(2)
        ]
        self._activation = ACTIVATIONS[activation]
        normalizer = encoder.normalizer
        self._normalization = None
        if normalizer is not None:
            self._normalization = (normalizer.scale.numpy(), normalizer.shift.numpy(), normalizer.clip)
        self._sample: Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
        if isinstance(head, GaussianHead):
            self._log_std, self._center, self._width = (
                tensor.detach().numpy() for tensor in (head.log_std, head.center, head.width)
            )
            self._log_width = 0.0 if head.is_unit else float(np.log(self._width).sum())
            self._unit, self._shape = head.is_unit, head.action_shape
            self._sample = self._sample_gaussian
        else:
            self._sample = self._sample_categorical

    @staticmethod
    def fits(encoder: ObservationEncoder, head: ActionHead, activation: str, parameter: Tensor) -> bool:
        """Whether a policy of these parts is supported: one input vector, tanh or relu, on the CPU."""
        only = next(iter(encoder.streams.values()))
        simple_head = isinstance(head, GaussianHead) or (isinstance(head, CategoricalHead) and head.scalar)
        return (
            encoder.is_single
            and isinstance(only, VectorEncoder)
            and simple_head
            and (activation in ACTIVATIONS and parameter.is_cpu)
        )

    def act(self, observation: np.ndarray) -> dict[str, np.ndarray]:
        """Action, log-prob and value of each row."""
        x = observation if observation.dtype == np.float32 else observation.astype(np.float32)
        if x.ndim > 2:
            x = x.reshape(len(x), -1)
        if self._normalization is not None:
            scale, shift, clip = self._normalization
            x = np.minimum(np.maximum(x * scale + shift, -clip), clip)
        outputs = []
        for hidden_layers, head_weight, head_bias in self._towers:
            hidden = x
            for weight, bias in hidden_layers:
                hidden = self._activation(hidden @ weight + bias)
            outputs.append(hidden @ head_weight + head_bias)
        action, log_prob = self._sample(outputs[0])
        return {schema.ACTION: action, schema.LOG_PROB: log_prob, schema.VALUE: outputs[1][:, 0]}

    def _sample_gaussian(self, mean: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        noise = np.random.standard_normal(mean.shape).astype(np.float32)
        unit = mean + noise * np.exp(self._log_std)
        constant = self._log_std.sum() + (self._log_width + mean.shape[-1] * HALF_LOG_2PI)
        log_prob = -0.5 * np.einsum("ij,ij->i", noise, noise) - np.float32(constant)
        action = unit if self._unit else self._center + unit * self._width
        return action if len(self._shape) == 1 else action.reshape(len(action), *self._shape), log_prob

    def _sample_categorical(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Gumbel-max, as in `CategoricalHead`."""
        shifted = logits - logits.max(-1, keepdims=True)
        log_p = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
        noise = np.random.standard_exponential(log_p.shape).astype(np.float32)
        choice = (log_p - np.log(noise)).argmax(-1)
        return choice, log_p[np.arange(len(choice)), choice]
