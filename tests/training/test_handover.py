"""A policy from one run to the next: cloned from a robot's recordings, trained on in an environment of that robot."""

import numpy as np
import pytest
import torch
from lerobot_worlds import CAMERA_SIDE, ENV_ID, JOINTS, LIMIT, PickAndPlace
from shared_data import shared_data
from tensordict import TensorDict

from deft import DatasetWriter, schema
from deft.config.loading import resolve, write_config
from deft.envs.make import wrap
from deft.evaluation.evaluate import find_run, load_policy
from deft.ownership import write_manifest
from deft.runs.policies import checkpoint_folder
from deft.training.handover import log_changes, use_policy_section

DATASET = "lerobot_v2/robot_sim_picknplace"
ENV = f"lerobot_worlds:{ENV_ID}"
SMALL = ["--vla-model-config", "image_size=32", "width=32", "cell=4"]
COMMON = ["--eval-freq", 0, "--threads", 1, "--device", "cpu", "--json"]
ONLINE = [*COMMON, "--env", ENV, "--num-envs", 2]
PPO = ["--rollout-steps", 4, "--batch-size", 8, "--n-epochs", 1]
GRPO = ["--group-size", 2, "--batch-size", 8, "--n-epochs", 1, "--num-iterations", 1]
STILL = ["--learning-rate", 1e-30]

pytestmark = pytest.mark.usefixtures("no_plots")


def clone(deft, dataset, folder, *more):
    data = ["--dataset", dataset, "--dataset-options", "skip_missing=true", "image_size=64", "episodes=[0]"]
    short = ["--num-epochs", 1, "--updates-per-epoch", 2, "--batch-size", 4, "--val-fraction", 0]
    return deft("train", "sft", *data, "--model", "vla-tiny", *SMALL, *short, *COMMON, "--output-dir", folder, *more)


def recorded(folder):
    """A LeRobot dataset with the streams of the real one; its actions are far from ±1, and one joint never moves."""
    generator, length = np.random.default_rng(0), 12
    actions = generator.uniform(-2, 0.5, (length, JOINTS))
    actions[:, 11] = -3
    observations = {
        "state": generator.normal(size=(length, JOINTS)),
        "ego_view": np.full((length, CAMERA_SIDE, CAMERA_SIDE, 3), 90, np.uint8),
    }
    with DatasetWriter(folder, format="lerobot", fps=20) as writer:
        writer.add_episode(observations, actions, instruction="pick the squash from the counter")
    return folder


def play(folder):
    """The policy of a run, and what it draws in an environment."""
    checkpoint, config = find_run(folder)
    env = wrap([PickAndPlace()], chunk_length=config.policy.chunk_length)
    policy = load_policy(checkpoint, config, env, "cpu")
    env.close()
    torch.manual_seed(0)
    streams = {
        "state": torch.randn(3, 44),
        "ego_view": torch.randint(0, 256, (3, 3, 256, 256), dtype=torch.uint8),
        "instruction": torch.randint(97, 123, (3, 40), dtype=torch.uint8),
    }
    with torch.no_grad():
        return policy, policy.act(TensorDict({schema.OBSERVATION: TensorDict(streams, [3])}, [3]))


def test_a_policy_cloned_from_a_lerobot_dataset_continues_with_ppo_grpo_and_sac(deft, tmp_path):
    """The dataset's actions have ranges of their own, such as -4 to -2; the environment's Box is that of the robot."""
    clone(deft, shared_data(DATASET), "sft")
    clone(deft, shared_data(DATASET), "single", "--chunk-length", 1)
    ppo = [*PPO, "--total-timesteps", 32, *STILL]
    deft("train", "ppo", "--model-path", "sft", *ONLINE, *ppo, "--output-dir", "ppo")
    deft("train", "ppo", "--model", "vla-tiny", "--model-path", "sft", *ONLINE, *ppo, "--output-dir", "named")
    deft("train", "grpo", "--model-path", "sft", *ONLINE, *GRPO, *STILL, "--output-dir", "grpo")
    sac = ["--learning-starts", 4, "--batch-size", 4, "--total-timesteps", 8, "--buffer-size", 8]
    sac += ["--policy-learning-rate", 1e-30]
    deft("train", "sac", "--model-path", "single", *ONLINE, *sac, "--output-dir", "sac")

    # With a learning rate of 1e-30 each is still the cloned policy: one action distribution in the robot's units.
    for source, names in (("sft", ["ppo", "named", "grpo"]), ("single", ["sac"])):
        policy, cloned = play(tmp_path / source)
        assert policy.center[11].item() == pytest.approx(-3)  # a joint that never moves: -3 ± 1
        for name in names:
            other, acted = play(tmp_path / name)
            assert torch.equal(acted[schema.ACTION], cloned[schema.ACTION]), name
            assert torch.equal(acted[schema.LOG_PROB], cloned[schema.LOG_PROB]), name
            assert other.model.image_size == 32
    assert np.abs(cloned[schema.ACTION].numpy()).max() > 1  # not the unit actions
    assert PickAndPlace().action_space.high[0] == LIMIT


