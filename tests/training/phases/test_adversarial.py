"""Phase 3: who learns when, a slow explorer, resuming after a stop, and when it ends."""

import copy
import dataclasses
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from explorers import world_model
from f1_worlds import changed, weights
from panning_camera import game_config

from deft import schema
from deft.data.episodes import EpisodeStore
from deft.errors import InputError, RunError
from deft.models.f1.explorer import load_explorer
from deft.runs import checkpoint
from deft.training.phases.adversarial import EXPLORER_FOLDER, AdversarialTrainer, action_spread, set_noise
from deft.training.phases.evaluation import explore
from deft.training.phases.explorer_rollouts import measure

ROOT = Path(__file__).parents[3]


def make(folder, policy=None, **game) -> AdversarialTrainer:
    return AdversarialTrainer(game_config(folder, **game), policy or world_model())


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """A run of three iterations, the first of them a warm-up, and the weights after each."""
    folder = tmp_path_factory.mktemp("game") / "run"
    made = make(folder, total_iterations=3, wm_warmup=1)
    after = []
    original = made.train_round

    def watched():
        result = original()
        after.append((weights(made.policy), weights(made.explorer), made.num_updates, made.ppo.version))
        return result

    first = (weights(made.policy), weights(made.explorer), 0, 0)
    made.train_round = watched
    made.train()
    return made, folder, [first, *after]


# -- who learns ------------------------------------------------------------------------------------------------------


def test_the_world_model_learns_in_every_iteration_and_the_explorer_after_the_warm_up(played):
    _, _, states = played
    for before, after in itertools.pairwise(states):
        moved = {name for name in before[0] if not torch.equal(before[0][name], after[0][name])}
        assert any(name.startswith("model.experts.generation.") for name in moved)
        assert any(name.startswith("model.memory.") for name in moved)
        assert not any(name.startswith("tokenizer.") for name in moved)
    first, warm, played_once, _ = states
    assert all(torch.equal(first[1][name], warm[1][name]) for name in first[1])  # the world model alone
    assert any(not torch.equal(warm[1][name], played_once[1][name]) for name in warm[1])


def test_so_many_world_model_updates_to_one_of_the_explorer(played):
    _, _, states = played
    # 6 steps in chunks of 3 are 2 optimizer steps a batch, 2 batches an iteration; PPO rests in the first.
    assert [state[2] for state in states] == [0, 4, 8, 12]
    assert [state[3] for state in states] == [0, 0, 1, 2]


def test_the_world_model_inside_the_explorer_stays(played):
    made, _, states = played
    frozen = ("f1.tokenizer.", "f1.model.experts.generation.", "f1.model.world_model.", "f1.model.motion.")
    assert not any(name.startswith(frozen) for name in changed(states[0][1], made.explorer))


def test_before_the_first_gradient_step_every_ratio_is_one(played):
    _, folder, _ = played
    lines = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    errors = [line["ppo/first_ratio_error"] for line in lines if "ppo/first_ratio_error" in line]
    assert len(errors) == 2  # not in the warm-up
    assert max(errors) < 1e-4


def test_what_is_logged(played):
    _, folder, _ = played
    last = json.loads((folder / "episode_metrics.jsonl").read_text().splitlines()[-1])
    wanted = {
        "train/wm_loss",
        "train/held_out_loss",
        "train/reward",
        "train/wm_error",
        "reward/progress",
        "train/older_wm_error",
    }
    assert wanted | {"game/action_spread", "game/actions_at_limit", "reward/paid_steps"} <= last.keys()
    assert last["step"] == 3
    assert last["reward/progress"] <= last["train/older_wm_error"] - last["train/wm_error"] + 1e-6
    assert last["reward/progress"] <= last["train/older_wm_uncertainty"] - last["train/wm_uncertainty"] + 1e-6


def test_older_and_newer_episodes_are_kept_apart(played):
    made, _, _ = played
    # Of 3 rollouts of 2 episodes, the last 2 are new (4 episodes); the first is older. One random episode a time.
    assert len(made.recent) == 4
    assert len(made.replay) == 2
    assert len(made.random_episodes) == made.num_random == 3


