"""Where tests that run in a ComfyUI of their own process get its models."""

from __future__ import annotations

from types import ModuleType


def tiny() -> ModuleType:
    """Tiny models of the host's classes. Imported late: there may be no host."""
    from sim_device_pack import models

    return models
