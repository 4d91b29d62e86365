"""The small VLA model: what it reads, what it gives, and what must not leak into it."""

import math

import pytest
import torch
from tensordict import TensorDict

from deft import schema
from deft.errors import InputError
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.interface import VLAModelInterface

TEXTS = ("push the red block to the left", "pick up the cup")


def make_model(**changes) -> GPTVLAModel:
    torch.manual_seed(0)
    config = {"action_dim": 3, "chunk_length": 2, "proprio_dim": 5, "image_size": 32}
    return GPTVLAModel(**{**config, **changes}).eval()


def make_observations(batch: int = 4, texts=TEXTS, length: int = 40, image_size: int = 32, **streams) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    rows = [torch.from_numpy(schema.encode_text(texts[i % len(texts)], length)) for i in range(batch)]
    data = {
        "rgb": torch.randint(0, 256, (batch, image_size, image_size, 3), dtype=torch.uint8, generator=generator),
        "proprio": torch.randn(batch, 5, generator=generator),
        "instruction": torch.stack(rows),
    }
    return TensorDict({**data, **streams}, [batch])


def test_shapes_and_one_pass_methods_agree():
    model, observations = make_model(), make_observations()
    assert isinstance(model, VLAModelInterface)
    action, log_prob, value = model.act(observations)
    assert action.shape == (4, 2, 3)
    assert log_prob.shape == (4,)
    assert value.shape == (4, 1)
    scored, entropy, same_value = model.evaluate(observations, action)
    assert entropy.shape == (4,)
    torch.testing.assert_close(scored, log_prob)
    torch.testing.assert_close(same_value, value)
    torch.testing.assert_close(model.get_value(observations), value)
    torch.testing.assert_close(model.evaluate_actions(observations, action), (scored, entropy))


def test_chunk_of_one_step_has_no_step_dimension():
    model = make_model(chunk_length=1)
    assert model(make_observations()).shape == (4, 3)


def test_starts_near_zero_with_the_given_deviation():
    model, observations = make_model(log_std_init=-1.0), make_observations(batch=64)
    assert model(observations, deterministic=True).abs().max() < 0.1
    draws = torch.stack([model(observations) for _ in range(4)])
    # Standard error of a deviation from n = 4 * 64 * 6 draws: sigma / sqrt(2 n) = 0.0066; three of them allowed.
    assert draws.std().item() == pytest.approx(math.exp(-1.0), abs=0.02)


def test_log_prob_and_entropy_by_hand():
    """At the mean: log p = -K A (log sigma + log(2 pi) / 2); entropy adds K A / 2."""
    model, observations = make_model(log_std_init=-0.5), make_observations()
    mean = model(observations, deterministic=True)
    log_prob, entropy = model.evaluate_actions(observations, mean)
    density = 2 * 3 * (0.5 - 0.5 * math.log(2 * math.pi))
    torch.testing.assert_close(log_prob, torch.full((4,), density))
    torch.testing.assert_close(entropy, torch.full((4,), 2 * 3 * 0.5 - density))
    # One deviation away in one dim of one step costs exactly 1/2.
    moved = mean.clone()
    moved[:, 1, 2] += math.exp(-0.5)
    torch.testing.assert_close(model.evaluate_actions(observations, moved)[0], log_prob - 0.5)


def test_padded_dims_enter_nothing():
    model, observations = make_model(), make_observations()
    mask = torch.tensor([[True, True, False]]).expand(4, 3)
    action, log_prob, _ = model.act(observations, action_mask=mask)
    assert (action[..., 2] == 0).all()
    garbage = action.clone()
    garbage[..., 2] = float("nan")
    scored, entropy, _ = model.evaluate(observations, garbage, action_mask=mask)
    torch.testing.assert_close(scored, log_prob)
    # Two real dims of three: two thirds of the entropy of all dims (equal deviations).
    torch.testing.assert_close(entropy, model.evaluate(observations, action)[1] * 2 / 3)
    (scored + entropy).sum().backward()
    assert (model.log_std.grad[:, 2] == 0).all()
    assert (model.action_head.weight.grad[2] == 0).all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("stream", ["rgb", "proprio", "instruction"])
