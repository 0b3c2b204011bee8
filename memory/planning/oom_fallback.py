"""Decide what to give up, and in which order, when a call runs out of memory. Pure functions.

The order is:

1. Evict the other units and try again.
2. Halve the share of the unit's own resident groups, down to a quarter, then to none.
3. Run the batch of classifier-free guidance in parts.

`stage` makes the failed call again after each of them, so the steps before it are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Fallback:
    """The way in which a call is tried.

    `strategy` is a placement or "auto". With `alone` all other units are evicted first. Of the groups that could stay
    on the device, a `share` from 0 to 1 may. The batch runs in `parts`, one after the other.
    """

    strategy: str = "auto"
    alone: bool = False
    share: float = 1.0
    parts: int = 1


_LEAST_SHARE = 0.25  # share of the resident groups below which all of them stream
_SLOW = 2.0  # multiple of the planned seconds above which a call does more than compute, such as paging
_HELPS = 0.8  # share of the earlier seconds that a call may take at most, for a lower share to count as a help


def next_fallback(attempt: Fallback, streams: bool, batch: int) -> Fallback | None:
    """Return the attempt to make after one that ran out of memory; None when nothing is left to give up.

    `streams` tells whether the unit can be streamed. `batch` is the number of parts that its call could be run in.
    """
    if not attempt.alone:
        return replace(attempt, alone=True)  # the same share once more, with the other units evicted
    if streams and attempt.share:
        return replace(attempt, strategy="streamed", share=_less(attempt.share))
    if attempt.parts < batch:
        return replace(attempt, parts=min(batch, 2 * attempt.parts))
    return None


def next_share(share: float, seconds: float, planned: float, before: float | None = None) -> float | None:
    """Return the share to try after a call that was slow though nothing failed; None to keep the present one.

    A device that pages silently (WDDM) is slow while too much lies on it. `seconds` is the time of the call, `planned`
    the planned one. `before` is the time of the call for which the share was last lowered, None if it was not. If
    lowering it did not help, the result is 1.0: the full share again.
    """
    if not is_slow(seconds, planned):
        return None
    if before is not None and seconds > _HELPS * before:
        return 1.0
    return _less(share) if share else None


def is_slow(seconds: float, planned: float) -> bool:
    """Return whether a call took more than twice the planned seconds. False if none were planned."""
    return seconds > _SLOW * planned > 0


def _less(share: float) -> float:
    """Return half the share, or 0 below a quarter."""
    return share / 2 if share > _LEAST_SHARE else 0.0


def describe(attempt: Fallback) -> str:
    """Return an attempt in words, for a message."""
    if attempt.share == 1:
        how = "with everything else gone"
    else:
        how = f"with {attempt.share:.0%} of the weights that could stay" if attempt.share else "with no weights staying"
    return how if attempt.parts == 1 else f"{how}, the batch in {attempt.parts} parts"
