"""The image tokenizer's training, on a model of 16 pixels and a recorded set of pictures; the tabletop's with few."""

import json
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from f1_worlds import micro_config
from safetensors.torch import load_file

from deft.cli import main
from deft.config.f1_settings import TokenizerTrainingConfig, TrainingConfig
from deft.config.loading import to_dict
from deft.config.settings import LoggingConfig
from deft.envs.tabletop.images import TabletopImages
from deft.errors import InputError, Stopped
from deft.evaluation.image_quality import psnr
from deft.models.f1.frames import to_images, to_model
from deft.models.f1.loading import WEIGHTS, load_f1_policy
from deft.models.f1.policy import F1Policy
from deft.models.f1.vq import MultiScaleTokenizer
from deft.runs import checkpoint
from deft.runs.signals import interruptible
from deft.training.phases.recorded import split
from deft.training.phases.tokenizer import DatasetFrames, FrameStore, TokenizerTrainer, perplexity, train_tokenizer

QUIET = LoggingConfig(console_level="ERROR", tensorboard=False)


@pytest.fixture
def model(tmp_path: Path) -> str:
    """The config file of a model of 16 pixels."""
    path = tmp_path / "micro.json"
    path.write_text(json.dumps({"preset": "tiny", **to_dict(micro_config())}))
    return str(path)


@pytest.fixture
def recording(tmp_path: Path) -> str:
    """Three episodes of 20 pictures: a bright square wanders over a shaded ground."""
    random = np.random.default_rng(0)
    folder = tmp_path / "recording"
    folder.mkdir()
    for episode in range(3):
        pictures = np.zeros((20, 3, 16, 16), np.uint8)
        pictures[:] = np.linspace(20, 120, 16).astype(np.uint8)
        for picture in pictures:
            row, column = random.integers(0, 12, 2)
            picture[:, row : row + 5, column : column + 5] = random.integers(150, 256, (3, 1, 1))
        arrays = {"action": np.zeros((20, 2), np.float32), "reward": np.zeros(20), "discount": np.ones(20)}
        np.savez(folder / f"{episode}.npz", observation=pictures, **arrays)
    return str(folder)


def _config(
    tmp_path: Path, model: str, recording: str, name: str = "run", **changes: object
) -> TokenizerTrainingConfig:
    settings = {"num_updates": 40, "batch_size": 8, "eval_interval": 20, "save_interval": 20, "threads": 1}
    return TokenizerTrainingConfig(
        model=model, dataset=recording, output_dir=str(tmp_path / name), device="cpu", **(settings | changes)
    )


def test_a_few_updates_repeat_pictures_that_were_kept_out_better(tmp_path, model, recording):
    results = train_tokenizer(_config(tmp_path, model, recording, num_updates=100, eval_interval=20), QUIET)
    folder = tmp_path / "run"
    lines = [json.loads(line) for line in (folder / "episode_metrics.jsonl").read_text().splitlines()]
    found = [line["psnr"] for line in lines if line["type"] == "evaluation"]
    assert found[-1] == pytest.approx(results["psnr"])
    assert found[-1] > found[0] + 1.5
    assert results["codes_used"] > 8
    assert 1 < results["perplexity"] <= 32
    assert results["frames"] == 2 * 20
    assert {path.name for path in (folder / "samples").iterdir()} >= {"update_20.png", "update_100.png"}
    assert json.loads((folder / "results.json").read_text())["ssim"] == pytest.approx(results["ssim"])


def test_a_model_starts_from_the_file_that_training_wrote(tmp_path, model, recording):
    """What training measured is what the loaded tokenizer does, up to the file's half precision."""
    config = _config(tmp_path, model, recording)
    results = train_tokenizer(config, QUIET)
    policy = load_f1_policy(micro_config(tokenizer_weights=results["weights"])).policy
    held_out = DatasetFrames(config, 16).held_out()["image"]
    made = to_images(policy.tokenizer.decode(policy.tokenizer.encode(to_model(held_out, 16, "held out"))))
    assert float(psnr(held_out, made).mean()) == pytest.approx(results["psnr"], abs=0.05)


def test_a_resumed_run_equals_one_that_was_not_interrupted(tmp_path, model, recording):
    whole = train_tokenizer(_config(tmp_path, model, recording, "whole"), QUIET)
    config = _config(tmp_path, model, recording, "parts", keep_checkpoints=5)
    train_tokenizer(config, QUIET)
    for path in (tmp_path / "parts" / "checkpoint-40").iterdir():  # as if killed after update 20
        path.unlink()
    (tmp_path / "parts" / "checkpoint-40").rmdir()
    config.resume = config.output_dir
    resumed = train_tokenizer(config, QUIET)
    first, second = (load_file(results["weights"]) for results in (whole, resumed))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert first.keys() == second.keys()
    assert whole["psnr"] == resumed["psnr"]


