"""Which of Pyramid-Flow's two transformers a model has: miniFlux, or the one made of Stable Diffusion 3's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

Kind = Literal["flux", "mmdit"]

_CLASSES: dict[str, Kind] = {"PyramidFluxTransformer": "flux", "PyramidDiffusionMMDiT": "mmdit"}


def kind_of(known: Mapping[str, Any]) -> Kind:
    """Which one a `config.json` is of, or the names of the weights in a file. ValueError if of neither."""
    if "_class_name" in known:
        if kind := _CLASSES.get(known["_class_name"]):
            return kind
        raise ValueError(f"{known['_class_name']} is no transformer of Pyramid-Flow. Use {', '.join(_CLASSES)}.")
    if any(name.startswith("pos_embed") for name in known):
        return "mmdit"
    if any(name.startswith(("single_transformer_blocks.", "num_single_layers")) for name in known):
        return "flux"
    raise ValueError("no weights of a transformer of Pyramid-Flow are there. Use the published ones.")
