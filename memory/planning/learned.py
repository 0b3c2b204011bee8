"""Measurements of runs, kept from run to run for each card (see `probe.card_of`), model and shape.

The files are those of `speeds`.
"""

from __future__ import annotations

import hashlib

from .. import speeds
from ..accelerator import Accelerator
from .forecast import UnitForecast
from .measured import Measured, Overhead
from .planner import UnitSizes


def recall(card: str, sizes: UnitSizes, work: UnitForecast) -> Measured | None:
    """Return the measured seconds of the groups, from this process or an earlier one; None if there are none."""
    try:
        return Measured.from_dict(speeds.groups(_key(card, sizes, work)))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def keep(card: str, sizes: UnitSizes, work: UnitForecast, measured: Measured | None) -> Measured | None:
    """Keep measured seconds, or forget them if `measured` is None. Return them as `recall` will, to four digits."""
    speeds.note_groups(_key(card, sizes, work), measured.to_dict() if measured else None)
    return measured and Measured.from_dict(measured.to_dict())


def recall_overhead(card: str, sizes: UnitSizes, work: UnitForecast, pictures: int = 1) -> Overhead:
    """Return the bytes that runs took beyond their forecast, in any process, for so many pictures at once.

    What the driver counts outside the allocator is known for a card as soon as any model has run on it.
    """
    found = _overhead(_key(card, sizes, work, "overhead")).scaled(pictures)
    return found.outside(recall_outside(card))


def least_overhead(accelerator: Accelerator) -> Overhead:
    """Return the bytes beyond tensors that any run on a device takes, as far as they are known before."""
    return Overhead(workspace_bytes=accelerator.workspace_bytes(), outside_bytes=accelerator.outside_bytes())


def recall_outside(card: str) -> int:
    """Return the bytes that the driver counted on a card for a process, beside the allocator."""
    return _overhead(_outside_key(card)).outside_bytes


def keep_overhead(card: str, sizes: UnitSizes, work: UnitForecast, seen: Overhead) -> None:
    """Keep the bytes that one more run took beyond its forecast."""
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
    """Return the key of a unit's measurements: the card, and a digest of its groups and of the operations of a call."""
    calls = max(1, work.calls)
    done = [(path, f"{operations.total / calls:.6g}") for path, operations in work.modules]
    digest = hashlib.sha256(repr((sizes.groups, f"{work.operations.total / calls:.6g}", done)).encode())
    return ", ".join(filter(None, (card, digest.hexdigest()[:24], what)))