def signal_in(monkeypatch, owner, name: str, at: int) -> list[int]:
    """Send the process SIGTERM in the `at`-th call of a method; counts the calls."""
    method, calls = getattr(owner, name), [0]

    def signalling(*given):
        calls[0] += 1
        if calls[0] == at:
            os.kill(os.getpid(), signal.SIGTERM)
        return method(*given)

    monkeypatch.setattr(owner, name, signalling)
    return calls


@pytest.mark.parametrize(
    ("where", "at", "saved"),
    [
        ((TokenizerTrainer, "update"), 4, "checkpoint-4"),
        ((MultiScaleTokenizer, "encode"), 2, "checkpoint-6"),  # the second of its four parts
        ((MultiScaleTokenizer, "encode"), 9, "checkpoint-12"),  # likewise: the first has four, and its samples three
    ],
    ids=["between two updates", "in an evaluation", "in the last evaluation"],
)
def test_a_signal_saves_and_the_resumed_run_is_the_same(tmp_path, model, recording, monkeypatch, where, at, saved):
    monkeypatch.setattr("deft.training.phases.tokenizer.CHUNK", 5)  # of 20 held-out images: four parts
    settings = {"num_updates": 12, "eval_interval": 6, "save_interval": 6, "log_interval": 3}
    train_tokenizer(_config(tmp_path, model, recording, "whole", **settings), QUIET)
    with monkeypatch.context() as patched:
        calls = signal_in(patched, *where, at)
        with pytest.raises(SystemExit) as ended:
            train_tokenizer(_config(tmp_path, model, recording, "half", **settings), QUIET)
    assert (ended.value.code, calls[0]) == (143, at)
    assert checkpoint.list_checkpoints(tmp_path / "half")[-1].name == saved
    assert not (tmp_path / "half" / "tokenizer.safetensors").exists()
    train_tokenizer(_config(tmp_path, model, recording, "half", resume=True, **settings), QUIET)
    one, other = (load_file(tmp_path / name / "tokenizer.safetensors") for name in ("whole", "half"))
    assert all(torch.equal(one[name], other[name]) for name in one)
    files = [tmp_path / name / "episode_metrics.jsonl" for name in ("whole", "half")]
    first, second = ([{**json.loads(line), "time": 0} for line in file.read_text().splitlines()] for file in files)
    assert [line["step"] for line in first if line["type"] == "evaluation"] == [6, 12]
    assert first == second


def test_a_stop_does_not_wait_for_frames():
    waiting = threading.Event()

    def source():
        waiting.wait(30)
        yield np.zeros((4, 3, 2, 2), np.uint8)

    store = FrameStore(source(), 4, 2, torch.device("cpu"))
    with pytest.raises(Stopped), interruptible(lambda: True):
        store.first(4)
    waiting.set()
    store.close()


def test_training_goes_on_from_a_tokenizer_that_is_there(tmp_path, model, recording):
    """Its codes keep their meaning at first: after one update it reconstructs held-out images nearly as well."""
    before = train_tokenizer(_config(tmp_path, model, recording, "before", num_updates=40, eval_interval=0), QUIET)
    settings = {"num_updates": 1, "lr": 1e-6, "revive_interval": 0, "shift_augmentation": 2}
    new = train_tokenizer(_config(tmp_path, model, recording, "new", **settings), QUIET)
    after = train_tokenizer(
        _config(tmp_path, model, recording, "after", init_weights=before["weights"], **settings), QUIET
    )
    assert after["psnr"] == pytest.approx(before["psnr"], abs=0.3)
    assert new["psnr"] < before["psnr"] - 0.5
    with pytest.raises(InputError, match=r"the image tokenizer's weights .*nothing\.safetensors are not there"):
        train_tokenizer(_config(tmp_path, model, recording, "none", init_weights="nothing"), QUIET)


