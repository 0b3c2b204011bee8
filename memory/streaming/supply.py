"""Where a streamed module's weights come from: pinned RAM where that can be had, else through a `Stager`'s windows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ..errors import release_frames
from ..planning.residency import WINDOWS
from ..units import hostbuffer
from ..units.reader import BATCH_BYTES
from ..units.weights import Stored
from .queues import Queues
from .ring import Block, RingSlot
from .stager import Stager, parts_of


class Supply:
    """Brings blocks to slots, and other weights to the device. `close` must follow.

    `on_disk` tells, by `id` of the parameters on `meta`, where they lie in files; empty for a module that is in RAM.
    Windows are as large as the largest block or, where there are none, as the largest tensor of `tensor_bytes`.
    """

    def __init__(
        self, blocks: Sequence[Block], queues: Queues, on_disk: Mapping[int, Stored], tensor_bytes: int
    ) -> None:
        self._blocks = blocks
        self._queues = queues
        self._window_bytes = max((block.packed_bytes for block in blocks), default=min(BATCH_BYTES, tensor_bytes))
        self._on_disk = on_disk
        self._stager: Stager | None = None
        self.reach = 0  # how many blocks beyond those in the ring can be on their way

    @property
    def host_bytes(self) -> int:
        """RAM taken by windows."""
        return self._stager.held_bytes if self._stager else 0

    def open(self) -> None:
        """Make the windows, if the weights are on disk."""
        if self._on_disk:
            self._stager, self.reach = self._new_stager(), WINDOWS
            self._stager.pin()

    def settle(self) -> None:
        """Wait until nothing is being read, and no copy is under way."""
        if self._stager:
            self._stager.settle()
        self._queues.finish()

    def close(self) -> None:
        """End the threads and let go of the windows."""
        if self._stager:
            self._stager.close()
            self._stager, self.reach = None, 0

    def bring(self, wanted: Sequence[torch.Tensor], device: torch.device) -> dict[int, torch.Tensor]:
        """Those of the wanted tensors that are on disk, read to the device, by `id` of the wanted one."""
        fresh = {id(t): torch.empty_like(t, device=device) for t in wanted if id(t) in self._on_disk}
        try:
            if fresh and self._stager:
                self._stager.bring([(self._on_disk[key], tensor) for key, tensor in fresh.items()])
        except BaseException as error:
            fresh.clear()
            release_frames(error)  # whoever shows the error would hold the tensors
            raise
        return fresh

    def prepare(self, blocks: list[Block]) -> None:
        """Make blocks ready to be streamed: in pinned memory where they may be, or through the windows."""
        if not self._on_disk:
            for block in blocks:
                block.pack(self._queues.device)
            if not (self._queues.copying and hostbuffer.wants_pinned(self._queues.device)):
                return
            if all(block.pinned for block in blocks) or not (self._stager or self._make_windows()):
                return
            blocks = [block for block in self._blocks if block.host is not None and not block.pinned]
        for block in blocks:
            block.parts = block.parts or parts_of(block, self._on_disk)

    def load(self, block: Block, slot: RingSlot) -> None:
        """Let a block come to a slot. `wait` must be asked before the slot's `copied` event."""
        if self._stager and block.parts:
            self._stager.load(block, slot)
            return
        if self._stager:
            self._stager.forget(slot)
        slot.load(block, self._queues)

    def wait(self, slot: RingSlot) -> None:
        """Wait until the copy to a slot has been queued. Returns at once for what comes straight from RAM."""
        if slot.pending and self._stager:
            self._stager.wait(slot)

    def ahead(self, upcoming: Sequence[Block], ring: Sequence[RingSlot]) -> None:
        """Read on: the blocks that come next, in order, of which those in the ring are there already."""
        if self._stager:
            inside = [slot.block for slot in ring]
            self._stager.ahead([block for block in upcoming if block.parts and block not in inside])

    def _new_stager(self) -> Stager:
        return Stager(self._queues, self._window_bytes)

    def _make_windows(self) -> bool:
        """Pin windows for the blocks that are not pinned, if need be in the place of some that are."""
        stager = self._new_stager()
        pinned = [block for block in self._blocks if block.pinned]
        given_up: list[Block] = []
        self._queues.finish()  # the copies out of what is unpinned here
        while not stager.pin():
            if not pinned:
                stager.close()
                for block in given_up:
                    block.pin(self._queues.device)
                return False
            given_up.append(pinned.pop())
            given_up[-1].unpin()
        self._stager, self.reach = stager, WINDOWS
        return True
