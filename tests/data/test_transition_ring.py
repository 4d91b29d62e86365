import numpy as np
import pytest
import torch

from deft import schema
from deft.data.datasets import Episode
from deft.data.transition_ring import TransitionRing
from deft.errors import InputError


def row(*steps, image: bool = False):
    """One step of each environment: (t, reward, terminated, truncated); the observation is t, the next one t + 1."""
    numbers, reward, terminated, truncated = (np.array(column) for column in zip(*steps, strict=True))

    def observe(values):
        if image:
            return np.repeat(values.astype(np.uint8)[:, None, None, None], 4, 2).repeat(4, 3)
        return values.astype(np.float32)[:, None]

    return {
        schema.OBSERVATION: observe(numbers),
        schema.ACTION: numbers.astype(np.float32)[:, None] / 10,
        schema.NEXT_REWARD: reward.astype(np.float32),
        schema.NEXT_TERMINATED: terminated.astype(bool),
        schema.NEXT_TRUNCATED: truncated.astype(bool),
        schema.NEXT_OBSERVATION: observe(numbers + 1),
    }


def content(ring: TransitionRing) -> list[tuple[float, ...]]:
    """(s, reward, discount, s') of everything in it, oldest first."""
    index = torch.arange(ring._oldest, ring._written) % ring._room
    rows = ring._rows(index)
    first, following = (rows[key].flatten(1)[:, 0].tolist() for key in (schema.OBSERVATION, schema.NEXT_OBSERVATION))
    rewards, discounts = (rows[key].tolist() for key in (schema.NEXT_REWARD, schema.DISCOUNT))
    return [(s, round(r, 5), round(d, 5), n) for s, r, d, n in zip(first, rewards, discounts, following, strict=True)]


def test_one_step_transitions_with_terminal_and_truncated_ends():
    ring = TransitionRing(10, gamma=0.9)
    ring.write(row((0, 1, False, False), (10, 1, False, False)))
    ring.write(row((1, 2, True, False), (11, 2, False, True)))
    # Only a terminal step is worth nothing afterwards; a truncated one counts its true last observation.
    assert content(ring) == [(0, 1, 0.9, 1), (10, 1, 0.9, 11), (1, 2, 0.0, 2), (11, 2, 0.9, 12)]
    assert len(ring) == 4


def test_n_steps_by_hand():
    ring = TransitionRing(10, gamma=0.5, n_step=3)
    for t in range(4):
        ring.write(row((t, t + 1, False, t == 3)))
    # Rewards 1, 2, 3, 4, cut after the fourth: from 0: 1 + ½·2 + ¼·3 = 2.75, γ³ = 0.125, to 3; from 1: 2 + 1.5 + 1 =
    # 4.5, to 4; then the rest of the episode: from 2: 3 + 2 = 5, γ²; from 3: 4, γ.
    assert content(ring) == [(0, 2.75, 0.125, 3), (1, 4.5, 0.125, 4), (2, 5.0, 0.25, 4), (3, 4.0, 0.5, 4)]
    ring = TransitionRing(10, gamma=0.5, n_step=3)
    ring.write(row((0, 1, False, False)))
    ring.write(row((1, 2, True, False)))
    assert content(ring) == [(0, 2.0, 0.0, 2), (1, 2.0, 0.0, 2)]  # terminal: no value after it


def test_steps_that_wait_do_not_change_with_the_environments_memory():
    ring = TransitionRing(10, gamma=1.0, n_step=3)
    memory = row((0, 1, False, False))
    for t in range(3):
        for key, value in row((t, 1, False, False)).items():
            memory[key][:] = value
        ring.write(memory)
    assert content(ring) == [(0, 3, 1.0, 3)]


def test_environments_do_not_mix_in_n_step_returns():
    ring = TransitionRing(10, gamma=1.0, n_step=2)
    ring.write(row((0, 1, False, False), (10, 100, False, False)))
    ring.write(row((1, 2, False, False), (11, 200, False, False)))
    assert content(ring) == [(0, 3, 1.0, 2), (10, 300, 1.0, 12)]


