"""Prediction scale by scale."""

import torch
from f1_worlds import micro_policy


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
