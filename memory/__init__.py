"""Bytes: who holds VRAM and RAM, and how weights move. Knows nothing of prompts, diffusers or node graphs."""

from . import simulated
from .errors import DoesNotFitError
from .manager import MemoryManager, manager
from .sizes import format_bytes, parse_bytes
from .weights.unit import ManagedModel

__all__ = ["DoesNotFitError", "ManagedModel", "MemoryManager", "format_bytes", "manager", "parse_bytes", "simulated"]
