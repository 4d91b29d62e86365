"""Env steps a second of a policy in the tabletop with two cameras: 32 environments together against one at a time.

What is counted is what collection does: the policy looks (inference on all environments at once), every environment
steps, ended ones are reset. `vla-tiny` with new weights, chunks of `--chunk` steps; many environments run in worker
processes (`env.vector: process`), one in the process itself. Rounds interleave the two, and the figure is the median.

    python benchmarks/vla_throughput.py --out vla_throughput.json
    python benchmarks/vla_throughput.py --model gpt-vla --chunk 1 --seconds 20
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
from common import print_machine, print_table, write_json

from deft import schema
from deft.config.settings import EnvConfig, VLAConfig
from deft.data.tensors import policy_inputs
from deft.envs.make import make_vector_env
from deft.envs.vector import VectorEnv
from deft.models.vla.loading import load_vla_model_for
from deft.models.vla.policy import VLAPolicy


class Contender:
    """One number of environments, its policy, and where the time goes."""

    def __init__(self, num_envs: int, vector: str, arguments: argparse.Namespace) -> None:
        kwargs: dict[str, Any] = {"task": "all", "observation": "images", "image_size": arguments.image_size}
        kwargs["control_mode"] = arguments.control_mode
        config = EnvConfig(
            id="tabletop",
            num_envs=num_envs,
            vector=vector,
            num_workers=arguments.workers,
            kwargs=kwargs,  # type: ignore[arg-type]
        )
        self.name = f"{num_envs} environment{'s' if num_envs > 1 else ''}"
        self.env: VectorEnv = make_vector_env(config, chunk_length=arguments.chunk)
        torch.manual_seed(0)
        vla = VLAConfig(model_class=arguments.model)
        model = load_vla_model_for(vla, self.env.observation_space, self.env.action_space, "tabletop", arguments.chunk)
        self.policy = VLAPolicy(model.to(arguments.device), chunk_length=arguments.chunk)
        self.device = torch.device(arguments.device)
        self.observation = self.env.reset(0)

    @torch.inference_mode()
    def run(self, seconds: float) -> dict[str, float]:
        """Steps a second, and the share of the time that inference took."""
        steps, thinking, start = 0, 0.0, time.perf_counter()
        while time.perf_counter() - start < seconds:
            before = time.perf_counter()
            actions = self.policy.act(policy_inputs(self.observation, self.device))[schema.ACTION].numpy(force=True)
            thinking += time.perf_counter() - before
            step = self.env.step(actions)
            self.observation = step.observation
            steps += int(step.num_steps.sum())
        elapsed = time.perf_counter() - start
        return {"steps_per_second": steps / elapsed, "inference_share": thinking / elapsed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--envs", type=int, default=32)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--model", default="vla-tiny")
    parser.add_argument("--chunk", type=int, default=1)
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--control-mode", default="delta_ee_pos")
    parser.add_argument("--seconds", type=float, default=10.0, help="of one round of one contender")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    print_machine()
    contenders = [Contender(1, "sync", arguments), Contender(arguments.envs, "process", arguments)]
    try:
        for contender in contenders:
            contender.run(1.0)
        rounds = [[contender.run(arguments.seconds) for contender in contenders] for _ in range(arguments.rounds)]
    finally:
        for contender in contenders:
            contender.env.close()
    rows, speeds = [], []
    for index, contender in enumerate(contenders):
        speeds.append(statistics.median(found[index]["steps_per_second"] for found in rounds))
        share = statistics.median(found[index]["inference_share"] for found in rounds)
        rows.append((contender.name, f"{speeds[-1]:.0f}", f"{share:.0%}", f"{speeds[-1] / speeds[0]:.2f}"))
    print_table(("", "env steps/s", "inference", "ratio"), rows)
    write_json(arguments.out, {"ratio": speeds[1] / speeds[0], "settings": vars(arguments), "rounds": rounds})


if __name__ == "__main__":
    main()
