import copy

import pytest
import torch
from offline_worlds import batch_of, make_linear, random_batch, schema_row, small_actor, two_step_dataset

from deft import schema
from deft.algorithms.fql import FQL
from deft.config.algorithm_settings import FQLSettings
from deft.config.settings import DatasetPolicyConfig
from deft.data.datasets.dataset import box
from deft.errors import InputError
from deft.models.q_flow import QFlowPolicy
from deft.runs.compute import torch_threads

# The second transition terminates: its target is its reward alone.
BATCH = batch_of([1.0, -1.0], [0.5, -0.5], [1.0, 2.0], [2.0, 3.0], [0.0, 1.0])


def fql(observation_dim: int = 1, action_dim: int = 1, chunk_length: int = 1, **settings) -> FQL:
    own = FQLSettings(**{"critic_layer_norm": False, **settings})
    config = DatasetPolicyConfig(hidden_dim=16, chunk_length=chunk_length, normalize_observation=False)
    policy = FQL.make_policy(box(observation_dim), box(action_dim, -1.0, 1.0), config, own)
    return FQL(policy, own)


def known(**settings) -> FQL:
    """Q = (s + 2a, 4a), Q̄ = (s + a, 4)."""
    algorithm = fql(gamma=0.9, **settings)
    make_linear(algorithm.critics.online, 0, [[1.0], [2.0]], [0.0])
    make_linear(algorithm.critics.online, 1, [[0.0], [4.0]], [0.0])
    make_linear(algorithm.critics.target, 0, [[1.0], [1.0]], [0.0])
    make_linear(algorithm.critics.target, 1, [[0.0], [0.0]], [4.0])
    return algorithm


@pytest.mark.parametrize(("aggregation", "target"), [("mean", 4.15), ("min", 3.7)])
def test_losses_of_one_distilled_update_by_hand(monkeypatch, aggregation, target):
    algorithm = known(value_aggregation=aggregation)
    policy = algorithm.policy
    make_linear(policy.one_step, 0, [[0.0], [1.0]], [0.0])  # μ(s, z) = z
    drawn = iter([1.5, 0.5])  # at s', clipped to an action of 1, and at s
    monkeypatch.setattr(policy, "sample_noise", lambda state: torch.full((2, 1, 1), next(drawn)))
    monkeypatch.setattr(policy, "denoised", lambda state, noise: torch.full((1, 2, 1), 0.25))
    metrics = algorithm.step(BATCH)
    # Q̄(s', 1) is 3 and 4 at s' = 2: the mean is 3.5, the minimum 3; y = 1 + 0.9 · 3.5 or 3, and 2 at the terminal.
    # Both critics have the values 2 and −2.
    assert float(metrics["q_loss"]) == pytest.approx(2 * ((target - 2) ** 2 + 4.0**2) / 2, rel=1e-5)
    # Q(s, 0.5) = (s + 1, 2): the means of the two critics are 2 and 1 at s = 1 and −1.
    assert float(metrics["policy_q"]) == pytest.approx(1.5, rel=1e-5)
    assert float(metrics["distill_loss"]) == pytest.approx(0.25**2, rel=1e-5)


def test_the_distilled_network_descends_the_formula(monkeypatch):
    algorithm = fql(3, 2, alpha=3.0, normalize_q=True)
    batch, noise = random_batch(16), torch.randn(16, 1, 2)
    policy, critics = copy.deepcopy((algorithm.policy, algorithm.critics))
    monkeypatch.setattr(algorithm.policy, "sample_noise", lambda state: noise)
    algorithm.step(batch)
    state = policy.encode(batch[schema.OBSERVATION])
    chosen = policy.distilled(state, noise)
    distance = (chosen - policy.denoised(state, noise)).square().mean()
    q = critics(state.for_critics, chosen.clamp(-1, 1)).mean(1)
    assert float(chosen.detach().abs().max()) < 1  # nothing is clipped here
    loss = 3.0 * distance - q.mean() / q.abs().mean().detach()
    gradients = torch.autograd.grad(loss, list(policy.one_step.parameters()))
    for expected, parameter in zip(gradients, algorithm.policy.one_step.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, expected, atol=1e-6, rtol=1e-5)


