"""VLAPolicy: the border between Deft and anybody's VLA model."""

import copy
import logging

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from deft import schema
from deft.errors import InputError
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.policy import VLAPolicy


class ThreeMethods(nn.Module):
    """The least that a VLA model can be: a Gaussian of unit deviation, with dropout on the way to its mean."""

    def __init__(self, dims: int = 2) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, dims))
        self.critic = nn.Linear(3, 1)

    def _distribution(self, observations):
        return torch.distributions.Normal(self.net(observations["proprio"]), 1.0)

    def forward(self, observations):
        return self._distribution(observations).sample()

    def get_value(self, observations):
        return self.critic(observations["proprio"])

    def evaluate_actions(self, observations, actions):
        distribution = self._distribution(observations)
        return distribution.log_prob(actions).sum(-1), distribution.entropy().sum(-1)


def make_batch(batch: int = 5, **extra) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    observation = TensorDict(
        {
            "rgb": torch.randint(0, 256, (batch, 32, 32, 3), dtype=torch.uint8, generator=generator),
            "proprio": torch.randn(batch, 3, generator=generator),
            "instruction": torch.from_numpy(schema.encode_text("go left", 16)).expand(batch, 16),
        },
        [batch],
    )
    return TensorDict({schema.OBSERVATION: observation, **extra}, [batch])


def make_gpt(**changes) -> GPTVLAModel:
    torch.manual_seed(0)
    return GPTVLAModel(**{"action_dim": 2, "proprio_dim": 3, "image_size": 32, "dropout": 0.3, **changes})


@pytest.mark.parametrize("make_model", [ThreeMethods, make_gpt, lambda: make_gpt(chunk_length=3)])
def test_act_then_evaluate_gives_the_same_log_prob(make_model):
    """Ratios start at 1, dropout or not, and although an algorithm calls train() before its update."""
    torch.manual_seed(0)
    policy = VLAPolicy(make_model())
    with torch.no_grad():
        td = policy.act(make_batch())
    schema.check_scalars(td)
    policy.train()
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-5)
    torch.testing.assert_close(scored["value"], td[schema.VALUE], rtol=0, atol=1e-5)
    torch.testing.assert_close(policy.get_value(td), td[schema.VALUE], rtol=0, atol=1e-5)
    (scored["log_prob"] + scored["entropy"] + scored["value"]).sum().backward()
    assert all(p.grad is not None for p in policy.parameters() if p.requires_grad)


def test_tokens_are_the_steps_of_a_chunk():
    policy = VLAPolicy(make_gpt(chunk_length=3), chunk_length=3)
    td = policy.act(make_batch())
    whole = policy.evaluate_actions(td)
    assert "token_log_prob" not in whole
    policy.reports_tokens = True
    scored = policy.evaluate_actions(td)
    assert scored["token_log_prob"].shape == (5, 3)
    torch.testing.assert_close(scored["token_log_prob"].sum(1), whole["log_prob"])
    torch.testing.assert_close(scored["value"], whole["value"])


def test_train_and_copies_keep_the_model_in_evaluation_mode():
    policy = VLAPolicy(ThreeMethods())
    assert policy.train().training
    assert not policy.model.training
    assert not copy.deepcopy(policy).train().model.net[1].training


def test_one_inference_is_one_forward_pass():
    policy = VLAPolicy(make_gpt())
    passes = []
    policy.model.vision.register_forward_hook(lambda *_: passes.append(1))
    td = policy.act(make_batch())
    assert len(passes) == 1
    policy.evaluate_actions(td)
    assert len(passes) == 2


def test_deterministic_repeats_and_sampling_does_not():
    policy = VLAPolicy(make_gpt())
    first, second = (policy.act(make_batch(), deterministic=True)[schema.ACTION] for _ in range(2))
    assert torch.equal(first, second)
    assert not torch.equal(policy.act(make_batch())[schema.ACTION], first)


def test_model_without_deterministic_keyword_says_that_it_samples_once(caplog):
    policy = VLAPolicy(ThreeMethods())
    with caplog.at_level(logging.WARNING):
        policy.act(make_batch())
        assert caplog.messages == []
        policy.act(make_batch(), deterministic=True)
        policy.act(make_batch(), deterministic=True)
    assert caplog.messages == ["ThreeMethods has no `deterministic` keyword: its actions are sampled"]


def test_action_mask_reaches_the_model():
    mask = torch.tensor([[True, False]]).expand(5, 2)
    policy = VLAPolicy(make_gpt())
    td = policy.act(make_batch(**{schema.ACTION_MASK: mask}))
    assert (td[schema.ACTION][:, 1] == 0).all()
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-5)
    assert not torch.allclose(scored["log_prob"], policy.evaluate_actions(td.exclude(schema.ACTION_MASK))["log_prob"])


