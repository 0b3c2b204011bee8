"""What surrounds a stage that runs in a node: the graph's order for the manager, words for the page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from comfy_api.latest import io

from ..memory.sizes import format_bytes
from .graph import coming_units
from .progress import show_text

if TYPE_CHECKING:
    from ..memory.timeline import Event
    from ..memory.unit import ManagedModel
    from ..pipelines import StagedPipeline

_SECONDS = 0.25  # between two texts: people read them


@contextmanager
def running(node: type[io.ComfyNode], pipe: StagedPipeline, doing: str) -> Iterator[None]:
    """For the time of a stage the manager knows what comes after it, and the node shows what it does.

    Afterwards the node shows what the stage took.
    """
    manager = pipe.manager
    stages = manager.timeline.stages
    before = stages[-1] if stages else None
    manager.schedule(coming_units(node))
    try:
        with manager.timeline.watched(_Words(node, pipe, doing)):
            yield
    finally:
        manager.schedule(None)
    if stages and stages[-1] is not before:
        show_text(node, stages[-1].summary())


class _Words:
    """Shows each event of a stage in the node, as far as it can be read."""

    def __init__(self, node: type[io.ComfyNode], pipe: StagedPipeline, doing: str) -> None:
        self._node, self._pipe, self._doing = node, pipe, doing
        self._shown, self._at = "", 0.0

    def __call__(self, event: Event, unit: ManagedModel) -> None:
        words = describe(self._pipe, event, unit, self._doing)
        now = time.monotonic()
        is_news = event.kind in ("read", "place") or now - self._at >= _SECONDS
        if words and words != self._shown and is_news:
            self._shown, self._at = words, now
            show_text(self._node, words)


def describe(pipe: StagedPipeline, event: Event, unit: ManagedModel, doing: str) -> str:
    """Such as "Llama 3.1 8B: encoding, streamed, 8 of 32 blocks stay, 5.20 of 8.00 GB"; nothing for what leaves."""
    title = pipe.titles.get(unit.name, unit.name)
    if event.kind == "read":
        return f"{title}: reading {format_bytes(event.bytes)}"
    if event.kind not in ("place", "call", "ran") or unit.placement is None:
        return ""
    how = unit.placement.describe()
    if not unit.placement.on_device:
        return f"{title}: {doing}, on the CPU"
    budget = format_bytes(pipe.manager.budget.device_bytes)
    return f"{title}: {doing}, {how}, {format_bytes(event.allocated_bytes)} of {budget}"
