"""One iteration of phase 2 and one of phase 3 with an F1 preset of new weights: that they run, their time and memory.

An iteration is the trainer's own `train_round`: the explorer acts in the tabletop, the world model looks at it, PPO
updates, and in phase 3 the world model learns. Episodes are few and short, so that the models are what is measured; the
first iteration also warms up, the second is timed. The image tokenizer is new too: codes mean nothing, and cost the
same.

    python benchmarks/phases_full.py --preset full --device cuda --json phases_full.json
    python benchmarks/phases_full.py --preset tiny --device cpu --phases student   # does it run
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import print_machine, print_table, write_json

from deft.config.f1_settings import PhaseConfig
from deft.models.f1.config import read_f1_config
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.policy import F1Policy
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.student import StudentTrainer


def make_config(arguments: argparse.Namespace, folder: Path) -> PhaseConfig:
    """Few and short episodes; everything else as it comes."""
    config = PhaseConfig()
    training, explorer, game = config.training, config.student.explorer, config.adversarial
    training.device, training.precision = arguments.device, arguments.precision
    training.steps_per_episode, training.batch_size = arguments.steps, arguments.episodes
    training.num_envs, training.bptt_length = arguments.episodes, arguments.steps
    explorer.episodes_per_update, explorer.batch_size = arguments.episodes, arguments.episodes * arguments.steps
    explorer.sequence_length, explorer.n_epochs = arguments.steps, 1
    game.wm_updates, game.wm_warmup, game.random_episodes = arguments.updates, 0, arguments.episodes
    config.student.output_dir, game.output_dir = str(folder / "student"), str(folder / "adversarial")
    return config


def new_policy(arguments: argparse.Namespace) -> F1Policy:
    """A teacher of new weights; the layers are computed again in the backward pass where that is asked for."""
    config = read_f1_config(arguments.preset)
    config.activation_checkpointing = arguments.recompute
    config.language_heads = False  # nothing reads them
    return load_f1_policy(config, arguments.device, True).policy


def wait(device: str) -> None:
    """Until the device has done what it was given."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def timed(work: Callable[..., Any], spent: dict[str, float], name: str, device: str) -> Callable[..., Any]:
    """`work`, with the seconds of its calls added up under a name."""

    def call(*arguments: Any, **named: Any) -> Any:
        wait(device)
        start = time.perf_counter()
        found = work(*arguments, **named)
        wait(device)
        spent[name] = spent.get(name, 0.0) + time.perf_counter() - start
        return found

    return call


def measure(arguments: argparse.Namespace, phase: str, folder: Path) -> dict[str, Any]:
    """Two iterations of a phase; the figures are the second's, the memory is that of both."""
    if arguments.device.startswith("cuda"):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    begin = time.perf_counter()
    config, policy = make_config(arguments, folder), new_policy(arguments)
    trainer: Any = StudentTrainer(config, policy) if phase == "student" else AdversarialTrainer(config, policy)
    spent: dict[str, float] = {}
    trainer.rollouts.collect = timed(trainer.rollouts.collect, spent, "acting", arguments.device)
    trainer.ppo.update = timed(trainer.ppo.update, spent, "PPO's update", arguments.device)
    if phase == "adversarial":
        trainer._train_world_model = timed(trainer._train_world_model, spent, "world model's updates", arguments.device)
        trainer.held_out_loss = timed(trainer.held_out_loss, spent, "held-out loss", arguments.device)
    wait(arguments.device)
    made = time.perf_counter() - begin
    iterate = timed(trainer.train_round, spent, "iteration", arguments.device)
    try:
        first = iterate()[1]
        seconds_first = spent["iteration"]
        print(f"{phase}: made in {made:.1f} s, the first iteration took {seconds_first:.1f} s", flush=True)
        spent.clear()
        metrics = iterate()[1]
    finally:
        trainer.close()
    finite = {name: float(value) for name, value in {**first, **metrics}.items() if "reward" in name or "loss" in name}
    return {
        "phase": phase,
        "made_seconds": made,
        "first_seconds": seconds_first,
        "seconds": dict(spent),
        "memory_gib": torch.cuda.max_memory_allocated() / 2**30 if arguments.device.startswith("cuda") else None,
        "explorer_weights": sum(one.numel() for one in trainer.explorer.parameters()),
        "explorer_learns": sum(one.numel() for one in trainer.explorer.parameters() if one.requires_grad),
        "first_ratio_error": float(first.get("train/first_ratio_error", first.get("ppo/first_ratio_error", "nan"))),
        "metrics": finite,
    }


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="a preset's name or a config file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=("auto", "fp32", "bf16"), default="auto")
    parser.add_argument("--episodes", type=int, default=2, help="of a rollout and of a batch")
    parser.add_argument("--steps", type=int, default=4, help="of an episode")
    parser.add_argument("--updates", type=int, default=5, help="of the world model in an iteration of phase 3")
    parser.add_argument("--recompute", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--phases", nargs="*", default=["student", "adversarial"], choices=["student", "adversarial"])
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print_machine()
    results = []
    for phase in arguments.phases:
        with tempfile.TemporaryDirectory() as folder:
            results.append(measure(arguments, phase, Path(folder)))
        gc.collect()
        write_json(arguments.json, {"arguments": vars(arguments), "results": results})
    print(f"{arguments.preset}: {arguments.episodes} episodes of {arguments.steps} steps", flush=True)
    for result in results:
        rows = [[name, f"{seconds:.2f} s"] for name, seconds in result["seconds"].items()]
        rows.append(["memory", "" if result["memory_gib"] is None else f"{result['memory_gib']:.1f} GiB"])
        rows.append(["ratio's distance from 1", f"{result['first_ratio_error']:.1e}"])
        print_table([result["phase"], f"{result['explorer_learns'] / 1e6:,.0f} M weights act and learn"], rows)


if __name__ == "__main__":
    main()
