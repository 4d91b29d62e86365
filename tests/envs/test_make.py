"""Making environments from a config: what works, and one clear line for what does not."""

import sys
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import gymnasium
import numpy as np
import pytest

from deft.config.settings import EnvConfig
from deft.envs import ActionChunk, SerialVectorEnv, make_env, make_vector_env, wrap
from deft.envs.adapters.gymnasium_vector import GymnasiumVectorEnv
from deft.errors import InputError

MakeEnv = Callable[..., gymnasium.Env]


def error_of(**settings: object) -> str:
    with pytest.raises(InputError) as caught:
        make_env(EnvConfig(**settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_bare_environment_with_its_own_or_another_time_limit() -> None:
    env = make_env(EnvConfig(id="CartPole-v1"))
    assert env.spec.max_episode_steps == 500
    assert isinstance(env, gymnasium.wrappers.TimeLimit)
    assert env.env is env.unwrapped  # no checker, no order enforcing: they cost time at every step
    assert make_env(EnvConfig(id="CartPole-v1", max_episode_steps=7)).spec.max_episode_steps == 7


@pytest.mark.parametrize("vector", ["sync", "process"])
@pytest.mark.parametrize("env_id", ["CartPole-v1", "driving"])  # driving steps all environments at once
def test_a_time_limit_is_a_setting_or_an_argument(env_id: str, vector: str) -> None:
    setting, argument = {"max_episode_steps": 2}, {"kwargs": {"max_episode_steps": 2}}
    for given in (setting, argument, setting | argument):
        with closing(make_vector_env(EnvConfig(id=env_id, vector=vector, num_workers=1, **given))) as env:
            env.reset(seed=0)
            action = env.action_space.sample()[None]
            assert [bool(env.step(action).truncated[0]) for _ in range(2)] == [False, True]


def test_null_is_the_default_of_the_environment() -> None:
    kwargs = {"image_size": None, "max_episode_steps": None, "num_targets": 2}
    env = make_env(EnvConfig(id="reach", kwargs=kwargs))
    assert env.spec.kwargs == {"num_targets": 2}
    assert env.spec.max_episode_steps == 50


def test_kwargs_and_render_mode() -> None:
    env = make_env(EnvConfig(id="Pendulum-v1", kwargs={"g": 3.0}), render_mode="rgb_array")
    assert env.unwrapped.g == 3.0
    assert env.render_mode == "rgb_array"


def test_short_name() -> None:
    assert gymnasium.spec("deft/Reach-v0").max_episode_steps == 50
    assert "deft/Reach-v0" in error_of(id="reach", kwargs={"no_such_argument": 1})


def test_vector_kinds_and_numbers() -> None:
    env = make_vector_env(EnvConfig(id="CartPole-v1", num_envs=3))
    assert isinstance(env, SerialVectorEnv)
    assert env.num_envs == 3
    assert len({id(item) for item in env.envs}) == 3
    assert make_vector_env(EnvConfig(id="CartPole-v1", num_envs=3), num_envs=1).num_envs == 1


def test_chunks() -> None:
    env = make_vector_env(EnvConfig(id="Pendulum-v1", num_envs=2), chunk_length=4, gamma=0.9)
    assert env.chunk_length == 4
    assert env.action_space.shape == (4, 1)
    assert isinstance(make_env(EnvConfig(id="Pendulum-v1"), chunk_length=2), ActionChunk)
    with pytest.raises(InputError, match="envpool cannot run action chunks"):
        make_vector_env(EnvConfig(id="Pendulum-v1", vector="envpool"), chunk_length=2)


def test_warp_simulates_only_the_tabletop() -> None:
    message = "warp simulates tabletop, f1-teacher, f1-student; reach runs with sync or process"
    with pytest.raises(InputError, match=message):
        make_vector_env(EnvConfig(id="reach", vector="warp"))
    with pytest.raises(InputError, match="rename_streams: not with"):
        make_vector_env(EnvConfig(id="tabletop", vector="warp", rename_streams={"top": "head_rgb"}))


def test_warp_names_the_extra_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "warp", None)
    with pytest.raises(InputError, match=r'env.vector: warp: warp is not installed: pip install "deft\[warp\]"'):
        make_vector_env(EnvConfig(id="tabletop", vector="warp"))


@pytest.mark.parametrize(
    ("env_id", "advice"),
    [
        ("CartPole-v9", "use CartPole-v1"),
        ("HalfCheetah-v1", "use HalfCheetah-v5"),
        ("HalfCheetah-v3", "use HalfCheetah-v5"),  # registered, but moved to another package
        ("Cartpole-v1", "CartPole-v1"),
        ("halfcheetah-v5", "HalfCheetah-v5"),
        ("deft/Rech-v0", "deft/Reach-v0"),
        ("ALE/Pong-v5", "ale_py:ALE/Pong-v5"),
        ("xyzzy", "my_package:MyEnv-v0"),
        ("CartPole v1", "CartPole-v1"),
    ],
)
def test_unknown_id_gives_the_one_to_use(env_id: str, advice: str) -> None:
    message = error_of(id=env_id)
    assert env_id in message
    assert advice in message


MUJOCO = (
    *("Ant", "HalfCheetah", "Hopper", "Humanoid", "HumanoidStandup", "InvertedDoublePendulum", "InvertedPendulum"),
    *("Pusher", "Reacher", "Swimmer", "Walker2d"),
)


@pytest.mark.parametrize("name", MUJOCO)
def test_every_old_mujoco_id_works_or_gives_the_one_to_use(name: str) -> None:
    for version in (2, 3, 4):
        env_id = f"{name}-v{version}"
        try:
            make_env(EnvConfig(id=env_id)).close()
        except InputError as error:
            message = str(error)
            assert env_id in message
            assert message.endswith(f"use {name}-v5")
            assert "\n" not in message
        else:
            assert version == 4  # which Gymnasium 1.4 still has, but for Pusher


def test_highway_ids_need_no_module() -> None:
    pytest.importorskip("highway_env")
    settings = {"config": {"vehicles_count": 3, "duration": 3}}
    env = make_vector_env(EnvConfig(id="highway-fast-v0", num_envs=2, kwargs=settings))
    assert env.reset(seed=0).shape == (2, 5, 5)  # a table: five vehicles, five numbers each
    assert env.action_space == gymnasium.spaces.Discrete(5)
    assert np.isfinite(env.step(np.array([0, 4])).reward).all()
    env.close()
    assert "use highway-v0" in error_of(id="highway-v7")


def test_highway_that_is_not_installed_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "highway_env", None)
    monkeypatch.delitem(gymnasium.registry, "merge-v0", raising=False)
    message = error_of(id="merge-v0")
    assert message == 'env.id: merge-v0: highway_env is not installed: pip install "deft[highway]"'


