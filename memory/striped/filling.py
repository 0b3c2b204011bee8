"""The memory that a lazy tensor is materialized into: one tensor, or blocks on the device and in RAM."""

from __future__ import annotations

from typing import Protocol

import torch

from .arena import Buffer
from .lazy_tensor import LazyTensor
from .rows import RowBlock, Rows


class Filling(Protocol):
    """Memory that is filled with stripes from the top down."""

    memory: Rows
    on_device: bool

    def put(self, start: int, stripe: torch.Tensor) -> None: ...
    def relieve(self) -> bool: ...


class AsOne:
    """All rows in one tensor, on the device or in RAM."""

    def __init__(self, node: LazyTensor, on_device: bool) -> None:
        self._node, self.on_device = node, on_device
        self._buffer = _rows(node, node.length, on_device)
        self.memory = Rows(node.axis, [RowBlock(0, node.length, self._buffer.tensor, self._buffer)])

    def put(self, start: int, stripe: torch.Tensor) -> None:
        axis = self._node.axis
        target = self._buffer.tensor.narrow(axis, start, stripe.shape[axis])
        if self.on_device:
            target.copy_(stripe)
        else:
            self._buffer.stored = self._node.arena.store(target, stripe, axis)

    def relieve(self) -> bool:
        """Return False: rows of one tensor cannot be moved to RAM."""
        return False


class InBlocks:
    """Rows in blocks: `staying` rows on the device, the others in RAM.

    The same share of each stripe stays on the device, so that the bus is used evenly during a pass. A row goes to RAM
    while less than `spared_bytes` of the budget would be left beside it.
    """

    on_device = False

    def __init__(self, node: LazyTensor, staying: int, spared_bytes: int) -> None:
        self._node, self._spared_bytes = node, spared_bytes
        self._share = staying / node.length
        self._owed = 0.0  # rows that should lie on the device so far and do not, with fractions
        self._host = _rows(node, node.length - staying, False) if staying < node.length else None
        self._used = 0
        self.memory = Rows(node.axis)

    def put(self, start: int, stripe: torch.Tensor) -> None:
        node, count = self._node, stripe.shape[self._node.axis]
        spare = node.arena.free_bytes - self._spared_bytes
        self._owed += self._share * count
        staying = min(round(self._owed), count, max(0, spare // node.row_bytes))
        self._owed -= staying
        self._to_host(start, stripe.narrow(node.axis, 0, count - staying))
        if staying:
            part = stripe.narrow(node.axis, count - staying, staying)
            owned = part if owns_its_memory(part, node) else part.clone(memory_format=torch.contiguous_format)
            self.memory.add(RowBlock(start + count - staying, start + count, owned, Buffer(node.arena, owned, True)))

    def relieve(self) -> bool:
        """Move all rows to RAM, and put later ones there. Return False if none were to stay on the device."""
        if not self._share:
            return False
        self._share = self._owed = 0.0
        self.memory.spill(self._node.length, self._node.arena, short=True)
        return True

    def _to_host(self, start: int, rows: torch.Tensor) -> None:
        node, axis = self._node, self._node.axis
        while count := rows.shape[axis]:
            if self._host is None or self._used == self._host.tensor.shape[axis]:
                self._host, self._used = _rows(node, count, False), 0
            fitting = min(count, self._host.tensor.shape[axis] - self._used)
            target = self._host.tensor.narrow(axis, self._used, fitting)
            self._host.stored = node.arena.store(target, rows.narrow(axis, 0, fitting), axis)
            self.memory.add(RowBlock(start, start + fitting, target, self._host))
            self._used, start = self._used + fitting, start + fitting
            rows = rows.narrow(axis, fitting, count - fitting)


def _rows(node: LazyTensor, count: int, on_device: bool) -> Buffer:
    shape = [*node.shape[: node.axis], count, *node.shape[node.axis + 1 :]]
    return node.arena.buffer(shape, node.dtype, node.axis, on_device)


def owns_its_memory(tensor: torch.Tensor, node: LazyTensor) -> bool:
    """Return whether rows own a contiguous storage, so that they can be materialized without a copy."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and not node.shares and node.memory is None
