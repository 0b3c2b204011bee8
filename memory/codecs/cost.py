"""The cost of decoding on a device: the kernels and the bytes of each.

Those of the eager decoder are counted by running `Codec.decode` on `meta` tensors.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .codec import Codec
from .fused import has_kernel

_OVERWRITING = ("copy_", "fill_")  # operators that do not read their target
_SCATTERED = ("index_copy_",)  # operators that write only the given elements of their target


@dataclass(frozen=True)
class Cost:
    """Kernels of one decoding: pairs (bytes that a kernel reads and writes, number of such kernels)."""

    kernels: tuple[tuple[int, int], ...]

    @property
    def launches(self) -> int:
        """Number of all kernels."""
        return sum(count for _, count in self.kernels)

    @property
    def traffic_bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(nbytes * count for nbytes, count in self.kernels)

    def seconds(self, bytes_per_second: float, least_seconds: float = 4e-6) -> float:
        """Return the seconds on a device with a memory bandwidth of `bytes_per_second`.

        Every kernel takes at least `least_seconds`, about the time to launch it. The result is an upper bound: data
        that one kernel leaves in the cache for the next are counted as read from memory.
        """
        return sum(max(nbytes / bytes_per_second, least_seconds) * count for nbytes, count in self.kernels)


@lru_cache(maxsize=1024)
def cost_of(codec: Codec, fused: bool = False) -> Cost:
    """Return the cost of decoding one weight once: by the eager decoder, or `fused` into one kernel if there is one.

    It is computed on `meta`: no memory is allocated.
    """
    if fused and has_kernel(codec):
        return Cost(((codec.encoded_bytes + codec.decoded_bytes, 1),))
    with torch.inference_mode(False), torch.no_grad():  # in inference mode a cast looks like a view
        parts = [torch.empty(part.count, dtype=part.dtype, device="meta") for part in codec.parts]
        out = torch.empty(codec.shape, dtype=codec.dtype, device="meta")
        with _Counting() as counting:
            codec.decode(parts, out)
    return Cost(tuple(sorted(counting.kernels.items())))


class _Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.kernels: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_view = any(each.alias_info and not each.alias_info.is_write for each in func._schema.returns)
        name = func._schema.name.removeprefix("aten::")
        if not is_view and name not in ("empty", "_unsafe_view"):
            read = args[1:] if name in _OVERWRITING + _SCATTERED else args
            written = args[3:] if name in _SCATTERED else result
            self.kernels[_bytes_of(read) + _bytes_of(written)] += 1
        return result


def _bytes_of(values: Any) -> int:
    """Return the bytes of all tensors among `values`. An expanded tensor counts as the bytes of its storage."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
