"""Weights that lie in files under names of their own: where each part of a module is found, without reading any."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import nn

from ...memory.vocabulary import Role
from ...memory.weights.encoded import is_encoded, shapes_in
from ...memory.weights.encoding import Source, holds, kernels_of
from ...memory.weights.stored import Stored, file_identity, stamps_of, stored_dtype
from ...memory.weights.unit import ManagedModel, building
from .building import on_meta
from .built import built
from .components import DECODED, check_runs
from .keys import key_text
from .places import Places, Rename, sources


@dataclass(frozen=True)
class Checkpoint:
    """A module that `make` builds as `config` says, and its files, whose names `rename` turns into the module's.

    Checkpoints of the same files and `config` make the same module: its structure is built once. Loading is strict:
    every weight of the module is in the files, and nothing else is. `dtype` None means the type that the files are
    stored in.
    """

    name: str
    role: Role
    files: tuple[Path, ...]
    make: Callable[[], nn.Module]
    rename: Rename
    dtype: torch.dtype | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for path in self.files:
            shapes_in(path)  # raises for one that is damaged or cut short
        check_runs(self.run_dtype, self.files[0])

    @cached_property
    def run_dtype(self) -> torch.dtype:
        """The type that the weights run in."""
        if self.dtype or not any(is_encoded(path) for path in self.files):
            return self.dtype or stored_dtype(self.files)
        return DECODED

    def identity(self) -> list[str]:
        """Digests of the files, for cache keys."""
        return [file_identity(path) for path in self.files]

    @cached_property
    def key(self) -> Hashable:
        """The identity of the model: its files, and how they are run."""
        return self.name, type(self), self.run_dtype, key_text(self.config), stamps_of(self.files)

    def unit(self, label: str) -> ManagedModel:
        """Return the module as a managed model, without loading it."""
        return ManagedModel(self.name, self.role, self._build, self._refuse, label, lambda: self.stored)

    @cached_property
    def stored(self) -> Mapping[str, Source]:
        """Where each weight of the module lies. ValueError for one that is missing, left over, or of another shape."""
        found = sources(self.files, self.run_dtype, self.rename)
        with building:
            module = self._build()
        wanted, kernels = dict(module.named_parameters()), kernels_of(module)
        where, what = self.files[0], type(module).__name__
        if missing := sorted(wanted.keys() - found):
            raise ValueError(
                f"{where} lacks {len(missing)} weights of {what}, such as {missing[0]}. Get the whole model."
            )
        if surplus := sorted(found.keys() - wanted):
            raise ValueError(
                f"{where} holds {len(surplus)} weights that {what} has no place for, such as {surplus[0]}. "
                "It is of another model, or quantized: get the plain one."
            )
        for name, parameter in wanted.items():
            stored, shape = found[name].shape, parameter.shape
            if not holds(stored, shape, id(parameter) in kernels):
                raise ValueError(f"{where} has {name} as {list(stored)} where {what} has {list(shape)}.")
        return found

    def _build(self) -> nn.Module:
        """Return the module, with parameters on `meta` and real buffers."""
        return built(self.key, self._construct)

    def _construct(self) -> nn.Module:
        with on_meta(self.files[0], self.name, self.files):
            module = self.make()
        for parameter in module.parameters():
            parameter.data = parameter.data.to(self.run_dtype)
        return module.requires_grad_(False)

    def _refuse(self) -> NoReturn:
        raise ValueError(f"{self.files[0]} holds weights that cannot be read as {self.run_dtype}. Get the plain model.")


def converted(stored: Places, convert: Callable[[dict[str, Any]], Mapping[str, Any]]) -> dict[str, Stored]:
    """Where weights lie under the names that a converter of diffusers gives them.

    It is run on shapes: what it renames, reshapes or splits is found again in the one tensor that it was made of.
    """
    found = {}
    with torch.inference_mode(False), torch.no_grad():  # views know what they are views of, in this mode only
        shapes = {name: torch.empty(at.shape, dtype=at.dtype, device="meta") for name, at in stored.items()}
        kept = list(shapes.values())  # the converter takes them out; no `id` may be given twice
        origin = {id(shape): at for shape, at in zip(kept, stored.values(), strict=True)}
        for name, value in convert(shapes).items():
            at = origin[id(value if value._base is None else value._base)]
            if not value.is_contiguous():
                raise ValueError(f"{name} is no one piece of {at.path}.")
            offset = at.offset + value.storage_offset() * at.dtype.itemsize
            found[name] = replace(at, offset=offset, shape=tuple(value.shape))
    return found
