"""Measures of a world model on held-out episodes: against "the next frame is this frame", and with ablations.

`deft evaluate RUN` calls `evaluate_teacher` for a run of `deft train teacher`; `measure` takes any policy and episodes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
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
    ablated: dict[str, Callable[..., dict[str, Tensor]]] = {}
    if ablations:
        ablated = {
            "actions_shuffled": partial(predict_frames, change=shuffled_actions),
            "images_masked": partial(predict_frames, change=masked_images(policy)),
        }
        if policy.config.memory_enabled:
            ablated["memory_zeroed"] = partial(predict_frames, keeps_memory=False)
    is_alone = ablations and all("head" in batch.streams for batch in batches)
    kept = {name: predict for name, predict in ablated.items() if name == "memory_zeroed"}
    num_passes = 1 + len(ablated) + (1 + len(kept) if is_alone else 0)
    with show_evaluation(num_passes * sum(len(batch.lengths) for batch in batches)) as watch:

        def run(predict: Callable[..., dict[str, Tensor]], batches: list[EpisodeBatch]) -> list[dict[str, Tensor]]:
            return [predict(policy, batch, watch=watch) for batch in batches]

        def ablate(names: Iterable[str], batches: list[EpisodeBatch], whole: dict[str, Any]) -> dict[str, Any]:
            """What each change costs, compared with the measures of the whole model."""
            found = {}
            for name in names:
                changed = _summarize(policy, run(ablated[name], batches))
                found[name] = {key: changed[key] for key in ABLATED} | {
                    "accuracy_lost": whole["wm_acc"] - changed["wm_acc"],
                    "cross_entropy_gained": changed["cross_entropy"] - whole["cross_entropy"],
                }
            return found

        predicted = run(predict_frames, batches)
        results = _summarize(policy, predicted)
        results["copy_cross_entropy"] = copy_cross_entropy(policy.tokenizer, predicted)
        if ablations:
            results["ablations"] = ablate(ablated, batches, results)
        if is_alone:
            alone = [batch.without_head() for batch in batches]
            seen = _summarize(policy, run(predict_frames, alone))
            results["without_head"] = {key: seen[key] for key in ABLATED} | {"ablations": ablate(kept, alone, seen)}
    if horizon:
        results["open_loop"] = open_loop(policy, batches, horizon)
    return results


def mean_loss(policy: F1Policy, batches: list[EpisodeBatch], together: int = HORIZON) -> float:
    """The cross-entropy of the next frame's codes, mean over all steps."""
    sums, lengths = episode_losses(policy, batches, together)
    return float(sums.sum() / lengths.sum())


def episode_losses(policy: F1Policy, batches: list[EpisodeBatch], together: int = HORIZON) -> tuple[Tensor, Tensor]:
    """The cross-entropy of the next frame's codes, summed over each episode, and the episodes' lengths."""
    sums = []
    for batch in batches:
        losses = step_results(policy, batch, ("wm_losses",), together)["wm_losses"].float().cpu()
        sums.append((losses * (torch.arange(len(losses))[:, None] < batch.lengths)).sum(0))
    return torch.cat(sums), torch.cat([batch.lengths for batch in batches])


@torch.no_grad()
def step_results(
    policy: F1Policy, batch: EpisodeBatch, names: Sequence[str], together: int = HORIZON
) -> dict[str, Tensor]:
    """Return results of the world model for every step, [T, B, …] each, `together` steps in one forward pass.

    The memory is carried through each episode, from zeros. What comes after an episode's end is undefined.
    """
    was_training = policy.training
    policy.eval()
    memory = _initial_memory(policy, len(batch.lengths))
    found: dict[str, list[Tensor]] = {name: [] for name in names}
    for _, steps, rows in batch.chunks(together):
        raise_if_stopped()
        columns = rows.to(policy.device)
        before = None if memory is None else memory[:, columns]
        results = policy.forward_with_world_model(steps, memory_state=before, by_step=True)
        if memory is not None:
            memory[:, columns] = results[schema.MEMORY_STATE]
        for name, parts in found.items():
            parts.append(batch.all_rows(results[name], rows))
    policy.train(was_training)
    return {name: torch.cat(parts) for name, parts in found.items()}


def _initial_memory(policy: F1Policy, count: int) -> Tensor | None:
    return policy.initial_memory(count) if policy.config.memory_enabled else None


