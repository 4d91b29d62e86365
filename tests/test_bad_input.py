"""What a user gets wrong, and what breaks under a run: one clear line, the right exit status, nothing saved is lost.

Exit status 2: a config, call, file or environment that cannot be used. 1: a run that started and failed.
"""

from __future__ import annotations

import errno
import hashlib
import os
import pickle
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import h5py
import numpy as np
import pytest
import torch
from gymnasium import spaces
from worlds import Counting

import deft.runs.logging as run_logging
from deft import (
    PPO,
    ActorCritic,
    DatasetWriter,
    PPOTrainer,
    RLConfig,
    RolloutBuffer,
    Trainer,
    VLABuffer,
    load_vla_model,
)
from deft.cli import main
from deft.config.settings import LoggingConfig
from deft.envs.make import wrap
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run
from deft.runs import checkpoint
from deft.training.collection import Collector

# A run of two rollouts with a checkpoint after each; --console-level leaves stderr to the one line of an error.
TINY = (
    "--total-timesteps 64 --rollout-steps 32 --batch-size 32 --ppo-epochs 1 --hidden-sizes 8 --save-freq 32 "
    "--eval-freq 0 --device cpu --no-tensorboard --no-enable-file-logging --console-level CRITICAL"
)
NEVER = 10**9


class Faulty(Counting):
    """Episodes of 5 steps; from step `at` of its life on it has the named fault. `size`: of its observation."""

    def __init__(self, fault: str = "", at: int = 0, size: int = 2) -> None:
        super().__init__(length=5)
        self.fault, self.at, self.size, self.life = fault, at, size, 0
        self.observation_space = spaces.Box(-1e6, 1e6, (size,), np.float32)
        if fault == "tuple observation":
            self.observation_space = spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))
        if fault == "dict action":
            self.action_space = spaces.Dict({"arm": spaces.Discrete(2)})
        if fault == "constructor":
            raise RuntimeError("the robot\nis switched off")

    def reset(self, *, seed=None, options=None):
        observation, info = super().reset(seed=seed)
        observation = np.resize(observation, self.size)
        if self.has("reset raises"):
            raise RuntimeError("the arm\nis stuck")
        return self.spoiled(observation, "reset "), info

    def step(self, action):
        self.life += 1
        observation, reward, terminated, truncated, info = super().step(action)
        if self.has("raises"):
            raise ValueError("the gripper\nfell off")
        if self.has("four values"):
            return observation, reward, terminated, info
        reward = {"nan reward": np.nan, "no reward": None}.get(self.fault, reward) if self.is_due() else reward
        return self.spoiled(np.resize(observation, self.size)), reward, terminated, truncated, info

    def is_due(self) -> bool:
        return self.life >= self.at

    def has(self, fault: str) -> bool:
        return self.fault == fault and self.is_due()

    def spoiled(self, observation: np.ndarray, when: str = "") -> np.ndarray:
        if self.has(f"{when}nan"):
            return np.full_like(observation, np.nan)
        if self.has(f"{when}shape"):
            return np.zeros(7, np.float32)
        if self.has(f"{when}broadcast"):
            return np.zeros(1, np.float32)
        return observation


class Seeing(gymnasium.Env):
    """What a VLA model reads: a picture, joint positions and an instruction; two action dims."""

    def __init__(self) -> None:
        self.observation_space = spaces.Dict(
            {
                "image": spaces.Box(0, 255, (16, 16, 3), np.uint8),
                "proprio": spaces.Box(-1, 1, (3,), np.float32),
                "instruction": spaces.Text(8),
            }
        )
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)


@pytest.fixture(scope="module", autouse=True)
def _registered_environments() -> Iterator[None]:
    gymnasium.register("bad/Faulty-v0", Faulty)
    gymnasium.register("bad/Seeing-v0", Seeing)
    yield
    del gymnasium.registry["bad/Faulty-v0"], gymnasium.registry["bad/Seeing-v0"]


Command = Callable[[str], tuple[int, list[str]]]


@pytest.fixture
def deft(capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `deft …` in this process: its exit status, and the lines on stderr."""

    def run(command: str) -> tuple[int, list[str]]:
        capsys.readouterr()
        status = main(shlex.split(command))
        return status, capsys.readouterr().err.splitlines()

    return run


def run_once(folder: Path, flags: str = "") -> Path:
    """A finished run of `Faulty`, with the checkpoints of 32 and 64 steps."""
    assert main(shlex.split(f"train ppo --env bad/Faulty-v0 {TINY} --output-dir {folder} {flags}")) == 0
    assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["checkpoint-32", "checkpoint-64"]
    return folder


def contents(folder: Path) -> dict[str, str]:
    """Every file below a folder, by a digest of its bytes."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def assert_one_line(lines: list[str], *named: str) -> None:
    """One line, from Deft, that names what is wrong."""
    assert len(lines) == 1, lines
    assert lines[0].startswith("deft: ")
    assert "raceback" not in lines[0]
    for words in named:
        assert words in lines[0]


def cut(path: Path, keep: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * keep)])


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


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


