"""Pyramid-Flow's two transformers by their kind."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from ....memory.weights.stored import Stored
from .flux import PyramidFluxTransformer3DModel, flux_config, flux_names
from .kinds import Kind
from .mmdit import PyramidSD3Transformer3DModel, mmdit_config, mmdit_names


class Transformer(NamedTuple):
    """A class, its arguments from a published `config.json`, and its weights from the published names."""

    make: Callable[..., nn.Module]
    config: Callable[[Mapping[str, Any]], dict[str, Any]]
    names: Callable[[Mapping[str, Stored]], dict[str, Stored]]


TRANSFORMERS: dict[Kind, Transformer] = {
    "flux": Transformer(PyramidFluxTransformer3DModel, flux_config, flux_names),
    "mmdit": Transformer(PyramidSD3Transformer3DModel, mmdit_config, mmdit_names),
}
