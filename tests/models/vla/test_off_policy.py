"""VLAPolicy in the off-policy and offline algorithms."""

import math

import numpy as np
import pytest
import torch
from gymnasium import spaces
from policies import BOX, OBSERVATION, SMALL, UNIT, Known, chunked, gpt, streams, tiny, vla_policy
from tensordict import TensorDict

from deft import schema
from deft.algorithms.cql import CQL
from deft.algorithms.iql import IQL
from deft.algorithms.td3_bc import TD3BC
from deft.config.algorithm_settings import CQLSettings, IQLSettings, TD3BCSettings
from deft.config.settings import DatasetPolicyConfig, VLAConfig
from deft.errors import InputError
from deft.models.action_scale import into_box
from deft.models.policy import Encoded
from deft.models.vla.gpt import GPTVLAModel
from deft.models.vla.policy import VLAPolicy
from deft.runs.checkpoint import load_weights

WIDE = spaces.Box(-3.0, 3.0, (2,), np.float32)


class Sampling(Known):
    """A `Known` model, drawn without gradient, and with no word for the most likely action."""

    def forward(self, observations):
        return self._distribution(observations).sample()


def rows(batch: int = 5) -> TensorDict:
    return TensorDict({schema.OBSERVATION: TensorDict(streams(batch), [batch])}, [batch])


def batch_of(batch: int = 5) -> dict:
    return {
        schema.OBSERVATION: streams(batch),
        schema.ACTION: torch.rand(batch, 2) * 2 - 1,
        schema.NEXT_REWARD: torch.randn(batch),
        schema.NEXT_OBSERVATION: streams(batch),
        schema.NEXT_TERMINATED: torch.ones(batch),
    }


# -- as a policy -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_model", [gpt, Known, Sampling])
@pytest.mark.parametrize("box", [UNIT, WIDE])
def test_a_stored_action_scores_what_it_scored_when_it_was_drawn(make_model, box):
    policy = vla_policy(make_model(), OBSERVATION, box, SMALL).train()
    td = policy.act(rows())
    schema.check_scalars(td)
    scored = policy.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    torch.testing.assert_close(scored["value"], td[schema.VALUE])
    torch.testing.assert_close(policy.get_value(td), td[schema.VALUE])


def test_model_outputs_are_units_of_the_box():
    policy = vla_policy(Known(mean=0.5, std=0.5), OBSERVATION, WIDE, SMALL)
    td = policy.act(rows(), deterministic=True)
    assert torch.equal(td[schema.ACTION], torch.full((5, 2), 1.5))  # half of the half width 3
    td.set(schema.ACTION, torch.full((5, 2), 3.0))  # a unit action of 1, one deviation from the mean
    scored = policy.evaluate_actions(td)
    # Each dim: −½ · 1² − log ½ − ½ log 2π, and − log 3, since a density of the Box is a third of one of the unit box.
    each = -0.5 - math.log(0.5) - 0.5 * math.log(2 * math.pi) - math.log(3.0)
    torch.testing.assert_close(scored["log_prob"], torch.full((5,), 2 * each))
    # Each dim of the entropy: ½ + ½ log 2π + log σ + log 3
    entropy = 0.5 + 0.5 * math.log(2 * math.pi) + math.log(0.5) + math.log(3.0)
    torch.testing.assert_close(scored["entropy"], torch.full((5,), 2 * entropy))
    # A padded dim has no part in either.
    td.set(schema.ACTION_MASK, torch.tensor([[True, False]]).expand(5, 2))
    masked = vla_policy(gpt(), OBSERVATION, WIDE, SMALL)
    plain = vla_policy(gpt(), OBSERVATION, UNIT, SMALL)
    plain.load_state_dict({**masked.state_dict(), "width": plain.width, "center": plain.center})
    difference = plain.evaluate_actions(td.clone().set(schema.ACTION, td[schema.ACTION] / 3))["log_prob"]
    difference = difference - masked.evaluate_actions(td)["log_prob"]
    torch.testing.assert_close(difference, torch.full((5,), math.log(3.0)), atol=1e-5, rtol=0)


def test_what_is_trained_is_what_the_environment_executes():
    policy = vla_policy(Known(mean=1.4), OBSERVATION, WIDE, SMALL)
    state = policy.encode(streams())
    executed = policy.act(rows(), deterministic=True)[schema.ACTION].clamp(-3.0, 3.0)
    assert torch.equal(policy.from_unit(policy.mean(state)[0]), executed)
    assert policy.sample(state, 50)[0].abs().max() == 1.0


