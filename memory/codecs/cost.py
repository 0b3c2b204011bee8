"""The cost of decoding on a device: the eager decoder's kernels and the bytes of each, counted on shapes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from .codec import Codec

_OVERWRITING = ("copy_", "fill_")  # which do not read what they write to
_SCATTERED = ("index_copy_",)  # which touch no more of it than they are given


@dataclass(frozen=True)
class Cost:
    """Kernels by the bytes that each reads and writes: (bytes, how many)."""

    kernels: tuple[tuple[int, int], ...]

    @property
    def traffic_bytes(self) -> int:
        """Bytes that all kernels read and write."""
        return sum(nbytes * count for nbytes, count in self.kernels)

    def seconds(self, bytes_per_second: float, least_seconds: float = 4e-6) -> float:
        """Return the time on a device of that memory bandwidth, on which no kernel takes less than `least_seconds`.

        An upper bound: what one kernel leaves in the cache for the next is counted as read from memory.
        """
        return sum(max(nbytes / bytes_per_second, least_seconds) * count for nbytes, count in self.kernels)


@lru_cache(maxsize=1024)
def cost_of(codec: Codec) -> Cost:
    """Return what decoding a weight once costs. Nothing is allocated for it."""
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
    """Bytes of all tensors; of one that is expanded only those that there are."""
    tensors = (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in tensors)
