"""From settings to workers: errors before a Ray is started."""

import pytest

from deft.config.loading import resolve
from deft.errors import InputError
from deft.training.cluster import connection
from deft.training.cluster.building import make_cluster_env


def test_an_unknown_environment_is_told_before_ray_starts(monkeypatch):
    def connect(*_):
        raise AssertionError("Ray was started")

    monkeypatch.setattr(connection, "connect", connect)
    config = {"algorithm": {"name": "ppo"}, "env": {"id": "CartPool-v1"}, "cluster": {"collectors": "ray"}}
    with pytest.raises(InputError, match=r"env\.id: there is no environment 'CartPool-v1'"):
        make_cluster_env(resolve(config), 1, 0.99)
    config["env"] = {"id": "CartPole-v1"}
    with pytest.raises(AssertionError, match="Ray was started"):
        make_cluster_env(resolve(config), 1, 0.99)