def test_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("Box2D", "jax"):
        monkeypatch.setitem(sys.modules, name, None)  # missing, whether or not it is installed
    for name in ("gymnasium.envs.box2d", "gymnasium.envs.phys2d", "gymnasium.envs.phys2d.cartpole"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert "gymnasium[box2d]" in error_of(id="LunarLander-v3")
    assert 'pip install "gymnasium[jax]"' in error_of(id="phys2d/CartPole-v1")


def test_wrong_kwargs() -> None:
    message = error_of(id="CartPole-v1", kwargs={"gravity": 3})
    assert "env.kwargs {'gravity': 3} do not fit CartPole-v1" in message
    assert "unexpected keyword argument 'gravity'" in message
    assert "xml" in error_of(id="Hopper-v5", kwargs={"xml_file": "/no/such/file.xml"})


def test_module_ids(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "registers_one.py").write_text(
        "import gymnasium\n"
        "gymnasium.register(id='ByModule-v0', entry_point='gymnasium.envs.classic_control:PendulumEnv')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert make_env(EnvConfig(id="registers_one:ByModule-v0")).spec.id == "ByModule-v0"
    del gymnasium.registry["ByModule-v0"]
    assert "module 'no_such_module' cannot be imported" in error_of(id="no_such_module:MyEnv-v0")


def test_wrap_takes_what_a_user_has(make_counting_env: MakeEnv) -> None:
    single = wrap(make_counting_env())
    assert single.num_envs == 1
    assert wrap(single) is single
    assert wrap([make_counting_env(), make_counting_env()]).num_envs == 2
    assert wrap(make_counting_env(), chunk_length=3).chunk_length == 3
    vector = gymnasium.vector.SyncVectorEnv(
        [make_counting_env] * 2, autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP
    )
    assert isinstance(wrap(vector), GymnasiumVectorEnv)
    for wrong in ("CartPole-v1", [], [1], None):
        with pytest.raises(InputError):
            wrap(wrong)
    with pytest.raises(InputError, match="chunk_length 1, but the policy has 2"):
        wrap(single, chunk_length=2)


def test_copies_are_independent() -> None:
    env = make_vector_env(EnvConfig(id="CartPole-v1", num_envs=4))
    assert len({row.tobytes() for row in env.reset(seed=0)}) == 4
    assert env.reset(seed=1)[0].tobytes() != env.reset(seed=0)[0].tobytes()
    assert np.array_equal(env.reset(seed=2)[0], make_vector_env(EnvConfig(id="CartPole-v1")).reset(seed=2)[0])
