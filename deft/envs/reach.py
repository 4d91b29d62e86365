"""A two-link robot arm on a table, seen from above, with an instruction that names the coloured target to reach.

Plain Python and numpy, no renderer to install. `deft.envs` registers it as `deft/Reach-v0`; an MLP solves its "state"
observation, and its "vla" observation (image, proprioception, instruction) tests the whole vision-language path. The
whole state is in plain attributes (numbers, arrays, `np_random`), so that a saved state continues bit for bit.
"""

from __future__ import annotations

import cmath
import math
from functools import cache, lru_cache
from typing import Any, Literal

import gymnasium
import numpy as np
from gymnasium import spaces

from deft.envs.checks import check_choice, check_render_mode, check_whole
from deft.envs.spaces import LETTERS, action_space, image_space, vector_space
from deft.errors import RunError

UPPER_ARM = 0.48  # link lengths and positions are in metres, with the shoulder at (0, 0)
FOREARM = 0.42
SHOULDER_LIMITS = (-0.8, math.pi + 0.8)
ELBOW_LIMITS = (-2.6, 2.6)
MAX_JOINT_STEP = 0.1  # radians a joint turns in one step at action 1

TARGET_RADIUS = 0.1  # the fingertip reaches a target when it is over its disc
# Within these bounds both elbow sides reach every target inside the joint limits: at distance 0.4 the elbow bends by
# 2.23 and the upper arm points 0.98 beside the target's direction, so the shoulder stays within 0.26 - 0.98 = -0.72.
TARGET_ANGLES = (0.26, math.pi - 0.26)
TARGET_DISTANCES = (0.4, 0.8)
START_SHOULDER = (0.3 * math.pi, 0.7 * math.pi)
START_ELBOW = (0.6, 1.9)  # bent to either side
START_GAP = 0.28  # from the fingertip to every target at reset
TARGET_GAP = 0.32  # between the centres of two targets
PATH_GAP = 0.22  # from the way to one target to every other target
MIDDLE_DISTANCE = 0.6
MAX_TARGETS = 3  # more of them rarely fit without lying in each other's way

PROGRESS_WEIGHT = 2.0  # per metre that the fingertip comes closer
CONTROL_WEIGHT = 0.005
REACHED_REWARD = 1.0

TARGET_COLOURS = {"red": (214, 48, 49), "green": (39, 158, 80), "blue": (41, 98, 214), "yellow": (246, 196, 30)}
COLOUR_NAMES = tuple(TARGET_COLOURS)
INSTRUCTION = "reach the {} target"

VIEW_SIZE = 1.8  # the side of the square that the camera sees
VIEW_LEFT, VIEW_TOP = -0.9, 1.08
RENDER_SIZE = 256

ZERO, ONE = np.zeros((), np.float32), np.ones((), np.float32)  # quicker than Python numbers where arrays are small

Colour = tuple[float, float, float]
WOOD_COLOUR: Colour = (203, 178, 146)
BASE_COLOUR: Colour = (52, 58, 66)
LINK_COLOUR: Colour = (232, 234, 237)
LINK_EDGE_COLOUR: Colour = (128, 134, 142)
JOINT_COLOUR: Colour = (74, 82, 92)
CAP_COLOUR: Colour = (158, 166, 175)
GRIPPER_COLOUR: Colour = (33, 37, 43)
RING_COLOUR: Colour = (255, 255, 255)
SHADOW_COLOUR: Colour = (40, 28, 18)


