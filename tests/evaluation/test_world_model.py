"""The measures of a world model, by hand on fake models, and `deft evaluate` of a teacher run."""

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from f1_worlds import micro_config
from panning_camera import WORLD, panning_config

from deft import schema
from deft.cli import main
from deft.config.loading import to_dict
from deft.data.episodes import batch_episodes
from deft.data.robot_episode import RobotEpisode
from deft.evaluation.image_quality import psnr
from deft.evaluation.world_model import (
    episode_losses,
    mean_loss,
    measure,
    open_loop,
    shuffled_actions,
    teacher_table,
    unigram_entropy,
)
from deft.models.f1.policy import F1Policy, encode_frames
from deft.training.phases.evaluation import evaluate_teacher
from deft.training.phases.exploration import Exploration, InlineExplorer
from deft.training.phases.teacher import train_teacher


class FakeTokenizer:
    """Frames of one colour: the code is the grey level, one token a frame, and the image that a code stands for."""

    sizes = (1,)

    def __init__(self):
        self.quantize = SimpleNamespace(
            distances=lambda vectors: (vectors - torch.arange(256.0)).abs(),  # [N, 1, 1] against 256 codes
            embedding=SimpleNamespace(weight=torch.arange(256.0)[:, None]),
        )

    def features(self, frames):
        return (frames[:, 0, 0, 0] + 1) * 127.5

    def residuals(self, features, codes):
        return features[:, None, None]

    def encode(self, frames):
        return ((frames[:, 0, 0, :1] + 1) * 127.5).round().long()

    def decode(self, codes):
        return (codes[..., None, None].float() / 127.5 - 1).expand(*codes.shape[:-1], 3, 4, 4)


class FakePolicy:
    """Says that the next frame is the last plus `step`: 0 copies, 10 is right in a world that gets brighter by 10."""

    def __init__(self, step):
        self.step, self.tokenizer = step, FakeTokenizer()
        tokenizer = SimpleNamespace(image_size=4, codebook_size=256)
        self.config = SimpleNamespace(tokenizer=tokenizer, n_obs_img_steps=4, memory_enabled=False)
        self.device = torch.device("cpu")

    def forward_with_world_model(self, batch, memory_state=None, by_step=False):
        codes = batch[schema.FRAME_TOKENS]
        right = (codes[..., 3, :] + self.step == codes[..., 4, :]).float().mean(-1)
        return {"wm_losses": 1.0 - right, "wm_accuracies": right, "wm_acc_tail": right.mean()}

    def predict_images_only(self, batch, memory_state=None):
        codes = batch[schema.FRAME_TOKENS][..., 3, :] if schema.FRAME_TOKENS in batch else self._codes(batch)
        found = codes + self.step
        images = ((self.tokenizer.decode(found) + 1) * 127.5).round().to(torch.uint8)
        return {"images": images, schema.FRAME_TOKENS: found}

    def _codes(self, batch):
        return batch[schema.IMAGE0_HISTORY][:, 3, 0, 0, :1].long()


def brighter(length=12, start=20, by=10):
    """Frame t has the level start + t · by."""
    levels = start + by * np.arange(length + 1)
    wrist = np.zeros((length + 1, 3, 4, 4), np.uint8) + levels[:, None, None, None].astype(np.uint8)
    codes = levels[:, None].astype(np.int64)
    return RobotEpisode(wrist, np.zeros((length + 1, 32), np.float32), np.ones((length, 32), np.float32), codes=codes)


