"""`deft collect`: what is recorded is what happened, in any number of copies, and a seed repeats it."""

import contextlib
import errno
import json
import os
import signal

import gymnasium
import minari
import numpy as np
import pytest
from gymnasium import spaces
from worlds import Counting

from deft import PPOTrainer, RLConfig
from deft.cli import main
from deft.config.command_settings import CollectConfig
from deft.config.loading import resolve
from deft.data.datasets import load_dataset
from deft.data.datasets.minari import MinariFiles
from deft.data.recording import Recording
from deft.errors import InputError, RunError
from deft.evaluation.evaluate import evaluate_run
from deft.schema import decode_text
from deft.training.collect import _env_config, collect


@pytest.mark.parametrize("name", [None, "reach", "deft/Reach-v0"])
@pytest.mark.parametrize("own", ["reach", "deft/Reach-v0"])
def test_the_environment_of_a_run_is_known_by_both_its_names(own, name):
    run = resolve({"algorithm": "ppo", "env": {"id": own, "kwargs": {"observation": "vla"}}})
    made = _env_config(CollectConfig(policy="run", env=name, episodes=1, out="data/x-v0"), run)
    assert made.kwargs["observation"] == "vla"


class Uneven(Counting):
    """Episodes of 2 and 9 steps in turn; the seed says which comes first. Raises or signals at a step of its life."""

    life = 0

    def __init__(self, fail_at=None, signal_at=None, start=0, die_at=None):
        super().__init__(terminates=True)
        self.action_space = spaces.Discrete(3, start=start)
        self.fail_at, self.signal_at, self.die_at = fail_at, signal_at, die_at
        self.life = 0

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        if seed is not None:
            self.parity = seed % 2
        self.length = 2 if (self.episode + self.parity) % 2 == 0 else 9
        return observation, info

    def step(self, action):
        assert self.action_space.contains(action)
        self.life += 1
        if self.life == self.fail_at:
            raise ValueError("the gripper fell off")
        if self.life == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.life == self.signal_at:
            os.kill(os.getpid(), signal.SIGINT)
        return super().step(action)


@pytest.fixture(autouse=True)
def _registered(tmp_path, monkeypatch):
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path))
    gymnasium.register("deft-test/Uneven-v0", entry_point=Uneven)
    yield
    gymnasium.registry.pop("deft-test/Uneven-v0")


@pytest.fixture(scope="module", params=[{}, {"chunk_length": 3}, {"memory_hidden": 8}], ids=str)
def run(request, tmp_path_factory):
    """A policy that decides one step at a time, one that decides three, and one with memory."""
    folder = tmp_path_factory.mktemp("run")
    config = RLConfig(
        total_timesteps=256, rollout_steps=64, num_envs=2, eval_freq=0, **request.param,
        env_kwargs={"num_targets": 1}, output_dir=str(folder), console_level="CRITICAL", tensorboard=False,
    )  # fmt: skip
    trainer = PPOTrainer(env="deft/Reach-v0", config=config)
    trainer.train()
    trainer.close()
    return folder


def record(tmp_path, name="recorded-v0", **settings):
    results = collect(CollectConfig(out=str(tmp_path / name), **settings))
    return results, load_dataset(tmp_path / name)


def test_exactly_the_steps_asked_for(tmp_path):
    results, dataset = record(tmp_path, env="reach", policy="expert", steps=101, num_envs=3, noise=0.3)
    assert results["recorded_steps"] == len(dataset) == 101
    # The expert reaches its target in about 11 steps, so only the three episodes open at the end are truncated.
    cut = [index for index in range(dataset.num_episodes) if dataset.episode(index).truncated[-1]]
    assert len(cut) == results["recorded_episodes"] - results["ended_episodes"]
    assert 1 <= len(cut) <= 3
    assert cut == list(range(dataset.num_episodes))[-len(cut) :]
    assert results["success_rate"] == 1.0


def test_the_recorded_actions_repeat_the_recorded_episode(tmp_path):
    """The noise is in them, and so is the clipping: what the environment carried out is what is recorded."""
    _, dataset = record(tmp_path, env="reach", policy="expert", steps=60, num_envs=2, noise=2.0, seed=5)
    metadata = list(minari.load_dataset("recorded-v0").storage.get_episode_metadata(range(dataset.num_episodes)))
    seeded = [index for index, entry in enumerate(metadata) if "seed" in entry]
    assert sorted(metadata[index]["seed"] for index in seeded) == [5, 6]
    for index in seeded:
        episode = dataset.episode(index)
        assert np.abs(episode.action).max() == 1.0
        env = gymnasium.make(dataset.env_id, **dataset.env_kwargs)
        observation, _ = env.reset(seed=metadata[index]["seed"])
        np.testing.assert_array_equal(observation, episode.observation[0])
        for step, action in enumerate(episode.action):
            observation, reward, terminated, _, _ = env.step(action)
            np.testing.assert_array_equal(observation, episode.observation[step + 1])
            assert np.float32(reward) == episode.reward[step]
            assert terminated == episode.terminated[step]


