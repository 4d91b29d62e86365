"""What the robot is told to do, when it is done, and how close it is: one class a task, no state of their own.

`TabletopEnv` asks them each step with a `View` of the world. Each judges an object without knowing which one is named:
where another object than the named one meets the goal, the episode ends as a failure, so that the words are needed.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from deft.envs.tabletop.scene import AREA_RADIUS, Scene

REACH_DISTANCE = 0.04  # metres from the point between the finger tips to the object's centre
LIFT_HEIGHT = 0.08
STACK_SHIFT = 0.028  # how far off the middle a placed object may stand
STACK_HEIGHT_ERROR = 0.008
STILL_SPEED = 0.05  # metres a second

APPROACH_WEIGHT = 2.0  # reward a metre that the hand comes closer to the object
GOAL_WEIGHT = 4.0  # reward a metre that the object comes closer to its goal


@dataclass(slots=True)
class View:
    """The world as a task sees it, after a step."""

    scene: Scene
    tcp: np.ndarray  # [3]: the point between the finger tips
    opening: float  # metres that a finger is open, of both the mean
    squeeze: float  # metres that the fingers would close further if nothing were between them
    places: np.ndarray  # [objects, 3]
    velocities: np.ndarray  # [objects, 3]
    top: float  # the table's height

    def rest_height(self, index: int) -> float:
        """Where an object's centre is when it stands on the table."""
        return self.top + self.scene.objects[index].half_height


@dataclass(slots=True)
class Goal:
    """Which object the instruction names, and for the place task which one it goes onto."""

    index: int
    base: int
    instruction: str


class Task(ABC):
    """One kind of instruction."""

    name: str
    templates: tuple[str, ...]
    has_area = False
    num_named = 1  # objects that the words speak of
    min_objects = 1

    def draw_goal(
        self, random: np.random.Generator, scene: Scene, index: int | None = None, split: str = "all"
    ) -> Goal:
        """Choose the object, another one as the base, and the words."""
        count = len(scene.objects)
        named = scene.named(split)
        chosen = named[int(random.integers(len(named)))] if index is None else index
        base = (chosen + 1 + int(random.integers(max(count - 1, 1)))) % count
        template = self.templates[random.integers(len(self.templates))]
        names = {"object": scene.objects[chosen].name, "base": scene.objects[base].name}
        return Goal(chosen, base, template.format(**names))

    @abstractmethod
    def is_met(self, view: View, index: int, base: int) -> bool:
        """Whether the goal holds for this object."""

    def is_met_by_another(self, view: View, goal: Goal) -> bool:
        """Whether a wrong object meets the goal."""
        return any(self.is_met(view, index, goal.base) for index in range(len(view.places)) if index != goal.index)

    def goal_distance(self, view: View, goal: Goal) -> float:
        """Metres that the object is from its goal; 0 where the hand alone moves."""
        return 0.0

    def potentials(self, view: View, goal: Goal) -> tuple[float, float]:
        """What the dense reward is the increase of: the hand's closeness, and the object's."""
        return (
            -APPROACH_WEIGHT * math.dist(view.tcp, view.places[goal.index]),
            -GOAL_WEIGHT * self.goal_distance(view, goal),
        )


class RandomExploration(Task):
    """No goal: the robot moves about for a world model to watch."""

    name = "random_exploration"
    templates = ("explore the table",)
    num_named = 0

    def is_met(self, view: View, index: int, base: int) -> bool:
        """Never."""
        return False

    def potentials(self, view: View, goal: Goal) -> tuple[float, float]:
        """Nothing is better than anything else."""
        return 0.0, 0.0


class Reach(Task):
    """Bring the open hand to the object."""

    name = "reach"
    templates = ("reach the {object}", "move to the {object}", "go to the {object}")

    def is_met(self, view: View, index: int, base: int) -> bool:
        """The point between the finger tips is at the object."""
        return math.dist(view.tcp, view.places[index]) < REACH_DISTANCE


class Push(Task):
    """Push the object into the marked area."""

    name = "push"
    templates = ("push the {object} to the white area", "slide the {object} onto the white area")
    has_area = True

    def is_met(self, view: View, index: int, base: int) -> bool:
        """It stands in the area, on the table."""
        assert view.scene.area is not None
        x, y, z = view.places[index].tolist()
        is_low = z < view.rest_height(index) + 0.02
        return is_low and math.dist((x, y), view.scene.area) < AREA_RADIUS - 0.02

    def goal_distance(self, view: View, goal: Goal) -> float:
        """In the plane, from the object's centre to the area's."""
        assert view.scene.area is not None
        return math.dist(view.places[goal.index, :2], view.scene.area)


class Pick(Task):
    """Lift the object."""

    name = "pick"
    templates = ("pick up the {object}", "lift the {object}", "grasp the {object} and lift it")

    def is_met(self, view: View, index: int, base: int) -> bool:
        """It is in the hand, well above the table."""
        is_high = view.places[index, 2] > view.rest_height(index) + LIFT_HEIGHT
        return bool(is_high) and math.dist(view.tcp, view.places[index]) < 0.05

    def goal_distance(self, view: View, goal: Goal) -> float:
        """What is left to lift."""
        return max(0.0, view.rest_height(goal.index) + LIFT_HEIGHT - float(view.places[goal.index, 2]))


class Place(Task):
    """Put the object onto another one and let go."""

    name = "place"
    templates = ("put the {object} on the {base}", "place the {object} on top of the {base}")
    num_named = min_objects = 2

    def is_met(self, view: View, index: int, base: int) -> bool:
        """It rests on the base, and the fingers have let go."""
        if index == base:
            return False
        upper, lower = view.scene.objects[index], view.scene.objects[base]
        x, y, z = (view.places[index] - view.places[base]).tolist()
        return (
            math.hypot(x, y) < STACK_SHIFT
            and abs(z - upper.half_height - lower.half_height) < STACK_HEIGHT_ERROR
            and view.opening > upper.half_width + 0.003
            and float(np.abs(view.velocities[index]).max()) < STILL_SPEED
        )

    def is_met_by_another(self, view: View, goal: Goal) -> bool:
        """Any stack but the one that was asked for."""
        count = range(len(view.places))
        return any(
            self.is_met(view, index, base)
            for index in count
            for base in count
            if (index, base) != (goal.index, goal.base)
        )

    def goal_distance(self, view: View, goal: Goal) -> float:
        """To where the object's centre is when it stands on the base."""
        return math.dist(view.places[goal.index], stack_place(view, goal))


def stack_place(view: View, goal: Goal) -> np.ndarray:
    """Where the object's centre is when it stands on the base."""
    place = view.places[goal.base].copy()
    place[2] += view.scene.objects[goal.base].half_height + view.scene.objects[goal.index].half_height
    return place


TASKS: dict[str, Task] = {task.name: task for task in (RandomExploration(), Reach(), Push(), Pick(), Place())}
GOAL_TASKS = tuple(name for name in TASKS if name != RandomExploration.name)
ALL_TASKS = "all"
