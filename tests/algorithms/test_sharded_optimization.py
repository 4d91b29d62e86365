"""Adam on weights that are shared out: the steps of the flat optimizers, and their state. Here they are whole."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from deft.algorithms.optimization import FlatAdam, FusedAdam, flat_adam, fused_adam
from deft.algorithms.sharded_optimization import ShardedFlatAdam, ShardedFusedAdam
from deft.errors import InputError

PAIRS = {
    "flat": (lambda parameters: FlatAdam(parameters, 0.1, 1e-5), lambda parts: ShardedFlatAdam(parts, 0.1, 0.0, 1e-5)),
    "fused": (lambda parameters: FusedAdam(parameters, 0.1, 0.3), lambda parts: ShardedFusedAdam(parts, 0.1, 0.3)),
}


def weights(size: int = 3) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(size, 2)), nn.Parameter(torch.randn(2)), nn.Parameter(torch.randn(1), False)]


def steps(optimizer, parameters: list[nn.Parameter], numbers: range) -> None:
    """Of a loss whose gradient is clipped at some steps, and in which the second weight is from step 2 on."""
    for number in numbers:
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()
        loss = (parameters[0] * (number - 2)).sum()
        if number >= 2:
            loss = loss + parameters[1].square().sum()
        loss.backward()
        optimizer.step(max_grad_norm=3.0)


@pytest.mark.parametrize("kind", PAIRS)
def test_steps_are_those_of_flat_memory(kind):
    found = []
    for make in PAIRS[kind]:
        parameters = weights()
        optimizer = make(parameters)
        steps(optimizer, parameters, range(5))
        found.append((parameters, optimizer.state_dict()))
    (flat, state), (apart, other) = found
    for one, another in zip(flat, apart, strict=True):
        torch.testing.assert_close(another, one, rtol=1e-5, atol=1e-6)
    assert state.keys() == other.keys()
    for name in ("first", "second"):
        torch.testing.assert_close(other[name], state[name], rtol=1e-5, atol=1e-6)
    assert state["count"] == other["count"] == 5


@pytest.mark.parametrize("kind", PAIRS)
@pytest.mark.parametrize("back", [False, True])
def test_each_goes_on_from_the_other(kind, back):
    first, second = reversed(PAIRS[kind]) if back else PAIRS[kind]

    def train(then: Callable) -> list[nn.Parameter]:
        parameters = weights()
        optimizer = first(parameters)
        steps(optimizer, parameters, range(3))
        state = optimizer.state_dict()
        parameters = [nn.Parameter(one.detach().clone(), one.requires_grad) for one in parameters]
        optimizer = then(parameters)
        optimizer.load_state_dict(state)
        steps(optimizer, parameters, range(3, 6))
        return parameters

    for one, another in zip(train(first), train(second), strict=True):
        torch.testing.assert_close(another, one, rtol=1e-5, atol=1e-6)


def test_the_norm_is_that_before_clipping():
    parameters = weights()
    optimizer = ShardedFlatAdam(parameters, 0.1)
    optimizer.take_gradients((parameters[0] * 2).sum())
    optimizer.take_gradients((parameters[1] * 3).sum(), add=True)
    # 6 weights with a gradient of 2, 2 with one of 3: √(6 · 4 + 2 · 9) = √42
    assert float(optimizer.step(max_grad_norm=1.0)) == pytest.approx(42**0.5)
    optimizer.take_gradients((parameters[1] * 3).sum())  # those of the first are 0 again
    assert float(optimizer.step()) == pytest.approx(18**0.5)


@pytest.mark.parametrize("kind", [ShardedFlatAdam, ShardedFusedAdam])
def test_the_state_of_other_weights_is_refused(kind):
    state = kind(weights(4), 0.1).state_dict()
    with pytest.raises(InputError, match="for 10 parameters; the policy trains 8"):
        kind(weights(), 0.1).load_state_dict(state)
    with pytest.raises(InputError, match="nothing to train"):
        kind(weights()[2:], 0.1)


def test_whole_weights_have_flat_memory():
    assert isinstance(flat_adam(weights(), 0.1, 1e-5), FlatAdam)
    assert isinstance(fused_adam(weights(), 0.1, 0.0), FusedAdam)
