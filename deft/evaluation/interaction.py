"""Measures of a world model on interaction: what it predicts of the pixels that change because objects move.

Most of what a wrist camera shows changes because the camera moves with the arm, and a world model that knows nothing of
objects is nearly as good on average as one that does. Here every pixel of a recorded episode is known to be due to a
moved object, or not (`deft.envs.interaction`). `deft evaluate` of phases 1 and 3 reports both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from deft import schema
from deft.data.episodes import EpisodeBatch
from deft.data.robot_episode import RobotEpisode
from deft.envs.interaction import HORIZONS
from deft.errors import InputError
from deft.evaluation.image_quality import MOST_DECIBELS
from deft.evaluation.world_model import EPISODES_TOGETHER, HORIZON, coded_batches, rolled_out
from deft.models.f1.frames import to_images, to_model
from deft.models.f1.policy import F1Policy
from deft.runs.signals import raise_if_stopped

WINDOW = 7  # steps between two starts of an open-loop prediction
PARTS = ("moved", "rest")
SUMS = ("tokens", "loss", "hits", "copied", "pixels", "error", "copy_error", "tokenizer_error")
AHEAD = ("pixels", "error", "copy_error")


@dataclass
class InteractionEpisode:
    """An episode, and which pixels of its wrist frames are due to objects that moved."""

    episode: RobotEpisode
    moved: np.ndarray  # bool [T, len(HORIZONS), h, w]: of frame t + 1, moved within the last h steps
    touched: np.ndarray | None  # bool [T]; None: not recorded, as which pixels moved
    lifted: np.ndarray | None  # bool [T]


def free_episodes(episodes: Sequence[RobotEpisode]) -> list[InteractionEpisode]:
    """Return episodes without a recording: all pixels count as `rest`, and contacts are not known."""
    found = []
    for episode in episodes:
        steps, size = len(episode), episode.wrist.shape[-1]
        nothing = np.zeros((steps, len(HORIZONS), size, size), bool)
        found.append(InteractionEpisode(episode, nothing, None, None))
    return found


def measure_interaction(
    policy: F1Policy, episodes: Sequence[InteractionEpisode], open_loop: bool = True
) -> dict[str, Any]:
    """The measures of a world model on these episodes, of `moved` pixels and tokens and of the `rest`.

    `cross_entropy` in nats per code and `accuracy` are given the true coarser codes; a code counts by the fraction of
    its cell's pixels that belong to the part. `psnr` is of the predicted frame one step ahead, over these pixels of all
    frames together; `copy_psnr` that of the last frame, `tokenizer_psnr` that of the true codes. `open_loop` has the
    same by the number of steps ahead, from the model's own predictions and the true actions; it takes longer than the
    rest.
    """
    return summarize(interaction_sums(policy, episodes, open_loop), episodes)


def summarize(sums: dict[str, Tensor], episodes: Sequence[InteractionEpisode]) -> dict[str, Any]:
    """Means of `interaction_sums` over all episodes; None where nothing moved."""
    total = {name: float(values.sum()) for name, values in sums.items()}
    steps = sum(len(one.episode) for one in episodes)
    results: dict[str, Any] = {
        "episodes": len(episodes),
        "steps": steps,
        **_happenings(episodes, steps),
        "cross_entropy": _ratio(total["moved_loss"] + total["rest_loss"], total["moved_tokens"] + total["rest_tokens"]),
    }
    for part in PARTS:
        tokens = total[f"{part}_tokens"]
        results[part] = {
            "tokens": tokens,
            "cross_entropy": _ratio(total[f"{part}_loss"], tokens),
            "accuracy": _ratio(total[f"{part}_hits"], tokens),
            "copy_accuracy": _ratio(total[f"{part}_copied"], tokens),
            **_psnrs(total, f"{part}_", ("", "copy_", "tokenizer_")),
        }
    results["open_loop"] = {
        str(ahead): {part: _psnrs(total, f"{part}_{ahead}_", ("", "copy_")) for part in PARTS}
        for ahead in HORIZONS
        if f"moved_{ahead}_pixels" in total
    }
    return results


def _happenings(episodes: Sequence[InteractionEpisode], steps: int) -> dict[str, float]:
    """What happens in the episodes, where it was recorded."""
    touched = [one.touched for one in episodes if one.touched is not None]
    lifted = [one.lifted for one in episodes if one.lifted is not None]
    if len(touched) < len(episodes) or len(lifted) < len(episodes):
        return {}
    in_contact = sum(int(one.sum()) for one in touched)
    return {
        "steps_in_contact": in_contact,
        "contacts_per_1000": 1000.0 * in_contact / steps,
        "steps_lifted": sum(int(one.sum()) for one in lifted),
        "frames_moved": sum(int(one.moved[:, 0].any((1, 2)).sum()) for one in episodes),
    }


def _psnrs(total: dict[str, float], prefix: str, kinds: Sequence[str]) -> dict[str, float | None]:
    """10 log10(255² / MSE), with the error summed over three channels."""
    found: dict[str, float | None] = {}
    for kind in kinds:
        error = _ratio(total[f"{prefix}{kind}error"], 3.0 * total[f"{prefix}pixels"])
        if error is not None:
            error = MOST_DECIBELS if error == 0 else min(MOST_DECIBELS, 10 * math.log10(255.0**2 / error))
        found[f"{kind}psnr"] = error
    return found


def _ratio(value: float, count: float) -> float | None:
    return value / count if count else None


@torch.no_grad()
def interaction_sums(
    policy: F1Policy, episodes: Sequence[InteractionEpisode], open_loop: bool = True
) -> dict[str, Tensor]:
    """Sums over each episode, float64 [E]: PART_NAME one step ahead, PART_AHEAD_NAME in open loop."""
    if not episodes:
        raise InputError("interaction is measured on one episode or more; got none")
    policy.eval()
    names = [f"{part}_{name}" for part in PARTS for name in SUMS]
    if open_loop:
        names += [f"{part}_{ahead}_{name}" for part in PARTS for ahead in HORIZONS for name in AHEAD]
    sums = {name: torch.zeros(len(episodes), dtype=torch.float64) for name in names}
    batches = coded_batches(policy, [one.episode for one in episodes])
    for number, batch in enumerate(batches):
        first = number * EPISODES_TOGETHER
        moved = _padded([one.moved for one in episodes[first : first + len(batch.lengths)]]).to(policy.device)
        own = {name: values[first : first + len(batch.lengths)] for name, values in sums.items()}  # views
        _one_step(policy, batch, moved[:, :, 0], own)
        if open_loop:
            _open_loop(policy, batch, moved, own)
    return sums


def _padded(moved: list[np.ndarray]) -> Tensor:
    """[B, T of the longest, horizons, h, w]."""
    longest = max(map(len, moved))
    found = torch.zeros(len(moved), longest, *moved[0].shape[1:], dtype=torch.bool)
    for row, values in enumerate(moved):
        found[row, : len(values)] = torch.as_tensor(values)
    return found


def token_shares(moved: Tensor, scales: Sequence[int]) -> Tensor:
    """The fraction of the pixels of each token's cell that moved: bool [N, h, w] → float [N, L], scale by scale."""
    pixels = moved[:, None].float()
    return torch.cat([functional.adaptive_avg_pool2d(pixels, scale).flatten(1) for scale in scales], 1)


