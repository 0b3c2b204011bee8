"""Choose the way to decode by its forecast, before any is tried. Pure functions: no tensor, no device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

WayName = Literal["whole", "stripes", "tiles", "cpu"]

_PATIENCE = 8  # times as long as blended tiles, which change the picture, and a minute
_MINUTE = 60.0
SHARES = (1.0, 1 / 2, 1 / 8)  # of the budget, that stripes are cut for: where one is exceeded, the next may keep it


@dataclass(frozen=True)
class Way:
    """One way to decode, and its needs: bytes on the device with the weights, RAM for feature maps, seconds.

    Beside those the driver counts `beside_bytes`. `share` is the part of the budget that stripes use. None is unknown:
    only trying tells.
    """

    name: WayName
    peak_bytes: int | None = None
    ram_bytes: int = 0
    seconds: float | None = None
    share: float = 1.0
    beside_bytes: int = 0

    @property
    def words(self) -> str:
        """The words that the user reads."""
        part = "" if self.share == 1 else f" of 1/{round(1 / self.share)} of the room"
        return {"whole": "whole", "stripes": f"in stripes{part}", "tiles": "in tiles", "cpu": "on the CPU"}[self.name]

    @property
    def note(self) -> str:
        """The note of a report if it is not whole. Of tiles it says that the picture differs."""
        return {"whole": "", "tiles": "in tiles, which may show faint seams"}.get(self.name, self.words)

    def fits(self, room_bytes: int, ram_bytes: int) -> bool:
        """Return whether it may fit the budgets."""
        fits = self.peak_bytes is None or self.peak_bytes + self.beside_bytes <= room_bytes
        return fits and self.ram_bytes <= ram_bytes


def choose(ways: Iterable[Way], room_bytes: int, ram_bytes: int) -> Way:
    """Choose the first way that fits, best first; the one after it where stripes take far longer.

    Whole and in stripes give the same picture; blended tiles do not, but are quick; the CPU, which always fits, is the
    last of the ways. Ways after the chosen one are not forecast.
    """
    fitting = (way for way in ways if way.fits(room_bytes, ram_bytes))
    first = next(fitting)
    if first.name != "stripes" or first.seconds is None or first.seconds <= _MINUTE:
        return first
    after = next(fitting)
    if after.seconds is not None and first.seconds > _PATIENCE * after.seconds + _MINUTE:
        return after
    return first


def less(way: Way) -> Way | None:
    """Return the way to try after memory ran out, or None after the CPU."""
    if way.name == "stripes" and way.share > SHARES[-1]:
        return Way("stripes", share=SHARES[-1])
    after: dict[WayName, WayName] = {"whole": "stripes", "stripes": "tiles", "tiles": "cpu"}
    return Way(after[way.name]) if way.name in after else None
