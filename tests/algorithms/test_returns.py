import pytest
import torch

from deft.algorithms.returns import discounted_sum, generalized_advantage, next_values, returns_so_far


def test_three_steps_by_hand():
    # γ = 0.5, λ = 0.5, no episode ends; V = [1, 2, 3], V(next of the last) = 4, r = [1, 1, 1]
    # δ2 = 1 + 0.5·4 − 3 = 0      A2 = 0
    # δ1 = 1 + 0.5·3 − 2 = 0.5    A1 = 0.5 + 0.25·0 = 0.5
    # δ0 = 1 + 0.5·2 − 1 = 1      A0 = 1 + 0.25·0.5 = 1.125
    value = torch.tensor([[1.0], [2.0], [3.0]])
    next_value = torch.tensor([[2.0], [3.0], [4.0]])
    no = torch.zeros(3, 1, dtype=torch.bool)
    advantage = generalized_advantage(torch.ones(3, 1), value, next_value, no, no, 0.5, 0.5)
    torch.testing.assert_close(advantage, torch.tensor([[1.125], [0.5], [0.0]]))


def test_termination_cuts_the_bootstrap_and_truncation_does_not():
    # One step each, γ = 0.5, r = 1, V = 0, V(final) = 10. Terminated: δ = 1. Truncated: δ = 1 + 0.5·10 = 6.
    # The second row (r = 1, V = 0, V(next) = 0, A = 1) belongs to the next episode and reaches neither.
    terminated = torch.tensor([[True, False], [False, False]])
    done = torch.tensor([[True, True], [False, False]])
    next_value = torch.tensor([[10.0, 10.0], [0.0, 0.0]])
    advantage = generalized_advantage(torch.ones(2, 2), torch.zeros(2, 2), next_value, terminated, done, 0.5, 1.0)
    torch.testing.assert_close(advantage, torch.tensor([[1.0, 6.0], [1.0, 1.0]]))


def test_discount_may_differ_by_step():
    # A chunk of 2 steps with γ = 0.5 discounts by 0.25: δ = 1 + 0.25·8 − 0 = 3
    no = torch.zeros(1, 1, dtype=torch.bool)
    advantage = generalized_advantage(
        torch.ones(1, 1), torch.zeros(1, 1), torch.full((1, 1), 8.0), no, no, torch.full((1, 1), 0.25), 0.95
    )
    assert advantage.item() == 3.0


@pytest.mark.parametrize("length", [1, 2, 3, 5, 64, 100])
def test_discounted_sum_is_the_recurrence(length):
    generator = torch.Generator().manual_seed(length)
    x, factor = torch.rand(2, length, 3, generator=generator, dtype=torch.float64)
    expected, carry = torch.empty_like(x), torch.zeros(3, dtype=torch.float64)
    for t in reversed(range(length)):  # y_t = x_t + factor_t · y_{t+1}, one step at a time
        carry = expected[t] = x[t] + factor[t] * carry
    torch.testing.assert_close(discounted_sum(x, factor), expected)


def test_returns_so_far_run_forwards_and_restart_with_an_episode():
    # γ = 0.5, carried 4: R0 = 4 + 1 = 5 (episode ends), R1 = 1, R2 = 0.5·1 + 1 = 1.5; carry on 0.5·1.5 = 0.75
    done = torch.tensor([[True], [False], [False]])
    returns, carried = returns_so_far(torch.ones(3, 1), done, 0.5, torch.tensor([4.0]))
    torch.testing.assert_close(returns, torch.tensor([[5.0], [1.0], [1.5]]))
    torch.testing.assert_close(carried, torch.tensor([0.75]))


def test_next_values_are_those_of_the_next_rows_within_an_episode() -> None:
    value, bootstrap = torch.tensor([[1.0], [2.0], [3.0]]), torch.tensor([[7.0], [8.0], [9.0]])
    done = torch.tensor([[False], [True], [False]])
    # row 0: V of row 1; row 1 ends, and row 2 is the last: their bootstraps
    torch.testing.assert_close(next_values(value, bootstrap, done), torch.tensor([[2.0], [8.0], [9.0]]))
