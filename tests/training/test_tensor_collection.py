"""Collection from environments whose steps are tensors: the same rollouts and updates as from numpy arrays."""

import copy
import dataclasses
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from worlds import Counting, Failing

from deft import schema
from deft.algorithms.grpo import GRPO
from deft.algorithms.ppo import PPO
from deft.algorithms.sac import SAC
from deft.config.algorithm_settings import GRPOSettings, PPOSettings, SACSettings
from deft.config.settings import PolicyConfig, TrainerConfig, VLAConfig
from deft.data import transition_ring
from deft.envs.host import HostVectorEnv
from deft.envs.serial import SerialVectorEnv
from deft.envs.vector import VectorEnv, VectorStep
from deft.envs.wrappers import ActionChunk
from deft.errors import InputError, RunError
from deft.models.actor_critic import ActorCritic
from deft.models.building import make_policy
from deft.training.collection import Collection, Collector
from deft.training.experience import make_collection
from deft.training.trainer import Trainer

STEPS = 8


class Tensors(VectorEnv):
    """The steps of a vector environment as tensors: views of its arrays, which it overwrites two steps later."""

    device = torch.device("cpu")

    def __init__(self, env: VectorEnv) -> None:
        super().__init__(env.num_envs, **env.description)
        self.env = env
        self.latest_actions: Any = None

    @property
    def observation(self) -> Any:
        return _tensors(self.env.observation)

    def reset(self, seed: Any = None) -> Any:
        return _tensors(self.env.reset(seed))

    def step(self, actions: Any) -> VectorStep:
        self.latest_actions = actions
        step = self.env.step(np.asarray(actions))
        return VectorStep(**{item.name: _tensors(getattr(step, item.name)) for item in dataclasses.fields(step)})

    def get_state(self) -> Any:
        return self.env.get_state()

    def set_state(self, states: Any) -> None:
        self.env.set_state(states)

    def state_obstacle(self) -> str | None:
        return self.env.state_obstacle()


def _tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _tensors(stream) for name, stream in value.items()}
    if not isinstance(value, np.ndarray):
        return value
    return torch.from_numpy(value if value.flags.writeable else value.copy())


class Robot(gymnasium.Env):
    """Images, proprioception and words. Episodes terminate at random or are truncated after 5 steps."""

    reward_terms = ("near", "slow")

    def __init__(self, words: bool = False) -> None:
        streams = {"head_rgb": spaces.Box(0, 255, (16, 16, 3), np.uint8), "state": spaces.Box(-9, 9, (3,), np.float32)}
        if words:
            streams["instruction"] = spaces.Text(8)
        self.observation_space = spaces.Dict(streams)
        self.action_space = spaces.Box(-1, 1, (2,), np.float32)
        self.steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        terms = {"near": float(action[0]), "slow": float(-np.square(action).sum())}
        terminated = bool(self.np_random.random() < 0.15)
        return self._observation(), sum(terms.values()), terminated, self.steps == 5, {"reward_terms": terms}

    def _observation(self):
        image = self.np_random.integers(0, 256, (16, 16, 3), np.uint8)
        streams = {"head_rgb": image, "state": self.np_random.normal(size=3).astype(np.float32)}
        return streams | ({"instruction": "push it"} if "instruction" in self.observation_space.spaces else {})


VLA = PolicyConfig(name="vla", vla_config=VLAConfig(model_class="vla-tiny"), unit_actions=True)
CASES = {
    "images": PolicyConfig(encoder_dim=16, hidden_sizes=(16,)),
    "memory": PolicyConfig(encoder_dim=16, hidden_sizes=(16,), memory_hidden=8),
    "chunks of a VLA": dataclasses.replace(VLA, chunk_length=2),
    "a VLA": VLA,
}


def robots(config: PolicyConfig, count: int = 3) -> SerialVectorEnv:
    made = [Robot(words=config.name == "vla") for _ in range(count)]
    chunks = config.chunk_length
    return SerialVectorEnv([ActionChunk(env, chunks, 0.9) for env in made] if chunks > 1 else made)


def learner(config: PolicyConfig, env: VectorEnv) -> tuple[Collection, PPO]:
    torch.manual_seed(0)
    policy = make_policy(config, env.observation_space, env.action_space)
    algorithm = PPO(policy, PPOSettings(batch_size=7, n_epochs=2, sequence_length=4, gamma=0.9))
    return make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=STEPS), 3, True, 100, 5.0), algorithm


