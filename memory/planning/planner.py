"""Plan the placement of one unit: sizes, workload, rates and a budget in; bytes, seconds and the reason out.

Pure functions: no device, no weights. `solver.place` chooses the layout and its seconds. A step takes at least
max(compute, copied bytes / bandwidth of the bus, read bytes / bandwidth of the disk).
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from ..codecs.codec import Codec
from ..codecs.cost import cost_of
from ..rates import SLOWEST_DISK_BYTES_PER_SECOND, Rates
from ..sizes import format_bytes
from ..vocabulary import PlacementName
from ..weights.reader import BATCH_BYTES
from .first_call import Beside, first_call_seconds
from .forecast import HeldBytes, Operations, UnitForecast
from .kept_dequantized import moment_bytes
from .measured import Measured, measured_loads
from .ring_offsets import WINDOWS
from .room import HeldWeights, PlanRequest, Room
from .solver import GroupLoad, Layout, Loads, least_bytes, place
from .tiers import held_in_ram


@dataclass(frozen=True)
class GroupSize:
    """Sizes of a weight group in bytes, and the modules that own its weights.

    `packed_bytes` is the size of its flat buffer, alignment gaps included; `held_bytes` is the size without gaps.
    `paths` names the modules. `codecs` lists the codecs of its encoded weights; dequantized, the whole group takes
    `plain_bytes`. In files the group takes `read_bytes`; None stands for `packed_bytes`.
    """

    packed_bytes: int
    held_bytes: int
    paths: tuple[str, ...] = ()
    codecs: tuple[Codec, ...] = ()
    plain_bytes: int = 0
    read_bytes: int | None = None

    def decode_seconds(self, rates: Rates) -> float:
        """Return the seconds of a call that dequantizing takes."""
        if not self.codecs:
            return 0
        costs = (cost_of(codec.alike, rates.fused) for codec in self.codecs)
        return sum(cost.seconds(rates.memory_bytes_per_second, rates.kernel_seconds) for cost in costs)

    def decoding(self, rates: Rates, free_bytes: int) -> tuple[float, int, int]:
        """Return what keeping the group dequantized saves and costs, as (seconds, bytes, temporary bytes).

        Dequantizing happens between two calls, when `free_bytes` of their working memory are free to be used.
        """
        more, moment = self.plain_bytes - self.held_bytes, max(0, moment_bytes(self.codecs) - free_bytes)
        return self.decode_seconds(rates), more, moment


@dataclass(frozen=True)
class UnitSizes:
    """The weights of a unit, in bytes.

    - `groups` are the weight groups that calls need, in call order. `idle` are the others, numbered after them.
    - `table_bytes` are embedding tables, whose rows are looked up in RAM.
    - `fixed_bytes` are the weights outside all groups as plain tensors, and the workspace in which groups are
      dequantized. That is `decoded_bytes` more than these weights take as stored. All other sizes are as stored.
    - `tensor_bytes` is the size of the largest tensor.
    - `decoding` maps a module's path to the temporary bytes of dequantizing in its call. The path "" stands for the
      weights outside all groups.
    - `read_bytes` is the size in files of all weights, `rest_read_bytes` that of the weights outside all groups. None
      stands for the size as stored.

    The unit computes in `dtype`, named as in safetensors.
    """

    total_bytes: int
    fixed_bytes: int
    groups: tuple[GroupSize, ...]
    table_bytes: int = 0
    tensor_bytes: int = 0
    decoded_bytes: int = 0
    decoding: HeldBytes = ()
    dtype: str = "BF16"
    read_bytes: int | None = None
    rest_read_bytes: int | None = None
    idle: tuple[GroupSize, ...] = ()

    @property
    def resident_bytes(self) -> int:
        """Bytes on the device if everything but the tables is there, groups as stored."""
        return self.total_bytes - self.table_bytes + self.decoded_bytes

    @property
    def most_bytes(self) -> int:
        """Bytes on the device if all groups are kept dequantized, including the temporary bytes of dequantizing one."""
        more = sum(max(0, p.plain_bytes - p.held_bytes) for p in self.groups if p.codecs)
        return self.resident_bytes + more + max((moment_bytes(group.codecs) for group in self.groups), default=0)

    def dequantizing_beside(self, dequantized: Collection[int] = ()) -> HeldBytes:
        """Return `decoding` for a unit of which just the groups in `dequantized` are kept so."""
        most, done = dict(self.decoding).get("", 0), {path for i in dequantized for path in self.groups[i].paths}
        # Weights outside the groups are dequantized before any group is copied: the room of the groups is still free.
        outside = most - sum(group.held_bytes for group in self.groups)
        calls = ((path, nbytes) for path, nbytes in self.decoding if path and path not in done)
        return (("", outside), *calls) if outside > 0 else tuple(calls)

    def _spared_bytes(self, work: UnitForecast) -> int:
        """Return the working memory that calls save if all groups are kept dequantized, in bytes."""
        of_groups = {path for group in self.groups for path in group.paths}
        others = tuple(each for each in self.dequantizing_beside() if each[0] not in of_groups)
        return (
            work.with_dequantizing(self.dequantizing_beside()).working_bytes
            - work.with_dequantizing(others).working_bytes
        )

    def outside_bytes(self, placement: PlacementName) -> int:
        """Return the bytes on the device beside the called groups. For a resident unit they include the idle groups."""
        if placement != "resident":
            return self.fixed_bytes
        return self.resident_bytes - sum(group.held_bytes for group in self.groups)

    @property
    def least_streamed_bytes(self) -> int:
        """The least bytes on the device in which the unit can be streamed."""
        return self.fixed_bytes + least_bytes([GroupLoad(p.packed_bytes, p.held_bytes) for p in self.groups])

    @functools.lru_cache(maxsize=64)  # noqa: B019  (of frozen data; budgets share it)
    def loads(self, work: UnitForecast | None, rates: Rates) -> Loads:
        """Return the groups with their seconds in one call, and the rates, for the solver.

        Without a forecast of the modules each group is taken to compute for as long as it is copied. No group may be
        kept dequantized if the weights leave after a single call.
        """
        rate, from_disk = rates.pinned_bytes_per_second, rates.disk_bytes_per_second
        # Weights that are cast as they are read have other sizes in files: the rate is that of bytes in RAM.
        if read := self.group_read_bytes(range(len(self.groups))):
            from_disk *= self.ram_bytes(range(len(self.groups))) / read
        once = work is not None and work.turns > 1 and not work.repeats
        if work is None or not work.modules:
            even = Loads.even(self.groups)
            seconds = tuple(replace(group, seconds=group.seconds / rate) for group in even.groups)
            return Loads(seconds, rate, disk_bytes_per_second=from_disk, once=once)
        before, operations = _by_group(self.groups, work)
        between_calls = work.live_bytes + work.working_bytes - work.called_bytes  # working memory free between calls
        calls = max(1, work.calls)
        first, *taken = (done.seconds(rates, self.dtype) / calls for done in (before, *operations))
        loads = tuple(
            GroupLoad(
                p.packed_bytes,
                p.held_bytes,
                own + p.decode_seconds(rates),
                *(p.decoding(rates, between_calls) if work.repeats and p.codecs else ()),
            )
            for p, own in zip(self.groups, taken, strict=True)
        )
        return Loads(loads, rate, first, from_disk, once=once, spared_bytes=self._spared_bytes(work))

    def ram_groups(self, found: Layout, ram_bytes: int) -> frozenset[int]:
        """Return the groups of the layout `found` to hold in RAM, if it has `ram_bytes` and cannot hold all of them."""
        return held_in_ram([group.packed_bytes for group in self.groups], found.copied, found.from_disk, ram_bytes)

    def beside(self, ram: frozenset[int] | None, there: frozenset[int] | None) -> Beside:
        """Return the bytes that the first call adds, for `first_call_seconds`.

        `ram` names the groups that RAM is to hold, None for all. `there` names those that it holds already, None for
        all weights.
        """
        rest_bytes = self.fixed_bytes - self.decoded_bytes
        held = tuple(group.held_bytes for group in self.groups)
        return Beside(rest_bytes, self.table_bytes if ram is None else 0, held, there, ram)

    def disk_bytes(self, found: Layout, kept: frozenset[int] | None, there: frozenset[int] | None, calls: int) -> int:
        """Return the bytes that `calls` calls read from disk, without looked-up rows of tables.

        `kept` names the groups that RAM keeps, None for all weights. `there` names those that it holds before the first
        call, None for all.
        """
        rest_bytes = self.fixed_bytes - self.decoded_bytes if self.rest_read_bytes is None else self.rest_read_bytes
        if kept is None:
            return self.missing_bytes(there)
        again = set(found.copied) - kept  # in each call
        once = set(range(len(self.groups))) - again - (kept if there is None else kept & there)
        return rest_bytes + self.group_read_bytes(once) + calls * self.group_read_bytes(again)

    def missing_bytes(self, there: frozenset[int] | None) -> int:
        """Return the bytes to read until RAM holds all weights.

        `there` names the groups that it holds already, None for all weights.
        """
        whole_bytes = self.total_bytes if self.read_bytes is None else self.read_bytes
        return 0 if there is None else whole_bytes - self.group_read_bytes(there)

    def group_read_bytes(self, groups: Iterable[int]) -> int:
        """Return the bytes that these groups take in files."""
        each = map(self._group, groups)
        return sum(group.packed_bytes if group.read_bytes is None else group.read_bytes for group in each)

    def ram_bytes(self, groups: Iterable[int]) -> int:
        """Return the bytes that these groups take in RAM."""
        return sum(self._group(i).packed_bytes for i in groups)

    def _group(self, i: int) -> GroupSize:
        """Return the size of a group by its number: called groups first, then idle ones."""
        return self.groups[i] if i < len(self.groups) else self.idle[i - len(self.groups)]


def _by_group(groups: Sequence[GroupSize], work: UnitForecast) -> tuple[Operations, list[Operations]]:
    """Return the operations ahead of the first group, and those of each group, summed over all calls.

    A group's operations run from the call of its modules until the call of the next group.
    """
    group_of = {path: i for i, group in enumerate(groups) for path in group.paths}
    before, operations, at = Operations(), [Operations()] * len(groups), -1
    for path, done in work.modules:
        parts = path.split(".")
        holders = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        at = next((group_of[holder] for holder in holders if holder in group_of), at)
        if at < 0:
            before += done
        else:
            operations[at] += done
    return before, operations


@dataclass(frozen=True)
class Candidate:
    """One way to run a unit: its placement, and the bytes and seconds that follow.

    `why_not` tells why it was rejected. It is empty for the chosen one.

    On the device:

    - `weights_bytes` are all weights there. `stay_bytes` of the `whole_bytes` that a call needs stay, groups as stored.
      Groups kept dequantized take `decoded_bytes` more.
    - `streamed` names the groups that pass through the ring of `ring_bytes`, out of `groups` in all.
    - `peak_vram_bytes` is the peak of weights and working memory. The driver counts `overhead_bytes` on top.

    In RAM and on disk:

    - `ram_bytes` is the RAM that the weights take. With `from_disk` it does not hold all of them.
    - `kept` names the groups in RAM after the stage, None for all weights. `windows_bytes` are the windows beside
      these.
    - Each call reads `read_bytes` for its copies: `step_read_bytes` a step, for `read_seconds`. The whole stage reads
      `disk_bytes`.

    In time:

    - `step_seconds` is a steady step. The first one also brings the weights, and takes `first_step_seconds`.
    - No step can be faster than `bound_seconds`. Copies and reads alone take `transfer_seconds`, the longer of the two.
    - Where the unit is evicted for others within a step, `turn_bytes` come back in `turn_seconds` of each step.
    - `step_bytes` cross the bus in each step after the first.
    """

    placement: PlacementName
    weights_bytes: int
    peak_vram_bytes: int
    ram_bytes: int
    streamed: tuple[int, ...]
    groups: int
    step_seconds: float
    first_step_seconds: float
    bound_seconds: float
    transfer_seconds: float
    from_disk: bool = False
    ring_bytes: int = 0
    stay_bytes: int = 0
    whole_bytes: int = 0
    read_bytes: int = 0
    step_read_bytes: int = 0
    read_seconds: float = 0.0
    decoded_bytes: int = 0
    overhead_bytes: int = 0
    turn_bytes: int = 0
    turn_seconds: float = 0.0
    step_bytes: int = 0
    disk_bytes: int = 0
    kept: frozenset[int] | None = None
    windows_bytes: int = 0
    why_not: str = ""
    layout: Layout = Layout()

    @property
    def driver_bytes(self) -> int:
        """The peak that the driver counts for this process, as far as it tells. The budget limits this figure."""
        return self.peak_vram_bytes + self.overhead_bytes

    @property
    def label(self) -> str:
        """The placement in words, with the share of the weights that stays and the share that comes from disk."""
        stays, read = (min(1, part / max(1, self.whole_bytes)) for part in (self.stay_bytes, self.read_bytes))
        where = f", {read:.0%} come from disk" if self.read_bytes else ""
        if self.placement != "streamed":
            return self.placement + where
        return f"streamed, {stays:.0%} of the weights stay{where}"

    def beginning_with(self, call_seconds: float, calls_per_step: float) -> Candidate:
        """Return the same candidate with a first call of `call_seconds`, which brings the weights."""
        others = self.step_seconds * (calls_per_step - 1) / calls_per_step
        return replace(self, first_step_seconds=max(self.step_seconds, call_seconds + max(0.0, others)))

    def coming_back(self, turn_bytes: float, turn_seconds: float, turns_per_step: float) -> Candidate:
        """Return the same candidate for weights that come back at each turn, with the bytes and seconds of one turn."""
        seconds = turn_seconds * turns_per_step
        return replace(
            self,
            step_seconds=self.step_seconds + seconds,
            first_step_seconds=max(
                self.step_seconds + seconds, self.first_step_seconds + turn_seconds * max(0.0, turns_per_step - 1)
            ),
            bound_seconds=self.bound_seconds + seconds,
            turn_bytes=round(turn_bytes * turns_per_step),
            step_bytes=self.step_bytes + round(turn_bytes * turns_per_step),
            turn_seconds=seconds,
        )


@dataclass(frozen=True)
class Plan(Candidate):
    """The chosen candidate with the reason in one sentence, and the rejected ones, each with its `why_not`.

    With `fits` false, nothing fits `budget_bytes` or the RAM. The plan is then the one that wants least.
    """

    unit: str = ""
    budget_bytes: int = 0
    reason: str = ""
    rejected: tuple[Candidate, ...] = ()
    fits: bool = True

    def taking_turns(self, others: str, more_bytes: int, idle_bytes: int) -> Plan:
        """Return the same plan for a unit that takes turns with `others`, which hold `more_bytes` more than planned."""
        if not self.fits:
            return self
        how = f"beside {others}, with which it takes turns"
        if self.turn_bytes:
            how = f"it takes turns with {others}, for which {format_bytes(self.turn_bytes)} come back in each step"

        def moved(candidate: Candidate) -> int:
            return max(idle_bytes, candidate.peak_vram_bytes + more_bytes)

        return replace(
            self,
            peak_vram_bytes=moved(self),
            reason=f"{self.reason.removesuffix('.')}{'; ' if self.turn_bytes else ' '}{how}.",
            rejected=tuple(replace(other, peak_vram_bytes=moved(other)) for other in self.rejected),
        )

    @property
    def resident_groups(self) -> tuple[int, ...]:
        """Indices of the groups that stay on the device."""
        return tuple(i for i in range(self.groups) if i not in set(self.streamed))


def least_call_seconds(sizes: UnitSizes, work: UnitForecast, rates: Rates, measured: Measured | None) -> float:
    """Return the seconds that a call computes beside dequantizing, or less. No batch takes less for a picture."""
    if not work.modules:
        return 0.0
    loads = measured_loads(sizes.loads(work, rates), measured)
    each = zip(loads.groups, sizes.groups, strict=True)
    least = loads.before_seconds + sum(max(0.0, load.seconds - group.decode_seconds(rates)) for load, group in each)
    return least if measured else min(least, work.operations.seconds(rates, sizes.dtype) / max(1, work.calls))


def comparable(seconds: float) -> float:
    """Return `seconds` rounded to nine digits, so that the order of a sum does not decide between equal candidates."""
    return float(f"{seconds:.9g}")


def least_weights(sizes: UnitSizes) -> dict[PlacementName, int]:
    """Return the least bytes of weights on the device at a time for each placement, best placement first.

    "streamed" is left out if it saves nothing.
    """
    least: dict[PlacementName, int] = {"resident": sizes.resident_bytes}
    if sizes.least_streamed_bytes < sizes.resident_bytes:
        least["streamed"] = sizes.least_streamed_bytes
    return least


def meant_by(strategy: str, sizes: UnitSizes) -> str:
    """Return the placement that a strategy other than "auto" means for a unit: resident if it cannot be streamed."""
    if strategy not in ("streamed", "leafwise"):
        return strategy
    return "streamed" if "streamed" in least_weights(sizes) else "resident"


def window_bytes(sizes: UnitSizes, placement: str) -> int:
    """Return the RAM in bytes of the windows through which a placement reads weights straight from disk."""
    if placement == "streamed" and sizes.groups:
        return WINDOWS * max(group.packed_bytes for group in sizes.groups)
    return WINDOWS * min(BATCH_BYTES, sizes.tensor_bytes)


def make_plan(
    unit: str,
    sizes: UnitSizes,
    work: UnitForecast,
    room: Room,
    rates: Rates,
    request: PlanRequest | None = None,
    held: HeldWeights | None = None,
    measured: Measured | None = None,
) -> Plan:
    """Return the best placement of a unit within the room, or the one that the requested strategy names.

    `measured` seconds of the groups replace those from operations and rates.

    A unit that cannot be streamed in less than the whole is planned as resident. When nothing fits, the plan is the one
    that wants least, with `fits` false. Called for each unit of a stage, by `pipelines.planning.plans`.
    """
    request, held = request or PlanRequest(), held or HeldWeights()
    strategy, steps = request.strategy, request.steps
    budget_bytes, ram_bytes, overhead = room.vram_bytes, room.ram_bytes, room.overhead
    bound_to = ["resident", "streamed"] if strategy in ("auto", "cpu") else [meant_by(strategy, sizes)]
    streams_from_disk = held.from_disk and sizes.total_bytes > ram_bytes
    forecast = sizes.loads(work, rates)
    loads = measured_loads(forecast, measured)
    compute = work.operations.seconds(rates, sizes.dtype) / max(1, work.calls)
    compute += sum(group.decode_seconds(rates) for group in sizes.groups)
    tensor_bytes = overhead.tensors_within(budget_bytes)
    bare, work = work, overhead.on(work.with_dequantizing(sizes.dequantizing_beside()))
    if loads is not forecast:
        compute = loads.compute_seconds
    loads = replace(loads, ram_bytes=ram_bytes if streams_from_disk else None)
    if strategy == "leafwise":
        loads = replace(loads, spared_bytes=0)
    by_group = loads if work.modules else loads.computing(compute)
    made = []
    for placement, least in least_weights(sizes).items():
        for weights_bytes in _weights_bytes(placement, least, sizes, work, tensor_bytes, strategy):
            outside = sizes.outside_bytes(placement)
            found = place(loads, weights_bytes - outside, placement)
            seconds = compute - sum(loads.groups[i].decode_seconds for i in found.dequantized)
            beside = overhead.on(bare.with_dequantizing(sizes.dequantizing_beside(found.dequantized)))
            candidate = _candidate(placement, sizes, beside, rates, seconds, found, request)
            # The first call has all weights as stored: groups are dequantized to stay only when it has ended.
            first_bytes = candidate.stay_bytes + outside - sizes.fixed_bytes + candidate.ring_bytes + work.peak_bytes
            candidate = replace(candidate, peak_vram_bytes=max(candidate.peak_vram_bytes, first_bytes))
            if streams_from_disk:
                candidate = _short_of_ram(candidate, sizes, rates, found, ram_bytes, work.calls / steps)
            in_ram = sizes.ram_groups(found, ram_bytes) if streams_from_disk else None
            kept = None if in_ram is None else sizes.ram_groups(found, min(ram_bytes, room.free_ram_bytes))
            calls, windows = max(1, round(request.times * work.calls)), window_bytes(sizes, placement)
            read = sizes.disk_bytes(found, kept, held.in_ram, calls)
            candidate = replace(candidate, disk_bytes=read, kept=kept, windows_bytes=windows)
            first = first_call_seconds(by_group, found, sizes.beside(in_ram, held.in_ram))
            first += compute - seconds  # groups kept dequantized are dequantized once more, after their first call
            candidate = candidate.beginning_with(first, work.calls / steps)
            if work.turns > 1:
                again = first_call_seconds(by_group, found, sizes.beside(in_ram, None)) + compute - seconds
                call_seconds = candidate.step_seconds * steps / work.calls
                # A streamed group whose bytes no other overwrites stays in the ring, but leaves with it at each turn.
                lying = sum(sizes.groups[i].packed_bytes for i in set(found.streamed) - set(found.copied))
                turn_bytes = candidate.stay_bytes - sizes.decoded_bytes + lying
                candidate = candidate.coming_back(turn_bytes, max(0.0, again - call_seconds), work.turns / steps)
            made.append(candidate)
    made = [
        replace(c, overhead_bytes=overhead.driver_bytes(c.peak_vram_bytes) - c.peak_vram_bytes)
        for i, c in enumerate(made)
        if c not in made[:i]
    ]
    allowed = [c for c in made if c.placement in bound_to]
    # Without a file to stream from it is not known here whether RAM must hold all weights: the run decides.
    ram_bytes_allowed = ram_bytes if streams_from_disk else sizes.total_bytes
    if not room.ram_stated:
        ram_bytes_allowed = max(ram_bytes_allowed, *(candidate.ram_bytes for candidate in made))
    on_device = [c for c in allowed if c.driver_bytes <= budget_bytes]
    within_ram = [c for c in on_device if c.ram_bytes <= ram_bytes_allowed]
    slow = work.calls > 1 and rates.disk_bytes_per_second < SLOWEST_DISK_BYTES_PER_SECOND
    fitting = [c for c in within_ram if not (slow and c.read_bytes)]
    best = fitting or within_ram
    if best:  # `min` takes the first of equally fast candidates
        chosen = min(best, key=lambda c: comparable(c.step_seconds))
    else:
        chosen = min(allowed, key=lambda c: (c.driver_bytes, c.ram_bytes))
    rejected = tuple(
        replace(c, why_not=_why_not(c, chosen, budget_bytes, ram_bytes_allowed, bound_to, slow))
        for c in made
        if c is not chosen
    )
    asked = strategy if request.by_user and len(bound_to) == 1 else ""
    reason = _reason(chosen, sizes, room, bool(fitting), ram_bytes_allowed, rates, asked)
    if fitting and chosen.from_disk and not room.ram_stated:
        reason += " RAM is short: weights come from disk."
    return Plan(
        **vars(chosen), unit=unit, budget_bytes=budget_bytes, reason=reason, rejected=rejected, fits=bool(fitting)
    )


def least_ram_on_cpu(sizes: UnitSizes) -> int:
    """Return the least RAM in bytes in which a unit runs from disk on the CPU: the least ring, and windows."""
    return sizes.least_streamed_bytes + window_bytes(sizes, "streamed")


def weights_on_cpu(sizes: UnitSizes, ram_bytes: int) -> int:
    """Return the bytes of weights beside the windows for a unit that runs on the CPU from disk in `ram_bytes`."""
    return max(sizes.least_streamed_bytes, min(sizes.most_bytes, ram_bytes - window_bytes(sizes, "streamed")))


def plan_on_cpu(
    unit: str, sizes: UnitSizes, work: UnitForecast, room: Room, rates: Rates, steps: int, held: HeldWeights
) -> Plan:
    """Return the plan of a unit that runs on the CPU: all in RAM, or from disk what does not fit.

    The seconds are those of the disk: how fast a CPU computes is not known. The first step reads nothing of weights
    that RAM holds whole.
    """
    ram_bytes, disk = room.ram_bytes, rates.disk_bytes_per_second
    whole, ram = format_bytes(sizes.total_bytes), format_bytes(ram_bytes)
    found, taken, read_bytes, step_read_bytes, reason = Layout(), sizes.total_bytes, 0, 0, ""
    if taken > ram_bytes and held.from_disk:
        windows, weights_bytes = window_bytes(sizes, "streamed"), weights_on_cpu(sizes, ram_bytes)
        loads = replace(sizes.loads(work, rates), ram_bytes=windows)
        found = place(loads, weights_bytes - sizes.fixed_bytes)
        taken = sizes.fixed_bytes + found.device_bytes + windows
        read_bytes = sizes.group_read_bytes(found.from_disk)
        step_read_bytes = round(read_bytes * work.calls / steps)
        each = format_bytes(step_read_bytes)
        reason = f"{whole} of weights do not fit {ram} of RAM, so {each} are read from disk in each step"
    fits = taken <= ram_bytes or not room.ram_stated
    if not fits:
        reason = f"nothing fits {ram} of RAM: it wants {format_bytes(taken, up=True)}"
    first, read = 0 if held.in_ram is None else sizes.total_bytes / disk, step_read_bytes / disk
    passing = sum(sizes.groups[i].held_bytes for i in found.streamed)
    return Plan(
        "cpu", 0, 0, taken, found.streamed, len(sizes.groups), read, max(first, read), read, read,
        from_disk=bool(found.from_disk), ring_bytes=found.ring_bytes, stay_bytes=sizes.total_bytes - passing,
        whole_bytes=sizes.total_bytes, read_bytes=read_bytes, step_read_bytes=step_read_bytes, read_seconds=read,
        unit=unit, fits=fits,
        reason=f"On the CPU: {reason or f'all {whole} of weights fit {ram} of RAM'}.", layout=found,
    )  # fmt: skip


def _weights_bytes(
    placement: PlacementName, least: int, sizes: UnitSizes, work: UnitForecast, budget_bytes: int, strategy: str
) -> list[int]:
    """Return the bytes of weights to consider: all that the budget leaves, and the least."""
    if strategy == "leafwise":
        return [least]
    most = min(budget_bytes - work.peak_bytes, sizes.most_bytes)
    if placement == "resident":
        return [max(least, most)]
    if strategy == "streamed":  # uses all the room there is, even if all weights then stay
        return [most, least] if least < most else [least]
    whole = sizes.resident_bytes if sizes.most_bytes == sizes.resident_bytes else sizes.most_bytes + 1
    return [most, least] if least < most < whole else [least]


def _candidate(
    placement: PlacementName,
    sizes: UnitSizes,
    work: UnitForecast,
    rates: Rates,
    compute: float,
    found: Layout,
    request: PlanRequest,
) -> Candidate:
    """Return the candidate of a layout whose calls compute for `compute` seconds, with all weights in RAM."""
    calls_per_step = work.calls / request.steps
    whole = sizes.fixed_bytes + sum(group.held_bytes for group in sizes.groups)
    stay_bytes = whole - sum(sizes.groups[i].held_bytes for i in found.streamed)
    weights_bytes = sizes.outside_bytes(placement) + found.device_bytes
    copied = found.copied_bytes / rates.pinned_bytes_per_second
    seconds = found.seconds if found.streamed else compute
    return Candidate(
        placement=placement,
        weights_bytes=weights_bytes,
        peak_vram_bytes=max(request.idle_bytes, work.peak_bytes + weights_bytes),
        ram_bytes=sizes.total_bytes,
        streamed=found.streamed,
        groups=len(sizes.groups),
        step_seconds=seconds * calls_per_step,
        first_step_seconds=seconds * calls_per_step,
        bound_seconds=max(compute, copied) * calls_per_step,
        transfer_seconds=copied * calls_per_step,
        step_bytes=round(found.copied_bytes * calls_per_step),
        ring_bytes=found.ring_bytes,
        stay_bytes=stay_bytes,
        decoded_bytes=sum(sizes.groups[i].plain_bytes - sizes.groups[i].held_bytes for i in found.dequantized),
        whole_bytes=whole,
        layout=found,
    )


def _short_of_ram(
    candidate: Candidate, sizes: UnitSizes, rates: Rates, found: Layout, ram_bytes: int, calls_per_step: float
) -> Candidate:
    """Return the same candidate for a RAM that does not hold all weights: bytes and seconds of reading included."""
    held = sizes.ram_bytes(sizes.ram_groups(found, ram_bytes))
    read_bytes = sizes.group_read_bytes(found.from_disk)
    read = read_bytes / rates.disk_bytes_per_second * calls_per_step
    return replace(
        candidate,
        from_disk=True,
        ram_bytes=window_bytes(sizes, candidate.placement) + held,
        bound_seconds=max(candidate.bound_seconds, read),
        transfer_seconds=max(candidate.transfer_seconds, read),
        read_bytes=read_bytes,
        step_read_bytes=round(read_bytes * calls_per_step),
        read_seconds=read,
    )


def _why_not(
    candidate: Candidate, chosen: Candidate, budget_bytes: int, ram_bytes: int, bound_to: list[str], slow: bool
) -> str:
    """Return why a candidate was rejected, as a phrase for the plan's table."""
    if candidate.placement not in bound_to:
        return "not what was asked for"
    if candidate.driver_bytes > budget_bytes:
        return f"{format_bytes(candidate.driver_bytes)} do not fit {format_bytes(budget_bytes)}"
    if candidate.ram_bytes > ram_bytes:
        return f"{format_bytes(candidate.ram_bytes)} do not fit {format_bytes(ram_bytes)} of RAM"
    if slow and candidate.read_bytes:
        return f"the disk is too slow to read {format_bytes(candidate.step_read_bytes)} from in each step"
    if candidate.step_seconds > chosen.step_seconds:
        times = candidate.step_seconds / chosen.step_seconds if chosen.step_seconds else 0
        return f"{times:.1f} times as slow" if times >= 1.05 else "slower"
    return "no faster, though it takes less"


