"""Where the stripes of a map go that is kept: to one tensor, or in blocks, some of each stripe on the device."""

from __future__ import annotations

from typing import Protocol

import torch

from .arena import Buffer
from .lazy_tensor import Map
from .rows import RowBlock, Rows


class Filling(Protocol):
    """Memory that stripes are put into, from the top down."""

    memory: Rows
    on_device: bool

    def put(self, start: int, stripe: torch.Tensor) -> None: ...
    def relieve(self) -> bool: ...


class AsOne:
    """One tensor, on the device or in RAM."""

    def __init__(self, node: Map, on_device: bool) -> None:
        self._node, self.on_device = node, on_device
        self._buffer = _rows(node, node.length, on_device)
        self.memory = Rows(node.axis, [RowBlock(0, node.length, self._buffer.tensor, self._buffer)])

    def put(self, start: int, stripe: torch.Tensor) -> None:
        axis = self._node.axis
        target = self._buffer.tensor.narrow(axis, start, stripe.shape[axis])
        if self.on_device:
            target.copy_(stripe)
        else:
            self._buffer.stored = self._node.room.store(target, stripe, axis)

    def relieve(self) -> bool:
        """Nothing of it can leave the device."""
        return False


class InBlocks:
    """`staying` rows on the device, a part of each stripe, so that as much comes and goes in all of a pass.

    While less than `spared_bytes` would be left on the device beside them, they go to RAM as the others.
    """

    on_device = False

    def __init__(self, node: Map, staying: int, spared_bytes: int) -> None:
        self._node, self._spared_bytes = node, spared_bytes
        self._share = staying / node.length
        self._owed = 0.0  # rows that should lie on the device and do not
        self._host = _rows(node, node.length - staying, False) if staying < node.length else None
        self._used = 0
        self.memory = Rows(node.axis)

    def put(self, start: int, stripe: torch.Tensor) -> None:
        node, count = self._node, stripe.shape[self._node.axis]
        spare = node.room.free_bytes - self._spared_bytes
        self._owed += self._share * count
        staying = min(round(self._owed), count, max(0, spare // node.row_bytes))
        self._owed -= staying
        self._to_host(start, stripe.narrow(node.axis, 0, count - staying))
        if staying:
            part = stripe.narrow(node.axis, count - staying, staying)
            owned = part if owns_its_memory(part, node) else part.clone(memory_format=torch.contiguous_format)
            self.memory.add(RowBlock(start + count - staying, start + count, owned, Buffer(node.room, owned, True)))

    def relieve(self) -> bool:
        """Put everything in RAM from now on, where the device has less room than was thought."""
        if not self._share:
            return False
        self._share = self._owed = 0.0
        self.memory.spill(self._node.length, self._node.room, short=True)
        return True

    def _to_host(self, start: int, rows: torch.Tensor) -> None:
        node, axis = self._node, self._node.axis
        while count := rows.shape[axis]:
            if self._host is None or self._used == self._host.tensor.shape[axis]:
                self._host, self._used = _rows(node, count, False), 0
            fitting = min(count, self._host.tensor.shape[axis] - self._used)
            target = self._host.tensor.narrow(axis, self._used, fitting)
            self._host.stored = node.room.store(target, rows.narrow(axis, 0, fitting), axis)
            self.memory.add(RowBlock(start, start + fitting, target, self._host))
            self._used, start = self._used + fitting, start + fitting
            rows = rows.narrow(axis, fitting, count - fitting)


def _rows(node: Map, count: int, on_device: bool) -> Buffer:
    shape = [*node.shape[: node.axis], count, *node.shape[node.axis + 1 :]]
    return node.room.buffer(shape, node.dtype, node.axis, on_device)


def owns_its_memory(tensor: torch.Tensor, node: Map) -> bool:
    """Return whether rows of a map may be kept as they are."""
    whole = tensor.is_contiguous() and tensor.untyped_storage().nbytes() == tensor.nbytes
    return whole and not node.shares and node.memory is None
