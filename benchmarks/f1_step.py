"""A training step of an F1 preset with random weights: time, share of the peak, memory; with and without recomputing.

A step is what `deft train teacher` does with a chunk: `--bptt` steps of `--batch` episodes, forward, backward and
AdamW. Useful arithmetic is that of matrix products, convolutions and attention, counted by torch on one row: what is
frozen has no gradient of its weights, what attention hides is not counted, nor what is computed a second time. The peak
is that of a large matrix product on the same device in the same run, beside the one of the data sheet where `--peak`
names it.

    python benchmarks/f1_step.py --preset full --lora --device cuda --precision bf16 --compile --peak 989
    python benchmarks/f1_step.py --preset small --device cuda --precision bf16
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
from torch.autograd import DeviceType
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from deft.models.f1.config import F1Config, read_f1_config
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.optimization import set_policy_requires_grad, setup_optimizer
from deft.models.f1.policy import F1Policy
from deft.models.lora import LoraSettings
from deft.runs.compute import autocast, choose_precision

WARM_UP, TOP = 2, 16
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}


def make_batch(config: F1Config, steps: int, rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """A chunk of random pictures, states and actions; the frames are coded, as the trainer does once for all."""
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
    size = 8192 if device.type == "cuda" else 256
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    timed(lambda: left @ right, device, 5)
    return 2 * size**3 / timed(lambda: left @ right, device, 20)


def make_policy(arguments: argparse.Namespace, device: torch.device) -> F1Policy:
    """All learns but the vision tower, unless asked for; of what learns, with LoRA, the adapters and the memory."""
    policy: F1Policy = load_f1_policy(
        read_f1_config(arguments.preset), device, True, LoraSettings() if arguments.lora else None
    ).policy
    set_policy_requires_grad(policy, freeze_vision_encoder=not arguments.train_vision)
    return policy


def count_operations(
    policy: F1Policy, batch: dict[str, torch.Tensor], memory: torch.Tensor, device: torch.device, dtype: Any
) -> tuple[int, dict[str, int]]:
    """Floating-point operations of a step, and of its forward pass by part; by one row, since all go by row."""
    rows = batch["state"].shape[0] * batch["state"].shape[1]
    policy.model.experts.activation_checkpointing = False
    one, memory = {name: value[:1, :1] for name, value in batch.items()}, memory[:, :1].contiguous()
    # Spelled out, attention is four products in the backward pass; fused kernels do a fifth, a second time.
    with sdpa_kernel(SDPBackend.MATH), autocast(device, dtype):
        with FlopCounterMode(display=False) as whole:
            policy(one, memory_state=memory)["loss"].backward()
        policy.zero_grad(set_to_none=True)
        with FlopCounterMode(display=False) as forward, torch.no_grad():
            policy(one, memory_state=memory)
    parts: dict[str, int] = {}
    for name, operations in forward.get_flop_counts().items():
        path, count = name.split("."), rows * sum(operations.values())
        if path[-1] in ("vision", "memory", "conditioning", "motion") or path[-2:-1] == ["world_model"]:
            part = "world_model" if path[-2:-1] == ["world_model"] else path[-1]
            parts[part] = parts.get(part, 0) + count
        elif path[-1] == "experts":
            parts["joint attention"] = parts.get("joint attention", 0) + count
        elif "experts" in path and path[-1].endswith("_proj"):
            part = path[path.index("experts") + 1]
            parts[part] = parts.get(part, 0) + count
            parts["joint attention"] = parts.get("joint attention", 0) - count  # what the projections do not do
    return rows * whole.get_total_flops(), parts


def measure(
    arguments: argparse.Namespace,
    policy: F1Policy,
    batch: dict[str, torch.Tensor],
    recompute: bool,
    device: torch.device,
    dtype: torch.dtype | None,
) -> dict[str, Any]:
    """The policy, as it would train."""
    policy.model.experts.activation_checkpointing = recompute
    optimizer = setup_optimizer(policy, 1e-4, 0.01)
    memory = policy.initial_memory(arguments.batch)
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()

    def step() -> None:
        with autocast(device, dtype):
            loss = policy(batch, memory_state=memory)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    first = timed(step, device, 1)
    timed(step, device, WARM_UP - 1)
    seconds = timed(step, device, arguments.repeats)
    peak_memory = torch.cuda.max_memory_allocated() / 2**30 if device.type == "cuda" else float("nan")
    if arguments.profile:
        print_profile(step, device, recompute)
    return {"recompute": recompute, "seconds": seconds, "first_seconds": first, "memory_gib": peak_memory}


def print_profile(step: Callable[[], None], device: torch.device, recompute: bool) -> None:
    """Where the time goes: kernels on a GPU, operations on a CPU."""
    on_gpu = device.type == "cuda"
    activities = [torch.profiler.ProfilerActivity.CPU]
    activities += [torch.profiler.ProfilerActivity.CUDA] if on_gpu else []
    with torch.profiler.profile(activities=activities) as profile:
        step()
        wait(device)
    found = [event for event in profile.key_averages() if not on_gpu or event.device_type == DeviceType.CUDA]

    def spent(event: Any) -> float:
        return event.self_device_time_total if on_gpu else event.self_cpu_time_total

    whole = sum(map(spent, found)) or 1.0
    rows = [
        [event.key[:110], event.count, f"{spent(event) / 1e3:.1f} ms", f"{100 * spent(event) / whole:.1f} %"]
        for event in sorted(found, key=spent, reverse=True)[:TOP]
    ]
    print(f"a step of {whole / 1e3:.1f} ms in all, {'with' if recompute else 'without'} recomputing", flush=True)
    print_table(["what", "calls", "time", "share"], rows)


def attention_times(config: F1Config, rows: int, device: torch.device) -> dict[str, float]:
    """Milliseconds of the largest block's attention, forward and backward, by kernel; what cannot run is left out."""
    queries = 2 * config.vision.num_tokens + config.num_tokens - 1
    shape = (rows, 1, queries, config.head_dim)
    keys, values = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    heads = config.num_heads
    folded = torch.randn(
        rows, 1, queries * heads, config.head_dim, device=device, dtype=torch.bfloat16
    ).requires_grad_()
    apart = torch.randn(rows, heads, queries, config.head_dim, device=device, dtype=torch.bfloat16).requires_grad_()
    mask = torch.ones(1, 1, queries, queries, dtype=torch.bool, device=device)
    found = {}
    for name, backends in {
        "default": list(BACKENDS.values()),
        **{name: [one] for name, one in BACKENDS.items()},
    }.items():
        for kind in ("folded", "masked"):

            def work(kind: str = kind) -> None:
                if kind == "folded":
                    functional.scaled_dot_product_attention(folded, keys, values).sum().backward()
                else:
                    expanded = (one.expand(-1, heads, -1, -1) for one in (keys, values))
                    functional.scaled_dot_product_attention(apart, *expanded, attn_mask=mask).sum().backward()

            try:
                with sdpa_kernel(backends):
                    timed(work, device, 2)
                    found[f"{name} {kind}"] = 1e3 * timed(work, device, 5)
            except RuntimeError as error:
                print(f"{name} {kind}: {str(error).strip().splitlines()[0][:100]}", flush=True)
    return found


