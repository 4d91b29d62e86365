"""The online loop: collect a rollout, update, publish the weights. One for all algorithms.

Built by `deft.training.run` from a config, or by hand: `Trainer(policy, env, algorithm).train(100_000)`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import gymnasium

from deft.algorithms.algorithm import Algorithm
from deft.algorithms.experience import Labels, Replay
from deft.config.output_base import output_base
from deft.config.settings import CurriculumConfig, TrainerConfig
from deft.envs.host import on_host
from deft.envs.make import make_another, wrap
from deft.envs.vector import Episode, VectorEnv
from deft.envs.wrappers import close_env
from deft.errors import InputError, fits_memory
from deft.models.policy import Policy
from deft.models.targets import frozen_copy
from deft.runs import checkpoint
from deft.runs.compute import is_small
from deft.runs.logging import WINDOW
from deft.runs.metric_ranges import ON_POLICY_RANGES, RangeWatch
from deft.runs.operator import Operator
from deft.runs.policy_spaces import PolicySpaces
from deft.runs.random_state import EVALUATION_SEED, training_seed
from deft.training.cluster.pool import ClusterEnv
from deft.training.collection import UNKNOWN_COLLECTOR
from deft.training.curriculum import Curriculum
from deft.training.evaluator import Evaluator
from deft.training.experience import make_collection, steps_per_update
from deft.training.lifecycle import RunSpec
from deft.training.loop import Intervals, Metrics
from deft.training.policy_loop import PolicyLoop
from deft.training.takeover import Takeover, action_names

log = logging.getLogger(__name__)
# Of an algorithm's state, what each process has for itself: its random numbers, and what it keeps of its rollouts.
OWN_STATE = ("generator", "running_return", "action_critic", "value_history")
SHORT_CHUNKS = 8  # memory is reserved for one more chunk in so many
# The settings of `env` that define what the environments are.
ENV_SETTINGS = ("id", "kwargs", "max_episode_steps", "reward_weights", "rename_streams")
Env: TypeAlias = gymnasium.Env | list[gymnasium.Env] | gymnasium.vector.VectorEnv | VectorEnv
EnvSource: TypeAlias = Callable[[], VectorEnv | gymnasium.Env] | VectorEnv | gymnasium.Env | None


@dataclasses.dataclass
class OnlineSpec(RunSpec):
    """What an online run has beside policy, environment and algorithm.

    A policy that is not a `fresh_policy` was trained before: it is evaluated before training, and takes no random
    actions at the start. `timeout`: seconds after which an environment that does not answer is considered hung.
    """

    video_env: Callable[[], gymnasium.Env] | None = None
    timeout: float = 60.0
    fresh_policy: bool = True
    curriculum: CurriculumConfig | None = None


class Trainer(PolicyLoop):
    """Trains one policy by one algorithm in one environment.

    `env` is a Gymnasium environment, a list of them, or a vector environment. Keywords beyond the named ones are fields
    of `OnlineSpec` (`output_dir`, `seed`, `logging_config`, …) and of `TrainerConfig` (`eval_freq`, `save_freq`, …).
    """

    unit: ClassVar[str] = "steps"
    state_keys = (
        "algorithm_name", "algorithm", "num_timesteps", "observation_space", "action_space", "collector", "buffer",
        "log", "random",
    )  # fmt: skip

    def __init__(
        self,
        policy: Policy,
        env: Env,
        algorithm: Algorithm,
        rollout_steps: int | None = None,
        buffer_type: str = "standard",
        batch_size: int | None = None,
        *,
        eval_env: EnvSource = None,
        spec: OnlineSpec | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(algorithm, Algorithm):
            raise InputError(f"algorithm: {algorithm!r} is not an Algorithm; create one, such as PPO(policy)")
        if algorithm.policy is not policy:
            raise InputError("algorithm: trains another policy object than the one given; pass algorithm.policy")
        self.spec = spec = OnlineSpec.take(spec, settings)
        if rollout_steps is not None:
            settings["rollout_steps"] = rollout_steps
        self.settings = TrainerConfig(buffer_type=buffer_type, **settings)  # type: ignore[arg-type]
        self.settings.rollout_steps = steps_per_update(algorithm, self.settings.rollout_steps)
        if batch_size is not None:
            algorithm.settings.batch_size = batch_size
        algorithm.check_policy(spec.fresh_policy)
        wrap_env = partial(wrap, chunk_length=policy.chunk_length, gamma=algorithm.settings.gamma)
        self.env = own = wrap(env) if algorithm.steps_singly else wrap_env(env)
        spec.spaces = spec.spaces or PolicySpaces(own.observation_space, own.env_action_space, own.action_mask)
        name = f"{algorithm.name}-{datetime.now():%Y%m%d-%H%M%S-%f}"
        directory = Path(spec.output_dir) if spec.output_dir is not None else output_base() / name
        # Workers and a background collector compute during the update; otherwise they wait for it.
        reserved = own.num_workers + 1 if self.settings.buffer_type == "vla" else 0
        super().__init__(policy, algorithm, spec, directory, reserved)
        self.num_timesteps = 0
        self._most_updates: int | None = None
        self._video_env = spec.video_env or partial(make_another, env, render_mode="rgb_array")
        source = eval_env if eval_env is not None else partial(make_another, env)
        self.evaluator = Evaluator(
            lambda: _like(on_host(wrap_env(_made(source))), own),
            spec.seed + EVALUATION_SEED,
            deterministic=self.settings.eval_deterministic,
            video_env=self._video_env,
            separates_random_state=not self._collects_during_updates,
        )
        self._watch = RangeWatch(ON_POLICY_RANGES if algorithm.experience.on_policy else {}, "step")
        self.gather_weights()
        # No two environments of a run start alike, nor do those of two runs with other seeds.
        env_seed = training_seed(spec.seed) + self.processes.rank * own.num_envs
        planned = math.ceil(self.settings.total_timesteps / (self._num_envs * own.chunk_length)) * own.num_envs
        if own.chunk_length > 1:  # the last chunk of an episode may be shorter: room for more of them
            planned += planned // SHORT_CHUNKS + own.num_envs
        self.collection = make_collection(
            own, self.acting, algorithm, self.settings, env_seed, spec.fresh_policy, planned, spec.timeout
        )
        experience = algorithm.experience
        if isinstance(experience, Replay | Labels) and experience.takeover:
            self._offer_takeover(experience.takeover_rate)
        self.curriculum = None
        if spec.curriculum is not None:
            self.curriculum = Curriculum(spec.curriculum, own, self.collection.paused)

    @property
    def global_step(self) -> int:
        """Environment steps trained on so far."""
        return self.num_timesteps

    @property
    def num_updates(self) -> int:  # type: ignore[override]
        """Updates of the policy so far."""
        return self.algorithm.version

    @property
    def intervals(self) -> Intervals:
        """As in `TrainerConfig`."""
        own = self.settings
        return Intervals(own.log_freq, own.eval_freq, own.save_freq, own.keep_checkpoints, own.video_freq)

    @property
    def progress(self) -> float:
        """The fraction of training that is done, 0 to 1: by steps, or by updates where `iterations` is given."""
        return super().progress if self._most_updates is None else self.algorithm.version / self._most_updates

    @property
    def is_over(self) -> bool:
        """Whether all steps, or all `iterations`, are done."""
        return super().is_over or self.algorithm.version == self._most_updates

    @property
    def window(self) -> int:
        """Episodes that means are over; of environments that start together failures often end last."""
        return max(WINDOW, self.env.num_envs)

    def train(self, total_timesteps: int | None = None, evaluates_last: bool = False) -> dict[str, Any]:
        """Train until `total_timesteps` environment steps in all, and return a summary; see `Run.execute`."""
        total, count = self._total(total_timesteps), self.processes.count
        if self.algorithm.version == 0:
            planned = max(total, self._total(None)) // count
            self.collection.check_length(total // count, planned)
            rounds = math.ceil(planned / (self.settings.rollout_steps * self.env.num_envs * self.env.chunk_length))
            self.algorithm.check_updates(self.collection.num_updates(rounds, planned))
        self._most_updates = self.settings.iterations if total_timesteps is None else None
        return self.run.execute(total, evaluates_last)

    def _total(self, total_timesteps: int | None) -> int:
        if total_timesteps is not None:
            return TrainerConfig(total_timesteps=total_timesteps).total_timesteps
        if self.settings.iterations is not None:  # an upper bound: chunks and episodes may end early
            most = self.settings.rollout_steps * self._num_envs * self.env.chunk_length * self.collection.max_rounds
            return self.settings.iterations * most
        return self.settings.total_timesteps

    @property
    def _num_envs(self) -> int:
        """Environments of all processes."""
        return self.env.num_envs * self.processes.count

    def _offer_takeover(self, rate: float) -> None:
        """Let a person act in the environments of this process, in the live view."""
        if not self.spec.logging_config.view:
            raise InputError("takeover: a person takes over in the live view; give --view too")
        if isinstance(self.env, ClusterEnv) or self.processes.count > 1:
            raise InputError("takeover: a person acts in environments of one process; use one, and collectors 'here'")
        collector = self.collection.collector
        names = action_names(collector.env)
        operator = Operator(self.run.directory, names, collector.env.num_envs, rate)
        collector.takeover = Takeover(collector.env, operator)

    # -- an iteration --------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Create the evaluation environment, so that what prevents it is known before training."""
        if self.is_evaluated:
            self.evaluator.env()
        if self.settings.video_freq:
            close_env(self._video_env())
        obstacle = self.env.state_obstacle()
        if obstacle is not None and self.num_timesteps == 0:
            log.warning("checkpoints of this run hold no environment state: %s", obstacle)
        if self._collects_during_updates:
            log.info("VLA mode collects during training: a resumed run continues, but not bit for bit")

    @property
    def _collects_during_updates(self) -> bool:
        return self.settings.buffer_type == "vla" and self.settings.max_staleness > 0

    @property
    def memory_advice(self) -> str:
        """Name the settings that an update's memory depends on, with their values."""
        return f"{super().memory_advice}, or fewer environments than num_envs {self._num_envs}"

    def begin(self) -> None:
        """Start to collect."""
        self.policy.set_env_steps(self.num_timesteps)
        self.gather_weights()
        self.collection.collector.set_version(self.algorithm.version)
        # With chunks the number of environment steps in a rollout is known only afterwards.
        exact = self.env.chunk_length == 1
        remaining = math.ceil((self.run.total - self.num_timesteps) / self._num_envs) if exact else None
        held = self.collection.pending
        whole = held % self.settings.rollout_steps == 0  # its last step is a segment's end, with its bootstrap
        if self.collection.in_update:
            remaining = None if remaining is None else max(0, remaining - self.collection.in_update)
        elif held and remaining is not None and (remaining < held or (remaining == held and not whole)):
            count = self.collection.drop()
            if count:
                log.warning("%d collected steps are dropped: total_timesteps ends before their rollout does", count)
        if self.curriculum is not None:
            self.curriculum.start()
        self.collection.start(self.settings.rollout_steps, remaining)

    def step(self) -> Metrics | None:
        """Collect, update, and count the steps."""
        collection = self.collection
        steps = collection.in_update or self._rollout_steps()
        if not collection.in_update:
            advice = f"use fewer environments than num_envs {self._num_envs}, or {collection.memory_advice}"
            with fits_memory(advice):
                if not collection.gather(steps, self._show_progress):
                    return None
        self.algorithm.progress = self.progress
        if self.settings.buffer_type != "vla" and not isinstance(self.env, ClusterEnv):  # which act meanwhile
            self.free_weights()
        metrics = collection.update(self.algorithm, steps, self.stop_requested)
        self.gather_weights()
        if metrics is None:
            return None
        count = collection.collector.take_step_count(steps)
        self.num_timesteps += count if self.processes.count == 1 else round(self.processes.total(count, self.device))
        self.policy.set_env_steps(self.num_timesteps)
        if self._most_updates is not None and self.run.log is not None:  # the total was an upper bound
            self.run.log.expect(round(self.num_timesteps / self.algorithm.version * self._most_updates))
        return metrics

    def finish_step(self, previous: int, metrics: Metrics) -> None:
        """Log, evaluate and save what is due, then let the collector act with the new weights."""
        self.run.finish_step(previous, metrics)
        self.collection.publish(self.algorithm.version)

    def latest_observation(self) -> Any:
        """The observation that the policy acts on next; None before the first, or if other machines have it."""
        return self.collection.collector.observation

    def _rollout_steps(self) -> int:
        """Vector steps of the next rollout: a whole one, or what is left to the total (chunks may make it several)."""
        if self.env.chunk_length > 1 and self.settings.buffer_type == "vla":  # the collector does not know its end
            return self.settings.rollout_steps
        most = self._num_envs * self.env.chunk_length
        return min(self.settings.rollout_steps, math.ceil((self.run.total - self.num_timesteps) / most))

    def _show_progress(self) -> bool:
        """Called by the collection at every step: show it, and return whether to stop."""
        if self.run.log is not None:
            per_step = self._num_envs * self.env.chunk_length
            self.run.log.progress(self.num_timesteps + self.collection.steps_under_way(per_step))
        return self.stop_requested()

    def further_metrics(self, previous: int, logs: bool) -> dict[str, float]:
        """Record the episodes that ended, and advance the curriculum."""
        episodes = self._record_episodes() if logs or self.processes.count == 1 else []
        if self.curriculum is not None:
            self.curriculum.update(self.num_timesteps, episodes)
        return {}

    def logged(self, metrics: Metrics) -> Metrics:
        """The metrics, with the number of episodes that were lost with a worker."""
        lost = self.collection.collector.num_lost_episodes
        return {**metrics, "rollout/lost_episodes": lost} if lost else metrics

    def check_metrics(self, metrics: Metrics) -> None:
        """Warn of metrics outside their usual range."""
        if self.processes.is_first:
            self._watch.check(self.num_timesteps, metrics)

    def _record_episodes(self) -> list[Episode]:
        episodes = [one for part in self.processes.gather(self.collection.collector.take_episodes()) for one in part]
        if self.run.log is not None:
            for episode in episodes:
                self.run.log.log_episode(self.num_timesteps, episode)
        return episodes

    def halt(self) -> None:
        """Stop collecting."""
        self.collection.close()

    def end(self) -> None:
        """Stop collecting, log the last episodes, and write what the run keeps of its data."""
        self.halt()
        self._record_episodes()
        if self.processes.is_first:
            self.collection.export(self.run_dir)

    def counts(self) -> dict[str, Any]:
        """Return the steps, and the mean return of the latest training episodes."""
        mean_reward = None if self.run.log is None else self.run.log.mean_reward
        return {"timesteps": self.num_timesteps, "mean_reward": mean_reward}

    # -- evaluation ----------------------------------------------------------------------------------------------------

    @property
    def is_evaluated(self) -> bool:
        """Whether `eval_freq` or `video_freq` is not 0: a video is recorded with an evaluation."""
        return self.settings.eval_freq > 0 or self.settings.video_freq > 0

    @property
    def evaluates_first(self) -> bool:
        """Whether this is the start of a run whose policy was trained before."""
        return not self.spec.fresh_policy and not self.num_timesteps and not self.run.is_loaded

    def start_evaluation(self, video: Path | None) -> list[tuple[int, dict[str, Any]]]:
        """Evaluate now."""
        return [(self.num_timesteps, self.evaluate(video=video))]

    def evaluate(self, num_episodes: int | None = None, video: Path | None = None) -> dict[str, Any]:
        """Return mean and deviation of the return over whole episodes (`eval_deterministic`), in an own environment."""
        count = self.settings.eval_episodes if num_episodes is None else num_episodes
        policy = self.acting
        if self.device.type != "cpu" and is_small(policy):  # one of small matrices acts three times as fast on the CPU
            policy = frozen_copy(policy).cpu()
        with self.run.evaluation(count) as watch:
            return self.evaluator.evaluate([policy], count, watch, video)[0]

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    @property
    def checkpoint_step(self) -> int:
        """The number of a checkpoint: environment steps, with those of an update that was stopped.

        Its weights are no longer those of the checkpoint before it, which may be the best.
        """
        return self.num_timesteps + sum(self.collection.counts_in_update())

    @property
    def is_midway(self) -> bool:
        """Whether collected steps wait for an update."""
        return self.collection.pending > 0

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Hold a collector that runs in the background."""
        return self.collection.paused()

    def state_dict(self, after_failure: bool = False) -> dict[str, Any]:
        """Return algorithm, environments, buffer and counters; where the environments' state is unknown, without it."""
        collection = self.collection
        collector = UNKNOWN_COLLECTOR if after_failure else collection.state_dict()
        if collector["env"] is None and collector["started"]:
            collector, buffer = collection.unknown_state()
        else:
            buffer = collection.buffer.state_dict()
        return {
            "algorithm_name": self.algorithm.name,
            "algorithm": self.algorithm.state_dict(),
            "num_timesteps": self.num_timesteps,
            "observation_space": str(self.env.observation_space),
            "action_space": str(self.env.action_space),
            "collector": collector,
            "buffer": buffer,
            "in_update": collection.counts_in_update(),
            "rollout_steps": self.settings.rollout_steps,
            "curriculum": None if self.curriculum is None else self.curriculum.state_dict(),
        }

    def process_state(self, state: dict[str, Any]) -> dict[str, Any]:
        """Environments and buffer of this process, and its part of the algorithm's state."""
        own = {name: state["algorithm"][name] for name in OWN_STATE if name in state["algorithm"]}
        return {"collector": state["collector"], "buffer": state["buffer"], "algorithm": own}

    def own_state(self, state: dict[str, Any], part: dict[str, Any], saved: int) -> dict[str, Any]:
        """Return the state of this process; one that the saved run did not have starts new episodes.

        Its replay buffer is that of another process.
        """
        if self.processes.rank < saved:
            return {**state, **part, "algorithm": {**state["algorithm"], **part.get("algorithm", {})}}
        part = part or state
        collector = {**part["collector"], **UNKNOWN_COLLECTOR}
        return {**state, "collector": collector, "buffer": part["buffer"], "random": None}

    def load_state_dict(self, state: dict[str, Any], folder: Path) -> None:
        """Load weights, algorithm, environments, buffer and counters."""
        self.check_state(state, folder)
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
        self._load_collection(state)
        if self.curriculum is not None and state.get("curriculum") is not None:
            self.curriculum.load_state_dict(state["curriculum"])
        self.gather_weights()

    def _load_collection(self, state: dict[str, Any]) -> None:
        collection, saved = self.collection, state["collector"]
        reason = self.env.state_obstacle() or "it was not saved: a failure, or a collector in the background"
        if _env_settings(state.get("config")) != _env_settings(self.spec.config):
            saved, reason = {**saved, **UNKNOWN_COLLECTOR}, "the environment's settings changed"
        same_rollout = state.get("rollout_steps") == self.settings.rollout_steps
        if not collection.load_state_dict(saved, state["buffer"], same_rollout):
            log.warning("resumed with new episodes, unlike an uninterrupted run: no environment state (%s)", reason)
        counts = state.get("in_update", [])
        collection.in_update = len(counts)
        if len(collection.collector.step_counts) < len(counts):  # not known without the environments' state
            collection.collector.step_counts.extendleft(reversed(counts))

    def close(self) -> None:
        """Free the environments, and destroy the process group."""
        self.collection.close()
        super().close()
        self.evaluator.close()
        self.env.close()


def _made(source: EnvSource) -> Any:
    """Return the environment that a user gave for evaluations, or what the function that a user gave creates."""
    return source() if callable(source) and not isinstance(source, gymnasium.Env) else source


def _like(env: VectorEnv, training: VectorEnv) -> VectorEnv:
    """Return an evaluation environment; an error if its spaces are not those of the training environment."""
    kinds = ["observation_space", *(["action_space"] if env.chunk_length == training.chunk_length else [])]
    for kind in kinds:
        if str(getattr(env, kind)) != str(getattr(training, kind)):
            raise InputError(f"eval_env: its {kind} differs from the training environment's; use the same")
    return env


def _env_settings(run_config: dict[str, Any] | None) -> dict[str, Any]:
    """The settings of a run that define its environments; a saved environment state belongs to these alone."""
    env = (run_config or {}).get("env", {})
    return {name: env.get(name) or None for name in ENV_SETTINGS}
