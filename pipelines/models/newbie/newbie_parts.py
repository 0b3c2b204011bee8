"""NewBie's models, as parts that are built and loaded from their files."""

from __future__ import annotations

from functools import partial

import torch

from ....memory.weights.stored import stored_tensors
from ...files.checkpoint import Checkpoint
from .adapter import AdaptedTower
from .gemma import gemma_names, make_gemma
from .jina import has_adapter, jina_names, make_jina
from .newbie_layout import Layout, vae_names
from .sizes import config_of


def read_parts(layout: Layout, dtype: torch.dtype | None) -> dict[str, Checkpoint]:
    """Return the parts by the name of their unit, to run in `dtype`; None keeps that of the files. Loads nothing."""
    from diffusers import AutoencoderKL  # here, since other families do without these

    from .transformer import NewbieTransformer2DModel, transformer_names

    config, vae = config_of(layout.transformer.config), layout.vae.config
    jina = layout.jina
    is_adapted = has_adapter(stored_tensors(jina.files))
    tower = AdaptedTower if is_adapted else Checkpoint
    return {
        "text_encoder": Checkpoint(
            "text_encoder",
            "text_encoder",
            layout.gemma.files,
            partial(make_gemma, layout.gemma.config),
            gemma_names,
            dtype,
            layout.gemma.config,
        ),
        "text_encoder_2": tower(
            "text_encoder_2",
            "text_encoder",
            jina.files,
            partial(make_jina, jina.config),
            jina_names,
            dtype,
            jina.config,
        ),
        "transformer": Checkpoint(
            "transformer",
            "transformer",
            layout.transformer.files,
            lambda: NewbieTransformer2DModel(**config),
            lambda stored: transformer_names(stored, config),
            dtype,
            config,
        ),
        # The decoder always runs in float32: half precision turns pictures black.
        "vae": Checkpoint(
            "vae",
            "vae",
            layout.vae.files,
            lambda: AutoencoderKL.from_config(dict(vae)),
            lambda stored: vae_names(stored, vae),
            torch.float32,
            vae,
        ),
    }
