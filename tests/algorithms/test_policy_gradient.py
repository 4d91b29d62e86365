import torch
from tensordict import TensorDict

from deft.algorithms.policy_gradient import Epochs


def test_a_state_holds_one_tensor_for_each_metric_and_is_restored():
    """The last minibatch is smaller, and some metrics are single numbers."""
    losses = [
        {"loss": torch.tensor(float(size)), "log_ratio": torch.arange(2.0 * size).reshape(size, 2)}
        for size in (3, 3, 1)
    ]
    data = TensorDict({"reward": torch.ones(7)}, batch_size=[7])
    state = Epochs(data, losses, first=2, epoch=1, order=torch.arange(7), done=1).state_dict()
    assert state["losses"]["log_ratio"]["values"].shape == (14,)  # 2 · (3 + 3 + 1)
    restored = Epochs.from_state(state, torch.device("cpu"))
    assert (restored.first, restored.epoch, restored.done) == (2, 1, 1)
    for one, other in zip(losses, restored.losses, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_a_state_before_the_first_minibatch():
    state = Epochs(TensorDict({"reward": torch.ones(7)}, batch_size=[7])).state_dict()
    assert Epochs.from_state(state, torch.device("cpu")).losses == []
