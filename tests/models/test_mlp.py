import pytest
import torch
from torch import nn

from deft.models.mlp import BatchedMLP


def plain(network: BatchedMLP, index: int) -> nn.Sequential:
    """One of the networks, out of torch's own layers."""
    layers: list[nn.Module] = []
    for layer, (weight, bias) in enumerate(zip(network.weights, network.biases, strict=True)):
        linear = nn.Linear(weight.shape[1], weight.shape[2])
        linear.weight.data.copy_(weight[index].T)
        linear.bias.data.copy_(bias[index, 0])
        layers.append(linear)
        if layer < len(network.weights) - 1:
            if network.layer_norm:
                norm = nn.LayerNorm(weight.shape[2])
                norm.weight.data.copy_(network.scales[layer][index, 0])
                norm.bias.data.copy_(network.shifts[layer][index, 0])
                layers.append(norm)
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)


@pytest.mark.parametrize("layer_norm", [False, True])
def test_values_and_gradients_are_those_of_separate_networks(layer_norm):
    torch.manual_seed(0)
    network = BatchedMLP(3, 4, (8, 8), 2, layer_norm)
    x = torch.randn(3, 5, 4, requires_grad=True)
    network(x).square().sum().backward()
    for index in range(3):
        reference = plain(network, index)
        own = x.detach()[index].requires_grad_()
        output = reference(own)
        torch.testing.assert_close(network(x)[index], output)
        output.square().sum().backward()
        torch.testing.assert_close(x.grad[index], own.grad)
        linears = [layer for layer in reference if isinstance(layer, nn.Linear)]
        for layer, linear in enumerate(linears):
            torch.testing.assert_close(network.weights[layer].grad[index], linear.weight.grad.T)
            torch.testing.assert_close(network.biases[layer].grad[index, 0], linear.bias.grad)


def test_one_input_serves_all_networks_and_rows_serve_their_own():
    torch.manual_seed(0)
    network = BatchedMLP(4, 3, (8,), 1)
    x = torch.randn(2, 5, 3)
    shared, own = network(x[:1]), network(x)
    torch.testing.assert_close(shared, network(x[:1].expand(4, -1, -1).contiguous()))
    # Two rows for four networks: row 0 for networks 0 and 1, row 1 for 2 and 3.
    torch.testing.assert_close(own[:2], shared[:2])
    torch.testing.assert_close(own[2:], network(x[1:])[2:])


@pytest.mark.parametrize("layer_norm", [False, True])
def test_a_frozen_network_passes_the_gradient_and_keeps_none(layer_norm):
    network = BatchedMLP(2, 3, (4,), 1, layer_norm)
    x = torch.randn(2, 5, 3, requires_grad=True)
    network(x, frozen=True).sum().backward()
    assert x.grad.abs().sum() > 0
    assert all(parameter.grad is None for parameter in network.parameters())


def test_bf16_products_keep_float32_outside():
    torch.manual_seed(0)
    network = BatchedMLP(2, 3, (16, 16), 1)
    x = torch.randn(2, 32, 3, requires_grad=True)
    exact = network(x)
    network.dtype = torch.bfloat16
    rough = network(x)
    rough.sum().backward()
    assert rough.dtype == x.grad.dtype == network.weights[0].grad.dtype == torch.float32
    # bfloat16 has 8 bits of mantissa: products are right to about 1 part in 100.
    torch.testing.assert_close(rough, exact, atol=0.02, rtol=0.05)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 units: slower, and as close
@pytest.mark.parametrize("layer_norm", [False, True])
def test_bf16_tells_large_values_apart(layer_norm):
    torch.manual_seed(0)
    network = BatchedMLP(1, 3, (16, 16), 1, layer_norm)
    x = torch.randn(1, 32, 3)
    exact = network(x).detach()
    network.dtype = torch.bfloat16
    with torch.no_grad():
        network.biases[-1] += 300.0
    # Values near 300 in bf16 come in steps of 2 (8 bits: 2⁸ to 2⁹ in 128 steps); these spread over less than one.
    assert exact.max() - exact.min() < 2
    torch.testing.assert_close(network(x).detach() - 300.0, exact, atol=0.02, rtol=0.05)
