"""VLAPolicy in the off-policy and offline algorithms: action chunks, their padding, and what acts."""

import copy

import pytest
import torch
from policies import BOX, OBSERVATION, SMALL, UNIT, Known, actor_policy, chunked, gpt, streams, tiny, vla_policy
from tensordict import TensorDict
from torch import nn

from deft import schema
from deft.algorithms.cql import CQL
from deft.algorithms.iql import IQL
from deft.algorithms.sac import SAC
from deft.algorithms.sft import SFT
from deft.algorithms.td3_bc import TD3BC
from deft.config.algorithm_settings import CQLSettings, IQLSettings, SACSettings, SFTSettings, TD3BCSettings
from deft.config.settings import DatasetPolicyConfig, VLAConfig
from deft.errors import InputError
from deft.models.building import make_policy
from deft.models.policy import Encoded, Policy
from deft.models.vla.policy import VLAPolicy


def batch_of_chunks(size: int = 5) -> dict:
    mask = torch.ones(size, 3, dtype=torch.bool)
    mask[0, 1:] = False  # the first one ends after one step
    return {
        schema.OBSERVATION: streams(size),
        schema.ACTION: torch.rand(size, 3, 2),
        schema.STEP_MASK: mask,
        schema.NEXT_REWARD: torch.rand(size),
        schema.NEXT_TERMINATED: torch.zeros(size),
        schema.DISCOUNT: torch.full((size,), 0.9),
        schema.NEXT_OBSERVATION: streams(size),
    }


# -- chunks, and a shared trunk ----------------------------------------------------------------------------------------


def test_a_chunk_is_one_action_to_the_algorithms():
    actor = vla_policy(tiny(), OBSERVATION, chunked(BOX), SMALL)
    assert (actor.action_dim, actor.chunk_length, actor.feature_dim) == (6, 3, actor.model.feature_dim)
    chunk = torch.tensor([[[2.0, 1.0], [-2.0, 0.0], [0.0, 0.5]]])
    assert actor.to_unit(chunk).tolist() == [[1, 1, -1, -1, 0, 0]]
    assert torch.equal(actor.from_unit(actor.to_unit(chunk)), chunk)
    td = actor.act(TensorDict({schema.OBSERVATION: TensorDict(streams(), [5])}, [5]))
    assert td[schema.ACTION].shape == (5, 3, 2)
    scored = actor.evaluate_actions(td)
    torch.testing.assert_close(scored["log_prob"], td[schema.LOG_PROB], rtol=0, atol=1e-4)
    torch.testing.assert_close(scored["value"], td[schema.VALUE])
    # Half widths 2 and ½ in each step: Σ log is 0, so the density is that of the unit actions.
    unit = VLAPolicy(actor.model).evaluate_actions(
        td.copy().set(schema.ACTION, actor.to_unit(td["action"]).view(5, 3, 2))
    )
    torch.testing.assert_close(scored["log_prob"], unit["log_prob"])


def test_critics_on_the_models_trunk_leave_it_to_the_policy():
    actor = vla_policy(tiny(), OBSERVATION, chunked(UNIT), SMALL)
    assert not list(actor.encoder_parameters())
    own = {id(parameter) for parameter in actor.actor_parameters()}
    values = {id(parameter) for parameter in actor.value_parameters()}
    assert not own & values
    assert own | values == {id(parameter) for parameter in actor.parameters()}
    state = actor.encode(streams())
    assert not state.features.requires_grad  # what critics and V read
    assert state.shared_features is not None
    assert state.shared_features.requires_grad
    algorithm = IQL(actor, IQLSettings(temperature=0.0))  # every weight is 1: the policy's loss is that of SFT
    batch = batch_of_chunks()
    before = {name: value.clone() for name, value in actor.state_dict().items()}
    observations = TensorDict(batch[schema.OBSERVATION], [5])
    with torch.no_grad():
        expected = actor.model.imitation_loss(observations, batch[schema.ACTION], batch[schema.STEP_MASK]).mean()
    torch.testing.assert_close(algorithm.step(batch)["policy_loss"], expected)
    changed = {name for name, value in actor.state_dict().items() if not torch.equal(value, before[name])}
    assert {"model.head.out.weight", "model.trunk.0.weight", "model.value_head.4.bias"} <= changed


