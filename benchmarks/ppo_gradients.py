"""Env steps per second of whole PPO training: gradients of the loss by autograd, or by derivatives written out by hand.

PPO takes its gradients from autograd. This benchmark shows what writing out the derivatives by log-prob, value and
entropy would save: it trains both in fresh processes, in interleaved rounds, with the settings of `ppo_speed.py`.

    chrt -r 20 taskset -c 0 python benchmarks/ppo_gradients.py --rounds 3 --json gradients.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

from common import print_machine, print_table, run_worker, write_json

CASES = {"cartpole-1": ("CartPole-v1", 1), "cartpole-8": ("CartPole-v1", 8), "pendulum-1": ("Pendulum-v1", 1)}
KINDS = ("autograd", "by hand")
ROLLOUT_STEPS, MINIBATCH, EPOCHS = 2048, 64, 10


def use_written_derivatives() -> None:
    """Replace the backward pass of PPO by one that starts at log-prob, value and entropy."""
    import torch

    from deft import schema
    from deft.algorithms.ppo import PPO

    def backward(self: Any, minibatch: Any, scale: float = 1.0) -> dict[str, Any]:
        settings, scored = self.settings, self._scored(minibatch)
        advantage = self._weighted_advantage(minibatch)
        log_ratio = scored["log_prob"].detach() - minibatch[schema.LOG_PROB]
        ratio, count = log_ratio.exp(), log_ratio.numel()
        plain = ratio * advantage
        clipped = ratio.clamp(1 - settings.clip_range, 1 + settings.clip_range) * advantage
        error = scored["value"].detach() - minibatch[schema.VALUE_TARGET]
        roots = [scored["log_prob"], scored["value"]]
        slopes = [(plain * (plain <= clipped)).mul_(-1 / count), error * (settings.value_coef / count)]
        if settings.entropy_coef:
            roots.append(scored["entropy"])
            slopes.append(torch.full_like(log_ratio, -settings.entropy_coef / count))
        self.optimizer.zero_grad()
        torch.autograd.backward(roots, slopes)
        return {
            "policy_loss": -torch.minimum(plain, clipped),
            "value_loss": 0.5 * error.square(),
            "entropy": scored["entropy"].detach(),
            "log_ratio": log_ratio,
        }

    PPO._backward = backward  # type: ignore[method-assign]


def work(kind: str, case: str, rollouts: int, seed: int) -> None:
    """Train once in this process; print one JSON line."""
    import torch

    from deft import PPOTrainer, RLConfig

    torch.set_num_threads(1)
    if kind == "by hand":
        use_written_derivatives()
    env, num_envs = CASES[case]
    with tempfile.TemporaryDirectory() as folder:
        config = RLConfig(
            algorithm="ppo",
            total_timesteps=ROLLOUT_STEPS * num_envs * (1 + rollouts),
            rollout_steps=ROLLOUT_STEPS,
            batch_size=MINIBATCH,
            ppo_epochs=EPOCHS,
            hidden_sizes=(64, 64),
            normalize_observation=False,
            normalize_reward=False,
            num_envs=num_envs,
            eval_freq=0,
            save_freq=0,
            console_level="WARNING",
            seed=seed,
            device="cpu",
            threads=1,
            output_dir=folder,
        )
        trainer = PPOTrainer(env=env, config=config)
        algorithm, began = trainer.trainer.algorithm, []
        update = algorithm.update

        def update_and_start(batches: Any) -> Any:
            metrics = update(batches)
            began.append(time.perf_counter())
            return metrics

        algorithm.update = update_and_start  # type: ignore[method-assign]
        trainer.train()
        seconds = time.perf_counter() - began[0]
        trainer.close()
    print(json.dumps({"steps_per_s": ROLLOUT_STEPS * num_envs * rollouts / seconds}))


def main() -> None:
    """Measure, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16_384, help="env steps measured a round, up to whole rollouts")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    names = arguments.cases.split(",")
    if arguments.worker is not None:
        rollouts = -(-arguments.steps // (ROLLOUT_STEPS * CASES[names[0]][1]))
        work(arguments.worker, names[0], rollouts, arguments.seed)
        return
    print_machine()
    results: dict[str, Any] = {}
    for name in names:
        rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for seed in range(1, arguments.rounds + 1):
            for kind in KINDS:
                options = ["--worker", kind, "--cases", name, "--steps", arguments.steps, "--seed", seed]
                rates[kind].append(run_worker("ppo_gradients.py", options)["steps_per_s"])
        medians = {kind: statistics.median(values) for kind, values in rates.items()}
        results[name] = {**medians, "ratio": medians["by hand"] / medians["autograd"]}
    rows = [
        [name, *(f"{found[kind]:.0f}" for kind in KINDS), f"{found['ratio']:.2f}"] for name, found in results.items()
    ]
    print_table(["case", "autograd, steps/s", "by hand, steps/s", "by hand / autograd"], rows)
    write_json(arguments.json, results)


if __name__ == "__main__":
    main()
