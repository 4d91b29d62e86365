"""The adapter around LeRobot's policies, with a stand-in that has the package's names and shapes."""

import json
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from deft import VLAPolicy, load_vla_model, schema
from deft.errors import InputError
from deft.schema import encode_text

SCALE = 2.0  # what the stand-in's processors divide and multiply by


class ACT(nn.Module):
    """A chunk from the cameras' means and the state, decorated as LeRobot does."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.layer = nn.Linear(4, 5 * 3)
        self.seen: dict[str, Any] = {}

    @classmethod
    def from_pretrained(cls, folder: str, **keywords: Any) -> "ACT":
        assert keywords["strict"]
        assert keywords["local_files_only"]
        policy = cls(keywords["config"])
        policy.load_state_dict(torch.load(Path(folder) / "weights.pt"))
        return policy

    def reset(self) -> None:
        self.seen = {}

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any]) -> Tensor:
        assert not self.seen  # the queues are empty
        self.seen = batch
        inputs = torch.cat([batch["observation.images.top"].mean((1, 2, 3))[:, None], batch["observation.state"]], 1)
        return self.layer(inputs).view(-1, 5, 3)


class Sampling(ACT):
    """Samples its chunk from noise that cannot be set."""

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any]) -> Tensor:
        return torch.randn(len(batch["task"]), 5, 3)


class Flow(ACT):
    """A flow: its chunk depends on the noise that it starts from."""

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], noise: Tensor | None = None) -> Tensor:
        assert noise is not None
        return super().predict_action_chunk.__wrapped__(self, batch) + noise[..., :3]


@pytest.fixture
def lerobot(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The package's modules, and a folder of a policy."""
    torch.manual_seed(0)
    config = SimpleNamespace(
        type="act",
        action_feature=SimpleNamespace(shape=(3,)),
        image_features={"observation.images.top": None},
        robot_state_feature=SimpleNamespace(shape=(3,)),
        device=None,
    )
    configs, factory = types.ModuleType("lerobot.configs.policies"), types.ModuleType("lerobot.policies.factory")
    configs.PreTrainedConfig = SimpleNamespace(from_pretrained=lambda folder, **keywords: config)  # type: ignore[attr-defined]
    factory.get_policy_class = {"act": ACT, "sampling": Sampling, "flow": Flow}.get  # type: ignore[attr-defined]
    factory.make_pre_post_processors = lambda config, **keywords: (  # type: ignore[attr-defined]
        lambda batch: batch | {"observation.state": batch["observation.state"] / SCALE},
        lambda action: action * SCALE,
    )
    for name in ("lerobot", "lerobot.configs", "lerobot.policies"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for module in (configs, factory):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        parent, _, child = module.__name__.rpartition(".")
        monkeypatch.setattr(sys.modules[parent], child, module, raising=False)
    torch.save(ACT(config).state_dict(), tmp_path / "weights.pt")
    (tmp_path / "config.json").write_text("{}")
    return tmp_path


def seen() -> TensorDict:
    streams = {
        "head_rgb": torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8),
        "state": torch.randn(2, 3),
        "instruction": torch.stack([torch.as_tensor(encode_text(text, 16)) for text in ("reach it", "push it")]),
    }
    return TensorDict(streams, [2])


SETTINGS: dict[str, Any] = {"action_dim": 3, "chunk_length": 2, "image_keys": ["head_rgb"], "proprio_dim": 3}


def test_a_policy_acts_and_is_scored_and_learns(lerobot: Path) -> None:
    model: Any = load_vla_model(lerobot, "lerobot", SETTINGS)
    policy, td = VLAPolicy(model), TensorDict({schema.OBSERVATION: seen()}, [2])
    with torch.no_grad():
        policy.act(td)
    assert model.backbone.seen["task"] == ["reach it", "push it"]
    assert float(model.backbone.seen["observation.images.top"].max()) <= 1.0
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB])
    # Their decorator switches gradients off; the network learns all the same.
    scored["log_prob"].sum().backward()
    assert float(model.backbone.layer.weight.grad.abs().sum()) > 0
    assert bool((model.backbone.layer.weight.grad[:6] != 0).any())
    assert bool((model.backbone.layer.weight.grad[6:] == 0).all())  # steps 3 to 5 of the chunk are not executed


