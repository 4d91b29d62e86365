"""`deft export`: what is written acts as the policy does, and what cannot be exported is rejected in one line."""

import json
import os

import numpy as np
import pytest
import torch
from gymnasium import spaces
from served_policies import BOX, decision_transformer, network, scene, tiny, vector

from deft import cli, load_policy
from deft.deployment import export as module
from deft.deployment.export import PolicyProgram, compare, export_onnx, export_program, trace
from deft.errors import InputError, RunError
from deft.models.vla.tiny import word_ids

POLICIES = {
    "gaussian": (network, vector),
    "categorical": (lambda: network(spaces.Discrete(3, start=1)), vector),
    "vla-tiny": (tiny, scene),
    "token": (lambda: tiny(head="token"), scene),
}


def inputs_of(policy, observation):
    """The inputs of a program as a user makes them from the rows of an observation."""
    rows = policy._rows(observation)
    return [torch.as_tensor(rows[name]) for name in policy.streams] if policy.streams else [torch.as_tensor(rows)]


@pytest.mark.parametrize("name", ["gaussian", "categorical", "vla-tiny", pytest.param("token", marks=pytest.mark.slow)])
def test_a_program_acts_as_the_policy(name, tmp_path):
    build, observe = POLICIES[name]
    policy = build()
    found = export_program(tmp_path, policy, tmp_path)
    assert found["max_error"] <= 1e-6
    program = torch.export.load(tmp_path / "policy.pt2").module()
    assert [one["name"] for one in found["inputs"]] == (policy.streams or ["observation"])
    for step in range(3):
        (action,) = program(*inputs_of(policy, observe(step)))
        wanted = policy.get_chunk(observe(step))
        got = action.detach().numpy()[0] if policy.policy.chunk_length > 1 else action.detach().numpy()
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape)
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-6)
    action = policy.get_action(observe(0))  # the policy itself is unchanged by the tracing
    assert np.isfinite(action).all()


def test_actions_of_a_program_are_clipped():
    policy = network()
    with torch.no_grad():
        policy.policy.head.log_std.fill_(0.0)
        policy.policy.towers.head_bias_0.copy_(torch.tensor([50.0, -50.0]))  # far outside of the Box
    (action,) = trace(policy).module()(*inputs_of(policy, vector(0)))
    assert action.tolist() == [[BOX.high[0], BOX.low[1]]]


