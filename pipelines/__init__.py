"""Encodes, samples and decodes with each model family. Imports nothing of ComfyUI.

The families are imported when they are first asked for: ComfyUI starts no slower for them.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import TYPE_CHECKING, Any

from ..collector import paused_collector

if TYPE_CHECKING:
    from .opening import MODELS, Pipeline, open_pipeline

__all__ = ["MODELS", "Pipeline", "open_pipeline"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    # In a thread: importing torch._dynamo leaves a cycle of frames, which would hold its callers' variables until the
    # next garbage collection, the first pipeline among them.
    with paused_collector(), ThreadPoolExecutor(1) as apart:
        apart.submit(import_module, "torch._dynamo").result()
        opening = apart.submit(import_module, ".opening", __name__).result()
    globals().update({each: getattr(opening, each) for each in __all__})
    return globals()[name]
