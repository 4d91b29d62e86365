"""Phase 1 beside the game: with random data alone, both must train the same world model."""

import copy
import json

import numpy as np
import pytest
import torch
from f1_worlds import micro_policy, wake
from panning_camera import game_config, panning_config

from deft.training.phases.exploration import InlineExplorer
from deft.training.phases.teacher import TeacherTrainer


@pytest.fixture
def benchmark(load_benchmark):
    return load_benchmark("phases_results")


def test_on_random_data_alone_the_game_trains_as_phase_1_does(benchmark, monkeypatch, tmp_path):
    """Bit for bit: the same episodes, drawn alike, at the same learning rates, with the same optimizer.

    What is random inside the model's training pass is switched off, as the explorer's dice come in between.
    """
    micro = wake(micro_policy(condition_init=0.05, unknown_action_rate=0.0, mask_sequence_rate=0.0))
    TeacherTrainer(panning_config(tmp_path / "teacher", num_episodes=2), micro).train()
    shares = {"random_share": 1.0, "replay_share": 0.0, "random_episodes": 2, "wm_updates": 2, "total_iterations": 4}
    config = game_config(tmp_path / "adversarial", **shares)
    config.training.precision = "float32"
    config.training.batch_size = 3
    config.student.teacher_checkpoint = config.adversarial.teacher_checkpoint = str(tmp_path / "teacher")
    game = benchmark.PacedGame(copy.deepcopy(config))
    start = copy.deepcopy(game.policy)
    game.generator = np.random.default_rng(5)
    rates = watch_rates(game)
    game.train()
    whole = json.loads((tmp_path / benchmark.PACE_FILE).read_text())
    # 6 steps in chunks of 3 are 2 updates a batch, 2 batches an iteration
    assert whole == {"pace": [[4, 0.0], [8, 0.25], [12, 0.5], [16, 0.75]], "over": True}

    known = []  # as phase 1 comes to know it: it is quicker than the game, and waits for each iteration

    def an_iteration_later(_: float) -> None:
        over = len(known) == len(whole["pace"])
        known.extend([] if over else [whole["pace"][len(known)]])
        (tmp_path / benchmark.PACE_FILE).write_text(json.dumps({"pace": known, "over": over}))

    (tmp_path / benchmark.PACE_FILE).unlink()
    monkeypatch.setattr(benchmark.time, "sleep", an_iteration_later)
    beside = benchmark.TeacherInStep(benchmark.longer_teacher(config, tmp_path / "random"))
    assert all(torch.equal(one, other) for one, other in zip(weights(beside.policy), weights(start), strict=True))
    beside.generator = np.random.default_rng(5)
    beside.explorer = handed_out(benchmark, game, benchmark.new_episodes(config))
    rates_beside = watch_rates(beside)
    beside.train()
    assert beside.num_updates == game.num_updates == 16
    assert rates_beside == rates
    assert len(set(rates)) > 4
    assert beside.num_taken == game.num_random == 8  # 2 new ones an iteration
    assert all(torch.equal(one, other) for one, other in zip(weights(beside.policy), weights(game.policy), strict=True))
    assert not all(torch.equal(one, other) for one, other in zip(weights(beside.policy), weights(start), strict=True))


def weights(policy: torch.nn.Module) -> list[torch.Tensor]:
    return list(policy.state_dict().values())


def watch_rates(trainer) -> list[float]:
    """The learning rate of each update to come."""
    rates: list[float] = []
    trainer.optimizer.register_step_pre_hook(lambda optimizer, *_: rates.append(optimizer.param_groups[0]["lr"]))
    return rates


def handed_out(benchmark, game, count):
    """A `PacedExplorer` without processes: the random episodes that the game had."""

    class Handed(benchmark.PacedExplorer):
        def __init__(self) -> None:
            self._count, self._every_batches, self._batches = count, game.config.adversarial.wm_updates, 0
            self._source = InlineExplorer(game._random_exploration)

        def take(self, number):
            return self._source.take(number)

        def allow(self, number):
            """It collects when asked."""

        def close(self):
            self._source.close()

    return Handed()


def test_phase_1_gets_as_many_new_episodes_as_the_game_trains_on(benchmark, tmp_path):
    config = game_config(tmp_path, random_share=0.5, random_episodes=3)
    config.training.num_envs, config.student.explorer.episodes_per_update = 4, 6
    assert benchmark.new_episodes(config) == 8 + 3  # two rounds of four copies
    config.adversarial.random_share = 1.0
    assert benchmark.new_episodes(config) == 3  # the explorer's are not trained on


def test_gains_are_of_all_scenes_and_of_each_half(benchmark):
    """Random scenes come first: there the game is 1 and 0 lower, in the scripted ones 2 and 4.

    All: mean 1.75, deviations −0.75, −1.75, 0.25, 2.25, so √(8.75 / 3 / 4) = 0.8539. A half: the difference over 2.
    """
    held_out = {"random": {"episodes": [3.0, 2.0, 5.0, 6.0]}, "game": {"episodes": [2.0, 2.0, 3.0, 2.0]}}
    scenes = benchmark.scene_gains({"held_out": held_out})
    assert benchmark._gains(scenes) == ["+1.7500 ± 0.8539", "+3.0000 ± 1.0000", "+0.5000 ± 0.5000"]
