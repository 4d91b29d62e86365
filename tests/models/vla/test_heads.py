"""The heads of `vla-tiny`: what they play where demonstrations have two modes, and switches beside them."""

import itertools
import math

import pytest
import torch

from deft.errors import InputError
from deft.models.denoising import Denoising, DiffusionChunks, FlowChunks
from deft.models.vla.heads import GaussianChunks, SwitchedChunks, TokenChunks
from deft.models.vla.tiny import TinyVLAModel

WIDTH, STEPS = 6, 3


def switched(dims=(1,), action_dim: int = 2) -> SwitchedChunks:
    torch.manual_seed(0)
    others = GaussianChunks(WIDTH, STEPS, action_dim - len(dims), -0.5, -0.5, "squared")
    head = SwitchedChunks(others, WIDTH, STEPS, action_dim, dims)
    torch.nn.init.normal_(head.out.weight)
    return head


@pytest.mark.parametrize(
    ("make_head", "least"),
    [
        (lambda: FlowChunks(32, 1, 1, Denoising()), 0.65),
        (lambda: DiffusionChunks(32, 1, 1, Denoising()), 0.65),
        (lambda: TokenChunks(32, 1, 1, 32), 1.0),
    ],
)
def test_evaluation_plays_an_action_that_was_demonstrated(make_head, least):
    """Demonstrations at 0.8 (60 %) and −0.8; their mean, 0.16, was never shown.

    A chain from noise 0, and the bin nearest the mean, are in between. A small flow from drawn noise is near a mode in
    some 80 % of the draws after 300 updates (seeds 0 to 3: 78 to 83 %), and the likeliest token always is.
    """
    torch.manual_seed(0)
    head, features = make_head(), torch.ones(256, 32)
    optimizer = torch.optim.Adam(head.parameters(), 1e-2)
    for _ in range(300):
        shown = torch.where(torch.rand(256, 1, 1) < 0.6, 0.8, -0.8)
        optimizer.zero_grad()
        head.imitation_loss(features, shown, None).mean().backward()
        optimizer.step()
    with torch.no_grad():
        played, log_prob, _ = head.draw(torch.ones(1000, 32), True, None)
    hits = ((played.abs() - 0.8).abs() < 0.2).float().mean()
    assert float(hits) >= least
    if isinstance(head, TokenChunks):
        assert bool((played > 0).all())  # the more frequent one
        assert log_prob[0].item() == pytest.approx(math.log(0.6), abs=0.2)
    else:
        # About as often as it was shown: 60 % of the noise leads there. A diffusion learns more slowly which noise
        # leads where: after 300 updates 41 % (seed 0) and 76 % (seed 1).
        spread = 0.15 if isinstance(head, FlowChunks) else 0.3
        assert abs(float((played > 0).float().mean()) - 0.6) < spread


def test_a_switch_changes_at_most_once():
    # Of the 8 patterns of three steps, +−+ and −+− change twice
    twice = {(1.0, -1.0, 1.0), (-1.0, 1.0, -1.0)}
    expected = set(itertools.product((-1.0, 1.0), repeat=3)) - twice
    assert {tuple(way) for way in switched().ways.tolist()} == expected
    assert len(switched().ways) == 6


def test_what_is_drawn_is_scored_as_it_was_drawn():
    head, features = switched((0, 2), 4), torch.randn(50, WIDTH)
    action, log_prob, _ = head.draw(features, False, None)
    tokens, entropy = head.score(features, action, None, None)
    torch.testing.assert_close(tokens.sum(1), log_prob)
    assert set(action[..., [0, 2]].unique().tolist()) == {-1.0, 1.0}
    assert entropy.shape == (50,)


def test_the_ways_are_drawn_as_often_as_their_probability_says():
    head, features = switched(), torch.randn(1, WIDTH).expand(20_000, -1)
    torch.manual_seed(0)
    action, _, _ = head.draw(features, False, None)
    found = head.way(action).flatten().bincount(minlength=6) / 20_000
    # 20,000 draws know a share to ± 0.0035 (√(p (1 − p) / n) at p = ½)
    torch.testing.assert_close(found, head._log_probs(features[:1])[0, 0].exp(), atol=0.015, rtol=0)


def test_the_log_prob_is_that_of_the_others_and_of_the_way():
    head, features = switched(), torch.randn(4, WIDTH)
    action = torch.randn(4, STEPS, 2)
    action[..., 1] = torch.tensor([0.3, 1.0, -2.0])  # by its signs open, open, closed: the third way
    assert head.way(action).tolist() == [[2]] * 4
    assert head.ways[2].tolist() == [1.0, 1.0, -1.0]
    others, _ = head.others.score(features, action[..., :1], None, None)
    expected = others.sum(1) + head.out(features).log_softmax(1)[:, 2]
    torch.testing.assert_close(head.score(features, action, None, None)[0].sum(1), expected)


