"""The critic of actions: what it predicts, where its gradient goes, and that PPO and GRPO learn and resume with it."""

import copy
from typing import Any

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import GRPOTrainer, PPOTrainer, RLConfig, schema
from deft.algorithms import action_critic
from deft.algorithms.action_critic import ActionCritic
from deft.algorithms.grpo import DEVIATION, GRPO, OLD_LOG_PROB
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.models.vla.heads import GaussianChunks, SwitchedChunks
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel

SPACE = spaces.Dict({"sensor": spaces.Box(-9, 9, (2,)), "number": spaces.Box(-1, 1, (2,))})
BOX = spaces.Box(-1, 1, (2,))
BATCH_SIZE = 256


@pytest.fixture(autouse=True)
def small_critic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_critic, "HIDDEN_SIZES", (32, 32))
    monkeypatch.setattr(action_critic, "LEARNING_RATE", 3e-3)


def make_policy(**changes: Any) -> ActorCritic:
    torch.manual_seed(0)
    config = PolicyConfig(critic_observation=("number",), hidden_sizes=(16, 16), log_std_init=-1.0, **changes)
    return ActorCritic(SPACE, BOX, config)


def make_rollout(policy: Any, count: int = 512, seed: int = 0, noise: float = 0.0) -> TensorDict:
    """One step each: the advantage is −|a − number|² plus noise, and the sensor shows the number with noise."""
    torch.manual_seed(seed)
    number = torch.rand(1, count, 2) * 2 - 1
    observation = TensorDict({"sensor": number + 0.3 * torch.randn(1, count, 2), "number": number}, [1, count])
    td = TensorDict({schema.OBSERVATION: observation}, [1, count])
    with torch.no_grad():
        row = policy.act(td[0].clone())
    td = row.unsqueeze(0)
    executed = td[schema.ACTION].clamp(-1, 1)
    reward = -(executed - number).square().sum(-1) + noise * torch.randn(1, count)
    td[schema.ADVANTAGE] = td[schema.NEXT_REWARD] = reward
    td[schema.NEXT_TERMINATED] = td[schema.NEXT_TRUNCATED] = torch.ones(1, count, dtype=torch.bool)
    td[schema.NEXT_VALUE] = torch.zeros(1, count)
    td[schema.POLICY_VERSION] = torch.zeros(1, count, dtype=torch.int64)
    td[schema.STEP_MASK] = torch.ones(1, count, dtype=torch.bool)
    return td


def test_it_learns_which_actions_are_better_in_a_scene() -> None:
    policy = make_policy()
    critic = ActionCritic(policy, BATCH_SIZE, seed=0)
    first = critic.learn(make_rollout(policy, seed=0))
    for seed in range(1, 12):
        found = critic.learn(make_rollout(policy, seed=seed))
    assert abs(first["action_critic_correlation"]) < 0.5
    assert found["action_critic_correlation"] > 0.9
    rows = make_rollout(policy, seed=99)[0]
    unit = rows[schema.ACTION].clamp(-1, 1).requires_grad_()
    critic.improvement(rows[schema.OBSERVATION], {"reparameterized": unit}).sum().backward()
    true = -2 * (unit.detach() - rows[schema.OBSERVATION, "number"])  # the gradient of −|a − number|²
    assert torch.cosine_similarity(unit.grad, true, dim=1).mean() > 0.9
    assert all(parameter.grad is None or not parameter.grad.any() for parameter in policy.parameters())


def test_it_remembers_the_last_rollouts_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(action_critic, "NUM_ROLLOUTS", 2)
    policy = make_policy()
    critic = ActionCritic(policy, BATCH_SIZE, seed=0)
    rollouts = [make_rollout(policy, 8, seed) for seed in range(3)]
    for rollout in rollouts:
        critic.learn(rollout)
    assert [len(advantage) for _, _, advantage in critic.rollouts] == [8, 8]
    torch.testing.assert_close(critic.rollouts[0][1], rollouts[1][schema.ACTION][0].clamp(-1, 1))


def test_reparameterized_actions_have_the_gradient_of_the_mean() -> None:
    head = GaussianChunks(3, 2, 1, -1.0, -1.0, "absolute")
    features, actions = torch.randn(4, 3), torch.randn(4, 2, 1)
    moved = head.reparameterize(features, actions)
    torch.testing.assert_close(moved, actions)  # the same actions, as functions of the weights
    moved.sum().backward()
    # μ = W f + b, so that d Σ a / d b = the number of rows, for each number of the chunk
    torch.testing.assert_close(head.out.bias.grad, torch.full((2,), 4.0))


