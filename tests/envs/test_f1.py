"""The F1 environments: the documents' contract, aligned histories, true ends, exact states."""

from collections.abc import Mapping
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium.utils.env_checker import check_env
from robot_worlds import MASK, WORLD_ID, NumberedWorld, numbers
from tensordict import TensorDict

from deft import schema
from deft.config.settings import EnvConfig
from deft.envs import SerialVectorEnv, make_env, make_vector_env
from deft.envs.f1 import CELL, ContactEnv, F1RLEnv, StudentEnv, TeacherEnv, WatchedEnv
from deft.envs.history import executed_action, prediction_pair
from deft.envs.tabletop.control import CONTROL_MODES, action_mask
from deft.envs.tabletop.env import TabletopEnv
from deft.errors import InputError, RunError
from deft.models.policy import Policy
from deft.training.collection import Collector

NUMBERED: dict[str, Any] = {"world": WORLD_ID}
SMALL: dict[str, Any] = {"image_size": 16, "max_steps": 4}


def numbered_action(t: int) -> np.ndarray:
    """a_t of the numbered worlds: 0.01 t, and noise in the padding."""
    action = np.full(32, 0.7, np.float32)
    action[MASK] = 0.01 * t
    return action


# --------------------------------------------------------------------------------------------------------- contract


# The `environment` and `training` sections of the documents' rl_config.yaml.
CONFIG: dict[str, Any] = {
    "training": {"steps_per_episode": 50, "action_dim": 32, "state_dim": 32, "batch_size": 8},
    "environment": {
        "task_name": "random_exploration",
        "control_mode": "delta_qpos",
        "single_arm": True,
        "scene_reset_interval": 50,
        "embodiment": ["franka-panda"],
        "domain_randomization": {
            "random_appearance": False,
            "random_background": True,
            "random_light": True,
            "cluttered_table": True,
        },
    },
}


@pytest.mark.usefixtures("gl")
@pytest.mark.parametrize("config", [CONFIG, CONFIG["environment"]])
def test_the_documents_example(config: dict[str, Any]) -> None:
    env = F1RLEnv(task_config=config, phase="teacher", device="cuda")
    obs, _info = env.reset()
    num_steps = 0
    for _ in range(100):
        action = env.action_space.sample()
        obs, reward, terminated, truncated, _info = env.step(action)
        num_steps += 1
        if terminated or truncated:
            break
    env.close()
    assert (num_steps, terminated, truncated, reward) == (50, False, True, 0.0)  # a time limit truncates
    assert {name: (stream.shape, stream.dtype.name) for name, stream in obs.items()} == {
        "state": ((32,), "float32"),
        "action_history": ((4, 32), "float32"),
        "wrist_rgb": ((4, 3, 64, 64), "uint8"),
        "head_rgb": ((4, 3, 64, 64), "uint8"),
    }


@pytest.mark.usefixtures("gl")
@pytest.mark.filterwarnings("ignore:.*not having a spec.*:UserWarning")  # made without gymnasium.make
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (TeacherEnv, {}),
        (StudentEnv, {"obs_img_stride": 2, "control_mode": "delta_ee"}),
        (TeacherEnv, {"task_name": "pick", "control_mode": "delta_ee_pos"}),
    ],
)
def test_gymnasium_contract(kind: type[F1RLEnv], config: dict[str, Any]) -> None:
    check_env(kind({**SMALL, **config}, render_mode="rgb_array"))


def test_teacher_and_student_differ_in_the_head_camera_alone() -> None:
    teacher, student = TeacherEnv(NUMBERED), StudentEnv(NUMBERED)
    assert set(teacher.observation_space) == {"state", "action_history", "wrist_rgb", "head_rgb"}
    assert set(student.observation_space) == {"state", "action_history", "wrist_rgb"}
    first = teacher.reset(seed=0)[0]
    assert set(first) == set(teacher.observation_space)
    assert first["head_rgb"][0, 2, 0, 0] == 0
    assert first["wrist_rgb"][0, 2, 0, 0] == 1
    assert set(student.reset(seed=0)[0]) == set(student.observation_space)
    assert "head_rgb" in StudentEnv({**NUMBERED, "need_head_camera": True}).observation_space.spaces
    assert "head_rgb" not in F1RLEnv({**NUMBERED, "need_head_camera": False}).observation_space.spaces


