"""A person takes over in the live view: what is executed, marked, stored and learned from."""

import contextlib
import json
import threading
import time
import urllib.request

import numpy as np
import pytest
import torch

from deft import cli, load_dataset, schema
from deft.config.loading import resolve
from deft.config.settings import EnvConfig
from deft.data.datasets.dataset import Episode
from deft.data.labelled import marked_parts
from deft.envs.make import make_vector_env
from deft.errors import InputError
from deft.runs.operator import Command, Operator
from deft.training import lifecycle
from deft.training.run import build_trainer
from deft.training.takeover import action_names

pytestmark = pytest.mark.usefixtures("no_plots")
QUIET = {"console_level": "CRITICAL", "tensorboard": False, "view": True, "view_port": 0}


@pytest.fixture
def unserved(monkeypatch):
    """Training without the process that serves the page."""
    monkeypatch.setattr(lifecycle, "serving", lambda *_: contextlib.nullcontext())


class Person:
    """An operator that acts after `first` polls until `last`, and watches otherwise; without files and pauses."""

    def __init__(self, first, last, action, env=0):
        self.first, self.last, self.action, self.env = first, last, action, env
        self.polls, self.shown, self.paced = 0, [], 0

    def poll(self):
        self.polls += 1
        acts = self.first < self.polls <= self.last
        return Command(self.env, self.action if acts else None)

    def show(self, image, **about):
        self.shown.append({"image": image, **about})

    def pace(self, num_steps):
        self.paced += num_steps

    def rest(self):
        pass

    def close(self):
        pass


def trainer(folder, name, cfg, person=None, chunk_length=1, num_envs=2, **changes):
    rounds = {"rollout_steps": 10} if name == "dagger" else {}
    config = {
        "algorithm": {"name": name, "cfg": {"batch_size": 8, "takeover": True, **cfg}},
        "env": {"id": "reach", "num_envs": num_envs, "max_episode_steps": 20},
        "policy": {"hidden_dim": 8, "chunk_length": chunk_length},
        "trainer": {"eval_freq": 0, "save_freq": 0, "log_freq": 1, **rounds},
        "logging": QUIET,
        "output_dir": str(folder),
        "threads": 1,
        "device": "cpu",
    }
    made = build_trainer(resolve({**config, **changes}))
    if person is not None:
        made.collection.collector.takeover._operator = person
    return made


def actions_of(ring):
    """All actions of a ring [n, …], in the order of writing."""
    return ring.state_dict()["columns"][schema.ACTION]


@pytest.mark.usefixtures("unserved")
@pytest.mark.parametrize("chunk_length", [1, 2])
def test_what_a_person_does_is_executed_and_added_to_the_prior_data(tmp_path, chunk_length):
    person = Person(3, 8, (1.0, -1.0), env=1)  # 5 decisions
    made = trainer(tmp_path, "sac", {"learning_starts": 8, "intervention_weight": 3.0}, person, chunk_length)
    made.train(40 * chunk_length)
    collection = made.collection
    assert collection._interventions.count == 5
    prior = actions_of(collection._prior)
    # Reach acts in [-1, 1]; a chunk repeats the action.
    expected = (
        torch.tensor([1.0, -1.0]).expand(5, chunk_length, 2) if chunk_length > 1 else torch.tensor([[1.0, -1.0]] * 5)
    )
    assert torch.equal(prior, expected)
    # All of them are in the replay buffer too: row 2 t + 1 is decision t of environment 1.
    stored = actions_of(collection.buffer)
    assert torch.equal(stored[[7, 9, 11, 13, 15]], expected)
    assert not torch.equal(stored[[5, 17]], expected[:2])
    assert len(person.shown) == person.polls == 20
    assert [one["acts"] for one in person.shown[2:9]] == ["policy", *["person"] * 5, "policy"]
    assert person.shown[4]["action"] == [1.0, -1.0]
    assert person.shown[4]["image"].shape == (256, 256, 3)
    assert person.paced >= 20
    batch = collection.sample(8)
    assert len(batch[schema.ACTION]) == 8
    made.close()


