"""A run directory of any kind is read: its settings, its status, its time; what is no run is rejected."""

import json

import pytest

from deft.errors import InputError
from deft.evaluation.report.run_data import ReportedRun, duration, flat
from deft.runs.checkpoint import folder_lock
from deft.runs.overview import is_locked

SESSION = {"started": 100.0, "first_step": 0, "ended": None, "last_step": None, "status": None}


def write_run(folder, lines=(), sessions=None, config="algorithm:\n  name: ppo\n"):
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(config)
    (folder / "episode_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if sessions is not None:
        record = {"unit": "steps", "total": 100, "sessions": sessions}
        (folder / "run.json").write_text(json.dumps(record))
    return folder


def update(step, time, **metrics):
    return {"type": "update", "step": step, "time": time, **metrics}


def test_settings_have_their_defaults_and_what_is_unknown_is_kept(tmp_path):
    run = ReportedRun.read(write_run(tmp_path, config="algorithm: {name: sac}\nenv: Pendulum-v1\nseed: 7\n"))
    assert (run.kind, run.subject, run.seed, run.unit) == ("sac", "Pendulum-v1", 7, "steps")
    changed = {name for name, value in run.settings.items() if value != run.defaults[name]}
    assert changed == {"env.id", "seed"}
    run = ReportedRun.read(write_run(tmp_path, config="algorithm: {name: mine}\nmagic: 3\n"))
    assert (run.kind, run.settings["magic"], run.defaults) == ("mine", 3, {})


def test_status_and_time_of_a_run_at_every_stage(tmp_path):
    lines = [update(10, 110.0), update(40, 130.0)]
    run = ReportedRun.read(write_run(tmp_path, lines))  # of a version without run.json
    assert (run.status_text, run.seconds, run.step) == ("ended: 40 steps", 20.0, 40)
    run = ReportedRun.read(write_run(tmp_path, lines, [SESSION]))
    assert run.status_text.startswith("killed: the process ended at about 40 of 100 steps")
    assert (run.seconds, run.rate) == (30.0, 40 / 30)  # from its start to its last line
    ended = {**SESSION, "ended": 140.0, "last_step": 40, "status": "stopped", "reason": "SIGTERM"}
    run = ReportedRun.read(write_run(tmp_path, lines, [ended]))
    assert run.status_text == "stopped at 40 of 100 steps: SIGTERM"
    later = {**SESSION, "started": 200.0, "ended": 260.0, "first_step": 40, "last_step": 100, "status": "complete"}
    run = ReportedRun.read(write_run(tmp_path, lines, [ended, later]))
    assert (run.status_text, run.seconds) == ("complete: 100 steps", 40.0 + 60.0)
    with folder_lock(tmp_path):
        run = ReportedRun.read(write_run(tmp_path, lines, [ended, SESSION]))
        assert run.status_text.startswith("in progress: 40 of 100 steps, about ")
    assert not is_locked(tmp_path)


def test_half_a_line_at_the_end_belongs_to_a_run_in_progress_and_a_damaged_line_is_an_error(tmp_path):
    write_run(tmp_path, [update(1, 1.0)])
    file = tmp_path / "episode_metrics.jsonl"
    file.write_text(file.read_text() + '{"type": "upd')
    assert ReportedRun.read(tmp_path).step == 1
    file.write_text("not JSON\n" + file.read_text())
    with pytest.raises(InputError, match="line 1 is not a line of metrics"):
        ReportedRun.read(tmp_path)


def test_values_that_were_not_finite_are_counted(tmp_path):
    lines = [update(1, 1.0, loss=0.5), update(2, 2.0, loss=None), update(3, 3.0, loss=None)]
    assert ReportedRun.read(write_run(tmp_path, lines)).not_finite == {"loss": (2, 2)}


def test_waypoint_ppo_begins_with_the_evaluation_of_the_supervised_policy(tmp_path):
    write_run(tmp_path, [{"type": "evaluation", "step": 64, "time": 1.0, "ade": 1.0}])
    evaluations = [{"iteration": 0, "timesteps": 0, "ade": 2.0}, {"iteration": 1, "timesteps": 64, "ade": 1.0}]
    (tmp_path / "eval_metrics.json").write_text(json.dumps(evaluations))
    assert [line["ade"] for line in ReportedRun.read(tmp_path).lines["evaluation"]] == [2.0, 1.0]


def test_what_is_no_run_is_named(tmp_path):
    with pytest.raises(InputError, match=r"no run in it: neither episode_metrics\.jsonl nor a config file$"):
        ReportedRun.read(tmp_path)
    write_run(tmp_path / "one")
    with pytest.raises(InputError, match=r"it holds 1 runs: deft report .*/\*$"):
        ReportedRun.read(tmp_path)
    with pytest.raises(InputError, match="no such folder"):
        ReportedRun.read(tmp_path / "none")
    with pytest.raises(InputError, match="not a folder"):
        ReportedRun.read(tmp_path / "one" / "config.yaml")


def test_small_texts():
    assert [duration(value) for value in (3.04, 59.4, 200, 7500)] == ["3.0 s", "59 s", "3 min 20 s", "2 h 5 min"]
    assert flat({"a": {"b": 1, "c": {}}, "d": (1, 2)}) == {"a.b": 1, "a.c": {}, "d": [1, 2]}
