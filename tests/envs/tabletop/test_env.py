"""The environment as a policy meets it: contract, exact states, kept scenes, and that the words are needed."""

import math
from collections import Counter
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env

import deft.envs  # noqa: F401 (registers the environment)
from deft.config.settings import EnvConfig
from deft.envs import SerialVectorEnv, make_env
from deft.envs.state import decode, encode, restore_state, save_state
from deft.envs.tabletop import env as env_module
from deft.envs.tabletop import panda
from deft.envs.tabletop.control import CONTROL_MODES
from deft.envs.tabletop.env import TabletopEnv
from deft.envs.tabletop.model import object_position
from deft.envs.tabletop.scene import COLOURS, HELD_OUT, TABLE_X, TABLE_Y, DomainRandomization, draw_scene
from deft.envs.tabletop.starts import PARTS
from deft.envs.tabletop.tasks import GOAL_TASKS, TASKS
from deft.errors import InputError, RunError

EVERYTHING = {
    "random_background": True,
    "random_light": True,
    "cluttered_table": True,
    "random_appearance": True,
    "random_head_camera_dis": 0.1,
    "random_table_height": 0.03,
    "crazy_random_light_rate": 0.5,
}


def play_expert(env: TabletopEnv, num_steps: int = 150, target: int | None = None) -> tuple[bool, int]:
    """Whether the expert ends the present episode with success, and after how many steps."""
    for step in range(num_steps):
        _, _, terminated, _, info = env.step(env.expert_action(target))
        if terminated:
            return info["success"], step + 1
    return False, num_steps


# ------------------------------------------------------------------------------------------------------- contract


@pytest.mark.usefixtures("gl")
@pytest.mark.filterwarnings("ignore:.*not having a spec.*:UserWarning")  # made without gymnasium.make
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"task": "all", "control_mode": "delta_ee", "reward": "sparse", "num_objects": 3},
        {"task": "push", "observation": "labelled", "control_mode": "delta_ee_pos", "image_size": 32},
        {"task": "random_exploration", "observation": "both", "cameras": ["wrist"], "num_objects": 1},
        {"task": "place", "observation": "privileged", "image_size": 32},
    ],
)
def test_gymnasium_contract(kwargs: dict[str, Any]) -> None:
    check_env(TabletopEnv(render_mode="rgb_array", **kwargs))


def test_registered() -> None:
    env = make_env(EnvConfig(id="tabletop", kwargs={"task": "reach"}))
    assert env.spec is not None
    assert env.spec.max_episode_steps == 150
    assert env.action_space.shape == (8,)
    assert env.reset(seed=0)[0].shape == (24 + 2 * 7 + 2 + 5,)
    assert gymnasium.spec("deft/Tabletop-v0").id == "deft/Tabletop-v0"


def test_state_by_hand() -> None:
    env = TabletopEnv("push", num_objects=3)
    state, _ = env.reset(seed=3)
    simulation, goal = env.simulation, env.goal
    np.testing.assert_allclose(state[:7], simulation.joints, atol=1e-6)
    np.testing.assert_allclose(state[7:14], 0, atol=1e-6)
    assert state[14] == pytest.approx(1.0)  # the gripper is open
    np.testing.assert_allclose(state[15:18], simulation.tcp, atol=1e-6)
    np.testing.assert_allclose(state[24:27], simulation.object_positions[goal.index] - simulation.tcp, atol=1e-6)
    np.testing.assert_allclose(state[31:34], simulation.object_positions[goal.base] - simulation.tcp, atol=1e-6)
    rest = ({0, 1, 2} - {goal.index, goal.base}).pop()
    np.testing.assert_allclose(state[38:41], simulation.object_positions[rest] - simulation.tcp, atol=1e-6)
    assert env.scene.area is not None
    np.testing.assert_allclose(state[45:47], np.subtract(env.scene.area, simulation.tcp[:2]), atol=1e-6)
    assert state[47:].tolist() == [0, 0, 1, 0, 0]  # the third of the five tasks


