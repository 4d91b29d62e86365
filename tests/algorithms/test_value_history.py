"""The value on the last rollouts, joined: its returns by hand, how rare rewards reach it, and resuming with it."""

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import PPOTrainer, RLConfig, schema
from deft.algorithms import value_history
from deft.algorithms.experience import Rollouts
from deft.algorithms.ppo import PPO
from deft.algorithms.value_history import ValueHistory
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic

LENGTH = 8  # steps of an episode of `walk`
SPACE = spaces.Dict({"sensor": spaces.Box(-9, 9, (1,)), "place": spaces.Box(0, 1, (LENGTH + 1,))})


def make_policy(**changes: Any) -> ActorCritic:
    torch.manual_seed(0)
    config = PolicyConfig(critic_observation=("place",), hidden_sizes=(16, 16), normalize_reward=False, **changes)
    return ActorCritic(SPACE, spaces.Box(-1, 1, (1,)), config)


def walk(policy: ActorCritic, step: int, version: int = 0, count: int = 4) -> TensorDict:
    """One step of episodes whose reward is 1 in the last of LENGTH steps where the column is even, whatever is done.

    `place`: a one-hot vector of the step, and whether there will be a reward.
    """
    place = torch.zeros(1, count, LENGTH + 1)
    place[..., step % LENGTH] = 1
    place[:, ::2, -1] = 1
    observation = TensorDict({"sensor": torch.zeros(1, count, 1), "place": place}, [1, count])
    td = TensorDict({schema.OBSERVATION: observation[0]}, [count])
    with torch.no_grad():
        policy.act(td)
        following = observation.clone()
        following["place"][..., :-1] = place[..., :-1].roll(1, -1)
        value = policy.get_value(TensorDict({schema.OBSERVATION: following[0]}, [count]))
    ends = step % LENGTH == LENGTH - 1
    td[schema.NEXT_REWARD] = place[0, :, -1] * ends
    td[schema.NEXT_TERMINATED] = torch.full((count,), ends)
    td[schema.NEXT_TRUNCATED] = torch.zeros(count, dtype=torch.bool)
    td[schema.NEXT_VALUE] = value
    td[schema.POLICY_VERSION] = torch.full((count,), version)
    td[schema.STEP_MASK] = torch.ones(count, dtype=torch.bool)
    return td.unsqueeze(0)


def steps(reward: float, next_value: float, terminated: bool = False, truncated: bool = False) -> dict[str, Any]:
    return {
        "reward": torch.tensor([[reward]]),
        "next_value": torch.tensor([[next_value]]),
        "discount": torch.tensor([[0.5]]),
        "terminated": torch.tensor([[terminated]]),
        "done": torch.tensor([[terminated or truncated]]),
    }


@pytest.fixture
def zero(monkeypatch: pytest.MonkeyPatch) -> tuple[ActorCritic, ValueHistory]:
    """A history whose V is 0 and stays so, with λ = ½."""
    monkeypatch.setattr(value_history, "LEARNING_RATE", 0.0)
    policy = make_policy()
    for parameter in policy.critic.network.parameters():
        parameter.data.zero_()
    return policy, ValueHistory(policy, num_updates=1, gae_lambda=0.5, seed=0)


def test_returns_go_on_through_the_rollouts_that_follow(zero: tuple[ActorCritic, ValueHistory]) -> None:
    policy, history = zero
    one = walk(policy, 0, count=1)
    advantage, value = history.learn(one, steps(0.0, 8.0))
    # the newest rollout ends in the V that was found with it: 0 + ½ · 8 − 0
    assert (advantage.item(), value.item()) == (4.0, 0.0)
    advantage, _ = history.learn(walk(policy, 1, count=1), steps(1.0, 9.0, terminated=True))
    assert advantage.item() == 1.0
    joined, _ = history._advantages(torch.cat(history.rollouts))
    # δ_0 = 0 + ½ V(s_1) − V(s_0) = 0 now that s_1 is known, and A_0 = δ_0 + γ λ A_1 = ½ · ½ · 1
    torch.testing.assert_close(joined, torch.tensor([[0.25], [1.0]]))


def test_a_truncated_step_ends_in_the_value_of_its_final_observation(zero: tuple[ActorCritic, ValueHistory]) -> None:
    policy, history = zero
    history.learn(walk(policy, 0, count=1), steps(2.0, 6.0, truncated=True))
    history.learn(walk(policy, 1, count=1), steps(1.0, 0.0, terminated=True))
    joined, _ = history._advantages(torch.cat(history.rollouts))
    torch.testing.assert_close(joined, torch.tensor([[2.0 + 0.5 * 6.0], [1.0]]))  # nothing of the next episode


