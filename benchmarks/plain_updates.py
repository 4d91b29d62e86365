"""IQL, TD3+BC and CQL as single-file implementations write them, in eager torch; `offline_speed.py` measures them.

Our own restatement of what public code does (network sizes, what is drawn, what is stepped when): a module a network,
an optimizer a network, one `backward` a loss, targets moved parameter by parameter, metrics read at every update.
"""

from __future__ import annotations

import copy
import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributions import Normal, TanhTransform, TransformedDistribution
from torch.nn import functional

BATCH, GAMMA, TAU, WIDTH = 256, 0.99, 0.005, 256
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


class PlainBuffer:
    """One float32 tensor for each of observation, action, reward, next observation and terminal."""

    def __init__(self, columns: Columns) -> None:
        self.columns = [torch.tensor(column, dtype=torch.float32) for column in columns]

    def sample(self) -> list[Tensor]:
        """A batch: NumPy draws the indices, each tensor is indexed with them."""
        indices = np.random.randint(0, len(self.columns[0]), size=BATCH)
        return [column[indices] for column in self.columns]


def mlp(inputs: int, outputs: int, layers: int, last: nn.Module | None = None) -> nn.Sequential:
    """Linear and ReLU, `layers` of them hidden."""
    modules: list[nn.Module] = []
    for layer in range(layers):
        modules += [nn.Linear(WIDTH if layer else inputs, WIDTH), nn.ReLU()]
    modules.append(nn.Linear(WIDTH, outputs))
    return nn.Sequential(*modules, *([] if last is None else [last]))


class Critic(nn.Module):
    """Q(s, a); several actions a state where they come as [B, N, A]."""

    def __init__(self, observation_dim: int, action_dim: int, layers: int) -> None:
        super().__init__()
        self.network = mlp(observation_dim + action_dim, 1, layers)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        if action.ndim == 3:
            observation = observation.unsqueeze(1).repeat_interleave(action.shape[1], 1)
        return self.network(torch.cat([observation, action], -1)).squeeze(-1)


def move(target: nn.Module, source: nn.Module) -> None:
    """The target a step towards its source."""
    for slow, fast in zip(target.parameters(), source.parameters(), strict=True):
        slow.data.copy_((1 - TAU) * slow.data + TAU * fast.data)


def step(loss: Tensor, *optimizers: torch.optim.Optimizer) -> None:
    """Gradients of one loss, and one step of the networks that it is for."""
    for optimizer in optimizers:
        optimizer.zero_grad()
    loss.backward()
    for optimizer in optimizers:
        optimizer.step()


def adam(module: nn.Module, learning_rate: float = 3e-4) -> torch.optim.Adam:
    """An optimizer of a network's own."""
    return torch.optim.Adam(module.parameters(), lr=learning_rate)


class PlainIQL:
    """V, then the twin critics, then the policy, each with its backward and its step; 2 hidden layers of 256."""

    def __init__(self, columns: Columns) -> None:
        self.buffer = PlainBuffer(columns)
        observation_dim, action_dim = columns[0].shape[1], columns[1].shape[1]
        self.critics = nn.ModuleList([Critic(observation_dim, action_dim, 2) for _ in range(2)])
        self.targets = copy.deepcopy(self.critics).requires_grad_(False)
        self.value = mlp(observation_dim, 1, 2)
        self.mean = mlp(observation_dim, action_dim, 2, nn.Tanh())
        self.mean.register_parameter("log_std", nn.Parameter(torch.zeros(action_dim)))
        self.critic_optimizer, self.value_optimizer = adam(self.critics), adam(self.value)
        self.policy_optimizer = adam(self.mean)
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.policy_optimizer, 1_000_000)

    def update(self) -> dict[str, float]:
        """One update, its batch included."""
        observation, action, reward, next_observation, terminal = self.buffer.sample()
        with torch.no_grad():
            next_value = self.value(next_observation).squeeze(-1)
            target = torch.min(*(critic(observation, action) for critic in self.targets))
        advantage = target - self.value(observation).squeeze(-1)
        value_loss = (torch.abs(0.7 - (advantage < 0).float()) * advantage**2).mean()
        step(value_loss, self.value_optimizer)

        backup = reward.squeeze(-1) + (1.0 - terminal.squeeze(-1)) * GAMMA * next_value
        values = [critic(observation, action) for critic in self.critics]
        critic_loss = sum(functional.mse_loss(value, backup) for value in values) / len(values)
        step(critic_loss, self.critic_optimizer)
        move(self.targets, self.critics)

        weight = torch.exp(3.0 * advantage.detach()).clamp(max=100.0)
        deviation = torch.exp(self.mean.log_std.clamp(-20.0, 2.0))
        log_prob = Normal(self.mean(observation), deviation).log_prob(action).sum(-1)
        policy_loss = -(weight * log_prob).mean()
        step(policy_loss, self.policy_optimizer)
        self.schedule.step()
        return {"v": value_loss.item(), "q": critic_loss.item(), "policy": policy_loss.item()}


