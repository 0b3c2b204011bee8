"""What the streaming engine is made of: blocks, and the ring of slots that they take turns in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..units.hostbuffer import layout, pack, pin, place_of, unpin
from ..units.structure import BlockWeights, Slot, split_blocks
from .queues import Queues

View = tuple[dict[str, Any], str, torch.Tensor]  # holder, key, and what it holds while the block runs


@dataclass(eq=False)
class Block(BlockWeights):
    """A block of a placed module: where its weights are, and what runs of it."""

    host: torch.Tensor | None = None  # the flat buffer, once it was needed
    pinned: bool = False  # it is, so that copies from it are asynchronous
    parts: Sequence[Any] | None = None  # what a `Stager` makes it up of, if it comes through one
    resident: bool = False
    calls: int = 0  # under way
    place: RingSlot | None = None  # where it runs now
    undo: Callable[[], Any] | None = None

    def pack(self, device: torch.device) -> None:
        """Put the host weights in one buffer, which then is their only place in RAM; pinned where that is possible."""
        if self.host is None:
            tensors = self.tensors()
            host, views = pack(tensors)
            replaced = {id(old): new for old, new in zip(tensors, views, strict=True)}
            for slot in self.slots:
                if slot.holder[slot.key] is slot.tensor:
                    slot.holder[slot.key] = replaced[id(slot.tensor)]
                slot.tensor = replaced[id(slot.tensor)]
            self.host = host
            self.pin(device)

    def pin(self, device: torch.device) -> None:
        """Pin the buffer where that is possible."""
        self.pinned = self.host is not None and pin(self.host, device)

    def unpin(self) -> None:
        """Let the system have the buffer's pages again. No copy from it may be under way."""
        if self.host is not None:
            unpin(self.host)
        self.pinned = False


@dataclass(eq=False)
class RingSlot:
    """A piece of device memory that blocks take turns in."""

    memory: torch.Tensor
    used: Any  # event: the last block that ran in it is done
    copied: Any  # event: the weights of `block` are there
    block: Block | None = None
    running: bool = False
    pending: Any = None  # what the slot waits for, where the copy could not be queued yet
    _views: dict[Block, tuple[torch.Tensor, list[View]]] = field(default_factory=dict)

    def prepare(self, block: Block) -> None:
        """Make the views that the block's parameters and buffers are in this slot."""
        if block not in self._views:
            self._views[block] = _views(block, self.memory)

    def load(self, block: Block, queues: Queues) -> None:
        """Queue the copy of a block's weights from its buffer."""
        assert block.host is not None
        self.prepare(block)
        self.block = None  # until the copy is queued, in case it is interrupted
        self.receive(block, block.host, queues)
        self.block = block

    def receive(self, block: Block, flat: torch.Tensor, queues: Queues) -> None:
        """Queue the copy of a block's weights from a flat buffer in RAM."""
        queues.copy(self._views[block][0], flat, self.used, self.copied)

    def enter(self, block: Block) -> None:
        """Let the block's parameters and buffers be views into the slot, until its `restore`."""
        block.place = self
        self.running = True
        for holder, key, view in self._views[block][1]:
            holder[key] = view


def _views(block: Block, memory: torch.Tensor) -> tuple[torch.Tensor, list[View]]:
    """The part of a slot that the block's copy fills, and what its parameters and buffers are meanwhile."""
    tensors = block.tensors()
    offsets, total = layout(tensors)
    with torch.inference_mode(False), torch.no_grad():
        places = zip(tensors, offsets, strict=True)
        made = {id(tensor): place_of(memory, offset, tensor) for tensor, offset in places}
        return memory[:total], [(slot.holder, slot.key, made[id(slot.tensor)]) for slot in block.slots]


def blocks_of(module: nn.Module, host_slots: list[Slot]) -> tuple[list[Block], list[Slot]]:
    """The blocks of a module that is to be placed, and all other weights. See `split_blocks`."""
    blocks, rest = split_blocks(module, host_slots)
    return [Block(b.module, b.slots, b.packed_bytes, b.held_bytes) for b in blocks], rest
