"""The parts of the model by themselves: tokenizer, blocks of attention, flow, sampling, motion, pictures, words."""

import math
from dataclasses import replace

import pytest
import torch
from f1_worlds import micro_config, micro_policy

from deft.errors import InputError
from deft.models import flow_chain
from deft.models.f1 import experts, frames
from deft.models.f1.config import PRESETS, TokenizerConfig
from deft.models.f1.experts import Block
from deft.models.f1.heads import choose, sample_time, time_embedding
from deft.models.f1.language import ByteTokenizer, FolderTokenizer, make_language_tokenizer
from deft.models.f1.motion import MotionPrior, fit_sharpness, prior_cross_entropy, prior_logits
from deft.models.f1.vq import CodebookAverages, MultiScaleQuantizer, MultiScaleTokenizer


def test_codes_add_up_to_the_features():
    """What is missing before a scale is the features less the contributions of the coarser scales."""
    tokenizer = micro_policy().tokenizer
    pictures = torch.rand(2, 3, 16, 16) * 2 - 1
    codes, features = tokenizer.encode(pictures), tokenizer.features(pictures)
    assert codes.shape == (2, 21)
    missing = tokenizer.residuals(features, codes)
    last = features - tokenizer.quantized(codes) + tokenizer.quantize.contribution(codes[:, 5:], 2)
    torch.testing.assert_close(missing[:, 5:], last.flatten(2).transpose(1, 2), atol=1e-5, rtol=0)
    # the nearest code of what is missing is the code itself
    assert torch.equal(tokenizer.quantize.distances(missing).argmin(-1), codes)


def test_a_tokenizer_learns_through_its_codes():
    torch.manual_seed(0)
    tokenizer = MultiScaleTokenizer(micro_config().tokenizer)
    pictures = torch.rand(4, 3, 16, 16) * 2 - 1
    optimizer = torch.optim.Adam(tokenizer.parameters(), 3e-3)
    losses = []
    for _ in range(30):
        made, quantization_loss, codes, _ = tokenizer(pictures)
        assert codes.shape == (4, 21)
        losses.append((made - pictures).square().mean())
        optimizer.zero_grad()
        (losses[-1] + quantization_loss).backward()
        optimizer.step()
    assert tokenizer.encoder.conv_in.weight.grad.abs().max() > 0
    assert losses[-1] < 0.9 * losses[0]


def test_a_linear_path_starts_as_principal_components():
    """As many directions as a patch has numbers (4 · 4 · 3 = 48) repeat it exactly; of fewer, the widest are kept."""
    torch.manual_seed(0)
    pictures = torch.rand(6, 3, 16, 16) * 2 - 1
    pictures[:, 0] = pictures[:, 0, :1, :1]  # one shade of red a picture: 15 of a patch's 16 reds say nothing new
    whole = MultiScaleTokenizer(replace(micro_config().tokenizer, code_dim=48, linear_path=True))
    whole.start_linear_path(pictures)
    features = whole.features(pictures)
    torch.testing.assert_close(whole.decode_features(features), pictures, atol=1e-4, rtol=0)
    torch.testing.assert_close(features.var((0, 2, 3), unbiased=False).mean(), torch.tensor(1.0), atol=1e-4, rtol=0)
    few = MultiScaleTokenizer(replace(micro_config().tokenizer, code_dim=33, linear_path=True))
    few.start_linear_path(pictures)
    torch.testing.assert_close(few.decode_features(few.features(pictures)), pictures, atol=1e-4, rtol=0)


def test_unused_codes_are_given_a_new_place():
    """Codes far from all features are never chosen; moved among the features, they are."""
    tokenizer = micro_policy().tokenizer
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(8, 4, 4, 4, generator=generator)
    with torch.no_grad():
        tokenizer.quantize.embedding.weight[8:] += 1000.0
    codebook = CodebookAverages(tokenizer.quantize)
    tokenizer.quantize.observe(tokenizer.quantize.assign(features)[1], decay=0.0)
    shares = tokenizer.quantize.ema_vocab_hit_SV
    torch.testing.assert_close(shares.sum(1), torch.ones(3))
    assert shares[:, 8:].sum() == 0
    codebook.update(features)
    assert codebook.reset_unused(features, generator) >= 24
    used = torch.cat(tokenizer.quantize.assign(features)[1], 1).unique()
    assert (used >= 8).sum() > 12
    assert codebook.reset_unused(features, generator) == 0  # they have time to prove themselves


