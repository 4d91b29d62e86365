import contextlib
import json
import logging
import os
import shutil
import signal

import pytest
import torch
from offline_worlds import two_step_dataset
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from deft.cli import main
from deft.config.loading import resolve
from deft.config.settings import LoggingConfig, RunConfig
from deft.errors import InputError, Stopped
from deft.ownership import INDEX, INDEX_HEADER, indexed_files, record, relative_files, start_index
from deft.runs.checkpoint import folder_lock, list_checkpoints, mark_best, save_checkpoint
from deft.runs.directory import place_run, remove_run
from deft.runs.logging import RunLogger
from deft.training.offline_run import build_offline_trainer
from deft.training.run import build_trainer

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


def test_without_an_index_only_checkpoints_are_deleted(tmp_path):
    """The manifest of a checkpoint lists its files; the other files could be anybody's."""
    make_run(tmp_path)
    (tmp_path / INDEX).unlink()
    before = relative_files(tmp_path)
    remove_run(tmp_path)
    assert relative_files(tmp_path) == sorted([INDEX, *(name for name in before if not is_checkpoint(name))])


def is_checkpoint(name: str) -> bool:
    return name.startswith(("checkpoint-", "best"))


def test_a_new_run_does_not_claim_the_files_that_it_finds(tmp_path):
    for name in FOREIGN:
        write(tmp_path, name)
    start_index(tmp_path)
    assert indexed_files(tmp_path) == []
    remove_run(tmp_path)
    assert set(relative_files(tmp_path)) == {*FOREIGN, INDEX}


LOOKS_LIKE_DEFT = ("results.json", "final.pt", "config.json", "videos/episode_1.mp4", "report.html", "evaluation.json")
TRAIN = [
    *("train", "ppo", "--env", "CartPole-v1", "--total-timesteps", "32", "--rollout-steps", "32", "--batch-size", "32"),
    *("--num-envs", "1", "--hidden-sizes", "4", "--ppo-epochs", "1", "--eval-freq", "0", "--device", "cpu"),
    *("--no-tensorboard", "--no-enable-file-logging"),
]


