"""Switch off TF32 and the like while the VAE runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Compute float32 products and convolutions in full float32 until the block ends.

    By default torch lets CUDA's convolutions round their inputs to TF32, ten bits of mantissa instead of 23. Nor are
    kernels tried out meanwhile, which costs time and memory for each height of a stripe.
    """
    cudnn = torch.backends.cudnn
    with ExitStack() as exits:
        _set(exits, cudnn, "benchmark", False)
        # Torch has older switches and newer ones, and refuses to read the older where the newer contradict them.
        with suppress(RuntimeError):
            _set(exits, cudnn, "allow_tf32", False)
        _set_newer(exits, getattr(cudnn, "conv", None))
        try:
            before = torch.get_float32_matmul_precision()
        except RuntimeError:
            _set_newer(exits, torch.backends.cuda.matmul)
        else:
            if before != "highest":
                torch.set_float32_matmul_precision("highest")
                exits.callback(torch.set_float32_matmul_precision, before)
        yield


def _set_newer(exits: ExitStack, owner: Any) -> None:
    if getattr(owner, "fp32_precision", "ieee") not in ("ieee", "none"):
        _set(exits, owner, "fp32_precision", "ieee")


def _set(exits: ExitStack, owner: Any, name: str, value: Any) -> None:
    before = getattr(owner, name)
    if before != value:
        setattr(owner, name, value)
        exits.callback(setattr, owner, name, before)
