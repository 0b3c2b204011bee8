"""A thread that looks after something every so often, for as long as there is something to look after."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable


class Watch:
    """Calls `look` in a thread of its own when woken, and again after as many seconds as it says, None for never."""

    def __init__(self, look: Callable[[], float | None]) -> None:
        self._look = look
        self._lock = threading.RLock()  # a finalizer may wake it in the middle of this
        self._woken = threading.Event()
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Look soon, and go on looking. Returns at once, and may be called from anywhere."""
        self._woken.set()
        with self._lock, contextlib.suppress(RuntimeError):  # of an interpreter that is ending
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
                self._thread = None  # the next call of `wake` begins anew
            raise