def _one_step(policy: F1Policy, batch: EpisodeBatch, moved: Tensor, sums: dict[str, Tensor]) -> None:
    """Add the measures of every step."""
    config, tokenizer = policy.config, policy.tokenizer
    size, history = config.tokenizer.image_size, config.n_obs_img_steps
    memory = policy.initial_memory(len(batch.lengths)) if config.memory_enabled else None
    for start, steps, rows in batch.chunks(HORIZON):
        raise_if_stopped()
        columns = rows.to(policy.device)
        before = None if memory is None else memory[:, columns]
        forced = policy.forward_with_world_model(steps, memory_state=before, by_step=True)
        images = policy.predict_images_only(steps, before)["images"].flatten(0, 1).float()
        if memory is not None:
            memory[:, columns] = forced[schema.MEMORY_STATE]
        shape = steps[schema.STATE].shape[:2]
        real = steps.get(schema.STEP_MASK, torch.ones(shape, dtype=torch.bool, device=policy.device)).flatten()
        tokens = steps[schema.FRAME_TOKENS].flatten(0, 1)
        target, last = tokens[:, history], tokens[:, history - 1]
        pixels = to_model(steps[schema.IMAGE0_HISTORY].flatten(0, 1), size, schema.IMAGE0_HISTORY)
        truth, still = (to_images(pixels[:, place]).float() for place in (history, history - 1))
        mask = moved[columns, start : start + shape[0]].transpose(0, 1).flatten(0, 1)
        losses = forced["wm_token_losses"].flatten(0, 1)
        by_token = {
            "tokens": torch.ones_like(losses),
            "loss": losses,
            "hits": forced["wm_token_hits"].flatten(0, 1).float(),
            "copied": (last == target).float(),
        }
        by_pixel = {
            "pixels": torch.ones_like(truth[:, 0]),
            "error": (images - truth).square().sum(1),
            "copy_error": (still - truth).square().sum(1),
            "tokenizer_error": (to_images(tokenizer.decode(target)).float() - truth).square().sum(1),
        }
        shares = token_shares(mask, config.tokenizer.scales)
        for part, share, chosen in (("moved", shares, mask.float()), ("rest", 1 - shares, 1 - mask.float())):
            for values, weight in ((by_token, share), (by_pixel, chosen)):
                for name, value in values.items():
                    found = (value * weight).flatten(1).sum(1).masked_fill(~real, 0.0)
                    sums[f"{part}_{name}"][rows] += found.view(shape).double().sum(0).cpu()


