"""Which runs may shard weights, and the copy that acts in their place; sharding itself is in test_shared_training."""

import logging

import pytest
import torch
from gymnasium import spaces

from deft import cli
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.runs import sharding
from deft.runs.processes import Processes

CPU = torch.device("cpu")
WHO_CAN = "`deft train ppo`, `sft` and `teacher` support it"


def small_policy() -> ActorCritic:
    torch.manual_seed(0)
    return ActorCritic(spaces.Box(-1, 1, (3,)), spaces.Box(-1, 1, (2,)), PolicyConfig(hidden_sizes=(4,)))


@pytest.mark.parametrize("name", ["sac", "grpo", "iql", "cql", "td3-bc", "dt", "student", "adversarial", "all"])
def test_who_keeps_weights_whole_says_who_does_not(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    online = {"sac": ["--env", "Pendulum-v1"], "grpo": ["--env", "CartPole-v1"]}
    subject = [] if name in ("student", "adversarial", "all") else online.get(name, ["--dataset", "some"])
    assert cli.main(["train", name, *subject, "--fsdp"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "fsdp: " in error[0]
    assert error[0].endswith(WHO_CAN)
    assert not list(tmp_path.rglob("checkpoint-*"))


def test_one_process_is_told_that_there_is_nobody_to_share_with(caplog):
    processes = Processes()
    with caplog.at_level(logging.WARNING):
        assert not sharding.should_shard(False, "ppo", True, processes)
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert not sharding.should_shard(True, "ppo", True, processes)
    assert [record.message for record in caplog.records] == [sharding.ONE_PROCESS]
    processes.count = 2
    assert sharding.should_shard(True, "ppo", True, processes)


def test_weights_of_several_types_and_compiled_ones_raise_an_error():
    policy = small_policy()
    next(policy.parameters()).data = next(policy.parameters()).data.bfloat16()
    with pytest.raises(InputError, match=r"fsdp: .* here bfloat16 and float32; use dtype float32, or lora"):
        sharding.shard_policy(policy, Processes(), CPU)
    policy = small_policy()
    next(policy.children())._compiled_call_impl = len  # as Module.compile() leaves it
    with pytest.raises(InputError, match="fsdp: not with compile"):
        sharding.shard_policy(policy, Processes(), CPU)


def test_the_copy_holds_weights_from_take_to_free():
    policy = small_policy()
    copy = sharding.WholeCopy(policy, CPU)
    assert sum(parameter.numel() for parameter in copy.policy.parameters()) == 0
    with torch.no_grad():
        for tensor in (*policy.parameters(), *policy.buffers()):
            tensor += 1
    copy.take()
    for name, value in policy.state_dict().items():
        assert torch.equal(copy.policy.state_dict()[name], value), name
    assert not any(parameter.requires_grad for parameter in copy.policy.parameters())
    copy.free()
    assert sum(parameter.numel() for parameter in copy.policy.parameters()) == 0
    assert sum(parameter.numel() for parameter in policy.parameters()) > 0
    silent = sharding.WholeCopy(policy, CPU, keeps=False)
    silent.take()
    assert sum(parameter.numel() for parameter in silent.policy.parameters()) == 0