def test_alternatives_of_a_switch_by_hand() -> None:
    head = SwitchedChunks(GaussianChunks(3, 2, 1, -1.0, -1.0, "absolute"), 3, 2, 2, [1])
    head.out.weight.data.zero_()
    head.out.bias.data.copy_(torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4])))
    actions = torch.tensor([[[0.5, 1.0], [0.6, 1.0]]])
    changed, probabilities = head.alternatives(torch.randn(1, 3), actions)
    # Sequences of two steps: closed, opened once (1, −1), open, and closed then opened (−1, 1); dim 0 stays.
    expected = [[-1.0, -1.0], [1.0, -1.0], [1.0, 1.0], [-1.0, 1.0]]
    torch.testing.assert_close(changed[0, :, :, 1], torch.tensor(expected))
    torch.testing.assert_close(changed[0, :, :, 0], torch.tensor([[0.5, 0.6]] * 4))
    torch.testing.assert_close(probabilities, torch.tensor([[0.1, 0.2, 0.3, 0.4]]))
    moved = head.reparameterize(torch.randn(1, 3), actions)
    torch.testing.assert_close(moved, actions)


def test_the_value_of_alternatives_is_weighed_by_their_probabilities() -> None:
    critic = ActionCritic(make_policy(), BATCH_SIZE, seed=0)
    # A(s, a) = a_0: the sum over two alternatives with a_0 = 1 and −1 is p − (1 − p), beside a_0 of the action itself.
    critic._outputs = lambda features, unit, frozen: unit[:, 0].expand(4, -1)  # type: ignore[method-assign]
    logit = torch.tensor(0.0, requires_grad=True)
    share = torch.sigmoid(logit)  # ½
    scored = {
        "reparameterized": torch.tensor([[0.3, 0.0]]),
        "alternatives": torch.tensor([[[1.0, 0.0], [-1.0, 0.0]]]),
        "alternative_probs": torch.stack([share, 1 - share]).unsqueeze(0),
    }
    observation = TensorDict({"sensor": torch.zeros(1, 2), "number": torch.zeros(1, 2)}, [1])
    found = critic.improvement(observation, scored)
    assert found.item() == pytest.approx(0.3)
    found.sum().backward()
    assert logit.grad is not None
    assert logit.grad.item() == pytest.approx(2 * 0.25)  # d(2p − 1)/d logit = 2 p (1 − p)


def test_its_gradient_is_nearer_to_the_true_one_than_that_of_ppo() -> None:
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(action_critic_coef=10.0, action_critic_batch_size=BATCH_SIZE), seed=0)
    for seed in range(8):
        algorithm.action_critic.learn(make_rollout(policy, 512, seed, noise=2.0))
    rows = make_rollout(policy, 64, seed=99, noise=2.0)[0]
    rows[schema.VALUE_TARGET] = rows[schema.NEXT_REWARD]
    trained = list(policy.towers.parameters())  # without the deviation, which only PPO trains

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return torch.cat([part.flatten() for part in found if part is not None])

    scored = policy.evaluate_actions(rows)
    wanted = gradient((scored["reparameterized"] - rows[schema.OBSERVATION, "number"]).square().sum(1).mean())
    similarities = []
    for coef in (0.0, 10.0):
        algorithm.settings.action_critic_coef = coef
        loss, _ = algorithm._loss(policy.evaluate_actions(rows), rows)
        similarities.append(float(torch.cosine_similarity(gradient(loss), wanted, dim=0)))
    # 64 rewards with noise of 2 say little; the critic has averaged 4096 of them
    assert similarities[0] < 0.7
    assert similarities[1] > 0.9


# -- a VLA model with a switch -----------------------------------------------------------------------------------------


