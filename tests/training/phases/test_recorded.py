"""Recorded video as episodes: cameras, frames, held-out episodes, and the training of phase 1 on it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from explorers import make_teacher
from f1_worlds import micro_config, same, small_policy
from gymnasium import spaces
from panning_camera import WORLD, panning_config
from safetensors.torch import save_file

from deft.config.loading import to_dict
from deft.data.episodes import batch_episodes
from deft.data.robot_episode import RobotEpisode
from deft.errors import InputError
from deft.runs import checkpoint
from deft.training.phases import teacher
from deft.training.phases.exploration import Exploration, InlineExplorer
from deft.training.phases.recorded import (
    DatasetExplorer,
    find_cameras,
    last_picture,
    open_video,
    split,
    trained_on,
    warn_of_seen_episodes,
)
from deft.training.phases.teacher import TeacherTrainer, train_teacher


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


# -- phase 1 on recorded video ---------------------------------------------------------------------------------------


def test_a_dataset_trains_the_same_model(tmp_path, recording):
    made = make_teacher(tmp_path / "run", dataset=str(recording), steps_per_episode=7, num_episodes=8)
    made.train()
    explorer = made.explorer
    assert isinstance(explorer, DatasetExplorer)
    assert explorer.num_episodes == 3  # one of four is kept out
    assert set(explorer.training_episodes) | set(explorer.held_out_episodes) == {0, 1, 2, 3}
    kept = explorer.held_out(9)
    assert [episode.number for episode in kept] == explorer.held_out_episodes.tolist()
    assert np.array_equal(
        kept[0].wrist, InlineExplorer(Exploration({"world": WORLD, "max_steps": 7})).take(4)[kept[0].number].wrist
    )
    assert kept[0].state.shape == (8, 32)
    low, high = (np.array(limit) for limit in explorer.normalization["action"])
    episode = explorer.read(int(explorer.training_episodes[0]))
    raw = explorer.dataset.episode(int(explorer.training_episodes[0])).action
    assert np.allclose((episode.action[:, :2] * (high - low)[:2] + (low + high)[:2]) / 2, raw[:, :2], atol=1e-6)
    assert not episode.action[:, 2:].any()  # dims that never change, and padding
    state = checkpoint.load_training_state(tmp_path / "run" / "checkpoint-8")["state"]
    assert state["normalization"] == explorer.normalization


def test_recorded_episodes_are_new_ones_each_time(tmp_path, recording):
    """With colours or positions changed every round takes new copies of the three; without, what is kept is enough."""
    settings = {"dataset": str(recording), "steps_per_episode": 7, "num_episodes": 8, "batch_size": 2}
    plain = make_teacher(tmp_path / "plain", colour_augmentation=0.0, **settings)
    plain.train()
    assert (plain.num_taken, len(plain.buffer)) == (3, 3)
    moved = make_teacher(tmp_path / "moved", colour_augmentation=0.0, shift_augmentation=3, **settings)
    moved.train()
    assert (moved.num_taken, len(moved.buffer)) == (9, 9)  # 3, then 2 in each of the three rounds after the first


def test_motion_is_learned_where_a_recording_moves(tmp_path, recording, monkeypatch):
    """Two episodes of 4 steps, all still but one step of 40 levels: with the mean, 5, each of the others has a share of
    5 / 80, and that one 45 / 80, of the steps that the motion prior is trained on."""
    settings = {"batch_size": 1, "bptt_length": 1, "motion_warmup": 0.5}
    made = make_teacher(tmp_path / "run", small_policy(motion_prior=True), dataset=str(recording), **settings)
    still = np.full((5, 3, 16, 16), 100, np.uint8)
    moves = still.copy()
    moves[3:] += 40
    zeros = {"state": np.zeros((5, 32), np.float32), "action": np.zeros((4, 32), np.float32)}
    batch = batch_episodes([RobotEpisode(wrist=wrist, **zeros) for wrist in (still, moves)])
    assert teacher.step_changes(batch).tolist() == [[0, 0, 0, 0], [0, 0, 40, 0]]
    trained, nothing = [], torch.tensor(0.0)

    def note(forward, steps, *_):
        trained.append(float(teacher.copy_loss(steps)))
        return {"motion_loss": nothing}, nothing

    monkeypatch.setattr(made, "update_in_parts", note)
    for _ in range(50):
        made._train_motion(batch)
    assert np.mean(np.array(trained) > 0) == pytest.approx(45 / 80, abs=0.08)  # of 400: 0.025 deviation


def test_a_recording_may_be_taken_at_a_lower_rate(tmp_path, recording):
    """Of 8 frames and 7 actions every third from the second on: frames 1, 4, 7; actions the means of 1–3 and 4–6."""
    whole = make_teacher(tmp_path / "whole", dataset=str(recording))._open_explorer()
    skips = make_teacher(tmp_path / "skips", dataset=str(recording), frame_skip=3)._open_explorer()
    every, third = whole.read(0), skips.read(0, 1)
    assert np.array_equal(third.wrist, every.wrist[[1, 4, 7]])
    assert np.allclose(third.action, [every.action[1:4].mean(0), every.action[4:7].mean(0)], atol=1e-6)
    assert skips.longest == 2
    kept = skips.held_out(1)  # from its first, second and third frame
    assert [len(episode.wrist) for episode in kept] == [3, 3, 2]
    assert np.array_equal(kept[1].wrist, whole.held_out(1)[0].wrist[[1, 4, 7]])
    with pytest.raises(InputError, match="frame_skip 5: the shortest episode"):
        make_teacher(tmp_path / "none", dataset=str(recording), frame_skip=5)._open_explorer()


@pytest.mark.parametrize(("name", "value"), [("frame_skip", 2), ("shift_augmentation", 4), ("wrist_camera", "hand")])
def test_settings_of_recordings_need_one(tmp_path, name, value):
    with pytest.raises(InputError, match=f"{name}: for recordings alone; name one with dataset"):
        make_teacher(tmp_path, **{name: value})


def test_a_dataset_run_resumes_bit_for_bit(tmp_path, recording):
    settings = {"dataset": str(recording), "steps_per_episode": 7, "scheduler": "constant"}
    once = make_teacher(tmp_path / "once", **settings)
    once.train()
    make_teacher(tmp_path / "twice", num_episodes=4, **settings).train()
    resumed = make_teacher(tmp_path / "twice", auto_resume=True, **settings)
    resumed.policy.load_state_dict(checkpoint.load_part(tmp_path / "twice" / "checkpoint-4", "model.pt"))
    resumed.train()
    assert same(once.policy.state_dict(), resumed.policy.state_dict())


def test_a_dataset_with_more_dims_makes_a_wider_model(tmp_path, recording):
    for file in recording.glob("*.npz"):
        arrays = dict(np.load(file))
        arrays["action"] = np.concatenate([arrays["action"]] * 10, 1)
        np.savez(file, **arrays)
    config = panning_config(tmp_path / "run", dataset=str(recording), num_episodes=2)
    (tmp_path / "model.json").write_text(json.dumps(to_dict(micro_config())))
    config.model.config_file = str(tmp_path / "model.json")
    train_teacher(config)
    assert json.loads((tmp_path / "run" / "f1_config.json").read_text())["max_action_dim"] == 40


def test_a_new_model_of_a_recording_takes_its_tokenizer_and_expects_stillness(tmp_path, recording):
    """The prior has a tail; the tokenizer is the named file's, its codes those that are trained on."""
    other = small_policy(motion_prior=True)
    tensors = {name: value.contiguous() for name, value in other.tokenizer.state_dict().items()}
    save_file(tensors, tmp_path / "tokenizer.safetensors")
    config = panning_config(tmp_path / "run", dataset=str(recording), num_episodes=2)
    (tmp_path / "model.json").write_text(json.dumps(to_dict(micro_config(motion_prior=True))))
    config.model.config_file, config.model.untrained_tokenizer = str(tmp_path / "model.json"), False
    config.model.tokenizer_weights = str(tmp_path / "tokenizer.safetensors")
    made = TeacherTrainer(config)
    assert made.policy.model.motion.tail == 1.5
    assert same(made.policy.tokenizer.state_dict(), tensors)
    made.close()
    config.model.checkpoint_path = "teacher.safetensors"
    with pytest.raises(InputError, match="tokenizer_weights: for new models"):
        TeacherTrainer(config)


def test_a_resumed_run_keeps_its_tokenizer(tmp_path, recording):
    config = panning_config(tmp_path / "run", dataset=str(recording), num_episodes=2)
    (tmp_path / "model.json").write_text(json.dumps(to_dict(micro_config())))
    config.model.config_file = str(tmp_path / "model.json")
    train_teacher(config)
    config.run.auto_resume, config.model.tokenizer_weights = True, "another.safetensors"
    with pytest.raises(InputError, match=r"tokenizer_weights: another\.safetensors differs from the resumed run's"):
        train_teacher(config)
