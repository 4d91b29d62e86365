"""What learns: the choice of parts, optimizers and schedules, and LoRA."""

import json

import pytest
import torch
from f1_worlds import f1_batch, micro_config, micro_policy, wake
from safetensors.torch import save_file

from deft import schema
from deft.errors import InputError
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.optimization import (
    add_lora,
    base_state_dict,
    load_adapter,
    merge_lora,
    save_adapter,
    set_policy_requires_grad,
    setup_optimizer,
    setup_scheduler,
)

WORLD_MODEL = {"experts.generation", "world_model", "memory", "conditioning"}
ACTING = {"experts.action", "flow", "memory"}  # of the memory, its gate to the action expert
UNDERSTANDING = {"words", "experts.understanding", "vision.projector"}


def learning(policy):
    """The parts with weights that learn."""
    names = [name.removeprefix("model.") for name, value in policy.named_parameters() if value.requires_grad]
    return {".".join(name.split(".")[: 2 if name.startswith(("experts", "vision")) else 1]) for name in names}


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ({}, WORLD_MODEL | ACTING | UNDERSTANDING),
        ({"train_gen_expert_only": True}, WORLD_MODEL),
        ({"train_act_expert_only": True}, ACTING),
        ({"freeze_gen_expert": True}, ACTING | UNDERSTANDING),
        (
            {"freeze_vision_encoder": False, "freeze_gen_expert": True},
            ACTING | UNDERSTANDING | {"vision.embeddings", "vision.layers", "vision.post_layernorm"},
        ),
    ],
)
def test_what_learns(arguments, parts):
    policy = micro_policy(language_heads=True)
    set_policy_requires_grad(policy, **arguments)
    assert learning(policy) == parts
    optimizer = setup_optimizer(policy, 1e-3, 0.1)
    trained = {id(value) for group in optimizer.param_groups for value in group["params"]}
    assert trained == {id(value) for value in policy.parameters() if value.requires_grad}


@pytest.mark.parametrize(
    "arguments",
    [
        {"freeze_vision_encoder": False},
        {"train_gen_expert_only": True},
        {"train_act_expert_only": True},
        {"freeze_gen_expert": True},
    ],
)
@pytest.mark.parametrize("adapters", [False, True])
def test_all_that_learns_has_a_gradient(arguments, adapters):
    """Processes that share gradients wait for every weight that is said to learn."""
    policy = wake(micro_policy(motion_prior=True))
    if adapters:
        pytest.importorskip("peft")
        add_lora(policy)
    set_policy_requires_grad(policy, **arguments)
    batch = {**f1_batch(2, 2), schema.ACTION: torch.randn(2, 2, 3, 32), schema.INSTRUCTION: ["go"] * 4}
    only = bool(arguments.get("train_gen_expert_only"))
    policy(batch, memory_state=torch.randn(2, 2, 6), train_gen_expert_only=only)["loss"].backward()
    learning = {name for name, value in policy.named_parameters() if value.requires_grad}
    assert learning
    assert learning == {name for name, value in policy.named_parameters() if value.grad is not None}


def test_choices_that_exclude_each_other():
    policy = micro_policy()
    with pytest.raises(InputError, match="train_act_expert_only and train_gen_expert_only exclude each other"):
        set_policy_requires_grad(policy, train_act_expert_only=True, train_gen_expert_only=True)
    with pytest.raises(InputError, match="freeze_gen_expert and train_gen_expert_only exclude each other"):
        set_policy_requires_grad(policy, freeze_gen_expert=True, train_gen_expert_only=True)
    with pytest.raises(InputError, match="the policy has no trainable parameters"):
        setup_optimizer(policy.requires_grad_(False))


