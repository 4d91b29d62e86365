"""Which number format is chosen."""

import pytest
import torch

from deft.runs import precision
from deft.runs.precision import autocast, choose_precision, cpu_has_bfloat16, set_precision

ARM = "processor\t: 0\nFeatures\t: fp asimd evtstrm {}\nCPU part\t: 0xd0c\n"


def test_a_cpu_without_instructions_for_it_gets_no_bfloat16(monkeypatch):
    assert not cpu_has_bfloat16(ARM.format("atomics"))
    assert cpu_has_bfloat16(ARM.format("bf16"))
    assert cpu_has_bfloat16("flags\t\t: fpu avx512_bf16 sse\n")
    assert not cpu_has_bfloat16("flags\t\t: fpu avx512f sse\n")
    cpu = torch.device("cpu")
    for has, quicker, expected in ((True, True, torch.bfloat16), (True, False, None), (False, True, None)):
        monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda has=has: has)
        monkeypatch.setattr(precision, "bfloat16_is_faster", lambda quicker=quicker: quicker)
        assert choose_precision("auto", cpu) is expected
    assert choose_precision("fp32", cpu) is None
    assert choose_precision("bf16", cpu) is torch.bfloat16


def test_autocast_is_where_it_is_asked_for():
    product = torch.ones(2, 2)
    with autocast(torch.device("cpu"), torch.bfloat16):
        assert (product @ product).dtype is torch.bfloat16
    with autocast(torch.device("cpu"), None):
        assert (product @ product).dtype is torch.float32


@pytest.mark.parametrize(("precision", "matmul", "rounds"), [("tf32", "high", True), ("fp32", "highest", False)])
def test_precision_holds_for_convolutions_too(precision, matmul, rounds):
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    try:
        set_precision(torch.device("cuda"), precision)
        assert (torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32) == (matmul, rounds)
    finally:
        torch.set_float32_matmul_precision(before[0])
        torch.backends.cudnn.allow_tf32 = before[1]


@pytest.mark.parametrize(
    ("name", "has_units", "is_told"), [("bf16", False, True), ("bf16", True, False), ("fp32", False, False)]
)
def test_bf16_that_a_cpu_emulates_is_told(monkeypatch, caplog, name, has_units, is_told):
    monkeypatch.setattr(precision, "cpu_has_bfloat16", lambda: has_units)
    set_precision(torch.device("cpu"), name)
    assert ("no bf16 instructions" in caplog.text) == is_told
