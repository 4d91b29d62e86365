import logging

import gymnasium
import numpy as np
import pytest
import torch
from policies import actor_policy
from worlds import Counting

from deft.algorithms.ppo import PPO
from deft.envs.process import ProcessVectorEnv
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.runs import compute
from deft.runs.checkpoint import load_training_state
from deft.runs.compute import (
    Threads,
    autocast,
    choose_device,
    choose_online_device,
    choose_precision,
    cpu_has_bfloat16,
    is_small,
    set_precision,
    thread_counts,
    threads_for,
    torch_threads,
)
from deft.training.trainer import Trainer

ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm {}\nCPU part\t: 0xd0c\n"


@pytest.fixture
def free_choice(monkeypatch):
    """No OMP_NUM_THREADS, which the other tests run with."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)


@pytest.mark.parametrize(
    ("requested", "small", "reserved", "cores", "counts"),
    [
        (None, False, 0, 8, (1, 2, 4, 8)),
        (None, False, 0, 6, (1, 2, 4, 6)),
        (None, False, 5, 8, (1, 2, 3)),  # five cores are those of workers and a background collector
        (None, False, 16, 8, (1,)),  # never less than one
        (None, True, 0, 8, (1,)),  # a small network
        (6, True, 16, 8, (6,)),  # what was asked for
    ],
)
@pytest.mark.usefixtures("free_choice")
def test_thread_counts_to_choose_from(requested, small, reserved, cores, counts):
    assert thread_counts(requested, small, reserved, cores) == counts


@pytest.mark.parametrize(("variable", "counts"), [("3", (3,)), ("4,2", (4,)), ("all", (1, 2)), ("0", (1, 2))])
def test_omp_num_threads_is_respected(monkeypatch, variable, counts):
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert thread_counts(None, cores=2) == counts
    assert thread_counts(5, cores=2) == (5,)  # a flag comes first


@pytest.mark.usefixtures("free_choice")
def test_networks_are_small_by_their_largest_product():
    space, action = gymnasium.spaces.Box(-1, 1, (8,)), gymnasium.spaces.Box(-1, 1, (2,))
    policy = actor_policy(space, action)  # 256 × 256 weights
    assert threads_for(None, policy, 32, cores=4).counts == (1,)  # 2.1 M multiplications
    assert threads_for(None, policy, 256, cores=4).counts == (1, 2, 4)  # 16.8 M
    camera = gymnasium.spaces.Dict({"rgb": gymnasium.spaces.Box(0, 255, (3, 64, 64), np.uint8)})
    assert threads_for(None, actor_policy(camera, action), 1, cores=4).counts == (1, 2, 4)


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 0.55, 4: 0.3, 8: 0.2}, 8),  # a quiet machine
        ({1: 1.0, 2: 0.55, 4: 0.5, 8: 0.1}, 2),  # 4 threads are 1.1 times as fast as 2: not worthwhile
        ({1: 1.0, 2: 9.0, 4: 20.0, 8: 30.0}, 1),  # a busy one
        ({1: 1.0, 2: 0.9, 4: 0.2, 8: 0.1}, 1),
    ],
)
def test_the_fastest_count_is_chosen(seconds, chosen):
    threads = Threads((1, 2, 4, 8), seconds=lambda size, count: seconds[count])
    with threads.applied():
        assert threads.count == torch.get_num_threads() == chosen


def test_a_collapse_of_throughput_is_measured_again():
    now, seconds = [0.0], {1: 1.0, 2: 0.5}
    threads = Threads((1, 2), seconds=lambda size, count: seconds[count], clock=lambda: now[0])

    def iterate(count, each):
        for _ in range(count):
            threads.begin()
            now[0] += each
            threads.tick(1)
            now[0] += 5.0  # an evaluation between two iterations does not count

    with threads.applied():
        iterate(20, 0.5)  # 2 iterations a second
        assert threads.count == 2
        seconds[2] = 8.0  # another process takes a core
        iterate(2, 0.8)  # 1.25 a second: above 0.6 of 2
        assert threads.count == 2
        iterate(2, 2.0)  # 0.5 a second
        assert threads.count == torch.get_num_threads() == 1


def test_a_resumed_run_computes_with_the_count_of_its_checkpoint():
    def quick(size, count):
        return 1.0 / count

    first = Threads((1, 2, 4), seconds=quick)
    with first.applied():
        pass
    resumed = Threads((1, 2, 4), seconds=lambda size, count: count)  # it would measure 1
    resumed.load_state_dict(first.state_dict())
    with resumed.applied():
        assert torch.get_num_threads() == 4
    fixed = Threads((2,), seconds=quick)  # --threads 2
    fixed.load_state_dict(4)
    assert fixed.count == 2


@pytest.mark.usefixtures("free_choice")
def test_a_trainer_leaves_cores_to_what_runs_beside_the_update(tmp_path):
    env = ProcessVectorEnv([Counting, Counting], num_workers=2)
    try:
        policy = ActorCritic(env.observation_space, env.action_space)
        assert Trainer(policy, env, PPO(policy), threads=3).run.threads.counts == (3,)
        assert Trainer(policy, env, PPO(policy)).run.threads.counts == (1,)  # small
    finally:
        env.close()


def test_the_choice_is_kept_in_the_checkpoint(tmp_path):
    env = gymnasium.make("CartPole-v1")
    policy = ActorCritic(env.observation_space, env.action_space)
    trainer = Trainer(policy, env, PPO(policy), 16, threads=2, output_dir=tmp_path, eval_freq=0)
    trainer.train(16)
    assert load_training_state(tmp_path / "checkpoint-16")["threads"] == 2


def test_threads_are_put_back_and_small_matrices_leave_onednn_out():
    before, enabled = torch.get_num_threads(), torch.backends.mkldnn.enabled
    with torch_threads(2, small_matrices=True):
        assert torch.get_num_threads() == 2
        assert not torch.backends.mkldnn.enabled
    assert torch.get_num_threads() == before
    assert torch.backends.mkldnn.enabled == enabled


def test_small_policies_in_bfloat16_are_left_to_onednn():
    spaces = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Box(-1, 1, (2,))
    assert is_small(actor_policy(*spaces))
    assert not is_small(actor_policy(*spaces, dtype=torch.bfloat16))


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


VECTOR = gymnasium.spaces.Box(-1, 1, (3,)), gymnasium.spaces.Box(-1, 1, (2,))
CAMERA = gymnasium.spaces.Box(0, 255, (3, 32, 32), np.uint8), gymnasium.spaces.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("policy", "batch_size", "captured", "chosen", "reason"),
    [
        # The largest layer of 256-256 has 65,536 weights. One with a batch of 976 takes 63,963,136 multiplications.
        (VECTOR, 64, False, "cpu", "the network is small"),
        (VECTOR, 976, False, "cpu", "the network is small"),
        (VECTOR, 977, False, "cuda", "64028672 multiplications per batch"),
        (VECTOR, 61, True, "cuda", "captured as a CUDA graph"),
        (CAMERA, 64, False, "cuda", "convolutions"),
    ],
)
def test_auto_trains_a_small_network_that_acts_on_the_cpu(
    policy, batch_size, captured, chosen, reason, monkeypatch, caplog
):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with caplog.at_level(logging.INFO, "deft"):
        device = choose_online_device("auto", actor_policy(*policy), batch_size, captured)
    assert device == torch.device(chosen)
    (line,) = caplog.messages
    other = {"cpu": "cuda", "cuda": "cpu"}[chosen]
    assert line.startswith(f"device: auto chose {chosen}: ")
    assert reason in line
    assert line.endswith(f"override with --device {other}")


def test_a_device_that_is_given_is_used_whatever_the_network(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    policy = actor_policy(*VECTOR)
    with caplog.at_level(logging.INFO, "deft"):
        assert choose_online_device("cuda", policy, 64) == torch.device("cuda")
        assert choose_online_device("cuda:1", policy, 64) == torch.device("cuda:1")
        assert choose_online_device("cpu", actor_policy(*CAMERA), 64) == torch.device("cpu")
        monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
        assert choose_online_device("auto", policy, 64) == torch.device("cpu")
    assert not caplog.messages  # nothing was chosen


def test_a_cpu_without_instructions_for_it_gets_no_bfloat16(monkeypatch):
    assert not cpu_has_bfloat16(ARM.format("atomics"))
    assert cpu_has_bfloat16(ARM.format("bf16"))
    assert cpu_has_bfloat16("flags\t\t: fpu avx512_bf16 sse\n")
    assert not cpu_has_bfloat16("flags\t\t: fpu avx512f sse\n")
    cpu = torch.device("cpu")
    for has, quicker, expected in ((True, True, torch.bfloat16), (True, False, None), (False, True, None)):
        monkeypatch.setattr(compute, "cpu_has_bfloat16", lambda has=has: has)
        monkeypatch.setattr(compute, "bfloat16_is_faster", lambda quicker=quicker: quicker)
        assert choose_precision("auto", cpu) is expected
    assert choose_precision("fp32", cpu) is None
    assert choose_precision("bf16", cpu) is torch.bfloat16


def test_autocast_is_where_it_is_asked_for():
    product = torch.ones(2, 2)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert (product @ product).dtype is torch.bfloat16
    with autocast(torch.device("cpu"), None):
        assert (product @ product).dtype is torch.float32


@pytest.mark.parametrize(("precision", "matmul", "rounds"), [("tf32", "high", True), ("fp32", "highest", False)])
def test_precision_holds_for_convolutions_too(precision, matmul, rounds):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_precision(torch.device("cuda"), precision)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, rounds)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("name", "has_units", "is_warned"), [("bf16", False, True), ("bf16", True, False), ("fp32", False, False)]
)
def test_bf16_that_a_cpu_emulates_causes_a_warning(monkeypatch, caplog, name, has_units, is_warned):
    monkeypatch.setattr(compute, "cpu_has_bfloat16", lambda: has_units)
    set_precision(torch.device("cpu"), name)
    assert ("no bf16 instructions" in caplog.text) == is_warned
