"""Ballast runs diffusion transformers that do not fit in VRAM, one stage at a time.

ComfyUI imports `comfy_entrypoint` from here; as a library it offers `open_pipeline`, `memory` and its errors. Nothing
heavy is imported until it is used.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import memory
    from .memory.errors import DoesNotFitError
    from .pipelines import open_pipeline
    from .pipelines.decoding.rescue import DecodeError

__version__ = "0.2.0"
__all__ = ["WEB_DIRECTORY", "DecodeError", "DoesNotFitError", "comfy_entrypoint", "memory", "open_pipeline"]

WEB_DIRECTORY = "./web"  # where ComfyUI's page looks for help pages


async def comfy_entrypoint() -> Any:
    """Return the extension with the nodes, for ComfyUI."""
    from .requirements import complaint

    if told := complaint():  # before the nodes are imported, which may need it
        logging.getLogger("ballast").warning("Ballast: %s", told)
    from .collector import paused_collector

    with paused_collector():
        from .nodes import BallastExtension
    return BallastExtension()


def __getattr__(name: str) -> Any:
    if name == "open_pipeline":
        from .pipelines import open_pipeline

        return open_pipeline
    if name == "DoesNotFitError":
        from .memory.errors import DoesNotFitError

        return DoesNotFitError
    if name == "DecodeError":
        from .pipelines.decoding.rescue import DecodeError

        return DecodeError
    if name == "memory":
        return import_module(".memory", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