@pytest.mark.parametrize("image", [False, True])
def test_the_oldest_are_overwritten(image):
    ring = TransitionRing(4, gamma=1.0)
    for t in range(7):
        ring.write(row((t, t, False, False), image=image))
    assert [transition[0] for transition in content(ring)] == [3, 4, 5, 6]
    assert [transition[3] for transition in content(ring)] == [4, 5, 6, 7]
    drawn = ring.sample(500)
    assert set(drawn[schema.NEXT_REWARD].tolist()) == {3.0, 4.0, 5.0, 6.0}


def test_images_are_kept_once():
    ring = TransitionRing(100)
    for t in range(20):
        ring.write(row((t, 0, False, t % 10 == 9), image=True))
    # Two episodes of ten steps: eleven images each.
    assert ring._num_frames == 22
    assert content(ring)[9][3] == 10  # the last image of the first episode, not the first of the second


def test_transitions_go_with_their_images():
    # Episodes of one step take two images a transition, twice what there is room for: the oldest transitions go.
    ring = TransitionRing(16)
    for t in range(64):
        ring.write(row((2 * t, t, False, True), image=True))
    kept = content(ring)
    assert [transition[1] for transition in kept] == [float(t) for t in range(64 - len(kept), 64)]
    assert all(transition[0] == 2 * transition[1] and transition[3] == transition[0] + 1 for transition in kept)
    assert 8 <= len(kept) < 16


@pytest.mark.parametrize(("image", "n_step"), [(False, 1), (True, 1), (False, 3), (True, 3)])
def test_a_resumed_ring_draws_the_same(image, n_step):
    ring = TransitionRing(8, seed=3, n_step=n_step)
    steps = [(t, t, False, t % 5 == 4) for t in range(30)]
    for step in steps[:20]:
        ring.write(row(step, image=image))
    ring.sample(4)
    other = TransitionRing(8, n_step=n_step)
    other.load_state_dict(ring.state_dict())
    for one in (ring, other):
        for step in steps[20:]:
            one.write(row(step, image=image))
    assert content(ring) == content(other)
    drawn, again = ring.sample(16), other.sample(16)
    assert drawn.keys() == again.keys()
    assert all(torch.equal(drawn[key], again[key]) for key in drawn)


@pytest.mark.parametrize("n_step", [1, 3])
def test_images_are_the_transitions_own_with_many_short_episodes(n_step):
    # Every image and the float beside it carry one number; 8 environments whose episodes last about 5 steps.
    generator = np.random.default_rng(0)
    ring, number = TransitionRing(100, n_step=n_step), np.zeros(8, np.int64)
    for _ in range(120):
        done = generator.random(8) < 0.2
        step = row(*[(n, 0, False, d) for n, d in zip(number, done, strict=True)])
        image = row(*[(n, 0, False, d) for n, d in zip(number % 256, done, strict=True)], image=True)
        streams = {
            (schema.OBSERVATION, "number"): step[schema.OBSERVATION],
            (*schema.NEXT_OBSERVATION, "number"): step[schema.NEXT_OBSERVATION],
            (schema.OBSERVATION, "image"): image[schema.OBSERVATION],
            (*schema.NEXT_OBSERVATION, "image"): image[schema.NEXT_OBSERVATION],
        }
        plain = {key: step[key] for key in step if key not in (schema.OBSERVATION, schema.NEXT_OBSERVATION)}
        ring.write({**plain, **streams})
        number += np.where(done, 7, 1)
        batch = ring.sample(64) if len(ring) else {}
        for key in (schema.OBSERVATION, schema.NEXT_OBSERVATION) if batch else ():
            expected = batch[key]["number"][:, 0] % 256
            assert torch.equal(batch[key]["image"][:, 0, 0, 0].float(), expected)
    assert len(ring) > 40


