"""Conversion of the robot's actions and states between physical units and the 32 numbers from -1 to 1 of policies.

`F1RLEnv` has one of each. They also serve recorded data and real robots: radians, metres and gripper openings to the
padded layout, and back. The ranges are the robot's limits; nothing is estimated.
"""

from __future__ import annotations

import numpy as np

from deft.envs.padded import ARM_STARTS, GRIPPERS, PADDED_SIZE
from deft.envs.tabletop import control, panda
from deft.errors import InputError

REACH = 0.95  # metres from the shoulder to the point between the finger tips of the extended arm
SHOULDER_HEIGHT = 0.333
_ANY_JOINT = np.pi  # radians in both directions, for arms with unknown limits


class RangeNormalizer:
    """Maps raw values [..., D], dim i from lower[i] to upper[i], to [-1, 1] in the 32-dim layout; zeros elsewhere.

    x = 2 (raw - lower) / (upper - lower) - 1, without clipping, so that it is invertible.
    """

    def __init__(self, mask: np.ndarray, lower: np.ndarray, upper: np.ndarray) -> None:
        """`lower` and `upper` have 32 entries; those of the mask are used."""
        if mask.shape != (PADDED_SIZE,) or mask.dtype != np.bool_:
            raise InputError(f"the mask is {mask.dtype} {mask.shape}; it must be bool ({PADDED_SIZE},)")
        self.mask = mask.copy()
        self.lower = np.asarray(lower, np.float64)[mask]
        self.upper = np.asarray(upper, np.float64)[mask]
        if not (self.lower < self.upper).all():
            raise InputError("the mask includes padding: dims 18 to 31 belong to no arm and no gripper")
        self.size = len(self.lower)
        """D: left arm, left gripper, right arm, right gripper, if the mask has them."""

    def normalize(self, raw: np.ndarray) -> np.ndarray:
        """Convert [..., D] in the robot's units to float32 [..., 32]."""
        raw = self._with_last_dim(raw, self.size)
        padded = np.zeros((*raw.shape[:-1], PADDED_SIZE), np.float32)
        padded[..., self.mask] = 2 * (raw - self.lower) / (self.upper - self.lower) - 1
        return padded

    def denormalize(self, padded: np.ndarray) -> np.ndarray:
        """Convert [..., 32] to float64 [..., D]."""
        padded = self._with_last_dim(padded, PADDED_SIZE)
        return self.lower + (padded[..., self.mask] + 1) / 2 * (self.upper - self.lower)

    @staticmethod
    def _with_last_dim(values: np.ndarray, size: int) -> np.ndarray:
        array = np.asarray(values, np.float64)
        if array.shape[-1:] != (size,):
            raise InputError(f"values have shape {array.shape}; the last dim must be {size}")
        return array


class ActionNormalizer(RangeNormalizer):
    """The arm's deltas of one step (radians or metres), and the target opening of the gripper, 0 to 1."""

    def __init__(
        self, control_mode: str = "delta_qpos", action_scale: float = 1.0, mask: np.ndarray | None = None
    ) -> None:
        """`mask` is by default `action_mask(control_mode)` of one Panda."""
        largest = {
            "delta_qpos": [control.MAX_JOINT_STEP] * 8,
            "delta_ee": [control.MAX_POSITION_STEP] * 3 + [control.MAX_ROTATION_STEP] * 5,
            "delta_ee_pos": [control.MAX_POSITION_STEP] * 8,
        }[control.check_mode(control_mode)]
        arm = action_scale * np.array(largest)
        super().__init__(_mask(control_mode, mask), *_both_arms(-arm, arm))


class StateNormalizer(RangeNormalizer):
    """Joint positions, or the hand's position and rotation, and the gripper's opening, in the dims of their deltas.

    The rotation is axis times angle, relative to the hand pointing straight down.
    """

    def __init__(
        self, control_mode: str = "delta_qpos", mask: np.ndarray | None = None, embodiment: str = "franka-panda"
    ) -> None:
        """Joint limits are the Panda's; those of any other robot are -π to π."""
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
    """Return the eight ranges of an arm in the dims of both arms; grippers from 0 to 1."""
    ranges = np.zeros((2, PADDED_SIZE))
    for start in ARM_STARTS.values():
        ranges[:, start : start + 8] = lower, upper
    ranges[1, list(GRIPPERS.values())] = 1.0
    return ranges[0], ranges[1]
