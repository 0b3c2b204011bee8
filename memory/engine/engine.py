"""The engine: makes a `Layout` true. Weight groups of a module are resident, or pass through the ring.

Gates around the modules of a group notice when it is called. They make the device wait for the group's copy, point the
parameters to the device copy, and start the prefetch of the next groups. The trip of one weight is told in `ring`.
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
from ..planning.measured import Measured, spread
from ..planning.solver import Layout
from ..weights.embeddings import rows_of
from ..weights.encoding import Source
from ..weights.groups import CallOrder, encoded, nbytes_of, plain_bytes_of
from ..weights.interpose import Forward, interpose
from ..weights.loading import find_stored
from ..weights.structure import ParameterRef
from .baton import pass_on
from .deferred_uploads import DeferredUploads
from .event_timer import EventTimer
from .order import Order
from .pending_reads import NOTHING, PendingReads
from .placement import Placement, keep_dequantized, outside_inference
from .ring import Ring, RingSlot, State, WeightGroup
from .weight_source import WeightSource

# [Note: Layout changes in mid-run]
# The host, another model or a slow step may change the room for weights while a call is under way, from any thread.
# `Engine.apply`, `grow` and `shrink` take the new layout at once. Three rules decide which groups move, and when:
# 1. The running group (`_current`) never moves. If the new layout needs it to (`_is_held_up`), the ring stays as it is
#    and the other groups that must leave are evicted now. `_leave` settles the rest when this group ends
#    (`_unsettled`).
# 2. Memory is freed before it is taken: groups are evicted, the ring is laid anew, then groups are brought
#    (`_move_groups`).
# 3. A request for more room moves nothing while the running group is in the way (`_more_bytes`). Otherwise groups would
#    be evicted at once for others that can be brought only when it ends: the device would hold less than before.
# A request for less room replaces a pending request for more. If memory runs out although the layout should fit, the
# room becomes the bytes that the weights hold by then, and the engine settles in the best layout for that.

_THROUGH = 1  # index in `Order`'s kinds: groups that pass through staging buffers

WHOLE = Layout()  # all groups resident, as they are stored


class Engine(Placement):
    """A module whose weight groups are where `layout` has them.

    Weights in no group are resident. Large embedding tables are not: calls look their rows up in RAM or in the file.

    `source` tells, by parameter name, where weights are in files. Parameters on `meta` are then read straight from
    there; ValueError if `source` does not name them all. `calls` is the order of the calls inside, as a dry run saw it.
    `incoming` are reads to RAM that are still under way.

    Placement `streamed`: the gates stay. The module takes one call at a time, from any thread, and `end_call` after
    each. `grow`, `shrink` and `apply` may be called from other threads during a call. A group that `calls` never saw is
    brought when it is called.

    Placement `resident`: all groups have device memory at once, and each is uploaded when it is first called. The gates
    go when everything is there. If the order of the calls is not known, everything is uploaded before the first call,
    since weights may be read outside the gates. Groups may be evicted between calls, and `complete` must come before
    each call.

    On the device `cpu` a module runs from disk: the ring, the resident groups and the staging buffers are all in RAM.
    `Residency` makes an engine for each unit that it puts in place; one in RAM that runs on the CPU gets a `Cpu`.
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
        self._found = {key: at for key, at in found.items() if key not in here}  # by `id` of the parameter on `meta`
        largest = max((ref.tensor.nbytes for ref in self.host_refs), default=0)
        self._bytes_in = self._bytes_read = 0
        self._called = [group for group in self._groups if group.called]
        self._source = WeightSource(self._groups if self._streams else [], self._queues, self._found, largest, incoming)
        self._uploads = DeferredUploads(self._groups, self._source, self._queues)
        self._gates: dict[WeightGroup, list[Callable[[], None]]] = {}
        self._lock = threading.RLock()
        self._ring: Ring | None = None
        self._current: WeightGroup | None = None  # the running group
        self._watch: EventTimer | None = None  # of the timed call, until its seconds are taken
        self._steady = False  # the last call ended well: the next one finds the prefetched groups
        idle = [] if self._streams else [group for group in self._groups if not group.called]
        self._outside_bytes = (
            plain_bytes_of(self._ungrouped) + self._workspace.nbytes + sum(group.held_bytes for group in idle)
        )
        self._placed = self._unsettled = False
        self._more_bytes = 0  # by which to grow when the running group has ended
        self._order = Order(
            self._groups,
            lambda group: group.called and group.slot is not None,
            lambda group: group.called and group.slot is not None and bool(group.parts),
        )

    @property
    def host_bytes(self) -> int:
        return self._source.host_bytes + (0 if self.on_device else self.resident_bytes)

    def take_bytes_in(self) -> int:
        """Return the bytes of weights copied to the device since the last call of this; 0 on the CPU."""
        self._count()
        taken, self._bytes_in = self._bytes_in, 0
        return taken if self.on_device else 0

    def take_bytes_read(self) -> int:
        """Return the bytes of files read for the device since the last call of this."""
        self._count()
        taken, self._bytes_read = self._bytes_read, 0
        return taken

    def _count(self) -> None:
        """Add the uploads of resident groups to the counts."""
        came, read = self._uploads.take_bytes()
        self._bytes_in, self._bytes_read = self._bytes_in + came, self._bytes_read + read

    @property
    def is_whole(self) -> bool:
        """Return whether every group is resident, or at least has its device memory."""
        return all(group.resident for group in self._groups)

    @property
    def dequantized(self) -> frozenset[int]:
        """The numbers, in call order, of the groups that are plain tensors now."""
        return frozenset(i for i, group in enumerate(self._called) if group.state is State.DEQUANTIZED)

    @property
    def _streams(self) -> bool:
        return self.layout.placement == "streamed"

    def describe(self) -> str:
        """Return the placement in words, such as "streamed, 40% of the weights stay"."""
        stay = sum(group.held_bytes for group in self._called if group.resident)
        whole = sum(group.held_bytes for group in self._called)
        how = "resident" if stay == whole else f"streamed, {stay / whole:.0%} of the weights stay"
        return how if self.on_device else f"cpu, {how}"

    # Changes of the layout

    def apply(self, layout: Layout) -> None:
        """Move the groups to where `layout` has them, as if the engine were placed with it.

        A layout of another placement needs another engine. See [Note: Layout changes in mid-run].
        """
        with self._lock:
            self._more_bytes = 0
            differs, self.layout = self._unsettled or layout != self.layout, layout
            if differs:
                self._move_groups()

    def grow(self, bytes: int) -> int:
        """Keep more groups resident, in up to `bytes` more. Return the bytes really taken.

        While the running group is in the way nothing moves, and 0 is returned; the growth happens when its call ends.
        """
        if self._streams:
            return self._change_room(max(0, bytes))
        with self._lock:
            before = self.resident_bytes
            missing = [group for group in self._groups if not group.resident]
            self._make_resident(missing, within_bytes=bytes)
            return self.resident_bytes - before

    def shrink(self, bytes: int) -> int:
        """Evict groups until `bytes` are free, or as many as can be. Return the bytes really freed.

        In a streamed layout they stream from now on. The running group leaves when its call ends, and is not counted.
        In a resident layout they are missing until `complete`, so no call may be under way.
        """
        if self._streams:
            return max(0, -self._change_room(-max(0, bytes)))
        with self._lock:
            before = self.resident_bytes
            self._watch, self._steady = None, False
            for group in self._groups:
                if group.resident and before - self.resident_bytes < bytes:
                    self._evict(group)
            return before - self.resident_bytes

    def complete(self, alone: bool = True) -> None:
        """Make ready for a call: bring evicted groups back, and dequantize the groups to be kept so.

        Only a resident layout has groups to bring back; a streamed one brings them when they are called. The gates of a
        resident layout go if no upload is left to queue. Unless `alone`, nothing is dequantized, since another call may
        be using the stored bytes.
        """
        with self._lock:
            if not self._streams:
                self._make_resident([group for group in self._groups if not group.resident])
                self._uploads.send_before(None, None)
                if self._source.has_windows or (self._gates and (self._steady or not self._uploads.pending)):
                    self._finish_uploads()
            if alone and any(group.state is State.RESIDENT for group in self._to_dequantize()):
                self._move_groups()

    def wait_for_copies(self) -> None:
        """Wait until no copy is under way.

        A resident layout that reads from disk uploads all groups first, and closes its staging buffers: their RAM is
        wanted.
        """
        if not self._streams and self._source.has_windows:  # a resident layout need not keep their RAM
            self._finish_uploads()
        self._source.wait_for_reads()

    # Calls

    def end_call(self, failed: bool = False, measured: bool = True) -> None:
        """End a call, and prefetch the first groups of the next one, unless this one `failed`.

        Its time is forgotten unless it is to be `measured`.
        """
        with self._lock:
            last = self._current
            self._leave()
            self._steady = not failed
            if self._watch and self._watch.runs and (not self._watch.end() or failed or not measured):
                self._watch = None
            if failed:
                self._order.lost()
            elif last:
                self._prefetch(last)

    def time_call(self) -> bool:
        """Time the call that begins now, group by group where gates are passed. Return whether it is timed.

        It is not without a copy stream, after a call that failed, after one that moved weights, or while an earlier
        time has not been taken.
        """
        with self._lock:
            if self._watch or not (self._steady and self._queues.copying):
                return False
            self._watch = EventTimer(self._queues)
            return True

    def take_seconds(self) -> Measured | None:
        """Return the seconds that each group of the timed call computed, once.

        The seconds of a call that passed no gates are divided among the groups in proportion to the expected ones. None
        if no call was timed, or the device has not finished it. None, and the times are forgotten, if groups moved
        during the call or not every group was called.
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
            loads = self.layout.loads
            if len(loads.groups) != len(self._called):
                return None
            spared = [  # `Loads` has seconds that include dequantizing at each call, however the groups ran
                load.decode_seconds * (group.state is State.DEQUANTIZED)
                for group, load in zip(self._called, loads.groups, strict=True)
            ]
            if set(found) == {None} and not self._streams:
                return spread(loads, found[None] + sum(spared))
            if set(found) != {None, *self._called}:
                return None
            seconds = tuple(found[group] + more for group, more in zip(self._called, spared, strict=True))
            return Measured(tuple(group.packed_bytes for group in self._called), seconds, found[None])

    # Placing and removing

    def _place(self) -> None:
        """Bring the weights in no group, settle in the layout, and begin to prefetch streamed groups."""
        if self._found:
            called = [ref for group in self._called for ref in group.refs]
            self._source.announce([ref.tensor for ref in (*called, *self._ungrouped)])
        self._source.open()
        self._bring_ungrouped()
        streaming = self._streaming()
        self._source.prepare(streaming)
        staying = self._called if self._streams else self._groups
        self._source.pin_too([group for group in staying if group not in streaming])
        self._place_tables()
        self._decode_calls()
        self._move_groups(self._groups)
        self._placed = True
        if self._streams:
            self._open_gates(self._groups)
            if self._called:
                self._prefetch(None)

    def _remove(self) -> None:
        """Free everything on the device: gates, staging buffers and ring go, and all groups are on the host."""
        with self._lock:
            self._close_gates()
            self._source.close()
            # The copies read host memory that may be dropped next, and write to device memory that is freed here.
            self._queues.finish()
            if self._ring:
                for slot in self._ring.slots:
                    slot.pending = None  # after an error slot and fill form a cycle, which only the collector frees
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
        """Return rows of a table on the device, from RAM or from the file, and count their bytes."""
        weight = ref.tensor
        self._source.await_ram([weight])
        self._source.await_disk([weight])
        ids = ids.cpu()
        rows = rows_of(ref, self._found.get(id(weight)), ids).to(self.device)
        self._bytes_in += rows.nbytes
        if nbytes := self._source.file_bytes([weight]):
            self._bytes_read += nbytes * ids.unique().numel() // len(ref.holder[ref.key])
        return rows

    def _bring(self, moving: list[ParameterRef]) -> None:
        """Copy weights to the device from RAM, or from disk through the staging buffers, which must be open."""
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

    def _bring_ungrouped(self) -> None:
        """Bring the weights that are in no group, and keep them dequantized.

        Any module may read them at any time. They come before all groups: only then do the reads of the groups to RAM
        begin.
        """
        self._bring(self._ungrouped)
        self._source.begin()
        self.resident_bytes += keep_dequantized(self._ungrouped) - nbytes_of(
            [ref for ref, _ in encoded(self._ungrouped)]
        )

    # The gates at each call

    def _open_gates(self, groups: Sequence[WeightGroup]) -> None:
        """Put a gate around each module of these groups."""
        for group in groups:
            if group not in self._gates:
                gates = [(owner.module, functools.partial(self._gate, group)) for owner in group.owners]
                self._gates[group] = [interpose(module, gate) for module, gate in gates]

    def _close_gates(self) -> None:
        for undo in (undo for gates in self._gates.values() for undo in gates):
            undo()
        self._gates.clear()

    def _gate(self, group: WeightGroup, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run a module of a group, and clone results that are views into the ring."""
        if self._current is not group:
            pass_on()  # another call may bring the group meanwhile
            if self._current is not group:
                self._enter(group)
        result = forward(*args, **kwargs)
        return self._kept(result) if group.slot else result

    def _enter(self, group: WeightGroup) -> None:
        """Make `group` the running group: leave the one before, wait for its weights on the device, and prefetch."""
        host.throw_if_interrupted()
        # Waits for the disk are without the lock: others may grow and shrink meanwhile.
        if group.resident:
            self._uploads.await_ram(group)
        else:
            self._source.await_ram(group.hosts)
        with self._lock:
            self._leave()
            if not (group.resident or (group.called and group.slot)):
                self._admit(group)
            self._uploads.enter(group)
            self._current, slot = group, group.slot
            self._order.called(group)
            if slot:
                if not slot.holds:
                    self._load(slot)
                slot.enter()
            self._prefetch(group)
        if slot:
            if slot.pending:
                self._source.wait(slot)  # without the lock too
            self._queues.wait(slot.copied)
            if self._found:
                self._source.passed([ref.tensor for ref in group.refs])
        if watch := self._watch:
            watch.start(group)

    def _admit(self, group: WeightGroup) -> None:
        """Make ready a group that is called although `calls` never saw it, such as an expert of a router."""
        with outside_inference():
            if group.slot:
                self._source.prepare([group])
                self._source.await_ram(group.hosts)
                self._order.forget()  # it may come through the staging buffers from now on
            else:
                self._make_resident([group])  # it is too large for the ring

    def _leave(self) -> None:
        """End the running group: record the last use of its slot, and make up for changes that waited for it."""
        if self._watch:
            self._watch.stop()
        group, self._current = self._current, None
        if group and group.slot and self._ring:
            self._ring.used(group.slot)
            # A stale view of the ring would be read in silence; a host tensor met on the device raises an error.
            group.restore()
        if self._unsettled:
            self._move_groups()
        if self._more_bytes:
            self._change_room(0)

    def _passes(self, tensor: torch.Tensor) -> bool:
        return super()._passes(tensor) or bool(self._ring and self._ring.holds(tensor))

    def _prefetch(self, group: WeightGroup | None) -> None:
        """Prefetch: queue the copies of the groups after `group`, until the ring has no bytes free for the next one.

        None stands for the start of a call. Where weights leave after one call (`Loads.once`), nothing is prefetched
        across its end. Without a ring this queues the uploads of resident groups instead.
        """
        if self._ring is None:
            self._uploads.send_before(None, self._current)
            return
        upcoming = self._upcoming(group, self._ring.most_at_a_time)
        # Slots that no copy may overwrite: of the running group, and of every group that is called before the next.
        kept: list[RingSlot | None] = [self._current.slot if self._current else None]
        for following in upcoming:
            slot = following.slot
            assert slot is not None
            if not slot.holds:
                if any(other in kept for other in slot.overlaps) or not self._source.has_room(following):
                    break
                # The copy stream keeps call order: a resident group that is called sooner must be queued sooner.
                if self._uploads.pending and not self._uploads.send_before(following, self._current):
                    break
                self._load(slot)
            kept.append(slot)
        if self._source.reach:
            upcoming = self._upcoming(group, self._ring.most_at_a_time + self._source.reach, _THROUGH)
            self._source.ahead(self._uploads.before_disk(upcoming, self._current))

    def _upcoming(self, group: WeightGroup | None, count: int, kind: int = 0) -> list[WeightGroup]:
        """Return up to `count` groups of a kind that are called after `group`."""
        upcoming = self._order.after(group or self._called[-1], count, kind)
        if self.layout.loads.once and group:
            later = set(self._called[self._called.index(group) + 1 :]) if group in self._called else set()
            return [following for following in upcoming if following in later]
        return upcoming

    def _load(self, slot: RingSlot) -> None:
        """Take the slot from other groups, and have the weight source queue its copy."""
        assert self._ring is not None
        for lost in self._ring.claim(slot):
            self._source.forget(lost)
        self._source.load(slot)
        slot.holds = True  # only now: an interrupt above must leave the slot without a group
        self._bytes_in += slot.group.packed_bytes
        self._bytes_read += self._source.file_bytes(slot.group.tensors())

    # What streams and what stays

    def _streaming(self, layout: Layout | None = None) -> list[WeightGroup]:
        """Return the groups that pass through the ring."""
        return [self._called[i] for i in (layout or self.layout).streamed]

    def _to_dequantize(self, layout: Layout | None = None) -> list[WeightGroup]:
        """Return the groups to keep dequantized. The first call still runs them as stored: see `complete`."""
        return [self._called[i] for i in (layout or self.layout).dequantized]

    def _change_room(self, more_bytes: int) -> int:
        """Change the room for weights by `more_bytes`. Return the bytes by which they have grown at once.

        The result is negative if groups were evicted. See [Note: Layout changes in mid-run].
        """
        with self._lock:
            before, planned = self.resident_bytes, self._outside_bytes + self.layout.device_bytes
            wanted = more_bytes if more_bytes < 0 else max(self._more_bytes, more_bytes)
            self._more_bytes = 0
            layout = self._layout_within(planned + wanted)
            change = layout.device_bytes - self.layout.device_bytes
            # With few groups the ring may take more bytes than the groups that stream through it free.
            if not self._placed or not (change <= 0 if wanted < 0 else change > 0):
                return 0
            if wanted > 0 and self._current and (self._is_held_up(layout) or planned + change < before):
                self._more_bytes = wanted
                return 0
            self.layout = layout
            self._move_groups()
            return self.resident_bytes - before

    def _layout_within(self, weights_bytes: int) -> Layout:
        """Return the layout for `weights_bytes` on the device in all; a ring that is there keeps its size if it can."""
        return self.layout.within(weights_bytes - self._outside_bytes, self._ring.nbytes if self._ring else None)

    def _is_held_up(self, layout: Layout) -> bool:
        """Return whether the running group must end before the groups can be where `layout` has them.

        The ring cannot be laid anew under a group that runs in it. Such a group cannot become resident, and a resident
        one cannot be evicted. Nor can it change between stored and dequantized while its modules run.
        """
        if (group := self._current) is None:
            return False
        leaves = group.resident and group in self._streaming(layout)
        is_dequantized, to_be = group.state is State.DEQUANTIZED, group in self._to_dequantize(layout)
        return group.slot is not None or leaves or is_dequantized is not to_be

    def _move_groups(self, missing: Sequence[WeightGroup] = ()) -> None:
        """Move all groups but the running one to where the layout has them. See [Note: Layout changes in mid-run].

        In a resident layout only the `missing` groups are brought: others may have been evicted to make room.
        """
        if self._watch and self._watch.runs:
            self._watch = None  # groups that move during the call would count as its computing
        self._unsettled = True  # until all is done: a ring that found no memory is laid when the next group is called
        there = [group for group in self._groups if group.resident]
        with outside_inference():
            while True:
                evicted = self._evict_leaving()
                if self._is_held_up(self.layout):
                    return
                self._lay_ring(self._streaming())
                try:
                    self._bring_staying(self._called if self._streams else [*missing, *evicted])
                except Exception as error:
                    # The device has less memory than the layout was placed for: settle in what the weights hold now.
                    layout = self._layout_within(self.resident_bytes)
                    if not is_out_of_memory(error) or not self._placed or layout == self.layout:
                        raise
                    self.layout, missing = layout, [g for g in (*missing, *evicted, *there) if not g.resident]
                else:
                    self._unsettled = False
                    self._source.close_unused(self._streaming())
                    return

    def _evict_leaving(self) -> list[WeightGroup]:
        """Evict the groups that stream from now on, and those that were kept dequantized and no longer are.

        Return the latter: they are to come back as they are stored.
        """
        streaming, dequantized = self._streaming(), self._to_dequantize()
        self._source.prepare([group for group in streaming if not group.slot and group is not self._current])
        stored_again = [g for g in self._called if g.state is State.DEQUANTIZED and g not in dequantized]
        for group in dict.fromkeys([*(g for g in streaming if g.resident), *stored_again]):
            if group is not self._current:
                self._evict(group)
        return stored_again

    def _bring_staying(self, staying: Sequence[WeightGroup]) -> None:
        """Make groups resident that are not, and dequantize those that are to be kept so."""
        self._make_resident([group for group in dict.fromkeys(staying) if not (group.resident or group.slot)])
        for group in self._to_dequantize():
            if group.state is State.RESIDENT:
                self._dequantize(group)

    def _dequantize(self, group: WeightGroup) -> None:
        """Keep a resident group dequantized. On an error it is evicted."""
        try:
            keep_dequantized(group.refs)
        except BaseException:
            self._evict(group)
            raise
        self.resident_bytes += group.plain_bytes - group.held_bytes
        group.become(State.DEQUANTIZED)

    def _make_resident(self, groups: Sequence[WeightGroup], within_bytes: int | None = None) -> None:
        """Make groups resident, as many as fit in `within_bytes`: allocate their device memory now.

        They are uploaded when they are called. In a resident layout they are uploaded at once if the order of the calls
        is not known.
        """
        taken = 0
        with outside_inference():
            for group in groups:
                if within_bytes is None or taken + group.held_bytes <= within_bytes:
                    if not self._streams:
                        self._source.open()
                    self.resident_bytes += self._uploads.allocate(group)
                    taken += group.held_bytes
            if not taken or self._streams:
                return
            self._source.follow(self._uploads.disk_copies())
            if self.calls.order:
                self._open_gates([group for group in self._groups if group.uploads])
                self._uploads.send_before(None, None)
            else:
                self._finish_uploads()

    def _finish_uploads(self) -> None:
        """Upload all groups now, so that neither gates nor staging buffers are needed any more."""
        for group in self._groups:
            self._uploads.enter(group)
        self._close_gates()
        self._source.close()

    def _evict(self, group: WeightGroup) -> None:
        """Evict a resident group."""
        nbytes = group.resident_bytes
        self._source.stop()  # its read-ahead refers to the device memory of groups that are still to be uploaded
        self._uploads.forget(group)
        group.restore()
        self.resident_bytes -= nbytes
        group.become(State.ON_HOST)

    def _lay_ring(self, streaming: list[WeightGroup]) -> None:
        """Lay the ring for these groups, in the size that the layout has. A ring that is so already stays."""
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
                self._queues.finish()  # copies into the ring, which is freed here
                self.resident_bytes -= self._ring.nbytes
                self._ring = None
        if wanted:
            if self._ring is None:
                self._ring = Ring(wanted, self._queues)
                self.resident_bytes += wanted
            self._ring.lay(streaming, [group for group in self._groups if not (group.called or group.resident)])
        self._order.forget()
