"""The contract of vector environments: what a new kind has to implement, and the defaults of the rest."""

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from deft.envs import VectorEnv, VectorStep
from deft.envs.vector import BatchedVectorEnv, BatchStep
from deft.errors import InputError


class Minimal(VectorEnv):
    """Only the two abstract methods."""

    def reset(self, seed=None):
        self.seeds = self._env_seeds(seed)
        return np.zeros((self.num_envs, 1), np.float32)

    def step(self, actions):
        raise NotImplementedError


def make(num_envs: int = 3) -> Minimal:
    return Minimal(num_envs, observation_space=spaces.Box(-1, 1, (1,)), action_space=spaces.Discrete(2))


def test_reset_and_step_are_all_that_a_new_kind_implements() -> None:
    env = make()
    assert VectorEnv.__abstractmethods__ == {"reset", "step"}
    assert env.env_action_space == env.action_space
    assert (env.action_mask, env.chunk_length, env.reward_terms, env.num_workers) == (None, 1, (), 0)
    assert env.get_state() is None
    assert env.render() is None
    env.close()


def test_what_it_does_not_have_is_an_error_in_one_line() -> None:
    env = make()
    with pytest.raises(InputError, match="cannot continue from a saved state: Minimal cannot save its state"):
        env.set_state([])
    with pytest.raises(InputError, match="Minimal have no method 'set_difficulty'"):
        env.set_difficulty("hard")
    with pytest.raises(InputError, match="Minimal holds no observations"):
        _ = env.observation


def test_environment_i_gets_seed_plus_i_or_its_own() -> None:
    env = make()
    env.reset(5)
    assert env.seeds == [5, 6, 7]
    env.reset([9, 2, 4])
    assert env.seeds == [9, 2, 4]
    env.reset()
    assert env.seeds == [None, None, None]
    with pytest.raises(InputError, match=r"reset\(\) got 2 seeds for 3 environments"):
        env.reset([1, 2])


def test_results_of_a_step_have_the_documented_fields() -> None:
    names = {"observation", "reward", "terminated", "truncated", "num_steps", "done_index", "final_observation"}
    assert names | {"episodes", "lost_index", "reward_terms"} == set(VectorStep.__slots__)


def test_environments_do_not_import_torch() -> None:
    code = (
        "import sys, deft.envs, deft.envs.process, deft.envs.adapters.gymnasium_vector; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# Vector environments that step in one call: the base class counts episodes and resets ended environments.


class Counters(BatchedVectorEnv):
    """Environment i counts up from 10 i; its episode terminates after `lengths[i]` steps. Reward: the count."""

    def __init__(self, lengths: list[int], **settings) -> None:
        super().__init__(len(lengths), spaces.Box(-np.inf, np.inf, (1,)), spaces.Discrete(2), **settings)
        self.limits = np.array(lengths)
        self.counts = np.zeros(len(lengths))
        self.restarted: list[list[int]] = []
        self.begun: list[list[int] | None] = []

    def _begin(self, seeds):
        self.begun.append(seeds)
        self.counts = 10.0 * np.arange(self.num_envs)

    def _advance(self, actions):
        self.counts += 1
        terminated = self.counts - 10 * np.arange(self.num_envs) >= self.limits
        return BatchStep(
            self.counts.copy(),
            terminated,
            success=actions == 1,
            terms=np.stack([self.counts, actions], 1) if self.reward_terms else None,
        )

    def _observe(self, rows):
        return self.counts[:, None] if rows is None else self.counts[rows, None]

    def _restart(self, rows):
        self.restarted.append(rows.tolist())
        self.counts[rows] = 10.0 * rows


def test_an_ended_environment_is_reset_in_the_step_and_keeps_its_last_observation() -> None:
    env = Counters([2, 5], reward_terms=("count", "action"))
    assert env.reset(3)[:, 0].tolist() == [0, 10]
    assert env.begun == [[3, 4]]
    first = env.step(np.array([1, 0]))
    assert first.observation[:, 0].tolist() == [1, 11]
    assert first.final_observation is None
    assert len(first.done_index) == 0
    second = env.step(np.array([1, 0]))
    assert second.terminated.tolist() == [True, False]
    assert second.done_index.tolist() == [0]
    assert second.final_observation[:, 0].tolist() == [2]
    assert first.next_observation() is first.observation
    assert second.next_observation()[:, 0].tolist() == [2, 12]  # the last one of the ended episode
    assert second.observation[:, 0].tolist() == [0, 12]  # environment 0 has begun again
    assert env.restarted == [[0]]
    (episode,) = second.episodes
    assert (episode.env_index, episode.length, episode.success) == (0, 2, True)
    assert episode.episode_return == 1 + 2
    assert episode.terms == {"count": 3.0, "action": 2.0}
    assert second.reward_terms.tolist() == [[2, 1], [12, 0]]


def test_the_next_episode_counts_from_zero() -> None:
    env = Counters([2, 3])
    env.reset()
    assert env.begun == [None]
    episodes = [episode for _ in range(6) for episode in env.step(np.zeros(2, np.int64)).episodes]
    assert [(one.env_index, one.length, one.episode_return) for one in episodes] == [
        (0, 2, 3.0),
        (1, 3, 11.0 + 12 + 13),
        (0, 2, 3.0),
        (0, 2, 3.0),
        (1, 3, 36.0),
    ]


@pytest.mark.parametrize("limit", [1, 2])
def test_a_time_limit_truncates(limit: int) -> None:
    env = Counters([2, 9], max_episode_steps=limit)
    env.reset()
    for _ in range(limit):
        step = env.step(np.zeros(2, np.int64))
    assert step.truncated.tolist() == [True, True]
    assert step.terminated.tolist() == [limit == 2, False]
    assert [one.length for one in step.episodes] == [limit, limit]