def test_a_lost_step_leaves_nothing_behind():
    ring = TransitionRing(10, gamma=1.0, n_step=2)
    ring.write(row((0, 1, False, False), (10, 1, False, False)))
    ring.write({**row((1, 1, False, False), (11, 0, False, True)), schema.STEP_MASK: np.array([True, False])})
    ring.write(row((2, 1, False, False), (20, 1, False, False)))
    ring.write(row((3, 1, False, False), (21, 1, False, False)))
    # Of the second environment only what came after the loss: 20 and 21.
    assert content(ring) == [(0, 2, 1.0, 2), (1, 2, 1.0, 3), (2, 2, 1.0, 4), (20, 2, 1.0, 22)]


def test_another_number_of_environments_after_a_cut():
    for n_step, image in ((3, False), (1, True)):
        ring = TransitionRing(10, n_step=n_step)
        ring.write(row((0, 1, False, False), (10, 1, False, False), image=image))
        ring.cut()
        ring.write(row((0, 1, False, True), (10, 1, False, True), (20, 1, False, True), image=image))
        assert len(ring) == (3 if n_step == 3 else 5)


def test_named_streams_and_chunks():
    ring = TransitionRing(4, gamma=0.5)
    plain = row((0, 1, False, False))
    step = {
        (schema.OBSERVATION, "state"): plain[schema.OBSERVATION],
        (*schema.NEXT_OBSERVATION, "state"): plain[schema.NEXT_OBSERVATION],
    }
    rest = {key: value for key, value in plain.items() if key not in (schema.OBSERVATION, schema.NEXT_OBSERVATION)}
    ring.write({**rest, **step, schema.NEXT_NUM_STEPS: np.array([3])})
    batch = ring.sample(2)
    assert batch[schema.OBSERVATION]["state"].tolist() == [[0.0], [0.0]]
    assert batch[schema.NEXT_OBSERVATION]["state"].tolist() == [[1.0], [1.0]]
    assert batch[schema.DISCOUNT].tolist() == [0.125, 0.125]  # γ³: three env steps


@pytest.mark.parametrize("n_step", [1, 2])
def test_episodes_of_a_dataset(n_step):
    ring = TransitionRing(10, gamma=0.5, n_step=n_step)
    for start in (0, 100):
        ring.extend(
            Episode(
                observation=np.arange(start, start + 4, dtype=np.float32)[:, None],
                action=np.zeros((3, 1), np.float32),
                reward=np.ones(3, np.float32),
                terminated=np.array([False, False, start == 100]),
                truncated=np.array([False, False, start == 0]),
            )
        )
    if n_step == 1:
        expected = [
            (0, 1, 0.5, 1),
            (1, 1, 0.5, 2),
            (2, 1, 0.5, 3),
            (100, 1, 0.5, 101),
            (101, 1, 0.5, 102),
            (102, 1, 0.0, 103),
        ]
    else:  # 1 + ½, γ² = ¼; the last of the first recording is cut, that of the second terminal
        expected = [
            (0, 1.5, 0.25, 2),
            (1, 1.5, 0.25, 3),
            (2, 1, 0.5, 3),
            (100, 1.5, 0.25, 102),
            (101, 1.5, 0.0, 103),
            (102, 1, 0.0, 103),
        ]
    assert content(ring) == expected


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("n_step", [1, 3])
def test_memory_is_taken_for_the_steps_that_come(image, n_step):
    """A buffer of more transitions than the machine holds, for a run of 12 steps; 16 come, and then another 20."""
    whole = TransitionRing(1000, seed=1, n_step=n_step)
    ring = TransitionRing(10**13, seed=1, n_step=n_step)
    assert not ring.reserve(12)

    def write(steps):
        for t in steps:  # two environments; an episode lasts two steps, so images are many
            for one in (whole, ring):
                one.write(row((t, t, False, t % 2 == 1), (100 + t, t, t % 2 == 1, False), image=image))

    write(range(6))
    assert len(ring._steps.tensors[schema.ACTION]) == 12
    assert content(ring) == content(whole)
    write(range(6, 8))
    assert len(ring._steps.tensors[schema.ACTION]) == 24  # twice as many
    assert ring.reserve(20)  # 16 and 20 are 36
    write(range(8, 18))
    assert len(ring._steps.tensors[schema.ACTION]) == 36
    assert content(ring) == content(whole)
    assert len(ring) == 36
    assert torch.equal(*(one.sample(50)[schema.NEXT_OBSERVATION] for one in (ring, whole)))
    again = TransitionRing(10**13, seed=2, n_step=n_step)
    again.reserve(40)
    again.load_state_dict(ring.state_dict())
    assert len(again._steps.tensors[schema.ACTION]) == 40
    assert content(again) == content(ring)


