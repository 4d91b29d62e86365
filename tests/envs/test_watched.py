"""Counts of hand poses and contacts, for evaluation."""

import numpy as np
import pytest

from deft.envs.f1 import CELL, WatchedEnv


@pytest.mark.usefixtures("gl")
def test_a_tally_of_poses_and_contacts():
    env = WatchedEnv({"image_size": 16, "max_steps": 100, "task_name": "pick"})
    env.reset(seed=1)
    tcp = env.simulator.unwrapped.simulation.tcp.copy()
    env.step(np.zeros(32, np.float32))
    cells, contacts = env.tally()
    assert cells[0][:3] == tuple(np.floor(tcp / CELL).astype(int))
    assert contacts == 0
    over = False
    while not over:  # the expert grasps
        _, _, terminated, truncated, _ = env.step(env.expert_action())
        over = terminated or truncated
    cells, contacts = env.tally()
    assert len(set(cells)) > 5
    assert 3 <= contacts < len(cells)  # from the grasp on, and not on the way there
    env.close()
