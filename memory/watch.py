"""A thread that repeats a check for as long as there is something to check."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class Watch:
    """Calls `look` in a thread of its own when woken, and again after the seconds that `look` returns.

    None ends the thread until the next `wake`.
    """

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._lock = threading.RLock()  # re-entrant: a finalizer may call `wake` while this thread holds it
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Call `look` soon, and go on. Returns at once, and may be called from any thread."""
        self._woken.set()
        with self._lock, contextlib.suppress(RuntimeError):  # an interpreter that is ending starts no threads
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="RAM watch (Ballast)", daemon=True)
                thread.start()
                self._thread = thread

    def _run(self) -> None:
        try:
            while True:
                self._woken.clear()
                if (seconds := self._look()) is not None:
                    self._woken.wait(seconds)
                    continue
                with self._lock:
                    if not self._woken.is_set():
                        self._thread = None
                        return
        except BaseException:
            with self._lock:
                self._thread = None  # the next `wake` starts a new thread
            raise
