"""Evaluation of the phases: world models, explorer against random actions, and the reward of noise.

`deft evaluate RUN` calls `evaluate_teacher`, `evaluate_student` or `evaluate_adversarial`; the benchmarks and
`deft train all` call `explore` and `compare_world_models`.
"""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import CONFIG_FILE, read_phase_config
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import WatchedEnv
from deft.errors import DeftError
from deft.evaluation.interaction import free_episodes, interaction_lines, measure_interaction
from deft.evaluation.predictions import PredictedEpisode, draw_sample, predict_episode, write_prediction_video
from deft.evaluation.world_model import EVALUATION_FILE, coded_batches, plot_horizons, teacher_table
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
from deft.training.phases.adversarial import load_game_explorer
from deft.training.phases.exploration import InlineExplorer, has_scripts, held_out_episodes, make_exploration
from deft.training.phases.explorer_rollouts import Collected, ExplorerRollouts, act_randomly, measure, open_envs
from deft.training.phases.interaction import interaction_episodes
from deft.training.phases.recorded import DatasetExplorer
from deft.training.phases.rewards import GameReward
from deft.training.phases.student import check_world_model, load_teacher

log = logging.getLogger(__name__)
ENVS_TOGETHER = 8
EXPLORED = {  # label in the report, label and digits in the table
    "cells": ("Poses visited, cells", "poses visited, cells", 0),
    "contacts_per_1000": ("Contacts with objects per 1,000 steps", "contacts per 1,000 steps", 1),
    "wm_error": ("World-model error a step, nats", "world-model error, nats", 3),
}
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
    and the same per 1,000 steps, `wm_error`: the world model's cross-entropy a step, `noise_views_per_1000`: steps in
    which a patch of noise was in the wrist camera's view, `memory_divergence`: the distance of both memories.
    """
    exploration = make_exploration(config, world_model, held_out=True)
    exploration.seed = seed
    env, num_steps = open_envs(exploration, min(episodes, ENVS_TOGETHER), WatchedEnv)
    rollouts = ExplorerRollouts(explorer, env, exploration, num_steps, episodes)
    try:
        with separate_random_state(seed), show_evaluation(rollouts.num_episodes) as watch:
            found = rollouts.collect(act_randomly(explorer) if random else None, watch=watch)
        tallies, views = env.call("tally"), env.call("noise_views")
    finally:
        rollouts.close()
    measures = measure(world_model, found)
    results = {
        "steps": float(found.rollout.numel()),
        "cells": float(len({cell for cells, _ in tallies for cell in cells})),
        "contacts": float(sum(contacts for _, contacts in tallies)),
        "contacts_per_1000": 1000.0 * sum(contacts for _, contacts in tallies) / found.rollout.numel(),
        "wm_error": float(measures.error.mean()),
        "noise_views_per_1000": 1000.0 * sum(views) / found.rollout.numel(),
    }
    if not random:  # random actions do not depend on the memory
        results["memory_divergence"] = float(measures.divergence.mean())
    return results, found


# -- deft evaluate ---------------------------------------------------------------------------------------------------


def evaluate_teacher(
    path: str | Path, episodes: int = 10, video: str | Path | None = None, seed: int = 0, device: str = "auto"
) -> dict[str, Any]:
    """The measures of a teacher run (its best or latest checkpoint, or the one given) on scenes not trained on."""
    folder, config, policy = load_world_model(path, device)
    if config.training.dataset is not None:
        recorded = DatasetExplorer(config.training, policy.config.tokenizer.image_size)
        found = recorded.held_out(episodes)
        recorded.close()
    else:
        exploration = make_exploration(config, policy, held_out=True)
        exploration.seed = seed
        explorer = InlineExplorer(exploration)
        found = []
        with show_evaluation(episodes) as watch:
            for _ in range(episodes):
                found += explorer.take(1)
                watch(1)
        explorer.close()
    batches = coded_batches(policy, found)
    results = measure_world_model(policy, batches)
    if config.training.dataset is None and has_scripts(config):
        results |= with_interaction({"": policy}, config, found, episodes, seed)[""]
        results["bars"] = interaction_bars({"world model": results})
    results["plots"] = [str(plot) for plot in plot_horizons(results["open_loop"], folder.parent / "plots")]
    return _finish(results, path, folder, predict_episode(policy, batches[0]), video)


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
    return _finish(results, path, folder, predict_episode(teacher, found.batch(teacher)), video)


def evaluate_adversarial(
    path: str | Path, episodes: int = 10, video: str | Path | None = None, seed: int = 0, device: str = "auto"
) -> dict[str, Any]:
    """Both sides of an adversarial run.

    The world model on another explorer's held-out episodes, compared with the one that it started from; the explorer
    against random actions; and the reward of scenes with a patch of pure noise, compared with the same scenes without.
    """
    folder, config, policy = load_world_model(path, device)
    explorer, reward = _load_game(folder, config, policy)
    results, found = _against_random(explorer, policy, config, episodes, seed)
    policies = {"present": policy}
    try:
        policies["at the start"] = load_teacher(config, policy.device, "adversarial", folder.parent).eval()
    except DeftError as error:
        log.warning("the world model that the run started from is not measured: %s", error)
    results["world_model"] = compare_world_models(policies, config, episodes, seed)
    if has_scripts(config):
        results["noise"] = noise_rewards(reward, explorer, policy, config, episodes, seed)
    results |= {name: results["world_model"]["present"][name] for name in WORLD_MODEL_MEASURES}
    results["bars"] = _bars(results, "explorer")
    measured = {name: one for name, one in reversed(results["world_model"].items()) if "interaction" in one}
    results["bars"] |= interaction_bars(measured)
    if "interaction" in results["world_model"]["present"]:
        results |= {name: results["world_model"]["present"][name] for name in ("interaction", "free_motion")}
    return _finish(results, path, folder, predict_episode(policy, found.batch(policy)), video)


def compare_world_models(
    policies: dict[str, F1Policy],
    config: PhaseConfig,
    episodes: int,
    seed: int = 0,
    found: list[RobotEpisode] | None = None,
    open_loop: bool = True,
) -> dict[str, dict[str, Any]]:
    """Measures of world models on the same held-out episodes of another explorer: scripted and random, half each.

    `found` are these episodes, where they were collected before. Without `open_loop` interaction is measured one step
    ahead.
    """
    first = next(iter(policies.values()))
    found = held_out_episodes(config, first, episodes, seed) if found is None else found
    results = {
        name: measure_world_model(policy, coded_batches(policy, found), ablations=False, horizon=0)
        for name, policy in policies.items()
    }
    if has_scripts(config):
        random = found[: len(found) - len(found) // 2]
        for name, more in with_interaction(policies, config, random, episodes, seed, open_loop).items():
            results[name] |= more
    return results


def with_interaction(
    policies: dict[str, F1Policy],
    config: PhaseConfig,
    free: list[RobotEpisode],
    episodes: int,
    seed: int,
    open_loop: bool = True,
) -> dict[str, dict[str, Any]]:
    """The `interaction` measures of world models on the same new held-out episodes, and `free_motion` on others.

    Free motion is measured one step ahead.
    """
    found = interaction_episodes(config, next(iter(policies.values())), episodes, seed)
    still = free_episodes(free)
    return {
        name: {
            "interaction": measure_interaction(policy, found, open_loop),
            "free_motion": measure_interaction(policy, still, open_loop=False),
        }
        for name, policy in policies.items()
    }


def interaction_bars(measured: dict[str, dict[str, Any]]) -> dict[str, dict[str, float]]:
    """What a report draws of world models on interaction."""
    bars: dict[str, dict[str, float]] = {}
    for name, results in measured.items():
        parts = (
            ("Cross-entropy of moved objects, nats", results["interaction"]["moved"]),
            ("Cross-entropy of all else, nats", results["interaction"]["rest"]),
            ("Cross-entropy in free motion, nats", results["free_motion"]),
        )
        for title, part in parts:
            if part["cross_entropy"] is not None:
                bars.setdefault(title, {})[name] = part["cross_entropy"]
    return bars


def noise_rewards_of_run(
    path: str | Path, episodes: int = 10, seed: int = 0, device: str = "auto"
) -> dict[str, dict[str, float]]:
    """`noise_rewards` of an adversarial run as it is now."""
    folder, config, policy = load_world_model(checkpoint.find_checkpoint(path), device)
    explorer, reward = _load_game(folder, config, policy)
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
        paid = reward.paid(raw, measures)
        results[name] = {
            "reward": float(paid.mean()),
            "standard_error": float(paid.mean(0).std() / paid.shape[1] ** 0.5) if paid.shape[1] > 1 else 0.0,
            "error": float(measures.error.mean()),
        }
    return results


def load_world_model(path: str | Path, device: str) -> tuple[Path, PhaseConfig, F1Policy]:
    """The best checkpoint of a run, or the one given, with the run's settings and the world model in it."""
    folder = checkpoint.find_best(path)
    policy = load_f1_policy(folder.parent / MODEL_FILE, choose_device(device), checkpoint_path=folder).policy.eval()
    return folder, read_phase_config(folder.parent / CONFIG_FILE), policy


