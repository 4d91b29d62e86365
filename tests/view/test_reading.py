import json
import os
import shutil
import time

import pytest
from viewed_runs import ENDED, append, make_run, write_live

import deft.runs.record
from deft.view import reading
from deft.view.reading import RunReader, find_runs


def test_a_finished_run(tmp_path):
    run = RunReader(make_run(tmp_path / "run", **ENDED)).snapshot("")
    assert (run["state"], run["step"], run["total"], run["unit"]) == ("complete", 200, 400, "steps")
    assert (run["name"], run["about"], run["left"], run["rate"]) == ("run", "ppo · tabletop", None, None)
    assert run["elapsed"] == pytest.approx(60.0)
    assert run["episodes"] == 6
    assert run["mean_reward"] == 3.0
    assert run["evaluation"] == {"step": 150, "mean_reward": 2.5, "success_rate": 0.5, "episodes": 10}
    # Of three episodes of each task, those of "push" succeed in the second update only.
    assert [(task["task"], round(task["success_rate"], 2)) for task in run["tasks"]] == [("push", 0.33), ("reach", 1.0)]
    assert run["log"] == ["INFO one", "INFO <b>two</b>"]
    titles = [panel["title"] for panel in run["panels"]]
    assert titles == ["Return", "Success rate", "Success rate by task", "Policy loss", "lr_group/width"]
    json.dumps(run, allow_nan=False)


def test_a_run_in_progress(tmp_path):
    folder = make_run(tmp_path / "run")
    write_live(folder)
    run = RunReader(folder).snapshot("")
    assert (run["state"], run["step"]) == ("running", 170)
    assert run["rate"] > 0
    assert run["left"] == pytest.approx((400 - 170) / run["rate"])
    assert [camera["name"] for camera in run["tiles"]["cameras"]] == ["head_rgb", "wrist_rgb"]


def test_only_new_lines_are_read_and_charts_are_sent_once(tmp_path):
    reader = RunReader(make_run(tmp_path / "run"))
    first = reader.snapshot("")
    assert "panels" not in reader.snapshot(first["version"])
    with open(tmp_path / "run" / "episode_metrics.jsonl", "a") as file:
        file.write('{"type": "update", "step": 200, "time": 1000050.0, "policy_loss"')  # not complete yet
    assert "panels" not in reader.snapshot(first["version"])
    with open(tmp_path / "run" / "episode_metrics.jsonl", "a") as file:
        file.write(": 7.0}\n")
    second = reader.snapshot(first["version"])
    loss = next(panel for panel in second["panels"] if panel["title"] == "Policy loss")
    assert loss["series"][0]["values"] == [1.0, 0.5, 1.0 / 3.0, 7.0]


def test_a_resumed_run_is_read_anew(tmp_path):
    folder = make_run(tmp_path / "run")
    reader = RunReader(folder)
    first = reader.snapshot("")
    path = folder / "episode_metrics.jsonl"  # a resumed run drops the lines after its checkpoint, in a new file
    kept = [line for line in path.read_text().splitlines(keepends=True) if '"step": 50' in line]
    (folder / "new").write_text("".join(kept))
    os.replace(folder / "new", path)
    append(folder, {"type": "update", "step": 100, "time": 1_000_050.0, "policy_loss": 9.0})
    second = reader.snapshot(first["version"])
    assert second["episodes"] == 2
    loss = next(panel for panel in second["panels"] if panel["title"] == "Policy loss")
    assert (loss["series"][0]["steps"], loss["series"][0]["values"]) == ([50, 100], [1.0, 9.0])


def test_lines_that_cannot_be_read_are_counted(tmp_path):
    folder = make_run(tmp_path / "run")
    with open(folder / "episode_metrics.jsonl", "a") as file:
        file.write('not json\n[1]\n{"type": "update"}\n')
    assert RunReader(folder).snapshot("")["unreadable"] == 3


def test_states(tmp_path, monkeypatch):
    folder = make_run(tmp_path / "run")
    write_live(folder)
    monkeypatch.setattr(reading, "_is_alive", lambda process: False)
    assert RunReader(folder).snapshot("")["state"] == "killed"
    monkeypatch.setattr(reading.socket, "gethostname", lambda: "another machine")
    assert RunReader(folder).snapshot("")["state"] == "running"  # by its files, which are new
    old = time.time() - 1_000
    for path in ("episode_metrics.jsonl", "run.json", "live/progress.json"):
        os.utime(folder / path, (old, old))
    assert RunReader(folder).snapshot("")["state"] == "unknown"
    failed = make_run(tmp_path / "failed", **ENDED | {"status": "failed", "reason": "RunError: no"})
    run = RunReader(failed).snapshot("")
    assert (run["state"], run["reason"]) == ("failed", "RunError: no")


def test_a_run_that_was_removed_and_is_written_again(tmp_path):
    reader = RunReader(make_run(tmp_path / "run"))
    assert reader.snapshot("")["episodes"] == 6
    shutil.rmtree(tmp_path / "run")
    reader.mark_viewed()
    assert reader.snapshot("") == {"name": "run", "state": "removed"}
    assert not (tmp_path / "run").exists()  # looking at it does not bring it back
    make_run(tmp_path / "run", updates=1)
    assert reader.snapshot("")["episodes"] == 2


@pytest.mark.parametrize("content", ["", "{", "[]", '{"sessions": 3}', '{"sessions": [], "total": "x"}', "null"])
def test_damaged_files_are_left_out(tmp_path, content):
    folder = make_run(tmp_path / "run")
    write_live(folder)
    for path in ("run.json", "live/progress.json", "config.yaml"):
        (folder / path).write_text(content)
    assert RunReader(folder).snapshot("")["step"] == 150


def test_media_are_the_latest_and_only_those_of_the_run(tmp_path):
    folder = make_run(tmp_path / "run")
    (folder / "samples").mkdir()
    for number in (1, 2, 3):
        path = folder / "samples" / f"episode_{number}.png"
        path.write_bytes(b"image")
        os.utime(path, (number, number))
    (tmp_path / "secret.png").write_bytes(b"secret")
    (folder / "samples" / "link.png").symlink_to(tmp_path / "secret.png")
    os.utime(folder / "samples" / "link.png", (0, 0))
    reader = RunReader(folder)
    assert [one["name"] for one in reader.snapshot("")["media"]] == ["episode_3.png", "episode_2.png"]
    assert reader.media_file("samples", "episode_1.png") == folder / "samples" / "episode_1.png"
    for place in (
        ("samples", "link.png"), ("samples", "../../secret.png"), ("samples", "..%2f..%2fsecret.png"),
        ("..", "secret.png"), (".", "config.yaml"), ("live", "token"), ("samples", ".hidden.png"),
        ("samples", "missing.png"), ("videos", "x.png"),
    ):  # fmt: skip
        assert reader.media_file(*place) is None, place


def test_find_runs(tmp_path):
    assert find_runs(tmp_path / "missing") == []
    assert find_runs(tmp_path) == []
    for number, name in enumerate(("first", "second")):
        make_run(tmp_path / name)
        for path in ("episode_metrics.jsonl", "run.json"):
            os.utime(tmp_path / name / path, (number, number))
    (tmp_path / "other").mkdir()
    assert find_runs(tmp_path) == ["second", "first"]
    assert find_runs(tmp_path / "first") == ["."]
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "config.yaml").write_text("algorithm: ppo\n")
    assert find_runs(empty) == ["."]


def test_names_agree_with_those_that_import_torch():
    assert reading.RECORD_FILE == deft.runs.record.RECORD_FILE