class ReachEnv(gymnasium.Env[Any, np.ndarray]):
    """Move the fingertip to the target whose colour the instruction names; touching another target is a failure.

    Action: the two joints' velocities, as fractions of `MAX_JOINT_STEP`. An episode terminates at a target;
    `info["success"]` is whether it was the right one. Dense reward, each term in `info["reward_terms"]`:
    distance (progress towards the target), control (−cost of the action), success (+1) and wrong_target (−1). Sparse
    reward: 1 when the right target is reached, else 0.
    """

    metadata = {"render_modes": ["rgb_array"], "render_fps": 10}  # noqa: RUF012 (Gymnasium's own declaration)

    def __init__(
        self,
        observation: Literal["state", "vla"] = "state",
        image_size: int = 64,
        render_mode: Literal["rgb_array"] | None = None,
        reward: Literal["dense", "sparse"] = "dense",
        num_targets: int = 2,
    ) -> None:
        """Choose the observation ("state" or "vla"), the reward, and the number of targets on the table."""
        check_choice("observation", observation, ("state", "vla"))
        check_choice("reward", reward, ("dense", "sparse"))
        check_render_mode(render_mode)
        check_whole("num_targets", num_targets, 1, MAX_TARGETS)
        check_whole("image_size", image_size, 16)
        self.observation = observation
        self.image_size = image_size
        self.render_mode = render_mode
        self.reward = reward
        self.reward_terms = ("success", *(("distance", "control", "wrong_target") if reward == "dense" else ()))
        self.num_targets = num_targets

        self.action_space = action_space(2)
        if observation == "state":
            self.observation_space = vector_space(8 + 2 * num_targets, 2.0)
        else:
            instruction = spaces.Text(max_length=32, charset=LETTERS)
            streams = {"rgb": image_space(image_size), "proprio": vector_space(8, 2.0), "instruction": instruction}
            self.observation_space = spaces.Dict(streams)

        self.shoulder = math.pi / 2
        self.elbow = 1.0
        self.shoulder_velocity = 0.0  # the motion of the joint in the last step, as a fraction of MAX_JOINT_STEP
        self.elbow_velocity = 0.0
        self.tip_x, self.tip_y = fingertip(self.shoulder, self.elbow)
        self.target_positions = np.zeros((num_targets, 2))
        self.target_colours = np.arange(num_targets)  # indices into COLOUR_NAMES
        self.target_index = 0  # the one that the instruction names

    @property
    def instruction(self) -> str:
        """The instruction to the robot."""
        return INSTRUCTION.format(COLOUR_NAMES[self.target_colours[self.target_index]])

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Draw a posture, positions and colours of the targets, and the target to reach."""
        super().reset(seed=seed)
        random = self.np_random
        self.shoulder_velocity = self.elbow_velocity = 0.0
        placed = False
        while not placed:
            self.shoulder = float(random.uniform(*START_SHOULDER))
            self.elbow = float(random.uniform(*START_ELBOW)) * (1 if random.random() < 0.5 else -1)
            self.tip_x, self.tip_y = fingertip(self.shoulder, self.elbow)
            placed = self._place_targets()
        self.target_colours = random.permutation(len(COLOUR_NAMES))[: self.num_targets]
        self.target_index = int(random.integers(self.num_targets))
        return self._observe(), {"success": False}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Turn both joints, then compute the reward and whether the fingertip touches a target."""
        shoulder_command, elbow_command = float(action[0]), float(action[1])
        if math.isnan(shoulder_command) or math.isnan(elbow_command):
            raise RunError(f"action is {action}; it must be two numbers")
        shoulder_command = min(max(shoulder_command, -1.0), 1.0)
        elbow_command = min(max(elbow_command, -1.0), 1.0)

        targets = self.target_positions.tolist()
        target_x, target_y = targets[self.target_index]
        distance_before = math.hypot(target_x - self.tip_x, target_y - self.tip_y)

        shoulder = min(max(self.shoulder + MAX_JOINT_STEP * shoulder_command, SHOULDER_LIMITS[0]), SHOULDER_LIMITS[1])
        elbow = min(max(self.elbow + MAX_JOINT_STEP * elbow_command, ELBOW_LIMITS[0]), ELBOW_LIMITS[1])
        self.shoulder_velocity = (shoulder - self.shoulder) / MAX_JOINT_STEP
        self.elbow_velocity = (elbow - self.elbow) / MAX_JOINT_STEP
        self.shoulder, self.elbow = shoulder, elbow
        self.tip_x, self.tip_y = tip_x, tip_y = fingertip(shoulder, elbow)

        distance = math.hypot(target_x - tip_x, target_y - tip_y)
        success = distance < TARGET_RADIUS
        wrong_target = not success and any(math.hypot(x - tip_x, y - tip_y) < TARGET_RADIUS for x, y in targets)
        terms = {"success": REACHED_REWARD if success else 0.0}
        if self.reward == "dense":
            terms["distance"] = PROGRESS_WEIGHT * (distance_before - distance)
            terms["control"] = -CONTROL_WEIGHT * (shoulder_command * shoulder_command + elbow_command * elbow_command)
            terms["wrong_target"] = -REACHED_REWARD if wrong_target else 0.0
        info = {"success": success, "reward_terms": terms}
        return self._observe(), sum(terms.values()), success or wrong_target, False, info

    def render(self) -> np.ndarray | None:
        """Return an image for videos, uint8 [h, w, 3], with a ring around the named target."""
        if self.render_mode is None:
            return None
        return np.ascontiguousarray(self._draw(RENDER_SIZE, detailed=True).transpose(1, 2, 0))

    def expert_action(self) -> np.ndarray:
        """Return a scripted action towards the named target: inverse kinematics, with the elbow on its present side."""
        x, y = self.target_positions[self.target_index].tolist()
        # Law of cosines: |target|² = upper² + forearm² + 2 · upper · forearm · cos(elbow)
        cosine = (x * x + y * y - UPPER_ARM**2 - FOREARM**2) / (2 * UPPER_ARM * FOREARM)
        elbow = math.copysign(math.acos(cosine), self.elbow)
        shoulder = math.atan2(y, x) - math.atan2(FOREARM * math.sin(elbow), UPPER_ARM + FOREARM * math.cos(elbow))
        steps = np.array([shoulder - self.shoulder, elbow - self.elbow], np.float32) / MAX_JOINT_STEP
        return steps / max(1.0, float(np.abs(steps).max()))

    def _place_targets(self) -> bool:
        """Draw target positions; False if they are too close to the fingertip, each other, or each other's path.

        The rules are equal for all targets, so that the image does not show which one the instruction will name.
        """
        angles = self.np_random.uniform(*TARGET_ANGLES, self.num_targets)
        distances = self.np_random.uniform(*TARGET_DISTANCES, self.num_targets)
        self.target_positions = np.stack([distances * np.cos(angles), distances * np.sin(angles)], axis=1)
        tip = (self.tip_x, self.tip_y)
        positions = self.target_positions.tolist()
        start = _unrolled(*tip)
        unrolled = [_unrolled(x, y) for x, y in positions]
        return (
            all(math.dist(position, tip) > START_GAP for position in positions)
            and all(math.dist(a, b) > TARGET_GAP for i, a in enumerate(positions) for b in positions[:i])
            and all(_gap(a, start, b) > PATH_GAP for a in unrolled for b in unrolled if a is not b)
        )

    def _observe(self) -> Any:
        tip_x, tip_y = self.tip_x, self.tip_y
        values = [math.cos(self.shoulder), math.sin(self.shoulder), math.cos(self.elbow), math.sin(self.elbow)]
        values += (self.shoulder_velocity, self.elbow_velocity, tip_x, tip_y)
        if self.observation == "vla":
            return {
                "rgb": self._draw(self.image_size, detailed=False),
                "proprio": np.array(values, np.float32),
                "instruction": self.instruction,
            }
        targets = self.target_positions.tolist()
        targets.insert(0, targets.pop(self.target_index))  # the named one first, so that no instruction is needed
        for x, y in targets:
            values += (x - tip_x, y - tip_y)
        return np.array(values, np.float32)

    def _draw(self, size: int, detailed: bool) -> np.ndarray:
        """Draw the table from above, uint8 [3, size, size]; `detailed` adds shadows, edges and the ring."""
        targets = tuple(complex(x, y) for x, y in self.target_positions.tolist())
        colours = tuple(TARGET_COLOURS[COLOUR_NAMES[index]] for index in self.target_colours.tolist())
        elbow = cmath.rect(UPPER_ARM, self.shoulder)
        tip = complex(self.tip_x, self.tip_y)
        forward = (tip - elbow) / FOREARM
        wrist = tip - 0.1 * forward
        if not detailed:
            canvas = _Canvas(_table_with_targets(size, targets, colours).copy())
            canvas.capsule(0j, elbow, 0.05, 0.05, LINK_COLOUR)
            canvas.capsule(wrist, tip, 0.03, 0.03, GRIPPER_COLOUR)
            canvas.capsule(elbow, wrist, 0.035, 0.035, LINK_COLOUR)
            return canvas.pixels.astype(np.uint8)

        canvas = _Canvas(_table(size).copy())
        for position, colour in zip(targets, colours, strict=True):
            canvas.disc(position + 0.01 - 0.012j, TARGET_RADIUS + 0.006, SHADOW_COLOUR, 0.35, blur=0.05)
            canvas.disc(position, TARGET_RADIUS, _mix(colour, (0, 0, 0), 0.3))
            canvas.disc(position, TARGET_RADIUS - 0.012, colour)
            canvas.disc(position, TARGET_RADIUS - 0.036, _mix(colour, (255, 255, 255), 0.18))
        canvas.ring(targets[self.target_index], TARGET_RADIUS + 0.035, 0.007, RING_COLOUR)
        for start, end, shift in ((0j, elbow, 0.03 - 0.03j), (elbow, wrist, 0.045 - 0.045j)):
            canvas.capsule(start + shift, end + shift, 0.05, 0.04, SHADOW_COLOUR, 0.3, blur=0.1)
        canvas.capsule(0j, elbow, 0.062, 0.052, LINK_EDGE_COLOUR)
        canvas.capsule(0j, elbow, 0.053, 0.043, LINK_COLOUR)
        palm, side = tip - 0.08 * forward, 0.04j * forward
        canvas.capsule(palm - side, palm + side, 0.02, 0.02, GRIPPER_COLOUR)
        for finger in (-side, side):
            canvas.capsule(palm + finger, tip + finger + 0.015 * forward, 0.017, 0.011, GRIPPER_COLOUR)
        canvas.capsule(elbow, wrist, 0.051, 0.038, LINK_EDGE_COLOUR)
        canvas.capsule(elbow, wrist, 0.042, 0.029, LINK_COLOUR)
        for joint, radius in ((0j, 0.045), (elbow, 0.034), (wrist, 0.022)):
            canvas.disc(joint, radius, JOINT_COLOUR)
            canvas.disc(joint, 0.55 * radius, CAP_COLOUR)
        return canvas.pixels.astype(np.uint8)


