"""Evaluation of phases 2 and 3: explorer against random actions, world models, and the reward of noise.

`deft evaluate RUN` calls `evaluate_student` and `evaluate_adversarial` for runs of these phases; the benchmarks and
`deft train all` call `explore` and `compare_world_models`.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict, TensorDictBase

from deft import schema
from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import CONFIG_FILE, read_phase_config
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import WatchedEnv
from deft.errors import DeftError
from deft.evaluation.predictions import draw_sample, predict_episode, write_prediction_video
from deft.evaluation.world_model import EVALUATION_FILE, coded_batches
from deft.evaluation.world_model import measure as measure_world_model
from deft.models.f1.explorer import ExplorerPolicy, load_explorer, new_explorer
from deft.models.f1.loading import load_f1_policy
from deft.models.f1.policy import F1Policy
from deft.runs import checkpoint
from deft.runs.compute import choose_device
from deft.runs.directory import MODEL_FILE, checkpoint_choice
from deft.runs.json_files import write_json
from deft.runs.logging import show_evaluation
from deft.runs.random_state import separate_random_state
from deft.training.phases.adversarial import EXPLORER_FOLDER
from deft.training.phases.explorer_rollouts import Collected, ExplorerRollouts, measure, open_envs
from deft.training.phases.game import GameReward
from deft.training.phases.held_out import SCRIPTED_WORLDS, held_out_episodes
from deft.training.phases.student import check_world_model, load_teacher
from deft.training.phases.teacher import make_exploration

log = logging.getLogger(__name__)
ENVS_TOGETHER = 8
Act = Callable[[TensorDict], TensorDictBase]
WORLD_MODEL_MEASURES = ("cross_entropy", "wm_acc", "copy_acc", "wm_acc_forced", "copy_acc_forced", "psnr", "copy_psnr")


# -- what an explorer finds ------------------------------------------------------------------------------------------


def explore(
    explorer: ExplorerPolicy,
    world_model: F1Policy,
    config: PhaseConfig,
    episodes: int,
    seed: int = 0,
    random: bool = False,
) -> tuple[dict[str, float], Collected]:
    """What the explorer (or, with `random`, uniformly random actions) finds in held-out scenes.

    `cells` of a grid of the hand's poses that were visited, `contacts`: steps in which the robot touched an object,
    `wm_error`: the world model's cross-entropy a step, `memory_divergence`: the distance of both memories.
    """
    exploration = make_exploration(config, world_model, held_out=True)
    exploration.seed = seed
    env, num_steps = open_envs(exploration, min(episodes, ENVS_TOGETHER), WatchedEnv)
    rollouts = ExplorerRollouts(explorer, env, exploration, num_steps, episodes)
    try:
        with separate_random_state(seed), show_evaluation(rollouts.num_episodes) as watch:
            found = rollouts.collect(act_randomly(explorer) if random else None, watch=watch)
        tallies = env.call("tally")
    finally:
        rollouts.close()
    measures = measure(world_model, found)
    results = {
        "steps": float(found.rollout.numel()),
        "cells": float(len({cell for cells, _ in tallies for cell in cells})),
        "contacts": float(sum(contacts for _, contacts in tallies)),
        "wm_error": float(measures.error.mean()),
    }
    if not random:  # random actions do not depend on the memory
        results["memory_divergence"] = float(measures.divergence.mean())
    return results, found


def act_randomly(explorer: ExplorerPolicy) -> Act:
    """Return a function that replaces the explorer's actions by uniformly random ones."""

    def act(td: TensorDict) -> TensorDictBase:
        acted = explorer.act(td)
        action = acted[schema.ACTION]
        acted.set(schema.ACTION, (2.0 * torch.rand_like(action) - 1.0) * explorer.action_mask)
        return acted

    return act


# -- deft evaluate ---------------------------------------------------------------------------------------------------


