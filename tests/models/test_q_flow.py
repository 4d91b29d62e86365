"""A flow policy that acts by critics: its candidates, also those of a VLA model."""

import numpy as np
import torch
from gymnasium import spaces
from policies import vla_policy

from deft.models.q_flow import QFlowPolicy
from deft.models.vla.tiny import TinyVLAModel


def test_candidates_of_a_vla_model_are_those_of_its_flow():
    model = TinyVLAModel(
        head="flow", action_dim=3, chunk_length=2, image_keys=["rgb"], image_size=16, proprio_key=None,
        instruction_key=None, width=16,
    )  # fmt: skip
    observation_space = spaces.Dict({"rgb": spaces.Box(0, 255, (3, 16, 16), np.uint8)})
    base = vla_policy(model, observation_space, spaces.Box(-1.0, 1.0, (2, 3), np.float32))
    policy = QFlowPolicy(base, num_candidates=4)
    rows = {"rgb": torch.randint(0, 255, (3, 3, 16, 16), dtype=torch.uint8)}
    state = base.encode_to_act(rows)
    torch.manual_seed(0)
    features, actions = policy.candidates(state)
    torch.manual_seed(0)
    noise = torch.randn(12, 2, 3)  # sample i of state b is row 3 i + b
    expected = model.denoise({"rgb": rows["rgb"].repeat(4, 1, 1, 1)}, noise).flatten(1).clamp(-1, 1)
    torch.testing.assert_close(actions[0], expected)
    assert torch.equal(features[0], state.features[0].repeat(4, 1))