def make_vla(**changes: Any) -> VLAPolicy:
    """A policy on images of 16 pixels; the second number of an action is a switch."""
    sizes = {"action_dim": 2, "chunk_length": 2, "image_keys": ["rgb"], "image_size": 16, "cell": 4, "width": 16}
    space = spaces.Dict({"rgb": spaces.Box(0, 255, (3, 16, 16), np.uint8), "number": spaces.Box(-1, 1, (1,))})
    torch.manual_seed(0)
    model = TinyVLAModel(**sizes, proprio_key=None, instruction_key=None, switch_dims=[-1], **changes)
    config = PolicyConfig(critic_observation=("number",))
    return VLAPolicy(model, observation_space=space, action_space=spaces.Box(-1, 1, (2, 2)), config=config)


def look(policy: VLAPolicy, count: int, version: int = 0, noise: float = 0.0) -> TensorDict:
    """Bright and dark images: the reward is the share of steps with the switch open on bright ones, closed on dark."""
    number = torch.randint(0, 2, (count, 1)).float() * 2 - 1
    images = ((number.view(count, 1, 1, 1) + 1) * 60 + torch.randint(0, 60, (count, 3, 16, 16))).to(torch.uint8)
    td = TensorDict({schema.OBSERVATION: TensorDict({"rgb": images, "number": number}, [count])}, [count])
    with torch.no_grad():
        policy.act(td)
    td[schema.NEXT_REWARD] = (td[schema.ACTION][:, :, 1] * number).mean(1) + noise * torch.randn(count)
    td[schema.NEXT_TERMINATED] = td[schema.NEXT_TRUNCATED] = torch.ones(count, dtype=torch.bool)
    td[schema.NEXT_VALUE] = torch.zeros(count)
    td[schema.POLICY_VERSION] = torch.full((count,), version)
    td[schema.STEP_MASK] = torch.ones(count, dtype=torch.bool)
    return td.unsqueeze(0)


def learned(coef: float) -> float:
    """The mean reward, −1 to 1, after 20 rollouts of 128 rewards that are mostly noise."""
    policy = make_vla()
    settings = PPOSettings(
        action_critic_coef=coef,
        action_critic_batch_size=BATCH_SIZE,
        batch_size=64,
        n_epochs=2,
        learning_rate=5e-3,
        value_warmup=4,
    )
    algorithm = PPO(policy, settings, seed=0)
    for _ in range(20):
        algorithm.update(iter([look(policy, 128, algorithm.version, noise=2.0)]))
    return float(look(policy, 1024)[schema.NEXT_REWARD].mean())


def test_a_switch_is_learned_from_rewards_that_ppo_alone_does_not_learn_from() -> None:
    assert learned(10.0) > 0.9
    assert learned(0.0) < 0.5


def test_a_vla_resumes_with_it_bit_for_bit() -> None:
    policy, settings = make_vla(), PPOSettings(action_critic_coef=1.0, batch_size=8, n_epochs=1)
    algorithm = PPO(policy, settings, seed=0)
    algorithm.update(iter([look(policy, 8)]))
    saved, weights = copy.deepcopy(algorithm.state_dict()), copy.deepcopy(policy.state_dict())
    data = look(policy, 8, version=1)
    metrics = algorithm.update(iter([data.clone()]))
    assert {"action_critic_loss", "action_critic_correlation"} <= set(metrics)
    assert not torch.equal(weights["model.head.out.weight"], policy.state_dict()["model.head.out.weight"])

    again = make_vla()
    again.load_state_dict(weights)
    resumed = PPO(again, settings, seed=5)
    resumed.load_state_dict(saved)
    resumed.update(iter([data.clone()]))
    for name, value in policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert resumed.action_critic is not None
    assert algorithm.action_critic is not None
    for own, theirs in zip(resumed.action_critic.rollouts, algorithm.action_critic.rollouts, strict=True):
        assert all(torch.equal(*columns) for columns in zip(own, theirs, strict=True))


