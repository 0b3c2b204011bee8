"""What is decoded for good: never over the room, more with more room, the same each time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from ballast.memory.codecs import int8
from ballast.memory.codecs.codec import Codec
from ballast.memory.codecs.gguf import TYPES, codec_of
from ballast.memory.planning.decoded import decoded_for_good, decoding_order, moment_bytes, placing_bytes
from ballast.memory.planning.solver import PieceLoad
from hypothesis import given
from hypothesis import strategies as st


@dataclass(frozen=True)
class Piece:
    held_bytes: int
    plain_bytes: int
    codecs: tuple[Codec, ...]


def piece(kind: str, rows: int) -> Piece:
    shape = (rows, 256)
    plain = rows * 512
    if kind == "plain":
        return Piece(plain, plain, ())
    numbers = {entry.name: entry for entry in TYPES.values()}
    made = int8.planned(shape, torch.bfloat16) if kind == "int8" else codec_of(numbers[kind], shape, torch.bfloat16)
    return Piece(made.stored_bytes, plain, (made,))


pieces = st.lists(st.builds(piece, st.sampled_from(["plain", "int8", "Q8_0", "Q4_K"]), st.integers(1, 40)), max_size=12)


@given(pieces, st.integers(0, 200_000), st.integers(0, 200_000))
def test_within_the_room_and_more_with_more(found: list[Piece], one: int, other: int) -> None:
    less, more = sorted((one, other))
    few, few_bytes = decoded_for_good(found, less)
    many, many_bytes = decoded_for_good(found, more)
    assert few_bytes <= less and many_bytes <= more and few <= many
    assert few_bytes == sum(found[i].plain_bytes - found[i].held_bytes for i in few)
    assert all(found[i].codecs for i in many)
    assert decoded_for_good(found, less) == (few, few_bytes)


@given(pieces, st.integers(-1000, 200_000))
def test_placing_stays_within_its_room(found: list[Piece], room: int) -> None:
    def most_there(chosen: frozenset[int]) -> int:
        """The most at a time, more than all take as stored, where pieces are decoded one after the other."""
        now = most = 0
        for i in sorted(chosen):
            most = max(most, now + moment_bytes(found[i].codecs) + found[i].plain_bytes - found[i].held_bytes)
            now += found[i].plain_bytes - found[i].held_bytes
        assert most - now <= placing_bytes([found[i] for i in sorted(chosen)]) == max(0, most - now)
        return most

    every, few = decoded_for_good(found, 10**9)[0], decoded_for_good(found, 10**9, room)[0]
    assert not few or most_there(few) <= room
    assert few <= every == decoded_for_good(found, 10**9, 10**9)[0]
    larger = {decoded_for_good(found, below)[0] for below in range(0, 200_000, 4000)} | {every}
    assert all(chosen <= few for chosen in larger if most_there(chosen) <= room), "what there is room for is used"


def test_all_have_what_decoding_at_calls_spares() -> None:
    found = [piece("int8", 8)] * 3
    more = sum(each.plain_bytes - each.held_bytes for each in found)
    assert decoded_for_good(found, more - 1)[0] == {0, 1}
    assert decoded_for_good(found, more - 1, spared_bytes=1) == ({0, 1, 2}, more)
    assert decoded_for_good(found, more - 2, spared_bytes=1)[0] == {0, 1}
    assert not decoded_for_good(found, -1, spared_bytes=more + 1)[0], "as they are stored they do not fit"


def test_what_costs_most_for_its_bytes_comes_first() -> None:
    found = [piece("int8", 8), piece("Q4_K", 8)]
    room = found[1].plain_bytes - found[1].held_bytes
    assert decoded_for_good(found, room)[0] == {1}, "a block of Q4_K takes a dozen kernels, int8 one"
    assert decoded_for_good(found, 10 * room)[0] == {0, 1}


def test_those_that_save_most_come_first_and_alike_ones_lie_evenly() -> None:
    alike = [PieceLoad(10, 10, 1.0, 0.5, 30) for _ in range(8)]
    better, plain = PieceLoad(10, 10, 1.0, 0.5, 10), PieceLoad(10, 10, 1.0)
    assert decoding_order(alike) == (0, 4, 2, 6, 1, 5, 3, 7)
    assert decoding_order([*alike[:4], better, *alike[4:], plain])[0] == 4
    assert 9 not in decoding_order([*alike[:4], better, *alike[4:], plain])