OFFLINE = (
    "--num-epochs 1 --batch-size 20 --hidden-dim 8 --eval-freq 0 --device cpu --no-tensorboard "
    "--no-enable-file-logging --console-level CRITICAL"
)
REJECTED = [
    # The command line
    ("trian", "trian", "no such command", "'train'"),
    ("train", "ppo", "--config FILE"),
    ("train ppoo", "ppoo", "no such algorithm", "ppo"),
    ("train ppo --learning-rat 1e-3", "--learning-rat", "'--learning-rate'"),
    ("train ppo --learning-rate", "--learning-rate", "needs a value"),
    ("train ppo --learning-rate fast", "--learning-rate", "'fast'", "a number"),
    ("train ppo --learning-rate -1", "--learning-rate", "-1", "more than 0"),
    ("train ppo --num-envs 2.5", "--num-envs", "2.5", "whole number"),
    ("train ppo --seed 9223372036854775808", "--seed", "9223372036854775808", "less than"),
    ("train ppo --vector thread", "--vector", "'thread'", "'sync', 'process', 'envpool'"),
    ("train ppo --overwrite=yes", "--overwrite", "takes no value", "--no-overwrite"),
    ("train ppo --lr 1e-3 --learning-rate 1e-3", "--learning-rate", "the same setting as --lr"),
    ("train ppo --env-kwargs size", "--env-kwargs", "'size'", "KEY=VALUE"),
    ("train ppo --iterations 1 --total-timesteps 9", "--iterations", "--total-timesteps"),
    ("train ppo 100000", "'100000'", "a value follows its flag"),
    ("evaluate", "one run folder or checkpoint", "none"),
    ("evaluate {place}/run --episodes 0", "--episodes", "0", "at least 1"),
    # Config files
    ("train --config {place}/nowhere.yaml", "{place}/nowhere.yaml", "no such config file"),
    ("train --config cartpole-pp", "cartpole-pp", "'cartpole-ppo'"),
    ("train --config {place}/settings.toml", "{place}/settings.toml", ".toml", ".yaml"),
    ("train --config {place}/syntax.json", "{place}/syntax.json, line 1", "not valid JSON"),
    ("train --config {place}/elision.json", "{place}/elision.json, line 2", "'...'"),
    ("train --config {place}/empty.yaml", "{place}/empty.yaml", "empty"),
    ("train --config {place}/list.yaml", "{place}/list.yaml", "not a mapping"),
    ("train --config {place}/binary.yaml", "{place}/binary.yaml", "cannot be read as text"),
    ("train --config {place}/syntax.yaml", "{place}/syntax.yaml, line", "not valid YAML"),
    ("train --config {place}/code.yaml", "{place}/code.yaml", "not valid YAML"),
    ("train --config {place}/twice.yaml", "{place}/twice.yaml, line 2", "'seed' is given twice"),
    ("train --config {place}/key.yaml", "env.num_env", "unknown setting", "'num_envs'"),
    ("train --config {place}/section.yaml", "trainers", "unknown setting", "'trainer'"),
    ("train --config {place}/elsewhere.yaml", "trainer.learning_rate", "'algorithm.cfg.learning_rate'"),
    ("train --config {place}/type.yaml", "trainer.total_timesteps", "'many'", "whole number"),
    ("train --config {place}/range.yaml", "algorithm.cfg.gae_lambda", "1.5", "at most 1"),
    ("train --config {place}/choice.yaml", "trainer.buffer_type", "'ring'", "'standard', 'vla'"),
    ("train --config {place}/nan.yaml", "algorithm.cfg.clip_range", "nan", "finite"),
    ("train --config {place}/algorithm.yaml", "algorithm.name", "'pp0'", "'ppo'"),
    ("train --config {place}/vla-without-model.yaml", "policy", "vla_config", "model_class"),
    # Environments
    ("train ppo {new} --env CartPole-v7", "CartPole-v7", "use CartPole-v1"),
    ("train ppo {new} --env CartPol", "CartPol", "CartPole-v1"),
    ("train ppo {new} --env no_such_package:X-v0", "no_such_package", "cannot be imported"),
    (
        "train ppo {new} --env bad/Faulty-v0 --env-kwargs colour=red",
        "'colour': 'red'",
        "do not fit bad/Faulty-v0: Faulty",
    ),
    ("train ppo {new} --env bad/Faulty-v0 --env-kwargs fault=constructor", "bad/Faulty-v0", "robot is switched off"),
    ("train ppo {new} --env bad/Faulty-v0 --env-kwargs 'fault=tuple observation'", "Tuple", "Dict", "wrap"),
    ("train ppo {new} --env bad/Faulty-v0 --env-kwargs 'fault=dict action'", "'arm'", "Discrete", "wrap"),
    ("train ppo {new} --env bad/Faulty-v0 --policy vla --vla-model-class gpt-vla", "VLA", "Box", "Discrete(2)"),
    ("train ppo {new} --env CartPole-v1 --action-dim 7", "policy.action_dim", "7", "CartPole-v1"),
    # The machine
    ("train ppo {new} --env CartPole-v1 --device cuda:64", "cuda:64", "CUDA devices"),
    ("train ppo {new} --env CartPole-v1 --device tpu", "'tpu'", "cuda:N"),
    ("train ppo {new} --env CartPole-v1 --device mps", "'mps'", "cuda:N"),
    ("train ppo {new} --env CartPole-v1 --threads 100000", "threads", "100000", "1024"),
    # The run folder
    ("train ppo --env bad/Faulty-v0 --output-dir {place}/run", "{place}/run", "checkpoint-64", "--auto-resume"),
    ("train ppo --env bad/Faulty-v0 --output-dir {place}/file", "{place}/file", "is a file"),
    ("train ppo --env bad/Faulty-v0 --output-dir {place}/file/run", "{place}/file/run", "Not a directory"),
    ("train ppo --env bad/Faulty-v0 --output-dir ''", "output_dir", "empty"),
    ("train ppo --env bad/Faulty-v0 --output-dir {place}/{long}", "output_dir", "too long"),
    ("train ppo {tiny} --env No-v0 --overwrite --output-dir {place}/run", "No-v0"),
    ("train --resume {place}/no-state/checkpoint-32 --output-dir {place}/run", "{place}/run", "already holds a run"),
    # Checkpoints
    ("train ppo --resume {place}/nowhere", "{place}/nowhere", "no such checkpoint"),
    ("train --resume {place}/nowhere", "{place}/nowhere", "config.yaml"),
    ("train ppo --resume {place}/empty", "{place}/empty", "neither a checkpoint"),
    ("train ppo --resume {place}/file", "{place}/file", "a folder"),
    ("train --resume {place}/cut-state", "{place}/cut-state/checkpoint-64/training_state.pt", "cut short"),
    ("train --resume {place}/empty-state", "{place}/empty-state/checkpoint-64/training_state.pt", "cut short"),
    ("train --resume {place}/cut-model", "{place}/cut-model/checkpoint-64/model.pt", "cut short"),
    ("train --resume {place}/flipped-state", "{place}/flipped-state/checkpoint-64/training_state.pt", "hash differs"),
    ("train --resume {place}/flipped-model", "{place}/flipped-model/checkpoint-64/model.pt", "hash differs"),
    ("evaluate {place}/flipped-model", "{place}/flipped-model/checkpoint-64/model.pt", "hash differs"),
    (
        "train ppo {new} --env bad/Faulty-v0 --model-path {place}/flipped-model",
        "{place}/flipped-model/checkpoint-64/model.pt",
        "hash differs",
    ),
    ("train --resume {place}/no-state", "{place}/no-state/checkpoint-64/training_state.pt", "missing"),
    ("train --resume {place}/run --hidden-sizes 16", "{place}/run/checkpoint-64/model.pt", "16", "8"),
    ("train --resume {place}/run --memory-hidden 4", "{place}/run/checkpoint-64/model.pt", "missing memory"),
    ("train --resume {place}/run --env CartPole-v1", "{place}/run/checkpoint-64", "observation_space", "(2,)", "(4,)"),
    ("train --resume {place}/run --env-kwargs size=3", "{place}/run/checkpoint-64", "observation_space", "(3,)"),
    ("train --resume {place}/run --num-envs 3", "{place}/run/checkpoint-64", "1 environments, now 3", "num_envs"),
    ("train ppo --auto-resume --output-dir {place}/all-damaged", "{place}/all-damaged", "none of the 2 checkpoints"),
    ("train ppo --env bad/Faulty-v0 --resume {place}/foreign/format", "{place}/foreign/format", "not a Deft"),
    ("train ppo --env bad/Faulty-v0 --resume {place}/foreign/keys", "{place}/foreign/keys", "lacks", "collector"),
    ("train ppo --env bad/Faulty-v0 --resume {place}/foreign/list", "{place}/foreign/list", "not a Deft"),
    ("train ppo --env bad/Faulty-v0 --resume {place}/foreign/object", "{place}/foreign/object", "Python objects"),
    ("train ppo --env bad/Faulty-v0 --resume {place}/foreign/weights-only", "{place}/foreign/weights-only", "missing"),
    ("train ppo {new} --env bad/Faulty-v0 --model-path {place}/nowhere.pt", "{place}/nowhere.pt", "does not exist"),
    ("train ppo {new} --env bad/Faulty-v0 --model-path {place}/file", "{place}/file", "damaged"),
    ("train ppo {new} --env bad/Faulty-v0 --model-path {place}/weights.pth", "{place}/weights.pth", "does not fit"),
    ("evaluate {place}/nowhere", "{place}/nowhere", "no such checkpoint"),
    ("evaluate {place}/empty", "{place}/empty", "neither a checkpoint"),
    ("evaluate {place}/run --video video.mp4", "bad/Faulty-v0", "cannot be rendered"),
    ("evaluate {place}/no-config", "{place}/no-config/config.yaml", "missing"),
    ("evaluate {place}/cut-model", "{place}/cut-model/checkpoint-64/model.pt", "cut short"),
    # Offline: the command line
    ("train iql", "dataset", "missing", "--dataset"),
    ("train iql --expectile 1.5", "--expectile", "1.5", "less than 1"),
    ("train iql --expectile 0", "--expectile", "0", "more than 0"),
    ("train iql --cql-alpha 1", "--cql-alpha", "unknown flag"),
    ("train iql --dataset " + "a" * 300, "was not found"),
    ("evaluate " + "a" * 300, "no such checkpoint"),
    ("train iql --resume=", "--resume", "'' is empty"),  # of a shell variable that is not set: not a new run
    ("train iql --model-path=", "--model-path", "'' is empty"),
    ("train iql --total-timesteps 100", "--total-timesteps", "unknown flag"),
    ("train iql --num-epochs 0", "--num-epochs", "at least 1"),
    ("train iql --precision half", "--precision", "'half'", "'bf16'"),
    ("train cql --alpha hot", "--alpha: ", "'hot'", "one of 'auto'", "not a number"),
    ("train cql --alpha -1", "--alpha: ", "-1", "one of 'auto'", "at least 0"),
    ("train cql --min-q-weight 2", "--min-q-weight", "2", "at most 1"),
    ("train td3-bc --policy-delay 0", "--policy-delay", "at least 1"),
    ("train dt --n-head 3", "n_head 3", "embed_dim 128"),
    ("train dt --tau 0.1", "--tau", "unknown flag"),
    ("train td3bc --dataset {place}/good.hdf5", "td3bc", "td3-bc"),
    # Offline: datasets
    ("train iql {new} --dataset nowhere-medium-v2", "nowhere-medium-v2", "not found", "DEFT_DATASETS", "deft collect"),
    ("train iql {new} --dataset {place}/nowhere.hdf5", "{place}/nowhere.hdf5", "not found"),
    ("train iql {new} --dataset ''", "dataset", "name or a path"),
    ("train iql {new} --dataset {place}/cut.hdf5", "{place}/cut.hdf5"),
    ("train iql {new} --dataset {place}/text.hdf5", "{place}/text.hdf5"),
    ("train iql {new} --dataset {place}/file", "{place}/file", "formats"),
    ("train iql {new} --dataset {place}/empty", "{place}/empty", "formats"),
    ("train iql {new} --dataset {place}/nan.hdf5", "{place}/nan.hdf5", "row 13 (episode 1)", "rewards"),
    ("train iql {new} --dataset {place}/short.hdf5", "{place}/short.hdf5", "actions", "(7, 1)"),
    ("train iql {new} --dataset {place}/lacks.hdf5", "{place}/lacks.hdf5", "rewards"),
    ("train iql {new} --dataset {place}/empty-rows.hdf5", "{place}/empty-rows.hdf5", "empty"),
    ("train iql {new} --dataset {place}/good.hdf5 --dataset-options split=train", "{place}/good.hdf5", "split"),
    # Offline: environments, policies, the machine
    ("train iql {new} --dataset {place}/good.hdf5 --env CartPole-v1", "CartPole-v1", "observations", "(4,)", "(3,)"),
    ("train iql {new} --dataset {place}/good.hdf5 --env Pendulum-v9", "Pendulum-v9", "use Pendulum-v1"),
    ("train dt {new} --dataset {place}/good.hdf5 --num-seeds 3", "num_seeds", "one seed at a time"),
    ("train dt {new} --dataset {place}/good.hdf5 --max-episode-length 5", "max_episode_length", "10"),
    ("train iql {new} --dataset {place}/good.hdf5 --capture on --device cpu", "capture", "GPU", "auto"),
    ("train iql {new} --dataset {place}/good.hdf5 --device cuda:64", "cuda:64", "CUDA devices"),
    ("train iql {new} --dataset {place}/good.hdf5 --policy vla", "vla_config"),
    ("train dt {new} --dataset {place}/good.hdf5 --policy vla --vla-model-class gpt-vla", "policy", "dt"),
    # Offline: checkpoints
    ("train iql --dataset {place}/good.hdf5 --resume {place}/run", "iql", "{place}/run", "'ppo'"),
    ("train {new} --config {place}/offline/config.yaml --resume {place}/run", "{place}/run/checkpoint-64", "lacks"),
    ("train iql --dataset {place}/good.hdf5 --resume {place}/offline", "iql", "'td3-bc'"),
    ("train td3-bc --dataset {place}/good.hdf5 --output-dir {place}/offline", "{place}/offline", "--auto-resume"),
    ("train --resume {place}/offline --hidden-dim 16", "{place}/offline/checkpoint-2/model.pt", "8", "16"),
    ("train iql {new} --dataset {place}/good.hdf5 --model-path {place}/nowhere", "{place}/nowhere", "does not exist"),
    ("train iql {new} --dataset {place}/good.hdf5 --model-path {place}/run", "{place}/run", "does not fit"),
    (
        "train iql {new} --dataset {place}/good.hdf5 --model-path {place}/offline --hidden-dim 16",
        "{place}/offline",
        "does not fit",
    ),
    ("train dt {new} --dataset {place}/good.hdf5 --model-path {place}/offline", "{place}/offline", "does not fit"),
    ("evaluate {place}/no-env", "env", "names no environment", "--env"),
    ("evaluate {place}/no-env --env CartPole-v1", "bounded Box", "Discrete(2)"),
    ("evaluate {place}/offline --env Hopper-v5", "{place}/offline/checkpoint-2/model.pt", "does not fit"),
    ("evaluate {place}/offline --env Pendulum-v9", "Pendulum-v9", "use Pendulum-v1"),
    # Recording and watching
    ("collect", "--policy"),
    ("collect --policy random --env reach --out x/y-v0", "--steps", "--episodes"),
    ("collect --policy random --env reach --out x/y-v0 --steps 5 --episodes 5", "--steps", "one of them"),
    ("collect --policy random --out x/y-v0 --steps 5", "--env"),
    ("collect --policy {place}/nowhere --out x/y-v0 --steps 5", "{place}/nowhere"),
    ("collect --policy expert --env CartPole-v1 --out x/y-v0 --steps 5", "CartPole-v1", "expert"),
    ("collect --policy random --env CartPole-v7 --out x/y-v0 --steps 5", "CartPole-v7", "use CartPole-v1"),
    ("collect --policy {place}/no-env --out x/y-v0 --steps 5", "--env"),
    ("play --env CartPole-v1 --policy expert", "CartPole-v1", "expert"),
    ("play --env CartPol --policy random", "CartPol", "CartPole-v1"),
    ("play --policy {place}/nowhere", "{place}/nowhere"),
    ("play --policy {place}/no-env", "--env"),
    ("play --env tabletop --task fold --policy random", "fold"),
    ("doctor now", "now"),
    # VLA models
    ("train {new} --config {place}/vla-file.yaml", "{place}/nowhere.pth", "does not exist"),
    ("train {new} --config {place}/vla-class.yaml", "'GPTVLAMode'", "GPTVLAModel"),
    ("train {new} --config {place}/vla-module.yaml", "'no_such_package'", "PYTHONPATH"),
    ("train {new} --config {place}/vla-no-model.yaml", "collections.OrderedDict", "torch.nn.Module"),
    ("train {new} --config {place}/vla-keys.yaml", "{place}/weights.pth", "missing", "unexpected (gripper.weight)"),
    ("train {new} --config {place}/vla-damaged.yaml", "{place}/weights.safetensors", "cannot be read"),
    ("train {new} --config {place}/vla-keyword.yaml", "model_config.image_sizes", "'image_size'"),
    ("train {new} --config {place}/vla-action-dim.yaml", "policy.action_dim", "7", "2"),
    ("train {new} --config {place}/vla-discrete.yaml", "VLA", "CartPole-v1", "Discrete(2)"),
]


