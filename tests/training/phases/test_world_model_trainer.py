"""A batch of the world model in micro-batches, and where parameters can be sharded."""

import pytest
import torch
from f1_worlds import f1_batch, micro_policy, wake
from panning_camera import game_config, panning_config

from deft import schema
from deft.errors import InputError
from deft.models.f1.experts import _joint_layer
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.all_phases import train_all
from deft.training.phases.student import StudentTrainer
from deft.training.phases.teacher import TeacherTrainer


def test_a_batch_in_parts_takes_the_step_of_the_whole(tmp_path):
    batch = f1_batch(3, 5)
    batch[schema.STEP_MASK] = torch.arange(3)[:, None] < torch.tensor([3, 1, 2, 3, 1])  # parts of 4 and 6 real steps
    found = []
    for parts in (1, 2):
        config = panning_config(
            tmp_path / str(parts), gradient_accumulation=parts, scheduler="constant", precision="fp32"
        )
        trainer = TeacherTrainer(config, wake(micro_policy(motion_prior=True)))
        trainer.policy.eval()  # nothing is hidden at random
        memory = trainer.policy.initial_memory(5)
        for _ in range(2):
            results, norm = trainer.update_on(batch, memory)
        found.append((trainer.policy.state_dict(), results, norm))
        trainer.close()
    (whole, results, norm), (in_parts, others, other_norm) = found
    torch.testing.assert_close(other_norm, norm, rtol=1e-5, atol=1e-6)
    for name, value in results.items():
        torch.testing.assert_close(others[name], value, rtol=1e-5, atol=1e-6, msg=name)
    for name, value in whole.items():
        torch.testing.assert_close(in_parts[name], value, rtol=1e-6, atol=1e-6, msg=name)


def test_layers_are_compiled_where_that_is_asked_for(tmp_path, monkeypatch):
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda function, **settings: compiled.append(function) or function)
    TeacherTrainer(panning_config(tmp_path), micro_policy())
    assert not compiled
    policy = micro_policy()
    TeacherTrainer(panning_config(tmp_path, compile=True), policy)
    assert compiled[0] is _joint_layer  # and each layer of the vision tower
    assert len(compiled) == 1 + len(policy.model.vision.layers)


def test_where_parameters_cannot_be_sharded_is_an_error(tmp_path):
    cases = [
        (AdversarialTrainer, game_config(tmp_path), "in phase adversarial .*`deft train ppo`, `sft` and `teacher`"),
        (StudentTrainer, panning_config(tmp_path), "in phase student .*`deft train ppo`, `sft` and `teacher`"),
        (train_all, panning_config(tmp_path), "in phase all .*`deft train ppo`, `sft` and `teacher`"),
        (TeacherTrainer, panning_config(tmp_path, lora={}), "not with model.lora"),
        (TeacherTrainer, panning_config(tmp_path, compile=True), "not with compile"),
        (TeacherTrainer, panning_config(tmp_path, sequential_training=False), "not on random steps"),
    ]
    for start, config, message in cases:
        config.training.fsdp = True
        with pytest.raises(InputError, match=f"fsdp: {message}"):
            start(config)
    assert not list(tmp_path.iterdir())
