"""Runs as `deft runs` lists them, and as `deft train` sums them up."""

import json
import shlex
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path

import pytest

from deft import cli
from deft.config.loading import PRESETS
from deft.config.training import parse_training
from deft.runs import overview
from deft.runs.checkpoint import folder_lock
from deft.runs.overview import find_runs, next_commands, read_overview, runs_table, start_line, summary

STARTED, ENDED = 1_800_000_000.0, 1_800_000_050.0
CONFIG = "algorithm: {name: ppo}\nenv: {id: CartPole-v1}\ntrainer: {total_timesteps: 1000}\n"


def line(kind: str, step: int, **values: object) -> str:
    return json.dumps({"type": kind, "step": step, "time": STARTED, **values}) + "\n"


LINES = (
    line("episode", 100, episode_return=5.0)
    + line("update", 100, **{"rollout/mean_reward": 10.0, "loss": 3.0})
    + line("evaluation", 200, mean_reward=20.0, success_rate=0.25)
    + line("update", 1000, **{"rollout/mean_reward": 90.0, "loss": 1.0})
    + line("evaluation", 1000, mean_reward=100.0, success_rate=0.75)
    + line("episode", 1000, episode_return=5.0)
    + '{"type": "upd'
)


def make_run(folder: Path, config: str = CONFIG, lines: str = LINES, **session: object) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "episode_metrics.jsonl").write_text(lines)
    ending = {"ended": ENDED, "last_step": 1000, "status": "complete"}
    sessions = [{"started": STARTED, "first_step": 0, **ending, **session}]
    (folder / "run.json").write_text(json.dumps({"unit": "steps", "total": 1000, "sessions": sessions}))
    return folder


def test_first_and_last_values(tmp_path):
    run = read_overview(make_run(tmp_path / "run"))
    assert (run.training, run.subject, run.state) == ("ppo", "CartPole-v1", "finished")
    assert (run.step, run.total, run.unit) == (1000, 1000, "steps")
    assert run.seconds == 50
    assert run.steps_per_second == 20  # 1,000 steps in 50 s
    assert run.measures == {  # losses are left out where there are returns
        "evaluation mean_reward": ((200, 20.0), (1000, 100.0)),
        "evaluation success_rate": ((200, 0.25), (1000, 0.75)),
        "training mean_reward": ((100, 10.0), (1000, 90.0)),
    }


def test_the_time_of_a_resumed_run_is_that_of_the_steps_since(tmp_path):
    run = read_overview(make_run(tmp_path / "run", first_step=600))
    # 400 steps in 50 s
    assert summary(run).splitlines()[0] == (
        "ppo on CartPole-v1 finished: 1,000 steps, the last 400 in 0:00:50 (8 steps/s)"
    )


