"""A user's own algorithm of each kind of experience trains, saves and resumes with the public trainers.

The classes stand here as they would in a user's own file: nothing in Deft names them.
"""

from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import ActorCritic, Trainer, schema
from deft.algorithms.algorithm import Algorithm
from deft.algorithms.experience import Groups, Replay
from deft.algorithms.offline import OfflineAlgorithm
from deft.config.algorithm_settings import AlgorithmSettings, OfflineSettings
from deft.config.settings import LoggingConfig, PolicyConfig
from deft.data.replay import ReplayBuffer, TransitionTable
from deft.errors import InputError
from deft.training.offline import OfflineTrainer

QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False, progress_bar=False)
PLAIN = PolicyConfig(hidden_sizes=(16,), normalize_observation=False, normalize_reward=False)


class Match(gymnasium.Env):
    """Four steps, each with a random sign as observation: action 1 earns a reward of 1 where it is negative, action 0
    where it is positive. A random policy earns 2 in the mean, the best one 4."""

    observation_space = spaces.Box(-1, 1, (1,), np.float32)
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._draw(), {}

    def step(self, action):
        reward = float(action == (self.sign < 0))
        self.steps += 1
        return self._draw(), reward, self.steps == 4, False, {}

    def _draw(self):
        self.sign = float(self.np_random.choice([-1.0, 1.0]))
        return np.array([self.sign], np.float32)


class Own(Algorithm):
    """What the own algorithms share: one optimizer, one step on a loss, a state."""

    def __init__(self, policy, settings=None):
        self.policy, self.settings = policy, settings or AlgorithmSettings()
        self.optimizer = torch.optim.Adam(policy.parameters(), 0.02)

    def _descend(self, log_prob, weight) -> dict[str, Any]:
        loss = -(log_prob * weight).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.version += 1
        return {"loss": loss.detach()}

    def state_dict(self):
        return {"optimizer": self.optimizer.state_dict(), "version": self.version}

    def load_state_dict(self, state):
        self.optimizer.load_state_dict(state["optimizer"])
        self.version = state["version"]


class OnPolicy(Own):
    """∇J = E[∇ log π(a|s) (r − E r)]: in `Match` an action decides the reward of its own step alone."""

    name = "own-on-policy"

    def update(self, batches):
        rollout = next(batches).flatten(0, 1)
        reward = rollout[schema.NEXT_REWARD]
        return self._descend(self.policy.evaluate_actions(rollout)["log_prob"], reward - reward.mean())


class Grouped(Own):
    """An episode is judged by its return, compared with the mean of its group."""

    name = "own-grouped"
    experience = Groups(group_size=8)

    def update(self, batches):
        (rollout,) = batches
        assert (rollout[schema.OBSERVATION][0].reshape(2, 8) == rollout[schema.OBSERVATION][0, ::8]).all()
        returns = rollout[schema.NEXT_REWARD].sum(0).reshape(-1, 8)
        weight = (returns - returns.mean(1, keepdim=True)).flatten().expand(rollout.batch_size)
        log_prob = self.policy.evaluate_actions(rollout.flatten(0, 1))["log_prob"]
        return self._descend(log_prob, weight.flatten())


class FromReplay(Own):
    """Weights the log-probability of stored actions by their reward; random actions make it an improvement."""

    name = "own-replay"
    experience = Replay(batch_size=64, buffer_size=500, train_freq=4, updates_per_step=0.5, learning_starts=64)

    def __init__(self, policy, settings=None):
        super().__init__(policy, settings)
        self.num_batches = 0

    def update(self, batches):
        metrics = {}
        for batch in batches:
            self.num_batches += 1
            stored = TensorDict({key: batch[key] for key in (schema.OBSERVATION, schema.ACTION)}, batch_size=[64])
            log_prob = self.policy.evaluate_actions(stored)["log_prob"]
            metrics = self._descend(log_prob, batch[schema.NEXT_REWARD] - 0.5)
        return metrics


class Offline(OfflineAlgorithm):
    """Squared error to the dataset's actions."""

    name = "own-offline"

    def __init__(self, policy, settings=None):
        self.policy, self.settings = policy, settings or OfflineSettings(batch_size=32)
        self.optimizer = torch.optim.Adam(policy.parameters(), 0.01)

    def _step(self, batch):
        inputs = TensorDict({schema.OBSERVATION: batch[schema.OBSERVATION]}, batch_size=[32])
        stored = TensorDict({**inputs, schema.ACTION: batch[schema.ACTION]}, batch_size=[32])
        loss = -self.policy.evaluate_actions(stored)["log_prob"].mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        return {"loss": loss.detach()}

    state_dict = Own.state_dict
    load_state_dict = Own.load_state_dict


