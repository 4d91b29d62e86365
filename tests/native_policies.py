"""Tiny policies in the layouts that LeRobot publishes, written to folders, and what they look at."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tensordict import TensorDict
from torch import Tensor

from deft import VLAPolicy, load_vla_model, schema
from deft.models.vla import act, diffusion_policy, groot, pi05, smolvla
from deft.models.vla.diffusion_network import position_grid
from deft.schema import encode_text

SIZE, STATE, ACTIONS = 32, 5, 3
STREAMS: dict[str, Any] = {
    "action_dim": ACTIONS, "chunk_length": 2, "image_keys": ["head_rgb", "wrist_rgb"], "proprio_dim": STATE,
}  # fmt: skip
REACH: dict[str, Any] = {
    "action_dim": 2,
    "chunk_length": 2,
    "image_keys": ["rgb"],
    "proprio_dim": 8,
    "proprio_key": "proprio",
}
"""The streams of `deft/Reach-v0`."""
ACT: dict[str, Any] = {
    "chunk_size": 4, "dim_model": 32, "n_heads": 4, "dim_feedforward": 48, "n_encoder_layers": 1,
    "n_vae_encoder_layers": 1, "latent_dim": 4, "kl_weight": 1.0,
}  # fmt: skip
DIFFUSION: dict[str, Any] = {
    "n_obs_steps": 2, "horizon": 8, "down_dims": [16, 32], "n_groups": 4, "diffusion_step_embed_dim": 16,
    "num_train_timesteps": 20, "num_inference_steps": 4, "use_group_norm": True, "spatial_softmax_num_keypoints": 4,
    "use_separate_rgb_encoder_per_camera": False, "resize_shape": [40, 40], "crop_ratio": 0.85,
    "prediction_type": "sample",
}  # fmt: skip
ATTENTION = {"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
VISION = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
FLOW: dict[str, Any] = {"chunk_size": 4, "max_state_dim": 10, "max_action_dim": 6}
SMOLVLA: dict[str, Any] = FLOW | {
    "num_steps": 3, "resize_imgs_with_padding": [32, 32], "train_expert_only": False, "freeze_vision_encoder": False,
    "num_vlm_layers": 2, "vlm_config": {
        "text_config": {
            "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300, **ATTENTION,
            "num_hidden_layers": 3,
        },
        "vision_config": {"model_type": "smolvlm_vision", "patch_size": 8, "image_size": 32, **VISION},
        "scale_factor": 2, "image_token_id": 299,
    },
}  # fmt: skip
PI05: dict[str, Any] = FLOW | {
    "num_inference_steps": 3, "image_resolution": [28, 28], "vlm_config": {
        "vocab_size": 300, "vision_config": VISION,
        "text_config": {"hidden_size": 32, "intermediate_size": 48, **ATTENTION, "num_hidden_layers": 1},
        "expert_config": {"hidden_size": 24, "intermediate_size": 64, **ATTENTION, "num_hidden_layers": 1},
    },
}  # fmt: skip
OFT: dict[str, Any] = {
    "image_sizes": [16, 16],
    "vision_config": [
        {"width": 16, "depth": 3, "heads": 2, "hidden": 24, "patch": 8, "registers": 2, "has_class": True,
         "has_scales": True},
        {"width": 24, "depth": 2, "heads": 2, "hidden": 40, "patch": 8},
    ],
    "text_config": {
        "model_type": "llama", "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 300,
    },
}  # fmt: skip
BLOCKS: dict[str, Any] = {"num_attention_heads": 2, "positional_embeddings": None}
GROOT: dict[str, Any] = {
    "action_head_cfg": {
        "action_dim": 6, "action_horizon": 4, "input_embedding_dim": 16, "hidden_size": 12, "max_seq_len": 8,
        "max_state_dim": 10, "num_target_vision_tokens": 2, "num_inference_timesteps": 3,
        "diffusion_model_cfg": {
            **BLOCKS, "attention_head_dim": 8, "output_dim": 12, "num_layers": 2, "cross_attention_dim": 32,
            "interleave_self_attention": True, "norm_type": "ada_norm",
        },
        "vl_self_attention_cfg": {**BLOCKS, "attention_head_dim": 16, "num_layers": 1},
    },
    "backbone_cfg": {"select_layer": 2, "tune_llm": False, "tune_visual": True, "project_to_dim": None},
    "eagle_config": {
        "use_pixel_shuffle": False, "mlp_connector_layers": 1, "image_token_index": 1, "force_image_size": 28,
        "vision_config": {"image_size": 28, "patch_size": 14, **VISION},
        "text_config": {
            "model_type": "qwen3", "hidden_size": 32, "intermediate_size": 48, "vocab_size": 300, **ATTENTION,
            "num_hidden_layers": 3,
        },
    },
}  # fmt: skip
TEXTS = ("pick up the red cube", "push the blue cylinder", "go")


def observations(batch: int = 3, seed: int = 0) -> TensorDict:
    """What a tabletop shows, small."""
    random = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (2, batch, 3, SIZE, SIZE), dtype=torch.uint8, generator=random)
    words = [torch.as_tensor(encode_text(TEXTS[index % 3], 40)) for index in range(batch)]
    streams = {"head_rgb": images[0], "wrist_rgb": images[1], "instruction": torch.stack(words)}
    return TensorDict({**streams, "state": torch.randn(batch, STATE, generator=random)}, [batch])


def acted(model: Any, batch: int = 3) -> tuple[VLAPolicy, TensorDict]:
    """A policy around the model, and what it saw and did."""
    policy = VLAPolicy(model)
    td = TensorDict({schema.OBSERVATION: observations(batch)}, [batch])
    with torch.no_grad():
        policy.act(td)
    return policy, td


def features(streams: dict[str, Any]) -> dict[str, Any]:
    """The `input_features` of a policy with these streams."""
    cameras = {
        f"observation.images.{key}": {"type": "VISUAL", "shape": [3, SIZE, SIZE]} for key in streams["image_keys"]
    }
    return {**cameras, "observation.state": {"type": "STATE", "shape": [streams["proprio_dim"]]}}


def statistics(streams: dict[str, Any] = STREAMS, seed: int = 3) -> dict[str, dict[str, Tensor]]:
    """Statistics of a dataset, by feature."""
    random = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {
        name: (3, 1, 1) if one["type"] == "VISUAL" else tuple(one["shape"]) for name, one in features(streams).items()
    }
    return {
        name: {
            "mean": torch.randn(shape, generator=random) * 0.1,
            "std": torch.rand(shape, generator=random) + 0.5,
            "q01": torch.rand(shape, generator=random) - 2.5,
            "q99": torch.rand(shape, generator=random) + 1.5,
            "min": torch.full(shape, -2.0),
            "max": torch.full(shape, 2.5),
        }
        for name, shape in (shapes | {"action": (streams["action_dim"],)}).items()
    }


def write_folder(
    path: Path, kind: str, settings: dict[str, Any], weights: dict[str, Tensor], streams: dict[str, Any]
) -> Path:
    """Write config, weights and processors as LeRobot 0.6 does."""
    path.mkdir(parents=True, exist_ok=True)
    modes = MODES[kind]
    output = {"action": {"type": "ACTION", "shape": [streams["action_dim"]]}}
    config = {"type": kind, "input_features": features(streams), "output_features": output}
    (path / "config.json").write_text(json.dumps(config | {"normalization_mapping": modes} | settings))
    save_file({name: value.contiguous() for name, value in weights.items()}, path / "model.safetensors")
    flat = {f"{name}.{key}": value for name, one in statistics(streams).items() for key, value in one.items()}
    for name, step, number in (("preprocessor", "normalizer", 3), ("postprocessor", "unnormalizer", 0)):
        state = f"policy_{name}_step_{number}_{step}_processor.safetensors"
        save_file(flat, path / state)
        steps = [
            {"registry_name": "rename_observations_processor", "config": {"rename_map": {}}},
            {"registry_name": f"{step}_processor", "config": {"norm_map": modes}, "state_file": state},
        ]
        (path / f"policy_{name}.json").write_text(json.dumps({"name": f"policy_{name}", "steps": steps}))
    return path


def act_folder(path: Path, streams: dict[str, Any] = STREAMS) -> Path:
    """A tiny ACT with new weights."""
    torch.manual_seed(0)
    model: Any = load_vla_model(None, "act", streams | {"architecture": ACT})
    return write_folder(path, "act", ACT, act.to_published(model.backbone.state_dict()), streams)


def diffusion_folder(path: Path, streams: dict[str, Any] = STREAMS, **changed: Any) -> Path:
    """A tiny diffusion policy with new weights."""
    torch.manual_seed(0)
    settings = DIFFUSION | changed
    model: Any = load_vla_model(None, "diffusion-policy", streams | {"architecture": settings})
    weights = diffusion_policy.to_published(model.backbone.state_dict(), position_grid(2, 2))  # of crops of 34 × 34
    weights = {name: value.clone() for name, value in weights.items()}  # grids share memory
    return write_folder(path, "diffusion", settings, weights, streams)


def smolvla_folder(path: Path, streams: dict[str, Any] = STREAMS) -> Path:
    """A tiny SmolVLA with new weights, and the head of words that LeRobot saves too."""
    torch.manual_seed(0)
    model: Any = load_vla_model(None, "smolvla", streams | SETTINGS["smolvla"] | {"architecture": SMOLVLA})
    weights = smolvla.to_published(model.backbone.state_dict()) | {smolvla.HEAD: torch.zeros(300, 32)}
    return write_folder(path, "smolvla", SMOLVLA, weights, streams)


def pi05_folder(path: Path, streams: dict[str, Any] = STREAMS) -> Path:
    """A tiny π0.5 whose norms depend on time, and the heads of words that LeRobot saves too."""
    torch.manual_seed(0)
    model: Any = load_vla_model(None, "pi05", streams | SETTINGS["pi05"] | {"architecture": PI05})
    for module in model.modules():
        if isinstance(module, pi05.AdaptiveNorm):
            torch.nn.init.normal_(module.dense.weight, std=0.1)
            module.dense.bias.data = torch.tensor([0.0, 0.0, 1.0]).repeat_interleave(24)  # scale, shift, gate
    weights = pi05.to_published(model.backbone.state_dict())
    heads = {pi05.HEAD: weights.pop(pi05.EMBEDDING), pi05.EXPERT_HEAD: torch.zeros(300, 24)}
    return write_folder(path, "pi05", PI05, weights | heads, streams)


def oft_statistics(streams: dict[str, Any] = STREAMS) -> dict[str, Any]:
    """The statistics of a dataset as OpenVLA writes them; the gripper, the last dim, is not normalised."""
    known = statistics(streams)
    action, state = (
        {key: known[name][key].tolist() for key in ("mean", "std", "q01", "q99")}
        for name in ("action", "observation.state")
    )
    mask = [True] * (streams["action_dim"] - 1) + [False]
    return {"tabletop": {"action": action | {"mask": mask}, "proprio": state}}


def oft_folder(path: Path, streams: dict[str, Any] = STREAMS) -> Path:
    """A tiny OpenVLA-OFT with new weights, and the weights that are never used."""
    torch.manual_seed(0)
    model: Any = load_vla_model(None, "openvla-oft", streams | SETTINGS["openvla-oft"] | {"architecture": OFT})
    for name, parameter in model.backbone.named_parameters():
        if "token" in name or "scale_factor" in name:  # as if trained
            torch.nn.init.normal_(parameter, std=0.5)
    path.mkdir(parents=True, exist_ok=True)
    unused = {
        "language_model.lm_head.weight": torch.zeros(300, 32),
        "vision_backbone.featurizer.norm.bias": torch.ones(16),
    }
    save_file(model.backbone.state_dict() | unused, path / "model.safetensors")
    for part in ("action_head", "proprio_projector"):
        weights = {f"module.{name}": value for name, value in model.get_submodule(part).state_dict().items()}
        torch.save(weights, path / f"{part}--10_checkpoint.pt")
    (path / "config.json").write_text(json.dumps(OFT | {"model_type": "openvla"}))
    (path / "dataset_statistics.json").write_text(json.dumps(oft_statistics(streams)))
    return path


def groot_folder(path: Path, streams: dict[str, Any] = STREAMS) -> Path:
    """A tiny GR00T N1.5 with new weights, and the weights that are never used."""
    torch.manual_seed(0)
    model: Any = load_vla_model(None, "groot", streams | SETTINGS["groot"] | {"architecture": GROOT})
    for name, parameter in model.backbone.action_head.named_parameters():
        if name.endswith(".W"):  # as if trained: new ones are small
            torch.nn.init.normal_(parameter, std=parameter.shape[1] ** -0.5)
    path.mkdir(parents=True, exist_ok=True)
    weights = {
        name.replace(groot.TOWER, groot.NESTED_TOWER): value for name, value in model.backbone.state_dict().items()
    }
    unused = {f"{prefix}weight": torch.zeros(1) for prefix in groot.UNUSED}
    save_file(weights | unused, path / "model.safetensors")
    known = oft_statistics(streams)["tabletop"]
    (path / "config.json").write_text(json.dumps(GROOT | {"model_type": "gr00t_n1_5"}))
    (path / "dataset_statistics.json").write_text(json.dumps(known))
    return path


MODES = {
    "act": dict.fromkeys(("VISUAL", "STATE", "ACTION"), "MEAN_STD"),
    "smolvla": {"VISUAL": "IDENTITY", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"},
    "pi05": {"VISUAL": "IDENTITY", "STATE": "QUANTILES", "ACTION": "QUANTILES"},
    "diffusion": {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"},
}
FOLDERS = {
    "act": act_folder,
    "smolvla": smolvla_folder,
    "pi05": pi05_folder,
    "diffusion-policy": diffusion_folder,
    "openvla-oft": oft_folder,
    "groot": groot_folder,
}
SETTINGS: dict[str, dict[str, Any]] = {
    "act": {},
    "smolvla": {"tokenizer": "bytes"},
    "pi05": {"tokenizer": "bytes", "prompt_length": 96},
    "diffusion-policy": {},
    "openvla-oft": {"tokenizer": "bytes", "prompt_length": 96, "chunk_size": 4},
    "groot": {"tokenizer": "bytes", "embodiment": 3},
}
"""Further `model_config` of each model."""


def load(name: str, folder: Path, **changed: Any) -> Any:
    """A model from its folder; every call has the same new heads."""
    torch.manual_seed(1)
    return load_vla_model(folder, name, STREAMS | SETTINGS[name] | changed)