def test_model_that_takes_no_mask():
    policy = VLAPolicy(ThreeMethods())
    policy.act(make_batch(**{schema.ACTION_MASK: torch.ones(5, 2, dtype=torch.bool)}))  # nothing is padded
    with pytest.raises(InputError, match="ThreeMethods takes no `action_mask`"):
        policy.act(make_batch(**{schema.ACTION_MASK: torch.tensor([[True, False]]).expand(5, 2)}))


@pytest.mark.parametrize("name", ["forward", "get_value", "evaluate_actions"])
def test_missing_method_is_named(name):
    methods = {"forward", "get_value", "evaluate_actions"} - {name}
    model = type("Partial", (nn.Module,), {method: lambda self, *_: None for method in methods})()
    with pytest.raises(InputError, match=f"^VLA model Partial lacks {name}: see deft.VLAModelInterface$"):
        VLAPolicy(model)


def test_model_must_be_a_module():
    model = type("Plain", (), {m: lambda self, *_: None for m in ("forward", "get_value", "evaluate_actions")})()
    with pytest.raises(InputError, match=r"Plain must be a torch\.nn\.Module"):
        VLAPolicy(model)


def test_sizes_come_from_the_model_or_must_fit_it():
    policy = VLAPolicy(make_gpt(chunk_length=3))
    assert (policy.action_dim, policy.chunk_length) == (2, 3)
    assert VLAPolicy(ThreeMethods()).chunk_length == 1
    with pytest.raises(InputError, match="action_dim 7 does not fit VLA model GPTVLAModel, built with action_dim 2"):
        VLAPolicy(make_gpt(), action_dim=7)
    with pytest.raises(InputError, match="chunk_length 4 does not fit"):
        VLAPolicy(make_gpt(), chunk_length=4)


class WrongShape(ThreeMethods):
    """Changes what one method returns."""

    def __init__(self, method: str, change) -> None:
        super().__init__()
        original = getattr(self, method)
        setattr(self, method, lambda *arguments: change(original(*arguments)))


@pytest.mark.parametrize(
    ("method", "change", "message"),
    [
        ("get_value", lambda v: v.squeeze(1), r"value of WrongShape.get_value has shape \[5\]; it must have \[5, 1\]"),
        ("evaluate_actions", lambda s: (s[0][:, None], s[1]), r"log_prob of .* has shape \[5, 1\]; it must have \[5\]"),
        ("evaluate_actions", lambda s: (s[0], s[1].sum()), r"entropy of .* has shape \[\]; it must have \[5\]"),
        ("evaluate_actions", lambda s: s[0], "evaluate_actions must return 2 tensors; it returned Tensor"),
        ("evaluate_actions", lambda s: (*s, s[0]), "must return 2 tensors; it returned 3 values"),
        ("forward", lambda a: a[:, :1], r"action of WrongShape.forward has shape \[5, 1\]; it must have \[5, 2\]"),
        ("forward", lambda a: a[:, None], r"has shape \[5, 1, 2\]; it must have \[5, 2\]"),
        ("forward", lambda a: a[0], r"has shape \[2\]; it must have \[5, A\]"),
    ],
)
def test_wrong_shapes_are_rejected_at_the_border(method, change, message):
    policy = VLAPolicy(WrongShape(method, change), action_dim=2)
    with pytest.raises(InputError, match=message):
        policy.evaluate_actions(policy.act(make_batch()))


def test_action_of_unknown_width_must_still_have_the_rank_of_a_batch():
    policy = VLAPolicy(WrongShape("forward", lambda a: a[:, 0]))
    with pytest.raises(InputError, match=r"has shape \[5\]; it must have \[5, A\]"):
        policy.act(make_batch())


def test_observations_and_batches_that_do_not_fit():
    policy = VLAPolicy(ThreeMethods())
    with pytest.raises(InputError, match="use an environment with a Dict observation space"):
        policy.act(TensorDict({schema.OBSERVATION: torch.zeros(5, 3)}, [5]))
    with pytest.raises(InputError, match=r"takes a batch \[B\]; this one is \[1, 5\]"):
        policy.get_value(make_batch().unsqueeze(0))


def test_reward_normalisation_is_part_of_the_policy():
    assert VLAPolicy(ThreeMethods()).reward_normalizer is None
    policy = VLAPolicy(ThreeMethods(), normalize_reward=True)
    assert policy.reward_normalizer is not None
    assert "reward_normalizer.statistics.mean" in policy.state_dict()  # saved with it
