"""The camera encoders of vla-tiny: what a cell sees, what the text changes, and how accurate a position is."""

import math

import pytest
import torch
from torch.nn import functional

from deft.errors import InputError
from deft.models.vla.cameras import ENCODERS, TEXT_DIM, CellEncoder, ConvolutionEncoder, ModulatedBlock
from deft.models.vla.tiny import TinyVLAModel


def images(count: int = 5, size: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize(("size", "cell"), [(16, 2), (32, 4), (16, 1), (48, 16)])
def test_a_cell_sees_a_patch_twice_its_width_around_it(size, cell):
    """What a convolution would see: kernels of 2 cell pixels, `cell` apart, over a picture with a black border."""
    torch.manual_seed(0)
    camera, image = CellEncoder(size, cell), images(3, size)
    left = cell // 2
    border = functional.pad(image / 127.5 - 1, (left, cell - left, left, cell - left), value=-1.0)
    kernels = camera.pixels.weight.view(-1, 3, 2 * cell, 2 * cell)
    expected = functional.conv2d(border, kernels, stride=cell).flatten(2).transpose(1, 2)
    seen = functional.linear(camera.cut(image), camera._by_quarter(camera.pixels.weight))
    torch.testing.assert_close(seen, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("vision", ENCODERS)
def test_a_camera_sees_the_same_with_and_without_a_gradient(vision):
    torch.manual_seed(0)
    camera, text = ENCODERS[vision](16, 2), torch.randn(5, TEXT_DIM)
    with torch.no_grad():
        without = camera(images(), text)
    assert without.shape == (5, camera.out_dim)
    torch.testing.assert_close(camera(images(), text), without)


@pytest.mark.parametrize("vision", ENCODERS)
def test_the_text_changes_what_the_queries_of_the_text_see_alone(vision):
    """Of 16 queries the last 8 are computed from the text; the features of cells depend on it with convolutions."""
    torch.manual_seed(0)
    camera, image = ENCODERS[vision](16, 2), images()
    one, other = (camera(image, torch.full((5, TEXT_DIM), value))[:, :32].view(5, 16, 2) for value in (0.0, 1.0))
    assert not torch.equal(one[:, 8:], other[:, 8:])
    assert torch.equal(one[:, :8], other[:, :8]) == (vision == "cells")


@pytest.mark.parametrize("vision", ENCODERS)
def test_a_query_finds_a_bright_cell_with_the_accuracy_of_a_cell(vision):
    """Trained for it, Σ p x is the position of a white square of one cell, among 8 × 8 cells of 2 pixels."""
    torch.manual_seed(0)
    camera = ENCODERS[vision](16, 2)
    column, row = torch.meshgrid(torch.arange(8), torch.arange(8), indexing="ij")
    cells = torch.stack([column.flatten(), row.flatten()], 1)
    image = torch.zeros(64, 3, 16, 16, dtype=torch.uint8)
    for one, (x, y) in zip(image, cells.tolist(), strict=True):
        one[:, 2 * y : 2 * y + 2, 2 * x : 2 * x + 2] = 255
    wanted = cells / 3.5 - 1.0  # the centres of cells 0 to 7 are at −1 to 1
    optimizer = torch.optim.Adam(camera.parameters(), 3e-3)
    for _ in range(60):
        found = camera(image, torch.zeros(64, TEXT_DIM))[:, :2]
        optimizer.zero_grad()
        (found - wanted).square().mean().backward()
        optimizer.step()
    assert float((found - wanted).detach().abs().mean()) < 1 / 7  # half the distance of two cells; at first 0.57


def test_a_block_is_modulated_by_the_text():
    """With identities as convolutions, h = 2 and γ = 0.5, β = 1: h + relu(1.5 · 2 + 1) = 6; of h = −2: −2 + 1."""
    block = ModulatedBlock(1)
    with torch.no_grad():
        for layer in (block.first, block.second):
            layer.weight.zero_()
            layer.weight[:, :, 1, 1] = 1.0
            layer.bias.zero_()
        block.text.weight.zero_()
        block.text.bias.copy_(torch.tensor([0.5, 1.0]))
    features = torch.tensor([2.0, -2.0]).view(1, 1, 1, 2)
    assert block(features, torch.zeros(1, TEXT_DIM)).flatten().tolist() == [6.0, -1.0]


@pytest.mark.parametrize(("size", "cell"), [(16, 4), (32, 8), (48, 2), (64, 4)])
def test_convolutions_see_around_a_cell_at_every_size(size, cell):
    """A change far from a cell changes its features: three scales see the whole of a small image."""
    torch.manual_seed(0)
    camera, image, text = ConvolutionEncoder(size, cell), images(1, size), torch.zeros(1, TEXT_DIM)
    changed = image.clone()
    changed[..., :cell, 2 * cell : 3 * cell] = 0
    with torch.no_grad():
        one, other = (camera.encode_cells(pixels, text, torch.float32)[0] for pixels in (image, changed))
    assert one.shape == ((size // cell) ** 2, camera.channels)
    neighbour = 0  # two cells to the left: beyond the patch of a cell
    assert math.isfinite(float(one.sum()))
    assert not torch.equal(one[neighbour], other[neighbour])


def test_too_few_cells_for_convolutions_are_rejected():
    with pytest.raises(InputError, match="fewer than 4 cells of 8 pixels"):
        TinyVLAModel(action_dim=2, image_size=16, cell=8, vision="convolutions")
    with pytest.raises(InputError, match="vision 'eyes' is none of cells, convolutions"):
        TinyVLAModel(action_dim=2, vision="eyes")