@pytest.mark.parametrize("vector", ["sync", "process"])
def test_minari_and_deft_read_the_same_pictures_and_words(vector, tmp_path):
    results, dataset = record(
        tmp_path, env="reach", policy="expert", episodes=3, num_envs=2, env_kwargs={"observation": "vla"}, vector=vector
    )
    theirs = minari.load_dataset(results["minari_id"])
    assert theirs.total_episodes == dataset.num_episodes == 3
    for index in range(3):
        their, ours = theirs[index], dataset.episode(index)
        assert ours.observation["rgb"].shape == (len(ours) + 1, 3, 64, 64)
        for name in ("rgb", "proprio"):
            np.testing.assert_array_equal(their.observations[name], ours.observation[name])
        words = [decode_text(row) for row in ours.observation["instruction"]]
        assert their.observations["instruction"] == words
        assert words[0].startswith("reach the ")
        np.testing.assert_array_equal(their.actions, ours.action)
        np.testing.assert_array_equal(their.rewards, ours.reward)
        np.testing.assert_array_equal(their.terminations, ours.terminated)
    env = theirs.recover_environment()  # the spec has the arguments
    assert env.observation_space == theirs.observation_space
    env.close()
    dataset.close()


def test_a_seed_repeats_the_recording(tmp_path):
    settings = {"env": "reach", "policy": "random", "steps": 120, "num_envs": 2, "noise": 0.1}
    rows = [
        record(tmp_path, f"{name}-v0", seed=seed, **settings)[1].table.rows.numpy()
        for name, seed in (("one", 0), ("two", 0), ("three", 1))
    ]
    np.testing.assert_array_equal(rows[0], rows[1])
    assert rows[0].shape != rows[2].shape or (rows[0] != rows[2]).any()


def test_appending_with_the_same_seed_adds_other_episodes(tmp_path):
    settings = {"env": "reach", "policy": "random", "episodes": 2, "append": True}
    record(tmp_path, **settings)
    results, dataset = record(tmp_path, **settings)
    assert (results["recorded_episodes"], results["total_episodes"]) == (2, 4)
    firsts = {tuple(dataset.episode(index).observation[0]) for index in range(4)}
    assert len(firsts) == 4


def test_each_copy_plays_its_share(tmp_path, monkeypatch):
    """Three copies, seven episodes: 3, 2 and 2. Copies 0 and 2 play 2, 9, 2 and 2, 9 steps, copy 1 plays 9, 2."""
    actions, step = [], Uneven.step
    monkeypatch.setattr(Uneven, "step", lambda self, action: (actions.append(action), step(self, action))[1])
    results, dataset = record(tmp_path, env="deft-test/Uneven-v0", policy="random", episodes=7, num_envs=3)
    assert sorted(dataset.lengths.tolist()) == sorted([2, 9, 2, 9, 2, 2, 9])
    assert results["mean_length"] == np.mean([2, 9, 2, 9, 2, 2, 9])
    assert len(actions) == 35  # those of the episodes: a copy that has played its share is not stepped
    assert all(dataset.episode(index).terminated[-1] for index in range(7))
    for index in range(7):  # Counting observes [episode, step]: no episode has rows of another
        observation = dataset.episode(index).observation
        assert observation[:, 1].tolist() == list(range(len(observation)))
        assert len(set(observation[:, 0])) == 1


def test_noise_on_discrete_actions_is_the_chance_of_a_random_one(tmp_path, monkeypatch):
    monkeypatch.setattr(Uneven, "expert_action", lambda self: self.action_space.start, raising=False)
    for noise, expected in ((0.0, 0.0), (0.3, 0.2), (1.0, 2 / 3)):  # a third of the random ones is the expert's
        _, dataset = record(
            tmp_path, f"noise{noise:.0f}{noise * 10:.0f}-v0", env="deft-test/Uneven-v0", policy="expert",
            steps=1500, num_envs=2, noise=noise, env_kwargs={"start": 4},
        )  # fmt: skip
        actions = np.concatenate([dataset.episode(index).action for index in range(dataset.num_episodes)])
        # The deviation of the mean of 1500 draws is below 0.013; four of them are 0.052.
        assert np.mean(actions != 0) == pytest.approx(expected, abs=0.052)


