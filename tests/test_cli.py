"""The command line: accepted and rejected arguments, messages, exit status."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft import cli
from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings
from deft.config.loading import replace, resolve, write_config
from deft.config.rl_yaml import PHASE_TRAINING
from deft.config.settings import OfflineRunConfig, RunConfig
from deft.config.training import FLAT_TRAINING, parse_training
from deft.errors import CommandExit, InputError, RunError

ALGORITHM_NAMES = ", ".join([*ALGORITHM_SETTINGS, *FLAT_TRAINING, *PHASE_TRAINING])
OFFLINE_NAMES = ", ".join(name for name, kind in ALGORITHM_SETTINGS.items() if kind.LEARNS_FROM == "dataset")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stand-ins for what the commands call, which keep what they were given."""
    seen: list[Any] = []
    run = types.ModuleType("deft.training.run")
    run.train = lambda config: seen.append(config) or {"run_dir": Path("a/b"), "mean_reward": np.float32(1.5)}  # type: ignore[attr-defined]
    offline = types.ModuleType("deft.training.offline_run")
    offline.train = lambda config: seen.append(("offline", config)) or {"updates": np.int64(7)}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deft.training.offline_run", offline)
    evaluation = types.ModuleType("deft.evaluation.evaluate")
    evaluation.evaluate_run = lambda path, **given: seen.append((path, given)) or {"mean_reward": float("nan")}  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "deft.training.run", run)
    monkeypatch.setitem(sys.modules, "deft.evaluation.evaluate", evaluation)
    return seen


def parsed(*arguments: str) -> RunConfig:
    return parse_training(list(arguments))[1]


def test_the_command_of_the_documents() -> None:
    command = (
        "ppo --env CartPole-v1 --total_timesteps 100000 --rollout_steps 2048 --ppo_epochs 4 --ppo_clip_range 0.2 "
        "--learning_rate 3e-4 --output_dir ./output/ppo --use-wandb"
    )
    expected = {
        "env.id": "CartPole-v1",
        "trainer.total_timesteps": 100000,
        "output_dir": "./output/ppo",
        "logging.use_wandb": True,
    }
    assert parsed(*command.split()) == replace(RunConfig(), **expected)


