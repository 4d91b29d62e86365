"""Objects, their positions and their appearance: a scene as plain data, drawn from a seed.

`TabletopEnv` draws one, `model.py` compiles it. A scene holds only numbers and text, so that it can be saved in a
checkpoint and compiles to the same model and images again.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from itertools import combinations, permutations
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter

from deft.config.validation import Fraction, NonNegative, Switch, settings
from deft.envs.tabletop import textures

# The table in metres: x away from the robot, whose base is the origin; its top is at z = -table_drop.
TABLE_X = (0.20, 0.80)
TABLE_Y = (-0.42, 0.42)
OBJECT_X = (0.33, 0.64)  # initial positions of the objects of a task
OBJECT_Y = (-0.28, 0.28)
OBJECT_REACH = 0.68  # from the robot's axis, so that the hand can point down
OBJECT_GAP = 0.15  # between the centres of two task objects: room for an open gripper
CLUTTER_GAP = 0.11  # from a task object to clutter
MAX_CLUTTER = 12
AREA_RADIUS = 0.06  # of the marked area of the push task
NOISE_TILES = 5  # per side of the patch with unpredictable colours
NOISE_SIDE = 0.26  # metres
NOISE_X, NOISE_Y = (0.40, 0.56), (-0.14, 0.14)  # its middle, within the initial view of the wrist camera

COLOURS = {
    "red": (0.83, 0.10, 0.09),
    "green": (0.10, 0.58, 0.18),
    "blue": (0.10, 0.25, 0.85),
    "yellow": (0.95, 0.78, 0.06),
    "purple": (0.50, 0.14, 0.62),
    "orange": (0.96, 0.45, 0.05),
}
# Combinations that are never in training (`split: train`) and that `split: held-out` names: one of the two kinds of a
# colour, so that each split always has the other.
HELD_OUT = {"red": "cylinder", "green": "cube", "yellow": "cylinder", "purple": "cube"}
# Half sizes as in MuJoCo: a box x, y, z; a cylinder and a capsule radius, half length; a sphere radius.
TASK_SHAPES = {"cube": ("box", (0.025, 0.025, 0.025)), "cylinder": ("cylinder", (0.024, 0.028))}
# Smallest and largest half sizes of the clutter.
CLUTTER_SIZES = {
    "box": ([0.012, 0.012, 0.010], [0.040, 0.030, 0.025]),
    "cylinder": ([0.014, 0.010], [0.032, 0.025]),
    "sphere": ([0.014], [0.025]),
    "capsule": ([0.010, 0.015], [0.018, 0.035]),
}

Vector = tuple[float, ...]


@settings
class DomainRandomization:
    """What varies between scenes; all off by default. The names are those of the F1 and RoboTwin settings."""

    random_appearance: Switch = False
    """Shades, sizes and gloss of the objects, and the robot's shell."""
    random_background: Switch = False
    """Textures and tints of table, walls and floor."""
    random_light: Switch = False
    """Position, colour and number of the lights."""
    cluttered_table: Switch = False
    """0 to 12 further objects: boxes, cylinders, spheres, capsules."""
    clean_background_rate: Fraction = 0.02
    """Fraction of the scenes with the plain background."""
    random_head_camera_dis: Annotated[NonNegative, Field(le=0.3)] = 0.0
    """Largest displacement of the head camera, in metres."""
    random_table_height: Annotated[NonNegative, Field(le=0.05)] = 0.0
    """Largest lowering of the table, in metres."""
    crazy_random_light_rate: Fraction = 0.02
    """Fraction of the scenes with random light in which the light has another colour in every step."""
    noise_patch_rate: Fraction = 0.0
    """Fraction of the scenes with a patch on the table whose tiles have random colours in every step."""
    short_name_rate: Fraction = 0.0
    """Fraction of the names in instructions that are a colour ("red one") or, if only one object has it, a kind
    ("cylinder")."""


