"""Deferred uploads: a resident piece has its room on the device at once, and its weights when it is called."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .queues import Queues
from .ring import Copy, Piece, State
from .supply import Supply


class Arrivals:
    """The pieces that stay and are not there yet, which one stream copies in the order of the calls.

    `pieces` are all of the module, in that order. Until a piece is there its module holds the host's tensors: whoever
    reads them elsewhere than in its calls meets an error that is seen. `take_bytes` tells what has come.
    """

    def __init__(self, pieces: Sequence[Piece], supply: Supply, queues: Queues) -> None:
        self._supply, self._queues = supply, queues
        self._order = {piece: i for i, piece in enumerate(pieces)}
        self._owing: list[Piece] = []  # whose copies have not been queued
        self._bytes_in = self._bytes_read = 0

    @property
    def owes(self) -> bool:
        """Return whether there are copies to queue."""
        return bool(self._owing)

    def take_bytes(self) -> tuple[int, int]:
        """Bytes that have come since this was last asked, and those of files that were read for them."""
        taken, self._bytes_in, self._bytes_read = (self._bytes_in, self._bytes_read), 0, 0
        return taken

    def expect(self, piece: Piece) -> int:
        """Take room for a piece. Returns the bytes."""
        made: dict[int, torch.Tensor] = {}
        for slot in piece.slots:
            if id(slot.tensor) not in made:
                made[id(slot.tensor)] = torch.empty_like(slot.tensor.detach(), device=self._queues.device)
        piece.owed = [(slot, made[id(slot.tensor)]) for slot in piece.slots]
        piece.arrived = self._queues.event()
        piece.become(State.AWAITED)
        self._queues.mark(piece.arrived)  # work that is queued may still read what was there before
        self._owing.append(piece)
        return sum(tensor.nbytes for tensor in made.values())

    def await_ram(self, piece: Piece) -> None:
        """Wait until what a piece is copied from has come to RAM. Raises what the reading raised."""
        if piece.state is State.AWAITED:
            self._supply.await_ram([slot.tensor for slot, _ in piece.owed])

    def enter(self, piece: Piece) -> None:
        """Make work that is queued from now on wait for a piece."""
        if piece.state is State.AWAITED:
            self._send(piece)
        if piece.state is not State.COMING:
            return
        self._queues.wait(piece.arrived)
        with torch.inference_mode(False), torch.no_grad():  # for tensors that outlive the call
            for slot, target in piece.owed:
                slot.set(target)
        piece.owed, piece.arrived = [], None
        piece.become(State.RESIDENT)

    def send_before(self, following: Piece | None, current: Piece | None) -> bool:
        """Queue the copies of what is called before another piece, as far as it has come to RAM.

        Those are all where nothing follows, or what follows is called before the `current` one, in the next call.
        Returns whether nothing is left of them.
        """
        upto = self._order[following] if following else len(self._order)
        now = self._order[current] if current and current.called else -1
        for piece in sorted(self._owing, key=self._order.__getitem__):
            if now < upto <= self._order[piece]:
                break
            if self._supply.is_on_disk(piece) or not self._supply.in_ram([slot.tensor for slot, _ in piece.owed]):
                return False
            self._send(piece)
        return True

    def before_disk(self, upcoming: list[Piece], current: Piece | None) -> list[Piece]:
        """Return the pieces that come through windows and are called before the next one that is to stay and is on
        disk: it takes the windows, and what was read into them would be read again.
        """
        now = self._order[current] if current else -1
        on_disk = (self._order[piece] for piece in self._owing if self._supply.is_on_disk(piece))
        upto = min((at for at in on_disk if at > now), default=None)
        return upcoming if upto is None else [piece for piece in upcoming if now < self._order[piece] < upto]

    def disk_copies(self) -> list[list[Copy]]:
        """Return what is to come from disk, by piece, in the order of the calls."""
        pieces = sorted(self._owing, key=self._order.__getitem__)
        return [copies for piece in pieces if (copies := self._copies(piece)[1])]

    def forget(self, piece: Piece) -> None:
        """Cancel the upload of a piece. Its room may then be given up."""
        if piece.state is State.COMING and piece.arrived:
            self._queues.finish()  # the copies into what is freed
        if piece in self._owing:
            self._owing.remove(piece)
        piece.owed, piece.arrived = [], None

    def clear(self) -> None:
        """Forget all, when no copy is under way."""
        self._owing.clear()
        for piece in self._order:
            piece.owed, piece.arrived = [], None

    def _send(self, piece: Piece) -> None:
        """Queue the copies of a piece, behind what used their bytes before."""
        self.await_ram(piece)
        in_ram, on_disk = self._copies(piece)
        self._supply.fill(on_disk)
        freed, done = piece.arrived, self._queues.event()
        after = [*filter(None, [freed]), *self._supply.events([source for source, _ in in_ram])]
        for source, target in in_ram:
            self._queues.copy(target, source, after, done)
        self._bytes_in += sum(target.nbytes for _, target in in_ram + on_disk)
        self._bytes_read += self._supply.file_bytes([source for source, _ in on_disk])
        piece.arrived = done if in_ram else None
        piece.become(State.COMING)
        self._owing.remove(piece)

    def _copies(self, piece: Piece) -> tuple[list[Copy], list[Copy]]:
        """Return the copies that a piece takes, each once: from RAM, and from disk."""
        once = {id(target): (slot.tensor, target) for slot, target in piece.owed}.values()
        on_disk = [copy for copy in once if self._supply.reads(copy[0])]
        return [copy for copy in once if not self._supply.reads(copy[0])], on_disk
