"""How closely the tabletop on MuJoCo Warp (`env.vector: warp`) agrees with the tabletop on the CPU.

Images: the same scenes after a few random steps, plain and randomised: PSNR and SSIM of both cameras, and pictures side
by side (CPU, Warp, twice the difference). Free motion: 50 random steps above the table, differences of joints and
objects. Scripted expert: successes and returns of the expert on both, and of the CPU's actions replayed on Warp.

    python benchmarks/warp_parity.py --device cuda --num-envs 100 --scenes 100 --episodes 100 --out parity
    python benchmarks/warp_parity.py --device cpu --num-envs 2 --scenes 4 --episodes 2 --out parity
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
import mujoco
import numpy as np
import torch
from common import print_machine, print_table, write_json
from warp_tabletop import RANDOMIZATIONS

from deft.envs.tabletop.env import TabletopEnv
from deft.envs.tabletop.panda import NUM_JOINTS
from deft.envs.tabletop.tasks import GOAL_TASKS
from deft.envs.tabletop.warp.env import WarpTabletopEnv

MOTION_STEPS = 50
LARGEST_SHIFT = 0.005  # metres
LARGEST_TURN = 0.02  # radians
SMALLEST_PSNR, SMALLEST_SSIM, EQUAL_SHARE = 25.0, 0.9, 0.95
EPISODE_STEPS = 150
EXTRA_STEPS = 10  # in which Warp may achieve the goal after the CPU did
RETURN_DIFFERENCE = 0.05


def similarity(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """PSNR in decibels, and SSIM with 7 × 7 windows (the mean over colours), of two uint8 images [3, h, w]."""
    x, y = (torch.from_numpy(image.astype(np.float64))[None] for image in (one, other))
    error = float(((x - y) ** 2).mean())

    def mean(values: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.avg_pool2d(values, 7, 1)

    count = 49 / 48  # sample variances
    mean_x, mean_y = mean(x), mean(y)
    var_x, var_y = count * (mean(x * x) - mean_x**2), count * (mean(y * y) - mean_y**2)
    both = count * (mean(x * y) - mean_x * mean_y)
    c1, c2 = (0.01 * 255) ** 2, (0.03 * 255) ** 2
    ssim = (2 * mean_x * mean_y + c1) * (2 * both + c2) / ((mean_x**2 + mean_y**2 + c1) * (var_x + var_y + c2))
    return 10 * np.log10(255**2 / max(error, 1e-9)), float(ssim.mean())


def batches(count: int, size: int) -> list[range]:
    return [range(first, first + size) for first in range(0, count, size)]


def compare_images(arguments: argparse.Namespace, randomization: str) -> dict[str, Any]:
    settings = {
        "task": "all",
        "observation": "images",
        "control_mode": "delta_ee",
        "image_size": arguments.image_size,
        # flickering lights have other random colours on Warp
        "domain_randomization": {**RANDOMIZATIONS[randomization], "crazy_random_light_rate": 0.0},
    }
    size = arguments.num_envs
    env = WarpTabletopEnv(size, device=arguments.device, num_scenes=size, **settings)
    cpu = TabletopEnv(**settings)
    found: dict[str, list[tuple[float, float]]] = {"head_rgb": [], "wrist_rgb": []}
    pictures = []
    for seeds in batches(arguments.scenes, size):
        env.reset(seed=seeds[0])
        random = np.random.default_rng(seeds[0])
        actions = np.repeat(random.uniform(-1, 1, (1, size, *env.action_space.shape)), 6, axis=0)
        ended = np.zeros(size, bool)
        for step in actions:
            result = env.step(torch.from_numpy(step))
            ended |= (result.terminated | result.truncated).cpu().numpy()
        on_warp: Any = result.observation
        on_warp = {name: stream.cpu().numpy() for name, stream in on_warp.items()}
        for row, seed in enumerate(seeds):
            if ended[row]:  # Warp shows the next scene
                continue
            cpu.reset(seed=seed)
            for step in actions:
                on_cpu = cpu.step(step[row])[0]
            shown = []
            for name, values in found.items():
                one, other = on_cpu[name], on_warp[name][row]
                values.append(similarity(one, other))
                difference = 2 * np.abs(one.astype(int) - other).clip(0, 127).astype(np.uint8)
                shown += [one, other, difference]
            pictures.append(np.concatenate(shown, axis=2).transpose(1, 2, 0))
    env.close()
    arguments.out.mkdir(parents=True, exist_ok=True)
    imageio.imwrite(arguments.out / f"images_{randomization}.png", np.concatenate(pictures[:12]))
    result: dict[str, Any] = {"scenes": len(pictures)}
    for name, values in found.items():
        psnr, ssim = np.array(values).T
        result[name] = {
            "psnr mean": psnr.mean(),
            "psnr lowest": psnr.min(),
            "ssim mean": ssim.mean(),
            "ssim lowest": ssim.min(),
        }
    return result


class Pair:
    """The same environments on Warp and on the CPU."""

    def __init__(self, arguments: argparse.Namespace, **settings: Any) -> None:
        self.size = arguments.num_envs
        settings = {"control_mode": "delta_ee_pos", "observation": "state", **settings}
        self.warp = WarpTabletopEnv(self.size, device=arguments.device, num_scenes=self.size, **settings)
        self.cpu = [TabletopEnv(**settings) for _ in range(self.size)]
        self.objects = self.cpu[0].settings.num_objects

    def reset(self, seeds: range) -> None:
        self.warp.reset(seed=seeds[0])
        for env, seed in zip(self.cpu, seeds, strict=True):
            env.reset(seed=seed)

    def expert_actions(self) -> np.ndarray:
        """The expert's actions for the states of Warp's simulation, [N, A]."""
        simulation = self.warp.simulation
        names = ("qpos", "qvel", "ctrl", "targets", "fingers")
        state = {name: getattr(simulation, name).cpu().double().numpy() for name in names}
        actions = []
        for row, env in enumerate(self.cpu):
            data = env.simulation.data
            data.qpos[:], data.qvel[:], data.ctrl[:] = (state[name][row] for name in names[:3])
            env.simulation.locate()
            env._controller.reset(state["targets"][row], state["fingers"][row])
            actions.append(env.expert_action())
        return np.stack(actions)

    def differences(self) -> tuple[np.ndarray, np.ndarray]:
        """Largest difference of the joints (radians) and of the objects' positions (metres) of each environment."""
        qpos = self.warp.simulation.qpos.cpu().numpy()
        own = np.stack([env.simulation.data.qpos[: 9 + 7 * self.objects] for env in self.cpu])
        apart = qpos[:, : own.shape[1]] - own
        positions = apart[:, 9:].reshape(self.size, self.objects, 7)[:, :, :3]
        return np.abs(apart[:, :NUM_JOINTS]).max(1), np.linalg.norm(positions, axis=2).max(1)


