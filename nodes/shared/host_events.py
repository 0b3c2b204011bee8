"""Listen to ComfyUI: to its progress, which tells what its own nodes do with VRAM, and to its unload buttons."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ... import memory
from ...memory.host import management as host

if TYPE_CHECKING:
    from ...memory.reports.observed import Observation

log = logging.getLogger("ballast")

_NAME = "ballast"
_UNLOAD_PATHS = ("/free", "/api/free")


def observe_prompt() -> None:
    """Record the nodes of the prompt that is about to run, until it ends. Older hosts report no progress."""
    on = host.device()
    if on is None or on.type == "cpu":
        return
    try:
        from comfy_execution.progress import add_progress_handler
    except ImportError:
        return
    add_progress_handler(_handler(memory.manager(on)))


def _quietly(method: Callable[..., None]) -> Callable[..., None]:
    """Keep the host's run going, whatever happens in a listener."""

    @functools.wraps(method)
    def safe(*args: Any, **kwargs: Any) -> None:
        try:
            method(*args, **kwargs)
        except Exception as error:
            log.warning("Ballast: cannot tell what a node did with VRAM (%s)", error)

    return safe


def _handler(of: memory.MemoryManager) -> Any:
    """Return a listener to the host's progress, of a class that the host gives."""
    from comfy_execution.progress import ProgressHandler

    from ...memory.reports.observed import Observation

    class Listener(ProgressHandler):
        def __init__(self) -> None:
            super().__init__(_NAME)
            self._graph: Any = None
            self._open: dict[str, Observation] = {}

        @_quietly
        def set_registry(self, registry: Any) -> None:
            self._graph = registry.dynprompt

        @_quietly
        def start_handler(self, node_id: str, state: Mapping[str, Any], prompt_id: str) -> None:
            name = self._graph.get_node(node_id).get("class_type", node_id)
            self._open[node_id] = Observation(of.timeline, name, prompt_id, of.budget.device_bytes)

        @_quietly
        def update_handler(self, node_id: str, *_: Any, **__: Any) -> None:
            if node_id in self._open:
                self._open[node_id].look()

        @_quietly
        def finish_handler(self, node_id: str, *_: Any, **__: Any) -> None:
            if node_id in self._open:
                self._open.pop(node_id).finish()

    return Listener()


def listen_for_unload() -> None:
    """Drop copies in RAM when the user asks to unload models: the host's own list has none of them."""
    from server import PromptServer

    app = getattr(getattr(PromptServer, "instance", None), "app", None)
    if app is not None and not app.frozen:
        app.on_response_prepare.append(_on_answer)


async def _on_answer(request: Any, response: Any) -> None:
    if request.method != "POST" or request.path not in _UNLOAD_PATHS or response.status != 200:
        return
    asked = await request.json()  # which the host has read, and aiohttp keeps
    if asked.get("unload_models") or asked.get("free_memory"):
        for each in memory.managers():
            each.drop_unclaimed()
