"""The life of a run, driven with a loop that only counts and draws random numbers."""

import dataclasses
import json
import math
import os
import signal
import socket
from pathlib import Path

import pytest
import torch

from deft.config.settings import LoggingConfig
from deft.errors import InputError, RunError, Stopped
from deft.runs import checkpoint
from deft.runs.compute import Threads
from deft.runs.directory import place_directory
from deft.training.lifecycle import Run, RunSpec
from deft.training.loop import Intervals, Loop

QUIET = LoggingConfig(console_level="CRITICAL", enable_file_logging=False, tensorboard=False)


class Counting(Loop):
    """Adds a random number to its weight in every step; evaluations return the given rewards in order."""

    def __init__(self, folder: Path, rewards: list[float] | None = None, **intervals: int) -> None:
        self.device, self.num_updates, self.weight = torch.device("cpu"), 0, torch.zeros(1)
        self.rewards, self.at_step = rewards, {}
        self.videos: list[str | None] = []  # of each evaluation
        self._intervals = Intervals(**{"log": 1, "evaluate": 0, "save": 0, "keep": 10, **intervals})
        self.run = Run(self, RunSpec(logging_config=QUIET, seed=3), folder, Threads((1,)))

    @property
    def global_step(self) -> int:
        return self.num_updates

    @property
    def intervals(self) -> Intervals:
        return self._intervals

    @property
    def is_evaluated(self) -> bool:
        return self.rewards is not None

    def step(self):
        if self.num_updates + 1 in self.at_step:
            self.at_step[self.num_updates + 1]()
        self.weight = self.weight + torch.rand(1)
        self.num_updates += 1
        return {"weight": self.weight.sum()}

    def start_evaluation(self, video):
        assert self.rewards is not None
        reward = self.rewards.pop(0)
        self.videos.append(None if video is None else video.name)
        if reward is None:
            os.kill(os.getpid(), signal.SIGTERM)
            raise Stopped
        return [(self.num_updates, {"mean_reward": reward, "std_reward": 0.0, "action_selection": "mode"})]

    def check_finite(self, state):
        if not torch.isfinite(self.weight).all():
            raise RunError("not finite")

    def weights(self):
        return {"weight": self.weight}

    def state_dict(self, after_failure=False):
        return {"num_updates": self.num_updates, "after_failure": after_failure}

    def load_state_dict(self, state, folder):
        self.num_updates = state["num_updates"]
        self.weight = checkpoint.load_part(folder, checkpoint.MODEL)["weight"]

    def summary(self):
        return {"updates": self.num_updates}


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def fail() -> None:
    raise ZeroDivisionError


def names(folder: Path) -> list[str]:
    return [path.name for path in checkpoint.list_checkpoints(folder)]


def lines(folder: Path) -> list[dict]:
    found = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in line.items() if name != "time"} for line in found]


def test_a_signal_stops_after_the_step_and_the_resumed_run_is_the_same(tmp_path):
    whole = Counting(tmp_path / "whole")
    assert whole.run.execute(6) == {"updates": 6}
    stopped = Counting(tmp_path / "half")
    stopped.at_step[3] = terminate
    with pytest.raises(SystemExit) as ended:
        stopped.run.execute(6)
    assert ended.value.code == 143
    assert names(tmp_path / "half") == ["checkpoint-3"]
    resumed = Counting(tmp_path / "half")
    resumed.load(tmp_path / "half")
    resumed.run.execute(6)
    assert torch.equal(resumed.weight, whole.weight)
    assert lines(tmp_path / "half") == lines(tmp_path / "whole")


def test_a_failure_is_raised_and_what_was_learned_is_saved(tmp_path):
    loop = Counting(tmp_path)
    loop.at_step[4] = fail
    with pytest.raises(ZeroDivisionError):
        loop.run.execute(6)
    assert names(tmp_path) == ["checkpoint-3"]
    assert checkpoint.load_training_state(tmp_path / "checkpoint-3")["after_failure"]


def test_a_failure_right_after_a_checkpoint_does_not_replace_it(tmp_path):
    loop = Counting(tmp_path, save=3)
    loop.at_step[4] = fail
    with pytest.raises(ZeroDivisionError):
        loop.run.execute(6)
    assert not checkpoint.load_training_state(tmp_path / "checkpoint-3")["after_failure"]


def test_weights_that_are_not_finite_are_never_saved(tmp_path):
    loop = Counting(tmp_path, save=2)
    loop.at_step[3] = lambda: setattr(loop, "weight", torch.full((1,), torch.nan))
    with pytest.raises(RunError, match="not finite"):
        loop.run.execute(4)
    assert names(tmp_path) == ["checkpoint-2"]


def test_the_best_is_marked_and_kept_and_a_tie_goes_to_the_later_one(tmp_path):
    loop = Counting(tmp_path, [1.0, 5.0, 5.0, 2.0], evaluate=1, keep=1)
    loop.run.execute(4)
    assert (tmp_path / "best").resolve().name == "checkpoint-3"
    assert names(tmp_path) == ["checkpoint-3", "checkpoint-4"]
    assert loop.best_reward == 5.0
    resumed = Counting(tmp_path, [4.0], evaluate=1, keep=1)
    resumed.load(tmp_path)
    assert (resumed.best_reward, resumed.last_evaluation["mean_reward"]) == (5.0, 2.0)
    resumed.run.execute(5)
    assert (tmp_path / "best").resolve().name == "checkpoint-3"


