"""Self-imitation: what enters the memory and with which priority, by hand; what is drawn; learning; resuming."""

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import PPOTrainer, RLConfig, schema
from deft.algorithms import self_imitation
from deft.algorithms.experience import Rollouts
from deft.algorithms.ppo import PPO
from deft.algorithms.self_imitation import PRIORITY, RETURN, UNIT, SelfImitation
from deft.config.algorithm_settings import PPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic

SPACE, BOX = spaces.Box(-9, 9, (1,)), spaces.Box(-2, 2, (2,))


def make_policy(**changes: Any) -> ActorCritic:
    torch.manual_seed(0)
    config = PolicyConfig(hidden_sizes=(16, 16), normalize_reward=False, **changes)
    return ActorCritic(SPACE, BOX, config)


def rollout(rewards: list[list[float]], ends: list[list[int]], values: list[list[float]]) -> tuple[Any, dict[str, Any]]:
    """A rollout [T, N] whose k-th decision has the observation k and the action (k, −k); ends: 1 terminated, 2 cut off.

    The value after the last step is 8, and γ = ½.
    """
    reward, end, value = torch.tensor(rewards), torch.tensor(ends), torch.tensor(values)
    number = torch.arange(float(reward.numel())).view(*reward.shape, 1)
    td = TensorDict({}, reward.shape)
    td[schema.OBSERVATION], td[schema.VALUE], td[schema.NEXT_REWARD] = number, value, reward
    td[schema.ACTION] = torch.cat([number, -number], -1)
    steps = {
        "reward": reward,
        "next_value": torch.full_like(reward, 8.0),
        "discount": torch.full_like(reward, 0.5),
        "terminated": end == 1,
        "done": end > 0,
    }
    return td, steps


def remembered(memory: SelfImitation) -> dict[float, tuple[float, float]]:
    """Return and priority by observation."""
    assert memory.memory is not None
    columns = memory.memory[schema.OBSERVATION][:, 0], memory.memory[RETURN], memory.memory[PRIORITY]
    return {o: (r, p) for o, r, p in zip(*(column.tolist() for column in columns), strict=True)}


def test_an_episode_of_two_rollouts_is_remembered_with_its_returns() -> None:
    memory = SelfImitation(make_policy(), None, seed=0)
    memory.remember(*rollout([[0.0], [0.0]], [[0], [0]], [[0.125], [0.75]]))
    assert memory.memory is None  # the episode has not ended
    memory.remember(*rollout([[4.0], [1.0]], [[1], [0]], [[3.0], [0.0]]))
    # R: 4, then ½ · 4 = 2 and ½ · 2 = 1; (R − V)₊: 4 − 3, 2 − 0.75, 1 − 0.125. The second rollout counts from 0 again.
    assert memory.memory is not None
    assert memory.memory[schema.OBSERVATION][:, 0].tolist() == [1.0, 0.0, 0.0]
    assert memory.memory[RETURN].tolist() == [2.0, 4.0, 1.0]
    assert memory.memory[PRIORITY].tolist() == [1.25, 1.0, 0.875]
    assert memory.memory[UNIT].tolist() == [[0.5, -0.5], [0.0, 0.0], [0.0, 0.0]]  # the range of actions is ± 2
    assert (memory.lengths.tolist(), memory.totals.tolist()) == ([1], [1.0])  # the next episode has begun


def test_decisions_that_went_as_expected_are_left_out() -> None:
    memory = SelfImitation(make_policy(), None, seed=0)
    memory.remember(*rollout([[0.0], [1.0]], [[0], [1]], [[0.5], [0.25]]))
    assert remembered(memory) == {1.0: (1.0, 0.75)}  # of the first, R = ½ = V


def test_a_truncated_episode_ends_in_the_value_of_its_final_observation() -> None:
    memory = SelfImitation(make_policy(), None, seed=0)
    memory.remember(*rollout([[1.0, 1.0]], [[1, 2]], [[0.0, 0.0]]))
    assert remembered(memory) == {0.0: (1.0, 1.0), 1.0: (5.0, 5.0)}  # 1 + ½ · 8


def test_episodes_of_a_smaller_return_are_not_imitated() -> None:
    memory = SelfImitation(make_policy(), 1.0, seed=0)
    # The sums of rewards, not discounted: 0.5 + 0.5 in the first environment, 0.5 + 0.25 in the second.
    memory.remember(*rollout([[0.5, 0.5], [0.5, 0.25]], [[0, 0], [1, 1]], [[0.0, 0.0], [0.0, 0.0]]))
    assert sorted(remembered(memory)) == [0.0, 2.0]


