"""The streaming engine: a module runs with some of its pieces resident and the others passing through a ring of bytes.

A streamed piece's weights are one flat buffer in RAM. One copy brings them to the ring while other pieces run, and
from the call of its first module to that of another piece's its parameters are views into the ring. Copies run on a
stream of their own and wait for the last use of the bytes, the piece waits for its copy; the host waits for neither,
and nothing comes back.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import nn

from ..errors import is_out_of_memory
from ..host import management as host
from ..planning.measured import Measured
from ..planning.solver import Arrangement, Loads, arrange, least_bytes
from ..sizes import format_bytes
from ..units.calls import Forward
from ..units.encoding import Source
from ..units.pieces import CallOrder, plain_bytes_of
from ..vocabulary import PlacementName
from .incoming import NOTHING, Incoming
from .order import Order
from .placement import Placement, decode_for_good, outside_inference
from .ring import Piece, Place, Ring
from .stopwatch import Stopwatch

# [Note: Layout changes in mid-run]
# The host, another model or a slow step may change what stays on the device while a call is under way, from any
# thread. `Streamed._rearrange` computes the new arrangement at once. What moves, and when, follows three rules:
# 1. The piece that runs (`_current`) never moves. If the new arrangement needs it to (`_is_held_up`), the ring stays
#    as it is, the other pieces that are to leave do so now, and `_leave` settles the rest when the call of this piece
#    ends (`_unsettled`).
# 2. Memory is freed before it is taken: pieces leave, then the ring is laid anew, then pieces come (`_settle`).
# 3. A wish for more room moves nothing while the running piece is in the way (`_more_bytes`). Otherwise pieces would
#    leave at once for others that can come only when the call ends, and the device would hold less than before.
# A wish for less room replaces a pending wish for more. When pieces come and memory runs out after all, the budget
# becomes what the weights hold by then, and the arrangement is chosen again for it.

_THROUGH = 1  # of the kinds of pieces: those that come through windows


class Streamed(Placement):
    """Some pieces resident, the rest through a ring; everything outside the pieces is resident, tables excepted.

    `weights_bytes` is what the weights may take on the device in all: those outside the pieces, the ring and the
    resident pieces. 0 asks for the least. Raises ValueError if it is less than `least_bytes`. `calls` tells the order
    of the calls inside, and `loads` what they compute: what stays is chosen by it. A piece that is never called, as far
    as that tells, comes when it is. One call of the module at a time, from whichever thread, and `rest`
    after it; `grow` and `shrink` may be called from others meanwhile.

    The windows that a module on disk is read through serve pieces in RAM that could not be pinned too, where the device
    wants it pinned.
    """

    name: ClassVar[PlacementName] = "streamed"
    _streams = True

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        weights_bytes: int = 0,
        source: Mapping[str, Source] | None = None,
        calls: CallOrder | None = None,
        loads: Loads | None = None,
        *,
        incoming: Incoming = NOTHING,
    ) -> None:
        super().__init__(module, device, source, calls, incoming=incoming)
        self._lock = threading.RLock()
        self._ring: Ring | None = None
        self._current: Piece | None = None  # the one that runs
        self._watch: Stopwatch | None = None  # of the call that is timed, until it is read
        self._steady = False  # the last call has brought everything, and ended well
        self._called = [piece for piece in self._pieces if piece.called]
        self._loads = self._located(loads or Loads.even(self._called))
        self._fixed_bytes = plain_bytes_of(self._rest) + self._workspace.nbytes
        least = self._least_bytes()
        if 0 < weights_bytes < least:
            raise ValueError(
                f"{format_bytes(weights_bytes)} are too little to stream {type(module).__name__}: it wants "
                f"{format_bytes(least)} for two of its largest pieces and for the weights outside of them."
            )
        self._budget_bytes = max(weights_bytes, least)
        self._arrangement = self._choose(self._budget_bytes)
        self._placed = self._unsettled = False
        self._more_bytes = 0  # by which to grow when the running call has ended
        self._order = Order(
            self._pieces,
            lambda piece: piece.called and piece.place is not None,
            lambda piece: piece.called and piece.place is not None and bool(piece.parts),
        )

    @property
    def host_bytes(self) -> int:
        return super().host_bytes + (0 if self.on_device else self.resident_bytes)

    @staticmethod
    def least_bytes(module: nn.Module, calls: CallOrder | None = None) -> int:
        """Return the least `weights_bytes` that the module can be streamed in."""
        return Streamed(module, torch.device("cpu"), calls=calls)._least_bytes()

    @property
    def streamed_bytes(self) -> int:
        """Bytes that a call of the whole module copies to the device."""
        return self._arrangement.copied_bytes

    def refit(self, weights_bytes: int, loads: Loads) -> None:
        """Sit as one that is placed anew does, within so many bytes and for calls that compute this."""
        with self._lock, outside_inference():
            self._loads, self._budget_bytes = self._located(loads), max(weights_bytes, self._least_bytes())
            self._more_bytes = 0
            found = self._choose(self._budget_bytes, keep_ring=False)
            if found != self._arrangement:
                self._arrangement = found
                self._settle()

    def grow(self, bytes: int) -> int:
        """Take up to so many bytes more for resident pieces. Returns the bytes really taken.

        Where a piece that runs is in the way, none is taken and nothing moves until its call ends.
        """
        return self._rearrange(max(0, bytes))

    def shrink(self, bytes: int) -> int:
        """Stream more pieces, to free so many bytes or as many as can be. Returns the bytes really freed.

        A piece that is running is freed when its call ends, and not counted.
        """
        return max(0, -self._rearrange(-max(0, bytes)))

    def describe(self) -> str:
        stay = sum(piece.held_bytes for piece in self._called if piece.resident)
        whole = sum(piece.held_bytes for piece in self._called)
        return "resident" if stay == whole else f"streamed, {stay / whole:.0%} of the weights stay"

    def settle(self) -> None:
        self._supply.settle()

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
                if any(piece.resident and not (piece.decoded or piece.owed) for piece in self._to_decode()):
                    self._settle()
                self._fetch(last)

    def time_call(self) -> bool:
        """Time the pieces of the call that begins now, unless the one before it told nothing of it. True if it is."""
        with self._lock:
            if self._watch or not (self._steady and self._queues.copying):
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
            pairs = list(zip(self._called, self._loads.pieces, strict=True))
            seconds = tuple(found[piece] + load.decode_seconds * piece.decoded for piece, load in pairs)
            return Measured(sizes, seconds, found[None])

    # Putting in place and taking away

    def _place(self) -> None:
        self._supply.open()
        self._move_rest()
        streaming = self._streaming()
        self._supply.prepare(streaming)
        self._supply.pin_too([piece for piece in self._called if piece not in streaming])
        self._settle()
        self._place_tables()
        self._decode_calls()
        self._open_gates(self._pieces)
        self._placed = True
        if self._called:
            self._fetch(None)

    def _remove(self) -> None:
        with self._lock:
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
                piece.resident = piece.decoded = False
                piece.place = None

    # The gates at each call

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
                self._bring(piece)  # it is too large for the ring

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
        if self._loads.once and piece:
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

    def _keep_decoded(self, piece: Piece) -> None:
        """Keep a resident piece dequantized."""
        try:
            decode_for_good(piece.slots)
        except BaseException:
            self._give_up(piece)
            raise
        self.resident_bytes += piece.plain_bytes - piece.held_bytes
        piece.decoded = True

    # What streams and what stays

    def _located(self, loads: Loads) -> Loads:
        """Return the loads, with which pieces are not in RAM."""
        on_disk = frozenset(i for i, piece in enumerate(self._called) if self._supply.is_on_disk(piece))
        return replace(loads, on_disk=on_disk)

    def _choose(self, budget_bytes: int, keep_ring: bool = True) -> Arrangement:
        """Return how the pieces must lie to keep a budget; a ring that is there stays, if it can."""
        room, there = budget_bytes - self._fixed_bytes, self._ring.nbytes if self._ring and keep_ring else None
        found = arrange(self._loads, room, there)
        if self._loads.on_disk & set(found.copied) <= set(found.from_disk):
            return found
        return arrange(replace(self._loads, ram_bytes=None), room, there)  # RAM holds others than would be best

    def _least_bytes(self) -> int:
        return self._fixed_bytes + least_bytes(self._loads.pieces)

    def _streaming(self, arrangement: Arrangement | None = None) -> list[Piece]:
        return [self._called[i] for i in (arrangement or self._arrangement).streamed]

    def _to_decode(self, arrangement: Arrangement | None = None) -> list[Piece]:
        """Return what is to stay decoded, from the end of the call that it comes in."""
        return [self._called[i] for i in (arrangement or self._arrangement).decoded]

    def _planned_bytes(self, arrangement: Arrangement | None = None) -> int:
        """Return what the weights take once everything is where it shall be."""
        return self._fixed_bytes + (arrangement or self._arrangement).device_bytes

    def _rearrange(self, more_bytes: int) -> int:
        """Change the budget by `more_bytes`. Return the bytes by which the weights have grown at once.

        See [Note: Layout changes in mid-run].
        """
        with self._lock, outside_inference():
            before, planned = self.resident_bytes, self._planned_bytes()
            wanted = more_bytes if more_bytes < 0 else max(self._more_bytes, more_bytes)
            self._more_bytes = 0
            arrangement = self._choose(planned + wanted)
            change = self._planned_bytes(arrangement) - planned
            # Of few pieces, the ring may take more than those that leave.
            if not self._placed or not (change <= 0 if wanted < 0 else change > 0):
                return 0
            if wanted > 0 and self._current and (self._is_held_up(arrangement) or planned + change < before):
                self._more_bytes = wanted
                return 0
            self._arrangement, self._budget_bytes = arrangement, planned + wanted
            self._settle()
            return self.resident_bytes - before

    def _is_held_up(self, arrangement: Arrangement) -> bool:
        """Return whether the piece that runs must end first, for the pieces to lie so.

        The ring cannot be laid anew under a piece that runs in it, nor can one that stays come into it, or be decoded
        for good while its modules see it decoded for their calls.
        """
        if (piece := self._current) is None:
            return False
        leaves = piece.resident and piece in self._streaming(arrangement)
        return piece.place is not None or leaves or piece.decoded is not (piece in self._to_decode(arrangement))

    def _settle(self) -> None:
        """Move all but the running piece to their new places. See [Note: Layout changes in mid-run]."""
        if self._watch and self._watch.runs:
            self._watch = None  # pieces move meanwhile
        with outside_inference():
            streaming = self._streaming()
            decoded = self._to_decode()
            stored_again = [piece for piece in self._called if piece.decoded and piece not in decoded]
            leaving = [piece for piece in streaming if piece.resident]
            for piece in streaming:
                if not piece.place and piece is not self._current:
                    self._supply.prepare([piece])
            for piece in (*leaving, *(piece for piece in stored_again if piece not in leaving)):
                if piece is not self._current:
                    self._give_up(piece)
            self._unsettled = self._is_held_up(self._arrangement)
            if self._unsettled:
                return
            self._lay(streaming)
            try:
                for piece in self._called:
                    if not (piece.resident or piece.place):
                        self._bring(piece)
                for piece in decoded:
                    if not (piece.decoded or piece.owed):
                        self._keep_decoded(piece)
            except Exception as error:
                if not is_out_of_memory(error) or not self._placed:
                    raise
                # There is less memory than was said.
                self._budget_bytes = max(self._least_bytes(), self.resident_bytes)
                self._arrangement = self._choose(self._budget_bytes)
                self._settle()

    def _lay(self, streaming: list[Piece]) -> None:
        """Give just these pieces places in a ring of the chosen size."""
        wanted = self._arrangement.ring_bytes
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


class CpuStreamed(Streamed):
    """The unit runs on the CPU, from disk: the ring and the weights that stay lie in RAM, beside the windows."""

    name = "cpu"
    on_device = False

    def describe(self) -> str:
        return f"cpu, {super().describe()}"

    def take_bytes_in(self) -> int:
        super().take_bytes_in()
        return 0
