"""Workers on a Ray of the test's own: the results of one process, and what happens when workers die."""

import os
from pathlib import Path

import gymnasium
import numpy as np
import pytest
import torch
import worlds

from deft import schema
from deft.config.loading import resolve
from deft.errors import InputError, RunError
from deft.runs.processes import Processes
from deft.training.cluster import connection
from deft.training.run import build_trainer

ray = pytest.importorskip("ray", reason="needs the extra scale")


@pytest.fixture(scope="module", autouse=True)
def cluster():
    settings = {"PYTHONPATH": str(Path(worlds.__file__).parent)}  # what the workers import
    before = {name: os.environ.get(name) for name in settings}
    os.environ |= settings
    for name in ("Numbered", "Failing"):
        if f"{name}-v0" not in gymnasium.registry:
            gymnasium.register(f"{name}-v0", f"worlds:{name}")
    assert connection.connect("local", 4)
    yield
    connection.disconnect()
    for name, value in before.items():
        os.environ.pop(name)
        if value is not None:
            os.environ[name] = value


def build(folder, algorithm="ppo", on_ray=True, **settings):
    """A tiny run; settings by dotted path, with `__` for the dot."""
    own = {"ppo": {"batch_size": 32, "n_epochs": 2}, "grpo": {"group_size": 2, "batch_size": 32}}
    own["sac"] = {"batch_size": 16, "learning_starts": 24, "n_step": 2, "train_freq": 2}
    config = {
        "algorithm": {"name": algorithm, "cfg": own[algorithm]},
        "env": {"id": "CartPole-v1", "num_envs": 4, **({"num_workers": 2} if on_ray else {})},
        "policy": {},
        "trainer": {"total_timesteps": 256, "eval_freq": 0, "save_freq": 0, "max_staleness": 0},
        "cluster": {"collectors": "ray" if on_ray else "here", "spare_workers": 0},
        "logging": {"console_level": "WARNING", "tensorboard": False, "enable_file_logging": False},
        "output_dir": str(folder),
        "device": "cpu",
        "threads": 1,
    }
    if algorithm != "sac":
        config["trainer"]["buffer_size"] = 16
    for path, value in settings.items():
        section, name = path.split("__")
        config[section][name] = value
    return build_trainer(resolve(config))


def trained(trainer):
    summary = trainer.train()
    trainer.close()
    return summary, {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def kill_at(trainer, orders):
    """Kill the worker that is given these orders, counted from 1, as soon as it has them."""
    pool, give, count = trainer.collection.collector.pool, trainer.collection.collector.pool.give, 0

    def giving(slot, order):
        nonlocal count
        give(slot, order)
        count += 1
        if count in orders:
            ray.kill(slot.handle)

    pool.give = giving


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("ppo", {"trainer__total_timesteps": 128}),
        ("ppo", {"env__id": "Pendulum-v1", "policy__memory_hidden": 4, "trainer__total_timesteps": 128}),
        ("sac", {"env__id": "Pendulum-v1", "trainer__total_timesteps": 48}),
        ("grpo", {"trainer__total_timesteps": 128}),
    ],
    ids=["ppo", "memory", "sac", "grpo"],
)
def test_without_staleness_the_result_is_that_of_one_process(tmp_path, algorithm, settings):
    here, weights = trained(build(tmp_path / "here", algorithm, on_ray=False, **settings))
    trainer = build(tmp_path / "ray", algorithm, **settings)
    if algorithm != "sac":  # a worker that dies begins again where it stood
        kill_at(trainer, {3})
    there, others = trained(trainer)
    assert (algorithm == "sac") or trainer.collection.collector.pool.num_deaths == 1
    assert {name: here[name] for name in ("timesteps", "mean_reward")} == {
        name: there[name] for name in ("timesteps", "mean_reward")
    }
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.slow
def test_a_run_goes_on_in_one_process(tmp_path):
    _, weights = trained(build(tmp_path / "whole", on_ray=False))
    trainer = build(tmp_path / "half", trainer__total_timesteps=128)
    trained(trainer)
    resumed = build(tmp_path / "other", on_ray=False)
    resumed.load(tmp_path / "half")
    _, others = trained(resumed)
    assert all(torch.equal(weights[name], others[name]) for name in weights)


def test_beside_the_learner_no_step_counts_twice_though_workers_die(tmp_path):
    trainer = build(
        tmp_path, env__id="Numbered-v0", trainer__max_staleness=1, trainer__total_timesteps=1024,
        cluster__block_steps=8, cluster__inference="actor",
    )  # fmt: skip
    collection, seen, ages = trainer.collection, [], []
    update, pool = trainer.algorithm.update, collection.collector.pool

    def watching(batches):
        rollout = next(batches)
        seen.append(rollout[schema.OBSERVATION].flatten(0, 1).clone())
        ages.append(int(trainer.algorithm.version - rollout[schema.POLICY_VERSION].min()))
        return update(iter([rollout]))

    trainer.algorithm.update = watching
    kill_at(trainer, {5})
    ray.kill(pool.inference, no_restart=False)  # Ray restarts it, and asks it again
    summary, _ = trained(trainer)
    assert summary["timesteps"] == 1024
    assert pool.num_deaths == 1
    assert max(ages) <= 1
    steps = torch.cat(seen).numpy()
    assert len(np.unique(steps, axis=0)) == len(steps) == 1024


def test_a_worker_that_waits_takes_the_place_of_a_dead_one(tmp_path):
    trainer = build(
        tmp_path, env__id="Numbered-v0", env__num_envs=2, env__num_workers=1, trainer__max_staleness=1,
        trainer__total_timesteps=10**6, cluster__block_steps=8, cluster__spare_workers=1, env__kwargs={"wait": 0.002},
    )  # fmt: skip
    pool, update, spares, killed, taken = trainer.collection.collector.pool, trainer.algorithm.update, [], [], []

    def watching(batches):
        slot = pool.slots[0]
        if not spares and pool.num_spares == 1:  # one waits: now the other may go
            spares.append(pool._spares[0][0])
            killed.append(slot.handle)
            ray.kill(slot.handle)
        # The pool's thread counts a death before it takes the dead one's place away
        if pool.num_deaths and slot.is_ready and slot.handle not in killed:
            taken.append(slot.handle)
        return update(batches)

    trainer.algorithm.update = watching
    trainer.run._stops = lambda: bool(taken)
    trained(trainer)
    assert pool.num_deaths == 1
    assert taken == spares


@pytest.mark.slow
def test_what_an_environment_raises_is_one_line(tmp_path):
    trainer = build(tmp_path, env__id="Failing-v0", env__kwargs={"at": 5}, trainer__max_staleness=1)
    with pytest.raises(RunError, match="the gripper fell off") as caught:
        trainer.train()
    trainer.close()
    assert "\n" not in str(caught.value)


def test_bad_settings_raise_an_error(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"num_workers: 5 workers cannot share 4 environments; use num_envs 5 or more"):
        build(tmp_path, env__num_workers=5)
    with pytest.raises(InputError, match=r"env\.vector: Ray workers are processes already"):
        build(tmp_path, env__vector="process")
    with pytest.raises(InputError, match="CPUs do not fit the cluster's 4"):
        build(tmp_path, cluster__worker_cpus=3.0)
    monkeypatch.setattr(Processes, "open", lambda *_: None)
    monkeypatch.setattr(Processes, "broadcast", lambda self, value: value)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InputError, match="max_staleness: SAC in several processes cannot collect during updates"):
        build(tmp_path, "sac", trainer__max_staleness=1)
