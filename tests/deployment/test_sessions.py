"""Modes of the server: chunks played to their end, temporal ensembling and asynchronous inference, by hand."""

import asyncio
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from gymnasium import spaces
from served_policies import BOX, CHUNK, network, scene, tiny

from deft.config.deployment_settings import ServeConfig
from deft.deployment.sessions import (
    ActionSession,
    AsyncSession,
    ChunkSession,
    EnsembleSession,
    RealTimeSession,
    make_session,
)
from deft.errors import InputError, RunError
from deft.evaluation.loaded_policy import LoadedPolicy


class Counting:
    """A policy whose chunk for the observation j is c_j[i] = 10 j + i, of K = 4 actions with one dim."""

    policy = SimpleNamespace(chunk_length=4, recurrent=False)
    action_space = spaces.Box(-np.inf, np.inf, (1,), np.float32)

    def get_chunk(self, observation, reward=None):
        return np.float32([[10 * observation + i] for i in range(4)])

    def check(self, observation):
        if observation < 0:
            raise InputError("negative")

    def reset(self):
        pass


async def at_once(method, *arguments):
    return method(*arguments)


def run(coroutine):
    return asyncio.run(coroutine)


async def actions_of(session, steps, start=0):
    return [float((await session.act(step, None))[0]) for step in range(start, start + steps)]


# ---------------------------------------------------------------------------------------------- temporal ensembling


def test_ensembling_weights_the_oldest_chunk_most():
    m = 0.5
    session = EnsembleSession(Counting(), at_once, m)
    first, second, *_, sixth = run(actions_of(session, 6))
    assert first == 0.0  # c_0[0]
    w = math.exp(-m)
    # t = 1: c_0[1] = 1 with weight 1, c_1[0] = 10 with weight exp(-m)
    assert second == pytest.approx((1 + 10 * w) / (1 + w))
    # t = 5: the chunks of steps 2 … 5 cover it: c_2[3] = 23, c_3[2] = 32, c_4[1] = 41, c_5[0] = 50
    weights = [1, w, w**2, w**3]
    assert sixth == pytest.approx(sum(a * b for a, b in zip(weights, [23, 32, 41, 50], strict=True)) / sum(weights))


def test_ensembling_begins_anew_after_a_reset():
    session = EnsembleSession(Counting(), at_once, 0.01)
    run(actions_of(session, 3))
    session.reset()
    assert run(actions_of(session, 1, start=7)) == [70.0]  # c_7[0] alone


def test_ensembling_of_equal_chunks_stays_in_the_bounds():
    policy = tiny()
    session = EnsembleSession(policy, at_once, 0.01)
    for _ in range(5):
        action = run(session.act(scene(0), None))
        assert BOX.contains(action)


# ------------------------------------------------------------------------------------------ asynchronous inference


class Slow:
    """Calls of the policy that take `delay` steps: they end when `step` was called as often."""

    def __init__(self, delay):
        self.delay, self.waiting, self.started = delay, [], []

    async def infer(self, method, *arguments):
        self.started.append(arguments[0])
        if len(self.started) > 1:  # nothing can be executed before the first chunk
            event = asyncio.Event()
            self.waiting.append([self.delay, event])
            await event.wait()
        return method(*arguments)

    async def step(self):
        for entry in self.waiting:
            entry[0] -= 1
            if entry[0] <= 0:
                entry[1].set()
        for _ in range(3):  # the task of the computation ends
            await asyncio.sleep(0)


async def played(session, slow, steps):
    found = []
    for step in range(steps):
        found.append(float((await session.act(step, None))[0]))
        await asyncio.sleep(0)
        await slow.step()
    return found


def test_the_next_chunk_is_computed_while_the_last_one_is_executed():
    slow = Slow(delay=1)
    session = AsyncSession(Counting(), slow.infer, horizon=2)
    # c_0 from step 0. Step 2 starts c_2 and is answered from c_0. Step 3 changes: c_2[1] = 21, as c_2[0] belongs to
    # step 2, which is over. Step 4 starts c_4 and is answered c_2[2] = 22; step 5: c_4[1] = 41; and so on.
    assert run(played(session, slow, 8)) == [0, 1, 2, 21, 22, 41, 42, 61]
    assert slow.started == [0, 2, 4, 6]


def test_actions_that_were_executed_during_the_computation_keep_their_place():
    slow = Slow(delay=2)
    session = AsyncSession(Counting(), slow.infer, horizon=1)
    # Step 1 starts c_1; steps 1 and 2 are executed from c_0. Step 3 changes to c_1[2] = 12 and, 2 ≥ 1 steps after its
    # observation, starts c_3; step 4: c_1[3] = 13; step 5: c_3[2] = 32 and starts c_5.
    assert run(played(session, slow, 7)) == [0, 1, 2, 12, 13, 32, 33]
    assert slow.started == [0, 1, 3, 5]


