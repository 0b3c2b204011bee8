"""The components of a diffusers folder: which classes, which files, how each becomes a module. Reads configs only."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...memory.files import check_links, one_line, read_json
from ...memory.vocabulary import Role
from ...memory.weights.encoded import is_encoded, shapes_in, sources_of
from ...memory.weights.encoding import Source, holds, kernels_of
from ...memory.weights.normed import norm_in_forward
from ...memory.weights.stored import (
    check_unchanged,
    file_identity,
    read_tensors,
    stamps_of,
    stored_dtype,
    stored_tensors,
)
from ...memory.weights.unit import ManagedModel
from .building import leave_weights, on_meta, only_tiled
from .built import built
from .keys import key_text
from .neighborhood import attend_in_blocks
from .places import weight_files
from .placing import read_whole
from .reference_attention import attend_to_frames
from .trust import check_settings, component_class, files_beside_weights, named_class, read_config

DECODED = torch.bfloat16  # what quantised weights are made into where nothing else is asked for
_DECODES = ("bitsandbytes", "torchao")  # libraries whose files are read, by what configs call them
_LONGEST_TEXT = 2**24  # tokens
_ENDLESS = int(1e30)  # transformers' own word for a tokenizer without a limit

DTYPES = {
    "bfloat16": torch.bfloat16,
    "bf16": torch.bfloat16,
    "float16": torch.float16,
    "fp16": torch.float16,
    "float32": torch.float32,
    "fp32": torch.float32,
}


def parse_dtype(dtype: str | torch.dtype) -> torch.dtype | None:
    """Return the dtype of a word, or None for "auto", which keeps the dtype of the files."""
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
    """One entry of `model_index.json`. `dtype` None means the type that the files are stored in.

    `config` is that of a module; of a tokenizer, what is set otherwise than in its files. `decodes` says that it makes
    pictures of latents under another name than "vae".
    """

    name: str
    folder: Path
    cls: type
    dtype: torch.dtype | None = None
    config: dict[str, Any] = field(default_factory=dict, repr=False)
    decodes: bool = False

    @property
    def is_module(self) -> bool:
        """Return whether it has weights; tokenizers, schedulers and the like have not."""
        return issubclass(self.cls, nn.Module)

    @property
    def role(self) -> Role:
        for prefix, role in (("text_encoder", "text_encoder"), ("transformer", "transformer"), ("unet", "transformer")):
            if self.name.startswith(prefix):
                return role  # type: ignore[return-value]
        return "vae" if self.name == "vae" or self.decodes else "other"

    @cached_property
    def files(self) -> tuple[list[Path], str | None]:
        """The weight files, checked to be whole, and their variant. One GGUF file will do where there is no other."""
        found = weight_files(self.folder)
        for path in found[0]:
            shapes_in(path)
        return found

    @cached_property
    def is_encoded(self) -> bool:
        """Return whether weights are stored in another form than plain tensors, and are dequantized when used."""
        return any(is_encoded(path) for path in self.files[0])

    @cached_property
    def run_dtype(self) -> torch.dtype:
        """The type that the weights run in."""
        return self.dtype or (DECODED if self.is_encoded else stored_dtype(self.files[0]))

    def identity(self) -> list[str]:
        """Digests of the files that the component is made of, for cache keys."""
        if self.is_module:
            return [file_identity(path) for path in (self.folder / "config.json", *self.files[0])]
        settings = [key_text(self.config)] if self.config else []
        return [file_identity(path) for path in files_beside_weights(self.folder)] + settings

    def create(self) -> Any:
        """Create a component without weights: a tokenizer or a scheduler."""
        # Of classes that choose others by what a folder says, which may then ask to run code of its own.
        strict = {"trust_remote_code": False} if self.cls.__name__.startswith("Auto") else {}
        with one_line(self.folder, f"read as {self.cls.__name__}"):
            made = self.cls.from_pretrained(  # type: ignore[attr-defined]
                self.folder, local_files_only=True, **strict, **self.config
            )
        if getattr(made, "model_max_length", 0) > _LONGEST_TEXT:
            made.model_max_length = _ENDLESS  # some pipelines fill up to there
        return made

    @cached_property
    def key(self) -> Hashable:
        """The identity of the model: its files, and how they are run."""
        config = file_identity(self.folder / "config.json")
        return self.name, self.cls, self.run_dtype, config, stamps_of(self.files[0])

    def unit(self, label: str) -> ManagedModel:
        """Return the component as a managed model, without loading it."""
        places = self.stored  # now: a file that is changed later is another model's
        return ManagedModel(self.name, self.role, self._build, self._read, label, lambda: places)

    @cached_property
    def stored(self) -> dict[str, Source]:
        """Where the weights lie, by the names that the module may have for them."""
        paths = self.files[0]
        found: dict[str, Source] = sources_of(paths, self.run_dtype) if self.is_encoded else dict(stored_tensors(paths))
        # Saved with a head, or by another class: LlamaForCausalLM has all that LlamaModel has under `model.`.
        prefix = f"{getattr(self.cls, 'base_model_prefix', '')}."
        return {name.removeprefix(prefix): at for name, at in found.items()} | found

    def _build(self) -> nn.Module:
        """Return the module, with parameters on `meta` and real buffers and plain tensors."""
        return built(self.key, self._construct)

    def _construct(self) -> nn.Module:
        from transformers import PreTrainedModel

        with on_meta(self.folder / "config.json", self.cls.__name__, self.files[0]):
            module: Any = self._structure()
        leave_weights(module)
        norm_in_forward(module)
        attend_in_blocks(module)
        attend_to_frames(module)
        if only_tiled(module):
            module.enable_tiling()
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
        buffers = dict(module.named_buffers())
        for name, value in self._read_buffers(list(buffers)).items():
            owner, _, key = name.rpartition(".")
            if holds(tuple(value.shape), tuple(buffers[name].shape), False):
                value = value.view(buffers[name].shape)
            module.get_submodule(owner)._buffers[key] = value.to(self.run_dtype) if value.is_floating_point() else value
        return module.requires_grad_(False)

    def _structure(self) -> nn.Module:
        """Build the module from its config."""
        from transformers import PreTrainedModel

        if issubclass(self.cls, PreTrainedModel):
            config: Any = self.cls.config_class.from_pretrained(self.folder)  # type: ignore[union-attr]
            return self.cls._from_config(config, dtype=self.run_dtype)
        return self.cls.from_config(self.cls.load_config(self.folder))  # type: ignore[attr-defined, no-any-return]

    def _read_buffers(self, names: list[str]) -> dict[str, torch.Tensor]:
        """Read the named buffers that the files have."""
        if self.files[0][0].suffix == ".safetensors":
            return read_tensors(self.files[0], names)
        return {name: read_whole(self.stored[name]) for name in names if name in self.stored}

    def _read(self) -> nn.Module:
        from transformers import PreTrainedModel

        for place in self.stored.values():
            check_unchanged(place.path, place.stamp)
        self._check_shapes()
        if self.is_encoded:  # and yet not read as it lies
            self._refuse_missing()
        dtype_argument = "dtype" if issubclass(self.cls, PreTrainedModel) else "torch_dtype"
        with one_line(self.folder, f"read as {self.cls.__name__}"):
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

    def _refuse_missing(self) -> None:
        missing = sorted(name for name, _ in self._build().named_parameters() if name not in self.stored)
        what = (
            f"lacks {len(missing)} weights of {self.cls.__name__}, such as {missing[0]}"
            if missing
            else (f"holds weights that {self.cls.__name__} cannot be run with as they lie")
        )
        raise ValueError(f"{self.files[0][0]} {what}. Get another file, or check that it is of this model.")

    def _check_shapes(self) -> None:
        """Raise ValueError for weights of other shapes than the config says, which the libraries report at length."""
        stored, module = self.stored, self._build()
        kernels = kernels_of(module)
        for name, parameter in module.named_parameters():
            if name in stored and not holds(stored[name].shape, parameter.shape, id(parameter) in kernels):
                raise ValueError(
                    f"{stored[name].path} does not fit its config.json: {name} is {list(stored[name].shape)} and not "
                    f"{list(parameter.shape)}. Download both again."
                )


def read_model_index(folder: Path) -> dict[str, Any]:
    """`model_index.json` of a diffusers folder."""
    index = folder / "model_index.json"
    if not index.is_file():
        where = "is not a folder" if not folder.is_dir() else "has no model_index.json"
        raise FileNotFoundError(f"{folder} {where}. Give the folder of a diffusers pipeline.")
    check_links([index], folder)
    content = read_json(index)
    if not isinstance(content.get("_class_name"), str):
        raise ValueError(f"{index} names no pipeline class (_class_name). Download it again.")
    return content


def names_class(entry: Any) -> bool:
    """Return whether an entry of an index is a component: the library and the class, or none. Numbers are settings."""
    return isinstance(entry, list) and len(entry) == 2 and not all(isinstance(part, int | float) for part in entry)


def pipeline_class(name: str) -> type:
    """Return the diffusers pipeline class of that name."""
    import diffusers

    found = named_class(diffusers, name)
    if not (found and issubclass(found, diffusers.DiffusionPipeline)):
        raise ValueError(
            f"unknown pipeline class {name!r}: diffusers {diffusers.__version__} has none of that name. "
            "A newer diffusers may."
        )
    return found


def _check_quantized(component: Component) -> None:
    """Raise ValueError for a config that asks for weights in a form that no codec decodes."""
    if (asked := component.config.get("quantization_config")) is None:
        return
    method = asked.get("quant_method") if isinstance(asked, dict) else None
    if method not in _DECODES:
        raise ValueError(
            f"{component.folder / 'config.json'} asks for quantized weights ({method}), which are not decoded. "
            f"Get the plain ones, or those of bitsandbytes or torchao."
        )


def _as_it_is(component: Component) -> Component:
    return component


def read_components(
    folder: Path,
    index: dict[str, Any],
    dtype: torch.dtype | None,
    elsewhere: Mapping[str, Path] | None = None,
    given: Mapping[str, Callable[[Component], Component]] | None = None,
) -> dict[str, Component]:
    """Return the components in a folder's index, each with its class and files.

    They lie in folders of their names, or `elsewhere`. What `given` makes of a component takes its place: its weights
    lie in no folder.
    """
    found = {}
    for name, entry in index.items():
        if name.startswith("_") or not names_class(entry) or None in entry:
            continue
        if not name.isidentifier():
            raise ValueError(f"{folder / 'model_index.json'} names a component {name!r}, which is no folder name.")
        path = (elsewhere or {}).get(name, folder / name)
        if not path.is_dir():
            raise FileNotFoundError(f"{folder} has no {name}/, which its model_index.json names. Download it again.")
        # The decoder always runs in float32: half precision turns pictures black.
        run_dtype = torch.float32 if name == "vae" else dtype
        component = Component(name, path, component_class(*entry), run_dtype)
        model = path if name in (elsewhere or {}) else folder
        if component.is_module:
            component.config.update(read_config(path, model))
            _check_quantized(component)
            if name in (given or {}):
                component = (given or {})[name](component)
            check_runs(component.run_dtype, path)
        else:
            check_settings(path, model)
            component = (given or {}).get(name, _as_it_is)(component)
        found[name] = component
    return found
