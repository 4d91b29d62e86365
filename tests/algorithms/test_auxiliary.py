import copy
import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from deft import schema
from deft.algorithms.auxiliary import Auxiliary
from deft.algorithms.grpo import GRPO
from deft.algorithms.ppo import PPO
from deft.config.algorithm_settings import GRPOSettings, PPOSettings
from deft.config.settings import PolicyConfig
from deft.errors import InputError
from deft.models.actor_critic import ActorCritic
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel

SIZES = {"action_dim": 2, "chunk_length": 2, "image_keys": ["rgb"], "image_size": 16, "cell": 4, "width": 16}
NO_WORDS = {"proprio_key": None, "instruction_key": None}
SETTINGS = {"batch_size": 8, "n_epochs": 2, "learning_rate": 1e-2, "auxiliary_learning_rate": 1e-2}
SEES, DOES = ("names", "cameras", "found"), ("trunk", "head", "value_head")
WORDS = ("text", "task")  # by which the trunk knows the task: the labels leave them alone


def make_policy(**changes) -> VLAPolicy:
    torch.manual_seed(0)
    model = TinyVLAModel(**{**SIZES, **NO_WORDS, "places_key": "places", "places_dim": 2, **changes})
    model.observe(pictures(64))
    return VLAPolicy(model)


def pictures(count: int, seed: int = 0) -> dict[str, torch.Tensor]:
    """A white patch on black, and where it is."""
    generator = torch.Generator().manual_seed(seed)
    corners = torch.randint(0, 12, (count, 2), generator=generator)
    images = torch.zeros(count, 3, 16, 16, dtype=torch.uint8)
    for image, (x, y) in zip(images, corners.tolist(), strict=True):
        image[:, y : y + 4, x : x + 4] = 255
    return {"rgb": images, "places": corners.float()}


@torch.no_grad()
def make_rollout(policy: VLAPolicy, steps: int = 8, num_envs: int = 4) -> TensorDict:
    rows = []
    for step in range(steps):
        td = TensorDict({schema.OBSERVATION: TensorDict(pictures(num_envs, step), [num_envs])}, batch_size=[num_envs])
        policy.act(td)
        td[schema.NEXT_REWARD] = td[schema.ACTION].sum((1, 2))
        td[schema.NEXT_TERMINATED] = td[schema.NEXT_TRUNCATED] = torch.ones(num_envs, dtype=torch.bool)
        td[schema.NEXT_VALUE] = torch.zeros(num_envs)
        td[schema.POLICY_VERSION] = torch.zeros(num_envs, dtype=torch.int64)
        td[schema.STEP_MASK] = torch.ones(num_envs, dtype=torch.bool)
        rows.append(td)
    return torch.stack(rows)


def weights(policy: VLAPolicy, modules: tuple[str, ...]) -> torch.Tensor:
    found = [parameter.detach().flatten() for name in modules for parameter in getattr(policy.model, name).parameters()]
    return torch.cat(found).clone()


