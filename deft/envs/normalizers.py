"""Actions and states of the robot between their own units and the 32 numbers from -1 to 1 that policies see.

`F1RLEnv` has one of each. They serve recorded data and real robots too: radians, metres and openings go in, the padded
layout comes out, and back. The ranges are the robot's limits, so that nothing is estimated and nothing drifts.
"""

from __future__ import annotations

import numpy as np

from deft.envs.tabletop import control, panda
from deft.errors import InputError

LEFT_ARM, RIGHT_ARM = 0, 9  # where the eight places of each arm begin
GRIPPERS = (8, 17)
REACH = 0.95  # metres from the shoulder to the point between the finger tips, the arm stretched out
SHOULDER_HEIGHT = 0.333
_ANY_JOINT = np.pi  # radians either way, for arms whose limits are not known


class RangeNormalizer:
    """Maps raw values [..., D], dim i from lower[i] to upper[i], to [-1, 1] at their places among 32; zeros elsewhere.

    x = 2 (raw - lower) / (upper - lower) - 1. Nothing is clipped, so that all is invertible.
    """

    def __init__(self, mask: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> None:
        """`lower` and `upper` are given for all 32 places; those of the mask count."""
        if mask.shape != (control.PADDED_SIZE,) or mask.dtype != np.bool_:
            raise InputError(f"the mask is {mask.dtype} {mask.shape}; it must be bool ({control.PADDED_SIZE},)")
        self.mask = mask.copy()
        self.lower = np.asarray(lower, np.float64)[mask]
        self.upper = np.asarray(upper, np.float64)[mask]
        if not (self.lower < self.upper).all():
            raise InputError("the mask has places that are padding: 18 to 31 belong to no arm and no gripper")
        self.size = len(self.lower)
        """D: left arm, left gripper, right arm, right gripper, as far as the mask has them."""

    def normalize(self, raw: np.ndarray) -> np.ndarray:
        """[..., D] in the robot's units to float32 [..., 32]."""
        raw = self._with_last_dim(raw, self.size)
        padded = np.zeros((*raw.shape[:-1], control.PADDED_SIZE), np.float32)
        padded[..., self.mask] = 2 * (raw - self.lower) / (self.upper - self.lower) - 1
        return padded

    def denormalize(self, padded: np.ndarray) -> np.ndarray:
        """The inverse: [..., 32] to float64 [..., D]."""
        padded = self._with_last_dim(padded, control.PADDED_SIZE)
        return self.lower + (padded[..., self.mask] + 1) / 2 * (self.upper - self.lower)

    @staticmethod
    def _with_last_dim(values: np.ndarray, size: int) -> np.ndarray:
        array = np.asarray(values, np.float64)
        if array.shape[-1:] != (size,):
            raise InputError(f"values have shape {array.shape}; the last dim must be {size}")
        return array


class ActionNormalizer(RangeNormalizer):
    """One step's deltas of the arm (radians or metres), and how far the gripper is to open, 0 to 1."""

    def __init__(
        self, control_mode: str = "delta_qpos", action_scale: float = 1.0, mask: np.ndarray | None = None
    ) -> None:
        """`mask` is `action_mask(control_mode)`, one Panda, unless another robot's is given."""
        largest = {
            "delta_qpos": [control.MAX_JOINT_STEP] * 8,
            "delta_ee": [control.MAX_POSITION_STEP] * 3 + [control.MAX_ROTATION_STEP] * 5,
            "delta_ee_pos": [control.MAX_POSITION_STEP] * 8,
        }[control.check_mode(control_mode)]
        arm = action_scale * np.array(largest)
        super().__init__(_mask(control_mode, mask), *_both_arms(-arm, arm))


class StateNormalizer(RangeNormalizer):
    """What the deltas add up to, at the same places: joint positions, or the hand's position and rotation; the opening.

    The rotation is axis times angle, from the hand pointing straight down.
    """

    def __init__(
        self, control_mode: str = "delta_qpos", mask: np.ndarray | None = None, embodiment: str = "franka-panda"
    ) -> None:
        """Joint limits are the Panda's; any other robot's joints are taken from -π to π."""
        lower, upper = np.full(8, -_ANY_JOINT), np.full(8, _ANY_JOINT)
        if control.check_mode(control_mode) != "delta_qpos":
            lower[:3], upper[:3] = -REACH, REACH
            lower[2], upper[2] = SHOULDER_HEIGHT - REACH, SHOULDER_HEIGHT + REACH
        elif embodiment == "franka-panda":
            lower[: panda.NUM_JOINTS], upper[: panda.NUM_JOINTS] = panda.JOINT_LOWER, panda.JOINT_UPPER
        super().__init__(_mask(control_mode, mask), *_both_arms(lower, upper))


def _mask(control_mode: str, mask: np.ndarray | None) -> np.ndarray:
    return control.action_mask(control_mode) if mask is None else np.asarray(mask)


def _both_arms(lower: np.ndarray, upper: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """An arm's eight ranges at the places of both arms; grippers from 0 to 1."""
    ranges = np.zeros((2, control.PADDED_SIZE))
    for start in (LEFT_ARM, RIGHT_ARM):
        ranges[:, start : start + 8] = lower, upper
    ranges[1, list(GRIPPERS)] = 1.0
    return ranges[0], ranges[1]
