"""One model for all scenes: what a scene sets in it, and episodes that are those of the CPU."""

import mujoco
import numpy as np
import pytest

from deft.envs.tabletop.env import TabletopEnv
from deft.envs.tabletop.model import NUM_ROBOT
from deft.envs.tabletop.warp.model import PARKED_HEIGHT, UNUSED_SIZE, batch_model, draw_block, scene_numbers
from deft.schema import decode_text

CLUTTER = {"cluttered_table": True, "random_table_height": 0.03, "random_appearance": True}


@pytest.fixture
def cluttered() -> TabletopEnv:
    env = TabletopEnv(task="push", domain_randomization=CLUTTER, observation="state")
    env.reset(seed=2)
    assert 0 < len(env.scene.clutter) < 12
    return env


def test_the_model_has_a_geom_of_each_shape_for_each_object(cluttered):
    batch = batch_model(cluttered)
    assert [sorted(shapes) for shapes in batch.shapes[:2]] == [["box", "cylinder"]] * 2
    assert [sorted(shapes) for shapes in batch.shapes[2:]] == [["box", "capsule", "cylinder", "sphere"]] * 12
    assert batch.model.nv == 9 + 6 * 14
    assert not batch.model.opt.enableflags & int(mujoco.mjtEnableBit.mjENBL_SLEEP)


def test_a_scene_uses_one_shape_of_each_object(cluttered):
    batch, simulation = batch_model(cluttered), cluttered.simulation
    numbers = scene_numbers(batch, simulation.scene, simulation.model, simulation.data)
    for index, item in enumerate(simulation.scene.everything):
        for shape, geom in batch.shapes[index].items():
            is_used = shape == item.shape
            assert (numbers["rgba"][geom, 3] == 1.0) == is_used
            assert (numbers["geom_size"][geom, 0] > UNUSED_SIZE) == is_used
            if is_used:
                expected = np.array(item.size)
                np.testing.assert_allclose(numbers["geom_size"][geom, : len(expected)], expected, atol=1e-6)


def test_clutter_that_a_scene_does_not_have_floats_above_the_table(cluttered):
    batch, simulation = batch_model(cluttered), cluttered.simulation
    numbers = scene_numbers(batch, simulation.scene, simulation.model, simulation.data)
    used = len(simulation.scene.everything)
    heights = numbers["qpos"][NUM_ROBOT:].reshape(14, 7)[:, 2]
    assert (heights[:used] < 0.1).all()
    assert (heights[used:] >= PARKED_HEIGHT).all()
    bodies = [batch.model.body(f"object{index}").id for index in range(14)]
    np.testing.assert_array_equal(numbers["body_gravcomp"][bodies], [0.0] * used + [1.0] * (14 - used))


@pytest.mark.parametrize("interval", [1, 2])
def test_blocks_are_the_episodes_of_the_environment_on_the_cpu(interval):
    arguments = {"task": "all", "scene_reset_interval": interval}
    first, states = draw_block(arguments, interval, [7, 8])
    second, _ = draw_block(arguments, interval, states)
    for row, seed in enumerate([7, 8]):
        env = TabletopEnv(**arguments)
        for number in range(2 * interval):
            env.reset(seed=seed if number == 0 else None)
            block = (first, second)[number // interval]
            drawn = {name: values[row, number % interval] for name, values in block.items()}
            assert decode_text(drawn["instruction"]) == env.instruction
            assert drawn["goal"] == env.goal.index
            np.testing.assert_allclose(drawn["qpos"], env.simulation.data.qpos, atol=1e-6)