def train(collection: Collection, algorithm: PPO, num_updates: int) -> tuple[list[Any], list[Any]]:
    """Rollouts and metrics."""
    rollouts, metrics = [], []
    for _ in range(num_updates):
        torch.manual_seed(algorithm.version)
        assert collection.gather(STEPS, lambda: False)
        rollouts.append(collection.buffer.get())
        metrics.append(algorithm.update(iter([rollouts[-1]])))
        rollouts[-1] = rollouts[-1].clone()
        collection.collector.take_step_count(STEPS)
        collection.publish(algorithm.version)
    return rollouts, metrics


def assert_same(found: Any, expected: Any) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        for key in other.keys(True, True):
            assert one[key].dtype == other[key].dtype, key
            assert torch.equal(one[key], other[key]), key


@pytest.mark.parametrize("case", CASES)
def test_rollouts_and_updates_are_those_of_numpy_arrays(case: str) -> None:
    config = CASES[case]
    plain, algorithm = learner(config, robots(config))
    tensor, other = learner(config, Tensors(robots(config)))
    assert isinstance(tensor.collector.env, Tensors)
    assert tensor.buffer.columns.device == torch.device("cpu")
    expected, metrics = train(plain, algorithm, 3)
    found, other_metrics = train(tensor, other, 3)
    assert isinstance(tensor.collector.env.latest_actions, torch.Tensor)
    assert_same(found, expected)
    for one, wanted in zip(other_metrics, metrics, strict=True):
        assert {name: float(value) for name, value in one.items()} == {
            name: float(value) for name, value in wanted.items()
        }
    for one, wanted in zip(other.policy.state_dict().values(), algorithm.policy.state_dict().values(), strict=True):
        assert torch.equal(one, wanted)
    assert torch.equal(other.running_return, algorithm.running_return)
    episodes = tensor.collector.take_episodes()
    assert episodes == plain.collector.take_episodes()
    assert len(episodes) > 6
    truncated = torch.cat([rollout[schema.NEXT_TRUNCATED] for rollout in expected])
    assert truncated.any()  # values of final observations were computed


@pytest.mark.parametrize("case", CASES)
def test_groups_and_updates_are_those_of_numpy_arrays(case: str) -> None:
    config, results = CASES[case], []
    for env in (robots(config, 4), Tensors(robots(config, 4))):
        torch.manual_seed(0)
        policy = make_policy(config, env.observation_space, env.action_space)
        algorithm = GRPO(policy, GRPOSettings(group_size=2, batch_size=7, n_epochs=2, sequence_length=4, kl_coef=0.1))
        collection = make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=STEPS), 3, True, 100, 5.0)
        assert collection.collector.env is env
        assert collection.buffer.columns.device == env.device
        rounds, metrics = [], []
        for _ in range(2):
            torch.manual_seed(algorithm.version)
            assert collection.gather(STEPS, lambda: False)
            rounds += list(collection.batches(STEPS))
            metrics.append({name: float(value) for name, value in algorithm.update(iter(rounds[-1:])).items()})
            collection.publish(algorithm.version)
        counts = collection.collector.take_step_count(0)
        results.append((rounds, metrics, policy.state_dict(), collection.collector.take_episodes(), counts))
    plain, tensor = results
    assert_same(tensor[0], plain[0])
    assert all(not rollout[schema.STEP_MASK].all() for rollout in plain[0])  # some episodes end before others
    assert tensor[1] == plain[1]
    assert all(torch.equal(tensor[2][name], weight) for name, weight in plain[2].items())
    assert tensor[3:] == plain[3:]


