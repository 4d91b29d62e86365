"""`deft train all`: the three phases in order in one directory, each from the best checkpoint of the previous one.

`phases.json` lists the completed phases. `--auto-resume` continues a stopped run at the phase and the checkpoint where
it was. A phase that is configured to be longer continues, unless a later one has started from it. Each phase is
evaluated at its end, and `report.html` is written again.
"""

from __future__ import annotations

import contextlib
import copy
import logging
from pathlib import Path
from typing import Any

from deft.config.f1_settings import PhaseConfig
from deft.config.rl_yaml import ALL_PHASES, CONFIG_FILE, PHASES, phase_of_file, write_phase_config
from deft.data.robot_episode import RobotEpisode
from deft.errors import InputError
from deft.evaluation.report import COMPARISON_FILE, write_report
from deft.evaluation.world_model import coded_batches, mean_loss
from deft.models.f1.policy import F1Policy
from deft.runs import checkpoint
from deft.runs.compute import choose_device
from deft.runs.directory import remove_run
from deft.runs.json_files import read_json, write_json
from deft.runs.processes import Processes
from deft.training.phases import evaluation
from deft.training.phases.adversarial import AdversarialTrainer
from deft.training.phases.base import BaseRLTrainer, check_fsdp
from deft.training.phases.evaluation import compare_world_models, load_world_model
from deft.training.phases.exploration import held_out_episodes
from deft.training.phases.rewards import Collapse
from deft.training.phases.student import StudentTrainer
from deft.training.phases.teacher import TeacherTrainer
from deft.view.process import check_view, serving

log = logging.getLogger(__name__)
PROGRESS_FILE = "phases.json"
CHOOSING_SEED, COMPARING_SEED = 1, 2  # of held-out scenes: the best is chosen on others than it is measured on
TRAINERS: dict[str, type[BaseRLTrainer]] = {
    "teacher": TeacherTrainer,
    "student": StudentTrainer,
    "adversarial": AdversarialTrainer,
}


def train_all(config: PhaseConfig) -> dict[str, Any]:
    """Train the phases that are not complete, evaluate them, and write the report."""
    check_fsdp(config, ALL_PHASES, can_shard=False)  # not only when phase 2 begins
    check_view(config.logging)
    root, replaces = _place(config)
    processes = Processes()
    device = processes.device(choose_device(config.training.device))
    processes.open(device)  # before the phases do: they find it open, and leave it so
    done: dict[str, Any] = {} if replaces else dict(processes.broadcast(read_json(root / PROGRESS_FILE) or {}))
    opened, collapse = False, None
    view = contextlib.ExitStack()  # one server for all phases
    try:
        for phase in PHASES:
            settings = phase_settings(config, phase, root)
            if phase in done and not _continues(settings, phase, done[phase]["summary"], root):
                log.info("%s is done: %s", phase, done[phase]["best"])
                if "ended_early" in done[phase]:
                    log.warning("%s ended early: %s", phase, done[phase]["ended_early"])
                continue
            settings.run.overwrite, settings.run.auto_resume = replaces, not replaces
            trainer = TRAINERS[phase](settings)
            if not opened and processes.is_first:  # the settings are checked by now
                _open(config, root, replaces)
                view.enter_context(serving(config.logging, root))
            opened = True
            try:
                summary = trainer.train()
            except Collapse as error:  # what there is of the phase is still worth a report
                summary, collapse = trainer.summary(), error
            if processes.is_first:
                done[phase] = {"summary": summary, "best": str(_best(config, phase, root / phase).name)}
                if collapse is not None:
                    done[phase]["ended_early"] = str(collapse)
                best, video = root / phase / checkpoint.BEST, root / phase / "plots" / "held_out.mp4"
                log.info("evaluating %s", best)
                evaluate = getattr(evaluation, f"evaluate_{phase}")
                evaluate(best, config.all.evaluation_episodes, video, COMPARING_SEED, str(device))
                write_json(done, root / PROGRESS_FILE)
                (root / COMPARISON_FILE).unlink(missing_ok=True)  # of the phase before it continued
                write_report(root)
            done = processes.broadcast(done)
        if processes.is_first and not (root / COMPARISON_FILE).is_file():
            compared = comparison(config, root, str(device))
            if "ended_early" in done["adversarial"]:
                compared["note"] += f" Phase 3 ended early: {done['adversarial']['ended_early']}."
            write_json(compared, root / COMPARISON_FILE)
        results: dict[str, Any] = {"run_dir": str(root)}
        if processes.is_first:
            results |= {phase: str(root / phase / checkpoint.BEST) for phase in PHASES}
            results["report"] = str(write_report(root))
        if collapse is not None:
            raise collapse
        return results
    finally:
        view.close()
        processes.close()


def phase_settings(config: PhaseConfig, phase: str, root: Path) -> PhaseConfig:
    """Return the settings of one phase."""
    own, whole = copy.deepcopy(config), config.all
    own.phase = phase  # type: ignore[assignment]
    getattr(own, phase).output_dir = str(root / phase)
    own.run.resume, own.run.overwrite, own.run.auto_resume = None, False, True
    own.logging.view = False  # `train_all` serves the page of all phases
    own.training.max_minutes = getattr(whole, f"{phase}_minutes")
    if phase == "teacher":
        own.training.vector = "process"  # random exploration has workers of its own
    if phase != "adversarial":
        own.training.num_episodes = getattr(whole, f"{phase}_episodes")
    if phase != "teacher":  # the later phases start from the teacher, adapters and all
        own.model.checkpoint_path = own.model.lora = own.model.tokenizer_weights = None
    own.student.teacher_checkpoint = own.adversarial.teacher_checkpoint = str(root / "teacher" / checkpoint.BEST)
    own.adversarial.student_checkpoint = str(root / "student" / checkpoint.BEST)
    return own