@pytest.mark.usefixtures("gl")
@pytest.mark.parametrize(("task", "named"), [("push", 1), ("place", 2), ("random_exploration", 0)])
def test_labels_say_where_what_the_words_speak_of_is_and_the_state_does_not(task: str, named: int) -> None:
    env = TabletopEnv(task, num_objects=3, observation="labelled", image_size=32)
    observation, _ = env.reset(seed=3)
    whole, _ = TabletopEnv(task, num_objects=3).reset(seed=3)
    assert observation["state"].tolist() == whole[:24].tolist()
    objects = whole[24:45].reshape(3, 7)[:, :3]  # position, then quaternion
    objects[named:] = 0  # no word speaks of these
    assert observation["places"].tolist() == [*objects.ravel().tolist(), *whole[45:47].tolist()]
    assert observation["places"][-2:].any() == (task == "push")


@pytest.mark.usefixtures("gl")
def test_privileged_observations_add_the_whole_state() -> None:
    env = TabletopEnv("push", num_objects=3, observation="privileged", image_size=32)
    images, whole = (
        TabletopEnv("push", num_objects=3, observation="images", image_size=32),
        TabletopEnv("push", num_objects=3),
    )
    observation, plain, state = (one.reset(seed=3)[0] for one in (env, images, whole))
    assert observation["scene_state"].tolist() == state.tolist()
    assert observation["state"].tolist() == plain["state"].tolist() == state[:24].tolist()
    assert set(observation) == {*plain, "scene_state"}


def test_dense_reward_is_progress() -> None:
    env = TabletopEnv("pick", control_mode="delta_ee_pos")
    env.reset(seed=0)
    before = math.dist(env.simulation.tcp, env.simulation.object_positions[env.goal.index])
    action = np.array([0.5, -1.0, 0.0, 1.0])
    _, reward, _, _, info = env.step(action)
    after = math.dist(env.simulation.tcp, env.simulation.object_positions[env.goal.index])
    terms = info["reward_terms"]
    assert terms["approach"] == pytest.approx(2 * (before - after))
    assert terms["control"] == pytest.approx(-0.005 * (0.25 + 1))
    assert reward == pytest.approx(sum(terms.values()))
    assert set(terms) == {"approach", "goal", "control", "success", "wrong_object"}


@pytest.mark.parametrize(("kind", "right", "wrong"), [("dense", 1.0, -1.0), ("sparse", 1.0, 0.0)])
def test_the_instruction_decides_which_object_counts(kind: Any, right: float, wrong: float) -> None:
    env = TabletopEnv("reach", reward=kind)
    for target in (0, 1):
        env.reset(seed=4, options={"target": 0})
        terminated = False
        while not terminated:
            _, reward, terminated, _, info = env.step(env.expert_action(target))
        assert info["success"] is (target == 0)
        last = info["reward_terms"]
        assert last["success"] + last.get("wrong_object", 0.0) == (right if target == 0 else wrong)
        if kind == "sparse":
            assert reward == (right if target == 0 else wrong)


def test_exploration_has_no_goal() -> None:
    env = TabletopEnv("random_exploration", max_episode_steps=20)
    _, info = env.reset(seed=0)
    assert "success" not in info
    positions = []
    for step in range(20):
        _, reward, terminated, truncated, info = env.step(env.expert_action())
        assert (reward, terminated, truncated) == (0.0, False, step == 19)
        assert "success" not in info
        positions.append(env.simulation.tcp.copy())
    assert np.ptp(positions, axis=0).max() > 0.1  # it moves about


# ---------------------------------------------------------------------------------------------------- exact states


def record(env: TabletopEnv, actions: np.ndarray) -> list[np.ndarray]:
    """Everything that steps, and resets at the end of episodes, give."""
    rows = []
    for action in actions:
        observation, reward, terminated, _, _ = env.step(action)
        rows += [observation["head_rgb"], observation["wrist_rgb"], observation["state"], np.array(reward)]
        if terminated:
            rows.append(env.reset()[0]["state"])
    return rows


