"""Record the calls of a unit that a sampling loop will make, with made-up predictions in place of its results."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..engine.cached_tensors import clear_cached_tensors
from ..planning.dry_run import StandIns, lay_stand_ins
from ..planning.taint import is_of_latents, named_arguments
from ..weights.interpose import Forward, interpose
from ..weights.structure import parameter_refs
from .shaped import Shaped, ShapedMode, shaped, shaped_like
from .tables import Tables

_COMPARED_ELEMENTS = 4096  # of masks and ids
_PREDICTION = 0.01  # of the made-up results: not 0, by whose norm some pipelines divide


class ShapesOf:
    """The shapes that a unit and the modules in it give, by its `skeleton`: the same structure, made for this alone.

    Its weights and buffers become `Shaped`: all that they touch has a shape only. Each kind of call is run once.
    `stand_ins` replace code that reads values.
    """

    def __init__(self, skeleton: nn.Module, device: torch.device, stand_ins: StandIns) -> None:
        self.skeleton, self.device = skeleton, device
        lay_stand_ins(skeleton, stand_ins)
        self._known: dict[Hashable, Any] = {}
        for ref in list(parameter_refs(skeleton)):
            shown = ref.tensor if ref.shown is None else ref.shown
            ref.holder[ref.key] = shaped_like(shown, device)

    def clear(self) -> None:
        """Free what the structure's own code has cached on the device."""
        clear_cached_tensors(self.skeleton, self.device)

    def result(self, path: str, args: tuple, kwargs: dict) -> Any:
        """Return the result of a module's call, or of the unit's for the path "", with shapes only."""
        key = path, _kind((args, kwargs))
        if key not in self._known:
            with ShapedMode():
                self._known[key] = shaped(self.skeleton.get_submodule(path)(*args, **kwargs), self.device)
        return shaped(self._known[key], self.device)


@contextmanager
def on_shapes(
    module: nn.Module,
    shapes: ShapesOf,
    chosen: dict[str, Callable[[str, Forward, tuple, dict], Any]],
) -> Iterator[None]:
    """Run calls of a module without its weights until the block ends.

    `chosen` tells what runs in place of some modules in it, by path. All others with weights give shapes only.
    """
    with ExitStack() as exits:
        for path, run in chosen.items():
            exits.callback(interpose(module.get_submodule(path), functools.partial(run, path)))
        for path in _others(module, chosen):
            exits.callback(interpose(module.get_submodule(path), functools.partial(_of_shapes, shapes, path)))
        with ShapedMode():
            yield


def _of_shapes(shapes: ShapesOf, path: str, forward: Forward, args: tuple, kwargs: dict) -> Any:
    return shapes.result(path, args, kwargs)


def _others(module: nn.Module, chosen: Any) -> list[str]:
    """Return the paths of the largest modules with weights that hold no chosen one."""
    found: list[str] = []

    def walk(owner: nn.Module, path: str) -> None:
        for name, child in owner.named_children():
            inner = f"{path}.{name}" if path else name
            if inner in chosen:
                continue
            holds = any(each.startswith(f"{inner}.") for each in chosen)
            callable_ = getattr(type(child), "forward", None) is not nn.Module.forward
            if holds or not callable_:
                walk(child, inner)
            elif any(True for _ in child.parameters()):
                found.append(inner)

    walk(module, "")
    return found


class Recorder:
    """Notes the calls of a unit in `tables` until `recording` ends. Each gives a made-up result."""

    def __init__(self, module: nn.Module, tables: Tables, shapes: ShapesOf) -> None:
        self.module, self.tables, self.shapes = module, tables, shapes

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all calls of the module until the block ends."""
        undo = interpose(self.module, self._run)
        try:
            yield
        finally:
            undo()

    def _run(self, forward: Forward, args: tuple, kwargs: dict) -> Any:
        arguments = {
            name: shaped(value, self.shapes.device) if is_of_latents(name) else value
            for name, value in named_arguments(forward, args, kwargs).items()
        }
        self.tables.add(arguments)
        return tree_map_only(Shaped, self._made_up, self.shapes.result("", (), arguments))

    def _made_up(self, tensor: Shaped) -> torch.Tensor:
        return torch.full(tensor.shape, _PREDICTION, dtype=tensor.dtype, device=self.shapes.device)


def _kind(value: Any) -> Hashable:
    """Return what two calls share whose results have the same shapes. Of masks and ids the values count too."""
    if isinstance(value, torch.Tensor):
        is_shaped = isinstance(value, Shaped)
        shape = value.shape, value.stride(), value.dtype, is_shaped
        if is_shaped or value.is_floating_point() or value.numel() > _COMPARED_ELEMENTS:
            return shape
        return *shape, tuple(value.flatten().tolist())
    if type(value) in (tuple, list):
        return tuple(map(_kind, value))
    if type(value) is dict:
        return tuple((key, _kind(each)) for key, each in value.items())
    return repr(value)
