"""Float32 means float32, whatever switches somebody has set, and they are as they were afterwards."""

from __future__ import annotations

import subprocess
import sys

import pytest
from places import TESTS

_SCRIPT = """
import conftest, sys, torch
from ballast.pipelines.decoding.precision import full_float32

def read(owner, name):
    try:
        return getattr(owner, name)
    except RuntimeError:  # torch's own, where its older and newer switches contradict each other
        return "refused"

def state():
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    names = [(cudnn, "allow_tf32"), (cudnn.conv, "fp32_precision"), (cudnn, "benchmark"), (matmul, "fp32_precision")]
    try:
        products = torch.get_float32_matmul_precision()
    except RuntimeError:
        products = "refused"
    return [*(read(*name) for name in names), products]

exec(sys.argv[1])
before = state()
with full_float32():
    tf32, convolutions, benchmark, products, _ = state()
assert tf32 is False or convolutions == "ieee", (tf32, convolutions)
assert products in ("ieee", "none") and benchmark is False, (products, benchmark)
assert state() == before, (before, state())
"""


@pytest.mark.parametrize(
    "setting",
    [
        "torch.backends.cudnn.benchmark = True; torch.set_float32_matmul_precision('medium')",
        pytest.param("torch.backends.fp32_precision = 'tf32'", marks=pytest.mark.soak),
        "torch.backends.cudnn.conv.fp32_precision = 'tf32'; torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    ],
)
def test_full_float32(setting: str) -> None:
    command = [sys.executable, "-c", _SCRIPT, setting]
    ran = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
