"""`deft suite` and `deft evaluate --suite`: install, list and check benchmark suites, and evaluate on their tasks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from deft import trust
from deft.config.command_settings import EvaluateConfig
from deft.config.settings import EnvConfig
from deft.config.suite_settings import SuiteCheckConfig, SuiteDownloadConfig, SuiteInstallConfig
from deft.envs.make import make_env, make_vector_env
from deft.envs.suites import SUITES, Suite, find_suite, suite_of
from deft.envs.suites.install import Progress, download, folder_of, install, locked_packages, state_of
from deft.envs.wrappers import close_env
from deft.errors import InputError
from deft.evaluation.evaluate import evaluate_run, first_seed, merge_env_kwargs
from deft.evaluation.rollouts import (
    EVALUATION_ENVS,
    EXPERT,
    check_expert,
    check_num_episodes,
    expert_actions,
    play_episodes,
    summarize,
)
from deft.evaluation.success import reward_interval, success_tables
from deft.runs.logging import show_evaluation
from deft.runs.random_state import seed_everything

LINE_INTERVAL = 5.0  # seconds between lines of progress without a terminal


# ---------------------------------------------------------------------------------------------------------- evaluation


def evaluate_suite(config: EvaluateConfig) -> dict[str, Any]:
    """Evaluate a run or a scripted policy on every task of a suite, `episodes` of each."""
    assert config.suite is not None
    suite = suite_of(config.suite)
    if suite is None:
        raise InputError(f"--suite {config.suite}: no suite; use one of {', '.join(SUITES)}, as in metaworld/MT10")
    if config.env is not None:
        raise InputError(f"--env {config.env}: the environment is that of --suite {config.suite}; give one of them")
    check_num_episodes(config.episodes)
    tasks = suite.tasks_of(config.suite)
    for name in suite.evaluation_kwargs.keys() & config.env_kwargs.keys():
        raise InputError(f"--env-kwargs {name}: is for training; an evaluation plays every task of --suite as often")
    # Not the settings of the run's training: those of the protocol, unless a flag says otherwise.
    kwargs = {"max_episode_steps": suite.time_limit(config.suite), **suite.evaluation_kwargs, **config.env_kwargs}
    episodes = config.episodes * len(tasks)
    whole = dataclasses.replace(config, env=config.suite, suite=None, episodes=episodes, env_kwargs=kwargs)
    if config.policy is not None:
        results = evaluate_scripted(whole, suite)
    else:
        results = evaluate_run(**whole.of_run())
    count = "1 episode" if config.episodes == 1 else f"{config.episodes} episodes"
    protocol = f"{count} per task of at most {kwargs['max_episode_steps']} steps; {suite.protocol}"
    version = f"{suite.package} {locked_packages(suite)[suite.package]}"
    return {"suite": config.suite, "version": version, "protocol": protocol, **results}


def evaluate_scripted(config: EvaluateConfig, suite: Suite | None = None) -> dict[str, Any]:
    """Evaluate an environment's scripted expert, or random actions."""
    if config.path is not None:
        raise InputError(f"--policy {config.policy}: the policy is the run {config.path}; give one of them")
    for name in ("video", "videos"):
        if getattr(config, name):
            raise InputError(f"--{name}: `deft play --policy {config.policy} --video FILE` records a scripted policy")
    if config.env is None:
        raise InputError(f"--env: missing; --policy {config.policy} needs --env or --suite")
    check_num_episodes(config.episodes)
    trust.name(config.env, config.env_kwargs)
    kwargs = merge_env_kwargs(config.env_kwargs, config.task, config.split, config.shuffle_instructions)
    kwargs = {**(suite.scripted_kwargs if suite else {}), **kwargs}
    env_config = EnvConfig(id=config.env, kwargs=kwargs, suite_path=config.suite_path)
    example = make_env(env_config)
    try:
        if config.policy == EXPERT:
            check_expert(example, config.env)
        action_space = example.action_space
    finally:
        close_env(example)
    seed_everything(config.seed)
    with closing(make_vector_env(env_config, num_envs=min(config.episodes, EVALUATION_ENVS))) as env:
        act = expert_actions(env, action_space) if config.policy == EXPERT else None
        seed = first_seed(env, config.seed, config.env)
        with show_evaluation(config.episodes) as watch:
            episodes = play_episodes(None, env, config.episodes, seed, act=act, watch=watch)
    return {
        **summarize(episodes),
        "action_selection": config.policy,
        **reward_interval([episodes]),
        **success_tables([episodes]),
        "first_seed": seed,
    }


