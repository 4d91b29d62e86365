"""Gradient steps as CUDA graphs: when they are captured, and that they are the steps of eager training."""

from typing import Any

import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deft import schema
from deft.algorithms.captured_step import MOST_RECORDINGS, WARM_UP, CapturedStep, can_capture
from deft.algorithms.grpo import GRPO
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a CUDA device")
SPACE = spaces.Dict(
    {
        "head_rgb": spaces.Box(0, 255, (32, 32, 3), dtype="uint8"),
        "proprio": spaces.Box(-9, 9, (3,)),
        "instruction": spaces.Box(0, 255, (16,), dtype="uint8"),
        "scene": spaces.Box(-1, 1, (2,)),
    }
)
CHUNK, ACTION, COUNT = 2, 3, 48


def make_policy(kind: str, device: str) -> Any:
    torch.manual_seed(0)
    config = PolicyConfig(critic_observation=("scene",), hidden_sizes=(16, 16), unit_actions=True)
    if kind == "actor-critic":
        return ActorCritic(spaces.Dict({name: SPACE[name] for name in ("proprio", "scene")}), box(1), config).to(device)
    model = TinyVLAModel(
        action_dim=ACTION, chunk_length=CHUNK, image_keys=("head_rgb",), image_size=32, proprio_key="proprio",
        proprio_dim=3, width=16, switch_dims=(-1,),
    )  # fmt: skip
    return VLAPolicy(model, observation_space=SPACE, action_space=box(CHUNK), config=config).to(device)


def box(chunk: int) -> spaces.Box:
    return spaces.Box(-1, 1, (ACTION,) if chunk == 1 else (chunk, ACTION))


def make_rollout(policy: Any, device: str, seed: int) -> TensorDict:
    """Episodes of one step, rewarded for actions near zero."""
    generator = torch.Generator().manual_seed(seed)
    streams = {}
    for name in ("proprio", "scene") if isinstance(policy, ActorCritic) else SPACE:
        shape = (1, COUNT, *SPACE[name].shape)
        numbers = torch.rand(shape, generator=generator)
        streams[name] = (numbers * 120).to(torch.uint8) if SPACE[name].dtype == "uint8" else numbers
    td = TensorDict({schema.OBSERVATION: TensorDict(streams, [1, COUNT])}, [1, COUNT]).to(device)
    torch.manual_seed(seed)
    with torch.no_grad():
        td = policy.act(td[0].clone()).unsqueeze(0)
    true = torch.ones(1, COUNT, dtype=torch.bool, device=device)
    td[schema.NEXT_REWARD] = -td[schema.ACTION].flatten(2).square().sum(-1)
    td[schema.NEXT_TERMINATED] = td[schema.NEXT_TRUNCATED] = td[schema.STEP_MASK] = true
    td[schema.NEXT_VALUE] = torch.zeros(1, COUNT, device=device)
    td[schema.POLICY_VERSION] = torch.zeros(1, COUNT, dtype=torch.int64, device=device)
    return td


def test_capture_on_is_an_error_on_the_cpu() -> None:
    with pytest.raises(InputError) as error:
        PPO(make_policy("actor-critic", "cpu"), PPOSettings(capture="on"))
    assert str(error.value) == "capture: 'on' needs a GPU; use auto"


def test_nothing_is_captured_on_the_cpu() -> None:
    policy = make_policy("actor-critic", "cpu")
    assert policy.capturable
    assert not can_capture(policy, PPOSettings(), compiles=False)
    assert PPO(policy, PPOSettings())._captured is None


def test_models_are_captured_only_if_they_are_known_to_allow_it() -> None:
    class Own(torch.nn.Module):
        def forward(self, observations: Any, deterministic: bool = False) -> Any: ...
        def evaluate_actions(self, observations: Any, actions: Any) -> Any: ...
        def get_value(self, observations: Any) -> Any: ...

    assert make_policy("vla-tiny", "cpu").capturable
    assert not VLAPolicy(Own(), ACTION).capturable