def test_the_summary(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = make_run(Path("a run"))
    (run / "checkpoint-1000").mkdir()
    (run / "best").symlink_to("checkpoint-1000")
    assert summary(read_overview(run)).splitlines() == [
        "ppo on CartPole-v1 finished: 1,000 steps in 0:00:50 (20 steps/s)",
        "run: a run (best: checkpoint-1000)",
        "  evaluation mean_reward   20    →  100   (steps 200 → 1,000)",
        "  evaluation success_rate  0.25  →  0.75  (steps 200 → 1,000)",
        "  training mean_reward     10    →  90    (steps 100 → 1,000)",
        "next:",
        "  deft evaluate 'a run' --episodes 100",
        "  deft play --policy 'a run' --video 'a run/play.mp4'",
        "  deft train --resume 'a run' --total-timesteps 2000",
    ]


def test_only_the_ends_of_a_long_file_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(overview, "END_BYTES", 300)
    middle = "".join(line("evaluation", step, mean_reward=-1.0) for step in range(300, 900))
    first = line("evaluation", 200, mean_reward=20.0)
    last = line("evaluation", 1000, mean_reward=100.0)
    run = read_overview(make_run(tmp_path / "run", lines=first + middle + last))
    assert run.measures == {"evaluation mean_reward": ((200, 20.0), (1000, 100.0))}


def test_states(tmp_path):
    open_session = {"ended": None, "last_step": None, "status": None}
    assert read_overview(make_run(tmp_path / "failed", status="failed")).state == "failed"
    assert read_overview(make_run(tmp_path / "stopped", status="stopped")).state == "stopped"
    run = make_run(tmp_path / "open", **open_session)
    killed = read_overview(run)
    assert killed.state == "killed"
    assert killed.step == 1000  # of the last line
    with folder_lock(run):
        assert read_overview(run).state == "running"
    with folder_lock(run):  # reading takes no lock that stays
        pass
    (run / "run.json").unlink()
    assert read_overview(run).state == "unknown"
    (run / "config.yaml").unlink()
    assert read_overview(run) is None


@pytest.mark.parametrize(
    ("damaged", "text"),
    [
        ("run.json", "{"),
        ("config.yaml", "{"),
        ("run.json", '{"sessions": [3]}'),
        ("run.json", '{"total": 3, "sessions": [{"started": "now", "ended": 3}]}'),
        ("run.json", '{"total": "many"}'),
        ("episode_metrics.jsonl", '{"type": "update", "step": "x", "rollout/mean_reward": []}\n'),
    ],
)
def test_a_damaged_run_is_named_and_left_out(tmp_path, caplog, damaged, text):
    (make_run(tmp_path / "bad") / damaged).write_text(text)
    make_run(tmp_path / "good")
    assert [run.directory.name for run in find_runs(tmp_path)] == ["good"]
    assert f"{tmp_path / 'bad'} is not listed, since its files are damaged: " in caplog.text


PHASE, NEW = "phase: teacher\nenvironment: {task_name: stack}\n", line("update", 5, **{"train/loss": 2.0})


def test_the_table(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    make_run(Path("out/ppo"))
    make_run(Path("out/all/teacher"), PHASE, NEW, ended=ENDED + 60, last_step=5, status="stopped")
    (tmp_path / "out/ppo/checkpoint-1000").mkdir()  # nothing below a run is searched
    make_run(tmp_path / "out/.trash/old")
    day = f"{datetime.fromtimestamp(ENDED):%Y-%m-%d}"
    assert runs_table(find_runs(Path("out"))).splitlines() == [
        "run              training  on           state     progress            return  success  changed",
        f"out/all/teacher  teacher   stack        stopped   5 steps (0%)        -       -        {day} 08:01",
        f"out/ppo          ppo       CartPole-v1  finished  1,000 steps (100%)  100     0.75     {day} 08:00",
    ]
    for columns, line in (  # 97 columns, of which the last takes 18
        ("96", "out/ppo          ppo       CartPole-v1  finished  1,000 steps (100%)  100     0.75"),
        ("80", "out/ppo          ppo       finished  1,000 steps (100%)  100     0.75"),
        ("60", "out/ppo          finished  1,000 steps (100%)  100     0.75"),
    ):
        monkeypatch.setenv("COLUMNS", columns)
        assert cli.main(["runs", "out"]) == 0
        assert capsys.readouterr().out.splitlines()[2] == line
    monkeypatch.delenv("COLUMNS")
    assert cli.main(["runs", "out", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["runs"]
    assert [row["run"] for row in rows] == ["out/all/teacher", "out/ppo"]
    assert rows[1]["mean_reward"] == 100
    assert rows[1]["changed"] == f"{day}T08:00:50+00:00"
    monkeypatch.setenv("OUTPUT_BASE", "out/ppo")
    assert cli.main(["runs"]) == 0
    assert "out/ppo  ppo" in capsys.readouterr().out
    monkeypatch.setenv("OUTPUT_BASE", "nowhere")
    assert cli.main(["runs"]) == 0
    assert capsys.readouterr().out == "no runs in nowhere\n"
    assert cli.main(["runs", "nowhere"]) == 2
    assert "nowhere: no such directory" in capsys.readouterr().err


OFFLINE = "algorithm: {name: iql}\nenv: {id: null}\ndataset: {path: d-v0}\ntrainer: {num_epochs: 4}\n"
OWN = "algorithm: {name: ppo}\nenv: {id: 'mine:Own-v0'}\ntrainer: {iterations: 3}\n"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (OFFLINE, ["deft train --resume run --num-epochs 8"]),  # no environment to play in
        (
            OWN,
            [
                "deft evaluate run --episodes 100 --trust-remote-code",
                "deft play --policy run --video run/play.mp4 --trust-remote-code",
                "deft train --resume run --iterations 6 --trust-remote-code",
            ],
        ),
        (PHASE, ["deft evaluate run", "deft train --resume run --num-episodes 2000"]),
    ],
)
def test_next_commands(tmp_path, monkeypatch, config, expected):
    monkeypatch.chdir(tmp_path)
    assert next_commands(read_overview(make_run(Path("run"), config))) == expected


def test_the_commands_at_the_end_of_training_work(tmp_path, monkeypatch, capsys, no_plots):
    monkeypatch.chdir(tmp_path)
    flags = "--env CartPole-v1 --total-timesteps 64 --rollout-steps 32 --log-freq 1 --eval-episodes 2 --output-dir run"
    assert cli.main(["train", "ppo", *flags.split(), "--threads", "1", "--device", "cpu"]) == 0
    output = capsys.readouterr().out.splitlines()
    assert output[0] == "starting ppo on CartPole-v1 in run"
    assert output[2].startswith("ppo on CartPole-v1 finished: 64 steps in 0:00:0")
    assert "report: run/report.html" in output
    commands = [shlex.split(line) for line in output[output.index("next:") + 1 :]]
    assert [command[1] for command in commands] == ["evaluate", "play", "train"]
    for _, *words in commands:
        assert cli.main([word.replace("100", "2") for word in words]) == 0
    assert (tmp_path / "run" / "play.mp4").stat().st_size > 0
    assert "ppo on CartPole-v1 finished: 128 steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("iql --dataset d-v0 --output-dir run", "starting iql on d-v0 in run"),
        ("--resume RUN", "resuming ppo on CartPole-v1 in RUN"),
        ("--resume RUN/checkpoint-1000", "resuming ppo on CartPole-v1 in RUN"),
        ("--config cartpole-ppo --auto-resume", "starting or resuming ppo on CartPole-v1 in outputs/cartpole-ppo"),
        ("--resume RUN --output-dir other", "resuming ppo on CartPole-v1 in other"),
        (
            "--config cartpole-ppo --resume RUN --output-dir RUN",
            f"resuming ppo on CartPole-v1 in RUN with the settings of {PRESETS}/cartpole-ppo.yaml, not those of RUN",
        ),
        ("teacher", "starting teacher on random_exploration in ./outputs/teacher_rl"),
        ("teacher --output-dir mine --resume mine", "resuming teacher on random_exploration in mine"),
        ("waypoint-sft --dataset d.npz", "starting waypoint-sft on d.npz in out/sft_waypoint_bc_torch_v0"),
    ],
)
def test_the_first_line_of_training(tmp_path, words, line):
    """`RUN` is the directory of a run of PPO; a phase has a directory of its own."""
    run = str(make_run(tmp_path / "run"))
    training = parse_training(words.replace("RUN", run).split())
    assert start_line(training) == line.replace("RUN", run)


def test_listing_is_quick_to_import():
    """`deft runs` needs no torch."""
    code = "import sys, deft.runs.overview; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