def test_of_a_long_episode_the_end_is_imitated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_imitation, "LONGEST", 2)
    memory = SelfImitation(make_policy(), None, seed=0)
    memory.remember(*rollout([[1.0]] * 3, [[0], [0], [1]], [[0.0]] * 3))
    assert remembered(memory) == {1.0: (1.5, 1.5), 2.0: (1.0, 1.0)}


def test_large_observations_make_the_ring_shorter(monkeypatch: pytest.MonkeyPatch) -> None:
    # A decision has 1 + 2 + 1 + 1 + 1 numbers of 4 bytes: 240 bytes are 10 decisions of one environment.
    monkeypatch.setattr(self_imitation, "EPISODES_BYTES", 240)
    monkeypatch.setattr(self_imitation, "SHORTEST", 3)
    lengths = []
    for count in (1, 2, 8):
        memory = SelfImitation(make_policy(), None, seed=0)
        memory.remember(*rollout([[0.0] * count], [[0] * count], [[0.0] * count]))
        assert memory.steps is not None
        lengths.append(len(memory.steps))
    assert lengths == [10, 5, 3]


def test_a_full_memory_keeps_what_is_least_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(self_imitation, "CAPACITY", 3)
    memory = SelfImitation(make_policy(), None, seed=0)
    for returns in ([1.0, 4.0], [2.0, 0.5], [3.0, 1.5]):
        memory.remember(*rollout([returns], [[1, 1]], [[0.0, 0.0]]))
    assert memory.memory is not None
    assert sorted(memory.memory[RETURN].tolist()) == [2.0, 3.0, 4.0]
    memory = SelfImitation(make_policy(), None, seed=0)
    for returns in ([1.0, 2.0, 3.0, 4.0, 5.0], [5.0, 9.0, 8.0, 7.0, 6.0]):  # more than fit
        memory.remember(*rollout([returns], [[1] * 5], [[0.0] * 5]))
    assert memory.memory is not None
    assert sorted(memory.memory[RETURN].tolist()) == [7.0, 8.0, 9.0]


def test_large_observations_make_the_memory_smaller(monkeypatch: pytest.MonkeyPatch) -> None:
    # A decision in memory has 1 + 2 + 1 + 1 numbers of 4 bytes: 45 bytes are 2 decisions.
    monkeypatch.setattr(self_imitation, "MEMORY_BYTES", 45)
    memory = SelfImitation(make_policy(), None, seed=0)
    memory.remember(*rollout([[1.0, 3.0, 2.0]], [[1, 1, 1]], [[0.0, 0.0, 0.0]]))
    assert memory.memory[RETURN].tolist() == [3.0, 2.0]


