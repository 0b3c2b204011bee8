"""HiDream-I1."""

from __future__ import annotations

from .pipeline import HiDreamPipeline

__all__ = ["HiDreamPipeline"]
