"""The changes that adapters make to modules: a term added to the output, or a difference added to a parameter.

The layers that take them are linear in their weights. So base(x) + strength * change(x) is the output of the layer with
changed weights, and no weight has to be rounded. Here are LoRA (arXiv:2106.09685) and full differences; LoHa and LoKr
are in `products`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

Held = Mapping[str, torch.Tensor]  # the tensors of a change by field name, on the device that computes
Shape = tuple[int, ...]

_CONVOLUTIONS: dict[type[nn.Module], Callable[..., torch.Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d


@dataclass(frozen=True, eq=False)
class Change:
    """One change of one module, with its tensors. The dataclass fields that are tensors are the tensors of the change.

    `alpha`, in the kinds that have it, scales the change by its rank.
    """

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the tensors of the change, by field name."""
        found = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, torch.Tensor)}

    def structure(self) -> list[Any]:
        """Return everything that decides the activations of the change, as plain data."""
        return [type(self).__name__, {name: list(tensor.shape) for name, tensor in self.tensors().items()}]

    def scaling(self, strength: float) -> float:
        """Return the factor of the change's output, for a strength."""
        return strength

    def like(self, module: nn.Module) -> Change:
        """Return the same change in the dtype that `module` computes in."""
        dtype = module.weight.dtype
        assert isinstance(dtype, torch.dtype)
        return replace(self, **{name: _plain(tensor, dtype) for name, tensor in self.tensors().items()})

    def why_not(self, module: Any) -> str:
        """Return why the change cannot be applied to a module, as the end of a message; empty if it can."""
        if not isinstance(module, LAYERS):
            return f"is of a {type(module).__name__}, which takes none"
        if not isinstance(module, nn.Linear) and (
            module.groups != 1 or set(module.dilation) != {1} or module.padding_mode != "zeros"
        ):
            return "is of a convolution with groups, dilation or padding of its own, which takes none"
        return self._misfit(module)

    def _misfit(self, module: Any) -> str:
        """Return the first shape that does not fit the module; empty if all fit."""
        shapes = self._shapes(tuple(module.weight.shape))
        wrong = (f"is {list(found)} where it must be {list(wanted)}" for found, wanted in shapes if found != wanted)
        return next(wrong, "")

    def _shapes(self, weight: Shape) -> list[tuple[Shape, Shape]]:
        """Return the shapes of the tensors, each with the one that it must have for a weight [out, in, ...]."""
        raise NotImplementedError

    def added(self, module: Any, held: Held, x: torch.Tensor) -> torch.Tensor:
        """Return the term to add to the module's output for the input `x`, before scaling.

        `held` has the tensors by field name, on the device of `x`.
        """
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class LowRank(Change):
    """LoRA and LoCon: `up` (B) @ `down` (A), with `down` [rank, in], `up` [out, rank], and maybe a `bias` [out].

    For a convolution `down` has its kernel, [rank, in, ...], and `up` kernels of size 1. Where there is `mid` [rank,
    rank, ...], that has the kernel, and `down` a kernel of size 1. The output is scaled by `alpha` / rank; by `alpha` /
    sqrt(rank) if `rank_stabilized`; by 1 without `alpha`.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None = None
    alpha: float | None = None
    rank_stabilized: bool = False
    mid: torch.Tensor | None = None

    @property
    def rank(self) -> int:
        """The rank of the change."""
        return self.down.shape[0]

    def scaling(self, strength: float) -> float:
        """Return the scaling, computed as peft does."""
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
    """A full difference: `weight` of the shape of the layer's, or `bias` [out], or both."""

    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None

    def _shapes(self, weight: Shape) -> list[tuple[Shape, Shape]]:
        found = [(self.weight, weight), (self.bias, weight[:1])]
        return [(tuple(tensor.shape), wanted) for tensor, wanted in found if tensor is not None]

    def added(self, module: Any, held: Held, x: torch.Tensor) -> torch.Tensor:
        weight, bias = held.get("weight"), held.get("bias")
        if weight is not None:
            return applied(module, x, weight, bias)
        assert bias is not None
        return bias if isinstance(module, nn.Linear) else bias.unflatten(0, (-1, *(1,) * (x.ndim - 2)))


@dataclass(frozen=True, eq=False)
class ParameterDelta(Change):
    """A difference for a parameter that its module's own code reads: that of a norm, or a modulation table.

    The code reads the sum of both, so the result is exact whatever it computes. `name` is the parameter's, `delta` has
    its shape.
    """

    name: str
    delta: torch.Tensor

    def structure(self) -> list[Any]:
        return [*super().structure(), self.name]

    def like(self, module: nn.Module) -> Change:
        return replace(self, delta=_plain(self.delta, module._parameters[self.name].dtype))  # type: ignore[union-attr]

    def why_not(self, module: Any) -> str:
        parameter = module._parameters.get(self.name)
        if parameter is None or not takes_changes(module):
            return f"is of a {type(module).__name__}, which takes no change of its {self.name}"
        found, wanted = list(self.delta.shape), list(parameter.shape)
        return "" if found == wanted else f"is {found} where it must be {wanted}"


def takes_changes(module: nn.Module) -> bool:
    """Return whether any kind of change can be applied to a module: it is a layer, or has parameters of its own."""
    return isinstance(module, LAYERS) or (bool(own_parameters(module)) and not isinstance(module, nn.Embedding))


def own_parameters(module: nn.Module) -> list[str]:
    """Return the names of the parameters that a module holds itself."""
    return [name for name, parameter in module._parameters.items() if parameter is not None]


def convolution_of(module: nn.Module) -> Callable[..., torch.Tensor] | None:
    """Return the function that a convolution applies; None for other modules."""
    return next((apply for base, apply in _CONVOLUTIONS.items() if isinstance(module, base)), None)


def applied(module: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """Return the output that a layer would have for `x` with this weight and bias."""
    if (convolve := convolution_of(module)) is None:
        return functional.linear(x, weight, bias)
    return convolve(x, weight, bias, module.stride, module.padding)


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a contiguous copy of a tensor in `dtype`, which shares memory with no larger tensor."""
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().to(dtype).contiguous()
        # A view would keep the whole tensor that it is a part of in RAM.
        return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()
