"""The command line of the host, as far as a pack reads it. Tests set attributes of `args`."""

from __future__ import annotations

from argparse import Namespace
from enum import Enum


class LatentPreviewMethod(Enum):
    NoPreviews = "none"
    Auto = "auto"
    Latent2RGB = "latent2rgb"
    TAESD = "taesd"


args = Namespace(
    base_directory=None,
    cpu=True,
    cpu_vae=False,
    disable_async_offload=False,
    disable_metadata=False,
    disable_pinned_memory=False,
    disable_smart_memory=False,
    fp32_vae=False,
    gpu_only=False,
    highvram=False,
    lowvram=False,
    normalvram=False,
    novram=False,
    preview_method=LatentPreviewMethod.NoPreviews,
    preview_size=512,
    reserve_vram=None,
)
