"""Pyramid-Flow's transformer and VAE, as parts that are built and loaded from their files."""

from __future__ import annotations

from typing import Any

import torch

from ....memory.weights.unit import ManagedModel
from ...files.checkpoint import Checkpoint
from .pyramid_layout import Layout


def read_parts(layout: Layout, dtype: torch.dtype | None) -> dict[str, Checkpoint]:
    """Return the parts by the name of their unit, to run in `dtype`; None keeps that of the files. Loads nothing."""
    from .transformer_classes import TRANSFORMERS  # here, since other families do without diffusers' model code
    from .vae import CausalVideoVAE

    known = TRANSFORMERS[layout.kind]
    config = known.config(layout.transformer[0])
    vae, files = layout.vae
    return {
        "transformer": Checkpoint(
            "transformer",
            "transformer",
            layout.transformer[1],
            lambda: known.make(**config),
            known.names,
            dtype,
            config,
        ),
        # The decoder always runs in float32: half precision turns pictures black.
        "vae": Checkpoint("vae", "vae", files, lambda: CausalVideoVAE.from_config(dict(vae)), dict, torch.float32, vae),
    }


def config_of(unit: ManagedModel) -> dict[str, Any]:
    """Return the config of a model of diffusers."""
    config: Any = unit.module.config
    return dict(config)