def test_a_step_without_actions_waits_and_is_counted():
    stalls = []
    slow = Slow(delay=9)
    session = AsyncSession(Counting(), slow.infer, horizon=3, stalled=lambda: stalls.append(1))

    async def play():
        found = [float((await session.act(step, None))[0]) for step in range(4)]  # step 3 starts c_3
        await asyncio.sleep(0)
        waiting = asyncio.create_task(session.act(4, None))
        await asyncio.sleep(0.01)
        assert not waiting.done()
        for _ in range(9):
            await slow.step()
        return [*found, float((await waiting)[0])]

    assert run(play()) == [0, 1, 2, 3, 31]  # c_3[1] at step 4
    assert stalls == [1]


def test_the_whole_chunk_as_horizon_is_get_action():
    policy = tiny()
    expected = [policy.get_action(scene(step)) for step in range(2 * CHUNK + 1)]
    session = AsyncSession(tiny(), at_once, horizon=CHUNK)

    async def play():
        return [await session.act(scene(step), None) for step in range(2 * CHUNK + 1)]

    for action, wanted in zip(run(play()), expected, strict=True):
        assert action.tobytes() == wanted.tobytes()


def test_blending_changes_gradually():
    slow = Slow(delay=1)
    session = AsyncSession(Counting(), slow.infer, horizon=2, blend_steps=1)
    # B = 1: at the change u = 3, w = 1 − 1/2: (c_0[3] + c_2[1]) / 2 = (3 + 21) / 2 = 12; step 4: c_2[2] = 22;
    # u = 5: (c_2[3] + c_4[1]) / 2 = (23 + 41) / 2 = 32
    assert run(played(session, slow, 6)) == [0, 1, 2, 12, 22, 32]


def test_a_reset_drops_the_chunk_that_is_being_computed():
    slow = Slow(delay=1)
    session = AsyncSession(Counting(), slow.infer, horizon=1)

    async def play():
        await session.act(0, None)
        await session.act(1, None)  # starts c_1
        session.reset()
        slow.started.clear()
        await slow.step()
        return float((await session.act(7, None))[0])

    assert run(play()) == 70.0
    assert slow.started == [7]


def test_a_rejected_message_and_a_failed_computation_are_errors_of_one_message():
    class Failing(Counting):
        fails = False

        def get_chunk(self, observation, reward=None):
            if self.fails:
                raise RunError("not finite")
            return super().get_chunk(observation)

    policy = Failing()
    session = AsyncSession(policy, at_once, horizon=2)

    async def play():
        found = [float((await session.act(step, None))[0]) for step in range(2)]
        with pytest.raises(InputError):
            await session.act(-1, None)  # no step
        policy.fails = True
        found.append(float((await session.act(2, None))[0]))  # starts c_2, which fails
        await asyncio.sleep(0)
        with pytest.raises(RunError):
            await session.act(3, None)
        policy.fails = False
        await asyncio.sleep(0)
        return [*found, float((await session.act(3, None))[0])]

    assert run(play()) == [0, 1, 2, 3]  # the step is repeated, and answered from c_0


# ------------------------------------------------------------------------------------------------ real-time chunking


class Continuing(Counting):
    """Its chunk for the observation j that continues another one is c_j[i] = 10 j + i, with the frozen actions."""

    policy = SimpleNamespace(chunk_length=4, recurrent=False, can_inpaint=True)
    action_selection = "sampled noise"

    def __init__(self):
        self.continued = []

    def inpaint_chunk(self, observation, running, frozen, max_guidance):
        self.continued.append((running[:, 0].tolist(), frozen, max_guidance))
        return np.concatenate([running[:frozen], self.get_chunk(observation)[frozen:]])


def test_the_next_chunk_continues_the_rest_of_the_last_one():
    slow, policy = Slow(delay=1), Continuing()
    session = RealTimeSession(policy, slow.infer, horizon=2, max_guidance=3.0)
    # As in the test of async: c_2 is computed in step 2 while c_0[2] = 2 is executed, which is frozen; c_0 has 2 and 3
    # left. Step 3 executes c_2[1] = 21. In step 4, c_2 has 22 and 23 left, and so on.
    assert run(played(session, slow, 6)) == [0, 1, 2, 21, 22, 41]
    assert policy.continued == [([2, 3], 1, 3.0), ([22, 23], 1, 3.0)]


