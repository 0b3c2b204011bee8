"""ControlNets: which class of diffusers a folder or a single file is for.

Single files have diffusers' own names and no config. The shapes of the weights tell it, and the transformer's config
what they do not tell: diffusers makes a ControlNet out of its transformer (`from_transformer`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....memory.files import read_json
from ..components import Component
from ..trust import named_class
from . import shapes
from .component import FileComponent, controlnet_component
from .contents import SingleFile, read_single, type_of
from .layouts import Layout
from .published import FACTS

_EMBEDDER, _FIRST = "controlnet_x_embedder.weight", "controlnet_blocks.0.weight"
_FLUX = (_EMBEDDER, _FIRST, "context_embedder.weight", "x_embedder.weight")
_QWEN = (_EMBEDDER, _FIRST, "img_in.weight", "txt_norm.weight")
_SD3 = ("pos_embed_input.proj.weight", _FIRST)
LAYOUTS = (
    Layout("FLUX.1", ("FluxControlNetModel",), _FLUX, _FLUX, None, shapes.flux_controlnet, frozenset()),
    Layout("Qwen-Image", ("QwenImageControlNetModel",), _QWEN, _QWEN, None, shapes.qwen_controlnet, frozenset()),
    Layout("Stable Diffusion 3", ("SD3ControlNetModel",), _SD3, _SD3, None, shapes.sd3_controlnet, frozenset()),
)


@dataclass(frozen=True)
class ControlNetFile:
    """A ControlNet in a single file."""

    path: Path

    @property
    def folder(self) -> Path:
        """The folder that stands for its own: a file has none."""
        return FACTS / "parts" / "controlnet"

    def component(self, transformer: Mapping[str, Any], base: Component) -> FileComponent:
        """Return the ControlNet with the weights of the file, beside a transformer of that config.

        ValueError, in one line, for a file that is damaged or of another model.
        """
        return controlnet_component(base, _read(self.path, base), transformer)


def kind_of(path: Path) -> str:
    """Return the class of diffusers that runs a ControlNet. Reads no weights.

    FileNotFoundError or ValueError, in one line, for what is none.
    """
    import diffusers

    if path.is_file():
        layout = _read(path, None).layout
        assert layout is not None
        return layout.classes[0]
    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder or file {path}. Give a ControlNet's: diffusers' folder or a file.")
    kind = str(read_json(path / "config.json").get("_class_name"))
    if "ControlNet" not in kind or named_class(diffusers, kind) is None:
        raise ValueError(f"{path} holds no ControlNet of the installed diffusers, but {kind}. Give another folder.")
    return kind


def _read(path: Path, base: Component | None) -> SingleFile:
    return read_single(path, LAYOUTS, "ControlNet", (base and base.dtype) or type_of(path))
