"""Several processes that train one policy: equal weights, two half batches are one whole, checkpoints go over."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from shared_learning import one_update, run, shard_f1, teach, train_vla

from deft import cli
from deft.runs import checkpoint
from deft.runs.processes import Processes

TESTS = Path(__file__).parents[1]


def launch(count, *arguments):
    """Start processes with the environment variables of `torchrun`."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {**os.environ, "WORLD_SIZE": str(count), "LOCAL_WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1"}
    shared |= {"MASTER_PORT": str(port), "PYTHONPATH": f"{TESTS}:{TESTS.parent}", "OMP_NUM_THREADS": "1"}
    started = [
        subprocess.Popen(
            [sys.executable, str(TESTS / "shared_learning.py"), *arguments],
            env={**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(count)
    ]
    errors = [process.communicate(timeout=170)[1] for process in started]
    assert all(process.returncode == 0 for process in started), "\n".join(error[-1500:] for error in errors)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    launch(2, str(folder), "train")
    return folder, [torch.load(folder / f"rank{rank}.pt", weights_only=False) for rank in range(2)]


@pytest.mark.parametrize("name", ["ppo", "grpo", "iql", "sac"])
def test_two_half_batches_are_one_whole(trained, name, monkeypatch):
    monkeypatch.setattr(torch, "randn", torch.randn)  # put back afterwards
    whole = one_update(name, Processes())
    first, second = (part["halves"][name] for part in trained[1])
    for key, value in whole.items():
        assert torch.equal(first[key], second[key]), key
        assert torch.allclose(first[key].double(), value.double(), rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("name", ["ppo-critic", "grpo-critic"])
def test_a_critic_of_actions_is_the_same_in_all_processes(trained, name):
    """It learns from batches of each process's own rollouts, so that two halves are not one whole."""
    first, second = (part["halves"][name] for part in trained[1])
    assert any(key.startswith("action critic.") for key in first)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@pytest.mark.parametrize("name", ["ppo", "grpo", "sac", "iql"])
def test_weights_are_equal_after_every_update(trained, name):
    first, second = (part["runs"][name] for part in trained[1])
    assert len(first["after"]) == len(second["after"]) >= 2
    assert first["steps"] == second["steps"]
    last = len(first["after"]) - 1
    for number, (one, other) in enumerate(zip(first["after"], second["after"], strict=True)):
        assert torch.equal(one, other), number
    assert not torch.equal(first["after"][0], first["after"][last])


def test_each_process_has_its_own_experience(trained):
    first, second = (part["runs"] for part in trained[1])
    assert first["ppo"]["steps"] == 96  # env steps of both together: 3 rollouts of 8 steps in 2 · 2 environments
    starts = torch.cat([run_["ppo"]["seen"][0][0] for run_ in (first, second)])
    assert len(torch.unique(starts, dim=0)) == 4
    # 200 transitions, each with an action of its own: no process draws what is another's.
    drawn = [set(torch.cat(run_["iql"]["seen"]).flatten().tolist()) for run_ in (first, second)]
    assert not drawn[0] & drawn[1]
    assert first["iql"]["steps"] == 14  # 2 epochs of ⌈200 / (2 · 16)⌉ updates


def test_sharded_parameters_take_the_steps_of_full_ones(trained):
    """FSDP in its smallest form; the slow tests below train whole runs with it, and resume them with other numbers."""
    first, second = (part["sharded"] for part in trained[1])
    assert first["share"] + second["share"] == pytest.approx(1.0)
    assert not second["weights"]  # rank 0 has them all
    alone = shard_f1(Processes(), None)["weights"]
    assert alone.keys() == first["weights"].keys()
    for name, value in alone.items():
        assert torch.allclose(first["weights"][name].double(), value.double(), atol=1e-5), name


def test_a_checkpoint_of_two_goes_on_in_one(trained, tmp_path):
    folder, _ = trained
    # Env steps are those of all processes; an epoch is more updates in one: 4 of ⌈200 / 16⌉.
    for name, steps in (("ppo", 192), ("sac", 192), ("iql", 52)):
        resumed = run(name, tmp_path, scale=2, resume=str(folder / name))
        assert resumed["steps"] == steps
        assert len(resumed["after"]) > 0


@pytest.fixture(scope="module")
def shared_out(tmp_path_factory):
    """Runs of two processes with whole weights and with shares, those gone on in one, and, of three, from there."""
    folder = tmp_path_factory.mktemp("shared-out")
    world = ["--env", "reach", "--env-kwargs", "observation=vla", "image_size=16", "--policy", "expert"]
    assert cli.main(["collect", *world, "--episodes", "3", "--out", str(folder / "demos")]) == 0
    launch(2, str(folder), "shard")
    for name in ("ppo", "sft"):
        train_vla(name, folder / f"{name}-one", fsdp=False, start=folder / f"{name}-shared", scale=2)
    launch(3, str(folder), "shard", str(folder / "shard2-0.pt"))
    return folder


@pytest.mark.slow
def test_weights_that_are_shared_out_train_as_whole_ones(shared_out):
    tmp_path = shared_out
    first, second = (torch.load(tmp_path / f"shard2-{rank}.pt", weights_only=False) for rank in range(2))
    assert first["share"] + second["share"] == pytest.approx(1.0)
    assert not second["weights"]  # the first process has them all
    alone = shard_f1(Processes(), None)
    for name, value in alone["weights"].items():
        assert torch.allclose(first["weights"][name].double(), value.double(), atol=1e-5), name
    three = torch.load(tmp_path / "shard3-0.pt", weights_only=False)["weights"]
    further = shard_f1(Processes(), tmp_path / "shard2-0.pt")["weights"]
    for name, value in further.items():
        assert torch.allclose(three[name].double(), value.double(), atol=1e-5), name
    # The same of `deft train teacher --fsdp`: weights and optimizer state of a run without it, in files of one process.
    assert all(part["teacher"]["is_sharded"] for part in (first, second))
    assert 0.5 < first["teacher"]["share"] < 0.8  # half of all but the image tokenizer
    apart, shared = (read_checkpoint(tmp_path / name) for name in ("apart", "shared"))
    assert apart[0].keys() == shared[0].keys()
    for name, value in apart[0].items():
        assert torch.allclose(shared[0][name].double(), value.double(), atol=1e-5), name
    for index, parameter_state in apart[1]["state"].items():
        assert torch.allclose(shared[1]["state"][index]["exp_avg"], parameter_state["exp_avg"], atol=1e-5), index
    assert (tmp_path / "three" / "checkpoint-24").is_dir()
    resumed = teach(tmp_path / "one", fsdp=True, start=tmp_path / "shared", num_episodes=24)  # nobody to share with
    assert not resumed["is_sharded"]
    assert resumed["summary"]["episodes"] == 24


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "sft"])
def test_a_vla_model_that_is_shared_out_trains_as_a_whole_one(shared_out, name):
    parts = [torch.load(shared_out / f"shard2-{rank}.pt", weights_only=False)[name] for rank in range(2)]
    assert parts[0]["share"] + parts[1]["share"] == pytest.approx(1.0)
    assert parts[0]["steps"] == parts[1]["steps"]
    apart, shared = (read_checkpoint(shared_out / f"{name}-{kind}", "algorithm") for kind in ("apart", "shared"))
    assert apart[0].keys() == shared[0].keys()
    for key, value in apart[0].items():
        assert torch.allclose(shared[0][key].double(), value.double(), atol=1e-5), key
    key = "optimizer" if name == "ppo" else "actor_optimizer"
    ones, others = (state[1][key]["state"] for state in (apart, shared))
    assert ones.keys() == others.keys()
    for index, values in ones.items():
        for name, value in values.items():  # step, exp_avg, exp_avg_sq
            torch.testing.assert_close(others[index][name], value, rtol=1e-3, atol=1e-7, msg=f"{name} of {index}")
    # Two processes with shares, then one with the whole, then three with shares: a third of the steps each.
    steps = [
        int(checkpoint.find_checkpoint(shared_out / f"{name}-{kind}").name.removeprefix("checkpoint-"))
        for kind in ("shared", "one", "three")
    ]
    assert steps[0] < steps[1] < steps[2]
    last = read_checkpoint(shared_out / f"{name}-three", "algorithm")
    assert last[1][key]["count"] > apart[1][key]["count"]
    assert all(torch.isfinite(value).all() for value in last[0].values())


def read_checkpoint(run_dir, part="optimizer"):
    folder = checkpoint.find_checkpoint(run_dir)
    weights = torch.load(folder / checkpoint.MODEL, weights_only=True)
    return weights, checkpoint.load_training_state(folder)[part]


@pytest.mark.slow
def test_a_checkpoint_of_two_goes_on_in_three_and_in_two(trained, tmp_path):
    folder, _ = trained
    for count in (3, 2):
        copy = tmp_path / str(count)
        subprocess.run(["cp", "-r", str(folder), str(copy)], check=True)
        launch(count, str(copy), "resume")
        resumed = [torch.load(copy / f"resumed{rank}.pt", weights_only=False) for rank in range(count)]
        for name in ("ppo", "sac", "iql"):
            assert len({len(one[name]["after"]) for one in resumed}) == 1
            assert all(torch.equal(one[name]["after"][-1], resumed[0][name]["after"][-1]) for one in resumed)
