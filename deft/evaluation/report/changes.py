"""Whether runs got better: measures before and after training, with 95 % intervals.

An interval is over training seeds where there are several runs, else over the episodes of the run. Runs of unequal
length are measured at the last step that all of them have reached.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deft.evaluation.plots import mean_window, metric_curve
from deft.evaluation.report.run_data import ReportedRun
from deft.evaluation.success import EPISODES, FEWEST_SEEDS, SEEDS, measured, t_interval, t_quantile

FEWEST_EPISODES = 5  # at each end of training, for a mean of training episodes
RETURN, SUCCESS = "Return", "Success rate"
EVALUATION, TRAINING, UPDATES = "evaluation", "training episodes", "updates"  # what a change was measured on
# Further measures of an evaluation, which have no interval, and whether more of them is better.
MEASURES = {
    "normalized_score": ("Normalised score", True),
    "collision_rate": ("Collision rate", False),
    "ade": ("ADE, m", False),
    "fde": ("FDE, m", False),
    "psnr": ("PSNR, dB", True),
}
# Metrics that tell how training goes where nothing is played, the first that there is.
LOSSES = (
    "val_loss",
    "ade",
    "train/held_out_loss",
    "train/wm_loss",
    "train/motion_loss",
    "loss",
    "bc_loss",
    "train/loss",
)


@dataclass
class Measure:
    """A mean, and its interval if it has one."""

    mean: float
    interval: tuple[float, float] | None = None
    over: str | None = None


@dataclass
class Change:
    """One measure before and after; `source` is what it was measured on, and `where` the same in detail."""

    name: str
    before: Measure | None
    after: Measure
    source: str
    where: str
    higher_is_better: bool = True

    @property
    def is_rate(self) -> bool:
        """Whether it is a fraction, shown in percent."""
        return self.name == SUCCESS

    @property
    def verdict(self) -> str:
        """`better`, `worse` or `unclear` by the intervals; empty without both."""
        if self.before is None or self.before.interval is None or self.after.interval is None:
            return ""
        rises, falls = (
            self.after.interval[0] > self.before.interval[1],
            self.after.interval[1] < self.before.interval[0],
        )
        if not rises and not falls:
            return "unclear"
        return "better" if rises == self.higher_is_better else "worse"


@dataclass
class _Sample:
    """Results of one run: of episodes, with the deviation of a single one."""

    mean: float
    deviation: float
    count: int


def changes(runs: Sequence[ReportedRun]) -> list[Change]:
    """Return the changes of runs that are repetitions of one another, the most telling ones first.

    Evaluations come first if the untrained policy was evaluated, or no episodes were logged; else training episodes.
    """
    end = common_end(runs)
    if end is not None:
        runs = [_until(run, end) for run in runs]
    evaluated, trained = list(_evaluated(runs)), list(_trained(runs))
    starts_at_zero = all(run.lines["evaluation"] and run.lines["evaluation"][0]["step"] == 0 for run in runs)
    found = [*evaluated, *trained] if starts_at_zero else [*trained, *evaluated]
    return found or list(_losses(runs))


def common_end(runs: Sequence[ReportedRun]) -> int | None:
    """Return the last step that all runs have reached; None where they end at the same step."""
    ends = {run.step for run in runs}
    return min(ends) if len(ends) > 1 else None


def _until(run: ReportedRun, step: int) -> ReportedRun:
    return replace(run, lines={kind: [line for line in own if line["step"] <= step] for kind, own in run.lines.items()})


def interval_of_line(line: dict[str, Any], name: str) -> tuple[float, float] | None:
    """Return the interval of a logged evaluation's `mean_reward` or `success_rate`."""
    samples = _samples_of_line(line, name)
    return _combined(samples, name == "success_rate").interval if samples else None


