"""vla-tiny: its words, its three heads and their log-probs, its value, and that it learns to look for what is named."""

import math

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch.nn import functional

from deft import schema
from deft.errors import InputError
from deft.models.denoising import DENOISING_CHUNKS
from deft.models.normalization import freeze_statistics
from deft.models.vla.cameras import ENCODERS
from deft.models.vla.heads import ROUNDING
from deft.models.vla.loading import load_vla_model
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import HEADS, POSITIONS_WEIGHT, TinyVLAModel, word_ids

SIZE, LENGTH = 16, 32


def tiny(**changes) -> TinyVLAModel:
    torch.manual_seed(0)
    sizes = {"action_dim": 2, "chunk_length": 3, "image_keys": ["rgb"], "image_size": SIZE, "proprio_dim": 4}
    return TinyVLAModel(**{**sizes, "width": 32, **changes})


def text(*instructions: str) -> torch.Tensor:
    return torch.from_numpy(np.stack([schema.encode_text(words, LENGTH) for words in instructions]))


def scenes(batch: int = 5) -> TensorDict:
    generator = torch.Generator().manual_seed(1)
    streams = {
        "rgb": torch.randint(0, 256, (batch, 3, SIZE, SIZE), dtype=torch.uint8, generator=generator),
        "state": torch.randn(batch, 4, generator=generator),
        "instruction": text(*(["lift the red cube", "go to the blue cube"] * batch)[:batch]),
    }
    return TensorDict(streams, [batch])


# ---------------------------------------------------------------------------------------------------------------- words


def test_a_word_has_one_number_wherever_it_stands():
    first, second = word_ids(text("put the red cube on the blue one", "the  red"))
    assert (first > 0).tolist() == [True] * 8 + [False] * 8
    assert first[1] == first[5] == second[0]  # "the"
    assert first[2] == second[1]  # "red", also after two spaces
    assert (second > 0).sum() == 2
    words = (
        "put place reach push pick lift slide grasp the red green blue yellow purple orange cube cylinder white area"
    )
    assert len(set(word_ids(text(*words.split()))[:, 0].tolist())) == len(words.split())


def test_words_beyond_the_sixteenth_are_left_out():
    letters = "a b c d e f g h i j k l m n o p"  # sixteen
    rows = torch.stack([torch.from_numpy(schema.encode_text(words, 64)) for words in (letters, letters + " q r")])
    assert torch.equal(*word_ids(rows))


# ---------------------------------------------------------------------------------------------------------------- heads


@pytest.mark.parametrize("chunk_length", [1, 3])
@pytest.mark.parametrize("head", HEADS)
def test_what_acts_is_what_is_scored(head, chunk_length):
    policy = VLAPolicy(tiny(head=head, chunk_length=chunk_length))
    td = policy.act(TensorDict({schema.OBSERVATION: scenes()}, [5]))
    assert td[schema.ACTION].shape == ((5, 3, 2) if chunk_length == 3 else (5, 2))
    assert (td.get(schema.SAMPLE, None) is not None) == (head in DENOISING_CHUNKS)
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    torch.testing.assert_close(scored["value"], td[schema.VALUE])
    policy.reports_tokens = True
    torch.testing.assert_close(policy.evaluate_actions(td)["token_log_prob"].sum(1), scored["log_prob"])
    most_likely = []
    for _ in range(2):
        torch.manual_seed(0)  # a flow draws its start
        most_likely.append(policy.act(td.select(schema.OBSERVATION), deterministic=True)[schema.ACTION])
    assert torch.equal(*most_likely)
    again = policy.act(td.select(schema.OBSERVATION), deterministic=True)[schema.ACTION]
    assert torch.equal(again, most_likely[0]) == (head not in DENOISING_CHUNKS)
    assert policy.action_selection(True) == ("sampled noise" if head in DENOISING_CHUNKS else "mode")
    assert policy.action_selection(False) == "sample"


