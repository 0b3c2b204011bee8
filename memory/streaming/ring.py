"""What the streaming engine is made of: blocks, the slots they take turns in, and the device's queues."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..host.flags import host_flags
from ..planning.residency import block_lists
from ..units.hostbuffer import can_pack, layout, pack, pin, place_of, unpin
from ..units.unit import Slot, slots

View = tuple[dict[str, Any], str, torch.Tensor]  # holder, key, and what it holds while the block runs

_copy_streams: dict[torch.device, Any] = {}
_copy_streams_lock = threading.Lock()


class Queues:
    """The device's streams and events; where there are none, copies block and the events are None."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.backend = torch.get_device_module(device)
        # `torch.cpu` has such classes too, which do nothing.
        names = ("Stream", "Event", "current_stream", "stream")
        has_streams = device.type != "cpu" and all(hasattr(self.backend, name) for name in names)
        self.copying = self._copy_stream() if has_streams and not host_flags().blocking else None

    def _copy_stream(self) -> Any:
        # One for the process: the memory that an allocator has given to a stream stays with it.
        with _copy_streams_lock:
            if self.device not in _copy_streams:
                _copy_streams[self.device] = self.backend.Stream(device=self.device)
            return _copy_streams[self.device]

    def event(self, waited_for: bool = False) -> Any:
        """A new event, None where there are none. One that the host waits for lets it sleep meanwhile."""
        if not self.copying:
            return None
        return self.backend.Event(blocking=True) if waited_for and self.device.type == "cuda" else self.backend.Event()

    def mark(self, event: Any) -> None:
        """Let the event happen when what this thread has queued so far is done."""
        if event:
            event.record(self.backend.current_stream(self.device))

    def wait(self, event: Any) -> None:
        """Let what this thread queues from now on begin after the event."""
        if event:
            self.backend.current_stream(self.device).wait_event(event)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Any, done: Any) -> None:
        """Queue a copy to the device behind one event, and let another happen when it is there."""
        if self.copying is None:
            target.copy_(source)
            return
        self.copying.wait_event(after)
        with self.backend.stream(self.copying):
            target.copy_(source, non_blocking=True)
        done.record(self.copying)

    def mark_copy(self, event: Any) -> None:
        """Let the event happen when the copies queued so far are done."""
        if event:
            event.record(self.copying)

    def finish(self) -> None:
        """Let the host wait for the copies under way."""
        if self.copying:
            self.copying.synchronize()


@dataclass(eq=False)
class Block:
    """A member of a block list, and the weights that are its own."""

    module: nn.Module
    slots: list[Slot]
    packed_bytes: int
    held_bytes: int  # without the gaps of the flat buffer
    host: torch.Tensor | None = None  # the flat buffer, once it was needed
    pinned: bool = False  # it is, so that copies from it are asynchronous
    parts: Sequence[Any] | None = None  # what a `Stager` makes it up of, if it comes through one
    resident: bool = False
    calls: int = 0  # under way
    place: RingSlot | None = None  # where it runs now
    undo: Callable[[], Any] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """The host's weights and buffers, each once."""
        return list({id(slot.tensor): slot.tensor for slot in self.slots}.values())

    def restore(self) -> None:
        """Let the module hold the host's tensors."""
        for slot in self.slots:
            slot.restore()

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


def split_blocks(module: nn.Module, host_slots: list[Slot]) -> tuple[list[Block], list[Slot]]:
    """The blocks with the weights that are theirs alone, and all other weights."""
    members = list(dict.fromkeys(member for _, blocks in block_lists(module) for member in blocks))
    holder_of: dict[int, int] = {}
    for index, member in enumerate(members):
        for slot in slots(member):
            # A submodule of two members belongs to neither.
            holder_of[id(slot.holder)] = index if holder_of.get(id(slot.holder), index) == index else -1
    owner_of: dict[int, int] = {}
    for slot in host_slots:
        index = holder_of.get(id(slot.holder), -1)
        owner_of[id(slot.tensor)] = index if owner_of.get(id(slot.tensor), index) == index else -1
    own: list[list[Slot]] = [[] for _ in members]
    for slot in host_slots:
        if (index := owner_of[id(slot.tensor)]) >= 0:
            own[index].append(slot)
    blocks: list[Block] = []
    for member, theirs in zip(members, own, strict=True):
        tensors = list({id(slot.tensor): slot.tensor for slot in theirs}.values())
        packed_bytes = layout(tensors)[1]
        if packed_bytes and all(map(can_pack, tensors)):
            held_bytes = sum(tensor.nbytes for tensor in tensors)
            blocks.append(Block(member, theirs, packed_bytes, held_bytes))
    streamable = {id(slot) for block in blocks for slot in block.slots}
    return blocks, [slot for slot in host_slots if id(slot) not in streamable]
