"""What counts as a VLA model."""

from torch import nn

from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.interface import VLAModelInterface, missing_methods


def test_class_and_instance_are_judged_alike():
    model = GPTVLAModel()
    assert isinstance(model, VLAModelInterface)
    assert missing_methods(GPTVLAModel) == missing_methods(model) == []
    assert missing_methods(nn.Linear) == missing_methods(nn.Linear(1, 1)) == ["get_value", "evaluate_actions"]


def test_the_forward_that_every_module_inherits_does_not_count():
    assert missing_methods(nn.Module) == ["forward", "get_value", "evaluate_actions"]
