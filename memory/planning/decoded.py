"""Which encoded groups that stay on the device are decoded for good, where there is room. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..codecs.codec import Codec
from ..weights.encoding import part_spans
from .tiers import spread


class DecodingLoad(Protocol):
    """A group: the seconds of its call, those of decoding in it, and what it takes more if it stays decoded."""

    @property
    def seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...
    @property
    def more_bytes(self) -> int: ...
    @property
    def moment_bytes(self) -> int: ...
    @property
    def is_encoded(self) -> bool: ...


@dataclass(frozen=True)
class Decoded:
    """Groups that stay decoded, the bytes that they take more than as stored, and the seconds of a call that this
    saves. The bytes count what one of them takes for the moment while it is decoded."""

    groups: tuple[int, ...] = ()
    more_bytes: int = 0
    saved_seconds: float = 0.0


def moment_bytes(codecs: Iterable[Codec]) -> int:
    """Return what decoding tensors for good takes beside the results, one after the other.

    Until its stored bytes leave.
    """
    return max((part_spans(codec)[1] + codec.workspace_bytes for codec in codecs), default=0)


def decoding_order(groups: Sequence[DecodingLoad]) -> tuple[int, ...]:
    """Return the encoded groups, those first that save most seconds for each byte more.

    Alike ones lie evenly in a call.
    """
    alike: dict[float, list[int]] = {}
    for i, group in enumerate(groups):
        if group.is_encoded:
            worth = float(f"{group.decode_seconds / max(1, group.more_bytes):.1e}")
            alike.setdefault(worth, []).append(i)
    seconds = [group.seconds for group in groups]
    return tuple(i for worth in sorted(alike, reverse=True) for i in spread(alike[worth], seconds))


def dequantized(groups: Sequence[DecodingLoad], chosen: Sequence[int]) -> Decoded:
    """Return what it takes to dequantize these groups for good, one after the other in the order of their calls."""
    most = later = 0
    for i in sorted(chosen, reverse=True):
        most = max(most, groups[i].moment_bytes - later)
        later += max(0, groups[i].more_bytes)
    seconds = sum(groups[i].decode_seconds for i in chosen)
    return Decoded(tuple(sorted(chosen)), later + most, seconds)


def decoded_within(
    groups: Sequence[DecodingLoad], streamed: Sequence[tuple[int, ...]], rooms: Sequence[int]
) -> list[Decoded]:
    """Return for each set of streamed groups those of the others to dequantize for good, within its room.

    Those of less room are among those of more.
    """
    order = np.array(decoding_order(groups), int)
    if not order.size:
        return [Decoded()] * len(streamed)
    stays = np.ones((len(streamed), len(groups)), bool)
    for i, passing in enumerate(streamed):
        stays[i, list(passing)] = False
    stays = stays[:, order]
    more = np.cumsum(stays * np.array([max(0, groups[i].more_bytes) for i in order]), axis=1)
    moment = np.maximum.accumulate(stays * np.array([groups[i].moment_bytes for i in order]), axis=1)
    fitting = stays & (more + moment <= np.array(rooms)[:, None])
    return [dequantized(groups, order[row].tolist()) for row in fitting]
