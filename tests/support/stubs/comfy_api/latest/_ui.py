"""What a pack sees as `comfy_api.latest.ui`: results drawn by the page."""

from __future__ import annotations

import os
import uuid
from typing import Any

import folder_paths

from ._base import FolderType


class _UIOutput:
    def as_dict(self) -> dict[str, Any]:
        raise NotImplementedError


class SavedResult(dict):
    def __init__(self, filename: str, subfolder: str, type: FolderType):
        super().__init__(filename=filename, subfolder=subfolder, type=type.value)


class SavedImages(_UIOutput):
    def __init__(self, results: list[SavedResult], is_animated: bool = False):
        self.results = results
        self.is_animated = is_animated

    def as_dict(self) -> dict[str, Any]:
        animated = {"animated": (True,)} if self.is_animated else {}
        return {"images": self.results} | animated


class PreviewText(_UIOutput):
    def __init__(self, value: str, **kwargs: Any):
        self.value = value

    def as_dict(self) -> dict[str, Any]:
        return {"text": (self.value,)}


class PreviewImage(_UIOutput):
    """Writes the batch `[B, H, W, C]` as PNG files to the temporary folder, as the host does."""

    def __init__(self, image: Any, animated: bool = False, cls: type | None = None, **kwargs: Any):
        from PIL import Image

        folder = folder_paths.get_temp_directory()
        os.makedirs(folder, exist_ok=True)
        self.values = []
        self.animated = animated
        for frame in image:
            name = f"preview_{uuid.uuid4().hex}.png"
            pixels = frame.detach().cpu().float().mul(255).clamp(0, 255).byte().numpy()
            Image.fromarray(pixels).save(os.path.join(folder, name))
            self.values.append(SavedResult(name, "", FolderType.temp))

    def as_dict(self) -> dict[str, Any]:
        return {"images": self.values, "animated": (self.animated,)}
