"""Which encoded pieces of a module that fits whole are decoded for good, where there is room. A pure function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..codecs.codec import Codec
from ..codecs.cost import cost_of


class Decodable(Protocol):
    """A piece: its bytes as stored and as plain tensors, and how those are stored that are not plain."""

    @property
    def held_bytes(self) -> int: ...
    @property
    def plain_bytes(self) -> int: ...
    @property
    def codecs(self) -> tuple[Codec, ...]: ...


def decoded_for_good(pieces: Sequence[Decodable], room_bytes: int) -> tuple[frozenset[int], int]:
    """The pieces to decode once rather than at each call, and the bytes that they take more than stored.

    Those first that decoding moves most bytes for, for each byte that they take more. Never more than the room; and of
    less room, the same ones up to some point.
    """
    more = [piece.plain_bytes - piece.held_bytes for piece in pieces]
    traffic = [sum(cost_of(codec.alike).traffic_bytes for codec in piece.codecs) for piece in pieces]
    order = sorted(
        (i for i, piece in enumerate(pieces) if piece.codecs), key=lambda i: (-traffic[i] / max(1, more[i]), i)
    )
    chosen: set[int] = set()
    taken = 0
    for i in order:
        if taken + max(0, more[i]) > room_bytes:
            break
        chosen.add(i)
        taken += more[i]
    return frozenset(chosen), taken
