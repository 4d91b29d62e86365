"""Phase 1: memory through chunks, learning, resuming, collecting beside training."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from explorers import make_teacher
from f1_worlds import micro_config, same, small_policy, weights
from panning_camera import WORLD, panning_config

from deft import schema
from deft.config.loading import to_dict
from deft.data.episodes import batch_episodes
from deft.errors import InputError, RunError
from deft.models.f1.frames import to_model
from deft.models.f1.policy import F1Policy, encode_frames
from deft.runs import checkpoint
from deft.training.phases import teacher
from deft.training.phases.exploration import Exploration, InlineExplorer, ProcessExplorer
from deft.training.phases.teacher import TeacherTrainer
from deft.training.phases.world_model_trainer import copy_accuracy

ROOT = Path(__file__).parents[3]
EXPLORATION = Exploration({"world": WORLD, "max_steps": 4})


def coding_policy(**changes) -> F1Policy:
    """A policy whose codes differ between images: the codebook is made of features of its encoder."""
    policy = small_policy(**changes)
    frames = np.concatenate([episode.wrist for episode in InlineExplorer(EXPLORATION).take(8)])
    with torch.no_grad():
        features = policy.tokenizer.features(to_model(torch.as_tensor(frames), 16, "wrist_rgb"))
        vectors = features.permute(0, 2, 3, 1).flatten(0, 2)
        chosen = torch.randperm(len(vectors), generator=torch.Generator().manual_seed(0))[:32]
        policy.tokenizer.quantize.embedding.weight.copy_(vectors[chosen])
    return policy


# -- memory ----------------------------------------------------------------------------------------------------------


def test_the_memory_state_is_logged_at_debug_level(tmp_path, caplog):
    """Batches of 2 episodes, 2 layers of 6: after every chunk the shape, after a round the size."""
    config = panning_config(tmp_path, num_episodes=2)
    config.logging.file_level = "DEBUG"
    config.logging.enable_file_logging = True
    TeacherTrainer(config, small_policy()).train()
    (file,) = (tmp_path / "logs").iterdir()
    lines = [line for line in file.read_text().splitlines() if "memory state" in line]
    assert all("DEBUG" in line for line in lines)
    assert (
        sum("(layers, batch, hidden) = (2, 2, 6)" in line for line in lines) == 1 + 3
    )  # zeros, then chunks of 2, 2, 1
    assert sum("after the last chunk: mean |m| 0." in line for line in lines) == 1


def test_memory_is_zeros_then_carried_without_its_gradient(tmp_path, monkeypatch):
    made = make_teacher(tmp_path, num_episodes=2)
    given, returned = [], []
    original = F1Policy.forward_with_world_model

    def watched(self, batch, memory_state=None, **arguments):
        results = original(self, batch, memory_state=memory_state, **arguments)
        given.append(memory_state)
        returned.append(results[schema.MEMORY_STATE])
        return results

    monkeypatch.setattr(F1Policy, "forward_with_world_model", watched)
    made.train()
    assert len(given) == 3  # 5 steps in chunks of 2
    assert not given[0].any()
    for before, after in zip(given[1:], returned, strict=False):
        assert torch.equal(before, after)
        assert not before.requires_grad
        assert after.requires_grad
    assert given[1].abs().sum() > 0
    assert not torch.equal(given[1][:, 0], given[1][:, 1])  # each row has its own


def test_a_memory_of_none_is_an_error(tmp_path, monkeypatch):
    made = make_teacher(tmp_path)
    monkeypatch.setattr("deft.training.phases.world_model_trainer.MemoryStateManager.get_current", lambda self: None)
    with pytest.raises(InputError, match="memory_state cannot be None"):
        made.train()


def test_chunks_with_carried_memory_equal_the_whole_sequence(tmp_path):
    made = make_teacher(tmp_path)
    made.policy.eval()
    made._gather()
    batch = made.buffer.batch(np.arange(2))
    whole, _ = batch.chunk(0, 5)
    with torch.no_grad():
        expected = made.policy(whole, memory_state=made.policy.initial_memory(2))
        memory, losses = made.policy.initial_memory(2), []
        for start in (0, 2, 4):
            chunk, _ = batch.chunk(start, 2)
            found = made.policy(chunk, memory_state=memory)
            memory = found[schema.MEMORY_STATE]
            losses.append(float(found["wm_loss"]) * len(chunk["state"]))
    assert torch.allclose(memory, expected[schema.MEMORY_STATE], atol=1e-6)
    assert sum(losses) / 5 == pytest.approx(float(expected["wm_loss"]), abs=1e-5)
    made.close()


def test_padded_steps_do_not_count(tmp_path):
    """An episode of 3 steps beside one of 5: the loss of the chunk is that of its real steps."""
    explorers = [InlineExplorer(Exploration({"world": WORLD, "max_steps": length}, seed=length)) for length in (5, 3)]
    policy = small_policy().eval()
    episodes = [explorer.take(1)[0] for explorer in explorers]
    for episode in episodes:
        episode.codes = encode_frames(policy, episode.wrist)
    batch, _ = batch_episodes(episodes).chunk(0, 5)
    single = [batch_episodes([episode]).chunk(0, 5)[0] for episode in episodes]
    with torch.no_grad():
        together = policy(batch, memory_state=policy.initial_memory(2))
        alone = [policy(one, memory_state=policy.initial_memory(1)) for one in single]
    for name in ("wm_loss", "wm_acc_mean", "wm_acc_tail"):
        expected = (5 * float(alone[0][name]) + 3 * float(alone[1][name])) / 8
        assert float(together[name]) == pytest.approx(expected, abs=1e-5)
    expected = (5 * copy_accuracy(single[0]) + 3 * copy_accuracy(single[1])) / 8
    assert copy_accuracy(batch) == pytest.approx(float(expected), abs=1e-6)


def test_memory_before_a_random_step_is_that_of_the_steps_before_it(tmp_path):
    made = make_teacher(tmp_path)
    made._gather()
    batch = made.buffer.batch(np.arange(2))
    times = torch.tensor([3, 0])
    found = made.memory_before(batch, torch.tensor([0, 1]), times)
    steps, _ = batch.chunk(0, 3)
    with torch.no_grad():
        expected = made.policy.forward_memory_only(steps, made.policy.initial_memory(2))
    assert torch.allclose(found[:, 0], expected[:, 0], atol=1e-6)
    assert not found[:, 1].any()
    made.close()


# -- learning --------------------------------------------------------------------------------------------------------


def test_it_learns_what_copying_cannot(tmp_path):
    """The picture moves in every step. After training the prediction moves it too, and by a_t: with another a_t it is
    another prediction, and a worse one."""
    policy = coding_policy(motion_prior=True)
    made = make_teacher(
        tmp_path,
        policy,
        num_episodes=240,
        steps_per_episode=8,
        batch_size=8,
        bptt_length=4,
        motion_warmup=0.6,
        motion_learning_rate=1e-2,
        learning_rate=2e-3,
        log_every=80,
    )
    made.train()
    policy.eval()
    explorer = InlineExplorer(Exploration({"world": WORLD, "max_steps": 8}, held_out=True))
    episodes = explorer.take(8)
    for episode in episodes:
        episode.codes = encode_frames(policy, episode.wrist)
    batch, _ = batch_episodes(episodes).chunk(0, 8)
    memory = policy.initial_memory(8)
    other = {**batch, "action_history": batch["action_history"].clone()}
    other["action_history"][..., -1, :] *= -1  # a_t alone: the camera goes the other way
    with torch.no_grad():
        results, misled = (policy(one, memory_state=memory) for one in (batch, other))
    predicted, changed = (policy.predict_images_only(one, memory)["frame_tokens"] for one in (batch, other))
    accuracy, copied = (predicted == batch["frame_tokens"][..., 4, :]).float().mean(), copy_accuracy(batch)
    assert accuracy > copied + 0.1
    assert (predicted != changed).float().mean() > 0.2
    assert float(misled["wm_loss"]) > 1.1 * float(results["wm_loss"])


def test_the_warm_up_teaches_the_motion_prior_alone(tmp_path):
    policy = small_policy(motion_prior=True)
    before = weights(policy)
    make_teacher(tmp_path, policy, num_episodes=4, motion_warmup=1.0).train()
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(name.startswith("model.motion.") for name in changed)


def test_a_second_warm_up_teaches_the_memory_alone(tmp_path):
    """After the motion: half of the rounds each, and nothing of the rest of the model."""
    policy = small_policy(motion_prior=True, memory_picture=True)
    before = weights(policy)
    made = make_teacher(tmp_path, policy, num_episodes=8, motion_warmup=0.5, memory_warmup=0.5)
    made.train()
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert {".".join(name.split(".")[:2]) for name in changed} == {"model.motion", "model.memory"}
    assert {"model.memory.to_picture.output.weight", "model.memory.gru.weight_hh_l0"} <= changed
    assert not any(".to_generation." in name or ".to_action." in name for name in changed)
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    kinds = ["motion" if "train/motion_loss" in line else "memory" for line in lines if "train/grad_norm" in line]
    assert kinds == ["motion"] * 2 + ["memory"] * 2
    assert made.schedule_progress == 0.0  # what follows would begin with the whole learning rate


def test_trust_in_the_motion_prior_is_fitted_once(tmp_path, monkeypatch):
    """Before the first update of the whole model, and not again: neither in later rounds nor after resuming."""
    fitted = []
    monkeypatch.setattr(teacher, "fit_sharpness", lambda *found: fitted.append(found) or torch.full((3,), 2.5))
    policy = small_policy(motion_prior=True)
    made = make_teacher(tmp_path, policy, num_episodes=6, motion_warmup=0.4, learning_rate=1e-9)
    made.train()
    assert len(fitted) == 1
    assert policy.model.motion.log_sharpness.tolist() == pytest.approx([2.5] * 3, abs=1e-4)
    config = made.config
    config.run.resume, config.training.num_episodes = str(tmp_path), 8
    TeacherTrainer(config, small_policy(motion_prior=True)).train()
    assert len(fitted) == 1


def test_trained_weights_are_not_warmed_up_unasked(tmp_path):
    """A new optimizer at the warm-up's rate would undo in one update what a teacher knows."""
    made = make_teacher(tmp_path, small_policy(motion_prior=True, memory_picture=True), motion_warmup=None)
    assert made._warmup_shares == (0.15, 0.05)
    made.config.model.checkpoint_path = "teacher.safetensors"
    assert made._warmup_shares == (0.0, 0.0)
    made.training.memory_warmup = 0.4
    assert made._warmup_shares == (0.0, 0.4)


