"""Updates that are captured in a CUDA graph take the steps of eager ones, for every algorithm that is captured."""

import pytest
import torch
from gymnasium import spaces
from offline_worlds import small_actor

from deft.algorithms.cql import CQL
from deft.algorithms.decision_transformer import DecisionTransformer
from deft.algorithms.iql import IQL
from deft.algorithms.offline import OfflineAlgorithm
from deft.algorithms.sac import SAC
from deft.algorithms.sft import SFT
from deft.algorithms.td3_bc import TD3BC
from deft.config.algorithm_settings import (
    CQLSettings,
    DTSettings,
    IQLSettings,
    SACSettings,
    SFTSettings,
    TD3BCSettings,
)
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import VectorDataset, box
from deft.data.replay import ReplayBuffer, TransitionTable
from deft.training.capture import WARM_UP, CapturedUpdate

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
OBSERVATION_DIM, ACTION_DIM, BATCH_SIZE, NUM_EPISODES, LENGTH = 3, 2, 16, 8, 6
DEVICE = torch.device("cuda")
KINDS = {
    "iql": (IQL, IQLSettings, "gaussian"),
    "iql with a falling learning rate": (IQL, lambda: IQLSettings(learning_rate_schedule="cosine"), "gaussian"),
    "cql": (CQL, CQLSettings, "tanh_gaussian"),
    "td3-bc": (TD3BC, TD3BCSettings, "gaussian"),
    "sac": (SAC, SACSettings, "tanh_gaussian"),
    "sft": (SFT, SFTSettings, "gaussian"),
}


def make_table() -> TransitionTable:
    generator = torch.Generator().manual_seed(0)
    table = TransitionTable([LENGTH] * NUM_EPISODES, OBSERVATION_DIM, ACTION_DIM)
    table.rows.copy_(torch.rand(table.rows.shape, generator=generator) * 1.8 - 0.9)
    table.terminated.zero_()
    return table


def make_pair(name: str) -> tuple[OfflineAlgorithm, object]:
    """Return an algorithm and its sampler, the same at every call."""
    torch.manual_seed(0)
    if name == "dt":
        settings = DTSettings(context_length=4, n_layer=1, embed_dim=16, warmup_steps=10, dropout=0.1)
        spaces_of_data = box(OBSERVATION_DIM), spaces.Box(-1, 1, (ACTION_DIM,))
        policy = DecisionTransformer.make_policy(*spaces_of_data, DatasetPolicyConfig(), settings)
        algorithm: OfflineAlgorithm = DecisionTransformer(policy.to(DEVICE), settings)
        dataset = VectorDataset(make_table(), "random", *spaces_of_data)
        sampler = algorithm.make_sampler(dataset, 0, DEVICE, 2**30)
        algorithm.prepare(dataset, sampler, fresh=True)
        return algorithm, sampler
    kind, settings_of, distribution = KINDS[name]
    policy = small_actor(OBSERVATION_DIM, ACTION_DIM, distribution).to(DEVICE)
    return kind(policy, settings_of()), ReplayBuffer(make_table(), 0, device=DEVICE)


def state_of(algorithm: OfflineAlgorithm) -> dict[str, torch.Tensor]:
    """Return all tensors of the policy and of the algorithm's state, by name."""
    found = {f"policy.{name}": value for name, value in algorithm.policy.state_dict().items()}

    def collect(prefix: str, value: object) -> None:
        if isinstance(value, torch.Tensor):
            found[prefix] = value
        elif isinstance(value, dict):
            for key, nested in value.items():
                collect(f"{prefix}.{key}", nested)

    collect("state", algorithm.state_dict())
    return {name: value.detach().cpu().clone() for name, value in found.items()}


@pytest.mark.parametrize("name", [*KINDS, "dt"])
def test_captured_updates_take_the_steps_of_eager_ones(name):
    def progress(algorithm: OfflineAlgorithm) -> float:
        return min(1.0, algorithm.version / 40)

    algorithm, sampler = make_pair(name)
    captured = CapturedUpdate(algorithm, sampler, BATCH_SIZE)
    torch.manual_seed(1)
    replayed = 0
    while algorithm.version < (WARM_UP + 5) * algorithm.period:
        algorithm.progress = progress(algorithm)
        _, metrics = captured.run()
        replayed += captured._graph is not None
    torch.cuda.synchronize()
    assert replayed >= 5
    found = state_of(algorithm)

    eager, source = make_pair(name)
    torch.manual_seed(1)
    while eager.version < algorithm.version:
        if eager.version < WARM_UP * eager.period or eager.version % eager.period == 0:
            eager.progress = progress(eager)  # a replay covers a period, with one learning rate
            eager.schedule()
        expected_metrics = eager.step(source.sample(BATCH_SIZE))
    expected = state_of(eager)

    assert found.keys() == expected.keys()
    found |= {f"metrics.{key}": value.cpu() for key, value in metrics.items()}
    expected |= {f"metrics.{key}": value.cpu() for key, value in expected_metrics.items()}
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-4, atol=1e-5, msg=lambda text, key=key: f"{key}: {text}")


def test_the_learning_rate_reaches_a_replay():
    """A schedule writes into the tensor that the graph reads: with a rate of 0 nothing moves."""
    algorithm, sampler = make_pair("sft")
    captured = CapturedUpdate(algorithm, sampler, BATCH_SIZE)
    while captured._graph is None:
        captured.run()
    for group in algorithm.actor_optimizer.param_groups:
        group["lr"].fill_(0.0)
        group["weight_decay"] = 0.0
    before = [parameter.detach().clone() for parameter in algorithm.policy.parameters()]
    captured.run()
    after = list(algorithm.policy.parameters())
    assert all(torch.equal(one, another) for one, another in zip(before, after, strict=True))
