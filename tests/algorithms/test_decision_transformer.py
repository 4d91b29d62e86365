"""The Decision Transformer learns what the return asks for, resumes, and weighs padding with nothing."""

import copy
import math

import gymnasium
import numpy as np
import pytest
import torch
from gymnasium import spaces

from deft import schema
from deft.algorithms.decision_transformer import DecisionTransformer, DropoutMasks, return_scale
from deft.algorithms.optimization import gradients_of
from deft.config.algorithm_settings import DTSettings
from deft.config.settings import DatasetPolicyConfig, VLAConfig
from deft.data.datasets.dataset import VectorDataset
from deft.data.replay import EpisodeWindows, TransitionTable
from deft.envs.make import wrap
from deft.errors import InputError
from deft.evaluation.rollouts import play_episodes
from deft.models.decision_transformer import DecisionTransformerPolicy

OBSERVATION, ACTION = spaces.Box(-np.inf, np.inf, (2,), np.float32), spaces.Box(-1, 1, (1,), np.float32)
SMALL = {"context_length": 4, "n_layer": 2, "embed_dim": 16, "batch_size": 16, "warmup_steps": 20}


def make_table(num_episodes: int = 40, length: int = 5) -> TransitionTable:
    """Two kinds of episodes that look alike: action 0.8 earns 1 a step, action −0.8 earns nothing."""
    table = TransitionTable([length] * num_episodes, 2, 1)
    generator = torch.Generator().manual_seed(0)
    for index in range(num_episodes):
        rows, good = table.episode_rows(index), index % 2 == 0
        table.observation[rows] = 5.0 + torch.randn(length + 1, 2, generator=generator)
        table.action[rows][:length] = 0.8 if good else -0.8
        table.reward[rows][:length] = float(good)
    return table


def make_algorithm(table: TransitionTable, **settings: object) -> tuple[DecisionTransformer, EpisodeWindows]:
    """Made as a run makes it, and prepared with the data."""
    torch.manual_seed(0)
    given = DTSettings(**(SMALL | settings))
    dataset = VectorDataset(table, "choice", OBSERVATION, ACTION)
    policy = DecisionTransformer.make_policy(OBSERVATION, ACTION, DatasetPolicyConfig(), given)
    algorithm = DecisionTransformer(policy, given)
    windows = algorithm.make_sampler(dataset, 0, torch.device("cpu"), 2**30)
    assert isinstance(windows, EpisodeWindows)
    algorithm.prepare(dataset, windows, fresh=True)
    return algorithm, windows


class Choice(gymnasium.Env):
    """The task of `make_table`: reward 1 for a positive action."""

    observation_space, action_space = OBSERVATION, ACTION

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps = 0
        return self._observation(), {}

    def step(self, action):
        self.steps += 1
        return self._observation(), float(action[0] > 0), False, self.steps == 5, {}

    def _observation(self):
        return (5.0 + self.np_random.normal(size=2)).astype(np.float32)


def test_the_return_that_is_asked_for_chooses_the_action() -> None:
    """The data is half good and half bad: its mean action is 0. Only the return-to-go differs between them."""
    algorithm, windows = make_algorithm(make_table(), learning_rate=3e-3)
    policy = algorithm.policy
    assert float(policy.target_return) == 5.0  # the best return: five steps of 1
    batches = windows.batches(16)
    losses = [float(algorithm.update(batches)["action_loss"]) for _ in range(150)]
    assert losses[0] > 0.5  # an action of 0 is 0.8 off: 0.64
    assert losses[-1] < 0.02
    env = wrap([Choice() for _ in range(2)])
    assert [episode.episode_return for episode in play_episodes(policy, env, 4)] == [5.0] * 4
    policy.target_return.fill_(0.0)
    assert [episode.episode_return for episode in play_episodes(policy, env, 4)] == [0.0] * 4


