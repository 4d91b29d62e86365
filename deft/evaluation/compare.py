"""`deft compare RUN_A RUN_B …`: policies on the same episodes, as a table with intervals and as a picture.

Every policy plays the same seeds, and worlds whose episodes then differ (another task, other scenes) are refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from deft.config.settings import CompareRunsConfig, EnvConfig
from deft.data.spaces import action_stream
from deft.envs.make import make_env, make_vector_env
from deft.envs.vector import Episode, VectorEnv
from deft.errors import InputError, RunError
from deft.evaluation.evaluate import env_of_run, find_run, first_seed, load_policy, world_kwargs
from deft.evaluation.plots import PALETTE, _figure, _save, _style
from deft.evaluation.rollouts import play_episodes, summarize
from deft.evaluation.success import interval_text, paired_difference, success_tables
from deft.models.policy import Policy
from deft.training.collect import EXPERT, EXPERT_METHOD, RANDOM
from deft.training.offline import members_of
from deft.training.random_state import seed_everything
from deft.training.run import EVALUATION_ENVS

COMPARISON = "comparison.json"
SCRIPTED = (RANDOM, EXPERT)  # policies that are no run
TOGETHER = "together"
SHUFFLED = "shuffled words"
SCENES = "domain_randomization"  # of an environment: what differs from scene to scene


def compare_runs(config: CompareRunsConfig) -> dict[str, Any]:
    """Play, measure and draw; `columns` holds, by column and by policy, what `deft evaluate` says of it.

    From the second policy on, `difference` is that of its success rate to the first one's, on the same episodes.
    """
    groups = _groups(config.runs)
    contenders = _contenders(config, groups)
    _check_same_scenes(contenders)
    results: dict[str, Any] = {"episodes": config.episodes, "seed": config.seed, "columns": {}}
    for column, kwargs in _columns(config, contenders).items():
        played: dict[str, list[list[Episode]]] = {}
        for label, members in contenders.items():
            played[label] = [member.play(config, kwargs) for member in members]
            _check_same_episodes(played, label)
        results["columns"][column] = _measures(played)
    last = next((name for names in reversed(groups.values()) for name in names[::-1] if name not in SCRIPTED), None)
    folder = Path(config.out or (Path(last) / "comparison" if last and Path(last).is_dir() else "comparison"))
    results["plots"] = [str(plot_successes(results, folder / "success.png"))] if _judged(results) else []
    results["comparison"] = str(folder / COMPARISON)
    _write(results, folder / COMPARISON)
    return results


class _Contender:
    """One policy, and where it plays."""

    def __init__(
        self, name: str, env_config: EnvConfig, chunk_length: int, load: Callable[[VectorEnv], Policy] | None = None
    ) -> None:
        self._name, self._env_config, self._chunk_length = name, env_config, chunk_length
        self._load = load
        self._policy: Policy | None = None
        scenes = env_config.kwargs.get(SCENES) or {}
        self.scenes = {name: value for name, value in dict(scenes).items() if value}  # what is off differs in nothing

    def has_splits(self) -> bool:
        """Whether its world knows combinations that training never sees."""
        env = make_env(self._env_config)
        try:
            return env.has_wrapper_attr("split")
        finally:
            env.close()

    def play(self, config: CompareRunsConfig, kwargs: dict[str, Any]) -> list[Episode]:
        """The episodes of one column."""
        seed_everything(config.seed)
        with _vector_env(self._env_config, kwargs, self._chunk_length, config.episodes) as env:
            if self._load is not None and self._policy is None:
                self._policy = self._load(env)
            act = _expert(env) if self._name == EXPERT else None
            return play_episodes(self._policy, env, config.episodes, first_seed(env, config.seed), act=act)


def _groups(words: Sequence[str]) -> dict[str, list[str]]:
    """What each row of the table is made of, by its label: a run, or several of them, `ppo=RUN,RUN,RUN`."""
    single = [word for word in words if "=" not in word or Path(word).exists()]
    labels = _labels([word for word in single if word not in SCRIPTED])
    groups: dict[str, list[str]] = {}
    for word in words:
        label, _, runs = word.partition("=")
        if word in single:
            label, runs = labels.get(word, word), word
        names = [word] if word in single else [name for name in runs.split(",") if name]
        if not label or not names or label in groups:
            raise InputError(f"{word}: give a label of its own and its runs, as in ppo=RUN,RUN,RUN")
        groups[label] = names
    return groups


def _contenders(config: CompareRunsConfig, groups: dict[str, list[str]]) -> dict[str, list[_Contender]]:
    """The policies of each row; scripted ones play where the first run does."""
    kwargs = world_kwargs(config.env_kwargs, config.task, None)
    found = {name: find_run(Path(name)) for names in groups.values() for name in names if name not in SCRIPTED}
    first = next(iter(found.values()), None)
    if first is None and config.env is None:
        raise InputError("--env: missing; random actions and the expert have no environment of their own")

    def contender(name: str) -> _Contender:
        if name in SCRIPTED:
            shared = EnvConfig(id=str(config.env), kwargs=kwargs)
            return _Contender(name, shared if first is None else env_of_run(first[1], config.env, kwargs), 1)
        folder, run = found[name]

        def load(env: VectorEnv) -> Policy:
            return members_of(load_policy(folder, run, env, config.device))[0]

        return _Contender(name, env_of_run(run, config.env, kwargs), run.policy.chunk_length, load)

    return {label: [contender(name) for name in names] for label, names in groups.items()}


def _labels(names: list[str]) -> dict[str, str]:
    """The last parts of the paths, as many as tell them apart."""
    parts = {name: Path(name).resolve().parts for name in names}
    for count in range(1, max((len(part) for part in parts.values()), default=0) + 1):
        labels = {name: "/".join(part[-count:]) for name, part in parts.items()}
        if len(set(labels.values())) == len(names):
            return labels
    return {name: name for name in names}


def _columns(config: CompareRunsConfig, contenders: dict[str, list[_Contender]]) -> dict[str, dict[str, Any]]:
    """The columns of the table, with what the environment is told for each."""
    splits: tuple[str, ...] = config.split or ()
    if config.split is None and all(member.has_splits() for members in contenders.values() for member in members):
        splits = ("train", "held-out")
    columns: dict[str, dict[str, Any]] = {split: {"split": split} for split in splits} or {"success": {}}
    if config.shuffle_instructions:
        columns[SHUFFLED] = {**next(iter(columns.values())), "shuffle_instructions": True}
    return columns


@contextmanager
def _vector_env(config: EnvConfig, kwargs: dict[str, Any], chunk_length: int, episodes: int) -> Iterator[VectorEnv]:
    merged = EnvConfig(id=config.id, kwargs={**config.kwargs, **kwargs}, max_episode_steps=config.max_episode_steps)
    env = make_vector_env(merged, chunk_length=chunk_length, num_envs=min(episodes, EVALUATION_ENVS))
    try:
        yield env
    finally:
        env.close()


def _expert(env: VectorEnv) -> Callable[[], np.ndarray]:
    stream = action_stream(env.action_space)
    return lambda: stream.to_rows(np.stack(env.call(EXPERT_METHOD)))


def _check_same_scenes(contenders: dict[str, list[_Contender]]) -> None:
    (first, members), *_ = contenders.items()
    scenes = members[0].scenes
    for label, group in contenders.items():
        for member in group:
            if member.scenes != scenes:
                raise InputError(
                    f"{first} and {label} do not play in the same scenes: {SCENES} is {scenes} for one and "
                    f"{member.scenes} for the other; give --env-kwargs '{SCENES}={{…}}', which holds for all"
                )


def _check_same_episodes(played: dict[str, list[list[Episode]]], label: str) -> None:
    first = next(iter(played))
    for member in played[label]:
        for index, (one, other) in enumerate(zip(played[first][0], member, strict=True)):
            if one.labels != other.labels:
                raise InputError(
                    f"{first} and {label} do not play the same episodes: number {index} is {_words(one)} for one and "
                    f"{_words(other)} for the other; give --task and --env-kwargs, which hold for all"
                )


def _words(episode: Episode) -> str:
    return repr(episode.labels.get("instruction", episode.labels.get("task", "")))


def _measures(played: dict[str, list[list[Episode]]]) -> dict[str, dict[str, Any]]:
    """What each row did, all of its runs together, and how it differs from the first row."""
    measures: dict[str, dict[str, Any]] = {}
    first = next(iter(played.values()))
    for label, members in played.items():
        episodes = [episode for member in members for episode in member]
        measures[label] = summarize(episodes) | success_tables(episodes)
        if len(members) > 1 and "success_rate" in measures[label]:
            measures[label]["success_rates"] = [summarize(member)["success_rate"] for member in members]
        if members is not first and "success_rate" in measures[label]:
            measures[label] |= _difference(first, members)
    return measures


def _difference(first: list[list[Episode]], second: list[list[Episode]]) -> dict[str, Any]:
    """Paired by episode, and by run where both have as many; else every run is paired with the first row's first."""
    before = first if len(first) == len(second) else [first[0]] * len(second)
    successes = ([bool(episode.success) for member in some for episode in member] for some in (before, second))
    return paired_difference(*successes)


