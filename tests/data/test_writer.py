"""`DatasetWriter`: a user's arrays come back as they were given, from Minari's layout and from LeRobot's."""

import json

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces

from deft import DatasetWriter, load_dataset
from deft.errors import InputError, RunError
from deft.schema import decode_text

MINARI, PNG, VIDEO = {"format": "minari"}, {"format": "lerobot", "use_videos": False}, {"format": "lerobot"}


def camera(count, start=0):
    """Smooth frames [T, 32, 48, 3] that move a little, as video codecs expect."""
    y, x = np.mgrid[:32, :48]
    frames = [np.stack([3 * x + 2 * t, 5 * y + t, 100 + 0 * x], -1) for t in range(start, start + count)]
    return np.stack(frames).astype(np.uint8)


def episode(length, seed=0, final=True):
    generator, rows = np.random.default_rng(seed), length + final
    return {
        "observations": {
            "state": generator.normal(size=(rows, 3)).astype(np.float32),
            "top": camera(rows, seed),
            "wrist": np.moveaxis(camera(rows, seed + 7), -1, 1),
        },
        "actions": generator.uniform(-1, 1, (length, 2)).astype(np.float32),
        "rewards": generator.random(length, np.float32),
    }


def channels_first(frames):
    return frames if frames.shape[1] == 3 else np.moveaxis(frames, -1, 1)


@pytest.mark.parametrize("settings", [MINARI, PNG, VIDEO], ids=["minari", "lerobot-png", "lerobot-video"])
def test_episodes_come_back_as_they_were_given(settings, tmp_path):
    path = tmp_path / "own-v0"
    given = [episode(5, 0), episode(3, 1), episode(4, 2)]
    ends = [np.arange(5) == 4, None, np.arange(4) == 3]
    words = ["pick up the cube", "open the drawer", "pick up the cube"]
    for part in (slice(0, 2), slice(2, 3)):  # the last one is appended
        with DatasetWriter(path, fps=20, append=True, **settings) as writer:
            for arrays, terminations, text in zip(given[part], ends[part], words[part], strict=True):
                writer.add_episode(**arrays, terminations=terminations, instruction=text, success=True)
    assert (writer.num_episodes, writer.num_steps) == (3, 12)

    dataset = load_dataset(path)
    assert dataset.lengths.tolist() == [5, 3, 4]
    for index, (arrays, terminations, text) in enumerate(zip(given, ends, words, strict=True)):
        found = dataset.episode(index)
        assert set(found.observation) == {"state", "top", "wrist", "instruction"}
        np.testing.assert_array_equal(found.observation["state"], arrays["observations"]["state"])
        np.testing.assert_array_equal(found.action, arrays["actions"])
        np.testing.assert_array_equal(found.reward, arrays["rewards"])
        np.testing.assert_array_equal(found.terminated, np.zeros(3, bool) if terminations is None else terminations)
        assert found.truncated[-1] == (terminations is None)
        assert {decode_text(row) for row in found.observation["instruction"]} == {text}
        for name in ("top", "wrist"):
            frames, images = (channels_first(rows[name]) for rows in (found.observation, arrays["observations"]))
            error = np.abs(frames.astype(int) - images)
            # Of x264 at crf 18 with half of the colours' resolution: a few levels on smooth images.
            assert error.max() <= (16 if settings is VIDEO else 0)
    dataset.close()


