"""Claims: the managed models of one open model, which stay claimed while it lives."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Protocol

import torch

from ...memory.codecs.converters import converter_of
from ...memory.memory_manager import MemoryManager, manager, refuse_fork
from ...memory.planning.dry_run import StandIns
from ...memory.weights.conversion import Conversion
from ...memory.weights.unit import ManagedModel
from ..encoding.embedding_cache import EmbeddingCache, shared_cache
from ..planning.forecasts import Forecaster

_CONVERTED = ("text_encoder", "transformer")  # whose weights may be converted; decoders run as they are


class Part(Protocol):
    """A part of a pipeline that has weights."""

    @property
    def key(self) -> Hashable:
        """Identifies the model, so that all pipelines that run it share it."""

    def unit(self, label: str) -> ManagedModel:
        """Make the managed model. Loads nothing."""


class _Owner:
    """Owns the models of an open model: they stay claimed while it lives."""


class Claims:
    """The managed models of one open model on one device, and where what is learned of them is kept."""

    def __init__(self, device: str | torch.device, cache: EmbeddingCache | None = None, weights: str = "auto") -> None:
        self.weights, self._converter = weights, converter_of(weights)
        self._manager = manager(device)
        self.cache = cache or shared_cache()
        self.forecasts = self.cache.directory / "forecasts"
        self._owner = _Owner()
        self._text_files: Any = None  # the digests of the encoders' files, once asked for

    @property
    def manager(self) -> MemoryManager:
        """The manager of its device. Raises RuntimeError in a forked process, before a stage begins to wait there."""
        refuse_fork()
        return self._manager

    def claim(self, part: Part, label: str) -> ManagedModel:
        """Return the managed model of a part. Every pipeline of this device with the same part shares it."""
        folder = self.cache.directory / "encoded"

        def make() -> ManagedModel:
            unit = part.unit(label)
            if unit.role in _CONVERTED and self._converter:
                digest = sha256(repr((part.key, self.weights)).encode()).hexdigest()
                path = folder / f"{unit.name}-{self.weights}-{digest[:32]}.safetensors"
                unit.conversion = Conversion(self._converter, path)
            return unit

        key = (part.key, self.weights, folder) if self._converter else part.key
        return self.manager.claim(key, make, self._owner)

    def forecaster(self, name: str, facts: Callable[[], Mapping[str, Any]], stand_ins: StandIns) -> Forecaster:
        """Return the forecaster of a model with these facts."""
        accelerator = self.manager.accelerator
        between = self.manager.between_stages
        return Forecaster(name, facts, self.forecasts, between, stand_ins, accelerator.fuses, accelerator.attention)

    def check_unchanged(self, files: Any, folder: Path) -> None:
        """Raise ValueError if the encoders' files changed since they were first asked for."""
        if self._text_files not in (None, files):
            raise ValueError(f"files in {folder} were changed. Open the pipeline again.")
        self._text_files = files