def assert_same(first: list[np.ndarray], second: list[np.ndarray]) -> None:
    assert len(first) == len(second)
    for index, (a, b) in enumerate(zip(first, second, strict=True)):
        np.testing.assert_array_equal(a, b, err_msg=f"row {index}")


@pytest.mark.usefixtures("gl")
def test_same_seed_same_pixels() -> None:
    actions = np.random.default_rng(0).uniform(-1, 1, (15, 8))

    def images(seed: int) -> list[np.ndarray]:
        env = TabletopEnv("all", observation="both", image_size=48, domain_randomization=EVERYTHING)
        first, _ = env.reset(seed=seed)
        return [first["head_rgb"], *record(env, actions)]

    first, second, other = images(5), images(5), images(6)
    assert_same(first, second)
    assert not np.array_equal(first[0], other[0])


@pytest.mark.usefixtures("gl")
@pytest.mark.parametrize("task", GOAL_TASKS)
def test_a_restored_state_goes_on_alike(task: str) -> None:
    """Saved at many times during the expert's work, with things asleep, pushed, held and let go."""
    kwargs: dict[str, Any] = {"observation": "both", "image_size": 32, "domain_randomization": EVERYTHING}
    env, fresh = TabletopEnv(task, **kwargs), TabletopEnv(task, **kwargs)
    env.reset(seed=7)
    random = np.random.default_rng(1)
    for _ in range(6):
        for _ in range(7):
            *_, terminated, _, _ = env.step(env.expert_action())
            if terminated:
                env.reset()
        saved = decode(encode(env.get_state()))
        actions = np.concatenate([[env.expert_action()], random.uniform(-1, 1, (6, 8))])
        first = record(env, actions)
        fresh.set_state(saved)
        assert_same(first, record(fresh, actions))
        env.set_state(saved)
        assert_same(first, record(env, actions))


def test_saved_with_wrappers_and_vector_environments() -> None:
    env = make_env(EnvConfig(id="tabletop", kwargs={"task": "all", "scene_reset_interval": 2}, max_episode_steps=9))
    env.reset(seed=1)
    actions = np.random.default_rng(0).uniform(-1, 1, (30, 8)).astype(np.float32)

    def go_on(steps: np.ndarray) -> list[np.ndarray]:
        rows = []
        for action in steps:
            observation, reward, terminated, truncated, _ = env.step(action)
            rows += [observation, np.array(reward)]
            if terminated or truncated:
                rows.append(env.reset()[0])
        return rows

    go_on(actions[:5])
    saved = save_state(env)
    first = go_on(actions)  # over several scenes
    restore_state(env, saved)
    assert_same(first, go_on(actions))


def test_vector_environments_are_saved() -> None:
    vector = SerialVectorEnv([TabletopEnv(), TabletopEnv()])
    assert vector.state_obstacle() is None  # asked before the first reset, too
    vector.reset(seed=0)
    states = vector.get_state()
    assert states is not None
    actions = np.random.default_rng(0).uniform(-1, 1, (2, 8)).astype(np.float32)
    first = np.array(vector.step(actions).observation)
    vector.set_state(states)
    np.testing.assert_array_equal(first, vector.step(actions).observation)


# ------------------------------------------------------------------------------------------------------------ scenes


def test_scene_is_kept_for_some_episodes() -> None:
    env = TabletopEnv("pick", scene_reset_interval=3)
    env.reset(seed=0)
    seeds, targets = [env.scene.seed], [env.goal.index]
    positions = env.simulation.object_positions.copy()
    for _ in range(11):
        play_expert(env, 25)
        env.reset()
        seeds.append(env.scene.seed)
        targets.append(env.goal.index)
        if seeds[-1] == seeds[0]:
            np.testing.assert_array_equal(env.simulation.object_positions, positions)  # put back
    assert [seeds.index(seed) for seed in seeds] == [0, 0, 0, 3, 3, 3, 6, 6, 6, 9, 9, 9]
    assert set(targets) == {0, 1}
    env.reset(seed=0)
    assert env.scene.seed == seeds[0]


