"""Which encoded pieces that stay on the device are decoded for good, where there is room. Pure functions."""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from ..codecs.codec import Codec
from ..codecs.cost import cost_of
from ..units.encoding import part_spans
from .tiers import spread

_FEW = 6  # pieces, of which all choices are looked at


class Decodable(Protocol):
    """A piece: its bytes as stored and as plain tensors, and how those are stored that are not plain."""

    @property
    def held_bytes(self) -> int: ...
    @property
    def plain_bytes(self) -> int: ...
    @property
    def codecs(self) -> tuple[Codec, ...]: ...


class DecodingLoad(Protocol):
    """A piece: the seconds of its call, those of decoding in it, and what it takes more if it stays decoded."""

    @property
    def seconds(self) -> float: ...
    @property
    def decode_seconds(self) -> float: ...
    @property
    def more_bytes(self) -> int: ...
    @property
    def moment_bytes(self) -> int: ...


@dataclass(frozen=True)
class Decoded:
    """Pieces that stay decoded, the bytes that they take more than as stored, and the seconds of a call that this
    saves. The bytes count what one of them takes for the moment while it is decoded."""

    pieces: tuple[int, ...] = ()
    more_bytes: int = 0
    saved_seconds: float = 0.0


def decoded_for_good(
    pieces: Sequence[Decodable], room_bytes: int, placing_room_bytes: float = math.inf, spared_bytes: int = 0
) -> tuple[frozenset[int], int]:
    """Return the pieces to decode once rather than at each call, and the bytes that they take more than stored.

    Those first that decoding moves most bytes for, for each byte that they take more. Never more than the room, nor,
    while they are decoded, than the `placing_room_bytes`; and of less room, the same ones up to some point. All have
    the `spared_bytes` more room.
    """
    more = [piece.plain_bytes - piece.held_bytes for piece in pieces]
    traffic = [sum(cost_of(codec.alike).traffic_bytes for codec in piece.codecs) for piece in pieces]
    order = sorted(
        (i for i, piece in enumerate(pieces) if piece.codecs), key=lambda i: (-traffic[i] / max(1, more[i]), i)
    )
    if 0 <= room_bytes < sum(max(0, more[i]) for i in order) <= room_bytes + spared_bytes:
        room_bytes += spared_bytes
    count = taken = 0
    for i in order:
        if taken + max(0, more[i]) > room_bytes:
            break
        count, taken = count + 1, taken + more[i]

    def most(count: int) -> int:
        chosen = sorted(order[:count])
        return sum(more[i] for i in chosen) + placing_bytes([pieces[i] for i in chosen])

    if most(count) > placing_room_bytes:
        count = max(0, bisect.bisect_right(range(count), placing_room_bytes, key=most) - 1)
    return frozenset(order[:count]), sum(more[i] for i in order[:count])


def moment_bytes(codecs: Iterable[Codec]) -> int:
    """Return what decoding tensors for good takes beside the results, one after the other.

    Until its stored bytes leave.
    """
    return max((part_spans(codec)[1] + codec.workspace_bytes for codec in codecs), default=0)


def placing_bytes(pieces: Sequence[Decodable]) -> int:
    """Return the peak of dequantizing these for good, one after the other, beyond their bytes when all are done."""
    most = later = 0
    for piece in reversed(pieces):
        most = max(most, moment_bytes(piece.codecs) - later)
        later += piece.plain_bytes - piece.held_bytes
    return most


def decoding_order(pieces: Sequence[DecodingLoad]) -> tuple[int, ...]:
    """Return the encoded pieces, those first that save most seconds for each byte more.

    Alike ones lie evenly in a call.
    """
    alike: dict[float, list[int]] = {}
    for i, piece in enumerate(pieces):
        if piece.decode_seconds:
            worth = float(f"{piece.decode_seconds / max(1, piece.more_bytes):.1e}")
            alike.setdefault(worth, []).append(i)
    seconds = [piece.seconds for piece in pieces]
    return tuple(i for worth in sorted(alike, reverse=True) for i in spread(alike[worth], seconds))


def decoded_within(
    pieces: Sequence[DecodingLoad], streamed: Sequence[tuple[int, ...]], rooms: Sequence[int]
) -> Iterator[tuple[int, Decoded]]:
    """Yield, for the index of each set of streamed pieces, what may be decoded of the others within its room.

    Of more than a few pieces it is one choice, which has in it that of less room; of few, all that there are.
    """
    order = decoding_order(pieces)
    if not order:
        yield from ((i, Decoded()) for i in range(len(streamed)))
    elif len(pieces) <= _FEW:
        for i, (passing, room) in enumerate(zip(streamed, rooms, strict=True)):
            staying = [piece for piece in order if piece not in passing]
            for size in range(len(staying) + 1):
                for chosen in itertools.combinations(staying, size):
                    if (decoded := _decoded(pieces, chosen)).more_bytes <= room:
                        yield i, decoded
    else:
        taken = _taken(pieces, order, streamed, rooms)
        for i, row in enumerate(taken):
            yield i, _decoded(pieces, np.array(order)[row].tolist())


def _taken(
    pieces: Sequence[DecodingLoad], order: Sequence[int], streamed: Sequence[tuple[int, ...]], rooms: Sequence[int]
) -> npt.NDArray[np.bool_]:
    """Return for each set which pieces of `order` that do not stream fit its room, from the first on."""
    stays = np.ones((len(streamed), len(pieces)), bool)
    for i, passing in enumerate(streamed):
        stays[i, list(passing)] = False
    stays = stays[:, list(order)]
    more = np.cumsum(stays * np.array([max(0, pieces[i].more_bytes) for i in order]), axis=1)
    moment = np.maximum.accumulate(stays * np.array([pieces[i].moment_bytes for i in order]), axis=1)
    return stays & (more + moment <= np.array(rooms)[:, None])


def _decoded(pieces: Sequence[DecodingLoad], chosen: Sequence[int]) -> Decoded:
    more_bytes = sum(max(0, pieces[i].more_bytes) for i in chosen)
    moment_bytes = max((pieces[i].moment_bytes for i in chosen), default=0)
    return Decoded(tuple(sorted(chosen)), more_bytes + moment_bytes, sum(pieces[i].decode_seconds for i in chosen))