def test_it_remembers_the_last_rollouts_alone(
    zero: tuple[ActorCritic, ValueHistory], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(value_history, "NUM_ROLLOUTS", 2)
    policy, history = zero
    for step in range(3):
        history.learn(walk(policy, step, count=1), steps(float(step), 0.0))
    assert [rollout["reward"].item() for rollout in history.rollouts] == [1.0, 2.0]


def test_the_advantages_of_an_update_are_those_of_the_new_value() -> None:
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(value_updates=20, gamma=0.5), seed=0)
    assert algorithm.experience == Rollouts(consecutive="value_updates")
    data = algorithm._with_advantages(walk(policy, LENGTH - 1))
    value = policy.get_value(data[0]).detach()
    reward = torch.tensor([1.0, 0.0, 1.0, 0.0])
    torch.testing.assert_close(data[schema.ADVANTAGE][0], reward - value)  # of a last step, by the V of now
    torch.testing.assert_close(data[schema.VALUE_TARGET][0], reward)
    assert not torch.equal(value, data[schema.VALUE][0])


def foresight(value_updates: int) -> float:
    """How much larger V of the first state is where a reward will come, after 3 episodes in rollouts of one step."""
    policy = make_policy()
    settings = PPOSettings(value_updates=value_updates, gamma=0.9, learning_rate=1e-3, n_epochs=1, batch_size=4)
    algorithm = PPO(policy, settings, seed=0)
    for step in range(3 * LENGTH):
        algorithm.update(iter([walk(policy, step, algorithm.version)]))
    value = policy.get_value(walk(policy, 0)[0]).detach()
    return float(value[0] - value[1])


def test_a_rare_reward_reaches_the_first_state(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(value_history, "LEARNING_RATE", 1e-2)
    true = 0.9 ** (LENGTH - 1)  # 0.48
    assert foresight(value_updates=10) == pytest.approx(true, abs=0.1)
    assert foresight(value_updates=0) < 0.25 * true


def test_an_algorithm_resumes_with_it_bit_for_bit() -> None:
    policy, settings = make_policy(), PPOSettings(value_updates=3, batch_size=4, n_epochs=1)
    algorithm = PPO(policy, settings, seed=0)
    algorithm.update(iter([walk(policy, 0)]))
    saved, weights = copy.deepcopy(algorithm.state_dict()), copy.deepcopy(policy.state_dict())
    data = walk(policy, 1, version=1)
    metrics = algorithm.update(iter([data.clone()]))
    assert metrics["value_history_loss"] > 0
    again = make_policy()
    again.load_state_dict(weights)
    resumed = PPO(again, settings, seed=5)
    resumed.load_state_dict(saved)
    resumed.update(iter([data.clone()]))
    assert not torch.equal(weights["critic.network.weights.0"], policy.state_dict()["critic.network.weights.0"])
    for name, value in policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


def test_what_it_cannot_do_is_said_in_one_line(tmp_path: Any) -> None:
    plain = ActorCritic(SPACE, spaces.Box(-1, 1, (1,)), PolicyConfig())
    with pytest.raises(InputError, match=r"value_updates: .*name them with critic_observation, or use value_updates 0"):
        PPO(plain, PPOSettings(value_updates=1))
    asynchronous = RLConfig(critic_observation=("place",), value_updates=1, buffer_type="vla", output_dir=str(tmp_path))
    with pytest.raises(InputError, match=r"value_updates: ppo joins rollouts in time, .*use buffer_type 'standard'"):
        PPOTrainer(env=Corridor(), config=asynchronous)
    without, with_it = PPO(make_policy(), PPOSettings()), PPO(make_policy(), PPOSettings(value_updates=1))
    with pytest.raises(InputError, match="value_updates was 0 in this run"):
        with_it.load_state_dict(without.state_dict())
    with pytest.raises(InputError, match="value_updates was above 0 in this run"):
        without.load_state_dict(with_it.state_dict())


class Corridor(gymnasium.Env):
    """Episodes of LENGTH steps with a reward at the end; the critic sees how far they are."""

    observation_space, action_space = SPACE, spaces.Box(-1, 1, (1,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.elapsed = 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.elapsed += 1
        ends = self.elapsed == LENGTH
        return self.observe(), float(ends) * float(action[0]), ends, False, {}

    def observe(self) -> dict[str, np.ndarray]:
        return {"sensor": np.zeros(1, np.float32), "place": np.eye(LENGTH + 1, dtype=np.float32)[self.elapsed]}


def test_a_run_in_two_parts_is_the_run_in_one(tmp_path: Any) -> None:
    given = {"critic_observation": ("place",), "value_updates": 2, "rollout_steps": 8, "tensorboard": False}

    def train(name: str, total: int, **more: Any) -> dict[str, torch.Tensor]:
        config = RLConfig(total_timesteps=total, output_dir=str(tmp_path / name), **given, **more)
        trainer = PPOTrainer(env=Corridor(), config=config)
        trainer.train()
        weights = copy.deepcopy(trainer.trainer.policy.state_dict())
        trainer.close()
        return weights

    whole = train("whole", 32)
    train("parts", 16)
    parts = train("parts", 32, resume=str(tmp_path / "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
