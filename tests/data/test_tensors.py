"""Conversion between arrays and tensors, and the check of log-probs."""

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from deft import schema
from deft.data.tensors import check_log_prob, policy_inputs, restore_generator, to_device, to_numpy, zero_rows
from deft.errors import RunError

CPU = torch.device("cpu")


def test_on_the_cpu_nothing_is_copied():
    tensor = torch.arange(3.0)
    assert np.shares_memory(to_numpy(tensor), tensor.numpy())
    assert to_device(tensor, CPU) is tensor
    array = np.arange(3.0)
    assert np.shares_memory(to_device(array, CPU).numpy(), array)


def test_tensors_with_gradients_can_be_read():
    assert to_numpy(torch.ones(2, requires_grad=True)).tolist() == [1, 1]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_values_survive_the_way_to_a_gpu_and_back():
    values = np.arange(1000, dtype=np.float32)
    assert np.array_equal(to_numpy(to_device(values, torch.device("cuda"))), values)


@pytest.mark.parametrize("observation", [np.zeros((4, 3)), {"a": np.zeros((4, 3)), "b": np.ones((4, 2), np.uint8)}])
def test_policy_inputs_have_one_row_for_each_environment(observation):
    td = policy_inputs(observation, CPU)
    assert td.batch_size == (4,)
    assert set(td.keys()) == {schema.OBSERVATION}
    found = td[schema.OBSERVATION]
    if isinstance(observation, dict):
        assert found["b"].dtype == torch.uint8
        found = found["a"]
    assert found.shape == (4, 3)


def test_policy_inputs_contain_what_is_given():
    memory, mask = torch.ones(2, 1, 3), torch.ones(2, 5, dtype=torch.bool)
    td = policy_inputs(np.zeros((2, 1)), CPU, memory, mask, np.array([0.5, 1.0], np.float32))
    assert torch.equal(td[schema.MEMORY], memory)
    assert torch.equal(td[schema.ACTION_MASK], mask)
    assert td[schema.PREVIOUS_REWARD].tolist() == [0.5, 1.0]


@pytest.mark.parametrize("make", [torch.tensor, np.array])
def test_a_log_prob_that_is_nan_is_an_error_that_names_the_environment(make):
    check_log_prob(None)
    check_log_prob(make([0.0, -1.0]))
    check_log_prob(make([float("inf"), -float("inf")]))  # their sum is NaN, they are not
    with pytest.raises(RunError, match="output for environment 1 is not a number"):
        check_log_prob(make([0.0, float("nan")]))


@pytest.mark.parametrize("nested", [False, True])
def test_memory_is_zeroed_in_a_copy(nested):
    memory = torch.ones(3, 2)
    given = TensorDict({"a": memory, "b": {"c": memory.clone()}}, batch_size=[3]) if nested else memory
    found = zero_rows(given, np.array([1]))
    part = found["b", "c"] if nested else found
    assert part.tolist() == [[1, 1], [0, 0], [1, 1]]
    assert memory.tolist() == [[1, 1]] * 3
    assert zero_rows(given, np.array([], np.int64)) is given


def test_a_generator_of_another_device_is_seeded_by_the_state(caplog):
    """A generator on a GPU has a state of 16 bytes: a seed and an offset."""
    on_gpu = torch.tensor([7, 0, 0, 0, 0, 0, 0, 0, 4, 0, 0, 0, 0, 0, 0, 0], dtype=torch.uint8)
    drawn = []
    for state in (on_gpu, on_gpu, on_gpu + 1):
        generator = torch.Generator()
        restore_generator(generator, state)
        drawn.append(torch.rand(4, generator=generator))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])
    assert "saved on another type of device than cpu" in caplog.text


def test_a_generator_of_the_same_device_continues(caplog):
    first, second = torch.Generator().manual_seed(3), torch.Generator()
    restore_generator(second, first.get_state())
    assert torch.equal(torch.rand(4, generator=first), torch.rand(4, generator=second))
    assert not caplog.messages
