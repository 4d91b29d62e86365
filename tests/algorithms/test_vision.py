"""Self-supervised vision: losses by hand, what it trains and leaves alone, runs, and imitation that starts from it."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.algorithms.vision import Vision, _same_rows
from deft.config.algorithm_settings import VisionSettings
from deft.config.command_settings import CollectConfig
from deft.config.settings import PolicyConfig
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel
from deft.runs.checkpoint import load_tensors
from deft.runs.policies import checkpoint_folder
from deft.training.collect import collect

COMMON = ["--threads", 1, "--device", "cpu", "--eval-freq", 0, "--no-progress-bar", "--json", "--num-epochs", 1]
COLOURS = {"red": (255, 0, 0), "green": (0, 255, 0), "blue": (0, 0, 255), "white": (255, 255, 255)}

pytestmark = pytest.mark.usefixtures("no_plots")


def make_policy(vision="cells", chunk_length=1, **changes):
    torch.manual_seed(0)
    sizes = {"action_dim": 2, "image_size": 16, "image_keys": ["rgb"], "proprio_key": None, "width": 8}
    model = TinyVLAModel(**sizes, chunk_length=chunk_length, vision=vision, **changes)
    shape = (2,) if chunk_length == 1 else (chunk_length, 2)
    config = PolicyConfig(unit_actions=True, separate_value=False)
    return VLAPolicy(model, action_space=spaces.Box(-1.0, 1.0, shape), config=config)


def encode(names):
    return torch.from_numpy(np.stack([schema.encode_text(f"find the {name} square", 32) for name in names]))


def squares(count=32, seed=0):
    """Dark images with a square of a random colour at a random place; the action moves it by 2 pixels to a side."""
    generator = np.random.default_rng(seed)
    image, after = (np.zeros((count, 3, 16, 16), np.uint8) for _ in range(2))
    names = generator.choice(list(COLOURS), count)
    action = generator.choice([-1.0, 1.0], (count, 2)).astype(np.float32)
    for i, name in enumerate(names):
        x, y = generator.integers(2, 12, 2)
        dx, dy = (2 * action[i]).astype(int)
        image[i, :, y : y + 2, x : x + 2] = np.array(COLOURS[name])[:, None, None]
        after[i, :, y + dy : y + dy + 2, x + dx : x + dx + 2] = np.array(COLOURS[name])[:, None, None]
    text = encode(names)
    now, later = ({"rgb": torch.from_numpy(frames), "instruction": text} for frames in (image, after))
    return {
        schema.OBSERVATION: now, schema.NEXT_OBSERVATION: later, schema.ACTION: torch.from_numpy(action),
    }  # fmt: skip


# -- losses ------------------------------------------------------------------------------------------------------------


def test_the_loss_is_that_of_the_right_image_and_the_right_text():
    """Logits as the predictor has them; both losses are −log softmax at the right answer, weighted 2 and 3."""
    settings = VisionSettings(batch_size=4, num_negatives=2, prediction_weight=2.0, text_weight=3.0)
    vision = Vision(make_policy(), settings)
    batch = squares(4, seed=3)
    names = [schema.decode_text(row) for row in batch[schema.OBSERVATION]["instruction"]]
    assert len(set(names)) > 1
    loss, metrics = vision._losses(batch)
    features, scores = vision.policy.describe_frames(batch[schema.OBSERVATION], 3)
    later, nothing = vision.policy.describe_frames(batch[schema.NEXT_OBSERVATION])
    assert nothing is None
    logits = vision.predictor.next_logits(features, batch[schema.ACTION], later, torch.eye(4, dtype=torch.bool))[0]
    by_hand = -torch.stack([logits[i, i] - logits[i].logsumexp(0) for i in range(4)]).mean()
    # The factor starts at e¹. Alternatives are the texts of the next two rows, unless they are the same.
    texts = []
    for i in range(4):
        allowed = [0, *(n for n in (1, 2) if names[(i + n) % 4] != names[i])]
        row = math.e * scores[i, 0][allowed]
        texts.append(row.logsumexp(0) - row[0])
    torch.testing.assert_close(metrics["prediction_loss"], by_hand)
    torch.testing.assert_close(metrics["text_loss"], torch.stack(texts).mean())
    torch.testing.assert_close(loss, 2 * by_hand + 3 * torch.stack(texts).mean())


def test_the_prediction_depends_on_the_actions_within_the_episode():
    vision = Vision(make_policy(chunk_length=2), VisionSettings(text_weight=0.0))
    batch = squares(4)
    chunk = torch.randn(4, 2, 2)
    mask = torch.tensor([[True, False]] * 4)

    def loss(actions):
        return vision._losses({**batch, schema.ACTION: actions, schema.STEP_MASK: mask})[0]

    beyond, within = chunk.clone(), chunk.clone()
    beyond[:, 1] += 1.0  # after the end of the episode: the last action is repeated there
    within[:, 0] += 1.0
    assert torch.equal(loss(chunk), loss(beyond))
    assert not torch.equal(loss(chunk), loss(within))


@pytest.mark.parametrize("vision", ["cells", "convolutions"])
def test_texts_are_compared_without_knowing_the_right_one(vision):
    """Scores of row 0 depend on its image and on the candidates; what text the image is encoded with is no hint."""
    camera = make_policy(vision).model.cameras[0]
    image, text = squares(2)[schema.OBSERVATION]["rgb"], torch.randn(3, 64)
    choices = text[torch.tensor([[1], [1]])]
    one, other = (camera.describe(image, text[[own, 1]], choices)[1][0] for own in (0, 2))
    assert torch.equal(one, other)
    features, _ = camera.describe(image, text[:2], choices)
    assert torch.equal(features, camera(image, text[:2]))


@pytest.mark.parametrize("vision", ["cells", "convolutions"])
def test_the_own_instruction_is_no_hint_of_the_next_image(vision):
    """Encoded with their own texts, images would be recognised by them: other texts of the rows after the first one
    must change nothing, and that of the first row must change the features of all."""
    learner = Vision(make_policy(vision), VisionSettings(text_weight=0.0))
    batch = squares(4, seed=3)

    def features(names):
        given = {**batch[schema.OBSERVATION], "instruction": encode(names)}
        return learner.policy.describe_frames(TensorDict(given, [4]))[0]

    one = features(["red", "red", "green", "blue"])
    assert torch.equal(one, features(["red", "white", "white", "red"]))
    assert ((one != features(["blue", "red", "green", "blue"])).flatten(1).any(1)).all()
    black = {
        "rgb": torch.zeros(4, 3, 16, 16, dtype=torch.uint8),
        "instruction": encode(["red", "green", "blue", "white"]),
    }
    same = {schema.OBSERVATION: black, schema.NEXT_OBSERVATION: black, schema.ACTION: torch.zeros(4, 2)}
    # Without images only chance remains: log 4 (the texts differ, so that the rows are alternatives).
    assert learner._losses(same)[1]["prediction_loss"].item() == pytest.approx(math.log(4))


def test_equal_next_images_are_no_alternatives():
    """Rows 0 and 2 lead to the same end of an episode: each has 2 alternatives, the other rows 3."""
    learner = Vision(make_policy(), VisionSettings(text_weight=0.0))
    batch = squares(4, seed=3)
    for stream in batch[schema.NEXT_OBSERVATION].values():
        stream[2] = stream[0]
    same = _same_rows(batch[schema.NEXT_OBSERVATION])
    expected = torch.eye(4, dtype=torch.bool)
    expected[0, 2] = expected[2, 0] = True
    assert torch.equal(same, expected)
    observation, later = batch[schema.OBSERVATION], batch[schema.NEXT_OBSERVATION]
    features, later = (learner.policy.describe_frames(one)[0] for one in (observation, later))
    plain = learner.predictor.next_logits(features, batch[schema.ACTION], later, torch.eye(4, dtype=torch.bool))[0]
    by_hand = [
        plain[i][[j for j in range(4) if j == i or {i, j} != {0, 2}]].logsumexp(0) - plain[i, i] for i in range(4)
    ]
    torch.testing.assert_close(learner._losses(batch)[1]["prediction_loss"], torch.stack(by_hand).mean())


def test_it_learns_where_things_are_and_what_they_are_called():
    """Four colours: by chance 1 of 32 (or 16) next images is found, and 1 of 2 to 4 texts."""
    policy = make_policy()
    vision = Vision(policy, VisionSettings(learning_rate=1e-2, num_negatives=4, learning_rate_schedule="constant"))
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    for seed in range(120):
        metrics = vision.step(squares(seed=seed))
    assert metrics["text_accuracy"] == 1.0
    held_out = vision.validate([squares(seed=1000), squares(16, seed=1001)])
    assert held_out["text_accuracy"] == 1.0
    assert held_out["prediction_accuracy"] > 0.1
    # log 32 = 3.5 by chance
    assert held_out["bc_loss"] < 3.0
    # Only the cameras and the text encoder that conditions them have changed, and no statistics.
    changed = {
        name.split(".")[1] for name, value in policy.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {"cameras", "names"}
    # A query of the text finds the named one of two squares: positions are the first 16 · 2 features, −1 to 1.
    image = np.zeros((2, 3, 16, 16), np.uint8)
    image[:, :, 4:6, 2:4] = np.array(COLOURS["red"])[:, None, None]
    image[:, :, 10:12, 12:14] = np.array(COLOURS["blue"])[:, None, None]
    text = encode(("red", "blue"))
    model = policy.model
    found = model.cameras[0](torch.from_numpy(image), model._encode_texts(text)[1])  # as a policy uses them
    positions = found[:, :32].view(2, 16, 2)[:, 8:]
    expected = torch.tensor([[2 / 7 - 1, 4 / 7 - 1], [12 / 7 - 1, 10 / 7 - 1]])  # cells 1, 2 and 6, 5 of 0…7
    # Patches are two cells wide: the cell beside that of a square, 2 / 7 away, shows it too.
    assert (positions - expected[:, None]).abs().amax(-1).amin(1).max() < 0.3


def test_validation_mixes_the_rows_of_its_batches():
    """Rows 0, 2 and 1, 3 of two batches of two: consecutive rows are frames of one scene."""
    vision = Vision(make_policy(), VisionSettings(batch_size=2, num_negatives=1))
    rows = squares(4, seed=3)

    def pick(value, which):
        return {key: pick(one, which) for key, one in value.items()} if isinstance(value, dict) else value[which]

    found = vision.validate([pick(rows, [0, 1]), pick(rows, [2, 3])])
    losses = [vision._losses(pick(rows, which))[0] for which in ([0, 2], [1, 3])]
    torch.testing.assert_close(found["bc_loss"], torch.stack(losses).mean())


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reach(tmp_path_factory):
    """60 steps of chance in the reach world: a camera, proprioception, and an instruction."""
    out = tmp_path_factory.mktemp("data") / "reach-v0"
    kwargs = {"observation": "vla", "image_size": 16}
    collect(CollectConfig(out=str(out), policy="random", env="deft/Reach-v0", env_kwargs=kwargs, steps=60))
    return out


def weights(path):
    return load_tensors(checkpoint_folder(path) / "model.pt")


def test_imitation_starts_from_the_encoders_and_fits_its_own_statistics(deft, deft_or_error, reach, tmp_path):
    train = ["--dataset", reach, "--model", "vla-tiny", *COMMON, "--batch-size", 16, "--updates-per-epoch", 3]
    summary = deft("train", "vision", *train, "--output-dir", "vision")
    assert {"prediction_loss", "text_loss"} <= summary.keys()
    assert "a run of vision does not act; train a policy from it" in deft_or_error(
        "evaluate", "vision", "--env", "deft/Reach-v0"
    )
    deft(
        "train",
        "sft",
        *train[:2],
        *train[4:],
        "--model-path",
        "vision",
        "--learning-rate",
        "1e-9",
        "--output-dir",
        "sft",
    )
    seen, imitated = weights(tmp_path / "vision"), weights(tmp_path / "sft")
    assert seen["model.proprio.count"] == 0 < imitated["model.proprio.count"]
    for name in ("model.cameras.0.pixels.weight", "model.names.words.weight"):
        torch.testing.assert_close(imitated[name], seen[name], atol=1e-6, rtol=0)


def test_training_on_equals_training_twice(deft, reach, tmp_path):
    train = ["train", "vision", "--dataset", reach, "--model", "vla-tiny", *COMMON[:-2], "--batch-size", 8]
    train += ["--updates-per-epoch", 2, "--num-negatives", 3]
    deft(*train, "--num-epochs", 4, "--output-dir", "whole")
    deft(*train, "--num-epochs", 2, "--learning-rate-schedule", "constant", "--output-dir", "half")
    deft(*train, "--num-epochs", 4, "--output-dir", "constant", "--learning-rate-schedule", "constant")
    deft(*train, "--num-epochs", 4, "--output-dir", "half", "--auto-resume", "--learning-rate-schedule", "constant")
    once, twice = weights(tmp_path / "constant"), weights(tmp_path / "half")
    assert all(torch.equal(value, twice[name]) for name, value in once.items())
    assert not torch.equal(once["model.cameras.0.queries"], weights(tmp_path / "whole")["model.cameras.0.queries"])


def test_one_instruction_has_no_alternatives(deft_or_error, tmp_path):
    out, kwargs = tmp_path / "one-v0", {"observation": "vla", "image_size": 16, "num_targets": 1}
    collect(CollectConfig(out=str(out), policy="random", env="deft/Reach-v0", env_kwargs=kwargs, steps=20))
    train = ["train", "vision", "--dataset", out, "--model", "vla-tiny", *COMMON, "--batch-size", 8]
    line = "text_weight 1: all 8 transitions of the first batch have the same instruction"
    assert line in deft_or_error(*train)


def test_errors(deft_or_error, reach):
    train = ["train", "vision", "--dataset", reach, *COMMON]
    assert "is no VLA model with camera encoders; use --model vla-tiny" in deft_or_error(*train)
    model = [*train, "--model", "vla-tiny"]
    assert "both 0: there is nothing to learn" in deft_or_error(*model, "--text-weight", 0, "--prediction-weight", 0)
    assert "too few other instructions" in deft_or_error(*model, "--batch-size", 7)
    silent = [*model, "--batch-size", 8, "--vla-model-config", "instruction_key=null"]
    assert "have no instructions to compare with the images; use --text_weight 0" in deft_or_error(*silent)
    assert "GPTVLAModel has no `describe_frames`" in deft_or_error(*train, "--model", "gpt-vla")
