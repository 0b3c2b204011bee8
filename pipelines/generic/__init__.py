"""Any diffusers pipeline, staged."""

from __future__ import annotations

from .pipeline import GenericPipeline

__all__ = ["GenericPipeline"]
