"""The budgets of one device's manager: VRAM and RAM, within what is free and what the user stated."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from . import ram, simulated
from .accelerator import Accelerator
from .host import management as host
from .planning.measured import Overhead
from .registry import Registry
from .sizes import format_bytes
from .vocabulary import Role
from .weights.unit import ManagedModel

log = logging.getLogger("ballast")

_RAM_RESERVE_BYTES = 2 * 2**30  # RAM left to the system and other programs


def spare_ram_bytes() -> int:
    """Return the free RAM, less the reserve and the RAM that a simulated card may still take, half at most."""
    spare, (held, most) = max(0, _beyond_reserve()), simulated.ram_taken()
    return spare - min(max(0, most - held), spare // 2)


def _beyond_reserve() -> int:
    return ram.available_bytes() - _RAM_RESERVE_BYTES


@dataclass(frozen=True)
class _StageCount:
    """The count of bytes that lie on the device beside weights, from the beginning of a stage.

    When the stage begins, two of the three terms add up to the part that is not counted as the stage's:

        beside weights = foreign + own leftover + other leftover
        uncounted      = foreign + own leftover

    Leftovers are tables and the like that earlier stages left with the units that were kept. They are an own leftover
    if all these units run in this stage: then they are part of the units' work. Else they are an other leftover.
    Example: 10 MB of another pack, and 2 MB left with a kept VAE. A stage of the VAE does not count 12 MB. A stage of
    another unit does not count 10 MB, and counts 2 MB that it has not brought.
    """

    foreign_bytes: int  # as the stage began
    uncounted_bytes: int
    own_leftover_bytes: int
    other_leftover_bytes: int

    @classmethod
    def begin(
        cls, beside_bytes: int, leftover_bytes: int, kept: Collection[ManagedModel], units: Collection[ManagedModel]
    ) -> _StageCount:
        """Begin the count of a stage of `units`, while those of `kept` are in place."""
        foreign = max(0, beside_bytes - leftover_bytes) if kept else beside_bytes
        uncounted = beside_bytes if all(unit in units for unit in kept) else foreign
        return cls(foreign, uncounted, uncounted - foreign, beside_bytes - uncounted)

    def counted(self, beside_bytes: int) -> int:
        """Return the bytes of `beside_bytes` that count as the stage's."""
        return max(0, beside_bytes - self.uncounted_bytes)

    def brought(self, beside_bytes: int) -> int:
        """Return the counted bytes without those that units of other stages keep."""
        return max(0, self.counted(beside_bytes) - self.other_leftover_bytes)

    def leftover(self, beside_bytes: int) -> int:
        """Return the leftover for the next stage, if this one ends with `beside_bytes`."""
        return max(0, beside_bytes - min(self.foreign_bytes, self.uncounted_bytes))

    def after_host_eviction(self, beside_bytes: int) -> _StageCount:
        """Return the count after the host evicted models of its own, which leaves `beside_bytes`."""
        return replace(self, uncounted_bytes=max(0, min(self.uncounted_bytes, beside_bytes)))

    def after_unit_eviction(self, freed_bytes: int) -> _StageCount:
        """Return the count after `freed_bytes` beside weights went with a unit, own leftovers first."""
        own = min(self.own_leftover_bytes, freed_bytes)
        return replace(
            self,
            uncounted_bytes=self.uncounted_bytes - own,
            own_leftover_bytes=self.own_leftover_bytes - own,
            other_leftover_bytes=max(0, self.other_leftover_bytes - (freed_bytes - own)),
        )


