"""Does the memory matter? An object leaves the wrist camera's view and comes back, by a scripted motion of the arm.

    python benchmarks/teacher_memory.py RUN                      measure a teacher as it is
    python benchmarks/teacher_memory.py RUN --train-minutes 5    … after training it on such sweeps for a while

The arm turns away for some steps and back again; the last four frames then no longer show what comes into view. Frames
of the way back are predicted with the memory carried from the episode's start, and with the memory reset at every
chunk, in the same held-out scenes. What was seen in the chunk itself is remembered in both. The head camera, which
shows the whole table all the time, is hidden.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import CONFIG_FILE, read_phase_config
from deft.data.episodes import batch_episodes
from deft.envs.f1 import F1RLEnv
from deft.evaluation.world_model import predict_frames
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.policy import F1Policy, encode_frames
from deft.runs import checkpoint
from deft.runs.compute import choose_device
from deft.runs.directory import MODEL_FILE
from deft.training.phases.exploration import Exploration, InlineExplorer, ProcessExplorer, make_exploration
from deft.training.phases.teacher import TeacherTrainer

AWAY, BACK = 10, 10  # steps
TURN = 1.0  # of the largest delta of the arm's first joint: a radian in all, more than the camera sees
CHUNK = 8
LEARNING_RATE = 5e-4  # at most: training starts from a trained teacher


@dataclass
class Sweeps(Exploration):
    """The arm turns to one side and back, with small random motions of the other joints."""

    def choose(self, env: F1RLEnv, generator: np.random.Generator, step: int) -> np.ndarray:
        """Joint 0 turns; which way is drawn at the first step."""
        if step == 0:
            self._side = generator.choice([-1.0, 1.0])
        action = generator.uniform(-0.1, 0.1, len(env.action_mask))
        action[0] = self._side * TURN * (1.0 if step < AWAY else -1.0)
        return action


def sweeps(config: PhaseConfig, policy: F1Policy, held_out: bool) -> Sweeps:
    """The run's world, swept."""
    made = make_exploration(config, policy, held_out)
    environment = {**made.environment, "max_steps": AWAY + BACK}
    return Sweeps(environment, made.seed, made.colour_augmentation, held_out, 1)


def measure_memory(policy: F1Policy, config: PhaseConfig, num_scenes: int, seed: int = 0) -> dict[str, Any]:
    """Accuracy and PSNR on the way back, with the memory carried and with it reset."""
    exploration = sweeps(config, policy, held_out=True)
    exploration.seed = seed
    episodes = InlineExplorer(exploration).take_all(num_scenes)
    for episode in episodes:
        episode.codes = encode_frames(policy, episode.wrist)
    model = policy.config
    batch = batch_episodes(episodes, model.n_obs_img_steps, model.obs_img_stride, policy.device).without_head()
    results: dict[str, Any] = {"scenes": num_scenes}
    rows = {}
    for name, reset_every in (("carried", None), ("reset", CHUNK)):
        found = predict_frames(policy, batch, reset_every=reset_every)
        chosen = found["step"] >= AWAY
        correct = found["correct"][chosen].float().mean(1)
        forced, loss = found["forced"][chosen], found["losses"][chosen]
        rows[name] = loss
        results[name] = {
            "wm_acc": float(correct.mean()),
            "wm_acc_forced": float(forced.mean()),
            "cross_entropy": float(loss.mean()),
            "psnr": float(found["psnr"][chosen].mean()),
        }
    difference = (rows["reset"] - rows["carried"]).view(-1, num_scenes).mean(0)  # rows are by step, then by scene
    results["cross_entropy_saved"] = float(difference.mean())
    results["standard_error"] = float(difference.std() / num_scenes**0.5)  # over scenes
    results["scenes_helped"] = int((difference > 0).sum())
    results["frames"] = len(rows["carried"])
    return results


def train_on_sweeps(run: Path, folder: Path, minutes: float, device: str) -> Path:
    """Continue a teacher run with sweeps instead of random actions."""
    source = checkpoint.find_checkpoint(run)
    config = read_phase_config(source.parent / CONFIG_FILE)
    config.model.config_file, config.model.checkpoint_path = str(source.parent / MODEL_FILE), str(source)
    config.training.max_minutes, config.training.motion_warmup = minutes, 0.0
    config.training.memory_warmup = 0.4
    config.training.learning_rate = min(config.training.learning_rate, LEARNING_RATE)
    config.training.steps_per_episode, config.training.device = AWAY + BACK, device
    config.training.head_dropout = 1.0
    config.training.bptt_length = AWAY + BACK  # what is seen again was last seen longer ago than a chunk
    config.training.save_freq = config.training.video_freq = config.training.sample_freq = 0
    config.teacher.output_dir, config.run.overwrite = str(folder), True
    trainer = TeacherTrainer(config)
    trainer.explorer = ProcessExplorer(sweeps(config, trainer.policy, held_out=False), trainer.num_workers)
    trainer.train()
    return folder


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path)
    parser.add_argument("--scenes", type=int, default=32)
    parser.add_argument("--train-minutes", type=float, default=0.0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    run = arguments.run
    if arguments.train_minutes:
        run = train_on_sweeps(run, Path(f"{run}-sweeps"), arguments.train_minutes, arguments.device)
    folder = checkpoint.find_checkpoint(run)
    config = read_phase_config(folder.parent / CONFIG_FILE)
    device = choose_device(arguments.device)
    policy = load_f1_policy(folder.parent / MODEL_FILE, device, checkpoint_path=folder).policy.eval()
    results = measure_memory(policy, config, arguments.scenes)
    print(json.dumps(results, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    import teacher_memory  # not as `__main__`: the processes that collect import `Sweeps` by name

    teacher_memory.main()
