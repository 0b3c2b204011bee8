"""A disk from which weights come to RAM when a test lets them."""

from __future__ import annotations

import threading

import pytest
from ballast.memory.weights import reader
from ballast.memory.weights.reader import Job

SECONDS = 20.0  # after which a test has failed


class Slow:
    """A disk that gives no more than it is allowed to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.allowed = threading.Semaphore(0)
        self.over = False  # it gives nothing any more
        self.read: list[int] = []  # bytes of each batch
        fill = reader.fill_batch
        monkeypatch.setattr(reader, "RAM_THREADS", 1)

        def filled(batch: list[Job], room: int) -> bool:
            assert self.allowed.acquire(timeout=SECONDS), "it waits for what nothing asks for"
            if self.over:
                raise OSError("unplugged")
            done = fill(batch, room)
            self.read.append(sum(group.stored_bytes for group, _ in batch))
            return done

        monkeypatch.setattr(reader, "fill_batch", filled)

    def allow(self, count: int = 1) -> None:
        if count:
            self.allowed.release(count)