def test_padded_switches_do_not_count():
    head, features = switched(), torch.randn(4, WIDTH)
    action, mask = torch.randn(4, STEPS, 2), torch.ones(4, STEPS, 2, dtype=torch.bool)
    mask[..., 1] = False
    tokens, entropy = head.score(features, action, mask, None)
    expected = head.others.score(features, action[..., :1], None, None)
    torch.testing.assert_close(tokens, expected[0])
    torch.testing.assert_close(entropy, expected[1])


def test_imitation_learns_how_often_and_not_which_one():
    """Three of four chunks stay closed, one opens: p = ¾ and ¼, not the likelier one alone."""
    head = switched()
    closed, opens = torch.full((STEPS,), -1.0), torch.tensor([-1.0, -1.0, 1.0])
    actions = torch.zeros(8, STEPS, 2)
    actions[..., 1] = torch.stack([closed] * 6 + [opens] * 2)
    features = torch.ones(8, WIDTH)
    optimizer = torch.optim.Adam(head.parameters(), 0.05)
    for _ in range(300):
        loss = head.imitation_loss(features, actions, None).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    found = head._log_probs(features[:1])[0, 0].exp()
    way = head.way(actions)[:, 0]
    assert found[way[0]].item() == pytest.approx(0.75, abs=0.01)
    assert found[way[-1]].item() == pytest.approx(0.25, abs=0.01)


def test_chunks_that_an_episode_cut_short_say_nothing_of_the_way():
    head, features, actions = switched(), torch.randn(2, WIDTH), torch.zeros(2, STEPS, 2)
    mask = torch.tensor([[True, True, True], [True, True, False]])
    cut = head.imitation_loss(features, actions, mask)
    others = 0.5 * head.others.imitation_loss(features, actions[..., :1], mask)  # one of two dims
    assert cut[1].item() == pytest.approx(others[1].item())
    assert cut[0].item() > others[0].item()


def test_the_likeliest_way_is_the_deterministic_one():
    head, features = switched(), torch.randn(30, WIDTH)
    action, _, _ = head.draw(features, True, None)
    assert torch.equal(head.way(action)[:, 0], head.out(features).argmax(1))


@pytest.mark.parametrize("kind", ["gaussian", "token", "flow"])
def test_a_model_with_switches_acts_and_scores(kind):
    torch.manual_seed(0)
    model = TinyVLAModel(
        head=kind, action_dim=3, chunk_length=2, image_keys=["rgb"], image_size=16, cell=4, width=8,
        proprio_key=None, instruction_key=None, switch_dims=[-1],
    )  # fmt: skip
    pictures = {"rgb": torch.randint(0, 256, (5, 3, 16, 16), dtype=torch.uint8)}
    action, log_prob, _, *sample = model.act(pictures)
    assert set(action[..., 2].unique().tolist()) <= {-1.0, 1.0}
    again = model.evaluate(pictures, action, **({"sample": sample[0]} if sample else {}))
    torch.testing.assert_close(again[0], log_prob)
    assert model.imitation_loss(pictures, action).shape == (5,)
    with pytest.raises(InputError, match="switches has no differentiable samples"):
        model.sample_many(pictures, 2)


def test_switches_that_do_not_fit_are_rejected():
    with pytest.raises(InputError, match="dims 0 to 6"):
        TinyVLAModel(switch_dims=[7])
    for wrong in (-1, True, "abc", ["a"], [0.5]):
        with pytest.raises(InputError, match="list of integers"):
            TinyVLAModel(switch_dims=wrong)
    with pytest.raises(InputError, match="at least one"):
        TinyVLAModel(action_dim=2, switch_dims=[0, -1])


def test_tokens_beside_a_switch_keep_their_bins():
    head = SwitchedChunks(TokenChunks(WIDTH, STEPS, 1, 4), WIDTH, STEPS, 2, [0])
    action, log_prob, _ = head.draw(torch.zeros(200, WIDTH), False, None)
    # Bins of −1 … 1 in four have centres ±0.25 and ±0.75; the switch is dim 0
    assert set(action[..., 1].unique().tolist()) == {-0.75, -0.25, 0.25, 0.75}
    assert set(action[..., 0].unique().tolist()) == {-1.0, 1.0}
    # All are drawn alike at first: 3 steps of 4 bins, one of 6 ways
    torch.testing.assert_close(log_prob, torch.full((200,), -3 * math.log(4) - math.log(6)), atol=1e-4, rtol=0)
