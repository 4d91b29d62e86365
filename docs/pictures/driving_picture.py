"""Makes the picture of the driving simulator in this folder: `python docs/pictures/driving_picture.py`."""

from pathlib import Path

import imageio.v3 as imageio
import numpy as np

from deft.envs.driving.env import DrivingEnv
from deft.envs.driving.rendering import images, render

SIZE = 320
SCENES = (("easy", 3, 24), ("medium", 11, 31), ("hard", 8, 93))  # difficulty, seed, step of the expert's drive


def main() -> None:
    """Three scenes for people, and the last one as a policy sees it, enlarged."""
    panels = []
    for difficulty, seed, num_steps in SCENES:
        env = DrivingEnv(difficulty)
        env.reset(seed=seed)
        for _ in range(num_steps):
            env.step(env.expert_action())
        panels.append(render(env.simulator, 0, SIZE))
    observation = images(env.simulator, 64)[0].transpose(1, 2, 0)
    panels.append(observation.repeat(SIZE // 64, axis=0).repeat(SIZE // 64, axis=1))
    gap = np.full((SIZE, 8, 3), 255, np.uint8)
    row = [part for panel in panels for part in (panel, gap)][:-1]
    imageio.imwrite(Path(__file__).parent / "driving.png", np.concatenate(row, axis=1))


if __name__ == "__main__":
    main()
