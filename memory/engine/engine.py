"""The engine: it makes a Layout true. Groups of a module are resident, or pass through a ring of bytes.

A streamed group's weights are one flat buffer in RAM. One copy brings them to the ring while other groups run, and
from the call of its first module to that of another group's its parameters are views into the ring. Copies run on a
stream of their own and wait for the last use of the bytes, the group waits for its copy; the host waits for neither,
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
from ..weights.embeddings import rows_of
from ..weights.encoding import Source
from ..weights.groups import CallOrder, encoded, nbytes_of, plain_bytes_of
from ..weights.interpose import Forward, interpose
from ..weights.loading import find_stored
from ..weights.structure import ParameterRef
from .deferred_uploads import DeferredUploads
from .event_timer import EventTimer
from .order import Order
from .pending_reads import NOTHING, PendingReads
from .placement import Placement, decode_for_good, outside_inference
from .ring import Ring, RingSlot, State, WeightGroup
from .weight_source import WeightSource

# [Note: Layout changes in mid-run]
# The host, another model or a slow step may change what stays on the device while a call is under way, from any
# thread. `Engine.apply` takes the new layout at once. What moves, and when, follows three rules:
# 1. The group that runs (`_current`) never moves. If the new layout needs it to (`_is_held_up`), the ring stays as it
#    is, the other groups that are to leave do so now, and `_leave` settles the rest when the call of this group ends
#    (`_unsettled`).
# 2. Memory is freed before it is taken: groups leave, then the ring is laid anew, then groups come (`_settle`).
# 3. A wish for more room moves nothing while the running group is in the way (`_more_bytes`). Otherwise groups would
#    leave at once for others that can come only when the call ends, and the device would hold less than before.
# A wish for less room replaces a pending wish for more. When groups come and memory runs out after all, the room
# becomes what the weights hold by then, and the layout is the best for that.

_THROUGH = 1  # of the kinds of groups: those that come through windows

WHOLE = Layout()  # all groups resident, as they are stored


class Engine(Placement):
    """A module on the device, its groups as a layout says; everything outside the groups is resident, tables excepted.

    With `source`, which tells where the weights lie in files, by name, what is on `meta` of the module comes straight
    from the disk; ValueError if it does not name all. `calls` tells the order of the calls inside.

    In a `streamed` layout gates at the modules of all groups bring each in time. One call of the module at a time, from
    whichever thread, and `rest` after it; `grow`, `shrink` and `apply` may be called from others meanwhile. A group
    that is never called, as far as `calls` tells, comes when it is.

    On the CPU a module runs so from disk: the ring, and the groups that stay, lie in RAM beside the windows.

    In a `resident` layout a group comes when it is called first, and the gates go as soon as all is there. Where the
    order of the calls is not known all is there before the first: who reads what is not known. Between calls groups may
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
        incoming: PendingReads = NOTHING,
    ) -> None:
        super().__init__(module, device, calls)
        self.name = "cpu" if device.type == "cpu" else layout.placement
        self.layout = layout
        on_disk = source is not None and any(ref.tensor.is_meta for ref in self.host_refs)
        found = find_stored(module, source or {}) if on_disk else {}
        if found is None:
            raise ValueError(f"the files do not name all weights of {type(module).__name__}: it must be loaded first.")
        here = {id(ref.tensor) for ref in self.host_refs if not ref.tensor.is_meta}
        self._found = {key: at for key, at in found.items() if key not in here}
        largest = max((ref.tensor.nbytes for ref in self.host_refs), default=0)
        self._bytes_in = self._bytes_read = 0
        self._called = [group for group in self._groups if group.called]
        self._source = WeightSource(self._groups if self._streams else [], self._queues, self._found, largest, incoming)
        self._uploads = DeferredUploads(self._groups, self._source, self._queues)
        self._gates: dict[WeightGroup, list[Callable[[], None]]] = {}
        self._lock = threading.RLock()
        self._ring: Ring | None = None
        self._current: WeightGroup | None = None  # the one that runs
        self._watch: EventTimer | None = None  # of the call that is timed, until it is read
        self._steady = False  # the last call has brought everything, and ended well
        idle = [] if self._streams else [group for group in self._groups if not group.called]
        self._outside_bytes = plain_bytes_of(self._rest) + self._workspace.nbytes + sum(p.held_bytes for p in idle)
        self._placed = self._unsettled = False
        self._more_bytes = 0  # by which to grow when the running call has ended
        self._order = Order(
            self._groups,
            lambda group: group.called and group.slot is not None,
            lambda group: group.called and group.slot is not None and bool(group.parts),
        )

    @property
    def host_bytes(self) -> int:
        return self._source.host_bytes + (0 if self.on_device else self.resident_bytes)

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
        came, read = self._uploads.take_bytes()
        self._bytes_in, self._bytes_read = self._bytes_in + came, self._bytes_read + read

    @property
    def is_whole(self) -> bool:
        """Return whether all groups are on the device, or have their room."""
        return all(group.resident for group in self._groups)

    @property
    def dequantized(self) -> frozenset[int]:
        """The groups that are plain tensors by now."""
        return frozenset(i for i, group in enumerate(self._called) if group.state is State.DEQUANTIZED)

    @property
    def _streams(self) -> bool:
        return self.layout.placement == "streamed"

    def describe(self) -> str:
        stay = sum(group.held_bytes for group in self._called if group.resident)
        whole = sum(group.held_bytes for group in self._called)
        how = "resident" if stay == whole else f"streamed, {stay / whole:.0%} of the weights stay"
        return how if self.on_device else f"cpu, {how}"

    # Changes of the layout

    def apply(self, layout: Layout) -> None:
        """Lie as one that is placed anew does. A layout of another placement wants another engine."""
        with self._lock:
            self._more_bytes = 0
            differs, self.layout = self._unsettled or layout != self.layout, layout
            if differs:
                self._settle()

    def grow(self, bytes: int) -> int:
        """Take up to `bytes` more for resident groups. Return the bytes really taken.

        Where a group that runs is in the way, none is taken and nothing moves until its call ends.
        """
        if self._streams:
            return self._rearrange(max(0, bytes))
        with self._lock:
            before = self.resident_bytes
            missing = [group for group in self._groups if not group.resident]
            self._come(missing, within_bytes=bytes)
            return self.resident_bytes - before

    def shrink(self, bytes: int) -> int:
        """Give groups up, to free `bytes` or as many as can be. Return the bytes really freed.

        In a streamed layout they stream from now on; one that runs is freed when its call ends, and not counted.
        In a resident one they are missing until `complete`, so that no call may be under way.
        """
        if self._streams:
            return max(0, -self._rearrange(-max(0, bytes)))
        with self._lock:
            before = self.resident_bytes
            for group in self._groups:
                if group.resident and before - self.resident_bytes < bytes:
                    self._give_up(group)
            return before - self.resident_bytes

    def complete(self, alone: bool = True) -> None:
        """Make ready for a call: bring back groups of a resident layout, and dequantize what is to stay so.

        In a resident layout the gates go, where all has come. What others may be using stays as it is, if not `alone`.
        """
        with self._lock:
            if not self._streams:
                self._come([group for group in self._groups if not group.resident])
                self._uploads.send_before(None, None)
                if self._source.has_windows or (self._gates and not self._uploads.owes):
                    self._arrive()
            if alone and any(group.state is State.RESIDENT for group in self._to_dequantize()):
                self._settle()

    def settle(self) -> None:
        if not self._streams and self._source.has_windows:  # whose RAM is wanted otherwise
            self._arrive()
        self._source.settle()

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
        """Time the groups of the call that begins now, unless the one before it told nothing of it. True if it is."""
        with self._lock:
            if self._watch or not (self._streams and self._steady and self._queues.copying):
                return False
            self._watch = EventTimer(self._queues)
            return True

    def take_seconds(self) -> Measured | None:
        """Return what the groups of the timed call computed, once.

        None if none was timed, or the device is not done with it.
        A call that was disturbed, or did not come to each group just so, is forgotten.
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
            sizes = tuple(group.packed_bytes for group in self._called)
            pairs = list(zip(self._called, self.layout.loads.groups, strict=True))
            seconds = tuple(
                found[group] + load.decode_seconds * (group.state is State.DEQUANTIZED) for group, load in pairs
            )
            return Measured(sizes, seconds, found[None])

    # Placing and removing

    def _place(self) -> None:
        if self._found:
            called = [ref for group in self._called for ref in group.refs]
            self._source.expect([ref.tensor for ref in (*called, *self._rest)])
        self._source.open()
        self._move_rest()
        streaming = self._streaming()
        self._source.prepare(streaming)
        staying = self._called if self._streams else self._groups
        self._source.pin_too([group for group in staying if group not in streaming])
        self._place_tables()
        self._decode_calls()
        self._settle(self._groups)
        self._placed = True
        if self._streams:
            self._open_gates(self._groups)
            if self._called:
                self._fetch(None)

    def _remove(self) -> None:
        with self._lock:
            self._close_gates()
            self._source.close()
            # The copies read host memory that may be dropped next, and write to what is freed here.
            self._queues.finish()
            if self._ring:
                for slot in self._ring.slots:
                    slot.pending = None  # after an error each still knows the other, and would wait for the collector
                self._ring.clear()
            self._ring = self._current = self._watch = None
            self._order.lost()
            self._order.forget()
            self._placed = self._unsettled = self._steady = False
            self._more_bytes = 0
            self._uploads.clear()
            for group in self._groups:
                group.slot = None
                group.become(State.ON_HOST)

    def _rows(self, ref: ParameterRef, ids: torch.Tensor) -> torch.Tensor:
        weight = ref.tensor
        self._source.await_ram([weight])
        self._source.await_disk([weight])
        ids = ids.cpu()
        rows = rows_of(ref, self._found.get(id(weight)), ids).to(self.device)
        self._bytes_in += rows.nbytes
        if nbytes := self._source.file_bytes([weight]):
            self._bytes_read += nbytes * ids.unique().numel() // len(ref.holder[ref.key])
        return rows

    def _move(self, moving: list[ParameterRef]) -> None:
        """Bring weights to the device: from RAM, or from the disk through the windows, which must be open."""
        copies = self._source.bring([ref.tensor for ref in moving], self.device)
        came = sum(tensor.nbytes for tensor in copies.values())
        self._bytes_read += self._source.file_bytes([ref.tensor for ref in moving])
        for ref in moving:
            if id(ref.tensor) not in copies:
                self._source.await_ram([ref.tensor])
                self._source.await_disk([ref.tensor])
                copies[id(ref.tensor)] = ref.tensor.detach().to(self.device)
                came += ref.tensor.nbytes
            ref.set(copies[id(ref.tensor)])
        self.resident_bytes += came
        self._bytes_in += came

    def _move_rest(self) -> None:
        """Bring what is in no group, and decode it for good: who reads it is not known. It comes before all others."""
        self._move(self._rest)
        self._source.begin()
        self.resident_bytes += decode_for_good(self._rest) - nbytes_of([ref for ref, _ in encoded(self._rest)])

    # The gates at each call

    def _open_gates(self, groups: Sequence[WeightGroup]) -> None:
        """Pass the calls of these groups' modules through `_gate`."""
        for group in groups:
            if group not in self._gates:
                gates = [(owner.module, functools.partial(self._gate, group)) for owner in group.owners]
                self._gates[group] = [interpose(module, gate) for module, gate in gates]

    def _close_gates(self) -> None:
        for undo in (undo for gates in self._gates.values() for undo in gates):
            undo()
        self._gates.clear()

    def _gate(self, group: WeightGroup, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if self._current is not group:
            self._enter(group)
        result = forward(*args, **kwargs)
        return self._kept(result) if group.slot else result

    def _enter(self, group: WeightGroup) -> None:
        host.throw_if_interrupted()
        if group.resident:  # without the lock, as below
            self._uploads.await_ram(group)
        else:
            self._source.await_ram(group.hosts)
        with self._lock:
            self._leave()
            if not (group.resident or (group.called and group.slot)):
                self._expect(group)
            self._uploads.enter(group)
            self._current, slot = group, group.slot
            self._order.called(group)
            if slot:
                if not slot.holds:
                    self._load(slot)
                slot.enter()
            self._fetch(group)
        if slot:
            if slot.pending:
                self._source.wait(slot)  # without the lock: others may grow and shrink meanwhile
            self._queues.wait(slot.copied)
            if self._found:
                self._source.passed([ref.tensor for ref in group.refs])
        if watch := self._watch:
            watch.start(group)

    def _expect(self, group: WeightGroup) -> None:
        """Make a group ready to come that was thought never to be called."""
        with outside_inference():
            if group.slot:
                self._source.prepare([group])
                self._source.await_ram(group.hosts)
            else:
                self._come([group])  # it is too large for the ring

    def _leave(self) -> None:
        """Note that the group that ran does no longer."""
        if self._watch:
            self._watch.stop()
        group, self._current = self._current, None
        if group and group.slot and self._ring:
            self._ring.used(group.slot)
            # Stale views would be read without a word; host weights met on the way are an error that is seen.
            group.restore()
        if self._unsettled:
            self._settle()
        if self._more_bytes:
            self._rearrange(0)

    def _passes(self, tensor: torch.Tensor) -> bool:
        return super()._passes(tensor) or bool(self._ring and self._ring.holds(tensor))

    def _fetch(self, group: WeightGroup | None) -> None:
        """Queue the copies of the groups that come after one, as far as the ring has room beside those before them.

        None comes before the first. Where no call follows the one under way, nothing is fetched for it.
        """
        if self._ring is None:
            self._uploads.send_before(None, self._current)
            return
        upcoming = self._upcoming(group, self._ring.most_at_a_time)
        kept: list[RingSlot | None] = [self._current.slot if self._current else None]
        for following in upcoming:
            slot = following.slot
            assert slot is not None
            if not slot.holds:
                if any(other in kept for other in slot.overlaps) or not self._source.has_room(following):
                    break
                if self._uploads.owes and not self._uploads.send_before(following, self._current):
                    break
                self._load(slot)
            kept.append(slot)
        if self._source.reach:
            upcoming = self._upcoming(group, self._ring.most_at_a_time + self._source.reach, _THROUGH)
            self._source.ahead(self._uploads.before_disk(upcoming, self._current))

    def _upcoming(self, group: WeightGroup | None, count: int, kind: int = 0) -> list[WeightGroup]:
        upcoming = self._order.after(group or self._called[-1], count, kind)
        if self.layout.loads.once and group:
            later = set(self._called[self._called.index(group) + 1 :]) if group in self._called else set()
            return [following for following in upcoming if following in later]
        return upcoming

    def _load(self, slot: RingSlot) -> None:
        assert self._ring is not None
        for lost in self._ring.claim(slot):
            self._source.forget(lost)
        self._source.load(slot)
        slot.holds = True  # not before, in case it is interrupted
        self._bytes_in += slot.group.packed_bytes
        self._bytes_read += self._source.file_bytes(slot.group.tensors())

    # What streams and what stays

    def _streaming(self, layout: Layout | None = None) -> list[WeightGroup]:
        return [self._called[i] for i in (layout or self.layout).streamed]

    def _to_dequantize(self, layout: Layout | None = None) -> list[WeightGroup]:
        """Return the groups to keep dequantized, from the call on that follows the one that they come in."""
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
            # Of few groups, the ring may take more than those that leave.
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
        """Return whether the group that runs must end first, for the groups to lie so.

        The ring cannot be laid anew under a group that runs in it, nor can one that stays come into it, or be decoded
        for good while its modules see it decoded for their calls.
        """
        if (group := self._current) is None:
            return False
        leaves = group.resident and group in self._streaming(layout)
        is_dequantized, to_be = group.state is State.DEQUANTIZED, group in self._to_dequantize(layout)
        return group.slot is not None or leaves or is_dequantized is not to_be

    def _settle(self, missing: Sequence[WeightGroup] = ()) -> None:
        """Move all but the running group to where the layout has them. See [Note: Layout changes in mid-run].

        Of a resident layout only these `missing` groups come: others may have left so that something else has room.
        """
        if self._watch and self._watch.runs:
            self._watch = None  # groups move meanwhile
        self._unsettled = True  # until all is done: a ring that found no memory is laid when the next group is called
        with outside_inference():
            there = [group for group in self._groups if group.resident]
            # 1. Free: groups that stream from now on leave, and those to lie as they are stored again.
            streaming, dequantized = self._streaming(), self._to_dequantize()
            for group in streaming:
                if not group.slot and group is not self._current:
                    self._source.prepare([group])
            stored_again = [p for p in self._called if p.state is State.DEQUANTIZED and p not in dequantized]
            for group in dict.fromkeys([*(p for p in streaming if p.resident), *stored_again]):
                if group is not self._current:
                    self._give_up(group)
            if self._is_held_up(self.layout):
                return
            # 2. Take: the ring, the groups that stay, and what is dequantized takes more.
            self._lay(streaming)
            try:
                staying = self._called if self._streams else [*missing, *stored_again]
                self._come([group for group in staying if not (group.resident or group.slot)])
                for group in dequantized:
                    if group.state is State.RESIDENT:
                        self._dequantize(group)
            except Exception as error:
                layout = self._within(self.resident_bytes)
                if not is_out_of_memory(error) or not self._placed or layout == self.layout:
                    raise
                # 3. There is less memory than was said.
                self.layout = layout
                self._settle([group for group in (*missing, *there) if not group.resident])
            else:
                self._unsettled = False

    def _dequantize(self, group: WeightGroup) -> None:
        """Keep a resident group dequantized."""
        try:
            decode_for_good(group.refs)
        except BaseException:
            self._give_up(group)
            raise
        self.resident_bytes += group.plain_bytes - group.held_bytes
        group.become(State.DEQUANTIZED)

    def _come(self, groups: Sequence[WeightGroup], within_bytes: int | None = None) -> None:
        """Make groups resident, as many as there are bytes for: their room is taken now, and they come when called.

        In a resident layout they come at once where the order of the calls is not known.
        """
        taken = 0
        with outside_inference():
            for group in groups:
                if within_bytes is None or taken + group.held_bytes <= within_bytes:
                    if not self._streams:
                        self._source.open()
                    self.resident_bytes += self._uploads.expect(group)
                    taken += group.held_bytes
            if not taken or self._streams:
                return
            self._source.follow(self._uploads.disk_copies())
            if self.calls.order:
                self._open_gates([group for group in self._groups if group.owed])
                self._uploads.send_before(None, None)
            else:
                self._arrive()

    def _arrive(self) -> None:
        """Make later work wait for all groups, so that no gates and no windows are needed any more."""
        for group in self._groups:
            self._uploads.enter(group)
        self._close_gates()
        self._source.close()

    def _give_up(self, group: WeightGroup) -> None:
        """Evict a resident group."""
        nbytes = group.resident_bytes
        self._source.stop()  # it holds on to the room of groups that are to come
        self._uploads.forget(group)
        group.restore()
        self.resident_bytes -= nbytes
        group.become(State.ON_HOST)

    def _lay(self, streaming: list[WeightGroup]) -> None:
        """Give just these groups slots in a ring of the chosen size."""
        wanted = self.layout.ring_bytes
        if (
            self._ring
            and [p.group for p in self._ring.slots if p.group.called] == streaming
            and self._ring.nbytes == wanted
        ):
            return
        if self._ring:
            for slot in self._ring.slots:
                self._source.forget(slot)
            self._ring.clear()
            if self._ring.nbytes != wanted:
                self._queues.finish()  # the copies into what is freed here
                self.resident_bytes -= self._ring.nbytes
                self._ring = None
        if wanted:
            if self._ring is None:
                self._ring = Ring(wanted, self._queues)
                self.resident_bytes += wanted
            self._ring.lay(streaming, [group for group in self._groups if not (group.called or group.resident)])
        self._order.forget()