def test_a_trained_policy_plays_as_in_evaluation(run, tmp_path):
    """The same seeds, likeliest actions: the same episodes."""
    evaluated = evaluate_run(run, episodes=4, seed=3)
    results, dataset = record(tmp_path, policy=str(run), episodes=4, num_envs=4, seed=3, deterministic=True)
    assert dataset.observation_space.shape == (10,)  # num_targets 1 comes from the run
    for name in ("mean_reward", "std_reward", "mean_length", "success_rate"):
        assert results[name] == pytest.approx(evaluated[name], abs=1e-5)  # sums in another order
    sampled, _ = record(tmp_path, "sampled-v0", policy=str(run), episodes=4, num_envs=4, seed=3)
    assert sampled["mean_reward"] != results["mean_reward"]
    assert [one["action_selection"] for one in (results, sampled)] == ["mode", "sample"]


def test_of_several_seeds_the_first_plays(tmp_path):
    record(tmp_path, env="Pendulum-v1", policy="random", steps=100)
    train = (
        f"train td3-bc --dataset {tmp_path}/recorded-v0 --num-epochs 1 --num-seeds 2 --batch-size 50 --hidden-dim 8 "
        f"--eval-freq 0 --output-dir {tmp_path}/run --no-tensorboard --console-level CRITICAL --device cpu"
    )
    assert main(train.split()) == 0
    played, _ = record(tmp_path, "played-v0", policy=f"{tmp_path}/run", episodes=1, num_envs=1, deterministic=True)
    evaluated = evaluate_run(tmp_path / "run", episodes=1)
    assert played["mean_reward"] == pytest.approx(evaluated["mean_rewards"][0], rel=1e-4)


def test_ctrl_c_keeps_the_whole_episodes(tmp_path):
    """Episodes of 2, 9 and 2 steps; the signal comes in the fifteenth step, the second of the fourth episode."""
    settings = {"env": "deft-test/Uneven-v0", "policy": "random", "steps": 1000, "env_kwargs": {"signal_at": 15}}
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, **settings)
    assert load_dataset(tmp_path / "recorded-v0").lengths.tolist() == [2, 9, 2]
    settings["env_kwargs"] = {"signal_at": 1}  # before the first episode has ended
    with pytest.raises(KeyboardInterrupt):
        record(tmp_path, "other-v0", **settings)
    assert [entry.name for entry in tmp_path.iterdir()] == ["recorded-v0"]


@pytest.mark.parametrize("end", [{"steps": 20}, {"episodes": 4}])
def test_an_episode_that_is_lost_with_its_worker_is_not_recorded(tmp_path, end):
    # A life of the environment ends in its 15th step: 2, 9 and 2 steps (or 9, 2), and then an episode that is lost.
    settings = {"env": "deft-test/Uneven-v0", "policy": "random", "vector": "process", **end}
    results, dataset = record(tmp_path, env_kwargs={"die_at": 15}, **settings)
    lengths = [len(dataset.episode(index)) for index in range(dataset.num_episodes)]
    assert results["recorded_steps"] == sum(lengths)
    assert (sum(lengths) if "steps" in end else len(lengths)) == next(iter(end.values()))
    assert set(lengths if "episodes" in end else lengths[:-1]) == {2, 9}


FLAGS = ["collect", "--env", "deft-test/Uneven-v0", "--policy", "random", "--steps", "50"]


def test_an_environment_that_raises_keeps_the_whole_episodes(tmp_path, capsys):
    """Episodes of 2, 9 and 2 steps; the twentieth step is the seventh of the fourth episode."""
    path = tmp_path / "recorded-v0"
    assert main([*FLAGS, "--out", str(path), "--env-kwargs", "fail_at=20"]) == 1
    line = capsys.readouterr().err.splitlines()[-1]
    assert "the gripper fell off" in line
    assert line.endswith(f"; {path} holds 3 complete episodes")
    assert load_dataset(path).lengths.tolist() == [2, 9, 2]
    assert main([*FLAGS, "--out", str(tmp_path / "other-v0"), "--env-kwargs", "fail_at=1"]) == 1
    assert capsys.readouterr().err.splitlines()[-1].endswith("; nothing was recorded")
    assert [entry.name for entry in tmp_path.iterdir()] == ["recorded-v0"]