@pytest.mark.parametrize("files", [("training_state.pt", "model.pt"), ("model.pt",)])
@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_a_folder_with_checkpoints_of_another_program_is_left_as_it_is(tmp_path, capsys, files, flags):
    names = [*(f"checkpoint-1000/{file}" for file in files), *LOOKS_LIKE_DEFT]
    for name in names:
        write(tmp_path, name)
    assert main([*TRAIN, "--output-dir", str(tmp_path), *flags]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"output_dir: {tmp_path / 'checkpoint-1000'} is not a checkpoint that Deft wrote" in line
    assert "--overwrite" not in line
    assert [name for name in relative_files(tmp_path) if name != ".lock"] == sorted(names)
    assert {(tmp_path / name).read_text() for name in names} == {"x"}


def test_an_index_of_a_folder_of_another_program_claims_nothing(tmp_path):
    for name in ("checkpoint-1000/training_state.pt", *LOOKS_LIKE_DEFT):
        write(tmp_path, name)
    start_index(tmp_path)
    assert indexed_files(tmp_path) == []


def test_files_of_the_user_in_the_places_of_a_runs_files_are_renamed(tmp_path, monkeypatch, caplog):
    """As in `cd FOLDER; deft train --config config.yaml --output-dir .`, twice."""
    monkeypatch.chdir(tmp_path)
    own = {"config.yaml": "# from the paper\nseed: 3\n", "episode_metrics.jsonl": "a", "plots/learning_curve.png": "b"}
    for name, text in own.items():
        write(tmp_path, name).write_text(text)
    for _ in range(2):
        assert main([*TRAIN, "--config", "config.yaml", "--output-dir", ".", "--overwrite"]) == 0
        assert {name: (tmp_path / f"{name}.kept").read_text() for name in own} == own
        assert "seed: 3" in (tmp_path / "config.yaml").read_text()
    assert not list(tmp_path.rglob("*.kept1"))
    assert "config.yaml: Deft did not write it; renamed to config.yaml.kept" in caplog.text


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("c.yaml", "algorithm: ppo\nenv: CartPole-v1\noutput_dir: {}\noverwrite: true\n"),
        ("c.yaml", "phase: teacher\nteacher: {{output_dir: {}}}\nrun: {{overwrite: true}}\n"),
    ],
)
def test_a_file_cannot_ask_for_a_run_to_be_replaced(tmp_path, capsys, file, content):
    make_run(tmp_path / "run")
    before = relative_files(tmp_path / "run")
    (tmp_path / file).write_text(content.format(tmp_path / "run"))
    assert main(["train", "--config", str(tmp_path / file)]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert f"{file}: overwrite: true is not accepted in a file; remove it, and use the flag --overwrite" in line
    assert relative_files(tmp_path / "run") == before


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


# -- a folder that is removed while the run trains ---------------------------------------------------------------------


def test_a_removed_folder_is_written_again_with_all_that_was_logged(tmp_path, caplog):
    run, settings = tmp_path / "run", LoggingConfig(console_level="CRITICAL")
    with RunLogger(run, settings, 10, write_start=lambda: record(write(run, "config.yaml"))) as run_log:
        run_log.log_metrics(1, {"loss": 1.0})
        shutil.rmtree(run)
        write(run, "videos/step_1.mp4")  # whoever writes next creates the folder, and that is no reason to leave it so
        run_log.log_metrics(2, {"loss": 2.0})
        run_log.flush()
        run_log.flush()
        with pytest.raises(InputError, match="another process is training"), folder_lock(run):
            pass
        run_log.log_metrics(3, {"loss": 3.0})
        logging.getLogger("deft").warning("after it")
    assert [record.message for record in caplog.records if "removed" in record.message] == [
        f"{run} was removed: it is written again, without its earlier checkpoints"
    ]
    lines = [json.loads(line) for line in (run / "episode_metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in lines] == [1.0, 2.0, 3.0]
    (events,) = (run / "tensorboard").iterdir()
    values = [value for event in EventFileLoader(str(events)).Load() for value in event.summary.value]
    assert [value.tensor.float_val[0] for value in values] == [1.0, 2.0, 3.0]
    (log_file,) = (run / "logs").iterdir()
    assert "after it" in log_file.read_text()
    assert {"config.yaml", "episode_metrics.jsonl"} <= set(indexed_files(run))


def online(folder, **run):
    settings = {"buffer_size": 8, "eval_freq": 0, "save_freq": 32, "log_freq": 1, "total_timesteps": 96}
    return build_trainer(
        resolve(
            {
                "algorithm": {"name": "ppo", "cfg": {"batch_size": 8, "n_epochs": 1}},
                "env": {"id": "CartPole-v1", "num_envs": 2},
                "trainer": settings,
                "logging": {"enable_file_logging": False, "console_level": "CRITICAL", "tensorboard": False},
                "output_dir": str(folder),
                "device": "cpu",
                "threads": 1,
                **run,
            }
        )
    )


@pytest.mark.parametrize("stops", [False, True])
def test_a_folder_that_is_removed_during_an_evaluation_is_written_again(tmp_path, stops):
    """Nothing is lost, whether the evaluation comes to its end or is stopped; a stop leaves no `best`."""
    trainer = online(
        tmp_path / "run", trainer={"buffer_size": 8, "eval_freq": 0, "save_freq": 0, "total_timesteps": 16}
    )
    evaluate = trainer.evaluate

    def removing(*given, **named):
        shutil.rmtree(tmp_path / "run")
        if stops:
            os.kill(os.getpid(), signal.SIGTERM)
            raise Stopped
        return evaluate(1)

    trainer.evaluate = removing
    with pytest.raises(SystemExit) if stops else contextlib.nullcontext():
        trainer.train(evaluates_last=True)
    (saved,) = list_checkpoints(tmp_path / "run")
    assert saved.name == "checkpoint-16"
    assert (tmp_path / "run" / "config.yaml").exists()
    assert (tmp_path / "run" / "best").exists() == (not stops)
    trainer.close()


def offline(folder, **run):
    settings = {"num_epochs": 3, "eval_freq": 0, "save_freq": 1, "log_freq": 1}
    config = resolve(
        {
            "algorithm": {"name": "iql", "cfg": {"batch_size": 32}},
            "policy": {"hidden_dim": 16},
            "trainer": settings,
            "logging": {"enable_file_logging": False, "console_level": "CRITICAL", "tensorboard": False},
            "output_dir": str(folder),
            "device": "cpu",
            "threads": 1,
            **run,
        }
    )
    return build_offline_trainer(config, two_step_dataset())


@pytest.mark.parametrize("make", [online, offline])
@pytest.mark.parametrize("replaces", [False, True], ids=["new", "overwrites another"])
def test_a_run_whose_folder_was_removed_is_resumed_and_the_same(tmp_path, make, replaces):
    """Removed after the first of three checkpoints, stopped after the second."""
    whole = make(tmp_path / "whole")
    whole.train()
    if replaces:
        make(tmp_path / "half").train()
    stopped = make(tmp_path / "half", overwrite=replaces)
    save, saves = stopped.save, []

    def removing(*given, **named):
        saves.append(save(*given, **named))
        if len(saves) == 1:
            shutil.rmtree(tmp_path / "half")
        if len(saves) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return saves[-1]

    stopped.save = removing
    with pytest.raises(SystemExit):
        stopped.train()
    assert list_checkpoints(tmp_path / "half") == [saves[1]]
    resumed = make(tmp_path / "half", auto_resume=True)
    resumed.train()
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, resumed.policy.state_dict()[name]), name
    one, other = ((tmp_path / name / "config.yaml").read_text() for name in ("whole", "half"))
    assert one.replace("/whole", "/half") == other
    files = [tmp_path / name / "episode_metrics.jsonl" for name in ("whole", "half")]
    first, second = ([{**json.loads(line), "time": 0} for line in file.read_text().splitlines()] for file in files)
    assert first == second
    for trainer in (whole, stopped, resumed):
        trainer.close()
