"""Held-out episodes of SFT: which they are, what is measured on them, early stopping, and resuming with the same."""

import json
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from offline_worlds import two_step_dataset

from deft.config.algorithm_settings import SFTSettings
from deft.config.loading import resolve
from deft.data.datasets.dataset import Dataset, EpisodeSubset, validation_episodes
from deft.errors import InputError
from deft.runs import checkpoint
from deft.training.offline import OfflineTrainer
from deft.training.offline_run import build_offline_trainer
from deft.training.validation import Validation

QUIET = {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False}


def make_trainer(folder: Path, dataset: Dataset | None = None, cfg: Any = None, run: Any = None, **trainer: Any):
    """On 40 episodes of 2 transitions: with the default 0.05, 2 are held out and 76 transitions are trained on."""
    config = {
        "algorithm": {"name": "sft", "cfg": {"batch_size": 16, **(cfg or {})}},
        "policy": {"hidden_dim": 16},
        "trainer": {"log_freq": 0, "eval_freq": 0, "save_freq": 0, "num_epochs": 3, **trainer},
        "logging": QUIET,
        "output_dir": str(folder),
        "device": "cpu",
        "threads": 1,
        **(run or {}),
    }
    return build_offline_trainer(resolve(config), dataset or two_step_dataset(40))


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]


def weights(trainer: OfflineTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.policy.state_dict().items()}


def test_whole_episodes_are_held_out_by_the_seed_alone():
    # 0.05 of 40 is 2. 0.05 of 9 is 0.45: none. 0.9 of 1 would be all: none.
    held_out = validation_episodes(40, 0.05, seed=3)
    assert len(set(held_out)) == 2
    assert held_out.tolist() == validation_episodes(40, 0.05, seed=3).tolist()
    assert held_out.tolist() != validation_episodes(40, 0.05, seed=4).tolist()
    assert [len(validation_episodes(count, 0.05, 0)) for count in (1, 9, 10, 29, 30)] == [0, 0, 1, 1, 2]
    assert len(validation_episodes(1, 0.9, 0)) == 0


def test_training_never_draws_a_held_out_episode(tmp_path):
    dataset = two_step_dataset(40)
    dataset.table.observation[:, 0] = torch.arange(120) // 3  # the episode's number
    trainer = make_trainer(tmp_path, dataset)
    held_out = validation_episodes(40, 0.05, seed=0).tolist()
    drawn = {int(value) for _ in range(50) for value in trainer.sampler.sample(16)["observation"][:, 0]}
    assert drawn == set(range(40)) - set(held_out)
    assert trainer.num_transitions == 76
    assert trainer.updates_per_epoch == 5  # ⌈76 / 16⌉
    assert (
        float(next(iter(trainer.policy.encoder.streams.values())).normalizer.count) == 76
    )  # nor do the statistics see them


def test_what_is_logged_while_a_run_is_built_is_on_the_console_and_in_its_log_file(tmp_path, capsys):
    logger = logging.getLogger("deft")
    before = (logger.level, list(logger.handlers))
    trainer = make_trainer(tmp_path, run={"logging": QUIET | {"console_level": "INFO"}})
    line = "2 of 40 episodes (4 transitions) are held out for val_loss (val_fraction 0.05)\n"
    assert re.search(rf"^\d\d:\d\d:\d\d INFO {re.escape(line)}", capsys.readouterr().err, re.MULTILINE)
    assert (logger.level, logger.handlers) == before
    trainer.train()
    [file] = (tmp_path / "logs").iterdir()
    assert len(re.findall(rf" INFO deft\.training\.validation: {re.escape(line)}", file.read_text())) == 1


def test_the_validation_loss_is_that_of_the_held_out_transitions(tmp_path):
    """By hand: −log N(a; tanh μ(s), σ) of the 4 held-out transitions, with the weights at the end."""
    dataset = two_step_dataset(40)
    trainer = make_trainer(tmp_path, dataset)
    summary = trainer.train()
    policy, rows = trainer.policy, EpisodeSubset(dataset, validation_episodes(40, 0.05, 0)).table
    chosen = rows.transition_rows()
    with torch.no_grad():
        state = policy.encode(rows.observation[chosen])
        expected = -policy.log_prob(state, rows.action[chosen].unsqueeze(0)).mean()
        error = (policy.mean(state)[0] - rows.action[chosen]).square().mean()
    assert summary["val_loss"] == pytest.approx(float(expected), rel=1e-5)
    assert summary["val_action_error"] == pytest.approx(float(error), rel=1e-5)
    logged = [(line["step"], "bc_loss" in line) for line in lines(tmp_path) if "val_loss" in line]
    assert logged == [(5, True), (10, True), (15, True)]  # once an epoch, in the line of its update