def comparison(config: PhaseConfig, root: Path, device: str) -> dict[str, Any]:
    """The world models of phases 1 and 3 on the same held-out episodes of another explorer, for the report."""
    policies: dict[str, F1Policy] = {}
    updates: dict[str, int] = {}
    for name, phase in (("Phase 1", "teacher"), ("Phase 3", "adversarial")):
        folder, _, policies[name] = load_world_model(root / phase / checkpoint.BEST, device)
        updates[name] = sum(updates.values()) + checkpoint.load_training_state(folder)["num_updates"]
    found = compare_world_models(policies, config, config.all.evaluation_episodes, COMPARING_SEED, open_loop=False)
    rows = [
        {
            "name": name,
            "values": {
                "cross-entropy, nats": one["cross_entropy"],
                "codes predicted, %": 100 * one["wm_acc"],
                "by copying, %": 100 * one["copy_acc"],
                **interaction_values(one),
                "updates in all": updates[name],
            },
        }
        for name, one in found.items()
    ]
    return {
        "title": "The world model, before and after phase 3",
        "note": f"{next(iter(found.values()))['episodes']} held-out episodes of another explorer: scripted pushes and "
        "grasps, and random actions, half each. Phase 3 has had more updates; benchmarks/phases_results.py compares at "
        "equal numbers.",
        "rows": rows,
        "bars": {"Cross-entropy, nats a code": {name: one["cross_entropy"] for name, one in found.items()}},
    }


def interaction_values(measured: dict[str, Any]) -> dict[str, float | None]:
    """The cross-entropy of moved objects and of free motion, where they were measured."""
    if "interaction" not in measured:
        return {}
    return {
        "moved objects, nats": measured["interaction"]["moved"]["cross_entropy"],
        "free motion, nats": measured["free_motion"]["cross_entropy"],
    }


def _place(config: PhaseConfig) -> tuple[Path, bool]:
    """Return the directory, and whether a run that it holds is replaced; an error if it must not be."""
    run = config.run
    root = Path(run.resume if run.resume is not None else config.all.output_dir)
    if root.exists() and not root.is_dir():
        raise InputError(f"output_dir: {root} is a file; name a folder")
    kind = phase_of_file(root / CONFIG_FILE)
    if run.resume is not None and kind != "all":
        raise InputError(f"--resume {root}: not a folder of `deft train all`")
    if kind in PHASES:
        raise InputError(f"output_dir: {root} is a run of phase {kind}; give another --output-dir")
    if kind is None and ((root / CONFIG_FILE).is_file() or checkpoint.list_checkpoints(root)):
        raise InputError(f"output_dir: {root} holds a run of another kind; give another --output-dir")
    begun = any(checkpoint.list_checkpoints(root / phase) for phase in PHASES)  # settings alone are replaced
    replaces = kind == "all" and begun and run.resume is None and not run.auto_resume
    if replaces and not run.overwrite:
        raise InputError(
            f"output_dir: {root} already holds a run: --auto-resume continues it, --overwrite replaces it, "
            "or give another --output-dir"
        )
    return root, replaces


def _continues(settings: PhaseConfig, phase: str, summary: dict[str, Any], root: Path) -> bool:
    """Whether a completed phase is now longer; an error if a later one has started from it."""
    unit, wanted = "episodes", settings.training.num_episodes
    if phase == "adversarial":
        unit, wanted = "iterations", settings.adversarial.iterations
    minutes = settings.training.max_minutes
    if summary[unit] >= wanted or (minutes is not None and summary["seconds"] >= 60.0 * minutes):
        return False
    for later in PHASES[PHASES.index(phase) + 1 :]:
        if checkpoint.list_checkpoints(root / later):
            raise InputError(
                f"{phase}: is done with {summary[unit]} {unit}, and {later} has started from it, so it cannot be "
                f"extended to {wanted}; leave its length as it was, or give another --output-dir"
            )
    return True


def _open(config: PhaseConfig, root: Path, replaces: bool) -> None:
    """Write the settings; delete a run that is replaced, all phases of it."""
    if replaces:
        for phase in PHASES:
            if (root / phase).is_dir():
                with checkpoint.folder_lock(root / phase):
                    remove_run(root / phase)
        for name in (PROGRESS_FILE, COMPARISON_FILE):
            (root / name).unlink(missing_ok=True)
    write_phase_config(config, root / CONFIG_FILE)


def _best(config: PhaseConfig, phase: str, run: Path) -> Path:
    """The best of the checkpoints that were kept, the latest on a tie, and `best` pointing at it.

    Of world models the one with the lowest loss on held-out episodes of another explorer; of students the one that the
    frozen world model predicts worst.
    """
    kept = checkpoint.list_checkpoints(run)[::-1]  # min and max take the first of equals
    if len(kept) == 1:
        chosen = kept[0]
    elif phase == "student":
        chosen = max(kept, key=lambda path: checkpoint.load_part(path, checkpoint.METRICS).get("train/wm_error", 0.0))
    else:
        losses: dict[Path, float] = {}
        episodes: list[RobotEpisode] = []
        for path in kept:
            policy = load_world_model(path, config.training.device)[2]
            episodes = episodes or held_out_episodes(config, policy, config.all.evaluation_episodes, CHOOSING_SEED)
            losses[path] = mean_loss(policy, coded_batches(policy, episodes))
        chosen = min(kept, key=losses.__getitem__)
    checkpoint.mark_best(run, chosen)
    return chosen