def _open_loop(policy: F1Policy, batch: EpisodeBatch, moved: Tensor, sums: dict[str, Tensor]) -> None:
    """Add the errors of frames that are predicted several steps ahead, against the last frame seen."""
    size = policy.config.tokenizer.image_size
    for start, rows, found in rolled_out(policy, batch, HORIZONS[-1], WINDOW):
        columns = rows.to(policy.device)
        for place, ahead in enumerate(HORIZONS):
            seen = batch.streams["wrist"][columns][:, [start, start + ahead]]
            still, truth = to_images(to_model(seen, size, schema.WRIST_RGB)).float().unbind(1)
            mask = moved[columns, start + ahead - 1, place].float()
            errors = {
                "pixels": torch.ones_like(mask),
                "error": (found["images"][:, ahead - 1].float() - truth).square().sum(1),
                "copy_error": (still - truth).square().sum(1),
            }
            for part, chosen in (("moved", mask), ("rest", 1 - mask)):
                for name, value in errors.items():
                    sums[f"{part}_{ahead}_{name}"][rows] += (value * chosen).flatten(1).sum(1).double().cpu()


def interaction_lines(results: dict[str, Any]) -> list[str]:
    """The measures as lines for a person."""
    lines = []
    for name, label in (("interaction", "interaction"), ("free_motion", "free motion")):
        found = results.get(name)
        if found is None:
            continue
        facts = [f"{found['steps']} steps of {found['episodes']} episodes"]
        if "contacts_per_1000" in found:
            facts.append(f"{found['contacts_per_1000']:.0f} contacts per 1,000 steps")
        lines.append(f"{label}: {', '.join(facts)}, cross-entropy {found['cross_entropy']:.4f}")
        for part, which in (("moved", "moved objects"), ("rest", "all else")):
            own = found[part]
            if own["cross_entropy"] is None:
                continue
            lines.append(
                f"  {which}: cross-entropy {own['cross_entropy']:.4f}, PSNR {own['psnr']:.2f} dB "
                f"(last frame {own['copy_psnr']:.2f})"
            )
            ahead = [
                f"{steps}: {one[part]['psnr']:.2f} ({one[part]['copy_psnr']:.2f})"
                for steps, one in found["open_loop"].items()
                if one[part]["psnr"] is not None
            ]
            if ahead:
                lines.append(f"    open loop, PSNR by steps ahead (last frame): {', '.join(ahead)}")
    return lines