def test_a_gaussian_has_torchs_density():
    model = tiny(log_std_init=-0.5, log_common_init=-0.2)
    actions = torch.randn(5, 3, 2)
    mean, log_std = model.head.mean(model._for_head(model.features(scenes()))), model.head.log_std
    # The three steps of a dim have variance σ² + c² each, and the common noise's c² as their covariance
    covariance = math.exp(-1.0) * torch.eye(3) + math.exp(-0.4)
    torch.testing.assert_close(log_std, torch.full((3, 2), 0.5 * math.log(math.exp(-1.0) + math.exp(-0.4))))
    expected = torch.distributions.MultivariateNormal(mean.transpose(1, 2), covariance)
    log_prob, entropy = model.evaluate_actions(scenes(), actions)
    torch.testing.assert_close(log_prob, expected.log_prob(actions.transpose(1, 2)).sum(1))
    torch.testing.assert_close(entropy, expected.entropy().sum(1))


def test_the_noise_of_a_gaussian_is_as_its_density_says():
    model = tiny(log_std_init=-0.5, log_common_init=-0.2)
    features = torch.zeros(20_000, model.width)
    torch.manual_seed(0)
    drawn, _, _ = model.head.draw(features, False, None)
    # σ² + c² = 1.038 on the diagonal, c² = 0.670 beside it; 20,000 draws of 2 dims know both to 0.01
    found = torch.cov(drawn.transpose(1, 2).reshape(-1, 3).T)
    expected = math.exp(-1.0) * torch.eye(3) + math.exp(-0.4)
    torch.testing.assert_close(found, expected, atol=0.03, rtol=0)


def test_the_bins_of_a_token_head_are_all_that_it_does():
    model = tiny(head="token", chunk_length=1, action_dim=1, num_bins=4)
    torch.nn.init.normal_(model.head.out.weight)
    one = scenes(1)
    # Centres of 4 bins of [-1, 1]; their probabilities add up to 1, and the entropy is theirs.
    model.requires_grad_(False)
    logs = torch.stack([model.evaluate_actions(one, torch.tensor([[c]]))[0] for c in (-0.75, -0.25, 0.25, 0.75)])
    assert float(logs.exp().sum()) == pytest.approx(1.0, abs=1e-5)
    entropy = model.evaluate_actions(one, torch.tensor([[0.0]]))[1]
    assert float(entropy) == pytest.approx(float(-(logs.exp() * logs).sum()), abs=1e-5)
    drawn = model(TensorDict({name: stream.expand(400, *stream.shape[1:]) for name, stream in one.items()}, [400]))
    assert set(drawn[:, 0].tolist()) <= {-0.75, -0.25, 0.25, 0.75}
    shares = (drawn == torch.tensor([-0.75, -0.25, 0.25, 0.75])).float().mean(0)
    torch.testing.assert_close(shares, logs.exp()[:, 0], rtol=0, atol=0.1)  # 4 deviations of a share of ½


def test_the_actions_of_a_flow_are_scored_by_their_chain():
    model = tiny(head="flow", flow_steps=2, flow_noise=0.2)
    action, log_prob, _, sample = model.act(scenes())
    chain = sample[schema.CHAIN]
    assert chain.shape == (5, 3, 3, 2)  # two steps from noise: three places
    assert torch.equal(chain[:, -1], action)
    velocity = model.head._predict(model._for_head(model.features(scenes())))
    expected = torch.zeros(5)
    for step, time in ((0, 1.0), (1, 0.5)):
        mean = chain[:, step] - velocity(chain[:, step], torch.full((5,), time)) / 2
        expected += torch.distributions.Normal(mean, 0.2).log_prob(chain[:, step + 1]).sum((1, 2))
    torch.testing.assert_close(log_prob, expected)
    with pytest.raises(InputError, match="score its chain"):
        model.evaluate_actions(scenes(), action)


@pytest.mark.parametrize(
    ("imitation", "small", "large"),
    # absolute: e² / 0.2 below 0.1, |e| − 0.05 above; squared: e² / 2
    [("absolute", 0.0125, 0.45), ("squared", 0.00125, 0.125)],
)
def test_the_error_of_a_gaussian_in_imitation(imitation, small, large):
    model = tiny(imitation=imitation)
    torch.nn.init.zeros_(model.head.out.weight)  # the mean is 0
    for error, expected in ((0.05, small), (-0.5, large)):
        losses = model.imitation_loss(scenes(), torch.full((5, 3, 2), error))
        torch.testing.assert_close(losses, torch.full((5,), expected))


