"""Makes the tabletop's pictures and videos in this folder: `python docs/pictures/tabletop_pictures.py`."""

from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from deft.envs.tabletop.env import TabletopEnv
from deft.envs.tabletop.tasks import GOAL_TASKS

FOLDER = Path(__file__).parent
RANDOMIZATION = {
    "random_appearance": True,
    "random_background": True,
    "random_light": True,
    "cluttered_table": True,
    "random_head_camera_dis": 0.08,
    "random_table_height": 0.03,
    "clean_background_rate": 0.0,
    "crazy_random_light_rate": 0.0,
}
SIZE = 240


def both(env: TabletopEnv, size: int = SIZE) -> np.ndarray:
    """Head and wrist camera side by side."""
    return np.concatenate(list(env.camera_images(("head", "wrist"), size).values()), axis=1)


def expert_video(task: str) -> None:
    """Two episodes of an expert: a plain scene and a randomised one."""
    frames = []
    for seed, randomization in ((3, {}), (11, RANDOMIZATION)):
        env = TabletopEnv(task, control_mode="delta_ee", domain_randomization=randomization)
        env.reset(seed=seed)
        frames += [both(env)] * 8
        for _ in range(150):
            _, _, terminated, _, info = env.step(env.expert_action())
            frames.append(both(env))
            if terminated:
                break
        assert info["success"], (task, seed)
        frames += [frames[-1]] * 12
    path = FOLDER / f"tabletop_{task}.mp4"
    imageio.imwrite(path, np.stack(frames), fps=25, codec="libx264", output_params=["-crf", "30"])
    print(f"{path.name}: {len(frames)} frames, {path.stat().st_size // 1024} kB")


def contact_sheet() -> None:
    """Sixteen randomised scenes, head camera."""
    env = TabletopEnv("all", domain_randomization=RANDOMIZATION)
    pictures = []
    for seed in range(16):
        env.reset(seed=seed)
        pictures.append(env.camera_images(("head",), 192)["head"].copy())
    rows = [np.concatenate(pictures[start : start + 4], axis=1) for start in range(0, 16, 4)]
    imageio.imwrite(FOLDER / "tabletop_scenes.jpg", np.concatenate(rows), quality=85)


def cameras() -> None:
    """What the two cameras see."""
    env = TabletopEnv("push")
    env.reset(seed=3)
    imageio.imwrite(FOLDER / "tabletop_cameras.jpg", both(env, 320), quality=90)


if __name__ == "__main__":
    for name in GOAL_TASKS:
        expert_video(name)
    contact_sheet()
    cameras()
