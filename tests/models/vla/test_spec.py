"""What a model's config need not say, because the environment's spaces do."""

import numpy as np
from gymnasium import spaces
from torch import nn

from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.spec import model_defaults
from deft.models.vla.tiny import TinyVLAModel

ACTIONS = spaces.Box(-1, 1, (2,), np.float32)


def picture(*shape: int) -> spaces.Box:
    return spaces.Box(0, 255, shape, np.uint8)


def vector(size: int) -> spaces.Box:
    return spaces.Box(-1, 1, (size,), np.float32)


def text(length: int) -> spaces.Box:
    """As the vector environments hand on a Text space."""
    return spaces.Box(0, 255, (length,), np.uint8)


ROBOT = spaces.Dict({"rgb": picture(3, 32, 32), "wrist": picture(32, 32, 3), "proprio": vector(8), "words": text(100)})


def test_everything_that_the_spaces_say():
    chunks = spaces.Box(-1, 1, (4, 2), np.float32)
    assert model_defaults(GPTVLAModel, {}, ROBOT, chunks, 4) == {
        "action_dim": 2,
        "chunk_length": 4,
        "image_keys": ["rgb", "wrist"],
        "image_size": 32,
        "proprio_key": "proprio",
        "proprio_dim": 8,
        "instruction_key": "words",
        "max_instruction_length": 100,
    }


def test_places_are_labels_and_no_proprioception():
    streams = {"rgb": picture(3, 32, 32), "proprio": vector(8), "places": vector(5)}
    defaults = model_defaults(TinyVLAModel, {}, spaces.Dict(streams), ACTIONS)
    assert [defaults[name] for name in ("proprio_key", "proprio_dim", "places_key", "places_dim")] == [
        "proprio", 8, "places", 5
    ]  # fmt: skip
    del streams["places"]
    assert model_defaults(TinyVLAModel, {}, spaces.Dict(streams), ACTIONS)["places_key"] is None


def test_what_is_given_is_not_said_again():
    given = {"action_dim": 7, "image_keys": ["wrist"], "instruction_key": None}
    defaults = model_defaults(GPTVLAModel, given, ROBOT, ACTIONS)
    assert not defaults.keys() & given.keys()
    assert "max_instruction_length" not in defaults  # it reads no words


def test_sizes_are_those_of_the_streams_that_are_named():
    space = spaces.Dict({"big": picture(3, 64, 64), "rgb": picture(3, 32, 32), "joints": vector(7), "force": vector(3)})
    given = {"image_keys": ["big"], "proprio_key": "force"}
    defaults = model_defaults(GPTVLAModel, given, space, ACTIONS)
    assert (defaults["image_size"], defaults["proprio_dim"]) == (64, 3)
    assert defaults["instruction_key"] is None  # there are no words


def test_several_vectors_and_sizes_are_left_to_the_user():
    space = spaces.Dict({"big": picture(3, 64, 64), "rgb": picture(3, 32, 32), "joints": vector(7), "force": vector(3)})
    defaults = model_defaults(GPTVLAModel, {}, space, ACTIONS)
    assert not {"image_size", "proprio_key", "proprio_dim"} & defaults.keys()
    with_usual_name = spaces.Dict({"proprio": vector(5), **space.spaces})
    assert model_defaults(GPTVLAModel, {}, with_usual_name, ACTIONS)["proprio_dim"] == 5


def test_room_for_long_instructions_is_kept():
    """Shorter instructions fit a model with room for 64, and so does its weights file."""
    space = spaces.Dict({"rgb": picture(3, 32, 32), "instruction": text(32)})
    defaults = model_defaults(GPTVLAModel, {}, space, ACTIONS)
    assert defaults["max_instruction_length"] == 64
    assert defaults["proprio_key"] is None


class Plain(nn.Module):
    """A user's model: the three methods, and no base class of Deft."""

    def forward(self, observations): ...

    def get_value(self, observations): ...

    def evaluate_actions(self, observations, actions): ...


def test_only_keywords_that_the_class_names():
    class Bare(Plain):
        def __init__(self) -> None:
            super().__init__()

    class Open(Plain):
        def __init__(self, action_dim: int, **rest: object) -> None:
            super().__init__()

    class Vector(Plain):
        def __init__(self, proprio_dim: int, max_instruction_length: int) -> None:
            super().__init__()

    assert model_defaults(Bare, {}, ROBOT, ACTIONS) == {}
    assert model_defaults(Open, {}, ROBOT, ACTIONS) == {"action_dim": 2}
    assert model_defaults(Vector, {}, ROBOT, ACTIONS) == {"proprio_dim": 8, "max_instruction_length": 100}


def test_pictures_are_bytes_of_three_channels():
    space = spaces.Dict(
        {"depth": picture(1, 32, 32), "float": spaces.Box(0, 1, (3, 32, 32)), "wide": picture(3, 32, 48)}
    )
    defaults = model_defaults(GPTVLAModel, {}, space, ACTIONS)
    assert defaults["image_keys"] == ["wide"]
    assert "image_size" not in defaults  # not a square
