"""Video frames with the instruction below the image, for `deft play` and `deft evaluate`."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from deft.envs.wrappers import wrapper_attribute

CAPTION_HEIGHT = 22  # pixels; H.264 needs an even number


class Captions(gymnasium.Wrapper):
    """Adds the attribute `instruction` of an environment, if it has one, below every rendered image."""

    def render(self) -> Any:
        """Return the image with a line of text below."""
        frame: Any = self.env.render()
        frame = frame[-1] if isinstance(frame, list) else frame
        text = wrapper_attribute(self.env, "instruction")
        if frame is None or not isinstance(text, str) or not text:
            return frame
        width = frame.shape[1]
        strip = Image.new("RGB", (width, CAPTION_HEIGHT), "black")
        font = _font_that_fits(text, width - 8)
        ImageDraw.Draw(strip).text((width / 2, CAPTION_HEIGHT / 2), text, "white", font, anchor="mm")
        return np.concatenate([np.asarray(frame), np.asarray(strip)])


class FrameRecorder(Captions):
    """Records an image of every step, including those within an action chunk."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._frames: list[np.ndarray] = []
        self.last_episode: list[np.ndarray] = []
        """The images of the previous episode."""

    def reset(self, **keywords: Any) -> Any:
        """Start the next episode."""
        found = self.env.reset(**keywords)
        self.last_episode, self._frames = self._frames, [self.render()]
        return found

    def step(self, action: Any) -> Any:
        """Step, then record an image."""
        found = self.env.step(action)
        self._frames.append(self.render())
        return found


def _font_that_fits(text: str, width: int) -> Any:
    """Return the largest font, up to 14 pixels, in which the text is at most `width` wide."""
    for size in range(14, 5, -1):
        font = ImageFont.load_default(size)
        if font.getlength(text) <= width:
            break
    return font
