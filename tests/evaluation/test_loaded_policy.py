"""`deft.load_policy`: outside of an environment a policy acts exactly as `deft evaluate` plays it."""

import shutil

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import cli, load_policy
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run
from deft.models.waypoint import PPOPolicy, WaypointSFT, WaypointShape
from deft.runs.random_state import seed_everything
from deft.runs.waypoint_files import save_ppo
from deft.training import run

SEED, LENGTH, SIDE = 5, 7, 16
PLAYED: list[np.ndarray] = []  # actions that any `Echo` was stepped with


class Echo(gymnasium.Env):
    """What is observed depends on the seed, the step and the last action, so that one wrong action changes the rest."""

    def __init__(self, kind: str = "vector", discrete: bool = False) -> None:
        self.kind, self.discrete = kind, discrete
        state = spaces.Box(-9, 9, (3,), np.float32)
        camera = spaces.Box(0, 255, (SIDE, SIDE, 3), np.uint8)
        parts = {
            "robot": spaces.Dict({"state": state}),
            "camera": camera,
            "instruction": spaces.Text(20, charset="abcdeiknop tuh"),
        }
        self.observation_space = state if kind == "vector" else spaces.Dict(parts)
        self.action_space = spaces.Discrete(3, start=1) if discrete else spaces.Box(-0.5, 0.5, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._observe(0.0), {}

    def step(self, action):
        assert self.action_space.contains(action) or self.action_space.contains(np.asarray(action))
        PLAYED.append(np.array(action))
        total = float(np.sum(action))
        return self._observe(total), total, False, False, {}

    def _observe(self, total):
        state = (self.np_random.normal(size=3) + total).astype(np.float32)
        if self.kind == "vector":
            return state
        camera = self.np_random.integers(0, 200, (SIDE, SIDE, 3)).astype(np.uint8) + np.uint8(10 * abs(total))
        return {"robot": {"state": state}, "camera": camera, "instruction": "pick up the cube"}


gymnasium.register(id="deft-tests/Echo-v0", entry_point=Echo, max_episode_steps=LENGTH)
ENV = "deft-tests/Echo-v0"
COMMON = ["--eval-freq", 0, "--threads", 1, "--device", "cpu", "--json"]
ONLINE = [*COMMON, "--env", ENV, "--rollout-steps", 8, "--batch-size", 8, "--n-epochs", 1, "--total-timesteps", 16]
SAC = [*COMMON, "--env", ENV, "--learning-starts", 8, "--batch-size", 4, "--total-timesteps", 12, "--buffer-size", 12]
OFFLINE = [*COMMON, "--env", ENV, "--num-epochs", 1, "--updates-per-epoch", 2, "--batch-size", 8]
TINY = ["--model", "vla-tiny", "--vla-model-config", "width=16", "cell=4", "proprio_key=robot/state"]
SEEN = ["--env-kwargs", "kind=seen"]
RUNS = {
    "ppo": ["ppo", *ONLINE],
    "ppo-discrete": ["ppo", *ONLINE, "--env-kwargs", "discrete=true"],
    "ppo-memory": ["ppo", *ONLINE, "--memory-hidden", 8],
    "ppo-images": ["ppo", *ONLINE, *SEEN],
    "ppo-vla-chunks": ["ppo", *ONLINE, *SEEN, *TINY, "--chunk-length", 3],
    "sac": ["sac", *SAC],
    "td3": ["td3", *SAC],
    "cal-ql": ["cal-ql", *SAC, "--cql-samples", 2],
    "iql": ["iql", *OFFLINE, "--dataset", "vector-v0"],
    "cql": ["cql", *OFFLINE, "--dataset", "vector-v0", "--num-seeds", 2],
    "td3-bc": ["td3-bc", *OFFLINE, "--dataset", "vector-v0"],
    "rebrac": ["rebrac", *OFFLINE, "--dataset", "vector-v0"],
    "qc": ["fql", *OFFLINE, "--dataset", "vector-v0", "--chunk-length", 3, "--policy-extraction", "best_of_n"],
    "dt": ["dt", *OFFLINE, "--dataset", "vector-v0", "--context-length", 4, "--embed-dim", 16, "--target-return", 2, 9],
    "sft-vla-chunks": ["sft", *OFFLINE, *SEEN, *TINY, "--chunk-length", 3, "--dataset", "seen-v0"],
    "sft-vla-flow": ["sft", *OFFLINE, *SEEN, *TINY, "head=flow", "--chunk-length", 2, "--dataset", "seen-v0"],
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with datasets of both kinds of observation."""
    folder = tmp_path_factory.mktemp("home")
    for kind in ("vector", "seen"):
        record = ["collect", "--env", ENV, "--env-kwargs", f"kind={kind}", "--policy", "random", "--episodes", "6"]
        assert cli.main([*record, "--out", str(folder / f"{kind}-v0"), "--json"]) == 0
    return folder


@pytest.fixture(scope="module")
def trained(home):
    """The run directory of a name in RUNS, trained once."""

    def train(name):
        folder = home / name
        if not folder.exists():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(run, "plot_run", lambda folder: [])
                patch.chdir(home)
                words = ["train", *RUNS[name], "--output-dir", folder]
                assert cli.main([str(word) for word in words]) == 0
        return folder

    return train


def evaluated(folder, **options):
    PLAYED.clear()
    results = evaluate_run(folder, episodes=1, seed=SEED, device="cpu", **options)
    return PLAYED[:LENGTH], results


def played(policy, kwargs):
    """The actions of one episode in a loop of one's own."""
    env = gymnasium.make(ENV, **kwargs)
    seed_everything(SEED)
    policy.reset()
    observation, reward, actions, over = env.reset(seed=SEED)[0], None, [], False
    while not over:
        actions.append(policy.get_action(observation, reward))
        observation, reward, terminated, truncated, _ = env.step(actions[-1])
        over = terminated or truncated
    return actions


def kwargs_of(name):
    return {"discrete": "discrete" in name, "kind": "seen" if "vla" in name or "images" in name else "vector"}


@pytest.mark.parametrize("name", RUNS)
def test_actions_are_those_of_an_evaluation(trained, name):
    folder = trained(name)
    expected, results = evaluated(folder)
    policy = load_policy(folder, device="cpu")
    first, again = played(policy, kwargs_of(name)), played(policy, kwargs_of(name))
    assert len(first) == LENGTH
    assert np.array_equal(first, expected)
    assert np.array_equal(again, expected)  # `reset` leaves no memory, no rest of a chunk
    assert policy.action_selection == results["action_selection"]
    assert first[0].shape == policy.action_space.shape
    assert first[0].dtype == policy.action_space.dtype


@pytest.mark.parametrize("name", ["ppo", "sac", "ppo-discrete"])
def test_actions_are_sampled_as_in_an_evaluation(trained, name):
    expected, _ = evaluated(trained(name), deterministic=False)
    policy = load_policy(trained(name), deterministic=False, device="cpu")
    assert np.array_equal(played(policy, kwargs_of(name)), expected)
    assert policy.action_selection == "sample"


def test_a_checkpoint_is_loaded_with_or_without_its_spaces(trained, tmp_path):
    folder = shutil.copytree(trained("ppo"), tmp_path / "run", symlinks=True)
    expected, _ = evaluated(folder)
    assert np.array_equal(played(load_policy(folder / "checkpoint-16", device="cpu"), kwargs_of("ppo")), expected)
    (folder / "checkpoint-16" / "spaces.json").unlink()  # as earlier versions saved them
    with pytest.raises(InputError, match=r"has no spaces\.json, since an earlier version saved it; give load_policy"):
        load_policy(folder)
    policy = load_policy(folder, env=gymnasium.make(ENV), device="cpu")
    assert np.array_equal(played(policy, kwargs_of("ppo")), expected)


def test_images_come_with_the_channels_first_or_last_and_texts_as_text_or_bytes(trained):
    policy = load_policy(trained("ppo-images"), device="cpu")
    observation = gymnasium.make(ENV, kind="seen").reset(seed=0)[0]
    action = policy.get_action(observation)
    words = np.zeros(policy.observation_space["instruction"].shape, np.uint8)
    words[:16] = np.frombuffer(b"pick up the cube", np.uint8)
    other = {
        "robot/state": observation["robot"]["state"].astype(np.float64),
        "camera": observation["camera"].transpose(2, 0, 1),
        "instruction": words,
        "not read": 3,
    }
    assert np.array_equal(policy.get_action(other), action)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"camera": None}, "the observation has the streams robot/state, instruction; the policy reads camera, "),
        ({"camera": np.zeros((8, 8, 3), np.uint8)}, r"stream 'camera' is uint8 \(3, 8, 8\), the policy reads uint8"),
        ({"camera": np.zeros((SIDE, SIDE, 3))}, "stream 'camera' is float64 "),
        ({"robot/state": np.full(3, np.nan)}, "stream 'robot/state' holds values that are infinite or not a number"),
        ({"robot/state": np.zeros(4)}, r"stream 'robot/state' is float64 \(4,\), the policy reads float32 \(3,\)"),
        ({"robot/state": "left"}, "stream 'robot/state' is <U4"),
        ({"robot/state": np.full(3, 1e300)}, "'robot/state' holds values that are infinite .* in float32"),
        ({"robot/state": [[1.0], [2.0, 3.0]]}, "stream 'robot/state' cannot be converted to a numpy array: "),
        ({"robot/state": torch.zeros(3, requires_grad=True)}, "stream 'robot/state' cannot be converted to a numpy"),
        ({"camera": None, 1: 2}, "the observation has the streams robot/state, instruction, 1; the policy reads"),
    ],
)
def test_an_observation_that_does_not_fit_is_an_error(trained, change, message):
    policy = load_policy(trained("ppo-images"), device="cpu")
    given = {"robot/state": np.zeros(3), "camera": np.zeros((SIDE, SIDE, 3), np.uint8), "instruction": "go"}
    given = {name: value for name, value in {**given, **change}.items() if value is not None}
    with pytest.raises(InputError, match=message):
        policy.get_action(given)


