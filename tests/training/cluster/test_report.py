"""What a run would put where, for clusters that are only described."""

import pytest

from deft.cli import main
from deft.training.cluster.report import describe_cluster, plan


def node(host, cpus, gpus=0, here=False):
    return {
        "host": host, "address": host, "cpus": cpus, "gpus": gpus, "memory": 2.0**35, "object_store": 2.0**33,
        "here": here,
    }  # fmt: skip


def test_learners_go_to_the_gpus_and_workers_to_the_cpus_that_are_left():
    nodes = [node("head", 16.0, 8.0, here=True), node("farm", 64.0)]
    chosen = plan(nodes)
    assert chosen["learners"] == [{"host": "head", "processes": 8}]
    assert chosen["workers"] == [{"host": "head", "workers": 8}, {"host": "farm", "workers": 64}]
    text = describe_cluster({"address": "auto", "reason": None, "nodes": nodes, "plan": chosen})
    assert "node head (here): 16 CPUs, 8 GPUs, memory 32.0 GiB, object store 8.0 GiB" in text
    assert "--ray-address auto --num-workers 72 --num-envs 72" in text
    assert "accelerate launch --num_machines 1 --num_processes 8" in text


def test_without_gpus_one_cpu_learns():
    chosen = plan([node("laptop", 4.0, here=True)])
    assert chosen["learners"] == [{"host": "laptop", "processes": 1}]
    assert chosen["num_workers"] == 3
    assert plan([node("tiny", 1.0)])["num_workers"] == 1  # it shares the CPU


def test_the_command_refuses_an_address_that_does_not_answer(capsys):
    pytest.importorskip("ray", reason="needs the extra scale")
    assert main(["doctor", "--cluster", "--ray-address", "127.0.0.1:1"]) == 2
    assert "no cluster answers at '127.0.0.1:1'" in capsys.readouterr().err
