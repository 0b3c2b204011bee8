"""Pyramid-Flow."""

from __future__ import annotations

from .layouts import is_pyramid
from .pipeline import PyramidFlowPipeline

__all__ = ["PyramidFlowPipeline", "is_pyramid"]
