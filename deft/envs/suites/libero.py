"""LIBERO: 130 manipulation tasks of a Panda arm in five groups (hf-libero, robosuite 1.4).

`SUITE` describes it; `LiberoEnv` runs in the suite's interpreter (`deft suite install libero`). The package has the
tasks (bddl files) and the published initial states. Scenes and objects are not on PyPI: `--suite-path` or
`ASSETS_VARIABLE` names the folder `assets` of LIBERO.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pickle
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_image_size, check_whole
from deft.envs.suites import Suite
from deft.envs.suites.simulated import SUCCESS, Streams, SuiteEnv
from deft.errors import InputError
from deft.schema import HEAD_RGB, WRIST_RGB

ASSETS_VARIABLE = "DEFT_LIBERO_ASSETS"
SCENES = ("scenes", "articulated_objects", "stable_scanned_objects", "stable_hope_objects", "turbosquid_objects")
GROUPS: dict[str, list[str]] = json.loads((Path(__file__).parent / "libero.tasks.json").read_text())
FOLDERS = {name: "libero_10" if name == "long" else f"libero_{name}" for name in GROUPS}
HORIZONS = {"spatial": 220, "object": 280, "goal": 300, "long": 520, "90": 400}  # of OpenVLA-OFT
NUM_STATES = 50  # published initial states of a task
SETTLE_STEPS = 10  # without motion, until objects have fallen onto their places
NO_MOTION = np.array([0.0] * 6 + [-1.0])  # with an open gripper
STATE_SIZE = 8  # position and axis-angle of the hand, and both fingers


def instruction_of(task: str) -> str:
    """Return the words of a task's name, after the number of its scene."""
    return re.sub(r"^[A-Z_]+SCENE\d+_", "", task).replace("_", " ")


SUITE = Suite(
    name="libero",
    entry_point="deft.envs.suites.libero:LiberoEnv",
    package="hf_libero",
    tasks={task: instruction_of(task) for tasks in GROUPS.values() for task in tasks},
    groups=GROUPS,
    horizons={**{task: HORIZONS[group] for group in GROUPS for task in GROUPS[group]}, **HORIZONS},
    numbers_episodes=True,
    protocol=(
        f"the {NUM_STATES} published initial states of each task in turn, {SETTLE_STEPS} steps without motion first, "
        "images rotated by 180°"
    ),
    scripted_kwargs={"observation": "state"},
    path_variable=ASSETS_VARIABLE,
    fingerprint_task="spatial",
    fingerprint_kwargs={"observation": "privileged"},
)


