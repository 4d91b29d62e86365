"""Whether something is due that happens at an interval of steps."""

from __future__ import annotations


def crossed(previous: int, step: int, interval: int) -> bool:
    """Whether a multiple of `interval` lies in (previous, step]: steps come in thousands. Never for interval 0."""
    return interval > 0 and step // interval > previous // interval
