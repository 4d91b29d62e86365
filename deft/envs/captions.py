"""The instruction under every picture of an environment; `deft play` and `deft evaluate` film with it."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from PIL import Image, ImageDraw, ImageFont

CAPTION_HEIGHT = 22  # pixels, even: H.264 wants that


class Captions(gymnasium.Wrapper):
    """Writes the instruction under every picture of an environment that has one (an attribute `instruction`)."""

    def render(self) -> Any:
        """The picture, with its line of text below."""
        frame: Any = self.env.render()
        frame = frame[-1] if isinstance(frame, list) else frame
        text = self.env.get_wrapper_attr("instruction") if self.env.has_wrapper_attr("instruction") else None
        if frame is None or not isinstance(text, str) or not text:
            return frame
        width = frame.shape[1]
        strip = Image.new("RGB", (width, CAPTION_HEIGHT), "black")
        ImageDraw.Draw(strip).text(
            (width / 2, CAPTION_HEIGHT / 2), text, "white", _font_that_fits(text, width - 8), anchor="mm"
        )
        return np.concatenate([np.asarray(frame), np.asarray(strip)])


class FrameRecorder(Captions):
    """Keeps a picture of every step, also of those within a chunk of actions."""

    def __init__(self, env: gymnasium.Env) -> None:
        super().__init__(env)
        self._frames: list[np.ndarray] = []
        self.last_episode: list[np.ndarray] = []
        """The pictures of the episode before the present one."""

    def reset(self, **keywords: Any) -> Any:
        """Begin the next episode."""
        found = self.env.reset(**keywords)
        self.last_episode, self._frames = self._frames, [self.render()]
        return found

    def step(self, action: Any) -> Any:
        """Step, then take the picture."""
        found = self.env.step(action)
        self._frames.append(self.render())
        return found


def _font_that_fits(text: str, width: int) -> Any:
    """The largest font, up to 14 pixels, in which the text is no wider than `width`."""
    for size in range(14, 5, -1):
        font = ImageFont.load_default(size)
        if font.getlength(text) <= width:
            break
    return font
