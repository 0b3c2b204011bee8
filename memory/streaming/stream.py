"""The streaming engine: a module runs with some of its blocks resident and the others passing through a ring of slots.

A streamed block's weights are one flat piece of RAM. One copy brings them to a slot of the ring while another block
runs, and for the time of its call the block's parameters are views into the slot. Copies run on a stream of their own
and wait for the slot's last use, the block waits for its copy; the host waits for neither, and nothing comes back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import is_out_of_memory
from ..host import management as host
from ..planning.residency import RING_SLOTS, blocks_to_stream, least_streamed_bytes, ring_bytes, streamed_blocks
from ..sizes import format_bytes
from ..units.weights import Stored
from .order import Order
from .placement import Placement, outside_inference
from .ring import Block, RingSlot, blocks_of


class Streamed(Placement):
    """Some blocks resident, the rest through a ring; everything outside the blocks is resident.

    `resident_bytes` is what the weights may take on the device in all: those outside the blocks, the ring and the
    resident blocks. 0 asks for the least. Raises ValueError if it is less than `least_bytes`. Blocks whose weights are
    not plain tensors are resident, and so are weights that several blocks share. One call of the module at a time,
    from whichever thread; `grow` and `shrink` may be called from others meanwhile.

    The windows that a module on disk is read through serve blocks in RAM that could not be pinned too, where the device
    wants it pinned.
    """

    name = "streamed"

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        resident_bytes: int = 0,
        source: Mapping[str, Stored] | None = None,
    ) -> None:
        super().__init__(module, device, source)
        self._lock = threading.RLock()
        self._ring: list[RingSlot] = []
        self._fixed_bytes = sum({id(slot.tensor): slot.tensor.nbytes for slot in self._rest}.values())
        least = self._least_bytes()
        if 0 < resident_bytes < least:
            raise ValueError(
                f"{format_bytes(resident_bytes)} are too little to stream {type(module).__name__}: it wants "
                f"{format_bytes(least)} for the weights outside its blocks and {RING_SLOTS} slots of its largest block."
            )
        self._streaming = self._choose(max(resident_bytes, least))
        self._budget_bytes = max(resident_bytes, least)
        self._placed = self._unsettled = False
        self._order = Order(self._blocks, lambda block: not block.resident)

    def _divide(self) -> None:
        self._blocks, self._rest = blocks_of(self.module, self.host_slots)

    @staticmethod
    def least_bytes(module: nn.Module) -> int:
        """The least `resident_bytes` that the module can be streamed in; all of it if it has no blocks to stream."""
        return Streamed(module, torch.device("cpu"))._least_bytes()

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a call of the whole module copies to the device."""
        streamed = [block.packed_bytes for block in self._streaming]
        return sum(streamed) if len(streamed) > RING_SLOTS else 0

    def grow(self, bytes: int) -> int:
        """Take up to so many bytes more for resident blocks. Returns the bytes really taken.

        What cannot move now, because it is running, moves when its call ends.
        """
        return max(0, self._rearrange(max(0, bytes)))

    def shrink(self, bytes: int) -> int:
        """Stream more blocks, to free so many bytes or as many as can be. Returns the bytes really freed.

        A block that is running is freed when its call ends, and not counted.
        """
        return max(0, -self._rearrange(-max(0, bytes)))

    def describe(self) -> str:
        stay = sum(block.resident for block in self._blocks)
        return "resident" if stay == len(self._blocks) else f"streamed, {stay} of {len(self._blocks)} blocks stay"

    def settle(self) -> None:
        self._supply.settle()

    # Putting in place and taking away

    def _place(self) -> None:
        self._supply.open()
        self._move(self._rest)
        for block in self._blocks:
            if block not in self._streaming:
                self._bring(block)
        self._supply.prepare([block for block in self._blocks if block in self._streaming])
        self._make_ring()
        for block in self._blocks:
            self._hook(block)
        if self._ring:
            self._fetch_after(self._blocks[-1])
        self._placed = True

    def _remove(self) -> None:
        with self._lock:
            self._supply.close()
            # The copies read host memory that may be dropped next, and write to what is freed here.
            self._queues.finish()
            self._ring.clear()
            self._order.lost()
            self._order.forget()
            self._placed = self._unsettled = False
            for block in self._blocks:
                block.resident, block.place, block.calls = False, None, 0
                if block.undo:
                    block.undo()
                    block.undo = None

    def _hook(self, block: Block) -> None:
        own = vars(block.module)
        forward, before = block.module.forward, own.get("forward")

        @functools.wraps(forward)
        def gated(*args: Any, **kwargs: Any) -> Any:
            failed = True
            try:
                self._enter(block)
                result = forward(*args, **kwargs)
                failed = False
                return result
            finally:
                self._leave(block, failed)

        own["forward"] = gated
        block.undo = lambda: own.pop("forward", None) if before is None else own.update(forward=before)

    # The gates at each call of a block

    def _enter(self, block: Block) -> None:
        host.throw_if_interrupted()
        with self._lock:
            block.calls += 1
            self._order.called(block)
            if block.resident or block.calls > 1:
                return
            slot = next((slot for slot in self._ring if slot.block is block), None)
            upcoming = self._next_after(block)[: RING_SLOTS - 1]
            if slot is None:
                slot = self._free_slot(upcoming)
                self._load(block, slot)
            slot.enter(block)
            self._prefetch(upcoming)
        if slot.pending:
            self._supply.wait(slot)  # without the lock: others may grow and shrink meanwhile
        self._queues.wait(slot.copied)

    def _leave(self, block: Block, failed: bool) -> None:
        with self._lock:
            block.calls = max(0, block.calls - 1)
            if block.place and not block.calls:
                slot, block.place = block.place, None
                self._queues.mark(slot.used)
                slot.running = False
                # Stale views would be read without a word; host weights met on the way are an error that is seen.
                block.restore()
            if self._unsettled and not block.calls:
                self._settle()
            if failed:
                self._order.lost()
            elif self._ring:
                self._fetch_after(block)

    def _next_after(self, block: Block) -> list[Block]:
        """The streamed blocks that will be called next, as many as there are slots and windows."""
        return self._order.after(block, RING_SLOTS + self._supply.reach)

    def _fetch_after(self, block: Block) -> None:
        upcoming = self._next_after(block)
        self._prefetch(upcoming[:RING_SLOTS])
        if self._supply.reach:
            self._supply.ahead(upcoming, self._ring)

    def _prefetch(self, wanted: list[Block]) -> None:
        """Queue the copies of the wanted blocks that are not in the ring yet, as far as slots are free."""
        for block in wanted:
            if all(slot.block is not block for slot in self._ring):
                free = [slot for slot in self._ring if not slot.running and slot.block not in wanted]
                if not free:
                    return
                self._load(block, free[0])

    def _free_slot(self, upcoming: list[Block]) -> RingSlot:
        if not self._ring:
            self._make_ring()
        free = [slot for slot in self._ring if not slot.running]
        if not free:
            raise RuntimeError(f"{RING_SLOTS} blocks of a streamed {type(self.module).__name__} are running already.")
        return next((slot for slot in free if slot.block not in upcoming), free[0])

    def _load(self, block: Block, slot: RingSlot) -> None:
        self._supply.load(block, slot)
        self._bytes_in += block.packed_bytes

    # What streams and what stays

    def _choose(self, budget_bytes: int) -> set[Block]:
        """The blocks that must stream to keep a budget."""
        if self._ring:  # which stays once it is there
            room = budget_bytes - self._fixed_bytes - ring_bytes(self._blocks)
            chosen = streamed_blocks([block.packed_bytes for block in self._blocks], room)
        else:
            chosen = blocks_to_stream(self._fixed_bytes, self._blocks, budget_bytes)
        return {self._blocks[i] for i in chosen}

    def _least_bytes(self) -> int:
        return least_streamed_bytes(self._fixed_bytes, self._blocks)

    def _rearrange(self, more_bytes: int) -> int:
        with self._lock, outside_inference():
            before, planned = self.resident_bytes, self._planned_bytes()
            streaming = self._choose(planned + more_bytes)
            change = self._planned_bytes(streaming) - planned
            # Spread anew, blocks of several sizes may come out below what there was; of few, the ring may take more.
            if self._placed and (change <= 0 if more_bytes < 0 else change > 0):
                self._streaming, self._budget_bytes = streaming, planned + more_bytes
                self._settle()
            return self.resident_bytes - before

    def _planned_bytes(self, streaming: set[Block] | None = None) -> int:
        """What the weights take once everything is where it shall be."""
        streaming = self._streaming if streaming is None else streaming
        kept = sum(block.held_bytes for block in self._blocks if block not in streaming)
        return self._fixed_bytes + kept + (ring_bytes(self._blocks) if streaming or self._ring else 0)

    def _settle(self) -> None:
        """Move what is not running to where it shall be: first what frees memory, then what takes it."""
        with outside_inference():
            idle = [block for block in self._blocks if not block.calls]
            for block in idle:
                if block.resident and block in self._streaming:
                    self._supply.prepare([block])
                    self._make_streamed(block)
            if self._streaming and not self._ring and any(not block.resident for block in self._blocks):
                self._make_ring()
            for block in idle:
                room = self._budget_bytes - self.resident_bytes
                if not block.resident and block not in self._streaming and block.held_bytes <= room:
                    try:
                        self._bring(block)
                    except Exception as error:
                        if not is_out_of_memory(error):
                            raise
                        self._streaming.add(block)  # there is less memory than was said
            self._order.forget()
            self._unsettled = any(block.resident is (block in self._streaming) for block in self._blocks)

    def _make_streamed(self, block: Block) -> None:
        block.restore()
        block.resident = False
        self.resident_bytes -= block.held_bytes

    def _make_ring(self) -> None:
        """Allocate the slots, once, for the largest block that may ever stream."""
        if not self._streaming or self._ring:
            return
        size = ring_bytes(self._blocks, slots=1)
        # Ordinary tensors, which may be written to in and outside inference mode.
        with torch.inference_mode(False):
            memories = [torch.empty(size, dtype=torch.uint8, device=self.device) for _ in range(RING_SLOTS)]
        for memory in memories:
            slot = RingSlot(memory, self._queues.event(), self._queues.event())
            self._queues.mark(slot.used)  # the allocator may hand out memory that queued work still reads
            self._ring.append(slot)
            self.resident_bytes += size