def test_as_many_steps_are_frozen_as_the_longest_delay():
    slow, policy = Slow(delay=2), Continuing()
    session = RealTimeSession(policy, slow.infer, horizon=1, delay=1)
    # Step 1 starts c_1 with 1 frozen step (the delay that is expected) of 1, 2, 3. It takes 2 steps: step 3 executes
    # c_1[2] = 12 and starts c_3 with 2 frozen steps of 12, 13; step 5 executes c_3[2] = 32.
    assert run(played(session, slow, 6)) == [0, 1, 2, 12, 13, 32]
    assert policy.continued[:2] == [([1, 2, 3], 1, 5.0), ([12, 13], 2, 5.0)]


def test_no_more_steps_are_frozen_than_are_left():
    slow, policy = Slow(delay=1), Continuing()
    session = RealTimeSession(policy, slow.infer, horizon=3, delay=9)
    assert run(played(session, slow, 5)) == [0, 1, 2, 3, 31]
    assert policy.continued == [([3], 1, 5.0)]


def test_the_frozen_actions_of_a_flow_are_those_of_the_running_chunk():
    policy = tiny(head="flow")
    chunk = policy.get_chunk(scene(0))
    new = policy.inpaint_chunk(scene(1), chunk[1:], 1)
    assert new.shape == (CHUNK, 2)
    assert BOX.contains(new[2])
    assert new[0].tobytes() == chunk[1].tobytes()
    torch.manual_seed(5)
    plain = policy.get_chunk(scene(1))
    torch.manual_seed(5)
    free = policy.inpaint_chunk(scene(1), chunk[1:], 0, max_guidance=0.0)
    np.testing.assert_allclose(free, plain, rtol=0, atol=1e-6)
    torch.manual_seed(5)
    guided = policy.inpaint_chunk(scene(1), chunk[1:], 0)
    assert np.abs(guided - plain).max() > 1e-3
    for bad in (chunk[:0], chunk[0], np.full((1, 2), np.nan)):
        with pytest.raises(InputError, match=r"inpaint_chunk: running .* \[1 to 3, 2\]"):
            policy.inpaint_chunk(scene(1), bad, 0)
    with pytest.raises(InputError, match="frozen_steps 3 must be 0 to 2"):
        policy.inpaint_chunk(scene(1), chunk[1:], 3)
    with pytest.raises(InputError, match="VLAPolicy has no denoising chain that can be guided"):
        tiny().inpaint_chunk(scene(1), chunk[1:], 1)


def test_real_time_chunking_of_a_flow():
    """Also the first calls of a server, and an error with sampled actions."""
    policy = tiny(head="flow")
    session = make_session("rtc", policy, at_once, ServeConfig(path="-"), lambda: None)
    session.warm_up(scene(0))
    for step in range(5):
        assert BOX.contains(run(session.act(scene(step), None)))
        policy.reset()
    sampled = LoadedPolicy(policy.policy, policy.made_for, deterministic=False)
    with pytest.raises(InputError, match="mode rtc adds no noise in the denoising steps; leave out --stochastic"):
        make_session("rtc", sampled, at_once, ServeConfig(path="-"), lambda: None)


# ------------------------------------------------------------------------------------------------- modes and policies


def test_chunks_and_actions_are_those_of_the_policy():
    policy, one, whole = tiny(), ActionSession(tiny(), at_once), ChunkSession(tiny(), at_once)
    chunk = policy.get_chunk(scene(0))
    assert chunk.shape == (CHUNK, 2)
    assert run(whole.act(scene(0), None)).tobytes() == chunk.tobytes()
    for step in range(CHUNK):  # the observations within a chunk are not used
        assert run(one.act(scene(step), None)).tobytes() == chunk[step].tobytes()


@pytest.mark.parametrize(
    ("mode", "policy", "settings", "words"),
    [
        ("ensemble", {}, {}, "one action at a time"),
        ("async", {}, {}, "one action at a time"),
        ("async", {"tiny": True}, {"execution_horizon": 4}, "execution_horizon 4 is larger than the chunk"),
        ("rtc", {}, {}, "one action at a time"),
        (
            "rtc",
            {"tiny": True},
            {},
            r"mode rtc .*\(VLAPolicy\) has no denoising chain that can be guided: use mode async",
        ),
        ("best", {}, {}, "mode 'best' is not one of action, chunk, ensemble, async, rtc"),
    ],
)
def test_modes_that_do_not_fit(mode, policy, settings, words):
    loaded = tiny() if policy else network()
    with pytest.raises(InputError, match=words):
        make_session(mode, loaded, at_once, ServeConfig(path="-", **settings), lambda: None)


def test_memory_and_discrete_actions_are_not_averaged():
    policy = Counting()
    policy.policy = SimpleNamespace(chunk_length=4, recurrent=True)
    with pytest.raises(InputError, match="memory of this policy advances once per chunk"):
        EnsembleSession(policy, at_once)
    policy = Counting()
    policy.action_space = spaces.Discrete(3)
    with pytest.raises(InputError, match="averages actions"):
        EnsembleSession(policy, at_once)
