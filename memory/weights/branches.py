"""Adapters (LoRA) as side branches: y = base(x) + s * B(A(x)), beside weights that are not changed.

The tensors of a change are buffers of the module whose output it adds to. So they move and are counted with that
module, in its weight group, which is cut as if they were not there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .changes import Change, ParameterDelta
from .structure import BRANCH, empty_on_meta

# Attribute of a module: its changes, each with the names of the buffers for its tensors, and its scaling.
_CHANGES = "_branch_changes"


@dataclass(frozen=True, eq=False)
class Adapter:
    """The changes of one LoRA, by path of their module. Adapters of the same `key` are the same."""

    key: Hashable
    parts: Mapping[str, Sequence[Change]]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        changes = (change for parts in self.parts.values() for change in parts)
        return sum(tensor.nbytes for change in changes for tensor in change.tensors().values())

    def structure(self) -> list[list[Any]]:
        """Return everything that decides the adapter's activations, as plain data."""
        return [[path, *(part.structure() for part in parts)] for path, parts in sorted(self.parts.items())]


ActiveAdapters = Sequence[tuple[Adapter, float]]  # each with its strength


def keys_of(adapters: ActiveAdapters) -> tuple[Hashable, ...]:
    """Return the keys of the adapters, which do not depend on their strengths."""
    return tuple(adapter.key for adapter, _ in adapters)


def attach(module: nn.Module, adapters: ActiveAdapters) -> None:
    """Put the branches of adapters beside their modules, which must have none yet. The changes must fit (`why_not`).

    For modules on `meta` that are run on shapes alone, see `attach_shapes`.
    """
    _attach(module, adapters, lambda tensor: tensor)


def attach_shapes(module: nn.Module, adapters: ActiveAdapters) -> None:
    """Attach branches with tensors on `meta`, for a run on shapes."""
    _attach(module, adapters, empty_on_meta)


def detach(module: nn.Module) -> None:
    """Remove all branches: the modules have their old classes and buffers."""
    for owner in module.modules():
        if _CHANGES not in vars(owner):
            continue
        del vars(owner)[_CHANGES]
        for key in [key for key in owner._buffers if key.startswith(BRANCH)]:
            del owner._buffers[key]
            owner._non_persistent_buffers_set.discard(key)
        owner.__class__ = type(owner).__bases__[0]


def set_strengths(module: nn.Module, adapters: ActiveAdapters) -> None:
    """Set the strengths of the attached branches."""
    for owner, parts in _placed(module, adapters):
        vars(owner)[_CHANGES] = [
            (part, {name: f"{BRANCH}{i}_{name}" for name in part.tensors()}, part.scaling(strength))
            for i, (part, strength) in enumerate(parts)
        ]


def _attach(module: nn.Module, adapters: ActiveAdapters, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for owner, parts in _placed(module, adapters):
            for i, (part, _) in enumerate(parts):
                for name, tensor in part.tensors().items():
                    owner.register_buffer(f"{BRANCH}{i}_{name}", made(tensor), persistent=False)
            changed = dict.fromkeys(part.name for part, _ in parts if isinstance(part, ParameterDelta))
            beside = not all(isinstance(part, ParameterDelta) for part, _ in parts)
            owner.__class__ = _branched(type(owner), tuple(changed), beside)  # type: ignore[arg-type]
    set_strengths(module, adapters)


def _placed(module: nn.Module, adapters: ActiveAdapters) -> Iterator[tuple[nn.Module, list[tuple[Change, float]]]]:
    """Yield each module that adapters have branches for, with its changes and their strengths in order."""
    for path in dict.fromkeys(path for adapter, _ in adapters for path in adapter.parts):
        parts = [(part, strength) for adapter, strength in adapters for part in adapter.parts.get(path, ())]
        yield module.get_submodule(path), parts


@functools.cache  # torch compiles by class: a new class for each `attach` would be compiled anew
def _branched(cls: type[nn.Module], changed: tuple[str, ...], beside: bool) -> type[nn.Module]:
    """Return a subclass of `cls` with the parameters named in `changed` changed and, if `beside`, with branches.

    It keeps the name of `cls`, which models and placements look at.
    """

    @functools.wraps(cls.forward)
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = cls.forward(self, x, *args, **kwargs)
        dtype = result.dtype
        for change, names, scaling in getattr(self, _CHANGES):
            if not scaling or isinstance(change, ParameterDelta):
                continue
            held = {name: self._buffers[buffer] for name, buffer in names.items()}
            given = next(iter(held.values())).dtype
            if x.dtype != given:
                x = x.to(given)
            result = result + change.added(self, held, x) * scaling
        return result.to(dtype)

    namespace: dict[str, Any] = {name: _sum(name) for name in changed}
    namespace |= {"__module__": cls.__module__, "__doc__": cls.__doc__} | ({"forward": forward} if beside else {})
    return type(cls.__name__, (cls,), namespace)


def _sum(name: str) -> property:
    """Return a property: the parameter plus its attached differences, summed in float32 at least."""

    def read(self: Any) -> torch.Tensor:
        held = self._parameters[name]
        wide = torch.promote_types(held.dtype, torch.float32)
        result = held.to(wide)
        for change, names, scaling in getattr(self, _CHANGES):
            if scaling and isinstance(change, ParameterDelta) and change.name == name:
                result = result + self._buffers[names["delta"]].to(wide) * scaling
        return result.to(held.dtype)

    return property(read)
