import os
import signal
import time

import pytest
import torch
from offline_worlds import TwoStep, first_action, small_actor
from worlds import Counting

from deft.data.datasets.dataset import box
from deft.envs.make import wrap
from deft.errors import InputError, RunError
from deft.training.evaluator import Evaluator, check_spaces


def make_env():
    return wrap([TwoStep(), TwoStep()])


def broken_env():
    return wrap([TwoStep(broken=True)])


def deadly_env():
    os._exit(9)


def test_evaluations_may_sample():
    torch.manual_seed(0)
    policy = small_actor(2, 1)
    found = [Evaluator(make_env, seed=7, deterministic=value).evaluate([policy], 20)[0] for value in (True, False)]
    assert [one["action_selection"] for one in found] == ["mode", "sample"]
    # The likeliest first action is positive in every episode or in none; a sampled one (σ = 1) in some of 20.
    assert found[0]["mean_reward"] in (0.0, 1.0)
    assert 0.0 < found[1]["mean_reward"] < 1.0


def test_a_process_beside_finds_what_this_one_finds():
    policies = []
    for seed in range(3):  # of different worth: 1 where the first action is positive
        torch.manual_seed(seed)
        policies.append(small_actor(2, 1))
    here = Evaluator(make_env, seed=7)
    expected = here.start(10, policies, 3)
    assert [result["mean_reward"] for result in expected[0][1]] == [float(first_action(p) > 0) for p in policies]
    assert {result["mean_length"] for result in expected[0][1]} == {2.0}
    beside = Evaluator(make_env, seed=7, in_background=True)
    try:
        assert beside.start(10, policies, 3) == []  # nothing is waited for
        with torch.no_grad():
            for parameter in policies[0].parameters():
                parameter.fill_(float("nan"))  # training continues: what is evaluated is a copy
        beside.start(20, policies[1:], 3)
        results = beside.finished(wait=True)
        beside._make_env = broken_env
        beside.start(30, policies[1:], 3)
        with pytest.raises(ValueError, match="no display"):  # a failure there is heard of here
            beside.finished(wait=True)
        beside._make_env = deadly_env
        beside.start(40, policies[1:], 3)
        with pytest.raises(RunError, match="step 40 died"):
            beside.finished(wait=True)
    finally:
        beside.close()
    assert results == [*expected, (20, expected[0][1][1:])]
    assert beside.finished(wait=True) == []
    here.close()


def endless_env():
    time.sleep(3600)


def test_a_stop_does_not_wait_for_an_evaluation_beside_and_ends_its_process():
    beside = Evaluator(endless_env, seed=7, in_background=True)
    beside.start(10, [small_actor(2, 1)], 3)
    (worker,) = beside._pool._processes.values()
    assert beside.finished(wait=True, stop=lambda: True) == []
    assert beside.pending == [10]
    beside.close()
    worker.join(30)
    assert worker.exitcode == -signal.SIGKILL


def test_evaluating_leaves_the_random_state_of_the_run():
    evaluator, policy = Evaluator(make_env, seed=0), small_actor(2, 1)
    state = torch.get_rng_state()
    evaluator.evaluate([policy], 2)
    assert torch.equal(torch.get_rng_state(), state)
    evaluator.close()


def test_an_environment_of_other_spaces_raises_an_error():
    env = make_env()
    check_spaces(env, box(2), box(1), "env TwoStep", "take another")
    with pytest.raises(InputError, match=r"env TwoStep: the environment's observations are .* the dataset's"):
        check_spaces(env, box(3), box(1), "env TwoStep", "take another")
    with pytest.raises(InputError, match=r"the environment's actions are .*; take another"):
        check_spaces(env, box(2), box(2), "env TwoStep", "take another")
    with pytest.raises(InputError, match="actions"):
        check_spaces(wrap([Counting()]), box(2), box(1), "env Counting", "take another")
