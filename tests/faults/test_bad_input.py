"""What a user gets wrong, and what breaks under a run: one clear line, the right exit status, nothing saved is lost.

Exit status 2: a config, call, file or environment that cannot be used. 1: a run that started and failed.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_worlds import TINY, Command, assert_one_line, contents

from deft import ActorCritic
from deft.training.collection import Collector

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
