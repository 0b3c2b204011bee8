"""The postprocessing of diffusers' calls after their VAE has decoded. The proof of a class finds which one it does."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def _in_8_bits(images: torch.Tensor) -> torch.Tensor:
    """As Cosmos hands its pictures to a safety checker, and takes them back."""
    return (images * 255).to(torch.uint8).float() / 255


def _in_linear_light(images: torch.Tensor) -> torch.Tensor:
    """Light of 0..55, as LTX-2's HDR gives it, of pictures in ARRI's LogC3 at EI 800."""
    bright = (10 ** ((images - 0.385537) / 0.247190) - 0.052272) / 5.555556
    return torch.where(images >= 5.367655 * 0.010591 + 0.092809, bright, (images - 0.092809) / 5.367655)


OF_ONE = ("frames", "second of two")  # of which several latents make one result

# Pictures [B,(F),H,W,3] in 0..1, as `decode` gives them.
TAILS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda images: images,
    "8 bits": _in_8_bits,
    "linear light": _in_linear_light,
    "frames": lambda images: images[None],  # of one video, which a VAE of pictures decodes
    "second of two": lambda images: images[1::2],  # JoyImage decodes what it edits before what it made
}

# Sound [B,C,T] of what its last module gives.
SOUND_TAILS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "": lambda sound: sound,
    "channels": lambda sound: sound.transpose(0, 1),  # MiniMax-H3 decodes each channel as an item of a batch
}
