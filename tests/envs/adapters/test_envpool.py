"""envpool behind the same contract; skipped where the extra is not installed, except for saying so."""

import sys

import numpy as np
import pytest
from gymnasium import spaces

from deft.config.settings import EnvConfig
from deft.envs import VectorEnv, make_vector_env
from deft.errors import InputError


def make(**settings: object) -> VectorEnv:
    return make_vector_env(EnvConfig(**{"id": "CartPole-v1", "vector": "envpool", **settings}))


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "envpool", None)
    with pytest.raises(InputError, match=r'pip install -e "\.\[envpool\]"'):
        make()


class TestInstalled:
    @pytest.fixture(autouse=True)
    def _needs_envpool(self) -> None:
        pytest.importorskip("envpool")

    def test_contract_of_a_step(self) -> None:
        # CartPole's reward is 1 a step, so that an episode's return is its length. Its physics show a true last
        # observation: x' = x + 0.02 v, with x and v of the observation before.
        env = make(num_envs=4, max_episode_steps=12)
        assert env.action_space == spaces.Discrete(2)
        observation = env.reset(seed=3)
        assert observation.dtype == np.float32
        rng = np.random.default_rng(0)
        num_terminated = num_truncated = num_both = 0
        lengths = np.zeros(4, int)
        for _ in range(200):
            step = env.step(rng.integers(2, size=4))
            lengths += 1
            assert step.num_steps.tolist() == [1] * 4
            assert step.done_index.tolist() == np.flatnonzero(step.terminated | step.truncated).tolist()
            true_next = step.observation.copy()
            if len(step.done_index):
                true_next[step.done_index] = step.final_observation
                starts = step.observation[step.done_index]
                assert (np.abs(starts) <= 0.05).all()  # CartPole starts within ±0.05
            np.testing.assert_allclose(true_next[:, 0], observation[:, 0] + 0.02 * observation[:, 1], atol=1e-5)
            for episode in step.episodes:
                index = episode.env_index
                assert episode.length == lengths[index] == episode.episode_return
                # Ended by the pole (12 degrees), by the time limit of 12, or by both in one step.
                has_fallen, is_late = abs(true_next[index, 2]) > np.radians(12), lengths[index] == 12
                assert (step.terminated[index], step.truncated[index]) == (has_fallen, is_late)
                num_terminated += has_fallen and not is_late
                num_truncated += is_late and not has_fallen
                num_both += has_fallen and is_late
                lengths[index] = 0
            observation = step.observation
        assert num_terminated > 0
        assert num_truncated > 0
        assert num_both > 0
        env.close()

    def test_seeds(self) -> None:
        env = make(num_envs=3)
        first = env.reset(seed=7).copy()
        other = make(num_envs=1).reset(seed=9)
        assert first[2].tolist() == other[0].tolist()  # environment i draws from seed + i
        assert env.reset(seed=8).tolist() != first.tolist()
        assert env.reset(seed=7).tolist() == first.tolist()
        assert env.reset().tolist() != first.tolist()
        env.close()
        env.close()

    def test_box_actions_are_clipped_and_float64_observations_become_float32(self) -> None:
        env, same = make(id="Hopper-v5", num_envs=2), make(id="Hopper-v5", num_envs=2)
        assert env.observation_space.dtype == np.float32
        env.reset(seed=0)
        same.reset(seed=0)
        found = env.step(np.full((2, 3), 50.0, np.float32))
        expected = same.step(np.ones((2, 3), np.float32))
        assert found.observation.tobytes() == expected.observation.tobytes()
        assert found.reward.tolist() == expected.reward.tolist()

    def test_dict_and_discrete_observations(self) -> None:
        walker = make(id="WalkerWalk-v1", num_envs=2)
        observation = walker.reset(seed=0)
        assert {name: value.shape for name, value in observation.items()} == {
            "orientations": (2, 14),
            "height": (2,),
            "velocity": (2, 9),
        }
        lake = make(id="FrozenLake-v1", num_envs=2)
        assert lake.reset(seed=0).dtype == np.int64
        assert lake.reset(seed=0).shape == (2,)

    def test_wrong_input(self) -> None:
        with pytest.raises(InputError, match=r"envpool has no environment 'CartPol-v1'; the nearest are CartPole-v1"):
            make(id="CartPol-v1")
        with pytest.raises(InputError, match=r"env.kwargs \{'gravity': 3\} do not fit envpool's CartPole-v1"):
            make(kwargs={"gravity": 3})
        env = make()
        with pytest.raises(InputError, match="before reset"):
            env.step(np.zeros(1, np.int64))
        assert env.get_state() is None
        assert "sync or process" in env.state_obstacle()
        with pytest.raises(InputError, match="no method 'fly'"):
            env.call("fly")
