"""LoRA as side branches: y = base(x) + s * B(A(x)), beside weights that stay as they are.

A and B are buffers of the very module whose output they add to, so they come, leave and are counted with it. They are
never part of a piece: they stay on the device as long as any of the module does.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .structure import BRANCH

_STRENGTHS = "_branch_strengths"  # of the module: a number for each of its branches, in order
_Apply = Callable[..., torch.Tensor]
_CONVOLUTIONS: dict[type[nn.Module], _Apply] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}


@dataclass(frozen=True, eq=False)
class LowRank:
    """The branch of one module: `down` (A) [rank, in], `up` (B) [out, rank], and `bias` [out] if it has one.

    Beside a convolution `down` has its kernel, [rank, in, ...], and `up` kernels of size 1. What they make is scaled by
    `alpha` / rank, or for a `rank_stabilized` one by `alpha` / sqrt(rank); by 1 where there is no `alpha`.
    """

    down: torch.Tensor
    up: torch.Tensor
    bias: torch.Tensor | None = None
    alpha: float | None = None
    rank_stabilized: bool = False

    @property
    def rank(self) -> int:
        """Of the change that it makes."""
        return self.down.shape[0]

    def tensors(self) -> list[torch.Tensor]:
        """What it is made of."""
        return [self.down, self.up, *([] if self.bias is None else [self.bias])]

    def scaling(self, strength: float) -> float:
        """The number that its output is multiplied by, computed as peft does."""
        alpha = self.rank if self.alpha is None else self.alpha
        return strength * alpha / (math.sqrt(self.rank) if self.rank_stabilized else self.rank)

    def why_not(self, module: nn.Module) -> str:
        """Why it cannot be beside a module; empty if it can."""
        if not isinstance(module, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d):
            return f"is of a {type(module).__name__}, which takes none"
        if not isinstance(module, nn.Linear) and (
            module.groups != 1 or set(module.dilation) != {1} or module.padding_mode != "zeros"
        ):
            return "is of a convolution with groups, dilation or padding of its own, which takes none"
        out, into, *kernel = module.weight.shape
        rank = self.rank
        wanted = [[rank, into, *kernel], [out, rank, *(1 for _ in kernel)], [out]]
        for tensor, shape in zip(self.tensors(), wanted, strict=False):
            if list(tensor.shape) != shape:
                return f"is {list(tensor.shape)} where it must be {shape}"
        return ""

    def like(self, module: nn.Module) -> LowRank:
        """The same in the type that a module computes in, as peft has it."""
        dtype = module.weight.dtype
        assert isinstance(dtype, torch.dtype)
        bias = None if self.bias is None else _plain(self.bias, dtype)
        return LowRank(_plain(self.down, dtype), _plain(self.up, dtype), bias, self.alpha, self.rank_stabilized)


@dataclass(frozen=True, eq=False)
class Adapter:
    """The branches of one LoRA in one module, by path. Two of the same `key` are the same."""

    key: Hashable
    parts: Mapping[str, LowRank]

    def structure(self) -> list[list[Any]]:
        """Everything of it that decides activations, as plain data."""
        return [[path, part.rank, part.bias is not None] for path, part in sorted(self.parts.items())]


Worn = Sequence[tuple[Adapter, float]]  # with the strength of each


def keys_of(worn: Worn) -> tuple[Hashable, ...]:
    """What tells these adapters from others, whatever their strengths are."""
    return tuple(adapter.key for adapter, _ in worn)


def attach(module: nn.Module, worn: Worn) -> None:
    """Put the branches of adapters, which fit, beside the modules that they are of. There must be none yet.

    Where a module's weights are on `meta` and no values are needed, see `attach_shapes`.
    """
    _attach(module, worn, lambda tensor: tensor)


def attach_shapes(module: nn.Module, worn: Worn) -> None:
    """As `attach`, on `meta`, for a run on shapes."""
    _attach(module, worn, lambda tensor: torch.empty_like(tensor, device="meta"))


def detach(module: nn.Module) -> None:
    """Take all branches away: the modules are as they were."""
    for owner in module.modules():
        if _STRENGTHS not in vars(owner):
            continue
        del vars(owner)[_STRENGTHS]
        for key in [key for key in owner._buffers if key.startswith(BRANCH)]:
            del owner._buffers[key]
            owner._non_persistent_buffers_set.discard(key)
        owner.__class__ = type(owner).__bases__[0]


def set_strengths(module: nn.Module, worn: Worn) -> None:
    """Let the branches that are there count so much."""
    for owner, parts in _placed(module, worn):
        vars(owner)[_STRENGTHS] = [part.scaling(strength) for part, strength in parts]


def _attach(module: nn.Module, worn: Worn, made: Callable[[torch.Tensor], torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        for owner, parts in _placed(module, worn):
            for i, (part, _) in enumerate(parts):
                for name, tensor in zip(("down", "up", "bias"), part.tensors(), strict=False):
                    owner.register_buffer(f"{BRANCH}{i}_{name}", made(tensor), persistent=False)
            owner.__class__ = _branched(type(owner))  # type: ignore[arg-type]
    set_strengths(module, worn)


def _placed(module: nn.Module, worn: Worn) -> Iterator[tuple[nn.Module, list[tuple[LowRank, float]]]]:
    """Each module that adapters have branches for, and these in their order."""
    for path in dict.fromkeys(path for adapter, _ in worn for path in adapter.parts):
        parts = [(adapter.parts[path], strength) for adapter, strength in worn if path in adapter.parts]
        yield module.get_submodule(path), parts


def _plain(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        plain = tensor.detach().to(dtype).contiguous()
        # Not a part of something larger, which it would keep in RAM.
        return plain if plain.untyped_storage().nbytes() == plain.nbytes else plain.clone()


@functools.cache  # torch compiles by class
def _branched(cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` with branches beside it. It keeps its name, which models and placements ask for."""
    apply = next((apply for base, apply in _CONVOLUTIONS.items() if issubclass(cls, base)), None)

    @functools.wraps(cls.forward)
    def forward(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        result = cls.forward(self, x, *args, **kwargs)
        dtype = result.dtype
        for i, scaling in enumerate(getattr(self, _STRENGTHS)):
            if not scaling:
                continue
            down, up = self._buffers[f"{BRANCH}{i}_down"], self._buffers[f"{BRANCH}{i}_up"]
            bias = self._buffers.get(f"{BRANCH}{i}_bias")
            if x.dtype != down.dtype:
                x = x.to(down.dtype)
            if apply is None:
                change = functional.linear(functional.linear(x, down), up, bias)
            else:
                change = apply(apply(x, down, None, self.stride, self.padding), up, bias)
            result = result + change * scaling
        return result.to(dtype)

    namespace = {"forward": forward, "__module__": cls.__module__, "__doc__": cls.__doc__}
    return type(cls.__name__, (cls,), namespace)