def with_watched_batches(played, random_share: float, batch_size: int) -> tuple[AdversarialTrainer, list]:
    """A trainer that learns nothing, a quarter of whose batches are older episodes, and the batches that it takes."""
    made = copy.copy(played[0])
    taken = []
    made.config = copy.deepcopy(made.config)
    made.config.adversarial.replay_share, made.config.adversarial.random_share = 0.25, random_share
    made.training = dataclasses.replace(made.training, batch_size=batch_size)
    made.train_chunks = lambda batch: taken.append(batch) or {}
    return made, taken


def test_a_batch_has_its_shares_of_older_and_random_episodes(played):
    made, taken = with_watched_batches(played, random_share=0.5, batch_size=4)
    stores = {"new": made.recent, "older": made.replay, "random": made.random_episodes}
    of = {e.wrist.tobytes(): name for name, store in stores.items() for e in store.episodes}
    made._train_world_model([])
    assert len(taken) == 2
    for batch in taken:
        kinds = [of[wrist.numpy().tobytes()] for wrist in batch.streams["wrist"]]
        assert kinds == ["new", "older", "random", "random"]


def test_random_episodes_are_the_same_where_they_are_collected_beside(played, tmp_path):
    made, _, _ = played
    config = game_config(tmp_path)
    config.training.overlap = True
    other = AdversarialTrainer(config, made.policy)
    other.num_random = 1  # as a run that is resumed after one
    found = [*other._collect_random(1), *other._collect_random(1)]
    other.close()
    for one, wanted in zip(found, list(made.random_episodes.episodes)[1:], strict=True):
        assert np.array_equal(one.wrist, wanted.wrist)
        assert np.array_equal(one.action, wanted.action)


def test_the_explorer_acts_with_a_share_of_the_students_noise(played, tmp_path):
    made, folder, _ = played
    deviation, initial = float(made.explorer.deviation[0]), float(made.explorer.initial_deviation)
    explorer, config = copy.deepcopy(made.explorer), game_config(tmp_path, explorer_noise=0.5)
    for _ in range(2):  # of an explorer that has it already, no more is taken away
        set_noise(explorer, config, folder)
        assert float(explorer.deviation[0]) == pytest.approx(0.5 * deviation)
        assert float(explorer.initial_deviation) == pytest.approx(0.5 * initial)
    with pytest.raises(InputError, match=r"action_noise: .* was trained with"):
        set_noise(explorer, game_config(tmp_path, explorer_noise=0.3), folder)


def test_the_explorers_noise_may_stay_longer_than_the_students(played, tmp_path):
    made, folder, _ = played
    explorer, config = copy.deepcopy(made.explorer), game_config(tmp_path, explorer_correlation=0.96)
    before = float(explorer.noise_correlation)
    set_noise(explorer, game_config(tmp_path), folder)
    assert float(explorer.noise_correlation) == before
    set_noise(explorer, config, folder)
    assert float(explorer.noise_correlation) == pytest.approx(0.96)
    with pytest.raises(InputError, match=r"noise_correlation: .* was trained with 0.96"):
        set_noise(explorer, game_config(tmp_path), folder)


def test_few_random_episodes_are_not_replaced_by_the_explorers(played):
    made, taken = with_watched_batches(played, random_share=0.75, batch_size=8)
    made._train_world_model([])
    # Of 8, 6 should be random and there are 3; 2 older ones are as many as are wanted, and leave no room for new ones.
    assert [len(batch.lengths) for batch in taken] == [5, 5]
    made.random_episodes = EpisodeStore(1)  # a game without random episodes: all are the explorer's
    made._train_world_model([])
    assert [len(batch.lengths) for batch in taken[2:]] == [6, 6]  # 2 older and all 4 new ones


# -- a slow explorer -------------------------------------------------------------------------------------------------