@dataclass
class SceneObject:
    """A movable object on the table."""

    shape: str  # box, cylinder, sphere or capsule
    size: Vector
    rgba: Vector
    place: Vector  # the position x, y
    quaternion: Vector
    mass: float
    name: str = ""  # "red cube" for a task's object
    gloss: float = 0.3

    @property
    def half_height(self) -> float:
        """From its centre to the table, in its initial orientation."""
        if self.shape == "box":
            return self.size[2]
        return self.size[1] if self.shape == "cylinder" else self.size[0]

    @property
    def half_width(self) -> float:
        """Half of the opening that a gripper needs."""
        return self.size[0]

    @property
    def radius(self) -> float:
        """Radius of the circle around its footprint."""
        if self.shape == "box":
            return math.hypot(self.size[0], self.size[1])
        return self.size[0] + (self.size[1] if self.shape == "capsule" else 0.0)


@dataclass
class Surface:
    """The appearance of table, wall or floor."""

    texture: int
    is_fine: bool = False  # the texture repeats three times as often
    tint: Vector = (1.0, 1.0, 1.0)


@dataclass
class Light:
    """One lamp."""

    position: Vector
    target: Vector
    colour: Vector


@dataclass
class Scene:
    """Everything except the robot's posture."""

    seed: int
    objects: list[SceneObject]
    """The objects of the task."""
    clutter: list[SceneObject] = field(default_factory=list)
    area: Vector | None = None
    """The centre of the push task's marked area."""
    table: Surface = field(default_factory=lambda: Surface(textures.WOOD))
    walls: Surface = field(default_factory=lambda: Surface(textures.PLASTER))
    floor: Surface = field(default_factory=lambda: Surface(textures.CONCRETE))
    lights: list[Light] = field(default_factory=lambda: [Light((0.8, -0.8, 1.8), (0.35, 0.0, 0.1), (0.55, 0.55, 0.53))])
    ambient: float = 0.42
    flickers: bool = False
    shell: Vector = (0.92, 0.93, 0.94)
    table_drop: float = 0.0
    head_camera_shift: Vector = (0.0, 0.0, 0.0)
    noise_patch: Vector | None = None
    """The centre of the noise patch."""

    @property
    def everything(self) -> list[SceneObject]:
        """Task objects, then clutter: the order of the bodies in the model."""
        return [*self.objects, *self.clutter]

    def named(self, split: str) -> list[int]:
        """Return the objects that an instruction may name: with `held-out` those that are not in training."""
        return [index for index, item in enumerate(self.objects) if split != "held-out" or is_held_out(item.name)]

    def short_names(self, index: int) -> list[str]:
        """Return shorter names of an object that name it alone: its colour, and its kind if no other object has it."""
        colour, _, kind = self.objects[index].name.partition(" ")
        has_others = self.clutter or sum(item.name.endswith(f" {kind}") for item in self.objects) > 1
        return [f"{colour} one"] if has_others else [f"{colour} one", kind]

    def as_data(self) -> dict[str, Any]:
        """Return plain data for a checkpoint."""
        return dataclasses.asdict(self)

    @classmethod
    def from_data(cls, data: dict[str, Any]) -> Scene:
        """Return the scene of the result of `as_data`."""
        return TypeAdapter(cls).validate_python(data)


def is_held_out(name: str) -> bool:
    """Return whether a name such as "red cylinder" is one of the held-out combinations."""
    colour, _, kind = name.partition(" ")
    return HELD_OUT.get(colour) == kind


def draw_scene(
    seed: int, num_objects: int, has_area: bool, randomization: DomainRandomization, split: str = "all"
) -> Scene | None:
    """Draw the scene of a seed; None if there is none, and another seed has to be tried.

    The scene does not depend on the object that the instruction will name: all objects follow the same rules. The
    splits differ only in the kinds of objects; with `held-out` at least one is a held-out combination.
    """
    random = np.random.default_rng([seed, 1])
    objects = _task_objects(random, num_objects, randomization.random_appearance, split)
    if split == "held-out" and not any(is_held_out(item.name) for item in objects):
        return None
    area = _set_task_positions(random, objects, has_area)
    if area is None:
        return None
    scene = Scene(seed, objects, area=area or None)
    if randomization.cluttered_table:
        random = np.random.default_rng([seed, 2])
        scene.clutter = _clutter(random, scene)
    random = np.random.default_rng([seed, 3])
    if randomization.random_background and random.random() >= randomization.clean_background_rate:
        scene.table, scene.walls, scene.floor = (_surface(random) for _ in range(3))
    random = np.random.default_rng([seed, 4])
    if randomization.random_light:
        scene.lights = [_light(random) for _ in range(random.integers(1, 4))]
        scene.ambient = float(random.uniform(0.25, 0.5))
        scene.flickers = bool(random.random() < randomization.crazy_random_light_rate)
    random = np.random.default_rng([seed, 5])
    if randomization.random_appearance:
        scene.shell = _rounded(np.array([0.85, 0.86, 0.88]) + random.uniform(-0.15, 0.12, 3))
    if randomization.random_table_height:
        scene.table_drop = float(random.uniform(0, randomization.random_table_height))
    if randomization.random_head_camera_dis:
        direction = random.normal(size=3)
        distance = random.uniform(0, randomization.random_head_camera_dis)
        scene.head_camera_shift = _rounded(distance * direction / np.linalg.norm(direction))
    random = np.random.default_rng([seed, 7])
    if random.random() < randomization.noise_patch_rate:
        scene.noise_patch = _rounded([random.uniform(*NOISE_X), random.uniform(*NOISE_Y)])
    return scene


