"""Measures of a world model on held-out episodes: against "the next frame is this frame", and with ablations.

`deft evaluate RUN` calls `evaluate_teacher` for a run of `deft train teacher`; `measure` takes any policy and episodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deft import schema
from deft.data.episodes import EpisodeBatch, batch_episodes
from deft.data.robot_episode import RobotEpisode
from deft.evaluation.image_quality import psnr
from deft.evaluation.plots import plot_comparison
from deft.models.f1.frames import to_images, to_model
from deft.models.f1.motion import TAIL, fit_sharpness, prior_cross_entropy
from deft.models.f1.policy import F1Policy, encode_frames, roll_out
from deft.models.f1.vq import MultiScaleTokenizer
from deft.runs.logging import show_evaluation
from deft.runs.signals import raise_if_stopped

EVALUATION_FILE = "evaluation.json"  # in the run folder, for its report
HORIZON = 10  # frames that are rolled out open loop
EPISODES_TOGETHER = 16
MOVING = 2.0  # mean absolute difference of two frames, in grey levels of 255, from which a frame counts as moving
LONGEST = 500  # steps of a recorded episode that are measured
GREY = 127
FITTED = 256  # frames on which the copy's sharpness is fitted
ABLATED = ("wm_acc", "wm_acc_forced", "cross_entropy", "psnr")

Change = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def coded_batches(policy: F1Policy, episodes: list[RobotEpisode]) -> list[EpisodeBatch]:
    """Episodes side by side, some at a time, with their frames' codes."""
    batches, model = [], policy.config
    for start in range(0, len(episodes), EPISODES_TOGETHER):
        part = [
            dataclasses.replace(episode, codes=encode_frames(policy, episode.wrist))
            for episode in episodes[start : start + EPISODES_TOGETHER]
        ]
        batches.append(batch_episodes(part, model.n_obs_img_steps, model.obs_img_stride, policy.device))
    return batches


def measure(
    policy: F1Policy, batches: list[EpisodeBatch], ablations: bool = True, horizon: int = HORIZON
) -> dict[str, Any]:
    """All measures over the steps of some episodes.

    `wm_acc` is of the codes as they are predicted, each scale from the model's own coarser ones, and `copy_acc` of the
    last frame's codes. With `_forced` each scale is given the true codes of the coarser ones, as in training; the copy
    then codes what these leave of the last frame's features. PSNRs are of the frames that move. What the model relies
    on is also measured `without_head`, by the wrist camera alone, where the episodes have both.
    """
    changes: dict[str, tuple[Change | None, bool]] = {}
    if ablations:
        changes = {"actions_shuffled": (shuffled_actions, True), "images_masked": (masked_images(policy), True)}
        if policy.config.memory_enabled:
            changes["memory_zeroed"] = (None, False)
    kept = {name: change for name, change in changes.items() if name == "memory_zeroed"}
    is_alone = ablations and all("head" in batch.streams for batch in batches)
    num_passes = 1 + len(changes) + (1 + len(kept) if is_alone else 0)
    with show_evaluation(num_passes * sum(len(batch.lengths) for batch in batches)) as watch:
        whole = [predict_frames(policy, batch, watch=watch) for batch in batches]
        results = _summarize(whole)
        results["copy_cross_entropy"] = copy_cross_entropy(policy.tokenizer, whole)
        if ablations:
            results["ablations"] = _ablate(policy, batches, changes, results, watch)
        if is_alone:
            alone = [batch.without_head() for batch in batches]
            seen = _summarize([predict_frames(policy, batch, watch=watch) for batch in alone])
            results["without_head"] = {key: seen[key] for key in ABLATED} | {
                "ablations": _ablate(policy, alone, kept, seen, watch)
            }
    if horizon:
        results["open_loop"] = open_loop(policy, batches, horizon)
    return results


def _ablate(
    policy: F1Policy,
    batches: list[EpisodeBatch],
    changes: dict[str, tuple[Change | None, bool]],
    whole: dict[str, Any],
    watch: Callable[[int], None],
) -> dict[str, dict[str, Any]]:
    """What each change costs, against the measures of the `whole` model: a change of the inputs, and whether the memory
    is kept."""
    found = {}
    for name, (change, keeps_memory) in changes.items():
        changed = _summarize([predict_frames(policy, batch, change, keeps_memory, watch=watch) for batch in batches])
        found[name] = {key: changed[key] for key in ABLATED} | {
            "accuracy_lost": whole["wm_acc"] - changed["wm_acc"],
            "cross_entropy_gained": changed["cross_entropy"] - whole["cross_entropy"],
        }
    return found


