"""Any diffusers pipeline, staged."""

from __future__ import annotations

from .pipeline import GenericPipeline
from .stock_parts import StockParts

__all__ = ["GenericPipeline", "StockParts"]