def test_minari_reads_what_the_writer_wrote(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    arrays = episode(4)
    with DatasetWriter(tmp_path / "own", metadata={"author": ["Ada"]}, env="CartPole-v1") as writer:
        writer.add_episode(**arrays, instruction="pick up the cubé", seed=11)
    theirs = minari.load_dataset("own-v0")
    assert theirs.env_spec.id == "CartPole-v1"
    assert theirs.storage.metadata["author"] == {"Ada"}
    found = theirs[0]
    assert found.observations["instruction"] == ["pick up the cubé"] * 5
    for name, values in arrays["observations"].items():
        np.testing.assert_array_equal(found.observations[name], values)
    np.testing.assert_array_equal(found.actions, arrays["actions"])
    assert found.truncations.tolist() == [False, False, False, True]
    assert next(iter(theirs.storage.get_episode_metadata([0])))["seed"] == 11


@pytest.mark.parametrize("settings", [MINARI, PNG], ids=["minari", "lerobot"])
def test_step_by_step_is_the_same(settings, tmp_path):
    """With one array that the loop writes to again and again, as drivers of cameras do."""
    arrays, buffer = episode(4), np.empty((32, 48, 3), np.uint8)
    with DatasetWriter(tmp_path / "steps-v0", fps=20, **settings) as writer:
        writer.add_step({"state": np.zeros(3), "top": camera(1)[0]}, np.zeros(2))
        writer.discard_episode()
        for step in range(4):
            buffer[:] = arrays["observations"]["top"][step]
            seen = {"state": arrays["observations"]["state"][step], "top": buffer}
            writer.add_step(seen, arrays["actions"][step], arrays["rewards"][step], terminated=step == 3)
        assert writer.num_episodes == 0
        writer.end_episode({key: arrays["observations"][key][4] for key in ("state", "top")}, instruction="go")
    found = load_dataset(tmp_path / "steps-v0").episode(0)
    np.testing.assert_array_equal(found.observation["state"], arrays["observations"]["state"])
    np.testing.assert_array_equal(
        channels_first(found.observation["top"]), channels_first(arrays["observations"]["top"])
    )
    np.testing.assert_array_equal(found.action, arrays["actions"])
    np.testing.assert_array_equal(found.reward, arrays["rewards"])
    assert found.terminated.tolist() == [False, False, False, True]


def test_a_large_camera_comes_back(tmp_path):
    """The metadata lists both bounds of each of its 921,600 numbers."""
    camera = np.arange(2 * 480 * 640 * 3, dtype=np.uint32).reshape(2, 480, 640, 3).astype(np.uint8)
    with DatasetWriter(tmp_path / "own-v0") as writer:
        writer.add_episode({"top": camera}, np.zeros((1, 2)))
    found = load_dataset(tmp_path / "own-v0").episode(0).observation["top"]
    np.testing.assert_array_equal(channels_first(found), channels_first(camera))


def test_lerobot_may_do_without_the_final_observation(tmp_path):
    """As the reader has it: T rows make T − 1 transitions, and T where the last one terminated."""
    with DatasetWriter(tmp_path / "own", "lerobot", fps=20, use_videos=False) as writer:
        writer.add_episode(**episode(4, final=False))
        writer.add_episode(**episode(4, final=False), terminations=[False, False, False, True])
    assert load_dataset(tmp_path / "own").lengths.tolist() == [3, 4]
    with (
        DatasetWriter(tmp_path / "own-v0") as writer,
        pytest.raises(InputError, match="observations has 4 rows for 4 actions; it needs 5"),
    ):
        writer.add_episode(**episode(4, final=False))


def test_one_array_without_words(tmp_path):
    observations, actions = np.arange(8.0).reshape(4, 2), np.array([[2.0], [-3.0], [0.5]])
    with DatasetWriter(tmp_path / "own-v0") as writer:
        writer.add_episode(observations, actions)
        writer.add_episode(observations, actions * 2)
    dataset = load_dataset(tmp_path / "own-v0")
    assert dataset.table is not None  # in memory: one vector of floats
    np.testing.assert_array_equal(dataset.episode(1).observation, observations)
    assert (dataset.action_space.low, dataset.action_space.high) == (-6, 4)  # it grew with the second episode
    with DatasetWriter(tmp_path / "own-v0", append=True) as writer:
        writer.add_episode(observations, actions * 3)
    assert (load_dataset(tmp_path / "own-v0").action_space.high) == 6

    with DatasetWriter(tmp_path / "lerobot", "lerobot", fps=20) as writer:
        writer.add_episode(observations, actions[:, 0])  # one joint
    dataset = load_dataset(tmp_path / "lerobot")
    assert list(dataset.observation_space) == ["state"]  # no empty instruction
    np.testing.assert_array_equal(dataset.episode(0).action, actions)


def test_discrete_actions_need_their_space(tmp_path):
    observations, actions = np.zeros((4, 2)), np.array([5, 7, 6])
    with DatasetWriter(tmp_path / "a-v0") as writer, pytest.raises(InputError, match="actions are int64; give action_"):
        writer.add_episode(observations, actions)
    with DatasetWriter(tmp_path / "b-v0", action_space=spaces.Discrete(3, start=5)) as writer:
        writer.add_episode(observations, actions)
    assert load_dataset(tmp_path / "b-v0").episode(0).action.tolist() == [0, 2, 1]
    with (
        DatasetWriter(tmp_path / "c", "lerobot", fps=20, action_space=spaces.Discrete(3, start=5)) as writer,
        pytest.raises(InputError, match="continuous actions, not those of a Discrete space; use minari"),
    ):
        writer.add_episode(observations, actions)


def test_an_exception_keeps_the_whole_episodes(tmp_path):
    def loop():
        with DatasetWriter(tmp_path / "own-v0") as writer:
            writer.add_episode(np.zeros((3, 2)), np.zeros((2, 1)))
            writer.add_step(np.zeros(2), np.zeros(1))
            raise RuntimeError("the arm is stuck")

    with pytest.raises(RuntimeError, match="the arm is stuck"):
        loop()
    assert load_dataset(tmp_path / "own-v0").num_episodes == 1


def test_the_environment_is_kept(tmp_path):
    arrays = np.zeros((3, 2)), np.zeros((2, 1))
    with DatasetWriter(tmp_path / "a-v0", env=gymnasium.make("Pendulum-v1", g=9.0)) as writer:
        writer.add_episode(*arrays)
    dataset = load_dataset(tmp_path / "a-v0")
    assert (dataset.env_id, dataset.env_kwargs) == ("Pendulum-v1", {"g": 9.0})
    with DatasetWriter(tmp_path / "b", "lerobot", fps=20, env="gymnasium:CartPole-v1", metadata={"lab": "5"}) as writer:
        writer.add_episode(*arrays)
    kept = json.loads((tmp_path / "b" / "meta" / "deft.json").read_text())
    assert (kept["lab"], kept["env_module"], json.loads(kept["env_spec"])["id"]) == ("5", "gymnasium", "CartPole-v1")
    with pytest.raises(InputError, match="env 'no module:CartPole-v1': 'no module' is not the name of a module"):
        DatasetWriter(tmp_path / "c-v0", env="no module:CartPole-v1")


def add(**changed):
    arrays = {"observations": {"state": np.zeros((4, 2))}, "actions": np.zeros((3, 1)), **changed}
    return lambda writer: writer.add_episode(**arrays)


@pytest.mark.parametrize(
    ("settings", "use", "complaint"),
    [
        ({"format": "lerobot"}, add(), "fps is missing"),
        ({"format": "lerobot", "fps": 0.0}, add(), "fps is 0.0; it must be greater than 0"),
        ({"format": "rlds"}, add(), "format is 'rlds'; it must be 'minari' or 'lerobot'"),
        ({"metadata": {"total_steps": 3}}, add(), "total_steps is an entry that Minari defines"),
        ({"env": "CartPole-v99"}, add(), "env is 'CartPole-v99', which Gymnasium does not know"),
        ({}, add(actions=np.zeros((0, 1))), "an episode needs one or more"),
        ({}, add(observations={"a": np.zeros((4, 2)), "b": np.zeros((5, 2))}), "parts of different length"),
        ({}, add(observations={"a": np.array(["x", "y", "z", "u"], object)}), r"observations\['a'\] is object"),
        ({}, add(terminations=[True, False, False]), "step 0 of 3 ends the episode; only the last step may"),
        ({}, add(rewards=[1.0]), r"rewards has shape \(1,\); it must be \(3,\)"),
        ({}, add(actions=np.full((3, 1), np.nan)), "actions has a value that is not finite"),
        ({}, add(success=[1]), "success is a list; an episode stores numbers, texts and booleans"),
        ({}, lambda writer: writer.end_episode(), "no step was added"),
        ({}, lambda writer: writer.add_step(np.zeros(2), np.zeros(1)), "1 steps were added and not written"),
        ({"observation_space": spaces.Dict({"arm": spaces.Box(0, 1, (2,))})}, add(), "has no 'arm'"),
    ],
)
def test_what_cannot_be_written(settings, use, complaint, tmp_path):
    with pytest.raises(InputError, match=complaint), DatasetWriter(tmp_path / "own-v0", **settings) as writer:
        use(writer)
    assert list(tmp_path.iterdir()) == []


def test_episodes_must_be_alike(tmp_path):
    with DatasetWriter(tmp_path / "own-v0") as writer:
        add()(writer)
        with pytest.raises(InputError, match=r"observations\['state'\] is float32 of shape \(3,\), and in earlier"):
            add(observations={"state": np.zeros((4, 3))})(writer)
        with pytest.raises(InputError, match="observations is a dict of arm, and in earlier episodes a dict of state"):
            add(observations={"arm": np.zeros((4, 2))})(writer)
        with pytest.raises(RunError, match="episode 1: state is not finite"):
            add(observations={"state": np.full((4, 2), np.nan)})(writer)
        add()(writer)
    assert load_dataset(tmp_path / "own-v0").num_episodes == 2
