"""The batched tabletop on Warp's CPU device is the tabletop: observations, rewards, ends, resets, chunks."""

from typing import Any

import numpy as np
import pytest
import torch

from deft import schema
from deft.algorithms.grpo import GRPO
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.config.settings import EnvConfig, PolicyConfig, TrainerConfig, VLAConfig
from deft.envs.make import make_tensor_env, make_vector_env
from deft.envs.state import decode
from deft.envs.tabletop.tasks import TASKS
from deft.envs.tabletop.warp.env import WarpTabletopEnv
from deft.envs.tabletop.warp.simulation import WarpSimulation
from deft.envs.vector import Episode, VectorEnv
from deft.errors import InputError, RunError
from deft.models.building import make_policy
from deft.training.experience import make_collection

pytestmark = pytest.mark.usefixtures("compiled_kernels")
LOOKS = {"random_appearance": True, "random_background": True, "random_table_height": 0.03, "random_light": True}
STILL = {**LOOKS, "crazy_random_light_rate": 0.0}


def both(chunk_length: int = 1, **settings: Any) -> tuple[VectorEnv, VectorEnv]:
    """The same two environments on Warp, with numpy arrays, and in this process."""
    common = {"id": "tabletop", "num_envs": 2, **settings}
    return tuple(
        make_vector_env(EnvConfig(vector=vector, **common), chunk_length=chunk_length, gamma=0.9, device="cpu")
        for vector in ("warp", "sync")
    )


def assert_near(found: Any, expected: Any) -> None:
    """States within float32's errors, images at least 25 dB, text equal."""
    if not isinstance(expected, dict):
        found, expected = {"": found}, {"": expected}
    assert list(found) == list(expected)
    for name, stream in expected.items():
        assert (found[name].shape, found[name].dtype) == (stream.shape, stream.dtype)
        if name.endswith("_rgb"):
            error = ((found[name].astype(float) - stream) ** 2).mean()
            assert 10 * np.log10(255**2 / error) > 25
        else:
            np.testing.assert_allclose(found[name], stream, atol=1e-4)


