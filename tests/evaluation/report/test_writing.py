"""The page about a run, several runs, phases or a comparison: complete, in one file, with escaped text."""

import base64
import json
import re
import time
from html.parser import HTMLParser

import pytest

from deft.cli import main
from deft.errors import InputError
from deft.evaluation.report import attempt_report, markup, write_report
from deft.evaluation.report.writing import REPORT_FILE

PICTURE = b"\x89PNG picture"
VOID = {"meta", "img", "br", "wbr", "link", "input"}


class Page(HTMLParser):
    """The parsed page: text, tags, addresses; unbalanced tags raise."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open, self.words, self.addresses, self.ids = [], [], [], []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.ids += [given["id"]] if "id" in given else []
        self.addresses += [given[name] for name in ("src", "href") if name in given]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not {"style", "script"} & set(self.open):
            self.words.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())


def parsed(path) -> Page:
    page = Page(path.read_text())
    # Nothing is loaded from elsewhere: addresses are data, or places in the page.
    assert all(address.startswith(("data:", "#")) for address in page.addresses), page.addresses
    assert {address[1:] for address in page.addresses if address.startswith("#")} <= set(page.ids)
    assert "http://" not in re.sub(r'"http://www.w3.org/2000/svg"', "", path.read_text())
    return page


def write_run(folder, seed=1, learning_rate=0.001, lines=None, status="complete"):
    """A run directory as `deft train ppo` leaves it."""
    folder.mkdir(parents=True)
    settings = {"seed": seed, "algorithm": {"name": "ppo", "cfg": {"learning_rate": learning_rate}}}
    (folder / "config.yaml").write_text(json.dumps({**settings, "env": {"id": "CartPole-v1"}}))
    now = time.time()
    if lines is None:
        lines = [
            {"type": "episode", "episode_return": float(step), "success": step > 15, "step": step} for step in range(30)
        ]
        lines += [{"type": "update", "step": step, "policy_loss": 1 / step, "odd": 2.0} for step in range(1, 31)]
        lines += [
            {"type": "evaluation", "step": step, "episodes": 10, "mean_reward": step + seed, "std_reward": 1.0}
            for step in (10, 30)
        ]
    text = "".join(json.dumps({"time": now + line["step"], **line}) + "\n" for line in lines)
    (folder / "episode_metrics.jsonl").write_text(text)
    session = {"started": now, "ended": now + 40, "first_step": 0, "last_step": 30, "status": status}
    session |= {"command": f"deft train ppo --seed {seed}", "directory": "/work", "host": "box", "system": "Linux"}
    session |= {"processor": "CPU", "cores": 2, "memory_gib": 8.0, "device": "cpu", "deft": "1", "commit": "abc123"}
    record = {"unit": "steps", "total": 30, "sessions": [session | {"python": "3", "torch": "2"}]}
    (folder / "run.json").write_text(json.dumps(record))
    return folder


def test_the_page_of_a_run_says_what_was_trained_how_well_how_fast_and_how_to_repeat_it(tmp_path):
    run = write_run(tmp_path / "ppo_1")
    page = parsed(write_report(run))
    assert "PPO · CartPole-v1 complete: 30 steps" in page.text
    # 30 episodes, windows of 10: returns 0 … 9 and 20 … 29, successes from the 17th on.
    assert "Return 4.5 → 24.5" in page.text
    assert "Success rate 0.0 → 100.0 % first → last 10 training episodes" in page.text
    assert "40 s of training" in page.text
    assert "0.75 steps a second" in page.text
    assert "Episode return" in page.text
    assert "All other metrics (1)" in page.text  # odd
    assert "algorithm. cfg. learning_ rate 0.001 0.0003" in page.text  # its value, and the default
    assert "deft train ppo --seed 1" in page.text
    assert f"deft train --config {run}/config.yaml --output-dir NEW_FOLDER" in page.text
    assert f"deft evaluate {run} --episodes 100" in page.text
    assert "box: CPU, 2 cores, 8.0 GiB" in page.text
    assert "commit abc123" in page.text
    assert "All evaluations during training (2)" in page.text


def test_a_checkpoint_stands_for_its_run_and_a_stopped_run_can_be_resumed(tmp_path):
    run = write_run(tmp_path / "run", status="stopped")
    (run / "checkpoint-30").mkdir()
    (run / "checkpoint-30" / "model.pt").write_bytes(b"")
    path = write_report(run / "checkpoint-30")
    assert path == run / REPORT_FILE
    assert f"resume it deft train --resume {run}" in parsed(path).text


def test_runs_that_differ_by_seed_form_a_group_and_others_stand_beside(tmp_path):
    runs = [write_run(tmp_path / f"fast_{seed}", seed) for seed in (1, 2, 3)]
    runs.append(write_run(tmp_path / "slow", 1, 0.1))
    page = parsed(write_report(runs, tmp_path / "all.html"))
    assert "fast 1, 2, 3 " in page.text
    # The last evaluations are 31, 32 and 33: 32 ± 4.3027 / √3.
    assert "12 → 32 (29.52 to 34.48)" in page.text
    assert "Differences between the groups setting fast slow algorithm. cfg. learning_ rate 0.001 0.1" in page.text
    assert f"deft compare fast={','.join(map(str, runs[:3]))} slow={runs[3]}" in page.text
    assert "95 % intervals over seeds" in page.text
    labelled = parsed(write_report([f"mine={runs[0]},{runs[3]}"], tmp_path / "labelled.html"))
    assert "2 runs, with seed 1 " in labelled.text  # those of `fast_1` and `slow`


def test_runs_of_unequal_length_are_compared_at_the_last_step_that_all_have_reached(tmp_path):
    """Evaluations of 11, 31 and, of a longer run, 51 at step 50; both have 12 and 32 at steps 10 and 30."""
    lines = [
        {"type": "evaluation", "step": step, "episodes": 10, "mean_reward": step + 1.0, "std_reward": 1.0}
        for step in (10, 30, 50)
    ]
    runs = [write_run(tmp_path / "ppo_1", 1, lines=lines[:2]), write_run(tmp_path / "ppo_2", 2, lines=lines)]
    page = parsed(path := write_report(runs, tmp_path / "all.html"))
    assert (
        "the runs of ppo end at 30 and 50 steps: their results and means are those at 30 steps, which all" in page.text
    )
    assert "Return 11 → 31 evaluation at 10 → 30 steps, 10 episodes" in page.text
    assert "2 runs, with seeds 1 and 2 " in page.text
    assert "30 and 50 steps" in page.text
    other = write_run(tmp_path / "slow", 3, lines=lines, learning_rate=0.1)
    text = parsed(write_report([runs[0], other], tmp_path / "groups.html")).text
    assert "These runs differ in length: ppo_1 at 30, slow at 50 steps." in text
    # A point for each evaluation of each run, and one for each mean, at the two steps that both have.
    assert path.read_text().count('class="point c1"') == 5
    assert path.read_text().count('class="dot c1"') == 2


def test_runs_that_count_steps_and_runs_that_count_updates_stand_side_by_side(tmp_path):
    """As in a comparison of SFT with PPO."""
    runs = [write_run(tmp_path / "ppo"), write_run(tmp_path / "sft", learning_rate=0.1)]
    record = json.loads((file := runs[1] / "run.json").read_text())
    file.write_text(json.dumps(record | {"unit": "updates"}))
    text = parsed(write_report(runs, tmp_path / "both.html")).text
    assert "steps or updates a second" in text
    assert "steps 0 to 30 – " in text  # in the columns of `ppo` and `sft`
    assert "updates – 0 to 30" in text


def test_every_run_has_its_commands(tmp_path):
    runs = [write_run(tmp_path / f"ppo_{seed}", seed) for seed in (1, 2)]
    page = parsed(write_report(runs, tmp_path / "all.html"))
    assert "ppo_1: started as deft train ppo --seed 1" in page.text
    assert "Commands of the other runs (1) ppo_2: started as deft train ppo --seed 2" in page.text
    assert f"ppo_2: repeat it deft train --config {runs[1]}/config.yaml" in page.text
    same_name = [write_run(tmp_path / name / "run", seed) for seed, name in enumerate("ab")]
    page = parsed(write_report(same_name, tmp_path / "same.html"))
    assert all(f"{run}: started as deft train ppo --seed {seed}" in page.text for seed, run in enumerate(same_name))


def test_a_run_with_nan_an_empty_one_and_one_that_was_killed_are_reported(tmp_path):
    lines = [{"type": "update", "step": step, "policy_loss": None, "entropy": 1.0} for step in (5, 6)]
    page = parsed(write_report(write_run(tmp_path / "nan", lines=lines, status="failed")))
    assert "policy_loss was not finite in 2 of 2 lines, first at step 5" in page.text
    assert "failed at 30 of 30 steps" in page.text
    assert "Policy loss" not in page.text
    assert "no metrics yet" in parsed(write_report(write_run(tmp_path / "empty", lines=[]))).text
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun" / "config.yaml").write_text("phase: teacher\n")
    assert "Phase 1 · Teacher" in parsed(write_report(tmp_path / "begun")).text


def test_the_page_of_a_phase_has_its_predictions_images_and_videos(tmp_path):
    run = tmp_path / "teacher"
    run.mkdir()
    (run / "config.yaml").write_text("phase: teacher\n")
    lines = [
        {"type": "update", "step": step, "time": float(step), "train/wm_loss": 5.0 - step, "train/odd": 1.0}
        for step in range(3)
    ]
    (run / "episode_metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {"wm_acc": 0.4, "copy_acc": 0.2, "ablations": {"images_masked": {"wm_acc": 0.1}}}
    found |= {"open_loop": {"wm_acc": [0.4, 0.3], "copy_acc": [0.2, 0.1]}, "bars": {"Cells": {"random": [1.0, 3.0]}}}
    (run / "evaluation.json").write_text(json.dumps(found))
    for name, content in (("samples/episode_2.png", PICTURE), ("videos/episode_2.mp4", b"video")):
        (run / name).parent.mkdir()
        (run / name).write_bytes(content)
    page = parsed(write_report(run))
    for words in ("World model: cross-entropy", "All other metrics (1)", "images masked", "40 %", "Open loop", "Cells"):
        assert words in page.text
    assert "wm loss 5 → 3" in page.text
    assert f"data:image/png;base64,{base64.b64encode(PICTURE).decode()}" in page.addresses
    assert "data:video/mp4;base64,dmlkZW8=" in page.addresses
    comparison = {"title": "Before and after phase 3", "rows": [{"name": "Phase 1", "values": {"codes": 0.5}}]}
    (tmp_path / "comparison.json").write_text(json.dumps(comparison))
    whole = parsed(write_report(tmp_path))  # of `deft train all`
    assert "Before and after phase 3 codes Phase 1 0.5" in whole.text
    assert "Phase 1 · Teacher" in whole.text


def test_the_page_of_a_comparison_has_its_tables_and_the_training_of_its_runs(tmp_path):
    run = write_run(tmp_path / "ppo")
    rows = {
        "ppo": {"episodes": 10, "seeds": 1, "mean_reward": 5.0, "mean_reward_interval": [4.0, 6.0]},
        "random": {"episodes": 10, "seeds": 1, "mean_reward": 1.0, "mean_reward_interval": [0.5, 1.5]},
    }
    rows["random"] |= {"reward_difference": -4.0, "reward_difference_interval": [-5.0, -3.0]}
    found = {"episodes": 10, "seed": 0, "columns": {"success": rows}, "action_selection": {"ppo": "mode"}}
    found["runs"] = {"ppo": [{"run": "ppo", "checkpoint": str(run / "checkpoint-30")}], "random": [{"run": "random"}]}
    folder = run / "comparison"
    folder.mkdir()
    (folder / "comparison.json").write_text(json.dumps(found))
    page = parsed(write_report(folder))
    assert "ppo against random" in page.text
    assert "random 1.00 0.50 to 1.50" in page.text
    assert "-4.00 (-5.00 to -3.00)" in page.text
    assert "Training runs" in page.text
    assert "Return 4.5 → 24.5" in page.text
    assert "-4.00 (-5.00 to -3.00)" in parsed(write_report(run)).text  # the run's own page has it too


def test_names_are_text_in_the_page_and_large_files_stay_beside_it(tmp_path, monkeypatch):
    run = write_run(tmp_path / "<img src=x onerror=alert(1)>")
    for name in ('plots/x" onload="alert(1).png', "videos/<b>.mp4"):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_bytes(b"content")
    text = write_report(run).read_text()
    assert "<img src=x" not in text
    assert '" onload="' not in text
    assert "&lt;b&gt;.mp4" in text
    monkeypatch.setattr(markup, "LARGEST_EMBEDDED", 3)
    text = write_report(run, tmp_path / "out.html").read_text()
    assert 'src="%3Cimg%20src%3Dx%20onerror%3Dalert%281%29%3E/videos/%3Cb%3E.mp4"' in text


def test_what_cannot_be_reported_is_one_line_and_exit_status_2(tmp_path, capsys):
    (tmp_path / "page.html").write_text("mine")
    run = write_run(tmp_path / "run")
    for arguments, words in (
        ([tmp_path / "missing"], "no such folder"),
        ([tmp_path / "page.html"], "not a folder"),
        ([tmp_path], "it holds 1 runs"),
        ([run, "random"], "random: not a run"),
        ([run, "--out", tmp_path / "page.html"], "exists and is no report of Deft"),
        ([run, "--out", tmp_path], "is a folder; name a file"),
        ([], "report: give the directories of runs; got none"),
    ):
        assert main(["report", *map(str, arguments)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert words in line
    (run / "comparison.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read as JSON"):
        write_report(run)
    assert attempt_report(run) == {}  # logged: the run itself is complete