def evaluate_student(
    path: str | Path, episodes: int = 10, video: str | Path | None = None, seed: int = 0, device: str = "auto"
) -> dict[str, Any]:
    """A student run against random actions and against a student before training, in the same held-out scenes."""
    folder = checkpoint.find_best(path)
    run, where = folder.parent, choose_device(device)
    config = read_phase_config(run / CONFIG_FILE)
    teacher = load_teacher(config, where, run=run).eval()
    explorer = load_explorer(folder, run / MODEL_FILE, where)
    check_world_model(teacher, explorer.f1, folder)
    results, found = _against_random(explorer, teacher, config, episodes, seed)
    with separate_random_state(config.training.seed):
        untrained = new_explorer(teacher, explorer.action_mask, config.student.explorer)
    results["untrained"], _ = explore(untrained, teacher, config, episodes, seed)
    results["bars"] = _bars(results, "student")
    return _finish(results, path, folder, teacher, found, video)


def evaluate_adversarial(
    path: str | Path, episodes: int = 10, video: str | Path | None = None, seed: int = 0, device: str = "auto"
) -> dict[str, Any]:
    """Both sides of an adversarial run.

    The world model on another explorer's held-out episodes, compared with the one that it started from; the explorer
    against random actions; and the reward of scenes with a patch of pure noise, compared with the same scenes without.
    """
    folder = checkpoint.find_best(path)
    config, policy, explorer, reward = _load_game(folder, device)
    results, found = _against_random(explorer, policy, config, episodes, seed)
    results["world_model"] = compare_world_models(_world_models(policy, config, folder.parent), config, episodes, seed)
    if config.environment.get("world", SCRIPTED_WORLDS[0]) in SCRIPTED_WORLDS:
        results["noise"] = noise_rewards(reward, explorer, policy, config, episodes, seed)
    results |= {name: results["world_model"]["present"][name] for name in WORLD_MODEL_MEASURES}
    results["bars"] = _bars(results, "explorer")
    return _finish(results, path, folder, policy, found, video)


def compare_world_models(
    policies: dict[str, F1Policy],
    config: PhaseConfig,
    episodes: int,
    seed: int = 0,
    found: list[RobotEpisode] | None = None,
) -> dict[str, dict[str, Any]]:
    """Measures of world models on the same held-out episodes of another explorer: scripted and random, half each.

    `found` are these episodes, where they were collected before.
    """
    first = next(iter(policies.values()))
    found = held_out_episodes(config, first, episodes, seed) if found is None else found
    return {
        name: measure_world_model(policy, coded_batches(policy, found), ablations=False, horizon=0)
        for name, policy in policies.items()
    }


def noise_rewards_of_run(
    path: str | Path, episodes: int = 10, seed: int = 0, device: str = "auto"
) -> dict[str, dict[str, float]]:
    """`noise_rewards` of an adversarial run as it is now."""
    config, policy, explorer, reward = _load_game(checkpoint.find_checkpoint(path), device)
    return noise_rewards(reward, explorer, policy, config, episodes, seed)


def noise_rewards(
    reward: GameReward, explorer: ExplorerPolicy, policy: F1Policy, config: PhaseConfig, episodes: int, seed: int
) -> dict[str, dict[str, float]]:
    """What a step pays on average, before scaling, in scenes with a patch of noise and in the same without it."""
    results: dict[str, dict[str, float]] = {}
    for name, rate in (("plain", 0.0), ("noise_patch", 1.0)):
        changed = copy.deepcopy(config)
        changed.environment["domain_randomization"] = {
            **(config.environment.get("domain_randomization") or {}),
            "noise_patch_rate": rate,
        }
        _, found = explore(explorer, policy, changed, episodes, seed)
        raw, measures, _ = reward.raw(policy, found)
        paid = torch.where(measures.error > reward.settings.reward_floor, raw, torch.zeros_like(raw))
        results[name] = {
            "reward": float(paid.mean()),
            "standard_error": float(paid.mean(0).std() / paid.shape[1] ** 0.5) if paid.shape[1] > 1 else 0.0,
            "error": float(measures.error.mean()),
        }
    return results


def _load_game(folder: Path, device: str) -> tuple[PhaseConfig, F1Policy, ExplorerPolicy, GameReward]:
    """Both sides of a checkpoint of phase 3, its settings, and what pays in it."""
    run, where = folder.parent, choose_device(device)
    config = read_phase_config(run / CONFIG_FILE)
    policy = load_f1_policy(run / MODEL_FILE, where, checkpoint_path=folder).policy.eval()
    explorer = load_explorer(folder / EXPLORER_FOLDER, run / EXPLORER_FOLDER / MODEL_FILE, where)
    reward = GameReward(config.adversarial, policy)
    reward.load_state_dict(checkpoint.load_training_state(folder)["state"]["reward"])
    return config, policy, explorer, reward


