"""How sure a success rate is: Wilson intervals, tables by task and by instruction, and paired differences.

`deft evaluate` and `deft compare` sum up episodes with it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from deft.envs.vector import Episode

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


def measured(successes: Sequence[bool]) -> dict[str, Any]:
    """Episodes, success rate and its interval."""
    count, total = sum(successes), len(successes)
    interval = [round(bound, 4) for bound in wilson_interval(count, total)]
    return {"episodes": total, "success_rate": count / total, "success_interval": interval}


def success_tables(episodes: Sequence[Episode]) -> dict[str, Any]:
    """The interval of the success rate, and the same for each `task` and each `instruction` that the world names."""
    judged = [episode for episode in episodes if episode.success is not None]
    if not judged:
        return {}
    tables: dict[str, Any] = {}
    tables["success_interval"] = measured([bool(episode.success) for episode in judged])["success_interval"]
    for label, name in (("task", "tasks"), ("instruction", "instructions")):
        groups: dict[str, list[bool]] = defaultdict(list)
        for episode in judged:
            if label in episode.labels:
                groups[episode.labels[label]].append(bool(episode.success))
        if groups:
            tables[name] = {group: measured(groups[group]) for group in sorted(groups)}
    return tables


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> dict[str, Any]:
    """How much more often the second succeeded on the same episodes, with a 95 % interval of the mean difference.

    b episodes were won and c lost by the change; both have the same scenes, so what is hard in them cancels. With ½
    more in each of the four cells (Agresti and Min, 2005): (b − c) / n ± z √(b + c − (b − c)² / n) / n.
    """
    pairs = list(zip(first, second, strict=True))
    won = sum(after and not before for before, after in pairs)
    lost = sum(before and not after for before, after in pairs)
    count, net, changed = len(pairs) + 2, won - lost, won + lost + 1
    half = NORMAL_95 * math.sqrt(changed - net * net / count) / count
    interval = [max(-1.0, net / count - half), min(1.0, net / count + half)]
    return {"difference": net / len(pairs), "difference_interval": [round(bound, 4) for bound in interval]}


def success_lines(results: dict[str, Any]) -> str:
    """The table by task as lines for a person; the one by instruction is in the JSON."""
    tasks = results.get("tasks", {})
    groups = tasks if len(tasks) == 1 else {"together": results, **tasks}
    width = max(len(name) for name in groups)
    lines = [f"{'':{width}}  episodes  success  95 % interval"]
    for name, group in groups.items():
        lines.append(f"{name:{width}}  {group['episodes']:8d}  {group['success_rate']:7.1%}  {interval_text(group)}")
    return "\n".join(lines)


def interval_text(group: dict[str, Any]) -> str:
    """`48.1 to 67.2 %`."""
    low, high = group["success_interval"]
    return f"{100 * low:.1f} to {100 * high:.1f} %"
