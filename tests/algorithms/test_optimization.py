"""`FlatAdam` steps as torch's AdamW, its state is torch's, and a gradient that is not finite raises an error."""

import gymnasium
import pytest
import torch
from torch import nn

from deft.algorithms.optimization import (
    FlatAdam,
    apply_gradients,
    backward,
    gradients_of,
    load_optimizer_state,
    restart,
    set_learning_rate,
)
from deft.algorithms.ppo import PPO
from deft.errors import InputError, RunError
from deft.models.actor_critic import ActorCritic
from deft.runs import checkpoint
from deft.training.trainer import Trainer

NOT_APPLIED = "the gradient is no longer finite, so the update was not applied"


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_not_applied(capturable, max_grad_norm, bad):
    layer = nn.Linear(3, 2)
    optimizer = FlatAdam(layer.parameters(), 0.1, capturable=capturable)
    before = layer.weight.detach().clone()
    layer.weight.grad[0, 0] = bad
    with pytest.raises(RunError, match=NOT_APPLIED):
        apply_gradients(optimizer, max_grad_norm)
    assert torch.equal(layer.weight, before)


def test_the_last_good_weights_are_saved(tmp_path):
    class FailsSecond(PPO):
        def update(self, batches):
            if self.version == 1:
                next(self.policy.parameters()).grad.fill_(torch.nan)
                self.apply_gradients(self.optimizer)
            return super().update(batches)

    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space)
    trainer = Trainer(policy, env, FailsSecond(policy), 16, output_dir=tmp_path, eval_freq=0, save_freq=0)
    with pytest.raises(RunError, match=NOT_APPLIED):
        trainer.train(64)
    saved = checkpoint.load_part(tmp_path / "checkpoint-16", checkpoint.MODEL)  # of the first rollout
    assert all(torch.equal(saved[name], value) for name, value in policy.state_dict().items())
    assert all(bool(value.isfinite().all()) for value in saved.values())


def networks() -> tuple[nn.Sequential, nn.Sequential]:
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    return first, second