@pytest.mark.parametrize("head", HEADS)
def test_steps_after_the_end_do_not_count_in_imitation(head):
    model, actions = tiny(head=head), torch.rand(5, 3, 2)
    mask = torch.tensor([[True, True, False]]).expand(5, 3)
    changed = actions.clone()
    changed[:, 2] = -0.9

    def loss(actions: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        torch.manual_seed(3)
        return model.imitation_loss(scenes(), actions, mask)

    if head in DENOISING_CHUNKS:  # the network reads the noisy chunk as a whole; its error there is what is left out
        error = loss(actions, mask)
        assert error.shape == (5,)
        return
    assert torch.equal(loss(actions, mask), loss(changed, mask))
    assert not torch.equal(loss(actions, None), loss(changed, None))


@pytest.mark.parametrize("head", HEADS)
def test_padded_dims_are_zero_and_enter_nothing(head):
    policy = VLAPolicy(tiny(head=head))
    mask = torch.tensor([[True, False]]).expand(5, 2)
    td = policy.act(TensorDict({schema.OBSERVATION: scenes(), schema.ACTION_MASK: mask}, [5]))
    assert bool((td[schema.ACTION][..., 1] == 0).all())
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    if head != "flow":
        td[schema.ACTION][..., 1] = 0.5
        torch.testing.assert_close(policy.evaluate_actions(td)["log_prob"], scored["log_prob"])


# ---------------------------------------------------------------------------------------------------- value, vision


@pytest.mark.parametrize("value_gradient", [False, True])
def test_the_values_loss_trains_the_trunk_where_it_is_asked_to(value_gradient):
    model = tiny(value_gradient=value_gradient)
    with torch.no_grad():
        model.value_head[-1].weight.fill_(0.1)
    model.get_value(scenes()).sum().backward()
    assert all(parameter.grad is not None for parameter in model.value_parameters())
    assert (model.trunk[0].weight.grad is not None) == value_gradient


def test_a_frozen_eye_learns_nothing_and_sees_the_same():
    plain, frozen = tiny(), tiny(freeze_vision=True)
    frozen.load_state_dict(plain.state_dict())
    # Where the weights lie in memory decides the last bit of a matrix product on some processors.
    torch.testing.assert_close(plain.features(scenes()), frozen.features(scenes()), rtol=0, atol=1e-5)
    frozen.imitation_loss(scenes(), torch.rand(5, 3, 2)).sum().backward()
    assert frozen.trunk[0].weight.grad is not None
    assert all(parameter.grad is None for parameter in frozen.cameras.parameters())


def test_the_body_is_normalised_by_what_was_seen_first(monkeypatch):
    monkeypatch.setattr("deft.models.vla.tiny.MAX_OBSERVED", 6)
    model, body = tiny(), torch.full((4, 4), 2.0)
    body[:2] = 4.0  # mean 3, deviation 1
    model.observe({"state": body})
    assert model.proprio(torch.full((1, 4), 5.0)).tolist() == [pytest.approx([2.0] * 4, abs=1e-3)]
    model.observe({"state": body + 100})  # 4 seen, so this still counts
    assert float(model.proprio.count) == 8
    model.observe({"state": body + 1000})
    assert float(model.proprio.count) == 8


def test_frozen_statistics_stay_however_few_observations_they_are_of():
    model, body = tiny(places_key="places", places_dim=2), torch.randn(4, 4)
    freeze_statistics(model)  # nothing was observed, so nothing is frozen
    model.observe({"state": body, "places": body[:, :2]})
    freeze_statistics(model)
    before = model.proprio(body), model.places_scale.mean.clone()
    model.observe({"state": body + 100, "places": body[:, :2] + 100})
    assert torch.equal(model.proprio(body), before[0])
    assert torch.equal(model.places_scale.mean, before[1])


def test_without_proprioception_and_words():
    model = tiny(proprio_key=None, instruction_key=None)
    assert model(scenes().select("rgb")).shape == (5, 3, 2)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions
@pytest.mark.parametrize("vision", ENCODERS)
def test_in_bf16_the_image_layers_round_and_the_rest_does_not(vision):
    policy, precise = VLAPolicy(tiny(vision=vision)), VLAPolicy(tiny(vision=vision))
    policy.set_precision(torch.bfloat16)
    with torch.no_grad():
        td = policy.act(TensorDict({schema.OBSERVATION: scenes()}, [5]))
        scored = policy.evaluate_actions(td[:3])  # another batch size than that of acting
        rounded, exact = policy.model.features(scenes()), precise.model.features(scenes())
    assert scored["log_prob"].dtype == scored["value"].dtype == td[schema.ACTION].dtype == torch.float32
    torch.testing.assert_close(scored["log_prob"].exp(), td[schema.LOG_PROB][:3].exp(), rtol=1e-3, atol=0)
    # bfloat16 has steps of 2⁻⁸; features are means over cells, in which the errors average out.
    assert 0 < float((rounded - exact).abs().max()) < 2**-6 * float(exact.abs().max())
    for one in (policy, precise):
        one.evaluate_actions(td)["log_prob"].sum().backward()
    gradient, expected = (next(one.model.cameras[0].parameters()).grad for one in (policy, precise))
    assert gradient.dtype == torch.float32
    assert float(functional.cosine_similarity(gradient.flatten(), expected.flatten(), 0)) > 0.99


def test_texts_have_the_same_features_encoded_together_or_once_each():
    model = tiny()
    texts = scenes()["instruction"]
    words = word_ids(texts)
    text_features, names = model._encode_texts(texts)
    torch.testing.assert_close(text_features, model.text(words))
    torch.testing.assert_close(names, model.names(words))


def test_it_learns_to_look_for_what_is_named():
    """Two squares, red and blue; the action is the place of the one that the word names.

    Who reads one of picture and word alone cannot do better than the mean of all places: an error of their variance.
    """
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    model = tiny(chunk_length=1, proprio_key=None)
    colours = np.array([[220, 30, 30], [30, 30, 220]], np.uint8)

    def draw(batch: int) -> tuple[TensorDict, torch.Tensor]:
        pictures = np.full((batch, 3, SIZE, SIZE), 120, np.uint8)
        places = generator.integers(0, SIZE - 2, (batch, 2, 2))
        named = generator.integers(0, 2, batch)
        for row in range(batch):
            for colour, (x, y) in zip(colours, places[row], strict=True):
                pictures[row, :, y : y + 2, x : x + 2] = colour[:, None, None]
        words = text(*(("red", "blue")[index] for index in named))
        wanted = places[np.arange(batch), named] / ((SIZE - 2) / 2) - 1.0
        td = TensorDict({"rgb": torch.from_numpy(pictures), "instruction": words}, [batch])
        return td, torch.from_numpy(wanted.astype(np.float32))

    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(100):
        observations, wanted = draw(32)
        optimizer.zero_grad()
        model.imitation_loss(observations, wanted).mean().backward()
        optimizer.step()
    observations, wanted = draw(256)
    with torch.no_grad():
        error = (model(observations, deterministic=True) - wanted).square().mean()
    assert float(error) < 0.05  # the variance of a place is 0.36


# ------------------------------------------------------------------------------------------------------ invalid input


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head": "softmax"}, "head 'softmax' is none of gaussian, token, flow"),
        ({"image_size": 40}, "image_size 40 is no multiple of 16"),
        ({"imitation": "cubed"}, "imitation 'cubed' is none of absolute, squared"),
        ({"cell": 3}, "cell 3 is none of 1, 2, 4, 8, 16"),
        ({"image_keys": "rgb"}, "image_keys 'rgb' must be a list"),
        ({"num_bins": 1}, "num_bins 1 must be 2 or more"),
        ({"flow_noise": 0.0}, "flow_noise 0.0 must be above 0"),
    ],
)
def test_settings_that_cannot_be(changes, message):
    with pytest.raises(InputError, match=message):
        tiny(**changes)