def test_the_labels_train_what_it_sees_by_and_nothing_else():
    policy = make_policy()
    auxiliary = Auxiliary(policy, 1e-2, 8)
    does, losses, rows = weights(policy, DOES + WORDS), [], make_rollout(policy).flatten(0, 1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(60):
        losses.append(float(auxiliary.update(rows, generator)["auxiliary_loss"]))
    # The two numbers have deviation 1 after scaling: smooth L1 with β 0.1 of a guess at the mean is about 0.8 − 0.05,
    # and 0.3 of it is counted
    assert 0.15 < losses[0] < 0.35
    assert losses[-1] < 0.2 * losses[0]
    torch.testing.assert_close(weights(policy, DOES + WORDS), does, rtol=0, atol=0)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_reward_trains_what_it_does_and_nothing_else(frozen):
    policy = make_policy(freeze_vision=frozen)
    algorithm = PPO(policy, PPOSettings(**SETTINGS))
    algorithm.auxiliary.learning_rate = 0.0
    sees, does = weights(policy, SEES), weights(policy, DOES)
    algorithm.update(iter([make_rollout(policy)]))
    torch.testing.assert_close(weights(policy, SEES), sees, rtol=0, atol=0)
    assert not torch.equal(weights(policy, DOES), does)


def test_ppo_and_grpo_learn_both():
    for algorithm_class, settings in ((PPO, PPOSettings(**SETTINGS)), (GRPO, GRPOSettings(**SETTINGS, kl_coef=0))):
        policy = make_policy()
        algorithm = algorithm_class(policy, settings)
        sees, does = weights(policy, SEES), weights(policy, DOES)
        metrics = algorithm.update(iter([make_rollout(policy)]))
        assert metrics["auxiliary_loss"] > 0
        assert not torch.equal(weights(policy, SEES), sees)
        assert not torch.equal(weights(policy, DOES), does)


def test_grpo_may_learn_to_see_first():
    policy = make_policy()
    algorithm = GRPO(policy, GRPOSettings(**SETTINGS, kl_coef=0, auxiliary_warmup=1))
    moved = []
    for _ in range(2):
        sees, does = weights(policy, SEES), weights(policy, DOES)
        algorithm.update(iter([make_rollout(policy)]))
        moved.append([not torch.equal(weights(policy, SEES), sees), not torch.equal(weights(policy, DOES), does)])
    assert moved == [[True, False], [True, True]]


def test_a_warm_up_in_which_nothing_learns_is_rejected():
    with pytest.raises(ValueError, match="1: nothing warms up; give auxiliary_learning_rate or action_critic"):
        GRPOSettings(auxiliary_warmup=1)


def test_several_passes_are_as_many_single_ones_and_tell_the_loss_of_the_first():
    generators = [torch.Generator().manual_seed(0) for _ in range(2)]
    thrice, once = make_policy(), make_policy()
    rows = make_rollout(once).flatten(0, 1)
    loss = Auxiliary(thrice, 1e-2, 8, epochs=3).update(rows, generators[0])
    single = Auxiliary(once, 1e-2, 8)
    losses = [single.update(rows, generators[1]) for _ in range(3)]
    assert loss == losses[0]
    torch.testing.assert_close(weights(thrice, SEES), weights(once, SEES), rtol=0, atol=0)


@pytest.mark.parametrize(("progress", "count"), [(0.0, 4), (0.24, 4), (0.25, 3), (0.5, 2), (0.75, 1), (1.0, 1)])
def test_passes_become_fewer_as_training_goes_on(progress, count):
    policy = make_policy()
    auxiliary = Auxiliary(policy, 1e-2, 8, epochs=4)
    rows, steps = make_rollout(policy).flatten(0, 1), []
    auxiliary.optimizer.update_parameters = lambda: steps.append(None)
    auxiliary.update(rows, torch.Generator(), progress)
    assert len(steps) == count * math.ceil(len(rows) / 8)


def test_the_step_size_falls_to_a_tenth():
    policy = make_policy()
    auxiliary, rates = Auxiliary(policy, 1e-2, 8), []
    rows = make_rollout(policy).flatten(0, 1)
    for progress in (0.0, 0.5, 1.0):
        auxiliary.update(rows, torch.Generator(), progress)
        rates.append(auxiliary.optimizer.param_groups[0]["lr"])
    # 1 − 0.9 t at t = 0, 1/2, 1
    assert rates == pytest.approx([1e-2, 0.55e-2, 0.1e-2])


def test_the_setting_reaches_it():
    for algorithm in (
        PPO(make_policy(), PPOSettings(**SETTINGS, auxiliary_epochs=3)),
        GRPO(make_policy(), GRPOSettings(**SETTINGS, auxiliary_epochs=2)),
    ):
        assert algorithm.auxiliary.epochs == algorithm.settings.auxiliary_epochs > 1


def test_it_resumes_bit_equal():
    policy = make_policy()
    algorithm = PPO(policy, PPOSettings(**SETTINGS))
    algorithm.update(iter([make_rollout(policy)]))
    twin_policy = make_policy()
    twin = PPO(twin_policy, PPOSettings(**SETTINGS))
    twin_policy.load_state_dict(copy.deepcopy(policy.state_dict()))
    twin.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    for one in (algorithm, twin):
        torch.manual_seed(3)
        one.update(iter([make_rollout(one.policy)]))
    torch.testing.assert_close(weights(twin_policy, SEES + DOES), weights(policy, SEES + DOES), rtol=0, atol=0)


def test_a_run_goes_on_as_it_began():
    plain = PPOSettings(**SETTINGS | {"auxiliary_learning_rate": 0})
    state = PPO(make_policy(), PPOSettings(**SETTINGS)).state_dict()
    with pytest.raises(InputError, match="was above 0 in this run and is 0 now"):
        PPO(make_policy(), plain).load_state_dict(state)
    with pytest.raises(InputError, match="was 0 in this run and is above it now"):
        PPO(make_policy(), PPOSettings(**SETTINGS)).load_state_dict(PPO(make_policy(), plain).state_dict())


def test_policies_with_nothing_to_learn_besides_are_rejected():
    box = spaces.Box(-1, 1, (3,), np.float32)
    plain = ActorCritic(box, spaces.Box(-1, 1, (2,)), PolicyConfig())
    with pytest.raises(InputError, match="ActorCritic has no auxiliary loss; set it to 0"):
        PPO(plain, PPOSettings(**SETTINGS))
    with pytest.raises(InputError, match="observation=labelled"):
        PPO(make_policy(places_key=None), PPOSettings(**SETTINGS))
