"""The fuzzer: a few cases of each kind of input all load or end in one clear line, and it knows what is not clear."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "fuzz_inputs.py"


def test_a_few_inputs_of_each_kind(tmp_path):
    command = [sys.executable, str(SCRIPT), "--cases", "150", "--seed", "1", "--json", "fuzz.json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads((tmp_path / "fuzz.json").read_text())["counts"]
    assert sum(counts.values()) == 150
    for kind in (
        "config",
        "minari",
        "lerobot",
        "lerobot-v2",
        "checkpoint",
    ):  # 30 of each; with this seed some load, some do not
        assert counts[f"{kind} loaded"] > 0
        assert counts[f"{kind} rejected"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["fuzz.json"]


@pytest.mark.parametrize(
    ("message", "outcome"),
    [
        ("config.yaml: seed: -1 is out of range; must be at least 0", "rejected"),
        ("config.yaml: two\nlines", "failed"),
        ("config.yaml: damaged: KeyError: 'seed'", "failed"),
        ("config.yaml: " + "x" * 2000, "failed"),
    ],
)
def test_what_a_clear_message_is(load_benchmark, message, outcome):
    assert load_benchmark("fuzz_inputs")._judged(message)[0] == outcome