def test_episodes_may_begin_on_the_way_of_the_expert() -> None:
    """Same scene and words; some starts hold the object, and the expert finishes each sooner than from the start."""
    whole, part = TabletopEnv(task="pick"), TabletopEnv(task="pick", expert_starts={"pick": 1.0})
    closed, lengths = 0, {}
    for seed in range(6):
        for env in (whole, part):
            env.reset(seed=seed)
        assert (part.scene, part.instruction) == (whole.scene, whole.instruction)
        closed += part.gripper_opening < 0.9
        start = part.observe()
        for env in (whole, part):
            success, lengths[env] = play_expert(env)
            assert success
        assert lengths[part] <= lengths[whole]
        np.testing.assert_array_equal(part.reset(seed=seed)[0], start)  # a seed gives the same start again
    assert 0 < closed < 6


def test_starts_follow_the_success_of_earlier_episodes() -> None:
    """The part of the way that an episode begins in becomes likelier or not; a saved state continues with the rates."""
    env = TabletopEnv(task="pick", expert_starts={"pick": 1.0})
    env.reset(seed=0)
    for _ in range(2):
        env.reset()  # of an episode without a step nothing is learned
    assert env.get_state()["start_rates"] == {"pick": [0.5] * PARTS}
    part = env.get_state()["part"]
    play_expert(env)
    assert env.get_state()["succeeded"]
    env.reset()
    rates = env.get_state()["start_rates"]["pick"]
    assert rates[part] == pytest.approx(0.525)  # 0.5 + 0.05 (1 - 0.5)
    assert sum(rates) == pytest.approx(0.5 * PARTS + 0.025)
    part = env.get_state()["part"]
    env.step(np.zeros(8))
    state = env.get_state()
    env.reset()
    other = TabletopEnv(task="pick", expert_starts={"pick": 1.0})
    other.set_state(state)
    other.reset()
    assert other.get_state()["start_rates"] == env.get_state()["start_rates"]
    assert env.get_state()["start_rates"]["pick"][part] == pytest.approx(0.95 * rates[part])  # it failed
    np.testing.assert_array_equal(other.observe(), env.observe())


def test_other_tasks_begin_as_ever() -> None:
    plain, asked = (TabletopEnv(task="push", expert_starts=starts) for starts in (None, {"pick": 1.0}))
    np.testing.assert_array_equal(plain.reset(seed=1)[0], asked.reset(seed=1)[0])


def test_exploration_leaves_things_where_they_lie() -> None:
    env = TabletopEnv("random_exploration", scene_reset_interval=50)
    env.reset(seed=0)
    env.simulation.data.qpos[object_position(0)] += [0.03, 0.0, 0.0]
    moved = env.simulation.object_positions.copy()
    env.step(np.array([0] * 7 + [1.0]))
    env.reset()
    np.testing.assert_allclose(env.simulation.object_positions, moved, atol=1e-3)
    assert np.abs(env.simulation.joints - panda.HOME).max() < 0.05


def test_scenes_are_stable() -> None:
    env = TabletopEnv("random_exploration", domain_randomization={"cluttered_table": True})
    still = np.array([0] * 7 + [1.0])
    for seed in range(10):
        env.reset(seed=seed)
        count = len(env.scene.everything)
        positions = [env.simulation.data.qpos[object_position(index)].copy() for index in range(count)]
        for _ in range(25):
            env.step(still)
        for index, place in enumerate(positions):
            assert math.dist(place, env.simulation.data.qpos[object_position(index)]) < 0.003