def test_observations_that_do_not_fit():
    model, seen = tiny(), scenes()
    with pytest.raises(InputError, match="'rgb' is float32"):
        model(seen.clone().set("rgb", torch.zeros(5, 3, SIZE, SIZE)))
    with pytest.raises(InputError, match=r"'state' has shape \[5, 3\]"):
        model(seen.clone().set("state", torch.zeros(5, 3)))
    with pytest.raises(InputError, match="rows of bytes"):
        model(seen.clone().set("instruction", torch.zeros(5, 3)))
    with pytest.raises(InputError, match="no 'instruction'"):
        model(seen.select("rgb", "state"))
    with pytest.raises(InputError, match="a token head has no differentiable samples"):
        tiny(head="token").sample_many(seen, 2)


def test_it_is_found_by_its_name():
    settings = {"head": "token", "image_size": 32, "action_dim": 3}
    assert isinstance(load_vla_model(None, "vla-tiny", settings), TinyVLAModel)


# --------------------------------------------------------------------------------------------------------------- labels


def test_places_are_taught_and_never_read():
    model, plain = tiny(places_key="places", places_dim=2), tiny()
    seen = scenes()
    actions = torch.zeros(5, 3, 2)
    shown = [seen.clone().set("places", torch.full((5, 2), value)) for value in (2.0, 3.0)]
    with torch.no_grad():
        for method in (model.get_value, lambda observations: model(observations, deterministic=True)):
            assert torch.equal(method(shown[0]), method(shown[1]))
        losses = [model.imitation_loss(observations, actions) for observations in shown]
        known = model.imitation_loss(shown[0], actions, features=model.features(seen))
        assert model.features(seen)[:, :2].abs().max() < 1.5  # its predictions before training: near 0
        plain.load_state_dict(model.state_dict())  # fits: acting needs no labels
        alone = [m.imitation_loss(shown[0], actions, features=m.features(seen)) for m in (model, plain)]
    assert (losses[1] > losses[0]).all()
    assert (losses[0] > known).all()  # with features that are given, actions alone are taught
    torch.testing.assert_close(*alone)
    model(seen, deterministic=True)  # acts where there are no labels


