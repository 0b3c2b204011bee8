"""Decide what to give up, and in which order, when a call runs out of memory. Pure functions.

Others leave first, then the call's own resident groups, by halves and then all; then the batch of classifier-free
guidance is run in parts. The call that failed is made again, so the steps before it are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Attempt:
    """How a call is tried: by `strategy`, with everything else gone if `alone`, with a `share` of the groups that could
    stay, with its batch in so many `parts`."""

    strategy: str = "auto"
    alone: bool = False
    share: float = 1.0
    parts: int = 1


_LEAST_SHARE = 0.25
_SLOW = 2.0  # times the planned seconds, from which on something else goes on than computing
_HELPS = 0.8  # of the seconds before that a call must at most take for the room that was given up


def next_attempt(attempt: Attempt, streams: bool, batch: int) -> Attempt | None:
    """Return what to try after an attempt that ran out of memory; None when there is nothing left to give up.

    `streams` is whether the unit can be streamed, `batch` how many parts its call could be run in.
    """
    if not attempt.alone:
        return replace(attempt, alone=True)  # the same once more, with what share there is
    if streams and attempt.share:
        return replace(attempt, strategy="streamed", share=_less(attempt.share))
    if attempt.parts < batch:
        return replace(attempt, parts=min(batch, 2 * attempt.parts))
    return None


def next_share(share: float, seconds: float, planned: float, before: float | None = None) -> float | None:
    """Return the share to try after a call that took so many seconds though nothing failed.

    None to go on with this one.
    A device that pages silently is slow as long as too much lies there. `before` are the seconds of the call for which
    the share was lowered last: where that was of no use, all of it comes back.
    """
    if not is_slow(seconds, planned):
        return None
    if before is not None and seconds > _HELPS * before:
        return 1.0
    return _less(share) if share else None


def is_slow(seconds: float, planned: float) -> bool:
    """Return whether a call took much longer than planned; of one that was to take no time nothing can be told."""
    return seconds > _SLOW * planned > 0


def _less(share: float) -> float:
    return share / 2 if share > _LEAST_SHARE else 0.0


def describe(attempt: Attempt) -> str:
    """Return an attempt in words, for a message."""
    if attempt.share == 1:
        how = "with everything else gone"
    else:
        how = f"with {attempt.share:.0%} of the weights that could stay" if attempt.share else "with no weights staying"
    return how if attempt.parts == 1 else f"{how}, the batch in {attempt.parts} parts"
