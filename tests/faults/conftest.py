"""What the tests of faults share: the registered environments, the command, and a folder of bad files."""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from faulty_worlds import OFFLINE, Command, Faulty, Seeing, cut, flip, run_once
from worlds import Counting

from deft.cli import main
from deft.runs import checkpoint

CONFIGS = {
    "syntax.json": '{"env": {"id": "CartPole-v1"} "seed": 1}',
    "elision.json": '{"env": {"id": "CartPole-v1"},\n...\n}',
    "empty.yaml": "# nothing yet\n",
    "list.yaml": "- env\n- policy\n",
    "syntax.yaml": "env:\n  id: [CartPole-v1\n",
    "twice.yaml": "seed: 1\nseed: 2\n",
    "key.yaml": "env: {id: CartPole-v1, num_env: 4}",
    "section.yaml": "trainers: {total_timesteps: 10}",
    "elsewhere.yaml": "trainer: {learning_rate: 0.1}",
    "type.yaml": "trainer: {total_timesteps: many}",
    "range.yaml": "algorithm: {name: ppo, cfg: {gae_lambda: 1.5}}",
    "choice.yaml": "trainer: {buffer_type: ring}",
    "nan.yaml": "algorithm: {name: ppo, cfg: {clip_range: .nan}}",
    "algorithm.yaml": "algorithm: {name: pp0}",
    "code.yaml": "!!python/object/apply:os.getcwd []",
    "settings.toml": "seed = 1\n",
    "vla-without-model.yaml": "policy: {name: vla}",
}


@pytest.fixture(scope="module", autouse=True)
def _registered_environments() -> Iterator[None]:
    gymnasium.register("bad/Faulty-v0", Faulty)
    gymnasium.register("bad/Seeing-v0", Seeing)
    yield
    del gymnasium.registry["bad/Faulty-v0"], gymnasium.registry["bad/Seeing-v0"]


@pytest.fixture
def deft(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `deft …` in this process: its exit status, and the lines on stderr."""

    def run(command: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        status = main(shlex.split(command))
        return status, capsys.readouterr().err.splitlines()

    return run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bad files of every kind, a good run, and runs that were damaged; nothing of it may change."""
    place = tmp_path_factory.mktemp("place")
    for name, text in CONFIGS.items():
        (place / name).write_text(text)
    (place / "binary.yaml").write_bytes(b"\xff\xfe\x00\x01")
    (place / "empty").mkdir()
    (place / "file").write_text("not a folder\n")

    run = run_once(place / "run")

    def copied(name: str) -> Path:
        return Path(shutil.copytree(run, place / name))

    cut(copied("cut-state") / "checkpoint-64" / checkpoint.TRAINING_STATE, 0.5)
    cut(copied("cut-model") / "checkpoint-64" / checkpoint.MODEL, 0.99)
    cut(copied("empty-state") / "checkpoint-64" / checkpoint.TRAINING_STATE, 0.0)
    flip(copied("flipped-state") / "checkpoint-64" / checkpoint.TRAINING_STATE)
    flip(copied("flipped-model") / "checkpoint-64" / checkpoint.MODEL)
    (place / "flipped-model" / checkpoint.BEST).symlink_to("checkpoint-64")
    (copied("no-state") / "checkpoint-64" / checkpoint.TRAINING_STATE).unlink()
    (copied("no-config") / "config.yaml").unlink()
    for path in checkpoint.list_checkpoints(place / "no-config"):  # which hold the settings too
        (path / checkpoint.TRAINING_STATE).unlink()
    for path in checkpoint.list_checkpoints(copied("all-damaged")):
        (path / checkpoint.MODEL).write_bytes(b"PK\x03\x04 junk")

    foreign = place / "foreign"
    for name, state in {
        "format": {"epoch": 3, "optimizer": {}},
        "keys": {"format": checkpoint.CHECKPOINT_FORMAT, "algorithm_name": "ppo"},
        "list": [1, 2, 3],
        "object": Counting(),
    }.items():
        (foreign / name).mkdir(parents=True)
        torch.save({"weight": torch.zeros(2)}, foreign / name / checkpoint.MODEL)
        torch.save(state, foreign / name / checkpoint.TRAINING_STATE)
    (foreign / "weights-only").mkdir()
    torch.save({"weight": torch.zeros(2)}, foreign / "weights-only" / checkpoint.MODEL)

    def write_vla(name: str, env: str = "bad/Seeing-v0", policy: str = "", **vla: Any) -> None:
        fields = ", ".join(f"{key}: {value}" for key, value in {"model_class": "gpt-vla", **vla}.items())
        (place / name).write_text(f"env: {{id: {env}}}\npolicy: {{name: vla, {policy} vla_config: {{{fields}}}}}\n")

    torch.save({"gripper.weight": torch.zeros(2, 2)}, place / "weights.pth")
    (place / "weights.safetensors").write_bytes(b"{}")
    write_vla("vla-file.yaml", model_path=place / "nowhere.pth")
    write_vla("vla-class.yaml", model_class="deft.models.vla.gpt.GPTVLAMode")
    write_vla("vla-module.yaml", model_class="no_such_package.Model")
    write_vla("vla-no-model.yaml", model_class="collections.OrderedDict")
    write_vla("vla-keys.yaml", model_path=place / "weights.pth")
    write_vla("vla-damaged.yaml", model_path=place / "weights.safetensors")
    write_vla("vla-keyword.yaml", model_config="{image_sizes: 16}")
    write_vla("vla-action-dim.yaml", policy="action_dim: 7,")
    write_vla("vla-discrete.yaml", env="CartPole-v1")
    write_offline(place)
    return place


def write_offline(place: Path) -> None:
    """Datasets good and damaged, runs on a dataset with an environment and without one, and their parts."""
    generator, rows = np.random.default_rng(0), 40
    columns = {
        "observations": generator.normal(size=(rows, 3)).astype(np.float32),
        "actions": generator.uniform(-2, 2, (rows, 1)).astype(np.float32),
        "rewards": generator.normal(size=rows).astype(np.float32),
        "terminals": np.arange(rows) % 10 == 9,
        "timeouts": np.zeros(rows, bool),
    }
    spoiled = columns["rewards"].copy()
    spoiled[13] = np.nan
    for name, change in {
        "good": {},
        "nan": {"rewards": spoiled},
        "short": {"actions": columns["actions"][:7]},
        "lacks": {"rewards": None},
        "empty-rows": {key: values[:0] for key, values in columns.items()},
    }.items():
        with h5py.File(place / f"{name}.hdf5", "w") as file:
            for key, values in (columns | change).items():
                if values is not None:
                    file[key] = values
    shutil.copy(place / "good.hdf5", place / "cut.hdf5")
    cut(place / "cut.hdf5", 0.5)
    (place / "text.hdf5").write_text("not a dataset\n")
    for name, flags in {"offline": "--env Pendulum-v1", "no-env": ""}.items():
        command = f"train td3-bc --dataset {place}/good.hdf5 {OFFLINE} {flags} --output-dir {place}/{name}"
        assert main(shlex.split(command)) == 0
