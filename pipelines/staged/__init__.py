"""The stages of a pipeline: encode, sample and decode, each with only its own weights on the device."""

from __future__ import annotations

from .family import ModelFamily, Modules, OnStep, Part
from .pictures import Pictures, as_stock
from .pipeline import StagedPipeline
from .prompts import Negative, Prompt, as_list, no_effect

__all__ = [
    "ModelFamily",
    "Modules",
    "Negative",
    "OnStep",
    "Part",
    "Pictures",
    "Prompt",
    "StagedPipeline",
    "as_list",
    "as_stock",
    "no_effect",
]
