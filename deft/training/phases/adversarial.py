"""Phase 3, `deft train adversarial`: an explorer looks for what the world model cannot predict, which then learns it.

An iteration: the explorer acts for whole episodes and is paid by the world model's error (`game`), PPO trains it once,
and the world model trains on `wm_updates` batches: what was just found, older episodes, and random ones. The world
model is the run's policy, so that a checkpoint is one of a teacher; the explorer is in the folder `explorer` beside it.
"""

from __future__ import annotations

import copy
import logging
import math
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from deft import schema
from deft.config.f1_settings import ExplorerSettings, PhaseConfig
from deft.config.loading import to_dict
from deft.config.validation import LEAST_NOISE
from deft.data.augmentation import recolor_episode
from deft.data.episodes import EpisodeBatch, EpisodeStore, batch_episodes
from deft.data.robot_episode import RobotEpisode
from deft.errors import InputError, RunError, Stopped
from deft.evaluation.world_model import coded_batches, mean_loss
from deft.models.f1.explorer import EXPLORER_FILE, ExplorerPolicy, explorer_extras, load_explorer, new_explorer
from deft.models.f1.policy import F1Policy
from deft.models.targets import cpu_weights
from deft.runs import checkpoint
from deft.runs.compute import autocast, set_precision
from deft.runs.directory import MODEL_FILE
from deft.runs.json_files import write_json
from deft.training.phases.base import Metrics, find_start
from deft.training.phases.exploration import (
    Explorer,
    InlineExplorer,
    ProcessExplorer,
    held_out_episodes,
    make_exploration,
)
from deft.training.phases.explorer_rollouts import (
    Collected,
    ExplorerPPO,
    ExplorerRollouts,
    act_randomly,
    open_envs,
)
from deft.training.phases.rewards import Collapse, CollapseGuard, GameReward
from deft.training.phases.student import NUM_ENVS, check_chain, check_mask, check_same, first_difference, load_teacher
from deft.training.phases.world_model_trainer import WorldModelTrainer

log = logging.getLogger(__name__)
EXPLORER_FOLDER = "explorer"  # in a checkpoint: `model.pt` and `explorer.pt`, as a student's
BUFFERS_FILE = "buffers.pt"
RECENT_ROLLOUTS = 2  # rollouts that count as new
HELD_OUT = 8  # episodes that measure forgetting
AT_LIMIT = 0.99
GOLDEN = (5**0.5 - 1) / 2  # its multiples fill the unit evenly
RANDOM_SEED = 7919  # added to the seed for the random episodes: their scenes are not the explorer's


