"""A plain object with `get_action` as a policy: the documents' example, and one line for what such an object lacks."""

import copy
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import nn
from vla_worlds import PointToColour, SevenJoints

from deft import schema
from deft.config.settings import DatasetPolicyConfig, PolicyConfig
from deft.config.views import RLConfig
from deft.envs import SerialVectorEnv
from deft.errors import InputError, RunError
from deft.models.vla.get_action import GetActionPolicy, find_modules, wrap_policy
from deft.models.vla.policy import VLAPolicy
from deft.training.api import PPOTrainer
from deft.training.collection import Collector

WORDS = {"red": 0, "blue": 1, "": 0}


class VLAModel(nn.Module):
    """Which half is red, times which colour is wanted: all that the world asks for."""

    def __init__(self, num_actions: int = 1) -> None:
        super().__init__()
        self.vision = nn.Linear(2, 8)
        self.language = nn.Embedding(2, 8)
        self.action = nn.Linear(8, num_actions)

    def forward(self, pixel_values: torch.Tensor, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        red = pixel_values[:, 0].float().div(255).mean(-2)  # [B, width]
        halves = torch.stack([part.mean(-1) for part in red.chunk(2, -1)], -1)
        return {"predicted_actions": self.action(self.vision(halves - 0.5) * self.language(input_ids))}


class Wrapped:
    """The documents' wrapper, with this world's names of picture and words."""

    def __init__(self, vla_model: nn.Module) -> None:
        self.vla = vla_model
        self.heard: list[Any] = []

    def tokenize(self, words: list[str]) -> torch.Tensor:
        self.heard.append(words)
        return torch.tensor([WORDS[word] for word in words])

    def get_action(self, obs: dict[str, Any], deterministic: bool = False) -> torch.Tensor:
        pixel_values = obs["camera"]
        input_ids = self.tokenize(obs.get("command", "red"))

        outputs = self.vla(pixel_values, input_ids)
        return outputs["predicted_actions"]


def config(tmp_path: Path, **settings: Any) -> RLConfig:
    defaults = {
        "rollout_steps": 16,
        "batch_size": 128,
        "learning_rate": 1e-2,
        "total_timesteps": 1_536,
        "encoder_dim": 16,
        "eval_freq": 0,
        "eval_episodes": 50,
        "log_std_init": -1.0,
        "progress_bar": False,
        "tensorboard": False,
        "output_dir": str(tmp_path / "run"),
    }
    return RLConfig(algorithm="ppo", **defaults | settings)


def wrap_in(policy: Any, env: gymnasium.Env, settings: PolicyConfig | None = None) -> Any:
    vector_env = SerialVectorEnv([env])
    return wrap_policy(policy, vector_env.observation_space, vector_env.action_space, settings or PolicyConfig())


def test_the_documents_example_learns_and_resumes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    envs: list[gymnasium.Env] = [PointToColour() for _ in range(8)]
    trainer = PPOTrainer(env=envs, policy=Wrapped(VLAModel()), config=config(tmp_path))
    before = trainer.evaluate(50)["mean_reward"]
    trainer.train()
    after = trainer.evaluate(50)["mean_reward"]
    assert before < 0.5  # random weights push about nowhere
    assert after > 0.8  # 1 at best
    trainer.close()

    other = Wrapped(VLAModel())  # other weights
    more = config(tmp_path, resume=str(tmp_path / "run"), total_timesteps=2_000)
    resumed = PPOTrainer(env=envs, policy=other, config=more)
    assert resumed.global_step == 1_536
    assert resumed.evaluate(50)["mean_reward"] == after
    for name, value in trainer.policy.model.policy.vla.state_dict().items():
        assert other.vla.state_dict()[name].equal(value), name  # the user's own module has them
    resumed.close()


def test_ratios_are_1_before_the_first_gradient_step() -> None:
    policy = wrap_in(Wrapped(VLAModel()), PointToColour())
    policy.train()
    rollout = Collector(SerialVectorEnv([PointToColour(), PointToColour()]), policy).collect_steps(40).flatten(0, 1)
    scored = policy.evaluate_actions(rollout)
    assert torch.allclose(scored["log_prob"], rollout[schema.LOG_PROB], atol=1e-5)
    assert torch.allclose(scored["value"], rollout[schema.VALUE], atol=1e-5)
    # Mean m, deviation 1, one dim: log p = −½ (a − m)² − ½ log 2π; the entropy of N(·, 1) is ½ + ½ log 2π = 1.4189.
    mean = policy.act(rollout.clone(), deterministic=True)[schema.ACTION][:, 0]
    expected = -0.5 * (rollout[schema.ACTION][:, 0] - mean).square() - 0.9189385
    assert torch.allclose(scored["log_prob"], expected, atol=1e-4)
    assert torch.allclose(scored["entropy"], torch.tensor(1.4189385))
    scored["log_prob"].sum().backward()
    assert all(parameter.grad is not None for parameter in policy.model.policy.vla.parameters())


def test_observations_are_tensors_and_words() -> None:
    seen: list[dict[str, Any]] = []

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(7))

        def get_action(self, obs: dict[str, Any]) -> torch.Tensor:  # a module itself, and without `deterministic`
            seen.append(obs)
            return self.weight.expand(len(obs["proprio"]), 7)

    env = SerialVectorEnv([SevenJoints(), SevenJoints()])
    policy = wrap_policy(Looking(), env.observation_space, env.action_space, PolicyConfig())
    Collector(env, policy).collect_steps(2)
    assert set(seen[0]) == {"rgb", "wrist_rgb", "proprio", "language"}
    assert seen[0]["language"] == ["stand still", "stand still"]
    assert seen[0]["rgb"].dtype == torch.uint8
    assert tuple(seen[0]["rgb"].shape) == (2, 3, 16, 16)
    assert next(name for name, _ in policy.model.named_parameters()) == "policy.weight"


