"""`lerobot`: a policy of the LeRobot package (ACT, SmolVLA, π0, …) from a local folder, behind Deft's interface.

Its chunk of actions is the mean of a Gaussian with a learned deviation. The package is a separate extra that needs
other versions of Python and torch than Deft; a failed import raises an error with these versions.
"""

from __future__ import annotations

import inspect
import json
import platform
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor, nn
from torch.nn import functional

from deft import schema, trust
from deft.errors import InputError
from deft.models.vla.interface import Sample, takes_keyword
from deft.models.vla.lerobot_folder import match_cameras
from deft.models.vla.pretrained import OWN_CODE, PretrainedVLA, ValueHead
from deft.models.vla.spec import ProprioSpec
from deft.models.vla.streams import GaussianVLA, Statistics, check_images, read_stream

POOLED = 8  # side of the pooled images that the value reads
STATE, TASK = "observation.state", "task"


@dataclass(kw_only=True)
class LeRobotSpec(ProprioSpec):
    """The keywords of `LeRobotVLA`."""

    folder: str | None = None
    load_weights: bool = True
    cameras: Mapping[str, str] | None = None
    log_std_init: float = -1.0


class LeRobotVLA(PretrainedVLA, GaussianVLA):
    """A LeRobot policy; LeRobot's processors normalise inputs and outputs, images are floats in [0, 1].

    `cameras` maps Deft's streams to the cameras of the policy (`{head_rgb: observation.images.top}`); without it they
    are matched by name. A flow policy starts from sampled noise, which is stored with the action: given that noise, the
    same observation has the same mean. PPO and GRPO need a policy whose chunk has a gradient (ACT, SmolVLA); a policy
    that samples without gradients (π0) can only be evaluated here: train π0 as `pi0`. The value has its own layers, on
    small images, the proprioception and the mean: LeRobot's policies have no common interface to their features.
    """

    spec_class = LeRobotSpec

    def __init__(self, spec: LeRobotSpec | None = None, **given: Any) -> None:
        spec = LeRobotSpec(**given) if spec is None else spec
        super().__init__(spec)
        if spec.folder is None or not (Path(spec.folder) / "config.json").is_file():
            raise InputError(f"{spec.folder}: no LeRobot policy: set model_path to the folder with its config.json")
        check_processors(Path(spec.folder))
        configs, factory = lerobot_modules()
        try:
            config = configs.PreTrainedConfig.from_pretrained(spec.folder, local_files_only=True)
            config.device = "cpu"
            policy_class = factory.get_policy_class(config.type)
            if spec.load_weights:
                self.backbone = policy_class.from_pretrained(
                    spec.folder, config=config, local_files_only=True, strict=True
                )
            else:
                self.backbone = policy_class(config)
            self._before, self._after = factory.make_pre_post_processors(
                config, pretrained_path=spec.folder, preprocessor_overrides={"device_processor": {"device": "cpu"}}
            )
        except (OSError, ValueError, RuntimeError, KeyError) as error:
            raise InputError(
                f"{spec.folder}: cannot be read as a LeRobot policy: {str(error).strip().splitlines()[0]}"
            ) from None
        self.config: Any = config
        wanted, taken = int(config.action_feature.shape[0]), spec.action_dim
        if wanted != taken:
            raise InputError(f"{spec.folder}: the policy has actions of {wanted} dims, the environment {taken}")
        self.cameras = match_cameras(spec.image_keys, list(config.image_features), spec.cameras)
        self.image_keys = tuple(self.cameras)
        # LeRobot's processors have the statistics of actions.
        self.action_statistics = Statistics(spec.action_dim, None, "action", persistent=False)
        self.log_std = nn.Parameter(torch.full((spec.chunk_length, spec.action_dim), float(spec.log_std_init)))
        inputs = len(self.cameras) * 3 * POOLED**2 + spec.proprio_dim + spec.chunk_length * spec.action_dim
        self.value_head = ValueHead(inputs, gradient=False)
        # LeRobot's decorator disables gradients: call the undecorated method.
        self._predict = inspect.unwrap(type(self.backbone).predict_action_chunk)
        self.starts_from_noise = hasattr(config, "max_action_dim") and takes_keyword(self._predict, "noise")
        self.keeps_sample = self.starts_from_noise
        self._checked = False

    # The interface of a VLA model ------------------------------------------------------------------------------------

    def get_value(self, observations: TensorDictBase) -> Tensor:
        """Value of each observation: [B, 1]."""
        with torch.no_grad():
            mean = self._mean(observations, self.draw_sample(observations))
        return self._value(observations, mean)

    def act(
        self, observations: TensorDictBase, deterministic: bool = False, action_mask: Tensor | None = None
    ) -> tuple[Any, ...]:
        """Actions, their log-prob [B], the value [B, 1], and the noise that a flow started from."""
        if not self._checked:
            self._checked, sample = True, self.draw_sample(observations)
            if not torch.equal(self._mean(observations, sample), self._mean(observations, sample)):
                raise InputError(
                    f"LeRobot's {self.config.type} gives another chunk for the same observation: its noise cannot be "
                    "set, and a sampled action has no log-prob"
                )
        return super().act(observations, deterministic, action_mask)

    def evaluate_tokens(
        self, observations: TensorDictBase, actions: Tensor, action_mask: Tensor | None = None, sample: Sample = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """As `evaluate`, with the log-prob of each step, [B, K]; a flow starts from the noise in `sample`."""
        if self.starts_from_noise and sample is None:
            raise InputError(
                f"LeRobot's {self.config.type} scores an action given the noise that it started from, and no noise is "
                "stored with this action: train it with ppo, grpo or sft"
            )
        return super().evaluate_tokens(observations, actions, action_mask, sample)

    def imitation_loss(self, observations: TensorDictBase, actions: Tensor, step_mask: Tensor | None = None) -> Tensor:
        """Mean squared error of the chunk: [B]."""
        error = (self._mean(observations, self.draw_sample(observations)) - self.chunk(actions)).square()
        return self.mean_over_steps(error, step_mask)

    def mean_and_value(self, observations: TensorDictBase, sample: Sample = None) -> tuple[Tensor, Tensor]:
        """The first K actions of the policy's chunk in the environment's units, [B, K, A], and the value [B, 1]."""
        mean = self._mean(observations, sample)
        if torch.is_grad_enabled() and not mean.requires_grad:
            raise InputError(
                f"LeRobot's {self.config.type} gives no gradient through its chunk of actions: evaluate it, or train "
                "pi0 or vlm instead"
            )
        return mean, self._value(observations, mean)

    def draw_sample(self, observations: TensorDictBase) -> dict[str, Tensor]:
        """Sample the noise that a flow policy starts from; nothing for other policies."""
        if not self.starts_from_noise:
            return {}
        size = (observations.batch_size[0], self.config.chunk_size, self.config.max_action_dim)
        return {schema.NOISE: torch.randn(size, device=self.log_std.device)}

    # Computation -----------------------------------------------------------------------------------------------------

    def _batch(self, observations: TensorDictBase) -> dict[str, Any]:
        """Convert the observation to LeRobot's names and types."""
        batch: dict[str, Any] = {}
        for key, name in self.cameras.items():
            batch[name] = check_images(read_stream(observations, key), key).float() / 255.0
        size = len(next(iter(batch.values()))) if batch else observations.batch_size[0]
        if self.config.robot_state_feature is not None:
            batch[STATE] = self.proprio_vectors(observations, size, self.log_std.device)
        rows = self.instructions(observations)
        batch[TASK] = [""] * size if rows is None else [schema.decode_text(row) for row in rows.cpu().numpy()]
        return batch

    def _mean(self, observations: TensorDictBase, sample: Sample) -> Tensor:
        device = self.log_std.device
        batch = self._before(self._batch(observations))
        batch = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        keywords = {"noise": sample[schema.NOISE]} if sample is not None and self.starts_from_noise else {}
        self.backbone.reset()  # its queues contain the last observation
        chunk = self._predict(self.backbone, batch, **keywords)
        if chunk.ndim != 3 or chunk.shape[1] < self.chunk_length:
            raise InputError(
                f"LeRobot's {self.config.type} gives a chunk {list(chunk.shape)}, which has fewer steps than "
                f"chunk_length {self.chunk_length}"
            )
        executed = chunk[:, : self.chunk_length]
        return self._after(executed.flatten(0, 1)).to(device).float().view(executed.shape)

    def gathered_layers(self) -> list[nn.Module]:
        """No layers: LeRobot's policies use the weights of their layers from outside."""
        return []

    def _value(self, observations: TensorDictBase, mean: Tensor) -> Tensor:
        batch = self._batch(observations)
        images = [functional.adaptive_avg_pool2d(batch[name], POOLED).flatten(1) for name in self.cameras.values()]
        state = self.proprio_vectors(observations, len(mean), mean.device)
        return self.value_head(torch.cat([*images, state, mean.flatten(1)], 1))


def check_processors(folder: Path) -> None:
    """Reject a folder whose processors name code outside LeRobot, or turn on the remote code of transformers.

    LeRobot imports the `class` of a step that has no `registry_name`, and takes `trust_remote_code` from the file.
    """
    for path in sorted(folder.glob("*.json")):
        try:
            content = json.loads(path.read_bytes())
        except (OSError, ValueError, RecursionError):
            continue  # LeRobot raises an error for a file that it reads
        steps = content.get("steps") if isinstance(content, dict) else None
        for step in steps if isinstance(steps, list) else ():
            named = str(step.get("class", "")) if isinstance(step, dict) and not step.get("registry_name") else ""
            named = "" if named.startswith("lerobot.") else named
            if re.search("'trust_remote_code': (?!False|None)", str(step)):
                named = "trust_remote_code"
            if named and not trust.trusts_remote_code():
                raise InputError(f"{path}: a processor contains code of its own ({named}); {OWN_CODE}")


def lerobot_modules() -> tuple[Any, Any]:
    """Import `lerobot.configs.policies` and `lerobot.policies.factory`; raise an error with what they need."""
    try:
        from lerobot.configs import policies as configs
        from lerobot.policies import factory
    except ImportError as error:
        missing = "" if error.name in (None, "lerobot") else f" ({error})"
        raise InputError(
            'LeRobot policies need lerobot 0.6, with Python 3.12 and torch 2.7 to 2.11: pip install "deft[lerobot]"'
            f" there; this is Python {platform.python_version()} with torch {torch.__version__}{missing}"
        ) from None
    return configs, factory
