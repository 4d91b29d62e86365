"""Small policies with new weights and observations for them, and a server for them, for the tests of deployment."""

from __future__ import annotations

import contextlib
import threading
import time

import numpy as np
import torch
from gymnasium import spaces

from deft.config.algorithm_settings import DTSettings
from deft.config.deployment_settings import ServeConfig
from deft.config.settings import PolicyConfig
from deft.deployment.server import PolicyServer, listen
from deft.envs.layout import ObservationLayout
from deft.evaluation.loaded_policy import LoadedPolicy
from deft.models.actor_critic import ActorCritic
from deft.models.decision_transformer import DecisionTransformerPolicy
from deft.models.vla.policy import VLAPolicy
from deft.models.vla.tiny import TinyVLAModel
from deft.runs.policy_spaces import PolicySpaces

SIDE, CHUNK, TEXT = 16, 3, 24
VECTOR = spaces.Box(-9, 9, (3,), np.float32)
BOX = spaces.Box(np.float32([-0.5, -2.0]), np.float32([0.5, 1.0]))
IMAGES = spaces.Dict(
    {
        "rgb": spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8),
        "wrist_rgb": spaces.Box(0, 255, (3, SIDE, SIDE), np.uint8),
        "state": spaces.Box(-9, 9, (4,), np.float32),
        "instruction": spaces.Text(TEXT, charset="abcdefghijklmnopqrstuvwxyz "),
    }
)


def network(action=BOX, observation=VECTOR, **settings) -> LoadedPolicy:
    """An ActorCritic whose actions differ clearly between observations."""
    torch.manual_seed(0)
    policy = ActorCritic(observation, action, PolicyConfig(**settings))
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return LoadedPolicy(policy, PolicySpaces(observation, action))


def decision_transformer() -> LoadedPolicy:
    """A Decision Transformer, which reads the reward of its last action."""
    torch.manual_seed(0)
    policy = DecisionTransformerPolicy(VECTOR, BOX, DTSettings(context_length=3, embed_dim=16, n_layer=1, n_head=1))
    policy.target_return.fill_(5.0)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return LoadedPolicy(policy, PolicySpaces(VECTOR, BOX))


def tiny(chunk_length=CHUNK, **changes) -> LoadedPolicy:
    """vla-tiny with two cameras, in chunks."""
    torch.manual_seed(0)
    cameras = {"image_keys": ["rgb", "wrist_rgb"], "image_size": SIDE, "width": 16, "cell": 4}
    model = TinyVLAModel(**{"action_dim": 2, "chunk_length": chunk_length, "proprio_dim": 4, **cameras, **changes})
    observation = ObservationLayout(IMAGES).space
    chunk = spaces.Box(np.tile(BOX.low, (chunk_length, 1)), np.tile(BOX.high, (chunk_length, 1)))
    policy = VLAPolicy(
        model, observation_space=observation, action_space=chunk if chunk_length > 1 else BOX, config=PolicyConfig()
    )
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return LoadedPolicy(policy, PolicySpaces(observation, BOX))


def vector(step: int) -> np.ndarray:
    return np.random.default_rng(step).normal(size=3).astype(np.float32)


def scene(step: int) -> dict:
    random = np.random.default_rng(step)
    return {
        "rgb": random.integers(0, 256, (SIDE, SIDE, 3)).astype(np.uint8),
        "wrist_rgb": random.integers(0, 256, (3, SIDE, SIDE)).astype(np.uint8),
        "state": random.normal(size=4),
        "instruction": "lift the red cube",
    }


@contextlib.contextmanager
def served(policy: LoadedPolicy, **settings):
    """A server for a policy in a thread: the server and its port."""
    config = ServeConfig(path="-", port=0, **settings)
    listener = listen(config.host, 0)
    server = PolicyServer(policy, config)
    thread = threading.Thread(target=server.run, args=(listener,), daemon=True)
    thread.start()
    try:
        yield server, listener.getsockname()[1]
    finally:
        while not server.is_running and thread.is_alive():
            time.sleep(0.01)
        server.stop()
        thread.join(10)
        assert not thread.is_alive()
