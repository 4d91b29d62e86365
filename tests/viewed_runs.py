"""Run directories for the tests of the live view, as training writes them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from deft.runs.live import LiveFiles
from deft.view import server

TOKEN = "0123456789abcdef01234567"
ENDED = {"ended": 1_000_060.0, "last_step": 200, "status": "complete"}


def make_run(folder: Path, updates: int = 3, **session: Any) -> Path:
    """A run of `updates` updates of 50 steps, two tasks and an evaluation; in progress unless `session` ends it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("algorithm: {name: ppo}\nenv: {id: tabletop}\n")
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "logs" / "rl_training_20260101_000000.log").write_text(
        "2026-01-01 00:00:00,000 DEBUG deft: a detail\nINFO one\nINFO <b>two</b>\n"
    )
    session = {"started": 1_000_000.0, "first_step": 0, "ended": None, "host": socket.gethostname(), **session}
    record = {"unit": "steps", "total": 400, "sessions": [session]}
    (folder / "run.json").write_text(json.dumps(record))
    lines: list[dict[str, Any]] = []
    for number in range(1, updates + 1):
        step, when = 50 * number, 1_000_000.0 + 10 * number
        for task, success in (("reach", True), ("push", number % 2 == 0)):
            lines.append({"type": "episode", "step": step, "time": when, "success": success, "task": task})
        values = {"rollout/mean_reward": float(number), "rollout/success_rate": 0.75, "policy_loss": 1.0 / number}
        lines.append({"type": "update", "step": step, "time": when, **values, "odd": None, "lr_group/width": 2.0})
    results = {"episodes": 10, "mean_reward": 2.5, "success_rate": 0.5, "action_selection": "mean"}
    lines.append({"type": "evaluation", "step": 50 * updates, "time": 1_000_040.0, **results})
    append(folder, *lines)
    return folder


def append(folder: Path, *lines: dict[str, Any]) -> None:
    with open(folder / "episode_metrics.jsonl", "a") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def write_live(folder: Path, step: int = 170, num_envs: int = 3) -> LiveFiles:
    """The live files of this process, with two cameras, while a page is open."""
    image = np.zeros((num_envs, 3, 16, 16), np.uint8)
    image[:, 0] = 200
    observation = {"head_rgb": image, "wrist_rgb": image[:, :, :8, :8], "state": np.zeros((num_envs, 4), np.float32)}
    files = LiveFiles(folder, lambda: observation, "steps")
    files.start(step - 20, 400)
    (folder / "live" / "viewer").touch()
    time.sleep(0.02)
    files.update(step, 400)
    assert os.path.exists(folder / "live" / "tiles.jpg")
    return files


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """The port of a server of this folder, below the path `/TOKEN/`."""
    listener = server.listen(0)
    running = server._server(folder, TOKEN)
    thread = threading.Thread(target=running.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        running.should_exit = True
        thread.join(5)
        listener.close()
