"""Building and filling policies: presets, config files, strict keys, what must be there."""

import logging

import pytest
import torch
from f1_worlds import f1_batch, micro_config, micro_policy
from safetensors.torch import save_file

from deft.errors import InputError
from deft.models.f1.config import PRESETS
from deft.models.f1.loading import fill_tokenizer, load_f1_policy
from deft.models.f1.policy import F1Policy


@pytest.fixture
def saved(tmp_path):
    policy = micro_policy()
    save_file(policy.state_dict(), tmp_path / "model.safetensors")
    return policy, tmp_path


def one_line(error) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize(("name", "low", "high"), [("tiny", 1e6, 3e6), ("small", 8e7, 1.2e8), ("full", 4.1e9, 4.9e9)])
def test_sizes_of_the_presets(name, low, high):
    with torch.device("meta"):
        policy = F1Policy(PRESETS[name]())
    assert low < sum(parameter.numel() for parameter in policy.parameters()) < high
    # a tokenizer that ships with the package is to stay under 2 MB; its file holds two bytes a number
    assert name != "tiny" or 2 * sum(tensor.numel() for tensor in policy.tokenizer.state_dict().values()) < 2e6


def test_tiny_takes_the_frames_of_the_environments():
    policy = load_f1_policy("tiny", debug=True).policy
    batch = f1_batch(1, pixels=64)
    results = policy.forward_with_world_model(batch, policy.initial_memory(1))
    assert {"motion_loss", "wm_loss"} <= set(results)
    assert policy.forward_motion_only(batch)["loss"].item() == pytest.approx(results["motion_loss"].item(), abs=1e-6)
    assert policy.predict_images_only(batch, policy.initial_memory(1))["images"].shape == (1, 3, 64, 64)


def test_a_checkpoint_gives_back_the_policy(saved):
    policy, folder = saved
    batch, memory = f1_batch(2), policy.initial_memory(2)
    expected = policy.forward_with_world_model(batch, memory)["loss"]
    torch.save(policy.state_dict(), folder / "weights.pt")
    for path in (folder, folder / "model.safetensors", folder / "weights.pt"):
        loaded, config, full_config = load_f1_policy(micro_config(), checkpoint_path=path)
        assert torch.equal(loaded.eval().forward_with_world_model(batch, memory)["loss"], expected)
        assert config == micro_config()
        assert full_config["num_layers"] == 2
    assert all(not parameter.is_meta for parameter in loaded.parameters())


@pytest.mark.parametrize("published", [False, True])
def test_keys_that_do_not_fit_are_named(published, saved):
    from deft.models.f1.loading import published_state_dict

    policy, folder = saved
    weights = published_state_dict(policy) if published else policy.state_dict()
    norm = "model.wm_out_layer_norm.weight" if published else "model.world_model.norm.weight"
    codes = "vae.quantize.embedding.weight" if published else "tokenizer.quantize.embedding.weight"
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    del weights[norm]
    weights["model.stranger"] = torch.zeros(1)
    weights[codes] = torch.zeros(3, 4)
    save_file(weights, folder / "other.safetensors")
    with pytest.raises(InputError) as error:
        load_f1_policy(micro_config(), checkpoint_path=folder / "other.safetensors")
    text = one_line(error)
    for part in (f"1 missing ({norm})", "1 unexpected (model.stranger)", f"{codes} is [3, 4] in the file and [32, 4]"):
        assert part in text


def test_a_checkpoint_without_the_memory_raises_an_error_unless_it_is_a_published_one(saved):
    from deft.models.f1.loading import published_state_dict

    policy, folder = saved
    bare = {name: tensor for name, tensor in policy.state_dict().items() if ".memory." not in name}
    save_file(bare, folder / "bare.safetensors")
    with pytest.raises(InputError, match=r"missing \(model\.memory\.frame\.weight"):
        load_f1_policy(micro_config(), checkpoint_path=folder / "bare.safetensors")
    repeated = {f"model.vae.{name}": tensor.clone() for name, tensor in policy.tokenizer.state_dict().items()}
    save_file(published_state_dict(policy) | repeated, folder / "published.safetensors")
    loaded = load_f1_policy(micro_config(), checkpoint_path=folder / "published.safetensors").policy
    assert loaded.model.memory.to_generation.gate.abs().max() == 0


