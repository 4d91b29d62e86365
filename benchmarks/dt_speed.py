"""Updates per second of the Decision Transformer: Deft beside a plain way of writing it, in one run; and acting.

The plain one is what the public implementations do: `nn.MultiheadAttention` with a causal and a padding mask, every
token through every layer, `nn.Dropout`, `torch.optim.AdamW`, a learning-rate scheduler; with GELU (as CORL has it) and
with ReLU (as the paper has it). Same sizes: 64 windows of 20 steps, 3 layers, 1 head, width 128. Rounds alternate
between them, so that noise on a shared machine falls on all; the ratio is the median over rounds. On a CPU the clock
counts the seconds of CPU of the one thread.

    python benchmarks/dt_speed.py --rounds 5
    python benchmarks/dt_speed.py --device cuda      # the update as it stands, and recorded as a CUDA graph
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from common import print_machine, print_table, write_json
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from deft import schema
from deft.algorithms.decision_transformer import DecisionTransformer
from deft.config.algorithm_settings import DTSettings
from deft.data.datasets.dataset import VectorDataset
from deft.data.replay import EpisodeWindows, TransitionTable
from deft.models.decision_transformer import DecisionTransformerPolicy
from deft.runs.compute import torch_threads
from deft.training.capture import CapturedUpdate

BATCH, CONTEXT, WIDTH, LAYERS, DROPOUT = 64, 20, 128, 3, 0.1
OBSERVATION_DIM, ACTION_DIM, EPISODE_LENGTH = 11, 3, 1000


class PlainBlock(nn.Module):
    """A pre-norm transformer block out of torch's modules."""

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.norm_1, self.norm_2, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)
        self.attention = nn.MultiheadAttention(WIDTH, 1, DROPOUT, batch_first=True)
        layers = [nn.Linear(WIDTH, 4 * WIDTH), activation(), nn.Linear(4 * WIDTH, WIDTH), nn.Dropout(DROPOUT)]
        self.mlp = nn.Sequential(*layers)

    def forward(self, x: Tensor, causal: Tensor, padding: Tensor) -> Tensor:
        normed = self.norm_1(x)
        attended = self.attention(
            normed, normed, normed, attn_mask=causal, key_padding_mask=padding, need_weights=False
        )[0]
        x = x + self.dropout(attended)
        return x + self.mlp(self.norm_2(x))


class PlainTransformer(nn.Module):
    """The Decision Transformer, written straight down."""

    causal: Tensor

    def __init__(self, activation: type[nn.Module]) -> None:
        super().__init__()
        self.time = nn.Embedding(EPISODE_LENGTH, WIDTH)
        self.returns, self.observation = nn.Linear(1, WIDTH), nn.Linear(OBSERVATION_DIM, WIDTH)
        self.action = nn.Linear(ACTION_DIM, WIDTH)
        self.norm_in, self.norm_out, self.dropout = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), nn.Dropout(DROPOUT)
        self.blocks = nn.ModuleList([PlainBlock(activation) for _ in range(LAYERS)])
        self.head = nn.Sequential(nn.Linear(WIDTH, ACTION_DIM), nn.Tanh())
        self.register_buffer("causal", ~torch.ones(3 * CONTEXT, 3 * CONTEXT, dtype=torch.bool).tril())

    def forward(self, batch: dict[Any, Tensor]) -> Tensor:
        time_ = self.time(batch[schema.TIMESTEP])
        tokens = [
            self.returns(batch[schema.RETURN_TO_GO][..., None]) + time_,
            self.observation(batch[schema.OBSERVATION]) + time_,
            self.action(batch[schema.ACTION]) + time_,
        ]
        padding = ~batch[schema.STEP_MASK].repeat_interleave(3, 1)
        x = self.dropout(self.norm_in(torch.stack(tokens, 2).flatten(1, 2)))
        for block in self.blocks:
            x = block(x, self.causal, padding)
        return self.head(self.norm_out(x)[:, 1::3])


class Plain:
    """One update in eager torch."""

    def __init__(self, windows: EpisodeWindows, activation: type[nn.Module], device: str) -> None:
        self.windows, self.model = windows, PlainTransformer(activation).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min((step + 1) / 10_000, 1.0))

    def update(self) -> None:
        batch = self.windows.sample(BATCH)
        error = (self.model(batch) - batch[schema.ACTION]).square() * batch[schema.STEP_MASK][..., None]
        self.optimizer.zero_grad()
        error.mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.25)
        self.optimizer.step()
        self.scheduler.step()


