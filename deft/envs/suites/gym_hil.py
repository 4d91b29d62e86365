"""gym-hil: a Franka Panda that picks up a cube, the simulated task of LeRobot's human-in-the-loop RL (HIL-SERL).

`SUITE` describes it; `GymHilEnv` runs in the suite's interpreter (`deft suite install gym-hil`).
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_image_size
from deft.envs.suites import Suite
from deft.envs.suites.simulated import SUCCESS, Cameras, Streams, SuiteEnv
from deft.schema import HEAD_RGB, WRIST_RGB

PICK, PICK_RANDOM, TEXT = "pick-cube", "pick-cube-random", "Pick up the cube"
HORIZON = 100  # steps of a tenth of a second
STEP = 0.025  # metres: what an action of 1 moves the gripper by, as in gym-hil's wrapper
MAX_GRIPPER = 255.0
SUITE = Suite(
    name="gym-hil",
    entry_point="deft.envs.suites.gym_hil:GymHilEnv",
    package="gym-hil",
    tasks={PICK: TEXT, PICK_RANDOM: TEXT},
    default_task=PICK,
    max_episode_steps=HORIZON,
    protocol="an episode succeeds when the cube is 10 cm above its initial height",
    scripted_kwargs={"observation": "state"},
    fingerprint_kwargs={"observation": "privileged", "reward": "dense"},
)
GRAVITY = -9.81
HOVER, LIFT = 0.08, 0.15  # metres above the cube, and above its initial position, that the expert aims at
NEAR = 0.01  # metres: the expert is where it aims at
CLOSING_STEPS = 5


class GymHilEnv(SuiteEnv):
    """The streams are `head_rgb` (camera front), `wrist_rgb`, `state` [18] and `instruction`.

    `state`: 7 joint angles and velocities, the command of the gripper (0 open, 1 closed) and its position in metres.
    `scene_state` [21] adds the position of the cube. An action [4] in [-1, 1] moves the gripper by up to 2.5 cm along
    each axis and adds to its command. In `pick-cube` the cube starts at one place, as in gym-hil's registered
    environments; in `pick-cube-random` anywhere in a rectangle of 20 × 30 cm. A cube pushed out of the workspace ends
    the episode.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (declared by Gymnasium)
    video_camera = "front"

    def __init__(
        self,
        task: str = PICK,
        observation: str = "images",
        image_size: int = 128,
        reward: str = SUCCESS,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(SUITE, task, observation, reward, render_mode)
        size = check_image_size(image_size)
        from gym_hil.envs.panda_pick_gym_env import PandaPickCubeGymEnv

        self._simulator = PandaPickCubeGymEnv(
            reward_type="sparse" if reward == SUCCESS else "dense",
            random_block_position=self.task_name == PICK_RANDOM,
            image_obs=False,
        )
        self._cameras = Cameras(SUITE.name, self._simulator.model)
        self._gravity = 1.0
        cameras = {HEAD_RGB: "front", WRIST_RGB: "handcam_rgb"}
        self._set_spaces(Streams(18, 21, cameras, size, size), spaces.Box(-1.0, 1.0, (4,), np.float32))

    def scale_gravity(self, scale: float) -> None:
        """Multiply gravity in the next episodes: for fingerprints, which measure what rounding changes."""
        self._gravity = scale

    def _begin(self, seed: int) -> None:
        self._simulator.model.opt.gravity[2] = GRAVITY * self._gravity
        np.random.seed(seed % 2**32)  # gym-hil draws the position from NumPy's global generator
        self._simulator.reset(seed=seed)

    def _advance(self, action: np.ndarray) -> tuple[float, bool, bool]:
        move, gripper = STEP * action[:3].astype(np.float64), action[3:].astype(np.float64)
        _, reward, terminated, _, info = self._simulator.step(np.concatenate([move, np.zeros(3), gripper]))
        has_succeeded = bool(info["succeed"])
        return float(reward), has_succeeded, bool(terminated) and not has_succeeded

    def _proprioception(self) -> np.ndarray:
        state = np.array(self._simulator.get_robot_state(), np.float64)
        state[14] /= MAX_GRIPPER
        return state

    def _scene(self) -> np.ndarray:
        return np.concatenate([self._proprioception(), self._simulator.data.sensor("block_pos").data])

    def _image(self, camera: str, height: int, width: int) -> np.ndarray:
        return self._cameras.render(self._simulator.data, camera, height, width)

    def expert_action(self) -> np.ndarray:
        """Return the action of a scripted policy: above the cube, down, close the gripper, up."""
        data = self._simulator.data
        block, hand, target = data.sensor("block_pos").data, data.sensor("2f85/pinch_pos").data, data.mocap_pos[0]
        closing = next((i for i, action in enumerate(reversed(self._actions)) if action[3] <= 0), len(self._actions))
        if closing:  # steps since the gripper began to close
            goal = target + [0.0, 0.0, LIFT if closing >= CLOSING_STEPS else 0.0]
        else:
            is_above = np.linalg.norm(hand[:2] - block[:2]) < NEAR
            goal = block + [0.0, 0.0, 0.0 if is_above else HOVER]
        is_there = np.linalg.norm(hand - block) < NEAR
        move = np.clip((goal - target) / STEP, -1.0, 1.0)
        return np.array([*move, 1.0 if closing or is_there else -1.0], np.float32)

    def close(self) -> None:
        """Close the simulator."""
        self._cameras.close()
        self._simulator.close()