def flicker(scene: Scene, step: int) -> np.ndarray:
    """Return the colours of the lights in one step of a scene with flickering light, [lights, 3]."""
    return np.random.default_rng([scene.seed, 6, step]).uniform(0.1, 0.9, (len(scene.lights), 3))


def noise_colours(scene: Scene, step: int) -> np.ndarray:
    """Return the colours of the noise patch's tiles in one step, [tiles, 3]; they are independent between steps."""
    return np.random.default_rng([scene.seed, 8, step]).uniform(0.0, 1.0, (NOISE_TILES**2, 3))


def distance_to_segment(point: Vector, start: Vector, end: Vector) -> float:
    """Return the distance from a point to a segment in the plane."""
    along_x, along_y = end[0] - start[0], end[1] - start[1]
    length = along_x * along_x + along_y * along_y
    dot = (point[0] - start[0]) * along_x + (point[1] - start[1]) * along_y
    part = min(max(dot / length, 0.0), 1.0) if length else 0.0
    return math.hypot(point[0] - start[0] - part * along_x, point[1] - start[1] - part * along_y)


def push_start(position: Vector, area: Vector, distance: float) -> Vector:
    """Return the point `distance` behind an object, opposite to the area, from which it is pushed straight into it."""
    length = math.dist(position, area)
    return tuple(p - distance * (a - p) / length for p, a in zip(position, area, strict=True))


def _rounded(values: Any) -> Vector:
    return tuple(round(float(value), 4) for value in values)


def _yaw(angle: float) -> Vector:
    return (math.cos(angle / 2), 0.0, 0.0, math.sin(angle / 2))


def _task_objects(random: np.random.Generator, count: int, varies: bool, split: str) -> list[SceneObject]:
    names = random.permutation(list(COLOURS))[:count]
    objects = []
    for colour in names:
        kind = "cube" if random.random() < 0.6 else "cylinder"
        if split != "all" and colour in HELD_OUT:
            unseen = HELD_OUT[str(colour)]
            kind = unseen if split == "held-out" else next(name for name in TASK_SHAPES if name != unseen)
        shape, size = TASK_SHAPES[kind]
        shade, scale, gloss = random.uniform(0.8, 1.15), random.uniform(0.88, 1.08), random.random()
        if not varies:  # drawn anyway, so that the positions do not depend on it
            shade, scale, gloss = 1.0, 1.0, 0.3
        rgb = np.clip(np.array(COLOURS[str(colour)]) * shade, 0, 1)
        objects.append(
            SceneObject(
                shape,
                _rounded(scale * np.array(size)),
                (*_rounded(rgb), 1.0),
                (0.0, 0.0),
                _yaw(float(random.uniform(-math.pi / 4, math.pi / 4))),
                0.1,
                f"{colour} {kind}",
                float(gloss),
            )
        )
    return objects


def _draw_position(random: np.random.Generator) -> Vector:
    while True:
        position = (float(random.uniform(*OBJECT_X)), float(random.uniform(*OBJECT_Y)))
        if math.hypot(*position) < OBJECT_REACH:
            return position


def _set_task_positions(random: np.random.Generator, objects: list[SceneObject], has_area: bool) -> Vector | None:
    """Set the position of each object; return the area's, () without an area, None if there is no solution."""
    for _ in range(100):
        positions = [_draw_position(random) for _ in objects]
        if not _have_room(positions, ()):
            continue
        area = _draw_position(random) if has_area else ()
        if _have_room(positions, area):
            break
    else:
        area, positions = _draw_one_by_one(random, len(objects)) if has_area else ((), [])
        if not positions:
            return None
    for item, position in zip(objects, positions, strict=True):
        item.place = position
    return area


