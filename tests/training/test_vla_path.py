"""The whole way of a vision-language-action model: config, weights, collection, update, checkpoint, evaluation."""

import json
from pathlib import Path

import gymnasium
import pytest
import torch
from documents import VLA_EXAMPLE
from vla_worlds import ListeningModel, PointToColour, SeeingModel

from deft import PPO, Trainer, VLAPolicy, cli, schema
from deft.config.algorithm_settings import PPOSettings
from deft.config.loading import load_config, replace
from deft.config.settings import LoggingConfig
from deft.envs.make import wrap
from deft.evaluation.rollouts import play_episodes, summarize
from deft.models.vla import gpt
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.loading import save_vla_model
from deft.training.run import build_trainer

WEIGHTS = "checkpoints/pretrained_vla_model.pth"
SIZE = 16
NUM_ENVS, STEPS = 2, 8
QUIET = LoggingConfig(console_level="CRITICAL", tensorboard=False)
WORLD = ["--env", "reach", "--env-kwargs", "observation=vla", f"image_size={SIZE}", "--num-envs", NUM_ENVS]
SHORT = ["--rollout-steps", STEPS, "--n-epochs", 1, "--batch-size", 8, "--eval-freq", 0, "--log-freq", 1]
SHORT += ["--threads", 1, "--device", "cpu", "--output-dir", "run", "--json"]

pytestmark = pytest.mark.usefixtures("no_plots")


