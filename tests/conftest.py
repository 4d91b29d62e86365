"""What every test shares: one thread, so that results do not depend on the machine's cores."""

import os

import pytest
import torch

os.environ["OMP_NUM_THREADS"] = "1"  # a fixed count: training measures none, and the processes it starts inherit it


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    yield
    torch.set_num_threads(before)
