"""Offline training of policies that see: pixels, and VLA models on datasets with language."""

import json
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
import yaml
from shared_data import shared_data
from vla_worlds import PointToColour

from deft import PPO, Trainer, schema
from deft.config.algorithm_settings import PPOSettings
from deft.config.command_settings import CollectConfig
from deft.config.loading import resolve, to_dict, write_config
from deft.config.settings import LoggingConfig
from deft.data.datasets import load_dataset
from deft.data.datasets.dataset import Dataset, Episode
from deft.envs.make import wrap
from deft.errors import InputError
from deft.evaluation.rollouts import play_episodes, summarize
from deft.models.vla import gpt
from deft.models.vla.loading import save_vla_model
from deft.models.vla.policy import VLAPolicy
from deft.training.collect import collect
from deft.training.handover import use_policy_section
from deft.training.offline import OfflineTrainer
from deft.training.offline_run import build_offline_trainer

QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "iql": {},
    "cql": {"cql_samples": 2},
    "td3-bc": {},
    "rebrac": {},
    "sft": {},
    "dt": {"embed_dim": 16, "n_layer": 1, "n_head": 1, "context_length": 4, "warmup_steps": 0},
}
SMALL = {"hidden_dim": 16, "encoder_dim": 16}
POINT = "deft-test/PointToColour-v0"
NUM_UPDATES = 3


@pytest.fixture(autouse=True)
def _small_models(monkeypatch, no_plots):
    monkeypatch.setitem(gpt.LANGUAGE_MODELS, "gpt-tiny", gpt.LanguageSpec(1, 64, 2))
    monkeypatch.setitem(gpt.VISION_ENCODERS, "resnet-tiny", gpt.VisionSpec(4, 4, False, 16, (32,), (1,), (2,), False))
    gymnasium.register(POINT, entry_point="vla_worlds:PointToColour")
    yield
    del gymnasium.registry[POINT]


@pytest.fixture(scope="module")
def reach(tmp_path_factory) -> Path:
    """90 steps of chance in the reach world: a camera, proprioception, and an instruction."""
    out = tmp_path_factory.mktemp("data") / "reach-v0"
    kwargs = {"observation": "vla", "image_size": 16}
    collect(CollectConfig(out=str(out), policy="random", env="deft/Reach-v0", env_kwargs=kwargs, steps=90))
    return out


def vla(**model_config: Any) -> dict[str, Any]:
    return {**SMALL, "name": "vla", "vla_config": {"model_class": "gpt-vla", "model_config": model_config}}


def make_trainer(folder: Path, algorithm: str, data: Path | Dataset, policy: Any, **changes: Any) -> OfflineTrainer:
    given = {"path": str(data)} if isinstance(data, Path) else {}
    config = {
        "algorithm": {
            "name": algorithm, "cfg": {"batch_size": 8, **SETTINGS.get(algorithm, {}), **changes.pop("cfg", {})},
        },
        "dataset": {**given, **changes.pop("dataset", {})},
        "policy": policy,
        "trainer": {
            "num_epochs": 1, "updates_per_epoch": NUM_UPDATES, "eval_freq": 0, "log_freq": 1,
            **changes.pop("trainer", {}),
        },
        "logging": QUIET,
        "output_dir": str(folder),
        "device": "cpu",
        "threads": 1,
        **changes,
    }  # fmt: skip
    return build_offline_trainer(resolve(config), data if isinstance(data, Dataset) else None)


def assert_trains(trainer: OfflineTrainer, *parts: str) -> None:
    """Each of the policy's named parts moves, and every metric is a number."""
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    summary = trainer.train()
    trainer.close()
    assert summary["updates"] == NUM_UPDATES
    moved = {name for name, value in trainer.policy.state_dict().items() if not torch.equal(value, before[name])}
    for part in parts:
        assert any(part in name for name in moved), part
    line = json.loads((trainer.run_dir / "episode_metrics.jsonl").read_text().splitlines()[-1])
    assert all(np.isfinite(value) for value in line.values() if isinstance(value, float))
    assert any(name.endswith("loss") for name in line)