def _evaluated(runs: Sequence[ReportedRun]) -> Iterator[Change]:
    lines = [run.lines["evaluation"] for run in runs]
    if not all(lines):
        return
    first, last = [own[0] for own in lines], [own[-1] for own in lines]
    has_before = all(len(own) > 1 for own in lines)
    where = f"evaluation at {_steps(first)} → {_steps(last)}" if has_before else f"evaluation at {_steps(last)}"
    where = f"{where} {runs[0].unit}"
    counts = sorted({int(line["episodes"]) for line in (*first, *last) if line.get("episodes")})
    where += f", {counts[0]} episodes{_of_each(runs)}" if len(counts) == 1 else ""
    for name, title in (("success_rate", SUCCESS), ("mean_reward", RETURN)):
        after = [sample for line in last for sample in _samples_of_line(line, name)]
        before = [sample for line in first for sample in _samples_of_line(line, name)]
        if after:
            own = _combined(before, title == SUCCESS) if has_before and before else None
            yield Change(title, own, _combined(after, title == SUCCESS), EVALUATION, where)
    for name, (title, higher_is_better) in MEASURES.items():
        ends = [[line[name] for line in own if line.get(name) is not None] for own in (first, last)]
        if ends[1]:
            before_values = _mean_of(ends[0]) if ends[0] and has_before else None
            yield Change(title, before_values, _mean_of(ends[1]), EVALUATION, where, higher_is_better)


def _of_each(runs: Sequence[ReportedRun]) -> str:
    return " of each run" if len(runs) > 1 else ""


def _steps(lines: Sequence[dict[str, Any]]) -> str:
    steps = [line["step"] for line in lines]
    return f"{steps[0]:,}" if len(set(steps)) == 1 else f"{min(steps):,} to {max(steps):,}"


def _samples_of_line(line: dict[str, Any], name: str) -> list[_Sample]:
    """The results of an evaluation; of seeds that were trained at once one each."""
    if line.get(name) is None or not line.get("episodes"):
        return []
    if name == "mean_reward" and line.get("mean_rewards"):
        return [_Sample(mean, 0.0, 1) for mean in line["mean_rewards"] if mean is not None]
    return [_Sample(line[name], line.get("std_reward") or 0.0, int(line["episodes"]))]


def _trained(runs: Sequence[ReportedRun]) -> Iterator[Change]:
    """The first and the last episodes of training."""
    for name, title in (("success", SUCCESS), ("episode_return", RETURN)):
        curves = [metric_curve(run.lines["episode"], name)[1].tolist() for run in runs]
        fewest = min(map(len, curves))
        if fewest < 2 * FEWEST_EPISODES:
            continue
        count = min(mean_window(fewest), fewest // 2)
        ends = []
        for part in (slice(None, count), slice(-count, None)):
            samples = [_Sample(statistics.fmean(own[part]), statistics.pstdev(own[part]), count) for own in curves]
            ends.append(_combined(samples, title == SUCCESS))
        yield Change(title, ends[0], ends[1], TRAINING, f"first → last {count} training episodes{_of_each(runs)}")


def _losses(runs: Sequence[ReportedRun]) -> Iterator[Change]:
    """The first and last values of the main loss."""
    known = [name for name in runs[0].metric_names if name.rpartition("/")[2].endswith("loss")]
    for name in [name for name in LOSSES if name in runs[0].metric_names] + known:
        curves = [metric_curve(run.lines["update"], name)[1].tolist() for run in runs]
        if all(len(own) > 1 for own in curves):
            count = max(1, min(map(len, curves)) // 20)
            before, after = (
                _mean_of([statistics.fmean(own[part]) for own in curves])
                for part in (slice(count), slice(-count, None))
            )
            words = f"first → last {count} values in the log" if count > 1 else "first → last value in the log"
            yield Change(
                name.rpartition("/")[2].replace("_", " "), before, after, UPDATES, words, higher_is_better=False
            )
            return


def _mean_of(values: Sequence[float]) -> Measure:
    """The mean over runs, with its interval where there are enough of them."""
    interval = t_interval(values) if len(values) >= FEWEST_SEEDS else None
    return Measure(statistics.fmean(values), interval, SEEDS if interval else None)


def _combined(samples: Sequence[_Sample], is_rate: bool) -> Measure:
    """The mean over runs, with the interval that `deft compare` has for it."""
    if is_rate:
        runs = [[index < round(one.mean * one.count) for index in range(one.count)] for one in samples]
        found = measured(runs)
        return Measure(found["success_rate"], tuple(found["success_interval"]), found["interval_over"])
    if len(samples) > 1:
        return _mean_of([one.mean for one in samples])
    (one,) = samples
    if one.count < 2:
        return Measure(one.mean)
    # `deviation` divides by n, the interval needs s, which divides by n − 1: s / √n = deviation / √(n − 1).
    half = t_quantile(one.count - 1) * one.deviation / math.sqrt(one.count - 1)
    return Measure(one.mean, (one.mean - half, one.mean + half), EPISODES)
