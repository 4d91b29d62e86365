"""What SmolVLA and π0.5 share: a flow policy that is built from a folder in LeRobot's layout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from deft.errors import InputError
from deft.models.flow_chain import Velocity
from deft.models.vla.experts import Prefix, freeze
from deft.models.vla.flow import FlowSpec, FlowVLA
from deft.models.vla.lerobot_folder import (
    ACTION,
    STATE,
    CameraImages,
    LeRobotFolder,
    LeRobotFolderSpec,
    check_dims,
    given_statistics,
    match_cameras,
    read_lerobot_folder,
)
from deft.models.vla.pretrained import DTYPES, add_lora
from deft.models.vla.spec import PretrainedSpec

EMPTY_CAMERA = "observation.images.empty_camera"


@dataclass(kw_only=True)
class LeRobotFlowSpec(FlowSpec, LeRobotFolderSpec, PretrainedSpec):
    """The keywords of `LeRobotFlowVLA`. `train_expert_only` None: as the folder sets it."""

    train_expert_only: bool | None = None


class LeRobotFlowVLA(FlowVLA):
    """A flow policy whose VLM and expert are in one network, `backbone`. A subclass builds it in its constructor."""

    config: Mapping[str, Any]

    def read_folder(self, spec: LeRobotFlowSpec, kind: str, title: str, defaults: Mapping[str, Any]) -> LeRobotFolder:
        """Return the folder of a policy that reads the state of the robot, and keep its config."""
        folder = read_lerobot_folder(spec, kind, defaults)
        check_dims(folder, spec)
        self.config = folder.config
        if folder.state_dim is None:
            raise InputError(
                f"{title} reads the robot's state, and there is none: set proprio_key to a stream of vectors"
            )
        return folder

    def add_images(
        self, spec: LeRobotFlowSpec, folder: LeRobotFolder, size: tuple[int, int] | None, centered: bool = False
    ) -> None:
        """Add the cameras; images are resized to (height, width)."""
        wanted = [name for name in folder.cameras if not name.startswith(EMPTY_CAMERA)]
        cameras = match_cameras(spec.image_keys, wanted, spec.cameras, optional=spec.cameras is not None)
        self.images = CameraImages(folder, cameras, size, centered=centered)
        self.image_keys = self.images.image_keys

    def add_statistics(self, spec: LeRobotFlowSpec, folder: LeRobotFolder) -> None:
        """Add the normalisation of the state and of actions."""
        known = given_statistics(spec)
        self.state_statistics = folder.normalizer(STATE, spec.proprio_dim, known.get("state"))
        self.action_statistics = folder.normalizer(ACTION, spec.action_dim, known.get("action"))

    def prepare_training(self, spec: LeRobotFlowSpec, networks: nn.Module, vlm: nn.Module, vision: nn.Module) -> None:
        """Set the type of the networks, freeze what is not trained, and add low-rank adapters."""
        if spec.dtype not in DTYPES:
            raise InputError(f"dtype {spec.dtype!r} is none of {', '.join(DTYPES)}")
        networks.to(DTYPES[spec.dtype])
        if spec.freeze_vision or self.config["freeze_vision_encoder"]:
            freeze(vision)
        if self.config["train_expert_only"] if spec.train_expert_only is None else spec.train_expert_only:
            freeze(vlm)
        add_lora(self.backbone, spec.lora)
        self.gradient_checkpointing = spec.gradient_checkpointing

    def velocity_given(self, prefix: Prefix, state: Tensor) -> tuple[Velocity, Tensor]:
        """The velocity field after the VLM has read an observation, and the features of the value."""
        backbone: Callable[..., Tensor] = self.backbone

        def velocity(x: Tensor, time: Tensor) -> Tensor:
            return backbone(x, time, prefix)

        return velocity, torch.cat([prefix.features, state], 1)