def test_no_stable_scene_ends_after_100_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    tries = []
    monkeypatch.setattr("deft.envs.tabletop.env.draw_scene", lambda *args: tries.append(args))
    with pytest.raises(RunError, match="no stable scene in 100 tries"):
        TabletopEnv().reset(seed=0)
    assert len(tries) == 100


# -------------------------------------------------------------------------------------------------------- robustness


def act_at_random(mode: str, num_steps: int) -> None:
    env = TabletopEnv("random_exploration", mode, domain_randomization={"cluttered_table": True}, num_objects=3)
    random = np.random.default_rng(0)
    env.reset(seed=0)
    action = env.action_space.sample()
    for step in range(num_steps):
        if step % 250 == 249:
            env.reset()
        if step % 4 == 0 or (step // 500) % 2:  # long pushes in one direction, and jitter
            action = random.uniform(-1, 1, action.shape)
        observation, *_ = env.step(action)
        data = env.simulation.data
        assert np.isfinite(observation).all()
        assert np.isfinite(data.qpos).all()
        assert (env.simulation.joints >= panda.JOINT_LOWER).all()
        assert (env.simulation.joints <= panda.JOINT_UPPER).all()
        for index in range(len(env.scene.everything)):
            x, y, z = data.qpos[object_position(index)]
            assert z > 0  # its centre is above the table
            assert TABLE_X[0] < x < TABLE_X[1]
            assert TABLE_Y[0] < y < TABLE_Y[1]


@pytest.mark.parametrize("mode", CONTROL_MODES)
def test_random_actions_break_nothing(mode: str) -> None:
    act_at_random(mode, 500)


@pytest.mark.slow
@pytest.mark.parametrize("mode", CONTROL_MODES)
def test_ten_thousand_random_actions_break_nothing(mode: str) -> None:
    act_at_random(mode, 10_000)


# ------------------------------------------------------------------------------------------------ experts and words


@pytest.mark.parametrize("mode", CONTROL_MODES)
@pytest.mark.parametrize("task", GOAL_TASKS)
def test_expert_solves_it(task: str, mode: str) -> None:
    env = TabletopEnv(task, mode)
    successes = 0
    for seed in range(6):
        env.reset(seed=seed)
        successes += play_expert(env)[0]
    assert successes >= 5


@pytest.mark.slow
@pytest.mark.parametrize("randomization", [{}, EVERYTHING], ids=["plain", "randomised"])
@pytest.mark.parametrize("task", GOAL_TASKS)
def test_expert_solves_200_seeds(task: str, randomization: dict[str, Any]) -> None:
    env = TabletopEnv(task, domain_randomization=randomization)
    successes = 0
    for seed in range(200):
        env.reset(seed=seed)
        successes += play_expert(env)[0]
    assert successes >= 190  # 95 %


def place_of_colour(env: TabletopEnv, colour: str) -> np.ndarray:
    """Where on the table the head camera's picture shows a colour, by the pixels whose hue is nearest to it."""
    size = 128
    picture = env.camera_images(("head",), size)["head"].astype(float)
    reference = np.array(COLOURS[colour])
    cosine = picture @ reference / np.linalg.norm(reference) / np.maximum(np.linalg.norm(picture, axis=2), 1)
    rows, columns = np.nonzero(cosine >= np.sort(cosine.ravel())[-25])
    row, column = np.median(rows) + 0.5, np.median(columns) + 0.5
    simulation = env.simulation
    camera = simulation.cameras["head"]
    half = np.tan(np.radians(simulation.model.cam_fovy[camera]) / 2)
    ray = simulation.data.cam_xmat[camera].reshape(3, 3) @ [
        (2 * column / size - 1) * half,
        (1 - 2 * row / size) * half,
        -1.0,
    ]
    origin = simulation.data.cam_xpos[camera]
    return (origin + ray * (0.03 - origin[2]) / ray[2])[:2]  # where the ray is 3 cm above the table


def oracle(env: TabletopEnv, reads_words: bool) -> int:
    """The object that a policy goes for which sees the picture, and where it may, reads the instruction."""
    positions = env.simulation.object_positions[:, :2]
    if not reads_words:  # nothing better is left than a rule: the one nearest to the robot
        return int(np.linalg.norm(positions, axis=1).argmin())
    words = env.instruction.split()
    named = next(word for word in words if word in COLOURS)
    return int(np.linalg.norm(positions - place_of_colour(env, named), axis=1).argmin())


@pytest.mark.usefixtures("gl")
def test_the_words_are_needed() -> None:
    env = TabletopEnv("reach")
    rates = {}
    for reads_words in (False, True):
        successes = 0
        for seed in range(40):
            env.reset(seed=seed)
            successes += play_expert(env, target=oracle(env, reads_words))[0]
        rates[reads_words] = successes / 40
    assert rates[False] <= 0.6
    assert rates[True] >= 0.95


def test_no_rule_about_places_tells_which_object_is_named() -> None:
    hits, count = np.zeros(4), 1000
    for seed in range(count):
        scene = draw_scene(seed, 2, False, DomainRandomization())
        assert scene is not None
        random = np.random.default_rng(seed)
        goal = TASKS["pick"].draw_goal(random, scene)
        x, y = np.array([item.place for item in scene.objects]).T
        names = [item.name for item in scene.objects]
        hits += np.array([x.argmin(), y.argmin(), names.index(min(names)), 0]) == goal.index
    # 1000 fair coins: 0.5 with a standard deviation of 0.016
    assert np.abs(hits / count - 0.5).max() < 0.065


# ------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "kwargs",
    [
        {"task": "juggle"},
        {"control_mode": "torque"},
        {"action_scale": 0.0},
        {"observation": "pixels"},
        {"image_size": 8},
        {"cameras": ["rear"]},
        {"reward": "shaped"},
        {"scene_reset_interval": 0},
        {"num_objects": 5},
        {"task_weights": {"juggle": 1.0}, "task": "all"},
        {"expert_starts": {"random_exploration": 1.0}},
        {"max_episode_steps": 0},
        {"render_mode": "human"},
    ],
)
def test_wrong_settings_are_named(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=rf"^{next(iter(kwargs))}(\[0\]: | is |: ).*(allowed|range|choose)"):
        TabletopEnv(**kwargs)


