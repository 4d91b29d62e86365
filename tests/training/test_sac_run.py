"""Runs of SAC: that they learn, resume, mix in other data, and continue with policies of other runs."""

import os
import signal

import gymnasium
import pytest
import torch
from gymnasium import spaces
from offline_worlds import TwoStep, schema_row, small_actor, two_step_dataset
from worlds import Target

from deft import CQLTrainer, IQLTrainer, OfflineRLConfig, PPOTrainer, RLConfig, SACTrainer, SFTTrainer, cli
from deft.config.loading import load_config, resolve
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run
from deft.models.vla import gpt
from deft.runs.logging import logged_evaluations
from deft.runs.policies import checkpoint_folder
from deft.training import run
from deft.training.run import build_trainer

QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}
SMALL = {"hidden_dim": 16, "num_layers": 2}
TARGET = "deft-test/Target-v0"
TWO_STEP = "deft-test/TwoStep-v0"


@pytest.fixture(autouse=True)
def _worlds(monkeypatch):
    monkeypatch.setattr(run, "plot_run", lambda folder: [])
    gymnasium.register(TARGET, entry_point=Target)
    gymnasium.register(TWO_STEP, entry_point=TwoStep)
    yield
    del gymnasium.registry[TARGET], gymnasium.registry[TWO_STEP]


def config(tmp_path, name="run", env=TARGET, **settings):
    cfg = {"batch_size": 32, "learning_starts": 100, "learning_rate": 3e-3, **settings.pop("cfg", {})}
    trainer = {"total_timesteps": 300, "eval_freq": 0, "save_freq": 0, **settings.pop("trainer", {})}
    return resolve(
        {
            "algorithm": {"name": "sac", "cfg": cfg},
            "env": {"id": env, "num_envs": 2, **settings.pop("env_settings", {})},
            "policy": SMALL,
            "trainer": trainer,
            "logging": QUIET,
            "threads": 1,
            "output_dir": str(tmp_path / name),
            **settings,
        }
    )


def weights(trainer):
    parts = {**trainer.policy.state_dict()}
    parts |= {f"critics.{name}": value for name, value in trainer.algorithm.critics.state_dict().items()}
    return parts


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_it_learns(tmp_path):
    # Random actions are off by 2.2 on average (per step), the best constant by 1.25; a learner by less than 0.5.
    trainer = build_trainer(config(tmp_path, trainer={"total_timesteps": 1500}, cfg={"gamma": 0.5, "tau": 0.05}))
    trainer.train()
    assert trainer.evaluate(20)["mean_reward"] > -5.0
    trainer.close()


@pytest.mark.parametrize(
    "cfg", [{}, {"n_step": 3}, {"updates_per_step": 0.5, "train_freq": 3}, {"policy_delay": 2, "random_steps": 37}]
)
def test_training_on_equals_training_twice(tmp_path, cfg):
    whole = build_trainer(config(tmp_path, "whole", cfg=cfg))
    whole.train()
    first = build_trainer(config(tmp_path, "first", cfg=cfg))
    first.train(174)
    folder = first.save()
    second = build_trainer(config(tmp_path, "second", cfg=cfg))
    second.load(folder)
    second.train(300)
    assert whole.algorithm.version == second.algorithm.version > 0
    assert_equal(weights(whole), weights(second))
    assert (
        whole.collection.buffer.state_dict()["columns"].keys()
        == second.collection.buffer.state_dict()["columns"].keys()
    )
    assert_equal(whole.collection.buffer.state_dict()["columns"], second.collection.buffer.state_dict()["columns"])
    for trainer in (whole, first, second):
        trainer.close()