@pytest.mark.parametrize(
    ("command", "settings"),
    [
        (
            "iql --dataset hopper-medium-v2 --num_epochs 100 --batch_size 256 --learning_rate 3e-4 --expectile 0.7 "
            "--temperature 3.0 --output_dir ./output/iql",
            {"output_dir": "./output/iql"},
        ),
        (
            "cql --dataset hopper-medium-v2 --num_epochs 100 --batch_size 256 --cql_alpha 5.0 "
            "--output_dir ./output/cql",
            {"output_dir": "./output/cql"},
        ),
        (
            "td3-bc --dataset hopper-medium-v2 --num_epochs 100 --alpha 2.5 --output_dir ./output/td3bc",
            {"output_dir": "./output/td3bc"},
        ),
        (
            "dt --dataset hopper-medium-v2 --context_length 20 --n_layer 3 --n_head 1 --embed_dim 128 "
            "--output_dir ./output/dt",
            {"output_dir": "./output/dt"},
        ),
        (
            "iql --model_path ./output/stage2_action_head/best --dataset hopper-medium-v2 --num_epochs 10",
            {"model_path": "./output/stage2_action_head/best", "trainer.num_epochs": 10},
        ),
        (
            "cql --dataset hopper-medium-v2 --cql-samples 4 --min_q_weight 0.75 --cql-lagrange --alpha 0.2",
            {
                "algorithm.cfg.cql_samples": 4,
                "algorithm.cfg.min_q_weight": 0.75,
                "algorithm.cfg.cql_lagrange": True,
                "algorithm.cfg.alpha": 0.2,
            },
        ),
        ("cql --dataset hopper-medium-v2 --alpha auto", {}),
        (
            "td3-bc --dataset hopper-medium-v2 --noise_clip 0.3 --policy_delay 3 --num-seeds 3 --capture off",
            {
                "algorithm.cfg.noise_clip": 0.3,
                "algorithm.cfg.policy_delay": 3,
                "trainer.num_seeds": 3,
                "trainer.capture": "off",
            },
        ),
        (
            "dt --dataset hopper-medium-v2 --target-return 3600 1800 --env Hopper-v4 --dataset-options split=better",
            {
                "algorithm.cfg.target_return": [3600.0, 1800.0],
                "env.id": "Hopper-v4",
                "dataset.options": {"split": "better"},
            },
        ),
    ],
)
def test_the_offline_commands_of_the_documents(command: str, settings: dict[str, Any]) -> None:
    """The values in the document's four commands are the defaults, so that only the rest differs from them."""
    default = resolve({"algorithm": command.split()[0], "dataset": "hopper-medium-v2"})
    assert isinstance(default, OfflineRunConfig)
    assert parsed(*command.split()) == replace(default, **settings)


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ("--num-envs 8", {"env.num_envs": 8}),
        ("--num_envs=8", {"env.num_envs": 8}),
        ("--buffer-size 64", {"trainer.rollout_steps": 64}),
        ("--rollout-steps 64", {"trainer.rollout_steps": 64}),
        ("--n-epochs 7", {"algorithm.cfg.n_epochs": 7}),
        ("--lr 1e-5", {"algorithm.cfg.learning_rate": 1e-5}),
        ("--clip-epsilon 0.3", {"algorithm.cfg.clip_range": 0.3}),
        ("--discount_gamma 0.9", {"algorithm.cfg.gamma": 0.9}),
        ("--total-timesteps 1e6 --seed 3", {"trainer.total_timesteps": 1_000_000, "seed": 3}),
        ("--hidden-sizes 32 16 --vector process", {"policy.hidden_sizes": [32, 16], "env.vector": "process"}),
        ("--log-std-init -0.5", {"policy.log_std_init": -0.5}),
        ("--max-grad-norm none", {"algorithm.cfg.max_grad_norm": None}),
        ("--no-progress-bar --compile", {"logging.progress_bar": False, "algorithm.cfg.compile": True}),
        ("--auto-resume --threads 2", {"auto_resume": True, "threads": 2}),
        (
            "--env-kwargs size=5 rate=1e-3 name=x on=true",
            {"env.kwargs": {"size": 5, "rate": 1e-3, "name": "x", "on": True}},
        ),
        (
            "--policy vla --vla-model-class a.B --vla-model-config width=8",
            {
                "policy.name": "vla",
                "policy.vla_config.model_class": "a.B",
                "policy.vla_config.model_config": {"width": 8},
            },
        ),
        ("--seed 1 --seed 2", {"seed": 2}),
    ],
)
def test_flags_set_their_settings(flags: str, settings: dict[str, Any]) -> None:
    assert parsed("ppo", *flags.split()) == replace(RunConfig(), **settings)


def test_names_of_streams_stay_text_and_may_be_separated_by_commas() -> None:
    expected = {"top": "z_top", "wrist": "0", "on": "true"}
    separated = (
        ["top=z_top,wrist=0", "on=true"],
        ["top=z_top", "wrist=0", "on=true"],
        ["top = z_top , wrist=0, on= true"],
    )
    for words in (*separated, [json.dumps(expected)]):
        assert parsed("ppo", "--env", "x", "--rename_streams", *words).env.rename_streams == expected


@pytest.mark.parametrize("words", [["top=z_top", "top=a_wrist"], ["top=z_top,top =a_wrist"]])
def test_a_key_that_is_given_twice_is_an_error(words: list[str]) -> None:
    with pytest.raises(InputError, match=r"--rename-streams: 'top' is given twice"):
        parsed("ppo", "--env", "x", "--rename_streams", *words)


def test_env_kwargs_as_json() -> None:
    assert parsed("ppo", "--env-kwargs", '{"goal": [1, 2], "name": "a b"}').env.kwargs == {
        "goal": [1, 2],
        "name": "a b",
    }


