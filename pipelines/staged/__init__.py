"""The stages of a pipeline: encode, sample and decode, each with only its own weights on the device."""

from __future__ import annotations

from .family import ModelFamily, Modules, OnStep, Part
from .pipeline import StagedPipeline
from .prompts import Negative, Prompt, as_list, no_effect

__all__ = ["ModelFamily", "Modules", "Negative", "OnStep", "Part", "Prompt", "StagedPipeline", "as_list", "no_effect"]