class EndsTogether(Counting):
    """Episodes of 3 steps; after `whole` of them the copy seeded 2 raises in the last step, or every copy in reset."""

    def __init__(self, whole=1, where="step"):
        super().__init__(length=3)
        self.whole, self.where, self.seed, self.ended, self.taken = whole, where, None, 0, 0

    def reset(self, *, seed=None, options=None):
        self.seed, self.taken = self.seed if seed is None else seed, 0
        if self.where == "reset" and self.ended > self.whole:
            raise ValueError("the arm is stuck")
        return super().reset(seed=seed)

    def step(self, action):
        self.taken += 1
        self.ended += self.taken == 3
        if self.where == "step" and self.seed == 2 and self.ended > self.whole:
            raise ValueError("the gripper fell off")
        return super().step(action)


# Four copies end an episode every third step. Raising in the sixth: copies 0 and 1 ended their second episode before
# copy 2 raised, so 4 + 2 are whole. In worker processes of two copies each, the second worker's copy 3 is not stepped.
# In the reset after the second episode: copy 0 raised first, so that 4 + 1 are whole; each worker's first: 4 + 2.
@pytest.mark.parametrize("where", ["step", "reset"])
@pytest.mark.parametrize(("vector", "kept"), [("sync", {"step": 6, "reset": 5}), ("process", {"step": 6, "reset": 6})])
def test_episodes_that_ended_in_the_step_that_raised_are_kept(where, vector, kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("deft.envs.process.available_cores", lambda: 2)
    gymnasium.register("deft-test/EndsTogether-v0", entry_point=EndsTogether)
    try:
        flags = "collect --env deft-test/EndsTogether-v0 --policy random --episodes 40 --num-envs 4 --seed 0"
        path = tmp_path / "recorded-v0"
        arguments = [*flags.split(), "--vector", vector, "--out", str(path), "--env-kwargs", f"where={where}"]
        assert main(arguments) == 1
    finally:
        gymnasium.registry.pop("deft-test/EndsTogether-v0")
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"; {path} holds {kept[where]} complete episodes")
    dataset = load_dataset(path)
    assert dataset.lengths.tolist() == [3] * kept[where]


@pytest.mark.parametrize(("die_at", "expected"), [(1, []), (2, []), (3, [2]), (11, [2]), (12, [2, 9]), (20, [2, 9, 2])])
def test_a_kill_keeps_the_whole_episodes(die_at, expected, tmp_path):
    """Episodes of 2, 9, 2, 9, … steps; the process kills itself in the middle of a step."""
    process = os.fork()
    if process == 0:
        with contextlib.suppress(BaseException):
            record(tmp_path, env="deft-test/Uneven-v0", policy="random", steps=50, env_kwargs={"die_at": die_at})
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    path = tmp_path / "recorded-v0"
    assert path.exists() == bool(expected)
    if expected:
        assert load_dataset(path).lengths.tolist() == expected
    # The next start removes what was left, and continues with the next seed.
    results, dataset = record(tmp_path, env="deft-test/Uneven-v0", policy="random", episodes=1, append=True)
    assert dataset.lengths.tolist()[:-1] == expected
    assert results["total_episodes"] == len(expected) + 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["recorded-v0"]


def test_a_full_disk_is_one_line(tmp_path, capsys, monkeypatch):
    """The fourth episode does not fit."""
    path, publish, count = tmp_path / "recorded-v0", Recording._publish, 0

    def full(self, files):
        nonlocal count
        count += 1
        if count == 4:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        publish(self, files)

    monkeypatch.setattr(Recording, "_publish", full)
    assert main([*FLAGS, "--out", str(path)]) == 1
    line = f"deft: {path} cannot be written: no space left on the disk; {path} holds 3 complete episodes"
    assert capsys.readouterr().err.splitlines()[-1] == line
    assert load_dataset(path).lengths.tolist() == [2, 9, 2]


def test_two_recordings_into_one_folder(tmp_path, capsys):
    path = tmp_path / "recorded-v0"
    with Recording(path, MinariFiles(path)):
        assert main([*FLAGS, "--out", str(path)]) == 2
    line = f"deft: {path}: another process is recording into it; wait until it ends, or give another name\n"
    assert capsys.readouterr().err == line
    assert main([*FLAGS, "--out", str(path)]) == 0