def test_statistics_of_the_data_go_into_the_policy() -> None:
    table = make_table()
    policy = make_algorithm(table)[0].policy
    observed = table.observation[table.transition_rows()]
    normalised = policy.encoder(observed)
    torch.testing.assert_close(normalised.mean(0), torch.zeros(2), atol=1e-4, rtol=0)
    torch.testing.assert_close(normalised.std(0, correction=0), torch.ones(2), atol=1e-4, rtol=0)
    assert float(policy.return_scale) == 1.0  # of a best return of 5
    assert int(policy.last_timestep) == 4


def test_targets_and_scale_can_be_given() -> None:
    policy = make_algorithm(make_table(), target_return=[4, 2.5], return_scale=8.0)[0].policy
    assert policy.target_returns == [4.0, 2.5]
    assert (float(policy.target_return), float(policy.return_scale)) == (4.0, 8.0)
    assert DTSettings(target_return=3600).target_return == (3600,)


def test_another_scale_than_the_weights_were_trained_with_is_rejected():
    table = make_table()
    algorithm, _ = make_algorithm(table, return_scale=8.0)
    algorithm.settings.return_scale = 4.0
    with pytest.raises(InputError, match="return_scale: 4 is given, but the weights were trained with 8"):
        algorithm.resumed()


def test_episodes_longer_than_the_timesteps_are_rejected() -> None:
    with pytest.raises(InputError, match=r"max_episode_length: 4 is less than the dataset's longest .* set it to 5"):
        make_algorithm(make_table(), max_episode_length=4)


def test_a_policy_from_a_checkpoint_keeps_its_statistics() -> None:
    algorithm, windows = make_algorithm(make_table(), target_return=[9.0])
    before = {name: value.clone() for name, value in algorithm.policy.state_dict().items()}
    algorithm.settings.target_return = (6.0,)
    algorithm.prepare(VectorDataset(make_table(num_episodes=4), "other", OBSERVATION, ACTION), windows, fresh=False)
    changed = {name for name, value in algorithm.policy.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"target_return"}


def test_what_it_cannot_train_is_rejected() -> None:
    with pytest.raises(InputError, match="num_seeds: dt trains one seed at a time"):
        DecisionTransformer.make_policy(OBSERVATION, ACTION, DatasetPolicyConfig(), DTSettings(), num_members=3)
    vla = DatasetPolicyConfig(name="vla", vla_config=VLAConfig(model_class="some.Model"))
    with pytest.raises(InputError, match="not a VLA model"):
        DecisionTransformer.make_policy(OBSERVATION, ACTION, vla, DTSettings())


@pytest.mark.parametrize(
    ("returns", "scale"), [([3222.0, 12.0], 1000.0), ([-76.0, -3.0], 10.0), ([0.5], 0.1), ([1.0], 1.0), ([0.0], 1.0)]
)
def test_the_scale_is_the_power_of_ten_below_the_largest_return(returns: list[float], scale: float) -> None:
    assert math.isclose(return_scale(returns), scale)


def test_the_loss_is_the_mean_over_real_steps_and_real_dims() -> None:
    algorithm, windows = make_algorithm(make_table(), dropout=0.0)
    batch = windows.windows(torch.tensor([0, 3, 4]))  # 4, 2 and 1 real steps
    predicted = algorithm.policy.predict(batch).detach()
    real = batch[schema.STEP_MASK]
    assert real.sum(1).tolist() == [4, 2, 1]
    expected = (predicted - batch[schema.ACTION])[real].square().mean()
    garbage = dict(batch)
    garbage[schema.ACTION] = torch.where(real[..., None], batch[schema.ACTION], torch.full((), 50.0))
    for given in (batch, garbage):
        loss = copy.deepcopy(algorithm).update(iter([given]))["action_loss"]
        torch.testing.assert_close(loss, expected)


