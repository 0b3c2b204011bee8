"""Choose which encoded weight groups on the device are kept dequantized, as far as there is room. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..codecs.codec import Codec
from ..weights.encoding import part_spans
from .tiers import spread


class DecodingLoad(Protocol):
    """A weight group: seconds of its call, seconds of dequantizing in it, and bytes that it takes more dequantized."""

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
class KeptDequantized:
    """Groups that are kept dequantized.

    `more_bytes` is what they take beyond their stored form. It includes the bytes that one of them takes temporarily
    while it is dequantized. `saved_seconds` are those of one call.
    """

    groups: tuple[int, ...] = ()
    more_bytes: int = 0
    saved_seconds: float = 0.0


def moment_bytes(codecs: Iterable[Codec]) -> int:
    """Return the bytes that dequantizing these tensors one by one takes temporarily, beside the results.

    That is the most of any tensor: its stored bytes, which leave afterwards, and the codec's workspace.
    """
    return max((part_spans(codec)[1] + codec.workspace_bytes for codec in codecs), default=0)


def dequantizing_order(groups: Sequence[DecodingLoad]) -> tuple[int, ...]:
    """Return the encoded groups, those first that save the most seconds for each extra byte.

    Groups of equal worth are spread evenly over a call.
    """
    alike: dict[float, list[int]] = {}
    for i, group in enumerate(groups):
        if group.is_encoded:
            worth = float(f"{group.decode_seconds / max(1, group.more_bytes):.1e}")
            alike.setdefault(worth, []).append(i)
    seconds = [group.seconds for group in groups]
    return tuple(i for worth in sorted(alike, reverse=True) for i in spread(alike[worth], seconds))


def dequantized(groups: Sequence[DecodingLoad], chosen: Sequence[int]) -> KeptDequantized:
    """Return the cost and gain of keeping the groups `chosen` dequantized, made one by one in call order."""
    # Backwards: while a group is made, the extra bytes of the later ones are still free, and serve as its workspace.
    most = later = 0
    for i in sorted(chosen, reverse=True):
        most = max(most, groups[i].moment_bytes - later)
        later += max(0, groups[i].more_bytes)
    seconds = sum(groups[i].decode_seconds for i in chosen)
    return KeptDequantized(tuple(sorted(chosen)), later + most, seconds)


def dequantized_within(
    groups: Sequence[DecodingLoad], streamed: Sequence[tuple[int, ...]], rooms: Sequence[int]
) -> list[KeptDequantized]:
    """Return for each set of streamed groups the other groups to keep dequantized, within the bytes of its room.

    More room keeps a superset: a group that is dequantized in less room is so in more, too.
    """
    order = np.array(dequantizing_order(groups), int)
    if not order.size:
        return [KeptDequantized()] * len(streamed)
    stays = np.ones((len(streamed), len(groups)), bool)
    for i, passing in enumerate(streamed):
        stays[i, list(passing)] = False
    stays = stays[:, order]
    more = np.cumsum(stays * np.array([max(0, groups[i].more_bytes) for i in order]), axis=1)
    moment = np.maximum.accumulate(stays * np.array([groups[i].moment_bytes for i in order]), axis=1)
    fitting = stays & (more + moment <= np.array(rooms)[:, None])
    return [dequantized(groups, order[row].tolist()) for row in fitting]