def _judged(results: dict[str, Any]) -> bool:
    """Whether the world says what a success is."""
    return all("success_rate" in measures for column in results["columns"].values() for measures in column.values())


def comparison_lines(results: dict[str, Any]) -> str:
    """The table for a person: a block for each column, a line for each policy."""
    blocks = []
    for column, policies in results["columns"].items():
        width = max(len(label) for label in (column, *policies))
        if not _judged(results):
            lines = [f"{'':{width}}  mean reward"]
            lines += [f"{label:{width}}  {values['mean_reward']:11.2f}" for label, values in policies.items()]
            blocks.append("\n".join(lines))
            continue
        tasks = list(next(iter(policies.values())).get("tasks", {}))
        header = [f"{column:{width}}", " success", f"{'95 % interval':>16}", f"{'to the first':>25}"]
        lines = ["  ".join(header + [f"{task:>8}" for task in tasks])]
        for label, values in policies.items():
            cells = [f"{label:{width}}", f"{values['success_rate']:8.1%}", f"{interval_text(values):>16}"]
            cells.append(f"{_difference_text(values):>25}")
            cells += [f"{values['tasks'][task]['success_rate']:8.1%}" for task in tasks]
            lines.append("  ".join(cells).rstrip())
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _difference_text(values: dict[str, Any]) -> str:
    if "difference" not in values:
        return ""
    low, high = (100 * bound for bound in values["difference_interval"])
    return f"{100 * values['difference']:+.1f} ({low:+.1f} to {high:+.1f})"


