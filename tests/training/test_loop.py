import itertools

from deft.training.loop import crossed


def test_intervals_fire_when_they_are_crossed():
    # Steps come in rollouts of 2048: 10,000 is never hit exactly, but crossed between 8192 and 10240.
    steps = range(0, 40_000, 2048)
    due = [step for previous, step in itertools.pairwise(steps) if crossed(previous, step, 10_000)]
    assert due == [10240, 20480, 30720]
    assert not crossed(0, 10_000, 0)
