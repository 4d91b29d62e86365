"""`VLAModel.from_pretrained`: the documents' example of stage 3, on a policy that stage 2 has made."""

from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import PPOTrainer, RLConfig, VLAModel
from deft.cli import main
from deft.config.settings import EnvConfig
from deft.envs import make_vector_env
from deft.errors import InputError
from deft.evaluation.evaluate import find_run, load_policy

SIDE = 16
TEXT = spaces.Text(16, charset="abcdefghijklmnopqrstuvwxyz ")


class Look(gymnasium.Env):
    """A grey image and an instruction; the closer the two actions are to its brightness, the better."""

    def __init__(self, with_state=False):
        streams = {"image": spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8), "instruction": TEXT}
        if with_state:
            streams["state"] = spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.observation_space, self.with_state = spaces.Dict(streams), with_state
        self.action_space = spaces.Box(-2.0, 2.0, (2,), np.float32)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self._look(), {}

    def step(self, action):
        reward = -float(np.abs(action - 4 * (self.grey / 255 - 0.5)).sum())
        return self._look(), reward, False, False, {}

    def _look(self):
        self.grey = int(self.np_random.integers(256))
        observation = {"image": np.full((3, SIDE, SIDE), self.grey, np.uint8), "instruction": "drive safely"}
        return observation | ({"state": np.zeros(3, np.float32)} if self.with_state else {})


gymnasium.register(id="tests/Look-v0", entry_point=Look, max_episode_steps=4)


def train(folder, *flags, kwargs="{}"):
    """Stage 2: random actions, cloned."""
    data, run = str(folder / "look-v0"), str(folder / "stage2_action_head")
    collect = ["collect", "--env", "tests/Look-v0", "--policy", "random", "--episodes", "8", "--out", data]
    assert main([*collect, "--env-kwargs", kwargs]) == 0
    settings = ["--num_epochs", "1", "--batch_size", "8", "--eval_episodes", "1", "--threads", "1", "--device", "cpu"]
    assert main(["train", "sft", "--dataset", data, "--output_dir", run, *settings, *flags]) == 0
    return f"{run}/best"


class VLAPolicy:
    """The document's class; it leaves `tokenize` out."""

    def __init__(self, vla_model):
        self.vla = vla_model
        self.tokenize = vla_model.tokenize

    def get_action(self, obs, deterministic=False):
        # Convert observation to VLA input format
        pixel_values = obs["image"]
        input_ids = self.tokenize(obs.get("instruction", "drive safely"))

        outputs = self.vla(pixel_values, input_ids)
        return outputs["predicted_actions"]


@pytest.fixture(scope="module")
def stage2(tmp_path_factory):
    return train(tmp_path_factory.mktemp("vla"), "--model", "vla-tiny", "--chunk_length", "1")


def test_it_predicts_what_the_policy_of_the_run_does(stage2):
    """In the environment's units, ±2, for images and texts as the environment gives them."""
    model = VLAModel.from_pretrained(stage2)
    env = make_vector_env(EnvConfig(id="tests/Look-v0", num_envs=3))
    observed = {name: torch.as_tensor(stream.copy()) for name, stream in env.reset(0).items()}
    policy = load_policy(*find_run(Path(stage2)), env, "cpu")
    td = TensorDict({"observation": TensorDict(observed, [3])}, [3])
    expected = policy.act(td, deterministic=True)["action"].clamp(-2, 2)
    tokens = model.tokenize("drive safely")
    assert torch.equal(tokens.expand(3, -1), observed["instruction"])
    found = model(observed["image"], tokens)["predicted_actions"]
    assert found.shape == (3, 2)
    torch.testing.assert_close(found.detach(), expected)
    torch.testing.assert_close(model({"image": observed["image"]}, tokens)["predicted_actions"], found)
    found.sum().backward()
    assert any(parameter.grad is not None and bool(parameter.grad.any()) for parameter in model.parameters())
    env.close()


def test_the_documents_example_trains_it(stage2, tmp_path):
    model = VLAModel.from_pretrained(stage2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    config = RLConfig(
        rollout_steps=16, total_timesteps=16, batch_size=8, ppo_epochs=1, learning_rate=1e-3, eval_freq=0, threads=1,
        device="cpu", output_dir=str(tmp_path / "ppo"),
    )  # fmt: skip
    trainer = PPOTrainer(env=gymnasium.make("tests/Look-v0"), policy=VLAPolicy(model), config=config)
    trainer.train()
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())
    trainer.close()


def test_a_built_in_actor_and_further_streams(tmp_path):
    model = VLAModel.from_pretrained(train(tmp_path, kwargs='{"with_state": true}'))
    image, tokens = torch.zeros(2, 3, SIDE, SIDE, dtype=torch.uint8), model.tokenize(["drive", "safely"])
    with pytest.raises(InputError, match=r"VLAModel reads image, instruction, state; given: image, instruction"):
        model(image, tokens)
    with pytest.raises(InputError, match="given: image, state, depth, instruction: give each"):
        model(image, tokens, state=torch.zeros(2, 3), depth=image)
    found = model(image, tokens, state=torch.zeros(2, 3))["predicted_actions"]
    assert found.shape == (2, 2)
    assert found.requires_grad


def test_what_is_no_vla_run_is_one_line(tmp_path):
    with pytest.raises(InputError, match="no such checkpoint or run folder"):
        VLAModel.from_pretrained(tmp_path / "absent")
    config = RLConfig(rollout_steps=8, total_timesteps=8, batch_size=8, eval_freq=0, output_dir=str(tmp_path / "run"))
    trainer = PPOTrainer("CartPole-v1", config=config)
    trainer.train()
    trainer.close()
    with pytest.raises(InputError, match="VLAModel is for named streams with images"):
        VLAModel.from_pretrained(tmp_path / "run")