def mean_loss(policy: F1Policy, batches: list[EpisodeBatch], together: int = HORIZON) -> float:
    """The cross-entropy of the next frame's codes, mean over all steps."""
    sums, lengths = episode_losses(policy, batches, together)
    return float(sums.sum() / lengths.sum())


@torch.no_grad()
def episode_losses(policy: F1Policy, batches: list[EpisodeBatch], together: int = HORIZON) -> tuple[Tensor, Tensor]:
    """The cross-entropy of the next frame's codes, summed over each episode, and the episodes' lengths.

    The memory is carried through each episode.
    """
    was_training = policy.training
    policy.eval()
    sums = []
    for batch in batches:
        memory = policy.initial_memory(len(batch.lengths)) if policy.config.memory_enabled else None
        losses = torch.zeros(len(batch.lengths), device=policy.device)
        for start in range(0, batch.longest, together):
            raise_if_stopped()
            cut = batch.chunk(start, together)
            assert cut is not None
            steps, rows = cut[0], cut[1].to(policy.device)
            before = None if memory is None else memory[:, rows]
            results = policy.forward_with_world_model(steps, memory_state=before, by_step=True)
            if memory is not None:
                memory[:, rows] = results[schema.MEMORY_STATE]
            by_step, real = results["wm_losses"].float(), steps.get(schema.STEP_MASK)
            losses[rows] += (by_step if real is None else by_step * real).sum(0)
        sums.append(losses.cpu())
    policy.train(was_training)
    return torch.cat(sums), torch.cat([batch.lengths for batch in batches])


@dataclass
class Predictions:
    """Predictions for every step of some episodes: one row a step."""

    correct: list[Tensor] = field(default_factory=list)  # [N, L] each
    copied: list[Tensor] = field(default_factory=list)
    copied_forced: list[Tensor] = field(default_factory=list)
    left: list[Tensor] = field(default_factory=list)  # [N, L, D]: what the true coarser codes leave of the last frame
    codes: list[Tensor] = field(default_factory=list)  # the true ones
    psnr: list[Tensor] = field(default_factory=list)  # [N] each
    copy_psnr: list[Tensor] = field(default_factory=list)
    tokenizer_psnr: list[Tensor] = field(default_factory=list)
    moves: list[Tensor] = field(default_factory=list)
    episode: list[Tensor] = field(default_factory=list)
    step: list[Tensor] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)  # cross-entropy, given the true codes of the coarser scales
    forced: list[Tensor] = field(default_factory=list)  # accuracy, likewise
    forced_tail: list[tuple[int, float]] = field(default_factory=list)  # steps, accuracy at the finest scale
    num_codes: int = 1
    finest: int = 1


