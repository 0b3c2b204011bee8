"""The components of a diffusers folder: which classes, which files, how each becomes a module. Reads configs only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..memory.unit import ManagedModel, Role
from ..memory.weights import (
    Stored,
    file_identity,
    find_weights,
    read_header,
    read_tensors,
    stored_dtype,
    stored_tensors,
)

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}
_WEIGHTS = (".safetensors", ".bin", ".pth", ".pt", ".gguf", ".h5", ".msgpack", ".onnx")


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """The type that a word means; None for "auto", which keeps the type that the files are stored in."""
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype != "auto" and dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}. Use auto, {', '.join(DTYPES)}.")
    return DTYPES.get(dtype)


def check_runs(dtype: torch.dtype, where: Path) -> None:
    """Raise ValueError for a type that weights are stored in and that nothing runs in."""
    if dtype not in DTYPES.values():
        raise ValueError(f"{where} is stored in {dtype}; give a dtype to run in, such as 'bf16'.")


@dataclass(frozen=True)
class Component:
    """One entry of `model_index.json`. `dtype` None means the type that the files are stored in."""

    name: str
    folder: Path
    cls: type
    dtype: torch.dtype | None = None
    config: dict[str, Any] = field(default_factory=dict, repr=False)

    @property
    def is_module(self) -> bool:
        """Whether it has weights; tokenizers, schedulers and the like have not."""
        return issubclass(self.cls, nn.Module)

    @property
    def role(self) -> Role:
        for prefix, role in (("text_encoder", "text_encoder"), ("transformer", "transformer"), ("unet", "transformer")):
            if self.name.startswith(prefix):
                return role  # type: ignore[return-value]
        return "vae" if self.name == "vae" else "other"

    @cached_property
    def files(self) -> tuple[list[Path], str | None]:
        """The weight files, checked to be whole, and their variant."""
        found = find_weights(self.folder)
        for path in found[0]:
            read_header(path)
        return found

    @cached_property
    def run_dtype(self) -> torch.dtype:
        """The type that the weights run in."""
        return self.dtype or stored_dtype(self.files[0])

    def identity(self) -> list[str]:
        """Digests of the files that the component is made of, for cache keys."""
        if self.is_module:
            return [file_identity(path) for path in (self.folder / "config.json", *self.files[0])]
        return [file_identity(path) for path in files_beside_weights(self.folder)]

    def create(self) -> Any:
        """A component without weights: a tokenizer, a scheduler."""
        return self.cls.from_pretrained(self.folder, local_files_only=True)  # type: ignore[attr-defined]

    def unit(self, label: str) -> ManagedModel:
        """The component as a managed model; nothing is loaded yet."""
        return ManagedModel(self.name, self.role, self._build, self._read, label, self._stored)

    def _stored(self) -> dict[str, Stored]:
        """Where the weights lie, by the names that the module may have for them."""
        found = stored_tensors(self.files[0])
        # Saved with a head, or by another class: LlamaForCausalLM has all that LlamaModel has under `model.`.
        prefix = f"{getattr(self.cls, 'base_model_prefix', '')}."
        return {name.removeprefix(prefix): at for name, at in found.items()} | found

    def _build(self) -> nn.Module:
        """The module's structure: parameters on `meta`, buffers and plain tensors real."""
        from accelerate import init_empty_weights
        from transformers import PreTrainedModel

        with init_empty_weights(include_buffers=False):
            if issubclass(self.cls, PreTrainedModel):
                config = self.cls.config_class.from_pretrained(self.folder)  # type: ignore[union-attr]
                module = self.cls._from_config(config, dtype=self.run_dtype)
            else:
                module = self.cls.from_config(self.cls.load_config(self.folder))  # type: ignore[attr-defined]
        keep = set(getattr(module, "_keep_in_fp32_modules", None) or ())
        if isinstance(module, PreTrainedModel):
            module.tie_weights()
            # transformers keeps these for float16 only, and has another list for both.
            keep = keep if self.run_dtype == torch.float16 else set()
            keep |= set(getattr(module, "_keep_in_fp32_modules_strict", None) or ())
        for name, parameter in module.named_parameters():
            if parameter.is_floating_point():
                fp32 = not keep.isdisjoint(name.split("."))
                parameter.data = parameter.data.to(torch.float32 if fp32 else self.run_dtype)
        stored = read_tensors(self.files[0], [name for name, _ in module.named_buffers()])
        for name, value in stored.items():
            owner, _, key = name.rpartition(".")
            module.get_submodule(owner)._buffers[key] = value.to(self.run_dtype) if value.is_floating_point() else value
        return module.requires_grad_(False)

    def _read(self) -> nn.Module:
        from transformers import PreTrainedModel

        self._check_shapes()
        dtype_argument = "dtype" if issubclass(self.cls, PreTrainedModel) else "torch_dtype"
        module, info = self.cls.from_pretrained(  # type: ignore[attr-defined]
            self.folder,
            local_files_only=True,
            use_safetensors=True,
            variant=self.files[1],
            output_loading_info=True,
            **{dtype_argument: self.run_dtype},
        )
        parameters = dict(module.named_parameters())
        if missing := sorted(name for name in info["missing_keys"] if name in parameters):
            raise ValueError(
                f"{self.folder} lacks {len(missing)} weights of {self.cls.__name__}, such as {missing[0]}. "
                "Download it again, or check that the folder holds this model."
            )
        return module

    def _check_shapes(self) -> None:
        """Raise ValueError for weights of other shapes than the config says, which the libraries report at length."""
        stored = self._stored()
        for name, parameter in self._build().named_parameters():
            if name in stored and stored[name].shape != parameter.shape:
                raise ValueError(
                    f"{stored[name].path} does not fit its config.json: {name} is {list(stored[name].shape)} and not "
                    f"{list(parameter.shape)}. Download both again."
                )


