"""Attention on the simulated accelerator: one fused kernel, or operators that materialize the scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Takes the tensors and options of an attention call; returns whether a fused kernel accepts them.
Fuses = Callable[..., bool]


def never(*tensors: Any, **options: Any) -> bool:
    """Return False: a card without fused kernels."""
    return False


def by_parts(*args: Any, **kwargs: Any) -> Any:
    """Return attention computed operator by operator, without a fused kernel, on any device."""
    return torch.ops.aten._scaled_dot_product_attention_math.default.decompose(*args, **kwargs)[0]


def softmax_by_parts(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the softmax of `by_parts`, which like on a real card takes several more score matrices for a moment."""
    return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
