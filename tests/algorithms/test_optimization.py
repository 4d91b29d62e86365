"""A gradient that is not finite is an error before it reaches the weights."""

import gymnasium
import pytest
import torch
from torch import nn

from deft.algorithms.optimization import FlatAdam, FusedAdam
from deft.algorithms.ppo import PPO
from deft.errors import RunError
from deft.models.actor_critic import ActorCritic
from deft.runs import checkpoint
from deft.training.trainer import Trainer

NOT_APPLIED = "the gradient is no longer finite, so the update was not applied"


@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
@pytest.mark.parametrize("kind", [FlatAdam, FusedAdam])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_is_not_applied(kind, max_grad_norm, bad):
    layer = nn.Linear(3, 2)
    optimizer = kind(layer.parameters(), 0.1)
    before = layer.weight.detach().clone()
    layer.weight.grad[0, 0] = bad
    with pytest.raises(RunError, match=NOT_APPLIED):
        optimizer.step(max_grad_norm)
    assert torch.equal(layer.weight, before)


def test_the_last_good_weights_are_saved(tmp_path):
    class FailsSecond(PPO):
        def update(self, batches):
            if self.version == 1:
                next(self.policy.parameters()).grad.fill_(torch.nan)
                self.optimizer.step()
            return super().update(batches)

    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space)
    trainer = Trainer(policy, env, FailsSecond(policy), 16, output_dir=tmp_path, eval_freq=0, save_freq=0)
    with pytest.raises(RunError, match=NOT_APPLIED):
        trainer.train(64)
    saved = checkpoint.load_part(tmp_path / "checkpoint-16", checkpoint.MODEL)  # of the first rollout
    assert all(torch.equal(saved[name], value) for name, value in policy.state_dict().items())
    assert all(bool(value.isfinite().all()) for value in saved.values())