def compare_motion(arguments: argparse.Namespace) -> dict[str, Any]:
    """Random steps of the hand, upwards on average, so that it touches nothing."""
    pair = Pair(arguments, task="all")
    turns, shifts = [], []
    for seeds in batches(arguments.episodes, pair.size):
        pair.reset(seeds)
        random = np.random.default_rng(seeds[0])
        for _ in range(MOTION_STEPS):
            actions = random.uniform(-1, 1, (pair.size, 4))
            actions[:, 2] += 0.3
            pair.warp.step(torch.from_numpy(actions))
            for env, action in zip(pair.cpu, actions, strict=True):
                env.step(action)
        turn, shift = pair.differences()
        turns.append(turn)
        shifts.append(shift)
    pair.warp.close()
    turns, shifts = np.concatenate(turns), np.concatenate(shifts)
    return {
        "joints rad, mean": turns.mean(),
        "joints rad, largest": turns.max(),
        "objects m, mean": shifts.mean(),
        "objects m, largest": shifts.max(),
    }


class Outcome:
    """Return, success and length of one episode in each of several environments."""

    def __init__(self, size: int) -> None:
        self.returns = np.zeros(size)
        self.wins = np.zeros(size, bool)
        self.lengths = np.zeros(size, int)  # 0: it has not ended
        self._steps = np.zeros(size, int)

    def add(self, row: int, reward: float, ended: bool, won: bool) -> None:
        if not self.lengths[row]:
            self.returns[row] += reward
            self._steps[row] += 1
            if ended:
                self.wins[row], self.lengths[row] = won, self._steps[row]

    @property
    def is_complete(self) -> bool:
        return bool(self.lengths.all())


def play_cpu(env: TabletopEnv, seed: int, actions: list[np.ndarray] | None, outcome: Outcome, row: int) -> list[Any]:
    """Play an episode: the expert's, or these actions and then the last of them. Return the actions."""
    env.reset(seed=seed)
    if actions is not None:  # as on Warp: objects at rest do not sleep
        env.simulation.model.opt.enableflags &= ~int(mujoco.mjtEnableBit.mjENBL_SLEEP)
    taken = []
    limit = EPISODE_STEPS if actions is None else len(actions) + EXTRA_STEPS
    for step in range(limit):
        action = env.expert_action() if actions is None else actions[min(step, len(actions) - 1)]
        taken.append(action)
        _, reward, terminated, _, info = env.step(action)
        outcome.add(row, reward, terminated or step == limit - 1, info["success"])
        if terminated:
            break
    return taken


