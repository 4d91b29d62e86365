"""ACT: the layout of LeRobot's weights, the residual network, positions, and the conditional VAE."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from native_policies import ACT, STREAMS, act_folder, load, observations, statistics
from torch import nn

from deft import load_vla_model
from deft.errors import InputError
from deft.models.vla.act import Attention, from_published, grid_sinusoids, sinusoids, to_published
from deft.models.vla.resnet import FrozenBatchNorm, ResNet

# Of the keys that LeRobot 0.6.1 saves for these sizes
PUBLISHED = {
    "model.action_head.weight": [3, 32],
    "model.backbone.bn1.running_var": [64],
    "model.backbone.conv1.weight": [64, 3, 7, 7],
    "model.backbone.layer2.0.conv2.weight": [128, 128, 3, 3],
    "model.backbone.layer2.0.downsample.0.weight": [128, 64, 1, 1],
    "model.backbone.layer2.0.downsample.1.running_mean": [128],
    "model.backbone.layer4.1.bn2.bias": [512],
    "model.decoder.layers.0.linear1.weight": [48, 32],
    "model.decoder.layers.0.multihead_attn.in_proj_bias": [96],
    "model.decoder.layers.0.multihead_attn.in_proj_weight": [96, 32],
    "model.decoder.layers.0.norm3.weight": [32],
    "model.decoder.norm.bias": [32],
    "model.decoder_pos_embed.weight": [4, 32],
    "model.encoder.layers.0.self_attn.in_proj_weight": [96, 32],
    "model.encoder.layers.0.self_attn.out_proj.bias": [32],
    "model.encoder_1d_feature_pos_embed.weight": [2, 32],
    "model.encoder_img_feat_input_proj.weight": [32, 512, 1, 1],
    "model.encoder_latent_input_proj.weight": [32, 4],
    "model.encoder_robot_state_input_proj.weight": [32, 5],
    "model.vae_encoder.layers.0.linear2.weight": [32, 48],
    "model.vae_encoder_action_input_proj.weight": [32, 3],
    "model.vae_encoder_cls_embed.weight": [1, 32],
    "model.vae_encoder_latent_output_proj.weight": [8, 32],
    "model.vae_encoder_pos_enc": [1, 6, 32],
    "model.vae_encoder_robot_state_input_proj.bias": [32],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return act_folder(tmp_path_factory.mktemp("act") / "policy")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load("act", folder)


def test_names_and_shapes_are_lerobots(model: Any) -> None:
    own = model.backbone.state_dict()
    published = to_published(own)
    assert PUBLISHED.items() <= {name: list(value.shape) for name, value in published.items()}.items()
    # resnet18: 1 + 20 norms of 4 buffers, 20 convolutions; a layer of the encoder: 12; of the decoder: 18
    assert len(published) == 20 * 4 + 20 + (12 + 1 + 2 + 2 + 2 + 1) + 12 + (18 + 2) + 2 + 2 + 2 + 1 + 1 + 2
    back = from_published(published)
    assert back.keys() == own.keys()
    assert all(torch.equal(back[name], own[name]) for name in own)


def test_attention_is_torchs() -> None:
    torch.manual_seed(0)
    own, theirs = Attention(8, 2), nn.MultiheadAttention(8, 2, batch_first=True)
    own.load_state_dict(
        {name.removeprefix("attn."): value for name, value in from_published(
            {f"model.attn.{name}": value for name, value in theirs.state_dict().items()}
        ).items()}
    )  # fmt: skip
    query, key, value = torch.randn(2, 3, 8), torch.randn(2, 5, 8), torch.randn(2, 5, 8)
    real = torch.tensor([[True] * 5, [True] * 3 + [False] * 2])
    expected = theirs(query, key, value, key_padding_mask=~real)[0]
    torch.testing.assert_close(own(query, key, value, real), expected)


def test_frozen_batch_norm_is_batch_norm_in_evaluation() -> None:
    torch.manual_seed(0)
    theirs = nn.BatchNorm2d(3).eval()
    for tensor in (theirs.weight.data, theirs.running_mean, theirs.running_var):
        tensor.uniform_(0.5, 1.5)
    own = FrozenBatchNorm(3)
    own.load_state_dict({name: value for name, value in theirs.state_dict().items() if name != "num_batches_tracked"})
    images = torch.randn(2, 3, 4, 4)
    torch.testing.assert_close(own(images), theirs(images))
    assert not list(own.parameters())


@pytest.mark.parametrize(
    ("name", "dilate", "channels", "side"), [("resnet18", False, 512, 2), ("resnet50", True, 2048, 4)]
)
def test_feature_maps_have_a_32nd_of_the_size_or_a_16th(name: str, dilate: bool, channels: int, side: int) -> None:
    network = ResNet(name, FrozenBatchNorm, dilate)
    assert network(torch.zeros(1, 3, 64, 64)).shape == (1, channels, side, side)
    with pytest.raises(InputError, match="replace_final_stride_with_dilation needs resnet50"):
        ResNet("resnet18", FrozenBatchNorm, True)


def test_positions() -> None:
    # Position 3 in 4 dims: sin 3, cos 3, then with the period 10000^(2/4) = 100 times as long
    expected = torch.tensor([math.sin(3), math.cos(3), math.sin(0.03), math.cos(0.03)])
    torch.testing.assert_close(sinusoids(torch.tensor([3.0]), 4)[0], expected)
    grid = grid_sinusoids(torch.zeros(1, 4, 2, 4))  # 2 rows, 4 columns; 2 dims each
    assert grid.shape == (8, 4)
    # Row 1 of 2 is at π, column 3 of 4 at 3π/2: token 2
    torch.testing.assert_close(grid[2], torch.tensor([0.0, -1.0, -1.0, 0.0]), rtol=0, atol=1e-5)


def test_images_state_and_actions_are_normalised_by_the_folder(model: Any) -> None:
    seen, known = observations(), statistics()
    top = known["observation.images.wrist_rgb"]
    expected = (seen["wrist_rgb"] / 255.0 - top["mean"]) / top["std"]
    torch.testing.assert_close(model.images(seen)[1], expected)
    chunk = model.backbone(model.images(seen), model._state(seen), torch.zeros(3, 4))[0]
    action = chunk[:, :2] * known["action"]["std"] + known["action"]["mean"]
    torch.testing.assert_close(model(seen, deterministic=True), action)


def test_the_loss_is_an_l1_error_and_the_divergence_of_the_latent(model: Any) -> None:
    seen, actions = observations(), torch.randn(3, 2, 3)
    target = (actions - model.action_statistics.shift) / model.action_statistics.scale
    real = torch.ones(3, 2, dtype=torch.bool)
    mean, log_variance = model.backbone.posterior(target, model._state(seen), real)
    torch.manual_seed(4)
    latent = mean + (0.5 * log_variance).exp() * torch.randn(3, 4)
    predicted = model.backbone(model.images(seen), model._state(seen), latent)[0][:, :2]
    posterior = torch.distributions.Normal(mean, (0.5 * log_variance).exp())
    prior = torch.distributions.Normal(torch.zeros(3, 4), torch.ones(3, 4))
    divergence = torch.distributions.kl_divergence(posterior, prior).sum(1)
    torch.manual_seed(4)
    found = model.imitation_loss(seen, actions)
    torch.testing.assert_close(found, (predicted - target).abs().mean((1, 2)) + divergence)  # kl_weight 1


def test_without_a_vae_the_loss_is_the_l1_error() -> None:
    torch.manual_seed(0)
    model: Any = load_vla_model(None, "act", STREAMS | {"architecture": ACT | {"use_vae": False}})
    seen, actions = observations(), torch.randn(3, 2, 3)
    assert not [name for name in model.state_dict() if "vae" in name]
    error = (model(seen, deterministic=True) - actions).abs().mean((1, 2))  # no statistics: actions as they are
    torch.testing.assert_close(model.imitation_loss(seen, actions), error)


def test_statistics_of_older_folders_are_among_the_weights(folder: Path, tmp_path: Path, model: Any) -> None:
    from safetensors.torch import load_file, save_file

    old = tmp_path / "old"
    old.mkdir()
    (old / "config.json").write_bytes((folder / "config.json").read_bytes())
    buffers = {}
    for name, one in statistics().items():
        part = "unnormalize_outputs" if name == "action" else "normalize_inputs"
        buffers |= {f"{part}.buffer_{name.replace('.', '_')}.{key}": value for key, value in one.items()}
    save_file(load_file(folder / "model.safetensors") | buffers, old / "model.safetensors")
    seen = observations()
    assert torch.equal(load("act", old)(seen, deterministic=True), model(seen, deterministic=True))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"vision_backbone": "vgg16"}, "vision_backbone 'vgg16' is none of resnet18"),
        ({"n_heads": 5}, "dim_model 32 is no multiple of n_heads 5"),
        ({"feedforward_activation": "glu"}, "feedforward_activation 'glu' is none of relu, gelu"),
        ({"layers": 5}, "architecture.layers is no setting of the policy"),
    ],
)
def test_settings_that_do_not_exist_are_rejected(changed: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        load_vla_model(None, "act", STREAMS | {"architecture": ACT | changed})
