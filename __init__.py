"""Ballast runs diffusion transformers that do not fit in VRAM, one stage at a time.

ComfyUI imports `comfy_entrypoint` from here; as a library it offers `open_pipeline` and `memory`. Nothing heavy is
imported until it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import memory
    from .pipelines import open_pipeline

__version__ = "0.1.0"
__all__ = ["WEB_DIRECTORY", "comfy_entrypoint", "memory", "open_pipeline"]

WEB_DIRECTORY = "./web"  # where ComfyUI's page looks for help pages


async def comfy_entrypoint() -> Any:
    """The extension with the nodes, for ComfyUI."""
    from .nodes import BallastExtension

    return BallastExtension()


def __getattr__(name: str) -> Any:
    if name == "open_pipeline":
        from .pipelines import open_pipeline

        return open_pipeline
    if name == "memory":
        from .memory import manager  # noqa: F401  (importing it makes `memory` an attribute of this package)

        return globals()["memory"]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
