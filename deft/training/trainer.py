"""The loop: gather a rollout, update, publish the weights, write down what happened. One for all algorithms.

Made by `deft.training.run` from a config, or by hand: `Trainer(policy, env, algorithm).train(100_000)`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import time
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import torch

from deft import schema
from deft.algorithms.algorithm import Algorithm, Metrics
from deft.config.output_base import output_base
from deft.config.settings import CurriculumConfig, LoggingConfig, TrainerConfig
from deft.envs.make import make_another, wrap
from deft.envs.vector import Episode, VectorEnv, close_env
from deft.errors import InputError, RunError, Stopped
from deft.evaluation.rollouts import evaluate_policy, film_episodes
from deft.models.policy import Policy
from deft.models.targets import frozen_copy
from deft.runs import checkpoint, sharding
from deft.runs.compute import is_small, threads_for
from deft.runs.intervals import crossed
from deft.runs.logging import WINDOW, RunLogger, best_logged, logged_evaluations
from deft.runs.metric_ranges import ON_POLICY_RANGES, RangeWatch
from deft.runs.policy_spaces import PolicySpaces
from deft.runs.processes import Processes, SilentLogger
from deft.runs.random_state import get_random_state, seed_everything, separate_random_state, set_random_state
from deft.runs.seeds import EVALUATION_SEED, process_seed, training_seed
from deft.runs.signals import StopSignal, never
from deft.training.cluster.pool import ClusterEnv
from deft.training.collection import UNKNOWN_COLLECTOR
from deft.training.curriculum import Curriculum
from deft.training.experience import make_collection, rollout_steps

log = logging.getLogger(__name__)
OWN_STATE = ("generator", "running_return")  # of an algorithm's state, what each process has for itself
# What of `env` makes the environments what they are.
ENV_SETTINGS = ("id", "kwargs", "max_episode_steps", "reward_weights", "rename_streams")
# What `Trainer.load` reads of a checkpoint's training state.
STATE_KEYS = (
    "algorithm_name",
    "algorithm",
    "num_timesteps",
    "best_reward",
    "observation_space",
    "action_space",
    "collector",
    "buffer",
    "log",
    "random",
)


class Trainer:
    """Runs one algorithm on one policy in one environment; owns the loop and nothing else.

    `env` is a Gymnasium environment, a list of them, or a vector environment. Keywords beyond the named ones are those
    of `TrainerConfig` (`eval_freq`, `save_freq`, `max_staleness`, …). A policy that is not a `fresh_policy` knows
    something already: it is evaluated before it trains, and takes no random actions at the start. `acting` acts in
    place of a policy whose weights are shared out.
    """

    def __init__(
        self,
        policy: Policy,
        env: gymnasium.Env | list[gymnasium.Env] | gymnasium.vector.VectorEnv | VectorEnv,
        algorithm: Algorithm,
        buffer_size: int = 2048,
        buffer_type: str = "standard",
        batch_size: int | None = None,
        *,
        eval_env: Callable[[], VectorEnv | gymnasium.Env] | VectorEnv | gymnasium.Env | None = None,
        video_env: Callable[[], gymnasium.Env] | None = None,
        output_dir: str | Path | None = None,
        logging_config: LoggingConfig | None = None,
        seed: int = 0,
        threads: int | None = None,
        timeout: float = 60.0,
        run_config: dict[str, Any] | None = None,
        on_start: Callable[[], None] | None = None,
        fresh_policy: bool = True,
        curriculum: CurriculumConfig | None = None,
        processes: Processes | None = None,
        acting: sharding.WholeCopy | None = None,
        spaces: PolicySpaces | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise InputError(f"algorithm: {algorithm!r} is not an Algorithm; make one, such as PPO(policy)")
        if algorithm.policy is not policy:
            raise InputError("the algorithm trains another policy object than the trainer was given")
        buffer_size = rollout_steps(algorithm, buffer_size)
        self.settings = TrainerConfig(buffer_size=buffer_size, buffer_type=buffer_type, **settings)  # type: ignore[arg-type]
        self.policy = policy
        self.algorithm = algorithm
        if batch_size is not None:
            algorithm.settings.batch_size = batch_size
        self.env = self._wrap(env)
        own = self.env
        self._spaces = spaces or PolicySpaces(own.observation_space, own.env_action_space, own.action_mask)
        self.seed = seed
        self.device = next(iter(policy.parameters())).device
        self.processes = processes or Processes()
        self.processes.open(self.device)
        # No two environments of a run start alike, nor do those of two runs with other seeds.
        self._env_seed = training_seed(seed) + self.processes.rank * self.env.num_envs
        if self.processes.count > 1:
            algorithm.share(self.processes)
        self.num_timesteps = 0
        self.best_reward = -math.inf
        self.last_evaluation: dict[str, Any] = {}  # what it found; empty in all processes but the first
        self._evaluated_at = -1  # steps
        self._owes_evaluation = False  # the run was saved for one, and ended before it was complete
        self._stop: Callable[[], bool] = never
        name = f"{algorithm.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        self.run_dir = Path(output_dir) if output_dir is not None else output_base() / name
        self.logging_config = logging_config or LoggingConfig()
        self._run_config = run_config
        self._on_start = on_start
        self._fresh_policy = fresh_policy
        self._loaded = False
        self._eval_env = eval_env if eval_env is not None else partial(make_another, env)
        self._own_eval_env: VectorEnv | None = None
        self._video_env = video_env or partial(make_another, env, render_mode="rgb_array")
        self._log: RunLogger | None = None
        self._log_state: dict[str, Any] | None = None
        self.early_records: list[logging.LogRecord] = []  # logged while it was built, for the run's log file
        self._random_state: dict[str, Any] | None = None
        self._last_metrics: dict[str, float] = {}
        self._most_updates: int | None = None
        algorithm.check_policy(fresh_policy)
        self._watch = RangeWatch(ON_POLICY_RANGES if algorithm.experience.on_policy else {}, "step")
        self._whole = acting
        self._take_weights()
        planned = math.ceil(self.settings.total_timesteps / self._num_envs) * self.env.num_envs
        self.collection = make_collection(
            self.env, self.acting, algorithm, self.settings, self._env_seed, fresh_policy, planned, timeout
        )
        self.curriculum = None if curriculum is None else Curriculum(curriculum, self.env, self.collection.paused)
        # Workers and a background collector compute beside the update; else they wait while it runs.
        reserved = self.env.num_workers + 1 if self.settings.buffer_type == "vla" else 0
        self.threads = threads_for(threads, policy, algorithm.settings.batch_size, reserved, self.processes.cores)

    @property
    def acting(self) -> Policy:
        """The policy that acts: the one that learns, or its copy with whole weights where those are shared out."""
        return self.policy if self._whole is None else self._whole.policy

    @property
    def global_step(self) -> int:
        """Env steps trained on so far."""
        return self.num_timesteps

    def train(self, total_timesteps: int | None = None, evaluates_last: bool = False) -> dict[str, Any]:
        """Train until `total_timesteps` env steps in all, and return a summary.

        A signal (Ctrl-C, SIGTERM, SIGHUP, SIGUSR1) stops between two steps, of an evaluation too; the run is saved, and
        so it is when it fails. `evaluates_last`: evaluate when all steps are done, also between two periodic
        evaluations, so that the end can be the best.
        """
        total = self._total(total_timesteps)
        count = self.processes.count
        if self.algorithm.version == 0:
            self.collection.check_length(total // count, max(total, self._total(None)) // count)
        self._most_updates = self.settings.iterations if total_timesteps is None else None
        self._stop = stop = StopSignal()
        started = time.monotonic()
        in_bfloat16 = getattr(self.algorithm.settings, "precision", None) == "bf16"  # the critics too: oneDNN's
        threads = self.threads.applied(is_small(self.policy) and not in_bfloat16)
        with stop, threads, self._folder(), self._logging(total) as run_log:
            self._log = run_log
            try:
                self._start(total)
                is_given = not self._fresh_policy and not self.num_timesteps and not self._loaded
                if self.settings.eval_freq and (is_given or self.processes.share(self._owes_evaluation)):
                    self._save_and_evaluate(run_log)  # what it could do before
                self._loop(total, stop, run_log)
                self.collection.close()
                self._record_episodes(run_log)
                if evaluates_last and self._evaluated_at != self.num_timesteps and not self._stops(stop):
                    self._save_and_evaluate(run_log)
                elif self._unsaved():
                    self._save_and_prune()
            except BaseException as error:
                self._save_after_failure(error)
                raise
            finally:
                self.collection.close()
                self._log_state = run_log.state_dict()
                self._log, self._stop = None, never
            summary = self._summary(run_log, time.monotonic() - started)
            if stop():
                log.warning("stopped by %s at %d steps", stop.received.name, self.num_timesteps)  # type: ignore[union-attr]
        stop.reraise()
        return summary

    def _loop(self, total: int, stop: StopSignal, run_log: RunLogger) -> None:
        """Collect, train, publish, repeat."""
        while self.num_timesteps < total and self.algorithm.version != self._most_updates and not self._stops(stop):
            self.threads.begin()
            steps = self.collection.in_update or self._rollout_steps(total)
            if not self.collection.in_update and not self.collection.gather(steps, self._ticking(stop, run_log)):
                break
            self.algorithm.progress = self._progress(total)
            self._free_weights()
            # Several processes stop together, between two updates.
            metrics = self.collection.update(self.algorithm, steps, stop if self.processes.count == 1 else never)
            self._take_weights()
            if metrics is None:
                break
            previous = self.num_timesteps
            self.num_timesteps += self._steps_of_all(self.collection.collector.take_step_count(steps))
            self.threads.tick(self.num_timesteps - previous)
            if self._most_updates is not None:  # episodes and chunks may end early: the total was a bound
                run_log.expect(round(self.num_timesteps / self.algorithm.version * self._most_updates))
            self._after_update(previous, metrics, run_log)
            self.collection.publish(self.algorithm.version)

    def _take_weights(self) -> None:
        """Give the acting copy, where there is one, the weights of now: from one update to the next it is whole."""
        if self._whole is not None:
            self._whole.take()

    def _free_weights(self) -> None:
        """Its memory is the update's, unless a collector goes on acting with it beside."""
        if self._whole is not None and self.settings.buffer_type == "standard" and not isinstance(self.env, ClusterEnv):
            self._whole.free()

    def _stops(self, stop: StopSignal) -> bool:
        """Whether the run is to end here, in all processes or in none."""
        return bool(self.processes.largest(float(stop()), self.device))

    def _steps_of_all(self, count: int) -> int:
        """Env steps of all processes together."""
        return count if self.processes.count == 1 else round(self.processes.total(count, self.device))

    def evaluate(self, num_episodes: int | None = None, video: Path | None = None) -> dict[str, Any]:
        """Mean and deviation of the return over whole episodes (`eval_deterministic`), in its own environment."""
        seed = self.seed + EVALUATION_SEED
        count = self.settings.eval_episodes if num_episodes is None else num_episodes
        # A collector at work beside this draws from the same generators, which then cannot be set back.
        beside = self.settings.buffer_type == "vla" and self.settings.max_staleness > 0
        deterministic = self.settings.eval_deterministic
        with self._watched(count) as watch, contextlib.nullcontext() if beside else separate_random_state(seed):
            results = evaluate_policy(
                self._player(), self._evaluation_env(), count, seed, deterministic=deterministic, watch=watch
            )
            if video is not None:
                filmed = film_episodes(self.acting, self._video_env(), video, 1, seed, deterministic, watch)
                results["video"] = str(filmed)
        return results

    def _watched(self, num_episodes: int) -> contextlib.AbstractContextManager[Callable[[int], None] | None]:
        """While the run trains: shows how far an evaluation is, and ends it when the run is to stop."""
        return contextlib.nullcontext() if self._log is None else self._log.evaluation(num_episodes, self._stop)

    def _player(self) -> Policy:
        """The policy that evaluations play with; one of small matrices acts three times as quickly on the CPU."""
        if self.device.type == "cpu" or not is_small(self.acting):
            return self.acting
        return frozen_copy(self.acting).cpu()

    def save(self, path: str | Path | None = None) -> Path:
        """Write a checkpoint into the run folder, or its content into `path`."""
        if not self._weights_are_finite():
            raise RunError(
                f"the policy's weights are no longer finite after {self.num_timesteps} steps, so nothing was saved: "
                "lower learning_rate; any checkpoint saved before is good"
            )
        with self.collection.paused():
            collector = self.collection.state_dict()
            if collector["env"] is None and collector["started"]:
                return self._write(*self.collection.unknown_state(), path)
            return self._write(collector, self.collection.buffer.state_dict(), path)

    def load(self, path: str | Path) -> None:
        """Go on from a checkpoint (or the latest of a run folder): weights, optimizer, environments, random state."""
        folder = checkpoint.find_checkpoint(path)
        state = checkpoint.load_training_state(folder)
        missing = [name for name in STATE_KEYS if name not in state]
        if missing:
            raise InputError(
                f"{folder}: its training state lacks {', '.join(missing)}; this version cannot go on from it"
            )
        if state["algorithm_name"] != self.algorithm.name:
            raise InputError(f"{folder}: a checkpoint of {state['algorithm_name']}, not of {self.algorithm.name}")
        state = self._own_part(folder, state)
        if (turned := _channels_first(state["observation_space"])) != state["observation_space"]:
            state |= {"observation_space": turned, "buffer": _turned(state["buffer"])}
        for kind in ("observation_space", "action_space"):
            if state[kind] != str(getattr(self.env, kind)):
                raise InputError(f"{folder}: its {kind} is {state[kind]}, this environment's {getattr(self.env, kind)}")
        saved = state["collector"]
        if saved["env"] is not None and len(saved["env"]) != self.env.num_envs:
            raise InputError(
                f"{folder}: saved with {len(saved['env'])} environments, now {self.env.num_envs}; use the same num_envs"
            )
        checkpoint.load_weights(self.policy, checkpoint.load_part(folder, checkpoint.MODEL), folder / checkpoint.MODEL)
        self.algorithm.load_state_dict(state["algorithm"])
        self.num_timesteps = state["num_timesteps"]
        self.threads.load_state_dict(state.get("threads"))
        if folder.parent.resolve() == self.run_dir.resolve():  # another folder has its own best
            self.best_reward = max(state["best_reward"], best_logged(folder.parent, self.num_timesteps))
        is_logged = any(
            line["step"] == self.num_timesteps for line in logged_evaluations(folder.parent, self.num_timesteps)
        )
        self._owes_evaluation = state.get("owes_evaluation", False) and not is_logged
        reason = self.env.state_obstacle() or "it was not saved: a failure, or a collector beside training"
        if _env_settings(state.get("config")) != _env_settings(self._run_config):
            saved, reason = {**saved, **UNKNOWN_COLLECTOR}, "the environment's settings changed"
        same_rollout = state.get("rollout_steps") == self.settings.buffer_size
        if not self.collection.load_state_dict(saved, state["buffer"], same_rollout):
            log.warning("resumed with new episodes, unlike an uninterrupted run: no environment state (%s)", reason)
        counts = state.get("in_update", [])
        self.collection.in_update = len(counts)
        if len(self.collection.collector.step_counts) < len(counts):  # forgotten with the environments' state
            self.collection.collector.step_counts.extendleft(reversed(counts))
        if self.curriculum is not None and state.get("curriculum") is not None:
            self.curriculum.load_state_dict(state["curriculum"])
        self._log_state = state["log"]
        self._random_state = state["random"]
        if self._random_state is None:  # of a process that the saved run did not have
            seed_everything(process_seed(self.seed + self.algorithm.version, self.processes.rank))
        self._loaded = True
        self._take_weights()

    def close(self) -> None:
        """Free the environments."""
        self.collection.close()
        self.processes.close()
        for env in {id(env): env for env in (self.env, self._own_eval_env) if env is not None}.values():
            env.close()

    # -- the parts of the loop -----------------------------------------------------------------------------------------

    def _total(self, total_timesteps: int | None) -> int:
        if total_timesteps is not None:
            return TrainerConfig(total_timesteps=total_timesteps).total_timesteps
        if self.settings.iterations is not None:  # an upper bound: chunks and episodes may end early
            most = self.settings.buffer_size * self._num_envs * self.env.chunk_length * self.collection.max_rounds
            return self.settings.iterations * most
        return self.settings.total_timesteps

    @property
    def _num_envs(self) -> int:
        """Environments of all processes."""
        return self.env.num_envs * self.processes.count

    def _progress(self, total: int) -> float:
        """How much of training is done, 0 to 1."""
        return self.num_timesteps / total if self._most_updates is None else self.algorithm.version / self._most_updates

    def _folder(self) -> contextlib.AbstractContextManager[None]:
        """The run folder, held by the first process."""
        return checkpoint.folder_lock(self.run_dir) if self.processes.is_first else contextlib.nullcontext()

    def _logging(self, total: int) -> RunLogger:
        if not self.processes.is_first:
            return SilentLogger()  # type: ignore[return-value]
        checkpoint.clean_temporary(self.run_dir)
        if self._on_start is not None and self.num_timesteps < total:
            self._on_start()
        if self.num_timesteps == 0 and not self._loaded and checkpoint.list_checkpoints(self.run_dir):
            raise InputError(
                f"output_dir: {self.run_dir} already holds a run; load() it to go on, or use another folder"
            )
        # Of environments that began together the failures often end last: a mean over the last few would be theirs.
        window = max(WINDOW, self.env.num_envs)
        run_log = RunLogger(
            self.run_dir,
            self.logging_config,
            total,
            self.num_timesteps,
            self._run_config,
            window=window,
            write_start=self._on_start,
            early_records=self.early_records,
        )
        if self._log_state is not None:
            run_log.load_state_dict(self._log_state)
        return run_log

    def _start(self, total: int) -> None:
        if self.num_timesteps >= total:
            log.warning("nothing to do: the run has %d of %d steps", self.num_timesteps, total)
        if self.settings.eval_freq:
            self._evaluation_env()  # what keeps it from being made is better known before training than after
        if self.settings.video_freq:
            close_env(self._video_env())
        obstacle = self.env.state_obstacle()
        if obstacle is not None and self.num_timesteps == 0:
            log.warning("checkpoints of this run hold no environment state: %s", obstacle)
        if self.settings.buffer_type == "vla" and self.settings.max_staleness > 0:
            log.info("VLA mode collects beside training: a resumed run continues, but not bit for bit")
        if self._random_state is not None:
            set_random_state(self._random_state)
            self._random_state = None
        elif self.algorithm.version == 0:
            # Whatever the process drew before does not matter.
            seed_everything(process_seed(self.seed, self.processes.rank))
        self.processes.equalize(self.policy)
        for part in vars(self.algorithm).values():
            if isinstance(part, torch.nn.Module) and part is not self.policy:
                self.processes.equalize(part)
        self._take_weights()
        self.collection.collector.set_version(self.algorithm.version)
        # With chunks the number of env steps in a rollout is known only afterwards.
        exact = self.env.chunk_length == 1
        remaining = math.ceil((total - self.num_timesteps) / self._num_envs) if exact else None
        held = self.collection.pending
        whole = held % self.settings.buffer_size == 0  # its last step is a segment's end, with its bootstrap
        if self.collection.in_update:
            remaining = None if remaining is None else max(0, remaining - self.collection.in_update)
        elif held and remaining is not None and (remaining < held or (remaining == held and not whole)):
            count = self.collection.drop()
            if count:
                log.warning("%d collected steps are dropped: total_timesteps ends before their rollout does", count)
        if self.curriculum is not None:
            self.curriculum.start()
        self.collection.start(self.settings.buffer_size, remaining)

    def _rollout_steps(self, total: int) -> int:
        """Vector steps of the next rollout: a whole one, or what is left to `total` (chunks may make it several)."""
        if self.env.chunk_length > 1 and self.settings.buffer_type == "vla":  # the collector does not know its end
            return self.settings.buffer_size
        most = self._num_envs * self.env.chunk_length
        return min(self.settings.buffer_size, math.ceil((total - self.num_timesteps) / most))

    def _ticking(self, stop: StopSignal, run_log: RunLogger) -> Callable[[], bool]:
        """The stop question that a collection asks at every step, which also moves the progress bar."""
        collection, per_step = self.collection, self._num_envs * self.env.chunk_length

        def tick() -> bool:
            run_log.progress(self.num_timesteps + collection.steps_under_way(per_step))
            return stop() and self.processes.count == 1  # several stop together, between two updates

        return tick

    def _after_update(self, previous: int, metrics: Metrics, run_log: RunLogger) -> None:
        """Log, evaluate and save what is due; steps come in thousands, so crossings count, not multiples."""
        step = self.num_timesteps
        logs = crossed(previous, step, self.settings.log_freq)
        episodes = self._record_episodes(run_log) if logs or self.processes.count == 1 else []
        if self.curriculum is not None:
            self.curriculum.update(step, episodes)
        if logs:
            lost = self.collection.collector.num_lost_episodes
            run_log.log_metrics(step, {**metrics, "rollout/lost_episodes": lost} if lost else metrics)
            if self.processes.is_first:
                self._watch.check(step, metrics)
        evaluates, saves = (
            crossed(previous, step, every) for every in (self.settings.eval_freq, self.settings.save_freq)
        )
        if evaluates or saves:
            self._last_metrics = {name: float(value) for name, value in metrics.items()}
        if evaluates:
            self._save_and_evaluate(run_log, filming=crossed(previous, step, self.settings.video_freq))
        elif saves:
            self._save_and_prune()
        run_log.progress(step)

    def _save_and_evaluate(self, run_log: RunLogger, filming: bool = False) -> None:
        """Save, so that nothing of the evaluation can lose what was learned; evaluate while other processes wait."""
        self._owes_evaluation = True  # the checkpoint says so, until the metrics hold the result
        if self._unsaved():
            self.save()
        is_best = False
        if self.processes.is_first:
            with contextlib.suppress(Stopped):
                is_best = self._evaluate_now(run_log, filming)
                self._owes_evaluation = False
        self._evaluated_at, self._owes_evaluation = self.processes.share((self._evaluated_at, self._owes_evaluation))
        if not self.processes.share(self._is_on_disk()):  # the folder was removed during the evaluation
            self.save()
        if self.processes.is_first:
            if is_best:
                checkpoint.mark_best(self.run_dir, self.run_dir / f"checkpoint-{self.num_timesteps}")
            checkpoint.prune_checkpoints(self.run_dir, self.settings.keep_checkpoints, self.num_timesteps)

    def _evaluate_now(self, run_log: RunLogger, filming: bool) -> bool:
        """Evaluate and log it; whether the checkpoint of now is the best, being as good as the best so far."""
        step, best = self.num_timesteps, self.run_dir / checkpoint.BEST
        results = self.evaluate(video=self.run_dir / "videos" / f"step_{step}.mp4" if filming else None)
        self._evaluated_at, self.last_evaluation = step, results
        run_log.log_evaluation(step, results)
        values = (results["mean_reward"], results["std_reward"], results["action_selection"])
        log.info("evaluation at %d steps: mean_reward %.4g ± %.3g (actions: %s)", step, *values)
        # On a tie the later weights, which saw more.
        is_best = results["mean_reward"] >= self.best_reward or not best.exists()
        if is_best:
            self.best_reward = results["mean_reward"]
        return is_best

    def _save_and_prune(self) -> None:
        self.save()
        if self.processes.is_first:
            checkpoint.prune_checkpoints(self.run_dir, self.settings.keep_checkpoints, self.num_timesteps)

    def _record_episodes(self, run_log: RunLogger) -> list[Episode]:
        episodes = [one for part in self.processes.gather(self.collection.collector.take_episodes()) for one in part]
        for episode in episodes:
            run_log.log_episode(self.num_timesteps, episode)
        return episodes

    def _unsaved(self) -> bool:
        """Whether something happened since the latest checkpoint: updates, or steps that wait for one."""
        return bool(self.processes.share(self.collection.pending > 0 or not self._is_on_disk()))

    def _is_on_disk(self) -> bool:
        return (self.run_dir / f"checkpoint-{self._saved_as}").exists()

    @property
    def _saved_as(self) -> int:
        """The number of a checkpoint: env steps, those of an update counted in that was stopped.

        Its weights are no longer those of the checkpoint before it, which may be the best.
        """
        return self.num_timesteps + sum(self.collection.counts_in_update())

    def _summary(self, run_log: RunLogger, seconds: float) -> dict[str, Any]:
        return {
            "run_dir": str(self.run_dir),
            "timesteps": self.num_timesteps,
            "mean_reward": run_log.mean_reward,
            "best_reward": self.best_reward if math.isfinite(self.best_reward) else None,
            "seconds": round(seconds, 3),
        }

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def _save_after_failure(self, error: BaseException) -> None:
        """Keep what was learned since the latest checkpoint; a resumed run then starts new episodes."""
        self.collection.close()
        if not self.processes.is_first:
            return
        saved = (self.run_dir / f"checkpoint-{self.num_timesteps}").exists()  # with its environments: the better one
        if self.algorithm.version == 0 or saved:
            return
        if self._whole is not None:
            log.warning(sharding.NOT_SAVED)
            return
        if not self._weights_are_finite():
            return
        run_log, self._log = self._log, None  # it may be what failed
        try:
            if run_log is not None:
                self._log_state = run_log.state_dict()
                run_log.restore_folder()
            folder = self._write(*self.collection.unknown_state(), None, alone=True)
        except Exception as second:
            log.error("after %s the run could not be saved either: %s", type(error).__name__, second)
        else:
            log.warning("saved %s after the failure", folder)

    def _weights_are_finite(self) -> bool:
        return sharding.are_finite(self.policy, self.processes, self.device)

    def _write(
        self, collector: dict[str, Any], buffer: dict[str, Any], path: str | Path | None, alone: bool = False
    ) -> Path:
        """Write a checkpoint, every process its part of it; `alone`: the others are gone."""
        folder = self.run_dir if path is None else Path(path).parent
        count = 1 if alone else self.processes.count
        algorithm = self.algorithm.state_dict()  # where weights are shared out, all processes give their part of it
        if count > 1:
            folder.mkdir(parents=True, exist_ok=True)
            if not self.processes.is_first:
                own = {name: algorithm[name] for name in OWN_STATE if name in algorithm}
                part = {"collector": collector, "buffer": buffer, "random": get_random_state(), "algorithm": own}
                checkpoint.write_process_part(folder, self.num_timesteps, self.processes.rank, part)
            self.processes.wait()
            if not self.processes.is_first:
                self.processes.wait()
                return folder / (f"checkpoint-{self.num_timesteps}" if path is None else Path(path).name)
        if self._log is not None:
            self._log.flush()
        state = {
            "algorithm_name": self.algorithm.name,
            "algorithm": algorithm,
            "num_timesteps": self.num_timesteps,
            "best_reward": self.best_reward,
            "owes_evaluation": self._owes_evaluation,
            "observation_space": str(self.env.observation_space),
            "action_space": str(self.env.action_space),
            "collector": collector,
            "buffer": buffer,
            "in_update": self.collection.counts_in_update(),
            "log": self._log.state_dict() if self._log is not None else self._log_state or {"window": []},
            "random": get_random_state(),
            "rollout_steps": self.settings.buffer_size,
            "config": self._run_config,
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
            "processes": count,
            "threads": self.threads.state_dict(),
        }
        weights = {name: value.detach().cpu() for name, value in self.acting.state_dict().items()}
        written = checkpoint.save_checkpoint(
            folder,
            self._saved_as,
            weights,
            state,
            self._last_metrics,
            name=None if path is None else Path(path).name,
            write_more=partial(checkpoint.move_process_parts, folder, self.num_timesteps, count),
            spaces=self._spaces,
        )
        if count > 1:
            self.processes.wait()
        return written

    def _own_part(self, folder: Path, state: dict[str, Any]) -> dict[str, Any]:
        """The state with what this process had kept; of a run with another number of processes, what there is.

        The first process always finds its own. A further one without a part begins new episodes, with the replay
        buffer of another.
        """
        saved, rank = state.get("processes", 1), self.processes.rank
        if rank == 0 and saved == self.processes.count:
            return state
        if saved != self.processes.count and self.processes.is_first:
            log.warning(
                "the run had %d processes, now %d: it goes on, but not bit for bit", saved, self.processes.count
            )
        part = checkpoint.load_process_part(folder, rank % saved)
        if rank == 0 or rank < saved:
            return {**state, **(part or {}), "algorithm": {**state["algorithm"], **(part or {}).get("algorithm", {})}}
        part = part or {name: state[name] for name in ("collector", "buffer")}
        collector = {**part["collector"], **UNKNOWN_COLLECTOR}
        return {**state, "collector": collector, "buffer": part["buffer"], "random": None}

    def _wrap(self, env: Any) -> VectorEnv:
        return wrap(env, chunk_length=self.policy.chunk_length, gamma=self.algorithm.settings.gamma)

    # -- evaluation ----------------------------------------------------------------------------------------------------

    def _evaluation_env(self) -> VectorEnv:
        """An environment of its own: the training one is in the middle of a rollout."""
        if self._own_eval_env is None:
            source = self._eval_env
            made = source() if callable(source) and not isinstance(source, gymnasium.Env) else source
            self._own_eval_env = self._wrap(made)
            for kind in ("observation_space", "action_space"):
                if str(getattr(self._own_eval_env, kind)) != str(getattr(self.env, kind)):
                    raise InputError(f"the evaluation environment's {kind} differs from the training environment's")
        return self._own_eval_env


def _env_settings(run_config: dict[str, Any] | None) -> dict[str, Any]:
    """What of a run's settings makes its environments what they are; a saved state belongs to these alone."""
    env = (run_config or {}).get("env", {})
    return {name: env.get(name) or None for name in ENV_SETTINGS}


def _channels_first(space: str) -> str:
    """The text of an observation space of an earlier version, which left images with channels last as they were."""

    def turned(match: re.Match[str]) -> str:
        shape = tuple(int(size) for size in match[1].split(", "))
        if schema.has_channels_last(shape, np.uint8):
            shape = (*shape[:-3], shape[-1], *shape[-3:-1])
        return f"{shape}, uint8"

    return re.sub(r"\((\d+(?:, \d+){2,3})\), uint8", turned, space)


def _turned(saved: Any) -> Any:
    """The buffer of such a checkpoint, its images with the channels first."""
    if isinstance(saved, dict):
        return {name: _turned(part) for name, part in saved.items()}
    if isinstance(saved, list):
        return [_turned(part) for part in saved]
    if isinstance(saved, torch.Tensor) and schema.has_channels_last(tuple(saved.shape[-3:]), saved.numpy().dtype):
        return saved.movedim(-1, -3).contiguous()
    return saved