def make_windows(device: str) -> EpisodeWindows:
    """Episodes of noise: what is learned does not change the time."""
    table = TransitionTable([EPISODE_LENGTH] * 50 + [EPISODE_LENGTH // 3] * 50, OBSERVATION_DIM, ACTION_DIM)
    table.rows.uniform_(-1, 1)
    return EpisodeWindows(table, CONTEXT, device=device)


def make_deft(windows: EpisodeWindows, device: str, **settings: Any) -> DecisionTransformer:
    dataset = VectorDataset(windows.table, "noise", action_space=spaces.Box(-1, 1, (ACTION_DIM,), np.float32))
    given = DTSettings(**settings)
    policy = DecisionTransformerPolicy(dataset.observation_space, dataset.action_space, given).to(device)
    algorithm = DecisionTransformer(policy, given)
    algorithm.prepare(dataset, windows, fresh=True)
    return algorithm


def seconds(update: Callable[[], Any], count: int, device: str) -> float:
    """Of one update, in the mean of `count`: of CPU on one thread, so that others on the machine count less; of wall on
    a GPU."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    for _ in range(count):
        update()
    if device == "cuda":
        torch.cuda.synchronize()
    return (clock() - start) / count


def updates(device: str, rounds: int, count: int, bf16: bool) -> dict[str, float]:
    """Updates per second of each way."""
    windows = make_windows(device)
    ways: dict[str, Callable[[], Any]] = {
        "plain, GELU": Plain(windows, nn.GELU, device).update,
        "plain, ReLU": Plain(windows, nn.ReLU, device).update,
    }
    for precision in ("fp32", "bf16") if bf16 or device == "cuda" else ("fp32",):
        algorithm, batches = make_deft(windows, device, precision=precision), windows.batches(BATCH)
        ways[f"Deft, {precision}"] = lambda algorithm=algorithm, batches=batches: algorithm.update(batches)
        if device == "cuda":
            ways[f"Deft, {precision}, recorded"] = CapturedUpdate(
                make_deft(windows, device, precision=precision), windows, BATCH
            ).run
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(rounds + 1):  # the first is a warm-up
        for name, update in ways.items():
            small = device == "cpu" and name == "Deft, float32"  # as a run does; the plain way leaves torch as it is
            with torch_threads(1, small_matrices=small):
                one = seconds(update, count, device)
            if number:
                taken[name].append(one)
    base = taken["plain, GELU"]
    rows, result = [], {}
    for name, times in taken.items():
        ratio = statistics.median(mine / own for mine, own in zip(base, times, strict=True))
        result[name] = 1 / statistics.median(times)
        rows.append([name, f"{result[name]:.2f}", f"{ratio:.2f}"])
    print_table(["update", "updates/s", "× plain, GELU"], rows)
    return result


def acting(device: str, num_envs: int, steps: int) -> dict[str, float]:
    """Actions per second in windows that are full."""
    rows, result = [], {}
    windows = make_windows(device)
    for slide in (1, 5, 10):
        policy = make_deft(windows, device, context_slide=slide).policy
        memory, observation = policy.initial_memory(num_envs), torch.randn(num_envs, OBSERVATION_DIM, device=device)
        reward = torch.zeros(num_envs, device=device)

        def act(policy=policy, memory=memory, observation=observation, reward=reward) -> None:
            parts = {schema.OBSERVATION: observation, schema.PREVIOUS_REWARD: reward, schema.MEMORY: memory}
            policy.act(TensorDict(parts, [num_envs]))

        with torch_threads(1, small_matrices=device == "cpu"), torch.inference_mode():
            seconds(act, CONTEXT, device)
            result[f"context_slide {slide}"] = num_envs / seconds(act, steps, device)
        rows.append([f"context_slide {slide}", f"{result[f'context_slide {slide}']:.0f}"])
    print_table([f"acting, {num_envs} environments", "actions/s"], rows)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=None, help="of each way in a round")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--bf16", action="store_true", help="also in bf16, on a CPU that has units for it")
    parser.add_argument("--json", default=None)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    print_machine()
    device = arguments.device
    count = arguments.updates or (4 if device == "cpu" else 200)
    result = updates(device, arguments.rounds, count, arguments.bf16)
    speed = acting(device, 10, 40)
    write_json(arguments.json, {"updates_per_second": result, "actions_per_second": speed})


if __name__ == "__main__":
    main()