def play(warp: VectorEnv, cpu: VectorEnv, steps: int) -> int:
    """Random actions in both; every result agrees. Return the number of episodes that ended."""
    random = np.random.default_rng(0)
    assert_near(warp.reset(seed=3), cpu.reset(seed=3))
    ended = 0
    for _ in range(steps):
        actions = random.uniform(-1, 1, (2, *warp.action_space.shape)).astype(np.float32)
        found, expected = warp.step(actions), cpu.step(actions)
        assert_near(found.observation, expected.observation)
        for name in ("terminated", "truncated", "num_steps", "done_index", "lost_index"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        np.testing.assert_allclose(found.reward, expected.reward, atol=1e-4)
        if expected.reward_terms is not None:
            np.testing.assert_allclose(found.reward_terms, expected.reward_terms, atol=1e-4)
        assert (found.final_observation is None) == (expected.final_observation is None)
        if expected.final_observation is not None:
            assert_near(found.final_observation, expected.final_observation)
        for one, other in zip(found.episodes, expected.episodes, strict=True):
            assert (one.env_index, one.length, one.success, one.labels) == (
                other.env_index,
                other.length,
                other.success,
                other.labels,
            )
            assert one.episode_return == pytest.approx(other.episode_return, abs=1e-4)
            assert one.terms == pytest.approx(other.terms, abs=1e-4)
            ended += 1
    warp.close()
    cpu.close()
    return ended


@pytest.mark.usefixtures("gl")
def test_steps_and_resets_are_those_of_the_cpu():
    kwargs = {"task": "all", "observation": "both", "domain_randomization": STILL}
    assert play(*both(max_episode_steps=3, kwargs=kwargs), 7) == 4  # two environments, after steps 3 and 6


@pytest.mark.usefixtures("gl")
def test_chunks_with_labels_and_weights_are_those_of_the_cpu():
    kwargs = {"task": "push", "observation": "labelled", "control_mode": "delta_ee_pos", "cameras": ["wrist"]}
    pair = both(2, max_episode_steps=3, kwargs=kwargs, reward_weights={"approach": 2.0})
    assert play(*pair, 4) == 4  # an episode ends in the middle of every second chunk


@pytest.mark.usefixtures("gl")
def test_privileged_observations_are_those_of_the_cpu():
    kwargs = {"task": "all", "observation": "privileged", "cameras": ["wrist"]}
    assert play(*both(max_episode_steps=2, kwargs=kwargs), 3) == 2  # two environments, after step 2


def test_starts_of_the_expert_are_those_of_the_cpu():
    """Targets included: with the fingers at another target than the CPU's, a held object would be dropped."""
    warp, cpu = both(kwargs={"task": "place", "expert_starts": {"place": 1.0}})
    assert_near(warp.reset(seed=3), cpu.reset(seed=3))
    assert 0.1 < cpu.observation[:, 14].min() < 0.9  # an environment begins with an object between its fingers
    for _ in range(3):
        found, expected = (env.step(np.tile([0.0] * 7 + [-1.0], (2, 1)).astype(np.float32)) for env in (warp, cpu))
    np.testing.assert_allclose(found.observation[:, :7], expected.observation[:, :7], atol=0.02)  # joints
    np.testing.assert_allclose(found.observation[:, 14], expected.observation[:, 14], atol=0.02)  # opening
    warp.close()
    cpu.close()


def test_starts_follow_the_success_of_all_environments_and_are_saved():
    """Two episodes of place that fail: the rates of the parts in which they began fall, by 5 % of 0.5 each."""
    kwargs = {"task": "place", "expert_starts": {"place": 1.0}, "num_scenes": 4}
    config = EnvConfig(id="tabletop", vector="warp", num_envs=2, max_episode_steps=1, kwargs=kwargs)
    env = make_tensor_env(config, device="cpu")
    env.reset(seed=3)
    parts = [decode(state)["part"] for state in env.get_state()]
    env.step(torch.zeros(2, 8))
    states = env.get_state()
    rates = decode(states[0])["start_rates"]
    assert rates.sum() == pytest.approx(0.5 * rates.size - 0.05, abs=2e-3)  # 0.025 each; twice in one part: 0.04875
    for part in parts:
        assert rates[list(TASKS).index("place"), part] < 0.48
    env.step(torch.zeros(2, 8))
    env.set_state(states)
    assert [decode(state)["part"] for state in env.get_state()] == [decode(state)["part"] for state in states]
    np.testing.assert_array_equal(decode(env.get_state()[1])["start_rates"], rates)
    env.close()


def test_exploration_in_a_sparse_hand_pose_environment_has_no_reward():
    kwargs = {"task": "random_exploration", "control_mode": "delta_ee", "reward": "sparse"}
    warp, cpu = both(kwargs=kwargs)
    assert warp.reward_terms == ()
    play(warp, cpu, 2)


def test_results_are_tensors_and_stay_valid_for_another_step():
    config = EnvConfig(id="tabletop", vector="warp", num_envs=2, kwargs={"task": "reach", "observation": "images"})
    env = make_tensor_env(config, device="cpu")
    env.reset(seed=0)
    first = env.step(torch.ones(2, 8))
    assert first.reward.dtype == torch.float32
    assert first.terminated.dtype == torch.bool
    assert first.observation["head_rgb"].shape == (2, 3, 64, 64)
    kept = {name: stream.clone() for name, stream in first.observation.items()}
    second = env.step(-torch.ones(2, 8))
    for name, stream in first.observation.items():
        assert torch.equal(stream, kept[name])
    assert not torch.equal(second.observation["state"], kept["state"])
    image = env.render(1)
    assert image.shape == (320, 320, 3)
    assert image.std() > 10
    env.close()


@pytest.mark.parametrize("env_id", ["tabletop", "f1-student"])
def test_a_saved_state_continues_in_another_environment(env_id, tmp_path):
    kwargs = {"task": "all", "observation": "images"} if env_id == "tabletop" else {}
    config = EnvConfig(id=env_id, vector="warp", num_envs=2, kwargs=kwargs, max_episode_steps=3)
    first, second = (make_tensor_env(config, device="cpu") for _ in range(2))
    assert first.state_obstacle() is None
    with pytest.raises(InputError, match="before reset"):
        first.get_state()
    first.reset(seed=5)
    actions = torch.rand(6, 2, *first.action_space.shape, generator=torch.Generator().manual_seed(0)) * 2 - 1
    for action in actions[:4]:
        first.step(action)  # the second episode has begun
    torch.save(first.get_state(), tmp_path / "state.pt")
    second.set_state(torch.load(tmp_path / "state.pt", weights_only=True))  # plain data, as a checkpoint holds it
    for name, stream in first.observation.items():
        assert torch.equal(stream, second.observation[name])
    for action in actions[4:]:
        one, other = first.step(action), second.step(action)
        assert torch.equal(one.reward, other.reward)
        assert torch.equal(one.truncated, other.truncated)
        for name, stream in one.observation.items():
            assert torch.equal(stream, other.observation[name])
    assert [vars_of(episode) for episode in one.episodes] == [vars_of(episode) for episode in other.episodes]
    first.close()
    second.close()


def vars_of(episode: Episode) -> tuple[Any, ...]:
    return episode.env_index, episode.episode_return, episode.length, episode.labels


@pytest.mark.parametrize("chunk_length", [1, 2])
def test_rollouts_and_losses_from_tensors_are_those_from_arrays(chunk_length):
    kwargs = {"task": "all", "observation": "images", "image_size": 16}
    config = EnvConfig(id="tabletop", vector="warp", num_envs=2, kwargs=kwargs, max_episode_steps=3)
    model = VLAConfig(model_class="vla-tiny")
    policy_config = PolicyConfig(name="vla", vla_config=model, unit_actions=True, chunk_length=chunk_length)
    rollouts, losses = [], []
    for tensors in (False, True):
        env = make_vector_env(config, chunk_length=chunk_length, gamma=0.9, device="cpu", tensors=tensors)
        torch.manual_seed(0)
        policy = make_policy(policy_config, env.observation_space, env.action_space)
        algorithm = PPO(policy, PPOSettings(batch_size=8, n_epochs=1))
        collection = make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=4), 1, True, 48, 5.0)
        assert (collection.collector.env.device is None) != tensors
        for _ in range(2):
            assert collection.gather(4, lambda: False)
            rollouts.append(collection.buffer.get())
            losses.append(float(algorithm.update(iter([rollouts[-1]]))["loss"]))
            rollouts[-1] = rollouts[-1].clone()
        env.close()
    assert losses[:2] == losses[2:]
    for expected, found in zip(rollouts[:2], rollouts[2:], strict=True):
        assert expected[schema.NEXT_TRUNCATED].any()
        for key in expected.keys(True, True):
            assert torch.equal(found[key], expected[key]), key


