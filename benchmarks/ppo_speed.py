"""Env steps per second of whole PPO training: Deft beside Stable-Baselines3 and TorchRL, in one run.

Each library trains in a fresh process with the same thread count, in interleaved rounds (A, B, C, A, B, C, …) so that
noise on a shared machine falls on all of them. Same environment, network (64-64 tanh, actor and critic apart), rollout
(2,048 steps an environment), minibatch (64), epochs (10), Adam (3e-4, epsilon 1e-5), clip, GAE and gradient clipping.
The clock starts after the first rollout and its update, so that imports and first calls do not count.

    python benchmarks/ppo_speed.py --rounds 5 --json speed.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from common import print_machine, print_table, run_worker, write_json

ROLLOUT_STEPS, MINIBATCH, EPOCHS = 2048, 64, 10
LEARNING_RATE, ADAM_EPSILON, CLIP, GAMMA, GAE_LAMBDA = 3e-4, 1e-5, 0.2, 0.99, 0.95
VALUE_COEF, ENTROPY_COEF, MAX_GRAD_NORM = 0.5, 0.0, 0.5
CASES = {"cartpole-1": ("CartPole-v1", 1), "cartpole-8": ("CartPole-v1", 8)}
CASES |= {"halfcheetah-1": ("HalfCheetah-v5", 1), "halfcheetah-8": ("HalfCheetah-v5", 8)}


@dataclass
class Case:
    env: str
    num_envs: int
    rollouts: int
    seed: int
    threads: int

    @property
    def rollout_transitions(self) -> int:
        return ROLLOUT_STEPS * self.num_envs


class Stopwatch:
    """Wall and CPU seconds since `start`, which each library calls once its first update is done."""

    def __init__(self) -> None:
        self.wall: float | None = None
        self.cpu = 0.0

    def start(self) -> None:
        """Start, at the first call alone."""
        if self.wall is None:
            self.wall, self.cpu = time.perf_counter(), time.process_time()

    def stop(self) -> tuple[float, float]:
        """Seconds of wall and of CPU."""
        if self.wall is None:
            raise RuntimeError("the stopwatch was never started: the run ended within its first rollout")
        return time.perf_counter() - self.wall, time.process_time() - self.cpu


def train_sb3(case: Case) -> tuple[float, float]:
    """Stable-Baselines3, its defaults where they are those of this benchmark."""
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    stopwatch = Stopwatch()

    class AfterFirstUpdate(BaseCallback):
        def _on_rollout_start(self) -> None:
            if self.num_timesteps > 0:
                stopwatch.start()

        def _on_step(self) -> bool:
            return True

    model = PPO(
        "MlpPolicy",
        make_vec_env(case.env, n_envs=case.num_envs, seed=case.seed),
        n_steps=ROLLOUT_STEPS,
        batch_size=MINIBATCH,
        n_epochs=EPOCHS,
        learning_rate=LEARNING_RATE,
        clip_range=CLIP,
        gamma=GAMMA,
        gae_lambda=GAE_LAMBDA,
        vf_coef=VALUE_COEF,
        ent_coef=ENTROPY_COEF,
        max_grad_norm=MAX_GRAD_NORM,
        policy_kwargs={"net_arch": {"pi": [64, 64], "vf": [64, 64]}, "optimizer_kwargs": {"eps": ADAM_EPSILON}},
        seed=case.seed,
        device="cpu",
    )
    model.learn(case.rollout_transitions * (1 + case.rollouts), callback=AfterFirstUpdate())
    return stopwatch.stop()


def train_sb3_without_onednn(case: Case) -> tuple[float, float]:
    """Stable-Baselines3 with the setting that Deft chooses for small networks: matrix products without oneDNN."""
    import torch

    with torch.backends.mkldnn.flags(enabled=False):
        return train_sb3(case)


def train_torchrl(case: Case) -> tuple[float, float]:
    """TorchRL, put together as its PPO tutorial and examples do: collector, GAE, storage, ClipPPOLoss."""
    import torch
    from tensordict.nn import AddStateIndependentNormalScale, TensorDictModule
    from torchrl.collectors import Collector
    from torchrl.data import LazyTensorStorage, TensorDictReplayBuffer
    from torchrl.data.replay_buffers.samplers import SamplerWithoutReplacement
    from torchrl.envs import (
        Compose,
        DoubleToFloat,
        ExplorationType,
        GymEnv,
        RewardSum,
        SerialEnv,
        StepCounter,
        TransformedEnv,
    )
    from torchrl.modules import MLP, IndependentNormal, OneHotCategorical, ProbabilisticActor, ValueOperator
    from torchrl.objectives import ClipPPOLoss
    from torchrl.objectives.value.advantages import GAE

    def make_env() -> GymEnv:
        return GymEnv(case.env, device="cpu")

    base = make_env() if case.num_envs == 1 else SerialEnv(case.num_envs, make_env)
    env = TransformedEnv(base, Compose(DoubleToFloat(), StepCounter(), RewardSum()))
    env.set_seed(case.seed)
    size = env.observation_spec["observation"].shape[-1]
    discrete = case.env.startswith("CartPole")
    actions = env.action_spec.shape[-1]

    def network(outputs: int) -> MLP:
        return MLP(in_features=size, out_features=outputs, num_cells=[64, 64], activation_class=torch.nn.Tanh)

    if discrete:
        actor = ProbabilisticActor(
            TensorDictModule(network(actions), in_keys=["observation"], out_keys=["logits"]),
            in_keys=["logits"],
            spec=env.full_action_spec.to("cpu"),
            distribution_class=OneHotCategorical,
            return_log_prob=True,
            default_interaction_type=ExplorationType.RANDOM,
        )
    else:
        # A Gaussian without squashing, as in the other two libraries.
        body = torch.nn.Sequential(network(actions), AddStateIndependentNormalScale(actions))
        actor = ProbabilisticActor(
            TensorDictModule(body, in_keys=["observation"], out_keys=["loc", "scale"]),
            in_keys=["loc", "scale"],
            distribution_class=IndependentNormal,
            return_log_prob=True,
            default_interaction_type=ExplorationType.RANDOM,
        )
    critic = ValueOperator(network(1), in_keys=["observation"])
    collector = Collector(
        env,
        actor,
        frames_per_batch=case.rollout_transitions,
        total_frames=case.rollout_transitions * (1 + case.rollouts),
        device="cpu",
    )
    storage = LazyTensorStorage(case.rollout_transitions, device="cpu")
    buffer = TensorDictReplayBuffer(storage=storage, sampler=SamplerWithoutReplacement(), batch_size=MINIBATCH)
    advantage = GAE(gamma=GAMMA, lmbda=GAE_LAMBDA, value_network=critic, average_gae=False)
    loss_module = ClipPPOLoss(
        actor_network=actor,
        critic_network=critic,
        clip_epsilon=CLIP,
        loss_critic_type="l2",
        entropy_coeff=ENTROPY_COEF,
        critic_coeff=VALUE_COEF,
        normalize_advantage=True,
    )
    parameters = list(loss_module.parameters())
    optimizer = torch.optim.Adam(parameters, lr=LEARNING_RATE, eps=ADAM_EPSILON)
    stopwatch = Stopwatch()
    for data in collector:
        with torch.no_grad():
            data = advantage(data)  # once a rollout, as in the other two libraries (the tutorial: once an epoch)
        buffer.extend(data.reshape(-1))
        for _ in range(EPOCHS):
            for batch in buffer:
                loss = loss_module(batch)
                (loss["loss_objective"] + loss["loss_entropy"] + loss["loss_critic"]).backward()
                torch.nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
        stopwatch.start()
    seconds = stopwatch.stop()
    collector.shutdown()
    return seconds


def train_deft(case: Case) -> tuple[float, float]:
    """Deft, by its public classes; it writes its run folder (metrics, TensorBoard, log, last checkpoint) as always."""
    from deft import PPOTrainer, RLConfig

    stopwatch = Stopwatch()
    with tempfile.TemporaryDirectory() as folder:
        config = RLConfig(
            algorithm="ppo",
            total_timesteps=case.rollout_transitions * (1 + case.rollouts),
            rollout_steps=ROLLOUT_STEPS,
            batch_size=MINIBATCH,
            ppo_epochs=EPOCHS,
            learning_rate=LEARNING_RATE,
            adam_epsilon=ADAM_EPSILON,
            ppo_clip_range=CLIP,
            discount_gamma=GAMMA,
            ppo_gae_lambda=GAE_LAMBDA,
            ppo_value_coef=VALUE_COEF,
            ppo_entropy_coef=ENTROPY_COEF,
            max_grad_norm=MAX_GRAD_NORM,
            hidden_sizes=(64, 64),
            activation="tanh",
            normalize_observation=False,
            normalize_reward=False,
            num_envs=case.num_envs,
            eval_freq=0,
            save_freq=0,
            console_level="WARNING",
            seed=case.seed,
            device="cpu",
            threads=case.threads,
            output_dir=folder,
        )
        trainer = PPOTrainer(env=case.env, config=config)
        algorithm = trainer.trainer.algorithm
        update = algorithm.update

        def update_and_start(batches: Any) -> Any:
            metrics = update(batches)
            stopwatch.start()
            return metrics

        algorithm.update = update_and_start  # type: ignore[method-assign]
        trainer.train()
        seconds = stopwatch.stop()
        trainer.close()
    return seconds


LIBRARIES: dict[str, Callable[[Case], tuple[float, float]]] = {
    "sb3": train_sb3,
    "sb3-no-onednn": train_sb3_without_onednn,
    "deft": train_deft,
    "torchrl": train_torchrl,
}


def work(library: str, case: Case) -> None:
    """One measurement, in this process; prints it as one JSON line."""
    import torch

    torch.set_num_threads(case.threads)
    torch.manual_seed(case.seed)
    wall, cpu = LIBRARIES[library](case)
    steps = case.rollouts * case.rollout_transitions
    print(json.dumps({"steps": steps, "wall_s": wall, "cpu_s": cpu, "steps_per_s": steps / wall}))


def main() -> None:
    """Measure, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="cartpole-1,cartpole-8,halfcheetah-1", help=f"of {', '.join(CASES)}")
    parser.add_argument("--only", default="sb3,sb3-no-onednn,deft,torchrl", help="libraries, in the order of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20_000, help="env steps measured a round, up to whole rollouts")
    parser.add_argument("--threads", type=int, default=1, help="torch and OpenMP threads of each process")
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    libraries, names = arguments.only.split(","), arguments.cases.split(",")
    for name, known in [(name, CASES) for name in names] + [(name, LIBRARIES) for name in libraries]:
        if name not in known:
            parser.error(f"{name!r} is not one of {', '.join(known)}")

    def case_of(name: str, seed: int) -> Case:
        env, num_envs = CASES[name]
        rollouts = -(-arguments.steps // (ROLLOUT_STEPS * num_envs))
        return Case(env, num_envs, rollouts, seed, arguments.threads)

    if arguments.worker is not None:
        work(arguments.worker, case_of(names[0], arguments.seed))
        return
    print_machine()
    results: dict[str, Any] = {}
    for name in names:
        runs: dict[str, list[dict[str, Any]]] = {library: [] for library in libraries}
        for round_index in range(arguments.rounds):
            for library in libraries:
                options = ["--worker", library, "--cases", name, "--steps", arguments.steps]
                options += ["--threads", arguments.threads, "--seed", arguments.seed + round_index]
                runs[library].append(run_worker("ppo_speed.py", options, arguments.threads))
        results[name] = summarise(name, runs)
    write_json(arguments.json, {"threads": arguments.threads, "steps": arguments.steps, "cases": results})


def summarise(name: str, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Print the table of one case and return it: medians of wall and of CPU rates, and Deft's ratios."""
    wall = {library: [run["steps_per_s"] for run in rounds] for library, rounds in runs.items()}
    cpu = {library: [run["steps"] / run["cpu_s"] for run in rounds] for library, rounds in runs.items()}
    median = {library: statistics.median(rates) for library, rates in wall.items()}
    median_cpu = {library: statistics.median(rates) for library, rates in cpu.items()}
    ratios = {}
    for other in runs:
        if "deft" in runs and other != "deft":
            pairs = [mine / theirs for mine, theirs in zip(wall["deft"], wall[other], strict=True)]
            ratios[other] = {"wall": median["deft"] / median[other], "rounds": pairs}
            ratios[other]["cpu"] = median_cpu["deft"] / median_cpu[other]
    print(f"\n{name}: {CASES[name][0]}, {CASES[name][1]} env(s), env steps per second of whole training")
    rows = []
    for library in runs:
        ratio = ratios.get(library)
        rows.append(
            [
                library,
                " ".join(f"{rate:,.0f}" for rate in wall[library]),
                f"{median[library]:,.0f}",
                f"{median_cpu[library]:,.0f}",
                ""
                if ratio is None
                else f"{ratio['wall']:.2f}x ({' '.join(f'{pair:.2f}' for pair in ratio['rounds'])})",
                "" if ratio is None else f"{ratio['cpu']:.2f}x",
            ]
        )
    print_table(["library", "rounds", "median", "per CPU second", "Deft is faster by", "by CPU time"], rows)
    return {"runs": runs, "median_steps_per_s": median, "median_steps_per_cpu_s": median_cpu, "deft_ratio": ratios}


if __name__ == "__main__":
    main()