def test_offline_training_reads_the_labels_and_learns_to_predict_them(monkeypatch):
    """What IQL learns of acting and of values stands on where things are, not on where they are found so far."""
    monkeypatch.setattr("deft.models.vla.tiny.LABEL_NOISE", 0.0)
    model = tiny(bottleneck=2, places_key="places", places_dim=2)
    actor = vla_policy(model, OBSERVATION, chunked(UNIT), SMALL)
    batch = batch_of_chunks()
    shown = batch[schema.OBSERVATION]
    seen, other = (TensorDict({**shown, "places": torch.full((5, 2), value)}, [5]) for value in (0.1, 0.3))
    state = actor.encode(seen)
    assert not torch.equal(state.features, actor.encode(other).features)
    torch.testing.assert_close(state.auxiliary_loss[0], model.auxiliary_loss(seen).mean())
    with torch.no_grad():  # what it acts on is what it finds, whatever the labels say
        assert torch.equal(model.features(seen), model.features(other))
    # Imitation does the same: every weight of IQL 1, its two losses are the one of SFT
    batch[schema.OBSERVATION] = batch[schema.NEXT_OBSERVATION] = {**shown, "places": seen["places"]}
    with torch.no_grad():
        expected = model.imitation_loss(seen, batch[schema.ACTION], batch[schema.STEP_MASK]).mean()
    metrics = IQL(actor, IQLSettings(temperature=0.0)).step(batch)
    torch.testing.assert_close(metrics["policy_loss"] + metrics["auxiliary_loss"], expected)


def test_iql_may_teach_seeing_faster_than_acting():
    """Three step sizes: of the critics, of the policy, and of what the labels teach."""
    model = tiny(bottleneck=2, places_key="places", places_dim=2)
    actor, batch = vla_policy(model, OBSERVATION, chunked(UNIT), SMALL), batch_of_chunks()
    for key in (schema.OBSERVATION, schema.NEXT_OBSERVATION):
        batch[key] = {**batch[key], "places": torch.rand(5, 2)}
    rates = {"learning_rate": 3e-3, "policy_learning_rate": 1e-4, "auxiliary_learning_rate": 1e-2}
    algorithm = IQL(actor, IQLSettings(**rates, weight_decay=0.0))
    before = {name: value.clone() for name, value in actor.named_parameters()}
    algorithm.progress = 0.5
    algorithm.schedule()
    algorithm.step(batch)
    # Adam's first step is its step size wherever there is a gradient; by then both of the policy's have fallen by half
    for part, rate in (("trunk.0.weight", 5e-5), ("found.5.bias", 5e-3), ("value_head.4.bias", 3e-3)):
        moved = (actor.get_parameter(f"model.{part}") - before[f"model.{part}"]).abs().max()
        assert float(moved.detach()) == pytest.approx(rate, rel=0.02)
    twin = IQL(copy.deepcopy(actor), IQLSettings(**rates, weight_decay=0.0))
    twin.load_state_dict(copy.deepcopy(algorithm.state_dict()))
    for one in (algorithm, twin):
        one.progress = 0.6
        one.schedule()
        torch.manual_seed(0)
        one.step(batch)
    for own, other in zip(actor.parameters(), twin.policy.parameters(), strict=True):
        assert torch.equal(own, other)
    without = IQL(copy.deepcopy(actor), IQLSettings())
    with pytest.raises(InputError, match="auxiliary_learning_rate was 0 in this run"):
        algorithm.load_state_dict(without.state_dict())
    with pytest.raises(InputError, match="auxiliary_learning_rate was above 0 in this run"):
        without.load_state_dict(algorithm.state_dict())