@pytest.mark.usefixtures("gl")
def test_a_student_renders_no_head_camera() -> None:
    env = StudentEnv(SMALL)
    env.reset(seed=0)
    assert isinstance(env.simulator, TabletopEnv)
    assert env.simulator.cameras == ("wrist",)


@pytest.mark.usefixtures("gl")
def test_goal_tasks_have_words_and_experts() -> None:
    env = StudentEnv({"task_name": "reach", "image_size": 16, "control_mode": "delta_ee", "max_steps": 150})
    observation, info = env.reset(seed=0)
    assert observation["instruction"] == info["instruction"] == env.instruction
    terminated = False
    for _ in range(150):
        action = env.expert_action()
        assert action.shape == (32,)
        _, _, terminated, truncated, info = env.step(action)
        if terminated or truncated:
            break
    assert terminated
    assert info["success"]
    with pytest.raises(InputError, match="no expert"):
        StudentEnv(NUMBERED).expert_action()


@pytest.mark.parametrize("mode", CONTROL_MODES)
@pytest.mark.usefixtures("gl")
def test_layout_of_states_and_actions(mode: str) -> None:
    env = StudentEnv({"image_size": 16, "control_mode": mode}, action_scale=0.5)
    world: Any = env.simulator
    np.testing.assert_array_equal(env.action_mask, action_mask(mode))
    observation, _ = env.reset(seed=1)
    for _ in range(10):
        action = env.action_space.sample()
        observation, *_, info = env.step(action)
        assert not observation["action_history"][:, ~env.action_mask].any()
        np.testing.assert_array_equal(info["executed_action"], np.where(env.action_mask, action, 0))
    raw = env.state_normalizer.denormalize(observation["state"])
    assert raw[-1] == pytest.approx(world.gripper_opening, abs=1e-6)
    arm = world.simulation.joints if mode == "delta_qpos" else world.simulation.tcp
    np.testing.assert_allclose(raw[: len(arm)], arm, atol=1e-5)
    assert not observation["state"][~env.action_mask].any()
    assert np.abs(observation["state"]).max() <= 1


@pytest.mark.usefixtures("gl")
def test_rotation_in_the_state_is_what_a_rotation_adds_to() -> None:
    env = StudentEnv({"image_size": 16, "control_mode": "delta_ee"})
    observation, _ = env.reset(seed=0)
    action = np.zeros(32, np.float32)
    action[5], action[8] = 1.0, 1.0  # about the robot's z axis by 0.1 rad a step
    before = env.state_normalizer.denormalize(observation["state"])[3:6]
    for _ in range(5):
        observation, *_ = env.step(action)
    moved = env.state_normalizer.denormalize(observation["state"])[3:6] - before
    assert np.abs(moved[:2]).max() < 0.05
    assert 0.3 < moved[2] < 0.5  # 5 x 0.1 rad, less what the arm lags behind


def test_padding_never_reaches_the_world() -> None:
    env = TeacherEnv(NUMBERED, action_scale=0.5)
    env.reset()
    env.step(np.where(MASK, 2.0, 1.0))
    world: Any = env.simulator.unwrapped
    # clipped to 1; joints scaled by 0.5, the gripper (8) not
    expected = np.where(MASK, 0.5, 0.0)
    expected[8] = 1.0
    np.testing.assert_array_equal(world.last_action, expected)


# -------------------------------------------------------------------------------------------------------- alignment


