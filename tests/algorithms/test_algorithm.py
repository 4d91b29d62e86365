"""What holds for every algorithm: which loss trains a shared encoder, what copies of a policy see, which statistics
change, and what a warm-up leaves as it is."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import random_batch, small_actor
from policies import actor_policy, vla_policy
from tensordict import TensorDict
from torch import Tensor
from vla_worlds import PlainModel

from deft import schema
from deft.algorithms.cal_ql import CalQL
from deft.algorithms.cql import CQL
from deft.algorithms.dagger import DAgger
from deft.algorithms.grpo import GRPO
from deft.algorithms.iql import IQL
from deft.algorithms.ppo import PPO
from deft.algorithms.rebrac import ReBRAC
from deft.algorithms.sac import SAC
from deft.algorithms.sft import SFT
from deft.algorithms.td3_bc import TD3BC
from deft.config.algorithm_settings import ALGORITHM_SETTINGS, GRPOSettings, PPOSettings, SACSettings, SFTSettings
from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.models.normalization import normalizers
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel

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


def make_actor(distribution: str = "gaussian") -> ActorCritic:
    torch.manual_seed(0)
    return actor_policy(STREAMS, ACTIONS, DatasetPolicyConfig(hidden_dim=16, encoder_dim=16), distribution)


def transitions(count: int = 8, look: Callable[[int], TensorDict] = seen) -> dict[Any, Any]:
    return {
        schema.OBSERVATION: dict(look(count).items()),
        schema.ACTION: torch.rand(count, 2) * 2 - 1,
        schema.NEXT_REWARD: torch.randn(count),
        schema.NEXT_OBSERVATION: dict(look(count).items()),
        schema.NEXT_TERMINATED: torch.zeros(count),
    }


@torch.no_grad()
def played(
    policy: Any, look: Callable[[int], TensorDict] = seen, steps: int = 4, num_envs: int = 4, version: int = 0
) -> TensorDict:
    """A rollout [T, N] that the policy acted on random observations."""
    rows, memory = [], policy.initial_memory(num_envs)
    for _ in range(steps):
        td = TensorDict({schema.OBSERVATION: look(num_envs)}, [num_envs])
        if memory is not None:
            td[schema.MEMORY] = memory
        policy.act(td)
        if memory is not None:
            memory = td[schema.NEXT_MEMORY]
        td = td.exclude(schema.NEXT)
        td[schema.NEXT_REWARD], td[schema.NEXT_VALUE] = torch.rand(num_envs), torch.rand(num_envs)
        for key in (schema.NEXT_TERMINATED, schema.NEXT_TRUNCATED):
            td[key] = torch.zeros(num_envs, dtype=torch.bool)
        td[schema.POLICY_VERSION] = torch.full((num_envs,), version)
        td[schema.STEP_MASK] = torch.ones(num_envs, dtype=torch.bool)
        rows.append(td)
    return torch.stack(rows)


def record_actor_inputs(policy: ActorCritic) -> list[bool]:
    """Whether each call of the actor network, while gradients are recorded, gets features with a gradient."""
    calls: list[bool] = []
    forward = policy.actor.forward

    def recording(features: Tensor, *rest: Any) -> Tensor:
        if torch.is_grad_enabled():
            calls.append(features.requires_grad)
        return forward(features, *rest)

    policy.actor.forward = recording  # type: ignore[method-assign]
    return calls


def assert_every_encoder_weight_moves(policy: ActorCritic, before: dict[str, Tensor]) -> None:
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
    policy = actor_policy(space, ACTIONS, DatasetPolicyConfig(hidden_dim=32, encoder_dim=32))
    algorithm = SFT(policy, SFTSettings(loss="mse", learning_rate=2e-3))
    for _ in range(200):
        images, place = spots(32, generator)
        algorithm.step({schema.OBSERVATION: images, schema.ACTION: 0.8 * place})
    images, place = spots(256, generator)
    with torch.no_grad():
        error = (policy.mean(policy.encode(images))[0] - 0.8 * place).square().mean()
    assert float(error) < 0.01


# -- copies of the policy ----------------------------------------------------------------------------------------------

ROBOT = spaces.Dict({**STREAMS.spaces, "proprio": spaces.Box(-99, 99, (3,), np.float32)})
KEYS: dict[str, Any] = {"image_keys": ["camera"], "image_size": SIDE, "proprio_dim": 3, "action_dim": 2}


def felt(count: int) -> TensorDict:
    """Random observations of `ROBOT`, with a proprioception that is far from 0."""
    return seen(count).set("proprio", 20.0 * torch.randn(count, 3) + 50.0)


def make_robot_policy(kind: str) -> Any:
    torch.manual_seed(0)
    config = DatasetPolicyConfig(hidden_dim=16, encoder_dim=16)
    if kind == "actor-critic":
        return ActorCritic(ROBOT, ACTIONS, PolicyConfig(hidden_sizes=[16], encoder_dim=16))
    if kind == "vla-policy":
        return VLAPolicy(TinyVLAModel(**KEYS, chunk_length=1, width=16, proprio_key="proprio"))
    if kind == "actor":
        return actor_policy(ROBOT, ACTIONS, config, "tanh_gaussian")
    if kind == "vla-tiny":
        model: Any = TinyVLAModel(**KEYS, chunk_length=1, width=16, proprio_key="proprio")
    else:
        model = GPTVLAModel(**KEYS)
    return vla_policy(model, ROBOT, ACTIONS, config)


WITH_COPIES: dict[str, Any] = {
    "target_policy": TD3BC,
    "anchor": lambda policy: SAC(policy, SACSettings(anchor_coef=1.0)),
    "reference": lambda policy: GRPO(policy, GRPOSettings(group_size=2, kl_coef=0.1)),
}


def fit(algorithm: Any) -> None:
    """Fit the statistics as training does: to a dataset, to the first steps, or after an update."""
    if isinstance(algorithm, GRPO):
        rollout = played(algorithm.policy, felt)
        rollout[schema.NEXT_REWARD] = torch.zeros(4, 4)  # groups without a spread: no gradient step
        algorithm.update(iter([rollout]))
    elif isinstance(algorithm, SAC):
        algorithm.observe({schema.OBSERVATION: felt(16)} for _ in range(2))
    else:
        algorithm.prepare(None, SimpleNamespace(observations=lambda: iter([felt(16)])), fresh=True)


@pytest.mark.parametrize("kind", ["actor", "vla-tiny", "gpt-vla"])
@pytest.mark.parametrize("name", WITH_COPIES)
def test_a_copy_normalises_as_the_policy_does_also_where_it_was_made_before(name, kind):
    policy = make_robot_policy(kind)
    algorithm = WITH_COPIES[name](policy)
    (copied,) = algorithm._copies()
    assert copied is getattr(algorithm, name)
    rows = TensorDict({schema.OBSERVATION: felt(8)}, [8])
    fit(algorithm)
    own = dict(policy.named_buffers())
    assert any(float(value) > 0 for key, value in own.items() if key.endswith("count"))
    for key, value in copied.named_buffers():
        assert torch.equal(value, own[key]), key
    # The weights are the same, so the actions are, but for rounding: matrices lie elsewhere in memory.
    with torch.no_grad():
        actions = [one.act(rows.clone(), deterministic=True)[schema.ACTION] for one in (policy, copied)]
    torch.testing.assert_close(*actions, rtol=0, atol=1e-6)


# -- statistics of a policy that is trained further --------------------------------------------------------------------

POLICIES = ["actor", "actor-critic", "vla-tiny", "vla-policy"]


def elsewhere(count: int) -> TensorDict:
    """Observations of `ROBOT` in another place than `felt`."""
    return seen(count).set("proprio", torch.randn(count, 3) + 90.0)


def make_online(kind: Any, policy: Any, learning_rate: float = 1e-3) -> Any:
    if kind is PPO:
        return PPO(policy, PPOSettings(learning_rate=learning_rate, batch_size=16))
    return GRPO(policy, GRPOSettings(learning_rate=learning_rate, batch_size=16, group_size=2))


def statistics(policy: Any) -> dict[str, Tensor]:
    """All buffers of the normalisers of observations."""
    return {
        f"{name}.{key}": value.clone()
        for name, part in normalizers(policy)
        if not name.startswith("reward_normalizer")
        for key, value in part.named_buffers()
    }


def assert_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name, value in first.items() if not torch.equal(value, second[name])] == []


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", [PPO, GRPO])
def test_a_trained_policy_keeps_its_statistics_and_moves_by_its_gradient_alone(kind, name):
    policy = make_robot_policy(name)
    policy.observe({schema.OBSERVATION: felt(64)})  # as `prepare` does with a dataset, or a run before did
    before = statistics(policy)
    algorithm = make_online(kind, policy, learning_rate=1e-12)  # weights do not move, so nothing may
    rollout = played(policy, elsewhere)
    metrics = algorithm.update(iter([rollout]))
    assert_equal(statistics(policy), before)
    with torch.no_grad():
        after = policy.evaluate_actions(rollout.flatten(0, 1))["log_prob"]
    torch.testing.assert_close(after, rollout[schema.LOG_PROB].flatten(), rtol=0, atol=1e-4)
    assert float(metrics["approx_kl"]) == pytest.approx(0.0, abs=1e-6)


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("kind", [PPO, GRPO])
@pytest.mark.parametrize("trained", [False, True])
def test_a_resumed_run_treats_the_statistics_as_it_did_before(kind, name, trained):
    policy = make_robot_policy(name)
    if trained:
        policy.observe({schema.OBSERVATION: felt(64)})
    algorithm = make_online(kind, policy)
    algorithm.update(iter([played(policy, elsewhere)]))
    weights, state = policy.state_dict(), algorithm.state_dict()
    assert all(
        float(part) == (64 if trained else 16) for key, part in statistics(policy).items() if "count" in key and part
    )
    resumed = make_robot_policy(name)
    again = make_online(kind, resumed)
    resumed.load_state_dict(weights)
    again.load_state_dict(state)
    before = statistics(resumed)
    again.update(iter([played(resumed, elsewhere)]))
    if trained:
        assert_equal(statistics(resumed), before)
    else:  # 16 more of each stream that it normalises
        counts = {key: float(part) for key, part in statistics(resumed).items() if key.endswith("count") and part}
        assert set(counts.values()) == {32.0}


# -- warm-up of the value, and of critics ------------------------------------------------------------------------------

VECTOR = spaces.Box(-9, 9, (3,), np.float32)
IMAGE = spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8)


def vectors(count: int) -> Tensor:
    return 2.0 * torch.randn(count, 3) + 5.0


def make_warmed(name: str) -> tuple[Any, Callable[[int], Any]]:
    """A policy whose value shares something with its actions, and what it sees."""
    torch.manual_seed(0)
    kind, _, option = name.partition(" ")
    if kind == "actor-critic":
        space, look = (VECTOR, vectors) if "vectors" in option else (IMAGE, lambda count: spots(count)[0])
        memory = 8 if "recurrent" in option else 0
        return ActorCritic(space, ACTIONS, PolicyConfig(hidden_sizes=[16], encoder_dim=16, memory_hidden=memory)), look
    if kind == "vla-tiny":
        made = {"head": option or "gaussian", "value_gradient": True, "chunk_length": 2, "width": 16}
        return VLAPolicy(TinyVLAModel(**KEYS, **made, proprio_key="proprio")), felt
    return (VLAPolicy(GPTVLAModel(**KEYS)) if kind == "gpt-vla" else make_robot_policy(option)), felt


WARMED = [
    "actor-critic vectors",
    "actor-critic images",
    "actor-critic recurrent vectors",
    "actor-critic recurrent images",
    "gpt-vla",
    "vla-tiny",
    "vla-tiny token",
    "vla-tiny flow",
    "robot actor",
    "robot gpt-vla",
    "robot vla-tiny",
]


@pytest.mark.parametrize("name", WARMED)
def test_warm_up_of_the_value_leaves_every_action_as_it_is(name):
    policy, look = make_warmed(name)
    algorithm = PPO(policy, PPOSettings(value_warmup=2, batch_size=16, n_epochs=2, learning_rate=1e-2))
    fixed = played(policy, look)
    rows = fixed if policy.recurrent else fixed.flatten(0, 1)

    def scored() -> dict[str, Tensor]:
        with torch.no_grad():
            return {key: value.clone() for key, value in policy.evaluate_actions(rows).items()}

    first = scored()
    for version in range(2):
        metrics = algorithm.update(iter([played(policy, look, version=version)]))
        assert float(metrics["approx_kl"]) == pytest.approx(0.0, abs=1e-6)
    second = scored()
    assert torch.equal(second["log_prob"], first["log_prob"])
    assert torch.equal(second["entropy"], first["entropy"])
    assert not torch.equal(second["value"], first["value"])
    algorithm.update(iter([played(policy, look, version=2)]))
    assert not torch.equal(scored()["log_prob"], first["log_prob"])


def test_a_value_with_statistics_of_its_own_takes_them_in_while_it_warms_up():
    policy = make_robot_policy("gpt-vla")  # the model has none: they are those of the encoder under V
    PPO(policy, PPOSettings(value_warmup=1, batch_size=16)).update(iter([played(policy, felt)]))
    assert {float(part.count) for _, part in normalizers(policy)} == {16.0}


def test_a_model_that_does_not_name_its_value_is_not_warmed_up():
    policy = VLAPolicy(PlainModel())
    PPO(policy)
    with pytest.raises(InputError, match=r"value_warmup: PlainModel .*value_parameters\(\)"):
        PPO(policy, PPOSettings(value_warmup=1))


@pytest.mark.parametrize("name", ["actor", "gpt-vla"])
def test_warm_up_of_critics_leaves_every_action_as_it_is(name):
    policy = make_robot_policy(name)
    algorithm = SAC(policy, SACSettings(critic_warmup=2, weight_decay=0.1, learning_rate=1e-2))
    rows = played(policy, felt).flatten(0, 1)
    with torch.no_grad():
        before = policy.evaluate_actions(rows)["log_prob"]
    encoder = next(policy.encoder_parameters()).clone()
    critics = next(algorithm.critics.parameters()).clone()
    for _ in range(2):
        algorithm.update(iter([transitions(look=felt)]))
    with torch.no_grad():
        assert torch.equal(policy.evaluate_actions(rows)["log_prob"], before)
    assert not torch.equal(next(algorithm.critics.parameters()), critics)
    # That of the actor is the policy's too; under a VLA model the critics have an encoder of their own.
    assert torch.equal(next(policy.encoder_parameters()), encoder) == (name == "actor")
    algorithm.update(iter([transitions(look=felt)]))
    with torch.no_grad():
        assert not torch.equal(policy.evaluate_actions(rows)["log_prob"], before)
    assert not torch.equal(next(policy.encoder_parameters()), encoder)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [(TD3BC, {}), (ReBRAC, {}), (SAC, {}), (CQL, {}), (CalQL, {}), (SFT, {"loss": "mse"})],
)
@pytest.mark.parametrize("distribution", ["flow", "diffusion"])
def test_a_policy_that_denoises_is_rejected_before_anything_is_collected(kind, settings, distribution):
    """Where the loss needs a mean action or samples with a density."""
    with pytest.raises(InputError, match=rf"policy: {kind.name}.* trains (the most likely action|samples).*iql or sft"):
        kind(small_actor(3, 2, distribution), ALGORITHM_SETTINGS[kind.name](**settings))


@pytest.mark.parametrize(("planned", "warns"), [(20, True), (21, False)])
def test_a_run_that_ends_within_the_warm_up_causes_a_warning(planned, warns, caplog):
    algorithm = SAC(small_actor(3, 2), SACSettings(critic_warmup=20))
    algorithm.check_updates(planned)
    found = [message for message in caplog.messages if message.startswith("critic_warmup: the first 20 updates")]
    assert bool(found) == warns


@pytest.mark.parametrize("kind", [SAC, DAgger])
def test_an_update_in_an_environment_takes_all_of_its_batches(kind):
    """Each with the values of its own progress: an update is as many steps, and none without batches."""
    batches, found = [random_batch() for _ in range(3)], []
    for _ in range(2):
        torch.manual_seed(0)
        found.append(kind(small_actor(3, 2), ALGORITHM_SETTINGS[kind.name]()))
    together, single = found
    assert together.update(iter([])) == {}
    assert together.version == 0
    for algorithm in found:
        algorithm.progress = 0.5
    torch.manual_seed(1)
    metrics = together.update(iter(batches))
    torch.manual_seed(1)
    for batch in batches:
        single.schedule()
        last = single.step(batch)
    assert together.version == single.version == 3
    assert metrics.keys() == last.keys()
    assert all(torch.equal(torch.as_tensor(metrics[name]), torch.as_tensor(last[name])) for name in last)
    assert all(map(torch.equal, together.policy.parameters(), single.policy.parameters()))