def test_random_steps_hide_the_head_camera_too(tmp_path):
    found = {}
    for dropout in (0.0, 1.0):
        settings = {"num_episodes": 4, "sequential_training": False, "head_dropout": dropout}
        made = make_teacher(tmp_path / str(dropout), small_policy(), **settings)
        batches: list[set[str]] = []

        def update(steps, memory, made=made, batches=batches):
            batches.append(set(steps))
            return type(made).update_on(made, steps, memory)

        made.update_on = update
        made.train()
        found[dropout] = set.union(*batches)
    assert found[1.0] < found[0.0]  # a picture fewer


def test_trust_in_the_motion_prior_learns_quicker(tmp_path):
    made = make_teacher(tmp_path, small_policy(motion_prior=True), learning_rate=1e-3)
    groups = zip(made.optimizer.param_groups, made.highest_rates, strict=True)
    rates = {id(one): rate for group, rate in groups for one in group["params"]}
    motion = made.policy.model.motion
    assert rates.pop(id(motion.log_sharpness)) == rates.pop(id(motion.trust.weight)) == pytest.approx(1e-2)
    assert rates.pop(id(motion.trust.bias)) == pytest.approx(1e-2)
    assert set(rates.values()) == {1e-3}
    learning = {id(one) for one in made.policy.parameters() if one.requires_grad}
    assert len(rates) == len(learning) - 3  # each once, and none left out
    made.close()


