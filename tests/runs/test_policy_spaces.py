"""Streams are known by their names, from the environment or the dataset to the policy, wherever it is loaded."""

import numpy as np
import pytest
from gymnasium import spaces

from deft.data.datasets import load_dataset
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel
from deft.ownership import write_manifest
from deft.runs.policy_spaces import PolicySpaces, check_streams, policy_space

ENV = ["--env", "vla_worlds:TwoCameras-v0"]
OTHER = [*ENV, "--env-kwargs", 'names=["z_top","a_wrist","z_arm","a_hand"]']  # sorted, they come the other way round
RENAME = ["top=z_top", "wrist=a_wrist", "arm=z_arm", "hand=a_hand"]
EVALUATE = ["--episodes", 2, "--device", "cpu", "--json"]
SHORT = ["--eval-freq", 0, "--threads", 1, "--device", "cpu", "--json"]
PPO = [*SHORT, "--rollout-steps", 8, "--batch-size", 8, "--n-epochs", 1, "--total-timesteps", 8]
MODEL = ["--model", "vla-tiny", "--chunk-length", 1, "--vla-model-config", "width=16", "proprio_key=arm", "cell=4"]
SAC = [*SHORT, "--total-timesteps", 8, "--learning-starts", 4, "--batch-size", 4, "--buffer-size", 8]

pytestmark = pytest.mark.usefixtures("no_plots")


def played(deft, *arguments, run="run"):
    return deft("evaluate", run, *EVALUATE, *arguments)["mean_reward"]


# SAC's actor on vectors has no parameter that bears a stream's name: without names it acts on the wrong one in silence.
@pytest.mark.parametrize(
    "train",
    [["ppo", *PPO, *MODEL], ["sac", *SAC, "--random-shift", 0, "--encoder-dim", 8, "--hidden-dim", 8]],
    ids=["vla-tiny", "actor"],
)
def test_evaluation_matches_streams_by_name(deft, deft_or_error, train):
    deft("train", *train, *ENV, "--output-dir", "run")
    own = played(deft, *ENV)
    error = deft_or_error("evaluate", "run", *EVALUATE, *OTHER)
    assert "the environment has the streams a_hand, a_wrist, z_arm, z_top; the policy reads arm, " in error
    assert "--rename_streams arm=STREAM" in error
    assert played(deft, *OTHER, "--rename_streams", *RENAME) == own  # the same episodes under other names
    compared = deft("compare", "run", *OTHER, "--rename_streams", *RENAME, *EVALUATE)
    assert compared["columns"]["success"]["run"]["mean_reward"] == own


def test_a_run_keeps_its_names(deft, deft_or_error, tmp_path):
    deft("train", "ppo", *PPO, *MODEL, *OTHER, "--rename_streams", *RENAME, "--output-dir", "run")
    recorded = PolicySpaces.read(tmp_path / "run" / "checkpoint-8")
    assert list(recorded.observation) == ["arm", "hand", "top", "wrist"]
    assert played(deft, *OTHER) == played(deft, *OTHER)  # its own environment: renamed as in training
    more = ["--total-timesteps", 16, "--trust-remote-code", "--json"]
    assert deft("train", "ppo", "--config", "run/config.yaml", "--resume", "run", *more)["timesteps"] == 16
    # Another run from it, in the same environment
    deft("train", "ppo", *PPO, *MODEL, *OTHER, "--model-path", "run", "--output-dir", "next")
    assert list(PolicySpaces.read(tmp_path / "next" / "checkpoint-8").observation) == ["arm", "hand", "top", "wrist"]
    config = tmp_path / "run" / "config.yaml"
    (tmp_path / "other.yaml").write_text(config.read_text().replace("top: z_top", "upper: z_top"))
    error = deft_or_error("train", "ppo", "--config", "other.yaml", "--resume", "run", "--trust-remote-code")
    assert "has the streams arm, hand, upper, wrist; the policy reads arm, top, wrist" in error
    # The flag adds to the names of the run.
    error = deft_or_error("train", "ppo", *PPO, *OTHER, *MODEL, "--resume", "run", "--rename_streams", "upper=z_top")
    assert "'upper': 'z_top'} gives one stream two names; give each one" in error