@torch.no_grad()
def predict_frames(
    policy: F1Policy,
    batch: EpisodeBatch,
    change: Change | None = None,
    keeps_memory: bool = True,
    reset_every: int | None = None,
    watch: Callable[[int], None] | None = None,
) -> dict[str, Tensor]:
    """Predict every step; the memory is carried through each episode. Return one row a step, by step and episode:

    `codes`, the true ones, and whether they are predicted (`correct`) or copied (`copied`, `copied_forced`) [N, L],
    `left` [N, L, D]: what the true coarser codes leave of the last frame, `psnr`, `copy_psnr`, `tokenizer_psnr`,
    `moves`, `episode` and `step` [N], and, given the true codes of the coarser scales, the cross-entropy `losses` and
    the accuracies `forced` and `forced_tail` [N].

    Without `keeps_memory` the memory is zeros before every step, with `reset_every` at the first of so many. `watch` is
    called with the number of episodes when they are done, and before that with 0.
    """
    config, tokenizer = policy.config, policy.tokenizer
    size, history = config.tokenizer.image_size, config.n_obs_img_steps
    parts: list[dict[str, Tensor]] = []
    memory = _initial_memory(policy, len(batch.lengths))
    for start, steps, rows in batch.chunks(reset_every or HORIZON):
        if start >= LONGEST:
            break
        raise_if_stopped()
        if watch is not None:
            watch(0)
        if memory is not None and reset_every is not None:
            memory = torch.zeros_like(memory)
        columns = rows.to(policy.device)
        given = steps if change is None else change(dict(steps))
        before = None if memory is None else memory[:, columns]
        if memory is not None and not keeps_memory:
            given = {name: value.flatten(0, 1) for name, value in given.items()}
            before = policy.initial_memory(len(given[schema.STATE]))
        forced = policy.forward_with_world_model(given, memory_state=before, by_step=True)
        free = policy.predict_images_only(given, before)
        if memory is not None and keeps_memory:
            memory[:, columns] = forced[schema.MEMORY_STATE]
        shape = steps[schema.STATE].shape[:2]
        real = steps.get(schema.STEP_MASK, torch.ones(shape, dtype=torch.bool, device=policy.device)).flatten()
        tokens = steps[schema.FRAME_TOKENS].flatten(0, 1)[real]
        target, last = tokens[:, history], tokens[:, history - 1]
        pixels = to_model(steps[schema.IMAGE0_HISTORY].flatten(0, 1)[real], size, schema.IMAGE0_HISTORY)
        left = tokenizer.residuals(tokenizer.features(pixels[:, history - 1]), target)
        shown = to_images(pixels[:, history - 1 : history + 1]).float()
        images = free["images"].reshape(-1, *shown.shape[-3:])[real].float()
        times = start + torch.arange(shape[0], device=policy.device)
        part = {
            "correct": free[schema.FRAME_TOKENS].reshape(-1, target.shape[-1])[real] == target,
            "copied": last == target,
            "copied_forced": tokenizer.quantize.distances(left).argmin(-1) == target,
            "left": left,
            "codes": target,
            "psnr": psnr(images, shown[:, 1]),
            "copy_psnr": psnr(shown[:, 0], shown[:, 1]),
            "tokenizer_psnr": psnr(to_images(tokenizer.decode(target)).float(), shown[:, 1]),
            "moves": (shown[:, 1] - shown[:, 0]).abs().flatten(1).mean(1) > MOVING,
            "episode": columns.expand(shape).flatten()[real],
            "step": times[:, None].expand(shape).flatten()[real],
            "losses": forced["wm_losses"].flatten()[real],
            "forced": forced["wm_accuracies"].flatten()[real],
        }
        parts.append(part | {"forced_tail": forced["wm_acc_tail"].expand(len(target))})
    if watch is not None:
        watch(len(batch.lengths))
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def _joined(parts: list[dict[str, Tensor]], name: str) -> Tensor:
    return torch.cat([part[name] for part in parts])