def test_memory_is_an_input_and_an_output():
    policy = network(memory_hidden=8)
    program, memory = trace(policy).module(), policy.policy.initial_memory(1)
    for step in range(3):
        action, memory = program(*inputs_of(policy, vector(step)), memory)
        np.testing.assert_allclose(action.detach().numpy()[0], policy.get_action(vector(step)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("name", ["gaussian", "categorical", pytest.param("vla-tiny", marks=pytest.mark.slow)])
def test_an_onnx_model_acts_as_the_policy(name, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    build, observe = POLICIES[name]
    policy = build()
    found = export_onnx(tmp_path, policy, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "policy.onnx", providers=["CPUExecutionProvider"])
    names = [one["name"] for one in found["inputs"]]
    assert [one.name for one in session.get_inputs()] == names
    for step in range(3):
        given = {key: value.numpy() for key, value in zip(names, inputs_of(policy, observe(step)), strict=True)}
        (action,) = session.run(["action"], given)
        wanted = policy.get_chunk(observe(step))
        np.testing.assert_allclose(action.reshape(wanted.shape), wanted, rtol=0, atol=1e-5)


def test_words_of_an_exported_program_are_those_of_the_model(monkeypatch):
    texts = torch.as_tensor(np.random.default_rng(0).choice(np.frombuffer(b"abc  \0", np.uint8), (50, 20)))
    eager = word_ids(texts)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    assert torch.equal(word_ids(texts), eager)


def test_a_program_that_differs_is_not_written():
    policy = network()
    program = PolicyProgram(policy)
    assert compare(policy, program) == 0.0
    with pytest.raises(RunError, match=r"differs from the policy by 0\.01"):
        compare(policy, lambda *inputs: (program(*inputs)[0] + 0.01,))
    with pytest.raises(RunError, match="nan"):
        compare(policy, lambda *inputs: (program(*inputs)[0] * float("nan"),))


@pytest.mark.parametrize("write", [export_program, export_onnx])
def test_policies_that_sample_are_rejected(write, tmp_path):
    if write is export_onnx:
        pytest.importorskip("onnxruntime")
    with pytest.raises(InputError, match=r"^VLAPolicy acts by sampled noise, and a program has no random numbers; use"):
        write(tmp_path, tiny(head="flow"), tmp_path)
    with pytest.raises(InputError, match=r"^DecisionTransformerPolicy reads rewards and keeps a history, which"):
        write(tmp_path, decision_transformer(), tmp_path)


# ------------------------------------------------------------------------------------------------------ the command


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "cartpole"
    words = ["train", "ppo", "--env", "CartPole-v1", "--total-timesteps", 64, "--rollout-steps", 32, "--batch-size", 32]
    words += ["--n-epochs", 1, "--eval-freq", 0, "--device", "cpu", "--output-dir", folder, "--json"]
    assert cli.main([str(word) for word in words]) == 0
    return folder


def test_safetensors_load_back(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["export", str(trained), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["folder"] == "cartpole-safetensors"
    assert results["files"] == ["config.yaml", "model.safetensors", "schema.json", "spaces.json"]
    one, other = (load_policy(path, device="cpu") for path in (trained, "cartpole-safetensors"))
    for step in range(5):
        observation = np.random.default_rng(step).normal(size=4)
        assert one.get_action(observation) == other.get_action(observation)
    for (name, mine), theirs in zip(one.policy.state_dict().items(), other.policy.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs), name
    assert cli.main(["evaluate", "cartpole-safetensors", "--episodes", "1"]) == 0
    (tmp_path / "cartpole-safetensors" / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(InputError, match="damaged"):
        load_policy("cartpole-safetensors")


def test_the_command_writes_a_program_with_its_schema(trained, tmp_path, capsys):
    out = tmp_path / "new" / "program"
    assert cli.main(["export", str(trained), "--format", "torch-export", "--out", str(out), "--json"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results["max_error"] <= 1e-6
    schema = json.loads((out / "schema.json").read_text())
    assert schema["inputs"] == [{"name": "observation", "shape": [1, 4], "dtype": "float32"}]
    assert schema["action"]["n"] == 2
    observation = np.float32([0.1, 0.2, -0.1, 0.3])
    (action,) = torch.export.load(out / "policy.pt2").module()(torch.as_tensor(observation)[None])
    assert int(action) == load_policy(trained, device="cpu").get_action(observation)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["/no/such/run"], "/no/such/run"),
        (["RUN", "--format", "tflite"], "format"),
        (["RUN", "--out", "OUT"], "exists; give another folder with --out"),
    ],
)
def test_bad_input(trained, tmp_path, capsys, words, message):
    words = [{"RUN": str(trained), "OUT": str(tmp_path)}.get(word, word) for word in words]
    assert cli.main(["export", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_nothing_is_left_behind_by_an_export_that_fails(trained, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "compare", lambda *_: (_ for _ in ()).throw(RunError("differs")))
    assert cli.main(["export", str(trained), "--format", "torch-export", "--out", str(tmp_path / "out")]) == 1
    assert os.listdir(tmp_path) == []


def test_a_missing_package_is_named(trained, monkeypatch, capsys):
    monkeypatch.setattr(module.importlib.util, "find_spec", lambda name: None if name == "onnx" else name)
    assert cli.main(["export", str(trained), "--format", "onnx"]) == 2
    assert "--format onnx needs onnx, which is not installed" in capsys.readouterr().err