def _draw_one_by_one(random: np.random.Generator, count: int) -> tuple[Vector, list[Vector]]:
    """Draw an area, and for many objects each position until it fits the previous ones; () and [] without success."""
    for _ in range(100):
        area = _draw_position(random)
        positions: list[Vector] = []
        for _ in range(200):
            position = _draw_position(random)
            if _have_room([*positions, position], area):
                positions.append(position)
            if len(positions) == count:
                return area, positions
    return (), []


def _have_room(positions: list[Vector], area: Vector) -> bool:
    """Return whether the objects are apart and, with an area, each can be pushed straight into it past the others."""
    if any(math.dist(a, b) < OBJECT_GAP for a, b in combinations(positions, 2)):
        return False
    if not area:
        return True
    ways = [(push_start(position, area, 0.10), area) for position in positions]
    return (
        all(0.14 < math.dist(position, area) < 0.28 for position in positions)
        and all(_is_reachable(start) for start, _ in ways)
        and all(
            distance_to_segment(positions[one], *ways[other]) > 0.11
            for one, other in permutations(range(len(positions)), 2)
        )
    )


def _is_reachable(position: Vector) -> bool:
    return 0.28 < position[0] < 0.74 and abs(position[1]) < 0.37 and math.hypot(*position) < 0.72


def _clutter(random: np.random.Generator, scene: Scene) -> list[SceneObject]:
    """Draw 0 to 12 objects and keep those that have room, away from the task's objects and from paths of pushing."""
    clutter: list[SceneObject] = []
    ways = []
    if scene.area is not None:
        ways = [(push_start(item.place, scene.area, 0.12), scene.area) for item in scene.objects]
    for _ in range(random.integers(0, MAX_CLUTTER + 1)):
        shape = str(random.choice(list(CLUTTER_SIZES)))
        quaternion = _yaw(float(random.uniform(-math.pi, math.pi)))
        size = _rounded(random.uniform(*CLUTTER_SIZES[shape]))
        if shape == "capsule":  # lies on its side: turned by 90° about x, then about z
            half, c = quaternion[3], quaternion[0]
            quaternion = tuple(math.sqrt(0.5) * value for value in (c, c, half, half))
        grey = random.uniform(0.2, 0.8)  # pale, to differ from the coloured objects of the task
        rgb = grey + random.uniform(-0.12, 0.12, 3)
        thing = SceneObject(shape, size, (*_rounded(rgb), 1.0), (0.0, 0.0), quaternion, 0.06, gloss=0.3)
        for _ in range(20):
            edge = thing.radius + 0.015
            x = float(random.uniform(TABLE_X[0] + edge, TABLE_X[1] - edge))
            y = float(random.uniform(TABLE_Y[0] + edge, TABLE_Y[1] - edge))
            thing.place = (x, y)
            if (
                all(math.dist(thing.place, item.place) > CLUTTER_GAP + thing.radius / 2 for item in scene.objects)
                and all(math.dist(thing.place, item.place) > thing.radius + item.radius + 0.006 for item in clutter)
                and (scene.area is None or math.dist(thing.place, scene.area) > AREA_RADIUS + thing.radius)
                and all(distance_to_segment(thing.place, *way) > 0.075 + thing.radius for way in ways)
            ):
                clutter.append(thing)
                break
    return clutter


def _surface(random: np.random.Generator) -> Surface:
    return Surface(
        int(random.integers(textures.COUNT)), bool(random.random() < 0.5), _rounded(random.uniform(0.55, 1.0, 3))
    )


def _light(random: np.random.Generator) -> Light:
    angle, height = random.uniform(-math.pi, math.pi), random.uniform(1.2, 2.2)
    radius = random.uniform(0.3, 1.3)
    brightness = random.uniform(0.2, 0.6)
    return Light(
        _rounded([0.4 + radius * math.cos(angle), radius * math.sin(angle), height]),
        _rounded([random.uniform(0.2, 0.6), random.uniform(-0.2, 0.2), 0.0]),
        _rounded(brightness * random.uniform(0.7, 1.0, 3)),
    )
