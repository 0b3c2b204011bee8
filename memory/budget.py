"""The budgets of one device's manager: VRAM and RAM, within what is free and what the user stated."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

from . import ram, simulated
from .accelerator import Accelerator
from .host import management as host
from .planning.measured import Overhead
from .registry import Registry
from .sizes import format_bytes
from .vocabulary import Role
from .weights.unit import ManagedModel

log = logging.getLogger("ballast")

_RAM_RESERVE_BYTES = 2 * 2**30


def spare_ram_bytes() -> int:
    """RAM that is free now, less what is left to others and to a simulated card, which gets half of it at most."""
    spare, (held, most) = max(0, _beyond_reserve()), simulated.ram_taken()
    return spare - min(max(0, most - held), spare // 2)


def _beyond_reserve() -> int:
    return ram.available_bytes() - _RAM_RESERVE_BYTES


class Budget:
    """Limits in bytes, None where nothing was stated.

    The units of `registry` count on the device, those of all registries in RAM.
    """

    def __init__(self, accelerator: Accelerator, registry: Registry) -> None:
        self.vram_limit: int | None = None
        self.ram_limit: int | None = None
        self.host_roles: Sequence[Role] | None = None  # of the host's models that will run, in order; None if unknown
        self._accelerator, self._registry = accelerator, registry
        self._not_ours: int | None = None  # bytes on the device when the present stage began, without any of ours
        self._left = 0  # bytes that stages have left beside the weights of units that are kept, such as tables
        self._own = 0  # of those, what is not counted in the present stage: it is part of its units' work
        self.overhead = Overhead()  # that the present stage is to have
        self._warned_of = 0  # bytes of the simulated card of which it was said that it may take too much RAM
        self._others = 0  # of those, what is counted in it though it brought none of it: what other units keep

    @property
    def reserve_bytes(self) -> int:
        """VRAM left to others."""
        reserved = host.reserve_bytes(self._accelerator.device)
        return self._accelerator.default_reserve_bytes() if reserved is None else reserved

    @property
    def vram_bytes(self) -> int:
        """VRAM that weights may hold: what they hold and what is free, less the reserve, within the stated limit.

        Both are less what goes to others than tensors: the limit is for what the driver counts for this process.
        """
        stage, outside = self.stage_bytes, self._accelerator.outside_bytes()
        overhead = self.overhead.outside(outside)
        free = self._accelerator.free_bytes() - self.reserve_bytes
        available = overhead.tensors_within(self._held_bytes() + stage + free + outside)
        if self.vram_limit is not None:
            available = min(available, overhead.tensors_within(self.vram_limit))
        return max(0, available - stage)

    @property
    def stage_bytes(self) -> int:
        """Bytes that the present stage holds beside weights, which are the pack's too."""
        return 0 if self._not_ours is None else max(0, self._beside_bytes() - self._not_ours)

    @property
    def live_bytes(self) -> int:
        """Bytes of these that the stage has brought itself."""
        return max(0, self.stage_bytes - self._others)

    @property
    def device_bytes(self) -> int:
        """VRAM that the pack may take in all: what was stated, or what it has taken and what is free for it."""
        if self.vram_limit is not None:
            return self.vram_limit
        return max(0, self._accelerator.allocated_bytes() + self._accelerator.free_bytes() - self.reserve_bytes)

    @property
    def ram_bytes(self) -> int:
        """RAM that weights may hold: what was stated, or what they hold and what is free, less the reserve.

        The memory of a simulated card is RAM too, and comes off what nobody stated. Half at least is left to weights.
        """
        if self.ram_limit is not None:
            return self.ram_limit
        in_all = self._ram_in_all()
        return in_all - min(simulated.ram_taken()[1], in_all // 2)

    def _ram_in_all(self) -> int:
        """RAM that weights and a simulated card hold, and what is free, less the reserve."""
        held = sum(unit.host_bytes for unit in self._registry.everyone())
        return max(0, held + simulated.ram_taken()[0] + _beyond_reserve())

    def _warn_of_card(self) -> None:
        """Say so, once for each size, where a simulated card and weights could take more RAM than there is."""
        if self._accelerator.device.type != simulated.DEVICE_TYPE:
            return
        card_bytes, in_all = simulated.ram_taken()[1], self._ram_in_all()
        taken = card_bytes if self.vram_limit is None else min(self.vram_limit, card_bytes)
        if taken + self.ram_bytes > in_all and card_bytes != self._warned_of:
            self._warned_of = card_bytes
            log.warning(
                "Ballast: the simulated card takes RAM, up to %s, and weights up to %s, of %s that can be had: the "
                "system may end this process. Set a smaller vram or ram budget.",
                format_bytes(taken), format_bytes(self.ram_bytes), format_bytes(in_all),
            )  # fmt: skip

    def ask_host(self, wanted_bytes: int) -> None:
        """Ask the host to move its own models away until so many bytes are free."""
        host.make_room(wanted_bytes, self._accelerator.device, self.host_roles)
        if self._not_ours is not None:  # what it gave up was not ours, and is not ours to fill
            self._not_ours = max(0, min(self._not_ours, self._beside_bytes()))

    @contextmanager
    def narrowed(self, vram: int | None, ram: int | None, units: Collection[ManagedModel]) -> Iterator[None]:
        """Other limits, for the time of a stage of these units, whose own bytes count from now on.

        What other units keep beside their weights counts too. What its own units keep is part of their work.
        """
        before = self.vram_limit, self.ram_limit, self._not_ours, self._own, self._others
        self.vram_limit = before[0] if vram is None else vram
        self.ram_limit = before[1] if ram is None else ram
        self._warn_of_card()
        beside, kept = self._beside_bytes(), [unit for unit in self._registry.units() if unit.placement]
        foreign = max(0, beside - self._left) if kept else beside
        self._not_ours = foreign if any(unit not in units for unit in kept) else beside
        self._own, self._others = self._not_ours - foreign, beside - self._not_ours
        try:
            yield
        finally:
            self._left = max(0, self._beside_bytes() - min(foreign, self._not_ours))
            self.vram_limit, self.ram_limit, self._not_ours, self._own, self._others = before

    @contextmanager
    def leaves(self, overhead: Overhead) -> Iterator[None]:
        """Leave room for what a stage takes beyond tensors, until it ends."""
        before, self.overhead = self.overhead, overhead
        try:
            yield
        finally:
            self.overhead = before

    @contextmanager
    def recount_cached(self) -> Iterator[None]:
        """While a unit leaves: what goes with its weights is the present stage's to take again, and counts then."""
        before = self._beside_bytes()
        yield
        if self._not_ours is not None:
            left = max(0, before - self._beside_bytes())
            gone = min(self._own, left)
            self._own, self._not_ours = self._own - gone, self._not_ours - gone
            self._others = max(0, self._others - (left - gone))

    def _beside_bytes(self) -> int:
        return self._accelerator.allocated_bytes() - self._held_bytes()

    def _held_bytes(self) -> int:
        return sum(unit.resident_bytes for unit in self._registry.units())