def make_trainer(kind: type[Own], folder, num_envs: int = 16, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    policy = ActorCritic(Match.observation_space, Match.action_space, PLAIN)
    given = {"buffer_size": 8, "eval_freq": 0, "save_freq": 0, **settings}
    envs = [Match() for _ in range(num_envs)]
    return Trainer(policy, envs, kind(policy), output_dir=folder, logging_config=QUIET, threads=1, **given)


def make_offline_trainer(folder) -> OfflineTrainer:
    """Actions of the dataset: 0.5 times the observation."""
    torch.manual_seed(0)
    table = TransitionTable([1] * 64, 1, 1)
    observation = torch.linspace(-1, 1, 64)
    table.rows.view(64, 2, 4)[:, 0, 0] = observation
    table.rows.view(64, 2, 4)[:, 0, 1] = 0.5 * observation
    box = spaces.Box(-1, 1, (1,), np.float32)
    policy = ActorCritic(box, box, PLAIN)
    algorithm, sampler = Offline(policy), ReplayBuffer(table, seed=0)
    given = {"eval_freq": 0, "save_freq": 0, "log_freq": 1}
    return OfflineTrainer(policy, algorithm, sampler, output_dir=folder, logging_config=QUIET, threads=1, **given)


def assert_same_weights(first, second) -> None:
    other = second.policy.state_dict()
    for name, value in first.policy.state_dict().items():
        assert torch.equal(value, other[name]), name


@pytest.mark.parametrize(("kind", "steps"), [(OnPolicy, 6_400), (Grouped, 6_400), (FromReplay, 640)])
def test_an_algorithm_of_ones_own_learns(tmp_path, kind, steps):
    trainer = make_trainer(kind, tmp_path)
    before = trainer.evaluate(20)["mean_reward"]
    trainer.train(steps)
    assert before < 3.0
    assert trainer.evaluate(20)["mean_reward"] == 4.0
    trainer.close()


@pytest.mark.parametrize("kind", [OnPolicy, Grouped, FromReplay])
def test_a_resumed_run_is_the_same(tmp_path, kind):
    whole = make_trainer(kind, tmp_path / "whole")
    whole.train(1_024)
    half = make_trainer(kind, tmp_path / "half")
    half.train(512)
    resumed = make_trainer(kind, tmp_path / "half")
    resumed.load(tmp_path / "half")
    resumed.train(1_024)
    assert whole.algorithm.version == resumed.algorithm.version > half.algorithm.version > 0
    assert_same_weights(whole, resumed)


def test_replay_is_drawn_from_as_declared(tmp_path):
    trainer = make_trainer(FromReplay, tmp_path)
    trainer.train(640)
    # Every turn is 4 steps of 16 environments; the first batches come after 64 env steps, half a batch for each step.
    assert trainer.algorithm.num_batches == trainer.algorithm.version == 640 // 2
    assert len(trainer.collection.buffer) == 500


def test_an_own_offline_algorithm_learns_and_resumes_the_same(tmp_path):
    whole = make_offline_trainer(tmp_path / "whole")
    whole.train(200)
    half = make_offline_trainer(tmp_path / "half")
    half.train(100)
    resumed = make_offline_trainer(tmp_path / "half")
    resumed.load(tmp_path / "half")
    resumed.train(200)
    assert_same_weights(whole, resumed)
    with torch.no_grad():
        inputs = TensorDict({schema.OBSERVATION: torch.tensor([[-0.8], [0.0], [0.8]])}, batch_size=[3])
        action = whole.policy.act(inputs, deterministic=True)[schema.ACTION]
    assert action.flatten().tolist() == pytest.approx([-0.4, 0.0, 0.4], abs=0.05)


def test_an_offline_algorithm_is_rejected_by_the_online_trainer(tmp_path):
    policy = ActorCritic(Match.observation_space, Match.action_space, PLAIN)
    with pytest.raises(InputError, match="algorithm: own-offline learns from a dataset; use OfflineTrainer"):
        Trainer(policy, [Match()], Offline(policy), output_dir=tmp_path, logging_config=QUIET)


def test_replay_and_groups_are_not_collected_in_the_background(tmp_path):
    for kind in (Grouped, FromReplay):
        with pytest.raises(InputError, match=f"buffer_type: {kind.name} collects and learns in turns"):
            make_trainer(kind, tmp_path, buffer_type="vla")
