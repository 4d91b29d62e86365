"""Code that files name does not run unless the user names or trusts it: a module leaves a mark when it is imported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import gymnasium
import h5py
import numpy as np
import pytest
import torch
import yaml
from gymnasium.envs.registration import EnvSpec

import deft
from deft import trust
from deft.cli import main
from deft.config.loading import load_config, replace
from deft.config.settings import EnvConfig
from deft.envs.make import make_env, make_vector_env
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run
from deft.models.vla.loading import find_vla_class, load_vla_model

EVIL = """
from pathlib import Path
import gymnasium
from gymnasium.envs.classic_control import PendulumEnv

Path({mark!r}).touch()
gymnasium.register("Evil-v0", entry_point=PendulumEnv, max_episode_steps=5)
"""
ID = "lair.evil:Evil-v0"
SHORT = ["--num-envs", "1", "--rollout-steps", "8", "--batch-size", "8", "--n-epochs", "1", "--total-timesteps", "8"]
SHORT += ["--eval-freq", "0", "--save-freq", "0", "--device", "cpu"]


@pytest.fixture
def mark(tmp_path, monkeypatch):
    """The file that the module `lair.evil` of the current directory makes; the module is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    before = trust.snapshot()
    path = tmp_path / "mark"
    (tmp_path / "lair").mkdir()
    (tmp_path / "lair" / "evil.py").write_text(EVIL.format(mark=str(path)))
    yield path
    trust.restore(before)
    gymnasium.registry.pop("Evil-v0", None)
    for name in ("lair", "lair.evil"):
        sys.modules.pop(name, None)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of PPO on Pendulum, which the tests copy and change."""
    run = tmp_path_factory.mktemp("trained") / "run"
    assert main(["train", "ppo", "--env", "Pendulum-v1", *SHORT, "--output-dir", str(run)]) == 0
    return run


@pytest.fixture
def run(trained, tmp_path):
    """A stranger's run: its config names the module."""
    target = tmp_path / "run"
    subprocess.run(["cp", "-r", str(trained), str(target)], check=True)
    write_config(target, lambda config: config["env"].update(id=ID))
    return target


def write_config(run, change):
    config = yaml.safe_load((run / "config.yaml").read_text())
    change(config)
    (run / "config.yaml").write_text(yaml.safe_dump(config))


def write_dataset(path, env_spec):
    """A Minari dataset of one episode in Pendulum's spaces."""
    box = {"type": "Box", "dtype": "float32", "shape": [3], "low": [-8] * 3, "high": [8] * 3}
    action = {**box, "shape": [1], "low": [-2], "high": [2]}
    metadata = {"minari_version": "0.5.4", "total_episodes": 1, "env_spec": json.dumps(env_spec)}
    metadata |= {"observation_space": json.dumps(box), "action_space": json.dumps(action)}
    (path / "data").mkdir(parents=True)
    (path / "data" / "metadata.json").write_text(json.dumps(metadata))
    with h5py.File(path / "data" / "main_data.hdf5", "w") as file:
        for name, shape in {"observations": (17, 3), "actions": (16, 1), "rewards": (16,)}.items():
            file[f"episode_0/{name}"] = np.zeros(shape, np.float32)
        file["episode_0/rewards"][-1] = 1.0
        file["episode_0/terminations"], file["episode_0/truncations"] = np.arange(16) == 15, np.zeros(16, bool)
    return path


def fails(arguments, capsys):
    """The one line of a command that ends with status 2."""
    assert main(list(map(str, arguments))) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    return lines[-1]


# ---------------------------------------------------------------------------------------------------- datasets


def test_a_dataset_runs_no_code(tmp_path, mark, caplog):
    path = write_dataset(tmp_path / "lair" / "data-v0", {"id": ID, "kwargs": {}})
    flags = ["--num-epochs", "1", "--batch-size", "8", "--hidden-dim", "8", "--device", "cpu", "--output-dir", "out"]
    assert main(["train", "iql", "--dataset", str(path), *flags]) == 0
    warnings = [message for message in caplog.messages if "lair.evil" in message]
    assert not mark.exists()
    assert len(warnings) == 1
    assert "--trust-remote-code" in warnings[0]
    assert str(path / "data" / "metadata.json") in warnings[0]