@pytest.mark.parametrize(
    ("space", "name"), [(spaces.Box(0, 255, (3, 16, 16), np.uint8), "image"), (spaces.Box(-1, 1, (4,)), "state")]
)
def test_a_single_stream_has_a_name_too(space: spaces.Box, name: str) -> None:
    weight = nn.Parameter(torch.zeros(2))
    policy = SimpleNamespace(weight=weight, get_action=lambda obs: weight.expand(len(obs[name]), 2))
    wrapped = wrap_policy(policy, space, spaces.Box(-2, 2, (2,)), PolicyConfig(log_std_init=-20.0))
    observation = torch.as_tensor(np.stack([space.sample()] * 3))
    td = wrapped.act(TensorDict({schema.OBSERVATION: observation}, [3]))
    assert td[schema.ACTION].abs().max() < 1e-6
    wrapped.observe(td)
    assert dict(wrapped.named_parameters())["model.weights.weight"] is weight


def test_chunks() -> None:
    weight = nn.Parameter(torch.zeros(2, 1))
    policy = SimpleNamespace(weight=weight, get_action=lambda obs: weight.expand(len(obs["state"]), 2, 1))
    space = spaces.Box(-1, 1, (3,))
    td = TensorDict({schema.OBSERVATION: torch.zeros(4, 3)}, [4])
    wrapped = wrap_policy(policy, space, spaces.Box(-1, 1, (2, 1)), PolicyConfig())
    wrapped.act(td)
    assert tuple(td[schema.ACTION].shape) == (4, 2, 1)
    assert torch.allclose(wrapped.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB])
    single = wrap_policy(policy, space, spaces.Box(-1, 1, (1,)), PolicyConfig())
    with pytest.raises(
        InputError, match=r"returned actions \[4, 2, 1\] for 4 observations; it must be \[4, 1\]; for ch"
    ):
        single.act(td)


def test_actions_of_another_range_have_the_right_density() -> None:
    # Box [0, 4]: half width 2. A deviation of 1 half range is 2: log N(3; 1, 2) = −½ · 1 − log 2 − ½ log 2π.
    weight = nn.Parameter(torch.ones(1))
    policy = SimpleNamespace(weight=weight, get_action=lambda obs: weight.expand(len(obs["state"]), 1))
    wrapped = wrap_policy(policy, spaces.Box(-1, 1, (1,)), spaces.Box(0.0, 4.0, (1,)), PolicyConfig())
    td = TensorDict({schema.OBSERVATION: torch.zeros(1, 1), schema.ACTION: torch.tensor([[3.0]])}, [1])
    assert wrapped.evaluate_actions(td)["log_prob"].item() == pytest.approx(-0.5 - np.log(2) - 0.9189385)
    assert wrapped.act(td, deterministic=True)[schema.ACTION].item() == pytest.approx(1.0)


def test_modules_are_found_wherever_they_are() -> None:
    inner, outer = nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1))
    scale = nn.Parameter(torch.ones(1))
    owner = SimpleNamespace(
        agent=SimpleNamespace(heads=[inner, "x"]), head=outer[0], net=outer, same=outer, scale=scale
    )
    owner.itself = owner
    assert [(place, part) for place, part in find_modules(owner)] == [
        ("agent/heads/0", inner),
        ("net", outer),  # of which `head` is a part
        ("scale", scale),
    ]


def test_a_copy_has_modules_of_its_own() -> None:
    policy = wrap_in(Wrapped(VLAModel()), PointToColour())
    other = copy.deepcopy(policy)
    assert other.model.policy.vla is other.model.parts["vla"]  # what is loaded into the copy is what it acts with
    assert other.model.policy.vla is not policy.model.policy.vla
    other.requires_grad_(False)  # a reference that is not trained needs no gradient
    env = SerialVectorEnv([PointToColour()])
    Collector(env, other).collect_steps(1)
    unique = Wrapped(VLAModel())
    unique.connection = threading.Lock()  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"Wrapped cannot be copied .*which VLA mode and GRPO need"):
        copy.deepcopy(wrap_in(unique, PointToColour()))