@pytest.mark.parametrize("stride", [1, 2])
def test_frames_and_actions_are_aligned(stride: int) -> None:
    """[img_{t-3} … img_t] and [a_{t-3} … a_t] predict img_{t+1}; frames number themselves, a_t is 0.01 t."""
    env = TeacherEnv({**NUMBERED, "obs_img_stride": stride, "max_steps": 100})
    observation, _ = env.reset()
    for t in range(30):
        action = numbered_action(t)
        kept = {name: stream.copy() for name, stream in observation.items()}
        next_observation, *_, info = env.step(action)
        for name, stream in kept.items():  # what was handed out does not change
            np.testing.assert_array_equal(observation[name], stream)
        inputs, target = prediction_pair(observation, info["executed_action"], next_observation)
        times = [max(0, t - stride * back) for back in (3, 2, 1, 0)]
        assert numbers(inputs["wrist_rgb"]) == numbers(inputs["head_rgb"]) == times
        assert target[0, 0, 0] == t + 1
        if t >= 3 * stride:
            np.testing.assert_allclose(inputs["action_history"][:, 0], 0.01 * np.array(times), atol=1e-6)
        assert inputs["action_history"][-1, 0] == action[0]
        # the observation itself ends before a_t
        assert observation["action_history"][-1, 0] == pytest.approx(0.01 * max(0, t - stride))
        observation = next_observation


