"""Critics and their targets."""

import torch

from deft.models.critics import Critics


def test_critics_start_as_their_targets_and_move_them_slowly():
    torch.manual_seed(0)
    critics = Critics(2, 3, 4, 1, (8,))
    features, action = torch.randn(2, 5, 4), torch.randn(2, 5, 1)
    values = critics(features, action)
    assert values.shape == (2, 3, 5)
    assert torch.equal(values, critics.target_values(features, action))
    before = critics.target.weights[0].clone()
    with torch.no_grad():
        critics.online.weights[0] += 1.0
    critics.move_target(0.25)  # target ← target + 0.25 · 1
    torch.testing.assert_close(critics.target.weights[0], before + 0.25)
