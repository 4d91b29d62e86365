"""The part that environments of suites have in common: streams, rewards for success, and states that can be saved.

A suite's environment derives from `SuiteEnv` and has five methods: `_begin`, `_advance`, `_proprioception`, `_scene`
and `_image`. It runs in the suite's interpreter, so this module needs no other packages than Gymnasium and NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_choice, check_render_mode
from deft.envs.mujoco_backend import cannot_render, check_backend
from deft.envs.suites import Suite
from deft.errors import InputError
from deft.schema import INSTRUCTION, STATE

OBSERVATIONS = ("images", "privileged", "state")
SUCCESS, DENSE = "success", "dense"
LETTERS = "".join(map(chr, range(32, 127)))
SCENE = "scene_state"


@dataclass(frozen=True)
class Streams:
    """The sizes of an environment's streams, and the cameras of its images."""

    state: int
    scene: int
    cameras: Mapping[str, str]
    """The simulator's camera of each stream of images."""
    height: int
    width: int


class SuiteEnv(gymnasium.Env):
    """One task of a suite.

    `observation`: `"images"` has the streams of the cameras, `state` (the robot) and `instruction`. `"privileged"` adds
    `scene_state`, robot and objects, for critics. `"state"` has only that and the instruction, without cameras.

    `reward`: `"success"` is 1 at the first step that succeeds and otherwise 0; `"dense"` is the suite's own reward.
    Either ends the episode at success, as the suite does.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (declared by Gymnasium)
    video_camera = ""
    """The camera of videos."""
    action_space: spaces.Box

    def __init__(self, suite: Suite, task: str, observation: str, reward: str, render_mode: str | None) -> None:
        check_choice("observation", observation, OBSERVATIONS)
        check_choice("reward", reward, (SUCCESS, DENSE))
        check_render_mode(render_mode)
        check_backend()
        self.task_name = suite.find(f"{suite.name}/{task}")
        self.instruction = suite.tasks[self.task_name]
        self._longest = len(self.instruction)  # instruction of any episode
        self.render_mode = render_mode
        self.observes = True
        self._observation, self._reward = observation, reward
        self._seed: int | None = None
        self._actions: list[np.ndarray] = []
        self._succeeded = False

    def _set_spaces(self, streams: Streams, action_space: spaces.Box) -> None:
        """Set the spaces; the constructor of an environment calls it last."""
        self._streams, self.action_space = streams, action_space

        def vector(size: int) -> spaces.Box:
            return spaces.Box(-np.inf, np.inf, (size,), np.float32)

        found: dict[str, spaces.Space] = {}
        found[STATE] = vector(streams.scene if self._observation == "state" else streams.state)
        if self._observation != "state":
            shape = (streams.height, streams.width, 3)
            found |= {name: spaces.Box(0, 255, shape, np.uint8) for name in streams.cameras}
        found[INSTRUCTION] = spaces.Text(self._longest, charset=LETTERS)
        if self._observation == "privileged":
            found[SCENE] = vector(streams.scene)
        self.observation_space = spaces.Dict(found)

    # ----------------------------------------------------------------------------------------------- of one simulator

    def _begin(self, seed: int) -> None:
        """Start the episode of a seed."""
        raise NotImplementedError

    def _advance(self, action: np.ndarray) -> tuple[float, bool, bool]:
        """Step; return the suite's reward, whether the task has succeeded, and whether the episode has failed."""
        raise NotImplementedError

    def _proprioception(self) -> np.ndarray:
        """Return the state of the robot."""
        raise NotImplementedError

    def _scene(self) -> np.ndarray:
        """Return the state of robot and objects."""
        raise NotImplementedError

    def _image(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return an image, uint8 [height, width, 3]."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------------------- episodes

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode; with a seed it depends on nothing else."""
        super().reset(seed=seed)
        drawn = int(self.np_random.integers(2**31))
        self._start(drawn if seed is None else seed)
        return self.observe(), self._info()

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Step the simulator."""
        if self._seed is None:
            raise InputError("step() was called before reset()")
        dense, has_failed = self._move(np.asarray(action, np.float32))
        reward = float(self._succeeded) if self._reward == SUCCESS else dense
        return self.observe(), reward, self._succeeded or has_failed, False, self._info()

    def _start(self, seed: int) -> None:
        self._seed, self._actions, self._succeeded = seed, [], False
        self._begin(seed)

    def _move(self, action: np.ndarray) -> tuple[float, bool]:
        dense, has_succeeded, has_failed = self._advance(action)
        self._actions.append(action)
        self._succeeded = self._succeeded or has_succeeded
        return dense, has_failed

    def _info(self) -> dict[str, Any]:
        return {"success": self._succeeded, "task": self.task_name, "instruction": self.instruction}

    def get_state(self) -> dict[str, Any]:
        """Return the present episode as the actions since its start."""
        actions = np.array(self._actions, np.float32).reshape(-1, *self.action_space.shape)
        return {"seed": self._seed, "actions": actions}

    def set_state(self, state: dict[str, Any]) -> None:
        """Play an episode again up to the saved state."""
        if state["seed"] is None:
            self._seed = None
            return
        self._start(state["seed"])
        for action in state["actions"]:
            self._move(action)

    # --------------------------------------------------------------------------------------------------- observations

    def observe(self) -> dict[str, Any]:
        """Return the present observation; with blank images while `observes` is false."""
        size = (self._streams.height, self._streams.width)
        own = self._scene() if self._observation == "state" else self._proprioception()
        found: dict[str, Any] = {STATE: own.astype(np.float32)}
        if self._observation != "state":
            for name, camera in self._streams.cameras.items():
                found[name] = self._image(camera, *size) if self.observes else np.zeros((*size, 3), np.uint8)
        found[INSTRUCTION] = self.instruction
        if self._observation == "privileged":
            found[SCENE] = self._scene().astype(np.float32)
        return found

    def set_observes(self, observes: bool) -> None:
        """Set whether the next observations have images."""
        self.observes = observes

    def render(self) -> np.ndarray | None:
        """Return an image of 480 × 640 pixels."""
        return None if self.render_mode is None else self._image(self.video_camera, 480, 640)


class Cameras:
    """Renders one MuJoCo model with `mujoco.Renderer`, one per size."""

    def __init__(self, suite: str, model: Any) -> None:
        self._suite, self._model = suite, model
        self._renderers: dict[tuple[int, int], Any] = {}

    def render(self, data: Any, camera: str, height: int, width: int) -> np.ndarray:
        """Return an image, uint8 [height, width, 3]."""
        if (height, width) not in self._renderers:
            self._renderers[height, width] = self._renderer(height, width)
        renderer = self._renderers[height, width]
        renderer.update_scene(data, camera=camera)
        image: np.ndarray = renderer.render()
        return image.copy()

    def _renderer(self, height: int, width: int) -> Any:
        import mujoco

        buffers = self._model.vis.global_
        buffers.offheight, buffers.offwidth = max(buffers.offheight, height), max(buffers.offwidth, width)
        try:
            return mujoco.Renderer(self._model, height, width)
        except Exception as error:
            raise cannot_render(self._suite, error) from error

    def close(self) -> None:
        """Free the renderers."""
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()