def test_a_signal_stops_between_updates_and_the_resumed_run_is_the_same(tmp_path):
    """20 vector steps of two environments, then 40 updates: the signal comes in the 70th of all."""
    cfg = {"train_freq": 20}
    whole = build_trainer(config(tmp_path, "whole", cfg=cfg))
    whole.train()
    stopped = build_trainer(config(tmp_path, "half", cfg=cfg))
    step = stopped.algorithm.step

    def signalling(batch):
        if stopped.algorithm.version == 69:
            os.kill(os.getpid(), signal.SIGTERM)
        return step(batch)

    stopped.algorithm.step = signalling
    with pytest.raises(SystemExit):
        stopped.train()
    assert stopped.algorithm.version == 70
    resumed = build_trainer(config(tmp_path, "half", cfg=cfg, auto_resume=True))
    assert (resumed.algorithm.version, resumed.num_timesteps) == (70, stopped.num_timesteps)
    resumed.train()
    assert whole.algorithm.version == resumed.algorithm.version > 70
    assert_equal(weights(whole), weights(resumed))
    for trainer in (whole, stopped, resumed):
        trainer.close()


def test_updates_follow_the_steps(tmp_path):
    # 300 steps, of which the first 100 only fill the buffer: (300 − 98) · 0.5 updates (steps come in twos; the turn
    # that reaches 100 counts).
    trainer = build_trainer(config(tmp_path, cfg={"updates_per_step": 0.5}))
    trainer.train()
    assert trainer.algorithm.version == 101
    assert len(trainer.collection.buffer) == 300
    trainer.close()


def test_images_and_the_buffer_resume(tmp_path):
    settings = {"env_settings": {"kwargs": {"image": True}}, "cfg": {"random_shift": 1}}
    whole = build_trainer(config(tmp_path, "whole", trainer={"total_timesteps": 140}, **settings))
    whole.train()
    first = build_trainer(config(tmp_path, "first", trainer={"total_timesteps": 120}, **settings))
    first.train()
    second = build_trainer(config(tmp_path, "second", trainer={"total_timesteps": 140}, **settings))
    second.load(first.run_dir)
    second.train()
    assert_equal(weights(whole), weights(second))
    for trainer in (whole, first, second):
        trainer.close()


def test_normalisation_is_taken_from_the_first_steps_and_kept(tmp_path):
    trainer = build_trainer(config(tmp_path, policy={**SMALL, "normalize_observation": True}))
    trainer.train(100)
    counts = [float(value) for name, value in trainer.policy.state_dict().items() if name.endswith("count")]
    trainer.train(200)
    again = [float(value) for name, value in trainer.policy.state_dict().items() if name.endswith("count")]
    assert counts == again == [100.0]
    trainer.close()


def iql(tmp_path, cls=IQLTrainer, **settings):
    trainer = cls(
        2,
        1,
        OfflineRLConfig(num_epochs=3, batch_size=32, output_dir=str(tmp_path / "offline"), hidden_dim=16, **QUIET),
        env=TWO_STEP,
        **settings,
    )
    trainer.train(two_step_dataset())
    return trainer


@pytest.mark.parametrize("cls", [IQLTrainer, CQLTrainer, SFTTrainer])
def test_the_policy_object_goes_on_with_ppo(tmp_path, cls):
    """The document's example: PPOTrainer(env, policy=iql_trainer.policy, config=online_config)."""
    offline = iql(tmp_path, cls, **({"cql_samples": 2} if cls is CQLTrainer else {}))
    before = offline.evaluate(8)
    settings = RLConfig(
        total_timesteps=64,
        learning_rate=1e-5,
        rollout_steps=32,
        eval_episodes=8,
        output_dir=str(tmp_path / "online"),
        **QUIET,
    )
    online = PPOTrainer(TwoStep(), policy=offline.policy, config=settings)
    assert online.policy is offline.policy
    assert online.evaluate(8)["mean_reward"] == before["mean_reward"]
    online.train()
    online.close()
    # The run can be evaluated from its folder: it wrote down which network it is.
    assert load_config(online.run_dir / "config.yaml").policy.hidden_dim == 16
    assert "mean_reward" in evaluate_run(online.run_dir, episodes=2, env=TWO_STEP)


