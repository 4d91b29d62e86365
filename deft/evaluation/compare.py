"""`deft compare RUN_A RUN_B …`: policies on the same episodes, as a table with intervals and as an image.

A row of the table is a run, or a method with several training seeds (`ppo=RUN,RUN,RUN`): its interval is over seeds.
Every policy plays the same seeds; environments whose episodes then differ (another task, other scenes) are rejected.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Collection, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from deft import trust
from deft.config.command_settings import CompareRunsConfig
from deft.config.settings import EnvConfig, OfflineRunConfig, RunConfig
from deft.envs.make import full_id, make_env, make_vector_env
from deft.envs.vector import Episode, VectorEnv
from deft.envs.wrappers import close_env
from deft.errors import InputError
from deft.evaluation.comparison_table import is_judged
from deft.evaluation.evaluate import env_of_run, find_run, first_seed, load_policy, merge_env_kwargs
from deft.evaluation.plots import draw_bars, drawing
from deft.evaluation.rollouts import (
    EXPERT,
    action_selection,
    evaluation_envs,
    expert_actions,
    play_episodes,
    summarize,
)
from deft.evaluation.run_groups import SCRIPTED, named_groups
from deft.evaluation.success import ONE_SIDE, difference, reward_interval, success_tables
from deft.models.policy import Policy, members_of
from deft.runs.json_files import write_json
from deft.runs.logging import show_evaluation
from deft.runs.random_state import seed_everything

log = logging.getLogger(__name__)
COMPARISON = "comparison.json"
TOGETHER = "together"
SHUFFLED = "shuffled words"
SCENES = "domain_randomization"  # of an environment: what differs from scene to scene


def compare_runs(config: CompareRunsConfig) -> dict[str, Any]:
    """Play, measure and draw; `columns` holds, by column and by policy, the results of `deft evaluate`.

    From the second policy on, `difference` is that of its success rate to the first one's, on the same episodes, and
    `reward_difference` that of its mean return. `runs` names the checkpoints of each row.
    """
    groups = named_groups(config.runs)
    contenders = _contenders(config, groups)
    _check_same_scenes(contenders)
    results: dict[str, Any] = {"episodes": config.episodes, "seed": config.seed, "columns": {}}
    results["runs"] = {label: [member.about for member in members] for label, members in contenders.items()}
    columns = _columns(config, contenders)
    total = config.episodes * len(columns) * sum(map(len, contenders.values()))
    with closing(_Arena(config)) as arena, show_evaluation(total) as watch:
        for column, kwargs in columns.items():
            played: dict[str, list[list[Episode]]] = {}
            for label, members in contenders.items():
                played[label] = [episodes for member in members for episodes in member.play(arena, kwargs, watch)]
                _check_same_episodes(played, label)
            results["columns"][column] = _measures(played, {label for label in groups if _is_scripted(groups[label])})
        _warn_of_single_runs(results["columns"])
    results["action_selection"] = {label: members[0].action_selection for label, members in contenders.items()}
    last = next((name for names in reversed(groups.values()) for name in names[::-1] if name not in SCRIPTED), None)
    folder = Path(config.out or (Path(last) / "comparison" if last and Path(last).is_dir() else "comparison"))
    results["plots"] = [str(plot_successes(results, folder / "success.png"))] if is_judged(results) else []
    results["comparison"] = str(folder / COMPARISON)
    write_json(results, folder / COMPARISON)
    return results


class _Arena:
    """The environments of a comparison; those of the last policy are used for the next one where they are the same."""

    def __init__(self, config: CompareRunsConfig) -> None:
        self.config = config
        self._open: tuple[EnvConfig, int, VectorEnv] | None = None

    def env(self, env_config: EnvConfig, chunk_length: int) -> VectorEnv:
        """Return the environments of a config for a policy of such chunks."""
        if self._open is not None and self._open[:2] == (env_config, chunk_length):
            return self._open[2]
        self.close()
        count = evaluation_envs(self.config.episodes, env_config.vector)
        device = str(self.config.device)
        env = make_vector_env(env_config, chunk_length=chunk_length, num_envs=count, device=device)
        self._open = (env_config, chunk_length, env)
        return env

    def close(self) -> None:
        """Close the environments."""
        if self._open is not None:
            self._open[2].close()
            self._open = None


class _Contender:
    """One run's policy (or the policies of all seeds that it trained at once), and where it plays."""

    def __init__(
        self,
        name: str,
        env_config: EnvConfig,
        chunk_length: int,
        load: Callable[[VectorEnv], list[Policy]] | None = None,
        about: dict[str, Any] | None = None,
    ) -> None:
        self._name, self._env_config, self._chunk_length = name, env_config, chunk_length
        self._load = load
        self._policies: list[Policy | None] | None = None
        self.about = {"run": name, **(about or {})}
        self.action_selection = name  # of what was played last: see `Policy.action_selection`
        scenes = env_config.kwargs.get(SCENES) or {}
        self.scenes = {name: value for name, value in dict(scenes).items() if value}  # what is off differs in nothing

    def has_splits(self) -> bool:
        """Whether its environment has combinations that are not in training."""
        env = make_env(self._env_config)
        try:
            return env.has_wrapper_attr("split")
        finally:
            close_env(env)

    def play(
        self, arena: _Arena, kwargs: dict[str, Any], watch: Callable[[int], None] | None = None
    ) -> list[list[Episode]]:
        """The episodes of one column, by each policy; `watch` as in `play_episodes`."""
        config = arena.config
        seed_everything(config.seed)
        env_config = dataclasses.replace(self._env_config, kwargs={**self._env_config.kwargs, **kwargs})
        env = arena.env(env_config, self._chunk_length)
        if self._policies is None:
            self._policies = [None] if self._load is None else [*self._load(env)]
        if self._policies[0] is not None:
            self.action_selection = action_selection(self._policies[0], config.deterministic)
        act = expert_actions(env, env.action_space) if self._name == EXPERT else None
        played, seed = [], first_seed(env, config.seed, env_config.id)
        for policy in self._policies:
            seed_everything(config.seed)
            episodes = play_episodes(policy, env, config.episodes, seed, config.deterministic, act=act, watch=watch)
            played.append(episodes)
        return played


