"""The lock of a device's stages, which run one at a time and do not wait for a thread that waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_SECONDS = 60.0  # that a thread waits for a stage whose `on_step` does not return


class StageLock:
    """Re-entrant. A stage lasts as long as it takes, but while it is in its caller's code others wait for so long only.

    That code may be waiting for them: they are refused, and it goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calling_since: float | None = None  # the holder called its caller's code
        self._outer: list[bool] = []  # for each time that it is held: whether it was taken in such code

    def __enter__(self) -> None:
        began = time.monotonic()
        while not self._lock.acquire(timeout=max(0.0, self._seconds_left(began))):
            if self._seconds_left(began) <= 0:
                raise RuntimeError(
                    f"another run on this device has been in its on_step for {PATIENCE_SECONDS:g} s, and a run in "
                    "another thread cannot begin before that returns. Run it in on_step itself, or let on_step not "
                    "wait for the thread."
                )
        self._outer.append(self._calling_since is not None)
        self._calling_since = None

    def __exit__(self, *_: Any) -> None:
        self._calling_since = time.monotonic() if self._outer.pop() else None
        self._lock.release()

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Until the block ends the holder is in its caller's code, which may take the lock once more."""
        self._calling_since = time.monotonic()
        try:
            yield
        finally:
            self._calling_since = None

    def is_owned(self) -> bool:
        """Return whether this thread holds it."""
        if not self._lock.acquire(blocking=False):
            return False
        self._lock.release()
        return bool(self._outer)

    def _seconds_left(self, began: float) -> float:
        since = self._calling_since
        return PATIENCE_SECONDS - (0.0 if since is None else time.monotonic() - max(since, began))
