import torch

from deft.models.normalization import RewardNormalizer, RunningNormalizer


def test_running_statistics_equal_those_of_all_data():
    torch.manual_seed(0)
    data = torch.randn(100, 3) * torch.tensor([1.0, 10.0, 0.1]) + torch.tensor([0.0, 5.0, -2.0])
    normalizer = RunningNormalizer((3,))
    assert torch.equal(normalizer(data), data.clamp(-10, 10))  # the identity before anything was seen
    for part in data.split([7, 43, 50]):
        normalizer.observe(part)
    torch.testing.assert_close(normalizer.mean, data.double().mean(0))
    torch.testing.assert_close(normalizer.variance, data.double().var(0, correction=0))
    normalized = normalizer(data)
    torch.testing.assert_close(normalized.mean(0), torch.zeros(3), atol=1e-4, rtol=0)
    torch.testing.assert_close(normalized.std(0, correction=0), torch.ones(3), atol=1e-3, rtol=0)


def test_far_values_are_clipped_and_a_constant_is_harmless():
    normalizer = RunningNormalizer((1,))
    normalizer.observe(torch.full((10, 1), 3.0))
    assert normalizer(torch.tensor([[3.0]])).item() == 0.0
    assert normalizer(torch.tensor([[1e6]])).item() == 10.0


def test_the_inverse_gives_back_what_was_normalised():
    normalizer = RunningNormalizer((2,))
    normalizer.observe(torch.tensor([[1.0, 20.0], [3.0, 60.0]]))  # means 2 and 40, deviations 1 and 20
    torch.testing.assert_close(normalizer.inverse(torch.tensor([[1.0, -0.5]])), torch.tensor([[3.0, 30.0]]))


def test_statistics_are_saved_with_the_module():
    normalizer, other = RunningNormalizer((2,)), RunningNormalizer((2,))
    normalizer.observe(torch.rand(5, 2))
    other.load_state_dict(normalizer.state_dict())
    x = torch.rand(4, 2)
    assert torch.equal(normalizer(x), other(x))


def test_rewards_keep_their_sign():
    # returns −2 and 4: mean 1, variance 9, so rewards are divided by 3 and not shifted
    normalizer = RewardNormalizer()
    normalizer.observe(torch.tensor([-2.0, 4.0]))
    torch.testing.assert_close(normalizer(torch.tensor([3.0, -6.0])), torch.tensor([1.0, -2.0]))
