"""The accounts of a simulated accelerator: bytes held, bytes moved, and a virtual clock.

Nothing here touches a tensor's data. Time is virtual: it advances by what the card's stated rates say a copy
or a kernel takes, never by what the CPU really took. Copies in one direction share one copy engine, as on a
real card. There is one host clock for all threads.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch

from ..sizes import format_bytes
from .attention import Fuses
from .lazy import copies
from .operators import Observer

KernelKind = Literal["product", "attention", "other"]


@dataclass(frozen=True)
class Transfer:
    """One copy: `direction` is "h2d", "d2h" or "d2d".

    `storage_ptr` is `untyped_storage().data_ptr()` of the tensor on the device. Addresses are reused: compare it only
    with those of tensors alive at the time of the copy.
    """

    direction: str
    nbytes: int
    tensor_shape: tuple[int, ...]
    dtype: torch.dtype
    storage_ptr: int


@dataclass(frozen=True)
class Stats:
    """The counters of a card since they were last reset. Times are in seconds of the virtual clock.

    `clock_seconds` is the time of the last thing to finish, host or device. `h2d_seconds` and `d2h_seconds`
    are how long the copy engines were busy, `attention_seconds` how long kernels of attention ran, `product_seconds`
    the others. `hazards` counts operations that touched a storage before work queued on another stream was done with
    it, or with one freed before it was made, whose bytes it may have: on a real card, a data race. `total_bytes` is 0
    without a cap. `driver_peak_bytes` is the most that the driver counted: tensors and the card's `CardOverhead`.
    """

    allocated_bytes: int
    peak_bytes: int
    total_bytes: int
    h2d_bytes: int
    d2h_bytes: int
    h2d_count: int
    d2h_count: int
    clock_seconds: float
    h2d_seconds: float
    d2h_seconds: float
    product_seconds: float
    attention_seconds: float
    allocation_count: int
    hazards: int
    driver_peak_bytes: int

    @property
    def compute_seconds(self) -> float:
        """How long kernels ran."""
        return self.product_seconds + self.attention_seconds


@dataclass(frozen=True)
class CardOverhead:
    """The memory of a card beyond tensors, and its computing time beyond its stated rate.

    The driver counts `context_bytes` from the start, `library_bytes` from the first large kernel on, and the
    allocator's pool, which is a share of `fragmentation` larger than the tensors that lay in it since it was last
    emptied. Each large kernel takes `workspace_bytes` from the allocator for a moment. Products and attention take
    `product_times` and `attention_times` as long as their operations at the stated rate.
    """

    context_bytes: int = 0
    library_bytes: int = 0
    workspace_bytes: int = 0
    fragmentation: float = 0.0
    product_times: float = 1.0
    attention_times: float = 1.0


class Times(NamedTuple):
    """The end of the last write to some bytes, and of the last read or write, in seconds of the virtual clock."""

    written: float = 0.0
    used: float = 0.0


class Freed(NamedTuple):
    """Bytes given back, and the time at which the last queued work on them ends."""

    nbytes: int
    used: float


class Allocation:
    """Bytes of one storage. Each tensor on the device refers to it, so it is freed with the last view."""

    __slots__ = ("__weakref__", "card", "freed", "nbytes", "spans")

    def __init__(self, card: Card, nbytes: int, freed: deque[Freed], used: float = 0.0) -> None:
        self.card = card
        self.nbytes = nbytes
        self.freed = freed
        # Until `used`, queued work on a freed storage may still touch these bytes.
        self.spans: dict[tuple[int, int], Times] = {(0, nbytes): Times(used, used)} if used else {}

    def __del__(self) -> None:
        # The garbage collector may call this anywhere, also under the card's lock: so only append to a deque.
        self.freed.append(Freed(self.nbytes, max((times.used for times in self.spans.values()), default=0.0)))


class Card:
    """One simulated card. `total_bytes` caps it (None: no cap); on `dry` ones large tensors have shapes but no data."""

    def __init__(self, total_bytes: int | None, device: torch.device | None = None, dry: bool = False) -> None:
        self.device = device  # what its tensors say they are on; None until that name means something to torch
        self.dry = dry
        self.lock = threading.Lock()
        self.freed: deque[Freed] = deque()
        self.watchers: list[Callable[[Transfer], None]] = []
        self.observers: tuple[Observer, ...] = ()  # of the operators of a dry run
        self.fuses: Fuses | None = None  # which attention calls have a fused kernel; None for all
        self.unified = False  # device memory is the system's RAM
        self.tells_free = True
        self.share = 1.0  # of `total_bytes`, that the allocator may take for this process
        self.unknown_types: frozenset[torch.dtype] = frozenset()  # dtypes without kernels
        self.pages_above: int | None = None  # allocated bytes beyond this page over the bus, without an error
        self.fail_in = 0
        self.kept_in_ram = 0  # bytes of tensors that a dry run keeps in RAM: see `dry.keep_in_ram`
        self.times = 1  # for which each kernel counts: see `dry.counted`
        self.timed = False
        self.overhead = CardOverhead()
        self._library = 0  # of its bytes, those that are there
        self._allocated = self._peak = self._interval_peak = 0
        self._pool = self._pool_peak = self._interval_pool = self._driver_peak = 0
        self.host = self.latest = 0.0
        self._freed_used = 0.0  # until when queued work uses bytes that have been freed
        self._engines = {"h2d": 0.0, "d2h": 0.0, "disk": 0.0}
        self.configure(total_bytes, 0, 25e9, 25e9, None)

    def configure(
        self,
        total: int | None,
        reserved: int,
        h2d: float,
        d2h: float,
        flops: float | None,
        disk: float | None = None,
        slot: int = 0,
        overhead: CardOverhead | None = None,
        attention_flops: float | None = None,
    ) -> None:
        """Set sizes in bytes and rates in bytes (and operations) per second, and start the counters anew.

        Attention goes by `flops` where it has no rate of its own.
        """
        self.overhead, self._library = overhead or CardOverhead(), 0
        self.total_bytes, self.reserved_bytes, self.flops, self.disk, self.slot = total, reserved, flops, disk, slot
        self.attention_flops = attention_flops
        self._rates = {"h2d": h2d, "d2h": d2h}
        self.timed = self.timed or flops is not None or self.overhead != CardOverhead()
        self.empty_pool()
        self.reset()

    def reset(self) -> None:
        """Set the counters to zero and the peak to the bytes held now. Waits for queued work first."""
        if not self.dry:
            copies.force_all()
            copies.races = 0
        with self.lock:
            self._settle()
            self._peak = self._interval_peak = self._allocated
            self._pool_peak = self._interval_pool = self._pool_now()
            self._driver_peak = self._driver_bytes()
            # Streams and events keep absolute times, so the clock is not turned back: its zero moves.
            self.host = self._zero = self.latest
            self._moved = {"h2d": 0, "d2h": 0}
            self._counts = {"h2d": 0, "d2h": 0}
            self._busy = {"h2d": 0.0, "d2h": 0.0, "product": 0.0, "attention": 0.0}
            self._allocations = self._hazards = 0

    def _settle(self) -> None:
        while self.freed:
            freed = self.freed.popleft()
            self._allocated -= freed.nbytes
            self._freed_used = max(self._freed_used, freed.used)

    def allocate(self, nbytes: int) -> Allocation:
        """Count a new storage. Raises torch.OutOfMemoryError, having counted nothing, if it does not fit."""
        if not nbytes:
            return Allocation(self, 0, self.freed)
        with self.lock:
            self._settle()
            if self.fail_in:
                self.fail_in -= 1
                if not self.fail_in:
                    raise self._out_of_memory(nbytes)
            self._hold(nbytes)
            self._allocated += nbytes
            self._allocations += 1
            # An allocator gives freed bytes away at once: any of them may be these.
            used = self._freed_used if self._freed_used > self.host else 0.0
        return Allocation(self, nbytes, self.freed, used)

    def _hold(self, nbytes: int) -> None:
        """Update the peaks for `nbytes` more. Raises torch.OutOfMemoryError if they do not fit."""
        held = self._allocated + nbytes
        pool = held + math.ceil(self.overhead.fragmentation * held)
        if self.total_bytes is not None and pool > min(
            self.total_bytes - self._gone_bytes(), self.share * self.total_bytes
        ):
            raise self._out_of_memory(nbytes)
        if held > self._interval_peak:
            self._interval_peak = held
            if held > self._peak:
                self._peak = held
        # If its spare bytes are in the way, an allocator returns them to the driver.
        full = self.total_bytes is not None and self._pool + self._gone_bytes() > self.total_bytes
        self._pool = pool if full or not self.overhead.fragmentation else max(self._pool, pool)
        self._interval_pool = max(self._interval_pool, self._pool)
        self._pool_peak = max(self._pool_peak, self._pool)
        self._driver_peak = max(self._driver_peak, self._pool + self.outside_bytes())

    def _gone_bytes(self) -> int:
        """Return the bytes that no tensor of this process can have."""
        return self.reserved_bytes + self.outside_bytes()

    def outside_bytes(self) -> int:
        """Return the bytes that the driver counts for this process beside the allocator's pool."""
        return self.overhead.context_bytes + self._library

    def _driver_bytes(self) -> int:
        return self._pool_now() + self.outside_bytes()

    def _pool_now(self) -> int:
        return self._pool if self.overhead.fragmentation else self._allocated

    def pool_bytes(self) -> int:
        """Return the bytes of the allocator's pool; those of tensors only, if the card has no fragmentation."""
        with self.lock:
            self._settle()
            return self._pool_now()

    def pool_peak_bytes(self) -> int:
        """Return the highest `pool_bytes` since the last reset of the peak."""
        return self._pool_peak

    def take_interval_pool(self) -> int:
        """Return the highest `pool_bytes` since the last call of this."""
        with self.lock:
            self._settle()
            peak, self._interval_pool = self._interval_pool, self._pool_now()
            return peak

    def empty_pool(self) -> None:
        """Return the pool's spare bytes to the driver, except the fragments between tensors."""
        with self.lock:
            self._settle()
            self._pool = self._allocated + math.ceil(self.overhead.fragmentation * self._allocated)

    def _out_of_memory(self, nbytes: int) -> torch.OutOfMemoryError:
        total = self._allocated if self.total_bytes is None else self.total_bytes
        free = max(0, total - self._gone_bytes() - self._allocated)
        return torch.OutOfMemoryError(
            f"sim out of memory. Tried to allocate {format_bytes(nbytes)}. sim:0 has a total capacity of "
            f"{format_bytes(total)} of which {format_bytes(free)} is free. This process has "
            f"{format_bytes(self._allocated)} allocated."
        )

    def allocated_bytes(self) -> int:
        """Return the bytes of live storages."""
        with self.lock:
            self._settle()
            return self._allocated

    def peak_bytes(self) -> int:
        """Return the highest `allocated_bytes` since the last reset."""
        return self._peak

    def reset_peak(self) -> None:
        """Set the peak to the bytes held now."""
        with self.lock:
            self._settle()
            self._peak = self._interval_peak = self._allocated
            self._pool_peak = self._interval_pool = self._pool_now()

    def take_interval_peak(self) -> int:
        """Return the highest `allocated_bytes` since the last call of this. `peak_bytes` is not changed."""
        with self.lock:
            self._settle()
            peak, self._interval_peak = self._interval_peak, self._allocated
            return peak

    def stats(self) -> Stats:
        """Return a snapshot of all counters."""
        with self.lock:
            self._settle()
            return Stats(
                self._allocated, self._peak, self.total_bytes if self.total_bytes is not None else 0,
                self._moved["h2d"], self._moved["d2h"], self._counts["h2d"], self._counts["d2h"],
                self.latest - self._zero, self._busy["h2d"], self._busy["d2h"], self._busy["product"],
                self._busy["attention"], self._allocations, self._hazards + copies.races, self._driver_peak,
            )  # fmt: skip

    def transfer(self, direction: str, tensor: torch.Tensor, device_side: Any, blocking: bool, stream: Any) -> None:
        """Count a copy that makes `tensor` (its shape and dtype are those of the destination).

        `device_side` is the simulated tensor read from or written to; `stream.ready` is when the stream is
        free, and moves. Copies within the device cost nothing.
        """
        nbytes = tensor.nbytes
        if direction != "d2d":
            with self.lock:
                start = max(self.host, stream.ready)
                span = span_of(device_side)
                self._check(span, start, direction == "h2d")
                seconds = nbytes / self._rates[direction]
                end = max(start, self._engines[direction]) + seconds
                stream.ready = self._engines[direction] = end
                self._mark(span, end, direction == "h2d")
                self._moved[direction] += nbytes
                self._counts[direction] += 1
                self._busy[direction] += seconds
                if blocking:
                    self.host = end
                self.latest = max(self.latest, end)
        if self.watchers:
            pointer = device_side.raw.untyped_storage().data_ptr()
            event = Transfer(direction, nbytes, tuple(tensor.shape), tensor.dtype, pointer)
            for watcher in tuple(self.watchers):
                watcher(event)

    def read(self, nbytes: int, after: float) -> float | None:
        """Count a read of `nbytes` from disk that begins at `after` or later. Return its end, None without `disk`."""
        if self.disk is None:
            return None
        with self.lock:
            start = max(self.host, after, self._engines["disk"])
            self._engines["disk"] = end = start + nbytes / self.disk
            self.latest = max(self.latest, end)
        return end

    def compute(
        self, operations: int, reads: list[Span], writes: list[Span], stream: Any, kind: KernelKind = "other"
    ) -> None:
        """Queue a kernel on a stream. Raises torch.OutOfMemoryError if its workspace does not fit."""
        with self.lock:
            if kind != "other" and self.overhead != CardOverhead():
                self._settle()
                self._library = self.overhead.library_bytes
                self._hold(self.overhead.workspace_bytes)
                slower = self.overhead.attention_times if kind == "attention" else self.overhead.product_times
                operations = round(operations * slower)
            start = max(self.host, stream.ready)
            for span in reads:
                self._check(span, start, False)
            for span in writes:
                self._check(span, start, True)
            flops = (self.attention_flops if kind == "attention" else None) or self.flops
            seconds = self.times * operations / flops if flops else 0.0
            seconds += self._paging_seconds(reads + writes)
            stream.ready = end = start + seconds
            for span in reads:
                self._mark(span, end, False)
            for span in writes:
                self._mark(span, end, True)
            self._busy["attention" if kind == "attention" else "product"] += seconds
            self.latest = max(self.latest, end)

    def repeat(self, product_seconds: float, attention_seconds: float) -> None:
        """Count kernels that ran before, in a dry run that does not walk them again."""
        with self.lock:
            self._busy["product"] += product_seconds
            self._busy["attention"] += attention_seconds

    def _paging_seconds(self, spans: list[Span]) -> float:
        """Return the seconds that a kernel waits for its bytes in system memory, which are assumed evenly spread."""
        self._settle()
        if self.pages_above is None or self._allocated <= self.pages_above:
            return 0.0
        share = 1 - self.pages_above / self._allocated
        return share * sum(span.end - span.begin for span in spans) / self._rates["h2d"]

    def _check(self, span: Span, start: float, write: bool) -> None:
        # On one stream `start` is never before the end of earlier work, so only other streams can trip this.
        for (begin, end), times in span.allocation.spans.items():
            if begin < span.end and span.begin < end and (times.used if write else times.written) > start:
                self._hazards += 1
                return

    @staticmethod
    def _mark(span: Span, end: float, write: bool) -> None:
        times = span.allocation.spans.get(span[1:], Times())
        written = max(times.written, end) if write else times.written
        span.allocation.spans[span[1:]] = Times(written, max(times.used, end))

    def wait_until(self, when: float) -> None:
        """Wait on the host for a moment of the virtual clock."""
        with self.lock:
            self.host = max(self.host, when)
            self.latest = max(self.latest, when)


class Span(NamedTuple):
    """Bytes `begin` to `end` of an allocation."""

    allocation: Allocation
    begin: int
    end: int


def span_of(tensor: Any) -> Span:
    """Return the bytes that a simulated tensor lies in."""
    raw = tensor.raw
    if not raw.numel():
        return Span(tensor.allocation, 0, 0)
    begin = raw.storage_offset() * raw.itemsize
    last = sum((size - 1) * stride for size, stride in zip(raw.shape, raw.stride(), strict=True))
    return Span(tensor.allocation, begin, begin + (last + 1) * raw.itemsize)


card = Card(None)  # the one in use; `dry_card` puts another in its place for a while


def current_card() -> Card:
    """Return the card in use. Do not keep it: `dry_card` puts another in its place for a while."""
    return card
