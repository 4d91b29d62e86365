"""`env.set_difficulty(level)`, as the documents write it, on whatever stands around the environment."""

import gymnasium
import numpy as np
import pytest

from deft import PPOTrainer, RLConfig
from deft.config.settings import EnvConfig
from deft.envs import make_env, make_vector_env, wrap
from deft.envs.state import restore_state, save_state
from deft.errors import InputError


def get_difficulty(training_step):
    """The documents' function."""
    if training_step < 10000:
        return "easy"
    elif training_step < 50000:
        return "medium"
    else:
        return "hard"


def driving(**settings):
    return EnvConfig(id="driving", **settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: gymnasium.make("deft/Driving-v0"),
        lambda: make_env(driving()),
        lambda: make_env(driving(max_episode_steps=5), chunk_length=2),
        lambda: make_env(driving(reward_weights={"progress": 2.0})),
    ],
    ids=["gymnasium.make", "make_env", "chunks", "weights"],
)
def test_through_the_wrappers_of_one_environment(make):
    env = make()
    for step, level in ((0, "easy"), (49_999, "medium"), (50_000, "hard")):
        env.set_difficulty(get_difficulty(step))
        env.reset(seed=0)
        assert env.unwrapped.simulator.difficulty == level
    with pytest.raises(InputError, match="difficulty is 'extreme'"):
        env.set_difficulty("extreme")
    env.close()


@pytest.mark.parametrize("vector", ["sync", "process"])
@pytest.mark.parametrize("weights", [{}, {"progress": 2.0}])
def test_in_every_environment_of_a_vector(vector, weights):
    """The traffic of the levels differs, so after the same seeds the first observations do."""
    env = make_vector_env(driving(num_envs=2, vector=vector, reward_weights=weights, kwargs={"difficulty": "easy"}))
    hard = make_vector_env(driving(num_envs=2, kwargs={"difficulty": "hard"}))
    expected = hard.reset(3).copy()
    assert not np.array_equal(env.reset(3), expected)
    env.set_difficulty("hard")
    np.testing.assert_array_equal(env.reset(3), expected)
    env.close()


def test_a_vector_of_a_users_environments_and_one_of_gymnasium():
    for made in (
        wrap([gymnasium.make("deft/Driving-v0") for _ in range(2)]),
        wrap(
            gymnasium.make_vec(
                "deft/Driving-v0",
                2,
                "sync",
                vector_kwargs={"autoreset_mode": gymnasium.vector.AutoresetMode.SAME_STEP},
            )
        ),
    ):
        made.set_difficulty("easy")
        made.reset(0)
        made.close()
    with pytest.raises(InputError, match="has no method 'set_difficulty'"):
        make_vector_env(EnvConfig(id="CartPole-v1")).set_difficulty("easy")


def test_a_trainers_environment(tmp_path):
    trainer = PPOTrainer(gymnasium.make("deft/Driving-v0"), config=RLConfig(output_dir=str(tmp_path / "run")))
    trainer.trainer.env.set_difficulty("hard")
    trainer.trainer.env.reset(0)
    assert trainer.trainer.env.envs[0].unwrapped.simulator.difficulty == "hard"
    trainer.trainer.close()


def test_saved_states_are_those_of_the_environment_without_it():
    """Checkpoints from before `set_difficulty` was forwarded still fit."""
    plain = gymnasium.make(gymnasium.spec("deft/Driving-v0"), disable_env_checker=True).env
    forwarded = gymnasium.make("deft/Driving-v0", disable_env_checker=True)
    plain.reset(seed=0)
    state = save_state(plain)
    restore_state(forwarded, state)
    action = np.array([0.5, 0.1], np.float32)
    np.testing.assert_array_equal(plain.step(action)[0], forwarded.step(action)[0])