def _load_game(folder: Path, config: PhaseConfig, policy: F1Policy) -> tuple[ExplorerPolicy, GameReward]:
    """The explorer of a checkpoint of phase 3, and its reward."""
    reward = GameReward(config.adversarial, policy)
    reward.load_state_dict(checkpoint.load_training_state(folder)["state"]["reward"])
    return load_game_explorer(folder, policy.device), reward


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
    bars = {label: {"random": random[key], name: own[key]} for key, (label, *_) in EXPLORED.items()}
    if "untrained" in results:
        divergences = {"untrained": results["untrained"]["memory_divergence"], name: own["memory_divergence"]}
        bars["Memory divergence D"] = divergences
    if "world_model" in results:
        losses = {which: found["cross_entropy"] for which, found in reversed(results["world_model"].items())}
        bars["Another explorer's episodes: cross-entropy"] = losses
    for key in ("reward", "error") if "noise" in results else ():
        bars[f"{key.capitalize()} of a step"] = {
            which.replace("_", " "): found[key] for which, found in results["noise"].items()
        }
    return bars


def _finish(
    results: dict[str, Any], path: str | Path, folder: Path, predicted: PredictedEpisode, video: str | Path | None
) -> dict[str, Any]:
    """Write plots, a video and the results."""
    drawn = draw_sample(predicted, folder.parent / "plots" / "held_out.png")
    results["plots"] = [*results.get("plots", ()), str(drawn)]
    if video is not None:
        results["video"] = str(write_prediction_video(predicted, Path(video)))
    results |= {"checkpoint": str(folder), "checkpoint_choice": checkpoint_choice(path, folder)}
    write_json(results, folder.parent / EVALUATION_FILE)
    return results


