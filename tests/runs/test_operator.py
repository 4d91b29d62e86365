"""The files by which a person takes over: which commands are accepted, for how long, and the pace."""

import json
import time

import numpy as np
import pytest

from deft.runs import operator
from deft.runs.operator import Command, Operator, parse_command, write_command

CONTROLS = {"names": ["x", "gripper"], "num_envs": 2, "rate": 10.0}


@pytest.fixture
def person(tmp_path):
    made = Operator(tmp_path, ["x", "gripper"], 2, 10.0)
    assert made.poll() is None  # offers the controls
    return made


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (["watch"], "a command has mode, env and action"),
        ({"mode": "watch", "file": "/etc/passwd"}, "a command has mode, env and action"),
        ({"mode": "fly"}, "mode is one of watch, act, away"),
        ({"mode": "watch", "env": 2}, "env is 0 to 1"),
        ({"mode": "watch", "env": True}, "env is 0 to 1"),
        ({"mode": "act", "action": [1.0]}, "action is a list of 2 finite numbers"),
        ({"mode": "act", "action": [1.0, float("nan")]}, "action is a list of 2 finite numbers"),
        ({"mode": "act", "action": [1.0, "2"]}, "action is a list of 2 finite numbers"),
    ],
)
def test_wrong_commands(content, message):
    with pytest.raises(ValueError, match=message):
        parse_command(content, CONTROLS)


def test_commands_are_read_until_they_expire(tmp_path, person, monkeypatch):
    assert json.loads((tmp_path / "live" / "controls.json").read_text()) == CONTROLS
    write_command(tmp_path, parse_command({"mode": "act", "env": 1, "action": [3, -0.5]}, CONTROLS))
    assert person.poll() == Command(1, (1.0, -0.5))  # clipped
    write_command(tmp_path, parse_command({"mode": "watch", "env": 0}, CONTROLS))
    assert person.poll() == Command(0, None)
    now = time.time()
    monkeypatch.setattr(operator.time, "time", lambda: now + operator.VALID + 0.01)
    assert person.poll() is None  # the page was closed
    monkeypatch.undo()
    write_command(tmp_path, parse_command({"mode": "away"}, CONTROLS))
    assert person.poll() is None
    (tmp_path / "live" / "command.json").write_text('{"mode": "act"')
    assert person.poll() is None
    person.close()
    assert not list((tmp_path / "live").glob("*.json"))


def test_a_command_of_an_earlier_session_is_forgotten(tmp_path):
    write_command(tmp_path, {"mode": "watch", "env": 0, "action": []})
    assert Operator(tmp_path, ["x", "gripper"], 2, 10.0).poll() is None


def test_the_pace_is_kept_while_somebody_watches(tmp_path, monkeypatch):
    person, slept, clock = Operator(tmp_path, ["x"], 1, 20.0), [], [100.0]
    monkeypatch.setattr(operator.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(operator.time, "sleep", slept.append)
    person.pace(1)
    clock[0] += 0.02
    person.pace(1)  # 1 / 20 s after the last one: 0.03 s are left
    clock[0] += 0.05
    person.pace(4)  # four steps at once: 0.2 s, of which 0.05 are over
    person.rest()
    person.pace(1)
    assert slept == pytest.approx([0.03, 0.15])


def test_frames(tmp_path, person):
    person.show(np.zeros((4, 6, 3), np.uint8), env=0, acts="policy")
    frame = json.loads((tmp_path / "live" / "frame.json").read_text())
    assert frame["acts"] == "policy"
    assert frame["image"].startswith("/9j/")  # a JPEG in base 64
