"""What holds for every algorithm: which loss trains a shared encoder."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from deft import schema
from deft.algorithms.cql import CQL
from deft.algorithms.grpo import GRPO
from deft.algorithms.iql import IQL
from deft.algorithms.ppo import PPO
from deft.algorithms.sac import SAC
from deft.algorithms.sft import SFT
from deft.algorithms.td3_bc import TD3BC
from deft.config.algorithm_settings import GRPOSettings, PPOSettings, SFTSettings
from deft.config.settings import ActorConfig
from deft.models.actor import Actor

ACTIONS = spaces.Box(-1, 1, (2,), np.float32)
SIDE = 16
STREAMS = spaces.Dict(
    {"camera": spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8), "instruction": spaces.Box(0, 255, (8,), np.uint8)}
)
OFF_POLICY = (IQL, CQL, TD3BC, SAC)


def spots(count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Images [B, 3, 16, 16] of one bright spot, and where it is, [B, 2] in [-1, 1]."""
    place = torch.rand(count, 2, generator=generator) * 2 - 1
    line = torch.linspace(-1, 1, SIDE)
    distance = (line[:, None] - place[:, :1, None]).square() + (line - place[:, 1:, None]).square()
    return (255 * torch.exp(-distance / 0.05)).to(torch.uint8).unsqueeze(1).expand(-1, 3, -1, -1).contiguous(), place


def seen(count: int) -> TensorDict:
    """Random observations of `STREAMS`."""
    words = torch.randint(97, 122, (count, 8), dtype=torch.uint8)
    return TensorDict({"camera": spots(count)[0], "instruction": words}, [count])


def make_actor(distribution: str = "gaussian") -> Actor:
    torch.manual_seed(0)
    return Actor(STREAMS, ACTIONS, ActorConfig(hidden_dim=16, encoder_dim=16), distribution)


def transitions(count: int = 8) -> dict[Any, Any]:
    return {
        schema.OBSERVATION: dict(seen(count).items()),
        schema.ACTION: torch.rand(count, 2) * 2 - 1,
        schema.NEXT_REWARD: torch.randn(count),
        schema.NEXT_OBSERVATION: dict(seen(count).items()),
        schema.NEXT_TERMINATED: torch.zeros(count),
    }


@torch.no_grad()
def played(policy: Any, steps: int = 4, num_envs: int = 4) -> TensorDict:
    """A rollout [T, N] that the policy acted, in groups of two for GRPO."""
    rows = []
    for _ in range(steps):
        td = policy.act(TensorDict({schema.OBSERVATION: seen(num_envs)}, [num_envs]))
        td[schema.NEXT_REWARD], td[schema.NEXT_VALUE] = torch.rand(num_envs), torch.rand(num_envs)
        for key in (schema.NEXT_TERMINATED, schema.NEXT_TRUNCATED):
            td[key] = torch.zeros(num_envs, dtype=torch.bool)
        td[schema.POLICY_VERSION] = torch.zeros(num_envs, dtype=torch.int64)
        td[schema.STEP_MASK] = torch.ones(num_envs, dtype=torch.bool)
        rows.append(td)
    return torch.stack(rows)


def record_actor_inputs(policy: Actor) -> list[bool]:
    """Whether each call of the actor network, while gradients are recorded, gets features with a gradient."""
    calls: list[bool] = []
    forward = policy.actor.forward

    def recording(features: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled():
            calls.append(features.requires_grad)
        return forward(features, *rest)

    policy.actor.forward = recording  # type: ignore[method-assign]
    return calls


def assert_every_encoder_weight_moves(policy: Actor, before: dict[str, Tensor]) -> None:
    names = [name for name, _ in policy.named_parameters() if name.startswith("encoder.")]
    assert {name.split(".")[2] for name in names} == {"camera", "instruction"}
    still = [name for name in names if torch.equal(policy.state_dict()[name], before[name])]
    assert still == []


# -- the encoder that policy and critics share -------------------------------------------------------------------------


@pytest.mark.parametrize("kind", OFF_POLICY)
def test_critics_train_the_encoder_and_the_policys_gradient_stops_there(kind):
    policy = make_actor(kind.distribution)
    algorithm = kind(policy)
    own = {id(parameter) for parameter in policy.encoder.parameters()}
    listed = [
        id(parameter)
        for optimizer in (algorithm.actor_optimizer, algorithm.critic_optimizer)
        for parameter in optimizer.parameters
    ]
    assert sorted(identity for identity in listed if identity in own) == sorted(own)  # each of them once
    calls = record_actor_inputs(policy)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    for _ in range(2):  # the policy of TD3+BC moves in the second
        algorithm.update(iter([transitions()]))
    assert calls
    assert not any(calls)
    assert_every_encoder_weight_moves(policy, before)


def test_sft_trains_the_encoder():
    policy = make_actor()
    algorithm = SFT(policy)
    own = {id(parameter) for parameter in policy.encoder.parameters()}
    listed = [id(parameter) for parameter in algorithm.actor_optimizer.parameters]
    assert sorted(identity for identity in listed if identity in own) == sorted(own)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    algorithm.update(iter([transitions()]))
    assert_every_encoder_weight_moves(policy, before)


@pytest.mark.parametrize("distribution", ["gaussian", "tanh_gaussian"])
@pytest.mark.parametrize("kind", [PPO, GRPO])
def test_the_policy_loss_of_ppo_and_grpo_trains_the_encoder(kind, distribution):
    policy = make_actor(distribution)
    alone = {"batch_size": 16, "entropy_coef": 0.0}  # and no loss of the value
    settings: Any = (
        PPOSettings(**alone, value_coef=0.0) if kind is PPO else GRPOSettings(**alone, kl_coef=0.0, group_size=2)
    )
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    kind(policy, settings).update(iter([played(policy)]))
    assert_every_encoder_weight_moves(policy, before)


def test_sft_learns_to_see():
    """The action is where the spot is. With the random encoder as it is the error stays near 0.03."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    space = spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8)
    policy = Actor(space, ACTIONS, ActorConfig(hidden_dim=32, encoder_dim=32))
    algorithm = SFT(policy, SFTSettings(loss="mse", learning_rate=2e-3))
    for _ in range(200):
        images, place = spots(32, generator)
        algorithm.step({schema.OBSERVATION: images, schema.ACTION: 0.8 * place})
    images, place = spots(256, generator)
    with torch.no_grad():
        error = (policy.mean(policy.encode(images))[0] - 0.8 * place).square().mean()
    assert float(error) < 0.01