def test_an_evaluation_that_was_stopped_is_made_when_the_run_is_resumed(tmp_path):
    loop = Counting(tmp_path, [None], evaluate=2)
    with pytest.raises(SystemExit):
        loop.run.execute(4)
    assert names(tmp_path) == ["checkpoint-2"]
    resumed = Counting(tmp_path, [7.0, 8.0], evaluate=2)
    resumed.load(tmp_path)
    assert resumed.run.owes_evaluation
    resumed.run.execute(4)
    assert [line["step"] for line in lines(tmp_path) if line["type"] == "evaluation"] == [2, 4]


def test_the_last_evaluation_is_made_once(tmp_path):
    Counting(tmp_path, [1.0, 2.0], evaluate=2).run.execute(3, evaluates_last=True)
    assert [line["step"] for line in lines(tmp_path) if line["type"] == "evaluation"] == [2, 3]
    resumed = Counting(tmp_path, [], evaluate=2)
    resumed.load(tmp_path)
    resumed.run.execute(3, evaluates_last=True)  # it would fail without a reward
    assert resumed.last_evaluation["mean_reward"] == 2.0


def test_a_video_is_recorded_when_it_is_due_and_at_the_end(tmp_path):
    # Evaluations at 3 and 6, videos at 2, 4 and 6, and the last evaluation at 7: each video has its evaluation.
    both = Counting(tmp_path / "both", [1.0] * 6, evaluate=3, video=2)
    both.run.execute(7, evaluates_last=True)
    assert both.videos == ["step_2.mp4", None, "step_4.mp4", "step_6.mp4", "step_7.mp4"]
    videos_only = Counting(tmp_path / "videos", [1.0] * 3, video=2)
    videos_only.run.execute(3, evaluates_last=True)
    assert videos_only.videos == ["step_2.mp4", "step_3.mp4"]
    periodic = Counting(tmp_path / "periodic", [1.0] * 2, evaluate=3, video=5)
    periodic.run.execute(3, evaluates_last=True)  # the last evaluation is a periodic one, before a video is due
    assert periodic.videos == ["step_3.mp4"]
    none = Counting(tmp_path / "none", [1.0] * 2, evaluate=3)
    none.run.execute(4, evaluates_last=True)
    assert none.videos == [None, None]


def test_a_run_is_not_started_over_another_one(tmp_path):
    Counting(tmp_path).run.execute(2)
    with pytest.raises(InputError, match="already holds a run"):
        Counting(tmp_path).run.execute(2)


@pytest.mark.parametrize(
    ("resume", "auto_resume", "overwrite", "found"),
    [
        ("run", False, False, ("checkpoint-2", False)),
        ("other", False, True, ("checkpoint-2", True)),
        (None, True, False, ("checkpoint-2", False)),
        (None, False, True, (None, True)),
    ],
)
def test_runs_are_placed_by_one_function(tmp_path, resume, auto_resume, overwrite, found):
    for name in ("run", "other"):
        Counting(tmp_path / name).run.execute(2)
    chosen = None if resume is None else str(tmp_path / resume)
    resume_from, replaces = place_directory(tmp_path / "run", chosen, auto_resume, overwrite)
    assert (None if resume_from is None else resume_from.name, replaces) == found
    with pytest.raises(InputError, match="--auto-resume continues it"):
        place_directory(tmp_path / "run", None, False, False)
    assert place_directory(tmp_path / "new", None, True, False) == (None, False)


def sessions(folder: Path) -> list[tuple]:
    found = json.loads((folder / "run.json").read_text())["sessions"]
    return [(one["first_step"], one["last_step"], one["status"], one.get("reason")) for one in found]


def test_a_run_with_settings_can_be_resumed_by_a_command(tmp_path):
    run = Counting(tmp_path / "a run").run
    run.directory.mkdir()
    assert run._how_to_resume() == ""  # of Python: there is no file to resume from
    (run.directory / "config.yaml").touch()
    assert run._how_to_resume() == f"; to resume: deft train --resume '{run.directory}'"


def test_run_json_has_how_each_start_of_a_run_ended(tmp_path):
    loop = Counting(tmp_path)
    loop.at_step[3] = lambda: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        loop.run.execute(6)
    assert sessions(tmp_path) == [(0, 3, "stopped", "SIGTERM")]
    loop = Counting(tmp_path)
    loop.run.load(tmp_path)

    def fail():
        raise RunError("no disk")

    loop.at_step[5] = fail
    with pytest.raises(RunError):
        loop.run.execute(6)
    loop = Counting(tmp_path)
    loop.run.load(tmp_path)
    loop.run.execute(6)
    assert sessions(tmp_path)[1:] == [(3, 4, "failed", "RunError: no disk"), (4, 6, "complete", None)]


def test_a_viewed_run_writes_live_files_and_a_port_in_use_is_found_before(tmp_path, monkeypatch):
    monkeypatch.setattr("deft.runs.live.INTERVAL", 0.0)
    monkeypatch.setattr("deft.runs.live.MOST_TIME", math.inf)
    loop = Counting(tmp_path / "run")
    shown = []

    def open_page() -> None:
        (tmp_path / "run" / "live" / "viewer").touch()

    loop.at_step[2] = open_page
    loop.at_step[4] = lambda: shown.append(json.loads((tmp_path / "run" / "live" / "progress.json").read_text()))
    loop.run.execute(5)
    # Steps 2 and 3 are shown when step 4 is made: the files are those of step 3.
    assert [(one["step"], one["total"], one["process"]) for one in shown] == [(3, 5, os.getpid())]
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        viewed = dataclasses.replace(QUIET, view=True, view_port=taken.getsockname()[1])
        with pytest.raises(InputError, match="give another --view-port"):
            Run(loop, RunSpec(logging_config=viewed), tmp_path / "other", Threads((1,)))
    assert not (tmp_path / "other").exists()