# ------------------------------------------------------------------------------------------------------------- suites


def install_suite(config: SuiteInstallConfig) -> dict[str, Any]:
    """Install a suite, with progress."""
    suite = find_suite(config.suite)
    with _shown_progress(suite.name) as progress:
        is_new = install(suite, progress, config.reinstall, [Path(folder) for folder in config.wheels])
    return {
        "suite": suite.name,
        "version": locked_packages(suite)[suite.package],
        "folder": str(folder_of(suite)),
        "installed": "now" if is_new else "already, and complete",
    }


def download_suite(config: SuiteDownloadConfig) -> dict[str, Any]:
    """Download the wheels of a suite, with progress."""
    suite, folder = find_suite(config.suite), Path(config.out)
    with _shown_progress(suite.name) as progress:
        files = download(suite, folder, progress, config.python_version, config.platform)
    return {
        "suite": suite.name,
        "version": locked_packages(suite)[suite.package],
        "folder": str(folder),
        "wheels": len(files),
        "megabytes": round(sum(file.stat().st_size for file in files) / 1e6, 1),
    }


def list_suites() -> dict[str, Any]:
    """Return the state of every suite."""
    suites = [find_suite(name) for name in SUITES]
    return {
        suite.name: {
            "state": state_of(suite),
            "version": locked_packages(suite)[suite.package],
            "tasks": len(suite.tasks),
            "groups": list(suite.groups),
            "folder": str(folder_of(suite)),
        }
        for suite in suites
    }


def suite_lines(suites: dict[str, Any]) -> str:
    """The list of suites as lines for a person."""
    width = max(map(len, suites))
    lines = []
    for name, about in suites.items():
        groups = f" ({', '.join(about['groups'])})" if about["groups"] else ""
        tasks = f"{about['tasks']:3d} task" + ("" if about["tasks"] == 1 else "s")
        lines.append(f"{name:{width}}  {about['version']:10}  {tasks}{groups}")
        advice = "" if about["state"] == "installed" else f": deft suite install {name}"
        lines.append(f"{'':{width}}  {about['state']}{advice or ' in ' + about['folder']}")
    return "\n".join(lines)


def check_suite(config: SuiteCheckConfig) -> dict[str, Any]:
    """Compare an installed suite with its fingerprint."""
    from deft.evaluation.fingerprint import check, update

    suite = find_suite(config.suite)
    suite.check_installed(f"suite check {suite.name}")
    with _shown_progress(suite.name) as progress:
        if config.update or config.merge:
            return update(suite, progress, config.merge, config.suite_path)
        return check(suite, progress, config.repeats, config.suite_path)


@contextmanager
def _shown_progress(name: str) -> Iterator[Progress]:
    """Show a bar on a terminal, and a line every few seconds elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
    from rich.progress import Progress as Bar

    console = Console(stderr=True)
    columns = (
        TextColumn(name),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    next_line = time.monotonic()
    with Bar(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None)

        def update(done: int, total: int, what: str) -> None:
            nonlocal next_line
            bar.update(task, completed=done, total=total, description=what)
            if not console.is_terminal and time.monotonic() >= next_line:
                next_line = time.monotonic() + LINE_INTERVAL
                console.print(f"{name}: {done} of {total}, {what}", highlight=False)

        yield update