def test_a_flag_changes_the_entries_of_a_mapping_that_it_names(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("env: {id: tabletop, kwargs: {task: pick, image_size: 32}, reward_weights: {grasp: 2, lift: 3}}")
    config = parsed("--config", str(path), "--env-kwargs", "image_size=64", "split=all", "--reward-weights", "lift=1")
    assert config.env.kwargs == {"task": "pick", "image_size": 64, "split": "all"}
    assert config.env.reward_weights == {"grasp": 2, "lift": 1}
    config = parsed("--config", str(path), "--env-kwargs", '{"task": null}')
    assert config.env.kwargs == {"task": None, "image_size": 32}
    assert config.env.arguments == {"image_size": 32}  # null: the environment's default


@pytest.mark.parametrize(
    ("file", "flags", "limit"),
    [
        ("{kwargs: {max_episode_steps: 5}}", "", 5),
        ("{kwargs: {max_episode_steps: 5}}", "--max-episode-steps 6", 6),
        ("{max_episode_steps: 5}", "--env-kwargs max_episode_steps=6", 6),
        ("{max_episode_steps: 5}", "--env-kwargs max_episode_steps=null", None),
        ("{kwargs: {max_episode_steps: 5}}", "--max-episode-steps none", None),
        ("{max_episode_steps: 5}", "--max-episode-steps 6 --env-kwargs max_episode_steps=6", 6),
    ],
)
def test_a_flag_replaces_the_time_limit_of_the_file_in_either_place(
    file: str, flags: str, limit: int | None, tmp_path: Path
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"env: {file}")
    assert parsed("--config", str(path), *flags.split()).env.time_limit == limit


def test_two_different_time_limits_are_an_error(tmp_path: Path) -> None:
    line = r"max_episode_steps is 6, and the environment's arguments \(--env-kwargs\) set it to 5; give one of them$"
    with pytest.raises(InputError, match=line):
        parsed("ppo", "--max-episode-steps", "6", "--env-kwargs", "max_episode_steps=5")
    path = tmp_path / "c.yaml"
    path.write_text("env: {max_episode_steps: 6, kwargs: {max_episode_steps: 5}}")
    with pytest.raises(InputError, match=line):
        parsed("--config", str(path))


def test_flags_come_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 5\nenv: CartPole-v1\ntrainer: {iterations: 3, buffer_size: 32}\n")
    config = parsed("--config", str(path), "--seed", "6")
    assert (config.seed, config.env.id, config.trainer.iterations) == (6, "CartPole-v1", 3)
    assert (config.trainer.buffer_size, config.algorithm.cfg) == (32, RunConfig().algorithm.cfg)
    assert parsed("ppo", f"--config={path}") == parsed("--config", str(path))
    # How long to train: a flag for steps replaces the file's iterations.
    longer = parsed("--config", str(path), "--total-timesteps", "640")
    assert (longer.trainer.total_timesteps, longer.trainer.iterations) == (640, None)


@pytest.mark.parametrize("resumed", [".", "checkpoint-500"])
def test_resume_takes_the_settings_of_the_run(tmp_path: Path, resumed: str) -> None:
    config = replace(RunConfig(), **{"env.id": "CartPole-v1", "seed": 4})
    write_config(config, tmp_path / "config.yaml")
    path = str(tmp_path / resumed)
    assert parsed("--resume", path, "--seed", "5") == replace(config, seed=5, resume=path)


WRONG = [
    ("trian", "trian: no such command; did you mean 'train'?"),
    ("train", f"train: give an algorithm ({ALGORITHM_NAMES}), --recipe NAME or --config FILE"),
    ("train pp", f"train pp: no such algorithm; one of {ALGORITHM_NAMES}"),
    (
        "train ppo CartPole-v1",
        "train: unexpected 'CartPole-v1'; a value follows its flag, and the algorithm comes first",
    ),
    ("train ppo --gama 0.9", "--gama: unknown flag; did you mean '--gamma'?"),
    ("train ppo --xyzzy", "--xyzzy: unknown flag; see --help"),
    ("train ppo -n 4", "-n: unknown flag; see --help"),
    ("train ppo --env", "--env: needs a value (TEXT)"),
    ("train ppo --env --seed 1", "--env: needs a value (TEXT)"),
    ("train ppo --num-envs four", "--num-envs: 'four' is not a whole number"),
    ("train ppo --num_envs 0 --seed -1", "--seed: -1 is out of range; must be at least 0 (and 1 more)"),
    (
        "train ppo --vector thread",
        "--vector: 'thread' is not allowed; one of 'sync', 'process', 'envpool', 'gpu', 'warp'",
    ),
    ("train ppo --lr 1e-4 --learning-rate 1e-4", "--learning-rate: the same setting as --lr; give one of them"),
    (
        "train ppo --env-kwargs a=1 --seed 1 --env-kwargs b=2",
        "--env-kwargs: given twice; write all of its values after one",
    ),
    ("train ppo --use-wandb=true", "--use-wandb: takes no value; write --use-wandb or --no-use-wandb"),
    ("train ppo --env-kwargs size", "--env-kwargs: 'size' is not KEY=VALUE, nor a JSON object"),
    (
        "train ppo --env-kwargs {a:1}",
        "--env-kwargs: not valid JSON: Expecting property name enclosed in double quotes (column 2)",
    ),
    (
        "train ppo --iterations 3 --total-timesteps 4",
        "--iterations: says how long to train, as --total-timesteps does; give one of them",
    ),
    ("train ppo --policy vla", "policy: name 'vla' needs vla_config with at least model_class"),
    ("train --config none.json", "none.json: no such config file"),
    ("train --resume none", "--resume none: no run: there is no config.yaml in it, nor in the folder above"),
    ("train iql --expectile 1.5", "--expectile: 1.5 is out of range; must be less than 1"),
    (
        "train cql --alpha hot",
        "--alpha: 'hot' is not allowed; one of 'auto'; and 'hot' is not a number",
    ),
    ("train dt --n-head 3", "algorithm.cfg: embed_dim 128 does not divide into n_head 3"),
    ("train td3-bc --expectile 0.7", "--expectile: unknown flag; it is a setting of iql"),
    (
        "train ppo --dataset x.hdf5",
        f"--dataset: unknown flag; it is a setting of {OFFLINE_NAMES}",
    ),
    ("train iql --no-normalize-reward", "--no-normalize-reward: unknown flag; it is a setting of ppo, grpo"),
    (
        "train sac --hidden-sizes 32 32",
        "policy.hidden_sizes: [32, 32] has no effect: policy 'actor' has num_layers layers of width hidden_dim; use "
        "--hidden-dim and --num-layers",
    ),
    (
        "train ppo --hidden-dim 32",
        "policy.hidden_dim: 32 has no effect: policy 'actor_critic' has layers of the widths hidden_sizes; use "
        "--hidden-sizes",
    ),
    ("evaluate", "evaluate: give one run folder or checkpoint; got none"),
    ("evaluate a b", "evaluate: give one run folder or checkpoint; got a b"),
    ("evaluate a --episodes 0", "--episodes: 0 is out of range; must be at least 1"),
    ("evaluate a --episode 3", "--episode: unknown flag; did you mean '--episodes'?"),
]


@pytest.mark.parametrize(("command", "line"), WRONG)
def test_bad_input_is_one_line_and_status_2(
    command: str, line: str, calls: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(command.split()) == 2
    captured = capsys.readouterr()
    assert captured.err == f"deft: {line}\n"
    assert captured.out == ""
    assert calls == []


def test_a_file_and_a_command_that_disagree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHM_SETTINGS, "other", AlgorithmSettings)
    path = tmp_path / "c.yaml"
    path.write_text("algorithm: ppo\n")
    with pytest.raises(InputError, match=r"^train other: .*c\.yaml sets the algorithm to 'ppo'; use `deft train ppo`$"):
        parse_training(["other", "--config", str(path)])


def test_train_calls_and_reports(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["train", "ppo", "--seed", "3", "--json"]) == 0
    assert calls == [replace(RunConfig(), seed=3)]
    assert json.loads(capsys.readouterr().out) == {"run_dir": "a/b", "mean_reward": 1.5}
    assert cli.main(["train", "ppo"]) == 0
    started = "starting ppo on deft/Reach-v0 in a new directory in outputs"
    assert capsys.readouterr().out == f"{started}\nrun_dir: a/b\nmean_reward: 1.5\n"


def test_train_calls_the_offline_run(calls: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["train", "td3-bc", "--dataset", "a.hdf5", "--json"]) == 0
    ((kind, config),) = calls
    assert (kind, config.algorithm.name, config.dataset.path) == ("offline", "td3-bc", "a.hdf5")
    assert json.loads(capsys.readouterr().out.splitlines()[-1]) == {"updates": 7}
    # The config.yaml of such a run is enough to repeat and to resume it.
    write_config(config, tmp_path / "config.yaml")
    assert parsed("--config", str(tmp_path / "config.yaml")) == config
    assert parsed("--resume", str(tmp_path)) == replace(config, resume=str(tmp_path))


def test_evaluate_calls_and_reports(calls: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["evaluate", "--episodes", "3", "--json", "outputs/a", "--video", "a.mp4"]) == 0
    rest = {"env": None, "env_kwargs": {}, "random_policy": False, "seed": 0, "device": "auto", "deterministic": True}
    rest |= {"videos": None, "task": None, "split": None, "shuffle_instructions": False, "rename_streams": {}}
    rest |= {"suite_path": None}
    assert calls == [("outputs/a", {"episodes": 3, "video": "a.mp4", "vector": None, **rest})]
    assert json.loads(capsys.readouterr().out) == {"mean_reward": None}  # JSON has no NaN


def fail_with(error: BaseException) -> Any:
    def train(config: RunConfig) -> None:
        raise error

    return train


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (RunError("the loss is\nnot finite"), 1, "deft: the loss is not finite\n"),
        (KeyboardInterrupt(), 130, "deft: stopped by Ctrl-C\n"),
        (CommandExit(143), 143, "deft: stopped by SIGTERM\n"),  # how the trainer ends after SIGTERM
    ],
)
def test_a_run_that_ends_early_says_so_in_its_status(
    calls: list[Any], capsys: pytest.CaptureFixture[str], error: BaseException, status: int, line: str
) -> None:
    sys.modules["deft.training.run"].train = fail_with(error)  # type: ignore[attr-defined]
    assert cli.main(["train", "ppo"]) == status
    assert capsys.readouterr().err == line