class PlainTD3BC:
    """Two critics with an optimizer each, the policy every second update; 2 hidden layers of 256."""

    def __init__(self, columns: Columns) -> None:
        self.buffer = PlainBuffer(columns)
        observation_dim, action_dim = columns[0].shape[1], columns[1].shape[1]
        self.actor = mlp(observation_dim, action_dim, 2, nn.Tanh())
        self.critic_1, self.critic_2 = (Critic(observation_dim, action_dim, 2) for _ in range(2))
        self.networks = (self.actor, self.critic_1, self.critic_2)
        self.targets = copy.deepcopy(self.networks)
        self.optimizers = [adam(network) for network in self.networks]
        self.count = 0

    def update(self) -> dict[str, float]:
        """One update, its batch included."""
        self.count += 1
        observation, action, reward, next_observation, terminal = self.buffer.sample()
        with torch.no_grad():
            noise = (torch.randn_like(action) * 0.2).clamp(-0.5, 0.5)
            next_action = (self.targets[0](next_observation) + noise).clamp(-1.0, 1.0)
            next_value = torch.min(*(target(next_observation, next_action) for target in self.targets[1:]))
            backup = reward.squeeze(-1) + (1.0 - terminal.squeeze(-1)) * GAMMA * next_value
        losses = [functional.mse_loss(critic(observation, action), backup) for critic in self.networks[1:]]
        critic_loss = losses[0] + losses[1]
        step(critic_loss, *self.optimizers[1:])
        metrics = {"q": critic_loss.item()}
        if self.count % 2 == 0:
            chosen = self.actor(observation)
            value = self.critic_1(observation, chosen)
            policy_loss = -2.5 / value.abs().mean().detach() * value.mean() + functional.mse_loss(chosen, action)
            step(policy_loss, self.optimizers[0])
            metrics["policy"] = policy_loss.item()
            for target, network in zip(self.targets, self.networks, strict=True):
                move(target, network)
        return metrics


class PlainCQL:
    """SAC with the penalty over 10 random, 10 current and 10 next actions; 3 hidden layers of 256 throughout."""

    SAMPLES = 10

    def __init__(self, columns: Columns) -> None:
        self.buffer = PlainBuffer(columns)
        observation_dim, self.action_dim = columns[0].shape[1], columns[1].shape[1]
        self.actor = mlp(observation_dim, 2 * self.action_dim, 3)
        self.critics = [Critic(observation_dim, self.action_dim, 3) for _ in range(2)]
        self.targets = copy.deepcopy(self.critics)
        self.log_alpha = nn.Parameter(torch.zeros(()))
        self.alpha_optimizer = torch.optim.Adam([self.log_alpha], lr=3e-5)
        self.actor_optimizer = adam(self.actor, 3e-5)
        self.critic_optimizers = [adam(critic) for critic in self.critics]

    def draw(self, observation: Tensor, count: int | None = None) -> tuple[Tensor, Tensor]:
        """Actions of the policy and their log-densities; each of `count` goes through the network."""
        if count is not None:
            observation = observation.unsqueeze(1).repeat_interleave(count, 1)
        mean, log_std = self.actor(observation).split(self.action_dim, -1)
        gaussian = Normal(mean, torch.exp((log_std - 1.0).clamp(-20.0, 2.0)))
        distribution = TransformedDistribution(gaussian, TanhTransform(cache_size=1))
        action = distribution.rsample()
        return action, distribution.log_prob(action).sum(-1)

    def update(self) -> dict[str, float]:
        """One update, its batch included."""
        observation, action, reward, next_observation, terminal = self.buffer.sample()
        chosen, log_prob = self.draw(observation)
        alpha_loss = -(self.log_alpha * (log_prob - self.action_dim).detach()).mean()
        alpha = self.log_alpha.exp()
        policy_loss = (alpha * log_prob - torch.min(*(critic(observation, chosen) for critic in self.critics))).mean()
        critic_loss, metrics = self.critic_loss(observation, action, reward, next_observation, terminal)
        metrics |= {"policy": policy_loss.item(), "alpha": alpha.item(), "entropy": -log_prob.mean().item()}
        step(alpha_loss, self.alpha_optimizer)
        step(policy_loss, self.actor_optimizer)
        step(critic_loss, *self.critic_optimizers)
        for target, critic in zip(self.targets, self.critics, strict=True):
            move(target, critic)
        return metrics

    def critic_loss(
        self, observation: Tensor, action: Tensor, reward: Tensor, next_observation: Tensor, terminal: Tensor
    ) -> tuple[Tensor, dict[str, float]]:
        """The TD error and the penalty, critic by critic."""
        values = [critic(observation, action) for critic in self.critics]
        next_action, _ = self.draw(next_observation)
        next_value = torch.min(*(target(next_observation, next_action) for target in self.targets)).detach()
        backup = reward.squeeze(-1) + (1.0 - terminal.squeeze(-1)) * GAMMA * next_value
        uniform = action.new_empty(BATCH, self.SAMPLES, self.action_dim).uniform_(-1, 1)
        current, current_log_prob = (part.detach() for part in self.draw(observation, self.SAMPLES))
        following, following_log_prob = (part.detach() for part in self.draw(next_observation, self.SAMPLES))
        total, metrics = torch.zeros(()), {}
        for index, (critic, value) in enumerate(zip(self.critics, values, strict=True)):
            parts = [critic(observation, uniform) + self.action_dim * math.log(2.0)]
            parts.append(critic(observation, following) - following_log_prob)
            parts.append(critic(observation, current) - current_log_prob)
            gap = (torch.logsumexp(torch.cat(parts, 1), 1) - value).mean()
            td_loss = functional.mse_loss(value, backup)
            total = total + td_loss + 10.0 * gap
            metrics |= {
                f"q_{index}": td_loss.item(),
                f"gap_{index}": gap.item(),
                f"mean_q_{index}": value.mean().item(),
            }
            metrics |= {f"part_{index}_{number}": part.mean().item() for number, part in enumerate(parts)}
        return total, metrics


PLAIN = {"iql": PlainIQL, "td3-bc": PlainTD3BC, "cql": PlainCQL}
