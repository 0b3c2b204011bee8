"""What to give up, and in which order, when a call runs out of memory. Pure functions.

Others leave first, then the call's own resident pieces, by halves and then all; then the batch of classifier-free
guidance is run in parts. The call that failed is made again, so the steps before it are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Attempt:
    """How a call is tried: by `strategy`, with everything else gone if `alone`, with a `share` of the pieces that could
    stay, with its batch in so many `parts`."""

    strategy: str = "auto"
    alone: bool = False
    share: float = 1.0
    parts: int = 1


_LEAST_SHARE = 0.25


def next_attempt(attempt: Attempt, streams: bool, batch: int) -> Attempt | None:
    """What to try after an attempt that ran out of memory; None when there is nothing left to give up.

    `streams` is whether the unit can be streamed, `batch` how many parts its call could be run in.
    """
    if not attempt.alone:
        return replace(attempt, alone=True)  # the same once more, with what share there is
    if streams and attempt.share:
        share = attempt.share / 2 if attempt.share > _LEAST_SHARE else 0.0
        return replace(attempt, strategy="streamed", share=share)
    if attempt.parts < batch:
        return replace(attempt, parts=min(batch, 2 * attempt.parts))
    return None


def describe(attempt: Attempt) -> str:
    """An attempt in words, for a message."""
    if attempt.share == 1:
        how = "with everything else gone"
    else:
        how = f"with {attempt.share:.0%} of the weights that could stay" if attempt.share else "with no weights staying"
    return how if attempt.parts == 1 else f"{how}, the batch in {attempt.parts} parts"
