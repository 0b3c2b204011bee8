"""What an adapter adds to the output of a module, computed beside it: in low rank, or from weights made for the call.

Each kind is linear in the weights of its module, so that base(x) + strength * change(x) is what the module would make
with changed weights, which nobody has to round. Here LoRA (arXiv:2106.09685) and whole differences; see `products`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Held = Mapping[str, torch.Tensor]  # the tensors of a change, where they are now
Shape = tuple[int, ...]

_CONVOLUTIONS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, eq=False)
class Change(ABC):
    """One change of one module, and its tensors. `alpha` scales it, by its rank, where it has one."""

    def tensors(self) -> dict[str, torch.Tensor]:
        """What it is made of, by name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def structure(self) -> list[Any]:
        """Everything of it that decides activations, as plain data."""
        return [type(self).__name__, {name: list(tensor.shape) for name, tensor in self.tensors().items()}]

    def scaling(self, strength: float) -> float:
        """The number that its output is multiplied by."""
        return strength

    def like(self, module: nn.Module) -> Change:
        """The same in the type that a module computes in."""
        dtype = module.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return replace(self, **{name: _plain(tensor, dtype) for name, tensor in self.tensors().items()})

    def why_not(self, module: Any) -> str:
        """Why it cannot be beside a module; empty if it can."""
        if not isinstance(module, LAYERS):
            return f"is of a {type(module).__name__}, which takes none"
        if not isinstance(module, nn.Linear) and (
            module.groups != 1 or set(module.dilation) != {1} or module.padding_mode != "zeros"
        ):
            return "is of a convolution with groups, dilation or padding of its own, which takes none"
        return self._misfit(module)

    def _misfit(self, module: Any) -> str:
        shapes = self._shapes(tuple(module.weight.shape))
        wrong = (f"is {list(found)} where it must be {list(wanted)}" for found, wanted in shapes if found != wanted)
        return next(wrong, "")

    @abstractmethod
    def _shapes(self, weight: Shape) -> list[tuple[Shape, Shape]]:
        """The shapes that it has, each with the one that it must have beside a weight [out, in, ...]."""

    @abstractmethod
    def added(self, module: Any, held: Held, x: torch.Tensor) -> torch.Tensor:
        """What it makes of the input of a module, before the scaling."""


@dataclass(frozen=True, eq=False)
class LowRank(Change):
    """LoRA and LoCon: `down` (A) [rank, in], `up` (B) [out, rank], and `bias` [out] if it has one.

    Beside a convolution `down` has its kernel, [rank, in, ...], and `up` kernels of size 1; or `mid` has it,
    [rank, rank, ...]. What they make is scaled by `alpha` / rank, or for a `rank_stabilized` one by
    `alpha` / sqrt(rank); by 1 where there is no `alpha`.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None = None
    alpha: float | None = None
    rank_stabilized: bool = False
    mid: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """Of the change that it makes."""
        return self.down.shape[0]

    def scaling(self, strength: float) -> float:
        """Computed as peft does."""
        alpha = self.rank if self.alpha is None else self.alpha
        return strength * alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def _shapes(self, weight: Shape) -> list[tuple[Shape, Shape]]:
        (out, into, *kernel), rank = weight, self.rank
        ones = (1,) * len(kernel)
        found = [
            (self.down, (rank, into, *(ones if self.mid is not None else kernel))),
            (self.up, (out, rank, *ones)),
            (self.bias, (out,)),
            (self.mid, (rank, rank, *kernel)),
        ]
        return [(tuple(tensor.shape), wanted) for tensor, wanted in found if tensor is not None]

    def added(self, module: Any, held: Held, x: torch.Tensor) -> torch.Tensor:
        bias = held.get("bias")
        if (convolve := convolution_of(module)) is None:
            return functional.linear(functional.linear(x, held["down"]), held["up"], bias)
        if "mid" in held:
            between = convolve(convolve(x, held["down"]), held["mid"], None, module.stride, module.padding)
        else:
            between = convolve(x, held["down"], None, module.stride, module.padding)
        return convolve(between, held["up"], bias)


@dataclass(frozen=True, eq=False)
class Delta(Change):
    """A change as large as what it changes: `weight` of the shape of the module's, or `bias`, or both.

    Norms with weights of their own take it too.
    """

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def why_not(self, module: Any) -> str:
        if not _is_norm(module):
            return super().why_not(module)
        return self._misfit(module)

    def _shapes(self, weight: Shape) -> list[tuple[Shape, Shape]]:
        found = [(self.weight, weight), (self.bias, weight[:1])]
        return [(tuple(tensor.shape), wanted) for tensor, wanted in found if tensor is not None]

    def added(self, module: Any, held: Held, x: torch.Tensor) -> torch.Tensor:
        weight, bias = held.get("weight"), held.get("bias")
        if weight is None:
            assert bias is not None
            last = isinstance(module, nn.Linear) or (_is_norm(module) and not isinstance(module, nn.GroupNorm))
            return bias if last else bias.unflatten(0, (-1, *(1,) * (x.ndim - 2)))
        return _normed(module, x, weight, bias) if _is_norm(module) else applied(module, x, weight, bias)


def takes_changes(module: nn.Module) -> bool:
    """Whether there is a kind of change that can be beside a module."""
    return isinstance(module, LAYERS) or _is_norm(module)


def convolution_of(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """The function that a convolution applies; None for other modules."""
    return next((apply for base, apply in _CONVOLUTIONS.items() if isinstance(module, base)), None)


def applied(module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """What a layer would make of `x` with these weights."""
    if (convolve := convolution_of(module)) is None:
        return functional.linear(x, weight, bias)
    return convolve(x, weight, bias, module.stride, module.padding)


def _is_norm(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "weight", None), torch.Tensor):
        return False
    is_rms = type(module).__name__.endswith("RMSNorm") and module.weight.ndim == 1 and hasattr(module, "eps")
    return is_rms or isinstance(module, nn.GroupNorm | nn.LayerNorm)


def _normed(module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """What a norm makes with these weights."""
    shift, eps = None if bias is None else bias.float(), module.eps
    if isinstance(module, nn.GroupNorm):
        return functional.group_norm(x.float(), module.num_groups, weight.float(), shift, eps)
    if isinstance(module, nn.LayerNorm):
        return functional.layer_norm(x.float(), weight.shape, weight.float(), shift, eps)
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    y = functional.rms_norm(x.float(), weight.shape, weight.float(), eps)
    return y if shift is None else y + shift


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().to(dtype).contiguous()
        # Not a part of something larger, which it would keep in RAM.
        return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()
