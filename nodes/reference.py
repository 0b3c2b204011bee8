"""PipelineReference: what travels between the nodes in place of weights, and where pipelines are found."""

from __future__ import annotations

import json
import os
import weakref
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import folder_paths
from comfy_api.latest import io

if TYPE_CHECKING:
    from ..pipelines import StagedPipeline

PipelineType = io.Custom("BALLAST_PIPELINE")
ConditioningType = io.Custom("BALLAST_CONDITIONING")

DEMO = "demo: shapes"
_DEMO_FOLDER = Path(__file__).resolve().parents[1] / "demo" / "shapes"
_MAX_DEPTH = 3

# By the fields of a reference: a key that was the reference itself would keep its pipeline alive.
_open: weakref.WeakValueDictionary[tuple, StagedPipeline] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class PipelineReference:
    """What to load, and with which budget. Small and immutable: the host may cache it for ever.

    The pipeline behind it lives as long as a reference to it does; its weights are the manager's to evict.
    """

    folder: str
    stamp: str  # of the files, so that a changed folder is another pipeline
    dtype: str
    vram_bytes: int | None
    device: str
    keep: bool
    llama: str = ""  # HiDream-I1's: the folder, and the variant
    variant: str = ""

    def open(self) -> StagedPipeline:
        """The pipeline; the same one for equal references."""
        pipe = _open.get(astuple(self))
        if pipe is None:
            from ..pipelines import open_pipeline

            cache_dir = Path(folder_paths.get_user_directory()) / "ballast" / "embeddings"
            pipe = open_pipeline(
                self.folder,
                self.device,
                self.vram_bytes,
                dtype=self.dtype,
                keep=self.keep,
                cache_dir=cache_dir,
                **{name: value for name in ("llama", "variant") if (value := getattr(self, name))},
            )
            _open[astuple(self)] = pipe
        object.__setattr__(self, "_pipeline", pipe)  # the one strong hold on it
        return pipe

    def __repr__(self) -> str:
        return f"PipelineReference({Path(self.folder).name}, {self.dtype})"


def find_pipelines() -> dict[str, Path]:
    """Names to choose from, with their folders: the demo model, then all in the host's `models/diffusers` folders."""
    found = {DEMO: _DEMO_FOLDER}
    for root in folder_paths.get_folder_paths("diffusers"):
        for path, folders, files in os.walk(root, followlinks=True):
            folders.sort()
            relative = Path(path).relative_to(root)
            if "model_index.json" in files:
                found.setdefault(relative.as_posix(), Path(path))
                folders.clear()
            elif len(relative.parts) >= _MAX_DEPTH:
                folders.clear()
    return found


def find_llamas() -> dict[str, Path]:
    """Names to choose from, with their folders: the Llama models in the host's `models/text_encoders` folders."""
    found: dict[str, Path] = {}
    for root in folder_paths.get_folder_paths("text_encoders"):
        for config in sorted(Path(root).glob("**/config.json")):
            relative = config.parent.relative_to(root)
            if len(relative.parts) <= _MAX_DEPTH and _is_llama(config):
                found.setdefault(relative.as_posix(), config.parent)
    return found


def _is_llama(config: Path) -> bool:
    try:
        return json.loads(config.read_text("utf-8")).get("model_type") == "llama"
    except (OSError, ValueError, AttributeError):
        return False


def file_stamp(folder: Path) -> str:
    """Changes when a file of the folder does. Reads no file."""
    stats = [path.stat() for path in folder.rglob("*") if path.is_file()]
    return f"{len(stats)}:{sum(s.st_size for s in stats)}:{max((s.st_mtime_ns for s in stats), default=0)}"