def main() -> None:
    """Measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="tiny", help="a preset's name or a config file")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--bptt", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    parser.add_argument("--lora", action="store_true")
    parser.add_argument("--train-vision", action="store_true", help="the vision tower too")
    parser.add_argument("--compile", action="store_true", help="compile the repeated layers")
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    parser.add_argument("--attention", choices=tuple(BACKENDS), help="prefer this kernel; else torch chooses")
    parser.add_argument("--attention-times", action="store_true", help="time the kernels of attention alone")
    parser.add_argument("--profile", action="store_true", help="print where the time goes")
    parser.add_argument("--recompute", choices=("off", "on", "both"), default="both")
    parser.add_argument("--peak", type=float, help="TFLOP/s of the data sheet")
    parser.add_argument("--json")
    arguments = parser.parse_args()
    print_machine()
    device = torch.device(arguments.device)
    config = read_f1_config(arguments.preset)
    if arguments.attention_times:
        found = attention_times(config, arguments.batch * arguments.bptt, device)
        print_table(["kernel", "ms"], [[name, f"{value:.2f}"] for name, value in found.items()])
        write_json(arguments.json, {"attention_ms": found, "arguments": vars(arguments)})
        return
    dtype = choose_precision(arguments.precision, device)
    is_half = arguments.precision == "bf16" or config.dtype == "bfloat16"
    policy = make_policy(arguments, device)
    trained = sum(one.numel() for one in policy.parameters() if one.requires_grad)
    size = sum(one.numel() for one in policy.parameters())
    batch = make_batch(config, arguments.bptt, arguments.batch, device)
    operations, parts = count_operations(policy, batch, policy.initial_memory(arguments.batch), device, dtype)
    what = f"{arguments.preset}, {size / 1e6:,.0f} M weights, of which {trained / 1e6:,.1f} M learn"
    print(f"{what}; batch {arguments.batch}, bptt {arguments.bptt}{', LoRA' if arguments.lora else ''}", flush=True)
    shares = [[name, f"{count / 1e12:.3g}"] for name, count in parts.items()]
    print_table(["arithmetic", "TFLOP"], [*shares, ["a step in all, with backward", f"{operations / 1e12:.4g}"]])
    peak = measured_peak(device, torch.bfloat16 if is_half else torch.float32)
    if arguments.compile:
        policy.model.compile_layers(dynamic=False, backend=arguments.backend)
    results: list[dict[str, Any]] = []
    rows = []
    report = {
        "operations": operations,
        "forward": parts,
        "peak": peak,
        "arguments": vars(arguments),
        "results": results,
    }
    for recompute in {"off": (False,), "on": (True,), "both": (True, False)}[arguments.recompute]:
        preferred = [BACKENDS[arguments.attention]] if arguments.attention else []
        try:
            with sdpa_kernel([*preferred, *BACKENDS.values(), SDPBackend.MATH], set_priority=bool(preferred)):
                found = measure(arguments, policy, batch, recompute, device, dtype)
        except torch.OutOfMemoryError as error:
            rows.append(["yes" if recompute else "no", "out of memory", str(error)[:120], "", "", ""])
            results.append({"recompute": recompute, "out_of_memory": str(error)[:300]})
            policy.zero_grad(set_to_none=True)
            continue
        results.append(found)
        rate = operations / found["seconds"]
        sheet = f"{100 * rate / (1e12 * arguments.peak):.1f} %" if arguments.peak else "–"
        rows.append(
            [
                "yes" if recompute else "no",
                f"{found['seconds']:.3f} s",
                f"{found['first_seconds']:.1f} s",
                f"{found['memory_gib']:.1f} GiB",
                f"{rate / 1e9:,.0f} GFLOP/s",
                f"{100 * rate / peak:.1f} % of {peak / 1e9:,.0f}, {sheet} of the data sheet",
            ]
        )
        write_json(arguments.json, report)  # what is measured is kept, whatever comes next
    print_table(["activations recomputed", "a step", "the first", "memory", "useful arithmetic", "of the peak"], rows)
    print(json.dumps(results))
    write_json(arguments.json, report)


if __name__ == "__main__":
    main()
