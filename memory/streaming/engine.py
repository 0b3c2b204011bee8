"""The engine: it makes a Layout true. Pieces of a module are resident, or pass through a ring of bytes.

A streamed piece's weights are one flat buffer in RAM. One copy brings them to the ring while other pieces run, and
from the call of its first module to that of another piece's its parameters are views into the ring. Copies run on a
stream of their own and wait for the last use of the bytes, the piece waits for its copy; the host waits for neither,
and nothing comes back.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..errors import is_out_of_memory
from ..host import management as host
from ..planning.measured import Measured
from ..planning.solver import Layout
from ..units.calls import Forward, interpose
from ..units.encoding import Source
from ..units.loading import find_stored
from ..units.pieces import CallOrder, encoded, nbytes_of, plain_bytes_of
from ..units.structure import Slot
from ..units.tables import rows_of
from .arrivals import Arrivals
from .incoming import NOTHING, Incoming
from .order import Order
from .placement import Placement, decode_for_good, outside_inference
from .ring import Piece, Place, Ring, State
from .stopwatch import Stopwatch
from .supply import Supply

# [Note: Layout changes in mid-run]
# The host, another model or a slow step may change what stays on the device while a call is under way, from any
# thread. `Engine.apply` takes the new layout at once. What moves, and when, follows three rules:
# 1. The piece that runs (`_current`) never moves. If the new layout needs it to (`_is_held_up`), the ring stays as it
#    is, the other pieces that are to leave do so now, and `_leave` settles the rest when the call of this piece ends
#    (`_unsettled`).
# 2. Memory is freed before it is taken: pieces leave, then the ring is laid anew, then pieces come (`_settle`).
# 3. A wish for more room moves nothing while the running piece is in the way (`_more_bytes`). Otherwise pieces would
#    leave at once for others that can come only when the call ends, and the device would hold less than before.
# A wish for less room replaces a pending wish for more. When pieces come and memory runs out after all, the room
# becomes what the weights hold by then, and the layout is the best for that.

_THROUGH = 1  # of the kinds of pieces: those that come through windows

WHOLE = Layout()  # all pieces resident, as they are stored


class Engine(Placement):
    """A module on the device, its pieces as a layout says; everything outside the pieces is resident, tables excepted.

    With `source`, which tells where the weights lie in files, by name, what is on `meta` of the module comes straight
    from the disk; ValueError if it does not name all. `calls` tells the order of the calls inside.

    In a `streamed` layout gates at the modules of all pieces bring each in time. One call of the module at a time, from
    whichever thread, and `rest` after it; `grow`, `shrink` and `apply` may be called from others meanwhile. A piece
    that is never called, as far as `calls` tells, comes when it is.

    On the CPU a module runs so from disk: the ring, and the pieces that stay, lie in RAM beside the windows.

    In a `resident` layout a piece comes when it is called first, and the gates go as soon as all is there. Where the
    order of the calls is not known all is there before the first: who reads what is not known. Between calls pieces may
    leave; `complete` must come before each call.
    """

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        layout: Layout = WHOLE,
        source: Mapping[str, Source] | None = None,
        calls: CallOrder | None = None,
        *,
        incoming: Incoming = NOTHING,
    ) -> None:
        super().__init__(module, device, calls)
        self.name = "cpu" if device.type == "cpu" else layout.placement
        self.layout = layout
        on_disk = source is not None and any(slot.tensor.is_meta for slot in self.host_slots)
        found = find_stored(module, source or {}) if on_disk else {}
        if found is None:
            raise ValueError(f"the files do not name all weights of {type(module).__name__}: it must be loaded first.")
        here = {id(slot.tensor) for slot in self.host_slots if not slot.tensor.is_meta}
        self._found = {key: at for key, at in found.items() if key not in here}
        largest = max((slot.tensor.nbytes for slot in self.host_slots), default=0)
        self._bytes_in = self._bytes_read = 0
        self._called = [piece for piece in self._pieces if piece.called]
        self._supply = Supply(self._pieces if self._streams else [], self._queues, self._found, largest, incoming)
        self._arrivals = Arrivals(self._pieces, self._supply, self._queues)
        self._gates: dict[Piece, list[Callable[[], None]]] = {}
        self._lock = threading.RLock()
        self._ring: Ring | None = None
        self._current: Piece | None = None  # the one that runs
        self._watch: Stopwatch | None = None  # of the call that is timed, until it is read
        self._steady = False  # the last call has brought everything, and ended well
        idle = [] if self._streams else [piece for piece in self._pieces if not piece.called]
        self._outside_bytes = plain_bytes_of(self._rest) + self._workspace.nbytes + sum(p.held_bytes for p in idle)
        self._placed = self._unsettled = False
        self._more_bytes = 0  # by which to grow when the running call has ended
        self._order = Order(
            self._pieces,
            lambda piece: piece.called and piece.place is not None,
            lambda piece: piece.called and piece.place is not None and bool(piece.parts),
        )

    @property
    def host_bytes(self) -> int:
        return self._supply.host_bytes + (0 if self.on_device else self.resident_bytes)

    def take_bytes_in(self) -> int:
        """Return the bytes of weights copied to the device since this was last asked."""
        self._count()
        taken, self._bytes_in = self._bytes_in, 0
        return taken if self.on_device else 0

    def take_bytes_read(self) -> int:
        """Return the bytes of files that were read for them."""
        self._count()
        taken, self._bytes_read = self._bytes_read, 0
        return taken

    def _count(self) -> None:
        came, read = self._arrivals.take_bytes()
        self._bytes_in, self._bytes_read = self._bytes_in + came, self._bytes_read + read

    @property
    def is_whole(self) -> bool:
        """Return whether all pieces are on the device, or have their room."""
        return all(piece.resident for piece in self._pieces)

    @property
    def dequantized(self) -> frozenset[int]:
        """The pieces that are plain tensors by now."""
        return frozenset(i for i, piece in enumerate(self._called) if piece.state is State.DEQUANTIZED)

    @property
    def _streams(self) -> bool:
        return self.layout.placement == "streamed"

    def describe(self) -> str:
        stay = sum(piece.held_bytes for piece in self._called if piece.resident)
        whole = sum(piece.held_bytes for piece in self._called)
        how = "resident" if stay == whole else f"streamed, {stay / whole:.0%} of the weights stay"
        return how if self.on_device else f"cpu, {how}"

    # Changes of the layout

    def apply(self, layout: Layout) -> None:
        """Lie as one that is placed anew does. A layout of another placement wants another engine."""
        with self._lock:
            self._more_bytes = 0
            differs, self.layout = layout != self.layout, layout
            if differs:
                self._settle()

    def grow(self, bytes: int) -> int:
        """Take up to `bytes` more for resident pieces. Return the bytes really taken.

        Where a piece that runs is in the way, none is taken and nothing moves until its call ends.
        """
        if self._streams:
            return self._rearrange(max(0, bytes))
        with self._lock:
            before = self.resident_bytes
            missing = [piece for piece in self._pieces if not piece.resident]
            self._come(missing, within_bytes=bytes)
            return self.resident_bytes - before

    def shrink(self, bytes: int) -> int:
        """Give pieces up, to free `bytes` or as many as can be. Return the bytes really freed.

        In a streamed layout they stream from now on; one that runs is freed when its call ends, and not counted.
        In a resident one they are missing until `complete`, so that no call may be under way.
        """
        if self._streams:
            return max(0, -self._rearrange(-max(0, bytes)))
        with self._lock:
            before = self.resident_bytes
            for piece in self._pieces:
                if piece.resident and before - self.resident_bytes < bytes:
                    self._give_up(piece)
            return before - self.resident_bytes

    def complete(self, alone: bool = True) -> None:
        """Make ready for a call: bring back pieces of a resident layout, and dequantize what is to stay so.

        In a resident layout the gates go, where all has come. What others may be using stays as it is, if not `alone`.
        """
        with self._lock:
            if not self._streams:
                self._come([piece for piece in self._pieces if not piece.resident])
                self._arrivals.send_before(None, None)
                if self._supply.has_windows or (self._gates and not self._arrivals.owes):
                    self._arrive()
            if alone and any(piece.state is State.RESIDENT for piece in self._to_dequantize()):
                self._settle()

    def settle(self) -> None:
        if not self._streams and self._supply.has_windows:  # whose RAM is wanted otherwise
            self._arrive()
        self._supply.settle()

    # Calls

    def rest(self, failed: bool = False) -> None:
        with self._lock:
            last = self._current
            self._leave()
            self._steady = not failed
            if self._watch and self._watch.runs and (not self._watch.end() or failed):
                self._watch = None
            if failed:
                self._order.lost()
            elif last:
                self._fetch(last)

    def time_call(self) -> bool:
        """Time the pieces of the call that begins now, unless the one before it told nothing of it. True if it is."""
        with self._lock:
            if self._watch or not (self._streams and self._steady and self._queues.copying):
                return False
            self._watch = Stopwatch(self._queues)
            return True

    def take_seconds(self) -> Measured | None:
        """Return what the pieces of the timed call computed, once.

        None if none was timed, or the device is not done with it.
        A call that was disturbed, or did not come to each piece just so, is forgotten.
        """
        with self._lock:
            if self._watch is None or self._watch.runs:
                return None
            try:
                found = self._watch.seconds()
            except RuntimeError:  # some builds of torch have such events without the time
                found = {}
            if found is None:
                return None
            self._watch = None
            if set(found) != {None, *self._called}:
                return None
            sizes = tuple(piece.packed_bytes for piece in self._called)
            pairs = list(zip(self._called, self.layout.loads.pieces, strict=True))
            seconds = tuple(
                found[piece] + load.decode_seconds * (piece.state is State.DEQUANTIZED) for piece, load in pairs
            )
            return Measured(sizes, seconds, found[None])

    # Putting in place and taking away

    def _place(self) -> None:
        if self._found:
            called = [slot for piece in self._called for slot in piece.slots]
            self._supply.expect([slot.tensor for slot in (*called, *self._rest)])
        self._supply.open()
        self._move_rest()
        streaming = self._streaming()
        self._supply.prepare(streaming)
        staying = self._called if self._streams else self._pieces
        self._supply.pin_too([piece for piece in staying if piece not in streaming])
        self._place_tables()
        self._decode_calls()
        self._settle(self._pieces)
        self._placed = True
        if self._streams:
            self._open_gates(self._pieces)
            if self._called:
                self._fetch(None)

    def _remove(self) -> None:
        with self._lock:
            self._close_gates()
            self._supply.close()
            # The copies read host memory that may be dropped next, and write to what is freed here.
            self._queues.finish()
            if self._ring:
                for place in self._ring.places:
                    place.pending = None  # after an error each still knows the other, and would wait for the collector
                self._ring.clear()
            self._ring = self._current = self._watch = None
            self._order.lost()
            self._order.forget()
            self._placed = self._unsettled = self._steady = False
            self._more_bytes = 0
            self._arrivals.clear()
            for piece in self._pieces:
                piece.place = None
                piece.become(State.ON_HOST)

    def _rows(self, slot: Slot, ids: torch.Tensor) -> torch.Tensor:
        weight = slot.tensor
        self._supply.await_ram([weight])
        self._supply.await_disk([weight])
        ids = ids.cpu()
        rows = rows_of(slot, self._found.get(id(weight)), ids).to(self.device)
        self._bytes_in += rows.nbytes
        if nbytes := self._supply.file_bytes([weight]):
            self._bytes_read += nbytes * ids.unique().numel() // len(slot.holder[slot.key])
        return rows

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

    # The gates at each call

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
        if self._current is not piece:
            self._enter(piece)
        result = forward(*args, **kwargs)
        return self._kept(result) if piece.place else result

    def _enter(self, piece: Piece) -> None:
        host.throw_if_interrupted()
        if piece.resident:  # without the lock, as below
            self._arrivals.await_ram(piece)
        else:
            self._supply.await_ram(piece.hosts)
        with self._lock:
            self._leave()
            if not (piece.resident or (piece.called and piece.place)):
                self._expect(piece)
            self._arrivals.enter(piece)
            self._current, place = piece, piece.place
            self._order.called(piece)
            if place:
                if not place.holds:
                    self._load(place)
                place.enter()
            self._fetch(piece)
        if place:
            if place.pending:
                self._supply.wait(place)  # without the lock: others may grow and shrink meanwhile
            self._queues.wait(place.copied)
            if self._found:
                self._supply.passed([slot.tensor for slot in piece.slots])
        if watch := self._watch:
            watch.start(piece)

    def _expect(self, piece: Piece) -> None:
        """Make a piece ready to come that was thought never to be called."""
        with outside_inference():
            if piece.place:
                self._supply.prepare([piece])
                self._supply.await_ram(piece.hosts)
            else:
                self._come([piece])  # it is too large for the ring

    def _leave(self) -> None:
        """Note that the piece that ran does no longer."""
        if self._watch:
            self._watch.stop()
        piece, self._current = self._current, None
        if piece and piece.place and self._ring:
            self._ring.used(piece.place)
            # Stale views would be read without a word; host weights met on the way are an error that is seen.
            piece.restore()
        if self._unsettled:
            self._settle()
        if self._more_bytes:
            self._rearrange(0)

    def _passes(self, tensor: torch.Tensor) -> bool:
        return super()._passes(tensor) or bool(self._ring and self._ring.holds(tensor))

    def _fetch(self, piece: Piece | None) -> None:
        """Queue the copies of the pieces that come after one, as far as the ring has room beside those before them.

        None comes before the first. Where no call follows the one under way, nothing is fetched for it.
        """
        if self._ring is None:
            self._arrivals.send_before(None, self._current)
            return
        upcoming = self._upcoming(piece, self._ring.most_at_a_time)
        kept: list[Place | None] = [self._current.place if self._current else None]
        for following in upcoming:
            place = following.place
            assert place is not None
            if not place.holds:
                if any(other in kept for other in place.overlaps) or not self._supply.has_room(following):
                    break
                if self._arrivals.owes and not self._arrivals.send_before(following, self._current):
                    break
                self._load(place)
            kept.append(place)
        if self._supply.reach:
            upcoming = self._upcoming(piece, self._ring.most_at_a_time + self._supply.reach, _THROUGH)
            self._supply.ahead(self._arrivals.before_disk(upcoming, self._current))

    def _upcoming(self, piece: Piece | None, count: int, kind: int = 0) -> list[Piece]:
        upcoming = self._order.after(piece or self._called[-1], count, kind)
        if self.layout.loads.once and piece:
            later = set(self._called[self._called.index(piece) + 1 :]) if piece in self._called else set()
            return [following for following in upcoming if following in later]
        return upcoming

    def _load(self, place: Place) -> None:
        assert self._ring is not None
        for lost in self._ring.claim(place):
            self._supply.forget(lost)
        self._supply.load(place)
        place.holds = True  # not before, in case it is interrupted
        self._bytes_in += place.piece.packed_bytes
        self._bytes_read += self._supply.file_bytes(place.piece.tensors())

    # What streams and what stays

    def _streaming(self, layout: Layout | None = None) -> list[Piece]:
        return [self._called[i] for i in (layout or self.layout).streamed]

    def _to_dequantize(self, layout: Layout | None = None) -> list[Piece]:
        """Return the pieces to keep dequantized, from the call on that follows the one that they come in."""
        return [self._called[i] for i in (layout or self.layout).dequantized]

    def _rearrange(self, more_bytes: int) -> int:
        """Change the room by `more_bytes`. Return the bytes by which the weights have grown at once.

        See [Note: Layout changes in mid-run].
        """
        with self._lock:
            before, planned = self.resident_bytes, self._outside_bytes + self.layout.device_bytes
            wanted = more_bytes if more_bytes < 0 else max(self._more_bytes, more_bytes)
            self._more_bytes = 0
            layout = self._within(planned + wanted)
            change = layout.device_bytes - self.layout.device_bytes
            # Of few pieces, the ring may take more than those that leave.
            if not self._placed or not (change <= 0 if wanted < 0 else change > 0):
                return 0
            if wanted > 0 and self._current and (self._is_held_up(layout) or planned + change < before):
                self._more_bytes = wanted
                return 0
            self.layout = layout
            self._settle()
            return self.resident_bytes - before

    def _within(self, weights_bytes: int) -> Layout:
        """Return the layout for other bytes of weights; a ring that is there stays, if it can."""
        return self.layout.within(weights_bytes - self._outside_bytes, self._ring.nbytes if self._ring else None)

    def _is_held_up(self, layout: Layout) -> bool:
        """Return whether the piece that runs must end first, for the pieces to lie so.

        The ring cannot be laid anew under a piece that runs in it, nor can one that stays come into it, or be decoded
        for good while its modules see it decoded for their calls.
        """
        if (piece := self._current) is None:
            return False
        leaves = piece.resident and piece in self._streaming(layout)
        is_dequantized, to_be = piece.state is State.DEQUANTIZED, piece in self._to_dequantize(layout)
        return piece.place is not None or leaves or is_dequantized is not to_be

    def _settle(self, missing: Sequence[Piece] = ()) -> None:
        """Move all but the running piece to where the layout has them. See [Note: Layout changes in mid-run].

        Of a resident layout only these `missing` pieces come: others may have left so that something else has room.
        """
        if self._watch and self._watch.runs:
            self._watch = None  # pieces move meanwhile
        with outside_inference():
            there = [piece for piece in self._pieces if piece.resident]
            # 1. Free: pieces that stream from now on leave, and those to lie as they are stored again.
            streaming, dequantized = self._streaming(), self._to_dequantize()
            for piece in streaming:
                if not piece.place and piece is not self._current:
                    self._supply.prepare([piece])
            stored_again = [p for p in self._called if p.state is State.DEQUANTIZED and p not in dequantized]
            for piece in dict.fromkeys([*(p for p in streaming if p.resident), *stored_again]):
                if piece is not self._current:
                    self._give_up(piece)
            self._unsettled = self._is_held_up(self.layout)
            if self._unsettled:
                return
            # 2. Take: the ring, the pieces that stay, and what is dequantized takes more.
            self._lay(streaming)
            try:
                staying = self._called if self._streams else [*missing, *stored_again]
                self._come([piece for piece in staying if not (piece.resident or piece.place)])
                for piece in dequantized:
                    if piece.state is State.RESIDENT:
                        self._dequantize(piece)
            except Exception as error:
                layout = self._within(self.resident_bytes)
                if not is_out_of_memory(error) or not self._placed or layout == self.layout:
                    raise
                # 3. There is less memory than was said.
                self.layout = layout
                self._settle([piece for piece in (*missing, *there) if not piece.resident])

    def _dequantize(self, piece: Piece) -> None:
        """Keep a resident piece dequantized."""
        try:
            decode_for_good(piece.slots)
        except BaseException:
            self._give_up(piece)
            raise
        self.resident_bytes += piece.plain_bytes - piece.held_bytes
        piece.become(State.DEQUANTIZED)

    def _come(self, pieces: Sequence[Piece], within_bytes: int | None = None) -> None:
        """Make pieces resident, as many as there are bytes for: their room is taken now, and they come when called.

        In a resident layout they come at once where the order of the calls is not known.
        """
        taken = 0
        with outside_inference():
            for piece in pieces:
                if within_bytes is None or taken + piece.held_bytes <= within_bytes:
                    if not self._streams:
                        self._supply.open()
                    self.resident_bytes += self._arrivals.expect(piece)
                    taken += piece.held_bytes
            if not taken or self._streams:
                return
            self._supply.follow(self._arrivals.disk_copies())
            if self.calls.order:
                self._open_gates([piece for piece in self._pieces if piece.owed])
                self._arrivals.send_before(None, None)
            else:
                self._arrive()

    def _arrive(self) -> None:
        """Make later work wait for all pieces, so that no gates and no windows are needed any more."""
        for piece in self._pieces:
            self._arrivals.enter(piece)
        self._close_gates()
        self._supply.close()

    def _give_up(self, piece: Piece) -> None:
        """Evict a resident piece."""
        nbytes = piece.resident_bytes
        self._supply.stop()  # it holds on to the room of pieces that are to come
        self._arrivals.forget(piece)
        piece.restore()
        self.resident_bytes -= nbytes
        piece.become(State.ON_HOST)

    def _lay(self, streaming: list[Piece]) -> None:
        """Give just these pieces places in a ring of the chosen size."""
        wanted = self.layout.ring_bytes
        if (
            self._ring
            and [p.piece for p in self._ring.places if p.piece.called] == streaming
            and self._ring.nbytes == wanted
        ):
            return
        if self._ring:
            for place in self._ring.places:
                self._supply.forget(place)
            self._ring.clear()
            if self._ring.nbytes != wanted:
                self._queues.finish()  # the copies into what is freed here
                self.resident_bytes -= self._ring.nbytes
                self._ring = None
        if wanted:
            if self._ring is None:
                self._ring = Ring(wanted, self._queues)
                self.resident_bytes += wanted
            self._ring.lay(streaming, [piece for piece in self._pieces if not (piece.called or piece.resident)])
        self._order.forget()
