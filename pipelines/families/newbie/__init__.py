"""NewBie-image-Exp0.1."""

from __future__ import annotations

from .layouts import is_newbie
from .pipeline import NewbiePipeline

__all__ = ["NewbiePipeline", "is_newbie"]