def test_padded_action_dims_teach_nothing() -> None:
    table = TransitionTable([5] * 4, 2, 3)
    table.rows.copy_(torch.randn(table.rows.shape).clamp(-1, 1))
    settings = DTSettings(**SMALL, dropout=0.0, weight_decay=0.0)
    policy = DecisionTransformerPolicy(OBSERVATION, spaces.Box(-1, 1, (3,), np.float32), settings)
    algorithm = DecisionTransformer(policy, settings)
    batch = EpisodeWindows(table, 4).sample(8)
    batch[schema.ACTION_MASK] = torch.tensor([True, True, False]).expand(8, 3)
    before = policy.head_weight.detach().clone()
    loss = algorithm.update(iter([batch]))["action_loss"]
    assert torch.equal(policy.head_weight[:, 2], before[:, 2])
    assert not torch.equal(policy.head_weight[:, 1], before[:, 1])
    assert torch.isfinite(loss)


def test_the_learning_rate_warms_up() -> None:
    algorithm, windows = make_algorithm(make_table(), learning_rate=1e-3, warmup_steps=4)
    batches = windows.batches(4)
    rates = [float(algorithm.update(batches)["learning_rate"]) for _ in range(6)]
    assert rates == pytest.approx([0.25e-3, 0.5e-3, 0.75e-3, 1e-3, 1e-3, 1e-3])


def test_gradients_are_clipped() -> None:
    algorithm, windows = make_algorithm(make_table(), max_grad_norm=1e-3)
    norm = algorithm.update(windows.batches(4))["grad_norm"]
    assert norm > 1e-3  # as logged, before clipping
    assert torch.linalg.vector_norm(gradients_of(algorithm.optimizer)[0]) == pytest.approx(1e-3)


def test_a_resumed_run_is_bit_equal() -> None:
    algorithm, windows = make_algorithm(make_table())
    batches = windows.batches(8)
    for _ in range(3):
        algorithm.update(batches)
    other, other_windows = make_algorithm(make_table())
    other.policy.load_state_dict(algorithm.policy.state_dict())
    other.load_state_dict(algorithm.state_dict())
    other_windows.load_state_dict(windows.state_dict())
    assert other.version == 3
    random_state = torch.get_rng_state()  # dropout's; a run's checkpoint has it
    for _ in range(2):
        algorithm.update(batches)
    torch.set_rng_state(random_state)
    for _ in range(2):
        other.update(other_windows.batches(8))
    for one, two in zip(algorithm.policy.parameters(), other.policy.parameters(), strict=True):
        assert torch.equal(one, two)


def test_the_optimizer_state_of_another_network_is_rejected() -> None:
    algorithm, _ = make_algorithm(make_table())
    wider, _ = make_algorithm(make_table(), embed_dim=32)
    with pytest.raises(InputError, match="optimizer state is for"):
        wider.load_state_dict(algorithm.state_dict())


def test_dropout_masks_keep_the_mean() -> None:
    masks = DropoutMasks(0.1, torch.device("cpu"))
    first, second = masks.draw([(200, 300), (41, 999)])
    assert (first.shape, second.shape) == ((200, 300), (41, 999))
    assert first.unique().tolist() == pytest.approx([0.0, 1 / 0.9])
    # Deviation of the share that is kept: √(0.09 / 60,000) = 0.0012
    assert float((first > 0).float().mean()) == pytest.approx(0.9, abs=0.006)
    assert float((second > 0).float().mean()) == pytest.approx(0.9, abs=0.008)
    before = first.clone()
    again, _ = masks.draw([(200, 300), (41, 999)])
    # Two draws agree where both keep or both drop: 0.81 + 0.01
    assert float((again == before).float().mean()) == pytest.approx(0.82, abs=0.01)


@pytest.mark.filterwarnings("ignore:.*mkldnn_matmul failed")  # on CPUs without bf16 units it is slow, not wrong
def test_bf16_is_near_float32() -> None:
    losses = {}
    for precision in ("float32", "bf16"):
        algorithm, windows = make_algorithm(make_table(), precision=precision, dropout=0.0)
        batches = windows.batches(16)
        losses[precision] = [float(algorithm.update(batches)["action_loss"]) for _ in range(5)]
        assert all(parameter.dtype == torch.float32 for parameter in algorithm.policy.parameters())
    assert losses["bf16"] == pytest.approx(losses["float32"], rel=0.02)
    assert losses["bf16"] != losses["float32"]