@pytest.mark.parametrize(("kind", "halfway"), [("cosine", 0.55), ("linear", 0.55), ("constant", 1.0)])
def test_schedules(kind, halfway):
    """From 1 to 0.1 in 10 steps: both curves are at (1 + 0.1) / 2 in the middle."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
    scheduler = setup_scheduler(optimizer, kind, T_max=10, eta_min=0.1)
    rates = []
    for _ in range(10):
        optimizer.step()
        scheduler.step()
        rates.append(scheduler.get_last_lr()[0])
    assert rates[4] == pytest.approx(halfway)
    assert rates[9] == pytest.approx(1.0 if kind == "constant" else 0.1)
    with pytest.raises(InputError, match="scheduler_type is 'step'; choose cosine, linear, constant"):
        setup_scheduler(optimizer, "step")


def trained(policy, steps=2):
    set_policy_requires_grad(policy, train_gen_expert_only=True)
    optimizer = setup_optimizer(policy, 1e-2)
    for step in range(steps):
        policy.forward_with_world_model(f1_batch(2, seed=step), torch.randn(2, 2, 6))["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return policy.eval()


def test_lora_changes_adapters_and_memory_alone_and_loads_back(tmp_path):
    pytest.importorskip("peft")
    policy = micro_policy()
    batch, memory = f1_batch(2), torch.randn(2, 2, 6)
    save_file(policy.state_dict(), tmp_path / "model.safetensors")
    untouched = policy.forward_with_world_model(batch, memory)["wm_loss"]
    add_lora(policy, {"r": 8, "lora_alpha": 32, "target_modules": ["q_proj", "v_proj"]})
    assert torch.equal(policy.forward_with_world_model(batch, memory)["wm_loss"], untouched)
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    trained(policy)
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    kinds = {"lora" if ".lora_" in name else name.split("model.model.")[1].split(".")[0] for name in changed}
    assert kinds == {"lora", "memory", "conditioning"}  # the parts that the published model lacks
    assert all(".lora_" in name or ".modules_to_save." in name for name in changed)

    expected = policy.forward_with_world_model(batch, memory)
    save_adapter(policy, tmp_path / "peft_adapter")
    assert expected["wm_loss"] != untouched
    # the folder has the base weights and the adapter; the latter alone brings back what was learned
    loaded = load_f1_policy(micro_config(), checkpoint_path=tmp_path).policy.eval()
    again = loaded.forward_with_world_model(batch, memory)
    torch.testing.assert_close(again["wm_loss"], expected["wm_loss"], atol=1e-6, rtol=0)
    torch.testing.assert_close(again["memory_state"], expected["memory_state"], atol=1e-6, rtol=0)
    assert base_state_dict(loaded).keys() == micro_policy().state_dict().keys()

    merge_lora(loaded)
    merged = loaded.forward_with_world_model(batch, memory)
    torch.testing.assert_close(merged["wm_loss"], expected["wm_loss"], atol=1e-5, rtol=0)
    assert loaded.state_dict().keys() == micro_policy().state_dict().keys()


def test_lora_that_cannot_be_put_on(tmp_path):
    pytest.importorskip("peft")
    policy = micro_policy()
    with pytest.raises(InputError, match="the policy has no LoRA adapters"):
        save_adapter(policy, tmp_path)
    with pytest.raises(InputError, match="holds no adapter"):
        load_adapter(policy, tmp_path)
    with pytest.raises(InputError, match="rank"):
        add_lora(policy, {"rank": 8})
    with pytest.raises(InputError, match="lora: "):
        add_lora(policy, {"target_modules": ["nothing_of_this_name"]})


def test_adapters_of_another_model_raise_an_error(tmp_path):
    pytest.importorskip("peft")
    policy = micro_policy()
    add_lora(policy)
    save_adapter(policy, tmp_path)
    with pytest.raises(InputError, match="adapters already"):
        add_lora(policy)
    with pytest.raises(InputError, match="adapters already"):
        load_adapter(policy, tmp_path)
    for changes in ({"memory_hidden": 12}, {"memory_enabled": False}, {"num_layers": 1}):
        other = micro_policy(**changes)
        before = set(other.state_dict())
        with pytest.raises(InputError, match="the adapters of this model"):
            load_adapter(other, tmp_path)
        assert set(other.state_dict()) == before, changes


def test_an_adapter_names_no_module_to_import(tmp_path, monkeypatch):
    """peft imports what `megatron_core` names where `megatron_config` is set."""
    pytest.importorskip("peft")
    policy = micro_policy()
    add_lora(policy, {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
    save_adapter(policy, tmp_path)
    file = tmp_path / "adapter_config.json"
    named = {"megatron_config": {"tensor_model_parallel_size": 1}, "megatron_core": "megatron_evil"}
    file.write_text(json.dumps(json.loads(file.read_text()) | named))
    mark = tmp_path / "mark"
    (tmp_path / "megatron_evil.py").write_text(f"open({str(mark)!r}, 'w').close()\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="megatron_config is set"):
        load_adapter(micro_policy(), tmp_path)
    assert not mark.exists()
