"""How a leased unit sits: put in place, and taken away without copying a weight back.

`cpu`: the unit runs where its weights are. `resident`, in a file of its own: all weights on the device. `streamed`, in
`stream`: some pieces resident, the rest through a ring. Tables of embeddings are never on the device.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..units.calls import Forward, interpose
from ..units.encoding import Source
from ..units.loading import find_stored
from ..units.pieces import CallOrder, Owner, divide, encoded, nbytes_of
from ..units.structure import Slot, slots
from ..units.tables import LookUp, rows_of
from ..vocabulary import PlacementName
from .arrivals import Arrivals
from .decoding import Workspace, decode
from .incoming import NOTHING, Incoming
from .queues import Queues
from .ring import Piece
from .strays import clear_strays
from .supply import Supply


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """For tensors that outlive a run: quantized ones cannot be made in inference mode, and others not be written to."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Placement:
    """Base of all placements: remembers the host tensors, so that taking away is putting them back.

    With `source`, which tells where the weights lie in files, by name, what is on `meta` of the module comes straight
    from the disk, and beside the rest RAM holds no more than `host_bytes`; ValueError if it does not name all. `calls`
    says which modules are called in which order.
    """

    name: ClassVar[PlacementName]
    on_device: ClassVar[bool] = True
    _streams: ClassVar[bool] = False

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        source: Mapping[str, Source] | None = None,
        calls: CallOrder | None = None,
        *,
        incoming: Incoming = NOTHING,
    ) -> None:
        self.module = module
        self.device = device
        self.host_slots: list[Slot] = list(slots(module))
        self.resident_bytes = 0
        self._bytes_in = self._bytes_read = 0
        self._last_resort: weakref.finalize | None = None
        self.calls = calls or CallOrder()
        divided = divide(module, self.host_slots, self.calls)
        self._pieces = [Piece.of(weights) for weights in divided.pieces]
        self._tables, self._rest = divided.tables, divided.rest
        self._encoded = [owner for owner in divided.owners if encoded(owner.slots)]
        self._workspace = Workspace(self._encoded, device)
        self._undo: list[Callable[[], None]] = []
        on_disk = source is not None and any(slot.tensor.is_meta for slot in self.host_slots)
        found = find_stored(module, source or {}) if on_disk else {}
        if found is None:
            raise ValueError(f"the files do not name all weights of {type(module).__name__}: it must be loaded first.")
        largest = max((slot.tensor.nbytes for slot in self.host_slots), default=0)
        self._queues = Queues(device)
        here = {id(slot.tensor) for slot in self.host_slots if not slot.tensor.is_meta}
        self._found = {key: at for key, at in found.items() if key not in here}
        streaming = self._pieces if self._streams else []
        self._supply = Supply(streaming, self._queues, self._found, largest, incoming)
        self._arrivals = Arrivals(self._pieces, self._supply, self._queues)
        self._gates: dict[Piece, list[Callable[[], None]]] = {}

    def place(self) -> None:
        """Put the unit in place. On any failure, out of memory included, everything is taken away again."""
        try:
            with outside_inference():
                if self._found:
                    called = [slot for piece in self._pieces if piece.called for slot in piece.slots]
                    self._supply.expect([slot.tensor for slot in (*called, *self._rest)])
                self._place()
        except BaseException:
            self.remove()
            raise

    @property
    def host_bytes(self) -> int:
        """RAM taken beside the module's own tensors."""
        return self._supply.host_bytes

    def describe(self) -> str:
        """Return how the unit sits, in words."""
        return self.name

    def grow(self, bytes: int) -> int:
        """Keep up to `bytes` more of the pieces. Return the bytes taken."""
        return 0

    def shrink(self, bytes: int) -> int:
        """Evict whole pieces until `bytes` are free, or as many as can be. Return the bytes freed."""
        return 0

    def complete(self) -> None:
        """Bring back what has to be there for a call."""

    def rest(self, failed: bool = False) -> None:
        """Note that a call has ended; what follows one that `failed` is not what followed before."""

    def settle(self) -> None:
        """Wait for the copies under way."""

    def take_bytes_in(self) -> int:
        """Bytes of weights copied to the device since this was last asked."""
        self._count()
        taken, self._bytes_in = self._bytes_in, 0
        return taken

    def take_bytes_read(self) -> int:
        """Return the bytes of files that were read for them."""
        self._count()
        taken, self._bytes_read = self._bytes_read, 0
        return taken

    def _count(self) -> None:
        came, read = self._arrivals.take_bytes()
        self._bytes_in, self._bytes_read = self._bytes_in + came, self._bytes_read + read

    def goes_with(self, unit: object) -> None:
        """Remove the module from the device as soon as its unit is deleted."""
        self._last_resort = weakref.finalize(unit, self.remove)
        self._last_resort.atexit = False

    def remove(self) -> None:
        """Take the unit off the device, with every stray tensor that its runs left behind."""
        if self._last_resort is not None:
            self._last_resort.detach()
        with torch.inference_mode():
            self._close_gates()
            while self._undo:
                self._undo.pop()()
            for slot in self.host_slots:
                slot.restore()
            self._remove()
            self._workspace.close()
            self.resident_bytes = 0
            clear_strays(self.module, self.device)

    def _place(self) -> None: ...

    def _remove(self) -> None: ...

    def _place_tables(self) -> None:
        """Look up the rows of the tables in RAM, or in the files."""
        for table in self._tables:
            self._undo.append(interpose(table.module, functools.partial(self._look_up, table)))

    def _look_up(self, table: Owner, forward: Forward, args: tuple, kwargs: dict) -> Any:
        (slot,) = table.slots
        weight = slot.tensor
        self._supply.await_ram([weight])
        self._supply.await_disk([weight])

        def fetch(ids: torch.Tensor) -> torch.Tensor:
            ids = ids.cpu()
            rows = rows_of(slot, self._found.get(id(weight)), ids).to(self.device)
            self._bytes_in += rows.nbytes
            if nbytes := self._supply.file_bytes([weight]):
                self._bytes_read += nbytes * ids.unique().numel() // len(slot.holder[slot.key])
            return rows

        with LookUp(slot.holder[slot.key], fetch):
            return forward(*args, **kwargs)

    def _move(self, moving: list[Slot]) -> None:
        """Bring weights to the device: from RAM, or from the disk through the windows, which must be open."""
        copies = self._supply.bring([slot.tensor for slot in moving], self.device)
        came = sum(tensor.nbytes for tensor in copies.values())
        self._bytes_read += self._supply.file_bytes([slot.tensor for slot in moving])
        for slot in moving:
            if id(slot.tensor) not in copies:
                self._supply.await_ram([slot.tensor])
                self._supply.await_disk([slot.tensor])
                copies[id(slot.tensor)] = slot.tensor.detach().to(self.device)
                came += slot.tensor.nbytes
            slot.set(copies[id(slot.tensor)])
        self.resident_bytes += came
        self._bytes_in += came

    def _move_rest(self) -> None:
        """Bring what is in no piece, and decode it for good: who reads it is not known. It comes before all others."""
        self._move(self._rest)
        self._supply.begin()
        self.resident_bytes += decode_for_good(self._rest) - nbytes_of([slot for slot, _ in encoded(self._rest)])

    def _decode_calls(self) -> None:
        """Show modules their encoded weights dequantized during their calls."""
        self._workspace.open()
        self.resident_bytes += self._workspace.nbytes
        for owner in self._encoded:
            self._undo.append(interpose(owner.module, functools.partial(self._decoded, owner)))

    def _decoded(self, owner: Owner, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with self._workspace.decoded(owner):
            return self._kept(forward(*args, **kwargs))

    def _kept(self, result: Any) -> Any:
        """Return what a module gave, without views of its weights, which others will take the place of."""
        if isinstance(result, torch.Tensor):
            return result.clone() if self._passes(result) else result
        return tree_map_only(torch.Tensor, self._kept, result)

    def _passes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies where other weights come to."""
        return self._workspace.holds(tensor)

    def _open_gates(self, pieces: Sequence[Piece]) -> None:
        """Pass the calls of these pieces' modules through `_gate`."""
        for piece in pieces:
            if piece not in self._gates:
                gates = [(owner.module, functools.partial(self._gate, piece)) for owner in piece.owners]
                self._gates[piece] = [interpose(module, gate) for module, gate in gates]

    def _close_gates(self) -> None:
        for undo in (undo for gates in self._gates.values() for undo in gates):
            undo()
        self._gates.clear()

    def _gate(self, piece: Piece, forward: Forward, args: tuple, kwargs: dict) -> Any:
        return forward(*args, **kwargs)

    def _bring(self, piece: Piece) -> None:
        """Make a piece resident: its room is taken now, and its weights come when it is called."""
        self.resident_bytes += self._arrivals.expect(piece)
        piece.resident = True

    def _give_up(self, piece: Piece) -> None:
        """Evict a resident piece."""
        self._arrivals.forget(piece)
        piece.restore()
        self.resident_bytes -= piece.resident_bytes
        piece.resident = piece.decoded = False


def decode_for_good(slots: Sequence[Slot]) -> int:
    """Decode for good what of the encoded parameters is on the device. Returns the bytes of the plain tensors."""
    decoded: dict[int, nn.Parameter] = {}
    for slot, codec in encoded(slots):
        if id(slot.tensor) not in decoded:
            assert slot.here is not None
            decoded[id(slot.tensor)] = decode(codec, slot.here)
        slot.here, slot.holder[slot.key] = None, decoded[id(slot.tensor)]
    return sum(tensor.nbytes for tensor in decoded.values())


class Cpu(Placement):
    """The unit runs where its weights are. Encoded ones are decoded there, those of one module at a time."""

    name = "cpu"
    on_device = False
    _decoded_bytes = 0

    @property
    def host_bytes(self) -> int:
        return self._decoded_bytes

    def _place(self) -> None:
        for slot, _ in encoded(self.host_slots):
            slot.here = slot.tensor
        self._decoded_bytes = decode_for_good(self._rest)
        self._tables = [table for table in self._tables if encoded(table.slots)]
        self._place_tables()
        self._decode_calls()
        self._decoded_bytes, self.resident_bytes = self._decoded_bytes + self.resident_bytes, 0

    def _remove(self) -> None:
        self._decoded_bytes = 0
