"""The memory under autocast."""

import torch
from f1_worlds import micro_policy


def test_the_memory_is_in_full_precision_under_autocast():
    memory = micro_policy().model.memory
    frame, state, action = (torch.randn(3, 2, size) for size in (64, 32, 32))
    with torch.autocast("cpu", torch.bfloat16):
        after, last = memory(frame, state, action, memory.zeros(2))
    assert after.dtype == last.dtype == torch.float32
