"""Rollouts of an explorer: who sees what, what the reward depends on, ends of episodes, and PPO on them."""

import math

import pytest
import torch
from explorers import REAL, explorer_policy, panning_rollouts, teacher_policy

from deft import schema
from deft.config.f1_settings import ExplorerSettings, StudentRewards
from deft.models.f1.explorer import ExplorerPolicy, world_model_weights
from deft.models.f1.policy import F1Policy
from deft.training.phases.explorer_rollouts import ExplorerPPO, measure
from deft.training.phases.rewards import StudentReward

SETTINGS = {"batch_size": 10, "sequence_length": 5, "n_epochs": 2}


@pytest.fixture(scope="module")
def teacher():
    return teacher_policy()


@pytest.fixture
def explorer(teacher):
    return explorer_policy(teacher)


def scripted(explorer, actions):
    """Acts as the explorer does, but with these actions [T, N, 2]."""
    remaining = list(actions)

    def act(td):
        td = explorer.act(td)
        action = torch.zeros_like(td[schema.ACTION])
        action[:, :2] = remaining.pop(0)
        td[schema.ACTION] = action
        # the memory after the step is of the action that was taken
        seen = td[schema.OBSERVATION]
        frame = explorer.f1.frame_features(seen[schema.FRAME_TOKENS])
        memory = td[schema.MEMORY].transpose(0, 1)
        _, after = explorer._step_memory(frame[None], seen[schema.STATE][None], action[None], memory)
        td[schema.NEXT_MEMORY] = after.transpose(0, 1)
        return td

    return act


def test_a_rollout_has_whole_episodes_of_new_scenes(explorer):
    rollouts = panning_rollouts(explorer, num_envs=2, num_steps=5, num_episodes=3)
    assert rollouts.num_episodes == 4  # two rounds of two copies
    first, second = rollouts.collect(version=7), rollouts.collect(version=8)
    assert first.rollout.batch_size == (5, 4)
    assert [episode.number for episode in first.episodes] == [0, 1, 2, 3]
    assert [episode.number for episode in second.episodes] == [4, 5, 6, 7]
    scenes = {episode.wrist[0].tobytes() for found in (first, second) for episode in found.episodes}
    assert len(scenes) == 8
    assert first.positions == [(0, 0), (0, 1), (0, 2), (0, 3)]
    assert not first.rollout[schema.MEMORY][0].any()
    assert first.rollout[schema.MEMORY][1:].abs().sum((-1, -2)).min() > 0
    assert first.rollout[schema.NEXT_TRUNCATED].sum(0).tolist() == [1, 1, 1, 1]
    assert first.rollout[schema.NEXT_TRUNCATED][-1].all()
    assert first.rollout[schema.POLICY_VERSION].unique().tolist() == [7]
    # an episode's frames and codes are those of the rollout, one step on
    episode = first.episodes[2]
    seen = first.rollout[schema.OBSERVATION]
    assert torch.equal(torch.as_tensor(episode.wrist[:-1]), seen[schema.IMAGE0][:, 2])
    assert torch.equal(torch.as_tensor(episode.codes[:-1]), seen[schema.FRAME_TOKENS][:, 2])
    assert torch.equal(torch.as_tensor(episode.action), explorer.executed(first.rollout[schema.ACTION])[:, 2])
    again = panning_rollouts(explorer_policy(), num_envs=2)
    again.load_state_dict({"num_begun": 2})  # as after the first rollout
    assert [episode.number for episode in again.collect().episodes] == [4, 5]


def test_the_student_sees_the_wrist_and_the_teacher_both(explorer, teacher, monkeypatch):
    given, looked = [], []
    act, forward = ExplorerPolicy.act, F1Policy.forward_with_world_model

    def watched_act(self, td, deterministic=False):
        given.append(set(td[schema.OBSERVATION].keys()))
        return act(self, td, deterministic)

    def watched_forward(self, batch, **arguments):
        looked.append((self, batch))
        return forward(self, batch, **arguments)

    monkeypatch.setattr(ExplorerPolicy, "act", watched_act)
    monkeypatch.setattr(F1Policy, "forward_with_world_model", watched_forward)
    found = panning_rollouts(explorer).collect()
    for episode in found.episodes:
        episode.head = 255 - episode.wrist  # the toy's two cameras show the same
    measure(teacher, found)
    assert given
    assert all(names == {schema.IMAGE0, schema.FRAME_TOKENS, schema.STATE} for names in given)
    ((policy, batch),) = looked
    assert policy is teacher
    head, wrist = batch[schema.IMAGE0], batch[schema.IMAGE1]
    assert torch.equal(wrist, found.rollout[schema.OBSERVATION][schema.IMAGE0])
    assert torch.equal(head, 255 - wrist)