def test_validating_changes_nothing_but_the_log(tmp_path):
    """The same training episodes without the validation of them end in the same weights."""
    dataset = two_step_dataset(40)
    held_out = validation_episodes(40, 0.05, 0)
    validated = make_trainer(tmp_path / "a", dataset)
    validated.train()
    alone = make_trainer(
        tmp_path / "b", EpisodeSubset(dataset, np.setdiff1d(np.arange(40), held_out)), {"val_fraction": 0.0}
    )
    assert "val_loss" not in alone.train()
    for name, value in weights(alone).items():
        assert torch.equal(value, validated.policy.state_dict()[name]), name


def test_a_resumed_run_holds_out_the_same_episodes_and_ends_alike(tmp_path):
    whole = make_trainer(tmp_path / "whole")
    whole.train()
    half = make_trainer(tmp_path / "half", num_epochs=1)
    half.train()
    resumed = make_trainer(tmp_path / "half", run={"resume": str(tmp_path / "half")})
    resumed.train()
    for name, value in weights(whole).items():
        assert torch.equal(value, resumed.policy.state_dict()[name]), name
    for change in ({"run": {"seed": 5}}, {"cfg": {"val_fraction": 0.2}}):
        run = {"resume": str(tmp_path / "half"), **change.get("run", {})}
        with pytest.raises(InputError, match="val_fraction, seed: the run held out other episodes"):
            make_trainer(tmp_path / "half", run=run, cfg=change.get("cfg"), num_epochs=4)


def test_too_few_episodes_are_all_trained_on_and_it_is_said(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        trainer = make_trainer(tmp_path, two_step_dataset(1))
    assert trainer.num_transitions == 2
    assert "no validation loss: val_fraction 0.05 of 1 episodes is none" in caplog.text


def test_the_updates_of_an_epoch_are_said_at_the_start(tmp_path, caplog):
    with caplog.at_level(logging.INFO):
        make_trainer(tmp_path).train()
    assert "76 transitions, batch size 16: 5 updates per epoch, 3 epochs, 15 updates in all" in caplog.text


def validation_of(losses: list[float], patience: int) -> Validation:
    values = iter(losses)
    return Validation(lambda: {"bc_loss": next(values)}, np.array([1]), patience, 0)


def test_early_stopping_counts_validations_without_a_lower_loss():
    validation = validation_of([3.0, 2.0, 2.0, 2.5, 1.0], patience=2)
    seen = []
    for _ in range(5):
        validation.run()
        seen.append((validation.chooses_best, validation.is_over))
    # Equal is not lower: 2.0 and 2.5 after 2.0 are two without.
    assert seen == [(True, False), (True, False), (False, False), (False, True), (True, False)]
    other = validation_of([9.0], patience=2)
    other.load_state_dict(validation.state_dict())
    assert (other.best, other.since) == (1.0, 0)


def test_early_stopping_ends_the_run_and_its_best_is_the_lowest_loss(tmp_path, caplog):
    """A learning rate that overshoots: the loss rises after some epoch, and `best` is the checkpoint before that."""
    cfg = {"early_stopping": 2, "learning_rate": 0.3}
    trainer = make_trainer(tmp_path, cfg=cfg, num_epochs=200, keep_checkpoints=1)
    with caplog.at_level(logging.INFO):
        summary = trainer.train()
    losses = {line["step"]: line["val_loss"] for line in lines(tmp_path)}
    lowest = min(losses, key=losses.__getitem__)
    assert summary["updates"] == lowest + 2 * 5 < 1000
    assert checkpoint.find_best(tmp_path).name == f"checkpoint-{lowest}"
    assert "early_stopping: val_loss has not fallen" in caplog.text
    again = make_trainer(tmp_path, cfg=cfg, num_epochs=200, run={"resume": str(tmp_path / f"checkpoint-{lowest + 10}")})
    assert again.train()["updates"] == summary["updates"]


def test_without_early_stopping_the_validation_marks_nothing_as_best(tmp_path):
    """The lowest loss is often not the most successful policy: what is played must be asked for."""
    make_trainer(tmp_path).train()
    assert not (tmp_path / "best").exists()


def test_early_stopping_needs_a_validation():
    with pytest.raises(ValueError, match="needs a val_loss"):
        SFTSettings(early_stopping=3, val_fraction=0.0)
