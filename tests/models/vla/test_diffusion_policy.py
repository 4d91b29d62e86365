"""Diffusion Policy: the layout of LeRobot's weights, keypoints, the U-Net, the chain, the loss, and histories."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from native_policies import DIFFUSION, STREAMS, acted, diffusion_folder, load, observations, statistics
from tensordict import TensorDict
from torch import nn

from deft import VLAPolicy, load_vla_model, schema
from deft.errors import InputError
from deft.models.inpainting import Inpainting
from deft.models.vla.diffusion_network import (
    ResidualBlock,
    SpatialSoftmax,
    center_crop,
    crop_shape,
    map_size,
    position_grid,
    time_sinusoids,
)
from deft.models.vla.diffusion_policy import from_published, to_published
from deft.models.vla.resnet import FixedBatchNorm

# Of the keys that LeRobot 0.6.1 saves for these sizes: actions 3, down_dims 16 and 32, and 2 · (5 + 2 · 8) + 16 numbers
# of condition
PUBLISHED = {
    "diffusion.rgb_encoder.backbone.0.weight": [64, 3, 7, 7],
    "diffusion.rgb_encoder.backbone.1.bias": [64],
    "diffusion.rgb_encoder.backbone.5.0.downsample.0.weight": [128, 64, 1, 1],
    "diffusion.rgb_encoder.backbone.7.1.conv2.weight": [512, 512, 3, 3],
    "diffusion.rgb_encoder.out.weight": [8, 8],
    "diffusion.rgb_encoder.pool.nets.weight": [4, 512, 1, 1],
    "diffusion.rgb_encoder.pool.pos_grid": [4, 2],
    "diffusion.unet.diffusion_step_encoder.1.weight": [64, 16],
    "diffusion.unet.diffusion_step_encoder.3.bias": [16],
    "diffusion.unet.down_modules.0.0.conv1.block.0.weight": [16, 3, 5],
    "diffusion.unet.down_modules.0.0.residual_conv.weight": [16, 3, 1],
    "diffusion.unet.down_modules.0.2.weight": [16, 16, 3],
    "diffusion.unet.down_modules.1.0.cond_encoder.1.weight": [64, 58],
    "diffusion.unet.mid_modules.1.conv2.block.1.weight": [32],
    "diffusion.unet.up_modules.0.0.conv1.block.0.weight": [16, 64, 5],
    "diffusion.unet.up_modules.0.2.weight": [16, 16, 4],
    "diffusion.unet.final_conv.0.block.0.weight": [16, 16, 5],
    "diffusion.unet.final_conv.1.weight": [3, 16, 1],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return diffusion_folder(tmp_path_factory.mktemp("diffusion") / "policy")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load("diffusion-policy", folder)


def test_names_and_shapes_are_lerobots(model: Any) -> None:
    own = model.backbone.state_dict()
    published = to_published(own, position_grid(2, 2))
    assert PUBLISHED.items() <= {name: list(value.shape) for name, value in published.items()}.items()
    back = from_published(published)
    assert back.keys() == own.keys()
    assert all(torch.equal(back[name], own[name]) for name in own)


def test_each_camera_may_have_an_encoder_with_batch_norms(tmp_path: Path) -> None:
    path = diffusion_folder(tmp_path, use_separate_rgb_encoder_per_camera=True, use_group_norm=False)
    published = to_published(load("diffusion-policy", path).backbone.state_dict(), position_grid(2, 2))
    for camera in (0, 1):
        assert f"diffusion.rgb_encoder.{camera}.backbone.4.0.bn1.num_batches_tracked" in published
        assert f"diffusion.rgb_encoder.{camera}.pool.pos_grid" in published


def test_batch_norm_keeps_its_statistics_and_trains_its_scale() -> None:
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(3)
    for tensor in (theirs.weight.data, theirs.running_mean, theirs.running_var):
        assert tensor is not None
        tensor.uniform_(0.5, 1.5)
    own = FixedBatchNorm(3)
    own.load_state_dict(theirs.state_dict())
    images = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(own.train()(images), theirs.eval()(images))
    assert torch.equal(own.running_mean, theirs.running_mean)
    assert own.weight.requires_grad


def test_a_keypoint_is_the_mean_position_of_a_map() -> None:
    pool = SpatialSoftmax(1, 1)
    nn.init.ones_(pool.nets.weight)
    nn.init.zeros_(pool.nets.bias)
    # Row 0: 0, log 2, 0; row 1: −∞. Weights ¼, ½, ¼ at x = −1, 0, 1 and y = −1
    found = pool(torch.tensor([[[[0.0, math.log(2), 0.0], [-100.0, -100.0, -100.0]]]]))
    torch.testing.assert_close(found, torch.tensor([[[0.0, -1.0]]]))
    found = pool(torch.tensor([[[[0.0, -100.0, -100.0], [0.0, -100.0, 0.0]]]]))  # x: −1, −1, 1; y: −1, 1, 1
    torch.testing.assert_close(found, torch.tensor([[[-1 / 3, 1 / 3]]]))
    with pytest.raises(InputError, match="at most 32 pixels"):
        pool(torch.zeros(1, 1, 1, 1))


def test_images_are_resized_and_cropped() -> None:
    image = torch.arange(25.0).view(1, 1, 5, 5)
    assert center_crop(image, (3, 2))[0, 0].tolist() == [[7, 8], [12, 13], [17, 18]]  # rows from 1, columns from 2
    with pytest.raises(InputError, match=r"crop_shape \[6, 5\] is larger than the images, 5 × 5"):
        center_crop(image, (6, 5))
    settings = {"resize_shape": None, "crop_ratio": 0.5, "crop_shape": [84, 90]}
    assert crop_shape(settings) == (84, 90)
    assert crop_shape(settings | {"resize_shape": [80, 70]}) == (40, 35)
    assert crop_shape(settings | {"resize_shape": [80, 70], "crop_ratio": 1.0}) is None
    assert map_size(settings, (96, 100)) == (3, 3)
    assert map_size(settings | {"crop_shape": None}, (96, 100)) == (3, 4)


def test_times_by_hand() -> None:
    # Four dims: frequencies 1 and 1 / 10000
    expected = [math.sin(3), math.sin(3e-4), math.cos(3), math.cos(3e-4)]
    torch.testing.assert_close(time_sinusoids(torch.tensor([3]), 4)[0], torch.tensor(expected))


def test_the_condition_scales_and_shifts_channels() -> None:
    torch.manual_seed(0)
    block = ResidualBlock(4, 4, condition=2, kernel=3, groups=2, has_scale=True)
    x, condition = torch.randn(2, 4, 6), torch.randn(2, 2)
    change = block.cond_encoder(condition)
    hidden = block.conv1(x) * change[:, :4, None] + change[:, 4:, None]
    torch.testing.assert_close(block(x, condition), block.conv2(hidden) + x)


def test_state_and_actions_are_normalised_by_their_bounds(model: Any) -> None:
    known = statistics()["action"]
    torch.testing.assert_close(model.action_statistics.normalize(known["max"]), torch.ones(3))
    torch.testing.assert_close(model.action_statistics.normalize(known["min"]), -torch.ones(3))


def test_the_chunk_begins_at_the_oldest_observation(model: Any) -> None:
    """Two observations: step 0 of the chunk is in the past, 1 and 2 are executed; only these are random."""
    torch.manual_seed(0)
    with torch.no_grad():
        action, _, _, sample = model.act(observations())
        chain = sample[schema.CHAIN]
        assert chain.shape == (3, 5, 8, 3)
        torch.testing.assert_close(action, model.action_statistics.denormalize(chain[:, -1, 1:3]))
        transition = model.steps(observations())[0](False, model.executed(None, torch.device("cpu")), None)
        mean, deviation = transition(chain[:, 1], 1)
    is_mean = torch.isclose(mean, chain[:, 2], rtol=0, atol=1e-5).all(2).all(0)
    assert is_mean.tolist() == [True, False, False, True, True, True, True, True]
    expected = torch.full((8, 3), 0.05)  # noise_min
    variance = (1 - model.signal[6]) / (1 - model.signal[11]) * (1 - model.signal[11] / model.signal[6])
    expected[1:3] = variance.sqrt()
    torch.testing.assert_close(deviation[0], expected)


@pytest.mark.parametrize("masks", [False, True])
def test_the_loss_by_hand(folder: Path, masks: bool) -> None:
    """ε̂ against ε over the whole chunk, or over the real steps; the chunk is filled with copies."""
    model = load("diffusion-policy", folder)
    model.config["do_mask_loss_for_padding"] = masks
    model.update = type(model.update)(0.05)  # the network predicts the noise
    seen, actions = observations(), torch.randn(3, 2, 3)
    step_mask = torch.tensor([[True, True], [True, False], [True, True]])
    torch.manual_seed(4)
    found = model.imitation_loss(seen, actions, step_mask)
    torch.manual_seed(4)
    time, noise = torch.randint(1, 21, (3,)), torch.randn(3, 8, 3)
    whole = actions[:, [0, 0, 1, 1, 1, 1, 1, 1]].clone()
    whole[1] = actions[1, 0]
    level = model.signal[time].view(3, 1, 1)
    noisy = level.sqrt() * model.action_statistics.normalize(whole) + (1 - level).sqrt() * noise
    error = (model.backbone(noisy, time - 1, model.condition(seen)) - noise).square()
    expected = torch.stack([error[0, 1:3].mean(), error[1, 1].mean(), error[2, 1:3].mean()])
    torch.testing.assert_close(found, expected if masks else error.mean((1, 2)))


def test_histories_are_read_and_single_observations_repeated(model: Any, caplog: pytest.LogCaptureFixture) -> None:
    now, before = observations(seed=0), observations(seed=1)
    both = now.clone()
    for key in model.streams:
        both[key] = torch.stack([before[key], now[key]], 1)
    twice = now.clone()
    for key in model.streams:
        twice[key] = torch.stack([now[key], now[key]], 1)
    model._warned_of_repetition = False
    with torch.no_grad(), caplog.at_level(logging.WARNING):
        conditions = [model.condition(one) for one in (both, twice, now)]
    assert "the diffusion policy reads the last 2 observations" in caplog.text
    torch.testing.assert_close(conditions[1], conditions[2])
    # [oldest, newest], each the state and the keypoints of both cameras: 5 + 2 · 8 numbers
    torch.testing.assert_close(conditions[0][:, 21:], conditions[1][:, 21:])
    torch.testing.assert_close(conditions[0][:, :5], model.state_statistics.normalize(before["state"]))
    td = VLAPolicy(model).act(TensorDict({schema.OBSERVATION: both.clone()}, [3]))
    assert td[schema.ACTION].shape == (3, 2, 3)
    both["head_rgb"] = both["head_rgb"][:, :1]
    with pytest.raises(InputError, match=r"'head_rgb' has a history of 1 steps; the diffusion policy reads 2"):
        model.condition(both)


def test_fewer_steps_may_be_used_to_act(folder: Path, model: Any) -> None:
    fast = load("diffusion-policy", folder, num_steps=2)
    assert fast.times == [11, 1, 0]
    policy, td = acted(fast)
    assert td[schema.SAMPLE, schema.CHAIN].shape == (3, 3, 8, 3)
    torch.testing.assert_close(policy.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"horizon": 6}, "horizon 6 must be a multiple of 4: down_dims has 2 stages"),
        ({"n_groups": 3}, r"down_dims \[16, 32\] must be multiples of n_groups 3"),
        ({"noise_scheduler_type": "PNDM"}, "noise_scheduler_type 'PNDM' is none of DDPM, DDIM"),
        ({"beta_schedule": "sigmoid"}, "beta_schedule 'sigmoid' is none of"),
        ({"num_inference_steps": 21}, "num_steps 21 is more than the policy was trained with: 20"),
        ({"vision_backbone": "vgg"}, "vision_backbone 'vgg' is none of resnet18"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        load_vla_model(None, "diffusion-policy", STREAMS | {"architecture": DIFFUSION | changed})


def test_keywords_that_do_not_fit_are_rejected() -> None:
    new = STREAMS | {"architecture": DIFFUSION}
    with pytest.raises(InputError, match="noise_min 0 must be above 0"):
        load_vla_model(None, "diffusion-policy", new | {"noise_min": 0})
    with pytest.raises(InputError, match="it reads the robot's state, and there is none"):
        load_vla_model(None, "diffusion-policy", new | {"proprio_key": None})


@pytest.fixture(params=["sample", "epsilon"])
def gaussian(request: Any, tmp_path: Path) -> Any:
    """A policy whose network is the exact denoiser of actions ~ N(0, s²), s = 0.5, each number by itself.

    Â(x) = c x with c = α s² / (α² s² + σ²), or ε̂(x) = σ x / (α² s² + σ²).
    """
    made = load("diffusion-policy", diffusion_folder(tmp_path / "policy", prediction_type=request.param))

    def predict(x: torch.Tensor, time: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
        signal = made.signal[int(time[0]) + 1]
        factor = 0.25 * signal.sqrt() if request.param == "sample" else (1 - signal).sqrt()
        return x * factor / (0.25 * signal + 1 - signal)

    made.backbone.forward = predict
    made.condition = lambda given: torch.zeros(len(given), made.backbone.feature_dim)
    return made


def test_one_step_is_guided_as_computed_by_hand(gaussian: Any) -> None:
    steps = gaussian.steps(observations())[0]
    last, (horizon, dims) = gaussian.num_steps - 1, gaussian.noise_shape
    x = 0.2 * torch.randn(3, horizon, dims, generator=torch.Generator().manual_seed(1))
    target, weights = torch.full_like(x, 0.6), torch.rand(1, horizon, 1, generator=torch.Generator().manual_seed(2))
    end = steps(True, torch.ones(1, horizon, dims, dtype=torch.bool), Inpainting(target, weights))(x, last)[0]
    signal = gaussian.signal[gaussian.times[last]]
    c = signal.sqrt() * 0.25 / (0.25 * signal + 1 - signal)
    # Â' = Â + λ c W (Y − Â) with Â = c x and λ = min(5, 1 / α); the last step ends there
    expected = c * x + min(5.0, float(1 / signal.sqrt())) * c * weights * (target - c * x)
    torch.testing.assert_close(end, expected.clamp(-1, 1))


def test_guidance_moves_the_frozen_steps_alone(gaussian: Any) -> None:
    """Numbers are independent for this network: those without weight are those of the chain without guidance."""
    seen, noise = observations(), torch.randn(3, *gaussian.noise_shape, generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        plain = gaussian.denoise(seen, noise)
        target = 0.5 * torch.ones_like(plain)
        weights = torch.zeros(1, plain.shape[1], 1)
        weights[:, 0] = 1.0
        guided = gaussian.denoise(seen, noise, inpainting=Inpainting(target, weights))
    torch.testing.assert_close(guided[:, 1:], plain[:, 1:])
    before, after = ((target - part)[:, 0].abs() for part in (plain, guided))
    assert float(after.mean()) < 0.3 * float(before.mean())
