"""A trained world model as the reward of an F1 environment, made by `F1RLEnv(teacher_policy=policy)`.

Each instance holds the recurrent memory of one environment; several instances may share one policy.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from deft import schema
from deft.errors import InputError
from deft.models.f1 import frames
from deft.models.f1.batch import BatchBuilder, MemoryStateManager

TERMS = {"teacher": "accuracy", "student": "error"}


class TeacherPolicy:
    """The reward of (s_t, a_t, s_{t+1}) from a world model's prediction of img_{t+1}.

    Phase `teacher`: `accuracy`, the fraction of the codes of img_{t+1} that are predicted, each scale from the model's
    own coarser codes (`wm_acc` of `deft evaluate`). Phase `student`: `error`, the mean cross-entropy of the codes in
    nats. The student's memory divergence is not part of it: the environment does not know the student's memory.
    """

    def __init__(self, policy: Any, phase: str = "teacher") -> None:
        """Read the rewards of `policy`, an `F1Policy`."""
        if phase not in TERMS:
            raise InputError(f"phase is {phase!r}; choose {' or '.join(TERMS)}")
        self.policy, self.phase = policy, phase
        self.reward_terms = (TERMS[phase],)
        self._memory = MemoryStateManager()

    def to(self, device: str | torch.device) -> TeacherPolicy:
        """Move the policy to a device."""
        self.policy.to(device)
        return self

    def reset(self) -> None:
        """Start an episode with a memory of zeros."""
        self._memory.reset()

    @torch.no_grad()
    def reward(self, inputs: dict[str, Any], target: np.ndarray) -> dict[str, float]:
        """The named reward of one step, from `prediction_pair`'s inputs and target."""
        policy = self.policy
        batch = BatchBuilder(policy.device).build_batch([{schema.OBSERVATION: inputs}], include_memory_states=False)
        frame = torch.as_tensor(target, device=policy.device)[None, None]
        batch[schema.IMAGE0_HISTORY] = torch.cat([batch[schema.IMAGE0_HISTORY], frame], 1)
        memory = self._memory.get_current()
        if memory is None and policy.model.memory is not None:
            memory = policy.initial_memory(1)
        was_training = policy.training
        policy.eval()
        try:
            if self.phase == "student":
                results = policy.forward_with_world_model(batch, memory, train_gen_expert_only=True)
                value = results["wm_loss"]
            else:
                results = policy.predict_images_only(batch, memory)
                pixels = frames.to_model(frame[:, 0], policy.config.tokenizer.image_size, schema.WRIST_RGB)
                codes = policy.tokenizer.encode(pixels)
                value = (results[schema.FRAME_TOKENS] == codes).float().mean()
        finally:
            policy.train(was_training)
        if schema.MEMORY_STATE in results:
            self._memory.update(results[schema.MEMORY_STATE])
        return {self.reward_terms[0]: float(value)}