# -- for the algorithms ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_model", [lambda: gpt(log_std_init=-2.0), lambda: Known(std=0.1)])
def test_draws_come_with_the_log_prob_that_the_model_gives_them(make_model):
    policy = vla_policy(make_model(), OBSERVATION, UNIT, SMALL)
    state = policy.encode(streams())
    assert state.features.shape == (1, 5, policy.feature_dim)
    unit, log_prob = policy.sample(state, 7)
    assert unit.shape == (7, 1, 5, 2)
    assert log_prob.shape == (7, 1, 5)
    for index in range(7):
        torch.testing.assert_close(policy.log_prob(state, unit[index]), log_prob[index], atol=1e-5, rtol=1e-5)
    assert unit.abs().max() < 1  # none was clipped
    assert len(unit.unique()) > 20  # drawn, each for itself


@pytest.mark.parametrize("make_model", [lambda: gpt(log_std_init=1.0), lambda: Known(std=3.0)])
def test_a_clipped_draw_has_the_log_prob_that_it_had_before(make_model):
    policy = vla_policy(make_model(), OBSERVATION, UNIT, SMALL)
    state = policy.encode(streams())
    unit, log_prob = policy.sample(state, 200)
    assert 0.5 < float((unit.abs() == 1).float().mean()) < 0.9
    # E log N(x) over the draws is −entropy; of what was clipped it would be far more.
    entropy = policy.evaluate_actions(rows().set(schema.ACTION, torch.zeros(5, 2)))["entropy"].mean()
    assert float(-log_prob.detach().mean()) == pytest.approx(float(entropy.detach()), abs=0.15)  # 1000 draws: ± 0.03
    # Moving the mean outwards changes nothing in it: no reward for drawing far outside.
    log_prob.sum().backward()
    gradient = policy.model.mean.grad if isinstance(policy.model, Known) else policy.model.action_head.weight.grad
    assert gradient is None or float(gradient.abs().max()) < 1e-3


def test_draws_have_the_models_distribution():
    for policy in (vla_policy(Known(0.2, 0.1), OBSERVATION, UNIT, SMALL), vla_policy(gpt(), OBSERVATION, UNIT, SMALL)):
        with torch.no_grad():
            if isinstance(policy.model, GPTVLAModel):
                policy.model.action_head.weight.zero_()
                policy.model.action_head.bias.fill_(0.2)
                policy.model.log_std.fill_(math.log(0.1))
            unit, _ = policy.sample(policy.encode(streams()), 400)
        assert float(unit.mean()) == pytest.approx(0.2, abs=0.01)  # 4000 draws: ± 0.0016
        assert float(unit.std()) == pytest.approx(0.1, abs=0.01)


def test_an_action_outside_the_box_can_only_come_back():
    x = torch.tensor([-1.5, -1.5, 0.5, 0.5, 1.5, 1.5], requires_grad=True)
    gradient = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
    clipped = into_box(x)
    assert clipped.tolist() == [-1.0, -1.0, 0.5, 0.5, 1.0, 1.0]
    clipped.backward(gradient)
    # A step goes against the gradient: from −1.5 with +1 it would go down, further out; from 1.5 with −1 further up.
    assert x.grad.tolist() == [0.0, -1.0, 1.0, -1.0, 1.0, 0.0]


def test_many_draws_cost_one_pass_of_a_model_that_defines_gaussian():
    policy = vla_policy(gpt(), OBSERVATION, UNIT, SMALL)
    state, sizes = policy.encode(streams()), []
    policy.model.vision.register_forward_hook(lambda module, inputs, output: sizes.append(len(inputs[0])))
    policy.sample(state, 10)
    assert sizes == [5]


def make(algorithm, settings, model):
    return algorithm(vla_policy(model, OBSERVATION, UNIT, SMALL), settings)


CASES = [(IQL, IQLSettings()), (CQL, CQLSettings(cql_samples=2)), (TD3BC, TD3BCSettings(policy_delay=1))]


@pytest.mark.parametrize(("kind", "settings"), CASES)
@pytest.mark.parametrize("make_model", [lambda: gpt(freeze_vision_encoder=True), Known])
def test_an_update_trains_model_and_critics_and_leaves_alone_what_is_frozen(kind, settings, make_model):
    algorithm = make(kind, settings, make_model())
    policy = algorithm.policy
    before = {name: value.clone() for name, value in policy.state_dict().items()}
    batch = batch_of()
    for _ in range(2):
        algorithm.step(batch)
    moved = {name for name, value in policy.state_dict().items() if not torch.equal(value, before[name])}
    assert not any(name.startswith("model.vision.") for name in moved)
    wanted = {"model.mean", "model.log_std"} if isinstance(policy.model, Known) else {"model.action_head.weight"}
    if kind is TD3BC:  # it trains the mean alone
        wanted -= {"model.log_std"}
    assert wanted <= moved
    assert any(name.startswith("encoder.streams.rgb") for name in moved)
    assert any(name.startswith("encoder.streams.instruction") for name in moved)