def test_the_robot_does_a_share_of_what_the_explorer_says(tmp_path):
    made = make(tmp_path, explorer_scale=0.25, wm_warmup=0, total_iterations=2)
    chosen, executed, remembered = [], [], []
    collect, step = made.rollouts.collect, made.rollouts.env.step
    memory = made.explorer.f1.model.memory

    def watched_collect(**arguments):
        found = collect(**arguments)
        chosen.append(found.rollout[schema.ACTION])
        return found

    def watched_step(actions):
        executed.append(actions.copy())
        return step(actions)

    made.rollouts.collect, made.rollouts.env.step = watched_collect, watched_step
    hook = memory.register_forward_pre_hook(lambda _, inputs: remembered.append(inputs[2].detach().clone()))
    made.train()
    hook.remove()
    wanted = torch.cat([0.25 * one.clamp(-1, 1) for one in chosen], 1)  # [T, 4]: two rollouts of two episodes
    assert wanted.abs().max() == 0.25  # some of it is at the limit
    done = torch.as_tensor(np.stack([episode.action for episode in made.recent.episodes], 1))
    assert torch.equal(done, wanted)  # what the world model learns from
    in_order = torch.as_tensor(np.concatenate(executed))
    assert torch.equal(in_order, wanted.transpose(0, 1).flatten(0, 1))  # what the environments execute
    assert max(float(one.abs().max()) for one in remembered) == 0.25  # what enters the explorer's memory
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert max(line["ppo/first_ratio_error"] for line in lines) < 1e-4  # the chain is scored as it was drawn
    spread, limit = action_spread_of(done, 0.25)
    assert lines[-1]["game/action_spread"] == pytest.approx(spread, rel=1e-4)  # of what it may do
    assert lines[-1]["game/actions_at_limit"] == pytest.approx(limit)
    assert limit > 0


def action_spread_of(actions: torch.Tensor, scale: float) -> tuple[float, float]:
    """Of the last rollout's two episodes and two real dims."""
    last = actions[:, 2:, :2].flatten(0, 1).numpy() / scale
    return float(last.std(0).mean()), float((np.abs(last) >= 0.99).mean())


def test_a_slow_explorer_goes_on_as_slowly_and_is_measured_so(tmp_path):
    made = make(tmp_path / "whole", explorer_scale=0.25, total_iterations=2)
    made.train()
    found = load_explorer(
        tmp_path / "whole" / "checkpoint-2" / EXPLORER_FOLDER,
        tmp_path / "whole" / EXPLORER_FOLDER / "f1_config.json",
    )
    assert float(found.action_scale) == 0.25
    resumed = AdversarialTrainer(
        game_config(
            tmp_path / "again",
            explorer_scale=0.25,
            total_iterations=2,
            resume=str(tmp_path / "whole" / "checkpoint-1"),
        )
    )
    resumed.train()
    assert not changed(weights(made.policy), resumed.policy)
    assert not changed(weights(made.explorer), resumed.explorer)
    with pytest.raises(
        InputError, match=r"explorer_scale: .*checkpoint-1 was trained with 0.25, not 1; resume with the same"
    ):
        AdversarialTrainer(game_config(tmp_path / "faster", resume=str(tmp_path / "whole" / "checkpoint-1")))
    config = game_config(tmp_path)
    for random, largest in ((False, 0.25), (True, 1.0)):  # random actions are not held back
        _, collected = explore(found, made.policy, config, 2, random=random)
        actions = np.concatenate([np.abs(episode.action) for episode in collected.episodes])
        assert actions.max() <= largest
        assert actions.max() > 0.7 * largest
        sizes = measure(made.policy, collected).action_size
        own = np.stack([np.abs(episode.action[:, :2]).mean(1) for episode in collected.episodes], 1)
        assert torch.allclose(sizes, torch.as_tensor(own))


