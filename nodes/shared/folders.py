"""Find pipelines and models in the host's folders, by the names that loaders offer."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import comfy.utils
import folder_paths

from ...memory.files import model_roots, read_json
from ...pipelines.files.recognition import MODULAR_INDEX, is_newbie_folder, is_pyramid_folder

DEMO = "demo: shapes"
_DEMO_FOLDER = Path(__file__).resolve().parents[2] / "demo" / "shapes"
_MAX_DEPTH = 3
_WEIGHTS = (".safetensors", ".sft", ".gguf")
# Where the host has tokenizers, by the kinds of `open_pipeline`.
_TOKENIZERS = {
    "clip": "sd1_tokenizer",
    "t5": "text_encoders/t5_tokenizer",
    "pile_t5": "text_encoders/t5_pile_tokenizer",
    "qwen": "text_encoders/qwen25_tokenizer",
    "llama": "text_encoders/llama_tokenizer",
}


def find_pipelines() -> dict[str, Path]:
    """Return names to choose from, with their folders: the demo model, then all in the host's `models/diffusers`."""

    def is_pipeline(path: Path, files: list[str]) -> bool:
        named = "model_index.json" in files or MODULAR_INDEX in files
        return named or is_newbie_folder(path) or is_pyramid_folder(path)

    return {DEMO: _DEMO_FOLDER} | _folders("diffusers", is_pipeline)


def find_llamas() -> dict[str, Path]:
    """Return names to choose from, with their folders: the Llama models in the host's `models/text_encoders`."""
    return _folders("text_encoders", lambda path, files: "config.json" in files and _is_llama(path / "config.json"))


def find_controlnets() -> dict[str, Path]:
    """Return names to choose from, with their folders or files: the ControlNets in the host's `models/controlnet`.

    Folders are diffusers', and files those without a config beside them, whatever they are of.
    """
    found = _folders("controlnet", lambda path, files: "config.json" in files and _is_controlnet(path / "config.json"))
    files = find_files("controlnet").items()
    return found | {name: file for name, file in files if not (file.parent / "config.json").exists()}


def find_files(kind: str) -> dict[str, Path]:
    """Return names to choose from, with their files: safetensors and GGUF in the host's `models/<kind>` folders.

    The host's own list leaves GGUF out, which packs that read it list for themselves.
    """
    found: dict[str, Path] = {}
    for root in folder_paths.get_folder_paths(kind):
        for path, folders, names in os.walk(root, followlinks=True):
            folders.sort()
            for file in (Path(path, name) for name in names if name.lower().endswith(_WEIGHTS)):
                found.setdefault(file.relative_to(root).as_posix(), file)
    return dict(sorted(found.items()))


def find_tokenizers() -> dict[str, Path]:
    """Return the folders of tokenizers that the host brings along, by kind."""
    root = Path(comfy.utils.__file__).parent
    return {kind: root / name for kind, name in _TOKENIZERS.items() if (root / name).is_dir()}


def _folders(kind: str, wanted: Callable[[Path, list[str]], bool]) -> dict[str, Path]:
    """Return the folders in the host's `models/<kind>` that `wanted` accepts, by their path there; none inside another.

    Links are followed: folders of models often lie on another disk. Where links inside a model may lead, which are a
    stranger's, `memory.files.check_links` says; it gets the host's folders here.
    """
    kinds = [other for other in folder_paths.folder_names_and_paths if other != "custom_nodes"]
    roots = [folder_paths.models_dir, *(root for other in kinds for root in folder_paths.get_folder_paths(other))]
    model_roots.update(Path(root).resolve() for root in roots)
    found: dict[str, Path] = {}
    for root in folder_paths.get_folder_paths(kind):
        for path, folders, files in os.walk(root, followlinks=True):
            folders.sort()
            relative = Path(path).relative_to(root)
            if wanted(Path(path), files):
                found.setdefault(relative.as_posix(), Path(path))
                folders.clear()
            elif len(relative.parts) >= _MAX_DEPTH:
                folders.clear()
    return found


def _is_llama(config: Path) -> bool:
    try:
        return read_json(config).get("model_type") == "llama"
    except (OSError, ValueError):
        return False


def _is_controlnet(config: Path) -> bool:
    try:
        return "ControlNet" in str(read_json(config).get("_class_name"))
    except (OSError, ValueError):
        return False


def file_stamp(*paths: Path | None) -> str:
    """Return a stamp that changes with the files, and with those in the folders. Reads no file."""
    given = [path for path in paths if path]
    files = [file for path in given for file in ([path] if path.is_file() else path.rglob("*")) if file.is_file()]
    stats = [file.stat() for file in files]
    return f"{len(stats)}:{sum(s.st_size for s in stats)}:{max((s.st_mtime_ns for s in stats), default=0)}"
