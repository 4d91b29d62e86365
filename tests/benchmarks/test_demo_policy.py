"""The command that makes the policy of `make demo` is one that Deft understands, and the policy is its result."""

import json

from deft.config.training import parse_training
from deft.evaluation.evaluate import find_run
from deft.models.vla.loading import PROVENANCE, shipped_policy


def test_the_shipped_policy_has_the_settings_of_the_script(load_benchmark):
    script = load_benchmark("demo_policy")
    provenance = json.loads((shipped_policy() / PROVENANCE).read_text())
    words = ["sft", "--dataset", "demonstrations-v0", *script.SFT, "--num_epochs", "1"]
    config, shipped = parse_training(words)[1], find_run(shipped_policy())[1]
    assert shipped.algorithm == config.algorithm
    assert shipped.policy == config.policy
    assert (shipped.trainer.num_epochs, shipped.trainer.updates_per_epoch) == (1, provenance["updates"])
