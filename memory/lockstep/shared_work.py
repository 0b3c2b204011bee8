"""The forecast of a unit whose passes run in lockstep. A pure function."""

from __future__ import annotations

from dataclasses import replace

from ..planning.forecast import UnitForecast


def in_lockstep(work: UnitForecast, passes: int, thread_bytes: int = 0) -> UnitForecast:
    """Return the forecast of calls that make `passes` predictions each, of a unit that made one in each call.

    Each call computes for all of them. While one runs, the others wait at a weight group, and hold at most what is
    held at the call of any module. Libraries take `thread_bytes` for each thread but the first.
    """
    held = max((nbytes for path, nbytes in work.held if path), default=work.working_bytes)
    waiting = (passes - 1) * (held + thread_bytes)
    return replace(
        work,
        calls=max(1, work.calls // passes),
        working_bytes=work.working_bytes + waiting,
        first_bytes=work.first_bytes + waiting,
        held=tuple((path, nbytes + waiting if path else nbytes) for path, nbytes in work.held),
    )