def _summarize(policy: F1Policy, parts: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The measures over all steps of all parts."""
    correct, copied, copied_forced, moves = (
        _joined(parts, name) for name in ("correct", "copied", "copied_forced", "moves")
    )
    loss, finest = float(_joined(parts, "losses").mean()), policy.tokenizer.sizes[-1]
    by_episode = [
        float(part["correct"][part["episode"] == row].float().mean())
        for part in parts
        for row in part["episode"].unique()
    ]
    entropy = unigram_entropy(_joined(parts, "codes"), policy.config.tokenizer.codebook_size)
    return {
        "episodes": len(by_episode),
        "mean_reward": float(np.mean(by_episode)),  # the teacher's reward is how much it predicts
        "std_reward": float(np.std(by_episode)),
        "frames": len(correct),
        "wm_acc": _mean(correct),
        "copy_acc": _mean(copied),
        "wm_acc_tail": _mean(correct[:, -finest:]),
        "copy_acc_tail": _mean(copied[:, -finest:]),
        "wm_acc_forced": _mean(_joined(parts, "forced")),
        "copy_acc_forced": _mean(copied_forced),
        "wm_acc_forced_tail": _mean(_joined(parts, "forced_tail").double()),
        "copy_acc_forced_tail": _mean(copied_forced[:, -finest:]),
        "moving_frames": int(moves.sum()),
        **{name: _mean(_joined(parts, name)[moves]) for name in ("psnr", "copy_psnr", "tokenizer_psnr")},
        "cross_entropy": loss,
        "unigram_entropy": entropy,
        "cross_entropy_ratio": loss / entropy if entropy > 0 else None,
    }


def _mean(values: Tensor) -> float | None:
    return float(values.float().mean()) if len(values) else None


@torch.no_grad()
def copy_cross_entropy(tokenizer: MultiScaleTokenizer, parts: list[dict[str, Tensor]]) -> float:
    """That of "the next frame is nearly this frame": the best that the distances ‖z − e‖² alone can do on these frames.

    z is what the true coarser codes leave of the last frame; β is fitted for each scale, on some of these very frames,
    for logits without and with a tail, of which the better counts.
    """
    left, codes = _joined(parts, "left"), _joined(parts, "codes")
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
        for start, rows, found in rolled_out(policy, batch, horizon, horizon):
            columns = rows.to(policy.device)
            codes = batch.streams["codes"][columns].long()
            target, last = codes[:, start + 1 : start + horizon + 1], codes[:, start : start + 1]
            wrist = batch.streams["wrist"][columns, start : start + horizon + 1]
            pixels = to_images(to_model(wrist, size, schema.WRIST_RGB)).float()
            truth, still = pixels[:, 1:].flatten(0, 1), pixels[:, :1].expand(-1, horizon, -1, -1, -1).flatten(0, 1)
            measured["wm_acc"].append((found[schema.FRAME_TOKENS] == target).float().mean(-1))
            measured["copy_acc"].append((last == target).float().mean(-1))
            measured["psnr"].append(psnr(found["images"].flatten(0, 1).float(), truth).view(-1, horizon))
            measured["copy_psnr"].append(psnr(still, truth).view(-1, horizon))
    return {name: torch.cat(values).mean(0).tolist() if values else [] for name, values in measured.items()}


@torch.no_grad()
def rolled_out(
    policy: F1Policy, batch: EpisodeBatch, horizon: int, every: int
) -> Iterator[tuple[int, Tensor, dict[str, Tensor]]]:
    """Yield what `roll_out` predicts for the `horizon` steps after every `every`-th step: start, rows, predictions.

    The memory before a start is that of the true steps before it. `rows` are the episodes that are long enough.
    """
    memory = _initial_memory(policy, len(batch.lengths))
    for start in range(0, min(batch.longest, LONGEST) - horizon + 1, every):
        rows = torch.nonzero(batch.lengths >= start + horizon).flatten()
        if not len(rows):
            break
        raise_if_stopped()
        columns = rows.to(policy.device)
        first = batch.steps(rows, torch.full_like(rows, start))
        history = first[schema.ACTION_HISTORY]
        first[schema.ACTION_HISTORY] = torch.cat([torch.zeros_like(history[:, :1]), history[:, :-1]], 1)
        actions = batch.streams["action"][columns, start : start + horizon]
        yield start, rows, roll_out(policy, first, actions, None if memory is None else memory[:, columns])
        if memory is not None:
            walked = batch.chunk(start, every)
            assert walked is not None
            there = walked[1].to(policy.device)
            memory[:, there] = policy.forward_memory_only(walked[0], memory[:, there])


def plot_horizons(results: dict[str, list[float]], folder: Path) -> list[Path]:
    """Accuracy and PSNR by horizon, the model's and the copy's; nothing where no episode was long enough."""
    if not results["wm_acc"]:
        return []
    ahead = np.arange(1, len(results["wm_acc"]) + 1)
    drawn = []
    for own, name, label in (("wm_acc", "acc", "Token accuracy"), ("psnr", "psnr", "PSNR, dB")):
        measured = {"world model": results[own], "last frame seen": results[f"copy_{name}"]}
        curves = {which: [(ahead, np.array(values))] for which, values in measured.items()}
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
    lines.append(
        f"cross-entropy {results['cross_entropy']:.3f}, of the last frame {results['copy_cross_entropy']:.3f}, "
        f"unigram entropy {results['unigram_entropy']:.3f}: {results['cross_entropy_ratio']:.3f} of it"
    )
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
