"""What a line of a batch asks for, as plain data that travels."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .images import open_image

if TYPE_CHECKING:
    from ..pipelines.staged import Item


@dataclass(frozen=True)
class Request:
    """A prompt with options of `encode` and arguments of `sample`; pictures by name are files, or what they hold."""

    prompt: str
    negative_prompt: str
    encoding: Mapping[str, Any]
    sampling: Mapping[str, Any]
    pictures: Mapping[str, Sequence[Path | bytes]]

    def item(self, edits: bool, on_step: Callable[..., None] | None = None) -> Item:
        """The item to run. Where the model `edits`, the image belongs to the prompt."""
        from ..pipelines.staged import Item

        def encode() -> dict[str, Any]:
            images = {"images": self._opened("image")} if edits and "image" in self.pictures else {}
            return {**self.encoding, **images}

        def sample() -> dict[str, Any]:
            names = [name for name in self.pictures if not (edits and name == "image")]
            opened = {name: self._opened(name) for name in names}
            if "mask" in opened:
                opened["mask"] = [mask.mean(dim=3) for mask in opened["mask"]]
            return {**self.sampling, **opened, "on_step": on_step}

        return Item(self.prompt, self.negative_prompt, encode, sample)

    def carried(self) -> Request:
        """The same with what its files hold, for a machine that has others."""
        return replace(
            self,
            pictures={
                name: [each if isinstance(each, bytes) else each.read_bytes() for each in files]
                for name, files in self.pictures.items()
            },
        )

    def text(self, edits: bool) -> tuple[Any, ...]:
        """What decides its embeddings."""
        images = tuple(self.pictures.get("image", ())) if edits else ()
        return self.prompt, self.negative_prompt, repr(sorted(self.encoding.items())), images

    def _opened(self, name: str) -> list[Any]:
        files = [io.BytesIO(each) if isinstance(each, bytes) else each for each in self.pictures[name]]
        return [open_image(file, None, None) for file in files]
