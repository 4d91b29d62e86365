"""The actor that acts for many: which weights it has when they come out of order."""

import asyncio

import torch
from tensordict import TensorDict

from deft import ActorCritic, schema
from deft.config.settings import PolicyConfig
from deft.data.datasets.dataset import box
from deft.training.cluster.blocks import pack_leaves, pack_weights
from deft.training.cluster.inference import InferenceActor


def policy_of(weight: float) -> ActorCritic:
    """All of its weights are this number: V says which."""
    policy = ActorCritic(box(3), box(2, -1.0, 1.0), PolicyConfig(hidden_sizes=(4,)))
    for parameter in policy.parameters():
        torch.nn.init.constant_(parameter, weight)
    return policy


def test_weights_that_come_late_do_not_replace_newer_ones():
    """Requests with versions 1 and 2 wait for their weights; those of 2 come first, then those of 1."""

    observations = TensorDict({schema.OBSERVATION: torch.zeros(1, 3)}, batch_size=[1])
    values = [policy_of(weight).get_value(observations).item() for weight in (1.0, 2.0)]
    assert values[0] != values[1]

    async def scene() -> list[float]:
        loop = asyncio.get_running_loop()
        actor = InferenceActor(policy_of(0.0), "cpu")
        fetched = {version: loop.create_future() for version in (1, 2)}
        rows = pack_leaves(observations)
        asked = [
            asyncio.ensure_future(actor.ask("get_value", rows, 1, version, [fetched[version]])) for version in (1, 2)
        ]
        await asyncio.sleep(0)
        fetched[2].set_result(pack_weights(policy_of(2.0)))
        second = await asked[1]
        fetched[1].set_result(pack_weights(policy_of(1.0)))
        first = await asked[0]
        later = await actor.ask("get_value", rows, 1, 1, [None])  # what is older is not fetched again
        assert [answer[1] for answer in (first, second, later)] == [2, 2, 2]
        return [float(answer[0][schema.VALUE][0]) for answer in (first, second, later)]

    assert asyncio.run(scene()) == [values[1]] * 3