def test_random_steps_train_too(tmp_path):
    policy = small_policy()
    before = weights(policy)
    summary = make_teacher(tmp_path, policy, sequential_training=False, num_episodes=4).train()
    assert summary["updates"] == 6  # two rounds of ⌈5 / 2⌉
    assert not same(before, policy.state_dict())


def test_lora_changes_adapters_and_memory_alone(tmp_path):
    from deft.models.f1.loading import load_f1_policy
    from deft.models.f1.optimization import add_lora

    policy = small_policy()
    add_lora(policy, {"r": 2})
    before = weights(policy)
    make_teacher(tmp_path, policy, num_episodes=4, lora={"r": 2}).train()
    changed = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(".lora_" in name or ".modules_to_save." in name for name in changed)
    saved = tmp_path / "checkpoint-4"
    assert (saved / "peft_adapter" / "adapter_config.json").is_file()
    loaded = load_f1_policy(tmp_path / "f1_config.json", checkpoint_path=saved).policy
    effective = [
        {n: v for n, v in one.state_dict().items() if ".original_module." not in n} for one in (policy, loaded)
    ]
    assert same(*effective)


# -- the run folder --------------------------------------------------------------------------------------------------


def test_a_video_and_a_picture_of_every_episode(tmp_path, monkeypatch):
    """`video_save_every: 1` with batches of 2: four episodes give four videos, each of its own episode."""
    filmed = []
    monkeypatch.setattr(
        "deft.training.phases.base.write_prediction_video",
        lambda episode, path: filmed.append((path.name, episode.wrist.copy())),
    )
    made = make_teacher(tmp_path, num_episodes=4, video_save_every=1, sample_save_every=3)
    made.train()
    assert [name for name, _ in filmed] == [f"episode_{n}.mp4" for n in (1, 2, 3, 4)]
    episodes = InlineExplorer(made.exploration()).take(4)
    for (_, frames), episode in zip(filmed, episodes, strict=True):
        np.testing.assert_array_equal(frames, episode.wrist[1:])
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["episode_3.png"]


