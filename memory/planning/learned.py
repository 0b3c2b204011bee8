"""Measurements of runs, kept from run to run for each card (see `probe.card_of`), model and shape."""

from __future__ import annotations

import hashlib

from .. import speeds
from .forecast import UnitForecast
from .measured import Measured, Overhead
from .planner import UnitSizes


def recall(card: str, sizes: UnitSizes, work: UnitForecast) -> Measured | None:
    """Return what the groups were measured to compute, in this process or an earlier one; None if they were not."""
    try:
        return Measured.from_dict(speeds.groups(_key(card, sizes, work)))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def keep(card: str, sizes: UnitSizes, work: UnitForecast, measured: Measured | None) -> Measured | None:
    """Keep what was measured, or with None forget it. Returns it as `recall` will."""
    speeds.note_groups(_key(card, sizes, work), measured.to_dict() if measured else None)
    return measured and Measured.from_dict(measured.to_dict())


def recall_overhead(card: str, sizes: UnitSizes, work: UnitForecast, outside_bytes: int = 0) -> Overhead:
    """Return what runs took beyond their forecast, in any process, and at least `outside_bytes` outside.

    Of a card on which others ran, what the driver counts outside is known also for what did not run there yet.
    """
    found = _overhead(_key(card, sizes, work, "overhead"))
    return found.outside(max(outside_bytes, recall_outside(card)))


def recall_outside(card: str) -> int:
    """Return what the driver was seen to count of a card for a process, beside the allocator."""
    return _overhead(_outside_key(card)).outside_bytes


def keep_overhead(card: str, sizes: UnitSizes, work: UnitForecast, seen: Overhead) -> None:
    """Keep what one more run took beyond its forecast."""
    _keep_overhead(_key(card, sizes, work, "overhead"), seen)
    _keep_overhead(_outside_key(card), Overhead(outside_bytes=seen.outside_bytes))


def _overhead(key: str) -> Overhead:
    try:
        return Overhead.from_dict(speeds.groups(key))
    except (KeyError, TypeError, ValueError):
        return Overhead()


def _keep_overhead(key: str, seen: Overhead) -> None:
    known = _overhead(key)
    found = known.seen_again(seen)
    if found != known:
        speeds.note_groups(key, found.to_dict())


def _outside_key(card: str) -> str:
    return f"{card}, outside"


def _key(card: str, sizes: UnitSizes, work: UnitForecast, what: str = "") -> str:
    calls = max(1, work.calls)
    done = [(path, f"{operations.total / calls:.6g}") for path, operations in work.modules]
    digest = hashlib.sha256(repr((sizes.groups, f"{work.operations.total / calls:.6g}", done)).encode())
    return ", ".join(filter(None, (card, digest.hexdigest()[:24], what)))