def fingertip(shoulder: float, elbow: float) -> tuple[float, float]:
    """Return the position of the fingertip for two joint angles (forward kinematics)."""
    return (
        UPPER_ARM * math.cos(shoulder) + FOREARM * math.cos(shoulder + elbow),
        UPPER_ARM * math.sin(shoulder) + FOREARM * math.sin(shoulder + elbow),
    )


def _unrolled(x: float, y: float) -> tuple[float, float]:
    """Transform a point to a plane in which the fingertip's arcs around the shoulder are straight lines."""
    return MIDDLE_DISTANCE * math.atan2(y, x), math.hypot(x, y)


def _gap(point: tuple[float, float], start: tuple[float, float], end: tuple[float, float]) -> float:
    """Return the distance from a point to the segment between two others."""
    along_x, along_y = end[0] - start[0], end[1] - start[1]
    dot = (point[0] - start[0]) * along_x + (point[1] - start[1]) * along_y
    part = min(max(dot / (along_x * along_x + along_y * along_y), 0.0), 1.0)
    return math.hypot(point[0] - start[0] - part * along_x, point[1] - start[1] - part * along_y)


def _mix(colour: Colour, other: Colour, part: float) -> Colour:
    red, green, blue = ((1 - part) * a + part * b for a, b in zip(colour, other, strict=True))
    return red, green, blue


