"""Video frames with the instruction below the image."""

import numpy as np
from worlds import Counting

from deft.envs.wrappers import CAPTION_HEIGHT, Captions


def test_captions_are_for_environments_with_words():
    class Pictured(Counting):
        render_mode = "rgb_array"
        instruction = ""

        def render(self):
            return np.zeros((32, 48, 3), np.uint8)

    env = Captions(Pictured())
    assert env.render().shape == (32, 48, 3)
    env.unwrapped.instruction = "pick up the red cube and put it on the blue one"  # shrinks to fit 48 pixels
    assert env.render().shape == (32 + CAPTION_HEIGHT, 48, 3)
    env.unwrapped.instruction = None
    assert env.render().shape == (32, 48, 3)
