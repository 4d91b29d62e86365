"""The physical GPU for Vulkan, the logical one for CUDA."""

import logging
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from deft.envs.adapters.sapien_gpu import VARIABLES, get_logical_gpu_id, get_physical_gpu_id, setup_sapien_gpu
from deft.errors import InputError


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LOCAL_RANK", "CUDA_VISIBLE_DEVICES", *VARIABLES):
        monkeypatch.setenv(name, "")  # so that it is put back, whatever the code sets
        monkeypatch.delenv(name)
    monkeypatch.delitem(sys.modules, "sapien", raising=False)


@pytest.mark.parametrize(
    ("rank", "visible", "physical"),
    [
        (None, None, 0),
        ("2", None, 2),  # all GPUs are visible: the rank is the number
        ("0", "4,5,6", 4),
        ("2", "4, 5, 6", 6),
        ("1", "3", 1),  # more processes than GPUs in the list
        ("0", "", 0),
        ("0", "-1", 0),
        ("1", "7,-1,5", 1),  # CUDA stops reading at -1
    ],
)
def test_rank_and_visible_devices(
    monkeypatch: pytest.MonkeyPatch, rank: str | None, visible: str | None, physical: int
) -> None:
    if rank is not None:
        monkeypatch.setenv("LOCAL_RANK", rank)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert get_physical_gpu_id() == physical
    assert get_logical_gpu_id() == int(rank or 0)
    assert setup_sapien_gpu() == physical
    assert [os.environ[name] for name in VARIABLES] == [str(physical)] * 3


def test_accelerator_knows_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert get_physical_gpu_id(SimpleNamespace(local_process_index=1)) == 3


def test_a_number_of_ones_own() -> None:
    assert setup_sapien_gpu(5) == 5
    assert os.environ["VK_DEVICE_INDEX"] == "5"


def test_names_that_are_no_numbers_are_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-8932f937")
    with pytest.raises(InputError, match="GPUs by number"):
        get_physical_gpu_id()
    monkeypatch.setenv("LOCAL_RANK", "first")
    with pytest.raises(InputError, match="LOCAL_RANK is 'first'"):
        get_logical_gpu_id()


def test_too_late_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    monkeypatch.setitem(sys.modules, "sapien", ModuleType("sapien"))
    setup_sapien_gpu(1)
    setup_sapien_gpu(1)  # as it is already
    assert [record.message for record in caplog.records] == [
        "SAPIEN was imported before its GPU was set: it may not render on GPU 1"
    ]