def test_it_draws_by_what_is_above_the_value_of_now(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    memory = SelfImitation(policy, None, seed=0)
    assert memory.draw(4) is None
    memory.remember(*rollout([[1.0, 3.0]], [[1, 1]], [[0.0, 0.0]]))
    drawn = memory.draw(1000)
    assert drawn is not None
    # Priorities 1 and 3: a quarter and three quarters; 0.05 is 3.6 standard deviations of a mean of 1,000
    assert float((drawn[schema.OBSERVATION] == 1).float().mean()) == pytest.approx(0.75, abs=0.05)
    monkeypatch.setattr(policy, "get_value", lambda td: torch.full((len(td),), 2.0))
    memory.draw(1000)  # what is drawn has the priority of now afterwards: (1 − 2)₊ = 0 and 3 − 2
    assert remembered(memory) == {0.0: (1.0, 0.0), 1.0: (3.0, 1.0)}
    drawn = memory.draw(50)
    assert drawn is not None
    assert bool((drawn[schema.OBSERVATION] == 1).all())
    monkeypatch.setattr(policy, "get_value", lambda td: torch.full((len(td),), 4.0))
    memory.draw(50)
    assert memory.draw(50) is None  # everything is expected


def test_a_draw_can_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    memory = SelfImitation(policy, None, seed=0)
    memory.remember(*rollout([[1.0, 3.0]], [[1, 1]], [[0.0, 0.0]]))
    monkeypatch.setattr(policy, "get_value", lambda td: torch.full((len(td),), 0.5))
    drawn = [memory.draw(20), memory.undraw(), memory.draw(20)]
    assert torch.equal(drawn[0][schema.OBSERVATION], drawn[2][schema.OBSERVATION])
    assert remembered(memory) == {0.0: (1.0, 0.5), 1.0: (3.0, 2.5)}


def test_a_privileged_value_refreshes_all_priorities() -> None:
    space = spaces.Dict({"sensor": SPACE, "place": SPACE})
    config = PolicyConfig(critic_observation=("place",), hidden_sizes=(16, 16), normalize_reward=False)
    torch.manual_seed(0)
    policy = ActorCritic(space, BOX, config)
    memory = SelfImitation(policy, None, seed=0)

    def add() -> None:
        td, steps = rollout([[1.0]], [[1]], [[0.0]])
        td[schema.OBSERVATION] = TensorDict({"sensor": torch.ones(1, 1, 1), "place": torch.ones(1, 1, 1)}, [1, 1])
        memory.remember(td, steps)

    add()
    policy.critic.network.biases[-1].data.fill_(0.25)
    policy.critic.network.weights[-1].data.zero_()
    add()
    assert memory.memory is not None
    assert memory.memory[PRIORITY].tolist() == [0.75, 1.0]  # 1 − ¼ by the value of now; the new one as it was stored


# -- within PPO --------------------------------------------------------------------------------------------------------

RADIUS, POINT = 0.35, 1.6


def guess(policy: ActorCritic, seed: int, version: int, count: int = 256) -> TensorDict:
    """One-step episodes, rewarded by 1 where the action is near a point that depends on the sign of the observation."""
    generator = torch.Generator().manual_seed(seed)
    sign = torch.randint(0, 2, (count, 1), generator=generator) * 2.0 - 1
    td = TensorDict({schema.OBSERVATION: sign}, [count])
    with torch.no_grad():
        policy.act(td)
    hit = (td[schema.ACTION] - POINT * torch.cat([sign, -sign], 1)).norm(dim=1) < RADIUS
    td[schema.NEXT_REWARD] = hit.float()
    td[schema.NEXT_TERMINATED] = torch.ones(count, dtype=torch.bool)
    td[schema.NEXT_TRUNCATED] = torch.zeros(count, dtype=torch.bool)
    td[schema.NEXT_VALUE] = torch.zeros(count)
    td[schema.POLICY_VERSION] = torch.full((count,), version)
    td[schema.STEP_MASK] = torch.ones(count, dtype=torch.bool)
    return td.unsqueeze(0)


def largest_error(coef: float, seed: int) -> float:
    """How far the most likely actions are from the two points after 100 rollouts of 8 episodes."""
    policy = make_policy(log_std_init=-0.7)
    settings = PPOSettings(learning_rate=1e-3, n_epochs=2, batch_size=8, entropy_coef=0.0, self_imitation_coef=coef)
    algorithm = PPO(policy, settings, seed=seed)
    torch.manual_seed(seed)
    for number in range(100):
        algorithm.update(iter([guess(policy, 1000 * seed + number, algorithm.version, count=8)]))
    sign = torch.tensor([[1.0], [-1.0]])
    td = TensorDict({schema.OBSERVATION: sign}, [2])
    with torch.no_grad():
        policy.act(td, deterministic=True)
    return float((td[schema.ACTION] - POINT * torch.cat([sign, -sign], 1)).norm(dim=1).max())


@pytest.mark.parametrize("seed", [1, 2])
def test_rare_successes_are_learned_sooner(seed: int) -> None:
    # At first about 1 of 100 episodes succeeds: PPO sees ten of 800 once, and remembers none.
    assert largest_error(0.0, seed) > 1.0
    assert largest_error(1.0, seed) < RADIUS


def test_the_loss_is_that_of_imitation_times_the_coefficient() -> None:
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(self_imitation_coef=0.5, batch_size=64), seed=0)
    data = algorithm._with_advantages(guess(policy, 0, 0, count=64)).flatten(0, 1)
    plain, metrics = algorithm._loss(policy.evaluate_actions(data), data)
    assert metrics["self_imitation_loss"] == 0  # nothing is remembered yet
    imitated = TensorDict({schema.OBSERVATION: torch.ones(64, 1), UNIT: torch.full((64, 2), 0.25)}, [64])
    with_it = data.copy().set("imitated", imitated)
    loss, metrics = algorithm._loss(policy.evaluate_actions(data), with_it)
    expected = policy.imitation(torch.ones(64, 1), torch.full((1, 64, 2), 0.25), None, "log_prob")["bc_loss"].mean()
    torch.testing.assert_close(loss - plain, 0.5 * expected)
    torch.testing.assert_close(metrics["self_imitation_loss"], expected.detach())


def test_a_warm_up_of_the_value_remembers_and_leaves_the_policy_as_it_is() -> None:
    policy = make_policy(log_std_init=0.0)
    algorithm = PPO(policy, PPOSettings(self_imitation_coef=1.0, value_warmup=1, batch_size=256), seed=0)
    before = policy.evaluate_actions(guess(policy, 5, 0)[0])["log_prob"].detach()
    metrics = algorithm.update(iter([guess(policy, 0, 0)]))
    torch.manual_seed(0)
    assert metrics["self_imitation_size"] > 0
    assert metrics["self_imitation_loss"] == 0
    assert algorithm.self_imitation is not None
    metrics = algorithm.update(iter([guess(policy, 1, 1)]))
    assert metrics["self_imitation_loss"] != 0
    assert before.isfinite().all()


