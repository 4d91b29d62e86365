"""Recorded video as episodes: cameras, frames, and held-out episodes that a tokenizer was trained on."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from safetensors.torch import save_file

from deft.errors import InputError
from deft.training.phases.recorded import (
    find_cameras,
    last_picture,
    open_video,
    split,
    trained_on,
    warn_of_seen_episodes,
)


def test_cameras_and_frames_of_a_dataset(recording):
    dataset = open_video(str(recording), {}, 16)
    assert find_cameras(dataset, None, None) == ("", None)
    pictures = {name: spaces.Box(0, 255, (3, 8, 8), np.uint8) for name in ("wrist", "head")}
    both = SimpleNamespace(name="two", observation_space=spaces.Dict(pictures))
    assert find_cameras(both, None, None) == ("wrist", "head")
    assert find_cameras(both, None, "off") == ("wrist", None)
    with pytest.raises(InputError, match="no images 'left'"):
        find_cameras(dataset, "left", None)
    grey = np.arange(8, dtype=np.uint8).reshape(2, 1, 2, 2)
    assert np.array_equal(last_picture(grey)[:, 2], grey[:, 0])
    with pytest.raises(InputError, match="4 channels"):
        last_picture(np.zeros((2, 4, 2, 2), np.uint8))
    assert [len(part) for part in split(20, 0.1, 0)] == [18, 2]
    assert [len(part) for part in split(3, 0.0, 0)] == [2, 1]
    with pytest.raises(InputError, match="one episode"):
        split(1, 0.5, 0)


def test_a_tokenizer_that_was_trained_on_held_out_episodes_warns(tmp_path, recording, caplog):
    dataset = open_video(str(recording), {}, 16)
    training, held_out = split(dataset.num_episodes, 0.1, 0)
    for name, episodes, num_warnings in (("good", training, 0), ("bad", np.concatenate([training, held_out]), 1)):
        header = {"trained_on": json.dumps(trained_on(dataset, episodes))}
        save_file({"weight": torch.zeros(1)}, tmp_path / name, header)
        caplog.clear()
        warn_of_seen_episodes(tmp_path / name, dataset, held_out)
        assert len(caplog.records) == num_warnings
    assert f"trained on episode {held_out[0]}, which is held out" in caplog.text
    save_file({"weight": torch.zeros(1)}, tmp_path / "other")
    caplog.clear()
    warn_of_seen_episodes(tmp_path / "other", dataset, held_out)  # of the tabletop: its file says nothing
    assert not caplog.records
