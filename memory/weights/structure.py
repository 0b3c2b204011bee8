"""The structure of a module: the places of its weights, and its lists of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..codecs.codec import Codec
from .encoding import Encoding, encoding_of

BRANCH = "_branch_"  # what the names of a LoRA's tensors begin with, among the buffers of the module that it changes
_SMALL_SHARE = 0.01  # lists below this part of a module's weights are not worth a gate at every call


@dataclass
class ParameterRef:
    """The place of one parameter or buffer: `holder[key]`, where holder is a module's `_parameters` or `_buffers`.

    `tensor` is the host's. Of an encoded parameter that is its bytes: the module holds `shown`, and what `here` of the
    bytes is on the device.
    """

    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    shown: torch.Tensor | None = None
    here: torch.Tensor | None = None

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of an encoded parameter."""
        return encoding_of(self.shown) if self.shown is not None else None

    @property
    def codec(self) -> Codec | None:
        """How an encoded parameter is stored."""
        return self.encoding.codec if self.encoding else None

    @property
    def plain_bytes(self) -> int:
        """Bytes of the parameter or buffer as the module's code sees it."""
        return (self.tensor if self.shown is None else self.shown).nbytes

    @property
    def is_branch(self) -> bool:
        """Return whether a LoRA has put it there: it divides nothing, and is in no file."""
        return self.key.startswith(BRANCH)

    def set(self, tensor: torch.Tensor) -> None:
        """Use a device's copy of the host's tensor."""
        if self.shown is not None:
            self.here = tensor
            return
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        self.holder[self.key] = tensor

    def restore(self) -> None:
        """Give the module back its tensor on the host."""
        self.holder[self.key] = self.tensor if self.shown is None else self.shown
        self.here = None

    def keep(self, tensor: torch.Tensor) -> None:
        """Replace the host's tensor. A copy in use on a device stays so."""
        if self.encoding:
            self.encoding.flat = tensor
        elif self.holder[self.key] is self.tensor:
            self.holder[self.key] = tensor
        self.tensor = tensor


def parameter_refs(module: nn.Module) -> Iterator[ParameterRef]:
    """Every parameter and buffer of a module, tied ones as often as they are held."""
    for owner in module.modules():
        yield from own_refs(owner)


def own_refs(module: nn.Module) -> Iterator[ParameterRef]:
    """Yield the parameters and buffers that a module holds itself, without those of its children."""
    for holder in (module._parameters, module._buffers):
        for key, tensor in holder.items():
            if tensor is not None and (encoding := encoding_of(tensor)):
                yield ParameterRef(holder, key, encoding.flat, tensor)
            elif tensor is not None:
                yield ParameterRef(holder, key, tensor)


def block_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the lists of blocks of a module, at whatever depth, none inside another, in the order of the module.

    A list counts if its members are called (so not lists of lists) and hold a part of the weights worth streaming.
    """
    total = sum(p.nbytes for p in module.parameters())
    found: list[tuple[str, nn.ModuleList]] = []
    for path, owner in module.named_modules():
        inside = any(path.startswith(f"{name}.") for name, _ in found)
        if isinstance(owner, nn.ModuleList) and path and not inside and all(is_called(member) for member in owner):
            size = sum(p.nbytes for p in owner.parameters())
            if size and size >= _SMALL_SHARE * total:
                found.append((path, owner))
    return found


def is_called(module: nn.Module) -> bool:
    """Return whether a module can be called, which lists of modules or of parameters cannot."""
    return getattr(type(module), "forward", None) is not nn.Module.forward