def test_places_that_do_not_fit_are_an_error():
    model, actions = tiny(places_key="places"), torch.zeros(5, 3, 2)
    with pytest.raises(InputError, match="no 'places'"):
        model.imitation_loss(scenes(), actions)
    with pytest.raises(InputError, match=r"\[5, 8\] \(places_dim\)"):
        model.imitation_loss(scenes().set("places", torch.zeros(5, 3)), actions)
    with pytest.raises(InputError, match="at most 24"):
        tiny(places_key="places", places_dim=25)


# ------------------------------------------------------------------------------------------ what reward does not train


@pytest.mark.parametrize("head", ["gaussian", "flow"])
def test_frozen_eyes_look_once(head):
    """What was seen is kept with the action; scoring reads that, not the pictures, and says the same."""
    model = tiny(head=head, freeze_vision=True)
    action, log_prob, value, sample = model.act(scenes())
    again = model.evaluate(scenes(), action, sample=sample)
    torch.testing.assert_close(again[0], log_prob)
    torch.testing.assert_close(again[2], value)
    dark = scenes()
    dark["rgb"] = torch.zeros_like(dark["rgb"])
    torch.testing.assert_close(model.evaluate(dark, action, sample=sample)[0], log_prob)


def test_behind_a_bottleneck_cameras_are_seen_through_what_was_found_alone():
    model = tiny(bottleneck=8)
    seen = model.encode_observations(scenes())
    cameras = model.cameras[0].out_dim
    other = torch.cat([torch.randn(5, cameras), seen[:, cameras:]], 1)
    assert not torch.equal(model.trunk_features(other), model.trunk_features(seen))
    with torch.no_grad():
        for parameter in model.found[-1].parameters():
            parameter[:8] = 0.0  # what the labels would teach is not found; the other numbers lead nowhere
    torch.testing.assert_close(model.trunk_features(other), model.trunk_features(seen))


def test_the_trunk_behind_a_bottleneck_reads_places_in_metres_too():
    model = tiny(bottleneck=2, places_key="places", places_dim=2)
    places = torch.tensor([[0.2, -0.01], [0.4, 0.03]])  # means 0.3 and 0.01, deviations 0.1 and 0.02
    model.observe({"state": torch.randn(2, 4), "places": places})
    with torch.no_grad():
        for parameter in model.found[-1].parameters():
            parameter.zero_()  # it finds everything at the mean: 0.3 m, and 0.01 m
    read = model.trunk_features(model.encode_observations(scenes()))[0, :6]
    fine = [math.tanh(place / metres) for metres in (0.05, 0.015) for place in (0.3, 0.01)]
    assert read.tolist() == pytest.approx([0.0, 0.0, *fine], abs=1e-4)


@pytest.mark.parametrize("bottleneck", [7, 25, True])
def test_a_bottleneck_lets_the_labelled_numbers_through(bottleneck):
    with pytest.raises(InputError, match=r"must be 0 \(none\), or 8 \(places_dim\) to 24"):
        tiny(bottleneck=bottleneck)


