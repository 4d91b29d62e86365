import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from offline_worlds import batch_of, learned_actions, make_linear, small_actor, two_step_dataset
from policies import actor_policy

from deft import schema
from deft.algorithms.sft import SFT
from deft.config.algorithm_settings import SFTSettings
from deft.config.settings import DatasetPolicyConfig
from deft.data.augmentation import augment
from deft.data.datasets.dataset import box
from deft.errors import InputError

BATCH = batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0])


@pytest.mark.parametrize("loss", ["log_prob", "mse"])
def test_losses_by_hand(loss):
    algorithm = SFT(small_actor(), SFTSettings(loss=loss))
    make_linear(algorithm.policy.actor, 0, [[0.0]], [0.0])  # π(s) = tanh(0), deviation exp(0)
    metrics = algorithm.step(BATCH)
    assert float(metrics["action_error"]) == pytest.approx(0.25)
    # −log N(±0.5; 0, 1) = ½ · 0.25 + ½ log 2π
    expected = 0.125 + 0.5 * math.log(2 * math.pi) if loss == "log_prob" else 0.25
    assert float(metrics["bc_loss"]) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("fresh", [True, False])
def test_a_policy_observes_the_whole_dataset_and_then_freezes_its_statistics(fresh, monkeypatch):
    algorithm, calls = SFT(small_actor()), []
    monkeypatch.setattr(algorithm.policy, "observe", lambda td: calls.append(td["observation"]))
    monkeypatch.setattr(algorithm.policy, "freeze_statistics", lambda: calls.append("frozen"))
    algorithm.prepare(None, SimpleNamespace(observations=lambda: iter([1, 2])), fresh)
    assert calls == ([1, 2, "frozen"] if fresh else [])


def test_it_finds_the_mean_of_the_data():
    # 3 of 10 episodes act about 0.6, the others −0.6: the mean is −0.24, which squared error and likelihood both want.
    torch.manual_seed(0)
    (action,) = learned_actions(SFT(small_actor(2), SFTSettings(learning_rate=3e-3)))
    assert action == pytest.approx(-0.24, abs=0.06)


def test_a_batch_in_parts_takes_the_step_of_the_whole():
    generator = torch.Generator().manual_seed(0)
    batch = batch_of(*(torch.randn(7, generator=generator).tanh().tolist() for _ in range(4)), [0.0] * 7)
    weights = []
    for parts in (1, 3):  # of 2, 2 and 3 rows
        torch.manual_seed(0)
        algorithm = SFT(small_actor(), SFTSettings(gradient_accumulation=parts, learning_rate=1e-2))
        metrics = [algorithm.step(batch) for _ in range(3)][-1]
        weights.append((torch.cat([one.flatten() for one in algorithm.policy.parameters()]), metrics["bc_loss"]))
    for whole, in_parts in zip(*weights, strict=True):
        torch.testing.assert_close(in_parts, whole, rtol=1e-6, atol=1e-6)


def test_augmented_images_are_trained_on_and_validated_as_they_are():
    """The loss of a step is that of the changed images; `validate` has the loss of the images themselves."""
    space = spaces.Box(0, 255, (3, 16, 16), np.uint8)
    batch = {
        schema.OBSERVATION: torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8),
        schema.ACTION: torch.zeros(4, 1),
    }
    policy = actor_policy(space, box(1, -1.0, 1.0), DatasetPolicyConfig(hidden_dim=8, encoder_dim=8))
    algorithm = SFT(policy, SFTSettings(augment="shift,color", learning_rate=1e-12))
    assert algorithm.settings.augment == ("shift", "color")
    plain = algorithm.validate([batch])
    torch.manual_seed(3)
    changed = augment(batch[schema.OBSERVATION], ("shift", "color"))
    expected = algorithm.validate([{**batch, schema.OBSERVATION: changed}])
    torch.manual_seed(3)
    step = algorithm.step(batch)
    assert float(step["bc_loss"]) == pytest.approx(float(expected["bc_loss"]), rel=1e-5)
    assert float(plain["bc_loss"]) != pytest.approx(float(expected["bc_loss"]), rel=1e-5)


def test_a_dataset_without_images_cannot_be_augmented():
    algorithm = SFT(small_actor(2), SFTSettings(augment=("color",)))
    dataset = two_step_dataset(4)
    with pytest.raises(InputError, match="augment: two-step has no images to augment"):
        algorithm.prepare(dataset, algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0), fresh=True)
    with pytest.raises(ValueError, match="augment"):
        SFTSettings(augment="shift,blur")


def test_the_mean_over_batches_counts_rows():
    # Actions ±0.5 have the error 0.25, actions ±1 have 1: over 2 and 1 rows (2 · 0.25 + 1) / 3 = 0.5.
    algorithm = SFT(small_actor(), SFTSettings(loss="mse"))
    make_linear(algorithm.policy.actor, 0, [[0.0]], [0.0])
    other = batch_of([1.0], [1.0], [0.0], [0.0], [0.0])
    before = [parameter.clone() for parameter in algorithm.policy.parameters()]
    assert float(algorithm.validate([BATCH, other])["bc_loss"]) == pytest.approx(0.5)
    assert all(torch.equal(a, b) for a, b in zip(before, algorithm.policy.parameters(), strict=True))