def test_members_of_a_group_start_from_one_scene_with_the_same_random_colours():
    looks = {"random_light": True, "crazy_random_light_rate": 1.0, "noise_patch_rate": 1.0}
    kwargs = {"task": "all", "observation": "images", "image_size": 16, "domain_randomization": looks}
    config = EnvConfig(id="tabletop", vector="warp", num_envs=4, kwargs=kwargs, max_episode_steps=2)
    policy_config = PolicyConfig(name="vla", vla_config=VLAConfig(model_class="vla-tiny"), unit_actions=True)
    env = make_tensor_env(config, device="cpu")
    policy = make_policy(policy_config, env.observation_space, env.action_space)
    algorithm = GRPO(policy, GRPOSettings(group_size=2, batch_size=8, max_resamples=0))
    collection = make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=2), 1, True, 48, 5.0)
    assert collection.collector.env is env
    first_frames = []
    for _ in range(2):
        assert collection.gather(2, lambda: False)
        (rollout,) = collection.batches(2)
        first = rollout[schema.OBSERVATION][0]
        for name, stream in first.items():
            assert torch.equal(stream[0::2], stream[1::2]), name  # members of one group
        assert not torch.equal(first["head_rgb"][0], first["head_rgb"][2])  # of two groups
        first_frames.append(first["head_rgb"][0])
        metrics = algorithm.update(iter([rollout]))
        assert torch.isfinite(metrics["loss"])
        collection.publish(algorithm.version)
    assert not torch.equal(*first_frames)  # each iteration has new scenes
    env.close()


def test_bad_actions_and_calls_have_clear_errors():
    env = WarpTabletopEnv(2, device="cpu", task="reach")
    with pytest.raises(InputError, match="before reset"):
        env.step(torch.zeros(2, 8))
    env.reset(seed=0)
    with pytest.raises(InputError, match=r"\(2, 7\)"):
        env.step(torch.zeros(2, 7))
    actions = torch.zeros(2, 8)
    actions[1, 3] = torch.nan
    with pytest.raises(RunError, match="environment 1 is infinite"):
        env.step(actions)
    env.close()


def test_too_many_environments_for_the_memory_are_one_line(monkeypatch):
    with pytest.raises(InputError, match=r"out of memory \(.*\): use fewer environments than num_envs 100000000$"):
        WarpTabletopEnv(100_000_000, device="cpu", task="reach")  # more rows than Warp can count

    def fail(*_: Any, **__: Any) -> None:
        raise RuntimeError("Failed to allocate 70000000000 bytes on device 'cuda:0'")

    monkeypatch.setattr(WarpSimulation, "prepare", fail)  # the first reset allocates too
    env = WarpTabletopEnv(2, device="cpu", task="reach")
    with pytest.raises(InputError, match=r"out of memory .*: use fewer environments than num_envs 2$"):
        env.reset(seed=0)
    env.close()


def test_the_cpu_is_used_where_there_is_no_cuda(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    env = WarpTabletopEnv(1, task="reach")
    assert env.device == torch.device("cpu")
    env.close()
    with pytest.raises(InputError, match="no CUDA device; use --device cpu"):
        WarpTabletopEnv(1, task="reach", device="cuda")
    with pytest.raises(InputError, match="auto, cpu, cuda or cuda:N"):
        WarpTabletopEnv(1, task="reach", device="tpu")
