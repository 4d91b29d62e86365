"""LIBERO's tasks, files and protocol. Its scenes are not on PyPI, so that no episode is played here."""

import pickle
import zipfile

import numpy as np
import pytest

from deft.cli import main
from deft.envs.suites import find_suite, libero
from deft.errors import InputError

SUITE = find_suite("libero")


def write_states(file, value):
    """A file as `torch.save` writes it: a zip archive with a pickle of protocol 2."""
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, protocol=2))
        archive.writestr("archive/version", "3")


def test_groups_have_the_tasks_and_time_limits_of_the_benchmark():
    sizes = {"spatial": 10, "object": 10, "goal": 10, "long": 10, "90": 90}
    assert {name: len(tasks) for name, tasks in libero.GROUPS.items()} == sizes
    assert len(SUITE.tasks) == 130
    limits = {name: SUITE.time_limit(f"libero/{name}") for name in sizes}
    assert limits == {"spatial": 220, "object": 280, "goal": 300, "long": 520, "90": 400}
    task = libero.GROUPS["long"][0]
    spec = SUITE.spec(f"libero/{task}", num_envs=4)
    assert (spec.max_episode_steps, spec.kwargs) == (520, {"task": task, "stride": 4})


def test_instructions_are_the_words_of_a_name():
    assert libero.instruction_of("KITCHEN_SCENE10_close_the_top_drawer") == "close the top drawer"
    assert libero.instruction_of("put_the_bowl_on_the_plate") == "put the bowl on the plate"
    assert all(text == text.lower() or "SCENE" not in text for text in SUITE.tasks.values())


def test_initial_states_are_read_without_torch(tmp_path):
    states = np.arange(6.0).reshape(2, 3)
    write_states(tmp_path / "a.pruned_init", states)
    assert np.array_equal(libero.read_states(tmp_path / "a.pruned_init"), states)
    with pytest.raises(InputError, match="no file of initial states"):
        libero.read_states(tmp_path / "missing.pruned_init")


def test_a_file_of_states_runs_no_code(tmp_path):
    write_states(tmp_path / "bad.pruned_init", print)
    with pytest.raises(InputError, match=r"contains __builtin__\.print, which is no array"):
        libero.read_states(tmp_path / "bad.pruned_init")


def test_missing_assets_are_named(tmp_path):
    with pytest.raises(InputError, match="are not on PyPI; --suite-path or DEFT_LIBERO_ASSETS must name"):
        libero.find_assets(None)
    for name in libero.SCENES[1:]:
        (tmp_path / name).mkdir()
    with pytest.raises(InputError, match="has no folder scenes; --suite-path or DEFT_LIBERO_ASSETS must name"):
        libero.find_assets(str(tmp_path))
    (tmp_path / "scenes").mkdir()
    assert libero.find_assets(str(tmp_path)) == tmp_path


def test_a_quaternion_as_axis_and_angle():
    """(0, 0, sin 45°, cos 45°) turns by 90° about z."""
    assert libero.axis_angle(np.array([0, 0, np.sqrt(0.5), np.sqrt(0.5)])) == pytest.approx([0, 0, np.pi / 2])
    assert libero.axis_angle(np.array([0, 0, 0, 1.0])).tolist() == [0, 0, 0]


class Simulator:
    """What `LiberoEnv` uses of LIBERO's environment; a state is one number, and 13 steps are success."""

    def __init__(self, log):
        self.sim, self.log, self.steps = self, log, 0

    def seed(self, seed): ...

    def reset(self):
        self.steps = 0

    def set_init_state(self, state):
        self.log.append(float(state[0]))
        return self.observation()

    def step(self, action):
        self.steps += 1
        return self.observation(), float(self.steps == 13), self.steps == 13, {}

    def observation(self):
        quaternion = np.array([0, 0, 0, 1.0])
        return {"robot0_eef_pos": np.zeros(3), "robot0_eef_quat": quaternion, "robot0_gripper_qpos": np.zeros(2)}

    def render(self, camera_name, height, width):
        image = np.zeros((height, width, 3), np.uint8)
        image[0, 0] = 255
        return image

    def close(self): ...


def test_episodes_take_the_initial_states_in_turn(tmp_path, monkeypatch):
    """Number n of the 10 tasks: task n mod 10, state n // 10 mod 50. 505 is task 5, state 0; 10 further is state 1."""
    log, made = [], []
    write_states(tmp_path / "states", np.arange(50.0).reshape(50, 1))
    for name in libero.SCENES:
        (tmp_path / name).mkdir()
    monkeypatch.setattr(libero.LiberoEnv, "_file", lambda *_: tmp_path / "states")
    monkeypatch.setattr(libero.LiberoEnv, "_make", lambda self, task: made.append(task) or Simulator(log))
    env = libero.LiberoEnv("spatial", image_size=16, stride=10, suite_path=str(tmp_path))
    observation, info = env.reset(seed=505)
    assert env.observation_space.contains(observation)
    assert info["task"] == libero.GROUPS["spatial"][5]
    assert (observation["head_rgb"][-1, -1] == 255).all()  # rotated by 180°
    ends = [env.step(np.zeros(7, np.float32))[2] for _ in range(3)]  # after 10 steps without motion
    assert ends == [False, False, True]
    env.reset()
    assert log == [0.0, 1.0]
    assert made == [libero.GROUPS["spatial"][5]]


def test_a_suite_without_assets_is_one_line(capsys, monkeypatch):
    from deft.envs.suites.install import INSTALLED, state_of

    if state_of(SUITE) != INSTALLED:
        pytest.skip("the suite libero is not installed: deft suite install libero")
    monkeypatch.delenv("DEFT_LIBERO_ASSETS", raising=False)
    evaluate = ["evaluate", "--suite", "libero/spatial", "--policy", "random", "--episodes", "1"]
    assert main(evaluate) == 2
    assert (
        "libero: its scenes and objects are not on PyPI; --suite-path or DEFT_LIBERO_ASSETS must"
        in capsys.readouterr().err
    )
    assert main([*evaluate, "--suite-path", "nowhere"]) == 2
    assert "nowhere: has no folder scenes, articulated_objects" in capsys.readouterr().err
