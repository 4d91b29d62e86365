"""Scenes: fair positions, the randomisation's switches one by one, and that plain data bring a scene back."""

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from deft.envs.state import decode, encode
from deft.envs.tabletop import scene as scenes
from deft.envs.tabletop.scene import DomainRandomization, Scene, draw_scene
from deft.errors import InputError

PLAIN = DomainRandomization()
EVERYTHING = DomainRandomization(True, True, True, True, random_head_camera_dis=0.1, random_table_height=0.03)


def draw(seed: int, randomization: DomainRandomization, has_area: bool = False, num_objects: int = 2) -> Scene:
    found = draw_scene(seed, num_objects, has_area, randomization)
    assert found is not None
    return found


@pytest.mark.parametrize("has_area", [False, True])
def test_places_are_fair(has_area: bool) -> None:
    for seed in range(100):
        found = draw_scene(seed, 2, has_area, PLAIN)
        if found is None:
            continue
        first, second = found.objects
        assert math.dist(first.place, second.place) >= scenes.OBJECT_GAP
        assert first.name.split()[0] != second.name.split()[0]  # the colours differ
        for item, other in ((first, second), (second, first)):
            assert math.hypot(*item.place) < scenes.OBJECT_REACH
            if has_area:
                assert found.area is not None
                assert math.dist(item.place, found.area) > scenes.AREA_RADIUS + item.radius
                way = (scenes.push_start(item.place, found.area, 0.1), found.area)
                assert scenes.distance_to_segment(other.place, *way) > 0.11


def test_almost_every_seed_gives_a_scene() -> None:
    assert sum(draw_scene(seed, 2, True, EVERYTHING) is None for seed in range(200)) < 20
    assert sum(draw_scene(seed, 4, False, EVERYTHING) is None for seed in range(200)) < 20


def test_clutter_stands_apart_and_leaves_room() -> None:
    numbers, shapes = set(), set()
    for seed in range(120):
        found = draw_scene(seed, 2, True, EVERYTHING)
        if found is None:
            continue
        numbers.add(len(found.clutter))
        shapes |= {item.shape for item in found.clutter}
        for index, item in enumerate(found.clutter):
            x, y = item.place
            assert scenes.TABLE_X[0] + item.radius < x < scenes.TABLE_X[1] - item.radius
            assert scenes.TABLE_Y[0] + item.radius < y < scenes.TABLE_Y[1] - item.radius
            assert all(math.dist(item.place, other.place) > scenes.CLUTTER_GAP for other in found.objects)
            others = found.clutter[:index]
            assert all(math.dist(item.place, other.place) > item.radius + other.radius for other in others)
            assert np.ptp(item.rgba[:3]) <= 0.24 + 1e-4  # pale: never one of the task's colours
    assert min(numbers) == 0
    assert max(numbers) >= 10
    assert shapes == set(scenes.CLUTTER_SIZES)


@pytest.mark.parametrize(
    ("settings", "changed"),
    [
        ({"random_appearance": True}, {"objects", "shell"}),
        ({"random_background": True, "clean_background_rate": 0.0}, {"table", "walls", "floor"}),
        ({"random_light": True, "crazy_random_light_rate": 0.0}, {"lights", "ambient"}),
        ({"random_light": True, "crazy_random_light_rate": 1.0}, {"lights", "ambient", "flickers"}),
        ({"cluttered_table": True}, {"clutter"}),
        ({"random_head_camera_dis": 0.1}, {"head_camera_shift"}),
        ({"random_table_height": 0.03}, {"table_drop"}),
        ({"noise_patch_rate": 1.0}, {"noise_patch"}),
        ({"random_background": True, "clean_background_rate": 1.0}, set()),
    ],
)
def test_a_switch_changes_its_own_part(settings: dict[str, Any], changed: set[str]) -> None:
    randomization = DomainRandomization(**settings)
    found: set[str] = set()
    for seed in range(20):
        plain, drawn = draw(seed, PLAIN), draw(seed, randomization)
        for part in dataclasses.fields(Scene):
            if getattr(plain, part.name) != getattr(drawn, part.name):
                found.add(part.name)
        assert [item.place for item in plain.objects] == [item.place for item in drawn.objects]
    assert found == changed


def test_rates_are_rates() -> None:
    half = DomainRandomization(random_background=True, random_light=True, clean_background_rate=0.5)
    half.crazy_random_light_rate = 0.25
    drawn = [draw(seed, half) for seed in range(400)]
    clean = np.mean([found.table == Scene(0, []).table and found.walls == Scene(0, []).walls for found in drawn])
    # standard deviations of 400 draws: 0.025 and 0.022
    assert abs(clean - 0.5) < 0.1
    assert abs(np.mean([found.flickers for found in drawn]) - 0.25) < 0.09
    assert {len(found.lights) for found in drawn} == {1, 2, 3}


def test_flicker_is_the_same_again() -> None:
    found = draw(3, DomainRandomization(random_light=True))
    np.testing.assert_array_equal(scenes.flicker(found, 5), scenes.flicker(found, 5))
    assert not np.array_equal(scenes.flicker(found, 5), scenes.flicker(found, 6))


def test_plain_data_bring_a_scene_back() -> None:
    for seed in range(10):
        found = draw(seed, EVERYTHING)
        assert Scene.from_data(decode(encode(found.as_data()))) == found
    assert draw(4, EVERYTHING) == draw(4, EVERYTHING)
    assert draw(4, EVERYTHING) != draw(5, EVERYTHING)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"random_lights": True}, "random_lights: unknown setting; did you mean"),
        ({"random_light": 1}, "random_light: 1 is not"),
        ({"clean_background_rate": 2.0}, "clean_background_rate: 2.0 is out of range"),
        ({"random_table_height": -0.1}, "random_table_height: -0.1 is out of range"),
        ({"random_head_camera_dis": "far"}, "random_head_camera_dis: 'far'"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        DomainRandomization(**settings)