def test_an_explorer_of_an_earlier_version_does_all_that_it_says(played, tmp_path):
    _, folder, _ = played
    place = tmp_path / "explorer"
    place.mkdir()
    for name in ("model.pt", "explorer.pt"):
        (place / name).write_bytes((folder / "checkpoint-3" / EXPLORER_FOLDER / name).read_bytes())
    extras = torch.load(place / "explorer.pt", weights_only=True)
    del extras["action_scale"]
    torch.save(extras, place / "explorer.pt")
    found = load_explorer(place, folder / EXPLORER_FOLDER / "f1_config.json")
    assert float(found.action_scale) == 1.0


def test_shares_of_more_than_a_batch_are_an_error(tmp_path):
    with pytest.raises(InputError, match="replay_share, random_share: their sum must be at most 1"):
        make(tmp_path, replay_share=0.6, random_share=0.5)


# -- resuming --------------------------------------------------------------------------------------------------------


def test_a_resumed_run_goes_on_bit_for_bit(played, tmp_path):
    made, folder, _ = played
    resumed = AdversarialTrainer(
        game_config(tmp_path / "again", total_iterations=3, wm_warmup=1, resume=str(folder / "checkpoint-2"))
    )
    resumed.train()
    assert not changed(weights(made.policy), resumed.policy)
    assert not changed(weights(made.explorer), resumed.explorer)
    assert resumed.num_updates == made.num_updates
    assert resumed.ppo.version == made.ppo.version
    for one, other in ((resumed.replay, made.replay), (resumed.random_episodes, made.random_episodes)):
        assert [e.number for e in one.episodes] == [e.number for e in other.episodes]
    one, other = (trainer.optimizer.state_dict()["state"] for trainer in (made, resumed))
    assert all(torch.equal(one[key]["exp_avg"], other[key]["exp_avg"]) for key in one)


def test_the_last_checkpoint_is_gone_on_from(played, tmp_path):
    _, folder, _ = played
    (
        folder / "checkpoint-99"
    ).mkdir()  # as a process that was killed in the middle would never leave it, but a disk may
    try:
        made = AdversarialTrainer(game_config(folder, total_iterations=3, auto_resume=True))
        assert made.resume_from == folder / "checkpoint-3"
        made.load(made.resume_from)
        assert made.episode == 3
        assert len(made.recent) == 4
        made.close()
    finally:
        (folder / "checkpoint-99").rmdir()


@pytest.mark.parametrize("name", AdversarialTrainer.parts)
def test_a_checkpoint_with_a_damaged_part_is_passed_over(name, played):
    _, folder, _ = played
    part = folder / "checkpoint-3" / name
    whole = part.read_bytes()
    part.write_bytes(whole[:100])
    try:
        found, problems = checkpoint.latest_whole_checkpoint(folder, AdversarialTrainer.parts)
        assert found == folder / "checkpoint-2"
        assert len(problems) == 1
        assert name in problems[0]
    finally:
        part.write_bytes(whole)


def test_a_checkpoint_holds_a_teacher_and_an_explorer(played):
    made, folder, _ = played
    place = folder / "checkpoint-3"
    assert {"model.pt", "training_state.pt", "metrics.pt", "deft_manifest.json", "buffers.pt", EXPLORER_FOLDER} == {
        p.name for p in place.iterdir()
    }
    saved = checkpoint.load_part(place, checkpoint.MODEL)
    assert all(torch.equal(saved[name], value) for name, value in made.policy.state_dict().items())


def test_another_run_starts_from_both_checkpoints(played, tmp_path):
    made, folder, _ = played
    config = game_config(tmp_path, teacher_checkpoint=str(folder), student_checkpoint=str(folder))
    started = AdversarialTrainer(config)
    assert not changed(weights(made.policy), started.policy)
    assert not changed(weights(made.explorer), started.explorer)
    started.close()