def test_streams_that_are_swapped_in_a_dataset_alone_are_warned_about(deft, caplog):
    deft("collect", *ENV, "--policy", "random", "--episodes", 2, "--json", "--out", "data/own-v0")
    learn = [*SHORT, "--num-epochs", 1, "--batch-size", 4, "--val-fraction", 0, "--rename_streams"]
    deft(
        "train",
        "sft",
        "--dataset",
        "data/own-v0",
        *ENV,
        *MODEL,
        *learn,
        "top=wrist",
        "wrist=top",
        "--output-dir",
        "run",
    )
    (warning,) = [text for text in caplog.messages if text.startswith("rename_streams: ")]
    assert "has streams named top, wrist already and keeps them" in warning
    assert "--env_rename_streams" in warning


def test_datasets_match_by_name(deft, deft_or_error, tmp_path):
    record = ["--policy", "random", "--episodes", 2, "--json"]
    deft("collect", *ENV, *record, "--out", "data/own-v0")
    deft("collect", *OTHER, *record, "--out", "data/other-v0")
    deft("collect", *OTHER, *record, "--out", "data/renamed-v0", "--rename_streams", *RENAME)
    assert list(load_dataset("data/renamed-v0").observation_space) == ["arm", "hand", "top", "wrist"]
    learn = [*SHORT, "--num-epochs", 1, "--batch-size", 4, "--val-fraction", 0]
    deft("train", "sft", "--dataset", "data/own-v0", *MODEL, *learn, "--output-dir", "run")
    more = ["train", "sft", "--dataset", "data/other-v0", "--model-path", "run", *learn]
    error = deft_or_error(*more, *OTHER, "--output-dir", "next")
    assert error.startswith("deft: dataset ")
    assert "has the streams a_hand, a_wrist, z_arm, z_top; the policy reads arm, top, wrist: name them" in error
    # The environment to evaluate in lacks the same names and is renamed like the dataset.
    deft(*more, *OTHER, "--rename_streams", *RENAME, "--output-dir", "next")
    assert isinstance(played(deft, run="next"), float)
    # One with yet other names is renamed by a flag of its own.
    third = [*ENV, "--env-kwargs", 'names=["up","hold","joints","fingers"]']
    error = deft_or_error(*more, *third, "--rename_streams", *RENAME, "--output-dir", "third")
    assert error.startswith("deft: env ")
    assert "--env_rename_streams arm=STREAM top=STREAM wrist=STREAM" in error
    names = ["top=up", "wrist=hold", "arm=joints"]
    deft(*more, *third, "--rename_streams", *RENAME, "--env-rename-streams", *names, "--output-dir", "third")
    assert played(deft, *ENV) == played(deft, *OTHER, "--rename_streams", *RENAME)
    error = deft_or_error("collect", *OTHER, "--policy", "run", "--episodes", 1, "--out", "data/no-v0", "--json")
    assert "the policy reads arm, top, wrist" in error


def test_a_policy_trained_with_labels_is_loaded_where_there_are_none(deft, tmp_path):
    """The trunk of a model with a bottleneck has inputs for each label; vla-tiny's own number of labels is 8."""
    labelled = [*ENV, "--env-kwargs", 'names=["top","wrist","arm","places"]']
    deft("train", "ppo", *PPO, *MODEL, "bottleneck=8", *labelled, "--output-dir", "run")
    assert PolicySpaces.read(tmp_path / "run" / "checkpoint-8").observation["places"].shape != (8,)
    unlabelled = [*ENV, "--env-kwargs", 'names=["top","wrist","arm","hand"]']
    assert played(deft, *labelled) == played(deft, *unlabelled)
    deft("train", "ppo", *PPO, *unlabelled, "--model-path", "run", "--output-dir", "next")
    assert isinstance(played(deft, run="next"), float)


def test_a_checkpoint_that_records_no_streams_is_taken_as_the_environment_has_them(deft, tmp_path, caplog):
    deft("train", "ppo", *PPO, *MODEL, *ENV, "--output-dir", "run")
    own = played(deft, *ENV)
    (tmp_path / "run" / "checkpoint-8" / "spaces.json").unlink()
    assert played(deft, *ENV) == own
    assert "does not record its streams: it is assumed that they are those of the environment: arm, hand" in caplog.text
    more = ["--total-timesteps", 16, "--trust-remote-code", "--json"]
    assert deft("train", "ppo", "--config", "run/config.yaml", "--resume", "run", *more)["timesteps"] == 16
    assert PolicySpaces.read(tmp_path / "run" / "checkpoint-16") is not None


