import math

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft.algorithms.grpo import GRPO
from deft.algorithms.policy_gradient import Epochs
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel


def test_a_state_holds_one_tensor_for_each_metric_and_is_restored():
    """The last minibatch is smaller, and some metrics are single numbers."""
    losses = [
        {"loss": torch.tensor(float(size)), "log_ratio": torch.arange(2.0 * size).reshape(size, 2)}
        for size in (3, 3, 1)
    ]
    data = TensorDict({"reward": torch.ones(7)}, batch_size=[7])
    state = Epochs(data, losses, first=2, epoch=1, order=torch.arange(7), done=1).state_dict()
    assert state["losses"]["log_ratio"]["values"].shape == (14,)  # 2 · (3 + 3 + 1)
    restored = Epochs.from_state(state, torch.device("cpu"))
    assert (restored.first, restored.epoch, restored.done) == (2, 1, 1)
    for one, other in zip(losses, restored.losses, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_before_the_first_minibatch():
    state = Epochs(TensorDict({"reward": torch.ones(7)}, batch_size=[7])).state_dict()
    assert Epochs.from_state(state, torch.device("cpu")).losses == []


# -- exploration_scale -------------------------------------------------------------------------------------------------


def make_box_policy(log_std: float) -> ActorCritic:
    return ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,)), PolicyConfig(log_std_init=log_std))


@pytest.mark.parametrize("head", ["gaussian", "flow"])
def test_the_noise_of_a_trained_model_is_scaled(head):
    model = TinyVLAModel(
        action_dim=3, chunk_length=2, image_keys=["rgb"], image_size=16, width=8, head=head, switch_dims=[-1],
        proprio_key=None, log_std_init=-3.0, log_common_init=-2.0, flow_noise=0.1,
    )  # fmt: skip
    algorithm = PPO(VLAPolicy(model), PPOSettings(exploration_scale=2.0))
    algorithm.check_policy(fresh=False)
    before = [parameter.clone() for parameter in algorithm.policy.noise_parameters()]
    others = model.trunk[0].weight.clone()
    algorithm.start_from_a_policy()
    after = list(algorithm.policy.noise_parameters())
    assert len(after) == {"gaussian": 2, "flow": 1}[head]
    for one, other in zip(before, after, strict=True):
        torch.testing.assert_close(other.exp(), 2.0 * one.exp())  # σ, not log σ, is doubled
    assert torch.equal(model.trunk[0].weight, others)


def test_the_noise_of_a_reference_is_scaled_too():
    """The KL divergence from the reference is 0 before the first update, as without a scale."""
    algorithm = GRPO(make_box_policy(-1.0), GRPOSettings(exploration_scale=3.0, kl_coef=0.1))
    algorithm.start_from_a_policy()
    for policy in (algorithm.policy, algorithm.reference):
        assert policy.head.log_std.tolist() == pytest.approx([math.log(3.0) - 1.0] * 2)


def test_a_scale_needs_a_trained_policy_with_noise():
    with pytest.raises(InputError, match="exploration_scale: scales the noise of a trained policy"):
        PPO(make_box_policy(0.0), PPOSettings(exploration_scale=2.0)).check_policy(fresh=True)
    discrete = ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Discrete(4), PolicyConfig())
    with pytest.raises(InputError, match="no standard deviation"):
        PPO(discrete, PPOSettings(exploration_scale=2.0)).check_policy(fresh=False)
    PPO(discrete, PPOSettings()).check_policy(fresh=True)


@pytest.mark.usefixtures("no_plots")
def test_a_resumed_run_does_not_scale_again(deft, tmp_path):
    """Learning rate 1e-30: the noise stays where the scale put it, log 2 above the default of 0."""
    common = ["--env", "Pendulum-v1", "--rollout-steps", 8, "--eval-freq", 0, "--device", "cpu", "--json"]
    common += ["--learning-rate", 1e-30, "--threads", 1]
    deft("train", "ppo", *common, "--total-timesteps", 8, "--output-dir", "first")
    scaled = [*common, "--model-path", "first", "--exploration-scale", 2]
    deft("train", "ppo", *scaled, "--total-timesteps", 8, "--output-dir", "second")
    deft("train", "--resume", "second", "--total-timesteps", 16, "--json")
    weights = torch.load(tmp_path / "second" / "checkpoint-16" / "model.pt")
    assert weights["head.log_std"].tolist() == pytest.approx([math.log(2.0)])
