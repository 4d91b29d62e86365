import pytest
import torch

from deft.config.settings import LoggingConfig, RunConfig
from deft.ownership import INDEX, INDEX_HEADER, indexed_files, record, relative_files, start_index
from deft.training.checkpoint import mark_best, save_checkpoint
from deft.training.logging import RunLogger
from deft.training.run_folder import place_run, remove_run

QUIET = LoggingConfig(enable_file_logging=False, console_level="CRITICAL")
OWN = ("config.yaml", "videos/step_100.mp4", "videos/reach.mp4", "plots/updates.png", "samples/episode_4.png")
FOREIGN = (
    "videos/holiday.mp4",
    "videos/step_7.mp4",
    "tensorboard/events.out.tfevents.1.host",
    "plots/mine.png",
    "a.txt",
)


def write(folder, name):
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("x")
    return path


def make_run(folder):
    """A run as the trainers make it, with foreign files among its own."""
    with RunLogger(folder, QUIET, 10) as run_log:
        run_log.log_metrics(1, {"loss": 1.0})
    for name in OWN:
        record(write(folder, name))
    mark_best(folder, save_checkpoint(folder, 5, {"w": torch.zeros(1)}, {}, {}))
    for name in FOREIGN:
        write(folder, name)


def test_overwriting_deletes_what_deft_wrote_and_nothing_else(tmp_path, caplog):
    make_run(tmp_path)
    (tmp_path / "checkpoint-9").mkdir()
    write(tmp_path, "checkpoint-9/thesis.txt")
    assert sum("tfevents" in name for name in indexed_files(tmp_path)) == 1
    remove_run(tmp_path)
    assert relative_files(tmp_path) == sorted([INDEX, "checkpoint-9/thesis.txt", *FOREIGN])
    assert indexed_files(tmp_path) == []
    assert "which Deft did not write" in caplog.text
    assert "videos/holiday.mp4" in caplog.text


def test_of_an_earlier_versions_run_the_known_names_are_deleted(tmp_path):
    """Without an index `videos/step_7.mp4` is Deft's by its name; `videos/reach.mp4` could be anybody's."""
    make_run(tmp_path)
    (tmp_path / INDEX).unlink()
    remove_run(tmp_path)
    kept = {*FOREIGN, "videos/reach.mp4", INDEX} - {"videos/step_7.mp4"}
    assert relative_files(tmp_path) == sorted(kept)


def test_a_new_run_does_not_claim_the_files_that_it_finds(tmp_path):
    for name in FOREIGN:
        write(tmp_path, name)
    start_index(tmp_path)
    assert indexed_files(tmp_path) == []
    remove_run(tmp_path)
    assert set(relative_files(tmp_path)) == {*FOREIGN, INDEX}


def test_files_that_this_run_has_written_already_are_kept(tmp_path):
    make_run(tmp_path)
    remove_run(tmp_path, keep=("config.yaml",))
    assert (tmp_path / "config.yaml").exists()
    assert not (tmp_path / "plots" / "updates.png").exists()


@pytest.mark.parametrize("name", ["../outside.txt", "link/outside.txt", "/{tmp_path}/outside.txt"])
def test_an_index_cannot_reach_out_of_its_folder(tmp_path, name):
    """The index of a run folder from somebody else may say anything."""
    outside, run = write(tmp_path, "outside.txt"), tmp_path / "run"
    run.mkdir()
    (run / "link").symlink_to("..")
    (run / INDEX).write_text(f"{INDEX_HEADER}\n{name.format(tmp_path=tmp_path)}\n")
    remove_run(run)
    assert outside.exists()


def test_a_run_without_a_directory_is_below_output_base(tmp_path, monkeypatch):
    monkeypatch.setenv("OUTPUT_BASE", str(tmp_path / "base"))
    config, _, _ = place_run(RunConfig(), "CartPole-v1")
    assert config.output_dir.startswith(str(tmp_path / "base" / "ppo-CartPole-v1-"))
    named, _, _ = place_run(RunConfig(output_dir=str(tmp_path / "mine")), "CartPole-v1")
    assert named.output_dir == str(tmp_path / "mine")
