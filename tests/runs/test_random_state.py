"""Episodes of training, of the evaluations during training and of tests start from seeds that are never shared."""

from typing import ClassVar

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces

from deft import PPO, ActorCritic, Trainer
from deft.algorithms.grpo import GRPO
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.config.settings import LoggingConfig
from deft.runs.random_state import EVALUATION_SEED, TRAINING_SEEDS, process_seed, training_seed

QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False)


class Seeded(gymnasium.Env):
    """Episodes of two steps; the class keeps the seeds that its instances were reset with."""

    observation_space = spaces.Box(-1.0, 1.0, (1,), np.float32)
    action_space = spaces.Discrete(2)
    seeds: ClassVar[list[int]]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        if seed is not None:
            self.seeds.append(seed)
        self.count = 0
        return self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32), {}

    def step(self, action):
        self.count += 1
        return self.np_random.uniform(-1.0, 1.0, 1).astype(np.float32), float(action), self.count == 2, False, {}


def seeds_of_run(tmp_path, seed: int, algorithm: str = "ppo") -> tuple[set[int], set[int]]:
    """The seeds that a run of 16 environments trains with, and those of its evaluations."""

    class Training(Seeded):
        seeds: ClassVar[list[int]] = []

    class Evaluation(Seeded):
        seeds: ClassVar[list[int]] = []

    envs = [Training() for _ in range(16)]
    Training.seeds.clear()
    policy = ActorCritic(envs[0].observation_space, envs[0].action_space)
    if algorithm == "ppo":
        learner = PPO(policy, PPOSettings(n_epochs=1))
    else:
        learner = GRPO(policy, GRPOSettings(n_epochs=1, group_size=4))
    trainer = Trainer(
        policy, envs, learner, 4, eval_env=Evaluation(), eval_freq=1, eval_episodes=16, seed=seed,
        output_dir=tmp_path / f"{algorithm}-{seed}", logging_config=QUIET,
    )  # fmt: skip
    Training.seeds.clear()  # what making the vector environment asked for
    Evaluation.seeds.clear()
    trainer.train(64)
    trainer.close()
    return set(Training.seeds), set(Evaluation.seeds)


@pytest.mark.parametrize("algorithm", ["ppo", "grpo"])
def test_runs_of_other_seeds_share_no_environment_seed(tmp_path, algorithm):
    runs = [seeds_of_run(tmp_path, seed, algorithm) for seed in (0, 1, 2)]
    tests = set(range(1000)) | set(range(2**30, 2**30 + 1000))  # `deft evaluate` and `deft compare` with seed 0
    for index, (training, evaluation) in enumerate(runs):
        assert len(training) >= (16 if algorithm == "ppo" else 4)
        assert len(evaluation) == 16
        assert all(seed in TRAINING_SEEDS for seed in training)
        assert not training & tests
        assert not evaluation & tests
        for other, evaluated in runs[:index]:
            assert not training & other
            assert not training & evaluated


def test_the_seeds_of_a_run_do_not_change():
    """A fixed value: a resumed run whose environments cannot save their state starts from the same seeds again."""
    sequence = np.random.SeedSequence([7]).generate_state(1, np.uint64)[0]
    assert training_seed(7) == 2**24 + int(sequence) % (2**29 - 2**24)
    assert training_seed(7) != training_seed(7, 1)
    assert TRAINING_SEEDS.stop == EVALUATION_SEED


def test_a_process_of_one_run_draws_other_numbers_than_the_next_run():
    seeds = {process_seed(seed, rank) for seed in range(10) for rank in range(8)}
    assert len(seeds) == 80  # seed + rank would give 17
    assert process_seed(5, 0) == 5