# -- every algorithm on images and instructions ------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_pixels(tmp_path, algorithm):
    trainer = make_trainer(tmp_path, algorithm, shared_data("metaworld_pixels/hammer"), SMALL)
    assert_trains(
        trainer, "encoder.streams.observation.convolutions", "query_key_value" if algorithm == "dt" else "actor"
    )


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_language(tmp_path, reach, algorithm):
    streams = [f"encoder.streams.{name}" for name in ("rgb", "instruction")]
    if algorithm == "dt":
        assert_trains(make_trainer(tmp_path, algorithm, reach, SMALL), "query_key_value", *streams)
        return
    # The built-in actor on camera and words: its own encoder learns.
    assert_trains(make_trainer(tmp_path / "actor", algorithm, reach, SMALL), "actor", *streams)
    trainer = make_trainer(tmp_path / "vla", algorithm, reach, vla())
    assert isinstance(trainer.policy, VLAPolicy)
    model = trainer.policy.model
    # What the dataset says of itself need not be configured.
    assert (model.action_dim, model.image_size, model.proprio_dim) == (2, 16, 8)
    assert trainer.policy.encoder.streams["proprio"].normalizer.count == 90
    critics = [] if algorithm == "sft" else streams  # SFT has none, whose encoder this is
    assert_trains(trainer, "model.byte_embedding", "model.vision", "model.proprio_projection", *critics)


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_real_robots_videos_and_tasks(tmp_path, algorithm):
    folder = shared_data("lerobot_v2/robot_sim_picknplace")
    options = {"skip_missing": True, "image_size": 32, "episodes": [0]}
    policy = SMALL if algorithm == "dt" else vla()
    trainer = make_trainer(tmp_path, algorithm, folder, policy, dataset={"options": options})
    images = "model.vision" if algorithm == "sft" else "convolutions"
    assert_trains(trainer, "query_key_value" if algorithm == "dt" else "model.byte_embedding", images)


# -- frozen, resumed, started from elsewhere ---------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", ["iql", "cql", "td3-bc", "rebrac", "sft"])
def test_what_is_frozen_stays_as_it_is_also_with_weight_decay(tmp_path, reach, algorithm):
    cfg = {"weight_decay": 0.1}
    trainer = make_trainer(tmp_path, algorithm, reach, vla(freeze_vision_encoder=True), cfg=cfg)
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.train()
    after = trainer.policy.state_dict()
    assert all(torch.equal(after[name], before[name]) for name in before if name.startswith("model.vision."))
    assert not torch.equal(after["model.vision_projection.weight"], before["model.vision_projection.weight"])