def test_an_image_without_pixels_is_an_error(trained):
    policy = load_policy(trained("sft-vla-chunks"), device="cpu")  # which scales images of any other size
    empty = {"robot/state": np.zeros(3), "camera": np.zeros((0, 0, 3), np.uint8), "instruction": "go"}
    with pytest.raises(InputError, match=r"stream 'camera' is uint8 \(3, 0, 0\), the policy reads uint8"):
        policy.get_action(empty)


@pytest.mark.parametrize("value", ["a", "3", float("nan"), float("inf"), 1e300, [1.0, 2.0]])
def test_rewards_and_target_returns_are_finite_numbers(trained, value):
    with pytest.raises(InputError, match=r"load_policy: target_return .* is not a finite number in float32"):
        load_policy(trained("dt"), target_return=value, device="cpu")
    policy = load_policy(trained("dt"), device="cpu")
    with pytest.raises(InputError, match=r"get_action: reward .* is not a finite number in float32"):
        policy.get_action(np.zeros(3), value)


def test_deterministic_is_true_or_false(trained):
    with pytest.raises(InputError, match="deterministic 'no' is not True or False"):
        load_policy(trained("ppo"), deterministic="no", device="cpu")


def test_a_decision_transformer_aims_at_a_return_and_needs_rewards(trained):
    folder = trained("dt")
    state = np.zeros(3, np.float32)
    policy = load_policy(folder, device="cpu")
    assert float(policy.policy.target_return) == 2  # the first of the run, as in an evaluation
    action = policy.get_action(state)
    with pytest.raises(InputError, match="needs the reward of its last action; give reward="):
        policy.get_action(state)
    assert not np.array_equal(load_policy(folder, target_return=9, device="cpu").get_action(state), action)
    with pytest.raises(InputError, match=r"target_return 9: only a Decision Transformer takes one"):
        load_policy(trained("iql"), target_return=9)


