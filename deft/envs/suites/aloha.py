"""ALOHA in simulation: two ViperX arms hand over a cube, or insert a peg into a socket (gym-aloha; ACT, LeRobot).

`SUITE` describes it; `AlohaEnv` runs in the suite's interpreter (`deft suite install aloha`).
"""

from __future__ import annotations

import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_image_size
from deft.envs.suites import Suite
from deft.envs.suites.aloha_expert import Expert
from deft.envs.suites.simulated import SUCCESS, Cameras, Streams, SuiteEnv
from deft.schema import HEAD_RGB

TRANSFER, INSERTION = "transfer-cube", "insertion"
NAMES = {TRANSFER: "transfer_cube", INSERTION: "insertion"}  # of gym-aloha
HORIZON = 400  # steps of 0.02 s, in ACT and in LeRobot
STAGES = 4  # of gym-aloha's reward; the last is success
NUM_ACTIONS, ARM = 14, 6
OBJECT = 7  # position and quaternion
SUITE = Suite(
    name="aloha",
    entry_point="deft.envs.suites.aloha:AlohaEnv",
    package="gym-aloha",
    tasks={
        TRANSFER: "Pick up the cube with the right arm and transfer it to the left arm.",
        INSERTION: "Insert the peg into the socket.",
    },
    max_episode_steps=HORIZON,
    protocol=(
        "camera top, object positions drawn from the episode's seed; an episode succeeds when gym-aloha's reward is 4 "
        "at any step"
    ),
    scripted_kwargs={"observation": "state"},
    fingerprint_kwargs={"observation": "privileged", "reward": "dense"},
)
GRAVITY = -9.81


class AlohaEnv(SuiteEnv):
    """The streams are `head_rgb` (camera top, 3 : 4), `state` [14] and `instruction`.

    `state`: 6 joint angles of the left arm and the opening of its gripper (0 closed, 1 open), then of the right arm.
    `scene_state` adds the 14 velocities, and position and quaternion of each object. An action [14] has the same layout
    as `state`: the positions that the joints are moved to. The dense reward is gym-aloha's, the stage of the task from
    0 to 4.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 50}  # noqa: RUF012 (declared by Gymnasium)
    video_camera = "top"

    def __init__(
        self,
        task: str = TRANSFER,
        observation: str = "images",
        image_size: int = 480,
        reward: str = SUCCESS,
        render_mode: str | None = None,
    ) -> None:
        super().__init__(SUITE, task, observation, reward, render_mode)
        height = check_image_size(image_size)
        from gym_aloha.env import AlohaEnv as Simulator

        self._control = Simulator(NAMES[self.task_name])._env
        # gym-aloha renders three cameras of 480 × 640 pixels in every step; images are made below instead.
        self._control.task.get_observation = lambda physics: None
        physics = self._control.physics
        self._cameras = Cameras(SUITE.name, physics.model.ptr)
        self._gravity = 1.0
        self._expert: Expert | None = None
        objects = OBJECT * (2 if self.task_name == INSERTION else 1)
        streams = Streams(
            NUM_ACTIONS, 2 * NUM_ACTIONS + objects, {HEAD_RGB: self.video_camera}, height, height * 4 // 3
        )
        self._set_spaces(streams, _joint_limits(physics.model.actuator_ctrlrange))

    def scale_gravity(self, scale: float) -> None:
        """Multiply gravity in the next episodes: for fingerprints, which measure what rounding changes."""
        self._gravity = scale

    def _begin(self, seed: int) -> None:
        from gym_aloha.tasks import sim
        from gym_aloha.utils import sample_box_pose, sample_insertion_pose

        self._control.physics.model.opt.gravity[2] = GRAVITY * self._gravity
        drawn = seed % 2**32
        if self.task_name == TRANSFER:
            sim.BOX_POSE[0] = sample_box_pose(drawn)
        else:
            sim.BOX_POSE[0] = np.concatenate(sample_insertion_pose(drawn))
        self._control.reset()
        self._expert = None

    def _advance(self, action: np.ndarray) -> tuple[float, bool, bool]:
        reward = self._control.step(action.astype(np.float64)).reward
        return float(reward), reward == STAGES, False

    def _proprioception(self) -> np.ndarray:
        found: np.ndarray = self._control.task.get_qpos(self._control.physics)
        return found

    def _scene(self) -> np.ndarray:
        task, physics = self._control.task, self._control.physics
        return np.concatenate([task.get_qpos(physics), task.get_qvel(physics), task.get_env_state(physics)])

    def _image(self, camera: str, height: int, width: int) -> np.ndarray:
        return self._cameras.render(self._control.physics.data.ptr, camera, height, width)

    def expert_action(self) -> np.ndarray:
        """Return the action of a scripted policy with the waypoints of ACT."""
        if self._expert is None:
            objects = self._control.task.get_env_state(self._control.physics)
            self._expert = Expert(self._control.physics.model.ptr, self.task_name == INSERTION, objects)
        return np.clip(
            self._expert.action(len(self._actions), self._proprioception()),
            self.action_space.low,
            self.action_space.high,
        ).astype(np.float32)

    def close(self) -> None:
        """Close the renderers."""
        self._cameras.close()


def _joint_limits(limits: np.ndarray) -> spaces.Box:
    """Return the actions from the limits of the 16 actuators: arms as they are, one opening from 0 to 1 per gripper."""
    low, high = np.zeros(NUM_ACTIONS, np.float32), np.ones(NUM_ACTIONS, np.float32)
    for arm in range(2):
        own = slice(7 * arm, 7 * arm + ARM)
        low[own], high[own] = limits[8 * arm : 8 * arm + ARM].T
    return spaces.Box(low, high)