def test_the_reward_is_of_the_step_that_was_taken(explorer, teacher):
    """Two rollouts that differ in a_2 alone: the measures before step 2 are equal, those of step 2 are not."""
    actions = torch.zeros(5, 2, 2)
    other = actions.clone()
    other[2] = torch.tensor([1.0, -1.0])
    measured = []
    for chosen in (actions, other):
        rollouts = panning_rollouts(explorer)
        measured.append(measure(teacher, rollouts.collect(scripted(explorer, chosen))))
    one, two = measured
    for name in ("error", "uncertainty", "divergence", "action_size"):
        first, second = getattr(one, name), getattr(two, name)
        assert torch.allclose(first[:2], second[:2], atol=1e-6), name
        assert (first[2] - second[2]).abs().min() > 1e-5, name


def test_uncertainty_and_divergence_depend_on_the_action_and_not_on_its_outcome_alone(explorer, teacher):
    """Where the world does not move (dim 0 by 0.1 rounds to no pixel), a_t still changes what is predicted."""
    actions = torch.zeros(5, 2, 2)
    nudged = actions.clone()
    nudged[2, :, 0] = 0.1
    found = []
    for chosen in (actions, nudged):
        collected = panning_rollouts(explorer).collect(scripted(explorer, chosen))
        found.append((collected, measure(teacher, collected)))
    (first, one), (second, two) = found
    assert torch.equal(
        first.rollout[schema.OBSERVATION][schema.IMAGE0], second.rollout[schema.OBSERVATION][schema.IMAGE0]
    )
    assert (one.uncertainty[2] - two.uncertainty[2]).abs().min() > 1e-6
    assert (one.divergence[2] - two.divergence[2]).abs().min() > 1e-7


def test_measures_are_the_world_models_own(explorer, teacher):
    """Cross-entropy, entropy and memory by hand for one episode, step by step with the memory carried."""
    found = panning_rollouts(explorer, num_steps=12, num_episodes=2).collect()  # more than one pass of steps
    measures = measure(teacher, found)
    batch, memory = found.batch(teacher), teacher.initial_memory(1)
    for step in range(12):
        one = batch.steps(torch.tensor([1]), torch.tensor([step]))
        with torch.no_grad():
            result = teacher(one, memory_state=memory, by_step=True)
        memory = result[schema.MEMORY_STATE]
        assert measures.error[step, 1].item() == pytest.approx(result["wm_loss"].item(), abs=1e-4)
        assert measures.uncertainty[step, 1].item() == pytest.approx(result["wm_entropies"].item(), abs=1e-4)
        distance = (found.remembered[step, 1] - memory[-1, 0]).norm().item()
        assert measures.divergence[step, 1].item() == pytest.approx(distance, abs=1e-4)
        assert torch.allclose(found.rollout[schema.TEACHER_MEMORY][step, 1], memory[-1, 0], atol=1e-5)
    assert not measures.divergence_before[0].any()
    assert torch.equal(measures.divergence_before[1:], measures.divergence[:-1])


def test_an_episode_that_ends_early_is_followed_by_another(explorer, teacher):
    """Copy 0 goes right twice and terminates at step 1, again at step 3; copy 1 never does."""
    actions = torch.zeros(5, 2, 2)
    actions[:, 0, 0] = 1.0
    found = panning_rollouts(explorer, ends_right=True).collect(scripted(explorer, actions))
    rollout = found.rollout
    assert rollout[schema.NEXT_TERMINATED][:, 0].tolist() == [False, True, False, True, False]
    assert not rollout[schema.NEXT_TERMINATED][:, 1].any()
    assert found.positions == [(0, 0), (2, 0), (4, 0), (0, 1)]
    assert [len(episode) for episode in found.episodes] == [2, 2, 1, 5]
    assert not rollout[schema.MEMORY][2, 0].any()
    assert not rollout[schema.MEMORY][4, 0].any()
    # V(next) is stored where a segment is cut (the last step), and not where it terminated
    value = rollout[schema.NEXT_VALUE]
    assert (value != 0).tolist() == [[False, False]] * 4 + [[True, True]]
    measures = measure(teacher, found)
    assert measures.starts[:, 0].tolist() == [True, False, True, False, True]
    alone = measure(
        teacher, type(found)(rollout[2:4, :1].clone(), found.episodes[1:2], [(0, 0)], found.remembered[2:4, :1])
    )
    assert torch.allclose(measures.error[2:4, 0], alone.error[:, 0], atol=1e-5)
    scored = explorer.evaluate_actions(rollout)
    assert (scored["value"] - rollout[schema.VALUE]).abs().max() < 1e-5


# -- PPO -------------------------------------------------------------------------------------------------------------


def test_before_the_first_step_of_every_iteration_the_ratio_is_one(explorer, teacher):
    rollouts, reward = panning_rollouts(explorer, num_episodes=4), StudentReward(StudentRewards())
    ppo = ExplorerPPO(explorer, ExplorerSettings(**SETTINGS))
    for _ in range(3):
        found = rollouts.collect(version=ppo.version)
        found.pay(*reward(measure(teacher, found)))
        scored = explorer.evaluate_actions(found.rollout)
        assert (scored["log_prob"] - found.rollout[schema.LOG_PROB]).exp().sub(1).abs().max() < 1e-4
        metrics = ppo.update(iter([found.rollout]))
        assert metrics["first_ratio_error"] < 1e-4
        assert metrics["staleness"] == 0
        assert metrics["approx_kl"] > 1e-6  # it did learn something


