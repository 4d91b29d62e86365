"""When a task is done, by hand-made worlds; what the words name."""

import numpy as np
import pytest

from deft.envs.tabletop.scene import DomainRandomization, draw_scene
from deft.envs.tabletop.tasks import GOAL_TASKS, TASKS, Goal, View, stack_position


def make_view(has_area: bool = False) -> View:
    """Two objects far apart on the table, the open hand high above."""
    scene = draw_scene(1, 2, has_area, DomainRandomization())
    assert scene is not None
    positions = np.array([[*item.place, item.half_height] for item in scene.objects])
    return View(scene, np.array([0.4, 0.0, 0.4]), 0.04, 0.0, positions, np.zeros((2, 3)), 0.0)


@pytest.mark.parametrize("name", GOAL_TASKS)
def test_nothing_is_done_at_the_start(name: str) -> None:
    task, view = TASKS[name], make_view(TASKS[name].has_area)
    goal = task.draw_goal(np.random.default_rng(0), view.scene)
    assert not task.is_achieved(view, goal.index, goal.base)
    assert not task.is_achieved_by_another(view, goal)


def test_reach() -> None:
    task, view = TASKS["reach"], make_view()
    view.tcp = view.positions[1] + [0.0, 0.0, 0.039]
    assert task.is_achieved(view, 1, 0)
    assert not task.is_achieved_by_another(view, Goal(1, 0, ""))
    assert not task.is_achieved(view, 0, 1)
    assert task.is_achieved_by_another(view, Goal(0, 1, ""))
    view.tcp = view.positions[1] + [0.0, 0.0, 0.041]
    assert not task.is_achieved(view, 1, 0)


def test_push() -> None:
    task, view = TASKS["push"], make_view(has_area=True)
    assert view.scene.area is not None
    goal = Goal(0, 1, "")
    distance = task.goal_distance(view, goal)
    assert distance == pytest.approx(np.hypot(*np.subtract(view.scene.objects[0].place, view.scene.area)))
    view.positions[0, :2] = np.add(view.scene.area, [0.039, 0.0])
    assert task.is_achieved(view, 0, 1)
    view.positions[0, 2] += 0.05  # held above the area
    assert not task.is_achieved(view, 0, 1)
    view.positions[1, :2] = view.scene.area
    assert task.is_achieved_by_another(view, goal)


def test_pick() -> None:
    task, view = TASKS["pick"], make_view()
    view.positions[0, 2] = view.rest_height(0) + 0.081
    assert not task.is_achieved(view, 0, 1)  # it flies
    view.tcp = view.positions[0].copy()
    assert task.is_achieved(view, 0, 1)
    assert task.is_achieved_by_another(view, Goal(1, 0, ""))
    assert task.goal_distance(view, Goal(0, 1, "")) == 0
    assert task.goal_distance(view, Goal(1, 0, "")) == pytest.approx(0.08)


def test_place() -> None:
    task, view = TASKS["place"], make_view()
    goal = Goal(0, 1, "")
    view.positions[0] = stack_position(view, goal)
    height = view.positions[0, 2] - view.positions[1, 2]
    assert height == pytest.approx(view.scene.objects[0].half_height + view.scene.objects[1].half_height)
    assert task.is_achieved(view, 0, 1)
    assert not task.is_achieved(view, 1, 0)
    assert task.is_achieved_by_another(view, Goal(1, 0, ""))  # the other way round was asked for
    view.opening = view.scene.objects[0].half_width  # still held
    assert not task.is_achieved(view, 0, 1)
    view.opening = 0.04
    view.velocities[0] = [0, 0, -0.06]  # still falling
    assert not task.is_achieved(view, 0, 1)


@pytest.mark.parametrize("name", GOAL_TASKS)
def test_words_name_the_object(name: str) -> None:
    task, view = TASKS[name], make_view(TASKS[name].has_area)
    random = np.random.default_rng(0)
    goals = [task.draw_goal(random, view.scene) for _ in range(40)]
    assert {goal.index for goal in goals} == {0, 1}
    assert len({goal.instruction for goal in goals if goal.index == 0}) == len(task.templates)
    for goal in goals:
        assert goal.base == 1 - goal.index
        words = goal.instruction
        assert view.scene.objects[goal.index].name in words
        if name == "place":
            positions = [words.index(view.scene.objects[index].name) for index in (goal.index, goal.base)]
            assert positions[0] < positions[1]
        else:
            assert view.scene.objects[goal.base].name not in words
        assert task.draw_goal(random, view.scene, index=1).index == 1


def test_short_names_name_one_object_alone() -> None:
    """Of "red cube" and "blue cylinder" each has a colour and a kind of its own; of two cubes each has a colour."""
    task, view = TASKS["place"], make_view()
    view.scene.objects[0].name, view.scene.objects[1].name = "red cube", "blue cylinder"
    random = np.random.default_rng(0)
    texts = {task.draw_goal(random, view.scene, 0, short_name_rate=1.0).instruction for _ in range(60)}
    names = [(upper, lower) for upper in ("red one", "cube") for lower in ("blue one", "cylinder")]
    assert texts == {words.format(object=upper, base=lower) for words in task.templates for upper, lower in names}
    view.scene.objects[1].name = "blue cube"
    assert view.scene.short_names(0) == ["red one"]
    view.scene.objects[1].name = "blue cylinder"
    view.scene.clutter = [view.scene.objects[1]]  # clutter has cylinders too
    assert view.scene.short_names(0) == ["red one"]
    halves = [task.draw_goal(random, view.scene, 0, short_name_rate=0.5).instruction for _ in range(400)]
    share = sum("red cube" in words for words in halves) / 400
    assert 0.42 < share < 0.58  # 0.5 ± 3 deviations of 0.025


def test_without_short_names_no_further_random_numbers_are_drawn() -> None:
    """The object, the base and one of three templates: the same goals as before there were short names."""
    view, random, expected = make_view(), np.random.default_rng(3), np.random.default_rng(3)
    TASKS["pick"].draw_goal(random, view.scene)
    for count in (2, 1, 3):
        expected.integers(count)
    assert random.bit_generator.state == expected.bit_generator.state


def test_potentials_rise_towards_the_goal() -> None:
    view = make_view()
    goal = Goal(0, 1, "")
    before = TASKS["pick"].potentials(view, goal)
    view.tcp = view.tcp + 0.5 * (view.positions[0] - view.tcp)
    after = TASKS["pick"].potentials(view, goal)
    # Half of the way: 2 a metre.
    assert after[0] == pytest.approx(before[0] / 2)
    view.positions[0, 2] += 0.03
    assert TASKS["pick"].potentials(view, goal)[1] - after[1] == pytest.approx(4 * 0.03)
    assert TASKS["random_exploration"].potentials(view, goal) == (0, 0)