@pytest.mark.parametrize("where", ["between updates", "in an update"])
def test_an_algorithm_resumes_with_it_bit_for_bit(where: str) -> None:
    policy = make_policy(log_std_init=0.0)
    settings = PPOSettings(self_imitation_coef=1.0, batch_size=64, n_epochs=2)
    algorithm = PPO(policy, settings, seed=0)
    algorithm.update(iter([guess(policy, 0, 0)]))
    data = guess(policy, 1, 1)
    if where == "in an update":
        answers = iter([False] * 5 + [True])
        algorithm.should_stop = lambda: next(answers)
        assert algorithm.update(iter([data.clone()])) == {}
        algorithm.should_stop = lambda: False
    saved, weights = copy.deepcopy(algorithm.state_dict()), copy.deepcopy(policy.state_dict())
    again = make_policy(log_std_init=0.0)
    again.load_state_dict(weights)
    resumed = PPO(again, settings, seed=5)
    resumed.load_state_dict(saved)
    found = [one.update(iter([data.clone()])) for one in (algorithm, resumed)]
    assert found[0]["self_imitation_loss"] == found[1]["self_imitation_loss"] != 0
    assert any(not torch.equal(value, policy.state_dict()[name]) for name, value in weights.items())
    for name, value in policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name


class Points(gymnasium.Env):
    """Episodes of 4 steps with an image, a sensor and a stream for critics; the last step's action is the reward."""

    observation_space = spaces.Dict(
        {"camera": spaces.Box(0, 255, (3, 16, 16), np.uint8), "sensor": SPACE, "place": spaces.Box(-9, 9, (2,))}
    )
    action_space = spaces.Box(-2, 2, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.elapsed = 0
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self.elapsed += 1
        ends = self.elapsed == 4
        return self.observe(), float(ends) * float(action[0] > 0), ends, False, {}

    def observe(self) -> dict[str, np.ndarray]:
        sensor, place = np.full(1, self.elapsed, np.float32), np.full(2, self.elapsed, np.float32)
        camera = np.full((3, 16, 16), 20 * self.elapsed, np.uint8)
        camera[:, self.elapsed :, 4:] = 90
        return {"camera": camera, "sensor": sensor, "place": place}


@pytest.mark.parametrize("critic_observation", [(), ("place",)])
def test_a_run_in_two_parts_is_the_run_in_one(tmp_path: Any, critic_observation: tuple[str, ...]) -> None:
    given = {"self_imitation_coef": 1.0, "self_imitation_return": 0.5, "rollout_steps": 6, "tensorboard": False}
    given |= {"critic_observation": critic_observation, "save_freq": 0, "eval_freq": 0, "batch_size": 4}

    def train(name: str, total: int, **more: Any) -> tuple[dict[str, torch.Tensor], Any]:
        config = RLConfig(total_timesteps=total, output_dir=str(tmp_path / name), **given, **more)
        trainer = PPOTrainer(env=Points(), config=config)
        trainer.train()
        weights, memory = copy.deepcopy(trainer.trainer.policy.state_dict()), trainer.trainer.algorithm.self_imitation
        trainer.close()
        return weights, memory.memory

    whole, memory = train("whole", 36)
    train("parts", 18)  # in the middle of an episode
    parts, again = train("parts", 36, resume=str(tmp_path / "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
    assert len(memory) > 4
    assert (memory == again).all()


def test_what_it_cannot_do_is_said_in_one_line() -> None:
    discrete = ActorCritic(SPACE, spaces.Discrete(2), PolicyConfig())
    with pytest.raises(InputError, match="self_imitation_coef: is not for discrete actions; use self_imitation_coef 0"):
        PPO(discrete, PPOSettings(self_imitation_coef=1.0))
    with pytest.raises(InputError, match="self_imitation_coef: is not for a policy with memory"):
        PPO(make_policy(memory_hidden=4), PPOSettings(self_imitation_coef=1.0))
    with pytest.raises(ValueError, match="self_imitation_return: nothing is imitated; give self_imitation_coef"):
        PPOSettings(self_imitation_return=0.5)
    without, with_it = PPO(make_policy(), PPOSettings()), PPO(make_policy(), PPOSettings(self_imitation_coef=1.0))
    assert (without.experience, with_it.experience) == (Rollouts(), Rollouts(consecutive="self_imitation_coef"))
    with pytest.raises(InputError, match="self_imitation_coef was 0 in this run"):
        with_it.load_state_dict(without.state_dict())