def test_sac_goes_on_with_policy_critics_and_scales(tmp_path):
    offline = iql(tmp_path)
    critics = offline.algorithm.critics.state_dict()
    trainer = SACTrainer(
        TwoStep(),
        policy=offline.policy,
        critics=offline,
        config=RLConfig(
            algorithm="sac", output_dir=str(tmp_path / "online"), learning_starts=10, total_timesteps=20, **QUIET
        ),
    )
    assert_equal(critics, trainer.trainer.algorithm.critics.state_dict())
    # Returns of the dataset are 0 and 1: IQL scales rewards by 1000, and so do the critics that it continues with.
    assert float(trainer.policy.reward_scale) == 1000.0
    assert trainer.trainer.collection._random_left == 0  # it can act already
    trainer.train()
    trainer.close()


def test_from_run_to_run_on_the_command_line(tmp_path, capsys):
    offline = iql(tmp_path, CQLTrainer, cql_samples=2)
    evaluated = offline.evaluate(10)
    source = str(offline.run_dir)
    settings = config(
        tmp_path, "online", env=TWO_STEP, model_path=source, trainer={"total_timesteps": 120, "eval_freq": 60}
    )
    trainer = build_trainer(settings)
    state = torch.load(checkpoint_folder(offline.run_dir) / "training_state.pt", weights_only=True)
    assert_equal(state["algorithm"]["critics"], trainer.algorithm.critics.state_dict())
    trainer.train()
    trainer.close()
    # The first evaluation is that of the policy as it came, and equals the last one before.
    first = logged_evaluations(trainer.run_dir, 120)[0]
    assert first["step"] == 0
    assert first["mean_reward"] == evaluated["mean_reward"]
    out = tmp_path / "ppo"
    arguments = [
        "train",
        "ppo",
        "--env",
        TWO_STEP,
        "--model-path",
        source,
        "--total-timesteps",
        "64",
        "--rollout-steps",
        "32",
    ]
    assert (
        cli.main(
            [*arguments, "--eval-freq", "0", "--output-dir", str(out), "--console-level", "ERROR", "--no-tensorboard"]
        )
        == 0
    )
    assert load_config(out / "config.yaml").policy.distribution == "tanh_gaussian"


@pytest.mark.parametrize("name", ["", "model.pt"])
def test_goes_on_with_a_checkpoint_that_was_saved_alone(tmp_path, name):
    """The settings are inside it: a network of width 16, where the default is 256."""
    offline = iql(tmp_path)
    source = offline.save(tmp_path / "elsewhere" / "saved")
    trainer = build_trainer(config(tmp_path, "online", env=TWO_STEP, policy={}, model_path=str(source / name)))
    assert trainer.policy.hidden_sizes == (16, 16)
    assert_equal(offline.policy.state_dict(), trainer.policy.state_dict())
    trainer.close()


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "sac"])
def test_the_statistics_of_the_dataset_stay_online_also_after_a_resume(tmp_path, algorithm):
    offline = iql(tmp_path, SFTTrainer)
    td = schema_row(torch.randn(4, 2))
    cfg = {"batch_size": 8} | ({"learning_starts": 20} if algorithm == "sac" else {})
    settings = {
        "algorithm": {"name": algorithm, "cfg": cfg},
        "env": {"id": TWO_STEP},
        "model_path": str(offline.run_dir),
        "trainer": {"eval_freq": 0, **({} if algorithm == "sac" else {"buffer_size": 16})},
        "logging": QUIET,
        "threads": 1,
        "output_dir": str(tmp_path / "online"),
    }
    first = build_trainer(resolve(settings))
    with torch.no_grad():
        actions = [one.act(td.clone(), deterministic=True)["action"] for one in (offline.policy, first.policy)]
    torch.testing.assert_close(*actions, rtol=0, atol=1e-6)
    first.train(64)
    first.close()
    resumed = build_trainer(resolve({**settings, "auto_resume": True}))
    resumed.train(128)
    resumed.close()
    assert resumed.num_timesteps >= 128
    before = offline.policy.encoder.state_dict()
    assert float(before["streams.observation.normalizer.count"]) > 0
    for one in (first, resumed):
        assert_equal(one.policy.encoder.state_dict(), before)


