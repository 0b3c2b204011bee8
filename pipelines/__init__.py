"""What each model family needs to be encoded, sampled and decoded. Knows nothing of ComfyUI.

The families are imported when they are first asked for: ComfyUI starts no slower for them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .families import FAMILIES, GenericPipeline, StagedPipeline, open_pipeline

__all__ = ["FAMILIES", "GenericPipeline", "StagedPipeline", "open_pipeline"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from . import families

    return getattr(families, name)
