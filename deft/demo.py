"""`make demo`: a short run of the three phases of F1 on the embedded tabletop, with an HTML report."""

from __future__ import annotations

import json
import sys
import time
from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deft.config.output_base import output_base
from deft.config.rl_yaml import read_phase_config
from deft.errors import DeftError
from deft.evaluation.report import COMPARISON_FILE
from deft.models.f1.loading import default_teacher
from deft.training.phases.all_phases import train_all


def main() -> int:
    """Train the phases in order, and print the results and the path of the report."""
    console = Console()
    root = output_base() / f"demo-{datetime.now():%Y%m%d-%H%M%S}"
    config = read_phase_config("phases-demo")
    config.phase, config.all.output_dir = "all", str(root)
    config.model.checkpoint_path = str(default_teacher())
    whole = config.all
    minutes = sum(part or 0.0 for part in (whole.teacher_minutes, whole.student_minutes, whole.adversarial_minutes))
    console.print(
        f"Deft trains a robot that explores a table, in three phases of {minutes:g} minutes in all: a world model that "
        "predicts its camera, an explorer that looks for what it cannot predict, and the two against each other."
    )
    started = time.monotonic()
    try:
        results = train_all(config)
    except DeftError as error:
        print(f"deft: {error}", file=sys.stderr)
        return error.exit_status
    found = json.loads((root / COMPARISON_FILE).read_text(encoding="utf-8"))
    names = list(found["rows"][0]["values"])
    table = Table(title="World models on held-out episodes of another explorer")
    table.add_column("")
    for name in names:
        table.add_column(name, justify="right")
    for row in found["rows"]:
        table.add_row(row["name"], *(f"{row['values'][name]:.4g}" for name in names))
    console.print(table)
    console.print(f"trained and evaluated in {time.monotonic() - started:.0f} s")
    console.print(f"run directory: {root}")
    console.print(f"resume:        deft train all --resume {root}")
    console.print(f"report:        {Path(results['report']).resolve()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