def test_numbers_go_through_their_processors(lerobot: Path) -> None:
    model: Any = load_vla_model(lerobot, "lerobot", SETTINGS)
    observation = seen()
    picture = (observation["head_rgb"].float() / 255).mean((1, 2, 3))[:, None]
    inputs = torch.cat([picture, observation["state"] / SCALE], 1)
    expected = SCALE * model.backbone.layer(inputs).view(-1, 5, 3)[:, :2]
    torch.testing.assert_close(model(observation, deterministic=True), expected)


def test_a_policy_that_samples_its_chunk_is_rejected(lerobot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["lerobot.policies.factory"], "get_policy_class", lambda name: Sampling)
    model: Any = load_vla_model(lerobot, "lerobot", SETTINGS)
    with pytest.raises(InputError, match="gives another chunk for the same observation"):
        model.act(seen())
    with pytest.raises(InputError, match="gives no gradient through its chunk"):
        model.evaluate(seen(), torch.zeros(2, 2, 3))


def test_a_flow_starts_from_noise_that_is_drawn_and_stored(lerobot: Path) -> None:
    config = sys.modules["lerobot.configs.policies"].PreTrainedConfig.from_pretrained("")  # type: ignore[attr-defined]
    config.type, config.chunk_size, config.max_action_dim = "flow", 5, 4
    model: Any = load_vla_model(lerobot, "lerobot", SETTINGS)
    policy, td = VLAPolicy(model), TensorDict({schema.OBSERVATION: seen()}, [2])
    with torch.no_grad():
        first, second = (policy.act(td.clone(), deterministic=True) for _ in range(2))
        noises = [one[schema.SAMPLE, schema.NOISE][:, :2, :3] for one in (first, second)]
        # The stand-in adds its noise, times the scale of the processor, to a mean that is always the same.
        difference = first[schema.ACTION] - second[schema.ACTION]
        torch.testing.assert_close(difference, SCALE * (noises[0] - noises[1]))
        assert policy.action_selection(deterministic=True) == "sampled noise"
        policy.act(td)
    torch.testing.assert_close(policy.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB])
    with pytest.raises(InputError, match="scores an action given the noise that it started from"):
        model.evaluate_actions(seen(), td[schema.ACTION])


def test_what_does_not_fit_is_said(lerobot: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="the policy has actions of 3 dims, the environment 4"):
        load_vla_model(lerobot, "lerobot", SETTINGS | {"action_dim": 4})
    with pytest.raises(InputError, match=r"do not include observation\.images\.top"):
        load_vla_model(lerobot, "lerobot", SETTINGS | {"cameras": {"head_rgb": "observation.images.side"}})
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no LeRobot policy"):
        load_vla_model(tmp_path / "empty", "lerobot", SETTINGS)


def test_without_the_package_its_needs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lerobot", None)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InputError, match=r"need lerobot 0.6, with Python 3.12 and torch 2.7 to 2.11: pip install"):
        load_vla_model(tmp_path, "lerobot", SETTINGS)


@pytest.mark.parametrize(
    "step",
    [
        {"class": "evil.Step", "config": {}},
        {"registry_name": "action_tokenizer", "config": {"action_tokenizer_name": "evil", "trust_remote_code": True}},
    ],
)
def test_processors_bring_no_code(lerobot: Path, step: dict[str, Any]) -> None:
    harmless = [{"class": "lerobot.processor.Rename"}, {"registry_name": "x", "config": {"trust_remote_code": False}}]
    (lerobot / "policy_preprocessor.json").write_text(json.dumps({"steps": harmless}))
    load_vla_model(lerobot, "lerobot", SETTINGS)
    (lerobot / "policy_preprocessor.json").write_text(json.dumps({"steps": [*harmless, step]}))
    with pytest.raises(InputError, match=r"policy_preprocessor.json: .* code of its own .* --trust-remote-code"):
        load_vla_model(lerobot, "lerobot", SETTINGS)
    load_vla_model(lerobot, "lerobot", SETTINGS, trust_remote_code=True)
