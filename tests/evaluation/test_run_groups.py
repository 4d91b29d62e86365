"""Runs are given one by one, by label, or by pattern; labels tell them apart."""

from pathlib import Path

import pytest

from deft.errors import InputError
from deft.evaluation.run_groups import named_groups


def test_several_runs_of_a_label_are_one_group() -> None:
    assert named_groups(["a/sft", "ppo=x,y", "random"]) == {
        "sft": ["a/sft"],
        "ppo": ["x", "y"],
        "random": ["random"],
    }
    with pytest.raises(InputError, match="a: is named twice; give each run once"):
        named_groups(["a", "a"])
    with pytest.raises(InputError, match="ppo=: give a label of its own and its runs"):
        named_groups(["ppo="])


def test_seeds_of_a_method_are_named_by_a_pattern_or_one_by_one(tmp_path: Path) -> None:
    runs = [tmp_path / f"ppo_{seed}" for seed in (0, 1, 2, 10)]
    for run in runs:
        run.mkdir()
    wanted = {"ppo": [str(run) for run in runs]}
    assert named_groups([f"ppo={tmp_path}/ppo_*"]) == wanted
    assert named_groups([f"ppo={run}" for run in runs]) == wanted
    with pytest.raises(InputError, match="matches no run folder"):
        named_groups([f"ppo={tmp_path}/sac_*"])
    with pytest.raises(InputError, match=r"ppo: .*ppo_0 is named twice; give each run once"):
        named_groups([f"ppo={tmp_path}/ppo_*", f"ppo={runs[0]}"])


def test_labels_tell_the_runs_apart() -> None:
    assert named_groups(["/x/sft", "/x/ppo"]) == {"sft": ["/x/sft"], "ppo": ["/x/ppo"]}
    assert named_groups(["/x/a/best", "/x/b/best"]) == {"a/best": ["/x/a/best"], "b/best": ["/x/b/best"]}
