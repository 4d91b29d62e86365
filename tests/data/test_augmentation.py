"""Random changes of images: alike in all frames of an episode, and in batches."""

import numpy as np
import torch

from deft.data import augmentation
from deft.data.augmentation import augment, random_color_tables, recolor, recolor_episode, shift_episode
from deft.data.robot_episode import RobotEpisode


def an_episode() -> RobotEpisode:
    pictures = np.arange(3 * 3 * 4 * 4, dtype=np.uint8).reshape(3, 3, 4, 4)
    return RobotEpisode(wrist=pictures, state=np.zeros((3, 2), np.float32), action=np.zeros((2, 2), np.float32))


def test_an_episode_is_shifted_alike_in_all_frames():
    """Each frame is one of the nine moves by −1, 0 or 1, with its edge repeated, and all frames are moved alike."""
    episode, found = an_episode(), set()
    for seed in range(40):
        moved = shift_episode(episode, np.random.default_rng(seed), 1)
        padded = np.pad(episode.wrist, ((0, 0), (0, 0), (1, 1), (1, 1)), mode="edge")
        fits = [
            (down, right)
            for down in range(3)
            for right in range(3)
            if np.array_equal(moved.wrist, padded[..., down : down + 4, right : right + 4])
        ]
        assert len(fits) == 1
        found.add(fits[0])
    assert len(found) == 9


def test_nothing_changes_unasked():
    episode = an_episode()
    assert shift_episode(episode, np.random.default_rng(0), 0) is episode
    assert recolor_episode(episode, np.random.default_rng(0), 0.0) is episode


# -- batches -----------------------------------------------------------------------------------------------------------


def a_batch() -> dict[str, torch.Tensor]:
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return {
        "top": images,
        "wrist": images.movedim(1, -1).contiguous(),  # channels last
        "history": torch.stack([images, images], 1),
        "state": torch.zeros(6, 4),
        "instruction": torch.zeros(6, 20, dtype=torch.uint8),
    }


def test_colors_change_alike_in_all_cameras_and_frames_of_a_row():
    torch.manual_seed(0)
    batch = a_batch()
    changed = augment(batch, ["color"])
    assert not torch.equal(changed["top"], batch["top"])
    assert torch.equal(changed["wrist"].movedim(-1, 1), changed["top"])
    for frame in range(2):
        assert torch.equal(changed["history"][:, frame], changed["top"])
    # One table a row and channel: equal levels stay equal, and a lighter one stays at least as light.
    for row in range(6):
        before, after = batch["top"][row, 1].flatten(), changed["top"][row, 1].flatten()
        order = before.argsort()
        assert (after[order].int().diff() >= 0).all()
    assert not torch.equal(changed["top"][0], changed["top"][1])
    assert changed["state"] is batch["state"]
    assert changed["instruction"] is batch["instruction"]


def test_shifts_move_an_image_by_a_sixteenth_at_most():
    """32 / 16 = 2 pixels: 25 moves with repeated borders. A plain observation is one stream."""
    image = a_batch()["top"]
    padded = torch.nn.functional.pad(image.float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    found = set()
    for seed in range(40):
        torch.manual_seed(seed)
        moved = augment(image, ["shift"])
        for row in range(6):
            fits = [
                (down, right)
                for down in range(5)
                for right in range(5)
                if torch.equal(moved[row], padded[row, :, down : down + 32, right : right + 32])
            ]
            assert len(fits) == 1
            found.add(fits[0])
    assert len(found) == 25


def test_recoloring_in_blocks_is_recoloring_at_once(monkeypatch):
    images, tables = a_batch()["top"], random_color_tables(6, 0.5, torch.device("cpu"))
    whole = recolor(images, tables)
    assert whole[2, 0, 5, 7] == tables[2, 0, int(images[2, 0, 5, 7])]
    monkeypatch.setattr(augmentation, "BLOCK", 2 * 3 * 32 * 32)
    assert torch.equal(recolor(images, tables), whole)
    gray = torch.zeros(6, 1, 32, 32, dtype=torch.uint8)
    assert recolor(gray, tables) is gray


def test_without_a_kind_a_batch_is_as_it_was():
    batch = a_batch()
    assert augment(batch, ()) is batch
