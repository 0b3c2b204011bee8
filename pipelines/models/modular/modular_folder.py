"""A folder with `modular_model_index.json`: its pipeline, its blocks, and the components that it names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from ....memory.files import check_links, read_json
from ...files.components import Component, read_components
from ...files.recognition import MODULAR_INDEX
from ...files.single.given import GivenFiles
from ...files.trust import named_class
from .block_stages import VAE, decoder_of


@dataclass(frozen=True)
class ModularFolder:
    """The pipeline class that a folder names, its blocks, and the components that lie in the folder.

    `missing` are components that the index names and the folder lacks, by name, with the repositories that have them.
    `config` are the values that the index has for the blocks' own settings, and `decoder` names the component that
    makes pictures of latents.
    """

    folder: Path
    pipeline_class: Any
    blocks: Any
    components: Mapping[str, Component]
    missing: Mapping[str, str]
    config: Mapping[str, Any]
    decoder: str


def read_modular(folder: Path, dtype: torch.dtype | None, files: GivenFiles | None = None) -> ModularFolder:
    """Read the configs of a folder, some of whose components have their weights in `files`.

    ValueError, in one line, for one that names other code than diffusers', or for files of another model.
    """
    path = folder / MODULAR_INDEX
    check_links([path], folder)
    index = read_json(path)
    pipeline_class, blocks = _classes(path, index)
    named, elsewhere, missing = {}, {}, {}
    for name, entry in index.items():
        if name.startswith("_") or not _is_component(entry):
            continue
        library, kind, spec = entry
        hint = spec.get("type_hint") or [None, None]
        kinds = [library, kind] if kind else list(hint)
        place = folder / _inside(path, name, spec.get("subfolder"))
        if kinds[1] is None:
            continue
        if place == folder or not place.is_dir():
            missing[name] = str(spec.get("pretrained_model_name_or_path") or "")
            continue
        named[name] = kinds
        if place != folder / name:
            elsewhere[name] = place
    components = read_components(folder, named, dtype, elsewhere, files.components(named) if files else None)
    if files:
        files.check_read(components.values())
    _leave_out_rewriting(blocks, components)
    decoder = decoder_of(blocks, components)
    if decoder in components and decoder != VAE:  # in float32, as any decoder
        components[decoder] = replace(components[decoder], dtype=torch.float32, decodes=True)
    known = {spec.name for spec in blocks.expected_configs}
    config = {name: value for name, value in index.items() if name in known}
    return ModularFolder(folder, pipeline_class, blocks, components, missing, config, decoder)


def _leave_out_rewriting(blocks: Any, there: Collection[str]) -> None:
    """Take away blocks that rewrite inputs, such as FLUX.3's upsampler of prompts, whose models are not there.

    diffusers' own way to encode a prompt as given.
    """
    for name, block in list(blocks.sub_blocks.items()):
        models = {spec.name for spec in block.expected_components if spec.default_creation_method == "from_pretrained"}
        made = {param.name for param in block.intermediate_outputs}
        if models and made and not models & set(there) and made <= {param.name for param in block.inputs}:
            blocks.sub_blocks.pop(name)


def _is_component(entry: Any) -> bool:
    return isinstance(entry, list) and len(entry) == 3 and isinstance(entry[2], dict)


def _inside(index: Path, name: str, subfolder: Any) -> PurePosixPath:
    """Return the folder of a component within the model's. Raises ValueError for one that leads elsewhere."""
    place = PurePosixPath(str(subfolder or ""))
    if place.is_absolute() or ".." in place.parts or "\\" in str(place) or ":" in str(place):
        raise ValueError(f"{index} has {name} in {str(subfolder)[:80]!r}, outside its folder. Download it again.")
    return place


def _classes(path: Path, index: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the pipeline class and an instance of its blocks: those that the index names, else the class's own."""
    import diffusers

    name = index.get("_class_name")
    cls: Any = named_class(diffusers, name)
    if cls is None or not issubclass(cls, diffusers.ModularPipeline):
        raise ValueError(
            f"{path} names the pipeline {str(name)[:80]!r}, which diffusers {diffusers.__version__} has not. A newer "
            "diffusers may. Other code is never loaded."
        )
    for chosen in (index.get("_blocks_class_name"), cls.default_blocks_name):
        blocks: Any = named_class(diffusers, chosen)
        if blocks is not None and issubclass(blocks, diffusers.SequentialPipelineBlocks) and blocks.block_classes:
            return cls, blocks()
    raise ValueError(f"{path} names no blocks of diffusers {diffusers.__version__}. A newer diffusers may have them.")
