"""How SAC's updates follow its steps where they are recorded: beside the environments, and none is lost."""

import pytest
import torch

from deft.config.loading import resolve
from deft.errors import InputError
from deft.training.run import build_trainer

STARTS, NUM_ENVS = 20, 2


class Recorded:
    """What `CapturedUpdate` is to the collection, without a GPU to record on."""

    def __init__(self, collection) -> None:
        self.collection = collection

    def run(self):
        algorithm = self.collection.algorithm
        algorithm.schedule()
        metrics = [algorithm.step(self.collection.sample(8)) for _ in range(algorithm.period)]
        return algorithm.period, metrics[-1]


def build(tmp_path, name, **cfg):
    config = resolve(
        {
            "algorithm": {"name": "sac", "cfg": {"batch_size": 8, "learning_starts": STARTS, **cfg}},
            "env": {"id": "Pendulum-v1", "num_envs": NUM_ENVS},
            "policy": {"hidden_dim": 8, "num_layers": 1},
            "trainer": {"total_timesteps": 60, "eval_freq": 0, "save_freq": 0},
            "logging": {"console_level": "CRITICAL", "tensorboard": False, "progress_bar": False},
            "device": "cpu",
            "threads": 1,
            "output_dir": str(tmp_path / name),
        }
    )
    trainer = build_trainer(config)
    collection = trainer.collection
    collection._captured = collection._captured_warmup = Recorded(collection)
    collection._is_beside = True
    collection.collector.before_stepping = collection._run_recorded
    return trainer


def test_recorded_updates_are_made_between_the_actions_and_the_step(tmp_path, monkeypatch):
    trainer, calls = build(tmp_path, "run"), []
    for owner, name in ((trainer.policy, "act"), (trainer.algorithm, "step"), (trainer.env, "step")):
        word = {"act": "act"}.get(name, "update" if owner is trainer.algorithm else "env")
        monkeypatch.setattr(owner, name, _recorded(getattr(owner, name), calls, word))
    trainer.train()
    # Ten turns at random; the tenth reaches `learning_starts` and makes two updates due, one a step; they are made in
    # the next turn, and so on: (60 − 18) are due in all, of which the last two wait for a turn to come.
    assert calls == ["env"] * 10 + ["act", "update", "update", "env"] * 20
    assert trainer.algorithm.version == 40
    trainer.close()


@pytest.mark.parametrize("cfg", [{"policy_delay": 2}, {"critic_warmup": 25}])
def test_what_waits_for_the_next_turn_is_resumed(tmp_path, cfg):
    trainers = [build(tmp_path, name, **cfg) for name in ("whole", "first", "second")]
    whole, first, second = trainers
    whole.train()
    first.train(40)
    second.load(first.save())
    second.train()
    assert whole.algorithm.version == second.algorithm.version == 40
    for own, theirs in zip(whole.policy.parameters(), second.policy.parameters(), strict=True):
        assert torch.equal(own, theirs)
    for trainer in trainers:
        trainer.close()


def test_the_critics_warm_up_is_a_recording_of_its_own(tmp_path):
    # 42 updates are due, 40 in time, made in twos. Those of the critics alone, 25 of them, are recorded up to the 24th;
    # the 25th is made as it stands, which leaves 15: 7 twos.
    trainer = build(tmp_path, "run", critic_warmup=25, policy_delay=2)
    collection, runs = trainer.collection, []
    for name in ("_captured_warmup", "_captured"):
        recorded = getattr(collection, name)
        setattr(collection, name, recorded := type(recorded)(collection))
        recorded.run = _recorded(recorded.run, runs, name)
    trainer.train()
    assert runs == ["_captured_warmup"] * 12 + ["_captured"] * 7
    assert trainer.algorithm.version == 39  # the 40th waits for a second
    trainer.close()


def test_updates_are_recorded_again_when_the_buffer_moves(tmp_path, monkeypatch):
    """A CUDA graph reads the memory that it was captured with."""
    trainer, resets = build(tmp_path, "run"), []
    collection = trainer.collection
    collection._planned_steps = 16

    def reset():
        resets.append(len(collection.buffer))
        collection._layout = collection._present_layout()

    monkeypatch.setattr(collection, "_reset_recordings", reset)
    start = collection.start
    monkeypatch.setattr(collection, "start", lambda steps, total: start(steps, None))  # as with chunks
    trainer.train()
    # Room for 16 of the 60 transitions, then 32 and 64; two come at a time.
    assert resets == [18, 34]
    assert trainer.algorithm.version == 40
    trainer.close()


def test_bf16_products_are_made_by_onednn_and_learn_alike(tmp_path):
    trainer, seen = build(tmp_path, "run", precision="bf16"), []
    trainer.collection.collector.before_stepping = lambda: seen.append(torch.backends.mkldnn.enabled)
    trainer.train(10)
    assert seen == [torch.backends.mkldnn.enabled] * 5
    trainer.close()
    losses = {}
    for precision in ("float32", "bf16"):
        torch.manual_seed(0)
        trainer = build(tmp_path, precision, precision=precision)
        trainer.train(24)
        torch.manual_seed(1)
        losses[precision] = trainer.algorithm.step(trainer.collection.sample(8))
        assert all(parameter.dtype == torch.float32 for parameter in trainer.policy.parameters())
        trainer.close()
    for name, value in losses["float32"].items():  # bf16 keeps 8 bits: an error of 1/256 a product
        assert float(losses["bf16"][name]) == pytest.approx(float(value), rel=0.03, abs=0.03), name
    assert float(losses["bf16"]["q_loss"]) != float(losses["float32"]["q_loss"])


def test_a_recording_needs_a_gpu(tmp_path):
    with pytest.raises(InputError, match="capture: 'on' needs a GPU"):
        build(tmp_path, "run", capture="on")


def _recorded(method, calls, word):
    def called(*arguments, **named):
        calls.append(word)
        return method(*arguments, **named)

    return called


def test_a_run_that_ends_before_its_first_update_is_an_error(tmp_path):
    trainer = build(tmp_path, "run", learning_starts=61)  # of 60 steps
    with pytest.raises(InputError, match=r"learning_starts: 61 .* the 60 env steps .* use at most 60"):
        trainer.train()
    assert not (tmp_path / "run").exists()
    trainer.train(64)  # an update is due after 62 steps, and made in the next turn
    assert trainer.algorithm.version > 0
    trainer.close()


def test_a_first_part_without_an_update_is_warned_about(tmp_path, caplog):
    trainer = build(tmp_path, "run")
    trainer.train(STARTS - 2)
    assert f"the first {STARTS - 2} env steps make no update: learning_starts is {STARTS}" in caplog.text
    trainer.close()
