"""The request of a line of a batch, as plain data that travels."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .images import joined, open_frames, open_image, open_mask

if TYPE_CHECKING:
    from ..pipelines.stages.batch_runs import Item

FRAMES = ("control", "video")  # may be films
File = Path | tuple[Path, bytes]  # or what it holds


@dataclass(frozen=True)
class Request:
    """A prompt with options of `encode` and arguments of `sample`; pictures by name are files, or what they hold."""

    prompt: str
    negative_prompt: str
    encoding: Mapping[str, Any]
    sampling: Mapping[str, Any]
    pictures: Mapping[str, Sequence[File]]

    def item(self, edits: bool, on_step: Callable[..., None] | None = None) -> Item:
        """Return the item to run. Where the model `edits`, the image belongs to the prompt."""
        from ..pipelines.stages.batch_runs import Item

        def encode() -> dict[str, Any]:
            images = {"images": self._opened("image")} if edits and "image" in self.pictures else {}
            return {**self.encoding, **images}

        def sample() -> dict[str, Any]:
            names = [name for name in self.pictures if not (edits and name == "image")]
            return {**self.sampling, **{name: self._opened(name) for name in names}, "on_step": on_step}

        return Item(self.prompt, self.negative_prompt, encode, sample)

    def carried(self) -> Request:
        """Return the same with what its files hold, for a machine that has others."""
        return replace(
            self,
            pictures={
                name: [(each, each.read_bytes()) if isinstance(each, Path) else each for each in files]
                for name, files in self.pictures.items()
            },
        )

    def text(self, edits: bool) -> tuple[Any, ...]:
        """Return what decides its embeddings."""
        images = tuple(self.pictures.get("image", ())) if edits else ()
        return self.prompt, self.negative_prompt, repr(sorted(self.encoding.items())), images

    def _opened(self, name: str) -> list[Any]:
        files = [
            (each, None) if isinstance(each, Path) else (each[0], io.BytesIO(each[1])) for each in self.pictures[name]
        ]
        if name in FRAMES:
            return [joined([(str(path), open_frames(path, content)) for path, content in files])]
        if name == "mask":
            return [open_mask(path, content) for path, content in files]
        return [open_image(path, None, None, content) for path, content in files]