class LiberoEnv(SuiteEnv):
    """The streams are `head_rgb` (camera agentview), `wrist_rgb`, `state` [8] and `instruction`.

    An action [7] in [-1, 1] moves and turns the hand (robosuite's OSC_POSE) and opens (-1) or closes (1) the gripper.
    Episode number n of a group of T tasks plays task n mod T from initial state n / T mod 50; a seed is the number of
    the first episode, and each later one is `stride` further on.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 20}  # noqa: RUF012 (declared by Gymnasium)
    video_camera = "agentview"

    def __init__(
        self,
        task: str = "spatial",
        observation: str = "images",
        image_size: int = 256,
        stride: int = 1,
        suite_path: str | None = None,
        render_mode: str | None = None,
    ) -> None:
        self._tasks = SUITE.tasks_of(f"{SUITE.name}/{task}")
        super().__init__(SUITE, self._tasks[0], observation, SUCCESS, render_mode)
        self._size, self._stride = check_image_size(image_size), check_whole("stride", stride, 1)
        self._assets = find_assets(suite_path)
        self._longest = max(len(SUITE.tasks[name]) for name in self._tasks)
        self._number: int | None = None
        self._simulator: Any = None
        self._found: dict[str, Any] = {}
        cameras = {HEAD_RGB: "agentview", WRIST_RGB: "robot0_eye_in_hand"}
        streams = Streams(STATE_SIZE, STATE_SIZE, cameras, self._size, self._size)
        self._set_spaces(streams, spaces.Box(-1.0, 1.0, (7,), np.float32))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Start the next episode, or that of a number."""
        if seed is None:
            seed = 0 if self._number is None else self._number + self._stride
        return super().reset(seed=seed, options=options)

    def _begin(self, seed: int) -> None:
        self._number = seed
        task = self._tasks[seed % len(self._tasks)]
        if self._simulator is None or task != self.task_name:
            self.close()
            self.task_name, self.instruction = task, SUITE.tasks[task]
            self._simulator = self._make(task)
        states = read_states(self._file("init_files", "pruned_init"))
        self._simulator.seed(0)
        self._simulator.reset()
        self._found = self._simulator.set_init_state(states[seed // len(self._tasks) % len(states)])
        for _ in range(SETTLE_STEPS):
            self._found = self._simulator.step(NO_MOTION)[0]

    def _advance(self, action: np.ndarray) -> tuple[float, bool, bool]:
        self._found, reward, is_done, _ = self._simulator.step(action.astype(np.float64))
        return float(reward), bool(is_done), False

    def _proprioception(self) -> np.ndarray:
        position, quaternion = self._found["robot0_eef_pos"], self._found["robot0_eef_quat"]
        return np.concatenate([position, axis_angle(quaternion), self._found["robot0_gripper_qpos"]])

    def _scene(self) -> np.ndarray:
        return self._proprioception()

    def _image(self, camera: str, height: int, width: int) -> np.ndarray:
        # robosuite's images are upside down; papers rotate them by 180°, which mirrors them left to right as well.
        image: np.ndarray = self._simulator.sim.render(camera_name=camera, height=height, width=width)
        return np.ascontiguousarray(image[::-1, ::-1])

    def close(self) -> None:
        """Close the simulator."""
        if self._simulator is not None:
            self._simulator.close()
            self._simulator = None

    def _file(self, folder: str, ending: str) -> Path:
        group = next(name for name in GROUPS if self.task_name in GROUPS[name])
        return package_folder() / folder / FOLDERS[group] / f"{self.task_name}.{ending}"

    def _make(self, task: str) -> Any:
        """Return LIBERO's environment of a task."""
        configure(self._assets)
        import libero.libero

        libero.libero._assets_path_cache = str(self._assets)
        from libero.libero.envs import OffScreenRenderEnv

        return OffScreenRenderEnv(
            bddl_file_name=str(self._file("bddl_files", "bddl")),
            camera_heights=self._size,
            camera_widths=self._size,
            use_camera_obs=False,
        )


def find_assets(given: str | None) -> Path:
    """Return the folder of scenes and objects; raise InputError that names what is missing."""
    remedy = f"--suite-path or {ASSETS_VARIABLE} must name the folder libero/libero/assets of LIBERO's repository"
    if not given:
        raise InputError(f"libero: its scenes and objects are not on PyPI; {remedy}")
    folder = Path(given).expanduser()
    missing = [name for name in SCENES if not (folder / name).is_dir()]
    if missing:
        raise InputError(f"{folder}: has no folder {', '.join(missing)}; {remedy}")
    return folder


def package_folder() -> Path:
    """Return the folder of LIBERO's package, without importing it: the import asks questions on the terminal."""
    spec = importlib.util.find_spec("libero")
    if spec is None or not spec.submodule_search_locations:
        raise InputError("libero: the package is not installed: deft suite install libero")
    return Path(next(iter(spec.submodule_search_locations))) / "libero"


def configure(assets: Path) -> None:
    """Write the config file that LIBERO reads when it is imported, in a folder of this process."""
    folder = Path(tempfile.mkdtemp(prefix="deft-libero-"))
    root = package_folder()
    paths = {"benchmark_root": root, "bddl_files": root / "bddl_files", "init_states": root / "init_files"}
    paths |= {"datasets": folder / "datasets", "assets": assets}
    text = "".join(f"{name}: {json.dumps(str(path))}\n" for name, path in paths.items())
    (folder / "config.yaml").write_text(text)
    os.environ["LIBERO_CONFIG_PATH"] = str(folder)


class _Arrays(pickle.Unpickler):
    """Reads NumPy arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        allowed = {
            ("numpy.core.multiarray", "_reconstruct"),
            ("numpy._core.multiarray", "_reconstruct"),
            ("numpy", "ndarray"),
            ("numpy", "dtype"),
            ("_codecs", "encode"),
        }
        if (module, name) not in allowed:
            raise InputError(f"a file of initial states contains {module}.{name}, which is no array")
        return super().find_class(module, name)


def read_states(file: Path) -> np.ndarray:
    """Return the initial states [number, size] in a file of `torch.save`, without torch."""
    try:
        with zipfile.ZipFile(file) as archive:
            name = next(name for name in archive.namelist() if name.endswith("/data.pkl"))
            with archive.open(name) as data:
                states = np.asarray(_Arrays(data).load())
    except (OSError, zipfile.BadZipFile, StopIteration, pickle.UnpicklingError) as error:
        raise InputError(f"{file}: no file of initial states; deft suite install libero --reinstall") from error
    return states


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """Return axis · angle of a quaternion (x, y, z, w)."""
    w = float(np.clip(quaternion[3], -1.0, 1.0))
    norm = np.sqrt(1.0 - w * w)
    if norm < 1e-9:
        return np.zeros(3)
    found: np.ndarray = np.asarray(quaternion[:3]) * (2.0 * np.arccos(w) / norm)
    return found
