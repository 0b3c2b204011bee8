"""The stages of a pipeline: encode, sample and decode, each with only its own weights on the device."""

from __future__ import annotations

from .family import ModelFamily, Modules, OnStep, Part
from .pipeline import StagedPipeline
from .prompts import Prompt, no_effect

__all__ = ["ModelFamily", "Modules", "OnStep", "Part", "Prompt", "StagedPipeline", "no_effect"]
