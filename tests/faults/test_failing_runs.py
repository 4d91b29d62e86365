"""Damaged checkpoints, and what breaks under a run: one clear line, and nothing that was saved is lost."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from faulty_worlds import NEVER, TINY, Command, assert_one_line, contents

import deft.runs.logging as run_logging
from deft import PPO
from deft.errors import InputError
from deft.runs import checkpoint

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
