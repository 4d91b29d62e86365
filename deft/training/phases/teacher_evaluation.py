"""`deft evaluate RUN` for a run of `deft train teacher`: the measures of its world model on held-out episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deft.config.rl_yaml import CONFIG_FILE, read_phase_config
from deft.evaluation.predictions import draw_sample, predict_episode, write_prediction_video
from deft.evaluation.world_model import EVALUATION_FILE, coded_batches, measure, plot_horizons
from deft.models.f1.loading import load_f1_policy
from deft.runs import checkpoint
from deft.runs.compute import choose_device
from deft.runs.directory import MODEL_FILE, checkpoint_choice
from deft.runs.json_files import write_json
from deft.runs.logging import show_evaluation
from deft.training.phases.exploration import InlineExplorer
from deft.training.phases.recorded import DatasetExplorer
from deft.training.phases.teacher import make_exploration


def evaluate_teacher(
    path: str | Path, episodes: int = 10, video: str | Path | None = None, seed: int = 0, device: str = "auto"
) -> dict[str, Any]:
    """The measures of a teacher run (its best or latest checkpoint, or the one given) on scenes not trained on."""
    folder = checkpoint.find_best(path)
    config = read_phase_config(folder.parent / CONFIG_FILE)
    policy = load_f1_policy(folder.parent / MODEL_FILE, choose_device(device), checkpoint_path=folder).policy.eval()
    if config.training.dataset is not None:
        recorded = DatasetExplorer(config.training, policy.config.tokenizer.image_size)
        found = recorded.held_out(episodes)
        recorded.close()
    else:
        exploration = make_exploration(config, policy, held_out=True)
        exploration.seed = seed
        explorer = InlineExplorer(exploration)
        found = []
        with show_evaluation(episodes) as watch:
            for _ in range(episodes):
                found += explorer.take(1)
                watch(1)
        explorer.close()
    batches = coded_batches(policy, found)
    results = measure(policy, batches)
    plots = folder.parent / "plots"
    results["plots"] = [str(plot) for plot in plot_horizons(results["open_loop"], plots)]
    predicted = predict_episode(policy, batches[0])
    results["plots"].append(str(draw_sample(predicted, plots / "held_out.png")))
    if video is not None:
        results["video"] = str(write_prediction_video(predicted, Path(video)))
    results |= {"checkpoint": str(folder), "checkpoint_choice": checkpoint_choice(path, folder)}
    write_json(results, folder.parent / EVALUATION_FILE)
    return results