def files_beside_weights(folder: Path) -> list[Path]:
    """What a tokenizer or the like is made of. It may lie beside a model's weights."""
    return [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in _WEIGHTS]


def read_json(path: Path, advice: str = "Download it again.") -> dict[str, Any]:
    """A JSON object from a file; ValueError or FileNotFoundError, naming the file, if there is none."""
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. {advice}")
    try:
        content = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object. Download it again.")
    return content


def read_model_index(folder: Path) -> dict[str, Any]:
    """`model_index.json` of a diffusers folder."""
    index = folder / "model_index.json"
    if not index.is_file():
        where = "is not a folder" if not folder.is_dir() else "has no model_index.json"
        raise FileNotFoundError(f"{folder} {where}. Give the folder of a diffusers pipeline.")
    content = read_json(index)
    if not isinstance(content.get("_class_name"), str):
        raise ValueError(f"{index} names no pipeline class (_class_name). Download it again.")
    return content


def pipeline_class(name: str) -> type:
    """The diffusers pipeline class of that name."""
    import diffusers

    found = getattr(diffusers, name, None)
    if not (isinstance(found, type) and issubclass(found, diffusers.DiffusionPipeline)):
        raise ValueError(
            f"unknown pipeline class {name!r}: diffusers {diffusers.__version__} has none of that name. "
            "A newer diffusers may."
        )
    return found


def read_components(
    folder: Path, index: dict[str, Any], dtype: torch.dtype | None, elsewhere: Mapping[str, Path] | None = None
) -> dict[str, Component]:
    """The components that a folder's index names, each with its class and its files found.

    They lie in folders of their names, or `elsewhere`.
    """
    found = {}
    for name, entry in index.items():
        if name.startswith("_") or not isinstance(entry, list) or len(entry) != 2 or None in entry:
            continue
        if not name.isidentifier():
            raise ValueError(f"{folder}/model_index.json names a component {name!r}, which is no folder name.")
        library, class_name = entry
        path = (elsewhere or {}).get(name, folder / name)
        if not path.is_dir():
            raise FileNotFoundError(f"{folder} has no {name}/, which its model_index.json names. Download it again.")
        # The decoder always runs in float32: half precision turns pictures black.
        run_dtype = torch.float32 if name == "vae" else dtype
        component = Component(name, path, _component_class(library, class_name), run_dtype)
        if component.is_module:
            component.config.update(read_json(path / "config.json"))
            if "quantization_config" in component.config:
                raise ValueError(
                    f"{path / 'config.json'} asks for quantized weights, which are not supported yet. "
                    "Get the plain ones."
                )
            check_runs(component.run_dtype, path)
        found[name] = component
    return found


def _component_class(library: str, name: str) -> type:
    import diffusers
    import transformers

    if library in ("diffusers", "transformers"):
        found = getattr(diffusers if library == "diffusers" else transformers, name, None)
    else:
        found = getattr(getattr(diffusers.pipelines, str(library), None), name, None)
    if not isinstance(found, type):
        raise ValueError(
            f"model_index.json names {library}.{name}, which is not in the installed diffusers {diffusers.__version__} "
            f"or transformers {transformers.__version__}. Other code is never loaded."
        )
    return found
