"""Loading and saving VLA models: strict about keys, loud about what does not fit, never random weights in silence."""

import logging
import sys
from importlib.metadata import EntryPoint, EntryPoints

import pytest
import torch
from torch import nn

from deft.errors import InputError, RunError
from deft.models.vla import loading
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.loading import load_vla_model, save_vla_model

CLASS = "deft.models.vla.gpt.GPTVLAModel"
CONFIG = {"image_size": 32, "action_dim": 2, "proprio_dim": 3}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    """The entry point that the package declares, whether or not it is installed here."""
    points = EntryPoints([EntryPoint("theirs", "deft.models.vla.gpt:GPTVLAModel", "deft.vla_models")])
    monkeypatch.setattr(loading, "entry_points", lambda group: points.select(group=group))


@pytest.fixture
def model():
    torch.manual_seed(3)
    return GPTVLAModel(**CONFIG)


def assert_same(left: nn.Module, right: nn.Module) -> None:
    ours, theirs = left.state_dict(), right.state_dict()
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth", ".pt"])
@pytest.mark.parametrize("model_class", [CLASS, "gpt-vla", "theirs", GPTVLAModel])
def test_saved_weights_come_back_bit_for_bit(tmp_path, model, suffix, model_class):
    path = tmp_path / "new_folder" / f"weights{suffix}"
    save_vla_model(model, path)
    assert_same(load_vla_model(path, model_class, CONFIG), model)
    assert_same(load_vla_model(str(path), model_class, CONFIG, device="cpu"), model)
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize("key", ["state_dict", "model"])
def test_wrapped_weights(tmp_path, model, key):
    torch.save({key: model.state_dict(), "epoch": 3}, tmp_path / "weights.pth")
    assert_same(load_vla_model(tmp_path / "weights.pth", CLASS, CONFIG), model)


def test_weights_that_share_memory_can_be_saved(tmp_path):
    tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    tied[1].weight = tied[0].weight
    save_vla_model(tied, tmp_path / "tied.safetensors")
    assert torch.equal(loading.read_weights(tmp_path / "tied.safetensors")["1.weight"], tied[0].weight)


def test_new_weights_are_said(caplog):
    with caplog.at_level(logging.WARNING):
        load_vla_model(None, CLASS, CONFIG)
    assert caplog.messages == ["GPTVLAModel starts from new weights: no model_path was given"]


def test_missing_unexpected_and_misshapen_keys_are_named(tmp_path, model):
    weights = model.state_dict()
    for name in [name for name in weights if name.startswith("blocks.0.mlp")]:  # norm, in and out: 6 tensors
        del weights[name]
    weights["extra.bias"] = torch.zeros(1)
    weights["log_std"] = torch.zeros(1, 9)
    torch.save(weights, tmp_path / "weights.pth")
    with pytest.raises(InputError) as error:
        load_vla_model(tmp_path / "weights.pth", CLASS, CONFIG)
    assert str(error.value) == (
        f"{tmp_path}/weights.pth does not fit GPTVLAModel: keys 6 missing (blocks.0.mlp_norm.weight, "
        "blocks.0.mlp_norm.bias, blocks.0.mlp_in.weight and 3 more), 1 unexpected (extra.bias), "
        "1 of another shape (log_std is [1, 9] in the file and [1, 2] in the model)"
    )


def one_line(error: pytest.ExceptionInfo) -> str:
    message = str(error.value)
    assert "\n" not in message
    return message


def test_path_that_does_not_exist(tmp_path):
    with pytest.raises(InputError, match="does not exist; leave model_path out to start from new weights"):
        load_vla_model(tmp_path / "absent.pth", CLASS, CONFIG)


def test_folder(tmp_path, model):
    save_vla_model(model, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"is a folder; name one of model\.safetensors"):
        load_vla_model(tmp_path, CLASS, CONFIG)


def test_unknown_kind_of_file(tmp_path, model):
    (tmp_path / "weights.ckpt").write_bytes(b"")
    for call in (
        lambda: load_vla_model(tmp_path / "weights.ckpt", CLASS, CONFIG),
        lambda: save_vla_model(model, tmp_path / "weights.ckpt"),
    ):
        with pytest.raises(InputError, match=r"weights\.ckpt must end in \.safetensors, \.pth, \.pt"):
            call()


