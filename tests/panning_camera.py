"""A toy world for world models: a camera over a random pattern, moved by every action. Copying the last frame fails.

Speaks the 32-dim layout of F1 worlds, 16 px. Its id is `panning_camera:tests/PanningCamera-v0`.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.config.rl_yaml import phase_config

WORLD = "panning_camera:tests/PanningCamera-v0"
SIZE, GROUND = 16, 64


class PanningCamera(gymnasium.Env):
    """Dims 0 and 1 move the camera up to three pixels right and down; at step `breaks_at` it raises.

    With `ends_right` an episode terminates when the camera has gone right in the last two steps.
    """

    def __init__(self, breaks_at: int = 0, ends_right: bool = False) -> None:
        picture = spaces.Box(0, 255, (3, SIZE, SIZE), np.uint8)
        self.observation_space = spaces.Dict(
            {"state": spaces.Box(-4, 4, (32,), np.float32), "wrist_rgb": picture, "head_rgb": picture}
        )
        self.action_space = spaces.Box(-1, 1, (32,), np.float32)
        self.action_mask = np.arange(32) < 2
        self.place, self.breaks_at, self.steps = np.zeros(2, int), breaks_at, 0
        self.ends_right, self.steps_right = ends_right, 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        coarse = self.np_random.integers(0, 256, (3, GROUND // 4, GROUND // 4))
        self.ground = coarse.repeat(4, 1).repeat(4, 2).astype(np.uint8)  # patches of 4 px
        self.place = self.np_random.integers(GROUND, size=2)
        self.steps = self.steps_right = 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        if self.steps == self.breaks_at:
            raise ValueError("the camera fell off")
        self.place = self.place + np.rint(3 * np.asarray(action)[:2]).astype(int)
        self.steps_right = self.steps_right + 1 if action[0] > 0 else 0
        return self._observation(), 0.0, self.ends_right and self.steps_right == 2, False, {}

    def _observation(self):
        column, row = ((place + np.arange(SIZE)) % GROUND for place in self.place)
        picture = self.ground[:, row[:, None], column]
        return {"state": np.zeros(32, np.float32), "wrist_rgb": picture, "head_rgb": picture}


gymnasium.register(id="tests/PanningCamera-v0", entry_point=PanningCamera)


def panning_config(folder: Any, **training: Any) -> Any:
    """A teacher run in this world: tiny, repeatable, quiet."""
    world_kwargs = training.pop("world_kwargs", {})
    run = {name: training.pop(name) for name in ("resume", "auto_resume", "overwrite") if name in training}
    lora = training.pop("lora", None)
    defaults = {
        "num_episodes": 8,
        "steps_per_episode": 5,
        "batch_size": 2,
        "bptt_length": 2,
        "motion_warmup": 0,
        "save_every": 0,
        "log_every": 1,
        "video_save_every": 0,
        "sample_save_every": 0,
        "colour_augmentation": 0.0,
        "overlap": False,
        "threads": 1,
        "device": "cpu",
    }
    return phase_config(
        {
            "phase": "teacher",
            "model": {"untrained_tokenizer": True, "lora": lora},
            "training": {**defaults, **training},
            "environment": {"world": WORLD, "world_kwargs": world_kwargs},
            "logging": {"console_level": "CRITICAL", "tensorboard": False, "enable_file_logging": False},
            "teacher": {"output_dir": str(folder)},
            "run": run,
        }
    )


def game_config(folder: Any, **game: Any) -> Any:
    """An adversarial run in the world of the panning camera: one copy of it, two episodes a rollout, all of it tiny."""
    run = {name: game.pop(name) for name in ("resume", "auto_resume", "overwrite") if name in game}
    return phase_config(
        {
            "phase": "adversarial",
            "model": {"untrained_tokenizer": True},
            "training": {
                "steps_per_episode": 6,
                "batch_size": 2,
                "bptt_length": 3,
                "save_every": 1,
                "log_every": 1,
                "video_save_every": 0,
                "sample_save_every": 0,
                "colour_augmentation": 0.0,
                "num_envs": 1,
                "overlap": False,
                "threads": 1,
                "device": "cpu",
            },
            "environment": {"world": WORLD},
            "logging": {"console_level": "CRITICAL", "tensorboard": False, "enable_file_logging": False},
            "student": {"explorer": {"episodes_per_update": 2, "batch_size": 6, "sequence_length": 3, "n_epochs": 1}},
            "adversarial": {
                "output_dir": str(folder),
                "total_iterations": 2,
                "wm_warmup": 0,
                "wm_updates": 2,
                "progress_lag": 1,
                "random_episodes": 1,
                "wm_lr": 1e-3,
                **game,
            },
            "run": run,
        }
    )
