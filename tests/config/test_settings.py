"""The settings classes: defaults, what constructors reject, and how a new algorithm is added."""

from __future__ import annotations

import pytest

from deft.config.algorithm_settings import ALGORITHM_SETTINGS, AlgorithmSettings, PPOSettings
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
