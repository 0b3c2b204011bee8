"""Attention on the simulated accelerator: one fused kernel, or where a card has none the matrices of its scores."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Of the tensors that attention is called with, and of its options by name: whether a fused kernel takes them.
Fuses = Callable[..., bool]


def never(*tensors: Any, **options: Any) -> bool:
    """Return False: a card without fused kernels."""
    return False


def by_parts(*args: Any, **kwargs: Any) -> Any:
    """Run attention without a fused kernel, operator by operator, on any device."""
    return torch.ops.aten._scaled_dot_product_attention_math.default.decompose(*args, **kwargs)[0]


def softmax_by_parts(func: Any, args: tuple, kwargs: dict) -> Any:
    """Return the softmax of that, which has several matrices more for a moment: so has a real card."""
    return func._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)
