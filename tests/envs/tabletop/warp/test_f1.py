"""The F1 environments on Warp have the histories of those on the CPU."""

import numpy as np
import pytest

from deft.config.settings import EnvConfig
from deft.envs.f1 import ContactEnv
from deft.envs.make import make_tensor_env, make_vector_env
from deft.errors import InputError

pytestmark = pytest.mark.usefixtures("compiled_kernels")


def make(vector: str, env_id: str, **task_config):
    config = EnvConfig(id=env_id, vector=vector, num_envs=2, kwargs={"task_config": task_config})
    return make_vector_env(config, device="cpu")


def assert_near(found, expected):
    assert list(found) == list(expected)
    for name, stream in expected.items():
        assert (found[name].shape, found[name].dtype) == (stream.shape, stream.dtype)
        if name.endswith("_rgb"):
            assert ((found[name].astype(float) - stream) ** 2).mean() < 255**2 / 10**2.5  # 25 dB
        else:
            np.testing.assert_allclose(found[name], stream, atol=1e-4)


@pytest.mark.usefixtures("gl")
@pytest.mark.parametrize("env_id", ["f1-teacher", "f1-student"])
def test_histories_are_those_of_the_cpu(env_id):
    settings = {"task_name": "pick", "max_steps": 3, "n_obs_img_steps": 2, "obs_img_stride": 2}
    settings["control_mode"] = "delta_ee" if env_id == "f1-teacher" else "delta_qpos"
    warp, cpu = (make(vector, env_id, **settings) for vector in ("warp", "sync"))
    np.testing.assert_array_equal(warp.action_mask, cpu.action_mask)
    random = np.random.default_rng(0)
    assert_near(warp.reset(seed=5), cpu.reset(seed=5))
    for step in range(1, 5):
        actions = random.uniform(-1.2, 1.2, (2, 32)).astype(np.float32)
        found, expected = warp.step(actions), cpu.step(actions)
        assert found.truncated.tolist() == expected.truncated.tolist() == [step == 3] * 2
        assert_near(found.observation, expected.observation)
        if step == 3:
            assert_near(found.final_observation, expected.final_observation)
    warp.close()


@pytest.mark.usefixtures("gl")
def test_contacts_are_counted_as_on_the_cpu():
    """The expert's grasp, replayed: contacts begin with it. Solvers differ, so that a step more or less may count."""
    settings = {"task_name": "pick", "max_steps": 40, "image_size": 16, "need_head_camera": True}
    cpu = ContactEnv(settings)
    cpu.reset(seed=5)
    config = EnvConfig(id="f1-student", vector="warp", num_envs=1, kwargs={"task_config": settings})
    warp = make_tensor_env(config, device="cpu")
    warp.reset([5])
    over, before, steps = False, None, 0
    while not over:
        if before is None and cpu._contacts:
            before = warp.call("take_contacts")  # of the way to the object
        action = cpu.expert_action().astype(np.float32)
        _, _, terminated, truncated, _ = cpu.step(action)
        warp.step(action[None])
        over, steps = terminated or truncated, steps + 1
    counted, expected = warp.call("take_contacts")[0] + before[0], cpu.take_contacts()
    assert before[0] <= 2  # the step that was just counted, and one of difference
    assert 3 <= expected < steps
    assert abs(counted - expected) <= 2
    assert warp.call("take_contacts") == [0]
    with pytest.raises(InputError, match="no method 'tally'"):
        warp.call("tally")
    warp.close()


def test_what_warp_cannot_do_is_one_line():
    with pytest.raises(InputError, match="simulates only the tabletop"):
        make("warp", "f1-teacher", world="my/Robot-v0")
    config = EnvConfig(id="f1-student", vector="warp")
    with pytest.raises(InputError, match="no action chunks"):
        make_vector_env(config, chunk_length=2, device="cpu")