def _contenders(config: CompareRunsConfig, groups: dict[str, list[str]]) -> dict[str, list[_Contender]]:
    """The policies of each row; scripted ones play where the first run does."""
    trust.name(config.env, config.env_kwargs)
    kwargs, names = merge_env_kwargs(config.env_kwargs, config.task, None), config.rename_streams
    found = {name: find_run(Path(name)) for names in groups.values() for name in names if name not in SCRIPTED}
    first = next(iter(found.values()), None)
    if first is None and config.env is None:
        raise InputError("--env: missing; random actions and the expert have no environment of their own")
    if config.env is None:
        _check_same_env({name: run.env.id for name, (_, run) in found.items() if run.env.id is not None})

    further: dict[str, Any] = {"suite_path": config.suite_path, "vector": config.vector}

    def env_of(run: RunConfig | OfflineRunConfig) -> EnvConfig:
        return env_of_run(run, config.env, kwargs, names, **further)

    def contender(name: str) -> _Contender:
        if name in SCRIPTED:
            shared = EnvConfig(id=str(config.env), kwargs=kwargs, rename_streams=names, **further)
            return _Contender(name, shared if first is None else env_of(first[1]), 1)
        folder, run = found[name]

        def load(env: VectorEnv) -> list[Policy]:
            return members_of(load_policy(folder, run, env, config.device))

        about = {"checkpoint": str(folder), "training_seed": run.seed}
        return _Contender(name, env_of(run), run.policy.chunk_length, load, about)

    contenders = {label: [contender(name) for name in names] for label, names in groups.items()}
    _warn_of_equal_seeds(contenders)
    return contenders


def _warn_of_equal_seeds(contenders: dict[str, list[_Contender]]) -> None:
    """Warn where runs of one row were trained with the same seed: they are not independent."""
    for label, members in contenders.items():
        seeds: dict[Any, str] = {}
        for member in members:
            seed, run = member.about.get("training_seed"), member.about["run"]
            if seed is not None and seed in seeds:
                pair = f"{label}: {seeds[seed]} and {run}"
                log.warning(
                    "%s were both trained with seed %d: an interval over seeds takes independent runs", pair, seed
                )
            seeds[seed] = run