def test_every_stream_reaches_action_and_value(stream):
    model, observations = make_model(), make_observations(texts=TEXTS[:1])
    changed = observations.clone()
    if stream == "instruction":
        changed[stream] = make_observations(texts=("push the red block to the lefT",))[stream]
    elif stream == "rgb":
        changed[stream] = 255 - changed[stream]
    else:
        changed[stream] = changed[stream] + 1.0
    for method in (lambda o: model(o, deterministic=True), model.get_value):
        assert ((method(changed) - method(observations)).abs() > 1e-7).flatten(1).any(1).all()


def test_padding_does_not_change_outputs():
    model = make_model()
    action = torch.zeros(4, 2, 3)
    short, long = (model.evaluate(make_observations(length=n), action) for n in (30, 200))
    for left, right in zip(short, long, strict=True):
        assert torch.equal(left, right)  # the columns of padding are cut off before anything is computed


def test_a_longer_neighbour_does_not_change_outputs():
    """Beside a longer instruction a row is padded inside the batch: its padding must not be seen."""
    model = make_model()
    alone = make_observations(batch=1, texts=("pick up the cup",))
    beside = TensorDict.cat([alone, make_observations(batch=1, texts=(TEXTS[0],))])
    for method in (lambda o: model(o, deterministic=True), model.get_value):
        torch.testing.assert_close(method(beside)[:1], method(alone), rtol=0, atol=1e-6)


def test_each_row_reads_its_own_instruction():
    """Equal instructions are read once; every row must still get its own, whatever the order of the batch."""
    model, observations = make_model(), make_observations(batch=6, texts=("c", "a", "b"))
    together = model(observations, deterministic=True)
    for row in range(6):
        torch.testing.assert_close(
            together[row], model(observations[row : row + 1], deterministic=True)[0], rtol=0, atol=1e-6
        )


def test_no_instruction_beside_one_and_alone():
    model = make_model()
    empty = model(make_observations(batch=2, texts=("",)), deterministic=True)
    mixed = model(make_observations(batch=2, texts=("", "go")), deterministic=True)
    assert empty.isfinite().all()
    torch.testing.assert_close(mixed[0], empty[0], rtol=0, atol=1e-6)
    assert not torch.allclose(mixed[1], empty[1], rtol=0, atol=1e-7)


def test_channels_first_and_last_images_are_the_same():
    model, observations = make_model(), make_observations()
    first = observations.clone()
    first["rgb"] = observations["rgb"].permute(0, 3, 1, 2).contiguous()
    assert torch.equal(model.get_value(first), model.get_value(observations))


def test_several_cameras_keep_their_places():
    model = make_model(image_keys=["head", "wrist"])
    head, wrist = make_observations()["rgb"], make_observations(batch=8)["rgb"][4:]
    observations = make_observations(head=head, wrist=wrist)
    straight = model.get_value(observations)
    torch.testing.assert_close(straight[2:3], model.get_value(observations[2:3]), rtol=0, atol=1e-6)
    crossed = model.get_value(make_observations(head=wrist, wrist=head))
    assert straight.shape == (4, 1)
    assert not torch.allclose(straight, crossed, rtol=0, atol=1e-7)


def test_without_proprioception_and_instruction():
    model = make_model(proprio_key=None, instruction_key=None)
    observations = make_observations().select("rgb")
    assert model(observations).shape == (4, 2, 3)


def test_gradient_reaches_every_parameter():
    model, observations = make_model(), make_observations()
    log_prob, entropy, value = model.evaluate(observations, torch.ones(4, 2, 3))
    (log_prob.sum() + entropy.sum() + value.sum()).backward()
    untouched = [name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert untouched == []


def test_frozen_vision_encoder_keeps_its_weights():
    model, observations = make_model(freeze_vision_encoder=True), make_observations()
    before = {name: tensor.clone() for name, tensor in model.vision.state_dict().items()}
    model.requires_grad_(True)  # even where someone switches every gradient on again
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    log_prob, _, value = model.evaluate(observations, torch.ones(4, 2, 3))
    (log_prob.sum() + value.sum()).backward()
    optimizer.step()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.vision.state_dict().items())
    assert model.vision_projection.weight.grad.abs().sum() > 0