class Counter(Policy):
    """Acts with 0.01 t, t as the newest frame shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def act(self, td: TensorDict, deterministic: bool = False) -> TensorDict:
        t = td[schema.OBSERVATION, schema.WRIST_RGB][:, -1, 0, 0, 0].float()
        td[schema.ACTION] = (0.01 * t)[:, None].expand(-1, 32).clone()
        td[schema.LOG_PROB] = td[schema.VALUE] = torch.zeros_like(t)
        return td

    def get_value(self, td: TensorDict) -> torch.Tensor:
        return torch.zeros(len(td))


def test_transitions_are_aligned_over_the_ends_of_episodes() -> None:
    """Two environments, episodes of 5 steps: collect_steps counts the steps of both; final frames are the true ones."""
    env = SerialVectorEnv([TeacherEnv(NUMBERED, max_steps=5) for _ in range(2)])
    rollout = Collector(env, Counter(), next_observation=True).collect_steps(2 * 12)
    assert rollout.batch_size == (12, 2)
    mask = torch.as_tensor(env.action_mask)
    inputs, target = prediction_pair(
        rollout[schema.OBSERVATION],
        executed_action(rollout[schema.ACTION], mask),
        rollout[schema.NEXT_OBSERVATION],
    )
    for row in range(2):
        newest = inputs["wrist_rgb"][:, row, -1, :, 0, 0]
        assert newest[:, 0].tolist() == [0, 1, 2, 3, 4] * 2 + [0, 1]
        assert (target[:, row, 0, 0, 0] == newest[:, 0] + 1).all()  # 5 at the ends, never the next episode's 0
        assert (target[:, row, 1, 0, 0] == newest[:, 1]).all()  # of the same episode
        assert torch.allclose(inputs["action_history"][:, row, -1, 0], 0.01 * newest[:, 0])
        histories = inputs["wrist_rgb"][:, row, :, 1, 0, 0]
        assert (histories == histories[:, -1:]).all()  # no frame of the episode before
    assert not inputs["action_history"][..., ~mask].any()
    # time limits truncate and never terminate
    assert not rollout[schema.NEXT_TERMINATED].any()
    assert rollout[schema.NEXT_TRUNCATED][:, 0].tolist() == ([False] * 4 + [True]) * 2 + [False] * 2


def test_the_world_ends_an_episode_and_the_limit_cuts_it() -> None:
    env = F1RLEnv({**NUMBERED, "world_kwargs": {"terminates_at": 2}}, max_steps=2)
    env.reset()
    assert env.step(numbered_action(0))[2:4] == (False, False)
    assert env.step(numbered_action(1))[2:4] == (True, True)
    # The world's registered limit of 3 is not inherited; of two limits the earlier one cuts.
    env = F1RLEnv(NUMBERED, max_steps=4)
    env.reset()
    assert [env.step(numbered_action(t))[3] for t in range(4)] == [False, False, False, True]
    made = make_env(EnvConfig(id="f1-student", kwargs={"task_config": NUMBERED, "max_steps": 4}, max_episode_steps=2))
    made.reset()
    assert [made.step(numbered_action(t))[3] for t in range(2)] == [False, True]


# ----------------------------------------------------------------------------------------------------------- reward


class Judge:
    """A teacher that pays by what it is shown."""

    def __init__(self) -> None:
        self.num_resets = 0
        self.device = ""
        self.seen: list[dict[str, np.ndarray]] = []

    def to(self, device: str) -> "Judge":
        self.device = device
        return self

    def reset(self) -> None:
        self.num_resets += 1

    def reward(self, inputs: dict[str, np.ndarray], target: np.ndarray) -> Mapping[str, float]:
        self.seen.append(inputs)
        return {"action": float(inputs["action_history"][-1, 0]), "frame": float(target[0, 0, 0])}


def test_a_teacher_pays_for_what_the_action_led_to() -> None:
    judge = Judge()
    env = StudentEnv(NUMBERED, teacher_policy=judge, device="cpu")
    assert judge.device == "cpu"
    observation, _ = env.reset()
    assert judge.num_resets == 1
    # r(s_t, a_t, s_{t+1}) = a_t + (t + 1): another action alone earns another reward
    action = np.zeros(32, np.float32)
    for t, first in enumerate((0.25, -0.5)):
        action[0] = first
        observation, reward, _, _, info = env.step(action)
        assert reward == first + t + 1
        assert info["reward_terms"] == {"action": first, "frame": t + 1}
    # the teacher sees the head camera, the student does not
    assert "head_rgb" in judge.seen[0]
    assert "head_rgb" not in observation
    vector = SerialVectorEnv([env])
    vector.reset()
    assert vector.get_state() is None
    assert "teacher_policy" in str(vector.state_obstacle())


# ----------------------------------------------------------------------------------------------------------- states


def play(env: Any, actions: np.ndarray) -> list[dict[str, np.ndarray]]:
    """Observations, final ones and rewards of a vector environment."""
    seen = []
    for action in actions:
        step = env.step(action)
        finals = {} if step.final_observation is None else {f"final/{k}": v for k, v in step.final_observation.items()}
        seen.append({k: v.copy() for k, v in (*step.observation.items(), *finals.items(), ("reward", step.reward))})
    return seen


def assert_same(first: list[dict[str, np.ndarray]], second: list[dict[str, np.ndarray]]) -> None:
    for left, right in zip(first, second, strict=True):
        assert set(left) == set(right)
        for name in left:
            np.testing.assert_array_equal(left[name], right[name], err_msg=name)


@pytest.mark.usefixtures("gl")
def test_saved_states_are_exact_in_this_process_and_in_workers() -> None:
    """Same seed, same pixels, whichever way they run; a restored state continues with its histories, anywhere."""
    task = {"image_size": 16, "obs_img_stride": 2, "scene_reset_interval": 2, "task_name": "push"}
    config = EnvConfig(id="f1-teacher", num_envs=2, kwargs={"task_config": task, "max_steps": 6})
    here = make_vector_env(config)
    config.vector, config.num_workers = "process", 2
    workers = make_vector_env(config)
    actions = np.random.default_rng(0).uniform(-1, 1, (16, 2, 32)).astype(np.float32)
    try:
        for env in (here, workers):
            env.reset(seed=3)
        assert_same(play(here, actions[:9]), play(workers, actions[:9]))
        states = workers.get_state()
        assert states is not None
        onward = play(workers, actions[9:])
        assert any("final/wrist_rgb" in row for row in onward)  # over an episode's end
        workers.set_state(states)
        assert_same(play(workers, actions[9:]), onward)
        here.set_state(states)
        assert_same(play(here, actions[9:]), onward)
    finally:
        here.close()
        workers.close()


def test_state_of_any_world() -> None:
    env = TeacherEnv({**NUMBERED, "obs_img_stride": 2})
    env.reset(seed=0)
    for t in range(7):
        env.step(numbered_action(t))
    state = env.get_state()
    expected = env.step(numbered_action(7))[0]
    for other in (env, TeacherEnv({**NUMBERED, "obs_img_stride": 2})):
        other.reset(seed=5)
        other.set_state(state)
        found = other.step(numbered_action(7))[0]
        assert numbers(found["wrist_rgb"]) == [2, 4, 6, 8]
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name], err_msg=name)


# ----------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phase": "adversary"}, "phase is 'adversary'; choose 'teacher' or 'student'"),
        ({"task_config": {"n_obs_img_step": 4}}, "task_config.n_obs_img_step: unknown setting; did you mean"),
        ({"task_config": {"obs_img_stride": 0}}, "task_config.obs_img_stride: 0 is out of range"),
        ({"history_length": 0}, "n_obs_img_steps: 0 is out of range"),
        ({"action_scale": 0.0}, "action_scale: 0.0 is out of range; must be more than 0"),
        ({"task_config": {"single_arm": False}}, "tabletop has one arm"),
        ({"task_config": {"embodiment": ["aloha-agilex"]}}, r"tabletop has only \[franka-panda\]"),
        ({"task_config": {"control_mode": "qpos"}}, "control_mode is 'qpos'"),
        ({"task_config": {"world": "CartPole-v1"}}, "needs 32 action dims and a mask of the real ones"),
        ({"task_config": {"environment": {}, "training": {"action_dim": 7}}}, "training.action_dim is 7"),
        ({"task_config": {"world": "maniskill", "scene_reset_interval": 50}}, "draws every scene; set it to 1"),
        ({"render_mode": "human"}, "render_mode is 'human'"),
        ({"task_config": {"world": "nothing"}}, "environment.world: there is no environment 'nothing'"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message) as found:
        F1RLEnv(**arguments)
    assert "\n" not in str(found.value)


def test_wrong_actions_are_rejected() -> None:
    env = TeacherEnv(NUMBERED)
    env.reset()
    for action in (np.zeros(8), np.full(32, np.nan)):
        with pytest.raises(RunError, match="take 32 numbers"):
            env.step(action)


def test_registered() -> None:
    for name, kind in (("deft/F1Teacher-v0", TeacherEnv), ("deft/F1Student-v0", StudentEnv)):
        env = gymnasium.make(name, task_config=NUMBERED, history_length=2)
        assert type(env.unwrapped) is kind
        assert env.reset()[0]["wrist_rgb"].shape == (2, 3, 4, 4)
    assert isinstance(TeacherEnv(NUMBERED).simulator.unwrapped, NumberedWorld)


@pytest.mark.usefixtures("gl")
def test_a_tally_of_poses_and_contacts():
    env = WatchedEnv({"image_size": 16, "max_steps": 100, "task_name": "pick"})
    env.reset(seed=1)
    tcp = env.simulator.unwrapped.simulation.tcp.copy()
    env.step(np.zeros(32, np.float32))
    cells, contacts = env.tally()
    assert cells[0][:3] == tuple(np.floor(tcp / CELL).astype(int))
    assert contacts == 0
    over = False
    while not over:  # the expert grasps
        _, _, terminated, truncated, _ = env.step(env.expert_action())
        over = terminated or truncated
    cells, contacts = env.tally()
    assert len(set(cells)) > 5
    assert 3 <= contacts < len(cells)  # from the grasp on, and not on the way there
    assert env.take_contacts() == contacts
    assert env.take_contacts() == 0  # since the last call
    assert env.tally()[1] == contacts
    env.close()


def test_contacts_are_not_known_in_other_worlds():
    env = ContactEnv(NUMBERED)
    env.reset(seed=0)
    assert env.take_contacts() is None
