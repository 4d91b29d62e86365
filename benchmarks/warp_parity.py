"""How closely the tabletop on MuJoCo Warp (`env.vector: warp`) agrees with the tabletop on the CPU.

Images: the same scenes after a few random steps, plain and randomised: PSNR and SSIM of both cameras, and pictures side
by side (CPU, Warp, twice the difference). Free motion: 50 random steps above the table, differences of joints and
objects. Scripted expert: its actions on the CPU, replayed on Warp, the state's differences, rewards and successes.

    python benchmarks/warp_parity.py --device cuda --num-envs 100 --scenes 100 --episodes 100 --out parity
    python benchmarks/warp_parity.py --device cpu --num-envs 2 --scenes 4 --episodes 2 --out parity
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import imageio.v3 as imageio
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
        for step in actions:
            on_warp = env.step(torch.from_numpy(step)).observation
        on_warp = {name: stream.cpu().numpy() for name, stream in on_warp.items()}
        for row, seed in enumerate(seeds):
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


def compare_expert(arguments: argparse.Namespace, task: str) -> dict[str, Any]:
    """The expert's episodes on the CPU, and its actions replayed on Warp."""
    pair = Pair(arguments, task=task)
    rows = []
    for seeds in batches(arguments.episodes, pair.size):
        pair.reset(seeds)
        size = pair.size
        returns, wins, lengths = np.zeros((2, size)), np.zeros((2, size), bool), np.zeros((2, size), int)
        open_ = np.ones((2, size), bool)  # CPU, Warp
        turns, shifts = np.full(size, np.nan), np.full(size, np.nan)
        actions = np.zeros((size, 4), np.float32)
        for step in range(EPISODE_STEPS + EXTRA_STEPS):
            for row, env in enumerate(pair.cpu):
                if open_[0, row]:
                    actions[row] = env.expert_action()
            result = pair.warp.step(torch.from_numpy(actions))
            reward, ended = result.reward.cpu().numpy(), (result.terminated | result.truncated).cpu().numpy()
            won = {episode.env_index: bool(episode.success) for episode in result.episodes}
            joints, objects = None, None
            for row, env in enumerate(pair.cpu):
                if open_[0, row]:
                    _, own, terminated, _, info = env.step(actions[row])
                    returns[0, row] += own
                    if terminated or step + 1 == EPISODE_STEPS:
                        open_[0, row], wins[0, row], lengths[0, row] = False, info["success"], step + 1
                        if open_[1, row] and not ended[row]:
                            if joints is None:
                                joints, objects = pair.differences()
                            turns[row], shifts[row] = joints[row], objects[row]
                if open_[1, row]:
                    returns[1, row] += reward[row]
                    if ended[row]:
                        open_[1, row], wins[1, row], lengths[1, row] = False, won[row], step + 1
            late = lengths[0][~open_[0]]
            if not open_[0].any() and (not open_[1].any() or step >= late.max() + EXTRA_STEPS):
                break
        for row in range(size):
            near = abs(returns[0, row] - returns[1, row]) < RETURN_DIFFERENCE
            rows.append(
                {
                    "equal": bool(wins[0, row] == wins[1, row] and near),
                    "same success": bool(wins[0, row] == wins[1, row]),
                    "won": wins[:, row].tolist(),
                    "return": returns[:, row].tolist(),
                    "length": lengths[:, row].tolist(),
                    "joints": float(turns[row]),
                    "objects": float(shifts[row]),
                }
            )
    pair.warp.close()
    both = np.array([row["won"] for row in rows], float)
    apart = [abs(row["return"][0] - row["return"][1]) for row in rows]
    return {
        "episodes": len(rows),
        "CPU success": both[:, 0].mean(),
        "Warp success": both[:, 1].mean(),
        "same success": float(np.mean([row["same success"] for row in rows])),
        "same success and return": float(np.mean([row["equal"] for row in rows])),
        "return difference, median": float(np.median(apart)),
        "length difference, mean": float(np.mean([abs(row["length"][0] - row["length"][1]) for row in rows])),
        "rows": rows,
    }


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
            text = ", ".join(f"{key} {value:.3f}" for key, value in found.items() if key != "rows")
            is_met = found["same success and return"] >= EQUAL_SHARE
            table.append([f"expert's actions, {task}", text, "met" if is_met else "missed"])
            print(table[-1], flush=True)
    print_table(["comparison", "found", "bar"], table)
    write_json(str(arguments.out / "parity.json"), result)


if __name__ == "__main__":
    main()
