"""The progress bar, which keeps every update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from . import model_management

PROGRESS_BAR_HOOK: Callable[..., None] | None = None


def set_progress_bar_global_hook(function: Callable[..., None] | None) -> None:
    global PROGRESS_BAR_HOOK
    PROGRESS_BAR_HOOK = function


class ProgressBar:
    """`bars` lists all bars made so far; `updates` of one is a list of (value, total, preview).

    The host checks for an interrupt whenever a bar moves; so does this one.
    """

    bars: list[ProgressBar] = []

    def __init__(self, total: float, node_id: str | None = None):
        self.total = total
        self.current: float = 0
        self.hook = PROGRESS_BAR_HOOK
        self.node_id = node_id
        self.updates: list[tuple[float, float, Any]] = []
        self.bars.append(self)

    def update_absolute(self, value: float, total: float | None = None, preview: Any = None) -> None:
        self.total = self.total if total is None else total
        self.current = min(value, self.total)
        self.updates.append((self.current, self.total, preview))
        model_management.throw_exception_if_processing_interrupted()
        if self.hook is not None:
            self.hook(self.current, self.total, preview, node_id=self.node_id)

    def update(self, value: float) -> None:
        self.update_absolute(self.current + value)
