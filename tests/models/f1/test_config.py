"""F1 configs from files, presets and the documents."""

import json

import pytest

from deft.config.loading import to_dict
from deft.errors import InputError
from deft.models.f1.config import PRESETS, read_f1_config
from deft.models.f1.loading import load_f1_policy


def test_config_files(tmp_path):
    file = tmp_path / "f1.yaml"
    file.write_text("preset: tiny\nchunk_size: 8\ntokenizer: {codebook_size: 256}\n")
    config = read_f1_config(file)
    assert (config.chunk_size, config.tokenizer.codebook_size, config.tokenizer.code_dim) == (8, 256, 16)
    assert config.memory_hidden == PRESETS["tiny"]().memory_hidden
    as_json = tmp_path / "f1.json"
    as_json.write_text(json.dumps(to_dict(config)))
    assert read_f1_config(as_json) == config
    for text, message in (
        ("preset: huge\n", "preset is 'huge'; choose tiny, small, full"),
        ("preset: tiny\nchunk_siez: 8\n", "chunk_siez"),
        ("preset: tiny\nmemory_hidden: -1\n", "memory_hidden"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=message):
            read_f1_config(file)
    with pytest.raises(InputError, match="huge: no such F1 config; name a file or a preset"):
        read_f1_config("huge")


def test_the_documents_model_config_is_of_the_tiny_model(tmp_path, caplog):
    """`debug_test.yaml` has three keys; 4.8 billion parameters are not what it says. The choice is logged."""
    file = tmp_path / "debug_test.yaml"
    file.write_text("n_obs_img_steps: 4\nn_pred_img_steps: 1\nobs_img_stride: 2\n")
    tiny = PRESETS["tiny"]()
    tiny.obs_img_stride = 2
    assert read_f1_config(file) == tiny
    assert "debug_test.yaml names no preset: with no sizes it is 'tiny'" in caplog.text
    policy = load_f1_policy(file, device="cpu").policy
    assert sum(parameter.numel() for parameter in policy.parameters()) < 3_000_000


def test_the_documents_memory_settings_are_those_of_the_full_model(caplog):
    memory = {"memory_enabled": True, "memory_hidden": 2048, "memory_num_layers": 4, "memory_project_to_vae_dim": True}
    assert read_f1_config(memory) == PRESETS["full"]()
    assert "its memory_hidden is that of 'full'" in caplog.text
    assert read_f1_config({"memory_hidden": 512}).vision == PRESETS["small"]().vision
    caplog.clear()
    assert read_f1_config({"num_layers": 2}).vision == PRESETS["full"]().vision  # sizes differ from the published
    assert not caplog.text


def test_the_documents_memory_settings_stand_beside_a_published_config(tmp_path):
    small = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    small |= {"hidden_size": 16, "intermediate_size": 32}
    pictures = {**small, "patch_size": 8, "image_size": 16}
    frames = {"pn": "1_2_4", "vae": {"vocab_size": 32, "z_channels": 4, "ch": 32}}
    mapping = {
        "und_expert_config": {"text_config": {**small, "vocab_size": 300}, "vision_config": pictures},
        "gen_expert_config": {**small, **frames},
        "act_expert_config": small,
        "memory_enabled": True,
        "memory_hidden": 10,
        "memory_num_layers": 3,
        "memory_project_to_vae_dim": False,
    }
    config = read_f1_config(mapping)
    assert (config.memory_hidden, config.memory_num_layers, config.memory_project_to_vae_dim) == (10, 3, False)
    assert config.tokenizer.image_size == 64
    mapping["act_expert_config"] = {**small, "head_dim": 4}
    with pytest.raises(InputError, match="head_dim differs between the experts"):
        read_f1_config(mapping)
    del mapping["gen_expert_config"]["vae"]
    with pytest.raises(InputError, match="not a published F1 config: 'vae'"):
        read_f1_config(mapping)
