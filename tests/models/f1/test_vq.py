"""The image tokenizer: codes, the linear path, and the learning of the codebook."""

from dataclasses import replace

import torch
from f1_worlds import micro_config, micro_policy

from deft.models.f1.config import TokenizerConfig
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
