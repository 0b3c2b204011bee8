"""The manager's report: the units, where they are, and the budget."""

from __future__ import annotations

from dataclasses import dataclass

from ..charts.text_tables import format_table
from ..sizes import format_bytes
from ..vocabulary import Role, Tier
from ..weights.unit import ManagedModel
from .timeline import CallCount, StageRecord


@dataclass(frozen=True)
class UnitReport:
    """The state of one unit: its tier, placement and bytes."""

    name: str
    label: str
    role: Role
    tier: Tier
    placement: str | None
    size_bytes: int
    resident_bytes: int
    host_bytes: int
    leased: bool
    pinned: bool
    cached: bool = False  # no pipeline refers to it
    pinned_bytes: int = 0  # of those in RAM

    @classmethod
    def of(cls, unit: ManagedModel) -> UnitReport:
        """Return the state of a unit now."""
        return cls(
            name=unit.name,
            label=unit.label,
            role=unit.role,
            tier=unit.tier,
            placement=unit.placement.name if unit.placement else None,
            size_bytes=unit.size_bytes,
            resident_bytes=unit.resident_bytes,
            host_bytes=unit.host_bytes,
            leased=unit.leases > 0,
            pinned=unit.pinned,
            cached=unit.is_cached,
        )


@dataclass(frozen=True)
class Report:
    """The state of one manager. `str()` of it is a table."""

    device: str
    budget_bytes: int
    reserve_bytes: int
    allocated_bytes: int
    free_bytes: int
    ram_budget_bytes: int
    disk_bytes_read: int
    device_bytes_in: int
    units: tuple[UnitReport, ...]
    guests: tuple[UnitReport, ...] = ()  # host models (ComfyUI's own)
    driver_bytes: int = 0  # bytes that the driver counts for this process; 0 if unknown
    sampled: StageRecord | None = None  # the newest sampling stage

    @property
    def resident_bytes(self) -> int:
        """Bytes of Ballast's weights on the device."""
        return sum(unit.resident_bytes for unit in self.units)

    @property
    def counted(self) -> dict[str, CallCount]:
        """The calls that a step cache saw in the newest sampling stage, by unit."""
        units = self.sampled.units.values() if self.sampled else ()
        return {unit.name: unit.counted for unit in units if unit.counted}

    @property
    def cache_decibels(self) -> float | None:
        """PSNR of the latents of the newest sampling stage against a run without a cache, if it was measured."""
        return self.sampled.cache_decibels if self.sampled else None

    @property
    def host_bytes(self) -> int:
        """Bytes of Ballast's weights in RAM."""
        return sum(unit.host_bytes for unit in self.units)

    def __str__(self) -> str:
        free = f"{format_bytes(self.free_bytes)} free"
        there = format_bytes(sum(guest.resident_bytes for guest in self.guests))
        kept = format_bytes(sum(guest.host_bytes for guest in self.guests))
        if self.guests and not self.units:
            head = f"{self.device}: {there} of ComfyUI's models, {free}; RAM: {kept} of ComfyUI's models"
        else:
            head = (
                f"{self.device}: {format_bytes(self.resident_bytes)} of weights in a budget of "
                f"{format_bytes(self.budget_bytes)}, {free}; RAM: {format_bytes(self.host_bytes)} of weights"
            )
            if self.driver_bytes > self.allocated_bytes:
                head += f"; the driver counts {format_bytes(self.driver_bytes)}"
            if self.guests:
                head += f"; ComfyUI's models: {there} there, {kept} in RAM"
        rows: list[tuple[str, ...]] = [("unit", "role", "tier", "placement", "size", "on device", "in RAM", "")]
        for unit in (*self.units, *self.guests):
            in_ram = f"{format_bytes(unit.pinned_bytes)} of RAM pinned" if unit.pinned_bytes else ""
            words = ("leased" * unit.leased, "pinned" * unit.pinned, "cached" * unit.cached, in_ram)
            state = ", ".join(word for word in words if word)
            sizes = map(format_bytes, (unit.size_bytes, unit.resident_bytes, unit.host_bytes))
            name = f"{unit.label}/{unit.name}" if unit.label else unit.name
            rows.append((name, unit.role, unit.tier, unit.placement or "-", *sizes, state))
        counted = [
            f"{name} computed {count.computed} of {count.calls} calls with the cache {count.cache}."
            for name, count in self.counted.items()
        ]
        if self.cache_decibels is not None:
            counted.append(f"Its latents are at {self.cache_decibels:.1f} dB against a run without a cache.")
        return "\n".join([head, format_table(rows), *counted])