def test_what_it_cannot_do_is_said_in_one_line() -> None:
    plain = ActorCritic(SPACE, BOX, PolicyConfig())
    with pytest.raises(InputError, match=r"action_critic_coef: .*name them with critic_observation"):
        PPO(plain, PPOSettings(action_critic_coef=1.0))
    remembers = make_policy(memory_hidden=4)
    with pytest.raises(InputError, match="action_critic_coef: is for continuous actions of a policy without memory"):
        PPO(remembers, PPOSettings(action_critic_coef=1.0))
    with pytest.raises(ValueError, match="action_critic_coef: needs ratio step"):
        PPOSettings(action_critic_coef=1.0, ratio="token")
    without = PPO(make_policy(), PPOSettings())
    with_critic = PPO(make_policy(), PPOSettings(action_critic_coef=1.0))
    with pytest.raises(InputError, match="action_critic_coef was 0 in this run"):
        with_critic.load_state_dict(without.state_dict())
    with pytest.raises(InputError, match="action_critic_coef was above 0 in this run"):
        without.load_state_dict(with_critic.state_dict())
    with pytest.raises(
        InputError, match=r"action_critic_coef: the actions of .* have no gradient; use a Gaussian policy"
    ):
        PPO(make_vla(head="flow"), PPOSettings(action_critic_coef=1.0))  # before anything is collected


# -- GRPO --------------------------------------------------------------------------------------------------------------


def make_groups(policy: Any, count: int = 64, size: int = 4, seed: int = 0, noise: float = 0.0) -> TensorDict:
    """`count` groups of episodes of one step, as `make_rollout`, with one number and one sensor in each group."""
    td = make_rollout(policy, count * size, seed).exclude(schema.ADVANTAGE, schema.NEXT_VALUE)
    for name in ("sensor", "number"):
        first = td[schema.OBSERVATION, name][:, ::size]
        td[schema.OBSERVATION, name] = first.repeat_interleave(size, 1)
    with torch.no_grad():
        policy.act(row := td[0].clone())
    td = row.unsqueeze(0)
    error = (td[schema.ACTION].clamp(-1, 1) - td[schema.OBSERVATION, "number"]).square().sum(-1)
    td[schema.NEXT_REWARD] = noise * torch.randn(1, count * size) - error
    return td


def make_grpo(policy: Any = None, **settings: Any) -> GRPO:
    given = {"action_critic_coef": 10.0, "group_size": 4, "kl_coef": 0.0, "normalize_std": False}
    given |= {"action_critic_batch_size": BATCH_SIZE, **settings}
    return GRPO(policy or make_policy(), GRPOSettings(**given), seed=0)


def test_the_term_in_the_loss_of_grpo_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # Ratios 1, 1.25 (above 1.2) and 0.9; advantages 2, −2 and 0. Without the critic:
    #   −(1 · 2 + min(1.25 · −2, 1.2 · −2) + 0) / 3 = −(2 − 2.5) / 3 = 1/6
    # The critic predicts 0.3, 9 and −0.1 deviations; one deviation is 2, the coefficient 10. The second is clipped:
    #   1/6 − 10 · 2 · (0.3 − 0.1) / 3 = 1/6 − 4/3
    minibatch = TensorDict(
        {
            schema.OBSERVATION: TensorDict({}, [3]),
            schema.ADVANTAGE: torch.tensor([2.0, -2.0, 0.0]),
            schema.STEP_MASK: torch.ones(3, dtype=torch.bool),
            OLD_LOG_PROB: torch.zeros(3),
            DEVIATION: torch.full((3,), 2.0),
        },
        [3],
    )
    scored = {"log_prob": torch.tensor([1.0, 1.25, 0.9]).log(), "entropy": torch.zeros(3)}
    monkeypatch.setattr(ActionCritic, "improvement", lambda self, *_: torch.tensor([0.3, 9.0, -0.1]))
    algorithm = make_grpo()
    loss, metrics = algorithm._loss(scored, minibatch)
    assert float(loss) == pytest.approx(1 / 6 - 4 / 3, abs=1e-6)
    assert float(metrics["loss"]) == pytest.approx(1 / 6, abs=1e-6)  # of GRPO alone, as PPO reports it
    without, _ = make_grpo(action_critic_coef=0.0)._loss(scored, minibatch)
    assert float(without) == pytest.approx(1 / 6, abs=1e-6)
    # With clip_range_high 0.28 the second action counts too: −20 · (0.3 + 9 − 0.1) / 3
    higher, metrics = make_grpo(clip_range_high=0.28)._loss(scored, minibatch)
    assert float(higher - metrics["loss"]) == pytest.approx(-20 * 9.2 / 3, abs=1e-4)