class SlowExplorer(ProcessExplorer):
    """Collects an episode while three rounds are trained."""

    def __init__(self, exploration, breaks_at=None):
        self.inner, self.num_asked, self.breaks_at = InlineExplorer(exploration), 0, breaks_at

    def take(self, count):
        return self.inner.take(count)

    def ready(self):
        self.num_asked += 1
        if self.num_asked == self.breaks_at:
            raise RunError("the simulator died")
        return self.inner.take(1) if self.num_asked % 3 == 0 else []

    def allow(self, count):
        pass

    def close(self):
        pass


def test_episodes_that_are_trained_on_again_are_not_counted(tmp_path):
    """2 at first, then one new one every third round: 4 episodes take 1 + 3 + 3 rounds of two chunks."""
    config = panning_config(tmp_path, overlap=True, num_envs=1, num_episodes=4, steps_per_episode=4, save_every=2)
    made = TeacherTrainer(config, small_policy(), SlowExplorer(EXPLORATION))
    summary = made.train()
    assert summary["episodes"] == made.num_taken == 4
    assert summary["updates"] == 7 * 2
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-2", "checkpoint-4"]


def test_what_was_learned_from_episodes_seen_before_is_saved(tmp_path):
    """The run fails two rounds after checkpoint-2, before there is a third episode: it is saved with what it knows."""
    config = panning_config(tmp_path, overlap=True, num_envs=1, num_episodes=3, steps_per_episode=4, save_every=1)
    made = TeacherTrainer(config, small_policy(), SlowExplorer(EXPLORATION, breaks_at=3))
    with pytest.raises(RunError, match="the simulator died"):
        made.train()
    assert (made.episode, made.num_updates) == (2, 6)
    saved = torch.load(tmp_path / "checkpoint-2" / "model.pt", weights_only=True)
    assert same(saved, {name: weights(made.policy)[name] for name in saved})


def test_outputs_are_as_documented(tmp_path):
    summary = make_teacher(tmp_path, num_episodes=6, save_every=2, video_save_every=4, sample_save_every=2).train()
    assert summary["episodes"] == 6
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == [
        "checkpoint-2",
        "checkpoint-4",
        "checkpoint-6",
    ]
    assert {path.name for path in (tmp_path / "checkpoint-6").iterdir()} == {
        "model.pt",
        "training_state.pt",
        "metrics.pt",
        "deft_manifest.json",
    }
    assert sorted(path.name for path in (tmp_path / "samples").iterdir()) == [f"episode_{n}.png" for n in (2, 4, 6)]
    assert [path.name for path in (tmp_path / "videos").iterdir()] == ["episode_4.mp4"]
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [2, 4, 6]
    assert {"train/wm_loss", "train/wm_acc_mean", "train/copy_acc", "train/learning_rate"} <= lines[-1].keys()


