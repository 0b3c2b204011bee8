"""The lock of a device's stages. They run one at a time, and never wait for a thread that waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_SECONDS = 60.0  # seconds that a thread waits for a stage whose `on_step` does not return


class StageLock:
    """A re-entrant lock that is waited for without limit, except while its holder is in its caller's code.

    That code, such as `on_step`, may itself be waiting for the other threads. So after `PATIENCE_SECONDS` these get a
    RuntimeError, and the holder goes on.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._calling_since: float | None = None  # time at which the holder entered its caller's code
        self._outer: list[bool] = []  # for each level of re-entry: whether it was entered from such code

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
        """Mark the holder as being in its caller's code until the block ends. That code may take the lock once more."""
        self._calling_since = time.monotonic()
        try:
            yield
        finally:
            self._calling_since = None

    def is_owned(self) -> bool:
        """Return whether this thread holds the lock."""
        if not self._lock.acquire(blocking=False):
            return False
        self._lock.release()
        return bool(self._outer)

    def _seconds_left(self, began: float) -> float:
        """Return the seconds until a thread that has waited since `began` is refused.

        The full patience while the holder is not in its caller's code.
        """
        since = self._calling_since
        return PATIENCE_SECONDS - (0.0 if since is None else time.monotonic() - max(since, began))