def test_off_policy_algorithms_get_an_actor_of_unit_actions() -> None:
    class Wide(PointToColour):
        def __init__(self) -> None:
            super().__init__()
            self.action_space = spaces.Box(-4.0, 0.0, (1,), np.float32)  # centre −2, half width 2

    weight = nn.Parameter(torch.full((1,), -1.0))
    policy = SimpleNamespace(weight=weight, get_action=lambda obs: weight.expand(len(obs["camera"]), 1))
    env = SerialVectorEnv([Wide()])
    actor = wrap_policy(policy, env.observation_space, env.action_space, DatasetPolicyConfig(log_std_init=-1.0))
    assert isinstance(actor, VLAPolicy)
    env.reset(seed=0)
    observation = {name: torch.as_tensor(stream) for name, stream in env.observation.items()}
    state = actor.encode(observation)
    assert actor.mean(state).item() == 0.5  # (−1 + 2) / 2
    drawn, _ = actor.sample(state, 5)
    assert tuple(drawn.shape) == (5, 1, 1, 1)
    drawn.sum().backward()
    assert weight.grad is not None
    td = actor.act(TensorDict({schema.OBSERVATION: TensorDict(observation, [1])}, [1]), deterministic=True)
    assert td[schema.ACTION].item() == -1.0
    assert any(parameter is weight for parameter in actor.actor_parameters())


def test_a_vla_model_stays_a_vla_policy() -> None:
    from vla_worlds import PlainModel

    env = SerialVectorEnv([gymnasium.make("deft/Reach-v0", observation="vla")])
    chunks = spaces.Box(-1, 1, (2, *env.action_space.shape), np.float32)
    policy = wrap_policy(PlainModel(), env.observation_space, chunks, PolicyConfig())
    assert isinstance(policy, VLAPolicy)
    assert not isinstance(policy, GetActionPolicy)
    assert policy.chunk_length == 2
    assert wrap_policy(policy, env.observation_space, env.action_space, PolicyConfig()) is policy


# ------------------------------------------------------------------------------------------------------ what is lacking


def object_with(get_action: Any) -> Any:
    return SimpleNamespace(vla=VLAModel(), get_action=get_action)


def act(policy: Any) -> None:
    env = SerialVectorEnv([PointToColour(), PointToColour()])
    wrapped = wrap_policy(policy, env.observation_space, env.action_space, PolicyConfig())
    Collector(env, wrapped).collect_steps(2)


def test_what_is_lacking_is_said_in_one_line() -> None:
    model = VLAModel()

    def reads(obs: dict[str, Any]) -> torch.Tensor:
        return model(obs["camera"], torch.zeros(len(obs["camera"]), dtype=torch.long))["predicted_actions"]

    cases = {
        "nothing to train in SimpleNamespace: none of its attributes": SimpleNamespace(get_action=reads),
        "gives actions without a gradient": object_with(lambda obs: reads(obs).detach()),
        "returned ndarray; it must return a torch tensor": object_with(lambda obs: np.zeros((2, 1))),
        "reads obs['image']; the environment's streams are camera, command": object_with(lambda obs: obs["image"]),
        "returned actions [1, 2] for 2 observations; it must be [2, 1]": object_with(lambda obs: reads(obs).T),
        "returned actions that are not finite": object_with(lambda obs: reads(obs) * float("nan")),
        "returns other actions when it is called again": object_with(lambda obs: reads(obs) + torch.rand(2, 1)),
        "is no deft.Policy, has no get_action(obs, deterministic=False), and lacks forward": SimpleNamespace(),
    }
    for message, policy in cases.items():
        with pytest.raises(InputError) as caught:
            act(policy)
        assert message in str(caught.value)
        assert "\n" not in str(caught.value)

    frozen = VLAModel().requires_grad_(False)
    with pytest.raises(InputError, match="nothing to train in Wrapped"):
        act(Wrapped(frozen))

    def breaks(obs: dict[str, Any]) -> torch.Tensor:
        raise ValueError("no tokenizer\nhere")

    with pytest.raises(RunError, match=r"get_action raised ValueError: no tokenizer here$"):
        act(object_with(breaks))


def test_discrete_actions_are_rejected() -> None:
    with pytest.raises(InputError, match=r"needs actions in a Box; the environment's are Discrete\(2\)"):
        wrap_policy(Wrapped(VLAModel()), spaces.Box(-1, 1, (4,)), spaces.Discrete(2), PolicyConfig())
