"""GR00T N1.5: the layout of the published weights, times, prompts, embodiments, and what is rejected."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from native_policies import GROOT, SETTINGS, STREAMS, groot_folder, load, observations
from safetensors.torch import load_file, save_file

from deft import load_vla_model
from deft.errors import InputError
from deft.models.vla.groot import chat_prompt
from deft.models.vla.groot_network import EmbodimentLinear, TimeNorm, time_features

EAGLE = "backbone.eagle_model."
# Of the keys of GR00T N1.5, for these sizes
PUBLISHED = {
    f"{EAGLE}vision_model.vision_model.embeddings.patch_embedding.weight": [16, 3, 14, 14],
    f"{EAGLE}vision_model.vision_model.post_layernorm.bias": [16],
    f"{EAGLE}language_model.model.embed_tokens.weight": [300, 32],
    f"{EAGLE}language_model.model.layers.1.self_attn.q_norm.weight": [8],
    f"{EAGLE}language_model.model.norm.weight": [32],
    f"{EAGLE}mlp1.0.weight": [32, 16],
    "action_head.vlln.weight": [32],
    "action_head.vl_self_attention.transformer_blocks.0.norm1.weight": [32],
    "action_head.vl_self_attention.transformer_blocks.0.attn1.to_out.0.bias": [32],
    "action_head.vl_self_attention.transformer_blocks.0.norm3.weight": [32],
    "action_head.model.timestep_encoder.timestep_embedder.linear_1.weight": [16, 256],
    "action_head.model.transformer_blocks.0.norm1.linear.weight": [32, 16],
    "action_head.model.transformer_blocks.0.attn1.to_k.weight": [16, 32],
    "action_head.model.transformer_blocks.1.attn1.to_k.weight": [16, 16],
    "action_head.model.transformer_blocks.0.ff.net.0.proj.weight": [64, 16],
    "action_head.model.transformer_blocks.0.ff.net.2.weight": [16, 64],
    "action_head.model.proj_out_1.weight": [32, 16],
    "action_head.model.proj_out_2.weight": [12, 16],
    "action_head.state_encoder.layer1.W": [32, 10, 12],
    "action_head.state_encoder.layer2.b": [32, 16],
    "action_head.action_encoder.W1.W": [32, 6, 16],
    "action_head.action_encoder.W2.W": [32, 32, 16],
    "action_head.action_decoder.layer2.W": [32, 12, 6],
    "action_head.future_tokens.weight": [2, 16],
    "action_head.position_embedding.weight": [8, 16],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return groot_folder(tmp_path_factory.mktemp("groot") / "policy")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return load("groot", folder)


def test_names_and_shapes_are_those_of_nvidia(folder: Path) -> None:
    saved = {name: list(value.shape) for name, value in load_file(folder / "model.safetensors").items()}
    assert PUBLISHED.items() <= saved.items()
    # Norms of the diffusion transformer have no weights beside those of the time
    assert not [name for name in saved if "model.transformer_blocks.0.norm3" in name and "vl_self" not in name]


def test_weights_that_lerobot_saved_are_the_same(folder: Path, tmp_path: Path, model: Any) -> None:
    """LeRobot adds a prefix; layers of Qwen3 after those that are used may be there."""
    path = groot_folder(tmp_path / "policy")
    weights = load_file(path / "model.safetensors")
    later = {f"{EAGLE}language_model.model.layers.2.mlp.up_proj.weight": torch.zeros(1)}
    save_file({f"_groot_model.{name}": value for name, value in (weights | later).items()}, path / "model.safetensors")
    again = load("groot", path).state_dict()
    assert all(torch.equal(value, again[name]) for name, value in model.state_dict().items())


def test_time_runs_from_noise_to_actions_in_buckets(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deft's t = 1 is noise, GR00T's 0; three steps are at the buckets 0, ⌊1000 / 3⌋ and ⌊2000 / 3⌋."""
    times: list[int] = []
    forward = type(model.backbone).forward

    def spy(self: Any, x: Any, time: Any, **given: Any) -> Any:
        times.append(int(time[0]))
        return forward(self, x, time, **given)

    monkeypatch.setattr(type(model.backbone), "forward", spy)
    with torch.no_grad():
        model(observations(), deterministic=True)
        velocity, _ = model.field(observations())
        velocity(torch.zeros(3, 4, 6), torch.full((3,), 1.0 - 0.6))
    assert times == [0, 333, 666, 600]


def test_the_velocity_is_the_negative_prediction(model: Any) -> None:
    velocity, _ = model.field(observations())
    seen, x = observations(), torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
    ids, real = model.tokenize.rows(model._instructions(seen, 3), torch.device("cpu"))
    features = model.backbone.read(model.preprocess(seen), ids, real)
    state = torch.nn.functional.pad(model.state_statistics.normalize(seen["state"]), (0, 5))
    predicted = model.backbone(x, torch.full((3,), 500), state, features, real)
    torch.testing.assert_close(velocity(x, torch.full((3,), 0.5)), -predicted)


