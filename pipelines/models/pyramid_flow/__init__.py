"""Pyramid-Flow."""

from __future__ import annotations

from .pyramid_layout import is_pyramid
from .pyramid_model import PyramidFlowModel

__all__ = ["PyramidFlowModel", "is_pyramid"]