def test_pictures_are_moved_each_by_its_own_way(tmp_path, model, recording):
    """By −2 … 2 pixels in both directions, the edges repeated: inside, each is the picture some pixels away."""
    config = _config(tmp_path, model, recording, shift_augmentation=2)
    trainer = TokenizerTrainer(config, DatasetFrames(config, 16))
    frames = torch.rand(32, 3, 16, 16)
    moved = trainer._shifted(frames)
    found = set()
    for before, after in zip(frames, moved, strict=True):
        ways = {
            (down, right)
            for down in range(-2, 3)
            for right in range(-2, 3)
            if torch.equal(after[:, 2:14, 2:14], before[:, 2 + down : 14 + down, 2 + right : 14 + right])
        }
        assert len(ways) == 1
        found |= ways
    assert len(found) > 10
    assert moved.max() <= frames.max()  # nothing comes in from outside


def test_a_tokenizer_and_a_teacher_keep_the_same_episodes_out(tmp_path, model, recording):
    for seed in range(4):
        config = _config(tmp_path, model, recording, seed=seed)
        pictures = DatasetFrames(config, 16)
        training, held_out = split(pictures._dataset.num_episodes, TrainingConfig().holdout, seed)
        assert (pictures._training == training).all()
        assert (pictures._held_out == held_out).all()
        assert pictures.trained_on["episodes"] == training.tolist()  # which the file's header says


def test_what_cannot_be_trained_is_an_error_of_one_line(tmp_path, model, recording, capsys):
    command = ["train", "tokenizer", "--output-dir", str(tmp_path / "out")]
    assert main([*command, "--dataset", str(tmp_path / "nowhere")]) == 2
    assert main([*command, "--model", str(tmp_path / "nowhere.json")]) == 2
    assert main([*command, "--dataset", recording, "--model", model, "--cameras", "front"]) == 2
    assert main([*command, "--dataset", recording, "--model", model, "--resume"]) == 2
    assert main([*command, "--env-kwargs", "colour=red"]) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len(lines) == 5
    parts = ("was not found", "no such config file", "no images 'front'", "no such checkpoint", "env_kwargs")
    assert not [line for part, line in zip(parts, lines, strict=True) if part not in line]
    config = _config(tmp_path, model, recording, num_updates=2)
    train_tokenizer(config, QUIET)
    with pytest.raises(InputError, match="already holds a run"):
        train_tokenizer(config, QUIET)
    config.resume, config.batch_size = True, 4
    with pytest.raises(InputError, match="was trained with batch_size 8, not 4"):
        train_tokenizer(config, QUIET)


def test_a_source_that_fails_or_ends_early_is_an_error():
    def failing():
        yield np.zeros((2, 3, 4, 4), np.uint8)
        raise InputError("the camera fell off")

    store = FrameStore(failing(), 4, 4, torch.device("cpu"))
    assert len(store.first(2)) == 2
    with pytest.raises(InputError, match="the camera fell off"):
        store.first(3)
    store.close()
    store = FrameStore((chunk for chunk in [np.ones((2, 3, 4, 4), np.uint8)]), 4, 4, torch.device("cpu"))
    with pytest.raises(InputError, match="4 images were expected, and there are 2"):
        store.first(4)
    store.close()


def test_perplexity_by_hand():
    """Two codes in equal parts are two; 1/2, 1/4, 1/4 has entropy 1.5 ln 2, so 2^1.5."""
    assert perplexity(torch.tensor([0.5, 0.5, 0.0])) == pytest.approx(2.0)
    assert perplexity(torch.tensor([0.5, 0.25, 0.25])) == pytest.approx(2**1.5)


def test_the_shipped_tokenizer_repeats_pictures_it_has_not_seen():
    """`tiny` from a clean install: no file to name. A picture of its mean colour alone scores about 15 dB."""
    policy = load_f1_policy("tiny").policy
    assert (WEIGHTS / "tiny_tokenizer.safetensors").stat().st_size < 2 * 2**20
    env = TabletopImages(64)
    pictures = torch.from_numpy(np.concatenate([env.reset(seed=7_000_000 + index)[0] for index in range(8)]))
    env.close()
    flat = pictures.float().mean((2, 3), keepdim=True).round().to(torch.uint8).expand_as(pictures)
    made = to_images(policy.tokenizer.decode(policy.tokenizer.encode(to_model(pictures, 64, "pictures"))))
    assert float(psnr(pictures, made).mean()) > float(psnr(pictures, flat).mean()) + 4


def test_a_tokenizer_that_is_missing_is_never_replaced_by_chance():
    config = micro_config(tokenizer_weights="nowhere")
    with pytest.raises(InputError, match="deft train tokenizer") as error:
        load_f1_policy(config)
    assert "\n" not in str(error.value)
    assert isinstance(load_f1_policy(config, debug=True).policy, F1Policy)