def test_iql_clones_what_its_start_did_about_what_that_saw():
    """Actions of its own episodes depend on the positions that it predicted then, not on its better ones now."""
    model = tiny(bottleneck=2, places_key="places", places_dim=2)
    actor, batch = vla_policy(model, OBSERVATION, chunked(UNIT), SMALL), batch_of_chunks()
    for key in (schema.OBSERVATION, schema.NEXT_OBSERVATION):
        batch[key] = {**batch[key], "places": torch.rand(5, 2)}
    algorithm = IQL(actor, IQLSettings(temperature=0.0, position_source="start"))  # every weight is 1
    observations = TensorDict(batch[schema.OBSERVATION], [5])
    chunks = batch[schema.ACTION], batch[schema.STEP_MASK]
    with torch.no_grad():
        expected = model.imitation_loss(observations, *chunks, features=model.features(observations)).mean()
        model.found[-1].bias += 1.0  # now it sees otherwise
        otherwise = model.imitation_loss(observations, *chunks, features=model.features(observations)).mean()
    assert not torch.isclose(otherwise, expected)
    twin = IQL(copy.deepcopy(actor), algorithm.settings)  # starts from this encoder
    saved = copy.deepcopy(algorithm.state_dict())
    metrics = algorithm.step(batch)
    torch.testing.assert_close(metrics["policy_loss"], expected)
    assert metrics["auxiliary_loss"] > 0  # and the labels teach it to see, as ever
    twin.load_state_dict(saved)
    assert torch.equal(twin.step(batch)["policy_loss"], metrics["policy_loss"])
    assert all(map(torch.equal, actor.parameters(), twin.policy.parameters()))
    plain = IQL(actor, IQLSettings())
    for one, other, was, now in ((twin, plain, "labels", "start"), (plain, twin, "start", "labels")):
        with pytest.raises(InputError, match=f"position_source was '{was}' in this run and is '{now}' now"):
            one.load_state_dict(other.state_dict())


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (tiny(places_key="places", places_dim=2), "is for a model with a bottleneck"),
        (tiny(bottleneck=8), "replaces labels, and the dataset has none"),
        (Known(), "is for vla-tiny .* Known predicts no object positions"),
    ],
)
def test_a_model_without_object_positions_is_an_error(model, reason):
    actor, batch = vla_policy(model, OBSERVATION, chunked(UNIT), SMALL), batch_of_chunks()
    with pytest.raises(InputError, match=reason):
        IQL(actor, IQLSettings(position_source="start")).step(batch)
    with pytest.raises(InputError, match="give one with model_path"):
        IQL(actor, IQLSettings(position_source="start")).prepare(None, None, fresh=True)


def test_sft_on_chunks_is_the_models_own_loss():
    actor, batch = vla_policy(tiny(), OBSERVATION, chunked(UNIT), SMALL), batch_of_chunks()
    with torch.no_grad():
        observations = TensorDict(batch[schema.OBSERVATION], [5])
        expected = actor.model.imitation_loss(observations, batch[schema.ACTION], batch[schema.STEP_MASK]).mean()
    torch.testing.assert_close(SFT(actor).step(batch)["bc_loss"], expected)


def test_an_actor_made_for_single_steps_is_made_for_their_chunks():
    config = DatasetPolicyConfig(
        name="vla", chunk_length=3, vla_config=VLAConfig(model_class="vla-tiny", model_config={"width": 16})
    )
    for space in (UNIT, chunked(UNIT)):  # a dataset's, and the environment's
        actor = make_policy(config, OBSERVATION, space, "here", weights_follow=True)
        assert (actor.chunk_length, actor.action_shape) == (3, (3, 2))


# -- padding -----------------------------------------------------------------------------------------------------------


class KnownChunks(Known):
    """A user's model of chunks: its own `forward` and `evaluate_actions`, and no word for padding."""

    def _distribution(self, observations):
        mean = self.mean.expand(len(observations), 3, 2)
        return torch.distributions.Normal(mean, self.log_std.exp().expand_as(mean))

    def evaluate_actions(self, observations, actions):
        log_prob, entropy = super().evaluate_actions(observations, actions)
        return log_prob.sum(-1), entropy.sum(-1)


class SamplingChunks(KnownChunks):
    """The same without `deterministic`."""

    def forward(self, observations):
        return self._distribution(observations).sample()


