"""The kernels compute what the classes for one environment compute."""

import numpy as np
import pytest
import torch
import warp as wp

from deft.envs.tabletop import panda
from deft.envs.tabletop.control import CONTROL_MODES, ArmController
from deft.envs.tabletop.env import TabletopEnv
from deft.envs.tabletop.tasks import TASKS
from deft.envs.tabletop.warp import kernels
from deft.envs.tabletop.warp.model import batch_model, draw_block
from deft.envs.tabletop.warp.simulation import MODE_NUMBERS, WarpSimulation, _arm

pytestmark = pytest.mark.usefixtures("compiled_kernels")
NUM_ENVS = 3


@pytest.mark.parametrize("mode", list(CONTROL_MODES))
def test_targets_are_those_of_the_controller(mode):
    random = np.random.default_rng(0)
    controllers = [ArmController(mode, 0.7) for _ in range(NUM_ENVS)]
    qpos = np.tile(np.append(panda.HOME, [0.04, 0.04]), (NUM_ENVS, 1))
    qpos[:, :7] += random.uniform(-0.1, 0.1, (NUM_ENVS, 7))
    for controller, row in zip(controllers, qpos, strict=True):
        controller.reset(row[:7], panda.FINGER_TRAVEL)
    arrays = {
        "targets": wp.array(qpos[:, :7], dtype=kernels.vec7, device="cpu"),
        "fingers": wp.array(np.full(NUM_ENVS, panda.FINGER_TRAVEL), dtype=float, device="cpu"),
        "ctrl": wp.zeros((NUM_ENVS, 9), dtype=float, device="cpu"),
    }
    for _ in range(4):
        actions = random.uniform(-1.5, 1.5, (NUM_ENVS, CONTROL_MODES[mode] + 1))
        inputs = [wp.array(values, dtype=float, device="cpu") for values in (actions, qpos)]
        wp.launch(
            kernels.command,
            NUM_ENVS,
            [MODE_NUMBERS[mode], 0.7, _arm("cpu"), *inputs],
            list(arrays.values()),
            device="cpu",
        )
        for controller, action, row in zip(controllers, actions, qpos, strict=True):
            controller.command(action, row[:7])
        expected = [np.append(controller.target, [controller.finger_target] * 2) for controller in controllers]
        np.testing.assert_allclose(arrays["ctrl"].numpy(), expected, atol=2e-5)  # float32
        np.testing.assert_allclose(arrays["targets"].numpy(), np.array(expected)[:, :7], atol=2e-5)


def achieve(env: TabletopEnv, index: int) -> None:
    """Put an object where it achieves the task's goal."""
    view = env.simulation.view()
    position = view.positions[index]
    if env.task_name in ("reach", "pick"):
        position[:] = view.tcp
    elif env.task_name == "push":
        position[:2] = env.scene.area
    else:
        base = env.goal.base if index != env.goal.base else env.goal.index
        heights = sum(env.scene.objects[which].half_height for which in (index, base))
        position[:] = view.positions[base] + [0.0, 0.0, heights]
    env.simulation.velocities[:] = 0.0


@pytest.mark.parametrize("case", ["nothing", "success", "wrong object"])
def test_rewards_and_ends_are_those_of_the_environment(case):
    """In the first state of an episode with objects moved: the terms follow from the positions alone."""
    arguments = {"task": "all", "control_mode": "delta_ee_pos"}
    seeds = [0, 1, 4, 11]  # one of each task
    envs = [TabletopEnv(**arguments) for _ in seeds]
    for env, seed in zip(envs, seeds, strict=True):
        env.reset(seed=seed)
    assert {env.task_name for env in envs} == {"reach", "push", "pick", "place"}
    simulation = WarpSimulation(batch_model(envs[0]), len(seeds), "delta_ee_pos", 1.0, torch.device("cpu"))
    numbers, _ = draw_block(arguments, 1, seeds)
    rows = torch.arange(len(seeds))
    simulation.place(rows, {name: torch.from_numpy(values[:, 0]) for name, values in numbers.items()})
    simulation.locate(rows.int())
    expected = []
    for row, env in enumerate(envs):
        before, done = env._potentials, case != "nothing"
        if done:
            achieve(env, env.goal.index if case == "success" else 1 - env.goal.index)
        simulation.qpos[row] = torch.from_numpy(env.simulation.data.qpos)
        simulation.qvel[row] = torch.from_numpy(env.simulation.data.qvel)
        after = TASKS[env.task_name].potentials(env.simulation.view(), env.goal)
        wins, wrong = case == "success", case == "wrong object"
        expected.append([float(wins), after[0] - before[0], after[1] - before[1], -0.005 * 0.75, -float(wrong)])
    simulation.actions[:] = torch.tensor([0.5, -0.5, 0.5, 1.0])  # effort 3 · 0.25
    terms = torch.zeros(len(seeds), 5)
    success, terminated = (torch.zeros(len(seeds), dtype=torch.bool) for _ in range(2))
    simulation.judge(terms, success, terminated)
    np.testing.assert_allclose(terms.numpy(), expected, atol=2e-5)
    assert success.tolist() == [case == "success"] * len(seeds)
    assert terminated.tolist() == [case != "nothing"] * len(seeds)
