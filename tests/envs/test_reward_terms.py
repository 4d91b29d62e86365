"""The named terms of a reward, and a seed for each environment: the same in every kind of vector environment."""

import os
import signal
from collections.abc import Callable

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv

from deft.config.settings import EnvConfig
from deft.envs import SerialVectorEnv, VectorEnv, make_env, make_vector_env
from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv
from deft.envs.process import ProcessVectorEnv
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]
KINDS = ["serial", "process", "gymnasium"]


@pytest.fixture
def make_naming_env(make_counting_env: MakeEnv) -> MakeEnv:
    """Counting environments that name their terms, in another order than they report them (time, one)."""

    class Naming(gymnasium.ObservationWrapper):
        reward_terms = ("one", "time")

        def observation(self, observation: np.ndarray) -> np.ndarray:
            return observation.copy()

    return lambda **kwargs: Naming(make_counting_env(**kwargs))


def make(kind: str, functions: list[Callable[[], gymnasium.Env]]) -> VectorEnv:
    if kind == "process":
        return ProcessVectorEnv(functions, num_workers=2)
    if kind == "gymnasium":
        return GymnasiumVectorEnv(SyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP))
    return SerialVectorEnv(functions)


@pytest.mark.parametrize("kind", KINDS)
def test_columns_are_those_that_the_environment_names(make_naming_env: MakeEnv, kind: str) -> None:
    env = make(kind, [lambda: make_naming_env(length=2), lambda: make_naming_env(length=3)])
    try:
        assert env.reward_terms == ("one", "time")
        env.reset(seed=0)
        steps = [env.step(np.zeros(2, np.int64)) for _ in range(2)]
        # One each; time is t, also in the step that ends the first one's episode.
        assert [step.reward_terms.tolist() for step in steps] == [[[1, 1], [1, 1]], [[1, 2], [1, 2]]]
        assert steps[0].reward_terms.dtype == np.float32
        third = env.step(np.zeros(2, np.int64))
        assert third.reward_terms.tolist() == [[1, 1], [1, 3]]
        assert third.episodes[0].terms == {"one": 3.0, "time": 6.0}
    finally:
        env.close()


@pytest.mark.parametrize("kind", KINDS)
def test_no_names_no_columns(make_counting_env: MakeEnv, kind: str) -> None:
    env = make(kind, [make_counting_env] * 2)
    try:
        assert env.reward_terms == ()
        env.reset(seed=0)
        assert env.step(np.zeros(2, np.int64)).reward_terms is None
    finally:
        env.close()


def test_workers_of_gymnasium_are_asked_without_harm() -> None:
    def adapted(env_id: str) -> GymnasiumVectorEnv:
        functions = [lambda: gymnasium.make(env_id)] * 2
        return GymnasiumVectorEnv(AsyncVectorEnv(functions, autoreset_mode=AutoresetMode.SAME_STEP))

    env = adapted("CartPole-v1")  # has no such attribute, and its workers live on
    env.reset(seed=0)
    assert env.step(np.zeros(2, np.int64)).reward_terms is None
    env.close()


def test_an_attribute_of_that_name_that_is_something_else(make_counting_env: MakeEnv) -> None:
    env = make_counting_env()
    env.reward_terms = {"time": 0.0}  # type: ignore[attr-defined]
    assert SerialVectorEnv([env]).reward_terms == ()


def test_terms_that_are_not_named_are_rejected(make_naming_env: MakeEnv) -> None:
    env = make_naming_env()
    env.reward_terms = ("one",)  # type: ignore[attr-defined]
    vector_env = SerialVectorEnv([env])
    vector_env.reset()
    with pytest.raises(RunError, match=r"reports reward terms that its attribute reward_terms does not name: time$"):
        vector_env.step(np.zeros(1, np.int64))
    with pytest.raises(InputError, match=r"environment 1 has reward_terms \('one', 'time'\), but environment 0"):
        SerialVectorEnv([env, make_naming_env()])


def test_a_lost_step_earned_nothing(make_naming_env: MakeEnv) -> None:
    env = ProcessVectorEnv([lambda: make_naming_env(length=9)] * 2, num_workers=2)
    try:
        env.reset(seed=0)
        env.step(np.zeros(2, np.int64)), env.step(np.zeros(2, np.int64))
        os.kill(env.worker_pids[1], signal.SIGKILL)
        assert env.step(np.zeros(2, np.int64)).reward_terms.tolist() == [[1, 3], [0, 0]]
    finally:
        env.close()


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [("reach", {}), ("reach", {"reward": "sparse"}), ("tabletop", {}), ("tabletop", {"reward": "sparse"})],
)
def test_own_environments_name_what_they_report(env_id: str, kwargs: dict[str, str]) -> None:
    env = make_vector_env(EnvConfig(id=env_id, kwargs=kwargs, num_envs=1))
    env.reset(seed=0)
    step = env.step(np.full((1, *env.action_space.shape), 0.3, np.float32))
    assert len(env.reward_terms) == (1 if kwargs else {"reach": 4, "tabletop": 5}[env_id])
    assert step.reward == pytest.approx(step.reward_terms.sum(1), abs=1e-6)  # all of the reward is in its terms
    env.close()


def test_a_task_without_a_reward_has_no_terms() -> None:
    env = make_env(EnvConfig(id="tabletop", kwargs={"task": "random_exploration"}))
    assert env.get_wrapper_attr("reward_terms") == ()


# ---------------------------------------------------------------------------------------------------------------- seeds


@pytest.mark.parametrize("kind", KINDS)
def test_each_environment_has_a_seed_of_its_own(make_naming_env: MakeEnv, kind: str) -> None:
    env = make(kind, [make_naming_env] * 2)
    try:
        # Column 2 of the observation is drawn in reset.
        third, fourth = env.reset(seed=3)[:, 2].tolist()  # seeds 3 and 4
        assert third != fourth
        assert env.reset(seed=[4, 3])[:, 2].tolist() == [fourth, third]
        assert env.reset(seed=np.array([3, 3]))[:, 2].tolist() == [third, third]
        assert env.reset(seed=(4, 4))[:, 2].tolist() == [fourth, fourth]
        with pytest.raises(InputError, match="3 seeds for 2 environments; give one to each"):
            env.reset(seed=[1, 2, 3])
    finally:
        env.close()


def test_a_new_worker_draws_from_the_seeds_too(make_naming_env: MakeEnv) -> None:
    def after_a_loss() -> list[float]:
        env = ProcessVectorEnv([make_naming_env] * 2, num_workers=1)
        try:
            env.reset(seed=[7, 8])
            os.kill(env.worker_pids[0], signal.SIGKILL)
            return env.step(np.zeros(2, np.int64)).observation[:, 2].tolist()
        finally:
            env.close()

    assert after_a_loss() == after_a_loss()
