"""Attention in blocks."""

import pytest
import torch
from f1_worlds import micro_policy

from deft.models.f1 import experts
from deft.models.f1.experts import Block


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
