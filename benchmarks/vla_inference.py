"""How quickly a vision-language-action model of 300 M parameters acts and learns: latency, samples a second, updates.

A PaliGemma-shaped model (SigLIP-B/16 at 224 px and 12 Gemma layers of width 1024, new weights: they do not change the
time) looks at the tabletop's two cameras, words and proprioception, and gives chunks of 4 actions and a value:

- **act**: `VLAPolicy.act` on a batch of 64, with resizing, tokenising and drawing;
- **update**: PPO's gradient steps on 64 transitions each, forward, backward and Adam, all weights or LoRA.

Eager and compiled (`torch.compile`), in bfloat16 on a GPU. The share of the peak is counted matrix work (2 · m · n · k
of every product in the forward pass; three times that for an update) over the time, against the same card's bfloat16
matrix products of 8192³, measured here.

    python benchmarks/vla_inference.py --out vla_inference.json
    python benchmarks/vla_inference.py --size tiny --device cpu --dtype float32 --batch 8 --repeats 2   # does it run
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from common import print_machine, print_table, write_json
from tensordict import TensorDict
from torch.utils.flop_counter import FlopCounterMode

from deft import schema
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import PPOSettings
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.vlm import VisionLanguageVLA
from deft.schema import encode_text

ACTION_DIM, CHUNK, PROPRIO, PICTURE, TEXT_LENGTH = 8, 4, 24, 64, 64
SIZES = {
    # text: width, layers, inner width, heads, head width; vision: width, layers, inner width, heads, patch, picture
    "300m": ((1024, 12, 4096, 8, 128), (768, 12, 3072, 12, 16, 224), 32_000),
    "tiny": ((64, 2, 128, 4, 16), (64, 2, 128, 4, 16, 32), 512),
}
TEXTS = (
    "pick up the red cube",
    "push the blue cylinder to the white area",
    "reach the orange cube",
    "lift the green one",
)


def architecture(size: str) -> dict[str, Any]:
    """A PaliGemma of this size."""
    (width, layers, inner, heads, head_dim), (v_width, v_layers, v_inner, v_heads, patch, picture), words = SIZES[size]
    return {
        "model_type": "paligemma",
        "projection_dim": width,
        "image_token_id": words - 1,
        "text_config": {
            "model_type": "gemma", "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": inner,
            "num_attention_heads": heads, "num_key_value_heads": 1, "head_dim": head_dim, "vocab_size": words,
        },
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": v_width, "num_hidden_layers": v_layers,
            "intermediate_size": v_inner, "num_attention_heads": v_heads, "patch_size": patch, "image_size": picture,
            "vision_use_head": False,
        },
    }  # fmt: skip


def make_policy(arguments: argparse.Namespace, lora: bool) -> VLAPolicy:
    torch.manual_seed(0)
    model = VisionLanguageVLA(
        architecture=architecture(arguments.size),
        action_dim=ACTION_DIM,
        chunk_length=CHUNK,
        image_keys=["head_rgb", "wrist_rgb"],
        proprio_dim=PROPRIO,
        tokenizer="bytes",
        prompt_length=48,
        dtype=arguments.dtype,
        lora={"r": 16} if lora else None,
        gradient_checkpointing=arguments.gradient_checkpointing,
    )
    return VLAPolicy(model.to(arguments.device))


def observations(batch: int, device: str) -> TensorDict:
    """What the tabletop gives, by its shapes: pictures of noise, since their content does not change the time."""
    pictures = torch.randint(0, 256, (2, batch, 3, PICTURE, PICTURE), dtype=torch.uint8)
    words = torch.stack([torch.as_tensor(encode_text(TEXTS[i % len(TEXTS)], TEXT_LENGTH)) for i in range(batch)])
    streams = {"head_rgb": pictures[0], "wrist_rgb": pictures[1], "instruction": words}
    return TensorDict(streams | {"state": torch.randn(batch, PROPRIO)}, [batch]).to(device)


def seconds(call: Callable[[], Any], repeats: int, device: str) -> float:
    """The median time of a call, the device's work included; three calls go before."""
    times = []
    for index in range(repeats + 3):
        _wait(device)
        start = time.perf_counter()
        call()
        _wait(device)
        if index >= 3:
            times.append(time.perf_counter() - start)
    return statistics.median(times)


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def measured_peak(arguments: argparse.Namespace) -> float:
    """FLOP/s of square matrix products in the model's dtype: what this card does at best."""
    size = 8192 if arguments.device.startswith("cuda") else 1024
    dtype = getattr(torch, arguments.dtype)
    a, b = (torch.randn(size, size, device=arguments.device, dtype=dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, 20, arguments.device)


def forward_flops(policy: VLAPolicy, td: TensorDict) -> int:
    """Of one pass over the batch, as torch counts matrix products and attention."""
    counter = FlopCounterMode(display=False)
    with torch.no_grad(), counter:
        policy.act(td.clone())
    return counter.get_total_flops()


def make_rollout(policy: VLAPolicy, batch: int, steps: int, device: str) -> TensorDict:
    """`steps` × `batch` transitions on the CPU, as a collector hands them over."""
    rows = []
    for _ in range(steps):
        td = TensorDict({schema.OBSERVATION: observations(batch, device)}, [batch])
        with torch.inference_mode():
            policy.act(td)
        rows.append(td.cpu().clone())
    rollout = torch.stack(rows).contiguous()
    rollout[schema.POLICY_VERSION] = torch.zeros(steps, batch, dtype=torch.int64)
    over = torch.zeros(steps, batch, dtype=torch.bool)
    answers = {schema.REWARD: torch.randn(steps, batch), schema.TERMINATED: over, schema.TRUNCATED: over.clone()}
    rollout[schema.NEXT] = TensorDict(answers | {schema.VALUE: torch.zeros(steps, batch)}, [steps, batch])
    return rollout


def measure(arguments: argparse.Namespace, compiled: bool, lora: bool, peak: float) -> dict[str, Any]:
    policy = make_policy(arguments, lora)
    td = TensorDict({schema.OBSERVATION: observations(arguments.batch, arguments.device)}, [arguments.batch])
    flops = forward_flops(policy, td)
    if compiled:
        policy.model.backbone.compile(mode=arguments.mode)

    @torch.inference_mode()
    def act() -> None:
        policy.act(td.clone())

    begin = time.perf_counter()
    acting = seconds(act, arguments.repeats, arguments.device)
    ready = time.perf_counter() - begin

    rollout = make_rollout(policy, arguments.batch, arguments.steps, arguments.device)
    settings = PPOSettings(n_epochs=1, batch_size=arguments.batch, learning_rate=1e-5)
    ppo = PPO(policy, settings)

    def update() -> None:
        rollout[schema.POLICY_VERSION].fill_(ppo.version)
        ppo.update(iter([rollout]))

    updating = seconds(update, max(1, arguments.repeats // 5), arguments.device)
    memory = torch.cuda.max_memory_allocated() / 2**30 if arguments.device.startswith("cuda") else None
    transitions = arguments.batch * arguments.steps
    return {
        "compiled": compiled,
        "lora": lora,
        "parameters": sum(parameter.numel() for parameter in policy.model.parameters()),
        "trained": sum(parameter.numel() for parameter in policy.model.parameters() if parameter.requires_grad),
        "act_seconds": acting,
        "act_samples_per_second": arguments.batch / acting,
        "act_share_of_peak": flops / acting / peak,
        "act_seconds_until_measured": ready,
        "update_seconds": updating,
        "update_transitions": transitions,
        "update_samples_per_second": transitions / updating,
        # Backward costs two forward passes; with LoRA the weights' gradients fall away, and it is about one.
        "update_share_of_peak": (2 if lora else 3) * flops * arguments.steps / updating / peak,
        "forward_flops": flops,
        "memory_gib": memory,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="300m")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=4, help="minibatches of an update")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--mode", default="default", help="of torch.compile")
    parser.add_argument("--gradient-checkpointing", action="store_true")
    parser.add_argument("--only", nargs="*", default=["eager", "compiled"], choices=["eager", "compiled"])
    parser.add_argument("--weights", choices=("all", "lora", "both"), default="both", help="what an update trains")
    parser.add_argument("--out")
    arguments = parser.parse_args()
    print_machine()
    if arguments.device.startswith("cuda"):
        print(torch.cuda.get_device_name(), flush=True)
    peak = measured_peak(arguments)
    print(f"peak of matrix products in {arguments.dtype}: {peak / 1e12:.1f} TFLOP/s", flush=True)
    results = []
    for lora in {"all": (False,), "lora": (True,), "both": (False, True)}[arguments.weights]:
        for name in arguments.only:
            if arguments.device.startswith("cuda"):
                torch.cuda.reset_peak_memory_stats()
                torch.cuda.empty_cache()
            torch.compiler.reset()
            results.append(measure(arguments, name == "compiled", lora, peak))
            result = results[-1]
            print(f"{name}{', LoRA' if lora else ''}: act {1e3 * result['act_seconds']:.1f} ms", flush=True)
            write_json(arguments.out, {"peak_flops": peak, "settings": vars(arguments), "results": results})
    print(f"{results[0]['parameters'] / 1e6:.0f} M parameters, batch {arguments.batch}, {arguments.dtype}", flush=True)
    header = ("", "act", "samples/s", "of peak", "PPO step", "transitions/s", "of peak", "memory")
    rows = []
    for result in results:
        name = f"{'compiled' if result['compiled'] else 'eager'}, {'LoRA' if result['lora'] else 'all weights'}"
        memory = "" if result["memory_gib"] is None else f"{result['memory_gib']:.1f} GiB"
        rows.append((
            name, f"{1e3 * result['act_seconds']:.1f} ms", f"{result['act_samples_per_second']:.0f}",
            f"{result['act_share_of_peak']:.1%}", f"{1e3 * result['update_seconds'] / arguments.steps:.1f} ms",
            f"{result['update_samples_per_second']:.0f}", f"{result['update_share_of_peak']:.1%}", memory,
        ))  # fmt: skip
    print_table(header, rows)


if __name__ == "__main__":
    main()
