"""Modular pipelines of diffusers."""

from __future__ import annotations

from .modular_model import ModularModel, open_modular

__all__ = ["ModularModel", "open_modular"]
