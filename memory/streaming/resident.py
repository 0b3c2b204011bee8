"""All weights of a module on the device: it begins with the first piece, and the others come while it runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..errors import is_out_of_memory, release_frames
from ..host import management as host
from ..planning.decoded import decoded_for_good, placing_bytes
from ..units.calls import Forward
from ..units.encoding import Source
from ..units.pieces import CallOrder
from .incoming import NOTHING, Incoming
from .placement import Placement, decode_for_good, outside_inference
from .ring import Piece


class Resident(Placement):
    """All weights on the device. Between calls pieces may leave; `complete` must come before each call.

    Where `calls` are known, a piece that was brought comes when it is called first, and gates at its modules wait for
    it; `complete` takes them away as soon as all is there. Else all is there before the call: who reads what is not
    known. Of encoded pieces those are decoded for good, by `decode`, that there is room for within `weights_bytes` in
    all.
    """

    name = "resident"

    def __init__(
        self,
        module: nn.Module,
        device: torch.device,
        source: Mapping[str, Source] | None = None,
        calls: CallOrder | None = None,
        weights_bytes: int = 0,
        *,
        incoming: Incoming = NOTHING,
    ) -> None:
        super().__init__(module, device, source, calls, incoming=incoming)
        self._weights_bytes = weights_bytes
        self._stored_bytes = 0  # of all, with nothing decoded for good
        self._to_decode: list[Piece] = []  # for good

    @property
    def is_whole(self) -> bool:
        """Return whether all pieces are there, or have their room."""
        return all(piece.resident for piece in self._pieces)

    @property
    def decoded(self) -> frozenset[int]:
        """Which of the pieces that are called are decoded for good."""
        return frozenset(i for i, piece in enumerate(self._called) if piece.decoded)

    @property
    def _called(self) -> list[Piece]:
        return [piece for piece in self._pieces if piece.called]

    def _place(self) -> None:
        self._supply.open()
        self._move_rest()
        self._place_tables()
        self._decode_calls()
        self._supply.pin_too(self._pieces)
        for piece in self._pieces:
            self._bring(piece)
        self._stored_bytes = self.resident_bytes
        self._choose(self._weights_bytes)
        self._let_come()

    def shrink(self, bytes: int) -> int:
        before = self.resident_bytes
        for piece in self._pieces:
            if piece.resident and before - self.resident_bytes < bytes:
                self._supply.stop()  # it holds on to the room of what is to come
                self._give_up(piece)
        return before - self.resident_bytes

    def grow(self, bytes: int) -> int:
        before = self.resident_bytes
        if self.is_whole:
            return 0
        with outside_inference():
            for piece in self._pieces:
                if not piece.resident and self.resident_bytes - before + piece.held_bytes <= bytes:
                    self._supply.open()
                    self._bring(piece)
            self._let_come()
        return self.resident_bytes - before

    def complete(self) -> None:
        self.grow(sum(piece.held_bytes for piece in self._pieces))
        self._arrivals.send_before(None, None)
        if self._supply.has_windows or (self._gates and not self._arrivals.owes):
            self._arrive()

    def refit(self, weights_bytes: int) -> None:
        """Keep no more dequantized for good than `weights_bytes` allow. The rest comes back as it is stored."""
        self._choose(weights_bytes)
        with outside_inference():
            coming = [piece for piece in self._to_decode if not piece.decoded]
            # In the order of the calls they take no more for a moment than is planned, in another they may.
            anew = placing_bytes(coming) > placing_bytes(self._to_decode)
            again = [piece for piece in self._called if piece.decoded and (anew or piece not in self._to_decode)]
            for piece in again:
                self._give_up(piece)
            for piece in again:
                self._supply.open()
                self._bring(piece)
            if again:
                self._let_come()

    def decode(self) -> None:
        """Decode for good what is there and is to be. No call may be under way."""
        with outside_inference():
            for piece in self._to_decode:
                if not piece.resident or piece.decoded or piece.owed:
                    continue
                try:
                    decode_for_good(piece.slots)
                except BaseException as error:
                    self._give_up(piece)
                    if not is_out_of_memory(error):
                        raise
                    release_frames(error)
                    self._to_decode = []  # there is less memory than was said
                    self.complete()
                    return
                self.resident_bytes += piece.plain_bytes - piece.held_bytes
                piece.decoded = True

    def rest(self, failed: bool = False) -> None:
        if not failed:
            self._arrivals.send_before(None, None)

    def settle(self) -> None:
        if self._supply.has_windows:  # whose RAM is wanted otherwise
            self._arrive()
        self._supply.settle()

    def _let_come(self) -> None:
        """Bring the expected pieces when they are called, or now."""
        self._supply.follow(self._arrivals.disk_copies())
        if self.calls.order:
            self._open_gates([piece for piece in self._pieces if piece.owed])
            self._arrivals.send_before(None, None)
        else:
            self._arrive()

    def _choose(self, weights_bytes: int) -> None:
        """Choose which pieces are to be decoded for good."""
        called = self._called
        chosen = decoded_for_good(called, weights_bytes - self._stored_bytes)[0]
        self._to_decode = [called[i] for i in sorted(chosen)]

    def _gate(self, piece: Piece, forward: Forward, args: tuple, kwargs: dict) -> Any:
        if piece.owed:
            host.throw_if_interrupted()
            self._arrivals.enter(piece)
            self._arrivals.send_before(None, None)
        return forward(*args, **kwargs)

    def _arrive(self) -> None:
        """Make later work wait for all pieces, so that no gates and no windows are needed any more."""
        for piece in self._pieces:
            self._arrivals.enter(piece)
        self._close_gates()
        self._supply.close()

    def _remove(self) -> None:
        self._supply.close()
        self._queues.finish()  # the copies read host memory that may be dropped next, and write to what is freed here
        self._arrivals.clear()
        for piece in self._pieces:
            piece.resident = piece.decoded = False