def play_warp(pair: Pair, seeds: range, actions: list[list[np.ndarray]] | None) -> Outcome:
    """The same on Warp; without actions, the expert sees the state of Warp's simulation."""
    pair.reset(seeds)
    outcome = Outcome(pair.size)
    rows = range(pair.size)
    for step in range(EPISODE_STEPS + EXTRA_STEPS):
        if actions is None:
            chosen = pair.expert_actions()
            last = [step == EPISODE_STEPS - 1] * pair.size
        else:
            chosen = np.stack([actions[row][min(step, len(actions[row]) - 1)] for row in rows])
            last = [step >= len(actions[row]) + EXTRA_STEPS - 1 for row in rows]
        result = pair.warp.step(torch.from_numpy(chosen))
        reward, ended = result.reward.tolist(), result.terminated.tolist()
        won = {episode.env_index: bool(episode.success) for episode in result.episodes}
        for row in rows:
            outcome.add(row, reward[row], ended[row] or last[row], won.get(row, False))
        if outcome.is_complete:
            break
    return outcome


def compare_expert(arguments: argparse.Namespace, task: str) -> dict[str, Any]:
    """The expert on the CPU; its actions on Warp and on the CPU without sleeping objects; the expert on Warp.

    Pushing is unstable: the second tells how far two exact simulators diverge with the same actions.
    """
    pair = Pair(arguments, task=task)
    found: dict[str, list[Outcome]] = {"CPU": [], "replay": [], "CPU replay": [], "Warp": []}
    for seeds in batches(arguments.episodes, pair.size):
        first, again = Outcome(pair.size), Outcome(pair.size)
        actions = [play_cpu(pair.cpu[0], seed, None, first, row) for row, seed in enumerate(seeds)]
        for row, seed in enumerate(seeds):
            play_cpu(pair.cpu[0], seed, actions[row], again, row)
        found["CPU"].append(first)
        found["CPU replay"].append(again)
        found["replay"].append(play_warp(pair, seeds, actions))
        found["Warp"].append(play_warp(pair, seeds, None))
    pair.warp.close()
    wins = {name: np.concatenate([part.wins for part in parts]) for name, parts in found.items()}
    returns = {name: np.concatenate([part.returns for part in parts]) for name, parts in found.items()}
    result: dict[str, Any] = {"episodes": len(wins["CPU"]), "success, CPU": wins["CPU"].mean()}
    for name, label in (("Warp", "expert on Warp"), ("replay", "replay on Warp"), ("CPU replay", "replay on CPU")):
        near = np.abs(returns[name] - returns["CPU"]) < RETURN_DIFFERENCE
        same = wins[name] == wins["CPU"]
        result[f"{label}: success"] = wins[name].mean()
        result[f"{label}: same success"] = same.mean()
        result[f"{label}: same success and return"] = (same & near).mean()
    return {name: float(value) for name, value in result.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--num-envs", type=int, default=100)
    parser.add_argument("--scenes", type=int, default=100, help="of each kind, for the images")
    parser.add_argument("--episodes", type=int, default=100, help="of motion, and of the expert in each task")
    parser.add_argument("--image-size", type=int, default=64)
    parser.add_argument("--parts", nargs="+", default=["images", "motion", "expert"])
    parser.add_argument("--randomizations", nargs="+", choices=sorted(RANDOMIZATIONS), default=["none", "looks"])
    parser.add_argument("--tasks", nargs="+", default=list(GOAL_TASKS))
    parser.add_argument("--out", type=Path, default=Path("warp_parity"))
    arguments = parser.parse_args()
    print_machine()
    arguments.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {}
    table = []
    if "images" in arguments.parts:
        for randomization in arguments.randomizations:
            found = result[f"images, {randomization}"] = compare_images(arguments, randomization)
            for name in ("head_rgb", "wrist_rgb"):
                values = found[name]
                is_met = values["psnr mean"] >= SMALLEST_PSNR and values["ssim mean"] >= SMALLEST_SSIM
                text = ", ".join(f"{key} {value:.3f}" for key, value in values.items())
                table.append([f"{name}, randomization {randomization}", text, "met" if is_met else "missed"])
                print(table[-1], flush=True)
    if "motion" in arguments.parts:
        found = result["motion"] = compare_motion(arguments)
        is_met = found["joints rad, largest"] <= LARGEST_TURN and found["objects m, largest"] <= LARGEST_SHIFT
        text = ", ".join(f"{key} {value:.6f}" for key, value in found.items())
        table.append([f"free motion, {MOTION_STEPS} steps", text, "met" if is_met else "missed"])
        print(table[-1], flush=True)
    if "expert" in arguments.parts:
        for task in arguments.tasks:
            found = result[f"expert, {task}"] = compare_expert(arguments, task)
            text = ", ".join(f"{key} {value:.3f}" for key, value in found.items())
            is_met = (
                min(found[f"{kind} on Warp: same success and return"] for kind in ("expert", "replay")) >= EQUAL_SHARE
            )
            table.append([f"expert's actions, {task}", text, "met" if is_met else "missed"])
            print(table[-1], flush=True)
    print_table(["comparison", "found", "bar"], table)
    write_json(str(arguments.out / "parity.json"), result)


if __name__ == "__main__":
    main()