def everything(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """Every tensor and number of a nested state, by its path."""
    if isinstance(value, dict):
        return {k: v for part, nested in value.items() for k, v in everything(nested, f"{name}.{part}").items()}
    if isinstance(value, list | tuple):
        return everything(dict(enumerate(value)), name)
    return {name: torch.as_tensor(value)} if isinstance(value, torch.Tensor | int | float) else {}


def fail_at(trainer: OfflineTrainer, call: int) -> None:
    """The disk fails when the trainer draws this batch."""
    sample, calls = trainer.sampler.sample, iter(range(1, call + 1))

    def failing(batch_size: int) -> Any:
        if next(calls) == call:
            raise OSError("unplugged")
        return sample(batch_size)

    trainer.sampler.sample = failing  # type: ignore[method-assign]


@pytest.mark.parametrize("algorithm", SETTINGS)
def test_a_resumed_run_is_the_same_while_episodes_pass_through_memory(tmp_path, algorithm):
    # 40 episodes of one step; the pool holds ten of them, and every sixteen draws another one comes in.
    data = tmp_path / "point-v0"
    collect(CollectConfig(out=str(data), policy="random", env=POINT, steps=40))
    policy = SMALL if algorithm == "dt" else vla()
    episode_bytes = 2 * (16 * 16 * 3 + 4) + 10
    options: dict[str, Any] = {"dataset": {"cache_gb": 10.5 * episode_bytes / 2**30}}

    def trainer(folder: str, **more: Any) -> OfflineTrainer:
        lengths = {"updates_per_epoch": 5, "num_epochs": 3}
        return make_trainer(tmp_path / folder, algorithm, data, policy, trainer=lengths, **options, **more)

    whole, half = trainer("whole"), trainer("half")
    assert not whole.sampler.fits  # type: ignore[attr-defined]
    whole.sampler.sample(1)
    fresh = whole.sampler.state_dict()
    whole = trainer("whole")
    whole.train()
    fail_at(half, 8)
    with pytest.raises(OSError, match="unplugged"):
        half.train()
    torch.manual_seed(99)  # whatever this process has drawn before must not matter
    resumed = trainer("half", auto_resume=True)
    assert resumed.num_updates == 7  # in the second epoch
    resumed.train()
    states = [
        everything(
            {
                "policy": dict(one.policy.state_dict()),
                "algorithm": one.algorithm.state_dict(),
                "sampler": one.sampler.state_dict(),
            }
        )
        for one in (whole, resumed)
    ]
    assert states[0].keys() == states[1].keys()
    for name, value in states[0].items():
        assert torch.equal(value, states[1][name]), name
    assert len(whole.sampler.state_dict()["pool"]) == 10
    assert whole.sampler.state_dict()["order"] != fresh["order"]  # episodes did come and go


COMMAND = [
    "--policy",
    "vla",
    "--vla-model-class",
    "gpt-vla",
    "--hidden-dim",
    16,
    "--encoder-dim",
    16,
    "--batch-size",
    8,
]
COMMAND += ["--updates-per-epoch", 2, "--num-epochs", 1, "--eval-freq", 1, "--eval-episodes", 2, "--threads", 1]
COMMAND += ["--device", "cpu", "--console-level", "ERROR", "--json"]


def test_the_command_from_pretrained_weights_which_a_checkpoint_then_stands_for(tmp_path, reach, deft):
    model = gpt.GPTVLAModel(action_dim=2, proprio_dim=8, image_size=16)
    save_vla_model(model, "weights.safetensors")
    flags = [*COMMAND, "--vla-model-path", "weights.safetensors", "--lr", 1e-6, "--output-dir", "run"]
    summary = deft("train", "iql", "--dataset", reach, *flags)
    assert summary["final_episodes"] == 2
    saved = torch.load(tmp_path / "run" / "checkpoint-2" / "model.pt", weights_only=True)
    # Adam moves a weight by at most the learning rate an update: the file's weights, trained on.
    distance = max(float((saved[f"model.{name}"] - value).abs().max()) for name, value in model.state_dict().items())
    assert 0 < distance < 3e-6
    (tmp_path / "weights.safetensors").unlink()
    assert deft("train", "--resume", "run", "--num-epochs", 2, "--json")["updates"] == 4
    assert deft("evaluate", "run", "--episodes", 2, "--json")["episodes"] == 2


def test_from_a_run_with_ppo_and_back_to_it(tmp_path, reach, deft, caplog):
    world = ["--env", "deft/Reach-v0", "--env-kwargs", "observation=vla", "image_size=16", "--policy", "vla"]
    world += ["--vla-model-class", "gpt-vla", "--rollout-steps", 8, "--total-timesteps", 8, "--n-epochs", 1]
    world += ["--batch-size", 8, "--eval-freq", 0, "--threads", 1, "--device", "cpu", "--json"]
    deft("train", "ppo", *world, "--output-dir", "online")
    deft("train", "iql", "--dataset", reach, *COMMAND, "--model-path", "online", "--output-dir", "offline")
    assert any("V and the encoder of the critics start" in message for message in caplog.messages)
    saved = torch.load(tmp_path / "offline" / "checkpoint-2" / "model.pt", weights_only=True)
    assert float(saved["encoder.streams.proprio.normalizer.count"]) == 90  # new, so it was fitted to the dataset
    deft("train", "ppo", *world, "--model-path", "offline", "--output-dir", "again")
    # An offline run's policy as a whole, with its V and its normalisation
    deft("train", "td3-bc", "--dataset", reach, *COMMAND, "--model-path", "offline", "--output-dir", "second")
    assert sum("the model is loaded" in message for message in caplog.messages) == 1
    again = torch.load(tmp_path / "again" / "checkpoint-8" / "model.pt", weights_only=True)
    assert again.keys() == saved.keys()  # PPO continues with V, whose weights have the same names
    saved = torch.load(tmp_path / "second" / "checkpoint-2" / "model.pt", weights_only=True)
    assert float(saved["encoder.streams.proprio.normalizer.count"]) == 90


def test_labels_of_key_frames_need_no_environment_that_has_them(tmp_path, reach, deft):
    """SFT learns where the point will be later; PPO and evaluation continue without labels."""
    flags = [
        *COMMAND[COMMAND.index("--updates-per-epoch") :],
        "--batch-size",
        8,
        "--model",
        "vla-tiny",
        "--keyframe-stream",
        "proprio",
        "--keyframe-dims",
        0,
        1,
    ]
    deft("train", "sft", "--dataset", reach, *flags, "--output-dir", "sft")
    model = yaml.safe_load((tmp_path / "sft" / "config.yaml").read_text())["policy"]["vla_config"]["model_config"]
    assert model["places_dim"] == 8  # two numbers at four later steps
    found = torch.load(tmp_path / "sft" / "checkpoint-2" / "model.pt", weights_only=True)
    assert float(found["model.places_scale.count"]) > 0
    world = ["--env", "deft/Reach-v0", "--env-kwargs", "observation=vla", "image_size=16", "--model-path", "sft"]
    world += ["--rollout-steps", 4, "--total-timesteps", 16, "--n-epochs", 1, "--batch-size", 4, "--eval-freq", 0]
    deft("train", "ppo", *world, "--threads", 1, "--device", "cpu", "--json", "--output-dir", "ppo")
    assert deft("evaluate", "ppo", "--episodes", 2, "--json")["episodes"] == 2


KEY_FRAMES = {"keyframe_stream": "proprio", "keyframe_dims": [0, 1]}


def tiny(**model_config: Any) -> dict[str, Any]:
    return {"name": "vla", "vla_config": {"model_class": "vla-tiny", "model_config": {"width": 8, **model_config}}}


@pytest.mark.parametrize(
    ("algorithm", "policy", "given", "message"),
    [
        ("sft", SMALL, KEY_FRAMES, "keyframe_stream: only vla-tiny learns from labels"),
        ("sft", vla(), KEY_FRAMES, "keyframe_stream: only vla-tiny learns from labels"),
        # V of RECAP would read them, and the losses of CQL leave them out
        (
            "recap-offline",
            tiny(),
            KEY_FRAMES,
            "recap-offline does not learn from labels; iql, fql, sft do; leave it out",
        ),
        ("cql", tiny(), KEY_FRAMES, "keyframe_stream: cql does not learn from labels"),
        # With a bottleneck actions are learned from the labels, which are the future
        ("sft", tiny(bottleneck=12), KEY_FRAMES, "keyframe_stream: with a bottleneck"),
        ("sft", tiny(places_key=None), KEY_FRAMES, "keyframe_stream: its labels are keyframes; leave places_key out"),
        ("sft", tiny(), {"keyframe_dims": [0]}, "keyframe_stream: missing; keyframe_dims and keyframe_switch"),
    ],
)
def test_labels_of_key_frames_are_learned_and_no_input(tmp_path, reach, algorithm, policy, given, message):
    with pytest.raises(InputError, match=message):
        make_trainer(tmp_path, algorithm, reach, policy, dataset={"path": str(reach), **given})


def test_other_labels_than_those_of_the_weights_are_an_error(tmp_path, reach):
    """Outputs for two numbers at four later steps are not trained on labels of one number."""
    first = make_trainer(tmp_path / "first", "sft", reach, tiny(), dataset={"path": str(reach), **KEY_FRAMES})
    first.train()
    again = {"path": str(reach), **KEY_FRAMES, "keyframe_dims": [0]}
    with pytest.raises(
        InputError, match=r"was trained with keyframes .*\(8,\)\), dataset reach-v0 has keyframes .*\(4,"
    ):
        make_trainer(tmp_path / "second", "sft", reach, tiny(), dataset=again, model_path=str(tmp_path / "first"))


def test_ppo_takes_over_the_whole_policy(tmp_path, reach):
    offline = make_trainer(tmp_path / "offline", "iql", reach, vla())
    offline.train()
    policy = offline.policy
    env = gymnasium.make("deft/Reach-v0", observation="vla", image_size=16)
    trainer = Trainer(
        policy, env, PPO(policy, PPOSettings(batch_size=8, n_epochs=1)), 16,
        eval_freq=0, output_dir=tmp_path / "online", logging_config=LoggingConfig(**QUIET),
    )  # fmt: skip
    trainer.collection.start(16, 16)
    assert trainer.collection.gather(16, lambda: False)
    rollout = next(trainer.collection.batches(16)).flatten(0, 1)
    with torch.no_grad():
        scored = policy.evaluate_actions(rollout)
    torch.testing.assert_close(scored["log_prob"], rollout[schema.LOG_PROB], rtol=0, atol=1e-4)
    torch.testing.assert_close(scored["value"], rollout[schema.VALUE])
    trainer.close()
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    trainer = Trainer(
        policy, gymnasium.make("deft/Reach-v0", observation="vla", image_size=16), PPO(policy), 16,
        eval_freq=0, output_dir=tmp_path / "trained", logging_config=LoggingConfig(**QUIET),
    )  # fmt: skip
    trainer.train(16)
    trainer.close()
    for name in ("model.action_head.weight", "value.weights.0"):
        assert not torch.equal(policy.state_dict()[name], before[name])


@pytest.mark.parametrize("loss", ["log_prob", "mse"])
def test_chunks_of_a_vla_model_are_validated(tmp_path, reach, loss):
    """One of the two episodes of chance, streamed: images, words, and chunks that end with their episode."""
    policy = {
        **SMALL,
        "name": "vla",
        "chunk_length": 4,
        "vla_config": {"model_class": "vla-tiny", "model_config": {"width": 16}},
    }
    cfg = {"val_fraction": 0.5, "augment": ["shift", "color"], "loss": loss}
    trainer = make_trainer(tmp_path, "sft", reach, policy, cfg=cfg)
    summary = trainer.train()
    trainer.close()
    assert np.isfinite(summary["val_loss"])
    assert trainer.num_transitions < 90


def test_a_decision_transformer_is_no_vla_model(tmp_path, reach):
    with pytest.raises(InputError, match="transformer of its own"):
        make_trainer(tmp_path, "dt", reach, vla())


# -- the words are read ------------------------------------------------------------------------------------------------


class OtherWords(Dataset):
    """A dataset whose episodes have each other's words."""

    def __init__(self, dataset: Dataset) -> None:
        super().__init__("other words", dataset.observation_space, dataset.action_space, dataset.lengths)
        self.episodes = [dataset.episode(index) for index in range(dataset.num_episodes)]
        self.giver = np.random.default_rng(0).permutation(dataset.num_episodes)

    def episode(self, index: int) -> Episode:
        episode = self.episodes[index]
        words = self.episodes[self.giver[index]].streams["command"]
        return Episode(
            {**episode.streams, "command": words}, episode.action, episode.reward, episode.terminated, episode.truncated
        )


def point(tmp_path: Path, algorithm: str, updates: int, shuffled: bool = False, **cfg: Any) -> dict[str | None, dict]:
    """Train on 500 pushes at random; then how it does when it sees everything, and when one stream is withheld."""
    data = tmp_path / "point-v0"
    if not data.exists():
        collect(CollectConfig(out=str(data), policy="random", env=POINT, steps=500, num_envs=4))
    dataset = load_dataset(data)
    trainer = make_trainer(
        tmp_path / f"run-{shuffled}", algorithm, OtherWords(dataset) if shuffled else dataset,
        {**vla(), "hidden_dim": 64, "encoder_dim": 32},
        trainer={"updates_per_epoch": updates}, cfg={"batch_size": 32, "learning_rate": 1e-3, **cfg},
    )  # fmt: skip
    trainer.train()
    results = {}
    for hidden in (None, "camera", "command"):
        world = wrap([PointToColour(hidden) for _ in range(50)])
        results[hidden] = summarize(play_episodes(trainer.policy, world, 200, seed=10_000))
    return results


def test_td3_bc_comes_to_read_picture_and_words(tmp_path):
    results = point(tmp_path, "td3-bc", 100)
    assert results[None]["success_rate"] > 0.95
    assert results[None]["mean_reward"] > 0.5  # of 1; and 0 for a policy that reads the picture or the words alone
    for hidden in ("camera", "command"):
        assert 0.3 < results[hidden]["success_rate"] < 0.7


@pytest.mark.slow
def test_iql_comes_to_read_the_words_and_not_those_of_another_episode(tmp_path):
    cfg = {"reward_scaling": "none", "temperature": 6.0, "learning_rate_schedule": "constant"}
    right = point(tmp_path, "iql", 300, **cfg)
    assert right[None]["success_rate"] > 0.9
    assert right[None]["mean_reward"] > 0.3
    assert 0.3 < right["command"]["success_rate"] < 0.7
    # With words that say nothing there is nothing to learn: the reward is 0 on average, whatever is done.
    wrong = point(tmp_path, "iql", 300, shuffled=True, **cfg)
    assert abs(wrong[None]["mean_reward"]) < 0.15


@pytest.mark.slow
def test_cql_comes_to_read_picture_and_words(tmp_path):
    cfg = {"batch_size": 64, "policy_learning_rate": 1e-3, "cql_samples": 4}
    results = point(tmp_path, "cql", 240, cql_alpha=0.2, alpha=0.05, **cfg)
    assert results[None]["success_rate"] > 0.9
    assert results[None]["mean_reward"] > 0.5
    assert 0.3 < results["command"]["success_rate"] < 0.7


def test_a_policy_setting_beside_a_model_path_holds_over_the_model_s(tmp_path):
    """The model is that of the run it starts from, the width is the one that was asked for."""
    model = {"name": "vla", "vla_config": {"model_class": "gpt-vla", "model_config": {}}}
    data, first = str(tmp_path / "data-v0"), tmp_path / "first"
    first.mkdir()
    source = resolve({"algorithm": "sft", "dataset": data, "policy": {**model, "hidden_dim": 16, "num_layers": 3}})
    write_config(source, first / "config.yaml")
    config = resolve({"algorithm": "iql", "dataset": data, "model_path": str(first), "policy": {"hidden_dim": 48}})
    policy = use_policy_section(config).policy
    assert policy.vla_config is not None
    assert policy.vla_config.model_class == "gpt-vla"
    assert (policy.hidden_dim, policy.num_layers) == (48, 3)


def test_a_run_that_goes_on_by_the_same_command_has_the_model_that_it_took_over(tmp_path):
    """Also where the run that it started from is gone: `--auto_resume` finds the model in the run's own folder."""
    model = {"name": "vla", "vla_config": {"model_class": "vla-tiny", "model_config": {"bottleneck": 8}}}
    run, data = tmp_path / "run", str(tmp_path / "data-v0")
    (run / "checkpoint-5").mkdir(parents=True)
    write_config(resolve({"algorithm": "iql", "dataset": data, "policy": model}), run / "config.yaml")
    config = resolve({"algorithm": "iql", "dataset": data, "model_path": str(tmp_path / "gone")})
    policy = use_policy_section(config, resume_from=run / "checkpoint-5").policy
    assert policy.vla_config is not None
    assert policy.vla_config.model_config == {"bottleneck": 8}


@pytest.mark.parametrize("algorithm", ["iql", "ppo"])
def test_a_model_is_built_as_in_its_run_but_for_what_is_said_of_it(tmp_path, algorithm):
    def section(name: str, **model_config: Any) -> dict[str, Any]:
        return {"name": "vla", "vla_config": {"model_class": name, "model_config": model_config}}

    data, first = str(tmp_path / "data-v0"), tmp_path / "first"
    first.mkdir()
    source = resolve({"algorithm": "sft", "dataset": data, "policy": section("vla-tiny", width=32, bottleneck=8)})
    write_config(source, first / "config.yaml")
    where = {"dataset": data} if algorithm == "iql" else {"env": {"id": "deft/Reach-v0"}}

    def taken(policy: dict[str, Any]) -> Any:
        config = resolve({"algorithm": algorithm, **where, "model_path": str(first), "policy": policy})
        found = use_policy_section(config)
        return found.policy.vla_config.model_config

    assert taken(section("vla-tiny", width=16, freeze_vision=True)) == {
        "width": 16,
        "bottleneck": 8,
        "freeze_vision": True,
    }
    assert taken(section("gpt-vla", hidden_dim=8)) == {"hidden_dim": 8}  # another model has nothing of it


@pytest.mark.parametrize("algorithm", ["iql", "ppo", "grpo"])
def test_the_chunk_length_comes_with_the_policy_also_where_the_model_is_named(tmp_path, algorithm):
    def section(length: int | None) -> dict[str, Any]:
        model = {"name": "vla", "vla_config": {"model_class": "vla-tiny"}}
        return model if length is None else model | {"chunk_length": length}

    data, first = str(tmp_path / "data-v0"), tmp_path / "first"
    first.mkdir()
    write_config(resolve({"algorithm": "sft", "dataset": data, "policy": section(2)}), first / "config.yaml")
    where = {"dataset": data} if algorithm == "iql" else {"env": {"id": "deft/Reach-v0"}}

    def found(length: int | None) -> int:
        config = resolve({"algorithm": algorithm, **where, "model_path": str(first), "policy": section(length)})
        return use_policy_section(config).policy.chunk_length

    assert found(None) == 2
    assert found(4) == 2  # what `--model vla-tiny` sets without `--chunk_length`
    assert found(2) == 2
    with pytest.raises(InputError, match=r"chunk_length: 3, but .* trained with 2; give --chunk_length 2"):
        found(3)


def test_an_offline_run_continues_with_the_policy_settings_of_a_run_of_sac(tmp_path):
    source = resolve({"algorithm": "sac", "env": {"id": "Pendulum-v1"}, "policy": {"hidden_dim": 32}})
    write_config(source, tmp_path / "config.yaml")
    config = resolve({"algorithm": "iql", "dataset": "data-v0", "model_path": str(tmp_path)})
    policy = use_policy_section(config).policy
    assert to_dict(policy) == to_dict(source.policy) | {"distribution": "tanh_gaussian"}  # the one of SAC's policies
    given = resolve({**to_dict(config), "policy": {"normalize_observation": True, "hidden_dim": 64}})
    assert use_policy_section(given).policy.hidden_dim == 64  # what the config itself sets has precedence
    unused = resolve({"algorithm": "ppo", "model_path": str(tmp_path), "policy": {"hidden_sizes": [8]}})
    with pytest.raises(InputError, match=r"^policy\.hidden_sizes: \[8\] has no effect: policy 'actor'"):
        use_policy_section(unused)  # known only with the policy of that run