@pytest.mark.parametrize("code", [0, None, 143, "switched off"])
def test_sys_exit_of_code_that_is_not_defts_is_a_failure(
    calls: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: Any
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sys.modules["deft.training.run"].train = fail_with(SystemExit(code))  # type: ignore[attr-defined]
    assert cli.main(["train", "ppo"]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert f"the command is not done: code that it ran called sys.exit({code!r})" in lines[0]


def test_an_unexpected_error_keeps_its_traceback(
    calls: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    sys.modules["deft.training.run"].train = fail_with(ZeroDivisionError("division\nby zero"))  # type: ignore[attr-defined]
    assert cli.main(["train", "ppo"]) == 1
    [file] = tmp_path.iterdir()
    line = f"deft: ZeroDivisionError: division by zero (traceback in {file}; --debug shows it)\n"
    assert capsys.readouterr().err == line
    assert "raise error\nZeroDivisionError: division" in file.read_text()
    assert cli.main(["train", "ppo", "--debug"]) == 1
    assert capsys.readouterr().err.startswith("Traceback (most recent call last):\n")
    assert list(tmp_path.iterdir()) == [file]


def test_help_is_grouped_and_shows_the_values_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("seed: 77\n")
    assert cli.main(["train", "ppo", "--config", str(path), "--help"]) == 0
    text = capsys.readouterr().out
    for part in ("env options", "ppo options", "Proximal policy optimization.", "--ppo-epochs INT", "(default: 77)"):
        assert part in text
    assert cli.main(["train", "--help"]) == 0
    assert f"Algorithms: {ALGORITHM_NAMES}." in capsys.readouterr().out
    assert cli.main(["evaluate", "--help"]) == 0
    assert "--episodes INT" in capsys.readouterr().out


def test_version_and_help_load_neither_torch_nor_pydantic() -> None:
    """`benchmarks/start_time.py` measures how long they take."""
    program = (
        "import sys; from deft.cli import main; status = main([sys.argv[1]]);"
        "print(status, 'torch' in sys.modules, 'pydantic' in sys.modules)"
    )
    for flag, start in (("--help", "usage: deft COMMAND"), ("--version", "deft 0.1.0")):
        ran = subprocess.run([sys.executable, "-c", program, flag], capture_output=True, text=True, check=True)
        assert ran.stdout.startswith(start)
        assert ran.stdout.splitlines()[-1] == "0 False False"


def test_python_m_deft_is_the_same_command() -> None:
    ran = subprocess.run([sys.executable, "-m", "deft", "train"], capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (
        2,
        f"deft: train: give an algorithm ({ALGORITHM_NAMES}), --recipe NAME or --config FILE\n",
    )


def test_parsing_imports_no_torch() -> None:
    program = (
        "import sys; from deft.config.training import parse_training; parse_training(['ppo']);"
        "print('torch' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ran.stdout == "False\n", ran.stderr