def train(network: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        torch.manual_seed(number)
        backward(network(torch.randn(8, 3)).square().sum(), optimizer)
        apply_gradients(optimizer, max_grad_norm=3.0)


def assert_same_weights(first: nn.Module, second: nn.Module) -> None:
    for one, another in zip(first.parameters(), second.parameters(), strict=True):
        torch.testing.assert_close(another, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("flat_first", [False, True])
def test_steps_and_state_are_those_of_torch(capturable, flat_first):
    """Each continues training from the state of the other."""

    def make(network: nn.Module, flat: bool) -> torch.optim.Optimizer:
        if flat:
            return FlatAdam(network.parameters(), 0.1, weight_decay=0.3, eps=1e-5, capturable=capturable)
        return torch.optim.AdamW(network.parameters(), 0.1, weight_decay=0.3, eps=1e-5)

    first, second = networks()
    one, another = make(first, flat_first), make(second, not flat_first)
    train(first, one, range(3))
    train(second, another, range(3))
    assert_same_weights(first, second)
    another.load_state_dict(one.state_dict())
    train(first, one, range(3, 6))
    train(second, another, range(3, 6))
    assert_same_weights(first, second)


@pytest.mark.parametrize("kind", [FlatAdam, torch.optim.AdamW])
def test_an_optimizer_restarts_as_a_new_one(kind):
    layer, other = nn.Linear(3, 2), nn.Linear(3, 2)
    other.load_state_dict(layer.state_dict())
    optimizer = kind(layer.parameters(), 0.1)
    for _ in range(3):
        layer(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    layer.load_state_dict(other.state_dict())
    restart(optimizer)
    new = kind(other.parameters(), 0.1)
    for one, used in ((layer, optimizer), (other, new)):
        used.zero_grad()
        one(torch.ones(1, 3)).square().sum().backward()
        used.step()
    assert torch.equal(layer.weight, other.weight)


def test_the_state_survives_a_file(tmp_path):
    first, second = networks()
    optimizer, other = FlatAdam(first.parameters(), 0.1), FlatAdam(second.parameters(), 0.2)
    train(first, optimizer, range(2))
    torch.save(optimizer.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(first.state_dict())
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert other.param_groups[0]["lr"] == 0.1
    train(first, optimizer, range(2, 4))
    train(second, other, range(2, 4))
    assert all(torch.equal(one, another) for one, another in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("as_list", [False, True])
def test_a_state_of_flat_tensors_is_translated(as_list):
    """The last version wrote `first` and `second` as one tensor of all parameters, or a list of one for each type."""
    network = networks()[0]
    count = sum(parameter.numel() for parameter in network.parameters())
    first, second = torch.arange(count) + 0.5, torch.arange(count) + 1.0
    state = {"first": [first], "second": [second], "count": 7, "learning_rate": 0.5}
    if not as_list:
        state = {"first": first, "second": second, "count": torch.tensor(7.0)}
    optimizer = FlatAdam(network.parameters(), 0.1)
    load_optimizer_state(optimizer, state)
    assert optimizer.param_groups[0]["lr"] == 0.1  # of the settings
    found = optimizer.state_dict()["state"]
    assert torch.equal(torch.cat([found[index]["exp_avg"].flatten() for index in range(4)]), first)
    assert torch.equal(torch.cat([found[index]["exp_avg_sq"].flatten() for index in range(4)]), second)
    assert all(values["step"] == 7 for values in found.values())
    with pytest.raises(InputError, match=f"for {count} parameters; the policy trains 8"):
        load_optimizer_state(FlatAdam(nn.Linear(3, 2).parameters(), 0.1), state)


def test_the_state_of_other_parameters_is_an_error():
    state = FlatAdam(nn.Linear(4, 2).parameters(), 0.1).state_dict()
    for load in (FlatAdam.load_state_dict, load_optimizer_state):
        with pytest.raises(InputError, match="for 10 parameters; the policy trains 8"):
            load(FlatAdam(nn.Linear(3, 2).parameters(), 0.1), state)


@pytest.mark.parametrize("capturable", [False, True])
def test_schedulers_of_torch_set_the_learning_rate(capturable):
    network = networks()[0]
    optimizer = FlatAdam(network.parameters(), 0.1, capturable=capturable)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    rate = optimizer.param_groups[0]["lr"]
    train(network, optimizer, range(1))
    optimizer.step()
    schedule.step()
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.05)
    set_learning_rate(optimizer, 0.2)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(0.2)
    if capturable:  # a CUDA graph reads this memory
        assert optimizer.param_groups[0]["lr"] is rate


def test_parameters_of_several_types_and_groups():
    """Each type has a flat tensor of its own; the norm is over all of them."""
    single, double = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))
    other, frozen = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1), requires_grad=False)
    optimizer = FlatAdam([{"params": [single, double, frozen]}, {"params": [other], "lr": 0.5}], 0.1)
    backward((single * 2).sum() + (double * 3).sum() + other.sum(), optimizer)
    # 2 weights with a gradient of 2, 2 of 3, 1 of 1: √(8 + 18 + 1)
    assert float(apply_gradients(optimizer)) == pytest.approx(27**0.5)
    # Adam's first step is the learning rate, against the sign of the gradient
    torch.testing.assert_close(single.detach(), torch.full((2,), -0.1))
    torch.testing.assert_close(double.detach(), torch.full((2,), -0.1, dtype=torch.float64))
    torch.testing.assert_close(other.detach(), torch.full((1,), -0.5))
    backward(other.sum(), optimizer, accumulate=True)
    assert [float(gradient.sum()) for gradient in gradients_of(optimizer)] == [4.0, 6.0, 2.0]
    backward(other.sum(), optimizer)
    assert [float(gradient.sum()) for gradient in gradients_of(optimizer)] == [0.0, 0.0, 1.0]
    optimizer.zero_grad()
    assert not any(float(gradient.sum()) for gradient in gradients_of(optimizer))


def test_gradients_that_replaced_the_views_are_used():
    """As after `module.zero_grad()`, or where a user assigns `grad`: the steps equal those of torch's AdamW."""
    ours, theirs = (nn.Parameter(torch.tensor([1.0, -2.0])) for _ in range(2))
    for parameter, optimizer in (
        (ours, FlatAdam([ours], 0.1)),
        (theirs, torch.optim.AdamW([theirs], 0.1, weight_decay=0.0)),
    ):
        parameter.grad = torch.tensor([3.0, -1.0])
        optimizer.step()
        parameter.grad = None
        parameter.square().sum().backward()
        optimizer.step()
    torch.testing.assert_close(ours.data, theirs.data)


def test_parameters_of_an_optimizer_are_aligned_as_those_of_a_copy():
    """The last bit of a matrix product depends on it on some processors, and copies of a policy collect and act."""
    layers = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2), nn.Linear(2, 2).to(torch.bfloat16))  # 15, 5, 10, 2, 4, 2
    optimizer = FlatAdam(layers.parameters(), 0.1)
    tensors = [tensor for parameter in optimizer.parameters for tensor in (parameter, parameter.grad)]
    assert [tensor.data_ptr() % 64 for tensor in tensors] == [0] * 12
    optimizer.set_gradients([torch.ones_like(parameter) for parameter in optimizer.parameters])
    assert [float(gradient.sum()) for gradient in gradients_of(optimizer)] == [32, 6]  # the gaps between them stay 0