def test_the_anchor_normalises_as_the_policy_whose_statistics_come_with_the_first_steps(tmp_path):
    policy = small_actor(distribution="tanh_gaussian", action_space=Target().action_space)
    cfg = {"anchor_coef": 0.1, "random_steps": 0, "learning_starts": 40}
    trainer = build_trainer(config(tmp_path, cfg=cfg), policy=policy)
    trainer.train(60)
    trainer.close()
    (own, anchored) = (one.encoder.streams["observation"].normalizer for one in (policy, trainer.algorithm.anchor))
    assert float(own.count) == 40
    assert_equal(own.state_dict(), anchored.state_dict())


@pytest.mark.parametrize("algorithm", ["ppo", "sac"])
def test_a_run_from_another_resumes_by_the_same_command(tmp_path, algorithm):
    """Also when the run that it started from is gone."""
    offline = iql(tmp_path)
    arguments = ["train", algorithm, "--env", TWO_STEP, "--model-path", str(offline.run_dir), "--auto-resume"]
    arguments += [
        "--output-dir",
        str(tmp_path / "run"),
        "--eval-freq",
        "0",
        "--console-level",
        "ERROR",
        "--no-tensorboard",
    ]
    arguments += ["--rollout-steps", "32"] if algorithm == "ppo" else ["--learning-starts", "20", "--batch-size", "8"]
    assert cli.main([*arguments, "--total-timesteps", "32"]) == 0
    offline.run_dir.rename(tmp_path / "gone")
    assert cli.main([*arguments, "--total-timesteps", "64"]) == 0
    assert (tmp_path / "run" / "checkpoint-64").is_dir()


def test_critics_that_do_not_fit_are_refused_or_made_anew(tmp_path):
    source = str(iql(tmp_path).run_dir)
    line = (
        r"its critics are of another shape than num_critics 3, critic_layer_norm false and hidden .*--no-keep-critics"
    )
    with pytest.raises(InputError, match=line):
        build_trainer(config(tmp_path, env=TWO_STEP, model_path=source, cfg={"num_critics": 3}))
    trainer = build_trainer(
        config(tmp_path, env=TWO_STEP, model_path=source, cfg={"num_critics": 3, "keep_critics": False})
    )
    # A policy that knows something starts with a low temperature, whatever becomes of its critics.
    assert float(trainer.algorithm.log_alpha.detach().exp()) == pytest.approx(0.05)
    trainer.close()


def test_the_anchor_is_the_policy_as_it_came_also_after_a_resume(tmp_path):
    source = iql(tmp_path)
    start = [parameter.detach().clone() for parameter in source.policy.actor_parameters()]
    cfg = {"anchor_coef": 0.1, "anchor_half_life": 100}
    settings = {"env": TWO_STEP, "model_path": str(source.run_dir), "cfg": cfg}
    first = build_trainer(config(tmp_path, **settings, trainer={"total_timesteps": 110}))
    first.train()
    checkpoint = first.save()
    first.close()
    resumed = build_trainer(config(tmp_path, "again", **settings, trainer={"total_timesteps": 120}))
    resumed.load(checkpoint)
    for one in (first, resumed):
        anchor = list(one.algorithm.anchor.actor_parameters())
        assert all(torch.equal(a, b) for a, b in zip(start, anchor, strict=True))
    now = list(resumed.policy.actor_parameters())
    assert any(not torch.equal(a, b) for a, b in zip(start, now, strict=True))
    resumed.close()


def test_a_policy_keeps_its_action_range_in_an_environment_with_a_wider_one(tmp_path):
    offline = iql(tmp_path)  # acts in [-1, 1]
    settings = RLConfig(algorithm="sac", output_dir=str(tmp_path / "online"), **QUIET)
    wide = gymnasium.wrappers.RescaleAction(TwoStep(), -2.0, 2.0)
    trainer = SACTrainer(wide, policy=offline.policy, config=settings)
    assert trainer.policy.head.bounds[1].tolist() == [1.0]
    trainer.close()
    apart = gymnasium.wrappers.RescaleAction(TwoStep(), 2.0, 3.0)
    with pytest.raises(
        InputError, match="the policy acts between -1 and 1, the environment takes 2 to 3: the two ranges do not"
    ):
        SACTrainer(apart, policy=offline.policy, config=settings)
    with pytest.raises(InputError, match="critics: give the trainer that trained the policy, not str"):
        SACTrainer(TwoStep(), policy=offline.policy, critics="iql", config=settings)