def test_the_best_of_n_acts_and_is_the_target(monkeypatch):
    algorithm = known(policy_extraction="best_of_n", num_candidates=2)
    policy = algorithm.policy
    assert policy.critics is algorithm.critics
    proposals = torch.tensor([0.1, 0.6, -0.5, -0.2])  # of the two states, then again
    monkeypatch.setattr(policy, "denoised", lambda state, noise: proposals.view(1, 4, 1))
    state = policy.encode(torch.tensor([[2.0], [3.0]]))
    # Both critics grow with a, so the larger of 0.1 and −0.5, and of 0.6 and −0.2. Q̄ = (s + a, 4): 2.1, 4 and 3.6, 4.
    assert policy.best(state)[0, :, 0].tolist() == pytest.approx([0.1, 0.6])
    assert algorithm._next_value(state)[0].tolist() == pytest.approx([(2.1 + 4) / 2, (3.6 + 4) / 2])
    make_linear(algorithm.critics.online, 0, [[0.0], [-9.0]], [0.0])
    assert policy.best(state)[0, :, 0].tolist() == pytest.approx([-0.5, -0.2])


def test_padding_after_an_episode_is_not_cloned():
    algorithm = fql(3, 2, chunk_length=3)
    action, mask = torch.rand(8, 3, 2) * 2 - 1, torch.ones(8, 3, dtype=torch.bool)
    mask[:, 2] = False
    batch = random_batch(8)
    losses = []
    for padding in (0.0, 0.9):
        action = action.clone()
        action[:, 2] = padding
        state = algorithm.policy.encode(batch[schema.OBSERVATION])._replace(step_mask=mask)
        torch.manual_seed(0)
        losses.append(algorithm.policy.imitation_loss(state, algorithm.policy.to_unit(action).unsqueeze(0)))
    assert torch.equal(*losses)
    assert losses[0].shape == (1, 8)


@pytest.mark.parametrize("extraction", ["distill", "best_of_n"])
def test_state_resumes_bit_for_bit(extraction):
    torch.manual_seed(0)
    settings = {"policy_extraction": extraction, "num_candidates": 4}
    algorithm, other = fql(3, 2, **settings), fql(3, 2, **settings)
    batches = [random_batch() for _ in range(5)]
    for batch in batches[:3]:
        algorithm.step(batch)
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    for one in (algorithm, other):
        torch.manual_seed(1)
        for batch in batches[3:]:
            one.step(batch)
    for name, value in algorithm.policy.state_dict().items():
        assert torch.equal(value, other.policy.state_dict()[name]), name
    for own, theirs in zip(algorithm.critics.parameters(), other.critics.parameters(), strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("chunk_length", [1, 2])
@pytest.mark.parametrize("settings", [{"alpha": 1.0}, {"policy_extraction": "best_of_n", "num_candidates": 16}])
def test_finds_the_rare_good_mode(settings, chunk_length):
    """3 of 10 actions of the data are about 0.6 and pay, the others about −0.6: a Gaussian would clone −0.24."""
    torch.manual_seed(0)
    algorithm = fql(2, 1, chunk_length, learning_rate=3e-3, tau=0.05, normalize_q=True, **settings)
    dataset = two_step_dataset()
    sampler = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 0)
    algorithm.prepare(dataset, sampler, fresh=True)
    with torch_threads(1, small_matrices=True):
        for _ in range(300):
            algorithm.update(sampler.batches(64))
    actions = algorithm.policy.act(schema_row(torch.zeros(64, 2)))[schema.ACTION].detach().reshape(64, chunk_length)
    assert float(actions[:, 0].mean()) == pytest.approx(0.6, abs=0.25)
    assert float((actions[:, 0] > 0).float().mean()) > 0.9


def test_other_policies_are_rejected():
    with pytest.raises(InputError, match=r"fql trains a QFlowPolicy, not ActorCritic"):
        FQL(small_actor())
    with pytest.raises(InputError, match=r"fql trains a policy that denoises, .*--distribution flow"):
        QFlowPolicy(small_actor())
    with pytest.raises(InputError, match="no log-prob; continue with fql or fql-online"):
        fql().policy.evaluate_actions(schema_row(torch.zeros(1, 1)))
