"""What calls of diffusers do with a picture after their VAE has decoded it. Which one a class does, its proof finds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch


def _in_8_bits(images: torch.Tensor) -> torch.Tensor:
    """As Cosmos hands its pictures to a safety checker, and takes them back."""
    return (images * 255).to(torch.uint8).float() / 255


# Pictures [B,(F),H,W,3] in 0..1, as `decode` gives them.
TAILS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {"": lambda images: images, "8 bits": _in_8_bits}