@pytest.mark.parametrize(
    ("task", "weights", "words"),
    [("pick", {"pick": 2.0}, "task is 'pick'"), ("all", dict.fromkeys(GOAL_TASKS, 0.0), "all are 0")],
)
def test_task_weights_without_a_choice_are_rejected(task: str, weights: dict[str, float], words: str) -> None:
    with pytest.raises(InputError, match=f"^task_weights: {words}"):
        TabletopEnv(task, task_weights=weights)


def test_task_weights_decide_how_often_a_task_is_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    env = TabletopEnv("all", task_weights={"place": 3.0, "reach": 0.0})
    monkeypatch.setattr(env_module, "draw_scene", lambda seed, *_: None)  # the task is drawn before the scene
    drawn: Counter[str] = Counter()
    for seed in range(500):
        with pytest.raises(RunError, match="no stable scene"):
            env.reset(seed=seed)
        drawn[env.task_name] += 1
    # shares 0, 1/5, 1/5, 3/5 of 500: expected 100, 100, 300; standard deviations 9, 9, 11
    assert drawn["reach"] == 0
    assert drawn["push"] == pytest.approx(100, abs=36)
    assert drawn["pick"] == pytest.approx(100, abs=36)
    assert drawn["place"] == pytest.approx(300, abs=44)