def test_three_commands_take_a_recorded_dataset_to_a_policy_that_learned_online(deft, tmp_path):
    clone(deft, recorded(tmp_path / "recorded"), "sft")
    learn = ["--learning-rate", 1e-3]
    deft("train", "ppo", "--model-path", "sft", *ONLINE, *PPO, *learn, "--total-timesteps", 32, "--output-dir", "ppo")
    deft("train", "ppo", "--resume", "ppo", "--config", "ppo/config.yaml", "--total-timesteps", 64, "--json")
    deft("train", "grpo", "--model-path", "ppo", *ONLINE, *GRPO, *learn, "--output-dir", "grpo")
    cloned, tuned, last = (play(tmp_path / name)[0] for name in ("sft", "ppo", "grpo"))
    assert cloned.center[11].item() == pytest.approx(-3)
    for before, after in ((cloned, tuned), (tuned, last)):
        assert torch.equal(after.center, before.center)
        assert any(not torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))
    results = deft("evaluate", "grpo", "--env", ENV, "--episodes", 2, "--device", "cpu", "--json")
    assert results["episodes"] == 2


def test_a_policy_that_was_published_without_its_training_state_has_no_critics(deft_or_error, tmp_path):
    deft = deft_or_error
    deft("collect", "--env", "Pendulum-v1", "--policy", "random", "--steps", 20, "--out", "random-v0", "--json")
    sft = ["--dataset", "random-v0", "--num-epochs", 1, "--updates-per-epoch", 1, "--hidden-dim", 8, *COMMON]
    deft("train", "sft", *sft, "--output-dir", "sft")
    checkpoint = checkpoint_folder(tmp_path / "sft")
    (checkpoint / "training_state.pt").unlink()
    sac = ["train", "sac", "--env", "Pendulum-v1", "--model-path", checkpoint, "--learning-starts", 10]
    sac += ["--batch-size", 4, "--total-timesteps", 12, *COMMON]
    assert "training_state.pt: missing" in deft(*sac, "--output-dir", "damaged")  # its manifest lists it
    (checkpoint / "deft_manifest.json").unlink()
    write_manifest(checkpoint, {})
    deft(*sac, "--output-dir", "sac")
    assert checkpoint_folder(tmp_path / "sac").name == "checkpoint-12"


@pytest.mark.parametrize(
    ("given", "arguments", "limit"),
    [
        ({}, {"task": "pick", "image_size": 32}, 100),
        ({"kwargs": {"image_size": 64}}, {"task": "pick", "image_size": 64}, 100),
        ({"kwargs": {"image_size": None}}, {"task": "pick"}, 100),  # the environment's default
        ({"max_episode_steps": 7}, {"task": "pick", "image_size": 32}, 7),
        ({"kwargs": {"max_episode_steps": 7}}, {"task": "pick", "image_size": 32}, 7),
        ({"kwargs": {"max_episode_steps": None}}, {"task": "pick", "image_size": 32}, None),
        ({"id": "reach", "kwargs": {"image_size": 64}}, {"image_size": 64}, None),  # another environment
    ],
)
@pytest.mark.parametrize("place", ["setting", "argument"])  # where the run that it starts from has its time limit
def test_a_run_has_the_arguments_of_the_run_that_it_starts_from(given, arguments, limit, place, tmp_path):
    before = {"id": "deft/Tabletop-v0", "kwargs": {"task": "pick", "image_size": 32}}
    (before if place == "setting" else before["kwargs"])["max_episode_steps"] = 100
    write_config(resolve({"env": before, "algorithm": "ppo"}), tmp_path / "config.yaml")
    config = resolve({"env": {"id": "tabletop", **given}, "algorithm": "ppo", "model_path": str(tmp_path)})
    used = use_policy_section(config)
    assert (used.env.arguments, used.env.time_limit) == (arguments, limit)
    assert use_policy_section(used).env == used.env  # its config.yaml repeats the run


def test_a_resumed_run_logs_what_changed(tmp_path, caplog):
    settings = {"algorithm": "ppo", "env": {"id": "reach", "kwargs": {"reward": "sparse"}}}
    write_config(resolve({**settings, "trainer": {"total_timesteps": 8}}), tmp_path / "config.yaml")
    changed = {
        "algorithm": {"name": "ppo", "cfg": {"gamma": 0.9}},
        "env": {"id": "reach", "kwargs": {"reward": "dense"}},
    }
    with caplog.at_level("INFO", "deft"):
        log_changes(resolve(settings | {"trainer": {"total_timesteps": 16}}), tmp_path)  # longer, else the same
        assert not caplog.messages
        log_changes(resolve(changed), tmp_path)
    (line,) = caplog.messages
    assert "env.kwargs {'reward': 'sparse'}, now {'reward': 'dense'}" in line
    assert "algorithm.cfg.gamma 0.99, now 0.9" in line
