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

for setting in sys.argv[1:]:
    exec(setting)
    before = state()
    with full_float32():
        tf32, convolutions, benchmark, products, _ = state()
    assert tf32 is False or convolutions == "ieee", (tf32, convolutions)
    assert products in ("ieee", "none") and benchmark is False, (products, benchmark)
    assert state() == before, (before, state())
"""


SETTINGS = [
    "torch.backends.cudnn.benchmark = True",
    "torch.set_float32_matmul_precision('medium')",
    "torch.backends.cudnn.conv.fp32_precision = 'tf32'; torch.backends.cudnn.rnn.fp32_precision = 'ieee'",
    "torch.backends.fp32_precision = 'tf32'",
]


@pytest.mark.parametrize(
    "settings", [SETTINGS, *(pytest.param([one], marks=pytest.mark.soak) for one in SETTINGS)], ids=" then ".join
)
def test_full_float32(settings: list[str]) -> None:
    """One after the other in one process, which takes seconds to start; each alone in the soak."""
    command = [sys.executable, "-c", _SCRIPT, *settings]
    ran = subprocess.run(command, cwd=TESTS, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
