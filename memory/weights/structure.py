"""The structure of a module: references to its parameters and buffers, and its lists of blocks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..codecs.codec import Codec
from .encoding import Encoding, encoding_of

BRANCH = "_branch_"  # prefix of a LoRA's buffers in the module that it changes
_SMALL_SHARE = 0.01  # of a module's weights: smaller lists are not worth a gate at every call


@dataclass
class ParameterRef:
    """A reference to one parameter or buffer: `holder[key]`, in a module's `_parameters` or `_buffers`.

    `tensor` is the host's copy, which stays the truth. An encoded parameter has three tensors. `tensor` is its stored
    bytes on the host, flat uint8. `shown` is the empty parameter on `meta` that the module holds. `here` is the copy of
    the stored bytes on the device, while there is one.
    """

    holder: dict[str, Any]
    key: str
    tensor: torch.Tensor
    shown: torch.Tensor | None = None
    here: torch.Tensor | None = None

    @property
    def encoding(self) -> Encoding | None:
        """The encoding of an encoded parameter; None for a plain one."""
        return encoding_of(self.shown) if self.shown is not None else None

    @property
    def codec(self) -> Codec | None:
        """The codec of an encoded parameter; None for a plain one."""
        return self.encoding.codec if self.encoding else None

    @property
    def plain_bytes(self) -> int:
        """Bytes of the parameter or buffer as the module's code sees it, that is, dequantized."""
        return (self.tensor if self.shown is None else self.shown).nbytes

    @property
    def is_branch(self) -> bool:
        """Return whether it belongs to a LoRA. Such a buffer is in no file, and does not change the weight groups."""
        return self.key.startswith(BRANCH)

    def set(self, tensor: torch.Tensor) -> None:
        """Use `tensor`, a device copy of the host's tensor."""
        if self.shown is not None:
            self.here = tensor
            return
        if isinstance(self.tensor, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=False)
        self.holder[self.key] = tensor

    def restore(self) -> None:
        """Give the module its host tensor back, and forget the device copy."""
        self.holder[self.key] = self.tensor if self.shown is None else self.shown
        self.here = None

    def keep(self, tensor: torch.Tensor) -> None:
        """Replace the host's tensor, such as by a view into a flat buffer. A device copy in use stays in use."""
        if self.encoding:
            self.encoding.flat = tensor
        elif self.holder[self.key] is self.tensor:
            self.holder[self.key] = tensor
        self.tensor = tensor


def parameter_refs(module: nn.Module) -> Iterator[ParameterRef]:
    """Yield references to every parameter and buffer of a module; tied ones once for each holder."""
    for owner in modules_in(module):
        yield from own_refs(owner)


def modules_in(module: nn.Module) -> Iterator[nn.Module]:
    """Yield the modules that `module.modules()` yields, in its order, in a fraction of its time."""
    seen, ahead = set[nn.Module](), [module]
    while ahead:
        if (owner := ahead.pop()) not in seen:
            seen.add(owner)
            yield owner
            ahead += [child for child in reversed(owner._modules.values()) if child is not None]


def own_refs(module: nn.Module) -> Iterator[ParameterRef]:
    """Yield references to the parameters and buffers that a module holds itself, without its children's."""
    for holder in (module._parameters, module._buffers):
        for key, tensor in holder.items():
            if tensor is not None and (encoding := encoding_of(tensor)):
                yield ParameterRef(holder, key, encoding.flat, tensor)
            elif tensor is not None:
                yield ParameterRef(holder, key, tensor)


def block_lists(module: nn.Module) -> list[tuple[str, nn.ModuleList]]:
    """Return the paths and lists of a module's blocks, such as transformer blocks, in the order of the module.

    Lists inside a list are left out. All members of a list must be modules that can be called, which lists are not. It
    must have at least 1 % of the weights.
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


def empty_on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return `torch.empty_like(tensor, device="meta")`, which is written in Python, in a tenth of its time."""
    device = None if tensor.is_meta else "meta"  # in a dry run "meta" asks for a tensor of the simulated card
    if tensor.is_contiguous():
        return tensor.new_empty(tensor.shape, device=device)
    return torch.empty_like(tensor, device=device)


def is_called(module: nn.Module) -> bool:
    """Return whether a module can be called; lists of modules or of parameters cannot."""
    return getattr(type(module), "forward", None) is not nn.Module.forward
