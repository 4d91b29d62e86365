"""`run.json`: one session for each start of a run, with what is needed to repeat it."""

import json

import pytest
import torch

from deft.runs.record import COMPLETE, FAILED, RECORD_FILE, RunRecord, started_as

CPU = torch.device("cpu")


def read(folder):
    return json.loads((folder / RECORD_FILE).read_text())


def test_a_session_names_the_machine_the_versions_and_its_steps(tmp_path):
    record = RunRecord(tmp_path, resumes=False)
    record.start(0, 100, "steps", CPU)
    found = read(tmp_path)
    assert (found["unit"], found["total"]) == ("steps", 100)
    (session,) = found["sessions"]
    assert session["ended"] is None  # in progress
    assert session["torch"] == torch.__version__
    assert session["cores"] >= 1
    assert session["device"] == "cpu"
    assert {"host", "processor", "memory_gib", "deft", "commit", "python", "command", "directory"} <= session.keys()
    record.end(60, FAILED, "RunError: no longer finite")
    (session,) = read(tmp_path)["sessions"]
    assert (session["last_step"], session["status"]) == (60, "failed")
    assert session["reason"] == "RunError: no longer finite"
    assert session["ended"] >= session["started"]


def test_a_resumed_run_has_a_session_for_each_start_and_a_new_run_has_one(tmp_path):
    for resumes, step in ((False, 0), (True, 50)):
        record = RunRecord(tmp_path, resumes)
        record.start(step, 100, "updates", CPU)
        record.end(step + 50, COMPLETE)
    assert [(one["first_step"], one["last_step"]) for one in read(tmp_path)["sessions"]] == [(0, 50), (50, 100)]
    RunRecord(tmp_path, resumes=False).start(0, 10, "updates", CPU)
    assert [one["first_step"] for one in read(tmp_path)["sessions"]] == [0]


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["/env/bin/deft", "train", "ppo", "--env", "my env"], "deft train ppo --env 'my env'"),
        (["/site/deft/__main__.py", "train"], "deft train"),
        (["scripts/mine.py", "--seed", "1"], "python scripts/mine.py --seed 1"),
        (["-c"], None),
        ([], None),
    ],
)
def test_the_command_that_started_a_run(arguments, command):
    assert started_as(arguments) == command