@pytest.mark.parametrize("settings", [{}, {"sequential_training": False, "buffer_capacity": 5}])
def test_resuming_equals_an_uninterrupted_run(tmp_path, settings):
    """8 episodes at once, and 4, stopped, then 4 more: the same weights, bit for bit."""
    once = make_teacher(tmp_path / "once", scheduler="constant", **settings)
    once.train()
    make_teacher(tmp_path / "twice", num_episodes=4, scheduler="constant", **settings).train()
    resumed = make_teacher(tmp_path / "twice", scheduler="constant", auto_resume=True, **settings)
    resumed.load(tmp_path / "twice" / "checkpoint-4")  # the policy was given, not loaded
    resumed.policy.load_state_dict(checkpoint.load_part(tmp_path / "twice" / "checkpoint-4", "model.pt"))
    resumed.train()
    assert resumed.episode == 8
    assert same(once.policy.state_dict(), resumed.policy.state_dict())


def test_a_run_is_not_replaced_unasked(tmp_path):
    make_teacher(tmp_path, num_episodes=2).train()
    with pytest.raises(InputError, match=r"already holds a run \(checkpoint-2\)"):
        make_teacher(tmp_path)
    make_teacher(tmp_path, num_episodes=4, overwrite=True).train()
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path)] == ["checkpoint-4"]


def test_the_clock_ends_a_run(tmp_path):
    summary = make_teacher(tmp_path, num_episodes=100_000, max_minutes=0.02).train()
    assert summary["episodes"] < 100_000
    assert (tmp_path / f"checkpoint-{summary['episodes']}").is_dir()
    assert summary["learning_rate"] < 4e-4  # of 2e-3: the schedule went by the clock


def command(folder: Path, *flags: str) -> list[str]:
    config = panning_config(folder, num_episodes=100_000, save_every=2, keep_checkpoints=2)
    values = {name: value for name, value in to_dict(config).items() if name != "run"}
    model = folder.parent / "model.json"
    model.write_text(json.dumps(to_dict(micro_config())))
    values["model"]["config_file"] = str(model)
    (folder.parent / "run.json").write_text(json.dumps(values))
    return [sys.executable, "-m", "deft", "train", "--config", str(folder.parent / "run.json"), *flags]


@pytest.mark.parametrize("how", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_killed_run_leaves_a_good_checkpoint(tmp_path, how):
    folder = tmp_path / "run"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    environment["DEFT_TRUSTED_MODULES"] = "panning_camera"  # named by the file of settings alone
    running = subprocess.Popen(command(folder), env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not checkpoint.list_checkpoints(folder) and time.monotonic() < deadline and running.poll() is None:
        time.sleep(0.02)
    running.send_signal(how)
    _, complaint = running.communicate(timeout=60)
    found, problems = checkpoint.latest_whole_checkpoint(folder)
    assert found is not None, complaint
    assert not problems
    reached = checkpoint.load_training_state(found)["episode"]
    assert found.name == f"checkpoint-{reached}"
    if how == signal.SIGTERM:
        assert running.returncode == 143
        assert complaint.strip().splitlines()[-1] == "deft: stopped by SIGTERM"
    more = [*command(folder), "--auto_resume", "--num_episodes", str(reached + 2), "--json"]
    done = subprocess.run(more, env=environment, capture_output=True, text=True, check=True, timeout=120)
    assert json.loads(done.stdout.splitlines()[-1])["episodes"] == reached + 2


# -- exploration -----------------------------------------------------------------------------------------------------


def test_a_run_collects_beside_training(tmp_path):
    made = make_teacher(tmp_path, overlap=True, num_envs=1, num_episodes=12)
    summary = made.train()
    assert summary["episodes"] >= 12
    assert made.num_taken >= summary["episodes"]
    _, process = made.explorer._workers[0]
    assert process.poll() is not None  # ended with the run


def test_what_goes_wrong_beside_training_ends_the_run(tmp_path):
    made = make_teacher(tmp_path, overlap=True, num_envs=1, world_kwargs={"breaks_at": 3})
    with pytest.raises(RunError, match="the camera fell off"):
        made.train()
