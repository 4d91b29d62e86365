"""DAgger: a task that imitation of the expert's own states does not solve, exact resume, and the recorded labels."""

import json

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import DAggerTrainer, load_dataset, load_policy
from deft.algorithms.dagger import DAgger
from deft.config.algorithm_settings import DAggerSettings
from deft.config.loading import resolve
from deft.config.settings import PolicyConfig
from deft.runs.checkpoint import load_tensors
from deft.runs.policies import checkpoint_folder

ENV = "deft-test/Line-v0"
COMMON = ["--threads", 1, "--device", "cpu", "--eval-freq", 0, "--save-freq", 0, "--no-progress-bar", "--json"]
SMALL = ["--hidden-dim", 32, "--batch-size", 32, "--learning-rate", "3e-3"]

pytestmark = pytest.mark.usefixtures("no_plots")


class Line(gymnasium.Env):
    """Walk along a line: position x, expert action −x clipped to ±0.5. Success is an |x| below 0.1 after 8 steps.

    Each step drifts by 0.4: the expert's states are near 0, and a policy that has seen no others does not return.
    """

    def __init__(self, expert=True):
        self.observation_space = spaces.Box(-10, 10, (1,), np.float32)
        self.action_space = spaces.Box(-0.5, 0.5, (1,), np.float32)
        if expert:
            self.expert_action = lambda: np.array([np.clip(-self.x, -0.5, 0.5)], np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.x, self.steps = float(self.np_random.uniform(-2, 2)), 0
        return np.array([self.x], np.float32), {}

    def step(self, action):
        self.x += float(action[0])
        self.steps += 1
        done = self.steps == 8
        info = {"success": abs(self.x) < 0.1} if done else {}
        return np.array([self.x], np.float32), -abs(self.x), False, done, info


@pytest.fixture(autouse=True)
def _world():
    gymnasium.register(ENV, entry_point=Line)
    yield
    del gymnasium.registry[ENV]


def train(deft, *more):
    return deft("train", "dagger", "--env", ENV, "--num-envs", 2, *SMALL, *COMMON, *more)


def test_it_imitates_the_expert_and_records_who_acted(deft, tmp_path):
    train(deft, "--rollout-steps", 40, "--total-timesteps", 240, "--updates-per-round", 60, "--output-dir", "run")
    policy = load_policy(tmp_path / "run", device="cpu")
    for x, expected in ((-1.0, 0.5), (0.2, -0.2), (1.5, -0.5)):
        assert float(policy.get_action(np.array([x], np.float32))[0]) == pytest.approx(expected, abs=0.12)
    assert deft("evaluate", "run", "--episodes", 10, "--json")["success_rate"] >= 0.8
    # 3 rounds of 2 · 40 steps, β = 1, ½, ¼: all of the first 80 steps are the expert's, about 20 of the last 80.
    dataset = load_dataset(tmp_path / "run" / "labels-v0")
    episodes = [dataset.episode(index) for index in range(dataset.num_episodes)]
    assert len(dataset) == 240
    marks = np.concatenate([episode.intervention for episode in episodes])
    assert marks[:80].all()
    assert 0.05 < marks[160:].mean() < 0.45
    labels = load_dataset(tmp_path / "run" / "labels-v0", actions="expert")
    for index, episode in enumerate(episodes):
        expert = np.clip(-episode.observation[:-1], -0.5, 0.5)
        assert np.allclose(labels.episode(index).action, expert, atol=1e-6)
        assert np.allclose(episode.action[episode.intervention], expert[episode.intervention], atol=1e-6)
        # what was executed leads from one observation to the next
        assert np.allclose(episode.observation[:-1] + episode.action, episode.observation[1:], atol=1e-5)


@pytest.mark.parametrize(
    "words", [[], ["--chunk-length", 3], ["--chunk-length", 3, "--expert-finishes", "--initial-beta", 0.2, "--beta", 1]]
)
def test_training_on_equals_training_twice(deft, tmp_path, words):
    words = ["--rollout-steps", 10, "--updates-per-round", 4, *words]
    if len(words) > 4:
        words += ["--policy", "actor_critic"]
    train(deft, *words, "--total-timesteps", 80, "--output-dir", "whole")
    train(deft, *words, "--total-timesteps", 40, "--output-dir", "half")
    train(deft, *words, "--total-timesteps", 80, "--output-dir", "half", "--auto-resume")
    whole, twice = (load_tensors(checkpoint_folder(tmp_path / name) / "model.pt") for name in ("whole", "half"))
    for name, value in whole.items():
        assert torch.equal(value, twice[name]), name
    one, two = (load_dataset(tmp_path / name / "labels-v0") for name in ("whole", "half"))
    assert one.fingerprint() == two.fingerprint()


def test_it_trains_from_python(tmp_path):
    settings = {"hidden_dim": 16}
    trainer = {"total_timesteps": 32, "rollout_steps": 8, "eval_freq": 0, "save_freq": 0}
    config = resolve(
        {
            "algorithm": {"name": "dagger", "cfg": {"updates_per_round": 2, "record": False}},
            "policy": settings,
            "trainer": trainer,
            "output_dir": str(tmp_path / "run"),
        }
    )
    one = DAggerTrainer(env=Line(), config=config)
    assert one.train()["timesteps"] == 32
    assert one.trainer.algorithm.version == 4 * 2  # rounds of 8 steps, two updates each
    one.close()


def test_the_expert_acts_less_and_less(deft, tmp_path):
    # β_i = 0.8 · 0.5^i in rounds of 2 · 4 steps
    words = ["--rollout-steps", 4, "--total-timesteps", 24, "--updates-per-round", 1, "--log-freq", 1]
    train(deft, *words, "--initial-beta", 0.8, "--beta", 0.5, "--output-dir", "run")
    logged = map(json.loads, (tmp_path / "run" / "episode_metrics.jsonl").read_text().splitlines())
    assert [line["beta"] for line in logged if line["type"] == "update"] == pytest.approx([0.8, 0.4, 0.2])


def test_an_expert_that_finishes_gives_plans_for_chunks(deft, tmp_path):
    words = ["--chunk-length", 3, "--expert-finishes", "--initial-beta", 0.3, "--beta", 1, "--loss", "mse"]
    words += ["--rollout-steps", 32, "--total-timesteps", 256, "--updates-per-round", 80]
    train(deft, *words, "--output-dir", "run", "--log-freq", 1)
    dataset = load_dataset(tmp_path / "run" / "labels-v0")
    marks = [dataset.episode(index).intervention for index in range(dataset.num_episodes)]
    assert all((np.diff(mark.astype(int)) >= 0).all() for mark in marks)  # once it acts, it acts to the end
    assert any(mark.all() for mark in marks)
    assert any(mark.any() and not mark.all() for mark in marks)
    # Only its steps are imitated.
    lines = map(json.loads, (tmp_path / "run" / "episode_metrics.jsonl").read_text().splitlines())
    labels = [line["num_labels"] for line in lines if line["type"] == "update"]
    assert labels[-1] == sum(int(mark.sum()) for mark in marks) < 256
    # The expert's plan from 0.7: −0.5, then −0.2, then nothing. π* along the path of a policy that stands still would
    # be −0.5 three times.
    policy = load_policy(tmp_path / "run", device="cpu")
    row = TensorDict({"observation": torch.tensor([[0.7]])}, batch_size=[1])
    chunk = policy.policy.act(row, deterministic=True)["action"].flatten().tolist()
    assert chunk == pytest.approx([-0.5, -0.2, 0.0], abs=0.12)


@pytest.mark.parametrize(("chunk", "finishes", "warns"), [(1, False, False), (3, False, True), (3, True, False)])
def test_it_warns_of_labels_that_are_no_plan(caplog, chunk, finishes, warns):
    space = spaces.Box(-1, 1, (1,), np.float32)
    settings = DAggerSettings(expert_finishes=finishes, beta=1.0)
    config = PolicyConfig(hidden_dim=8, chunk_length=chunk)
    DAgger(DAgger.make_policy(space, space, config, settings), settings).check_policy(fresh=True)
    assert ("--expert_finishes" in caplog.text) == warns


def test_demonstrations_are_added_from_the_start(deft, tmp_path):
    deft("collect", "--env", ENV, "--policy", "expert", "--episodes", 4, "--out", "demo-v0", "--json")
    words = ["--rollout-steps", 8, "--updates-per-round", 2, "--total-timesteps", 16, "--log-freq", 1]
    train(deft, *words, "--prior-data", "demo-v0", "--initial-beta", 0, "--output-dir", "run")
    lines = (tmp_path / "run" / "episode_metrics.jsonl").read_text().splitlines()
    update = next(line for line in lines if '"update"' in line)
    assert '"num_labels": 48' in update  # 4 episodes of 8 steps, and 16 steps of the round
    assert '"intervention_rate": 0' in update


def test_interventions_are_sampled_more_often(deft, tmp_path):
    words = ["--rollout-steps", 8, "--updates-per-round", 1, "--total-timesteps", 48, "--beta", 0.3]
    train(deft, *words, "--output-dir", "run")
    data = ["--dataset", "run/labels-v0", "--num-epochs", 1, "--updates-per-epoch", 2, *SMALL, *COMMON]
    deft("train", "sft", *data, "--intervention-weight", 4, "--dataset-options", "actions=expert")
    sac = ["--env", ENV, "--prior-data", "run/labels-v0", "--learning-starts", 10, "--total-timesteps", 20]
    deft("train", "sac", *sac, *SMALL, *COMMON, "--intervention-weight", 4)


def test_errors(deft_or_error, tmp_path):
    gymnasium.register("deft-test/NoExpert-v0", entry_point=Line, kwargs={"expert": False})
    try:
        error = deft_or_error("train", "dagger", "--env", "deft-test/NoExpert-v0", *COMMON)
    finally:
        del gymnasium.registry["deft-test/NoExpert-v0"]
    assert "DAgger needs a scripted expert" in error
    assert "--takeover --view" in error
    deft_or_error("collect", "--env", ENV, "--policy", "random", "--episodes", 2, "--out", "demo-v0", "--json")
    data = ["train", "sft", "--dataset", "demo-v0", *COMMON]
    rounds = ["train", "dagger", "--env", ENV, "--expert-finishes", *COMMON]
    assert "beta 0.5: with expert_finishes only steps of the expert are imitated" in deft_or_error(*rounds)
    assert "is for a scripted expert" in deft_or_error(*rounds, "--beta", 1, "--takeover", "--view")
    assert "does not mark interventions" in deft_or_error(*data, "--intervention-weight", 2)
    assert "has no expert's actions" in deft_or_error(*data, "--dataset-options", "actions=expert")
