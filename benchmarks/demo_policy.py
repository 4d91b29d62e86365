"""The policy that `make demo` starts from: vla-tiny after a short SFT on noisy demonstrations of one task.

    python benchmarks/demo_policy.py --out deft/models/vla/weights/tabletop-pick

`deft collect` records the scripted expert with noise and with the object positions of the simulator as labels, and
`deft train sft` imitates it. OUT is a run directory with the last checkpoint's weights and without its training state,
and `provenance.json` has the command. An interrupted SFT is resumed by the same command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import torch
import yaml

from deft import __version__ as deft_version
from deft.models.vla.loading import PROVENANCE
from deft.ownership import write_manifest
from deft.runs import checkpoint
from deft.runs.policy_spaces import SPACES_FILE

SFT = ["--model", "vla-tiny", "--vla-model-config", "bottleneck=8", "switch_dims=[-1]", "--batch_size", "64"]
SFT += ["--learning_rate", "1e-3", "--learning_rate_schedule", "constant", "--weight_decay", "0.01", "--eval_freq", "0"]


def deft(*words: object) -> None:
    """Run a `deft` command."""
    print("deft", *words, flush=True)
    subprocess.run([sys.executable, "-m", "deft", *map(str, words)], check=True)


def main() -> int:
    """Record, train and write the policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--task", default="pick")
    parser.add_argument("--demonstrations", type=int, default=1000)
    parser.add_argument("--noise", type=float, default=0.3, help="on the expert's actions")
    parser.add_argument("--updates", type=int, default=244, help="of SFT; an epoch has 402")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, default=Path("outputs/demo-policy"), help="for the dataset and the run")
    given = parser.parse_args()
    demonstrations, run = given.work / "demonstrations-v0", given.work / "sft"
    if not demonstrations.is_dir():
        world = ["--env", "tabletop", "--task", given.task, "--env-kwargs", "observation=labelled", "--num_envs", 8]
        expert = ["--policy", "expert", "--noise", given.noise, "--episodes", given.demonstrations]
        deft("collect", *world, *expert, "--seed", given.seed, "--out", demonstrations)
    length = ["--num_epochs", 1, "--updates_per_epoch", given.updates, "--seed", given.seed]
    deft("train", "sft", "--dataset", demonstrations, *SFT, *length, "--auto_resume", "--output_dir", run)

    source = checkpoint.find_checkpoint(run)
    folder = given.out / source.name
    shutil.rmtree(given.out, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in (checkpoint.MODEL, SPACES_FILE):
        shutil.copy(source / name, folder)
    write_manifest(folder, {})
    config = yaml.safe_load((run / "config.yaml").read_text())
    config["dataset"]["path"], config["output_dir"], config["auto_resume"] = demonstrations.name, given.out.name, False
    (given.out / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    weights = checkpoint.load_part(folder, checkpoint.MODEL)
    provenance = {
        "command": shlex.join(["python", "benchmarks/demo_policy.py", "--out", str(given.out)]),
        "deft": deft_version,
        "torch": torch.__version__,
        "task": given.task,
        "demonstrations": given.demonstrations,
        "noise": given.noise,
        "updates": given.updates,
        "seed": given.seed,
        "parameters": sum(value.numel() for value in weights.values()),
    }
    (given.out / PROVENANCE).write_text(json.dumps(provenance, indent=1) + "\n")
    print(f"written: {given.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
