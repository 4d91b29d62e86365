"""`diffusion-policy`: Diffusion Policy (Chi et al., 2023) in LeRobot's layout, from a local folder or with new weights.

A residual network with a spatial softmax reads the cameras; a 1-D U-Net denoises a chunk of actions, as DDPM or DDIM.
PPO and GRPO score the denoising chain exactly (DPPO, Ren et al., 2024). LeRobot and diffusers are not needed.
"""

from __future__ import annotations

import functools
import logging
import re
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.denoising_chain import Transition, mean_real
from deft.models.diffusion_chain import DiffusionUpdate, diffused, diffusion_times, signal_of
from deft.models.flow_chain import hold_last
from deft.models.inpainting import Inpainting, guided_action, guided_noise
from deft.models.vla.denoising import ChainShape, DenoisingVLA, Steps
from deft.models.vla.diffusion_network import DiffusionNetwork, ResidualBlock, map_size, position_grid
from deft.models.vla.lerobot_folder import (
    ACTION,
    STATE,
    CameraImages,
    LeRobotFolder,
    LeRobotFolderSpec,
    Weights,
    check_dims,
    given_statistics,
    load_published,
    match_cameras,
    read_lerobot_folder,
    with_prefix,
    without_prefix,
)
from deft.models.vla.pretrained import ValueHead, add_lora
from deft.models.vla.streams import read_stream

logger = logging.getLogger(__name__)

DEFAULTS = {
    "n_obs_steps": 2, "horizon": 64, "vision_backbone": "resnet18", "resize_shape": None, "crop_ratio": 1.0,
    "crop_shape": None, "use_group_norm": False, "spatial_softmax_num_keypoints": 32,
    "use_separate_rgb_encoder_per_camera": True, "down_dims": (512, 1024, 2048), "kernel_size": 5, "n_groups": 8,
    "diffusion_step_embed_dim": 128, "use_film_scale_modulation": True, "noise_scheduler_type": "DDPM",
    "num_train_timesteps": 100, "beta_schedule": "squaredcos_cap_v2", "beta_start": 0.0001, "beta_end": 0.02,
    "prediction_type": "epsilon", "clip_sample": True, "clip_sample_range": 1.0, "num_inference_steps": None,
    "do_mask_loss_for_padding": False,
}  # fmt: skip
CHOICES = {"noise_scheduler_type": ("DDPM", "DDIM"), "prediction_type": ("epsilon", "sample")}
NAME = "diffusion policy"
LORA_TARGETS = ("cond_encoder.1", "block.0", "out")
PREFIX = "diffusion."
GRID = "pool.pos_grid"  # a constant that LeRobot saves
# Layers of a residual network, which LeRobot numbers
NUMBERED = {"conv1": "0", "bn1": "1", **{f"layer{stage}": str(stage + 3) for stage in range(1, 5)}}
NAMED = {number: name for name, number in NUMBERED.items()}


@dataclass(kw_only=True)
class DiffusionPolicySpec(LeRobotFolderSpec):
    """The keywords of `DiffusionPolicyVLA`. `num_steps` None: as the folder sets it."""

    num_steps: int | None = None
    noise_min: float = 0.05


