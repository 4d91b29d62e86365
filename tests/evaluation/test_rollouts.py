"""How policies act step by step, and the episodes that an evaluation plays."""

import numpy as np
import pytest
import torch
from tensordict import TensorDictBase
from worlds import Counting

from deft import schema
from deft.envs.make import wrap
from deft.evaluation.rollouts import PolicyActor, merge_results, play_episodes, summarize
from deft.models.policy import Policy


class Chunks(Policy):
    """Decides two steps at once: 10 · k and 10 · k + 1 at decision k of an episode."""

    chunk_length = 2
    needs_reward = True

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self.rewards: list[list[float]] = []

    def initial_memory(self, num_envs: int) -> torch.Tensor:
        return torch.zeros(num_envs, 1, 1)

    def act(self, td: TensorDictBase, deterministic: bool = False) -> TensorDictBase:
        self.rewards.append(td[schema.PREVIOUS_REWARD].tolist())
        td[schema.ACTION] = 10 * td[schema.MEMORY][:, 0] + torch.arange(2)
        td[schema.NEXT_MEMORY] = td[schema.MEMORY] + 1
        return td


def test_a_chunk_is_played_to_its_end_or_the_episodes() -> None:
    policy = Chunks()
    actor, observation = PolicyActor(policy, 2, None, deterministic=True), np.zeros((2, 1), np.float32)
    rewards = np.array([3.0, 4.0], np.float32)
    assert actor.act(observation, rewards).tolist() == [0, 0]
    actor.ended(np.array([1]))  # environment 1 drops the rest of its chunk and its memory
    assert actor.act(observation, rewards).tolist() == [1, 0]
    assert actor.act(observation, rewards).tolist() == [10, 1]
    # Decisions: of both environments, of the second alone, of the first alone; each reads its own reward.
    assert policy.rewards == [[3.0, 4.0], [4.0], [3.0]]


def test_environments_that_play_chunks_are_given_whole_ones() -> None:
    actor = PolicyActor(Chunks(), 2, None, deterministic=True, chunk_length=1)
    observation, rewards = np.zeros((2, 1), np.float32), np.zeros(2, np.float32)
    assert actor.act(observation, rewards).tolist() == [[0, 1], [0, 1]]
    assert actor.act(observation, rewards).tolist() == [[10, 11], [10, 11]]


def test_each_environment_plays_its_own_episode():
    """Seven episodes on three copies: waves of three, three and one; long and short ones count alike."""
    copies = [Counting(length=2), Counting(length=5), Counting(length=9)]
    episodes = play_episodes(None, wrap(copies), 7)
    # copy i plays episodes i, i + 3, i + 6: lengths 2, 5, 9, 2, 5, 9, 2
    assert [episode.length for episode in episodes] == [2, 5, 9, 2, 5, 9, 2]
    # Resets: one before each wave, and one at the end of each episode; a copy that has played is not stepped on.
    assert [copy.episode + 1 for copy in copies] == [6, 5, 5]
    summary = summarize(episodes)
    assert summary["mean_reward"] == pytest.approx(np.mean([2, 5, 9, 2, 5, 9, 2]))
    assert "success_rate" not in summary
    # a measure is averaged over the episodes that have it: (0.5 + 0.7) / 2
    for episode, value in zip(episodes, (0.5, 0.7), strict=False):
        episode.measures["coverage"] = value
    assert summarize(episodes)["measures/coverage"] == pytest.approx(0.6)


def test_results_of_several_seeds_are_merged() -> None:
    results = [
        {"mean_reward": mean, "mean_length": 2 * mean, "std_reward": 9.0, "terms/a": mean, "measures/b": -mean}
        for mean in (1.0, 3.0)
    ]
    merged = merge_results(results, lambda mean: 10 * mean)
    # The mean and deviation over seeds: (1 + 3) / 2 and √((1 + 1) / 2).
    assert merged == {
        "mean_reward": 2.0,
        "mean_length": 4.0,
        "std_reward": 1.0,
        "terms/a": 2.0,
        "measures/b": -2.0,
        "mean_rewards": [1.0, 3.0],
        "normalized_score": 20.0,
        "normalized_scores": [10.0, 30.0],
    }
