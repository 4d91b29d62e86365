"""OpenVLA-OFT: the layout of the published weights, parallel decoding, FiLM, the action head, images and files."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_policies import OFT, SETTINGS, STREAMS, load, observations, oft_folder, oft_statistics
from safetensors.torch import load_file, save_file

from deft import load_vla_model
from deft.errors import InputError
from deft.models.vla.prismatic import SHAPES, film_weights, used_weights, vision_shapes

NEW = STREAMS | SETTINGS["openvla-oft"] | {"architecture": OFT}
# Of the keys of OpenVLA, for these sizes: patches of 8 in images of 16, Llama with 32 numbers per token
PUBLISHED = {
    "vision_backbone.featurizer.cls_token": [1, 1, 16],
    "vision_backbone.featurizer.reg_token": [1, 2, 16],
    "vision_backbone.featurizer.pos_embed": [1, 4, 16],
    "vision_backbone.featurizer.patch_embed.proj.weight": [16, 3, 8, 8],
    "vision_backbone.featurizer.blocks.0.norm1.weight": [16],
    "vision_backbone.featurizer.blocks.0.attn.qkv.weight": [48, 16],
    "vision_backbone.featurizer.blocks.0.attn.proj.bias": [16],
    "vision_backbone.featurizer.blocks.0.ls1.scale_factor": [16],
    "vision_backbone.featurizer.blocks.0.mlp.fc1.weight": [24, 16],
    "vision_backbone.featurizer.blocks.1.ls2.scale_factor": [16],
    "vision_backbone.fused_featurizer.pos_embed": [1, 4, 24],
    "vision_backbone.fused_featurizer.blocks.0.mlp.fc2.weight": [24, 40],
    "projector.fc1.weight": [160, 40],
    "projector.fc2.weight": [32, 160],
    "projector.fc3.bias": [32],
    "language_model.model.embed_tokens.weight": [300, 32],
    "language_model.model.layers.1.self_attn.q_proj.weight": [32, 32],
    "language_model.model.layers.0.mlp.gate_proj.weight": [48, 32],
    "language_model.model.norm.weight": [32],
}
HEAD = {
    "model.layer_norm1.weight": [96],
    "model.fc1.weight": [32, 96],
    "model.mlp_resnet_blocks.1.ffn.0.weight": [32],
    "model.mlp_resnet_blocks.0.ffn.1.bias": [32],
    "model.layer_norm2.bias": [32],
    "model.fc2.weight": [3, 32],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return oft_folder(tmp_path_factory.mktemp("oft") / "policy")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load("openvla-oft", folder)


def shapes(module: Any) -> dict[str, list[int]]:
    return {name: list(value.shape) for name, value in module.state_dict().items()}


def test_names_and_shapes_are_openvlas(model: Any) -> None:
    assert PUBLISHED.items() <= shapes(model.backbone).items()
    assert HEAD.items() <= shapes(model.action_head).items()
    assert shapes(model.proprio_projector) == {
        "fc1.weight": [32, 5], "fc1.bias": [32], "fc2.weight": [32, 32], "fc2.bias": [32]
    }  # fmt: skip


def test_the_published_sizes_are_those_of_openvla_7b() -> None:
    names = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    dino, siglip = vision_shapes({"timm_model_ids": names})
    assert (dino.width, dino.depth, dino.registers, dino.has_class, dino.has_scales) == (1024, 24, 4, True, True)
    assert (siglip.width, siglip.depth, siglip.hidden, siglip.has_class) == (1152, 27, int(1152 * 3.7362), False)
    with pytest.raises(InputError, match="timm_model_ids: 'vit_base' is not supported; known: " + next(iter(SHAPES))):
        vision_shapes({"timm_model_ids": ["vit_base"]})


def test_weights_that_are_never_used_are_left_out() -> None:
    unused = (
        "language_model.lm_head.weight", "vision_backbone.featurizer.norm.bias",
        "vision_backbone.featurizer.blocks.2.norm1.weight", "vision_backbone.fused_featurizer.attn_pool.latent",
        "vision_backbone.fused_featurizer.blocks.1.mlp.fc1.bias",
        "language_model.model.layers.0.self_attn.rotary_emb.inv_freq",
    )  # fmt: skip
    kept = ("vision_backbone.featurizer.blocks.1.norm1.weight", "vision_backbone.fused_featurizer.blocks.0.norm1.bias")
    weights = dict.fromkeys(unused + kept, torch.zeros(1))
    assert set(used_weights(weights, OFT)) == set(kept)


def test_every_token_reads_every_other_one(model: Any) -> None:
    """Attention has both directions: the action of the first step depends on the last token, </s>."""
    words = model.backbone.embed(torch.arange(6).view(1, 6)).detach().requires_grad_()
    hidden = model.backbone(words, torch.ones(1, 6, dtype=torch.bool))
    for step in range(6):
        read = torch.autograd.grad(hidden[0, step].sum(), words, retain_graph=True)[0][0].abs().sum(1)
        assert bool((read > 0).all())


def test_the_sequence_is_images_state_prompt_actions(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """1 + 2 cameras · 4 patches + 1 + (prompt − 1) + 4 steps · 3 dims + 1 tokens, and zeros for the actions."""
    given: list[Any] = []
    forward = type(model.backbone).forward

    def spy(self: Any, tokens: Any, real: Any) -> Any:
        given.append((tokens, real))
        return forward(self, tokens, real)

    monkeypatch.setattr(type(model.backbone), "forward", spy)
    hidden = model.action_states(observations())
    tokens, real = given[0]
    length = model.tokenize.length
    assert hidden.shape == (3, 4, 3, 32)
    assert tokens.shape == (3, 1 + 8 + 1 + length - 1 + 12 + 1, 32)
    assert bool((tokens[:, -13:-1] == 0).all())
    torch.testing.assert_close(tokens[0, -1], model.backbone.embed(torch.tensor(2)))
    state = model.proprio_projector(model._state(observations()))
    torch.testing.assert_close(tokens[:, 9], state)
    # "In: What action should the robot take to pick up the red cube?\nOut:" has 67 bytes
    assert real.sum(1).tolist()[0] == 1 + 8 + 1 + 66 + 12 + 1


def test_hidden_states_are_those_before_the_action_tokens(model: Any) -> None:
    """That of the last word is the first, and that of the last action token is left out."""
    seen = observations(1)
    ids, is_word = model.tokenize.rows(model._lower_case(seen, 1), torch.device("cpu"))
    words, stop = model.backbone.embed(ids[:, :67]), model.backbone.embed(torch.tensor([[2]]))
    prompt = (words.sum(1) + stop[:, 0]) / 68
    parts = [words[:, :1], model.backbone.read_images(model.images(seen), prompt)]
    parts += [model.proprio_projector(model._state(seen)).unsqueeze(1), words[:, 1:], torch.zeros(1, 12, 32), stop]
    tokens = torch.cat(parts, 1)
    hidden = model.backbone(tokens, torch.ones(tokens.shape[:2], dtype=torch.bool))
    start = 1 + 8 + 1 + 66  # of the action tokens
    assert int(is_word.sum()) == 67
    torch.testing.assert_close(model.action_states(seen).flatten(1, 2), hidden[:, start - 1 : start + 11])


def test_padding_of_the_prompt_changes_nothing(folder: Path, model: Any) -> None:
    short = load("openvla-oft", folder, prompt_length=70)
    with torch.no_grad():
        actions = [one(observations(), deterministic=True) for one in (model, short)]
    torch.testing.assert_close(*actions, rtol=0, atol=1e-5)


def test_prompts_are_lower_case(model: Any) -> None:
    seen, upper = observations(1), observations(1)
    upper["instruction"] = torch.tensor([list(bytes(seen["instruction"][0].tolist()).upper())], dtype=torch.uint8)
    with torch.no_grad():
        torch.testing.assert_close(model(seen, deterministic=True), model(upper, deterministic=True))


def test_states_and_actions_are_normalised_by_quantiles(model: Any) -> None:
    known = oft_statistics()["tabletop"]
    high = torch.tensor(known["proprio"]["q99"])
    seen = observations()
    seen["state"] = torch.stack([high, high + 9.0, high - 1e4])
    torch.testing.assert_close(model._state(seen), torch.tensor([1.0, 1.0, -1.0]).view(3, 1).expand(-1, 5))
    assert model.action_statistics.scale[2] == 1.0  # a dim that its mask leaves out


def test_the_loss_is_the_l1_error(model: Any) -> None:
    seen, actions = observations(), torch.randn(3, 2, 3)
    step_mask = torch.tensor([[True, True], [True, False], [True, True]])
    mean = model.action_statistics.normalize(model(seen, deterministic=True))
    error = (mean - model.action_statistics.normalize(actions)).abs().sum(2) * step_mask
    torch.testing.assert_close(model.imitation_loss(seen, actions, step_mask), error.sum(1) / 6)


def test_film_reads_the_prompt_and_has_no_effect_at_first(tmp_path: Path) -> None:
    torch.manual_seed(0)
    film: Any = load_vla_model(None, "openvla-oft", NEW | {"architecture": OFT | {"use_film": True}})
    own = film.state_dict()
    plain: Any = load_vla_model(None, "openvla-oft", NEW)
    plain.load_state_dict({name: own[name] for name in plain.state_dict()})
    pixels = [torch.randn(2, 2, 3, 16, 16) for _ in range(2)]
    prompt = torch.randn(2, 32)
    before = plain.backbone.read_images(pixels, prompt)
    torch.testing.assert_close(film.backbone.read_images(pixels, prompt), before)
    block = film.backbone.vision_backbone.featurizer.blocks[0]
    torch.nn.init.normal_(block.scale.weight, std=0.1)
    assert not torch.allclose(film.backbone.read_images(pixels, prompt), before)
    torch.testing.assert_close(film.backbone.read_images(pixels, torch.zeros(2, 32)), before)


def test_film_is_loaded_from_its_file_with_merged_adapters(tmp_path: Path) -> None:
    """W + α / r · B A with r = 2 and α = 2; the names are those of a wrapped vision backbone."""
    torch.manual_seed(3)
    source: Any = load_vla_model(None, "openvla-oft", NEW | {"architecture": OFT | {"use_film": True}})
    path = oft_folder(tmp_path / "policy")
    published, layer = {}, "featurizer.blocks.0.attn.qkv"
    for name, value in source.backbone.vision_backbone.state_dict().items():
        inner = name if ".scale." in name or ".shift." in name else name.replace("blocks.0.", "blocks.0.block.")
        inner = inner if ".scale." in name or ".shift." in name else inner.replace("blocks.1.", "blocks.1.block.")
        published[f"vision_backbone.{inner}"] = value
    wrapped = f"vision_backbone.{layer.replace('blocks.0', 'blocks.0.block')}"
    base = published.pop(f"{wrapped}.weight")
    published[f"{wrapped}.base_layer.bias"] = published.pop(f"{wrapped}.bias")
    down, up = torch.randn(2, 16), torch.randn(48, 2)
    published |= {f"{wrapped}.base_layer.weight": base, f"{wrapped}.lora_A.default.weight": down}
    published[f"{wrapped}.lora_B.default.weight"] = up
    torch.save(published, path / "vision_backbone--10_checkpoint.pt")
    assert f"vision_backbone.{layer}.bias" in film_weights(published)
    model = load("openvla-oft", path)
    torch.testing.assert_close(model.backbone.get_parameter(f"vision_backbone.{layer}.weight"), base + up @ down)
    trained = load("openvla-oft", path, lora={"r": 2}).backbone.named_parameters()
    assert all("lora_" in name or ".scale." in name or ".shift." in name for name, one in trained if one.requires_grad)


def test_images_are_scaled_cropped_and_normalised(folder: Path) -> None:
    model = load("openvla-oft", folder, crop_scale=0.25)
    seen = observations()
    ramp = torch.linspace(0, 255, 16).round().to(torch.uint8).expand(3, 3, 16, 16)
    seen["head_rgb"] = ramp
    dino, siglip = model.images(seen)
    assert dino.shape == siglip.shape == (3, 2, 3, 16, 16)
    # A quarter of the area is half of the side: columns from a quarter to three quarters of the ramp
    row = siglip[0, 0, 0, 8] * 0.5 + 0.5
    torch.testing.assert_close(row, torch.linspace(0.25, 0.75, 16), rtol=0, atol=0.01)
    green = (siglip[0, 0, 1] * 0.5 + 0.5 - 0.456) / 0.224
    torch.testing.assert_close(dino[0, 0, 1], green)


def test_weights_may_be_in_several_files(folder: Path, tmp_path: Path, model: Any) -> None:
    path = oft_folder(tmp_path / "policy")
    weights = load_file(path / "model.safetensors")
    names = sorted(weights)
    (path / "model.safetensors").unlink()
    for part, chosen in enumerate((names[::2], names[1::2]), 1):
        save_file({name: weights[name] for name in chosen}, path / f"model-0000{part}-of-00002.safetensors")
    again = load("openvla-oft", path)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in again.state_dict().items())


def test_openvla_before_oft_needs_a_new_head(tmp_path: Path) -> None:
    path = oft_folder(tmp_path / "policy")
    for part in ("action_head", "proprio_projector"):
        (path / f"{part}--10_checkpoint.pt").unlink()
    with pytest.raises(InputError, match=r"there is no action_head--…_checkpoint.pt in it; if this is OpenVLA before"):
        load("openvla-oft", path)
    assert load("openvla-oft", path, new_head=True).proprio_projector is not None
    assert load("openvla-oft", path, new_head=True, proprio_key=None).proprio_projector is None


def test_without_a_projector_the_state_is_not_read(tmp_path: Path) -> None:
    path = oft_folder(tmp_path / "policy")
    (path / "proprio_projector--10_checkpoint.pt").unlink()
    assert load("openvla-oft", path).streams == {"head_rgb", "wrist_rgb", "instruction"}


def test_folders_that_do_not_fit_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no OpenVLA: there is no config.json"):
        load("openvla-oft", tmp_path)
    with pytest.raises(InputError, match="chunk_length 9 is more than this OpenVLA-OFT has: 4"):
        load("openvla-oft", folder, chunk_length=9)
    with pytest.raises(InputError, match=r"action_head--10_checkpoint.pt does not fit the action head of OpenVLA-OFT"):
        load("openvla-oft", folder, action_dim=4, statistics={"action": {"mean": [0.0] * 4, "std": [1.0] * 4}})
    with pytest.raises(InputError, match="the policy reads the robot's state, and there is none"):
        load("openvla-oft", folder, proprio_key=None)
    with pytest.raises(InputError, match="set either the folder of the model"):
        load_vla_model(None, "openvla-oft", STREAMS)
    with pytest.raises(InputError, match="crop_scale 0 must be above 0"):
        load("openvla-oft", folder, crop_scale=0)
    path = oft_folder(tmp_path / "policy")
    torch.save({}, path / "action_head--20_checkpoint.pt")
    with pytest.raises(InputError, match=r"there are 2 files action_head--…_checkpoint.pt in it; keep one"):
        load("openvla-oft", path)
    (path / "action_head--20_checkpoint.pt").rename(path / "noisy_action_projector--20_checkpoint.pt")
    with pytest.raises(InputError, match="its action head is a diffusion"):
        load("openvla-oft", path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"model_type": "llava"}))
    with pytest.raises(InputError, match="has the model_type 'llava'; the model class openvla-oft needs 'openvla'"):
        load("openvla-oft", path)
