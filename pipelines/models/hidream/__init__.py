"""HiDream-I1."""

from __future__ import annotations

from .hidream_model import HiDreamModel, open_hidream

__all__ = ["HiDreamModel", "open_hidream"]