@pytest.mark.parametrize(("command", "named"), [(command, named) for command, *named in REJECTED])
def test_bad_input_is_refused_in_one_line(
    command: str, named: list[str], place: Path, tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    before = contents(place)
    words = {"place": place, "new": f"--output-dir {tmp_path}/new", "long": "x" * 300, "tiny": TINY}
    status, lines = deft(command.format(**words))
    assert status == 2, lines
    assert_one_line(lines, *(part.format(**words) for part in named))
    assert contents(place) == before
    assert not list(tmp_path.iterdir())  # no run was begun


@pytest.mark.skipif(os.geteuid() == 0 and not Path("/proc/self").exists(), reason="root may write everywhere")
def test_an_output_folder_that_cannot_be_written(tmp_path: Path, deft: Command) -> None:
    folder = Path("/proc/deft-run")
    if os.geteuid() != 0:
        (tmp_path / "locked").mkdir(mode=0o500)
        folder = tmp_path / "locked" / "run"
    status, lines = deft(f"train ppo --env bad/Faulty-v0 {TINY} --output-dir {folder}")
    assert status == 2
    assert_one_line(lines, "output_dir", str(folder), "cannot be written")


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_costs_no_run(
    package: str, place: Path, tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as where it is not installed
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    before = contents(run)
    status, lines = deft(f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {run} --overwrite --use-{package}")
    assert status == 2
    assert_one_line(lines, f"use_{package}", "not installed", f'pip install -e ".[{package}]"')
    assert contents(run) == before


def test_a_machine_without_cuda(tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, lines = deft(f"train ppo {TINY} --env CartPole-v1 --output-dir {tmp_path}/run --device cuda")
    assert status == 2
    assert_one_line(lines, "device", "'cuda'", "CUDA devices")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--env Hoper-v5", ("Hoper-v5", "Hopper-v5")),
        ("--env CartPole-v1 --env-kwargs colour=red", ("colour", "CartPole-v1")),
        ("--env CartPole-v1 --chunk-length 2", ("envpool", "chunk")),
    ],
)
def test_envpool_is_refused_in_one_line(flags: str, named: tuple[str, ...], tmp_path: Path, deft: Command) -> None:
    pytest.importorskip("envpool")
    status, lines = deft(f"train ppo {TINY} --vector envpool --output-dir {tmp_path}/run {flags}")
    assert status == 2
    assert_one_line(lines, *named)


def test_a_renderer_that_is_not_installed(tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    assert deft(f"train ppo {TINY} --env CartPole-v1 --output-dir {run}") == (0, [])
    monkeypatch.setitem(sys.modules, "pygame", None)  # as where it is not installed
    status, lines = deft(f"evaluate {run} --episodes 1 --video {tmp_path}/video.mp4")
    assert status == 2
    assert_one_line(lines, "CartPole-v1", "cannot be rendered", "pygame")


def test_a_rollout_larger_than_the_machine(tmp_path: Path, deft: Command) -> None:
    # 10^13 steps of at least 4 bytes: 40 TB
    status, lines = deft(
        f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {tmp_path} --rollout-steps 1e13 --total-timesteps 1e13"
    )
    assert status == 2
    assert_one_line(lines, "rollout_steps", "10000000000000", "GiB")


@pytest.mark.parametrize(
    ("owner", "method", "named"),
    [
        (ActorCritic, "evaluate_actions", ("batch_size than 32", "gradient_accumulation", "num_envs 1")),
        (Collector, "collect", ("num_envs 1", "rollout_steps")),
    ],
)
def test_a_gpu_that_runs_out_of_memory(
    owner: Any, method: str, named: tuple[str, ...], tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 GiB. GPU 0 has a total capacity")

    monkeypatch.setattr(owner, method, fail)
    status, lines = deft(f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {tmp_path}/run")
    assert status == 2
    assert_one_line(lines, "out of memory", "8.00 GiB", *named)


@pytest.mark.parametrize("package", ["warp", "mujoco_warp"])
def test_warp_that_is_not_installed(
    package: str, tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    status, lines = deft(f"train ppo {TINY} --env tabletop --vector warp --output-dir {tmp_path}/run")
    assert status == 2
    assert_one_line(lines, "env.vector: warp", "not installed", "[warp]")


# -- a damaged checkpoint among good ones ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["cut-state", "cut-model", "empty-state", "no-state", "flipped-state", "flipped-model"]
)
def test_auto_resume_goes_on_from_the_checkpoint_before(
    name: str, place: Path, tmp_path: Path, deft: Command, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(place / name, tmp_path / "run"))
    status, lines = deft(f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {run} --auto-resume")
    assert (status, lines) == (0, [])
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "skipped" in warnings[0]
    assert "checkpoint-64" in warnings[0]
    whole, problems = checkpoint.latest_whole_checkpoint(run)
    assert (whole, problems) == (run / "checkpoint-64", [])  # written anew


def test_overwrite_replaces_a_run_once_all_is_well(place: Path, tmp_path: Path, deft: Command) -> None:
    run = Path(shutil.copytree(place / "run", tmp_path / "run"))
    (run / "notes.txt").write_text("mine")
    status, lines = deft(f"train ppo {TINY} --env CartPole-v1 --output-dir {run} --overwrite --save-freq 64")
    assert (status, lines) == (0, [])
    assert [path.name for path in checkpoint.list_checkpoints(run)] == ["checkpoint-64"]
    assert "CartPole" in (run / "config.yaml").read_text()
    assert (run / "notes.txt").read_text() == "mine"


def test_a_copied_run_is_resumed_in_its_new_place(place: Path, tmp_path: Path, deft: Command) -> None:
    before = contents(place / "run")
    run = Path(shutil.copytree(place / "run", tmp_path / "copy"))
    status, lines = deft(f"train --resume {run} --total-timesteps 96")
    assert (status, lines) == (0, [])
    assert (run / "checkpoint-96").is_dir()
    assert contents(place / "run") == before


# -- runs that fail ----------------------------------------------------------------------------------------------------

FAILURES = [
    ("nan", "environment 0", "observation", "not a number"),
    ("nan reward", "environment 0", "reward", "not a number"),
    ("no reward", "environment 0 (bad/Faulty-v0)", "reward None", "one number"),
    ("raises", "environment 0 (bad/Faulty-v0)", "ValueError: the gripper fell off"),
    ("reset raises", "environment 0 (bad/Faulty-v0)", "RuntimeError: the arm is stuck", "reset()"),
    ("reset nan", "environment 0", "observation", "not a number"),
    ("four values", "environment 0 (bad/Faulty-v0)", "expected 5, got 4"),
    ("shape", "environment 0 (bad/Faulty-v0)", "(7,)", "observation_space", "(2,)"),
    ("broadcast", "environment 0 (bad/Faulty-v0)", "(1,)", "observation_space", "(2,)"),
    ("reset shape", "environment 0 (bad/Faulty-v0)", "(7,)", "observation_space", "(2,)"),
]


def assert_resumes(run: Path, deft: Command, flags: str = "") -> None:
    """The latest checkpoint is complete, and the run resumes from it to its end."""
    latest, problems = checkpoint.latest_whole_checkpoint(run)
    assert latest is not None
    assert not problems
    assert deft(f"train --resume {run} {flags}") == (0, [])
    assert (run / "checkpoint-64").is_dir()


@pytest.mark.parametrize(
    ("fault", "named", "buffer_type"),
    [
        *((fault, named, "standard") for fault, *named in FAILURES),
        *((fault, named, "vla") for fault, *named in FAILURES if fault in ("nan", "raises")),
    ],
)
def test_a_failing_environment_ends_the_run(
    fault: str, named: list[str], buffer_type: str, tmp_path: Path, deft: Command
) -> None:
    run = tmp_path / "run"
    status, lines = deft(
        f"train ppo {TINY} --env bad/Faulty-v0 --env-kwargs 'fault={fault}' at=50 --output-dir {run} "
        f"--buffer-type {buffer_type} --max-staleness 0"
    )
    assert status == 1, lines
    assert_one_line(lines, *named)
    assert [path.name for path in checkpoint.list_checkpoints(run)] == ["checkpoint-32"]
    assert_resumes(run, deft, f"--env-kwargs at={NEVER}")


def test_an_environment_that_never_keeps_to_its_space(tmp_path: Path, deft: Command) -> None:
    status, lines = deft(
        f"train ppo {TINY} --env bad/Faulty-v0 --env-kwargs 'fault=reset shape' --output-dir {tmp_path}/run"
    )
    assert status == 2
    assert_one_line(lines, "environment 0 (bad/Faulty-v0)", "(7,)", "observation_space", "(2,)")


def test_a_gradient_that_is_not_finite(tmp_path: Path, deft: Command) -> None:
    run = tmp_path / "run"
    status, lines = deft(
        f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {run} --learning-rate 1e30 --total-timesteps 320"
    )
    assert status == 1
    assert_one_line(lines, "gradient", "learning_rate")
    saved, problems = checkpoint.latest_whole_checkpoint(run)
    assert saved is not None
    assert not problems
    weights = checkpoint.load_part(saved, checkpoint.MODEL)
    assert all(bool(torch.isfinite(weight).all()) for weight in weights.values())


def test_weights_that_are_not_finite_never_replace_good_ones(
    tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    update = PPO.update

    def poisoned(self: PPO, batches: Any) -> Any:
        metrics = update(self, batches)
        if self.version == 2:  # the last step of this update overflowed; its loss was still finite
            next(self.policy.parameters()).data.view(-1)[0] = torch.nan
        return metrics

    monkeypatch.setattr(PPO, "update", poisoned)
    run = tmp_path / "run"
    status, lines = deft(f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {run} --keep-checkpoints 1")
    assert status == 1
    assert_one_line(lines, "weights", "64 steps", "learning_rate")
    monkeypatch.undo()
    assert [path.name for path in checkpoint.list_checkpoints(run)] == ["checkpoint-32"]
    assert_resumes(run, deft)


def no_space(path: str | None = None) -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)


def test_a_disk_that_is_full_at_a_checkpoint(tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    save, saved = torch.save, []

    def save_until_full(content: Any, file: Any) -> None:
        if len(saved) == 4:  # a checkpoint is three files: the second file of the second one
            file.write(b"half of it")
            raise no_space()
        save(content, file)
        saved.append(file)

    monkeypatch.setattr(torch, "save", save_until_full)
    run = tmp_path / "run"
    status, lines = deft(f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {run}")
    assert status == 1
    assert_one_line(lines, "checkpoint-64", str(run), "no space left")
    monkeypatch.undo()
    assert [path.name for path in run.glob("*checkpoint-*")] == ["checkpoint-32"]  # and nothing half-written
    assert_resumes(run, deft)


def test_a_disk_that_is_full_while_logging(tmp_path: Path, deft: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    write_line = run_logging.RunLogger._write_line

    def write_until_full(self: Any, kind: str, step: int, values: Any) -> None:
        if step == 64:
            raise no_space(str(self.run_dir / run_logging.METRICS_FILE))
        write_line(self, kind, step, values)

    monkeypatch.setattr(run_logging.RunLogger, "_write_line", write_until_full)
    run = tmp_path / "run"
    status, lines = deft(f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {run}")
    assert status == 1
    assert_one_line(lines, str(run / run_logging.METRICS_FILE), "No space left")
    monkeypatch.undo()
    # The weights of the second update are saved all the same: only the log had no room.
    assert [path.name for path in checkpoint.list_checkpoints(run)] == ["checkpoint-32", "checkpoint-64"]
    assert_resumes(run, deft)


def test_a_folder_in_the_place_of_the_best_checkpoint(tmp_path: Path, deft: Command) -> None:
    run = tmp_path / "run"
    (run / "best" / "mine").mkdir(parents=True)
    status, lines = deft(
        f"train ppo {TINY} --env bad/Faulty-v0 --output-dir {run} --eval-freq 32 --eval-episodes 1 --save-freq 0"
    )
    assert (status, lines) == (0, [])  # with a warning: ending a run here would lose it
    assert (run / "best.kept" / "mine").is_dir()
    assert (run / "best").is_symlink()


def test_messages_are_one_line_that_no_terminal_acts_on() -> None:
    error = InputError("config.yaml: 'a\nb' and \x1b[2J\x00 and \u202e are not allowed: é")
    assert str(error) == r"config.yaml: 'a b' and \x1b[2J\x00 and \u202e are not allowed: é"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


# -- from Python -------------------------------------------------------------------------------------------------------


def trainer_with(tmp_path: Path, env: Any, **settings: Any) -> Trainer:
    vector = wrap(env)
    policy = ActorCritic(vector.observation_space, vector.action_space)
    quiet = LoggingConfig(console_level="CRITICAL", tensorboard=False, enable_file_logging=False)
    return Trainer(policy, vector, PPO(policy), output_dir=tmp_path / "run", logging_config=quiet, **settings)


CALLS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a name that RLConfig lacks": (lambda _: RLConfig(learning_rat=1e-3), r"learning_rat: .*'learning_rate'"),  # type: ignore[call-arg]
    "text for a number": (lambda _: RLConfig(rollout_steps="many"), r"rollout_steps: 'many' is not a whole number"),  # type: ignore[arg-type]
    "out of range": (lambda _: RLConfig(discount_gamma=2.0), r"discount_gamma: 2\.0 is out of range.*at most 1"),
    "assigned": (lambda _: setattr(RLConfig(), "batch_size", 0), r"batch_size: 0 is out of range.*at least 1"),
    "another algorithm's": (
        lambda path: PPOTrainer("CartPole-v1", config=RLConfig(tau=0.5, output_dir=str(path / "run"))),
        r"tau: 0\.5 .*ppo has no such setting",
    ),
    "no environment": (
        lambda path: PPOTrainer(5, config=RLConfig(output_dir=str(path / "run"))),  # type: ignore[arg-type]
        r"env: int is not an environment; pass a gymnasium\.Env",
    ),
    "environments that differ": (
        lambda _: wrap([Counting(), gymnasium.make("CartPole-v1")]),
        r"environment 1 has observation_space .*, but environment 0 has",
    ),
    "one environment twice": (lambda _: wrap([Counting()] * 2), r"the same environment object was given twice"),
    "the algorithm of another policy": (
        lambda path: Trainer(*(lambda a, b: (a.policy, a.env, b.algorithm))(*_two_trainers(path))),
        r"trains another policy object",
    ),
    "a setting that Trainer lacks": (
        lambda path: trainer_with(path, Counting(), eval_frequency=3),
        r"eval_frequency: unknown setting; did you mean 'eval_freq'",
    ),
    "an empty rollout buffer": (lambda _: RolloutBuffer(4).get(), r"the rollout buffer is empty"),
    "an empty ring": (lambda _: VLABuffer(4).get(), r"VLA buffer with 0 new ones"),
    "actions of another shape": (
        lambda _: _stepped(wrap([Counting(), Counting()]), np.zeros(3, np.int64)),
        r"actions have shape \(3,\); 2 environments .* take \(2,\)",
    ),
    "a step before the reset": (lambda _: wrap(Counting()).step(np.zeros(1, np.int64)), r"before reset\(\)"),
    "a model file that is missing": (
        lambda path: load_vla_model(path / "nowhere.pth", "gpt-vla"),
        r"nowhere\.pth does not exist",
    ),
    "a checkpoint that is missing": (
        lambda path: trainer_with(path, Counting()).load(path / "nowhere"),
        r"nowhere: there is no such checkpoint",
    ),
    "an evaluation of no episodes": (
        lambda path: trainer_with(path, Counting(), eval_env=Counting()).evaluate(0),
        r"num_episodes: 0 is out of range; must be at least 1",
    ),
    "a run's evaluation of no episodes": (
        lambda path: evaluate_run(path / "run", episodes=0),
        r"num_episodes: 0 is out of range; must be at least 1",
    ),
    "a line break in the output path": (
        lambda path: RLConfig(output_dir=f"{path}/a\nb"),
        r"output_dir: the path '.*/a\\nb' holds the control character '\\n'; use a name without it",
    ),
    "a line break in the folder of a run": (
        lambda path: trainer_with(path / "a\nb", Counting()).train(32),
        r"holds the control character",
    ),
    "a control character in a dataset's path": (
        lambda path: DatasetWriter(path / "a\x1b[1mb", format="lerobot", fps=10).close(),
        r"holds the control character '\\x1b'",
    ),
    "evaluation without another environment": (
        lambda path: trainer_with(path, Counting()).evaluate(1),
        r"evaluation needs a separate environment.*pass eval_env",
    ),
}


def _two_trainers(path: Path) -> tuple[Trainer, Trainer]:
    return trainer_with(path, Counting()), trainer_with(path, Counting())


def _stepped(env: Any, actions: np.ndarray) -> Any:
    env.reset(0)
    return env.step(actions)


@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_call_raises_an_error(name: str, tmp_path: Path) -> None:
    call, message = CALLS[name]
    with pytest.raises(InputError, match=message) as caught:
        call(tmp_path)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "run").exists()


class Uncopiable(Counting):
    """An environment that holds something that cannot be copied, as a simulator's connection cannot."""

    def __deepcopy__(self, memo: dict[int, object]) -> Uncopiable:
        raise TypeError("cannot copy a connection")


def test_evaluation_that_cannot_be_is_refused_before_training(tmp_path: Path) -> None:
    """An environment without a spec is copied for evaluation; one that cannot be is named before the first step."""
    config = RLConfig(
        rollout_steps=32,
        total_timesteps=64,
        eval_freq=32,
        hidden_sizes=(8,),
        output_dir=str(tmp_path / "run"),
        console_level="CRITICAL",
        tensorboard=False,
        device="cpu",
    )
    trainer = PPOTrainer(Uncopiable(), config=config)
    with pytest.raises(InputError, match=r"\(Uncopiable\) .* pass eval_env"):
        trainer.train()
    assert trainer.global_step == 0
    trainer.close()
    trainer = PPOTrainer(Counting(), config=config)
    trainer.train()
    assert trainer.evaluate(3)["episodes"] == 3
    trainer.close()


# -- real processes ----------------------------------------------------------------------------------------------------

in_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for child processes in /proc")


def children(parent: int) -> list[int]:
    """The processes that have this parent."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:  # ended meanwhile
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(stat.parent.name))
    return found


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


PATIENCE = 300.0  # seconds: a limit for what hangs, on a machine that is busy with other things


def wait_for(condition: Callable[[], Any]) -> None:
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Starts an endless `python -m deft train` in tmp_path/run, and waits for its first checkpoint."""
    started: list[subprocess.Popen[str]] = []

    def begin(flags: str) -> subprocess.Popen[str]:
        command = f"-m deft train ppo --env CartPole-v1 {TINY} --total-timesteps {NEVER} --output-dir run {flags}"
        process = subprocess.Popen(
            [sys.executable, *shlex.split(command)],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        wait_for(lambda: process.poll() is not None or checkpoint.list_checkpoints(tmp_path / "run"))
        assert process.poll() is None
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


@in_proc
@pytest.mark.parametrize(
    ("number", "flags", "status"),
    [
        (signal.SIGINT, "--num-envs 2 --vector process", 130),
        (signal.SIGTERM, "--buffer-type vla", 143),
        (signal.SIGUSR1, "--num-envs 2 --vector process", 138),
    ],
)
def test_a_signal_stops_the_run_and_saves_it(
    number: signal.Signals, flags: str, status: int, start: Any, tmp_path: Path, deft: Command
) -> None:
    process = start(flags)
    workers = children(process.pid)
    process.send_signal(number)
    _, complaint = process.communicate(timeout=PATIENCE)
    assert process.returncode == status, complaint
    lines = complaint.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("deft: stopped by ")
    assert workers or "process" not in flags
    wait_for(lambda: not any(map(is_running, workers)))
    latest, problems = checkpoint.latest_whole_checkpoint(tmp_path / "run")
    assert latest is not None
    assert not problems
    steps = checkpoint.load_training_state(latest)["num_timesteps"]
    assert deft(f"train --resume {tmp_path}/run --total-timesteps {steps + 64}") == (0, [])


@in_proc
def test_a_killed_worker_is_replaced(start: Any, tmp_path: Path) -> None:
    process = start("--num-envs 2 --num-workers 2 --vector process")
    first, second = children(process.pid)
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: set(children(process.pid)) - {first, second})
    metrics = tmp_path / "run" / "episode_metrics.jsonl"
    wait_for(lambda: '"rollout/lost_episodes": 1' in metrics.read_text())  # an update after the loss
    assert process.poll() is None
    assert is_running(second)


@in_proc
def test_a_killed_worker_ends_the_run_where_none_may_be_replaced(start: Any, tmp_path: Path, deft: Command) -> None:
    process = start("--num-envs 2 --num-workers 2 --vector process --restart-workers 0")
    first, second = children(process.pid)
    os.kill(first, signal.SIGKILL)
    _, complaint = process.communicate(timeout=PATIENCE)
    assert process.returncode == 1
    assert_one_line(complaint.splitlines(), "worker process", "environment", "SIGKILL")
    wait_for(lambda: not is_running(second))
    latest, problems = checkpoint.latest_whole_checkpoint(tmp_path / "run")
    assert latest is not None
    assert not problems
    steps = checkpoint.load_training_state(latest)["num_timesteps"]
    assert deft(f"train --resume {tmp_path}/run --total-timesteps {steps + 64}") == (0, [])
