import gymnasium
import pytest
import torch
from worlds import Counting

from deft.algorithms.ppo import PPO
from deft.envs.process import ProcessVectorEnv
from deft.errors import InputError
from deft.machine import available_cores
from deft.models.actor import Actor
from deft.models.actor_critic import ActorCritic
from deft.training.compute import choose_device, choose_threads, is_small, torch_threads
from deft.training.trainer import Trainer


@pytest.mark.parametrize(
    ("requested", "workers", "background", "cores", "threads"),
    [
        (None, 0, False, 8, 8),  # the machine is ours
        (None, 4, False, 8, 4),  # four cores are the workers'
        (None, 4, True, 8, 3),  # one more is the background collector's
        (None, 2, False, 2, 1),  # never less than one
        (None, 16, True, 8, 1),
        (6, 16, True, 8, 6),  # what was asked for
    ],
)
def test_threads_are_what_workers_and_collector_leave(requested, workers, background, cores, threads):
    assert choose_threads(requested, workers, background, cores) == threads


def test_a_trainer_counts_its_workers():
    env = ProcessVectorEnv([Counting, Counting], num_workers=2)
    try:
        policy = ActorCritic(env.observation_space, env.action_space)
        assert env.num_workers == 2
        assert Trainer(policy, env, PPO(policy)).threads == max(1, available_cores() - 2)
        assert Trainer(policy, env, PPO(policy), threads=3).threads == 3
    finally:
        env.close()


def test_threads_are_put_back_and_small_matrices_leave_onednn_out():
    before, enabled = torch.get_num_threads(), torch.backends.mkldnn.enabled
    with torch_threads(2, small_matrices=True):
        assert torch.get_num_threads() == 2
        assert not torch.backends.mkldnn.enabled
    assert torch.get_num_threads() == before
    assert torch.backends.mkldnn.enabled == enabled


def test_small_policies_in_bfloat16_are_left_to_onednn():
    spaces = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Box(-1, 1, (2,))
    assert is_small(Actor(*spaces))
    assert not is_small(Actor(*spaces, dtype=torch.bfloat16))


def test_training_runs_with_the_chosen_threads(tmp_path):
    seen = []

    class Looks(PPO):
        def update(self, batches):
            seen.append(torch.get_num_threads())
            return super().update(batches)

    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space)
    trainer = Trainer(policy, env, Looks(policy), 16, threads=2, output_dir=tmp_path, eval_freq=0)
    trainer.train(16)
    assert seen == [2]


def test_devices_that_are_not_there_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert choose_device("auto") == torch.device("cpu")
    with pytest.raises(InputError, match="'cuda:1' was asked for, but torch sees 0"):
        choose_device("cuda:1")
    with pytest.raises(InputError, match="'gpu' cannot be used"):
        choose_device("gpu")