def test_a_model_that_is_right_and_one_that_copies():
    """Every frame is 10 levels brighter than the last. A copy is wrong in every token, and 10 levels off:
    PSNR 10 log10(255² / 100) = 28.13 dB; a model that adds 10 is right everywhere (100 dB is the limit)."""
    batches = [batch_episodes([brighter(), brighter(7)])]
    right, copies = (measure(FakePolicy(step), batches, ablations=False, horizon=3) for step in (10, 0))
    assert right["frames"] == copies["frames"] == 19
    assert right["moving_frames"] == 19
    assert right["wm_acc"] == right["wm_acc_forced"] == 1.0
    assert copies["wm_acc"] == copies["wm_acc_forced"] == 0.0
    assert right["copy_acc"] == copies["copy_acc"] == right["copy_acc_forced"] == 0.0
    assert right["psnr"] == pytest.approx(100.0)
    assert copies["psnr"] == pytest.approx(right["copy_psnr"]) == pytest.approx(10 * math.log10(255**2 / 100), abs=1e-4)
    assert right["tokenizer_psnr"] == pytest.approx(100.0)
    assert right["cross_entropy"] == 0.0
    assert copies["cross_entropy"] == pytest.approx(1.0)
    # levels 30 … 90 occur twice, 100 … 140 once: 7 · (2/19) and 5 · (1/19)
    entropy = -(7 * 2 / 19 * math.log(2 / 19) + 5 / 19 * math.log(1 / 19))
    assert right["unigram_entropy"] == pytest.approx(entropy)
    assert copies["cross_entropy_ratio"] == pytest.approx(1 / entropy)
    # Always 10 off: b · 10 + log Σ_k e^(−b |k|) = 10 b + log coth(b / 2) is least at sinh b = 0.1, where it is 4.0;
    # the levels near 0 have fewer neighbours on one side.
    assert right["copy_cross_entropy"] == copies["copy_cross_entropy"] == pytest.approx(4.0, rel=0.03)
    assert right["mean_reward"] == 1.0
    # Open loop, 3 frames ahead: the copy is 10, 20, 30 levels off.
    assert right["open_loop"]["wm_acc"] == [1.0, 1.0, 1.0]
    assert copies["open_loop"]["wm_acc"] == right["open_loop"]["copy_acc"] == [0.0, 0.0, 0.0]
    expected = [10 * math.log10(255**2 / off**2) for off in (10, 20, 30)]
    assert right["open_loop"]["copy_psnr"] == pytest.approx(expected, abs=1e-4)


def test_frames_that_stand_still_do_not_count_for_psnr():
    """A brighter episode beside one that does not move: PSNR is of the first, tokens are of both."""
    still = brighter(12, 50, 0)
    results = measure(FakePolicy(0), [batch_episodes([brighter(), still])], ablations=False, horizon=0)
    assert results["moving_frames"] == 12
    assert results["copy_acc"] == results["wm_acc"] == 0.5
    assert results["psnr"] == pytest.approx(10 * math.log10(255**2 / 100), abs=1e-4)
    assert results["std_reward"] == 0.5  # one episode all right, one all wrong


def test_psnr_and_entropy():
    black, grey = torch.zeros(1, 3, 4, 4), torch.full((1, 3, 4, 4), 51.0)
    assert float(psnr(black, grey)) == pytest.approx(20 * math.log10(255 / 51))  # 13.98 dB
    assert unigram_entropy(torch.tensor([[0, 0], [1, 1]]), 8) == pytest.approx(math.log(2))
    assert unigram_entropy(torch.tensor([3, 3, 3]), 8) == 0.0


