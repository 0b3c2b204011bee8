"""The stages of a pipeline: encode, sample and decode, each with only its own weights on the device."""

from __future__ import annotations

from .family import ModelFamily, Modules, OnStep, Part
from .pictures import Frames, Pictures, as_handed, as_stock, handed
from .pipeline import StagedPipeline
from .prompts import COUNTS, TOLD, Negative, Prompt, as_list, no_effect
from .runs import Item, Latents, Made

__all__ = [
    "COUNTS",
    "TOLD",
    "Frames",
    "Item",
    "Latents",
    "Made",
    "ModelFamily",
    "Modules",
    "Negative",
    "OnStep",
    "Part",
    "Pictures",
    "Prompt",
    "StagedPipeline",
    "as_handed",
    "as_list",
    "as_stock",
    "handed",
    "no_effect",
]