@pytest.mark.usefixtures("unserved")
def test_a_segment_ends_with_its_episode(tmp_path):
    made = trainer(tmp_path, "sac", {"learning_starts": 8}, Person(0, 30, (0.5, 0.5)), num_envs=1)
    made.train(45)  # episodes of 20 steps: segments of 20 and 10
    prior = made.collection._prior
    assert made.collection._interventions.count == len(prior) == 30
    assert prior.state_dict()["last_frame"] == {}
    made.close()


@pytest.mark.usefixtures("unserved")
@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_a_resumed_run_has_the_interventions(tmp_path, weight):
    cfg = {"learning_starts": 8, "intervention_weight": weight}
    whole = trainer(tmp_path / "whole", "sac", cfg, Person(2, 6, (1.0, 0.0)))
    whole.train(40)
    half = trainer(tmp_path / "half", "sac", cfg, Person(2, 6, (1.0, 0.0)))
    half.train(20)
    half.close()
    resumed = trainer(tmp_path / "half", "sac", cfg, Person(0, 0, ()), resume=str(tmp_path / "half"))
    resumed.train(40)
    assert resumed.collection._interventions.count == 4
    for name, value in whole.policy.state_dict().items():
        assert torch.equal(value, resumed.policy.state_dict()[name]), name
    for made in (whole, resumed):
        made.close()


@pytest.mark.usefixtures("unserved")
def test_nothing_changes_while_nobody_watches(tmp_path):
    class Nobody(Person):
        def poll(self):
            return None

    runs = [
        trainer(tmp_path / "offered", "sac", {"learning_starts": 8}, Nobody(0, 0, ())),
        trainer(tmp_path / "plain", "sac", {"learning_starts": 8, "takeover": False}),
    ]
    for made in runs:
        made.train(40)
        made.close()
    first, second = (made.policy.state_dict() for made in runs)
    assert all(torch.equal(value, second[name]) for name, value in first.items())


@pytest.mark.usefixtures("unserved")
def test_dagger_imitates_the_steps_that_a_person_decided(tmp_path):
    # 3 rounds of 10 steps; the person acts in steps 4 to 9 of the first round, in the middle of chunks of 4.
    person = Person(3, 9, (1.0, -1.0))
    cfg = {"updates_per_round": 100, "learning_rate": 1e-2}
    made = trainer(tmp_path, "dagger", cfg, person, chunk_length=4)
    made.train(60)
    assert made.run.last_metrics["num_labels"] == 6
    assert made.run.last_metrics["intervention_rate"] == 0  # of the last round
    observation = torch.from_numpy(made.collection._episodes()[0].observation[:1])
    state = made.policy.encode(observation)
    assert made.policy.mean(state)[0, 0, :2].tolist() == pytest.approx([1.0, -1.0], abs=0.2)
    made.close()
    recorded = load_dataset(tmp_path / "labels-v0")
    marks = np.concatenate([recorded.episode(index).marks for index in range(recorded.num_episodes)])
    assert (marks.sum(), len(marks)) == (6, 60)  # all steps are recorded, with who decided them
    with pytest.raises(InputError, match="expert"):
        load_dataset(tmp_path / "labels-v0", actions="expert")


def test_parts_that_an_expert_decided():
    marks = np.array([True, False, True, True, False])
    steps = np.arange(5, dtype=np.float32)
    ends = np.array([False] * 4 + [True])
    whole = Episode(np.arange(6.0)[:, None], steps[:, None], steps, ends, np.zeros(5, bool), marks)
    first, second = marked_parts(whole)
    assert (first.observation[:, 0].tolist(), first.action[:, 0].tolist()) == ([0, 1], [0])
    assert (second.observation[:, 0].tolist(), second.reward.tolist()) == ([2, 3, 4], [2, 3])
    assert (second.terminated.tolist(), second.truncated.tolist()) == ([False, False], [False, True])
    last = Episode(
        *(vars(whole)[name] for name in ("observation", "action", "reward", "terminated", "truncated")), ~marks
    )
    assert marked_parts(last)[-1].terminated.tolist() == [True]  # its end is the episode's
    assert not marked_parts(last)[-1].truncated.any()