def test_a_checkpoint_that_does_not_fit_is_refused_by_key(played, tmp_path):
    _, folder, _ = played
    place = tmp_path / "checkpoint-1"
    (place / EXPLORER_FOLDER).mkdir(parents=True)
    source = folder / "checkpoint-3"
    for name in ("model.pt", "training_state.pt", "metrics.pt"):
        (place / name).write_bytes((source / name).read_bytes())
    kept = torch.load(source / EXPLORER_FOLDER / "model.pt", weights_only=True)
    kept.pop("model.flow.action_out_proj.weight")
    torch.save(kept, place / EXPLORER_FOLDER / "model.pt")
    (place / EXPLORER_FOLDER / "explorer.pt").write_bytes((source / EXPLORER_FOLDER / "explorer.pt").read_bytes())
    (tmp_path / EXPLORER_FOLDER).mkdir()
    text = (folder / EXPLORER_FOLDER / "f1_config.json").read_text()
    (tmp_path / EXPLORER_FOLDER / "f1_config.json").write_text(text)
    config = game_config(tmp_path / "run", teacher_checkpoint=str(source), student_checkpoint=str(place))
    with pytest.raises(InputError, match="action_out_proj"):
        AdversarialTrainer(config)


def test_without_a_teacher_one_line_says_so(tmp_path):
    with pytest.raises(InputError, match="nothing: there is no such checkpoint"):
        AdversarialTrainer(game_config(tmp_path, teacher_checkpoint=str(tmp_path / "nothing")))


def test_another_tokenizer_is_an_error(tmp_path):
    config = game_config(tmp_path)
    config.model.tokenizer_weights = "another"
    with pytest.raises(InputError, match="tokenizer_weights: phase 3"):
        AdversarialTrainer(config)


def test_recorded_video_is_an_error(tmp_path):
    config = game_config(tmp_path)
    config.training.dataset = "videos"
    with pytest.raises(InputError, match="dataset: phase 3"):
        AdversarialTrainer(config, world_model())


PROCESSES = """
import sys
from pathlib import Path
import torch
from f1_worlds import micro_policy, wake
from panning_camera import game_config
from deft.training.phases.adversarial import AdversarialTrainer

folder = Path(sys.argv[1])
trainer = AdversarialTrainer(game_config(folder / "run", wm_warmup=0), wake(micro_policy(condition_init=0.05)))
assert trainer.processes.count == 2
rank = trainer.processes.rank
trainer.train()
taken = {"taken": torch.tensor([episode.number for episode in trainer.recent.episodes])}
weights = {**dict(trainer.policy.named_parameters()), **dict(trainer.explorer.named_parameters())}
torch.save({name: value.detach() for name, value in weights.items()} | taken, folder / f"weights{rank}.pt")
"""


@pytest.mark.slow
def test_two_processes_keep_both_sides_equal(tmp_path):
    (tmp_path / "train.py").write_text(PROCESSES)
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1"]
    launch += ["--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [*launch, str(tmp_path / "train.py"), str(tmp_path)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    one, other = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    assert not set(one.pop("taken").tolist()) & set(other.pop("taken").tolist())  # each its own scenes
    assert all(torch.equal(one[name], other[name]) for name in one)


# -- when it ends ----------------------------------------------------------------------------------------------------


def test_a_run_that_ends_by_the_guard_says_so_and_is_saved(tmp_path):
    made = make(tmp_path, total_iterations=5, reward_floor=1e6, collapse_patience=2)
    with pytest.raises(RunError, match="the game is over"):
        made.train()
    # the second unpaid iteration in a row is counted, logged and saved as such
    assert checkpoint.list_checkpoints(tmp_path)[-1].name == "checkpoint-2"
    lines = [json.loads(line) for line in (tmp_path / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2]


def test_action_spread(collected):
    _, found = collected
    other = copy.copy(found)
    other.episodes = [copy.copy(episode) for episode in found.episodes]
    for episode in other.episodes:
        episode.action = np.zeros_like(episode.action)
        episode.action[::2, 0] = 1.0  # of 6 steps 3: deviation 0.5; the other real dim stays 0
    assert action_spread(other) == (pytest.approx(0.25), pytest.approx(0.25))
    assert action_spread(other, 0.5)[0] == pytest.approx(0.5)  # of an explorer that may do half as much
