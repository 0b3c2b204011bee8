"""Limits of a model's folder: data in its own files, and classes of the installed libraries. No code."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...memory.files import MAX_JSON_BYTES, check_links, one_line, read_json

_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")
_MAX_OF_SCHEDULER = 100_000  # usual are 1000 timesteps
_MAX_SIZE = 2**24  # of a model; vocabularies, which are the largest, have a few 100 000 words
_MAX_SIDE = 2**17  # of a picture
_SIDES = re.compile("axes|resolution|sample_size")
_SIZES = re.compile("size|dim|len|layers|heads|channels|resolution|axes|factor|patch")
_MAX_WORDS_BYTES = 8 * MAX_JSON_BYTES  # the largest tokenizer.json has 33 MB


def read_config(folder: Path, model: Path) -> dict[str, Any]:
    """Read a component's `config.json`. Check that its files lie in the model and ask for no code."""
    check_links((folder, *folder.iterdir()), model)
    path = folder / "config.json"
    config = read_json(path)
    # A name with a slash is a repository whose kernels transformers would download and run.
    if any("_implementation" in key and "/" in str(value) for key, value in _leaves(config)):
        raise ValueError(f"{path} asks for code of its own (attn_implementation), which is never run. Remove that.")
    _check_numbers(path, config, _MAX_SIZE, _SIZES)
    _check_numbers(path, config, _MAX_SIDE, _SIDES)
    if (folder / "adapter_config.json").exists():
        raise ValueError(f"{folder} holds an adapter (adapter_config.json) of another model. Get the merged weights.")
    return config


def _leaves(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _leaves(inner, f"{key}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _leaves(inner, key)
    else:
        yield key, value


def check_settings(folder: Path, model: Path) -> None:
    """Raise ValueError for the files of a tokenizer or a scheduler that are no such files, or name others elsewhere."""
    files = files_beside_weights(folder)
    check_links((folder, *files), model)
    for path in files:
        if path.name.endswith("_config.json"):
            for key, value in read_json(path).items():
                # Old versions wrote where a file lay at the time. Only what is there now can be read.
                if key.endswith("_file") and isinstance(value, str) and (folder / value).exists():
                    check_links([folder / value], model)
            if path.name == "scheduler_config.json":
                _check_numbers(path, read_json(path), _MAX_OF_SCHEDULER, re.compile(""))
        elif path.stat().st_size > _MAX_WORDS_BYTES:
            raise ValueError(f"{path} has {path.stat().st_size} bytes, which no tokenizer has. Download it again.")


def _check_numbers(path: Path, config: dict[str, Any], most: int, keys: re.Pattern[str]) -> None:
    """Raise ValueError for a number that no such config has: there are tables and pictures of that size."""
    for key, value in _leaves(config):
        # Some numbers are infinite, and mean that there is no limit.
        if isinstance(value, (int, float)) and most < abs(value) < math.inf and keys.search(key):
            name = key.strip(".")[:80]
            name = name if name.isprintable() else repr(name)
            raise ValueError(
                f"{path} has {name} = {str(value)[:40]}, where none has more than {most}. Download it again."
            )


def files_beside_weights(folder: Path) -> list[Path]:
    """Return the files of a tokenizer or the like, which may lie beside a model's weights."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in _WEIGHTS]


def named_class(library: Any, name: Any) -> type | None:
    """Return the class that a library exports under a name, or None."""
    found = _given_out(library, name)
    return found if isinstance(found, type) else None


def _given_out(library: Any, name: Any) -> Any:
    if not isinstance(name, str) or not name.isidentifier() or name.startswith("_"):
        return None
    with one_line(Path(library.__name__), f"asked for {name}"):  # which it imports then
        return getattr(library, name, None)


def component_class(library: Any, name: Any) -> type:
    """Return the class that an index names as `[library, name]`. Raises ValueError, in one line, for other classes."""
    import diffusers
    import transformers

    home: Any = {"diffusers": diffusers, "transformers": transformers}.get(str(library))
    home = home or _given_out(diffusers.pipelines, library)
    found = named_class(home, name) if isinstance(home, ModuleType) else None
    if found is None:
        raise ValueError(
            f"model_index.json names {str(library)[:80]!r}, {str(name)[:80]!r}, which is not in the installed "
            f"diffusers {diffusers.__version__} or transformers {transformers.__version__}. Other code is never loaded."
        )
    if needed := getattr(found, "_backends", None):
        needed = [package for package in needed if find_spec(package) is None] or needed
        raise ImportError(f"{name} needs packages that are not installed: {', '.join(needed)}. Install them with pip.")
    if not issubclass(found, _parts_of_pipelines()):
        raise ValueError(
            f"model_index.json names {library}.{name}, which is no model, scheduler, tokenizer or the like. "
            "Download it again."
        )
    return found


def _parts_of_pipelines() -> tuple[type, ...]:
    """Return the base classes that a component may be derived from."""
    import diffusers
    import transformers
    from diffusers.guiders.guider_utils import BaseGuidance
    from transformers.image_processing_utils import BaseImageProcessor

    return (
        diffusers.ModelMixin,
        diffusers.SchedulerMixin,
        BaseGuidance,
        transformers.PreTrainedModel,
        transformers.PreTrainedTokenizerBase,
        transformers.ProcessorMixin,
        transformers.FeatureExtractionMixin,
        BaseImageProcessor,
        transformers.AutoTokenizer,
    )
