import math

import pytest
import torch
from offline_worlds import batch_of, learned_actions, make_linear, small_actor

from deft.algorithms.sft import SFT
from deft.config.algorithm_settings import SFTSettings

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


def test_it_finds_the_mean_of_the_data():
    # 3 of 10 episodes act about 0.6, the others −0.6: the mean is −0.24, which squared error and likelihood both want.
    torch.manual_seed(0)
    (action,) = learned_actions(SFT(small_actor(2), SFTSettings(learning_rate=3e-3)))
    assert action == pytest.approx(-0.24, abs=0.06)
