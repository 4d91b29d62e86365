"""The contract of vector environments: what a new kind has to implement, and the defaults of the rest."""

import subprocess
import sys

import numpy as np
import pytest
from gymnasium import spaces

from deft.envs import VectorEnv, VectorStep
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