CAMERA, SENSOR = spaces.Box(0, 255, (3, 16, 16), np.uint8), spaces.Box(-1, 1, (2,), np.float32)
WORDS = spaces.Box(0, 255, (20,), np.uint8)
MADE_FOR = spaces.Dict({"instruction": WORDS, "state": SENSOR, "top": CAMERA, "wrist": CAMERA})


def changed(**streams):
    return spaces.Dict({**MADE_FOR.spaces, **streams})


def tiny(**keywords):
    keywords = {"image_keys": ["top", "wrist"], "image_size": 16, "proprio_dim": 2, "action_dim": 1, **keywords}
    return VLAPolicy(TinyVLAModel(chunk_length=1, width=8, **keywords))


def test_what_a_policy_does_not_read_may_differ(caplog):
    policy = tiny(image_keys=["top"])
    others = {name: space for name, space in MADE_FOR.items() if name != "wrist"}
    with caplog.at_level("INFO"):
        check_streams(policy, MADE_FOR, spaces.Dict({**others, "back": CAMERA}), "here")
    assert "here has further streams, which the policy does not read: back" in caplog.text
    with pytest.raises(InputError, match=r"here has the streams .*; the policy reads instruction, state, top, wrist"):
        check_streams(tiny(), MADE_FOR, spaces.Dict(others), "here")


@pytest.mark.parametrize(
    ("streams", "actor_critic", "vla"),
    [
        ({"top": spaces.Box(0, 255, (3, 48, 64), np.uint8)}, "'top' is image of shape", None),  # a VLA model scales it
        ({"instruction": spaces.Box(0, 255, (50,), np.uint8)}, None, None),
        ({"state": spaces.Box(-1, 1, (3,), np.float32)}, "'state' is vector", "'state' is vector of shape"),
        ({"top": SENSOR}, "'top' is vector", "'top' is vector of shape"),
    ],
)
def test_a_stream_of_another_kind_is_named(streams, actor_critic, vla):
    policies = (ActorCritic(MADE_FOR, spaces.Box(-1, 1, (1,))), actor_critic), (tiny(), vla)
    for policy, message in policies:
        if message is None:
            check_streams(policy, MADE_FOR, changed(**streams), "here")
        else:
            with pytest.raises(InputError, match=f"here: stream {message}"):
                check_streams(policy, MADE_FOR, changed(**streams), "here")


def test_labels_come_and_go():
    labelled = changed(places=SENSOR)
    check_streams(tiny(), labelled, MADE_FOR, "here")
    recorded = PolicySpaces(labelled, SENSOR)
    assert policy_space(recorded, MADE_FOR, "run", "here") == MADE_FOR
    assert policy_space(PolicySpaces(MADE_FOR, SENSOR), labelled, "run", "here") == labelled
    with pytest.raises(InputError, match=r"labels: run was trained with places .* here has keyframes"):
        policy_space(recorded, changed(keyframes=SENSOR), "run", "here")  # as many, and of another kind


def test_spaces_survive_writing(tmp_path):
    uneven = spaces.Box(np.array([-1, -2], np.float32), np.array([1, np.inf], np.float32))
    observation = changed(mode=spaces.Discrete(3), arm=uneven)
    PolicySpaces(observation, uneven, np.array([True, False])).write(tmp_path)
    again = PolicySpaces.read(tmp_path)
    assert again.observation == observation
    assert again.action == uneven
    assert again.action_mask.tolist() == [True, False]
    assert (tmp_path / "spaces.json").stat().st_size < 2_000  # bounds of an image are one number
    assert PolicySpaces.read(tmp_path / "absent") is None


@pytest.mark.parametrize(
    "text",
    ["{", "[]", "{}", "[" * 9999, '{"observation_space": {"type": "Dict", "subspaces": 3}, "action_space": 1}'],
)
def test_damaged_spaces_are_an_error(tmp_path, text):
    (tmp_path / "spaces.json").write_text(text)
    with pytest.raises(InputError, match=r"spaces\.json: damaged"):
        PolicySpaces.read(tmp_path)


def test_spaces_are_verified_by_the_manifest(tmp_path):
    PolicySpaces(MADE_FOR, SENSOR).write(tmp_path)
    write_manifest(tmp_path, {})
    file = tmp_path / "spaces.json"
    file.write_text(file.read_text().replace("wrist", "waist"))
    with pytest.raises(InputError, match=r"spaces\.json: "):
        PolicySpaces.read(tmp_path)