def test_the_policy_loss_trains_the_model_and_the_others_the_critics_encoder():
    algorithm = make(IQL, IQLSettings(), gpt())
    policy = algorithm.policy
    state = policy.encode(streams())
    still = Encoded(state.observation, state.features.detach())
    policy.log_prob(still, torch.zeros(1, 5, 2)).sum().backward()
    assert all(not parameter.grad.any() for parameter in [*policy.encoder_parameters(), *policy.value_parameters()])
    assert policy.model.byte_embedding.weight.grad.any()
    for parameter in policy.parameters():
        parameter.grad.zero_()
    value, q = policy.state_value(state.features), algorithm.critics(state.features, torch.zeros(1, 5, 2))
    (value.sum() + q.sum()).backward()
    assert all(not parameter.grad.any() for parameter in policy.actor_parameters())
    assert policy.encoder.streams["instruction"].embedding.weight.grad.any()


def test_get_value_is_what_iql_trained():
    # Every episode ends with reward 2 whatever is done, so V must come to 2.
    policy = vla_policy(Known(), OBSERVATION, BOX, DatasetPolicyConfig(hidden_dim=32, encoder_dim=8))
    algorithm = IQL(policy, IQLSettings(learning_rate=3e-3, tau=0.2))
    batch = {**batch_of(16), schema.NEXT_REWARD: torch.full((16,), 2.0)}
    for _ in range(60):
        algorithm.step(batch)
    td = TensorDict({schema.OBSERVATION: TensorDict(batch[schema.OBSERVATION], [16])}, [16])
    value = policy.get_value(td)
    torch.testing.assert_close(value, torch.full((16,), 2.0), atol=0.2, rtol=0)
    assert torch.equal(policy.act(td)[schema.VALUE], value)


@pytest.mark.parametrize(("kind", "settings", "message"), [(*CASES[1], "iql"), (*CASES[2], "deterministic")])
def test_what_a_model_must_offer_is_named_in_one_line(kind, settings, message):
    make(IQL, IQLSettings(), Sampling()).step(batch_of())  # IQL asks for log-probs alone
    with pytest.raises(InputError, match=message) as error:
        make(kind, settings, Sampling()).step(batch_of())
    assert "Sampling" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_cannot_be_built_is_rejected():
    with pytest.raises(InputError, match="bounded Box"):
        vla_policy(Known(), OBSERVATION, spaces.Box(-np.inf, np.inf, (2,), np.float32), SMALL)
    with pytest.raises(InputError, match="chunk_length"):
        vla_policy(gpt(chunk_length=4), OBSERVATION, UNIT, SMALL)
    config = DatasetPolicyConfig(name="vla", vla_config=VLAConfig(model_class="gpt-vla"))
    with pytest.raises(InputError, match="num_seeds"):
        IQL.make_policy(OBSERVATION, UNIT, config, IQLSettings(), num_members=3)
    with pytest.raises(InputError, match="named streams; the dataset"):
        IQL.make_policy(UNIT, UNIT, config, IQLSettings(), where="the dataset")


# -- weights -----------------------------------------------------------------------------------------------------------


def test_weights_are_loaded_strictly():
    policy = vla_policy(gpt(), OBSERVATION, WIDE, SMALL)
    policy.observe({schema.OBSERVATION: {"proprio": torch.randn(50, 3) * 4}})
    other = vla_policy(gpt(), OBSERVATION, WIDE, SMALL)
    load_weights(other, policy.state_dict(), "run")
    td = rows()
    torch.testing.assert_close(other.get_value(td), policy.get_value(td))
    lacking = {name: value for name, value in policy.state_dict().items() if "byte_embedding" not in name}
    with pytest.raises(InputError, match=r"missing model\.byte_embedding"):
        load_weights(other, lacking, "run")


def test_the_model_goes_from_online_to_offline_and_back(caplog):
    online, offline = VLAPolicy(gpt()), vla_policy(gpt(), OBSERVATION, UNIT, SMALL)
    td = rows()
    assert online.complete_weights(online.state_dict()).keys() == online.state_dict().keys()
    assert offline.complete_weights(offline.state_dict()).keys() == offline.state_dict().keys()
    assert caplog.messages == []
    value = offline.get_value(td)
    load_weights(offline, online.state_dict(), "run")
    action = online.act(td.clone(), deterministic=True)[schema.ACTION]
    assert torch.equal(offline.act(td.clone(), deterministic=True)[schema.ACTION], action)
    assert torch.equal(offline.get_value(td), value)
    assert "V and the encoder of the critics start from new weights" in caplog.messages[-1]

    back = VLAPolicy(gpt(), normalize_reward=True)
    load_weights(back, offline.state_dict(), "run")
    assert torch.equal(back.act(td.clone(), deterministic=True)[schema.ACTION], action)
    assert "its own value starts from new weights" in caplog.messages[-1]


