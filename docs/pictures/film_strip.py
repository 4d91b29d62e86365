"""Videos of episodes as rows of frames, one below the other: the picture of the headline in this folder.

deft evaluate runs/sft --task place --env-kwargs observation=images --episodes 24 --videos sft
deft evaluate runs/ppo --task place --env-kwargs observation=images --episodes 24 --videos ppo
python docs/pictures/film_strip.py sft/failure_0_*.mp4 ppo/success_0_*.mp4 --names "after imitation" "after PPO"
"""

import argparse
from pathlib import Path

import imageio.v3 as imageio
import numpy as np
from PIL import Image, ImageDraw, ImageFont

FRAMES, WIDTH, LABEL = 6, 200, 22


def row(video: Path, name: str) -> Image.Image:
    """Frames at equal distances, from the first to the last, below a name; without the video's own caption."""
    frames = np.stack(list(imageio.imiter(video)))
    chosen = frames[np.linspace(0, len(frames) - 1, FRAMES).round().astype(int), : frames.shape[2]]
    strip = Image.new("RGB", (FRAMES * WIDTH, WIDTH + LABEL), "white")
    for index, frame in enumerate(chosen):
        strip.paste(Image.fromarray(frame).resize((WIDTH - 2, WIDTH - 2)), (index * WIDTH, LABEL))
    ImageDraw.Draw(strip).text((2, 3), name, "black", ImageFont.load_default(15))
    return strip


def main() -> None:
    """Rows of the videos that are named, in one picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("videos", type=Path, nargs="+")
    parser.add_argument("--names", nargs="+", required=True)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "headline_strip.jpg")
    arguments = parser.parse_args()
    rows = [row(video, name) for video, name in zip(arguments.videos, arguments.names, strict=True)]
    whole = Image.new("RGB", (rows[0].width, sum(one.height for one in rows)), "white")
    for index, one in enumerate(rows):
        whole.paste(one, (0, index * one.height))
    whole.save(arguments.out, quality=88)


if __name__ == "__main__":
    main()