class AdversarialTrainer(WorldModelTrainer):
    """Phase 3. `policy` and `explorer` replace those of the two checkpoints."""

    phase: ClassVar[str] = "adversarial"
    parts: ClassVar[tuple[str, ...]] = (
        f"{EXPLORER_FOLDER}/{checkpoint.MODEL}",
        f"{EXPLORER_FOLDER}/{EXPLORER_FILE}",
        BUFFERS_FILE,
    )
    unit: ClassVar[str] = "iterations"
    shown: ClassVar[tuple[str, ...]] = ("reward", "wm_loss", "held_out_loss")

    def __init__(
        self, config: PhaseConfig, policy: F1Policy | None = None, explorer: ExplorerPolicy | None = None
    ) -> None:
        if config.training.dataset is not None:
            raise InputError("dataset: phase 3 explores an environment; datasets are for `deft train teacher`")
        if config.model.tokenizer_weights is not None:
            raise InputError("tokenizer_weights: phase 3 uses the teacher's tokenizer; leave it out")
        config = copy.deepcopy(config)
        if config.model.lora is not None:
            log.warning("model.lora: ignored; phase 3 trains all weights of the world model")
            config.model.lora = None
        if config.adversarial.replay_share + config.adversarial.random_share > 1.0:
            raise InputError(
                "replay_share, random_share: their sum must be at most 1; the rest of a batch is new episodes"
            )
        warn_of_idle_settings(config)
        config.training.learning_rate = config.adversarial.wm_learning_rate
        super().__init__(config, policy)
        if config.training.precision == "auto":
            set_precision(self.device, "fp32")  # for the explorer's ratios, as in phase 2
        game, training = config.adversarial, config.training
        if explorer is None:
            game.student_checkpoint = self.fixed_start("adversarial", "student_checkpoint", always=True)
            if self.resume_from is None and game.student_checkpoint is not None:
                find_start("student_checkpoint", game.student_checkpoint)  # checked before the environments are opened
        rank, count = self.processes.rank, self.processes.count
        exploration = make_exploration(config, self.policy)
        num_envs = training.num_envs or NUM_ENVS
        env, num_steps = open_envs(exploration, num_envs, vector=training.vector, device=self.device)
        self.explorer = explorer if explorer is not None else self._load_explorer(env.action_mask)
        where = self.resume_from or Path(game.student_checkpoint or "the explorer")
        check_mask(self.explorer, env.action_mask, where)
        check_tokenizer(self.policy, self.explorer.f1, where)
        set_noise(self.explorer, config, where, resumes=self.resume_from is not None)
        set_scale(self.explorer, game.explorer_scale, where, resumes=self.resume_from is not None)
        episodes = config.student.explorer.episodes_per_update
        self.rollouts = ExplorerRollouts(self.explorer, env, exploration, num_steps, episodes, rank, count)
        self.ppo = ExplorerPPO.of_run(self.explorer, explorer_settings(config), training.seed, self.processes)
        self.reward = GameReward(game, self.policy, self.processes.merge_statistics)
        self.guard = CollapseGuard(game.collapse_patience)
        self.generator = np.random.default_rng([training.seed, rank, 3])
        self.recent = EpisodeStore(RECENT_ROLLOUTS * self.rollouts.num_episodes)
        self.replay = EpisodeStore(game.replay_capacity)
        self.random_episodes = EpisodeStore(game.replay_capacity)
        self._random_exploration = copy.deepcopy(exploration)
        self._random_exploration.seed, self._random_exploration.scenes_kept = training.seed + RANDOM_SEED, 1
        self._random_explorer: Explorer | None = None  # opened when it is first used
        self.num_random = 0  # random episodes taken so far
        self.stateful = {"ppo": self.ppo, "reward": self.reward, "rollouts": self.rollouts, "guard": self.guard}
        self.stores = {"recent": self.recent, "replay": self.replay, "random": self.random_episodes}

    @property
    def total(self) -> int:
        """Iterations of the whole run."""
        return self.config.adversarial.iterations

    # -- an iteration --------------------------------------------------------------------------------------------------

    def train_round(self) -> tuple[int, Metrics]:
        """Let the explorer act and learn, then train the world model on its episodes."""
        game = self.config.adversarial
        self.policy.eval()
        rollouts = []
        if self.partial is None:
            with self.stoppable():
                found = self.rollouts.collect(version=self.ppo.version)
                random = self._collect_random(game.random_episodes)
                with autocast(self.device, self.autocast_dtype):
                    metrics: Metrics = dict(self.reward.pay(self.policy, found))
            metrics["train/reward"] = found.rollout[schema.NEXT_REWARD].mean()
            spread, saturated = action_spread(found, game.explorer_scale)
            metrics |= {"game/action_spread": spread, "game/actions_at_limit": saturated}
            metrics |= {f"train/{name}": value for name, value in found.observed().items()}
            self._keep(found.episodes, random)
            self.partial = metrics, []
            rollouts.append(found.rollout)
        metrics, trained = self.partial
        if (rollouts or self.ppo.unfinished is not None) and self.episode >= game.wm_warmup:
            self.ppo.progress, self.ppo.should_stop = self.progress, self.stop_requested
            learned = self.ppo.update(iter(rollouts))
            if self.ppo.unfinished is not None:
                raise Stopped
            metrics |= {f"ppo/{name}": value for name, value in learned.items()}
        self._train_world_model(trained)
        metrics |= {name: sum(float(one[name]) for one in trained) / len(trained) for name in trained[0]}
        self.partial = None
        self.reward.end_iteration(self.policy, self.episode + 1)
        metrics |= {
            "game/warm_up": float(self.episode < game.wm_warmup),  # only the world model is trained
            "game/replay": len(self.replay),
            "game/random": len(self.random_episodes),
        }
        return 1, metrics

    def evaluate_round(self, metrics: Metrics) -> Metrics:
        """Return the held-out loss; the guard checks it and the round's metrics for a collapse."""
        held_out = self.held_out_loss()
        # Alike in all processes: of each measure the value furthest from a collapse counts.
        signs = (("game/action_spread", 1.0), ("game/actions_at_limit", -1.0), ("reward/paid_steps", 1.0))
        found = [sign * self.processes.maximum(sign * float(metrics[name]), self.device) for name, sign in signs]
        try:
            self.guard.check(held_out, *found)
        except Collapse as collapse:  # the iteration is counted, logged and saved first
            self.ends_with = collapse
        return {"train/held_out_loss": held_out}

    def collection_state(self) -> tuple[dict[str, Any], int]:
        """Return which scenes come next, the explorer's and the random ones."""
        return self.rollouts.state_dict(), self.num_random

    def restore_collection(self, state: tuple[dict[str, Any], int]) -> None:
        """Restore a `collection_state`."""
        self.rollouts.load_state_dict(state[0])
        self.num_random = state[1]

    def _keep(self, episodes: list[RobotEpisode], random: list[RobotEpisode]) -> None:
        """Add the explorer's new episodes, move those that they displace to the replay, and add random ones."""
        strength = self.training.colour_augmentation
        displaced = max(0, len(self.recent) + len(episodes) - (self.recent.episodes.maxlen or 0))
        self.replay.add(list(self.recent.episodes)[:displaced])
        # The explorer's have codes already, unless they get other colours.
        found = [recolor_episode(episode, self.generator, strength) for episode in episodes]
        self.recent.add(self.coded(found))
        self.random_episodes.add(self.coded(random))

    def _collect_random(self, count: int) -> list[RobotEpisode]:
        """Return the next random episodes; with `overlap`, those of the next iteration are collected meanwhile.

        One process collects them in order, so that a resumed run continues bit for bit.
        """
        if not count:
            return []
        if self.training.vector == "warp":
            num_rounds = -(-count // self.rollouts.env.num_envs)
            self.num_random += count
            return self.rollouts.collect(act_randomly(self.explorer), num_rounds=num_rounds).episodes[:count]
        if self._random_explorer is None:
            every = self.processes.count
            first = self.num_random * every + self.processes.rank
            if self.training.overlap:
                self._random_explorer = ProcessExplorer(self._random_exploration, 1, first, every)
            else:
                self._random_explorer = InlineExplorer(self._random_exploration, first, every)
        found = self._random_explorer.take(count)
        self._random_explorer.allow(count)
        self.num_random += count
        return found

    def _train_world_model(self, trained: list[Metrics]) -> None:
        """Train on `wm_updates` batches of new, older and random episodes; add the metrics of each to `trained`.

        Those that are in it already are not trained on again. A stop request raises `Stopped` between two of them.
        """
        game, model = self.config.adversarial, self.policy.config
        size = self.training.batch_size
        self.policy.train()
        first = self.episode * game.wm_updates
        for number in range(first + len(trained), first + game.wm_updates):
            if self.stop_requested():
                raise Stopped
            num_random, num_older = split_batch(number, size, game.random_share, game.replay_share)
            random = self.random_episodes.draw_unseen_first(num_random, self.generator)
            # While there are few random episodes the batch is smaller: the explorer's do not replace them.
            room = size - num_random if len(self.random_episodes) else size
            older = self.replay.draw(num_older, self.generator)
            newer = self.recent.draw(room - len(older), self.generator)
            episodes = [*newer, *older, *random]
            batch = batch_episodes(episodes, model.n_obs_img_steps, model.obs_img_stride, self.device)
            trained.append({**self.train_chunks(batch), **self.reward.learn(batch)})
            self.shown_episodes = batch
        self.policy.eval()

    @cached_property
    def held_out(self) -> list[EpisodeBatch]:
        """Episodes of another explorer, in held-out scenes."""
        return coded_batches(self.policy, held_out_episodes(self.config, self.policy, HELD_OUT, self.training.seed))

    def held_out_loss(self) -> float:
        """Return the world model's cross-entropy on the held-out episodes."""
        return mean_loss(self.policy, self.held_out)

    # -- models --------------------------------------------------------------------------------------------------------

    def _load_policy(self) -> F1Policy:
        """Load the world model: of the resumed run, or of the teacher."""
        game = self.config.adversarial
        game.teacher_checkpoint = self.fixed_start("adversarial", "teacher_checkpoint", always=True)
        if self.resume_from is not None:
            return super()._load_policy()
        return load_teacher(self.config, self.device, "adversarial")

    def _load_explorer(self, action_mask: Any) -> ExplorerPolicy:
        """Load the explorer of the resumed run or of the student, or build a new one."""
        given = self.config.adversarial.student_checkpoint
        if self.resume_from is not None:
            return load_game_explorer(self.resume_from, self.device)
        if given is None:
            log.warning("student_checkpoint: none was given; phase 3 starts with a new explorer")
            return new_explorer(self.policy, action_mask, explorer_settings(self.config))
        folder = find_start("student_checkpoint", given)
        if (folder / EXPLORER_FOLDER).is_dir():  # of another adversarial run
            return load_game_explorer(folder, self.device)
        return load_explorer(folder, folder.parent / MODEL_FILE, self.device)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def write_files(self, folder: Path) -> None:
        """Write the explorer, as a student's checkpoint has it, and the buffers."""
        super().write_files(folder)
        place = folder / EXPLORER_FOLDER
        place.mkdir()
        torch.save(cpu_weights(self.explorer.f1.state_dict()), place / checkpoint.MODEL)
        torch.save(explorer_extras(self.explorer), place / EXPLORER_FILE)
        buffers = {name: store.state_dict() for name, store in self.stores.items()}
        torch.save({**buffers, "unseen": self.random_episodes.num_unseen}, folder / BUFFERS_FILE)
        write_json(to_dict(self.explorer.config), self.run_dir / EXPLORER_FOLDER / MODEL_FILE)

    def phase_state(self) -> dict[str, Any]:
        """Return both sides' optimizers and counters; networks and buffers are files of their own."""
        own = {"generator": self.generator.bit_generator.state, "num_random": self.num_random}
        return super().phase_state() | own

    def load_phase_state(self, state: dict[str, Any], folder: Path) -> None:
        """Load it, and the buffers."""
        super().load_phase_state(state, folder)
        self.processes.remember_statistics(self.reward.scale)
        if self.processes.is_first:
            self.generator.bit_generator.state = state["generator"]
        self.num_random = state["num_random"]
        buffers = checkpoint.load_part(folder, BUFFERS_FILE)
        for name, store in self.stores.items():
            store.load_state_dict(buffers[name])
        self.random_episodes.num_unseen = buffers["unseen"]

    def close(self) -> None:
        """Free the environments."""
        self.rollouts.close()
        if self._random_explorer is not None:
            self._random_explorer.close()
        super().close()

    def check_finite(self, state: dict[str, Any]) -> None:
        """Raise an error if weights of the world model or the explorer are not finite."""
        super().check_finite(state)
        if not all(bool(torch.isfinite(parameter).all()) for parameter in self.explorer.parameters()):
            raise RunError(
                f"the explorer's weights are no longer finite after {self.episode} iterations, so nothing was saved: "
                "lower explorer_learning_rate; any checkpoint saved before is good"
            )


def load_game_explorer(folder: Path, device: torch.device) -> ExplorerPolicy:
    """Load the explorer of a checkpoint of phase 3."""
    return load_explorer(folder / EXPLORER_FOLDER, folder.parent / EXPLORER_FOLDER / MODEL_FILE, device)


def explorer_settings(config: PhaseConfig) -> ExplorerSettings:
    """Return the student's settings of PPO, with the learning rate and noise of phase 3."""
    settings = copy.deepcopy(config.student.explorer)
    settings.learning_rate = config.adversarial.explorer_learning_rate
    factor = config.adversarial.explorer_noise
    if (noise := settings.action_noise * factor) < LEAST_NOISE:
        raise InputError(
            f"explorer_noise: {factor:g} of action_noise {settings.action_noise:g} is {noise:g}; it must be at least "
            f"{LEAST_NOISE:g}, for slower motions use explorer_scale"
        )
    settings.initial_noise *= factor
    settings.action_noise *= factor
    if config.adversarial.explorer_correlation is not None:
        settings.noise_correlation = config.adversarial.explorer_correlation
    return settings


def warn_of_idle_settings(config: PhaseConfig) -> None:
    """Warn about settings that have no effect."""
    game = config.adversarial
    if config.model.checkpoint_path is not None:
        log.warning("model.checkpoint_path: ignored; the world model of phase 3 is that of teacher_checkpoint")
    if game.random_share and not game.random_episodes:
        log.warning("random_share: ignored without random_episodes; batches are the explorer's episodes alone")
    if game.wm_warmup >= game.iterations:
        text = "wm_warmup: %d of %d iterations, so the explorer is not trained at all"
        log.warning(text, game.wm_warmup, game.iterations)


def split_batch(number: int, size: int, random_share: float, replay_share: float) -> tuple[int, int]:
    """Return how many random and how many older episodes batch `number` has.

    Where that is no whole number, what is left of a batch goes to one kind or another in turn, by the golden ratio.
    """
    wanted = [size * share for share in (random_share, replay_share, 1.0 - random_share - replay_share)]
    counts = [math.floor(count + 1e-9) for count in wanted]
    left = size - sum(counts)
    bounds = np.cumsum([count - whole for count, whole in zip(wanted, counts, strict=True)])
    for place in range(left):  # spots one apart: no kind is hit twice
        spot = number * GOLDEN % 1.0 + place
        counts[min(int(np.searchsorted(bounds, spot, side="right")), 2)] += 1
    return counts[0], counts[1]


def check_tokenizer(world_model: F1Policy, explorer: F1Policy, where: Path) -> None:
    """Raise an error if an explorer has another tokenizer, or a memory of another size."""
    name = first_difference(explorer.tokenizer.state_dict(), world_model.tokenizer.state_dict())
    if name is not None:
        raise InputError(
            f"student_checkpoint: {where} has another tokenizer than the teacher (tokenizer.{name}); "
            "give a student of this teacher"
        )
    for setting in ("memory_enabled", "memory_hidden"):
        found, wanted = (getattr(one.config, setting) for one in (explorer, world_model))
        if found != wanted:
            raise InputError(
                f"student_checkpoint: {where} has {setting} {found}, the teacher {wanted}; give a student of its own"
            )


def set_noise(explorer: ExplorerPolicy, config: PhaseConfig, where: Path, resumes: bool = False) -> None:
    """Give an explorer with the student's noise that of phase 3; one that has it already is not changed."""
    wanted, scale = explorer_settings(config), config.adversarial.explorer_noise
    if resumes:
        check_same("explorer_noise", float(explorer.deviation[0]) / config.student.explorer.action_noise, scale, where)
    if not math.isclose(float(explorer.deviation[0]), wanted.action_noise, rel_tol=1e-6):
        check_chain(explorer, config.student.explorer, where)
        explorer.deviation.mul_(scale)
        explorer.initial_deviation.mul_(scale)
    if config.adversarial.explorer_correlation is not None:  # it changes no action's density
        explorer.noise_correlation.fill_(wanted.noise_correlation)
    check_chain(explorer, wanted, where)


def set_scale(explorer: ExplorerPolicy, scale: float, where: Path, resumes: bool = False) -> None:
    """Set the bound of the explorer's actions; a resumed run must keep its own."""
    before = float(explorer.action_scale)
    if resumes:
        check_same("explorer_scale", before, scale, where)
    elif before != 1.0 and not math.isclose(before, scale, rel_tol=1e-6):
        log.warning("explorer_scale: %s was trained with %g; this run uses %g", where, before, scale)
    explorer.action_scale.fill_(scale)


def action_spread(found: Collected, scale: float = 1.0) -> tuple[float, float]:
    """Return the deviation of the actions, mean over the real dims, and the fraction of them at the limits.

    Both are relative to the largest action of the explorer, `scale`.
    """
    if found.streams is not None:
        actions = found.streams["action"].flatten(0, 1).cpu().numpy() / scale
    else:
        actions = np.concatenate([episode.action for episode in found.episodes]) / scale
    real = found.rollout[schema.ACTION_MASK][0, 0].cpu().numpy().astype(bool)
    return float(actions[:, real].std(0).mean()), float((np.abs(actions[:, real]) >= AT_LIMIT).mean())


def train_adversarial(config: PhaseConfig) -> dict[str, Any]:
    """`deft train adversarial`."""
    return AdversarialTrainer(config).train()