def _columns(config: CompareRunsConfig, contenders: dict[str, list[_Contender]]) -> dict[str, dict[str, Any]]:
    """The columns of the table, with the environment's arguments for each."""
    splits: tuple[str, ...] = config.split or ()
    if config.split is None and all(member.has_splits() for members in contenders.values() for member in members):
        splits = ("train", "held-out")
    columns: dict[str, dict[str, Any]] = {split: {"split": split} for split in splits} or {"success": {}}
    if config.shuffle_instructions:
        columns[SHUFFLED] = {**next(iter(columns.values())), "shuffle_instructions": True}
    return columns


def _check_same_env(env_ids: dict[str, str]) -> None:
    """Raise an error if runs, given with the environments that they were trained in, would play in different ones."""
    (first, own), *others = env_ids.items() or [("", "")]
    for name, env_id in others:
        ours, theirs = (full_id(one.rpartition(":")[2]) for one in (own, env_id))
        if ours != theirs:
            raise InputError(
                f"{first} and {name} were trained in different environments, {own} and {env_id}: their results are not "
                "comparable; give --env ID to evaluate all of them in one environment"
            )


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


def _is_scripted(names: Sequence[str]) -> bool:
    return all(name in SCRIPTED for name in names)


def _warn_of_single_runs(columns: dict[str, dict[str, Any]]) -> None:
    """Warn where the interval of a difference leaves out the variance between training seeds of one side."""
    rows = next(iter(columns.values()))
    first = next(iter(rows))
    for label, values in rows.items():
        if values.get("reward_difference_over") == ONE_SIDE:
            log.warning(
                "%s: its difference to %s is over seeds of the other side only, and too certain: %s is a single "
                "trained run; give several training seeds of it, as in %s=RUN,RUN,RUN",
                label, first, *[label if values["seeds"] == 1 else first] * 2,
            )  # fmt: skip


def _measures(played: dict[str, list[list[Episode]]], scripted: Collection[str] = ()) -> dict[str, dict[str, Any]]:
    """What each row did, its runs as seeds of one method, and how it differs from the first row."""
    measures: dict[str, dict[str, Any]] = {}
    reference, first = next(iter(played.items()))
    for label, runs in played.items():
        trained = (reference not in scripted, label not in scripted)
        found = summarize([episode for run in runs for episode in run])
        found |= {"seeds": len(runs), **reward_interval(runs), **success_tables(runs)}
        if runs is not first:
            found |= {
                f"reward_{name}": value for name, value in difference(_returns(first), _returns(runs), trained).items()
            }
        if runs is not first and "success_rate" in found:
            found |= difference(_successes(first), _successes(runs), trained)
        measures[label] = found
    return measures


def _returns(runs: list[list[Episode]]) -> list[list[float]]:
    return [[episode.episode_return for episode in run] for run in runs]


def _successes(runs: list[list[Episode]]) -> list[list[bool]]:
    return [[bool(episode.success) for episode in run] for run in runs]


def plot_successes(results: dict[str, Any], path: Path) -> Path:
    """Bars of the success rates with their intervals: a panel for each column, a group for each task."""
    columns = results["columns"]
    policies = list(next(iter(columns.values())))
    by_column = [measures[policies[0]].get("tasks", {}) for measures in columns.values()]
    tasks = [task for task in by_column[0] if all(task in known for known in by_column)]
    groups = [TOGETHER, *tasks] if len(tasks) > 1 else [TOGETHER]
    width = max(3.4, 0.45 * len(groups) * (len(policies) + 1) + 1.2)
    with drawing(path, width * len(columns), 3.6) as figure:
        panels = figure.subplots(1, len(columns), squeeze=False, sharey=True)[0]
        for axes, (column, measures) in zip(panels, columns.items(), strict=True):
            rates, errors = {}, {}
            for label in policies:
                values = [measures[label] if group == TOGETHER else measures[label]["tasks"][group] for group in groups]
                rates[label] = np.array([value["success_rate"] for value in values])
                bounds = np.array([value["success_interval"] for value in values])
                errors[label] = np.stack([rates[label] - bounds[:, 0], bounds[:, 1] - rates[label]]).clip(min=0.0)
            draw_bars(axes, groups, rates, errors)
            axes.set_ylim(0.0, 1.02)
            axes.grid(axis="x", visible=False)
            axes.set_title(column)
        panels[0].set_ylabel(f"success in {results['episodes']} episodes")
        handles, labels = panels[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=min(4, len(labels)))
    return path
