"""Whole episodes: the ring, and the batches that are cut out of them."""

import numpy as np
import pytest
import torch
from panning_camera import WORLD

from deft.data.augmentation import color_tables, recolor_episode
from deft.data.episodes import EpisodeBuffer, EpisodeStore, batch_episodes
from deft.data.robot_episode import RobotEpisode
from deft.envs.f1 import TeacherEnv
from deft.envs.history import prediction_pair
from deft.errors import InputError


def episode(length: int, number: int = 0) -> RobotEpisode:
    """Frame t is filled with t, state t with t, action t with t + 1 (all of them plus 10 times the number)."""
    base = 10 * number

    def frames(*shape: int) -> np.ndarray:
        return np.arange(base, base + length + 1).reshape(-1, *[1] * len(shape)) + np.zeros(shape)

    return RobotEpisode(
        wrist=frames(3, 4, 4).astype(np.uint8),
        state=frames(32).astype(np.float32),
        action=(frames(32)[:-1] + 1).astype(np.float32),
        codes=frames(5).astype(np.int64),
        number=number,
    )


def test_the_histories_are_those_of_the_environment():
    """Cut out of a whole episode, with a stride too, a batch is what `prediction_pair` makes step by step."""
    for stride in (1, 2):
        env = TeacherEnv({"world": WORLD, "obs_img_stride": stride, "max_steps": 6})
        generator = np.random.default_rng(0)
        observation, _ = env.reset(seed=3)
        seen, pairs, actions = [observation], [], []
        for _ in range(6):
            action = generator.uniform(-1, 1, 32).astype(np.float32)
            following, *_, info = env.step(action)
            pairs.append(prediction_pair(seen[-1], info["executed_action"], following))
            actions.append(info["executed_action"])
            seen.append(following)
        whole = RobotEpisode(
            wrist=np.stack([one["wrist_rgb"][-1] for one in seen]),
            state=np.stack([one["state"] for one in seen]),
            action=np.stack(actions),
            head=np.stack([one["head_rgb"][-1] for one in seen]),
        )
        batch, rows = batch_episodes([whole], history=4, stride=stride).chunk(0, 6)
        assert rows.tolist() == [0]
        for step, (inputs, target) in enumerate(pairs):
            assert np.array_equal(batch["image0_history"][step, 0, :4], inputs["wrist_rgb"])
            assert np.array_equal(batch["image0_history"][step, 0, 4], target)
            assert np.array_equal(batch["action_history"][step, 0], inputs["action_history"])
            assert np.array_equal(batch["state"][step, 0], inputs["state"])
            assert np.array_equal(batch["image0"][step, 0], inputs["head_rgb"][-1])
            assert np.array_equal(batch["image1"][step, 0], inputs["wrist_rgb"][-1])
        env.close()


def test_an_episode_begins_with_its_first_frame_and_no_action():
    batch, _ = batch_episodes([episode(5)]).chunk(1, 1)
    assert batch["frame_tokens"][0, 0, :, 0].tolist() == [0, 0, 0, 1, 2]  # t = 1: img_{-2} … img_1, then img_2
    assert batch["action_history"][0, 0, :, 0].tolist() == [0, 0, 1, 2]  # a_0 is 1, a_1 is 2
    assert batch["state"][0, 0, 0] == 1
    assert "image1" not in batch  # without a head camera the wrist is the picture that is looked at
    assert batch["image0"][0, 0, 0, 0, 0] == 1


def test_chunks_of_episodes_that_end_at_different_times():
    batch = batch_episodes([episode(5), episode(3, 1), episode(2, 2)])
    whole, rows = batch.chunk(0, 2)
    assert rows.tolist() == [0, 1, 2]
    assert "step_mask" not in whole
    middle, rows = batch.chunk(2, 2)
    assert rows.tolist() == [0, 1]  # the third has ended
    assert middle["step_mask"].tolist() == [[True, True], [True, False]]
    last, rows = batch.chunk(4, 2)
    assert rows.tolist() == [0]
    assert last["state"].shape[:2] == (1, 1)  # one step is left
    assert "step_mask" not in last
    assert batch.chunk(6, 2) is None
    rows, times = batch.all_steps()
    assert sorted(zip(rows.tolist(), times.tolist(), strict=True)) == [
        (r, t) for r in range(3) for t in range((5, 3, 2)[r])
    ]


