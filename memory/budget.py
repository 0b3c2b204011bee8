"""The budgets of one device's manager: VRAM and RAM, within what is free and what the user stated."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from . import ram, simulated
from .accelerator import Accelerator
from .host import management as host
from .planning.measured import Overhead
from .registry import Registry
from .sizes import format_bytes
from .vocabulary import Role

log = logging.getLogger("ballast")

_RAM_RESERVE_BYTES = 2 * 2**30  # RAM left to the system and other programs


def spare_ram_bytes() -> int:
    """Return the free RAM, less the reserve and the RAM that a simulated card may still take, half at most."""
    spare, (held, most) = max(0, _beyond_reserve()), simulated.ram_taken()
    return spare - min(max(0, most - held), spare // 2)


def _beyond_reserve() -> int:
    return ram.available_bytes() - _RAM_RESERVE_BYTES


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
        self._uncounted: int | None = None  # bytes beside weights as the present stage began; None between stages
        self._ram_left: int | None = None  # that the present stage leaves to weights, if it keeps tensors in RAM
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
        """Bytes that the present stage has allocated beside weights, such as latents. 0 between stages."""
        return 0 if self._uncounted is None else max(0, self._beside_bytes() - self._uncounted)

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
        if self._uncounted is not None:
            # The host's models were in the uncounted bytes. Without this the stage could allocate as many bytes
            # as they held without having them counted.
            self._uncounted = max(0, min(self._uncounted, self._beside_bytes()))

    @contextmanager
    def for_stage(self, vram: int | None, ram: int | None) -> Iterator[None]:
        """Set the limits of a stage, and count its bytes beside weights, until it ends. None keeps a limit as it is.

        What lies beside weights as it begins belongs to others, and is not counted.
        """
        before = self.vram_limit, self.ram_limit, self._uncounted
        self.vram_limit = self.vram_limit if vram is None else vram
        self.ram_limit = self.ram_limit if ram is None else ram
        self._warn_of_card()
        self._uncounted = self._beside_bytes()
        try:
            yield
        finally:
            self.vram_limit, self.ram_limit, self._uncounted = before

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