def test_learns_what_the_instruction_asks_for():
    """Same picture and pose, two instructions, opposite actions: only a model that reads the text can fit both."""
    model = make_model(chunk_length=1)
    one = make_observations(batch=1)
    observations = torch.cat([one, one])
    observations["instruction"] = make_observations(batch=2, texts=("go left", "go right"))["instruction"]
    target = torch.tensor([[-1.0, 0.5, 0.0], [1.0, -0.5, 0.0]])
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(30):
        loss = (model(observations, deterministic=True) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    # A model without the text can do no better than the mean of the two targets: loss (1 + 0.25 + 0) / 3 = 0.42.
    assert loss.item() < 0.05


@pytest.mark.parametrize(
    ("vision", "language", "vision_millions", "language_millions"),
    [
        # Known sizes without the classifier: ResNet-18 11.2 M, ResNet-50 23.5 M. A GPT-2 layer has
        # 12 d² + 13 d parameters: 12 layers of 768: 85.1 M; 24 layers of 1024: 302.3 M.
        ("resnet18", "gpt2", 11.2, 85.1),
        ("resnet50", "gpt2-medium", 23.5, 302.3),
        ("resnet-tiny", "gpt-tiny", 0.10, 0.224),
    ],
)
def test_named_sizes(vision, language, vision_millions, language_millions):
    with torch.device("meta"):
        model = GPTVLAModel(vision_encoder=vision, language_model=language)
    count = {name: sum(p.numel() for p in getattr(model, name).parameters()) / 1e6 for name in ("vision", "blocks")}
    assert count["vision"] == pytest.approx(vision_millions, rel=0.02)
    assert count["blocks"] == pytest.approx(language_millions, rel=0.01)


def test_resnet_sizes_run():
    model = make_model(vision_encoder="resnet18", image_size=64)
    assert model.visual_position.shape[0] == 4  # 64 pixels, 32 to a token: 2 × 2
    assert model.get_value(make_observations(batch=1, image_size=64)).shape == (1, 1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vision_encoder": "resnet51"}, "vision_encoder 'resnet51' is none of resnet-tiny, resnet18, resnet50"),
        ({"language_model": "gpt5"}, "language_model 'gpt5' is none of gpt-tiny"),
        ({"image_size": 50}, "image_size 50 is no multiple of 16"),
        ({"image_keys": "rgb"}, "image_keys 'rgb' must be a list"),
        ({"image_keys": ()}, "image_keys"),
        ({"chunk_length": 0}, "chunk_length 0 must be 1 or more"),
    ],
)
def test_bad_settings(changes, message):
    with pytest.raises(InputError, match=message):
        make_model(**changes)


@pytest.mark.parametrize(
    ("streams", "message"),
    [
        ({"rgb": torch.zeros(4, 32, 32, 3)}, r"'rgb' is float32 \[4, 3, 32, 32\]; images are uint8"),
        ({"rgb": torch.zeros(4, 1, 48, 48, dtype=torch.uint8)}, r"'rgb' is uint8 \[4, 1, 48, 48\]; images are uint8"),
        ({"proprio": torch.zeros(4, 6)}, r"'proprio' has shape \[4, 6\].*\[4, 5\]"),
        ({"instruction": torch.zeros(4, 8)}, "'instruction' is torch.float32"),
        ({"instruction": torch.ones(4, 65, dtype=torch.uint8)}, "65 bytes.*max_instruction_length 64"),
    ],
)
def test_bad_observations(streams, message):
    with pytest.raises(InputError, match=message):
        make_model()(make_observations(**streams))


def test_missing_stream_is_named():
    with pytest.raises(InputError, match=r"no 'rgb'; it has \['instruction', 'proprio'\]"):
        make_model()(make_observations().exclude("rgb"))
