"""Worker processes: the same bits as in this process, and clean ends whatever happens."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft.config.settings import EnvConfig
from deft.envs import ActionChunk, VectorEnv, make_vector_env
from deft.envs.process import ProcessVectorEnv
from deft.errors import InputError, RunError

MakeEnv = Callable[..., gymnasium.Env]


@pytest.fixture
def make_faulty_env() -> Callable[..., gymnasium.Env]:
    """A maker of environments that fail in a given way when the action is 1."""

    class FaultyEnv(gymnasium.Env):
        observation_space = spaces.Box(-1, 1, (2,))
        action_space = spaces.Discrete(2)

        def __init__(self, fault: str) -> None:
            self.fault = fault

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
            return np.zeros(2, np.float32), {}

        def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
            if action == 1 and self.fault == "raise":
                raise ValueError("joint 3 is broken")
            if action == 1 and self.fault == "hang":
                time.sleep(1000)
            if action == 1 and self.fault == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return np.zeros(2, np.float32), 0.0, False, False, {}

        def environment_variable(self, name: str) -> str:
            return os.environ[name]

        def has_torch(self) -> bool:
            return "torch" in sys.modules

        def is_deaf_to_interrupt(self) -> bool:
            return signal.getsignal(signal.SIGINT) is signal.SIG_IGN

    def make(fault: str = "none") -> gymnasium.Env:
        return FaultyEnv(fault)

    return make


def wait_until_gone(pids: list[int], seconds: float) -> bool:
    """Whether the processes end in time. Zombies count as ended."""

    def is_alive(pid: int) -> bool:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return file.read().rpartition(")")[2].split()[0] != "Z"
        except (FileNotFoundError, ProcessLookupError):
            return False

    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.05)
    return False


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[VectorEnv, VectorEnv]]:
    settings = {"num_envs": 3, "max_episode_steps": 20, **request.param}
    config = EnvConfig(**settings)
    serial = make_vector_env(config)
    config.vector, config.num_workers = "process", 2
    process = make_vector_env(config)
    yield serial, process
    serial.close()
    process.close()


@pytest.mark.parametrize("pair", [{"id": "CartPole-v1"}, {"id": "Hopper-v5"}], indirect=True)
def test_same_bits_as_serial(pair: tuple[VectorEnv, VectorEnv]) -> None:
    serial, process = pair
    assert process.observation_space == serial.observation_space
    assert process.action_space == serial.action_space
    assert process.reset(seed=5).tobytes() == serial.reset(seed=5).tobytes()
    serial.action_space.seed(0)
    num_done = 0
    for turn in range(100):
        actions = np.stack([np.asarray(serial.action_space.sample()) for _ in range(3)])
        expected, found = serial.step(actions), process.step(actions)
        for name in ("observation", "reward", "terminated", "truncated", "num_steps", "done_index"):
            assert getattr(found, name).tobytes() == getattr(expected, name).tobytes(), name
            assert getattr(found, name).dtype == getattr(expected, name).dtype, name
        assert found.episodes == expected.episodes
        if expected.final_observation is None:
            assert found.final_observation is None
        else:
            num_done += len(expected.done_index)
            assert found.final_observation.tobytes() == expected.final_observation.tobytes()
        if turn == 50:  # a state saved by one kind continues in the other
            process.set_state(serial.get_state())
            serial.set_state(process.get_state())
            assert process.observation.tobytes() == serial.observation.tobytes()
    assert num_done > 5


def test_dict_observations_chunks_and_calls(make_counting_env: MakeEnv) -> None:
    class Named(gymnasium.ObservationWrapper):
        def __init__(self, env: gymnasium.Env) -> None:
            super().__init__(env)
            self.observation_space = spaces.Dict({"state": env.observation_space, "instruction": spaces.Text(8)})

        def observation(self, observation: np.ndarray) -> dict:
            return {"state": observation, "instruction": "go"}

    def make() -> gymnasium.Env:
        return ActionChunk(Named(make_counting_env(length=3, action_space=spaces.Discrete(2, start=4))), 2, 0.5)

    env = ProcessVectorEnv([make] * 3, num_workers=2)
    try:
        assert env.chunk_length == 2
        assert env.action_space == spaces.MultiDiscrete([2, 2])
        first = env.reset(seed=0)
        assert bytes(first["instruction"][2]) == b"go\0\0\0\0\0\0"
        step = env.step(np.array([[0, 1], [1, 0], [1, 1]]))
        assert step.reward.tolist() == [2.0] * 3  # 1 + 0.5 * 2
        assert step.num_steps.tolist() == [2] * 3
        assert first["state"][:, 1].tolist() == [0] * 3  # still valid: the other set of arrays was written
        assert env.call("get_received") == [[4, 5], [5, 4], [5, 5]]  # in the environments' order
        step = env.step(np.zeros((3, 2), np.int64))
        assert step.num_steps.tolist() == [1] * 3
        assert step.final_observation["state"][:, 1].tolist() == [3] * 3
        assert [episode.episode_return for episode in step.episodes] == [6.0] * 3
        with pytest.raises(InputError, match="no method 'fly'"):
            env.call("fly")
        assert env.call("add", 1) == [1] * 3  # a wrong call leaves the environments as they are
        assert env.render(2) is None
    finally:
        env.close()


def test_suspended_environments_are_not_stepped(make_counting_env: MakeEnv) -> None:
    env = ProcessVectorEnv([lambda: ActionChunk(make_counting_env(length=9), 2, 1.0)] * 3, num_workers=2)
    try:
        env.reset(seed=0)
        actions = np.zeros((3, 2), np.int64)
        env.suspend([0, 2])  # of both workers
        for times in ([0, 2, 0], [0, 4, 0]):
            step = env.step(actions)
            assert step.observation[:, 1].tolist() == times
            assert step.num_steps.tolist() == [0, 2, 0]
        env.suspend([])
        env.reset(seed=0)
        assert env.step(actions).num_steps.tolist() == [2] * 3
    finally:
        env.close()


def test_workers_are_light_and_leave_signals_to_the_parent(make_faulty_env: MakeEnv) -> None:
    env = ProcessVectorEnv([make_faulty_env] * 2, num_workers=1)
    assert len(env.worker_pids) == 1
    assert env.call("environment_variable", "OMP_NUM_THREADS") == ["1", "1"]
    assert env.call("has_torch") == [False, False]
    assert env.call("is_deaf_to_interrupt") == [True, True]
    assert os.getpgid(env.worker_pids[0]) != os.getpgid(0)  # Ctrl-C goes to the terminal's group
    env.close()
    env.close()
    assert wait_until_gone(env.worker_pids, 1)
    with pytest.raises(RunError, match="closed"):
        env.reset()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("raise", r"environment 1 \(FaultyEnv\) raised ValueError: joint 3 is broken"),
        ("die", "worker process of environment 1 ended: killed by SIGKILL"),
        ("hang", "environment 1 did not answer 'step' within 1 s"),
    ],
)
def test_fault_is_named_and_ends_every_worker(make_faulty_env: MakeEnv, fault: str, message: str) -> None:
    # Environments 1 and 2 share a worker, 0 is alone: the message must distinguish them, and all must end.
    functions = [make_faulty_env, lambda: make_faulty_env(fault), make_faulty_env]
    env = ProcessVectorEnv(functions, num_workers=2, timeout=1.0 if fault == "hang" else 60.0, restart_workers=0)
    env.reset()
    env.step(np.zeros(3, np.int64))
    with pytest.raises(RunError, match=message) as caught:
        env.step(np.ones(3, np.int64))
    assert "\n" not in str(caught.value)
    assert wait_until_gone(env.worker_pids, 1)
    with pytest.raises(RunError, match=message):
        env.step(np.zeros(3, np.int64))
    env.close()


@pytest.fixture
def make_mortal_env() -> Callable[..., gymnasium.Env]:
    """A maker of environments that show [last digits of the seed, t]; an action of 1 is their death, 2 their sleep."""

    class MortalEnv(gymnasium.Env):
        def __init__(self, length: int = 100, dies_in_reset: str | None = None) -> None:
            self.observation_space = spaces.Dict({"seen": spaces.Box(-1, 10**4, (2,), np.float64)})
            self.action_space = spaces.Discrete(3)
            self.length, self.dies_in_reset = length, dies_in_reset
            self.seed, self.t = -1, 0

        def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[dict, dict]:
            if self.dies_in_reset is not None and os.path.exists(self.dies_in_reset):
                os.kill(os.getpid(), signal.SIGKILL)
            self.seed, self.t = -1 if seed is None else seed % 10**4, 0
            return self.observe(), {}

        def step(self, action: int) -> tuple[dict, float, bool, bool, dict]:
            if action == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            if action == 2:
                time.sleep(1000)
            self.t += 1
            return self.observe(), 1.0, self.t == self.length, False, {}

        def observe(self) -> dict:
            return {"seen": np.array([self.seed, self.t], np.float64)}

        def time_now(self) -> int:
            return self.t

        def get_state(self) -> dict:
            return {"seed": self.seed, "t": self.t}

        def set_state(self, state: dict) -> None:
            self.seed, self.t = state["seed"], state["t"]

    def make(**kwargs: Any) -> gymnasium.Env:
        return MortalEnv(**kwargs)

    return make


@pytest.mark.parametrize("fault", [1, 2], ids=["dies", "hangs"])
def test_failed_worker_is_replaced_and_its_episodes_end_where_they_were_seen(
    make_mortal_env: MakeEnv, fault: int, caplog: pytest.LogCaptureFixture
) -> None:
    # Worker 0 has environment 0, worker 1 has 1 and 2. Environment 0 ends an episode in the very step of the loss.
    functions = [lambda: make_mortal_env(length=3), make_mortal_env, make_mortal_env]
    env = ProcessVectorEnv(functions, num_workers=2, timeout=1.0)
    try:
        env.reset(seed=5)
        env.step(np.zeros(3, np.int64))
        acted_on = env.step(np.zeros(3, np.int64)).observation["seen"]
        before = acted_on.copy()
        first, second = env.worker_pids
        step = env.step(np.array([0, 0, fault]))
        assert step.terminated.tolist() == [True, False, False]
        assert step.truncated.tolist() == [False, True, True]
        assert step.reward.tolist() == [1.0, 0.0, 0.0]
        assert step.num_steps.tolist() == [1, 1, 1]
        assert step.done_index.tolist() == [0, 1, 2]
        assert step.lost_index.tolist() == [1, 2]
        assert [episode.env_index for episode in step.episodes] == [0]  # what was lost is not finished
        # Environment 1 had made its third step before environment 2 failed, but nobody has seen it.
        assert step.final_observation["seen"].tolist() == [[5, 3], [6, 2], [7, 2]]
        assert acted_on.tolist() == before.tolist()  # the rows that the transition begins with stay as they were
        seeds = step.observation["seen"][1:, 0].tolist()
        assert seeds[1] == seeds[0] + 1
        assert seeds[0] not in (5, 6, 7)  # drawn anew
        assert step.observation["seen"][:, 1].tolist() == [0, 0, 0]
        assert env.worker_pids[0] == first
        assert env.worker_pids[1] != second
        assert wait_until_gone([second], 1)
        reason = "ended: killed by SIGKILL" if fault == 1 else "did not answer 'step' within 1 s"
        assert [reason in record.message and "2 unfinished" in record.message for record in caplog.records] == [True]
        step = env.step(np.zeros(3, np.int64))
        assert step.observation["seen"].tolist() == [[-1, 1], [seeds[0], 1], [seeds[1], 1]]
        assert step.done_index.tolist() == step.lost_index.tolist() == []
    finally:
        env.close()


def test_same_run_same_new_seeds(make_mortal_env: MakeEnv) -> None:
    def seeds_after_two_losses() -> list[list[float]]:
        env = ProcessVectorEnv([make_mortal_env])
        env.reset(seed=1)
        seen = [env.step(np.array([action])).observation["seen"][0].tolist() for action in (1, 0, 1)]
        env.close()
        return seen

    first = seeds_after_two_losses()
    assert first[0][0] != first[2][0]
    assert first == seeds_after_two_losses()


def test_worker_that_died_between_two_steps(make_mortal_env: MakeEnv) -> None:
    env = ProcessVectorEnv([make_mortal_env] * 2, num_workers=2)
    try:
        env.reset(seed=0)
        for _ in range(3):
            seen = env.step(np.zeros(2, np.int64)).observation["seen"]
        os.kill(env.worker_pids[1], signal.SIGKILL)
        assert env.call("time_now") == [3, 0]  # of the new episode
        assert env.get_state() is None  # no state belongs to what the caller has seen
        assert seen[:, 1].tolist() == [3, 3]
        step = env.step(np.zeros(2, np.int64))
        assert step.lost_index.tolist() == [1]
        assert step.observation["seen"][:, 1].tolist() == [4, 0]
        assert step.final_observation["seen"].tolist() == [[1, 3]]
        assert env.step(np.zeros(2, np.int64)).observation["seen"][:, 1].tolist() == [5, 1]
        assert env.get_state() is not None
    finally:
        env.close()


def test_states_are_set_in_a_worker_that_had_died(make_mortal_env: MakeEnv) -> None:
    env = ProcessVectorEnv([make_mortal_env] * 2, num_workers=2)
    try:
        env.reset(seed=0)
        env.step(np.zeros(2, np.int64))
        states = env.get_state()
        assert states is not None
        env.step(np.zeros(2, np.int64))
        os.kill(env.worker_pids[0], signal.SIGKILL)
        env.set_state(states)
        assert env.observation["seen"].tolist() == [[0, 1], [1, 1]]
        step = env.step(np.zeros(2, np.int64))
        assert step.observation["seen"].tolist() == [[0, 2], [1, 2]]
        assert step.lost_index.tolist() == []
    finally:
        env.close()


def test_lost_chunk_took_no_steps(make_mortal_env: MakeEnv) -> None:
    # γ^0 = 1: the transition's TD error is 0 + V(last seen) − V(last seen), so that nothing is learned from the loss.
    env = ProcessVectorEnv([lambda: ActionChunk(make_mortal_env(), 2, 0.9)] * 2, num_workers=2)
    try:
        env.reset(seed=0)
        assert env.step(np.array([[0, 0], [0, 1]])).num_steps.tolist() == [2, 0]
        assert env.step(np.zeros((2, 2), np.int64)).num_steps.tolist() == [2, 2]
    finally:
        env.close()


def test_worker_that_fails_in_a_row_ends_the_run(make_mortal_env: MakeEnv) -> None:
    limit = 1
    env = ProcessVectorEnv([make_mortal_env] * 2, num_workers=2, restart_workers=limit)
    env.reset(seed=0)
    die = np.array([0, 1])
    for _ in range(limit):
        assert env.step(die).lost_index.tolist() == [1]
    env.step(np.zeros(2, np.int64))  # a step in between: counted anew
    for _ in range(limit):
        assert env.step(die).lost_index.tolist() == [1]
    pids = env.worker_pids
    with pytest.raises(RunError, match=f"environment 1 ended: killed by SIGKILL; {limit} restarts did not help"):
        env.step(die)
    assert wait_until_gone(pids, 1)
    env.close()


def test_new_worker_that_does_not_come_up_ends_the_run(make_mortal_env: MakeEnv, tmp_path: Path) -> None:
    marker = tmp_path / "broken"
    env = ProcessVectorEnv([lambda: make_mortal_env(dies_in_reset=str(marker))])
    env.reset(seed=0)
    marker.touch()
    with pytest.raises(RunError, match=r"ended: killed by SIGKILL; 3 restarts did not help"):
        env.step(np.array([1]))
    with pytest.raises(RunError, match="restarts did not help"):
        env.reset()
    env.close()


def test_constructor_that_fails_is_not_tried_again(make_mortal_env: MakeEnv, tmp_path: Path) -> None:
    tries = tmp_path / "tries"

    def make() -> gymnasium.Env:
        with open(tries, "a") as file:
            file.write("x")
        os.kill(os.getpid(), signal.SIGKILL)
        return make_mortal_env()

    with pytest.raises(RunError, match="ended: killed by SIGKILL"):
        ProcessVectorEnv([make])
    assert tries.read_text() == "x"


def test_traceback_of_the_worker_is_a_note(make_faulty_env: MakeEnv) -> None:
    env = ProcessVectorEnv([lambda: make_faulty_env("raise")])
    env.reset()
    with pytest.raises(RunError) as caught:
        env.step(np.ones(1, np.int64))
    assert "in step" in caught.value.__notes__[0]


def test_failure_while_making_is_the_environments_own(make_counting_env: MakeEnv) -> None:
    with pytest.raises(InputError, match=r"env\.kwargs"):
        make_vector_env(EnvConfig(id="CartPole-v1", vector="process", kwargs={"gravity": 3}))
    with pytest.raises(InputError, match="environment 1 has action_space Discrete"):
        ProcessVectorEnv([make_counting_env, lambda: make_counting_env(action_space=spaces.Discrete(9))], num_workers=2)


def test_environment_registered_by_the_main_script(make_counting_env: MakeEnv) -> None:
    gymnasium.register(id="test/Counting-v0", entry_point=make_counting_env, max_episode_steps=2)
    try:
        env = make_vector_env(EnvConfig(id="test/Counting-v0", vector="process", kwargs={"length": 5}))
    finally:
        del gymnasium.registry["test/Counting-v0"]
    env.reset()
    env.step(np.zeros(1, np.int64))
    assert env.step(np.zeros(1, np.int64)).truncated.tolist() == [True]
    env.close()


@pytest.mark.parametrize("is_stuck", [False, True], ids=["waiting", "in a step that never ends"])
def test_no_worker_outlives_a_killed_parent(is_stuck: bool) -> None:
    code = f"""
import time, threading
import gymnasium, numpy as np
from deft.envs.process import ProcessVectorEnv
class Stuck(gymnasium.Wrapper):
    def step(self, action):
        time.sleep(1000)
env = ProcessVectorEnv([lambda: Stuck(gymnasium.make("CartPole-v1"))] * 2, num_workers=2)
env.reset()
print(*env.worker_pids, flush=True)
if {is_stuck}:
    env.step(np.zeros(2, np.int64))
time.sleep(1000)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    time.sleep(0.2)  # until the step has begun
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until_gone(pids, 5)


def test_interrupted_call_does_not_mix_up_answers(make_counting_env: MakeEnv) -> None:
    env = ProcessVectorEnv([make_counting_env])
    env.reset(seed=0)
    worker = env._workers[0]
    worker.connection.send((env._request, "call", ("add", 100)))  # asked, and its answer never read
    assert env.call("add", 1) == [1]
    env.close()


def test_default_number_of_workers(make_counting_env: MakeEnv) -> None:
    env = ProcessVectorEnv([make_counting_env] * 3)
    assert len(env.worker_pids) == min(3, len(os.sched_getaffinity(0)))
    env.close()
