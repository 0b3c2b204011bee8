"""Only the marker that stops what depends on an output."""

from __future__ import annotations


class ExecutionBlocker:
    def __init__(self, message: str | None):
        self.message = message