class Marked:
    """An object whose unpickling would run code."""

    def __reduce__(self):
        return (sys.intern, ("this must not run",))


@pytest.mark.parametrize("content", [Marked(), {"model": nn.Linear(1, 1)}])
def test_pickled_code_is_rejected(tmp_path, content):
    torch.save(content, tmp_path / "foreign.pth")
    with pytest.raises(InputError, match=r"foreign.pth holds code \([\w.]+\).*was not opened") as error:
        load_vla_model(tmp_path / "foreign.pth", CLASS, CONFIG)
    one_line(error)


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("kept", [0, 100, -100])
def test_damaged_files(tmp_path, model, suffix, kept):
    path = tmp_path / f"weights{suffix}"
    save_vla_model(model, path)
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(InputError, match="cannot be read as weights") as error:
        load_vla_model(path, CLASS, CONFIG)
    one_line(error)


@pytest.mark.parametrize("content", [[torch.zeros(1)], {"epoch": 3}, {"model": {"epoch": 3}}])
def test_file_without_weights(tmp_path, content):
    torch.save(content, tmp_path / "weights.pth")
    with pytest.raises(InputError, match="holds no weights"):
        load_vla_model(tmp_path / "weights.pth", CLASS, CONFIG)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"freeze_vision": True},
            "model_config.freeze_vision is not a keyword of GPTVLAModel; did you mean 'freeze_vis",
        ),
        (
            {"zzz": 1},
            "model_config.zzz is not a keyword of GPTVLAModel; allowed: action_dim, .*vision_encoder, language_model",
        ),
        ({"action_dim": "seven"}, "GPTVLAModel cannot be built from model_config: '<' not supported"),
        ({"vision_encoder": "resnet51"}, "vision_encoder 'resnet51' is none of"),
        ([1], r"model_config must hold the keywords of GPTVLAModel; it is \[1\]"),
    ],
)
def test_wrong_model_config(config, message):
    with pytest.raises(InputError, match=message) as error:
        load_vla_model(None, CLASS, config)
    one_line(error)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt-vls", "'gpt-vls' is neither a registered model nor a path .*; did you mean 'gpt-vla'?"),
        ("something", "'something' is neither .*; registered models: act, diffusion-policy, gpt-vla"),
        ("my_models.GPTVLAModel", "there is no module 'my_models' .*; did you mean 'gpt-vla'?"),
        ("deft.models.vlas.gpt.GPTVLAModel", "there is no module 'deft.models.vlas' "),
        (
            "deft.models.vla.gpt.GPTVLAModl",
            "has no class 'GPTVLAModl'; did you mean 'deft.models.vla.gpt.GPTVLAModel'?",
        ),
        ("deft.models.vla.gpt.VISION_ENCODERS", "must be a subclass of torch.nn.Module"),
        ("torch.nn.Linear", "model_class Linear lacks get_value, evaluate_actions"),
    ],
)
def test_class_that_cannot_be_used(name, message):
    with pytest.raises(InputError, match=message) as error:
        load_vla_model(None, name, {})
    one_line(error)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("import no_such_dependency", "importing 'broken_vla' failed: No module named 'no_such_dependency'"),
        ("raise RuntimeError('first\\nsecond')", "importing 'broken_vla' failed: RuntimeError: first"),
    ],
)
def test_module_that_fails_to_import(tmp_path, monkeypatch, code, message):
    (tmp_path / "broken_vla.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=message) as error:
        load_vla_model(None, "broken_vla.Model", {})
    one_line(error)


def test_unknown_device():
    with pytest.raises(InputError, match="device 'abacus' cannot be used") as error:
        load_vla_model(None, CLASS, CONFIG, device="abacus")
    one_line(error)


def test_failed_save_keeps_the_old_file(tmp_path, model, monkeypatch):
    path = tmp_path / "weights.pth"
    save_vla_model(model, path)
    before = path.read_bytes()

    def full_disk(weights, target):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(RunError, match=r"could not be written to .*: .*No space left on device"):
        save_vla_model(model, path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]
