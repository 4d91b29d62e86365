"""Warnings about metrics of online and offline runs outside their expected range, with advice."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Range:
    """Where a metric is expected to lie, and the advice for when it does not; `below`: where that is another one."""

    low: float
    high: float
    advice: str
    below: str | None = None


OVERESTIMATION = (
    "if Q-values are high and the score is poor: more num_critics, a larger cql_alpha (cql), a smaller expectile (iql)"
)
INSTABILITY = "if it spikes or the score crashes: a smaller learning_rate"
SMALL_LOSS = "harmless: small rewards give small losses"
OFFLINE_RANGES = {
    "v_loss": Range(0.01, 1.0, INSTABILITY, SMALL_LOSS),
    "q_loss": Range(0.01, 1.0, f"rewards of another scale change it; {OVERESTIMATION}", SMALL_LOSS),
    "policy_loss": Range(-10.0, 10.0, f"that of cql is about −Q, of the rewards' scale; {INSTABILITY}"),
    "mean_advantage": Range(-5.0, 5.0, f"it should centre around 0; {OVERESTIMATION}"),
}


SMALLER_UPDATES = (
    "if it spikes or the score crashes: a smaller learning_rate, clip_range or max_grad_norm, a larger entropy_coef"
)
ON_POLICY_RANGES = {
    "policy_loss": Range(-0.1, 0.1, SMALLER_UPDATES),
    "value_loss": Range(0.01, 1.0, f"large returns make large losses: normalize_reward; {SMALLER_UPDATES}", SMALL_LOSS),
}


class RangeWatch:
    """Warns once when a metric leaves its range, and again only after it has been back; `unit` is what steps count."""

    def __init__(self, ranges: Mapping[str, Range], unit: str = "update") -> None:
        self._ranges, self._unit = ranges, unit
        self._outside: set[str] = set()

    def check(self, step: int, metrics: Mapping[str, float | Tensor]) -> list[str]:
        """Log each metric that has just left its range (below, where that is harmless, as information); the lines."""
        lines = []
        for name, expected in self._ranges.items():
            if name not in metrics:
                continue
            value = float(metrics[name])
            if math.isfinite(value) and expected.low <= value <= expected.high:
                self._outside.discard(name)
            elif name not in self._outside:
                self._outside.add(name)
                is_below = value < expected.low and expected.below is not None
                lines.append(
                    f"{name} is {value:.4g} at {self._unit} {step}, outside {expected.low:g} to {expected.high:g}: "
                    f"{expected.below if is_below else expected.advice}"
                )
                log.log(logging.INFO if is_below else logging.WARNING, "%s", lines[-1])
        return lines
