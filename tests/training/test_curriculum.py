"""The environments become harder at the right time, after a resume and in a new worker too."""

import contextlib
import os
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from worlds import Counting

from deft.config.settings import CurriculumConfig
from deft.envs import Episode, SerialVectorEnv
from deft.envs.process import ProcessVectorEnv
from deft.errors import InputError
from deft.training.curriculum import Curriculum


class Levelled(Counting):
    """Has three levels, and records those that were set."""

    def __init__(self) -> None:
        super().__init__()
        self.levels_set: list[Any] = []

    def set_difficulty(self, level: Any) -> None:
        if level not in ("easy", "medium", "hard"):
            raise ValueError(f"no level {level}")
        self.levels_set.append(level)

    def get_levels_set(self) -> list[Any]:
        return self.levels_set


def episodes(*successes: bool | None) -> list[Episode]:
    return [Episode(0, 1.0, 1, success, {}) for success in successes]


def test_levels_begin_at_their_steps() -> None:
    env = Levelled()
    curriculum = Curriculum(CurriculumConfig(), SerialVectorEnv([env]))
    curriculum.start()
    assert env.levels_set[-1] == curriculum.level == "easy"
    count = len(env.levels_set)
    # The documents' example: easy below 10,000, medium below 50,000, then hard.
    steps = (9_999, 10_000, 30_000, 49_999, 50_000, 90_000)
    assert [curriculum.update(step, []) for step in steps] == [None, "medium", None, None, "hard", None]
    assert env.levels_set[count:] == ["medium", "hard"]


def test_a_long_rollout_may_skip_a_level() -> None:
    curriculum = Curriculum(CurriculumConfig(), SerialVectorEnv([Levelled()]))
    assert curriculum.update(60_000, []) == "hard"


def test_levels_begin_when_enough_episodes_succeed() -> None:
    config = CurriculumConfig(success_rate=0.75, window=4)
    curriculum = Curriculum(config, SerialVectorEnv([Levelled()]))
    curriculum.start()
    assert curriculum.update(10, episodes(True, True, True)) is None  # not four yet
    assert curriculum.update(20, episodes(False)) == "medium"  # 3 of 4
    assert curriculum.update(30, episodes(True, True, True, True)) is None  # nor does the one that began at easy
    assert curriculum.update(40, episodes(False, False)) is None  # the last four: 2 of 4
    assert curriculum.update(50, episodes(True, True, True)) == "hard"  # F T T T
    assert curriculum.update(60, episodes(True, True, True, True)) is None  # nothing is harder


def test_success_that_is_not_reported_raises_an_error() -> None:
    curriculum = Curriculum(CurriculumConfig(success_rate=0.5, window=2), SerialVectorEnv([Levelled()]))
    curriculum.update(5, episodes(None, True, None))  # one that was cut says nothing
    curriculum = Curriculum(CurriculumConfig(success_rate=0.5, window=2), SerialVectorEnv([Levelled()]))
    with pytest.raises(InputError, match="reports no success"):
        curriculum.update(10, episodes(None, None))


def test_an_environment_without_the_method_is_refused_at_the_start() -> None:
    curriculum = Curriculum(CurriculumConfig(), SerialVectorEnv([Counting()]))
    with pytest.raises(InputError) as caught:
        curriculum.start()
    assert str(caught.value) == (
        "env.curriculum: environment 0 (Counting) has no method 'set_difficulty'; give the environment "
        "set_difficulty(level), or leave env.curriculum out"
    )


def test_a_level_that_the_environment_does_not_know_is_refused_at_the_start() -> None:
    config = CurriculumConfig(levels=("easy", "hrad"), at_steps=(1_000_000,))
    with pytest.raises(InputError, match=r"set_difficulty\('hrad'\) raised ValueError: no level hrad"):
        Curriculum(config, SerialVectorEnv([Levelled()])).start()


def test_a_resumed_run_is_where_it_was() -> None:
    config = CurriculumConfig(success_rate=1.0, window=2)
    first = Curriculum(config, SerialVectorEnv([Levelled()]))
    first.update(1, episodes(True, True))
    first.update(2, episodes(False, True))  # the first of them began at easy
    env = Levelled()
    second = Curriculum(config, SerialVectorEnv([env]))
    second.load_state_dict(first.state_dict())
    second.start()
    assert env.levels_set == ["medium"]  # what the saved state was at, and nothing else
    assert second.update(3, episodes(True)) == "hard"  # with the one success before


def test_a_collector_is_paused_only_while_a_level_is_set() -> None:
    pauses = []

    @contextlib.contextmanager
    def paused() -> Iterator[None]:
        pauses.append(len(env.levels_set))
        yield

    env = Levelled()
    curriculum = Curriculum(CurriculumConfig(), SerialVectorEnv([env]), paused)
    curriculum.update(1, [])
    curriculum.update(10_000, [])
    assert pauses == [0]
    assert env.levels_set == ["medium"]


def test_a_new_worker_is_told_the_level() -> None:
    env = ProcessVectorEnv([Levelled] * 2, num_workers=2)
    try:
        curriculum = Curriculum(CurriculumConfig(), env)
        curriculum.start()
        env.reset(seed=0)
        curriculum.update(10_000, [])
        os.kill(env.worker_pids[1], signal.SIGKILL)
        assert env.step(np.zeros(2, np.int64)).lost_index.tolist() == [1]
        assert env.call("get_levels_set") == [["hard", "medium", "easy", "medium"], ["medium"]]
    finally:
        env.close()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"levels": ("easy",)}, "at least two different ones"),
        ({"levels": ("easy", "hard")}, "2 levels need 1 growing numbers of steps"),
        ({"at_steps": (5, 3)}, "3 levels need 2 growing numbers of steps, not [5, 3]"),
        ({"levels": (1, 2)}, "not []; give --curriculum-at-steps or --curriculum-success-rate"),
        ({"at_steps": (5, 8), "success_rate": 0.5}, "give at_steps or success_rate, one of them"),
    ],
)
def test_wrong_settings_raise_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError) as caught:
        CurriculumConfig(**settings)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