def test_the_deviation_is_that_of_the_advantages_of_the_iteration() -> None:
    # Two groups of two: returns 5 and 1 → +2, −2; returns 3 and 3 → 0, 0, which are not trained on, but are real steps.
    # Their deviation (with n − 1) is √((4 + 4) / 3) = 1.633
    algorithm = make_grpo(group_size=2)
    rollout = make_groups(algorithm.policy, 2, 2)
    rollout[schema.NEXT_REWARD] = torch.tensor([[5.0, 1.0, 3.0, 3.0]])
    epochs = algorithm._begin([rollout])
    assert epochs.data is not None
    torch.testing.assert_close(epochs.data[schema.ADVANTAGE], torch.tensor([2.0, -2.0]))
    torch.testing.assert_close(epochs.data[DEVIATION], torch.full((2,), (8 / 3) ** 0.5))
    assert algorithm.action_critic is not None
    features, unit, advantage = algorithm.action_critic.rollouts[0]
    half = 2 / (8 / 3) ** 0.5
    torch.testing.assert_close(advantage, torch.tensor([half, -half, 0.0, 0.0]))
    torch.testing.assert_close(unit, rollout[schema.ACTION][0].clamp(-1, 1))
    assert features.abs().max() > 0


def test_the_unit_of_the_reward_does_not_matter() -> None:
    """Rewards in other units scale the loss of GRPO and the term of the critic alike."""
    found = []
    for unit in (1.0, 64.0):
        policy = make_policy()
        algorithm = make_grpo(policy)
        rollout = make_groups(policy, 16)
        rollout[schema.NEXT_REWARD] *= unit
        data: Any = algorithm._begin([rollout]).data
        loss, _ = algorithm._loss(policy.evaluate_actions(data), data)
        gradients = torch.autograd.grad(loss, list(policy.parameters()), allow_unused=True)
        found.append(torch.cat([part.flatten() for part in gradients if part is not None]))
    torch.testing.assert_close(found[1], 64 * found[0], rtol=1e-3, atol=1e-4)


def test_steps_after_an_episode_and_of_lost_groups_are_not_learned_from(monkeypatch: pytest.MonkeyPatch) -> None:
    algorithm = make_grpo(action_critic_batch_size=8)
    rollout = torch.cat([make_groups(algorithm.policy, 3, 4, seed) for seed in range(2)])  # two steps of 12 episodes
    rollout[schema.STEP_MASK][1, :3] = False  # three episodes of one step
    rollout[schema.STEP_MASK][:, 8:] = False  # the third group was lost
    steps = []
    assert algorithm.action_critic is not None
    step = algorithm.action_critic._step
    monkeypatch.setattr(algorithm.action_critic, "_step", lambda batch: (steps.append(len(batch)), step(batch))[1])
    metrics = algorithm.update(iter([rollout]))
    assert {"action_critic_loss", "action_critic_correlation"} <= set(metrics)
    assert [len(column) for column in algorithm.action_critic.rollouts[0]] == [13, 13, 13]  # 8 + 5
    assert steps == [8] * 2 * action_critic.NUM_UPDATES  # 13 steps are two batches of 8
    rollout[schema.STEP_MASK][:] = False  # nothing is left of the next iteration
    rollout[schema.POLICY_VERSION] += 1
    before = [parameter.clone() for parameter in algorithm.policy.parameters()]
    kept = algorithm._learn_actions([rollout], [algorithm.advantages(rollout)], {})
    assert float(kept) == 0
    assert len(algorithm.action_critic.rollouts) == 1
    assert all(torch.equal(*pair) for pair in zip(before, algorithm.policy.parameters(), strict=True))