class HostTensors(TorchDispatchMode):
    """Collects tensors that an operation reads and that no operation made: parameters, buffers and Python numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[int, torch.Tensor] = {}
        self._made: dict[int, torch.Tensor] = {}  # kept, so that no other tensor gets their ids

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(function)
        assert not name.startswith(("aten._local_scalar_dense", "aten.nonzero", "aten.masked_select")), name
        for value in tree_leaves((args, kwargs or {})):
            if isinstance(value, torch.Tensor) and id(value) not in self._made:
                self.found[id(value)] = value
        results = function(*args, **(kwargs or {}))
        for value in tree_leaves(results):
            if isinstance(value, torch.Tensor):
                self._made[id(value)] = value
        return results


@pytest.mark.parametrize("kind", ["actor-critic", "vla-tiny"])
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_scoring_reads_nothing_from_the_host(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A recording must not wait for the GPU, and a list or number that becomes a tensor is copied there each time."""
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)  # texts are encoded as on a GPU
    policy = make_policy(kind, "cpu")
    rollout = make_rollout(policy, "cpu", 0)
    if name == "ppo":
        algorithm: Any = PPO(policy, PPOSettings(action_critic_coef=1.0))
        rows = algorithm._with_advantages(rollout).flatten(0, 1)
    else:
        algorithm = GRPO(policy, GRPOSettings(action_critic_coef=1.0))
        rows = algorithm._begin([rollout]).data
    read = []
    for _ in range(2):
        with HostTensors() as mode:
            algorithm._loss(algorithm._scored(rows), rows)[0].backward()
        read.append(mode)
    # What is read both times stays where it is: parameters, buffers, the minibatch.
    assert [value.shape for key, value in read[1].found.items() if key not in read[0].found] == []


@on_gpu
@pytest.mark.parametrize("kind", ["actor-critic", "vla-tiny"])
@pytest.mark.parametrize("name", ["ppo", "grpo", "grpo with a critic of actions"])
def test_captured_updates_are_those_of_eager_training(kind: str, name: str) -> None:
    """Minibatches of 20, 20 and 8 rows, two epochs; three updates, the first of the value alone: rounding grows."""

    def train(capture: str) -> tuple[Any, list[dict[str, float]]]:
        policy = make_policy(kind, "cuda")
        common: dict[str, Any] = {"batch_size": 20, "n_epochs": 2, "learning_rate": 1e-3, "capture": capture}
        if name == "ppo":
            own = PPOSettings(**common, value_warmup=1, action_critic_coef=1.0, learning_rate_schedule="adaptive")
            algorithm: Any = PPO(policy, own)
        else:
            algorithm = GRPO(policy, GRPOSettings(**common, action_critic_coef=float(name != "grpo")))
        found = []
        for number in range(3):
            rollout = make_rollout(policy, "cuda", number)
            rollout[schema.POLICY_VERSION] += algorithm.version
            metrics = algorithm.update(iter([rollout]))
            found.append({key: float(value) for key, value in metrics.items()})
        assert (capture == "auto") == bool(algorithm._captured is not None and algorithm._captured._recordings)
        return policy, found

    eager, expected = train("off")
    captured, found = train("auto")
    for one, other in zip(expected, found, strict=True):
        assert one == pytest.approx(other, rel=2e-2, abs=1e-3)
    for (key, value), other in zip(eager.state_dict().items(), captured.state_dict().values(), strict=True):
        torch.testing.assert_close(value, other, rtol=1e-3, atol=1e-4, msg=lambda text, key=key: f"{key}: {text}")


@on_gpu
def test_a_recording_is_made_for_each_size_and_kind_of_minibatch() -> None:
    total = torch.zeros((), device="cuda")
    calls = []

    def step(minibatch: TensorDict) -> dict[str, torch.Tensor]:
        calls.append(len(minibatch))
        total.add_(minibatch["x"].sum())
        return {"total": total * 1}

    captured = CapturedStep(step)
    results = [captured(TensorDict({"x": torch.full((2,), float(n))}, [2]).cuda()) for n in range(6)]
    # Σ 2n: 0, 2, 6, 12, 20, 30; earlier results stay as they were
    assert [float(result["total"]) for result in results] == [0, 2, 6, 12, 20, 30]
    assert len(calls) == WARM_UP + 1  # and once while recording
    for kind in range(MOST_RECORDINGS + 1):
        for _ in range(WARM_UP + 2):
            captured(TensorDict({"x": torch.zeros(3)}, [3]).cuda(), kind)
    assert len(captured._recordings) == MOST_RECORDINGS
