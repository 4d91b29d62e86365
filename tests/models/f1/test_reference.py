"""The published model's code, as numbers: the same weights and inputs give the same outputs here."""

import json

import pytest
import torch
from safetensors.torch import load_file
from shared_data import shared_data

from deft.models import flow_chain
from deft.models.f1.config import PRESETS, read_f1_config
from deft.models.f1.loading import OWN_PREFIXES, load_f1_policy, published_name, published_state_dict, save_published
from deft.models.f1.policy import F1Policy


@pytest.fixture(scope="module")
def reference():
    folder = shared_data("f1_reference")
    settings = json.loads((folder / "tiny_config.json").read_text()) | {"memory_hidden": 16, "memory_num_layers": 2}
    policy, config, full_config = load_f1_policy(settings, checkpoint_path=folder / "tiny_model.safetensors")
    assert full_config["und_expert_config"]["hidden_size"] == config.understanding.hidden_size == 64
    return policy.eval(), load_file(folder / "tiny_io.safetensors"), folder


def understood(policy, io):
    images = [(io[name], io[f"{name}_mask"]) for name in ("image0", "image1")]
    return policy.model.understand(images, io["lang_tokens"], io["lang_masks"])


@torch.no_grad()
def test_tokens(reference):
    policy, io, _ = reference
    codes = policy.tokenizer.encode(io["frames"])
    assert torch.equal(codes, io["token_indices"])
    torch.testing.assert_close(policy.tokenizer.embed(codes), io["token_embeddings"], atol=1e-5, rtol=0)
    torch.testing.assert_close(policy.tokenizer.decode(codes), io["decoded_frames"], atol=1e-4, rtol=0)


@pytest.mark.parametrize("extras", [False, True])
@torch.no_grad()
def test_logits_and_flow_losses(reference, extras):
    """Also with memory and actions given: what the published model lacks starts without effect."""
    policy, io, _ = reference
    history = io["token_embeddings"][:, :4]
    remembered = torch.randn(2, 16) if extras else None
    robot = (torch.randn(2, 4, 32), torch.ones(2, dtype=torch.bool), io["state"]) if extras else None
    prefix, condition = understood(policy, io), policy.model.condition(history, remembered, robot)
    logits = policy.model.teacher_forced(prefix, condition, io["token_indices"][:, 4])
    torch.testing.assert_close(logits, io["teacher_forced_logits"], atol=1e-4, rtol=0)
    predicted = policy.model.predict_frame(prefix, condition)
    torch.testing.assert_close(predicted.logits, io["greedy_logits"], atol=1e-4, rtol=0)
    noisy = flow_chain.noised(io["actions"], io["noise"], io["time"])
    velocity, _ = policy.model.velocity_and_features(predicted, io["state"], noisy, io["time"], remembered)
    losses = (io["noise"] - io["actions"] - velocity).square()
    torch.testing.assert_close(losses, io["flow_losses"], atol=1e-4, rtol=0)


def test_the_published_layout_is_written_as_it_was_read(reference, tmp_path):
    policy, _, folder = reference
    save_published(policy, tmp_path / "model.safetensors")
    written, read = load_file(tmp_path / "model.safetensors"), load_file(folder / "tiny_model.safetensors")
    assert written.keys() == read.keys()
    assert all(torch.equal(written[name], read[name]) for name in read)


def test_every_tensor_of_the_published_checkpoint_has_its_place_in_the_full_preset():
    manifest = json.loads((shared_data("f1_reference") / "full_manifest.json").read_text())
    with torch.device("meta"):
        policy = F1Policy(PRESETS["full"]())
    names = {name: published_name(name) for name in policy.state_dict()}
    shared = [name for name in names.values() if name is not None]
    assert len(shared) == len(set(shared)) == len(manifest) == 1281
    own = published_state_dict(policy)
    for name, entry in manifest.items():
        assert list(own[name].shape) == entry["shape"], name
        assert own[name].dtype == getattr(torch, entry["dtype"]), name
    assert all(name.startswith(OWN_PREFIXES) for name, theirs in names.items() if theirs is None)


def test_the_published_config_of_the_full_size_is_the_full_preset():
    """The tiny published config with the published sizes put in, which differ from it in numbers alone."""
    settings = json.loads((shared_data("f1_reference") / "tiny_config.json").read_text())
    words = {"hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18, "num_attention_heads": 8}
    pictures = {"hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16}
    expert = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 18, "num_attention_heads": 8}
    und = settings["und_expert_config"]
    und["text_config"].update(words, vocab_size=257152, head_dim=256)
    und["vision_config"].update(pictures, image_size=224)
    frames = {"pn": "1_2_3_4_5_6_8_10_13_16", "num_resolutions": 10}
    frames["vae"] = {"vocab_size": 4096, "z_channels": 32, "ch": 160, "share_quant_resi": 4}
    settings["gen_expert_config"].update(expert, head_dim=256, **frames)
    settings["act_expert_config"].update(expert, head_dim=256)
    settings["chunk_size"] = 50
    published, full = read_f1_config(settings), PRESETS["full"]()
    published.dtype = full.dtype  # set by the checkpoint, not by the config
    assert published == full