@torch.no_grad()
def predict_frames(
    policy: F1Policy,
    batch: EpisodeBatch,
    change: Change | None = None,
    keeps_memory: bool = True,
    reset_every: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> Predictions:
    """Predict every step; the memory is carried through each episode.

    Without `keeps_memory` it is zeros before every step, with `reset_every` at the first of so many. `watch` is called
    with the number of episodes when they are done, and before that with 0.
    """
    config, tokenizer = policy.config, policy.tokenizer
    size, history = config.tokenizer.image_size, config.n_obs_img_steps
    found = Predictions(num_codes=config.tokenizer.codebook_size, finest=tokenizer.sizes[-1])
    has_memory = config.memory_enabled
    memory = policy.initial_memory(len(batch.lengths)) if has_memory else None
    length = reset_every or HORIZON
    for start in range(0, min(batch.longest, LONGEST), length):
        raise_if_stopped()
        if watch is not None:
            watch(0)
        cut = batch.chunk(start, length)
        assert cut is not None
        if memory is not None and reset_every is not None:
            memory = torch.zeros_like(memory)
        steps, rows = cut
        columns = rows.to(policy.device)
        given = steps if change is None else change(dict(steps))
        before = None if memory is None else memory[:, columns]
        if has_memory and not keeps_memory:
            given = {name: value.flatten(0, 1) for name, value in given.items()}
            before = policy.initial_memory(len(given[schema.STATE]))
        forced = policy.forward_with_world_model(given, memory_state=before, by_step=True)
        free = policy.predict_images_only(given, before)
        if memory is not None and keeps_memory:
            memory[:, columns] = forced[schema.MEMORY_STATE]
        mask = steps.get(schema.STEP_MASK)
        real = torch.ones_like(steps[schema.STATE][..., 0], dtype=torch.bool) if mask is None else mask
        real = real.flatten()
        tokens = steps[schema.FRAME_TOKENS].flatten(0, 1)[real]
        target, last = tokens[:, history], tokens[:, history - 1]
        pixels = to_model(steps[schema.IMAGE0_HISTORY].flatten(0, 1)[real], size, schema.IMAGE0_HISTORY)
        features = tokenizer.features(pixels[:, history - 1])
        left = tokenizer.residuals(features, target)
        nearest = tokenizer.quantize.distances(left).argmin(-1)
        shown = to_images(pixels[:, history - 1 : history + 1]).float()
        images = free["images"].reshape(-1, *shown.shape[-3:])[real].float()
        found.correct.append(free[schema.FRAME_TOKENS].reshape(-1, target.shape[-1])[real] == target)
        found.copied.append(last == target)
        found.copied_forced.append(nearest == target)
        found.left.append(left)
        found.codes.append(target)
        found.psnr.append(psnr(images, shown[:, 1]))
        found.copy_psnr.append(psnr(shown[:, 0], shown[:, 1]))
        found.tokenizer_psnr.append(psnr(to_images(tokenizer.decode(target)).float(), shown[:, 1]))
        found.moves.append((shown[:, 1] - shown[:, 0]).abs().flatten(1).mean(1) > MOVING)
        found.step.append(
            (start + torch.arange(len(steps[schema.STATE])))[:, None].expand(-1, len(rows)).flatten()[real.cpu()]
        )
        found.episode.append(rows.to(real.device).expand(len(steps[schema.STATE]), -1).flatten()[real])
        found.losses.append(forced["wm_losses"].flatten()[real])
        found.forced.append(forced["wm_accuracies"].flatten()[real])
        found.forced_tail.append((int(real.sum()), float(forced["wm_acc_tail"])))
    if watch is not None:
        watch(len(batch.lengths))
    return found


def _summarize(parts: list[Predictions]) -> dict[str, Any]:
    """The measures over all steps of all parts."""

    def joined(name: str) -> Tensor:
        return torch.cat([tensor for part in parts for tensor in getattr(part, name)])

    correct, copied, forced_copy, moves = (joined(name) for name in ("correct", "copied", "copied_forced", "moves"))
    weight, tails = np.array([entry for part in parts for entry in part.forced_tail]).T
    loss = float(joined("losses").mean())
    finest = parts[0].finest
    by_episode = [
        float(_cat(part.correct)[_cat(part.episode) == row].float().mean())
        for part in parts
        for row in _cat(part.episode).unique()
    ]
    entropy = unigram_entropy(joined("codes"), parts[0].num_codes)
    results: dict[str, Any] = {
        "episodes": len(by_episode),
        "mean_reward": float(np.mean(by_episode)),  # the teacher's reward is how much it predicts
        "std_reward": float(np.std(by_episode)),
        "frames": len(correct),
        "wm_acc": _mean(correct),
        "copy_acc": _mean(copied),
        "wm_acc_tail": _mean(correct[:, -finest:]),
        "copy_acc_tail": _mean(copied[:, -finest:]),
        "wm_acc_forced": _mean(joined("forced")),
        "copy_acc_forced": _mean(forced_copy),
        "wm_acc_forced_tail": float((tails * weight).sum() / weight.sum()),
        "copy_acc_forced_tail": _mean(forced_copy[:, -finest:]),
        "moving_frames": int(moves.sum()),
        "psnr": _mean(joined("psnr")[moves]),
        "copy_psnr": _mean(joined("copy_psnr")[moves]),
        "tokenizer_psnr": _mean(joined("tokenizer_psnr")[moves]),
        "cross_entropy": loss,
        "unigram_entropy": entropy,
        "cross_entropy_ratio": loss / entropy if entropy > 0 else None,
    }
    return results


def _cat(tensors: list[Tensor]) -> Tensor:
    return torch.cat(tensors)


def _mean(values: Tensor) -> float | None:
    return float(values.float().mean()) if len(values) else None


@torch.no_grad()
def copy_cross_entropy(tokenizer: MultiScaleTokenizer, parts: list[Predictions]) -> float:
    """That of "the next frame is nearly this frame": the best that the distances ‖z − e‖² alone can do on these frames.

    z is what the true coarser codes leave of the last frame; β is fitted for each scale, on some of these very frames,
    for logits without and with a tail, of which the better counts.
    """
    left, codes = (
        torch.cat([tensor for part in parts for tensor in getattr(part, name)]) for name in ("left", "codes")
    )
    some = slice(None, None, math.ceil(len(codes) / FITTED))
    quantize, sizes = tokenizer.quantize, tokenizer.sizes
    found = []
    for tail in (0.0, TAIL):
        sharpness = fit_sharpness(left[some], codes[some], quantize, sizes, lambda slopes: slopes, tail)
        losses = [
            prior_cross_entropy(z, true, sharpness, quantize, sizes, tail)
            for z, true in zip(left.split(FITTED), codes.split(FITTED), strict=True)
        ]
        found.append(float(torch.cat(losses).mean()))
    return min(found)


def unigram_entropy(codes: Tensor, num_codes: int) -> float:
    """−Σ p log p of how often each code occurs, in nats: what predicting from these shares alone would cost."""
    counts = torch.bincount(codes.flatten(), minlength=num_codes).double()
    shares = counts[counts > 0] / counts.sum()
    return float(-(shares * shares.log()).sum())


# -- what the model relies on ----------------------------------------------------------------------------------------


def shuffled_actions(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Each row gets another row's actions (with one row alone, those of another time)."""
    actions = batch[schema.ACTION_HISTORY]
    dim = 1 if actions.shape[1] > 1 else 0
    return {**batch, schema.ACTION_HISTORY: actions.roll(1, dim)}


def masked_images(policy: F1Policy) -> Change:
    """Replace all input images by grey; the target stays."""
    size, observed = policy.config.tokenizer.image_size, policy.config.n_obs_img_steps
    grey = encode_frames(policy, np.full((1, 3, size, size), GREY, np.uint8))[0]

    def change(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        changed = dict(batch)
        for name in (schema.IMAGE0, schema.IMAGE1):
            if name in changed:
                changed[name] = torch.full_like(changed[name], GREY)
        frames, tokens = changed[schema.IMAGE0_HISTORY].clone(), changed[schema.FRAME_TOKENS].clone()
        frames[..., :observed, :, :, :] = GREY
        tokens[..., :observed, :] = grey
        return {**changed, schema.IMAGE0_HISTORY: frames, schema.FRAME_TOKENS: tokens}

    return change


# -- open loop -------------------------------------------------------------------------------------------------------


@torch.no_grad()
def open_loop(policy: F1Policy, batches: list[EpisodeBatch], horizon: int = HORIZON) -> dict[str, list[float]]:
    """Accuracy and PSNR by how many frames ahead, from the model's own predictions; the copy is the last frame seen.

    The actions are given, the states are not: the first state is used for all frames.
    """
    measured: dict[str, list[Tensor]] = {name: [] for name in ("wm_acc", "copy_acc", "psnr", "copy_psnr")}
    size = policy.config.tokenizer.image_size
    for batch in batches:
        memory = policy.initial_memory(len(batch.lengths)) if policy.config.memory_enabled else None
        for start in range(0, min(batch.longest, LONGEST) - horizon + 1, horizon):
            rows = torch.nonzero(batch.lengths >= start + horizon).flatten()
            if not len(rows):
                break
            columns = rows.to(policy.device)
            first = batch.steps(rows, torch.full_like(rows, start))
            history = first[schema.ACTION_HISTORY]
            first[schema.ACTION_HISTORY] = torch.cat([torch.zeros_like(history[:, :1]), history[:, :-1]], 1)
            actions = batch.streams["action"][columns, start : start + horizon]
            before = None if memory is None else memory[:, columns]
            found = roll_out(policy, first, actions, before)
            codes = batch.streams["codes"][columns].long()
            target, last = codes[:, start + 1 : start + horizon + 1], codes[:, start : start + 1]
            wrist = batch.streams["wrist"][columns, start : start + horizon + 1]
            pixels = to_images(to_model(wrist, size, schema.WRIST_RGB)).float()
            truth, still = pixels[:, 1:], pixels[:, :1].expand(-1, horizon, -1, -1, -1)
            shape = truth.shape[:2]
            measured["wm_acc"].append((found[schema.FRAME_TOKENS] == target).float().mean(-1))
            measured["copy_acc"].append((last == target).float().mean(-1))
            measured["psnr"].append(psnr(found["images"].flatten(0, 1).float(), truth.flatten(0, 1)).view(shape))
            measured["copy_psnr"].append(psnr(still.flatten(0, 1), truth.flatten(0, 1)).view(shape))
            if memory is not None:
                walked = batch.chunk(start, horizon)
                assert walked is not None
                there = walked[1].to(policy.device)
                memory[:, there] = policy.forward_memory_only(walked[0], memory[:, there])
    return {name: torch.cat(values).mean(0).tolist() if values else [] for name, values in measured.items()}


def plot_horizons(results: dict[str, list[float]], folder: Path) -> list[Path]:
    """Accuracy and PSNR by horizon, the model's and the copy's; nothing where no episode was long enough."""
    if not results["wm_acc"]:
        return []
    ahead = np.arange(1, len(results["wm_acc"]) + 1)
    drawn = []
    for name, label in (("acc", "Token accuracy"), ("psnr", "PSNR, dB")):
        own = results["wm_acc" if name == "acc" else name]
        curves = {
            "world model": [(ahead, np.array(own))],
            "last frame seen": [(ahead, np.array(results[f"copy_{name}"]))],
        }
        path = folder / f"open_loop_{name}.png"
        drawn.append(plot_comparison(curves, path, "Open loop", "Frames ahead", label))
    return drawn


def teacher_table(results: dict[str, Any]) -> str:
    """The measures as lines for a person."""
    lines = [f"{'':26}{'model':>9}{'copy':>9}{'gain':>9}"]
    rows = (
        ("tokens right, %", "wm_acc", "copy_acc", 100.0),
        ("  given the coarser ones", "wm_acc_forced", "copy_acc_forced", 100.0),
        ("PSNR where it moves, dB", "psnr", "copy_psnr", 1.0),
    )
    for label, own, copy, scale in rows:
        if results[own] is not None and results[copy] is not None:
            gain = results[own] - results[copy]
            lines.append(f"{label:26}{results[own] * scale:9.2f}{results[copy] * scale:9.2f}{gain * scale:+9.2f}")
    ratio = results["cross_entropy_ratio"]
    entropies = (
        f"cross-entropy {results['cross_entropy']:.3f}, of the last frame {results['copy_cross_entropy']:.3f}, "
        f"unigram entropy {results['unigram_entropy']:.3f}"
    )
    lines.append(f"{entropies}: {ratio:.3f} of it")
    lines += _ablation_lines(results.get("ablations", {}))
    alone = results.get("without_head")
    if alone is not None:
        lines.append(
            f"by the wrist camera alone: {100 * alone['wm_acc']:.2f} % tokens "
            f"({100 * alone['wm_acc_forced']:.2f} given the coarser ones), cross-entropy {alone['cross_entropy']:.3f}"
        )
        lines += [f"  {line}" for line in _ablation_lines(alone["ablations"])]
    return "\n".join(lines)


def _ablation_lines(ablations: dict[str, dict[str, Any]]) -> list[str]:
    return [
        f"{name.replace('_', ' ')}: {100 * values['wm_acc']:.2f} % tokens "
        f"({100 * values['wm_acc_forced']:.2f} given the coarser ones), lost {100 * values['accuracy_lost']:.2f}, "
        f"cross-entropy {values['cross_entropy_gained']:+.3f}"
        for name, values in ablations.items()
    ]