@pytest.mark.parametrize("n_step", [1, 2])
def test_the_replay_buffer_and_updates_are_those_of_numpy_arrays(n_step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    monkeypatch.setattr(transition_ring, "to_numpy", lambda tensor: copied.append(tensor.ndim) or tensor.numpy())
    config, results = PolicyConfig(encoder_dim=16, hidden_sizes=(16,)), []
    settings = SACSettings(batch_size=8, buffer_size=40, learning_starts=20, n_step=n_step)
    for env in (robots(config), Tensors(robots(config))):
        torch.manual_seed(0)
        policy = SAC.make_policy(env.observation_space, env.action_space, config, settings)
        algorithm = SAC(policy, settings)
        collection = make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=STEPS), 3, True, 1000, 5.0)
        assert collection.collector.env is env
        metrics: Any = {}
        for number in range(30):  # 90 steps: random actions, then the policy's; the buffer is overwritten
            torch.manual_seed(number)
            assert collection.gather(1, lambda: False)
            metrics = collection.update(algorithm, 1, lambda: False) or metrics
            collection.collector.take_step_count(1)
            collection.publish(algorithm.version)
        batch = TensorDict(collection.buffer.sample(16), batch_size=[16])
        results.append((batch, {name: float(value) for name, value in metrics.items()}, policy.state_dict()))
    plain, tensor = results
    assert algorithm.version > 60
    assert max(copied) == n_step  # flags of ended episodes; for n steps also vectors; never images
    assert_same(tensor[:1], plain[:1])
    assert tensor[1] == plain[1]
    assert all(torch.equal(tensor[2][name], weight) for name, weight in plain[2].items())


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # a CPU without bf16 instructions
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_in_bf16_every_ratio_is_one_before_the_first_step(name: str) -> None:
    env = Tensors(robots(VLA, 4))
    torch.manual_seed(0)
    policy = make_policy(VLA, env.observation_space, env.action_space)
    algorithm: Any = (
        PPO(policy, PPOSettings(precision="bf16", batch_size=7))
        if name == "ppo"
        else GRPO(policy, GRPOSettings(precision="bf16", batch_size=7, group_size=2, kl_coef=0.1))
    )
    collection = make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=STEPS), 3, True, 100, 5.0)
    assert policy.model.cameras[0].dtype == torch.bfloat16
    assert collection.gather(STEPS, lambda: False)
    rounds = list(collection.batches(STEPS))
    epochs = algorithm._begin(rounds if name == "grpo" else rounds[0])
    order = torch.randperm(epochs.data.numel(), generator=algorithm.generator)
    items = epochs.data if name == "grpo" else epochs.data.flatten(0, 1)
    for minibatch in algorithm._minibatches(items, order, 7):
        scored = algorithm._scored(minibatch)
        _, metrics = algorithm._loss(scored, minibatch)
        assert scored["log_prob"].dtype == torch.float32
        torch.testing.assert_close(metrics["log_ratio"].exp(), torch.ones(len(minibatch)), atol=1e-3, rtol=0)
        if name == "grpo":  # the reference computes as the policy does
            assert float(metrics["kl"]) < 1e-6
    metrics = algorithm.update(iter(rounds))
    assert torch.isfinite(metrics["loss"])


def test_bf16_is_for_policies_that_have_it() -> None:
    env = Tensors(SerialVectorEnv([Counting()]))
    policy = ActorCritic(env.observation_space, env.action_space)
    with pytest.raises(InputError, match="precision: bf16 is for vla-tiny; ActorCritic"):
        PPO(policy, PPOSettings(precision="bf16"))


def test_a_group_of_tensors_that_lost_a_member_is_dropped() -> None:
    """A lost episode is masked with its group; the others are cut at the end of the round."""

    class Losing(Tensors):
        def step(self, actions: Any) -> VectorStep:
            step = super().step(actions)
            lost = torch.tensor([1])
            return dataclasses.replace(step, lost_index=lost, done_index=lost, final_observation=step.observation[lost])

    env = Losing(SerialVectorEnv([Counting(length=9) for _ in range(4)]))
    policy = ActorCritic(env.observation_space, env.action_space)
    algorithm = GRPO(policy, GRPOSettings(group_size=2, max_resamples=0))
    collection = make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=3), 0, True, 64, 5.0)
    assert collection.gather(3, lambda: False)
    (rollout,) = collection.batches(3)
    assert rollout[schema.STEP_MASK].tolist() == [[False, False, True, True]] * 3
    assert collection.collector.num_lost_episodes == 1
    # Three episodes are cut after 3 steps of reward 1, that of environment 1 was lost.
    cut = [(episode.env_index, episode.episode_return, episode.length) for episode in collection.collector.episodes]
    assert cut == [(0, 3.0, 3), (2, 3.0, 3), (3, 3.0, 3)]


