"""Makes f1_alignment.png in this folder, with frames of the tabletop: `python docs/pictures/f1_alignment.py`."""

from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from deft.envs.f1 import StudentEnv
from deft.envs.history import prediction_pair

FRAME, GAP, LEFT, TOP = 132, 34, 150, 78
INK, FAINT, GIVEN, WANTED = "#20242a", "#8a929c", "#2b6cb0", "#c05621"


def font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    """Pillow's own."""
    return ImageFont.load_default(size)


def main() -> None:
    """Four frames and four actions, and the frame that they predict."""
    env = StudentEnv({"task_name": "pick", "control_mode": "delta_ee", "image_size": FRAME, "max_steps": 99})
    observation, _ = env.reset(seed=3)
    for _ in range(7):
        observation, *_ = env.step(env.expert_action())
    action = env.expert_action()
    next_observation, *_ = env.step(action)
    inputs, target = prediction_pair(observation, action, next_observation)

    columns = [LEFT + index * (FRAME + GAP) for index in range(5)]
    picture = Image.new("RGB", (columns[-1] + FRAME + 24, 380), "white")
    draw = ImageDraw.Draw(picture)
    for index, (x, time) in enumerate(zip(columns, ("t-3", "t-2", "t-1", "t", "t+1"), strict=True)):
        is_target = index == 4
        draw.text((x + FRAME // 2, 34), time, INK, font(20), anchor="mm")
        frame = target if is_target else inputs["wrist_rgb"][index]
        picture.paste(Image.fromarray(np.ascontiguousarray(frame.transpose(1, 2, 0))), (x, TOP))
        draw.rectangle(
            (x - 3, TOP - 3, x + FRAME + 2, TOP + FRAME + 2), outline=WANTED if is_target else GIVEN, width=3
        )
        name = "img(t+1)" if is_target else f"img({time})"
        draw.text((x + FRAME // 2, TOP + FRAME + 18), name, WANTED if is_target else GIVEN, font(17), anchor="mm")
        if is_target:
            continue
        y = TOP + FRAME + 74
        draw.rounded_rectangle((x + 30, y - 18, x + FRAME - 30, y + 18), 8, outline=GIVEN, width=3)
        draw.text((x + FRAME // 2, y), f"a({time})", GIVEN, font(17), anchor="mm")
        # An action leads from the frame above it to the next one.
        end = (columns[index + 1] - 8, TOP + FRAME - 8)
        draw.line((x + FRAME - 28, y - 10, *end), fill=FAINT, width=2)
        draw.polygon((end, (end[0] - 11, end[1] + 3), (end[0] - 4, end[1] + 11)), fill=FAINT)
    draw.text((24, TOP + FRAME // 2), "wrist_rgb", INK, font(19), anchor="lm")
    draw.text((24, TOP + FRAME + 74), "actions", INK, font(19), anchor="lm")
    y = TOP + FRAME + 118
    draw.line((columns[0], y, columns[3] + FRAME, y), fill=GIVEN, width=3)
    for x in (columns[0], columns[3] + FRAME):
        draw.line((x, y - 8, x, y), fill=GIVEN, width=3)
    middle = (columns[0] + columns[3] + FRAME) // 2
    draw.text((middle, y + 24), "observation t, and the action taken in it", GIVEN, font(19), anchor="mm")
    draw.text((columns[4] + FRAME // 2, y + 24), "predicted", WANTED, font(19), anchor="mm")
    picture.save(Path(__file__).with_name("f1_alignment.png"), optimize=True)


if __name__ == "__main__":
    main()
