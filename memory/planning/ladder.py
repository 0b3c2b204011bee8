"""What to give up, and in which order, when a call runs out of memory. Pure functions.

Others leave first, then the call's own resident blocks, by halves and then all; then the batch of classifier-free
guidance is run in parts; last, each layer comes for its own call. The call that failed is made again, so the steps
before it are kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Terms:
    """How a unit runs: by `strategy`, with everything else gone if `alone`, with a `share` of the blocks that could
    stay, with its batch in so many `parts`."""

    strategy: str = "auto"
    alone: bool = False
    share: float = 1.0
    parts: int = 1


_LEAST_SHARE = 0.25


def next_terms(terms: Terms, placement: str | None, streams: bool, batch: int) -> Terms | None:
    """The terms to try after those that ran out of memory; None when there is nothing left to give up.

    `placement` is how the unit sat, None if it could not be placed at all; `streams` whether it can be streamed,
    `batch` how many parts its call could be run in.
    """
    if not terms.alone:
        return replace(terms, alone=True)  # the same once more, with what share there is
    if streams and terms.share and placement != "leafwise":
        share = terms.share / 2 if terms.share > _LEAST_SHARE else 0.0
        return replace(terms, strategy="streamed", share=share)
    if terms.parts < batch:
        return replace(terms, parts=min(batch, 2 * terms.parts))
    if placement != "leafwise" and terms.strategy != "leafwise":
        return replace(terms, strategy="leafwise")
    return None


def describe(terms: Terms, placement: str | None = None) -> str:
    """What the terms mean, for a message; `placement` is how the unit sat under them, where that is known."""
    if "leafwise" in (terms.strategy, placement):
        how = "layer by layer"
    elif terms.share == 1:
        how = "with everything else gone"
    else:
        how = f"with {terms.share:.0%} of the blocks that could stay" if terms.share else "with no block staying"
    return how if terms.parts == 1 else f"{how}, the batch in {terms.parts} parts"