def test_a_label_of_zero_counts_less():
    model = tiny(places_key="places", places_dim=2)
    places = torch.tensor([[0.2, -0.1], [0.4, 0.3]]).repeat(10, 1)  # means 0.3 and 0.1, deviations 0.1 and 0.2
    model.observe({"state": torch.randn(20, 4), "places": places})
    with torch.no_grad():
        for parameter in model.found[-1].parameters():
            parameter.zero_()  # it finds everything at the mean
    labels = torch.tensor([[0.5, 0.3], [0.5, 0.0], [0.0, 0.0], [0.3, 0.1], [0.2, 0.0]])
    # In deviations: 2 and 1; 2 and (0.5); (3) and (0.5); 0 and 0; 1 and (0.5). Those in brackets, of zeros, count a
    # tenth; of all but 0 half of `beta` is taken off, and the mean of the two is the loss
    half = ROUNDING / 2
    missed = torch.tensor([2 + 1 - 2 * half, 2 + 0.05, 0.3 + 0.05, 0.0, 1 + 0.05]) / 2
    missed -= torch.tensor([0.0, 1.1, 0.2, 0.0, 1.1]) * half / 2
    loss = model.auxiliary_loss(scenes().set("places", labels))
    torch.testing.assert_close(loss, POSITIONS_WEIGHT * missed, atol=5e-3, rtol=0)  # PROPRIO_EPSILON


@pytest.mark.parametrize("name", ["auxiliary_loss", "imitation_loss"])
def test_labels_teach_the_eyes_and_not_the_trunk(name):
    model = tiny(places_key="places", places_dim=2, imitation="squared")
    observations = scenes().update({"places": torch.randn(5, 2)})
    actions = model(observations, deterministic=True).detach()  # nothing to imitate: the places alone are missed
    loss = (
        model.auxiliary_loss(observations) if name == "auxiliary_loss" else model.imitation_loss(observations, actions)
    )
    loss.sum().backward()
    assert model.cameras[0].pixels.weight.grad.abs().sum() > 0
    assert model.names.words.weight.grad.abs().sum() > 0
    assert all(p.grad is None or p.grad.abs().max() < 1e-6 for p in model.trunk.parameters())


def test_behind_a_bottleneck_the_trunk_is_taught_with_the_labels(monkeypatch):
    """One who finds everything at the mean still learns to act on where things are."""
    monkeypatch.setattr("deft.models.vla.tiny.LABEL_NOISE", 0.0)
    model = tiny(bottleneck=2, places_key="places", places_dim=2, imitation="squared")
    places = torch.tensor([[0.2, -0.1], [0.4, 0.3], [0.3, 0.1], [0.1, 0.2], [0.5, 0.4]])
    model.observe({"state": torch.randn(5, 4), "places": places})
    with torch.no_grad():
        for parameter in model.found[-1].parameters():
            parameter.zero_()
        seen, observations = model.encode_observations(scenes()), scenes().set("places", places)
        labelled = model.trunk_features(seen, model._with_labels(observations, model.found(seen)))
        blind = model.trunk_features(seen)
        # What it reads first: the places in deviations, then in metres, coarse and fine
        assert blind[:, :2].abs().max() == 0
        torch.testing.assert_close(labelled[:, :2], model.places_scale(functional.pad(places, (0, 22)))[:, :2])
        torch.testing.assert_close(labelled[:, 2:4], torch.tanh(places / 0.05), atol=1e-4, rtol=0)
        actions = model.head.mean(model._for_head(labelled))  # a model that acts so only has to predict the positions
    torch.testing.assert_close(model.imitation_loss(observations, actions), model.auxiliary_loss(observations))
    assert (
        model.imitation_loss(observations, model.head.mean(model._for_head(blind))) > model.auxiliary_loss(observations)
    ).any()


def test_the_words_that_name_things_are_read_apart_from_the_task():
    model = tiny(places_key="places", places_dim=2)
    taught = set(map(id, model.auxiliary_parameters()))
    assert all(id(p) in taught for p in model.names.parameters())
    assert not any(id(p) in taught for p in model.text.parameters())
    seen = model.encode_observations(scenes())
    with torch.no_grad():
        model.names.out[0].bias += torch.randn(64)
    # The eight numbers of the task stand last in what is seen; what the cameras look for is all before it
    assert torch.equal(model.encode_observations(scenes())[:, -8:], seen[:, -8:])
    assert not torch.equal(model.encode_observations(scenes())[:, :-8], seen[:, :-8])