def plot_successes(results: dict[str, Any], path: Path) -> Path:
    """Bars of the success rates with their intervals: a panel for each column, a group for each task."""
    columns = results["columns"]
    policies = list(next(iter(columns.values())))
    by_column = [measures[policies[0]].get("tasks", {}) for measures in columns.values()]
    tasks = [task for task in by_column[0] if all(task in known for known in by_column)]
    groups = [TOGETHER, *tasks] if len(tasks) > 1 else [TOGETHER]
    with _style():
        width = max(3.4, 0.45 * len(groups) * (len(policies) + 1) + 1.2)
        figure = _figure(width * len(columns), 3.6)
        panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        for axes, (column, measures) in zip(panels, columns.items(), strict=True):
            for index, label in enumerate(policies):
                values = [measures[label] if group == TOGETHER else measures[label]["tasks"][group] for group in groups]
                rates = np.array([value["success_rate"] for value in values])
                bounds = np.array([value["success_interval"] for value in values])
                errors = np.stack([rates - bounds[:, 0], bounds[:, 1] - rates]).clip(min=0.0)
                bar = 0.8 / len(policies)
                places = np.arange(len(groups)) + (index - (len(policies) - 1) / 2) * bar
                style: dict[str, Any] = {"color": PALETTE[index % len(PALETTE)], "capsize": 2, "label": label}
                axes.bar(places, rates, 0.92 * bar, yerr=errors, error_kw={"elinewidth": 1.0}, **style)
            axes.set_xticks(np.arange(len(groups)), groups)
            axes.set_ylim(0.0, 1.02)
            axes.grid(axis="x", visible=False)
            axes.set_title(column)
        panels[0].set_ylabel(f"success in {results['episodes']} episodes")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
        return _save(figure, path)


def _write(results: dict[str, Any], path: Path) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        os.replace(unfinished, path)
    except OSError as error:
        raise RunError(f"cannot write {path}: {error.strerror or error}") from error