def test_truncation_bootstraps_from_the_true_final_observation() -> None:
    class Reader(ActorCritic):
        """V(o) = 100·episode + step."""

        def get_value(self, td):
            return 100 * td[schema.OBSERVATION][:, 0] + td[schema.OBSERVATION][:, 1]

    env = Tensors(SerialVectorEnv([Counting(length=3)]))
    collector = Collector(env, Reader(env.observation_space, env.action_space))
    rollout = collector.collect_steps(5)
    assert rollout[schema.OBSERVATION][:, 0].tolist() == [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1]]
    # Step 2 ends episode 0 at observation [0, 3]: V = 3. The last step leads to [1, 2]: V = 102.
    assert rollout[schema.NEXT_VALUE][:, 0].tolist() == [0, 0, 3, 0, 102]


def test_reward_terms_and_next_observations_are_written() -> None:
    rollouts = []
    for env in (robots(VLA), Tensors(robots(VLA))):
        torch.manual_seed(0)
        policy = make_policy(VLA, env.observation_space, env.action_space)
        collector = Collector(env, policy, next_observation=True, reward_terms=True)
        rollouts.append(collector.collect_steps(3 * STEPS))
    assert rollouts[0][schema.NEXT_REWARD_TERMS].shape == (STEPS, 3, 2)
    assert_same(rollouts[1:], rollouts[:1])


@pytest.mark.parametrize(("how", "what"), [("nan", "observation"), ("nan_reward", "reward")])
def test_values_that_are_not_numbers_raise_an_error(how: str, what: str) -> None:
    env = Tensors(SerialVectorEnv([Counting(), Failing(at=3, how=how)]))
    collector = Collector(env, ActorCritic(env.observation_space, env.action_space))
    with pytest.raises(RunError, match=f"environment 1 gave, as its {what}, a value that is infinite or not a number"):
        collector.collect_steps(20)


def test_a_run_resumes_in_the_middle_of_a_rollout() -> None:
    config = CASES["memory"]
    whole, algorithm = learner(config, Tensors(robots(config)))
    train(whole, algorithm, 1)
    torch.manual_seed(9)
    whole.collector.collect(whole.buffer, 3)
    saved = copy.deepcopy((whole.state_dict(), whole.buffer.state_dict(), algorithm.state_dict()))
    resumed, other = learner(config, Tensors(robots(config)))
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(saved[2])
    resumed.collector.set_version(other.version)
    assert resumed.load_state_dict(saved[0], saved[1], same_rollout=True)
    assert resumed.pending == 3
    expected, found = train(whole, algorithm, 2), train(resumed, other, 2)
    assert_same(found[0], expected[0])
    assert [float(one["loss"]) for one in found[1]] == [float(one["loss"]) for one in expected[1]]


def test_collections_that_need_arrays_receive_them() -> None:
    """Background collection, and a policy on another device than the environments."""
    env = Tensors(SerialVectorEnv([Counting() for _ in range(4)]))
    policy = ActorCritic(env.observation_space, env.action_space)

    def kind(algorithm: Any, **settings: Any) -> type:
        found = make_collection(env, policy, algorithm, TrainerConfig(rollout_steps=8, **settings), 0, True, 64, 5.0)
        return type(found.collector.env)

    assert kind(PPO(policy)) is Tensors
    assert kind(PPO(policy), buffer_type="vla") is HostVectorEnv
    assert kind(GRPO(policy, GRPOSettings(group_size=2))) is Tensors
    env.device = torch.device("meta")
    assert kind(PPO(policy)) is HostVectorEnv


def test_the_trainer_evaluates_in_environments_with_arrays(tmp_path: Any) -> None:
    env, eval_env = (Tensors(SerialVectorEnv([Counting(), Counting()])) for _ in range(2))
    policy = ActorCritic(env.observation_space, env.action_space)
    settings: dict[str, Any] = {"output_dir": tmp_path / "run", "eval_freq": 16, "eval_episodes": 2}
    trainer = Trainer(policy, env, PPO(policy), 8, eval_env=eval_env, **settings)
    assert trainer.train(32)["timesteps"] == 32
    assert trainer.last_evaluation["mean_reward"] == 3.0  # three steps of reward 1
    trainer.close()