def test_a_code_is_the_running_mean_of_what_it_stands_for():
    """One scale of 1 × 1, two codes at 0 and 10. Features 1, 3 go to the first, 11 to the second.

    With decay 0.5, from nothing: counts 0.5 · (2, 1), sums 0.5 · (4, 11), means (2, 11). Then 4 and 12: counts
    0.5 · (1, 0.5) + 0.5 · (1, 1) = (1, 0.75), sums 0.5 · (2, 5.5) + 0.5 · (4, 12) = (3, 8.75).
    """
    config = TokenizerConfig(scales=(1,), codebook_size=2, code_dim=1)
    quantizer = MultiScaleQuantizer(config)
    quantizer.embedding.weight.data = torch.tensor([[0.0], [10.0]])
    codebook = CodebookAverages(quantizer, decay=0.5)
    codebook.update(torch.tensor([1.0, 3.0, 11.0]).view(3, 1, 1, 1))
    torch.testing.assert_close(quantizer.embedding.weight, torch.tensor([[2.0], [11.0]]))
    codebook.update(torch.tensor([4.0, 12.0]).view(2, 1, 1, 1))
    torch.testing.assert_close(quantizer.embedding.weight, torch.tensor([[3.0], [8.75 / 0.75]]))


def test_a_block_sees_itself_and_what_comes_before():
    """Tokens 0 1 | 2 | 3 4, of which 1 is padding in row 1."""
    real = torch.tensor([[True] * 5, [True, False, True, True, True]])
    block, cpu = Block(5, (2, 3), real), torch.device("cpu")
    assert block.positions(cpu).tolist() == [[0, 1, 2, 3, 4], [0, 0, 1, 2, 3]]
    whole = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1]]
    padded = [[1, 0, 0, 0, 0], [0, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 1], [1, 0, 1, 1, 1]]
    assert block.mask(5, cpu)[:, 0].int().tolist() == [whole, padded]
    assert block.mask(2, cpu)[:, 0].int().tolist() == [whole[3:], padded[3:]]
    unpadded = Block.join([Block(2), Block(1, (0,)), Block(2, (0,))])
    assert unpadded == Block(5, (2, 3))
    assert unpadded.positions(cpu).tolist() == [[0, 1, 2, 3, 4]]
    assert unpadded.mask(5, cpu)[:, 0].int().tolist() == [whole]
    assert unpadded.spans(range(5)) == ((2, 2), (1, 3), (2, 5))  # queries, and the keys that they see
    assert unpadded.spans([1, 3, 4]) == ((1, 2), (2, 5))
    assert Block.join([unpadded, Block(2, is_real=real[:, :2])]).is_real.tolist() == [[True] * 7, [True] * 6 + [False]]


