"""The answers of a pipeline's VAE encoder and image encoder before it samples, recorded once.

These modules run in stages of their own. Their answers are kept on the CPU, in the order of the calls, and given again
while the transformer samples.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_map_only, tree_unflatten

from ..encoding.conditioning import to_host

Run = Callable[..., Any]  # of a module's call: gives what it answers, opened


class _Parameters(NamedTuple):
    """The parameters of a posterior, as a tree of tensors, which the posterior itself is not."""

    tensor: torch.Tensor


class _Certain(_Parameters):
    """The parameters of a posterior that is one value, as of Cosmos' VAE."""


def opened(output: Any) -> Any:
    """Turn a module's output into a tree of tensors. A posterior becomes its parameters."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution, IdentityDistribution

    output = tree_map_only(DiagonalGaussianDistribution, lambda posterior: _Parameters(posterior.parameters), output)
    return tree_map_only(IdentityDistribution, lambda posterior: _Certain(posterior.parameters), output)


def closed(tree: Any) -> Any:
    """Turn the tree that `opened` made back into the module's output."""
    from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution, IdentityDistribution

    def close(leaf: Any) -> Any:
        if isinstance(leaf, _Certain):
            return IdentityDistribution(leaf.tensor)
        return DiagonalGaussianDistribution(leaf.tensor) if isinstance(leaf, _Parameters) else leaf

    return tree_map(close, tree, is_leaf=lambda node: isinstance(node, _Parameters))


class Posterior:
    """Calls a VAE's `encode`, and gives the one tensor that its answer follows from. `whole` makes the answer of it."""

    def __init__(self) -> None:
        self._spec: TreeSpec | None = None

    def __call__(self, module: torch.nn.Module, pixels: torch.Tensor, device: torch.device, way: str) -> torch.Tensor:
        encode: Callable[..., Any] = module.encode  # type: ignore[assignment]
        leaves, self._spec = tree_flatten(opened(encode(pixels.to(device, torch.float32))))
        if len(leaves) != 1 or not isinstance(leaves[0], torch.Tensor):
            raise ValueError(f"{type(module).__name__} encodes a picture to more than one tensor.")
        return leaves[0]

    def whole(self, tensor: torch.Tensor) -> Any:
        """Return the opened answer with this tensor in it."""
        assert self._spec is not None, "the VAE was not called"
        return tree_unflatten([tensor], self._spec)


class Answers:
    """The answers of a run, by the name of the module and in the order of its calls."""

    def __init__(self) -> None:
        self._kept: dict[str, list[tuple[Any, Any]]] = {}

    def ask(self, name: str, run: Run) -> Run:
        """Return a call of a module that runs it by `run` and keeps the answer."""

        def call(*args: Any, **kwargs: Any) -> Any:
            answer = tree_map_only(torch.Tensor, to_host, run(*args, **kwargs))
            self._kept.setdefault(name, []).append((_shapes(args, kwargs), answer))
            return _given(answer, args, kwargs)

        return call

    def tell(self) -> Telling:
        """Return the answers, from the first one on."""
        return Telling(self._kept)


class NotSeenError(RuntimeError):
    """A module that is not there to run is asked for something that was not asked before."""


class Telling:
    """Gives kept answers again, in their order."""

    def __init__(self, kept: dict[str, list[tuple[Any, Any]]]) -> None:
        self._kept = kept
        self._told: dict[str, int] = {}  # how many of each module's

    def answer(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return a module's next answer, on the device of its inputs. Raises NotSeenError if it was not asked that."""
        kept, place = self._kept.get(name, []), self._told.get(name, 0)
        if place >= len(kept) or kept[place][0] != _shapes(args, kwargs):
            raise NotSeenError(f"it asks its {name} for more while it samples than before")
        self._told[name] = place + 1
        return _given(kept[place][1], args, kwargs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Answer the same questions once more after the block ends."""
        told = dict(self._told)
        yield
        self._told = told


def _given(answer: Any, args: Any, kwargs: Any) -> Any:
    """Return the answer as the module would: on the inputs' device and, for a posterior, in their dtype."""
    asked = next(leaf for leaf in tree_flatten((args, kwargs))[0] if isinstance(leaf, torch.Tensor))
    nodes = tree_flatten(answer, is_leaf=lambda node: isinstance(node, _Parameters))[0]
    dtype = asked.dtype if any(isinstance(node, _Parameters) for node in nodes) else None
    return closed(tree_map_only(torch.Tensor, lambda tensor: tensor.to(asked.device, dtype), answer))


def _shapes(args: Any, kwargs: Any) -> list[Any]:
    leaves = tree_flatten((args, kwargs))[0]
    return [tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