def test_a_waypoint_policy_takes_camera_and_motion(tmp_path):
    torch.manual_seed(0)
    own = PPOPolicy(WaypointSFT(WaypointShape(camera_size=32, motion_dim=3, num_waypoints=4)))
    torch.nn.init.normal_(own.delta_head.direct[0].weight)  # a correction that is not zero
    config = {"hidden_sizes": [64, 64], "residual_bound": 4.0, "residual_modes": 3, "log_std_init": -1.0}
    save_ppo(own, tmp_path / "final.pt", config, 1)
    camera, motion = np.full((32, 32, 3), 77, np.uint8), np.array([1.0, 2.0, 3.0], np.float32)
    found = load_policy(tmp_path, device="cpu").get_action({"camera": camera, "motion": motion})
    streams = {"camera": torch.full((1, 3, 32, 32), 77, dtype=torch.uint8), "motion": torch.as_tensor(motion)[None]}
    streams["sft_offset"] = torch.zeros(1, 4, 2)
    td = own.act(TensorDict({"observation": TensorDict(streams, [1])}, [1]), deterministic=True)
    assert found.shape == (4, 2)
    np.testing.assert_array_equal(found, td["action"][0].numpy(force=True))


def test_code_that_a_run_names_is_not_imported_without_trust(trained, tmp_path, monkeypatch):
    folder = shutil.copytree(trained("sft-vla-chunks"), tmp_path / "run", symlinks=True)
    (tmp_path / "stranger.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))
    config = folder / "config.yaml"
    config.write_text(config.read_text().replace("vla-tiny", "stranger:Model"))
    assert "stranger:Model" in config.read_text()
    with pytest.raises(InputError, match="stranger"):
        load_policy(folder)


def test_what_is_no_run_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such checkpoint or run folder"):
        load_policy(tmp_path / "absent")


def test_a_file_of_a_checkpoint_leads_to_its_folder(trained):
    file = trained("ppo") / "checkpoint-16" / "model.pt"
    with pytest.raises(InputError, match=r"model\.pt: is one file of a checkpoint; give its folder .*checkpoint-16$"):
        load_policy(file)