def test_a_policy_that_does_not_fit_is_refused_in_one_line(tmp_path):
    offline = iql(tmp_path)
    settings = {"output_dir": str(tmp_path / "online"), **QUIET}
    with pytest.raises(InputError, match=r"^policy: made for observations Box.*, the environment has Box.*\(4,\)"):
        PPOTrainer(gymnasium.make("CartPole-v1"), policy=offline.policy, config=RLConfig(**settings))
    discrete = gymnasium.wrappers.TransformAction(TwoStep(), lambda action: action, spaces.Discrete(2))
    with pytest.raises(InputError, match=r"^policy: made for actions of 1 numbers, the environment takes Discrete"):
        PPOTrainer(discrete, policy=offline.policy, config=RLConfig(**settings))
    online = PPOTrainer(TwoStep(), config=RLConfig(**settings, eval_freq=0, memory_hidden=8))
    online.close()
    other = RLConfig(algorithm="sac", output_dir=str(tmp_path / "sac"), **QUIET)
    with pytest.raises(InputError, match=r"^policy: sac needs continuous .*; ActorCritic with recurrent memory"):
        SACTrainer(TwoStep(), policy=online.policy, config=other)


def test_sac_continues_with_a_policy_of_ppo(tmp_path):
    settings = RLConfig(total_timesteps=64, rollout_steps=32, output_dir=str(tmp_path / "ppo"), eval_freq=0, **QUIET)
    online = PPOTrainer(TWO_STEP, config=settings)
    online.train()
    online.close()
    trainer = build_trainer(config(tmp_path, env=TWO_STEP, model_path=str(tmp_path / "ppo")))
    assert_equal(online.policy.state_dict(), trainer.policy.state_dict())
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.train()
    trainer.close()
    assert not torch.equal(before["towers.weight_0"], trainer.policy.state_dict()["towers.weight_0"])
    assert load_config(trainer.run_dir / "config.yaml").policy.name == "actor_critic"
    assert "mean_reward" in evaluate_run(trainer.run_dir, episodes=2, env=TWO_STEP)


def test_a_vla_model_trains(tmp_path, monkeypatch):
    monkeypatch.setitem(gpt.LANGUAGE_MODELS, "gpt-tiny", gpt.LanguageSpec(1, 64, 2))
    model = {"model_class": "gpt-vla", "model_config": {"language_model": "gpt-tiny"}}
    settings = config(
        tmp_path,
        env="deft/Reach-v0",
        env_settings={"kwargs": {"observation": "vla", "image_size": 16}},
        policy={"name": "vla", "vla_config": model},
        cfg={"batch_size": 8, "learning_starts": 20},
        trainer={"total_timesteps": 24},
    )
    trainer = build_trainer(settings)
    before = {name: value.clone() for name, value in trainer.policy.state_dict().items()}
    trainer.train()
    after = trainer.policy.state_dict()
    assert any(not torch.equal(before[name], after[name]) for name in before if name.startswith("model."))
    trainer.close()


def test_a_vla_model_of_chunks_trains(tmp_path):
    """By its name vla-tiny decides four steps at a time; for SAC it decides one, unless more are asked for."""
    world = ["--env", "reach", "--env-kwargs", "observation=vla", "image_size=16"]
    flags = ["--model", "vla-tiny", "--vla-model-config", "width=8", "--console-level", "ERROR", "--eval-freq", "0"]
    few = ["--total-timesteps", "12", "--learning-starts", "10", "--batch-size", "4"]
    for length in (1, 4):
        chunks = ["--chunk-length", "4"] if length == 4 else []
        out = tmp_path / str(length)
        assert cli.main(["train", "sac", *world, *flags, *few, *chunks, "--output-dir", str(out)]) == 0
        assert load_config(out / "config.yaml").policy.chunk_length == length