class DiffusionPolicyVLA(DenoisingVLA):
    """Images and the robot's state to K actions of the chunk, and a value.

    The policy reads the last `n_obs_steps` observations, from streams with a history ([B, H, 3, h, w] and [B, H, P]);
    a stream without one is repeated, as LeRobot does in the first step of an episode. The chunk begins at the oldest
    of them. When actions are sampled, the executed dims follow DDPM (η = 1) with a deviation of at least `noise_min`,
    in normalised units, and the other ones DDIM (η = 0), which is deterministic and has the same distribution at every
    step. Deterministic actions are DDIM from sampled noise. The value reads the features of the U-Net's condition.
    """

    spec_class = DiffusionPolicySpec
    signal: Tensor

    def __init__(self, spec: DiffusionPolicySpec | None = None, **given: Any) -> None:
        spec = DiffusionPolicySpec(**given) if spec is None else spec
        super().__init__(spec)
        folder = read_lerobot_folder(spec, "diffusion", DEFAULTS, "diffusion-policy")
        self.config = _checked(folder, spec)
        if folder.state_dim is None:
            raise InputError(f"{NAME}: it reads the robot's state, and there is none: set proprio_key to a stream")
        check_dims(folder, spec)
        cameras = match_cameras(spec.image_keys, list(folder.cameras), spec.cameras)
        self.images = CameraImages(folder, cameras)
        self.image_keys, self.instruction_key = self.images.image_keys, None
        known = given_statistics(spec)
        self.state_statistics = folder.normalizer(STATE, spec.proprio_dim, known.get("state"))
        self.action_statistics = folder.normalizer(ACTION, spec.action_dim, known.get("action"))
        self._add_schedule(spec)
        self.backbone = DiffusionNetwork(self.config, len(self.image_keys), spec.proprio_dim, spec.action_dim)
        if folder.path is not None and spec.load_weights:
            grids = functools.partial(to_published, grid=_grid(folder))
            load_published(self.backbone, folder, grids, from_published)
        if spec.freeze_vision:
            self.backbone.rgb_encoder.requires_grad_(False)
        add_lora(self.backbone, spec.lora, LORA_TARGETS)
        self.value_head = ValueHead(self.backbone.feature_dim, spec.value_gradient)
        self._warned_of_repetition = False

    def _add_schedule(self, spec: DiffusionPolicySpec) -> None:
        config = self.config
        total = config["num_train_timesteps"]
        default = config["num_inference_steps"] or total
        shape = ChainShape(NAME, config["horizon"], spec.action_dim, default, first=config["n_obs_steps"] - 1)
        self.add_chain(shape, spec.num_steps)
        if self.num_steps > total:
            raise InputError(f"num_steps {self.num_steps} is more than the policy was trained with: {total}")
        levels = signal_of(config["beta_schedule"], total, config["beta_start"], config["beta_end"])
        self.register_buffer("signal", levels, persistent=False)  # ᾱ_0 = 1 … ᾱ_T
        self.times = diffusion_times(total, self.num_steps)
        self.update = DiffusionUpdate(
            spec.noise_min,
            config["clip_sample_range"] if config["clip_sample"] else None,
            predicts_action=config["prediction_type"] == "sample",
            recompute=config["noise_scheduler_type"] == "DDPM",
        )

    # The interface of a VLA model ------------------------------------------------------------------------------------

    def steps(self, observations: TensorDictBase) -> tuple[Steps, Tensor]:
        """The denoising steps given an observation, and the features of the value."""
        features = self.condition(observations)

        def steps(deterministic: bool, mask: Tensor, inpainting: Inpainting | None) -> Transition:
            is_random = False if deterministic else mask
            guided = guided_action if self.update.predicts_action else guided_noise

            def predict(x: Tensor, time: Tensor) -> Tensor:
                return self.backbone(x, time, features).float()

            def transition(x: Tensor, step: int) -> tuple[Tensor, Tensor]:
                time, after = self.times[step], self.times[step + 1]
                network = guided(predict, self.signal[time], inpainting)
                predicted = network(x, torch.full((len(x),), time - 1, device=x.device))
                return self.update(x, predicted, self.signal[time], self.signal[after], is_random)

            return transition

        return steps, features

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """‖ε̂(x_t, t) − ε‖² of demonstrated chunks [B, K, A], or ‖â − a‖² if the U-Net predicts actions: [B].

        The policy's chunk is longer than K: it is filled with copies of the first and the last real action, as LeRobot
        does at both ends of an episode. They are counted unless the policy has `do_mask_loss_for_padding`.
        """
        chunk, first, horizon = self.chunk(actions), self.shape.first, self.shape.chunk_size
        held = self.action_statistics.normalize(chunk if step_mask is None else hold_last(chunk, step_mask))
        places = (torch.arange(horizon, device=chunk.device) - first).clamp(0, self.chunk_length - 1)
        whole, mask = held[:, places], None
        if self.config["do_mask_loss_for_padding"]:
            real = step_mask if step_mask is not None else chunk.new_ones(chunk.shape[:2], dtype=torch.bool)
            mask = nn.functional.pad(real, (first, horizon - first - self.chunk_length)).unsqueeze(-1)
        time = torch.randint(1, len(self.signal), (len(whole),), device=whole.device)
        noise = torch.randn_like(whole)
        predicted = self.backbone(diffused(whole, noise, self.signal[time]), time - 1, self.condition(observations))
        error = (predicted - (whole if self.update.predicts_action else noise)).float().square()
        return mean_real(error, mask)

    def gathered_layers(self) -> list[nn.Module]:
        """The blocks of the U-Net, whose weights FSDP gathers one at a time."""
        return [module for module in self.modules() if isinstance(module, ResidualBlock)]

    # Observations ----------------------------------------------------------------------------------------------------

    def condition(self, observations: TensorDictBase) -> Tensor:
        """What the U-Net is conditioned on beside the time: features of the observations, [B, F]."""
        streams = {key: self._history(observations, key, 5) for key in self.image_keys}
        flat = self.images({key: frames.flatten(0, 1) for key, frames in streams.items()})
        images = [one.unflatten(0, streams[key].shape[:2]) for key, one in zip(self.image_keys, flat, strict=True)]
        assert self.proprio_key is not None
        states = {self.proprio_key: self._history(observations, self.proprio_key, 3)}
        state = self.state_statistics.normalize(self.vectors(states, self.proprio_key, self.proprio_dim, "proprio_dim"))
        return self.backbone.features(images, state)

    def _history(self, observations: TensorDictBase, key: str, ndim: int) -> Tensor:
        """A stream with a history, [B, H, …], or with one observation, [B, 1, …]."""
        stream, wanted = read_stream(observations, key), self.config["n_obs_steps"]
        if stream.ndim == ndim and stream.shape[1] != wanted:
            raise InputError(
                f"observation {key!r} has a history of {stream.shape[1]} steps; the {NAME} reads {wanted} (n_obs_steps)"
            )
        if stream.ndim == ndim:
            return stream
        if wanted > 1 and not self._warned_of_repetition:
            self._warned_of_repetition = True
            logger.warning(
                "the %s reads the last %d observations, and %r has no history: its newest is repeated",
                NAME,
                wanted,
                key,
            )
        return stream.unsqueeze(1)