OWN_WORLD = """
import gymnasium
from gymnasium.envs.classic_control import CartPoleEnv

class Pole(CartPoleEnv):
    pass

gymnasium.register("own/Pole-v3", entry_point={entry_point}, max_episode_steps=20)
"""


@pytest.mark.parametrize(
    ("package", "entry_point"), [("own_package", '"own_package.worlds:Pole"'), ("other_package", "Pole")]
)
def test_the_module_of_an_environment_is_in_the_metadata(package, entry_point, tmp_path, monkeypatch):
    """Also where it is registered with the class itself, which is no text."""
    (tmp_path / package).mkdir()
    (tmp_path / package / "worlds.py").write_text(OWN_WORLD.format(entry_point=entry_point))
    monkeypatch.syspath_prepend(tmp_path)
    _, dataset = record(tmp_path, env=f"{package}.worlds:own/Pole-v3", policy="random", steps=30)
    assert dataset.env_id == f"{package}.worlds:own/Pole-v3"
    theirs = minari.load_dataset("recorded-v0")
    assert theirs.env_spec.id == "own/Pole-v3"
    theirs.recover_environment().close()
    gymnasium.registry.pop("own/Pole-v3")


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"env": "CartPole-v1", "policy": "expert", "steps": 5}, "CartPole-v1 offers no scripted expert"),
        ({"env": "CartPole-v1", "policy": "random", "steps": 5, "noise": 2}, "2 is no chance of a random action"),
        ({"policy": "random", "steps": 5}, "--env: missing"),
        ({"policy": "nowhere", "steps": 5}, "nowhere: there is no such checkpoint or run folder"),
    ],
)
def test_what_cannot_be_recorded(settings, complaint, tmp_path):
    with pytest.raises(InputError, match=complaint):
        record(tmp_path, **settings)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("end", [[], ["--steps", "5", "--episodes", "2"]])
def test_one_end_is_needed(end, tmp_path, capsys):
    assert main(["collect", "--env", "reach", "--policy", "random", "--out", str(tmp_path / "x-v0"), *end]) == 2
    assert capsys.readouterr().err == "deft: give --steps or --episodes, one of them\n"


def test_the_command(tmp_path, capsys):
    out = str(tmp_path / "reach" / "random-v0")
    flags = ["--env", "reach", "--policy", "random", "--steps", "7", "--env-kwargs", "num_targets=1", "--out", out]
    assert main(["collect", *flags, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert (results["minari_id"], results["recorded_steps"]) == ("reach/random-v0", 7)
    assert load_dataset("reach/random-v0").env_kwargs == {"num_targets": 1}
    assert main(["collect", "--policy", "random", "--steps", "7"]) == 2
    assert capsys.readouterr().err.startswith("deft: --out: missing")


def test_a_decision_transformer_is_rejected_before_anything_is_made(tmp_path, monkeypatch, capsys):
    run = resolve({"algorithm": "dt", "dataset": {"path": "data/x-v0"}})
    monkeypatch.setattr("deft.training.collect.find_run", lambda path: (tmp_path, run))
    out = tmp_path / "recorded-v0"
    assert main(["collect", "--policy", str(tmp_path), "--episodes", "1", "--out", str(out)]) == 2
    assert "a run of a Decision Transformer, which needs its rewards to act" in capsys.readouterr().err
    assert not out.exists()


def test_only_successes_are_recorded(installed, tmp_path):
    """One environment plays near, far, never and near again: the third has no success and is dropped."""
    results, _ = record(tmp_path, env="fake/all", policy="expert", only_success=True, episodes=3)
    assert (results["recorded_episodes"], results["dropped_episodes"]) == (3, 1)
    assert results["tasks"] == {"near": 2, "far": 1}
    assert results["success_rate"] == 1.0


def test_a_recording_without_successes_ends(installed, tmp_path, monkeypatch):
    monkeypatch.setattr("deft.training.collect.MAX_DROPPED", 2)
    with pytest.raises(RunError, match="--only-success: 0 of 2 episodes succeeded; use a better policy or less noise"):
        record(tmp_path, env="fake/never", policy="expert", only_success=True, episodes=1)
    kwargs = {"reports": False}
    with pytest.raises(InputError, match="--only-success: fake/never does not report success"):
        record(tmp_path, "x-v0", env="fake/never", policy="expert", only_success=True, episodes=1, env_kwargs=kwargs)


def test_only_successes_are_whole_episodes(tmp_path):
    with pytest.raises(InputError, match="--only-success records whole episodes; give --episodes"):
        record(tmp_path, env="reach", policy="expert", only_success=True, steps=5)
