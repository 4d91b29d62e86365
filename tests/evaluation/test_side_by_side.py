"""Videos of two policies in the same episodes."""

import numpy as np

from deft.evaluation.side_by_side import COLOURS, GAP, STRIP_HEIGHT, Recording, join

SIZE = 32


def recording(length: int, success: bool | None) -> Recording:
    """Images of one grey each: that of step i is i."""
    return Recording([np.full((SIZE, SIZE, 3), step, np.uint8) for step in range(length)], success)


def test_an_episode_that_ends_first_keeps_its_last_image() -> None:
    frames = join({"before": recording(5, False), "after": recording(3, True)}, hold=2)
    assert len(frames) == 5 + 2
    assert {frame.shape for frame in frames} == {(SIZE + STRIP_HEIGHT, 2 * SIZE + GAP, 3)}
    left = [int(frame[-1, 0, 0]) for frame in frames]
    right = [int(frame[-1, -1, 0]) for frame in frames]
    assert left == [0, 1, 2, 3, 4, 4, 4]
    assert right == [0, 1, 2, 2, 2, 2, 2]


def test_the_outcome_is_shown_once_the_episode_has_ended() -> None:
    frames = join({"before": recording(4, False), "after": recording(2, True)}, hold=1)
    corners = [(tuple(frame[0, 0]), tuple(frame[0, -1])) for frame in frames]
    unknown, success, failure = COLOURS[None], COLOURS[True], COLOURS[False]
    assert corners == [(unknown, unknown), *[(unknown, success)] * 2, *[(failure, success)] * 2]