def test_the_world_model_does_not_change_and_the_memory_learns(explorer, teacher):
    frozen = {name: value.clone() for name, value in world_model_weights(explorer.f1).items()}
    theirs = {name: value.clone() for name, value in teacher.state_dict().items()}
    rollouts, reward = panning_rollouts(explorer, num_episodes=4), StudentReward(StudentRewards())
    ppo = ExplorerPPO(explorer, ExplorerSettings(**SETTINGS, learning_rate=1e-2))
    distances = []
    for _ in range(10):
        found = rollouts.collect(version=ppo.version)
        measures = measure(teacher, found)
        distances.append(float(measures.divergence.mean()))
        found.pay(*reward(measures))
        ppo.update(iter([found.rollout]))
    assert all(torch.equal(value, frozen[name]) for name, value in world_model_weights(explorer.f1).items())
    assert all(torch.equal(value, theirs[name]) for name, value in teacher.state_dict().items())
    assert distances[-1] < 0.8 * distances[0]


def test_it_learns_a_reward_that_any_learner_finds(teacher):
    """Paid for going right: what was as often left as right goes right more often than not."""
    explorer = explorer_policy(teacher, initial_noise=0.7, noise_correlation=0.0)  # 40 draws, few beyond the limits
    rollouts = panning_rollouts(explorer, num_envs=8, num_episodes=8)
    settings = ExplorerSettings(batch_size=40, sequence_length=5, learning_rate=3e-2, desired_kl=0.3, gamma=0.5)
    ppo = ExplorerPPO(explorer, settings)
    means = []
    for _ in range(8):
        found = rollouts.collect(version=ppo.version)
        right = explorer.executed(found.rollout[schema.ACTION])[..., 0]
        means.append(float(right.mean()))
        found.pay(right)
        ppo.update(iter([found.rollout]))
    assert abs(means[0]) < 0.35
    assert means[-1] > means[0] + 0.4


def test_two_learning_rates_and_their_state(explorer):
    ppo = ExplorerPPO(explorer, ExplorerSettings(learning_rate=1e-3, max_grad_norm=None))
    acting, others = explorer.parameter_groups()
    before = [one.detach().clone() for one in (acting[0], others[0])]
    ppo.optimizer.zero_grad()
    acting[0].grad.fill_(1.0)
    others[0].grad.fill_(1.0)
    ppo.optimizer.step()
    # Adam's first step is the learning rate itself, by the sign of the gradient
    assert (before[0] - acting[0]).mean().item() == pytest.approx(1e-4, rel=1e-2)
    assert (before[1] - others[0]).mean().item() == pytest.approx(1e-3, rel=1e-2)
    assert ppo.learning_rate == 1e-3
    state = ppo.state_dict()
    other = ExplorerPPO(explorer_policy(), ExplorerSettings(learning_rate=1e-3, max_grad_norm=None))
    other.load_state_dict(state)
    for one, another in zip(ppo.optimizer.parameters, other.optimizer.parameters, strict=True):
        assert torch.equal(ppo.optimizer.state[one]["exp_avg"], other.optimizer.state[another]["exp_avg"])
    assert [group["lr"] for group in other.optimizer.param_groups] == pytest.approx([1e-4, 1e-3])


def test_what_is_averaged_is_every_gradient_before_every_step(explorer):
    """With a second process that pulls the other way, nothing moves."""
    averaged = []

    class Opposite:
        count = 2

        def average(self, tensors):
            averaged.append(sum(tensor.numel() for tensor in tensors))
            for tensor in tensors:
                tensor.zero_()

        def sum(self, tensor):
            return tensor.mul_(2)

        def maximum(self, value, device):
            return value

        def merge_statistics(self, module):
            pass

    rollouts = panning_rollouts(explorer, num_episodes=2)
    ppo = ExplorerPPO(explorer, ExplorerSettings(**SETTINGS))
    ppo.share(Opposite())
    found = rollouts.collect()
    found.pay(torch.rand(5, 2))
    before = [one.detach().clone() for one in explorer.parameters()]
    ppo.update(iter([found.rollout]))
    # Each parameter has its gradient at a multiple of 64 bytes: 16 numbers.
    size = sum(16 * math.ceil(one.numel() / 16) for group in explorer.parameter_groups() for one in group)
    assert averaged == [size, size, 1]  # one minibatch of ten, two epochs; then the KL
    assert all(torch.equal(one, other) for one, other in zip(before, explorer.parameters(), strict=True))
    assert ppo.learning_rate == pytest.approx(4.5e-4)  # 1.5 · 3e-4: by the mean KL of all processes, which is 0
    assert REAL.sum() == 2