ROBOT = spaces.Box(np.array([-4.0, 0.5], np.float32), np.array([-2.0, 0.75], np.float32))  # such as a dataset's range


@pytest.mark.parametrize("head", ["gaussian", "token", "flow"])
@pytest.mark.parametrize("length", [1, 3])
def test_the_action_scale_goes_with_the_weights_from_offline_to_online_and_back(head, length):
    box = ROBOT if length == 1 else chunked(ROBOT)
    offline = vla_policy(tiny(head=head, chunk_length=length), OBSERVATION, box, SMALL)
    online = VLAPolicy(tiny(head=head, chunk_length=length))
    load_weights(online, offline.state_dict(), "run")
    back = vla_policy(tiny(head=head, chunk_length=length), OBSERVATION, box, SMALL)
    load_weights(back, online.state_dict(), "run")
    acted = []
    for policy in (offline, online, back):
        torch.manual_seed(3)
        acted.append(policy.act(rows()))
    # One distribution in the units of the environment: the same draw is the same action, with the same log-prob.
    for other in acted[1:]:
        assert torch.equal(other[schema.ACTION], acted[0][schema.ACTION])
        assert torch.equal(other[schema.LOG_PROB], acted[0][schema.LOG_PROB])
    first, *others = (policy.evaluate_actions(acted[0]) for policy in (offline, online, back))
    for scored in others:
        assert all(torch.equal(scored[name], first[name]) for name in ("log_prob", "entropy"))
    # An untrained model gives unit actions around 0, that is the middle of the range.
    middle = acted[0][schema.ACTION].detach().flatten(0, -2).mean(0)
    assert abs(middle[0] + 3) < 1.5
    assert abs(middle[1] - 0.625) < 0.3


def test_the_density_of_a_scaled_policy_is_one_in_the_environments_units():
    policy = VLAPolicy(tiny(chunk_length=1))
    policy.set_scale(torch.tensor([-3.0, 0.625]), torch.tensor([1.0, 0.125]))
    td = policy.act(rows(), deterministic=True)
    own, common = policy.model.head.deviations
    assert not common.any()
    # The density of N(0, (w σ)²) at its mean is 1 / (w σ √2π) in each of the two dims.
    expected = -(own * torch.tensor([1.0, 0.125])).log().sum() - np.log(2 * np.pi)
    torch.testing.assert_close(td[schema.LOG_PROB], expected.expand(len(td)))
    torch.testing.assert_close(policy.evaluate_actions(td)["log_prob"], td[schema.LOG_PROB], atol=1e-4, rtol=0)


def test_padded_dims_add_nothing_to_the_density_of_a_scaled_policy():
    policy = VLAPolicy(tiny(chunk_length=1))
    td = rows()
    td.set(schema.ACTION_MASK, torch.tensor([True, False]).expand(len(td), 2))
    before = policy.act(td.clone(), deterministic=True)[schema.LOG_PROB]
    policy.set_scale(torch.zeros(2), torch.tensor([2.0, 100.0]))
    after = policy.act(td.clone(), deterministic=True)[schema.LOG_PROB]
    torch.testing.assert_close(after, before - np.log(2.0))


def test_weights_from_before_policies_had_a_scale_act_in_the_environments_units():
    policy, other = VLAPolicy(gpt()), VLAPolicy(gpt())
    old = {name: value for name, value in policy.state_dict().items() if name not in ("center", "width")}
    other.set_scale(torch.full((2,), 5.0), torch.full((2,), 7.0))
    load_weights(other, old, "run")
    assert other.is_unit
    td = rows()
    action = policy.act(td.clone(), deterministic=True)[schema.ACTION]
    assert torch.equal(other.act(td.clone(), deterministic=True)[schema.ACTION], action)


def test_a_policy_around_a_model_that_does_not_state_its_action_dim_takes_a_scale():
    policy = VLAPolicy(Known())
    assert policy.step_dim is None
    weights = {**policy.state_dict(), "center": torch.tensor([1.0, 2.0]), "width": torch.tensor([3.0, 4.0])}
    load_weights(policy, weights, "run")
    assert policy.center.tolist() == [1.0, 2.0]
    assert not policy.is_unit


def test_a_model_of_another_shape_is_named():
    offline = vla_policy(gpt(), OBSERVATION, UNIT, SMALL)
    other = VLAPolicy(gpt(language_model="gpt-tiny", max_instruction_length=32))
    with pytest.raises(InputError, match=r"model\.instruction_position is \(32, 96\), expected \(64, 96\)"):
        load_weights(offline, other.state_dict(), "run")