def updates(folder) -> list[dict]:
    lines = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    return [line for line in lines if line["type"] == "update"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder with the example's config; its two networks have 300 million parameters, so their shapes are shrunk."""
    monkeypatch.setitem(gpt.VISION_ENCODERS, "resnet50", gpt.VISION_ENCODERS["resnet-tiny"])
    monkeypatch.setitem(gpt.LANGUAGE_MODELS, "gpt2-medium", gpt.LanguageSpec(1, 16, 2))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.json").write_text(VLA_EXAMPLE)
    return tmp_path


def pretrained(chunk_length: int = 1) -> GPTVLAModel:
    """The model behind the example's weights file, for the reach world."""
    torch.manual_seed(42)
    sizes = {"action_dim": 2, "proprio_dim": 8, "image_size": SIZE, "chunk_length": chunk_length}
    model = GPTVLAModel(vision_encoder="resnet50", language_model="gpt2-medium", **sizes)
    save_vla_model(model, WEIGHTS)
    return model


@pytest.mark.parametrize("chunk_length", [1, 4])
@pytest.mark.parametrize("mode", ["standard", "vla"])
def test_the_example_trains_resumes_and_is_evaluated(project, deft, mode, chunk_length):
    before = pretrained(chunk_length).state_dict()
    rollout = STEPS * NUM_ENVS * chunk_length
    flags = ["--action-dim", 2, "--chunk-length", chunk_length, "--buffer-type", mode]
    # More than one rollout and no more than two, also where chunks end early
    summary = deft("train", "--config", "config.json", *WORLD, *SHORT, *flags, "--total-timesteps", rollout * 3 // 2)
    assert summary["timesteps"] > rollout
    assert len(updates(project / "run")) == 2
    saved = project / "run" / f"checkpoint-{summary['timesteps']}" / "model.pt"
    after = torch.load(saved, weights_only=True)
    # Adam moves a weight by at most the learning rate a step, 4 + 4 steps: the file's weights, trained on.
    distance = max(float((after[f"model.{name}"] - weight).abs().max()) for name, weight in before.items())
    assert 0 < distance < 10 * 1e-5

    (project / WEIGHTS).unlink()  # a checkpoint stands for itself
    resumed = deft("train", "--resume", "run", "--total-timesteps", rollout * 5 // 2, "--json")
    assert resumed["timesteps"] > summary["timesteps"]
    assert len(updates(project / "run")) >= 3
    result = deft("evaluate", "run", "--episodes", 2, "--json")
    assert result["episodes"] == 2
    assert 0 <= result["success_rate"] <= 1
    assert 1 <= result["mean_length"] <= 50  # env steps, not chunks


@pytest.mark.parametrize("chunk_length", [1, 4])
@pytest.mark.parametrize("mode", ["standard", "vla"])
def test_the_first_rollout_is_of_the_weights_in_the_file(project, mode, chunk_length):
    expected = pretrained(chunk_length).state_dict()
    config = replace(
        load_config("config.json"),
        **{
            "env.kwargs": {"observation": "vla", "image_size": SIZE},
            "env.num_envs": NUM_ENVS,
            "policy.action_dim": 2,
            "policy.chunk_length": chunk_length,
            "trainer.buffer_type": mode,
            "trainer.buffer_size": STEPS,
            "device": "cpu",
        },
    )
    trainer = build_trainer(config)
    trainer.collection.start(STEPS, STEPS)
    assert trainer.collection.gather(STEPS, lambda: False)
    rollout = next(trainer.collection.batches(STEPS)).flatten(0, 1)
    trainer.close()
    assert trainer.policy.reward_normalizer is not None  # policy.normalize_reward holds for VLA policies too
    own = trainer.policy.model.state_dict()
    assert own.keys() == expected.keys()
    assert all(torch.equal(own[name], weight) for name, weight in expected.items())
    chunk = () if chunk_length == 1 else (chunk_length,)
    assert rollout[schema.ACTION].shape == (STEPS * NUM_ENVS, *chunk, 2)
    with torch.no_grad():
        log_prob = trainer.policy.evaluate_actions(rollout)["log_prob"]
    ratio = (log_prob - rollout[schema.LOG_PROB]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0, atol=1e-4)


def test_the_example_as_it_stands_for_a_robot_of_seven_joints(project, deft):
    torch.manual_seed(0)
    sizes = {"action_dim": 7, "proprio_dim": 7, "image_keys": ["rgb", "wrist_rgb"], "image_size": SIZE}
    save_vla_model(GPTVLAModel(vision_encoder="resnet50", language_model="gpt2-medium", **sizes), WEIGHTS)
    flags = ["--env", "vla_worlds:SevenJoints-v0", *SHORT, "--total-timesteps", STEPS * 2]
    assert deft("train", "--config", "config.json", *flags)["timesteps"] == STEPS * 2


def test_a_class_with_the_three_methods_alone(project, deft):
    """Named by its path, with the whole config on the command line; the bytes of the instruction arrive."""
    ListeningModel.heard.clear()
    model = ["--policy", "vla", "--vla-model-class", "vla_worlds.ListeningModel"]
    flags = [*WORLD, *SHORT, "--buffer-type", "vla", "--total-timesteps", STEPS * NUM_ENVS * 2]
    assert deft("train", "ppo", *model, *flags)["timesteps"] == STEPS * NUM_ENVS * 2
    assert deft("evaluate", "run", "--episodes", 1, "--json")["episodes"] == 1
    texts = {row.rstrip(b"\0").decode() for row in ListeningModel.heard}
    assert texts
    assert texts <= {f"reach the {colour} target" for colour in ("red", "green", "blue", "yellow")}


@pytest.mark.parametrize("chunk_length", [1, 3])
def test_by_hand_in_python(tmp_path, chunk_length):
    env = gymnasium.make("deft/Reach-v0", observation="vla", image_size=SIZE)
    model = GPTVLAModel(action_dim=2, proprio_dim=8, image_size=SIZE, chunk_length=chunk_length)
    policy = VLAPolicy(model)
    algorithm = PPO(policy, PPOSettings(n_epochs=1, batch_size=8))
    trainer = Trainer(
        policy, env, algorithm, buffer_size=STEPS, buffer_type="vla", output_dir=tmp_path, logging_config=QUIET
    )
    before = model.action_head.bias.clone()
    trainer.train(total_timesteps=STEPS * chunk_length * 3 // 2)
    assert algorithm.version == 2
    assert not torch.equal(model.action_head.bias, before)
    assert trainer.evaluate(1)["episodes"] == 1
    trainer.close()


def test_the_preset_trains(deft):
    flags = [*SHORT, "--num-envs", 2, "--total-timesteps", STEPS * 2]
    assert deft("train", "--config", "vla-reach", *flags)["timesteps"] == STEPS * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--env", "reach"], "policy.name: a VLA policy reads named streams; reach observes Box"),
        (["--env", "CartPole-v1"], "policy.name: a VLA policy acts in a Box with one dimension; CartPole-v1 has Disc"),
        ([*WORLD, "--action-dim", "7"], "policy.action_dim: 7 was given, but reach takes actions of 2 dims"),
        ([*WORLD, "--vla-model-config", "chunk_length=4"], "chunk_length 1 does not fit VLA model GPTVLAModel"),
        ([*WORLD, "--vla-model-config", "image_keys=[wrist]"], "the observation has no 'wrist'; it has"),
        ([*WORLD, "--vla-model-path", "none.pth"], "model_path none.pth does not exist"),
    ],
)
def test_what_does_not_fit_is_refused_in_one_line(tmp_path, monkeypatch, capsys, flags, message):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "ppo", "--policy", "vla", "--vla-model-class", "gpt-vla", *SHORT, "--buffer-type", "vla"]
    assert cli.main([str(argument) for argument in [*arguments, *flags]]) == 2
    complaint = capsys.readouterr().err.strip().splitlines()
    assert complaint[-1].startswith(f"deft: {message}")


def test_picture_and_words_together_are_learned(tmp_path):
    """Who reads one of them alone is right half of the time (see the world); the model must come to read both."""
    model = GPTVLAModel(
        action_dim=1,
        image_size=SIZE,
        image_keys=["camera"],
        instruction_key="command",
        max_instruction_length=4,
        proprio_key=None,
    )
    policy = VLAPolicy(model)
    algorithm = PPO(policy, PPOSettings(learning_rate=1e-3, batch_size=64, entropy_coef=0.0))
    worlds = [PointToColour() for _ in range(32)]
    trainer = Trainer(policy, worlds, algorithm, 8, eval_freq=0, output_dir=tmp_path, logging_config=QUIET)
    trainer.train(1536)
    trainer.close()

    def score(hidden: str | None) -> dict:
        return summarize(play_episodes(policy, wrap([PointToColour(hidden) for _ in range(50)]), 200, seed=10_000))

    seen = score(hidden=None)
    assert seen["success_rate"] > 0.95
    assert seen["mean_reward"] > 0.8  # of 1; and 0 for a policy that reads the picture or the words alone
    for hidden in ("camera", "command"):
        assert 0.3 < score(hidden)["success_rate"] < 0.7


@pytest.mark.parametrize("head", ["token", "flow"])
def test_from_demonstrations_to_reinforcement(deft, head):
    """collect → sft → ppo, grpo and iql: the later runs need no flags for the model, its chunks or its environment."""
    quiet = ["--threads", 1, "--device", "cpu", "--console-level", "ERROR", "--json"]
    world = ["--env", "reach", "--env-kwargs", "observation=vla", f"image_size={SIZE}"]
    deft("collect", *world, "--policy", "expert", "--noise", 0.1, "--episodes", 3, "--out", "demos", "--json")
    model = ["--model", "vla-tiny", "--vla-model-config", f"head={head}", "width=16"]
    offline = ["--dataset", "demos", "--num-epochs", 1, "--updates-per-epoch", 2, "--batch-size", 8, *quiet]
    trained = deft("train", "sft", *offline, *model, "--eval-freq", 1, "--eval-episodes", 2, "--output-dir", "sft")
    assert trained["final_episodes"] == 2
    assert load_config("sft/config.yaml").policy.chunk_length == 4  # what vla-tiny is made for
    weights = torch.load(next(Path("sft").glob("checkpoint-*")) / "model.pt", weights_only=True)

    iql = [*offline, "--eval-freq", 0, "--reward-scaling", "none", "--model-path", "sft", "--output-dir", "iql"]
    assert deft("train", "iql", *iql)["updates"] == 2
    again = torch.load(next(Path("iql").glob("checkpoint-*")) / "model.pt", weights_only=True)
    assert again.keys() == weights.keys()  # critics and V stand on the model's trunk: there is no other encoder
    assert not torch.equal(again["model.value_head.4.weight"], weights["model.value_head.4.weight"])

    online = ["--env", "reach", "--num-envs", 2, "--n-epochs", 1, "--batch-size", 8, "--eval-freq", 0, *quiet]
    for source in ("sft", "iql"):
        flags = ["--model-path", source, "--rollout-steps", 4, "--total-timesteps", 8, "--output-dir", f"{source}_ppo"]
        assert deft("train", "ppo", *online, *flags)["timesteps"] >= 8
    config = load_config("iql_ppo/config.yaml")
    assert config.policy.chunk_length == 4
    assert config.env.kwargs == {"observation": "vla", "image_size": SIZE}
    flags = ["--model-path", "sft", "--group-size", 2, "--iterations", 1, "--output-dir", "grpo"]
    assert deft("train", "grpo", *online, *flags)["timesteps"] > 0
    assert deft("evaluate", "iql_ppo", "--episodes", 2, "--json")["episodes"] == 2


def test_a_users_model_has_images_in_one_layout_from_environments_and_datasets(deft, monkeypatch):
    """PointToColour gives images of 16×16×3, and so it is recorded: the model has uint8 [B, 3, 16, 16] from both."""
    env = "vla_worlds:PointToColour-v0"
    deft("collect", "--env", env, "--policy", "random", "--episodes", 8, "--out", "data/seen-v0", "--json")
    model = ["--policy", "vla", "--vla-model-class", "vla_worlds.SeeingModel"]
    monkeypatch.setattr(SeeingModel, "seen", set())
    deft("train", "ppo", "--env", env, *model, "--total-timesteps", 16, *SHORT)
    assert SeeingModel.seen == {(torch.uint8, (3, 16, 16))}
    SeeingModel.seen.clear()
    offline = ["--dataset", "data/seen-v0", "--num-epochs", 1, "--batch-size", 4, "--eval-freq", 0, "--device", "cpu"]
    deft("train", "iql", *offline, *model, "--output-dir", "offline", "--json")
    assert SeeingModel.seen == {(torch.uint8, (3, 16, 16))}