def test_names_of_controls():
    tabletop = make_vector_env(EnvConfig(id="tabletop", kwargs={"control_mode": "delta_ee_pos"}))
    assert action_names(tabletop) == ["x", "y", "z", "gripper"]
    tabletop.close()
    assert action_names(make_vector_env(EnvConfig(id="reach"))) == ["dim 0", "dim 1"]
    with pytest.raises(InputError, match="numbers within bounds"):
        action_names(make_vector_env(EnvConfig(id="CartPole-v1")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["sac", "--takeover"], "give --view too"),
        (["dsrl", "--takeover"], "a person's action has no noise; use critic action"),
        *[
            ([name, "--takeover"], "unknown flag; it is a setting of sac, td3, fql-online, dsrl, dagger, recap")
            for name in ("cal-ql", "ppo")
        ],
    ],
)
def test_bad_input(words, message, capsys, tmp_path):
    output = ["--output-dir", str(tmp_path / "run"), "--device", "cpu"]
    assert cli.main(["train", *words, "--env", "reach", *output]) == 2
    assert message in capsys.readouterr().err


def test_a_page_takes_over_by_http(deft, tmp_path, monkeypatch):
    """A simulated page: it reads the address, acts for a while, and leaves."""
    run, seen, is_served, opened = tmp_path / "run", [], threading.Event(), Operator.open

    def open_when_served(self):  # training is faster than the start of the server
        is_new = not self._is_open
        opened(self)
        assert not is_new or is_served.wait(60)

    monkeypatch.setattr(Operator, "open", open_when_served)

    def page():
        deadline = time.monotonic() + 60
        while not (run / "live" / "controls.json").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        token, port = (run / "live" / "token").read_text().strip(), port_of(run)
        address = f"http://127.0.0.1:{port}/{token}/"
        while time.monotonic() < deadline and sum(one.get("acts") == "person" for one in seen) < 3:
            body = json.dumps({"mode": "act", "env": 0, "action": [0.25, 1]}).encode()
            request = urllib.request.Request(f"{address}operate?run=.", body, {"content-type": "application/json"})
            with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
                seen.append(json.loads(answer.read()))
                is_served.set()
            time.sleep(0.05)

    thread = threading.Thread(target=page)
    thread.start()
    words = ["train", "dagger", "--env", "reach", "--takeover", "--view", "--view-port", 0, "--takeover-rate", 20]
    words += ["--rollout-steps", 100, "--total-timesteps", 300, "--updates-per-round", 2, "--batch-size", 8]
    deft(*words, "--eval-freq", 0, "--threads", 1, "--device", "cpu", "--output-dir", "run", "--json")
    thread.join()
    acted = [one for one in seen if one.get("acts") == "person"]
    assert len(acted) >= 3
    assert acted[-1]["action"] == [0.25, 1.0]
    assert acted[-1]["image"]
    recorded = load_dataset(run / "labels-v0")
    episodes = [recorded.episode(index) for index in range(recorded.num_episodes)]
    chosen = np.concatenate([episode.action[episode.marks] for episode in episodes])
    assert len(chosen) >= 3
    assert np.allclose(chosen, [0.25, 1.0])
    assert not (run / "live" / "controls.json").exists()  # nobody can take over any more


def port_of(run):
    text = next((run / "logs").glob("*.log")).read_text()
    return int(text.split("live view of")[1].split("127.0.0.1:")[1].split("/")[0])
