"""The web server, reduced to a recorder of what nodes sent to the page."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class _Routes:
    """Accepts route decorators; `handlers` maps (method, path) to the function."""

    def __init__(self) -> None:
        self.handlers: dict[tuple[str, str], Callable] = {}

    def _register(self, method: str, path: str) -> Callable:
        def keep(function: Callable) -> Callable:
            self.handlers[method, path] = function
            return function

        return keep

    def get(self, path: str, **kwargs: Any) -> Callable:
        return self._register("GET", path)

    def post(self, path: str, **kwargs: Any) -> Callable:
        return self._register("POST", path)


class PromptServer:
    instance: PromptServer

    def __init__(self) -> None:
        self.client_id: str | None = None
        self.last_node_id: str | None = None
        self.last_prompt_id: str | None = None
        self.routes = _Routes()
        self.texts: list[tuple[str, str]] = []
        self.events: list[tuple[Any, Any, str | None]] = []

    def send_progress_text(self, text: str | bytes, node_id: str, sid: str | None = None) -> None:
        text = text if isinstance(text, str) else bytes(text).decode()
        self.texts.append((str(node_id), text))

    def send_sync(self, event: Any, data: Any, sid: str | None = None) -> None:
        self.events.append((event, data, sid))


PromptServer.instance = PromptServer()