def test_prediction_scale_by_scale_is_the_prediction_at_once():
    """Given its own choices as the truth, the teacher-forced pass has the logits of the pass with a cache."""
    policy = micro_policy(motion_prior=True)
    torch.manual_seed(1)
    model, tokenizer = policy.model, policy.tokenizer
    codes = torch.randint(0, 32, (2, 4, 21))
    words = torch.tensor([[2, 5, 0], [2, 6, 7]])
    prefix = model.understand([(torch.randn(2, 3, 16, 16), torch.tensor([True, False]))], words, words != 0)
    condition = model.condition(tokenizer.embed(codes), expected=torch.randn(2, 4, 4, 4))
    predicted = model.predict_frame(prefix, condition)
    at_once = model.teacher_forced(prefix, condition, predicted.codes)
    torch.testing.assert_close(at_once, predicted.logits, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize(("kv_heads", "recompute"), [(1, False), (2, True)])
def test_attention_block_by_block_is_attention_with_a_mask(monkeypatch, kv_heads, recompute):
    """Outputs and gradients, of a pass at once and of passes with a cache."""
    policy = micro_policy(num_kv_heads=kv_heads, num_heads=4, activation_checkpointing=recompute)
    torch.manual_seed(2)
    codes, pictures, words = torch.randint(0, 32, (2, 4, 21)), torch.randn(2, 3, 16, 16), torch.tensor([[2, 5], [3, 6]])
    robot = (torch.randn(2, 32), torch.randn(2, 3, 32), torch.rand(2))
    found = []
    for length in (10_000, 0):
        monkeypatch.setattr(experts, "LONG", length)
        policy.zero_grad()
        prefix = policy.model.understand([(pictures, None)], words, None)
        condition = policy.model.condition(policy.tokenizer.embed(codes))
        logits = policy.model.teacher_forced(prefix, condition, codes[:, 0])
        predicted = policy.model.predict_frame(prefix, condition)
        velocity, _ = policy.model.velocity_and_features(predicted, *robot)
        (logits.square().mean() + velocity.square().mean()).backward()
        gradients = [one.grad for one in policy.model.experts.parameters() if one.grad is not None]
        assert len(gradients) > 40
        found.append([logits, predicted.logits, velocity, *gradients])
    for masked, spanned in zip(*found, strict=True):
        torch.testing.assert_close(spanned, masked, atol=1e-5, rtol=1e-5)
    assert not torch.equal(found[0][0], found[1][0])  # it was another way to it


def test_the_memory_is_in_full_precision_under_autocast():
    memory = micro_policy().model.memory
    frame, state, action = (torch.randn(3, 2, size) for size in (64, 32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        after, last = memory(frame, state, action, memory.zeros(2))
    assert after.dtype == last.dtype == torch.float32


def test_time_follows_its_distribution():
    """P(t ≤ x) = ((x − 0.001) / 0.999)^1.5, that of Beta(1.5, 1): its mean is 0.6."""
    torch.manual_seed(0)
    times = sample_time(20_000, torch.device("cpu"))
    assert times.min() >= 0.001
    assert times.max() <= 1.0
    assert times.mean().item() == pytest.approx(0.6 * 0.999 + 0.001, abs=0.01)
    assert (times <= 0.5).float().mean().item() == pytest.approx(((0.5 - 0.001) / 0.999) ** 1.5, abs=0.01)


def test_integration_of_the_true_velocity_gives_the_actions():
    actions, noise = torch.randn(2, 3, 4), torch.randn(2, 3, 4)
    seen = []

    def velocity(noisy, time):
        seen.append(time[0].item())
        torch.testing.assert_close(noisy, flow_chain.noised(actions, noise, time), atol=1e-5, rtol=0)
        return noise - actions

    torch.testing.assert_close(flow_chain.integrate(velocity, noise, 10), actions, atol=1e-5, rtol=0)
    assert seen == pytest.approx([1 - step / 10 for step in range(10)])


def test_time_embedding_of_known_periods():
    """The first pair has period 0.004, the last 4: at t = 1 the angles are 2π·250 and π/2."""
    embedding = time_embedding(torch.tensor([1.0]), 4)[0]
    expected = [math.sin(500 * math.pi), 1.0, math.cos(500 * math.pi), 0.0]
    assert embedding.tolist() == pytest.approx(expected, abs=1e-6)


def test_choices():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05])).expand(1, 4000, 4)
    torch.manual_seed(0)

    def shares(top_k, top_p):
        return torch.bincount(choose(logits, top_k, top_p).flatten(), minlength=4) / 4000

    assert shares(1, 1.0).tolist() == [1, 0, 0, 0]
    assert shares(0, 1.0).tolist() == pytest.approx([0.5, 0.3, 0.15, 0.05], abs=0.03)
    assert shares(2, 1.0).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)  # 5/8 and 3/8
    assert shares(0, 0.8).tolist() == pytest.approx([0.625, 0.375, 0, 0], abs=0.03)  # 0.5 + 0.3 hold 0.8
    assert shares(0, 0.81)[2] > 0.1  # and no more than they


def test_the_prior_is_trusted_as_far_as_it_is_right():
    """Two codes 1 apart, the expected place on the first: p(first) = 1 / (1 + exp(−β / spread)), at best its share."""
    quantize = MultiScaleQuantizer(replace(micro_config().tokenizer, codebook_size=2, code_dim=1, scales=(1, 2)))
    with torch.no_grad():
        quantize.embedding.weight.copy_(torch.tensor([[0.0], [1.0]]))
    spread = 0.5  # variance of 0 and 1
    codes = torch.zeros(10, 5, dtype=torch.int64)
    codes[0, 0] = 1  # the coarse scale is wrong once in 10; the fine one half of the time
    codes[:5, 1:] = 1
    found = fit_sharpness(torch.zeros(10, 5, 1), codes, quantize, [1, 4], lambda slopes: slopes).exp()
    assert float(found[0]) == pytest.approx(spread * math.log(9.0), rel=1e-2)  # 0.9 : 0.1
    assert float(found[1]) == pytest.approx(0.4, rel=1e-2)  # the least there is: the prior knows nothing of it


