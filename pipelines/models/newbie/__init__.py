"""NewBie-image-Exp0.1."""

from __future__ import annotations

from .newbie_layout import is_newbie
from .newbie_model import NewbieModel

__all__ = ["NewbieModel", "is_newbie"]
