"""What counts as a VLA model."""

import copy

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from deft.errors import InputError
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.interface import BaseVLAModel, VLAModelInterface, as_vla_model, missing_methods, overrides


def test_class_and_instance_are_judged_alike():
    model = GPTVLAModel()
    assert isinstance(model, VLAModelInterface)
    assert missing_methods(GPTVLAModel) == missing_methods(model) == []
    assert missing_methods(nn.Linear) == missing_methods(nn.Linear(1, 1)) == ["get_value", "evaluate_actions"]


def test_the_forward_that_every_module_inherits_does_not_count():
    assert missing_methods(nn.Module) == ["forward", "get_value", "evaluate_actions"]


class Plain(nn.Module):
    """The three methods of the documents' example, and nothing else."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, observations):
        return self.layer(observations["state"])

    def get_value(self, observations):
        return observations["state"].sum(-1, keepdim=True)

    def evaluate_actions(self, observations, actions):
        error = (actions - self(observations)).square().sum(-1)
        return -error, torch.zeros_like(error)


def test_a_plain_module_gets_the_defaults_of_the_base_class():
    plain = Plain()
    model = as_vla_model(plain)
    assert model is plain
    assert isinstance(model, BaseVLAModel)
    assert isinstance(model, Plain)
    assert type(model).__name__ == "Plain"
    assert list(model.state_dict()) == ["layer.weight", "layer.bias"]
    assert not model.takes_deterministic
    assert not model.takes_action_mask
    assert not overrides(model, "act")
    observations = TensorDict({"state": torch.randn(4, 3)}, [4])
    action, log_prob, value = model.act(observations)
    assert torch.equal(action, plain(observations))
    assert torch.equal(log_prob, torch.zeros(4))
    assert torch.equal(value, plain.get_value(observations))
    samples, log_probs = model.sample_many(observations, 3)
    assert samples.shape == (3, 4, 2)
    assert log_probs.shape == (3, 4)
    copied = copy.deepcopy(model)
    assert torch.equal(copied.act(observations)[0], action)
    assert as_vla_model(model) is model


def test_a_subclass_must_define_the_three_methods():
    with pytest.raises(TypeError, match="abstract"):
        BaseVLAModel()
    assert missing_methods(BaseVLAModel) == ["forward", "get_value", "evaluate_actions"]
    with pytest.raises(InputError, match="Linear lacks get_value, evaluate_actions"):
        as_vla_model(nn.Linear(1, 1))