def test_prompts_have_the_patches_and_a_list_with_the_text(model: Any) -> None:
    rows = model._instructions(observations(1), 1)
    assert rows == [b"['pick up the red cube']"]
    ids, real = model.tokenize.rows(rows, torch.device("cpu"))
    assert int((ids == 1).sum()) == 2 * 4  # two cameras with four patches
    assert int(real.sum()) == 8 + len(rows[0])
    model_without = observations(1)
    model_without["instruction"] = torch.zeros(1, 40, dtype=torch.uint8)
    assert model._instructions(model_without, 1) == [b"['Perform the task.']"]


def test_padding_of_the_prompt_changes_nothing(folder: Path, model: Any) -> None:
    short = load("groot", folder, prompt_length=28)
    x, time = torch.randn(3, 4, 6), torch.tensor([0.2, 0.5, 0.8])
    with torch.no_grad():
        outputs = [one.field(observations())[0](x, time) for one in (model, short)]
    torch.testing.assert_close(*outputs, rtol=0, atol=1e-5)


def test_the_chat_template_of_the_tokenizer_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Tokenizer:
        def apply_chat_template(self, chat: Any, **keywords: Any) -> str:
            kinds = [part["type"] for part in chat[0]["content"]]
            assert kinds == ["image", "image", "text"]
            return "user: <image-1><image-2>" + chat[0]["content"][2]["text"] + " assistant:"

    class Module:
        AutoTokenizer = type("Auto", (), {"from_pretrained": staticmethod(lambda *given, **keywords: Tokenizer())})

    monkeypatch.setattr("deft.models.vla.groot.transformers_module", Module)
    patch = "<IMG_CONTEXT>"
    expected = f"user: <image 1><img>{patch * 3}</img><image 2><img>{patch * 3}</img>{{instruction}} assistant:"
    assert chat_prompt(str(tmp_path), 3, 2) == expected
    with pytest.raises(InputError, match=r"vlm_folder: GR00T needs config.json and the tokenizer of Eagle 2.5"):
        chat_prompt(None, 3, 2)


def test_embodiments_have_weights_of_their_own(folder: Path, model: Any) -> None:
    layer = EmbodimentLinear(3, 2, 2)
    x = torch.randn(1, 4, 2)
    torch.testing.assert_close(layer(x, 1), x @ layer.W[1] + layer.b[1])
    other = load("groot", folder, embodiment=4)
    x, time = torch.randn(3, 4, 6), torch.full((3,), 0.5)
    with torch.no_grad():
        assert not torch.allclose(other.field(observations())[0](x, time), model.field(observations())[0](x, time))


def test_times_scale_and_shift_norms() -> None:
    norm = TimeNorm(4)
    x, time = torch.randn(2, 3, 4), torch.randn(2, 4)
    scale, shift = norm.linear(torch.nn.functional.silu(time)).chunk(2, -1)
    expected = torch.nn.functional.layer_norm(x, [4]) * (1 + scale[:, None]) + shift[:, None]
    torch.testing.assert_close(norm(x, time), expected)
    found = time_features(torch.tensor([2]))[0]
    assert found.shape == (256,)
    torch.testing.assert_close(found[[0, 128]], torch.tensor([2.0]).cos().repeat(2) * torch.tensor([1.0, 0.0])
                               + torch.tensor([2.0]).sin().repeat(2) * torch.tensor([0.0, 1.0]))  # fmt: skip


def test_qwen3_is_frozen_as_the_folder_sets_it(model: Any) -> None:
    frozen = {name for name, one in model.backbone.named_parameters() if not one.requires_grad}
    assert frozen
    assert all("language_model" in name for name in frozen)


@pytest.mark.parametrize(
    ("part", "changed", "line"),
    [
        ("backbone_cfg", {"project_to_dim": 1536}, "project_to_dim must be null: GR00T N1 is not supported"),
        ("eagle_config", {"use_pixel_shuffle": True}, "mlp_connector_layers 1 and without use_pixel_shuffle"),
        ("action_head_cfg", {"noise_beta_beta": 2.0}, "noise_beta_beta must be 1"),
        ("action_head_cfg", {"max_state_dim": 2}, "proprio_dim 5 is more than this GR00T has: 2"),
        ("action_head_cfg", {"action_dim": 2}, "action_dim 3 is more than this GR00T has: 2"),
        ("action_head_cfg", {"max_num_embodiments": 2}, "embodiment 3 must be 0 to 1"),
    ],
)
def test_settings_that_do_not_fit_are_rejected(part: str, changed: dict[str, Any], line: str) -> None:
    architecture = GROOT | {part: GROOT[part] | changed}
    with pytest.raises(InputError, match=line):
        load_vla_model(None, "groot", STREAMS | SETTINGS["groot"] | {"architecture": architecture})


def test_folders_that_do_not_fit_are_rejected(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no GR00T: there is no config.json"):
        load("groot", tmp_path)
    with pytest.raises(InputError, match="chunk_length 9 is more than this GR00T has: 4"):
        load("groot", folder, chunk_length=9)
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gr00t_n1_6"}))
    with pytest.raises(InputError, match="has the model_type 'gr00t_n1_6'; groot needs 'gr00t_n1_5'"):
        load("groot", tmp_path)
    del config["eagle_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"vlm_folder: GR00T needs config.json and the tokenizer of Eagle 2.5"):
        load("groot", tmp_path)