def actor_of(make_model) -> Policy:
    """A policy for chunks of 3 steps: around a model, or, by the name of its distribution, the built-in one."""
    torch.manual_seed(0)
    space = chunked(UNIT)
    if isinstance(make_model, str):
        return actor_policy(
            OBSERVATION, space, DatasetPolicyConfig(hidden_dim=8, encoder_dim=8, log_std_init=-1.5), make_model
        )
    return vla_policy(make_model(), OBSERVATION, space, SMALL)


PADDED = {
    "Actor gaussian": ("gaussian", ("nll", "mse")),
    "Actor tanh_gaussian": ("tanh_gaussian", ("nll", "mse")),
    "vla-tiny gaussian": (tiny, ("nll", "mse")),
    "vla-tiny squared": (lambda: tiny(imitation="squared"), ("nll",)),
    "vla-tiny token": (lambda: tiny(head="token"), ("nll",)),
    "vla-tiny flow": (lambda: tiny(head="flow"), ("nll",)),
    "vla-tiny switch": (lambda: tiny(switch_dims=[1]), ("nll",)),
    "gpt-vla": (lambda: gpt(chunk_length=3), ("nll", "mse")),
    "a user's model": (KnownChunks, ("nll", "mse")),
    "a user's model that samples": (SamplingChunks, ("nll",)),
}


