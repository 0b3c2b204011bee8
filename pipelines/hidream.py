"""HiDream-I1: the generic path, at the size that was asked for."""

from __future__ import annotations

from typing import Any

from .generic import GenericPipeline


class HiDreamPipeline(GenericPipeline):
    """`HiDreamImagePipeline`, staged."""

    def _prepare(self, pipe: Any, arguments: dict[str, Any]) -> None:
        # The stock pipeline rescales every size to the area of default_sample_size squared: make that the area asked.
        side = pipe.default_sample_size * pipe.vae_scale_factor
        width, height = arguments.get("width", side), arguments.get("height", side)
        # A hair more, since it rounds the result down.
        pipe.default_sample_size = (width * height) ** 0.5 / pipe.vae_scale_factor * (1 + 1e-9)