def _reason(
    chosen: Candidate,
    sizes: UnitSizes,
    room: Room,
    fits: bool,
    ram_allowed: int,
    rates: Rates,
    asked: str,
) -> str:
    """Return one sentence for the user: why the chosen candidate was chosen, or why nothing fits."""
    budget_bytes, ram_bytes = room.vram_bytes, room.ram_bytes
    how = f"{asked.capitalize()}, as asked for"
    budget, whole = format_bytes(budget_bytes), format_bytes(sizes.total_bytes)
    if not fits and chosen.driver_bytes <= budget_bytes and chosen.ram_bytes <= ram_allowed:
        rate, read = rates.disk_bytes_per_second / 1e9, format_bytes(chosen.step_read_bytes)
        return (
            f"A disk of {rate:.2f} GB/s is too slow to read {read} of weights from in each step, which takes "
            f"{chosen.read_seconds:.0f} s."
        )
    if not fits and chosen.driver_bytes <= budget_bytes:
        ram = format_bytes(ram_bytes)
        if asked:
            return f"{how}, does not fit {ram} of RAM: from disk it wants {format_bytes(chosen.ram_bytes)}."
        return (
            f"Nothing fits {ram} of RAM: {chosen.placement} from disk wants {format_bytes(chosen.ram_bytes, up=True)}."
        )
    if not fits and asked:
        return f"{how}, does not fit {budget}: it wants {format_bytes(chosen.driver_bytes, up=True)}."
    if not fits:
        least = format_bytes(chosen.driver_bytes, up=True)
        return f"Nothing fits {budget}: {chosen.placement} wants least, {least}."
    if not chosen.streamed:
        reason = f"{how}: all" if asked else "All"
        reason += f" {whole} of weights fit {budget} with their activations"
    else:
        copies_first = chosen.transfer_seconds >= 0.99 * chosen.bound_seconds
        cost = "the copies set the pace" if copies_first else "the copies hide behind the computing"
        why = how if asked else f"{whole} of weights do not fit {budget}"
        if not asked and sizes.resident_bytes + chosen.driver_bytes - chosen.weights_bytes <= budget_bytes:
            why = f"{whole} of weights fit {budget} only as they are stored, which is slower"
        stay, passing = chosen.stay_bytes, chosen.whole_bytes - chosen.stay_bytes
        more = f" (and {format_bytes(chosen.decoded_bytes)} more, kept dequantized)" if chosen.decoded_bytes else ""
        reason = (
            f"{why}: {format_bytes(stay)} stay{more}, {format_bytes(passing)} pass through a ring of "
            f"{format_bytes(chosen.ring_bytes)}, and {cost}"
        )
    if chosen.read_bytes:
        reason += (
            f"; {whole} do not fit {format_bytes(ram_bytes)} of RAM, so {format_bytes(chosen.step_read_bytes)} "
            f"are read from disk in each step, {chosen.read_seconds:.1f} s"
        )
    elif chosen.from_disk:
        reason += f"; {whole} do not fit {format_bytes(ram_bytes)} of RAM, which holds {format_bytes(chosen.ram_bytes)}"
    return reason + "."
