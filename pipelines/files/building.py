"""Building the structure of a module from a stranger's config: on `meta`, and never larger than its files can fill."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ...memory.files import one_line
from ...memory.simulated.operators import Uncompiled, tensors_in
from ...memory.weights.encoded import shapes_in
from ...memory.weights.structure import empty_on_meta

_CALLS, _CALLS_PER_TENSOR = 1_000, 50  # models make about 5
_SMALL = 2**22  # elements; two of that size make no more than a GB or so of anything
_ONLY_TILED = ("AutoencoderKLAllegro",)
_aten = torch.ops.aten
_INITIALIZES = frozenset(
    overload
    for packet in (_aten.normal_, _aten.uniform_, _aten.fill_, _aten.zero_, _aten.erfinv_, _aten.clamp_)
    for overload in (getattr(packet, name) for name in packet.overloads())
)
_TABLES_BYTES = 2 * 2**30  # the largest table that a model makes for itself has 1.8 GB


@contextlib.contextmanager
def on_meta(where: Path, name: str, files: Sequence[Path]) -> Iterator[None]:
    """Build modules with their parameters on `meta`, their buffers and plain tensors real.

    ValueError, in one line that names `where`, for whatever goes wrong, and for a config of absurd sizes: more layers
    than the files have weights for, or tensors that are larger than all of them, none of which is ever allocated.
    """
    from accelerate import init_empty_weights

    shapes = [shape for path in files for shape in shapes_in(path)]
    elements = sum(map(math.prod, shapes))
    limits = _Limits(_CALLS + _CALLS_PER_TENSOR * len(shapes), max(_TABLES_BYTES, 8 * elements))
    with one_line(where, f"built as {name}"), init_empty_weights(include_buffers=False), limits:
        yield


def leave_weights(module: nn.Module) -> None:
    """Put on `meta` the parameters that a constructor has put elsewhere, as `torch.nn.utils.skip_init` does."""
    left: dict[int, nn.Parameter] = {}  # tied ones stay tied
    for owner in module.modules():
        for key, tensor in owner._parameters.items():
            if tensor is not None and not tensor.is_meta:
                empty = nn.Parameter(empty_on_meta(tensor), requires_grad=False)
                owner._parameters[key] = left.setdefault(id(tensor), empty)


def only_tiled(module: nn.Module) -> bool:
    """Return whether a VAE decodes and encodes in its own tiles, or not at all."""
    return type(module).__name__ in _ONLY_TILED


class _Limits(Uncompiled):
    """Counts what torch is asked to do, and looks at the size of each large result before it is made."""

    def __init__(self, calls: int, most_bytes: int) -> None:
        super().__init__()
        self.calls, self.most_bytes = calls, most_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.calls -= 1
        if self.calls < 0:
            raise ValueError("its config asks for many more layers than there are weights")
        if func in _INITIALIZES and args[0].is_meta:
            return args[0]  # of no value, and torch takes its time
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "meta":
            made = func(*args, **kwargs)
            self._check(made)
            return made
        if func is _aten.empty.memory_format:  # most of what constructors call
            self._check_bytes(math.prod(args[0]) * (kwargs.get("dtype") or torch.get_default_dtype()).itemsize)
        elif "device" in kwargs or any(tensor.numel() > _SMALL for tensor in tensors_in((args, kwargs))):
            self._check_call(func, args, kwargs)
        return func(*args, **kwargs)

    def _check_call(self, func: Any, args: Any, kwargs: Any) -> None:
        on_meta = {**kwargs, "device": torch.device("meta")} if "device" in kwargs else kwargs
        args, on_meta = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), (args, on_meta))
        with contextlib.suppress(NotImplementedError):  # what looks at values, or only moves them
            self._check(func(*args, **on_meta))

    def _check(self, made: Any) -> None:
        self._check_bytes(max((tensor.nbytes for tensor in tensors_in(made)), default=0))

    def _check_bytes(self, bytes: int) -> None:
        if bytes > self.most_bytes:
            raise ValueError("its config asks for tensors larger than all of its weights")