def test_its_gradient_is_nearer_to_the_true_one_than_that_of_grpo() -> None:
    policy = make_policy()
    algorithm, alone = make_grpo(policy), make_grpo(policy, action_critic_coef=0.0)
    policy.reparameterizes = True  # the second algorithm has unset it
    for seed in range(8):
        rollout = make_groups(policy, 128, 4, seed, noise=3.0)
        algorithm._learn_actions([rollout], [algorithm.advantages(rollout)], {})
    trained = list(policy.towers.parameters())  # without the deviation, which only GRPO trains

    def gradient(loss: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(loss, trained, allow_unused=True)
        return torch.cat([part.flatten() for part in found if part is not None])

    similarities = []
    for seed in range(99, 103):
        rows: Any = alone._begin([make_groups(policy, 16, 4, seed, noise=3.0)]).data
        rows[DEVIATION] = rows[schema.ADVANTAGE].std().expand(64)
        scored = policy.evaluate_actions(rows)
        wanted = gradient((scored["reparameterized"] - rows[schema.OBSERVATION, "number"]).square().sum(1).mean())
        losses = [one._loss(policy.evaluate_actions(rows), rows)[0] for one in (alone, algorithm)]
        similarities.append([float(torch.cosine_similarity(gradient(loss), wanted, dim=0)) for loss in losses])
    without, with_critic = np.mean(similarities, 0)
    # 64 rewards with noise of 3 say little; the critic has averaged 4096 of them
    assert without < 0.5
    assert with_critic > 0.9


@pytest.mark.parametrize("stops_after", [None, 3])
def test_grpo_resumes_with_it_bit_for_bit(stops_after: int | None) -> None:
    """Also in the middle of an update: the first one is stopped after 3 of 2 · 4 minibatches."""

    def start() -> tuple[Any, GRPO]:
        policy = make_policy()
        return policy, make_grpo(policy, batch_size=16, n_epochs=2, advantage="process")

    policy, whole = start()
    data = [make_groups(policy, 16, 4, seed) for seed in range(2)]
    data[1][schema.POLICY_VERSION] += 1
    for rollout in data:
        whole.update(iter([rollout.clone()]))

    stopped, algorithm = start()
    if stops_after is not None:
        asked = iter(range(100))
        algorithm.should_stop = lambda: next(asked) >= stops_after
        assert algorithm.update(iter([data[0].clone()])) == {}
        assert algorithm.unfinished is not None
        assert algorithm.unfinished.done == stops_after
    else:
        algorithm.update(iter([data[0].clone()]))
    saved, weights = copy.deepcopy(algorithm.state_dict()), copy.deepcopy(stopped.state_dict())

    again, resumed = start()
    resumed.generator.manual_seed(9)
    again.load_state_dict(weights)
    resumed.load_state_dict(saved)
    if stops_after is not None:
        metrics = resumed.update(iter([]))
        assert {"action_critic_loss", "action_critic_correlation"} <= set(metrics)
    resumed.update(iter([data[1].clone()]))
    for name, value in policy.state_dict().items():
        assert torch.equal(value, again.state_dict()[name]), name
    assert whole.action_critic is not None
    assert resumed.action_critic is not None
    for name, value in whole.action_critic.networks.state_dict().items():
        assert torch.equal(value, resumed.action_critic.networks.state_dict()[name]), name


def test_a_switch_of_a_vla_is_learned_by_grpo() -> None:
    policy = make_vla()
    algorithm = make_grpo(policy, batch_size=64, n_epochs=2, learning_rate=5e-3, group_size=2)
    for _ in range(15):
        rollout = look(policy, 128, algorithm.version).exclude(schema.NEXT_VALUE)
        for name in ("rgb", "number"):  # both members of a group see one image
            rollout[schema.OBSERVATION, name][:, 1::2] = rollout[schema.OBSERVATION, name][:, ::2]
        with torch.no_grad():
            policy.act(row := rollout[0].clone())
        row[schema.NEXT_REWARD] = (row[schema.ACTION][:, :, 1] * row[schema.OBSERVATION, "number"]).mean(1)
        row[schema.NEXT_REWARD] += 2.0 * torch.randn(128)
        algorithm.update(iter([row.unsqueeze(0)]))
    assert float(look(policy, 1024)[schema.NEXT_REWARD].mean()) > 0.9


def test_it_can_learn_before_the_policy_of_grpo() -> None:
    policy = make_policy()
    algorithm = make_grpo(policy, auxiliary_warmup=1)
    before = [parameter.clone() for parameter in policy.parameters()]
    metrics = algorithm.update(iter([make_groups(policy)]))
    assert metrics["action_critic_loss"] > 0
    assert all(torch.equal(*pair) for pair in zip(before, policy.parameters(), strict=True))
    value = [parameter.clone() for parameter in policy.critic.parameters()]
    towers = policy.towers.head_weight_0.clone()
    algorithm.update(iter([make_groups(policy)]))
    assert not torch.equal(towers, policy.towers.head_weight_0)
    assert all(torch.equal(*pair) for pair in zip(value, policy.critic.parameters(), strict=True))


def test_the_first_features_are_normalised() -> None:
    policy = make_policy()
    algorithm = make_grpo(policy)
    rollout = make_groups(policy, 64)
    rollout[schema.OBSERVATION, "number"] = 100 + rollout[schema.OBSERVATION, "number"]
    algorithm.update(iter([rollout]))
    assert algorithm.action_critic is not None
    features = algorithm.action_critic.rollouts[0][0]
    assert features.abs().max() < 5  # without statistics they would be clipped to 10


def test_what_grpo_cannot_do_with_it_is_said_in_one_line(tmp_path: Any) -> None:
    with pytest.raises(InputError, match=r"action_critic_coef: .*name them with critic_observation"):
        make_grpo(ActorCritic(SPACE, BOX, PolicyConfig()))
    with pytest.raises(InputError, match="action_critic_coef: is for continuous actions of a policy without memory"):
        make_grpo(make_policy(memory_hidden=4))
    discrete = ActorCritic(SPACE, spaces.Discrete(3), PolicyConfig(critic_observation=("number",)))
    with pytest.raises(InputError, match="action_critic_coef: is for continuous actions of a policy without memory"):
        make_grpo(discrete)
    with pytest.raises(ValueError, match="action_critic_coef: needs ratio step"):
        GRPOSettings(action_critic_coef=1.0, ratio="token")
    without, with_critic = make_grpo(action_critic_coef=0.0), make_grpo()
    with pytest.raises(InputError, match="action_critic_coef was 0 in this run"):
        with_critic.load_state_dict(without.state_dict())
    with pytest.raises(InputError, match="action_critic_coef was above 0 in this run"):
        without.load_state_dict(with_critic.state_dict())
    config = RLConfig(algorithm="grpo", critic_observation=("number",), output_dir=str(tmp_path / "run"))
    with pytest.raises(InputError, match=r"grpo trains no value function .*; give action_critic_coef, or leave it out"):
        GRPOTrainer(env=Guess(), config=config)


# -- runs --------------------------------------------------------------------------------------------------------------


class Guess(gymnasium.Env):
    """The action should match a number that the policy observes with noise, and the critic without."""

    observation_space, action_space = SPACE, BOX

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.number = self.np_random.uniform(-1, 1, 2).astype(np.float32)
        return self.observe(), {}

    def step(self, action: np.ndarray) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return self.observe(), -float(np.square(action - self.number).sum()), True, False, {}

    def observe(self) -> dict[str, np.ndarray]:
        sensor = self.number + self.np_random.normal(0, 0.3, 2)
        return {"sensor": sensor.astype(np.float32), "number": self.number}


def test_it_is_a_setting_of_a_run_and_of_its_checkpoints(tmp_path: Any) -> None:
    given = {"critic_observation": ("number",), "action_critic_coef": 5.0, "rollout_steps": 64, "tensorboard": False}
    config = RLConfig(total_timesteps=128, output_dir=str(tmp_path / "run"), **given)
    trainer = PPOTrainer(env=Guess(), config=config)
    trainer.train()
    trainer.close()
    longer = RLConfig(total_timesteps=256, output_dir=str(tmp_path / "run"), resume=str(tmp_path / "run"), **given)
    trainer = PPOTrainer(env=Guess(), config=longer)
    trainer.train()
    assert len(trainer.trainer.algorithm.action_critic.rollouts) == 4
    trainer.close()


def test_a_grpo_run_in_two_parts_is_the_run_in_one(tmp_path: Any) -> None:
    given = {"critic_observation": ("number",), "action_critic_coef": 5.0, "group_size": 4, "num_envs": 8}

    def train(name: str, iterations: int, **more: Any) -> dict[str, torch.Tensor]:
        folder = str(tmp_path / name)
        settings = {"algorithm": "grpo", "iterations": iterations, "output_dir": folder, "tensorboard": False}
        trainer = GRPOTrainer(env=Guess(), config=RLConfig(**settings, **given, **more))
        trainer.train()
        assert len(trainer.trainer.algorithm.action_critic.rollouts) == iterations
        assert trainer.trainer.policy.streams == {"sensor"}
        weights = copy.deepcopy(trainer.trainer.policy.state_dict())
        trainer.close()
        return weights

    whole = train("whole", 4)
    train("parts", 2)
    parts = train("parts", 4, resume=str(tmp_path / "parts"))
    assert all(torch.equal(value, parts[name]) for name, value in whole.items())
