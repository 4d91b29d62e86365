"""Images of random scenes: they follow from the seed."""

import numpy as np
import pytest

from deft.envs.tabletop.images import TabletopImages


@pytest.mark.usefixtures("gl")
def test_images_come_from_the_seed_and_show_many_scenes():
    def images(seed: int) -> np.ndarray:
        env = TabletopImages(16, images_per_scene=2)
        found = [env.reset(seed=seed)[0]]
        ends = []
        for _ in range(3):
            if ends and ends[-1]:
                found.append(env.reset()[0])
            image, _, _, truncated, _ = env.step(0)
            found.append(image)
            ends.append(truncated)
        assert ends == [True, True, True]  # two images a scene: the reset's and one more
        env.close()
        return np.stack(found)

    first, again, other = images(0), images(0), images(1)
    assert first.shape == (6, 2, 3, 16, 16)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    scenes = first[::2].reshape(3, -1).astype(int)
    assert np.abs(scenes[0] - scenes[1]).mean() > 10  # another table, other walls