def test_loading_a_dataset_in_python_runs_no_code(tmp_path, mark, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)  # as in a notebook that was started here
    path = write_dataset(tmp_path / "data-v0", {"id": ID, "kwargs": {}})
    dataset = deft.load_dataset(path)
    with pytest.raises(InputError, match=r"lair\.evil"):
        make_env(EnvConfig(id=dataset.env_id))
    metadata = json.loads((path / "data" / "metadata.json").read_text())
    del metadata["observation_space"]  # the spaces can then only be those of the environment
    (path / "data" / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(InputError, match="trust_remote_code=True"):
        deft.load_dataset(path)
    assert not mark.exists()
    deft.load_dataset(path, trust_remote_code=True)
    assert mark.exists()


def test_the_options_of_a_file_trust_nothing(tmp_path, mark, capsys):
    path = write_dataset(tmp_path / "data-v0", {"id": ID, "kwargs": {}})
    Path("config.yaml").write_text(f"algorithm: iql\ndataset: {{path: {path}, options: {{trust_remote_code: true}}}}\n")
    assert "trust_remote_code" in fails(["train", "--config", "config.yaml", "--output-dir", "out"], capsys)
    assert not mark.exists()


# ---------------------------------------------------------------------------------------- runs and checkpoints


@pytest.mark.parametrize("command", ["evaluate {}", "compare {} random", "play --policy {}", "collect --policy {}"])
def test_a_strangers_run_runs_no_code(command, run, mark, capsys):
    more = {"collect": ["--steps", "5", "--out", "data/new-v0"]}
    words = command.format(run).split()
    line = fails([*words, *more.get(words[0], [])], capsys)
    assert not mark.exists()
    for part in ("lair.evil", str(run / "config.yaml"), "--trust-remote-code", f"--env {ID}"):
        assert part in line


def test_resuming_a_strangers_run_runs_no_code(run, mark, capsys):
    assert "lair.evil" in fails(["train", "--resume", run, "--total-timesteps", 16], capsys)
    assert "lair.evil" in fails(["train", "--config", run / "config.yaml", "--output-dir", "out"], capsys)
    assert not mark.exists()


def test_the_config_inside_a_checkpoint_runs_no_code(run, mark, capsys):
    (run / "config.yaml").unlink()
    checkpoint = next(run.glob("checkpoint-*"))
    state = torch.load(checkpoint / "training_state.pt", weights_only=True)
    state["config"]["env"]["id"] = ID
    torch.save(state, checkpoint / "training_state.pt")
    (checkpoint / "deft_manifest.json").unlink(missing_ok=True)
    line = fails(["evaluate", checkpoint], capsys)
    assert not mark.exists()
    assert f"{checkpoint / 'training_state.pt'}" in line


def test_a_model_class_in_a_file_runs_no_code(run, mark, capsys):
    def change(config):
        config["env"].update(id="reach", kwargs={"observation": "vla", "image_size": 16})
        config["policy"].update(name="vla", vla_config={"model_class": "lair.evil.Model"})

    write_config(run, change)
    line = fails(["evaluate", run], capsys)
    assert not mark.exists()
    for part in ("model_class", "lair.evil", str(run / "config.yaml"), "--trust-remote-code"):
        assert part in line


def test_a_world_in_the_arguments_of_an_environment_runs_no_code(run, mark, capsys):
    """`f1-teacher` makes the environment that its argument names, in this process or in workers."""
    kwargs = {"task_config": {"world": ID}}
    for flags in ([], ["--vector", "process"]):
        write_config(run, lambda config: config["env"].update(id="f1-teacher", kwargs=kwargs))
        line = fails(["collect", "--policy", run, "--steps", "5", "--out", "data/new-v0", *flags], capsys)
        assert not mark.exists()
        assert "lair.evil" in line
        assert "--trust-remote-code" in line


def test_the_phases_run_no_code_of_a_file(mark, capsys, tmp_path):
    Path("phase.yaml").write_text(f"phase: teacher\nenvironment: {{world: '{ID}'}}\n")
    line = fails(["train", "--config", "phase.yaml", "--device", "cpu", "--output-dir", "out"], capsys)
    assert not mark.exists()
    assert f"--environment world={ID}" in line


def test_a_robotwin_that_a_file_names_is_not_run(run, mark, tmp_path, capsys):
    for folder in ("envs", "task_config"):
        (tmp_path / "twin" / folder).mkdir(parents=True)
    (tmp_path / "twin" / "envs" / "beat_block_hammer.py").write_text(EVIL.format(mark=str(mark)))
    write_config(run, lambda config: config["env"].update(id="robotwin", kwargs={"root": str(tmp_path / "twin")}))
    line = fails(["evaluate", run], capsys)
    assert not mark.exists()
    assert f"ROBOTWIN_ROOT={tmp_path / 'twin'}" in line


def test_python_runs_no_code_of_a_run(run, mark, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"lair\.evil.*trust_remote_code=True"):
        evaluate_run(run, 1, device="cpu")
    with pytest.raises(InputError, match=r"lair\.evil"):
        deft.PPOTrainer(config=replace(load_config(run / "config.yaml"), output_dir="out"))
    assert not mark.exists()


def test_python_runs_no_code_of_a_run_that_names_it_in_bytes(run, mark, monkeypatch, tmp_path):
    """YAML's `!!binary` gives bytes, of which the settings make text."""
    monkeypatch.syspath_prepend(tmp_path)
    write_config(run, lambda config: config["env"].update(id=ID.encode()))
    assert "!!binary" in (run / "config.yaml").read_text()
    with pytest.raises(InputError, match=r"lair\.evil"):
        evaluate_run(run, 1, device="cpu")
    assert not mark.exists()


def test_python_runs_no_code_of_a_long_name(mark, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    path = write_dataset(tmp_path / "data-v0", {"id": f"lair.evil:{'E' * 600}-v0", "kwargs": {}})
    with pytest.raises(InputError, match=r"Deft does not import a module that only a file names"):
        make_env(EnvConfig(id=deft.load_dataset(path).env_id))
    assert not mark.exists()


def test_arguments_of_an_environment_that_is_made_for_its_spaces_run_no_code(mark, monkeypatch, tmp_path):
    """Gymnasium's wrapper of `gym` imports what its `env_id` names, also where only the spaces are wanted."""
    monkeypatch.syspath_prepend(tmp_path)
    spec = EnvSpec("GymV26Environment-v0", entry_point=lambda env_id: gymnasium.make(env_id))
    monkeypatch.setitem(gymnasium.registry, "GymV26Environment-v0", spec)
    path = write_dataset(tmp_path / "data-v0", {"id": "GymV26Environment-v0", "kwargs": {"env_id": ID}})
    metadata = json.loads((path / "data" / "metadata.json").read_text())
    del metadata["observation_space"]
    (path / "data" / "metadata.json").write_text(json.dumps(metadata))
    with pytest.raises(InputError, match=r"env\.kwargs\.env_id"):
        deft.load_dataset(path)
    assert not mark.exists()


# -------------------------------------------------------------------------------------- the current directory


@pytest.mark.parametrize("program", [["-m", "deft"], ["-c", "import sys; from deft.cli import main; sys.exit(main())"]])
def test_the_current_directory_shadows_no_library(program, tmp_path, mark):
    (tmp_path / "yaml.py").write_text(EVIL.format(mark=str(mark)))
    flags = [] if program[0] == "-m" else ["-P"]  # as in the script `deft`, whose own folder is first on the path
    command = [sys.executable, *flags, *program, "train", "ppo", "--env", "Pendulum-v1", *SHORT, "--output-dir", "out"]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()


def test_worker_processes_import_nothing_from_the_current_directory(tmp_path, mark):
    (tmp_path / "signal.py").write_text(EVIL.format(mark=str(mark)))
    env = make_vector_env(EnvConfig(id="Pendulum-v1", num_envs=1, vector="process", num_workers=1))
    env.close()
    assert not mark.exists()


def test_an_installed_module_comes_before_one_of_the_current_directory(tmp_path, mark, monkeypatch, capsys):
    installed = tmp_path / "installed"
    installed.mkdir()
    monkeypatch.syspath_prepend(installed)
    (installed / "lair_twice.py").write_text("import gymnasium\n")
    (tmp_path / "lair_twice.py").write_text(EVIL.format(mark=str(mark)))
    line = fails(["train", "ppo", "--env", "lair_twice:Evil-v0", *SHORT, "--output-dir", "out"], capsys)
    assert "no environment 'Evil-v0'" in line
    assert not mark.exists()
    assert str(tmp_path) not in sys.path


# -------------------------------------------------------------------------------------------- what the user names works


def test_the_user_names_the_module(run, mark, capsys, tmp_path):
    """`--env module:Id` names a module of the current directory, for training and for evaluation."""
    assert main(["train", "ppo", "--env", ID, *SHORT, "--output-dir", "own"]) == 0
    assert mark.exists()
    del sys.modules["lair"], sys.modules["lair.evil"], gymnasium.registry["Evil-v0"]
    assert main(["evaluate", "own", "--env", ID, "--episodes", "1", "--device", "cpu"]) == 0
    assert str(tmp_path) not in sys.path


def test_trust_remote_code(run, mark, caplog):
    assert main(["evaluate", str(run), "--episodes", "1", "--device", "cpu", "--trust_remote_code"]) == 0
    assert mark.exists()
    shown = [message for message in caplog.messages if ID in message]
    assert len(shown) == 1
    assert str(run / "config.yaml") in shown[0]


def test_the_allow_list(run, mark, monkeypatch, tmp_path, capsys):
    """It allows the module, and does not search the current directory for another one."""
    monkeypatch.setenv("DEFT_TRUSTED_MODULES", "other, lair.evil")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["evaluate", str(run), "--episodes", "1", "--device", "cpu"]) == 0
    assert mark.exists()


def test_python_trusts_by_a_keyword(run, mark, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert evaluate_run(run, 1, device="cpu", trust_remote_code=True)["episodes"] == 1
    assert mark.exists()
    assert not trust.trusts_remote_code()


def test_names_in_python_are_the_users(mark, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    assert make_env(EnvConfig(id=ID)).spec.id == "Evil-v0"
    with pytest.raises(InputError, match="has no class 'Model'"):
        load_vla_model(None, "lair.evil.Model")


def test_modules_that_are_imported_already_run_nothing_new(run):
    """A config may name what this process has imported: looking up a class in it executes nothing."""
    with trust.command_line(False), pytest.raises(InputError, match="must be a subclass"):
        find_vla_class("collections.OrderedDict")


def test_worker_processes_decide_as_their_parent(mark, tmp_path):
    """What the user named reaches the worker; what a file named does not, whoever asks for it there."""
    ask = "trust.import_module('lair.evil', 'lair.evil:Evil-v0', 'env.id', '--env')"
    with trust.command_line(False):
        rejected = subprocess.run(trust.child_command(ask), capture_output=True, text=True)
        assert "--trust-remote-code" in rejected.stderr
        assert not mark.exists()
        trust.name(ID)
        subprocess.run(trust.child_command(ask), check=True)
    assert mark.exists()


def test_text_that_repeats_itself_is_read_once():
    """YAML aliases make a tree of 10^20 leaves out of a few lines; each container is visited once."""
    nested = ["lair.evil:Evil-v0"]
    for _ in range(20):
        nested = [nested] * 10
    before = trust.snapshot()
    trust.read_from("bomb.yaml", nested)
    trust.restore(before)
