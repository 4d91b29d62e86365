"""Fixtures of the phases."""

from pathlib import Path

import numpy as np
import pytest
from explorers import world_model
from panning_camera import WORLD, game_config

from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.exploration import Exploration, InlineExplorer


@pytest.fixture
def recording(tmp_path) -> Path:
    """Four npz episodes of the panning camera, as pixel datasets have them: channels of three stacked frames."""
    folder = tmp_path / "pixels"
    folder.mkdir()
    explorer = InlineExplorer(Exploration({"world": WORLD, "max_steps": 7}))
    for episode in explorer.take(4):
        stacked = np.concatenate([episode.wrist[[0, *range(7)]], episode.wrist, episode.wrist], 1)
        np.savez(
            folder / f"{episode.number}.npz",
            observation=stacked,
            action=np.concatenate([np.zeros((1, 4)), episode.action[:, :4]]).astype(np.float32),
            reward=np.zeros(8, np.float32),
            discount=np.ones(8, np.float32),
        )
    return folder


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """A world model, and what an explorer of phase 3 collected around it."""
    made = AdversarialTrainer(game_config(tmp_path_factory.mktemp("collected")), world_model())
    found = made.rollouts.collect()
    made.close()
    return made.policy, found
