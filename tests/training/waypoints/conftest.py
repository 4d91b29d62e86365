"""A recording of the toy and a supervised policy trained on it, made once for the tests of this folder."""

import pytest

from deft.config.settings import LoggingConfig
from deft.config.waypoint_settings import WaypointRecordingConfig, WaypointSFTConfig
from deft.training.waypoints.record import record
from deft.training.waypoints.sft import train_sft

TOY = {"camera_size": 16, "num_waypoints": 4, "horizon": 1}


@pytest.fixture(scope="session")
def recording(tmp_path_factory):
    path = tmp_path_factory.mktemp("waypoints") / "toy.npz"
    record(WaypointRecordingConfig(out=str(path), env="toy", episodes=200, env_kwargs=TOY))
    return path


@pytest.fixture(scope="session")
def sft(recording):
    folder = recording.parent / "sft"
    train_sft(WaypointSFTConfig(dataset=str(recording), out_dir=str(folder), num_epochs=8, lr=2e-3, threads=1))
    return folder


@pytest.fixture
def quiet():
    return LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False, progress_bar=False)


@pytest.fixture
def toy():
    return dict(TOY)