@cache
def _pixel_centres(size: int) -> np.ndarray:
    """Return the position of each pixel's centre on the table as complex numbers x + iy in pixels; read-only."""
    scale = size / VIEW_SIZE
    centres = np.arange(size) + 0.5
    grid = ((VIEW_LEFT * scale + centres) + 1j * (VIEW_TOP * scale - centres)[:, None]).astype(np.complex64)
    grid.flags.writeable = False
    return grid


@cache
def _colour_column(colour: Colour) -> np.ndarray:
    return (np.array(colour, np.float32) + np.float32(0.5)).reshape(3, 1, 1)


class _Canvas:
    """Draws antialiased shapes on the table; each shape changes only the pixels around it.

    Positions are complex numbers x + iy in metres: a multiplication rotates them, `abs` gives distances.
    """

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels  # float32 [3, size, size] with 0.5 added, so that the conversion to uint8 rounds
        self.scale = pixels.shape[1] / VIEW_SIZE
        self.centres = _pixel_centres(pixels.shape[1])

    def disc(self, position: complex, radius: float, colour: Colour, opacity: float = 1.0, blur: float = 0.0) -> None:
        """Draw a filled circle; `blur` is the width of its edge."""
        box = self._box(position, position, radius + blur)
        distance = np.abs(self.centres[box] - position * self.scale)
        self._blend(box, radius * self.scale - distance, colour, opacity, blur)

    def ring(self, position: complex, radius: float, half_width: float, colour: Colour) -> None:
        """Draw a circle as a line."""
        box = self._box(position, position, radius + half_width)
        distance = np.abs(self.centres[box] - position * self.scale)
        self._blend(box, half_width * self.scale - np.abs(distance - radius * self.scale), colour)

    def capsule(
        self,
        start: complex,
        end: complex,
        radius: float,
        end_radius: float,
        colour: Colour,
        opacity: float = 1.0,
        blur: float = 0.0,
    ) -> None:
        """Draw a thick line with round ends, with a radius at each end."""
        box = self._box(start, end, max(radius, end_radius) + blur)
        length = abs(end - start)
        turned = (self.centres[box] - start * self.scale) * ((end - start).conjugate() / length)  # the line lies on x
        along = np.minimum(np.maximum(turned.real, 0.0), length * self.scale)
        inside = radius * self.scale - np.abs(turned - along)
        if radius != end_radius:
            inside += along * ((end_radius - radius) / length)
        self._blend(box, inside, colour, opacity, blur)

    def _box(self, start: complex, end: complex, margin: float) -> tuple[slice, slice]:
        """Return the rows and columns of a shape."""
        scale, margin = self.scale, margin + 1.0 / self.scale  # one more pixel for the smooth edge
        top = (VIEW_TOP - max(start.imag, end.imag) - margin) * scale
        bottom = (VIEW_TOP - min(start.imag, end.imag) + margin) * scale
        left = (min(start.real, end.real) - margin - VIEW_LEFT) * scale
        right = (max(start.real, end.real) + margin - VIEW_LEFT) * scale
        # A negative bound would count from the other side of the image.
        return slice(max(int(top), 0), max(int(bottom) + 1, 0)), slice(max(int(left), 0), max(int(right) + 1, 0))

    def _blend(
        self, box: tuple[slice, slice], inside: np.ndarray, colour: Colour, opacity: float = 1.0, blur: float = 0.0
    ) -> None:
        """Draw where `inside`, the pixels' depth within the shape, is positive; the edge has the width `blur`."""
        if blur:
            inside /= blur * self.scale
        inside += 0.5
        coverage = np.minimum(np.maximum(inside, ZERO, out=inside), ONE, out=inside)
        if opacity != 1.0:
            coverage *= opacity
        region = self.pixels[:, box[0], box[1]]
        region += (_colour_column(colour) - region) * coverage