def test_chunks_are_learned_and_resume_bit_for_bit(tmp_path):
    """Both steps of the two-step world in one decision: the first one's sign decides the reward of the second."""
    chunks = {"policy": {**SMALL, "chunk_length": 2}, "env": TWO_STEP}
    cfg = {"learning_starts": 60, "gamma": 0.9, "alpha": 0.05}
    trainers = [build_trainer(config(tmp_path, name, cfg=cfg, **chunks)) for name in ("whole", "first", "second")]
    whole, first, second = trainers
    whole.train()
    first.train(174)
    second.load(first.save())
    second.train(300)
    assert whole.algorithm.version == second.algorithm.version > 0
    assert_equal(weights(whole), weights(second))
    batch = whole.collection.buffer.sample(64)
    assert (batch["action"].shape, batch["step_mask"].all()) == ((64, 2, 1), True)
    # One decision is a whole episode: its reward is γ · 1 for a positive first action, and nothing follows.
    torch.testing.assert_close(batch["next", "reward"], 0.9 * (batch["action"][:, 0, 0] > 0).float())
    assert not batch["discount"].any()
    assert whole.evaluate(20)["mean_reward"] == 1.0
    for trainer in trainers:
        trainer.close()
    # 300 env steps in chunks of 2 are at least 150 transitions; there is room for 1/8 more and 2 of the environments
    assert [len(one.collection.buffer._steps.tensors["action"]) for one in trainers] == [170] * 3
    with pytest.raises(InputError, match=r"n_step 3: with chunk_length 2 .*; use --n_step 1"):
        build_trainer(config(tmp_path, "n", cfg={"n_step": 3}, **chunks))


def test_a_buffer_takes_memory_for_the_steps_of_the_run(tmp_path):
    """10^12 transitions are more than any machine holds, and a run of 40 steps has 40 of them, also resumed at 60."""
    settings = {"cfg": {"buffer_size": 10**12, "learning_starts": 10}, "trainer": {"total_timesteps": 40}}
    trainer = build_trainer(config(tmp_path, **settings))
    trainer.train()
    assert len(trainer.collection.buffer._steps.tensors["action"]) == 40
    trainer.close()
    longer = config(tmp_path, **settings | {"trainer": {"total_timesteps": 60}}, resume=str(tmp_path / "run"))
    trainer = build_trainer(longer)
    trainer.train()
    assert len(trainer.collection.buffer) == len(trainer.collection.buffer._steps.tensors["action"]) == 60
    trainer.train(70)  # of its own, in Python
    assert len(trainer.collection.buffer) == len(trainer.collection.buffer._steps.tensors["action"]) == 70
    trainer.close()


def test_prior_data_is_mixed_in(tmp_path, monkeypatch):
    dataset = two_step_dataset()
    monkeypatch.setattr("deft.training.replay_collection.load_dataset", lambda name: dataset)
    trainer = build_trainer(
        config(
            tmp_path,
            env=TWO_STEP,
            cfg={"prior_data": "two-step", "prior_fraction": 0.25},
            trainer={"total_timesteps": 110},
        )
    )
    trainer.train()
    collection = trainer.collection
    batch = collection.sample(32)
    prior = {round(float(action), 5) for action in dataset.table.action.flatten()}
    from_prior = [round(float(action), 5) in prior for action in batch["action"].flatten()]
    assert from_prior == [False] * 24 + [True] * 8  # a quarter of 32
    trainer.close()


def test_what_sac_cannot_do_is_said_in_one_line(tmp_path, capsys):
    common = ["--output-dir", str(tmp_path / "x")]
    for arguments, message in (
        (["--env", "CartPole-v1"], "sac: the policy acts in a bounded Box; the actions here are Discrete(2); use"),
        (["--buffer-type", "vla"], "--buffer-type: unknown flag"),
        (["--alpha", "loud"], "alpha"),
        (
            ["--env", "Pendulum-v1", "--anchor-coef", "0.1"],
            "anchor_coef: keeps a trained policy near its",
        ),
    ):
        assert cli.main(["train", "sac", *arguments, *common]) == 2
        error = capsys.readouterr().err
        assert message in error
        assert error.count("\n") == 1
