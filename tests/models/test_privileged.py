"""Asymmetric critics: what the policy reads, what its value reads, and what is rejected."""

import pytest
import torch
from gymnasium import spaces
from policies import actor_policy
from tensordict import TensorDict
from torch import nn
from worlds import SecretSign

from deft import VLAPolicy, schema
from deft.algorithms.cql import CQL
from deft.algorithms.iql import IQL
from deft.algorithms.td3_bc import TD3BC
from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.models.privileged import PrivilegedValue, public_space, with_critic_streams

ENV = SecretSign()
SPACE, ACTIONS = ENV.observation_space, ENV.action_space
CONFIG = PolicyConfig(critic_observation=("secret",), hidden_sizes=(8,), hidden_dim=8, encoder_dim=8)


class Reader(nn.Module):
    """A user's VLA model that reads every float stream it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.value = nn.Linear(3, 2), nn.Linear(3, 1)
        self.given: set[str] = set()

    def forward(self, observations):
        return self._distribution(observations).sample()

    def get_value(self, observations):
        return self.value(observations["state"])

    def evaluate_actions(self, observations, actions):
        distribution = self._distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)

    def _distribution(self, observations):
        self.given.update(observations.keys())
        return torch.distributions.Normal(self.mean(observations["state"]), 1.0)


def make(kind: str, space: spaces.Dict = SPACE) -> ActorCritic | VLAPolicy:
    torch.manual_seed(0)
    if kind == "vla":
        return VLAPolicy(Reader(), observation_space=space, action_space=ACTIONS, config=CONFIG)
    memory = {"memory_hidden": 4} if kind == "memory" else {}
    config = PolicyConfig(**{**vars(CONFIG), "name": "actor" if kind == "actor" else "actor_critic", **memory})
    return ActorCritic(space, ACTIONS, config)


def inputs(secret: float | None, count: int = 5) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    streams = {
        "state": torch.rand(count, 3, generator=generator),
        "image": torch.randint(0, 256, (count, 3, 8, 8), generator=generator, dtype=torch.uint8),
    }
    if secret is not None:
        streams["secret"] = torch.full((count, 2), secret)
    return TensorDict(
        {schema.OBSERVATION: TensorDict(streams, [count]), schema.MEMORY: torch.zeros(count, 1, 4)}, [count]
    )


def act(policy: ActorCritic | VLAPolicy, secret: float | None) -> TensorDict:
    torch.manual_seed(3)
    with torch.no_grad():
        return policy.act(inputs(secret))


KINDS = ["actor_critic", "memory", "actor", "vla"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_depends_on_the_stream_and_the_action_does_not(kind):
    policy = make(kind)
    one, other = act(policy, 0.0), act(policy, 1.0)
    assert torch.equal(one[schema.ACTION], other[schema.ACTION])
    assert torch.equal(one[schema.LOG_PROB], other[schema.LOG_PROB])
    assert not torch.equal(one[schema.VALUE], other[schema.VALUE])
    assert torch.equal(one[schema.VALUE], policy.get_value(inputs(0.0)))
    if kind == "vla":
        assert policy.model.given == {"state", "image"}
    assert policy.streams == {"state", "image"}


@pytest.mark.parametrize("kind", KINDS)
def test_the_gradient_of_the_value_reaches_the_critic_alone(kind):
    policy = make(kind)
    td = act(policy, 0.5)
    if kind == "memory":  # [T, B]: two steps of every environment
        td = torch.stack([td, td])
        flags = torch.zeros(2, 5, dtype=torch.bool)
        td[schema.NEXT_TERMINATED], td[schema.NEXT_TRUNCATED] = flags, flags
    scored = policy.evaluate_actions(td)
    assert torch.allclose(scored["value"], td[schema.VALUE])  # what acted is what is trained
    scored["value"].sum().backward()
    reached = {name for name, value in policy.named_parameters() if value.grad is not None and value.grad.any()}
    assert reached
    assert all(name.startswith("critic.") for name in reached)
    assert {id(value) for value in policy.critic.parameters()} <= {id(v) for v in policy.value_only_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_policy_acts_without_the_stream(kind):
    policy = make(kind)
    assert torch.equal(act(policy, None)[schema.ACTION], act(policy, 1.0)[schema.ACTION])
    assert schema.VALUE not in act(policy, None)
    deployed = make(kind, public_space(SPACE, ("secret",)))
    deployed.load_state_dict(deployed.complete_weights(policy.state_dict()))
    assert torch.equal(act(deployed, None)[schema.ACTION], act(policy, 1.0)[schema.ACTION])
    assert not any(name.startswith("critic.") for name in deployed.state_dict())
    with pytest.raises(InputError, match="the value reads secret"):
        deployed.get_value(inputs(None))


def test_statistics_are_of_the_critic_s_own(caplog):
    policy = make("actor_critic")
    names = [name for name, _ in policy.named_buffers() if name.endswith("normalizer.count")]
    policy.observe_value(inputs(0.5))
    counts = {name: int(policy.get_buffer(name)) for name in names}
    # the critic reads the named stream and the other vector, and not the image
    assert {name: count for name, count in counts.items() if count} == {
        "critic.encoder.streams.secret.normalizer.count": 5,
        "critic.encoder.streams.state.normalizer.count": 5,
    }
    assert "encoder.streams.state.normalizer.count" in names
    assert not any(name.startswith("encoder.streams.secret") for name in policy.state_dict())


def test_weights_without_a_critic_keep_the_new_one(caplog):
    policy = make("actor_critic")
    plain = {name: value for name, value in policy.state_dict().items() if not name.startswith("critic.")}
    assert policy.complete_weights(plain).keys() == policy.state_dict().keys()
    assert "critic_observation starts from new weights" in caplog.text


def test_value_by_hand():
    value = PrivilegedValue(spaces.Dict({"secret": SPACE["secret"]}), ("secret",), (1,))
    with torch.no_grad():
        for parameter in value.parameters():
            parameter.fill_(0.5)
    # relu(0.5 · 1 + 0.5 · 2 + 0.5) · 0.5 + 0.5 = 1.5
    observation = TensorDict({"secret": torch.tensor([[[1.0, 2.0]]])}, [1, 1])
    assert value(observation).tolist() == [[1.5]]


@pytest.mark.parametrize(
    ("names", "given", "message"),
    [
        (("goal",), SPACE, "has no stream 'goal'; it has image, secret, state"),
        (("image",), SPACE, "'image' is an image or a text.*vectors of the world: secret, state"),
        (("secret",), SPACE["secret"], "one array without named streams"),
        (("secret",), spaces.Dict({"secret": SPACE["secret"]}), "names all streams"),
    ],
)
def test_streams_that_critics_cannot_read(names, given, message):
    with pytest.raises(InputError, match=message):
        with_critic_streams(given, names, given, "the world")


@pytest.mark.parametrize("kind", [IQL, CQL, TD3BC])
def test_seeds_trained_at_once_have_a_value_each(kind):
    space = spaces.Dict({name: SPACE[name] for name in ("state", "secret")})
    config = DatasetPolicyConfig(critic_observation=("secret",), hidden_dim=8)
    torch.manual_seed(0)
    policy = actor_policy(space, ACTIONS, config, num_members=2)
    algorithm = kind(policy)
    batch = {
        schema.OBSERVATION: {"state": torch.rand(2, 6, 3), "secret": torch.rand(2, 6, 2)},
        schema.NEXT_OBSERVATION: {"state": torch.rand(2, 6, 3), "secret": torch.rand(2, 6, 2)},
        schema.ACTION: torch.rand(2, 6, 2),
        schema.NEXT_REWARD: torch.rand(2, 6),
        schema.NEXT_TERMINATED: torch.zeros(2, 6),
    }
    assert all(torch.isfinite(value) for value in algorithm.step(batch).values())
    # features of `state` (3), and the critic's of `secret` and `state` (2 + 3)
    assert algorithm.critics.online.weights[0].shape[1] == 3 + 5 + 2
    state = policy.encode(batch[schema.OBSERVATION])
    assert policy.value_of(state).shape == (2, 6)
    alone = policy.member(1)
    assert alone.critic is None
    own = alone.encode({"state": batch[schema.OBSERVATION]["state"][1]})
    torch.testing.assert_close(alone.mean(own)[0], policy.mean(state)[1])


def test_off_policy_critics_need_the_streams():
    config = DatasetPolicyConfig(critic_observation=("secret",))
    with pytest.raises(InputError, match="critic_observation secret: the policy was built for observations without"):
        IQL(actor_policy(public_space(SPACE, ("secret",)), ACTIONS, config))