def test_wrong_use_is_named() -> None:
    with pytest.raises(InputError, match="num_objects is 1; choose a whole number, from 2 to 4"):
        TabletopEnv("place", num_objects=1)
    env = TabletopEnv()
    with pytest.raises(RunError, match="before reset"):
        env.step(np.zeros(8))
    with pytest.raises(InputError, match="options target is 2"):
        env.reset(seed=0, options={"target": 2})
    env.reset(seed=0)
    with pytest.raises(RunError, match="action is"):
        env.step(np.full(8, np.nan))


@pytest.mark.parametrize("seed", [12, 51, 53])
def test_four_objects_and_an_area_find_room(seed):
    env = TabletopEnv(task="push", num_objects=4)
    env.reset(seed=seed)
    assert len(env.scene.objects) == 4


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_objects": 2.7},
        {"image_size": "64"},
        {"scene_reset_interval": 2.5},
        {"action_scale": "x"},
        {"domain_randomization": "all"},
        {"task": ["pick"]},
    ],
)
def test_values_of_another_kind_are_rejected_by_name(wrong):
    with pytest.raises(InputError, match=f"^{next(iter(wrong))}: "):
        TabletopEnv(**wrong)


def test_the_time_limit_may_be_given_with_the_other_arguments():
    env = make_env(EnvConfig(id="tabletop", kwargs={"max_episode_steps": 5}))
    env.reset(seed=0)
    ends = [env.step(np.zeros(8, np.float32))[3] for _ in range(5)]
    assert ends == [False] * 4 + [True]
    env.close()


# -------------------------------------------------------------------------------------------------------- the splits


def names_of(split: str, num_objects: int = 2) -> tuple[set[str], set[str]]:
    """All objects of 60 scenes, and those that instructions name."""
    shown, named = set(), set()
    random = np.random.default_rng(0)
    scenes = (draw_scene(seed, num_objects, False, DomainRandomization(), split) for seed in range(60))
    for scene in (found for found in scenes if found is not None):
        shown |= {item.name for item in scene.objects}
        named.add(scene.objects[TASKS["pick"].draw_goal(random, scene, split=split).index].name)
    return shown, named


def test_training_never_sees_the_held_out_combinations() -> None:
    held_out = {f"{colour} {kind}" for colour, kind in HELD_OUT.items()}
    seen, _ = names_of("train")
    assert not seen & held_out
    assert len(seen) == 2 * len(COLOURS) - len(held_out)  # and all others
    everything, _ = names_of("all")
    assert everything == seen | held_out
    _, named = names_of("held-out")
    assert named == held_out  # the others may stand beside them, but are never named
    assert TabletopEnv().split == "train"


def test_the_splits_differ_in_kinds_alone() -> None:
    for seed in range(20):
        scenes = [draw_scene(seed, 2, True, DomainRandomization(), split) for split in ("train", "all")]
        if None not in scenes:
            first, second = ([(item.place, item.name.split()[0]) for item in scene.objects] for scene in scenes)
            assert first == second


def test_shuffled_words_name_an_object_by_chance() -> None:
    """Half of the time the other one; scene and goal are those of the same seed without it."""
    env, shuffled = TabletopEnv(task="reach"), TabletopEnv(task="reach", shuffle_instructions=True)
    misleading = 0
    for seed in range(24):
        env.reset(seed=seed)
        _, info = shuffled.reset(seed=seed)
        assert shuffled.scene == env.scene
        assert shuffled.goal.index == env.goal.index
        assert info["instruction"] == shuffled.instruction
        misleading += env.scene.objects[env.goal.index].name not in shuffled.instruction
    assert 5 <= misleading <= 19  # 24 fair coins: outside with a chance of 0.3 %


@pytest.mark.parametrize(
    ("kwargs", "line"),
    [
        ({"split": "test"}, "split: 'test' is not allowed; one of 'train', 'held-out', 'all'"),
        ({"shuffle_instructions": 1}, "shuffle_instructions: 1 is not true or false"),
    ],
)
def test_bad_splits_are_rejected(kwargs: dict[str, Any], line: str) -> None:
    with pytest.raises(InputError, match=line):
        TabletopEnv(**kwargs)
