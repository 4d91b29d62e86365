"""The settings classes: defaults, what constructors reject, and how a new algorithm is added."""

from __future__ import annotations

import pytest

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings, PPOSettings
from deft.config.loading import resolve
from deft.config.settings import AlgorithmConfig, PolicyConfig, RunConfig, VLAConfig
from deft.config.validation import Fraction, quoted, settings
from deft.errors import InputError


@settings
class ToySettings(AlgorithmSettings):
    """An algorithm that a later change adds."""

    tau: Fraction = 0.005


def test_a_new_algorithm_is_one_class_and_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ALGORITHM_SETTINGS, "toy", ToySettings)
    assert AlgorithmConfig(name="toy").cfg == ToySettings(tau=0.005)
    given: dict[str, float] = {"tau": 0.5}
    assert AlgorithmConfig(name="toy", cfg=given).cfg == ToySettings(tau=0.5)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"^cfg: .*is not a mapping of settings$"):
        AlgorithmConfig(name="toy", cfg=PPOSettings())


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: PPOSettings(gamma=1.5), "gamma: 1.5 is out of range; must be at most 1"),
        (lambda: PPOSettings(gama=0.9), "gama: unknown setting; did you mean 'gamma'?"),  # type: ignore[call-arg]
        (lambda: RunConfig(seed=True), "seed: True is not a whole number"),
        (lambda: PolicyConfig(name="vla"), "name 'vla' needs vla_config with at least model_class"),
        (
            lambda: PolicyConfig(vla_config=VLAConfig(model_class="a.B")),
            "vla_config is given but name is 'actor_critic'; write name 'vla' or leave it out",
        ),
        (lambda: AlgorithmConfig(name="ppoo"), f"name: 'ppoo' is not allowed; one of {quoted(ALGORITHM_SETTINGS)}"),
    ],
)
def test_constructors_raise_an_error_of_one_line(make: object, line: str) -> None:
    assert callable(make)
    with pytest.raises(InputError) as caught:
        make()
    assert str(caught.value) == line


@pytest.mark.parametrize(
    ("algorithm", "policy"),
    [
        ("sac", {"hidden_sizes": [64, 64], "activation": "tanh", "memory_num_layers": 1}),  # the defaults
        ("sac", {"hidden_dim": 32}),
        ("sac", {"name": "actor_critic", "hidden_sizes": [8], "hidden_dim": 32}),  # hidden_dim: of the critics
        ("ppo", {"name": "actor", "hidden_dim": 32}),
        ("ppo", {"critic_observation": ["secret"], "hidden_dim": 32}),  # of the value network
        ("ppo", {"name": "vla", "vla_config": {"model_class": "a.B"}, "hidden_dim": 32, "hidden_sizes": [8]}),
    ],
)
def test_settings_that_the_policy_uses_are_accepted(algorithm: str, policy: dict[str, object]) -> None:
    config = resolve({"algorithm": algorithm, "policy": policy})
    config.policy.reject_unused(config.policy.changed(), config.algorithm.cfg)


@pytest.mark.parametrize(
    ("algorithm", "policy", "advice"),
    [
        ("iql", {"hidden_sizes": [8]}, "use --hidden-dim and --num-layers"),
        ("iql", {"activation": "relu"}, "leave --activation out"),
        ("grpo", {"hidden_dim": 32}, "use --hidden-sizes"),
        ("ppo", {"num_layers": 3}, "use --hidden-sizes"),
        ("ppo", {"memory_num_layers": 2}, r"give --memory-hidden \(ppo, grpo\)"),
    ],
)
def test_settings_that_the_policy_does_not_use_raise_an_error(
    algorithm: str, policy: dict[str, object], advice: str
) -> None:
    (name,) = policy
    config = resolve({"algorithm": algorithm, "policy": policy})  # files of earlier runs may hold such settings
    with pytest.raises(InputError, match=rf"^policy\.{name}: .* has no effect: .*; {advice}$"):
        config.policy.reject_unused(config.policy.changed(), config.algorithm.cfg)
