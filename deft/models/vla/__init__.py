"""Vision-language-action models: the interface, the policy around it, loading, and two small models."""

from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.interface import BaseVLAModel, VLAModelInterface
from deft.models.vla.loading import load_vla_model, save_vla_model
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel

__all__ = [
    "BaseVLAModel",
    "GPTVLAModel",
    "TinyVLAModel",
    "VLAModelInterface",
    "VLAPolicy",
    "load_vla_model",
    "save_vla_model",
]
