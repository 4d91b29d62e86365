"""Two processes that train one model: equal parameters, and two half batches are one whole."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from f1_worlds import f1_batch, micro_policy, wake

from deft.models.normalization import RunningNormalizer
from deft.runs.processes import Processes

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys
from pathlib import Path
import torch
from f1_worlds import f1_batch, micro_policy, wake
from panning_camera import panning_config
from deft.runs.processes import Processes
from deft.training.phases.teacher import TeacherTrainer

folder = Path(sys.argv[1])
processes = Processes()
assert processes.count == 2
processes.open(torch.device("cpu"))

policy = wake(micro_policy(motion_prior=True))  # in eval mode: nothing is hidden at random
batch = {name: value[:, processes.rank::2] for name, value in f1_batch(3, 4).items()}
policy(batch, memory_state=policy.initial_memory(2))["loss"].backward()
processes.average_gradients(policy.parameters())
gradients = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
torch.save(gradients, folder / f"gradients{processes.rank}.pt")

config = panning_config(folder / "run", num_episodes=16, motion_warmup=0.5)
trainer = TeacherTrainer(config, micro_policy(motion_prior=True))
trainer.train()
taken = {"taken": trainer.buffer.numbers}
torch.save({**trainer.policy.state_dict(), **taken}, folder / f"weights{processes.rank}.pt")
"""


def test_alone_nothing_is_shared():
    processes = Processes()
    assert (processes.count, processes.rank, processes.is_first) == (1, 0, True)
    weight = torch.nn.Parameter(torch.ones(2))
    weight.grad = torch.tensor([1.0, 3.0])
    processes.average_gradients([weight])
    assert weight.grad.tolist() == [1.0, 3.0]
    assert processes.maximum(3.0, torch.device("cpu")) == 3.0
    assert processes.broadcast("a") == "a"


def test_statistics_are_over_all_that_the_processes_observed(monkeypatch):
    """Another process observes 4, 8 in the first round and 12 in the second, as (n, Σx, Σx²); this one 0, then 2, 4."""
    processes, scales = Processes(), RunningNormalizer(())
    processes.count = 2
    added = iter([(2, 12, 80), (1, 12, 144), (1, 0, 0)])
    monkeypatch.setattr(processes, "sum", lambda own: own + torch.tensor(next(added), dtype=torch.float64))
    scales.observe(torch.tensor([0.0]))
    processes.merge_statistics(scales)
    assert (float(scales.count), float(scales.mean)) == (3, 4)
    assert float(scales.variance) == pytest.approx(80 / 3 - 16)
    scales.observe(torch.tensor([2.0, 4.0]))
    processes.merge_statistics(scales)
    assert (float(scales.count), float(scales.mean)) == (6, 5)  # 0, 4, 8, 2, 4, 12

    resumed, loaded = Processes(), RunningNormalizer(())
    resumed.count = 2
    loaded.load_state_dict(scales.state_dict())
    resumed.remember_statistics(loaded)  # else both would add all six
    monkeypatch.setattr(resumed, "sum", lambda own: own + torch.tensor(next(added), dtype=torch.float64))
    loaded.observe(torch.tensor([5.0]))
    resumed.merge_statistics(loaded)
    assert (float(loaded.count), float(loaded.mean)) == (8, pytest.approx(35 / 8))


@pytest.mark.slow
def test_two_processes_keep_equal_parameters(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--num_processes",
        "2",
        "--num_machines",
        "1",
        "--multi_gpu",
    ]
    launch += ["--mixed_precision", "no", "--dynamo_backend", "no", str(tmp_path / "train.py"), str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT / 'tests'}:{ROOT}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(launch, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]

    first, second = (torch.load(tmp_path / f"gradients{rank}.pt") for rank in range(2))
    policy = wake(micro_policy(motion_prior=True))
    batch = f1_batch(3, 4)
    policy(batch, memory_state=policy.initial_memory(4))["loss"].backward()
    whole = {name: one.grad for name, one in policy.named_parameters() if one.grad is not None}
    assert whole.keys() == first.keys() == second.keys()
    for name, gradient in whole.items():
        assert torch.equal(first[name], second[name])
        assert torch.allclose(first[name], gradient, atol=1e-5, rtol=1e-4), name

    one, other = (torch.load(tmp_path / f"weights{rank}.pt") for rank in range(2))
    assert not set(one.pop("taken").tolist()) & set(other.pop("taken").tolist())  # each its own scenes
    assert all(torch.equal(one[name], other[name]) for name in one)
    fresh = micro_policy(motion_prior=True).state_dict()
    assert any(not torch.equal(one[name], fresh[name]) for name in one)
    assert (tmp_path / "run" / "checkpoint-16" / "model.pt").is_file()
