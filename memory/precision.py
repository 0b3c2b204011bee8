"""How exact products and convolutions are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Float32 means float32 in this process until the block ends.

    By default torch lets CUDA's convolutions round their inputs to TF32, ten bits of mantissa instead of 23. Nor are
    kernels tried out meanwhile, which costs time and memory for each height of a stripe.
    """
    with ExitStack() as exits:
        for owner, name, wanted in (*_switches(), (torch.backends.cudnn, "benchmark", False)):
            before = getattr(owner, name)
            if before != wanted:
                exits.callback(setattr, owner, name, before)
                setattr(owner, name, wanted)
        yield


def _switches() -> Iterator[tuple[Any, str, Any]]:
    """What allows TF32: the switches that everybody uses, unless somebody has set the newer ones, which they defy."""
    for old, new in ((torch.backends.cudnn, "conv"), (torch.backends.cuda.matmul, "")):
        try:
            _ = old.allow_tf32
        except RuntimeError:
            yield getattr(old, new) if new else old, "fp32_precision", "ieee"
        else:
            yield old, "allow_tf32", False
