"""Find the parts of Pyramid-Flow: in its folders, or in single files beside the text encoders of another model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...files.places import FILES, shown, weight_files
from ...files.recognition import PYRAMID_TRANSFORMER as _DIT
from ...files.recognition import PYRAMID_VAE as _VAE
from ...files.recognition import PYRAMID_VARIANTS as VARIANTS
from ...files.recognition import is_pyramid_folder
from ...files.single.layouts import layout_of
from ...files.single.transformers import LAYOUTS
from ...files.trust import read_config
from .kinds import Kind, kind_of

REPOSITORY = "rain1011/pyramid-flow-miniflux"
# The classes of the text encoders, by the numbers of their folders. The last is T5.
TEXT: dict[Kind, tuple[str, ...]] = {
    "flux": ("CLIPTextModel", "T5EncoderModel"),
    "mmdit": ("CLIPTextModelWithProjection", "CLIPTextModelWithProjection", "T5EncoderModel"),
}
# Whose names in diffusers its weights have, beside which it has none of a scale of guidance.
_NAMED_SO = ("FLUX.1", "Stable Diffusion 3")
_GUIDED = "time_text_embed.guidance_embedder."


@dataclass(frozen=True)
class Layout:
    """The parts of one download: configs are empty where files come without."""

    kind: Kind
    variant: str
    transformer: tuple[Mapping[str, Any], tuple[Path, ...]]
    vae: tuple[Mapping[str, Any], tuple[Path, ...]]
    text: Path  # the folder that the text encoders' folders lie in

    def text_index(self) -> dict[str, list[str]]:
        """Return the text encoders and tokenizers as a `model_index.json` would name them."""
        index: dict[str, list[str]] = {}
        for number, cls in enumerate(TEXT[self.kind], 1):
            suffix = f"_{number}" if number > 1 else ""
            index |= {
                f"text_encoder{suffix}": ["transformers", cls],
                f"tokenizer{suffix}": ["transformers", "AutoTokenizer"],
            }
        return index


def is_pyramid(path: Path) -> bool:
    """Return whether a folder holds Pyramid-Flow, or a file one of its transformers. Reads no weights."""
    if path.is_dir():
        return is_pyramid_folder(path)
    if path.suffix not in FILES or not path.is_file():
        return False
    try:
        kind_of(names := shown([path]))
    except ValueError:
        return False
    layout = layout_of(names, LAYOUTS)
    named_so = layout is None or (layout.title in _NAMED_SO and not (layout.original and layout.is_original(names)))
    return named_so and not any(name.startswith(_GUIDED) for name in names)


def find_layout(path: Path, variant: str, text: Path | None, vae: Path | None) -> Layout:
    """Return the parts in a folder, or beside the file of a transformer, whose `vae` and `text` are then to be named.

    Raises FileNotFoundError or ValueError, in one line, for what is missing.
    """
    if variant != "auto" and variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r} of Pyramid-Flow. Use auto, {', '.join(VARIANTS)}.")
    if path.is_file():
        return _single_files(path, variant, text, vae)
    there = [name for name in VARIANTS if (path / f"{_DIT}{name}").is_dir()]
    chosen = next(iter(there), VARIANTS[0]) if variant == "auto" else variant
    if chosen not in there:
        raise FileNotFoundError(
            f"{path} has no {_DIT}{chosen}/, only {', '.join(there) or 'others'}. Download it, or choose another."
        )
    config, files = _folder(path / f"{_DIT}{chosen}")
    return Layout(kind_of(config), chosen, (config, files), _folder(path / _VAE), text or path)


def _folder(folder: Path) -> tuple[Mapping[str, Any], tuple[Path, ...]]:
    return read_config(folder, folder.parent), tuple(weight_files(folder)[0])


def _single_files(transformer: Path, variant: str, text: Path | None, vae: Path | None) -> Layout:
    named = {"vae": vae, "text": text}
    if missing := [name for name, path in named.items() if path is None]:
        raise ValueError(
            f"{transformer.name} is the transformer alone. Name its {' and '.join(missing)} as well: the file of the "
            "VAE, and a folder with text_encoder and tokenizer folders, such as that of FLUX.1."
        )
    if gone := [path for path in named.values() if path is not None and not path.exists()]:
        raise FileNotFoundError(f"there is no {gone[0]}. Put it back, or name another.")
    assert vae is not None and text is not None
    chosen = next((name for name in VARIANTS if name in transformer.stem), "768p") if variant == "auto" else variant
    return Layout(kind_of(shown([transformer])), chosen, ({}, (transformer,)), ({}, (vae,)), text)
