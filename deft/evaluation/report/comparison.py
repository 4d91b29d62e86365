"""The section of a report about a comparison: of policies, of waypoint policies, or of the phases' world models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from deft.evaluation.comparison_table import comparison_rows, is_judged, selections
from deft.evaluation.report.charts import Bar, bar_chart
from deft.evaluation.report.markup import grid, heading, table
from deft.evaluation.report.phases import phase_comparison
from deft.evaluation.waypoints import MEASURES

SUPERVISED, TRAINED = "supervised", "with PPO"  # the policies in a comparison of waypoints


def comparison(found: Mapping[str, Any]) -> str:
    """Return the tables and charts of the content of a `comparison.json`; empty if it is none that is known."""
    if "columns" in found:
        return _policies(dict(found))
    if SUPERVISED in found and TRAINED in found:
        return _waypoints(found)
    return phase_comparison(found) if "rows" in found else ""


def compared_runs(found: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return the checkpoints that `deft compare` played, by label."""
    rows = found.get("runs", {})
    named = {label: [one["checkpoint"] for one in runs if one.get("checkpoint")] for label, runs in rows.items()}
    return {label: folders for label, folders in named.items() if folders}


def _policies(found: dict[str, Any]) -> str:
    lead = (
        f"{found['episodes']} episodes of each policy, from seed {found['seed']}; differences are to the first row, on "
        f"the same episodes. Actions: {selections(found)}."
    )
    parts = [heading("Comparison", lead)]
    for (head, *rows), (column, policies) in zip(comparison_rows(found), found["columns"].items(), strict=True):
        parts.append(table(head, rows))
        parts.append(grid(_charts(column, policies, is_judged(found))))
    return "".join(parts)


def _charts(column: str, policies: Mapping[str, Any], judged: bool) -> list[str]:
    mean, interval, by_seed = "mean_reward", "mean_reward_interval", "mean_rewards"
    title, scale = "Mean return", 1.0
    if judged:
        mean, interval, by_seed = "success_rate", "success_interval", "success_rates"
        title, scale = "Success, %" if column == "success" else f"Success, %: {column}", 100.0

    def bar(label: str, values: Mapping[str, Any], color: int) -> Bar:
        bounds = [scale * bound for bound in values[interval]] if interval in values else None
        return Bar(label, scale * values[mean], color, bounds, [scale * one for one in values.get(by_seed, ())])

    limits = (0.0, 100.0) if judged else None
    charts = [bar_chart(title, [bar(label, own, index) for index, (label, own) in enumerate(policies.items())], limits)]
    tasks = list(next(iter(policies.values())).get("tasks", {})) if judged else []
    for task in tasks if len(tasks) > 1 else ():
        own = {label: values["tasks"][task] for label, values in policies.items() if task in values.get("tasks", {})}
        bars = [bar(label, values, index) for index, (label, values) in enumerate(own.items())]
        charts.append(bar_chart(f"{title}: {task}", bars, limits))
    return charts


def _waypoints(found: Mapping[str, Any]) -> str:
    before, after = found[SUPERVISED], found[TRAINED]
    names = [name for name in before if name.rpartition("/")[2] in MEASURES and name in after]
    rows = [[name, before[name], after[name], f"{after[name] - before[name]:+.4g}"] for name in names]
    about = f"{' + '.join(found.get('env', ()))}, difficulty {found.get('difficulty')}, from seed {found.get('seed')}"
    lead = f"The supervised waypoint policy and PPO's, on the same held-out episodes: {about}."
    return heading("Comparison", lead) + table(["", SUPERVISED, TRAINED, "change"], rows)