@cache
def _table(size: int) -> np.ndarray:
    """Draw a table of planks with the robot's base, float32 [3, size, size]; read-only."""
    positions = _pixel_centres(size) * (VIEW_SIZE / size)
    planks = (VIEW_TOP - positions.imag) / 0.225
    plank = np.floor(planks)
    waves = np.sin(55 * positions.imag + 3 * np.sin(2.1 * positions.real + 1.7 * plank))
    tone = 6.0 * np.sin(2.4 * plank) + 2.5 * waves
    tone -= 16.0 * (np.abs(planks - np.round(planks)) < 0.02)  # the gaps between planks
    tone -= 14.0 * np.abs(positions - 0.2j) ** 2  # light falls off towards the corners
    canvas = _Canvas((_colour_column(WOOD_COLOUR) + tone).astype(np.float32))
    canvas.disc(0.015 - 0.018j, 0.14, SHADOW_COLOUR, 0.4, blur=0.05)
    canvas.disc(0j, 0.13, BASE_COLOUR)
    canvas.ring(0j, 0.121, 0.005, JOINT_COLOUR)
    for quarter in range(4):
        canvas.disc(cmath.rect(0.1, math.pi * (0.25 + 0.5 * quarter)), 0.012, CAP_COLOUR)
    canvas.pixels.flags.writeable = False
    return canvas.pixels


@lru_cache(maxsize=32)  # targets do not move during an episode
def _table_with_targets(size: int, targets: tuple[complex, ...], colours: tuple[Colour, ...]) -> np.ndarray:
    canvas = _Canvas(_table(size).copy())
    for position, colour in zip(targets, colours, strict=True):
        canvas.disc(position, TARGET_RADIUS, colour)
    canvas.pixels.flags.writeable = False
    return canvas.pixels
