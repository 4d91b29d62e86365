"""SmolVLA and π0.5: names of LeRobot's weights, who attends to whom, prompts, times, images, and shared layers."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from native_policies import FOLDERS, PI05, SETTINGS, SMOLVLA, STREAMS, load, observations, statistics
from safetensors.torch import load_file, save_file

from deft import load_vla_model
from deft.errors import InputError
from deft.models.vla import pi05 as pi05_module
from deft.models.vla.experts import attend, resize_with_padding, rotate, time_embedding

# Of the keys that LeRobot 0.6.1 saves for these sizes
PUBLISHED = {
    "smolvla": {
        "model.action_in_proj.weight": [24, 6],
        "model.action_out_proj.weight": [6, 24],
        "model.action_time_mlp_in.weight": [24, 48],
        "model.state_proj.weight": [32, 10],
        "model.vlm_with_expert.lm_expert.layers.0.self_attn.k_proj.weight": [8, 24],  # reads actions
        "model.vlm_with_expert.lm_expert.layers.1.self_attn.k_proj.weight": [8, 8],  # reads keys of SmolVLM2
        "model.vlm_with_expert.lm_expert.layers.1.mlp.gate_proj.weight": [256, 24],
        "model.vlm_with_expert.lm_expert.norm.weight": [24],
        "model.vlm_with_expert.vlm.model.connector.modality_projection.proj.weight": [32, 64],
        "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight": [300, 32],
        "model.vlm_with_expert.vlm.model.text_model.layers.1.self_attn.q_proj.weight": [16, 32],
        "model.vlm_with_expert.vlm.model.vision_model.embeddings.patch_embedding.weight": [16, 3, 8, 8],
    },
    "pi05": {
        "model.action_in_proj.weight": [24, 6],
        "model.paligemma_with_expert.gemma_expert.model.layers.0.input_layernorm.dense.weight": [72, 24],
        "model.paligemma_with_expert.gemma_expert.model.layers.0.post_attention_layernorm.dense.bias": [72],
        "model.paligemma_with_expert.gemma_expert.model.layers.0.self_attn.o_proj.weight": [24, 16],
        "model.paligemma_with_expert.gemma_expert.model.norm.dense.weight": [72, 24],
        "model.paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight": [300, 32],
        "model.paligemma_with_expert.paligemma.model.language_model.layers.0.mlp.up_proj.weight": [48, 32],
        "model.paligemma_with_expert.paligemma.model.multi_modal_projector.linear.weight": [32, 16],
        "model.paligemma_with_expert.paligemma.model.vision_tower.vision_model.embeddings.position_embedding.weight":
            [4, 16],
        "model.time_mlp_out.bias": [24],
    },
}  # fmt: skip
NETWORKS: dict[str, Any] = {"smolvla": SMOLVLA, "pi05": PI05}


@pytest.fixture(scope="module", params=["smolvla", "pi05"])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def folder(name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return FOLDERS[name](tmp_path_factory.mktemp(name) / "policy")


@pytest.fixture(scope="module")
def model(name: str, folder: Path) -> Any:
    return load(name, folder)


def test_names_and_shapes_are_lerobots(name: str, folder: Path, model: Any) -> None:
    module = __import__(f"deft.models.vla.{name}", fromlist=["to_published"])
    published = module.to_published(model.backbone.state_dict())
    assert PUBLISHED[name].items() <= {key: list(value.shape) for key, value in published.items()}.items()
    saved = set(load_file(folder / "model.safetensors"))
    assert {key for key in published if key != pi05_module.EMBEDDING} <= saved
    assert not [key for key in published if "layers.2." in key]  # SmolVLM2 has more layers than are used


def test_what_a_token_may_read(name: str, model: Any) -> None:
    """In both, actions read the prefix; in SmolVLA an action reads earlier actions, in π0.5 all of them."""
    velocity, _ = model.field(observations(1))
    x = torch.randn(1, 4, 6, generator=torch.Generator().manual_seed(0), requires_grad=True)
    out = velocity(x, torch.tensor([0.5]))
    read = torch.stack([torch.autograd.grad(out[0, step].sum(), x, retain_graph=True)[0][0].abs().sum(1) > 0
                        for step in range(4)])  # fmt: skip
    expected = torch.ones(4, 4, dtype=torch.bool)
    assert torch.equal(read, expected.tril() if name == "smolvla" else expected)


def test_padding_of_the_prompt_changes_nothing(name: str, folder: Path, model: Any) -> None:
    """The longest prompt of these has 23 tokens, or 65."""
    short = load(name, folder, prompt_length={"smolvla": 24, "pi05": 65}[name])
    x, time = torch.randn(3, 4, 6), torch.tensor([0.2, 0.5, 0.8])
    with torch.no_grad():
        outputs = [one.field(observations())[0](x, time) for one in (model, short)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_the_velocity_depends_on_time(model: Any) -> None:
    velocity, x = model.field(observations())[0], torch.randn(3, 4, 6)
    early, late = (velocity(x, torch.full((3,), time)) for time in (0.9, 0.1))
    assert bool(((early - late).detach().abs() > 1e-6).any(2).all())


def test_cameras_may_be_left_out_by_name(name: str, folder: Path, model: Any) -> None:
    one = load(name, folder, cameras={"wrist_rgb": "observation.images.wrist_rgb"})
    assert one.image_keys == ("wrist_rgb",)
    x, time = torch.randn(3, 4, 6), torch.full((3,), 0.5)
    with torch.no_grad():
        assert not torch.allclose(one.field(observations())[0](x, time), model.field(observations())[0](x, time))
    with pytest.raises(InputError, match=r"the policy reads observation.images.head_rgb"):
        load(name, folder, cameras={"head_rgb": "observation.images.side"})


def test_training_the_expert_only_leaves_the_vision_language_model(name: str, folder: Path) -> None:
    model = load(name, folder, train_expert_only=True)
    model.imitation_loss(observations(), torch.randn(3, 2, 3)).sum().backward()
    moved = {key for key, value in model.backbone.named_parameters() if value.grad is not None}
    assert moved
    assert not [key for key in moved if ".vlm." in key or ".paligemma." in key]
    assert [
        key for key in moved if "expert" in key.removeprefix("vlm_with_expert").removeprefix("paligemma_with_expert")
    ]


def test_pi05_writes_the_state_into_its_prompt(tmp_path: Path) -> None:
    model = load("pi05", FOLDERS["pi05"](tmp_path / "policy"))
    text = torch.tensor([list(b"pick_it\nup\0\0")], dtype=torch.uint8)
    # Bins of width 1/128 from −1: −1 → 0, 0 → 128, 0.5 → 192, 1 and above → 255, below −1 → −1
    state = torch.tensor([[-1.0, 0.0, 0.5, 3.0, -1.1]])
    assert model.prompts(text, state) == [b"Task: pick it up, State: 0 128 192 255 -1;\nAction: "]
    known = statistics()["observation.state"]
    middle = (known["q01"] + known["q99"]) / 2
    torch.testing.assert_close(model.state_statistics.normalize(known["q99"]), torch.ones(5))
    torch.testing.assert_close(model.state_statistics.normalize(middle), torch.zeros(5), rtol=0, atol=1e-6)


def test_pi05_without_the_prefix_of_names_is_the_same(tmp_path: Path) -> None:
    """openpi's conversion saves names without `model.`."""
    folder = FOLDERS["pi05"](tmp_path / "policy")
    before = load("pi05", folder).state_dict()
    weights = load_file(folder / "model.safetensors")
    save_file({key.removeprefix("model."): value for key, value in weights.items()}, folder / "model.safetensors")
    after = load("pi05", folder).state_dict()
    assert all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize(
    ("kind", "changed", "line"),
    [
        ("smolvla", {"add_image_special_tokens": True}, "architecture.add_image_special_tokens is no setting"),
        ("smolvla", {"num_expert_layers": 1}, "num_expert_layers 1 must be the number of layers of the VLM, 2"),
        (
            "smolvla",
            {"vlm_config": None},
            "vlm_folder: SmolVLA needs the config.json and the tokenizer of HuggingFaceTB",
        ),
        ("smolvla", {"max_state_dim": 2}, "proprio_dim 5 is more than this SmolVLA has: 2"),
        ("pi05", {"max_action_dim": 2}, "action_dim 3 is more than this π0.5 has: 2"),
        ("pi05", {"vlm_config": None, "paligemma_variant": "gemma_9b"}, "π0.5 has no network 'gemma_9b'"),
        ("pi05", {"time_sampling_beta_beta": 2.0}, "time_sampling_beta_beta must be 1"),
    ],
)
def test_what_does_not_fit_is_rejected(kind: str, changed: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        load_vla_model(None, kind, STREAMS | SETTINGS[kind] | {"architecture": NETWORKS[kind] | changed})


# -------------------------------------------------------------------------------------------------------- shared layers


def test_rotation_by_hand() -> None:
    # Two pairs of dims: frequencies 1 and 1 / 100; (x0, x2) and (x1, x3) are pairs. Position 2.
    found = rotate(torch.tensor([[[[1.0, 0.0, 0.0, 1.0]]]]), torch.tensor([[2]]))[0, 0, 0]
    expected = torch.tensor([math.cos(2), -math.sin(0.02), math.sin(2), math.cos(0.02)])
    torch.testing.assert_close(found, expected)


def test_attention_with_shared_keys_is_torchs() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 3, 4, 8), torch.randn(2, 5, 2, 8), torch.randn(2, 5, 2, 8)
    mask = torch.rand(2, 3, 5) > 0.4
    mask[..., 0] = True
    heads = [x.transpose(1, 2) for x in (query, key, value)]
    expected = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=mask.unsqueeze(1), enable_gqa=True)
    torch.testing.assert_close(attend(query, key, value, mask), expected.transpose(1, 2))
    nothing = attend(query, key, value, torch.zeros_like(mask))
    assert bool(torch.isfinite(nothing).all())


def test_times_by_hand() -> None:
    # Periods 0.5 and 2: the angles of t = 0.25 are π and π / 4
    found = time_embedding(torch.tensor([0.25]), 4, 0.5, 2.0)[0]
    expected = torch.tensor([0.0, math.sqrt(0.5), -1.0, math.sqrt(0.5)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-6)


def test_images_are_padded_where_the_model_expects_it() -> None:
    image = torch.ones(1, 3, 4, 8)  # half as high as wide
    corner, centre = (resize_with_padding(image, (8, 8), centered)[0, 0, :, 0] for centered in (False, True))
    assert corner.tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert centre.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]
    assert resize_with_padding(image, (4, 8), True) is image
