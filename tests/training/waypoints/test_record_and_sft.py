"""Recorded driving, and the supervised policy that is trained on it."""

import json
import os
import random
import signal

import numpy as np
import pytest
import torch

from deft.config.waypoint_settings import WaypointRecordingConfig, WaypointSFTConfig
from deft.data.waypoint_recording import WaypointRecording
from deft.envs.waypoints.toy import ToySimulator
from deft.errors import InputError
from deft.models.waypoint import WaypointSFT, WaypointShape
from deft.runs.waypoint_files import load_sft, save_sft
from deft.training.waypoints import sft as waypoint_sft
from deft.training.waypoints.record import record
from deft.training.waypoints.sft import train_sft


def test_a_recording_holds_what_was_seen_and_planned(recording, toy):
    found = WaypointRecording.load(recording)
    assert len(found) == 200  # 200 episodes of one decision
    simulator = ToySimulator(1, **toy)
    for episode in (0, 17, 150):  # more than the copies that recorded: episode i is of seed i
        simulator.reset(np.arange(1), [episode])
        np.testing.assert_array_equal(found.camera[episode], simulator.observe()["camera"][0])
        np.testing.assert_allclose(found.waypoints[episode], simulator.target_waypoints()[0], rtol=1e-6)
    assert found.about["env"] == "toy"


def test_noise_is_driven_but_not_recorded_and_label_noise_is(tmp_path):
    kwargs = {"env": "driving", "episodes": 2, "env_kwargs": {"camera_size": 16}}
    plain, noisy, mislabelled = tmp_path / "plain.npz", tmp_path / "noisy.npz", tmp_path / "labels.npz"
    record(WaypointRecordingConfig(out=str(plain), noise=0.0, **kwargs))
    record(WaypointRecordingConfig(out=str(noisy), noise=1.0, **kwargs))
    record(WaypointRecordingConfig(out=str(mislabelled), noise=0.0, label_noise=0.5, **kwargs))
    first, second, third = (WaypointRecording.load(path) for path in (plain, noisy, mislabelled))
    np.testing.assert_array_equal(second.waypoints[0], first.waypoints[0])  # the first plan, before any noise
    assert not np.allclose(second.motion[1], first.motion[1])
    np.testing.assert_array_equal(third.motion, first.motion)
    assert np.std(third.waypoints - first.waypoints) == pytest.approx(0.5, rel=0.1)


def test_supervised_training_fits_and_writes_the_files(sft):
    model, about = load_sft(sft)
    metrics = json.loads((sft / "train_metrics.json").read_text())
    assert [entry["epoch"] for entry in metrics] == list(range(1, 9))
    assert metrics[-1]["ade"] < 0.7 * metrics[0]["ade"]
    assert metrics[-1]["ade"] < 0.2
    assert about["dataset"]["env"] == "toy"
    assert json.loads((sft / "config.json").read_text())["num_epochs"] == 8
    # It looks at the picture: another picture, other waypoints.
    streams = {"camera": torch.zeros(2, 3, 16, 16, dtype=torch.uint8), "motion": torch.zeros(2, 5)}
    streams["camera"][1, :, :, :6] = 255
    first, second = model(streams)
    assert (first - second).abs().max() > 0.05


def test_validation_is_on_whole_episodes_that_were_kept_out(tmp_path):
    from deft.training.waypoints.sft import _split

    rows = WaypointRecording(*(np.zeros((40, 1)) for _ in range(3)), np.repeat(np.arange(10), 4), {})
    training, held_out = _split(rows, 0.2, seed=0)
    assert len(held_out) == 8
    assert not set(rows.episode[training]) & set(rows.episode[held_out])
    with pytest.raises(InputError, match="leaves none to train on"):
        _split(rows, 1.0, seed=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda path: None, "does not exist; `deft collect waypoints"),
        (lambda path: path.write_bytes(b"not a zip"), "is damaged, or not a waypoint recording"),
        (lambda path: np.savez(path, camera=np.zeros((1, 3, 8, 8))), "has no motion, waypoints, episode, about"),
    ],
)
def test_a_dataset_that_is_none_is_one_line(tmp_path, make, message):
    path = tmp_path / "data.npz"
    make(path)
    with pytest.raises(InputError, match=message):
        train_sft(WaypointSFTConfig(dataset=str(path), out_dir=str(tmp_path / "sft")))


def test_nothing_is_overwritten_unasked(recording, sft, toy):
    with pytest.raises(InputError, match="--overwrite replaces it"):
        record(WaypointRecordingConfig(out=str(recording), env="toy"))
    with pytest.raises(InputError, match="--overwrite replaces it"):
        train_sft(WaypointSFTConfig(dataset=str(recording), out_dir=str(sft)))


@pytest.mark.parametrize("where", ["encode", "_validate"], ids=["in an epoch", "before a validation"])
def test_a_signal_saves_and_the_resumed_run_is_the_same(recording, tmp_path, monkeypatch, where):
    """The signal comes in the second of three epochs: in its second minibatch, or in its validation."""

    def config(name: str, **run) -> WaypointSFTConfig:
        return WaypointSFTConfig(str(recording), str(tmp_path / name), num_epochs=3, threads=1, device="cpu", **run)

    train_sft(config("whole"))
    owner = WaypointSFT if where == "encode" else waypoint_sft.WaypointSFTTrainer
    method, calls = getattr(owner, where), [0]
    # 180 of 200 decisions are trained on: three minibatches an epoch, and the validation encodes once.
    at = 6 if where == "encode" else 2

    def signalling(*given):
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return method(*given)

    with monkeypatch.context() as patched:
        patched.setattr(owner, where, signalling)
        with pytest.raises(SystemExit) as ended:
            train_sft(config("half"))
    assert (ended.value.code, calls[0]) == (143, at)
    assert not (tmp_path / "half" / "model.pt").exists()
    with pytest.raises(InputError, match="--auto-resume continues it"):
        train_sft(config("half"))
    with pytest.raises(InputError, match="was trained with learning_rate"):
        train_sft(config("half", resume=True, lr=0.1))
    train_sft(config("half", resume=True))
    one, other = (load_sft(tmp_path / name)[0].state_dict() for name in ("whole", "half"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    first, second = (json.loads((tmp_path / name / "train_metrics.json").read_text()) for name in ("whole", "half"))
    assert first == second
    assert not list((tmp_path / "half").glob("checkpoint-*"))


def test_a_flipped_bit_is_detected_or_changes_nothing(tmp_path):
    """A policy in one file has no manifest: the CRC-32 of each tensor protects it; padding between them may differ."""
    torch.manual_seed(0)
    model, path = WaypointSFT(WaypointShape(16, 2, 3, 8, (8,))), tmp_path / "model.pt"
    save_sft(model, path, {"about": "it"})
    whole, detected = path.read_bytes(), 0
    for bit in random.Random(0).sample(range(8 * len(whole)), 60):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        try:
            found, about = load_sft(path)
        except InputError:
            detected += 1
        else:
            assert about == {"about": "it"}
            assert all(torch.equal(value, model.state_dict()[name]) for name, value in found.state_dict().items())
    assert detected > 30  # most of the file is tensors
