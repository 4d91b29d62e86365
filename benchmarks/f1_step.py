"""A training step of an F1 preset with random weights: time, share of the peak, memory; with and without recomputing.

A step is what `deft train teacher` does with a chunk: `--bptt` steps of `--batch` episodes, forward, backward and
AdamW. Floating-point operations are counted by torch; recomputed ones are not counted as useful. The peak is that of a
large matrix product on the same device in the same run, beside the one of the data sheet where `--peak` names it.

    python benchmarks/f1_step.py --preset full --lora --device cuda --peak 989
    python benchmarks/f1_step.py --preset small --device cuda --precision bfloat16
    python benchmarks/f1_step.py --preset tiny --device cpu --batch 8 --profile
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch
from common import print_machine, print_table, write_json
from torch.utils.flop_counter import FlopCounterMode

from deft.models.f1.config import F1Config, read_f1_config
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.lora import LoraSettings
from deft.models.f1.optimization import set_policy_requires_grad, setup_optimizer
from deft.models.f1.policy import F1Policy
from deft.training.precision import autocast


def make_batch(config: F1Config, steps: int, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A chunk of random pictures, states and actions."""
    generator = torch.Generator().manual_seed(0)
    seen, coded, frames = config.vision.image_size, config.tokenizer.image_size, config.n_obs_img_steps + 1

    def pictures(*shape: int) -> torch.Tensor:
        return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(device)

    return {
        "image0": pictures(steps, rows, 3, seen, seen),
        "image1": pictures(steps, rows, 3, seen, seen),
        "image0_history": pictures(steps, rows, frames, 3, coded, coded),
        "frame_tokens": torch.randint(
            0, config.tokenizer.codebook_size, (steps, rows, frames, config.num_tokens), generator=generator
        ).to(device),
        "action_history": torch.randn(
            steps, rows, config.n_obs_img_steps, config.max_action_dim, generator=generator
        ).to(device),
        "state": torch.randn(steps, rows, config.max_state_dim, generator=generator).to(device),
    }


def wait(device: torch.device) -> None:
    """Until the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of one call."""
    wait(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    wait(device)
    return (time.perf_counter() - start) / repeats


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP/s of a large matrix product."""
    size = 8192 if device.type == "cuda" else 1024
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timed(lambda: left @ right, device, 5)
    return 2 * size**3 / timed(lambda: left @ right, device, 20)


def measure(arguments: argparse.Namespace, recompute: bool, device: torch.device) -> dict[str, Any]:
    """One preset, as it would train."""
    config = read_f1_config(arguments.preset)
    config.activation_checkpointing = recompute
    lora = LoraSettings() if arguments.lora else None
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    policy: F1Policy = load_f1_policy(config, device, True, lora).policy
    if lora is None:
        set_policy_requires_grad(policy)
    optimizer = setup_optimizer(policy, 1e-4, 0.01)
    batch = make_batch(config, arguments.bptt, arguments.batch, device)
    memory = policy.initial_memory(arguments.batch)
    dtype = torch.bfloat16 if arguments.precision == "bfloat16" else None
    loss_of: Callable[..., Any] = torch.compile(policy) if arguments.compile else policy

    def step() -> None:
        with autocast(device, dtype):
            loss = loss_of(batch, memory_state=memory)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    step()
    seconds = timed(step, device, arguments.repeats)
    peak_memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    if arguments.profile:
        activities = [torch.profiler.ProfilerActivity.CPU]
        activities += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
        with torch.profiler.profile(activities=activities) as profile:
            step()
            wait(device)
        order = "cuda_time_total" if device.type == "cuda" else "self_cpu_time_total"
        print(profile.key_averages().table(sort_by=order, row_limit=16, max_name_column_width=60))
    policy.model.experts.activation_checkpointing = False
    with FlopCounterMode(display=False) as counter, autocast(device, dtype):
        loss = policy({name: value[:1, :1] for name, value in batch.items()}, memory_state=memory[:, :1].contiguous())[
            "loss"
        ]
        loss.backward()
    operations = counter.get_total_flops() * arguments.batch * arguments.bptt  # all of them are by row
    return {"recompute": recompute, "seconds": seconds, "memory_gib": peak_memory, "flop": operations}


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bptt", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--recompute", choices=("off", "on", "both"), default="both")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the data sheet")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print_machine()
    device = torch.device(arguments.device)
    is_half = arguments.precision == "bfloat16" or read_f1_config(arguments.preset).dtype == "bfloat16"
    peak = measured_peak(device, torch.bfloat16 if is_half else torch.float32)
    results, rows = [], []
    for recompute in {"off": (False,), "on": (True,), "both": (True, False)}[arguments.recompute]:
        try:
            found = measure(arguments, recompute, device)
        except torch.OutOfMemoryError as error:
            rows.append(["yes" if recompute else "no", "out of memory", str(error).split(". ")[1], "", ""])
            torch.cuda.empty_cache()
            continue
        results.append(found)
        rate = found["flop"] / found["seconds"]
        sheet = f"{100 * rate / (1e12 * arguments.peak):.1f} %" if arguments.peak else "–"
        rows.append(
            [
                "yes" if recompute else "no",
                f"{found['seconds']:.3f} s",
                f"{found['memory_gib']:.1f} GiB",
                f"{rate / 1e9:,.0f} GFLOP/s",
                f"{100 * rate / peak:.1f} % of {peak / 1e9:,.0f}, {sheet} of the data sheet",
            ]
        )
    print(f"{arguments.preset}, batch {arguments.batch}, bptt {arguments.bptt}{', LoRA' if arguments.lora else ''}")
    print_table(["activations recomputed", "a step", "memory", "useful arithmetic", "of the peak"], rows)
    print(json.dumps(results))
    write_json(arguments.json, {"results": results, "peak": peak, "arguments": vars(arguments)})


if __name__ == "__main__":
    main()