def test_a_buffer_larger_than_memory_raises_an_error():
    with pytest.raises(InputError, match=r"buffer_size: .* use a smaller buffer_size"):
        TransitionRing(10**13).write(row((0, 0, False, False)))
    with pytest.raises(InputError, match="smaller than the 2 environments"):
        TransitionRing(1).write(row((0, 0, False, False), (1, 0, False, False)))


def returns_of(ring: TransitionRing) -> list[float]:
    """The returns of everything in it, oldest first."""
    rows = ring._rows(torch.arange(ring._oldest, ring._written) % ring._room)
    return [round(value, 5) for value in rows[schema.VALUE_TARGET].tolist()]


@pytest.mark.parametrize("image", [False, True])
def test_returns_of_two_episodes_by_hand(image):
    ring = TransitionRing(20, gamma=0.5, returns=True)
    ring.write(row((0, 1, False, False), (10, 8, False, False), image=image))
    ring.write(row((1, 2, False, False), (11, 4, True, False), image=image))
    # The second environment's episode is over: 8 + ½ · 4 = 10, and 4. The first one's is not, and waits.
    assert content(ring) == [(10, 8, 0.5, 11), (11, 4, 0.0, 12)]
    assert returns_of(ring) == [10, 4]
    ring.write(row((2, 4, False, True), (20, 1, False, False), image=image))
    # Cut by a time limit: 4, 2 + ½ · 4 = 4, 1 + ½ · 4 = 3. The value after the cut still counts in the target.
    assert content(ring)[2:] == [(0, 1, 0.5, 1), (1, 2, 0.5, 2), (2, 4, 0.5, 3)]
    assert returns_of(ring)[2:] == [3, 4, 4]


def test_returns_beside_n_step_targets_and_chunks():
    ring = TransitionRing(20, gamma=0.5, n_step=2, returns=True)
    for t in range(3):
        ring.write(row((t, 4, t == 2, False)))
    # n-step rewards 4 + ½ · 4, 4 + ½ · 4, 4; returns 4 + 2 + 1 = 7, 6, 4.
    assert content(ring) == [(0, 6, 0.25, 2), (1, 6, 0.0, 3), (2, 4, 0.0, 3)]
    assert returns_of(ring) == [7, 6, 4]
    ring = TransitionRing(20, gamma=0.5, returns=True)
    for t, steps in ((0, 3), (1, 1)):
        ring.write({**row((t, 4, t == 1, False)), schema.NEXT_NUM_STEPS: np.array([steps])})
    assert returns_of(ring) == [4 + 0.5**3 * 4, 4]  # the first transition is a chunk of three env steps


def test_unfinished_episodes_are_part_of_the_state_and_lost_ones_are_dropped():
    rings = [TransitionRing(20, gamma=0.5, returns=True) for _ in range(2)]
    rings[0].write(row((0, 1, False, False), (10, 8, False, False)))
    rings[1].load_state_dict(rings[0].state_dict())
    for ring in rings:
        ring.write(row((1, 2, True, False), (11, 4, False, False)))
        ring.cut([1])
        ring.write(row((20, 1, True, False), (30, 2, True, False)))
        assert content(ring) == [(0, 1, 0.5, 1), (1, 2, 0.0, 2), (20, 1, 0.0, 21), (30, 2, 0.0, 31)]
        assert returns_of(ring) == [2, 2, 1, 2]


def test_returns_of_a_recorded_episode():
    ring = TransitionRing(20, gamma=0.5, returns=True)
    numbers, ends = np.arange(4, dtype=np.float32)[:, None], np.array([False, False, True])
    ring.extend(Episode(numbers, numbers[:3], np.array([1, 2, 4], np.float32), ends, ~ends & False))
    assert returns_of(ring) == [3, 4, 4]
