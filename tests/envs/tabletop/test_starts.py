"""Where on the expert's way episodes begin."""

import numpy as np
import torch

from deft.envs.tabletop.starts import LEAST, PARTS, RATE, draw_part, left, updated


def test_parts_are_drawn_by_how_uncertain_success_is() -> None:
    """p (1 - p) + 0.03: 0.03 for 0 and 1, 0.28 for 0.5; with two parts of 0.5 the sum is 6 · 0.03 + 2 · 0.28 = 0.74."""
    rates = np.array([0.0, 0.0, 0.5, 1.0, 1.0, 1.0, 0.5, 1.0])
    assert rates.shape == (PARTS,)
    bounds = np.cumsum([0.03, 0.03, 0.28, 0.03, 0.03, 0.03, 0.28, 0.03]) / 0.74
    assert LEAST == 0.03
    for part, (low, high) in enumerate(zip([0.0, *bounds], bounds, strict=False)):
        assert draw_part(rates, np.array(low + 1e-9)) == part
        assert draw_part(rates, np.array(high - 1e-9)) == part
    draws = torch.tensor([0.0, 0.1, 0.99], dtype=torch.float64)
    chosen = draw_part(torch.tensor(rates).expand(3, PARTS), draws)
    assert chosen.tolist() == [0, 2, 7]  # 0.1 · 0.74 = 0.074 is above 0.06


def test_a_rate_follows_the_latest_episodes() -> None:
    """Two episodes at once weigh 1 - 0.95²; with one success of two, 0.9 moves towards 0.5."""
    rates, episodes = np.array([0.9, 0.2]), np.array([2.0, 0.0])
    new = updated(rates, episodes, np.array([1.0, 0.0]))
    np.testing.assert_allclose(new, [0.9 + (1 - (1 - RATE) ** 2) * (0.5 - 0.9), 0.2])
    same = updated(torch.tensor(rates), torch.tensor(episodes), torch.tensor([1.0, 0.0]))
    np.testing.assert_allclose(same.numpy(), new)


def test_the_parts_cover_the_way_and_grow_towards_its_beginning() -> None:
    """Squares of eighths: 1/64 for the first part, 1 - 49/64 = 15/64 for the last."""
    assert [left(part, 0.0) for part in range(PARTS)] == [part**2 / 64 for part in range(8)]
    assert left(7, 1.0) == 1.0
    assert int(left(7, 0.999999) * 60) == 59  # never before the first of 60 steps
