"""The ensemble whose disagreement is a reward of phase 3."""

import torch
from f1_worlds import micro_policy

from deft import schema
from deft.models.f1.disagreement import Disagreement


def test_an_ensemble_comes_to_agree_on_noise_and_disagrees_where_it_was_not():
    """Frames of pure noise, at first and after training on other noise; and actions that it has never seen."""
    torch.manual_seed(0)
    ensemble = Disagreement(micro_policy().config, members=4, width=32)
    optimizer = torch.optim.Adam(ensemble.parameters(), 3e-3)

    def noise(rows: int) -> dict[str, torch.Tensor]:
        return {
            schema.IMAGE0_HISTORY: torch.randint(0, 256, (rows, 5, 3, 16, 16), dtype=torch.uint8),
            schema.ACTION_HISTORY: torch.zeros(rows, 4, 32),
            schema.STATE: torch.zeros(rows, 32),
        }

    held_out = noise(64)
    before = float(ensemble(held_out).mean())
    for _ in range(150):
        loss = ensemble.loss(noise(32))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after = float(ensemble(held_out).mean())
    unseen = float(ensemble({**held_out, schema.ACTION_HISTORY: torch.ones(64, 4, 32)}).mean())
    assert after < before / 4  # noise stays as unforeseeable as it was, but all expect the same of it
    assert unseen > 2 * after