def _world_models(policy: F1Policy, config: PhaseConfig, run: Path) -> dict[str, F1Policy]:
    """The run's, and the one that it started from, where that is still there."""
    found = {"present": policy}
    try:
        found["at the start"] = load_teacher(config, policy.device, "adversarial", run).eval()
    except DeftError as error:
        log.warning("the world model that the run started from is not measured: %s", error)
    return found


def _against_random(
    explorer: ExplorerPolicy, world_model: F1Policy, config: PhaseConfig, episodes: int, seed: int
) -> tuple[dict[str, Any], Collected]:
    own, found = explore(explorer, world_model, config, episodes, seed)
    random, _ = explore(explorer, world_model, config, episodes, seed, random=True)
    selection = explorer.action_selection(deterministic=False)
    results = {"episodes": len(found.episodes), "explorer": own, "random": random, "action_selection": selection}
    return results, found


def _bars(results: dict[str, Any], name: str) -> dict[str, dict[str, float]]:
    """The comparisons, as the report draws them."""
    own, random = results["explorer"], results["random"]
    bars = {
        "Poses visited, cells": {"random": random["cells"], name: own["cells"]},
        "Steps in contact with an object": {"random": random["contacts"], name: own["contacts"]},
        "World-model error a step, nats": {"random": random["wm_error"], name: own["wm_error"]},
    }
    if "untrained" in results:
        divergences = {"untrained": results["untrained"]["memory_divergence"], name: own["memory_divergence"]}
        bars["Memory divergence D"] = divergences
    if "world_model" in results:
        losses = {which: found["cross_entropy"] for which, found in reversed(results["world_model"].items())}
        bars["Another explorer's episodes: cross-entropy"] = losses
    if "noise" in results:
        noise = results["noise"]
        bars["Reward of a step"] = {"plain": noise["plain"]["reward"], "noise patch": noise["noise_patch"]["reward"]}
        bars["Error of a step"] = {"plain": noise["plain"]["error"], "noise patch": noise["noise_patch"]["error"]}
    return bars


def _finish(
    results: dict[str, Any],
    path: str | Path,
    folder: Path,
    world_model: F1Policy,
    found: Collected,
    video: str | Path | None,
) -> dict[str, Any]:
    """Write plots, a video and the results."""
    plots = folder.parent / "plots"
    predicted = predict_episode(world_model, found.batch(world_model))
    results["plots"] = [str(draw_sample(predicted, plots / "held_out.png"))]
    if video is not None:
        results["video"] = str(write_prediction_video(predicted, Path(video)))
    results |= {"checkpoint": str(folder), "checkpoint_choice": checkpoint_choice(path, folder)}
    write_json(results, folder.parent / EVALUATION_FILE)
    return results


def explorer_table(results: dict[str, Any]) -> str:
    """The measures as lines for a person."""
    rows = {name: results[name] for name in ("explorer", "random", "untrained") if name in results}
    lines = [f"{'':28}" + "".join(f"{name:>12}" for name in rows)]
    for label, key, digits in (
        ("poses visited, cells", "cells", 0),
        ("steps in contact", "contacts", 0),
        ("world-model error, nats", "wm_error", 3),
        ("memory divergence", "memory_divergence", 3),
    ):
        cells = [f"{row[key]:12.{digits}f}" if key in row else f"{'–':>12}" for row in rows.values()]
        lines.append(f"{label:28}" + "".join(cells))
    for name, found in results.get("world_model", {}).items():
        accuracy = f"{100 * found['wm_acc']:.2f} % of the codes ({100 * found['copy_acc']:.2f} by copying)"
        lines.append(f"world model {name}: cross-entropy {found['cross_entropy']:.4f}, {accuracy}")
    for name, found in results.get("noise", {}).items():
        paid = f"{found['reward']:+.4f} ± {found['standard_error']:.4f}"
        lines.append(f"reward of a step, {name.replace('_', ' ')}: {paid} (error {found['error']:.3f})")
    return "\n".join(lines)
