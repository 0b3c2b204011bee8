"""Run a stage in a node: tell the manager what comes next, and show text and a bar on the page."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import comfy.utils
from comfy_api.latest import io
from comfy_execution.utils import get_executing_context

from ...memory.host import management as host
from ...memory.sizes import format_bytes, parse_bytes
from .graph import coming_host_roles, coming_units
from .progress import clear_failure, show_failure, show_text

if TYPE_CHECKING:
    from ...memory.reports.timeline import Event
    from ...memory.weights.unit import ManagedModel
    from ...pipelines import Pipeline

_SECONDS = 0.25  # between two texts: people read them
_LONGEST = 500  # characters of an error
# What the library asks of its arguments, as the widgets and sockets of the nodes have it.
_IN_WIDGETS = {
    "Give image, too.": "Connect image, too.",
    "Leave width and height out.": "Set width and height to 0.",
    "Leave images out, or give one to sample.": "Disconnect images, or connect one to image of Offloaded Sampler.",
    "Give images.": "Connect images.",
    "that does. Leave it out.": "that does. Disconnect it, or set it to 0.",
    "takes no picture to start from. Leave it out.": "takes no picture to start from. Disconnect it.",
    "starts from a latent: encode the picture first, and give it that.": (
        "takes no image: connect it to FP32 VAE Encode, and that to latent."
    ),
    "makes pictures, not videos: leave frames out.": "makes pictures, not videos: set frames to 0.",
    "Leave frames out.": "Set frames to 0.",
    "Leave it out; guidance is its own scale.": "Set true_cfg to 0: guidance is its own scale.",
    "Give it: ": "Connect ",
    "Give them to encode, and none to sample.": "Connect them to Staged Text Encode, and none here.",
    "Give latents that a run left at this step.": "Connect the latent of a sampler that ended at this step.",
    "Encode one prompt, and leave batch out.": "Encode one prompt, and set batch to 1.",
}
_BUDGET = re.compile(r"Raise the (v?ram) budget to ([\d.]+ [KMGT]?B)")
_NEWS = ("read", "place", "compile")  # that is shown at once


def shows_failure(execute: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a node's `execute` to show in the node why it failed."""

    @functools.wraps(execute)
    def run(node: type[io.ComfyNode], *args: Any, **kwargs: Any) -> Any:
        try:
            result = execute(node, *args, **kwargs)
        except BaseException as error:
            if isinstance(error, ValueError | RuntimeError) and len(error.args) == 1:
                error.args = (in_widgets(str(error)),)
            line = " ".join(str(error).split()) or type(error).__name__
            show_failure(node, "stopped" if host.is_interrupt(error) else f"failed: {line[:_LONGEST]}")
            raise
        clear_failure(node)
        return result

    return run


def in_widgets(text: str) -> str:
    """Reword what the library asks for: widgets instead of arguments, budgets in GB."""
    for said, words in _IN_WIDGETS.items():
        text = text.replace(said, words)
    return _BUDGET.sub(lambda found: f"Raise {found[1]}_gb to {_gigabytes(found[2])}", text)


def _gigabytes(size: str) -> str:
    """Return a size in GB as the widgets take it, never less: they have three digits."""
    return f"{math.ceil(parse_bytes(size) / 2**30 * 1000) / 1000:g}"


@contextmanager
def running(
    node: type[io.ComfyNode], pipe: Pipeline, doing: str, idle: str = "", notes: Sequence[str] = ()
) -> Iterator[list[str]]:
    """Tell the manager which models come next while a stage runs, and show progress in the node.

    Afterwards the node shows the notes, with those that the block added to what it was given, and what the stage took,
    or `idle` where none ran.
    """
    said = list(notes)
    manager = pipe.manager
    stages = manager.timeline.stages
    before = stages[-1] if stages else None
    manager.schedule(coming_units(node), coming_host_roles(node))
    manager.timeline.run = prompt_id()
    try:
        with manager.timeline.watched(_Page(node, pipe, doing)):
            yield said
    finally:
        manager.schedule(None)
    took = stages[-1].summary() if stages and stages[-1] is not before else idle
    if took or said:
        show_text(node, "\n".join(filter(None, [*said, took])))  # what is to be done is seen first, in a small node


def prompt_id() -> str:
    """Return the prompt that is running now, as the host names it."""
    context = get_executing_context()
    return context.prompt_id if context else ""


class _Page:
    """Shows events of a stage in the node, slowly enough to read, and reading from disk as a bar."""

    def __init__(self, node: type[io.ComfyNode], pipe: Pipeline, doing: str) -> None:
        self._node, self._pipe, self._doing = node, pipe, doing
        self._shown, self._at = "", 0.0
        self._bar: comfy.utils.ProgressBar | None = None
        self._reading = ""  # the model that the bar is of

    def __call__(self, event: Event, unit: ManagedModel) -> None:
        if event.kind in ("read", "reading", "converting"):
            read, total = (0, event.bytes) if event.kind == "read" else (event.bytes, event.total_bytes)
            if self._bar is None or self._reading != unit.name:
                self._bar = comfy.utils.ProgressBar(max(1, total), node_id=self._node.hidden.unique_id)
            self._reading = unit.name
            self._bar.update_absolute(read, max(1, total))
        elif event.kind == "load" and self._bar and self._reading == unit.name:
            self._bar.update_absolute(self._bar.total)
        words = describe(self._pipe, event, unit, self._doing)
        now = time.monotonic()
        if words and words != self._shown and (event.kind in _NEWS or now - self._at >= _SECONDS):
            self._shown, self._at = words, now
            show_text(self._node, words)


def describe(pipe: Pipeline, event: Event, unit: ManagedModel, doing: str) -> str:
    """Return the words for an event; empty for evictions.

    Such as "Llama 3.1 8B: encoding, streamed, 32% of the weights stay, 5.20 of 8.00 GB".
    """
    title = pipe.titles.get(unit.name, unit.name)
    if event.kind == "read":
        return f"{title}: reading {format_bytes(event.bytes)}"
    if event.kind == "reading":
        return f"{title}: reading, {format_bytes(event.bytes)} of {format_bytes(event.total_bytes)}"
    if event.kind == "converting":
        return f"{title}: converting weights into a file, {format_bytes(event.bytes)} read"
    if event.kind == "compile":
        return f"{title}: compiling, which cannot be stopped before it is done"
    if event.kind not in ("place", "call", "ran", "compiled") or unit.placement is None:
        return ""
    how = unit.placement.describe()
    if not unit.placement.on_device:
        return f"{title}: {doing}, on the CPU"
    budget = format_bytes(pipe.manager.budget.device_bytes)
    return f"{title}: {doing}, {how}, {format_bytes(event.allocated_bytes)} of {budget}"