def test_new_episodes_are_drawn_first_and_replace_the_oldest():
    buffer, generator = EpisodeBuffer(3, 4), np.random.default_rng(0)
    for number in range(2):
        buffer.add(episode(4, number))
    assert buffer.draw(5, generator).tolist() == [0, 1]  # all there are
    for number in range(2, 5):
        buffer.add(episode(4, number))
    assert sorted(buffer.numbers.tolist()) == [2, 3, 4]
    assert buffer.num_unseen == 3
    assert buffer.numbers[buffer.draw(2, generator)].tolist() == [2, 3]  # the oldest of the new
    drawn = buffer.draw(2, generator)
    assert buffer.numbers[drawn[0]] == 4  # the last new one, then one again
    assert len(set(drawn)) == 2
    assert buffer.num_unseen == 0


def test_a_refilled_buffer_draws_as_the_first_did():
    def filled(numbers) -> EpisodeBuffer:
        buffer = EpisodeBuffer(3, 4)
        for number in numbers:
            buffer.add(episode(4, number))
        return buffer

    first = filled(range(5))
    first.draw(2, np.random.default_rng(0))
    again = EpisodeBuffer(3, 4)
    again.refill([episode(4, number) for number in (2, 3, 4)], first.state_dict())
    assert torch.equal(again.numbers, first.numbers)
    for buffer in (first, again):
        buffer.add(episode(4, 5))
    one, other = (buffer.draw(3, np.random.default_rng(1)) for buffer in (first, again))
    assert one.tolist() == other.tolist()
    assert torch.equal(first.batch(one).streams["wrist"], again.batch(other).streams["wrist"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda buffer: buffer.add(episode(9)), "9 steps does not fit into a buffer of 4"),
        (lambda buffer: EpisodeBuffer(2, 2).draw(1, np.random.default_rng(0)), "empty"),
        (lambda buffer: RobotEpisode(np.zeros((3, 3, 4, 4)), np.zeros((4, 32)), np.zeros((3, 32))), "wrist has 3 rows"),
        (lambda buffer: buffer.add(RobotEpisode(np.zeros((5, 3, 8, 8)), np.zeros((5, 32)), np.zeros((4, 32)))),
         "does not fit into a buffer of wrist, state, action, codes"),
    ],
)  # fmt: skip
def test_episodes_that_do_not_fit_raise_an_error(change, message):
    buffer = EpisodeBuffer(2, 4)
    buffer.add(episode(4))
    with pytest.raises(InputError, match=message):
        change(buffer)


def test_colours_change_alike_in_all_frames_of_both_cameras():
    frames = np.random.default_rng(0).integers(0, 256, (4, 3, 8, 8)).astype(np.uint8)
    whole = RobotEpisode(frames, np.zeros((4, 32)), np.zeros((3, 32)), head=frames[::-1].copy(), codes=np.zeros((4, 5)))
    changed = recolor_episode(whole, np.random.default_rng(1), 0.3)
    table = color_tables(np.random.default_rng(1), 0.3)
    assert not np.array_equal(changed.wrist, frames)
    assert np.array_equal(changed.wrist, changed.head[::-1])
    for channel in range(3):
        assert np.array_equal(changed.wrist[:, channel], table[channel][frames[:, channel]])
        assert (np.diff(table[channel].astype(int)) >= 0).all()  # brighter stays brighter
    assert changed.codes is None  # they were of the old colours
    assert recolor_episode(whole, np.random.default_rng(1), 0.0) is whole


def test_a_store_keeps_the_latest_and_comes_back():
    def episode(number):
        return RobotEpisode(
            wrist=np.full((3, 3, 4, 4), number, np.uint8),
            state=np.zeros((3, 32), np.float32),
            action=np.zeros((2, 32), np.float32),
            codes=np.full((3, 5), number),
            number=number,
        )

    store = EpisodeStore(3)
    store.add(map(episode, range(5)))
    assert [one.number for one in store.episodes] == [2, 3, 4]
    drawn = store.draw(2, np.random.default_rng(0))
    assert len({one.number for one in drawn}) == 2
    assert len(store.draw(9, np.random.default_rng(0))) == 3
    assert store.num_unseen == 3  # `draw` does not count
    assert [one.number for one in store.draw_unseen_first(2, np.random.default_rng(0))] == [2, 3]
    assert store.num_unseen == 1
    again = EpisodeStore(3)
    again.load_state_dict(store.state_dict())
    for one, other in zip(store.episodes, again.episodes, strict=True):
        assert one.number == other.number
        assert all(np.array_equal(one.streams()[name], other.streams()[name]) for name in one.streams())
        assert other.head is None
    first, *others = store.draw_unseen_first(3, np.random.default_rng(0))
    assert first.number == 4
    assert {one.number for one in others} == {2, 3}
    store.add([episode(5)])
    assert store.num_unseen == 1
    store.add(map(episode, range(6, 11)))  # more than it holds
    assert store.num_unseen == 3
    assert len(store.draw_unseen_first(9, np.random.default_rng(0))) == 3
    assert store.num_unseen == 0
