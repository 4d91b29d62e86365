"""How sure a success rate or a return is: intervals over training seeds or over episodes, and paired differences.

`deft evaluate` and `deft compare` sum up episodes with it.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from deft.envs.vector import Episode

SEEDS, EPISODES = "seeds", "episodes"  # what an interval is over
ONE_SIDE = "seeds of the other side only"  # of a difference to a single trained run
FEWEST_SEEDS = 3  # of an interval in reports; that of two by Student's t is 9 times as wide as they are apart
NORMAL_95 = 1.959964  # 97.5 % of a standard normal lie below it


def wilson_interval(successes: int, trials: int, z: float = NORMAL_95) -> tuple[float, float]:
    """The 95 % interval of a success rate that was measured in `trials` episodes.

    (p + z²/2n ± z √(p(1−p)/n + z²/4n²)) / (1 + z²/n): it holds for few episodes, and for rates near 0 and 1, too.
    """
    if trials == 0:
        return 0.0, 1.0
    rate, spread = successes / trials, z * z / trials
    center = rate + spread / 2
    half = z * math.sqrt(rate * (1 - rate) / trials + spread / (4 * trials))
    low, high = (center - half) / (1 + spread), (center + half) / (1 + spread)
    return (0.0 if successes == 0 else low), (1.0 if successes == trials else high)


def t_quantile(freedom: int) -> float:
    """The t for which a Student variable of `freedom` degrees lies between −t and t with probability 0.95."""
    low, high = 0.0, 1e3
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if _t_between(middle, freedom) < 0.95 else (low, middle)
    return high


def _t_between(t: float, freedom: int) -> float:
    """P(−t < T < t), by the finite sums for whole degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    angle = math.atan(t / math.sqrt(freedom))
    sine, cosine = math.sin(angle), math.cos(angle)
    is_odd = freedom % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for power in range(2 + is_odd, freedom + 1, 2):
        total += term
        term *= cosine * cosine * (power - 1) / power
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of a mean: x̄ ± t s / √n with n − 1 degrees of freedom; unbounded for a single value."""
    mean = statistics.fmean(values)
    if len(values) < 2:
        return -math.inf, math.inf
    half = t_quantile(len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return mean - half, mean + half


def welch_interval(first: Sequence[float], second: Sequence[float]) -> tuple[float, float]:
    """The 95 % interval of mean(second) − mean(first) of independent runs: Δ ± t √(s₁²/n₁ + s₂²/n₂).

    The degrees of freedom are Welch and Satterthwaite's, rounded down.
    """
    parts = [statistics.variance(values) / len(values) for values in (first, second)]
    difference = statistics.fmean(second) - statistics.fmean(first)
    if not sum(parts):
        return difference, difference
    squares = sum(part**2 / (len(values) - 1) for part, values in zip(parts, (first, second), strict=True))
    half = t_quantile(max(1, math.floor(sum(parts) ** 2 / squares))) * math.sqrt(sum(parts))
    return difference - half, difference + half


def hull(one: Sequence[float], other: Sequence[float], low: float = -1.0, high: float = 1.0) -> list[float]:
    """The smallest interval that contains both, within `low` and `high`."""
    return [round(max(low, min(one[0], other[0])), 4), round(min(high, max(one[1], other[1])), 4)]


def measured(runs: Sequence[Sequence[bool]]) -> dict[str, Any]:
    """Success rate with a 95 % interval: over seeds where there are several runs, else over the run's episodes.

    Over seeds: the t interval of the runs' rates, widened where needed to contain the Wilson interval of all episodes.
    Runs that happen to agree would otherwise give an interval of no width.
    """
    runs = [run for run in runs if len(run)]
    rates = [sum(run) / len(run) for run in runs]
    total = sum(map(len, runs))
    by_episode = wilson_interval(sum(map(sum, runs)), total)
    found: dict[str, Any] = {"episodes": total, "success_rate": statistics.fmean(rates)}
    if len(rates) == 1:
        return found | {"success_interval": hull(by_episode, by_episode, 0.0), "interval_over": EPISODES}
    interval = hull(t_interval(rates), by_episode, 0.0)
    return found | {"success_interval": interval, "interval_over": SEEDS, "success_rates": rates}


def reward_interval(runs: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    """The t interval of the mean return: over the runs' means where there are several, else over the episodes.

    Over seeds it is widened where needed to contain the one over all episodes.
    """
    means = [statistics.fmean(episode.episode_return for episode in run) for run in runs]
    interval = t_interval([episode.episode_return for run in runs for episode in run])
    if len(means) > 1:
        over_seeds = t_interval(means)
        interval = min(interval[0], over_seeds[0]), max(interval[1], over_seeds[1])
    if not math.isfinite(interval[0]):  # of one episode
        return {}
    over = {"interval_over": SEEDS, "mean_rewards": means} if len(means) > 1 else {"interval_over": EPISODES}
    return {"mean_reward_interval": list(interval), **over}


def success_tables(runs: Sequence[Sequence[Episode]]) -> dict[str, Any]:
    """The interval of the success rate, and the same for each `task` and each `instruction` that the episodes name.

    `runs` are the episodes of each training seed of one method.
    """
    judged = [[episode for episode in run if episode.success is not None] for run in runs]
    if not any(judged):
        return {}
    tables = measured([[bool(episode.success) for episode in run] for run in judged])
    del tables["episodes"]
    for label, name in (("task", "tasks"), ("instruction", "instructions")):
        groups: dict[str, list[list[bool]]] = defaultdict(lambda: [[] for _ in judged])
        for index, run in enumerate(judged):
            for episode in run:
                if label in episode.labels:
                    groups[episode.labels[label]][index].append(bool(episode.success))
        if groups:
            tables[name] = {group: measured(groups[group]) for group in sorted(groups)}
    return tables


def difference(
    first: Sequence[Sequence[float]], second: Sequence[Sequence[float]], trained: tuple[bool, bool] = (True, True)
) -> dict[str, Any]:
    """mean(second) − mean(first) with a 95 % interval, of values [runs][episodes] on the same episodes.

    One run each: paired by episode. As many runs each: run k of one is paired with run k of the other, and the t
    interval is over these differences. One run against several: over the several. Else Welch's interval. An interval
    over seeds is widened where needed to contain the one over episodes.

    `trained`: whether each side is trained. The interval of several runs against a single trained one leaves out how
    much that run would differ with another training seed: it is over the seeds of the other side only.
    """
    are_independent = len(first) != len(second) and 1 not in (len(first), len(second))
    count = (min if are_independent else max)(len(first), len(second))
    pairs = [(first[index % len(first)], second[index % len(second)]) for index in range(count)]
    by_episode = _paired_interval([(a, b) for one, other in pairs for a, b in zip(one, other, strict=True)])
    before, after = ([statistics.fmean(run) for run in runs] for runs in (first, second))
    found: dict[str, Any] = {"difference": statistics.fmean(after) - statistics.fmean(before)}
    if len(first) == len(second) == 1:
        return found | {"difference_interval": list(by_episode), "difference_over": EPISODES}
    if are_independent:
        over_seeds = welch_interval(before, after)
    else:
        found["differences"] = [statistics.fmean(other) - statistics.fmean(one) for one, other in pairs]
        over_seeds = t_interval(found["differences"])
    interval = [min(by_episode[0], over_seeds[0]), max(by_episode[1], over_seeds[1])]
    lacks_seeds = any(is_trained and len(runs) == 1 for is_trained, runs in zip(trained, (first, second), strict=True))
    return found | {"difference_interval": interval, "difference_over": ONE_SIDE if lacks_seeds else SEEDS}


def _paired_interval(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Over episodes: `paired_difference` for successes, the t interval of the differences for other values."""
    if all(isinstance(value, bool) for pair in pairs for value in pair):
        return paired_difference([bool(a) for a, _ in pairs], [bool(b) for _, b in pairs])
    return t_interval([b - a for a, b in pairs])


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> tuple[float, float]:
    """The 95 % interval of how much more often the second succeeded on the same episodes.

    b episodes were won and c lost by the change; both have the same scenes, so what is hard in them cancels. With ½
    more in each of the four cells (Agresti and Min, 2005): (b − c) / n ± z √(b + c − (b − c)² / n) / n.
    """
    pairs = list(zip(first, second, strict=True))
    won = sum(after and not before for before, after in pairs)
    lost = sum(before and not after for before, after in pairs)
    count, net, changed = len(pairs) + 2, won - lost, won + lost + 1
    half = NORMAL_95 * math.sqrt(changed - net * net / count) / count
    return max(-1.0, net / count - half), min(1.0, net / count + half)


def success_lines(results: dict[str, Any]) -> str:
    """The table by task as lines for a person; the one by instruction is in the JSON."""
    tasks = results.get("tasks", {})
    groups = tasks if len(tasks) == 1 else {"together": results, **tasks}
    width = max(len(name) for name in groups)
    lines = [f"{'':{width}}  episodes  success  95 % interval over {results['interval_over']}"]
    for name, group in groups.items():
        lines.append(f"{name:{width}}  {group['episodes']:8d}  {group['success_rate']:7.1%}  {interval_text(group)}")
    return "\n".join(lines)


def interval_text(group: dict[str, Any]) -> str:
    """`48.1 to 67.2 %`."""
    low, high = group["success_interval"]
    return f"{100 * low:.1f} to {100 * high:.1f} %"
