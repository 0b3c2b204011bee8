"""Drop copies in RAM when the user presses an unload button: the host's own list of models has none of them."""

from __future__ import annotations

from typing import Any

from ...memory.manager import managers

_PATHS = ("/free", "/api/free")


def listen() -> None:
    """Subscribe to requests to unload models."""
    from server import PromptServer

    app = getattr(getattr(PromptServer, "instance", None), "app", None)
    if app is not None and not app.frozen:
        app.on_response_prepare.append(_answered)


async def _answered(request: Any, response: Any) -> None:
    if request.method != "POST" or request.path not in _PATHS or response.status != 200:
        return
    asked = await request.json()  # which the host has read, and aiohttp keeps
    if asked.get("unload_models") or asked.get("free_memory"):
        for each in managers():
            each.drop_unclaimed()