def test_a_tail_lets_the_prior_be_sure_and_wrong_at_times():
    """The first of four codes is expected, and is right 8 times in 10; twice it is the far one, 100 away.

    ν = 1: p_k ~ 1 / (1 + β d_k), with 1 / s = Σ_k that, for d = 0, 1, 1, 100². The best β is found by trying all.
    """
    quantize = MultiScaleQuantizer(replace(micro_config().tokenizer, codebook_size=4, code_dim=1, scales=(1,)))
    with torch.no_grad():
        quantize.embedding.weight.copy_(torch.tensor([[0.0], [1.0], [-1.0], [100.0]]))
    spread = float(quantize.embedding.weight.detach().var())
    codes, places = torch.tensor([0] * 8 + [3] * 2)[:, None], torch.zeros(10, 1, 1)
    steps = torch.linspace(math.log(0.4), math.log(1e6), 4001)  # log β in units of the spread
    shares = 1 / (1 + (steps.exp() / spread)[:, None] * torch.tensor([0.0, 1.0, 1.0, 100.0**2]))
    losses = -0.8 * shares[:, 0].log() - 0.2 * shares[:, 3].log() + shares.sum(1).log()
    found = fit_sharpness(places, codes, quantize, [1], lambda slopes: slopes, tail=1.0)
    assert float(found) == pytest.approx(float(steps[losses.argmin()]), abs=0.01)
    with_tail = prior_cross_entropy(places, codes, found, quantize, [1], tail=1.0).mean()
    assert float(with_tail) == pytest.approx(float(losses.min()), abs=1e-4)
    without = fit_sharpness(places, codes, quantize, [1], lambda slopes: slopes)
    assert prior_cross_entropy(places, codes, without, quantize, [1]).mean() > with_tail + 0.05
    # near codes are weighed as without a tail
    near = torch.tensor([0.0, 1e-4])
    torch.testing.assert_close(prior_logits(near, torch.tensor(1.0), 1.5), prior_logits(near, torch.tensor(1.0)))


def test_motion_starts_as_a_copy_and_moves_the_way_it_says():
    torch.manual_seed(0)
    prior = MotionPrior(micro_config(motion_prior=True))
    history = torch.rand(1, 4, 3, 16, 16)
    robot = (torch.randn(1, 4, 32), torch.ones(1, dtype=torch.bool), torch.randn(1, 32))
    torch.testing.assert_close(prior(history, *robot), history[:, -1], atol=1e-5, rtol=0)
    with torch.no_grad():
        prior.camera.bias[0] = 2 / 16 * 3  # each pixel is taken from 3 px to its right (the picture is 2 wide)
        prior.head.bias[5] = -20.0  # and nothing stays
    moved = prior(history, *robot)
    torch.testing.assert_close(moved[..., :-3], history[:, -1][..., 3:], atol=1e-4, rtol=0)


def test_logits_begin_from_the_codes_of_the_copied_frame():
    """A still scene: the prior's likeliest codes are those of the last frame."""
    policy = micro_policy(motion_prior=True)
    picture = torch.rand(2, 3, 16, 16) * 2 - 1
    codes, expected = policy.tokenizer.encode(picture), policy.tokenizer.features(picture)
    missing = policy.tokenizer.residuals(expected, codes)
    output = torch.zeros(2, 21, 16)
    logits = policy.model.motion.logits(missing, policy.model.world_model.level[0], output, policy.tokenizer.quantize)
    assert torch.equal(logits.argmax(-1), codes)


def test_pictures_are_scaled_once_and_back():
    pictures = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).expand(1, 3, -1, -1)
    scaled = frames.to_model(pictures, 16, "image0")
    assert scaled.min() == -1
    assert scaled.max() == 1
    assert torch.equal(frames.to_images(scaled), pictures)
    with pytest.raises(InputError, match=r"image0 is float32 \[1, 3, 16, 16\]"):
        frames.to_model(scaled, 16, "image0")


def test_pictures_keep_their_shape():
    """8×16 made 4×4: the picture is 2×4, with black above it."""
    scaled = frames.to_model(torch.full((1, 3, 8, 16), 255, dtype=torch.uint8), 4, "image0")
    assert scaled[0, 0].tolist() == [[-1.0] * 4] * 2 + [[1.0] * 4] * 2


def test_bytes_as_words():
    tokens, mask = ByteTokenizer(6)(["ab", "abcdefgh", ""])
    assert tokens.tolist() == [[2, 100, 101, 13, 0, 0], [2, 100, 101, 102, 103, 104], [2, 13, 0, 0, 0, 0]]
    assert mask.sum(1).tolist() == [4, 6, 2]


def test_the_longest_instruction_of_the_tabletop_is_read_to_its_end():
    """55 bytes, a beginning and a new line: the object that it goes onto is named last."""
    text = "place the yellow cylinder on top of the purple cylinder"
    for preset in ("tiny", "small"):
        tokens, mask = make_language_tokenizer(PRESETS[preset]())([text])
        assert int(mask.sum()) == len(text) + 2 < tokens.shape[1]
        assert bytes(tokens[0, 1 : len(text) + 1].sub(3).tolist()).decode() == text


def test_a_language_tokenizer_that_is_not_there():
    with pytest.raises(InputError, match="language_tokenizer_path is not set"):
        FolderTokenizer("", 8)
    with pytest.raises(InputError, match="language_tokenizer_path /nowhere is not a folder"):
        FolderTokenizer("/nowhere", 8)
