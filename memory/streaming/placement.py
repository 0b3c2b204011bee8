"""How a leased unit sits: put in place, and taken away without copying a weight back.

`resident`: all weights on the device. `leafwise`: each module's weights come for its own call and go again. `cpu`: the
unit runs where its weights are. `streamed`, in `stream`: some blocks resident, the rest through a ring.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import nn

from ..units.calls import Forward, interpose
from ..units.loading import find_stored
from ..units.structure import Slot, leafwise_slots, slots
from ..units.weights import Stored
from ..vocabulary import PlacementName
from .queues import Queues
from .ring import Block, blocks_of
from .strays import clear_strays
from .supply import Supply


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """For tensors that outlive a run: quantized ones cannot be made in inference mode, and others not be written to."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Placement:
    """Base of all placements: remembers the host tensors, so that taking away is putting them back.

    With `source`, which tells where the weights lie in files, by name, a module on `meta` runs straight from the disk
    and RAM holds no more than `host_bytes`; ValueError if it does not name them all.
    """

    name: ClassVar[PlacementName]
    on_device: ClassVar[bool] = True

    def __init__(self, module: nn.Module, device: torch.device, source: Mapping[str, Stored] | None = None) -> None:
        self.module = module
        self.device = device
        self.host_slots: list[Slot] = list(slots(module))
        self.resident_bytes = 0
        self._bytes_in = 0
        self._last_resort: weakref.finalize | None = None
        self._blocks: list[Block] = []
        self._divide()
        on_disk = source is not None and any(slot.tensor.is_meta for slot in self.host_slots)
        found = find_stored(module, source or {}) if on_disk else {}
        if found is None:
            raise ValueError(f"the files do not name all weights of {type(module).__name__}: it must be loaded first.")
        largest = max((slot.tensor.nbytes for slot in self.host_slots), default=0)
        self._queues = Queues(device)
        self._supply = Supply(self._blocks, self._queues, found, largest)

    def place(self) -> None:
        """Put the unit in place. On any failure, out of memory included, everything is taken away again."""
        try:
            with outside_inference():
                self._place()
        except BaseException:
            self.remove()
            raise

    @property
    def host_bytes(self) -> int:
        """RAM taken beside the module's own tensors."""
        return self._supply.host_bytes

    def describe(self) -> str:
        """How the unit sits, in words."""
        return self.name

    def grow(self, bytes: int) -> int:
        """Let up to so many bytes more of the blocks stay. Returns the bytes taken."""
        return 0

    def shrink(self, bytes: int) -> int:
        """Let whole blocks leave until so many bytes are free, or as many as can be. Returns the bytes freed."""
        return 0

    def complete(self) -> None:
        """Bring back what has to be there for a call."""

    def settle(self) -> None:
        """Wait for the copies under way."""

    def take_bytes_in(self) -> int:
        """Bytes of weights copied to the device since this was last asked."""
        taken, self._bytes_in = self._bytes_in, 0
        return taken

    def goes_with(self, unit: object) -> None:
        """Let the module be taken away at once when the unit that it is of is deleted."""
        self._last_resort = weakref.finalize(unit, self.remove)
        self._last_resort.atexit = False

    def remove(self) -> None:
        """Take the unit off the device, with every stray tensor that its runs left behind."""
        if self._last_resort is not None:
            self._last_resort.detach()
        with torch.inference_mode():
            self._restore()
            self._remove()
            self.resident_bytes = 0
            clear_strays(self.module, self.device)

    def _restore(self) -> None:
        for slot in self.host_slots:
            slot.restore()

    def _divide(self) -> None:
        """Find the blocks, for placements that know them from the start."""

    def _place(self) -> None: ...

    def _remove(self) -> None: ...

    def _move(self, moving: list[Slot]) -> None:
        """Bring weights to the device: from RAM, or from the disk through the windows, which must be open."""
        copies = self._supply.bring([slot.tensor for slot in moving], self.device)
        came = sum(tensor.nbytes for tensor in copies.values())
        for slot in moving:
            if id(slot.tensor) not in copies:
                copies[id(slot.tensor)] = slot.tensor.detach().to(self.device)
                came += slot.tensor.nbytes
            slot.set(copies[id(slot.tensor)])
        self.resident_bytes += came
        self._bytes_in += came

    @contextlib.contextmanager
    def _windows(self) -> Iterator[None]:
        """Windows to read through, for the time of one move."""
        self._supply.open()
        try:
            yield
        finally:
            self._supply.close()

    def _bring(self, block: Block) -> None:
        """Let a block stay; on any failure it is where it was."""
        before = self.resident_bytes
        try:
            self._move(block.slots)
            block.resident = True
        except BaseException:
            block.restore()
            self.resident_bytes = before
            raise


class Resident(Placement):
    """All weights on the device. Between calls blocks may leave; `complete` must bring them back before the next."""

    name = "resident"

    def _place(self) -> None:
        with self._windows():
            self._move(self.host_slots)

    def shrink(self, bytes: int) -> int:
        before = self.resident_bytes
        if not self._blocks:  # known once one has left
            self._blocks = blocks_of(self.module, self.host_slots)[0]
            for block in self._blocks:
                block.resident = True
        for block in self._blocks:
            if block.resident and before - self.resident_bytes < bytes:
                block.restore()
                block.resident = False
                self.resident_bytes -= block.held_bytes
        return before - self.resident_bytes

    def grow(self, bytes: int) -> int:
        before = self.resident_bytes
        if all(block.resident for block in self._blocks):
            return 0
        with outside_inference(), self._windows():
            for block in self._blocks:
                if not block.resident and self.resident_bytes - before + block.held_bytes <= bytes:
                    self._bring(block)
        return self.resident_bytes - before

    def complete(self) -> None:
        self.grow(sum(block.held_bytes for block in self._blocks))

    def _remove(self) -> None:
        self._blocks = []


class Leafwise(Placement):
    name = "leafwise"

    def __init__(self, module: nn.Module, device: torch.device, source: Mapping[str, Stored] | None = None) -> None:
        super().__init__(module, device, source)
        self._undo: list[Callable[[], None]] = []

    def _place(self) -> None:
        self._supply.open()
        stays, comes = leafwise_slots(self.module)
        self._move(stays)
        for owner, own in comes:
            self._undo.append(interpose(owner, _Coming(self, own).run))

    def _remove(self) -> None:
        self._supply.close()
        while self._undo:
            self._undo.pop()()


class _Coming:
    """The weights of one module, on the device for the time of its calls."""

    def __init__(self, placement: Leafwise, own: list[Slot]) -> None:
        self._placement, self._own = placement, own
        self._calls = 0  # under way, one inside the other

    def run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        held = self._placement.resident_bytes
        self._calls += 1
        try:
            if self._calls == 1:
                with outside_inference():
                    self._placement._move(self._own)
            return forward(*args, **kwargs)
        finally:
            self._calls -= 1
            if not self._calls:
                for slot in self._own:
                    slot.restore()
                self._placement.resident_bytes = held


class Cpu(Placement):
    name = "cpu"
    on_device = False