@pytest.mark.parametrize(("name", "loss"), [(name, loss) for name, (_, losses) in PADDED.items() for loss in losses])
def test_what_stands_in_padded_steps_is_not_trained_on(name, loss):
    policy = actor_of(PADDED[name][0])
    batch = batch_of_chunks()
    observation, mask = batch[schema.OBSERVATION], batch[schema.STEP_MASK]
    parameters = [parameter for parameter in policy.parameters() if parameter.requires_grad]

    def found(action: torch.Tensor) -> list[torch.Tensor]:
        torch.manual_seed(1)
        losses = policy.imitation(observation, action.flatten(1).unsqueeze(0), mask, loss)
        gradients = torch.autograd.grad(losses["bc_loss"].sum(), parameters, allow_unused=True)
        return [value.detach() for value in (*losses.values(), *gradients) if value is not None]

    action = batch[schema.ACTION]
    garbage, other = action.clone(), action.clone()
    garbage[~mask] = torch.tensor([0.9, -0.9])
    other[0, 0] = -0.7  # a step that is real
    expected = found(action)
    for one, same in zip(found(garbage), expected, strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(found(other)[0], expected[0])


def test_cloning_a_users_chunks_has_the_gradient_of_their_real_steps():
    """What is scored in the padding is drawn from the model: in the mean over many rows its gradient is 0."""
    policy, count = actor_of(lambda: KnownChunks(0.2, 0.5)), 50_000
    mask = torch.tensor([True, True, False]).expand(count, 3)
    state = Encoded(TensorDict({}, [count]), torch.zeros(1, count, 8), step_mask=mask)
    unit = torch.full((1, count, 6), 0.3)
    policy.imitation_loss(state, unit).mean().backward()
    # Two real steps at z = (0.3 − 0.2) / 0.5: d/dμ = −z / σ and d/d log σ = 1 − z² each; the drawn one's deviation over
    # 50,000 rows is 2 / √50,000 = 0.009 and √2 / √50,000 = 0.006.
    torch.testing.assert_close(policy.model.mean.grad, torch.full((2,), -0.8), rtol=0, atol=0.04)
    torch.testing.assert_close(policy.model.log_std.grad, torch.full((2,), 1.92), rtol=0, atol=0.03)


class DependentChunks(KnownChunks):
    """Each step adds `rho` times the step before to its mean; 0: steps are independent."""

    def __init__(self, rho: float) -> None:
        super().__init__()
        self.rho = nn.Parameter(torch.tensor(rho))

    def evaluate_actions(self, observations, actions):
        before = torch.cat([torch.zeros_like(actions[:, :1]), actions[:, :-1]], 1)
        return super().evaluate_actions(observations, actions - self.rho * before)


def test_padding_of_a_model_whose_steps_depend_on_each_other_is_an_error():
    policy, batch = actor_of(lambda: DependentChunks(0.0)), batch_of_chunks()
    mask, action = batch[schema.STEP_MASK], batch[schema.ACTION].flatten(1).unsqueeze(0)
    state = policy.encode(batch[schema.OBSERVATION])._replace(step_mask=mask)
    policy.imitation_loss(state, action)
    with torch.no_grad():
        policy.model.rho.fill_(0.5)  # learned: the second padded batch is checked again
    with pytest.raises(InputError, match=r"DependentChunks: the steps of a chunk depend on each other.*`step_mask`"):
        policy.imitation_loss(state, action)
    policy.imitation_loss(state._replace(step_mask=None), action)  # no padding, no error


@pytest.mark.parametrize("changes", [{"head": "token"}, {"head": "flow"}, {"switch_dims": [1]}])
def test_heads_without_a_mean_are_not_trained_by_a_loss_of_it(changes):
    """The mean of two demonstrated modes is an action that nobody demonstrated; a switch has no gradient."""
    policy, batch = actor_of(lambda: tiny(**changes)), batch_of_chunks()
    with pytest.raises(InputError, match="TinyVLAModel has no mean action"):
        policy.mean(policy.encode(batch[schema.OBSERVATION]))
    for kind, settings in ((SFT, SFTSettings(loss="mse")), (TD3BC, TD3BCSettings())):
        with pytest.raises(InputError, match=rf"policy: {kind.name}.*TinyVLAModel has no mean .*loss log_prob"):
            kind(policy, settings)


def test_td3_bc_clones_real_steps_alone():
    policy, batch = actor_of(tiny), batch_of_chunks()
    algorithm = TD3BC(policy, TD3BCSettings(policy_delay=1))
    state = policy.encode(batch[schema.OBSERVATION])._replace(step_mask=batch[schema.STEP_MASK])
    action = batch[schema.ACTION].flatten(1).unsqueeze(0)
    with torch.no_grad():
        error = (policy.mean(state) - action).square().view(5, 3, 2) * batch[schema.STEP_MASK].unsqueeze(-1)
    metrics = algorithm._improve(state, action)
    torch.testing.assert_close(metrics["bc_loss"], error.mean())


# -- what acts is what learns ------------------------------------------------------------------------------------------

ACTING = {
    "Actor gaussian": "gaussian",
    "Actor tanh_gaussian": "tanh_gaussian",
    "vla-tiny gaussian": lambda: tiny(log_std_init=-2.5, log_common_init=-1.5),
    "gpt-vla": lambda: gpt(chunk_length=3, log_std_init=-1.5),
    "a user's model": lambda: KnownChunks(0.2, 0.3),
}


def densities(policy, observation, unit):
    """Log-densities of unit actions [n, B, K · A] by `evaluate_actions`, which scores what was acted: [n, B]."""
    count, batch = unit.shape[:2]
    td = TensorDict({schema.OBSERVATION: TensorDict(observation, [batch]).repeat(count)}, [count * batch])
    scored = policy.evaluate_actions(td.set(schema.ACTION, policy.from_unit(unit.flatten(0, 1))))
    scale = policy if isinstance(policy, VLAPolicy) else policy.head
    return (scored["log_prob"] + scale.width.log().sum()).view(count, batch)


@pytest.mark.parametrize("name", ACTING)
def test_draws_in_learning_have_the_distribution_that_acts(name):
    policy, observation, count = actor_of(ACTING[name]), streams(1), 1500
    one = TensorDict({schema.OBSERVATION: TensorDict(observation, [1])}, [1])
    with torch.no_grad():
        state = policy.encode(observation)
        drawn, log_prob = (part[:, 0] for part in policy.sample(state, count))  # [n, 1, K · A], [n, 1]
        acted = policy.to_unit(policy.act(one.repeat(count))[schema.ACTION]).view(count, -1).clamp(-1.0, 1.0)
        learned, deviation = drawn[:, 0].clamp(-1.0, 1.0), acted.std(0)
        # Means of 1,500 draws differ by √(2/1500) = 0.037 deviations, correlations by at most as much.
        assert float(((learned.mean(0) - acted.mean(0)) / deviation).abs().max()) < 0.16
        assert float((learned.std(0) / deviation - 1).abs().max()) < 0.12
        assert float((torch.corrcoef(learned.T) - torch.corrcoef(acted.T)).abs().max()) < 0.16
        inside = (drawn.abs() < 0.999).all(-1)[:50]  # what was clipped keeps the density that it had before
        assert int(inside.sum()) > 20
        scored = densities(policy, observation, drawn[:50])
        torch.testing.assert_close(log_prob[:50][inside], scored[inside], rtol=0, atol=2e-3)
        known = torch.stack([policy.log_prob(state, unit.unsqueeze(0))[0] for unit in drawn[:10]])
        torch.testing.assert_close(known[inside[:10]], scored[:10][inside[:10]], rtol=0, atol=1e-4)
        # td3-bc trains the action that an evaluation plays
        played = policy.to_unit(policy.act(one, deterministic=True)[schema.ACTION]).view(1, -1)
        torch.testing.assert_close(policy.mean(state)[0], played.clamp(-1.0, 1.0))


def test_steps_of_a_chunk_are_correlated_in_cql_as_they_are_in_acting(monkeypatch):
    """c² / (σ² + c²) = e⁻³ / (e⁻⁵ + e⁻³) = 0.88 between the steps of a dim, 0 between dims."""
    policy = actor_of(ACTING["vla-tiny gaussian"])
    algorithm, seen = CQL(policy, CQLSettings(cql_samples=1000)), []
    monkeypatch.setattr(algorithm, "_penalised", lambda *given: seen.extend(given) or CQL._penalised(algorithm, *given))
    algorithm.step(batch_of_chunks(2))
    for drawn in (seen[0], seen[2]):  # at the state, and at the next one
        found = torch.corrcoef(drawn[:, 0, 0].detach().view(-1, 3, 2)[:, :, 0].T)
        torch.testing.assert_close(found, 0.88 + 0.12 * torch.eye(3), rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", [SAC, CQL])
@pytest.mark.parametrize("model", ["vla-tiny gaussian", "gpt-vla", "a user's model"])
def test_soft_policies_pay_for_the_density_that_acts(kind, model, monkeypatch):
    """The log π in SAC's and CQL's policy loss is that of `evaluate_actions`, at the draws that the critics judge."""
    policy, batch = actor_of(ACTING[model]), batch_of_chunks()
    settings = SACSettings(random_shift=0) if kind is SAC else CQLSettings(cql_samples=3)
    algorithm, seen, sample = kind(policy, settings), [], policy.sample
    monkeypatch.setattr(policy, "sample", lambda *given: seen.append(sample(*given)) or seen[-1])
    observations = (schema.OBSERVATION, schema.NEXT_OBSERVATION)
    expected = []
    before = copy.deepcopy(policy)
    algorithm.step(batch)
    for drawn, log_prob in seen:
        units = drawn[:, 0].detach()
        known = [densities(before, batch[key], units) for key in observations]
        found = [bool(((one - log_prob[:, 0]).abs() < 2e-3)[(units.abs() < 1).all(-1)].all()) for one in known]
        expected.append(any(found))
    assert len(expected) >= 2
    assert all(expected)


def test_an_anchor_is_compared_by_densities():
    """KL(π ‖ π₀) of a policy and its copy is 0, whatever loss cloning has, and wherever draws are clipped."""
    policy = actor_of(lambda: tiny(log_std_init=0.5))
    state = policy.encode(streams())
    assert float(policy.divergence(state, copy.deepcopy(policy), state).detach().abs().max()) < 1e-4


@pytest.mark.parametrize("head", ["token", "flow"])
@pytest.mark.parametrize("kind", [SAC, CQL])
def test_heads_without_a_density_of_differentiable_draws_are_named(head, kind):
    with pytest.raises(InputError, match=f"policy: {kind.name} trains samples .* TinyVLAModel has no differentiable"):
        kind(actor_of(lambda: tiny(head=head)))
