"""Find the parts of NewBie: in the official folders, in diffusers', or in ComfyUI's split files."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ....memory.weights.stored import Stored
from ...files.checkpoint import converted
from ...files.places import FILES, shown, weight_files
from ...files.recognition import is_newbie_folder
from ...files.trust import check_settings, files_beside_weights, read_config
from .gemma import GEMMA_3_4B
from .sizes import gemma_sizes, jina_sizes, transformer_sizes, vae_sizes
from .tokenizers import embedded_tokenizer, folder_tokenizer

REPOSITORY = "NewBie-AI/NewBie-image-Exp0.1"
_MARK = "clip_text_pooled_proj.0.weight"  # what no other Lumina has


@dataclass(frozen=True)
class Part:
    """A model: its config, empty where there is none, and its files."""

    config: Mapping[str, Any]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Words:
    """A tokenizer: how to make it, and the files that it is made of."""

    make: Callable[[], Any]
    files: tuple[Path, ...]


@dataclass(frozen=True)
class Layout:
    """The parts of one download."""

    transformer: Part
    gemma: Part
    jina: Part
    vae: Part
    gemma_words: Words
    jina_words: Words


def is_newbie(path: Path) -> bool:
    """Return whether a folder holds NewBie, or a file its transformer. Reads no weights."""
    if path.is_file():
        return path.suffix in FILES and any(name.endswith(_MARK) for name in shown([path]))
    return is_newbie_folder(path)


def find_layout(path: Path, gemma: Path | None, jina: Path | None, vae: Path | None) -> Layout:
    """Return the parts of NewBie in a folder, or beside the file of a transformer.

    `gemma`, `jina` and `vae` are ComfyUI's files of the others, which a folder does not need. Raises FileNotFoundError
    or ValueError, in one line, for what is missing.
    """
    if path.is_file():
        return _split_files(path, {"gemma": gemma, "jina": jina, "vae": vae})
    if given := [name for name, file in (("gemma", gemma), ("jina", jina), ("vae", vae)) if file]:
        raise ValueError(f"{path} is a folder, which has its own {', '.join(given)}. Leave it out.")
    second = path / "clip_model" if (path / "clip_model").is_dir() else path / "text_encoder_2"
    first, words = path / "text_encoder", (path / "tokenizer", path / "tokenizer_2")
    gemma_words, jina_words = words if words[0].is_dir() else (first, second)
    return Layout(
        _folder(path / "transformer"),
        _folder(first),
        _folder(second),
        _folder(path / "vae"),
        _words(gemma_words),
        _words(jina_words),
    )


def _folder(folder: Path) -> Part:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.parent} has no {folder.name}/. Download all of {REPOSITORY} again.")
    return Part(read_config(folder, folder.parent), tuple(weight_files(folder)[0]))


def _words(folder: Path) -> Words:
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder.parent} has no {folder.name}/. Download all of {REPOSITORY} again.")
    check_settings(folder, folder.parent)
    return Words(lambda: folder_tokenizer(folder), tuple(files_beside_weights(folder)))


def _split_files(transformer: Path, others: Mapping[str, Path | None]) -> Layout:
    files = {"transformer": transformer, **{name: file for name, file in others.items() if file}}
    if missing := [name for name, file in others.items() if not file]:
        raise ValueError(
            f"{transformer.name} is the transformer alone. Name the files of its {', '.join(missing)} as well: "
            "gemma_3_4b_it_bf16, jina_clip_v2_bf16 and ae of the same download."
        )
    if gone := [file for file in files.values() if not file.is_file()]:
        raise FileNotFoundError(f"there is no file {gone[0]}. Put it back, or name another.")
    gemma, jina, vae = (files[name] for name in ("gemma", "jina", "vae"))
    return Layout(
        Part(transformer_sizes(shown([transformer])), (transformer,)),
        Part(GEMMA_3_4B | gemma_sizes(shown([gemma])), (gemma,)),
        Part(jina_sizes(shown([jina])), (jina,)),
        Part(vae_sizes(shown([vae])), (vae,)),
        Words(lambda: embedded_tokenizer(gemma), (gemma,)),
        Words(lambda: embedded_tokenizer(jina), (jina,)),
    )


def vae_names(stored: Mapping[str, Stored], config: Mapping[str, Any]) -> dict[str, Stored]:
    """Where the VAE's weights lie, by diffusers' names, from a file with its names or with the original ones."""
    if not any(name.startswith("encoder.down.") for name in stored):
        return dict(stored)
    from diffusers.loaders.single_file_utils import convert_ldm_vae_checkpoint

    return converted(stored, lambda shapes: convert_ldm_vae_checkpoint(shapes, config))