class Budget:
    """The VRAM and RAM limits of one manager in bytes, None where the user stated nothing.

    The units of `registry` count on the device, those of all registries in RAM.
    """

    def __init__(self, accelerator: Accelerator, registry: Registry) -> None:
        self.vram_limit: int | None = None
        self.ram_limit: int | None = None
        self.host_roles: Sequence[Role] | None = None  # of the host's models that will run, in order; None if unknown
        self.overhead = Overhead()  # memory beyond tensors that is reserved for the present stage
        self._accelerator, self._registry = accelerator, registry
        self._stage: _StageCount | None = None  # None between stages
        self._ram_left: int | None = None  # that the present stage leaves to weights, if it keeps tensors in RAM
        self._leftover_bytes = 0  # that the last stage left beside the weights of units that are kept
        self._warned_card_bytes = 0  # size of the simulated card for which the RAM warning was given

    @property
    def reserve_bytes(self) -> int:
        """VRAM left to other programs."""
        reserved = host.reserve_bytes(self._accelerator.device)
        return self._accelerator.default_reserve_bytes() if reserved is None else reserved

    @property
    def vram_bytes(self) -> int:
        """VRAM that weights may hold.

        The driver's bytes of this process are tensors and an overhead, such as library workspaces. Both the budget and
        the stated limit are for the driver's bytes:

            driver's bytes  = weights + beside weights + outside + free - reserve, at most `vram_limit`
            VRAM of weights = tensors within the driver's bytes - beside weights
        """
        beside, outside = self.beside_weights_bytes, self._accelerator.outside_bytes()
        free = self._accelerator.free_bytes() - self.reserve_bytes
        overhead = self.overhead.outside(outside)
        tensors = overhead.tensors_within(self._weights_bytes() + beside + outside + free)
        if self.vram_limit is not None:
            tensors = min(tensors, overhead.tensors_within(self.vram_limit))
        return max(0, tensors - beside)

    @property
    def beside_weights_bytes(self) -> int:
        """Bytes on the device that count as the present stage's, beside weights. 0 between stages."""
        return self._stage.counted(self._beside_bytes()) if self._stage else 0

    @property
    def brought_by_stage_bytes(self) -> int:
        """Bytes beside weights that the present stage has allocated itself, such as latents. 0 between stages."""
        return self._stage.brought(self._beside_bytes()) if self._stage else 0

    @property
    def device_bytes(self) -> int:
        """VRAM limit of the pack, weights and all else.

        That is the stated limit, or else what the pack has taken and what is free, less the reserve.
        """
        if self.vram_limit is not None:
            return self.vram_limit
        return max(0, self._accelerator.allocated_bytes() + self._accelerator.free_bytes() - self.reserve_bytes)

    @property
    def ram_bytes(self) -> int:
        """RAM that weights may hold: the stated limit, or what they hold and what is free, less the reserve.

        Without a stated limit the memory of a simulated card, which is RAM too, is subtracted, but half at most. A
        stage that keeps tensors of its own in RAM leaves the rest.
        """
        if self._ram_left is not None:
            return self._ram_left
        if self.ram_limit is not None:
            return self.ram_limit
        in_all = self._ram_in_all()
        return in_all - min(simulated.ram_taken()[1], in_all // 2)

    def ask_host(self, wanted_bytes: int) -> None:
        """Ask the host to evict models of its own until `wanted_bytes` are free."""
        host.evict_host_models(wanted_bytes, self._accelerator.device, self.host_roles)
        if self._stage:
            # The host's models were in the uncounted bytes. Without this the stage could allocate as many bytes
            # as they held without having them counted.
            self._stage = self._stage.after_host_eviction(self._beside_bytes())

    @contextmanager
    def for_stage(self, vram: int | None, ram: int | None, units: Collection[ManagedModel]) -> Iterator[None]:
        """Set the limits of a stage of `units`, and count its bytes beside weights, until it ends.

        None keeps a limit as it is. See `_StageCount`.
        """
        before = self.vram_limit, self.ram_limit, self._stage
        self.vram_limit = self.vram_limit if vram is None else vram
        self.ram_limit = self.ram_limit if ram is None else ram
        self._warn_of_card()
        kept = [unit for unit in self._registry.units() if unit.placement]
        self._stage = _StageCount.begin(self._beside_bytes(), self._leftover_bytes, kept, units)
        try:
            yield
        finally:
            self._leftover_bytes = self._stage.leftover(self._beside_bytes())
            self.vram_limit, self.ram_limit, self._stage = before

    @contextmanager
    def reserving(self, overhead: Overhead) -> Iterator[None]:
        """Reserve `overhead`, the memory that a stage takes beyond tensors, until the block ends."""
        before, self.overhead = self.overhead, overhead
        try:
            yield
        finally:
            self.overhead = before

    @contextmanager
    def keeping_in_ram(self, nbytes: int) -> Iterator[None]:
        """Leave `nbytes` of RAM to tensors that a stage keeps there, until the block ends."""
        before, self._ram_left = self._ram_left, max(0, self.ram_bytes - nbytes) if nbytes else self._ram_left
        try:
            yield
        finally:
            self._ram_left = before

    @contextmanager
    def evicting_unit(self) -> Iterator[None]:
        """Count the bytes beside weights that go with a unit, which is evicted in the block.

        A stage that allocates them again has brought them.
        """
        before = self._beside_bytes()
        yield
        if self._stage:
            self._stage = self._stage.after_unit_eviction(max(0, before - self._beside_bytes()))

    def _beside_bytes(self) -> int:
        """Return the bytes of tensors on the device that are no weights of units."""
        return self._accelerator.allocated_bytes() - self._weights_bytes()

    def _weights_bytes(self) -> int:
        return sum(unit.resident_bytes for unit in self._registry.units())

    def _ram_in_all(self) -> int:
        """Return the RAM that weights and a simulated card hold, and what is free, less the reserve."""
        held = sum(unit.host_bytes for unit in self._registry.everyone())
        return max(0, held + simulated.ram_taken()[0] + _beyond_reserve())

    def _warn_of_card(self) -> None:
        """Warn, once for each size, if a simulated card and weights could take more RAM than there is."""
        if self._accelerator.device.type != simulated.DEVICE_TYPE:
            return
        card_bytes, in_all = simulated.ram_taken()[1], self._ram_in_all()
        taken = card_bytes if self.vram_limit is None else min(self.vram_limit, card_bytes)
        if taken + self.ram_bytes > in_all and card_bytes != self._warned_card_bytes:
            self._warned_card_bytes = card_bytes
            log.warning(
                "Ballast: the simulated card takes RAM, up to %s, and weights up to %s, of %s that can be had: the "
                "system may end this process. Set a smaller vram or ram budget.",
                format_bytes(taken), format_bytes(self.ram_bytes), format_bytes(in_all),
            )  # fmt: skip
