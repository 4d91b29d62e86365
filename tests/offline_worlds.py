"""What the tests of the offline algorithms share: a task where cloning fails, and networks with known outputs."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import torch
from gymnasium import spaces
from policies import actor_policy
from tensordict import TensorDict
from torch import Tensor

from deft import schema
from deft.algorithms.off_policy import OffPolicy
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import VectorDataset, box
from deft.data.replay import TransitionTable
from deft.models.actor_critic import ActorCritic
from deft.models.mlp import BatchedMLP
from deft.runs.compute import torch_threads

ACTIONS = box(1, -1.0, 1.0)


class TwoStep(gymnasium.Env):
    """The first of two actions decides the reward of the second step: 1 where it is positive, else 0.

    Observation: [step, sign of the first action].
    """

    def __init__(self, broken: bool = False) -> None:
        self.observation_space, self.action_space = box(2), ACTIONS
        if broken:
            raise ValueError("no display")

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps, self.sign = 0, 0.0
        return np.zeros(2, np.float32), {}

    def step(self, action: np.ndarray) -> Any:
        if self.steps == 0:
            self.sign = 1.0 if action[0] > 0 else -1.0
        self.steps += 1
        reward = float(self.sign > 0) if self.steps == 2 else 0.0
        return np.array([self.steps, self.sign], np.float32), reward, self.steps == 2, False, {}


def two_step_dataset(num_episodes: int = 200, seed: int = 0, **options: Any) -> VectorDataset:
    """3 of 10 episodes act well (about 0.6), the others badly (about −0.6): cloning finds their mean, −0.24."""
    generator = np.random.default_rng(seed)
    table = TransitionTable([2] * num_episodes, 2, 1)
    sign = np.where(np.arange(num_episodes) % 10 < 3, 1.0, -1.0)
    rows = table.rows.view(num_episodes, 3, 5).numpy()  # observation (2), action, reward, terminated
    rows[:, 1:, 0], rows[:, 1:, 1] = [1, 2], sign[:, None]
    rows[:, :2, 2] = generator.normal(0.0, 0.1, (num_episodes, 2))
    rows[:, 0, 2] += 0.6 * sign
    rows[:, 1, 3], rows[:, 1, 4] = sign > 0, 1.0
    options = {"env_id": None, "reference_returns": (0.0, 1.0), **options}
    return VectorDataset(table, "two-step", box(2), ACTIONS, **options)


def learned_actions(algorithm: OffPolicy, updates: int = 300, batch_size: int = 64, seed: int = 0) -> list[float]:
    """Train on the two-step dataset; then the first action that each member takes without exploring."""
    dataset = two_step_dataset()
    sampler = algorithm.make_sampler(dataset, seed, torch.device("cpu"), 0)
    algorithm.prepare(dataset, sampler, fresh=True)
    with torch_threads(1, small_matrices=True):
        for update in range(updates):
            algorithm.progress = update / updates
            algorithm.update(sampler.batches(batch_size))
    policy = algorithm.policy
    assert isinstance(policy, ActorCritic)
    return [first_action(policy.member(index)) for index in range(policy.num_members)]


@torch.no_grad()
def first_action(policy: ActorCritic) -> float:
    return float(policy.act(schema_row(torch.zeros(1, 2)), deterministic=True)[schema.ACTION])


def schema_row(observation: Tensor) -> TensorDict:
    return TensorDict({schema.OBSERVATION: observation}, batch_size=[len(observation)])


def batch_of(observation: Any, action: Any, reward: Any, next_observation: Any, terminated: Any) -> dict[Any, Tensor]:
    """A batch of one-dimensional observations and actions."""
    return {
        schema.OBSERVATION: torch.tensor(observation)[:, None],
        schema.ACTION: torch.tensor(action)[:, None],
        schema.NEXT_REWARD: torch.tensor(reward),
        schema.NEXT_OBSERVATION: torch.tensor(next_observation)[:, None],
        schema.NEXT_TERMINATED: torch.tensor(terminated),
    }


def random_batch(
    batch_size: int = 8, observation_dim: int = 3, action_dim: int = 2, members: int = 1
) -> dict[Any, Tensor]:
    """Random transitions, [members, B, …] with several members; a third of them terminate."""
    shape = (batch_size,) if members == 1 else (members, batch_size)
    return {
        schema.OBSERVATION: torch.randn(*shape, observation_dim),
        schema.ACTION: torch.rand(*shape, action_dim) * 2 - 1,
        schema.NEXT_REWARD: torch.randn(shape),
        schema.NEXT_OBSERVATION: torch.randn(*shape, observation_dim),
        schema.NEXT_TERMINATED: (torch.rand(shape) < 1 / 3).float(),
        schema.NEXT_ACTION: torch.rand(*shape, action_dim) * 2 - 1,
        schema.NEXT_STEP_MASK: torch.rand(*shape, 1) < 0.8,
    }


@torch.no_grad()
def make_linear(network: BatchedMLP, which: int, slopes: list[list[float]], bias: list[float]) -> None:
    """Network `which` of the batch becomes x ↦ x · slopes + bias, exactly: x = relu(x) − relu(−x) in every layer."""
    for parameter in (*network.weights, *network.biases):
        parameter[which] = 0.0
    inputs = len(slopes)
    pairs = torch.tensor([[1.0], [-1.0]])  # units 2j and 2j + 1 hold relu(x_j) and relu(−x_j)
    for j in range(inputs):
        network.weights[0][which, j, 2 * j : 2 * j + 2] = pairs[:, 0]
        for layer in list(network.weights)[1:-1]:
            layer[which, 2 * j : 2 * j + 2, 2 * j : 2 * j + 2] = pairs @ pairs.T
        network.weights[-1][which, 2 * j : 2 * j + 2] = pairs @ torch.tensor([slopes[j]])
    network.biases[-1][which, 0] = torch.tensor(bias)


def set_known_networks(algorithm: Any) -> None:
    """Q = (s + 2a, 4a), Q̄ = (s + a, 4); π(s) = tanh(0) = 0 and π̄(s) = tanh(20) = 1, of TD3 and its relatives.

    The critics' learning rate is tiny, so that the policy is trained on these values.
    """
    for network, which, slopes, bias in (
        (algorithm.critics.online, 0, [[1.0], [2.0]], 0.0),
        (algorithm.critics.online, 1, [[0.0], [4.0]], 0.0),
        (algorithm.critics.target, 0, [[1.0], [1.0]], 0.0),
        (algorithm.critics.target, 1, [[0.0], [0.0]], 4.0),
        (algorithm.policy.actor, 0, [[0.0]], 0.0),
        (algorithm.target_policy.actor, 0, [[0.0]], 20.0),
    ):
        make_linear(network, which, slopes, [bias])
    algorithm.critic_optimizer.param_groups[0]["lr"].fill_(1e-12)


def small_actor(
    observation_dim: int = 1,
    action_dim: int = 1,
    distribution: str = "gaussian",
    members: int = 1,
    action_space: spaces.Box | None = None,
    **config: Any,
) -> ActorCritic:
    settings = DatasetPolicyConfig(**{"hidden_dim": 16, **config})
    space = action_space or box(action_dim, -1.0, 1.0)
    return actor_policy(box(observation_dim), space, settings, distribution, members)


@torch.no_grad()
def alone(algorithm: Any, index: int) -> Any:
    """One member of a batched algorithm, not yet trained, as an algorithm of its own with copies of its weights."""
    single = type(algorithm)(algorithm.policy.member(index), algorithm.settings)
    count = algorithm.settings.num_critics
    part = slice(index * count, (index + 1) * count)
    for own, every in zip(single.critics.parameters(), algorithm.critics.parameters(), strict=True):
        own.copy_(every[part])
    return single


def assert_members_train_as_if_alone(algorithm: Any, updates: int = 6) -> None:
    """Each member of a batched update ends with the weights that it would have alone, on the same batches."""
    members, count = algorithm.policy.num_members, algorithm.settings.num_critics
    singles = [alone(algorithm, index) for index in range(members)]
    start = [parameter.clone() for parameter in algorithm.policy.actor_parameters()]
    for update in range(updates):
        batch = random_batch(members=members)
        algorithm.progress = update / updates
        algorithm.update(iter([batch]))
        for index, single in enumerate(singles):
            single.progress = update / updates
            single.update(iter([{name: value[index] for name, value in batch.items()}]))
    assert any(not torch.equal(a, b) for a, b in zip(start, algorithm.policy.actor_parameters(), strict=True))
    for index, single in enumerate(singles):
        member = algorithm.policy.member(index).state_dict()
        for name, value in single.policy.state_dict().items():
            torch.testing.assert_close(value, member[name], atol=1e-6, rtol=1e-6, msg=f"{name} of member {index}")
        part = slice(index * count, (index + 1) * count)
        for own, every in zip(single.critics.parameters(), algorithm.critics.parameters(), strict=True):
            torch.testing.assert_close(own, every[part], atol=1e-6, rtol=1e-6)
