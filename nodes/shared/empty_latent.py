"""Empty latents, such as Empty Latent Image makes: to a Ballast pipeline they are a size."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import comfy.latent_formats
import torch

_TELL = "Connect the empty latent that goes with the model, or set width, height and frames instead."


def is_empty(latent: Mapping[str, Any]) -> bool:
    """Return whether a LATENT holds zeros only, of pictures or videos, as the host's own samplers see it."""
    samples = latent.get("samples") if isinstance(latent, Mapping) else None
    return (
        isinstance(samples, torch.Tensor)
        and samples.layout == torch.strided
        and samples.ndim in (4, 5)
        and not samples.is_nested
        and not samples.is_meta
        and samples.is_floating_point()
        and 0 < samples.numel() < 2**31
        and not torch.count_nonzero(samples)
    )


def size_of(latent: Mapping[str, Any], form: Any, asked: Mapping[str, int]) -> dict[str, int]:
    """Return the width, height, frames and batch that an empty latent stands for.

    `form` is the host's latent format of the pipeline, if it has one; `asked` has what the widgets say, 0 for nothing.
    ValueError, in one line, where the widgets say another size, or the latent fits no format of the host.
    """
    samples = latent["samples"]
    count, _, *frames, rows, columns = samples.shape
    ratio = latent.get("downscale_ratio_spacial") or _ratio(samples, form, "spacial_downscale_ratio")
    size = {"width": columns * ratio, "height": rows * ratio, "batch": count}
    if frames and frames[0] > 1:
        size["frames"] = (frames[0] - 1) * _ratio(samples, form, "temporal_downscale_ratio") + 1
    nothing = {"batch": 1}
    for name, given in size.items():
        if asked.get(name, 0) not in (nothing.get(name, 0), given):
            raise ValueError(
                f"{name} is {asked[name]}, but the empty latent says {given}. Set it to {nothing.get(name, 0)}, or "
                "disconnect latent."
            )
    return size


def _ratio(samples: torch.Tensor, form: Any, name: str) -> int:
    """Return by how much the formats that such latents can be of are smaller than pictures: the pipeline's, if it is
    one of them."""
    channels, dimensions = samples.shape[1], samples.ndim - 2
    known = [cls for cls in vars(comfy.latent_formats).values() if isinstance(cls, type)]
    fitting = [cls for cls in known if (getattr(cls, "latent_channels", 0), getattr(cls, "latent_dimensions", 0))
               == (channels, dimensions)]  # fmt: skip
    if form is not None and type(form) in fitting:
        return int(getattr(form, name))
    ratios = {int(getattr(cls, name)) for cls in fitting}
    if len(ratios) != 1:
        raise ValueError(f"the empty latent has {channels} channels, which say no size here. {_TELL}")
    return ratios.pop()
