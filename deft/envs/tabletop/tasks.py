"""The tasks: instruction, success and distance to the goal; one class per task, without state.

`TabletopEnv` calls them each step with a `View` of the simulation. If another object than the named one achieves the
goal, the episode ends as a failure, so that the policy needs the instruction.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np

from deft.envs.tabletop.scene import AREA_RADIUS, Scene

REACH_DISTANCE = 0.04  # metres from the point between the finger tips to the object's centre
LIFT_HEIGHT = 0.08
STACK_SHIFT = 0.028  # largest distance of a placed object from the middle
STACK_HEIGHT_ERROR = 0.008
STILL_SPEED = 0.05  # metres a second

APPROACH_WEIGHT = 2.0  # reward per metre by which the hand comes closer to the object
GOAL_WEIGHT = 4.0  # reward per metre by which the object comes closer to its goal


@dataclass(slots=True)
class View:
    """The state of the simulation after a step, for tasks and experts."""

    scene: Scene
    tcp: np.ndarray  # [3]: the point between the finger tips
    opening: float  # metres, mean of both fingers
    squeeze: float  # metres between the fingers and their target
    positions: np.ndarray  # [objects, 3]
    velocities: np.ndarray  # [objects, 3]
    top: float  # the table's height

    def rest_height(self, index: int) -> float:
        """Return the height of an object's centre on the table."""
        return self.top + self.scene.objects[index].half_height


@dataclass(slots=True)
class Goal:
    """The object that the instruction names, and for the place task its base."""

    index: int
    base: int
    instruction: str


class Task(ABC):
    """One kind of instruction."""

    name: str
    templates: tuple[str, ...]
    has_area = False
    num_named = 1  # objects in the instruction
    min_objects = 1

    def draw_goal(
        self,
        random: np.random.Generator,
        scene: Scene,
        index: int | None = None,
        split: str = "all",
        short_name_rate: float = 0.0,
    ) -> Goal:
        """Draw the object, another one as the base, and the instruction; see `DomainRandomization.short_name_rate`."""
        count = len(scene.objects)
        named = scene.named(split)
        chosen = named[int(random.integers(len(named)))] if index is None else index
        base = (chosen + 1 + int(random.integers(max(count - 1, 1)))) % count
        template = self.templates[random.integers(len(self.templates))]
        names = {}
        for role, named_index in (("object", chosen), ("base", base)):
            names[role] = scene.objects[named_index].name
            if short_name_rate and random.random() < short_name_rate:
                names[role] = str(random.choice(scene.short_names(named_index)))
        return Goal(chosen, base, template.format(**names))

    @abstractmethod
    def is_achieved(self, view: View, index: int, base: int) -> bool:
        """Return whether the goal holds for this object."""

    def is_achieved_by_another(self, view: View, goal: Goal) -> bool:
        """Return whether a wrong object achieves the goal."""
        others = (index for index in range(len(view.positions)) if index != goal.index)
        return any(self.is_achieved(view, index, goal.base) for index in others)

    def goal_distance(self, view: View, goal: Goal) -> float:
        """Return the distance of the object from its goal in metres; 0 if only the hand moves."""
        return 0.0

    def potentials(self, view: View, goal: Goal) -> tuple[float, float]:
        """Return the potentials of the hand and of the object, whose increase is the dense reward."""
        return (
            -APPROACH_WEIGHT * math.dist(view.tcp, view.positions[goal.index]),
            -GOAL_WEIGHT * self.goal_distance(view, goal),
        )


class RandomExploration(Task):
    """No goal: the robot explores, for training a world model."""

    name = "random_exploration"
    templates = ("explore the table",)
    num_named = 0

    def is_achieved(self, view: View, index: int, base: int) -> bool:
        """Return False."""
        return False

    def potentials(self, view: View, goal: Goal) -> tuple[float, float]:
        """Return zeros."""
        return 0.0, 0.0


class Reach(Task):
    """Move the hand to the object."""

    name = "reach"
    templates = ("reach the {object}", "move to the {object}", "go to the {object}")

    def is_achieved(self, view: View, index: int, base: int) -> bool:
        """Return whether the point between the finger tips is at the object."""
        return math.dist(view.tcp, view.positions[index]) < REACH_DISTANCE


class Push(Task):
    """Push the object into the marked area."""

    name = "push"
    templates = ("push the {object} to the white area", "slide the {object} onto the white area")
    has_area = True

    def is_achieved(self, view: View, index: int, base: int) -> bool:
        """Return whether the object is in the area, on the table."""
        assert view.scene.area is not None
        x, y, z = view.positions[index].tolist()
        is_low = z < view.rest_height(index) + 0.02
        return is_low and math.dist((x, y), view.scene.area) < AREA_RADIUS - 0.02

    def goal_distance(self, view: View, goal: Goal) -> float:
        """Return the horizontal distance from the object to the area."""
        assert view.scene.area is not None
        return math.dist(view.positions[goal.index, :2], view.scene.area)


class Pick(Task):
    """Lift the object."""

    name = "pick"
    templates = ("pick up the {object}", "lift the {object}", "grasp the {object} and lift it")

    def is_achieved(self, view: View, index: int, base: int) -> bool:
        """Return whether the object is in the hand, above the table."""
        is_high = view.positions[index, 2] > view.rest_height(index) + LIFT_HEIGHT
        return bool(is_high) and math.dist(view.tcp, view.positions[index]) < 0.05

    def goal_distance(self, view: View, goal: Goal) -> float:
        """Return the remaining height."""
        return max(0.0, view.rest_height(goal.index) + LIFT_HEIGHT - float(view.positions[goal.index, 2]))


class Place(Task):
    """Put the object onto another one and release it."""

    name = "place"
    templates = ("put the {object} on the {base}", "place the {object} on top of the {base}")
    num_named = min_objects = 2

    def is_achieved(self, view: View, index: int, base: int) -> bool:
        """Return whether the object rests on the base, and the fingers are open."""
        if index == base:
            return False
        upper, lower = view.scene.objects[index], view.scene.objects[base]
        x, y, z = (view.positions[index] - view.positions[base]).tolist()
        return (
            math.hypot(x, y) < STACK_SHIFT
            and abs(z - upper.half_height - lower.half_height) < STACK_HEIGHT_ERROR
            and view.opening > upper.half_width + 0.003
            and float(np.abs(view.velocities[index]).max()) < STILL_SPEED
        )

    def is_achieved_by_another(self, view: View, goal: Goal) -> bool:
        """Return whether there is another stack than the named one."""
        count = range(len(view.positions))
        return any(
            self.is_achieved(view, index, base)
            for index in count
            for base in count
            if (index, base) != (goal.index, goal.base)
        )

    def goal_distance(self, view: View, goal: Goal) -> float:
        """Return the distance from the object to its position on the base."""
        return math.dist(view.positions[goal.index], stack_position(view, goal))


def stack_position(view: View, goal: Goal) -> np.ndarray:
    """Return the position of the object's centre on the base."""
    position = view.positions[goal.base].copy()
    position[2] += view.scene.objects[goal.base].half_height + view.scene.objects[goal.index].half_height
    return position


TASKS: dict[str, Task] = {task.name: task for task in (RandomExploration(), Reach(), Push(), Pick(), Place())}
GOAL_TASKS = tuple(name for name in TASKS if name != RandomExploration.name)
ALL_TASKS = "all"
