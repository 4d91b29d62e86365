"""In which part of the expert's way an episode begins: mostly in those from which it sometimes succeeds.

The way is divided into `PARTS` parts, the first one at its end and the shortest. Each part of each task has a success
rate p, of the latest episodes that began in it, and is drawn in proportion to p (1 - p) + `LEAST`: what always succeeds
teaches nothing any more, and what never does nothing yet. Rates are arrays of numpy or tensors of torch.
"""

from __future__ import annotations

from typing import Any

PARTS = 8
WHOLE = -1  # instead of a part: the episode begins at the beginning
FIRST_RATE = 0.5
LEAST = 0.03
RATE = 0.05  # of an episode in the success rate


def left(part: int, within: float) -> float:
    """Return the fraction of the way that is left at a point `within` [0, 1) a part; the first part has 1/64 of it."""
    return ((part + within) / PARTS) ** 2


def draw_part(rates: Any, draw: Any) -> Any:
    """Choose a part by a number `draw` […] of [0, 1), from the success rates […, PARTS]."""
    bounds = (rates * (1 - rates) + LEAST).cumsum(-1)
    return (bounds <= draw[..., None] * bounds[..., -1:]).sum(-1)


def updated(rates: Any, episodes: Any, successes: Any) -> Any:
    """Return the success rates after so many further `episodes` and `successes` of each part."""
    weight = 1 - (1 - RATE) ** episodes
    return rates + weight * (successes / episodes.clip(1) - rates)
