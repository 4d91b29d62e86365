import torch
from torch import nn

from deft.models.normalization import RunningNormalizer
from deft.models.targets import OlderCopy, cpu_weights, frozen_copy, soft_update


def make_network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(RunningNormalizer((2,)), nn.Linear(2, 1))


def test_a_copy_moves_by_tau_and_has_the_statistics_of_its_source():
    network = make_network()
    target = frozen_copy(network)
    assert not any(parameter.requires_grad for parameter in target.parameters())
    network[0].observe(torch.randn(50, 2) * 4 + 3)  # after the copy was made
    with torch.no_grad():
        network[1].weight.fill_(1.0)
        target[1].weight.fill_(3.0)
    soft_update(target, network, 0.25)
    # Parameters: 0.75 · 3 + 0.25 · 1. Statistics are not averaged: half of a mean with half of a deviation is neither.
    assert torch.equal(target[1].weight, torch.full((1, 2), 2.5))
    for own, source in zip(target.buffers(), network.buffers(), strict=True):
        assert torch.equal(own, source)
    assert float(target[0].count) == 50


def test_with_tau_0_the_statistics_alone_are_copied_and_with_1_all_of_it():
    network = make_network()
    target = frozen_copy(network)
    network[0].observe(torch.randn(50, 2) * 4 + 3)
    with torch.no_grad():
        network[1].weight.add_(1.0)
    before = target[1].weight.clone()
    soft_update(target, network, 0.0)
    assert torch.equal(target[1].weight, before)
    assert torch.equal(target[0](torch.ones(1, 2)), network[0](torch.ones(1, 2)))
    soft_update(target, network, 1.0)
    for name, value in target.state_dict().items():
        assert torch.equal(value, network.state_dict()[name]), name


def test_copied_weights_are_no_views_and_keep_their_values():
    network = make_network()
    whole = torch.arange(10.0)
    network[1].weight.data = whole[2:4].view(1, 2)  # a view of a larger tensor, as an optimizer may make it
    copied = cpu_weights(network.state_dict())
    assert copied.keys() == network.state_dict().keys()
    assert copied["1.weight"].untyped_storage().nbytes() == 2 * 4  # two floats, not ten
    whole.zero_()
    assert copied["1.weight"].tolist() == [[2.0, 3.0]]
    assert not any(value.requires_grad for value in copied.values())


def test_an_older_copy_is_one_to_two_lags_old_and_is_restored():
    network = make_network()
    first = float(network[1].weight.detach().flatten()[0])
    older = OlderCopy(network, lag=2)
    seen = []
    for iteration in range(1, 7):
        with torch.no_grad():
            network[1].weight.fill_(float(iteration))
        older.update(network, iteration)
        seen.append(float(older.network[1].weight.flatten()[0]))
    # After 2, 4 and 6 iterations come the weights that were kept two iterations before: those of 0, 2 and 4.
    assert seen == [first, first, first, 2.0, 2.0, 4.0]
    restored = OlderCopy(make_network(), lag=2)
    restored.load_state_dict({**older.state_dict(), "something": "else"})
    assert torch.equal(restored.network[1].weight, older.network[1].weight)
    restored.update(network, 8)
    assert float(restored.network[1].weight.flatten()[0]) == 6.0