def test_a_tokenizer_without_weights_raises_an_error(caplog):
    """Random codes would be learned in silence."""
    with pytest.raises(InputError, match="the image tokenizer has no weights") as error:
        load_f1_policy(micro_config())
    one_line(error)
    with pytest.raises(InputError, match=r"tokenizer's weights .*nowhere\.safetensors are not there") as error:
        load_f1_policy(micro_config(tokenizer_weights="/nowhere.safetensors"))
    one_line(error)
    with caplog.at_level(logging.WARNING, "deft.models.f1.loading"):
        load_f1_policy(micro_config(), debug=True)
    assert "its codes mean nothing yet" in caplog.text


def test_a_tokenizer_of_its_own_file(saved):
    policy, folder = saved
    save_file(policy.tokenizer.state_dict(), folder / "tokenizer.safetensors")
    for name in ("tokenizer.safetensors", "model.safetensors"):  # alone, or out of a whole checkpoint
        loaded = load_f1_policy(micro_config(tokenizer_weights=str(folder / name))).policy
        for key, tensor in policy.tokenizer.state_dict().items():
            assert torch.equal(loaded.tokenizer.state_dict()[key], tensor)
    save_file({"encoder.conv_in.weight": torch.zeros(1)}, folder / "other.safetensors")
    with pytest.raises(InputError, match="does not fit the image tokenizer"):
        fill_tokenizer(loaded.tokenizer, folder / "other.safetensors")


@pytest.mark.parametrize("name", ["absent", "absent.safetensors"])
def test_a_checkpoint_that_is_not_there(tmp_path, name):
    with pytest.raises(InputError, match="does not exist; leave it out to start from new weights"):
        load_f1_policy(micro_config(), checkpoint_path=tmp_path / name)
    with pytest.raises(InputError, match=r"has no model\.safetensors or model\.pt"):
        load_f1_policy(micro_config(), checkpoint_path=tmp_path)


@pytest.mark.parametrize("device", ["nonsense", "cuda:99"])
def test_a_device_that_is_not_there(device):
    with pytest.raises(InputError, match=f"device '{device}' cannot be used"):
        load_f1_policy(micro_config(), device, debug=True)


@pytest.mark.slow
def test_weights_of_a_paligemma_folder(tmp_path):
    """transformers' own SigLIP and Gemma give the same features and outputs, from the files that they wrote."""
    transformers = pytest.importorskip("transformers")
    from deft.models.f1.experts import Block
    from deft.models.f1.loading import load_paligemma

    text = {"hidden_size": 12, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"num_key_value_heads": 1, "head_dim": 8, "vocab_size": 270, "model_type": "gemma"}
    text["hidden_activation"] = "gelu_pytorch_tanh"
    pictures = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    pictures |= {"patch_size": 8, "image_size": 16, "model_type": "siglip_vision_model", "vision_use_head": False}
    config = transformers.PaliGemmaConfig(
        text_config=text, vision_config=pictures, projection_dim=12, image_token_index=269
    )
    theirs = transformers.PaliGemmaForConditionalGeneration(config).eval()
    for name, parameter in theirs.named_parameters():
        torch.nn.init.normal_(parameter, std=0.3 if "norm" in name else 0.1)
    theirs.save_pretrained(tmp_path)
    policy = micro_policy()
    load_paligemma(policy, tmp_path)
    picture = torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        seen = theirs.model.vision_tower(picture).last_hidden_state
        expected = theirs.model.multi_modal_projector(seen)
        torch.testing.assert_close(policy.model.vision(picture), expected, atol=1e-5, rtol=1e-4)
        embeddings = torch.randn(2, 5, 12)
        mask = torch.zeros(2, 1, 5, 5)  # all see all
        language = theirs.model.language_model
        hidden, positions = embeddings, torch.arange(5)[None].expand(2, -1)
        rotation = language.rotary_emb(hidden, positions)
        for layer in language.layers:
            hidden = layer(hidden, attention_mask=mask, position_embeddings=rotation, position_ids=positions)
        ours, _ = policy.model.experts({"understanding": embeddings}, Block(5), {"understanding": 5})
        torch.testing.assert_close(ours["understanding"], language.norm(hidden), atol=1e-5, rtol=1e-4)
        assert torch.equal(policy.model.words.weight, language.embed_tokens.weight[:259])
    with pytest.raises(InputError, match=r"has no \.safetensors files"):
        load_paligemma(policy, tmp_path / "absent")
