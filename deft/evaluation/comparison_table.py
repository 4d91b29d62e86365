"""The tables of `deft compare` from its results, for the terminal and for reports."""

from __future__ import annotations

from typing import Any

from deft.evaluation.success import EPISODES, SEEDS


def is_judged(results: dict[str, Any]) -> bool:
    """Whether the environment reports success."""
    return all("success_rate" in measures for column in results["columns"].values() for measures in column.values())


def comparison_rows(results: dict[str, Any]) -> list[list[list[str]]]:
    """Return a table for each column of the comparison: the heads, then a row for each policy."""
    tables, judged = [], is_judged(results)
    for column, policies in results["columns"].items():
        tasks = list(next(iter(policies.values())).get("tasks", {})) if judged else []
        title = [column, "success"] if judged else ["", "mean reward"]
        rows = [[*title, "95 % interval", "over", "difference to the first", "over", "by seed", *tasks]]
        for label, values in policies.items():
            by_task = [f"{values['tasks'][task]['success_rate']:.1%}" for task in tasks]
            rows.append([label, *_cells(values, judged), *by_task])
        kept = [cells for cells in zip(*rows, strict=True) if any(cells[1:])]
        tables.append([list(row) for row in zip(*kept, strict=True)])
    return tables


def comparison_lines(results: dict[str, Any]) -> str:
    """Return the tables as text."""
    blocks = []
    for rows in comparison_rows(results):
        padded = []
        for index, cells in enumerate(zip(*rows, strict=True)):
            width = max(map(len, cells))
            padded.append([cell.rjust(width) if index else cell.ljust(width) for cell in cells])
        blocks.append("\n".join("  ".join(row).rstrip() for row in zip(*padded, strict=True)))
    return "\n\n".join([*blocks, f"actions: {selections(results)}"])


def selections(results: dict[str, Any]) -> str:
    """Return how the actions of each policy were selected."""
    return ", ".join(f"{label}: {how}" for label, how in results["action_selection"].items())


def _cells(values: dict[str, Any], is_rate: bool) -> list[str]:
    """Return success rate or mean return, its interval and what that is over, the same of the difference, by seed."""
    mean, interval, prefix, by_seed = "mean_reward", "mean_reward_interval", "reward_", "mean_rewards"
    scale, digits = 1, 2
    if is_rate:
        mean, interval, prefix, by_seed = "success_rate", "success_interval", "", "success_rates"
        scale, digits = 100, 1

    def text(value: float, sign: str = "") -> str:
        return f"{scale * value:{sign}.{digits}f}"

    def bounds(name: str, sign: str = "") -> str:
        return " to ".join(text(bound, sign) for bound in values[name])

    gap = ""
    if f"{prefix}difference" in values:
        gap = f"{text(values[f'{prefix}difference'], '+')} ({bounds(f'{prefix}difference_interval', '+')})"
    return [
        text(values[mean]) + "%" * is_rate,
        bounds(interval) + " %" * is_rate if interval in values else "",
        _over(values),
        gap,
        _gap_over(values, prefix),
        " ".join(map(text, values.get(by_seed, ()))),
    ]


def _over(values: dict[str, Any]) -> str:
    """What the interval is over: `3 seeds` or `100 episodes`."""
    if "interval_over" not in values:
        return ""
    return f"{values['seeds' if values['interval_over'] == SEEDS else 'episodes']} {values['interval_over']}"


def _gap_over(values: dict[str, Any], prefix: str) -> str:
    """What the interval of the difference is over: `3 seeds`, `100 episodes` or `3 seeds of the other side only`."""
    over = values.get(f"{prefix}difference_over", "")
    count = values["episodes"] if over == EPISODES else len(values.get(f"{prefix}differences", ()))
    return f"{count} {over}" if count and over else over  # Welch's has no pairs to count
