"""Episodes on the device: drawn in blocks, in the order of the environment on the CPU, repeated at the end."""

import torch

from deft.envs.tabletop.warp.episodes import EpisodeSource
from deft.envs.tabletop.warp.model import draw_block


def test_blocks_follow_each_other_and_repeat() -> None:
    arguments = {"task": "all"}
    source = EpisodeSource(arguments, 2, 3, torch.device("cpu"))
    source.start([4, 5])
    expected, _ = draw_block(arguments, 3, [4, 5])
    rows = torch.arange(2)
    for numbers in ([0, 0], [1, 0], [1, 2], [3, 4]):
        found = source.take(rows, torch.tensor(numbers), max(numbers))
        for name, values in expected.items():
            for row, number in enumerate(numbers):
                assert torch.equal(found[name][row], torch.from_numpy(values)[row, number % 3]), (name, numbers)
    source.start([6, 7])
    again, _ = draw_block(arguments, 1, [6, 7])
    found = source.take(rows, torch.zeros(2, dtype=torch.int64), 0)
    assert torch.equal(found["qpos"], torch.from_numpy(again["qpos"])[:, 0])
    source.close()