def test_shuffling_gives_each_row_the_actions_of_another():
    batch = {schema.ACTION_HISTORY: torch.arange(3.0)[None, :, None, None].expand(2, 3, 4, 32)}
    assert shuffled_actions(batch)[schema.ACTION_HISTORY][:, :, 0, 0].tolist() == [[2, 0, 1]] * 2


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A teacher run of a few episodes, from its config file on."""
    folder = tmp_path_factory.mktemp("teacher")
    (folder / "model.json").write_text(json.dumps(to_dict(micro_config(motion_prior=True, condition_init=0.05))))
    config = panning_config(folder / "run", num_episodes=4, steps_per_episode=12)
    config.model.config_file = str(folder / "model.json")
    train_teacher(config)
    (folder / "model.json").unlink()  # a run keeps its own
    return folder / "run"


def test_ablations_and_carried_memory(run, monkeypatch, capsys):
    """Open loop and the passes agree with the model's own methods, on episodes that end at different times."""
    policy = F1Policy(micro_config(condition_init=0.3, motion_prior=True)).eval()
    torch.nn.init.normal_(policy.tokenizer.quantize.embedding.weight)
    torch.nn.init.normal_(policy.model.world_model.output.weight)  # which starts with nothing to say
    episodes = [InlineExplorer(Exploration({"world": WORLD, "max_steps": n}, seed=n)).take(1)[0] for n in (12, 7)]
    for episode in episodes:
        episode.codes = encode_frames(policy, episode.wrist)
    batch = batch_episodes(episodes)
    monkeypatch.setattr("deft.runs.progress.LINE_INTERVAL", 0.0)
    results = measure(policy, [batch], horizon=3)
    # Six passes of two episodes: whole, three ablations, without the head camera, and there without the memory.
    shown = [line for line in capsys.readouterr().err.splitlines() if "% of 12 · " in line]
    assert "100% of 12 · 12 episodes" in shown[-1]
    assert results["frames"] == 19
    assert set(results["ablations"]) == {"actions_shuffled", "images_masked", "memory_zeroed"}
    alone = measure(policy, [batch.without_head()], horizon=0)
    assert "without_head" not in alone
    assert results["without_head"]["cross_entropy"] == alone["cross_entropy"] != results["cross_entropy"]
    assert results["without_head"]["ablations"] == {"memory_zeroed": alone["ablations"]["memory_zeroed"]}
    assert "by the wrist camera alone" in teacher_table(results)
    losses = []
    for episode in episodes:  # one after the other, all steps at once
        steps, _ = batch_episodes([episode]).chunk(0, 12)
        with torch.no_grad():
            found = policy(steps, memory_state=policy.initial_memory(1))
        losses.append((len(episode), float(found["wm_loss"])))
    assert results["cross_entropy"] == pytest.approx(sum(n * loss for n, loss in losses) / 19, abs=1e-5)
    sums, lengths = episode_losses(policy, [batch], together=5)  # in pieces, beside each other
    assert lengths.tolist() == [12, 7]
    assert (sums / lengths).tolist() == pytest.approx([loss for _, loss in losses], abs=1e-5)
    assert mean_loss(policy, [batch]) == pytest.approx(results["cross_entropy"], abs=1e-5)
    changed = [results["ablations"][name]["cross_entropy"] for name in results["ablations"]]
    assert all(abs(value - results["cross_entropy"]) > 1e-6 for value in changed)  # each takes something away
    ahead = open_loop(policy, [batch], 3)
    first = batch.steps(torch.tensor([0, 1]), torch.tensor([0, 0]))
    predicted = policy.predict_images_only(first, policy.initial_memory(2))
    right = (predicted["frame_tokens"] == batch.streams["codes"][:, 1]).float().mean()
    assert open_loop(policy, [batch_episodes([RobotEpisode(*_cut(e, 3)) for e in episodes])], 3)["wm_acc"][0] == (
        pytest.approx(float(right))
    )
    assert len(ahead["wm_acc"]) == 3


def _cut(episode, length):
    """The first steps of an episode."""
    return (
        episode.wrist[: length + 1], episode.state[: length + 1], episode.action[:length],
        episode.head[: length + 1], episode.codes[: length + 1],
    )  # fmt: skip


def test_deft_evaluate_measures_a_teacher(run, capsys, tmp_path, monkeypatch):
    video = tmp_path / "predictions.mp4"
    monkeypatch.setattr("deft.runs.progress.LINE_INTERVAL", 0.0)
    assert main(["evaluate", str(run), "--episodes", "2", "--device", "cpu", "--video", str(video), "--json"]) == 0
    shown = capsys.readouterr()
    assert "100% of 2 · 2 episodes" in shown.err  # while they are collected
    results = json.loads(shown.out.splitlines()[-1])
    assert results["episodes"] == 2
    assert results["frames"] == 24
    assert {
        "wm_acc",
        "copy_acc",
        "psnr",
        "copy_psnr",
        "cross_entropy",
        "unigram_entropy",
        "ablations",
    } <= results.keys()
    assert len(results["open_loop"]["wm_acc"]) == len(results["open_loop"]["copy_acc"]) == 10
    assert video.stat().st_size > 1000
    assert all((run / "plots" / name).is_file() for name in ("open_loop_acc.png", "open_loop_psnr.png", "held_out.png"))
    assert main(["evaluate", str(run / "checkpoint-4"), "--episodes", "2", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    assert "tokens right" in printed
    assert main(["evaluate", str(run), "--random-policy"]) == 2
    again = evaluate_teacher(run, episodes=2, device="cpu")
    assert again["wm_acc"] == results["wm_acc"]
    assert teacher_table(again) in printed