def world_model_table(results: dict[str, Any]) -> str:
    """The measures of a teacher as lines for a person."""
    return "\n".join([teacher_table(results), *interaction_lines(results)])


def explorer_table(results: dict[str, Any]) -> str:
    """The measures as lines for a person."""
    rows = {name: results[name] for name in ("explorer", "random", "untrained") if name in results}
    lines = [f"{'':28}" + "".join(f"{name:>12}" for name in rows)]
    columns = {key: (short, digits) for key, (_, short, digits) in EXPLORED.items()}
    for key, (label, digits) in (columns | {"memory_divergence": ("memory divergence", 3)}).items():
        cells = [f"{row[key]:12.{digits}f}" if key in row else f"{'–':>12}" for row in rows.values()]
        lines.append(f"{label:28}" + "".join(cells))
    for name, found in results.get("world_model", {}).items():
        accuracy = f"{100 * found['wm_acc']:.2f} % of the codes ({100 * found['copy_acc']:.2f} by copying)"
        lines.append(f"world model {name}: cross-entropy {found['cross_entropy']:.4f}, {accuracy}")
        lines += [f"  {line}" for line in interaction_lines(found)]
    for name, found in results.get("noise", {}).items():
        paid = f"{found['reward']:+.4f} ± {found['standard_error']:.4f}"
        lines.append(f"reward of a step, {name.replace('_', ' ')}: {paid} (error {found['error']:.3f})")
    return "\n".join(lines)
