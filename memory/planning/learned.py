"""Measured seconds of pieces, kept from run to run for each card, model, shape and torch."""

from __future__ import annotations

import hashlib

import torch

from .. import speeds
from .forecast import UnitForecast
from .measured import Measured
from .planner import UnitSizes


def recall(card: str, sizes: UnitSizes, work: UnitForecast) -> Measured | None:
    """What the pieces were measured to compute, in this process or an earlier one; None if they were not."""
    try:
        return Measured.from_dict(speeds.pieces(_key(card, sizes, work)))
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def keep(card: str, sizes: UnitSizes, work: UnitForecast, measured: Measured | None) -> Measured | None:
    """Keep what was measured, or with None forget it. Returns it as `recall` will."""
    speeds.note_pieces(_key(card, sizes, work), measured.to_dict() if measured else None)
    return measured and Measured.from_dict(measured.to_dict())


def _key(card: str, sizes: UnitSizes, work: UnitForecast) -> str:
    calls = max(1, work.calls)
    done = [(path, f"{operations / calls:.6g}") for path, operations in work.modules]
    digest = hashlib.sha256(repr((sizes.pieces, f"{work.operations / calls:.6g}", done)).encode())
    return f"{card}, torch {torch.__version__}, {digest.hexdigest()[:24]}"