def _checked(folder: LeRobotFolder, spec: DiffusionPolicySpec) -> dict[str, Any]:
    """The settings of a policy that the adapter can run."""
    where = f"{folder.path}: " if folder.path is not None else "architecture: "
    if "ENV" in {feature.kind for feature in folder.inputs.values()}:
        raise InputError(f"{where}the policy reads observation.environment_state, which is not supported")
    for key, known in CHOICES.items():
        if folder.config[key] not in known:
            raise InputError(f"{where}{key} {folder.config[key]!r} is none of {', '.join(known)}")
    if not spec.noise_min > 0:
        raise InputError(f"noise_min {spec.noise_min} must be above 0: without noise a step has no log-prob")
    return folder.config


# -------------------------------------------------------------------------------------------------- names of weights


def _grid(folder: LeRobotFolder) -> Tensor:
    height, width = next(iter(folder.cameras.values())).shape[1:]
    return position_grid(*map_size(folder.config, (height, width)))


def to_published(state: Weights, grid: Tensor) -> dict[str, Tensor]:
    """LeRobot's names: a residual network is a sequence of numbered layers; `grid` is saved with each encoder."""
    found: dict[str, Tensor] = {}
    for name, value in state.items():
        found[_renamed(name, NUMBERED)] = value
        if name.endswith("pool.nets.weight"):
            found[name.replace("pool.nets.weight", GRID)] = grid
    return with_prefix(found, PREFIX)


def from_published(weights: Weights) -> dict[str, Tensor]:
    """The inverse of `to_published`, without the grids."""
    own = without_prefix(weights, PREFIX)
    return {_renamed(name, NAMED): value for name, value in own.items() if not name.endswith(GRID)}


def _renamed(name: str, names: dict[str, str]) -> str:
    """A name whose layer after `backbone.` is replaced."""
    return re.sub(r"(?<=backbone\.)(\w+)", lambda layer: names[layer[0]], name, count=1)
