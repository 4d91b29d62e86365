"""Actions and states in the robot's units and in the padded layout: there, and back."""

import numpy as np
import pytest

from deft.envs.normalizers import REACH, ActionNormalizer, RangeNormalizer, StateNormalizer
from deft.envs.tabletop import panda
from deft.envs.tabletop.control import CONTROL_MODES, ArmController, action_mask, kinematics, unpad_action
from deft.errors import InputError

SIZES = {"delta_qpos": 8, "delta_ee": 7, "delta_ee_pos": 4}
# Two arms of six joints, as RoboTwin's default robot has.
TWO_ARMS = np.isin(np.arange(32), [*range(6), 8, *range(9, 15), 17])


@pytest.mark.parametrize("mode", CONTROL_MODES)
@pytest.mark.parametrize("kind", [ActionNormalizer, StateNormalizer])
def test_round_trip(kind: type, mode: str) -> None:
    normalizer = kind(mode)
    assert normalizer.size == SIZES[mode]
    random = np.random.default_rng(0)
    raw = random.uniform(normalizer.lower, normalizer.upper, (50, 3, normalizer.size))
    padded = normalizer.normalize(raw)
    assert padded.shape == (50, 3, 32)
    assert padded.dtype == np.float32
    assert np.abs(padded).max() <= 1
    assert np.abs(padded[..., normalizer.mask]).max() > 0.99  # the whole range is used
    assert not padded[..., ~normalizer.mask].any()
    np.testing.assert_allclose(normalizer.denormalize(padded), raw, atol=1e-6)
    beyond = normalizer.upper + 0.3  # outside the range it can be inverted too
    np.testing.assert_allclose(normalizer.denormalize(normalizer.normalize(beyond)), beyond, atol=1e-6)


def test_places_of_a_panda() -> None:
    padded = StateNormalizer().normalize(np.append(panda.JOINT_UPPER, 0.0))
    assert padded[:7].tolist() == [1] * 7
    assert padded[7] == 0  # the place of an eighth joint
    assert padded[8] == -1  # closed
    assert not padded[9:].any()
    np.testing.assert_array_equal(ActionNormalizer("delta_ee").mask, action_mask("delta_ee"))


def test_places_of_two_arms() -> None:
    normalizer = ActionNormalizer("delta_qpos", 0.5, TWO_ARMS)
    # 0.1 rad x 0.5 is the largest step: 0.05 → 1, -0.025 → -0.5; openings 1 and 0.25 → 1 and -0.5
    padded = normalizer.normalize(np.array([0.05] * 6 + [1.0] + [-0.025] * 6 + [0.25]))
    expected = np.zeros(32)
    expected[:6], expected[8], expected[9:15], expected[17] = 1, 1, -0.5, -0.5
    np.testing.assert_allclose(padded, expected, atol=1e-6)
    joints = StateNormalizer("delta_qpos", TWO_ARMS, "aloha-agilex").normalize(np.full(14, np.pi))
    assert joints[[0, 5, 9, 14]].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("mode", CONTROL_MODES)
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_an_action_moves_the_target_by_what_it_says(mode: str, scale: float) -> None:
    controller = ArmController(mode, scale)
    padded = np.zeros(32, np.float32)
    padded[: SIZES[mode] - 1] = np.linspace(-0.8, 0.9, SIZES[mode] - 1)
    raw = ActionNormalizer(mode, scale).denormalize(padded)
    joints = controller.target.copy()
    position, _ = kinematics().pose(joints)
    controller.command(unpad_action(padded, mode), joints)
    if mode == "delta_qpos":
        np.testing.assert_allclose(controller.target - joints, raw[:7], atol=1e-6)
    else:
        np.testing.assert_allclose(kinematics().pose(controller.target)[0] - position, raw[:3], atol=1e-3)


def test_the_hand_is_always_within_reach() -> None:
    random = np.random.default_rng(0)
    normalizer = StateNormalizer("delta_ee_pos")
    positions = [kinematics().pose(random.uniform(panda.JOINT_LOWER, panda.JOINT_UPPER))[0] for _ in range(500)]
    distances = np.linalg.norm(np.array(positions) - [0, 0, 0.333], axis=1)
    assert 0.8 < distances.max() < REACH
    padded = normalizer.normalize(np.column_stack([positions, np.zeros(500)]))
    assert np.abs(padded).max() <= 1


def test_wrong_shapes_are_rejected() -> None:
    with pytest.raises(InputError, match="last dim must be 8"):
        ActionNormalizer().normalize(np.zeros(7))
    with pytest.raises(InputError, match="last dim must be 32"):
        ActionNormalizer().denormalize(np.zeros(8))
    with pytest.raises(InputError, match="control_mode is 'qpos'"):
        StateNormalizer("qpos")
    with pytest.raises(InputError, match="bool"):
        RangeNormalizer(np.ones(32), np.zeros(32), np.ones(32))
    with pytest.raises(InputError, match="padding"):
        ActionNormalizer(mask=np.ones(32, bool))
