"""Placements: how the weights of a unit in use are placed, and removed again without copying one back.

There are three. `cpu` runs the unit where its weights are. `resident` keeps all weight groups on the device. `streamed`
keeps some, while the others pass through the ring. `engine.Engine` does the latter two. Large embedding tables stay in
RAM or in the file.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ..planning.measured import Measured
from ..planning.solver import Layout
from ..vocabulary import PlacementName
from ..weights.embeddings import LookUp, rows_of
from ..weights.groups import CallOrder, Owner, divide, encoded
from ..weights.interpose import Forward, interpose
from ..weights.structure import ParameterRef, parameter_refs
from .cached_tensors import clear_cached_tensors
from .dequantize import Workspace, decode
from .ring import WeightGroup
from .streams import Queues


@contextlib.contextmanager
def outside_inference() -> Iterator[None]:
    """Leave inference mode, for tensors that outlive a run.

    Tensor subclasses cannot be made in inference mode, and tensors made in it cannot be written to outside of it.
    """
    with torch.inference_mode(False), torch.no_grad():
        yield


class Placement:
    """Base of all placements. Remembers the host tensors, so that removing the unit is putting them back.

    `calls` is the order of the modules' calls, by which the module is divided into weight groups. `resident_bytes` are
    the bytes of device memory that the weights take now, ring and workspace included. The methods that do nothing here
    are the interface that `Residency` calls; `Engine` fills them in.
    """

    name: PlacementName
    layout = Layout()

    def __init__(self, module: nn.Module, device: torch.device, calls: CallOrder | None = None) -> None:
        self.module = module
        self.device = device
        self.host_refs: list[ParameterRef] = list(parameter_refs(module))
        self.resident_bytes = 0
        self.calls = calls or CallOrder()
        self._last_resort: weakref.finalize | None = None  # see `goes_with`
        divided = divide(module, self.host_refs, self.calls)
        self._groups = [WeightGroup.of(weights) for weights in divided.groups]
        self._tables, self._ungrouped = divided.tables, divided.rest
        self._encoded = [owner for owner in divided.owners if encoded(owner.refs)]
        self._workspace = Workspace(self._encoded, device)
        self._queues = Queues(device)
        self._undo: list[Callable[[], None]] = []

    def place(self) -> None:
        """Put the unit in place. On any error, out of memory included, everything is removed again."""
        try:
            with outside_inference():
                self._place()
        except BaseException:
            self.remove()
            raise

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM taken beside the module's own tensors, such as staging buffers."""
        return 0

    @property
    def on_device(self) -> bool:
        """Return whether the weights are on a device other than the CPU."""
        return self.name != "cpu"

    @property
    def is_whole(self) -> bool:
        """Return whether no group has to be brought before a call."""
        return True

    @property
    def dequantized(self) -> frozenset[int]:
        """The numbers, in call order, of the weight groups that are kept dequantized."""
        return frozenset()

    def describe(self) -> str:
        """Return how the unit is placed, in words."""
        return self.name

    def apply(self, layout: Layout) -> None:
        """Move the groups to where `layout` has them."""

    def grow(self, bytes: int) -> int:
        """Keep more groups resident, in up to `bytes` more. Return the bytes taken."""
        return 0

    def shrink(self, bytes: int) -> int:
        """Evict whole groups until `bytes` are free, or as many as can be. Return the bytes freed."""
        return 0

    def complete(self, alone: bool = True) -> None:
        """Make ready for a call. `alone` tells that no other call is under way."""

    def end_call(self, failed: bool = False, measured: bool = True) -> None:
        """Note that a call has ended, or has `failed`. Its time is kept only if it is to be `measured`.

        The group where a failed call stopped is not learnt as the predecessor of the next call's first group.
        """

    def wait_for_copies(self) -> None:
        """Wait for the copies under way."""

    def time_call(self) -> bool:
        """Time the groups of the call that begins now, if they can be timed. Return whether they are timed."""
        return False

    def take_seconds(self) -> Measured | None:
        """Return the measured seconds of each group of the timed call, once; None if there are none yet."""
        return None

    def take_bytes_in(self) -> int:
        """Return the bytes of weights copied to the device since the last call of this."""
        return 0

    def take_bytes_read(self) -> int:
        """Return the bytes of files read for the device since the last call of this."""
        return 0

    def goes_with(self, unit: object) -> None:
        """Remove the module from the device when `unit` is garbage collected, in case nobody evicted it."""
        self._last_resort = weakref.finalize(unit, self.remove)
        self._last_resort.atexit = False

    def remove(self) -> None:
        """Take the unit off the device, together with every tensor that its runs cached there."""
        if self._last_resort is not None:
            self._last_resort.detach()
        with torch.inference_mode():
            self._close_gates()
            while self._undo:
                self._undo.pop()()
            for ref in self.host_refs:
                ref.restore()
            self._remove()
            self._workspace.close()
            self.resident_bytes = 0
            self.clear_cached_tensors()

    def clear_cached_tensors(self) -> None:
        """Take what the unit's runs cached on the device off it."""
        clear_cached_tensors(self.module, self.device)

    def _place(self) -> None: ...

    def _remove(self) -> None: ...

    def _close_gates(self) -> None: ...

    def _place_tables(self) -> None:
        """Make embedding tables look up their rows in RAM, or in the file."""
        for table in self._tables:
            self._undo.append(interpose(table.module, functools.partial(self._look_up, table)))

    def _look_up(self, table: Owner, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run an embedding's module, with the rows of its table fetched for the ids of the call."""
        (ref,) = table.refs
        with LookUp(ref.holder[ref.key], functools.partial(self._rows, ref)):
            return forward(*args, **kwargs)

    def _rows(self, ref: ParameterRef, ids: torch.Tensor) -> torch.Tensor:
        """Return the rows of a table by `ids` [n], on the device [n, width]."""
        return rows_of(ref, None, ids.cpu()).to(self.device)

    def _decode_calls(self) -> None:
        """Open the workspace, and dequantize each module's encoded weights in it for the time of its call."""
        self._workspace.open()
        self.resident_bytes += self._workspace.nbytes
        for owner in self._encoded:
            self._undo.append(interpose(owner.module, functools.partial(self._decoded, owner)))

    def _decoded(self, owner: Owner, forward: Forward, args: tuple, kwargs: dict) -> Any:
        """Run a module with its encoded weights dequantized in the workspace."""
        with self._workspace.decoded(owner):
            return self._kept(forward(*args, **kwargs))

    def _kept(self, result: Any) -> Any:
        """Return a module's result, with views of its weights cloned: other weights take their memory next."""
        if isinstance(result, torch.Tensor):
            return result.clone() if self._passes(result) else result
        return tree_map_only(torch.Tensor, self._kept, result)

    def _passes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in memory that other weights are written to later."""
        return self._workspace.holds(tensor)


def keep_dequantized(refs: Sequence[ParameterRef]) -> int:
    """Dequantize encoded parameters that are on the device, and keep them so. Return the bytes of the plain tensors.

    Each of `refs` that is encoded must have its stored bytes there (`ParameterRef.here`). They are let go of.
    """
    decoded: dict[int, nn.Parameter] = {}
    for ref, codec in encoded(refs):
        if id(ref.tensor) not in decoded:
            assert ref.here is not None
            decoded[id(ref.tensor)] = decode(codec, ref.here)
        ref.here, ref.holder[ref.key] = None, decoded[id(ref.tensor)]
    return sum(tensor.nbytes for tensor in decoded.values())


class Cpu(Placement):
    """The unit runs where its weights are, in RAM. Encoded ones are dequantized there, one module at a time."""

    name = "cpu"
    _decoded_bytes = 0

    @property
    def host_bytes(self) -> int:
        return self._decoded_bytes

    def _place(self) -> None:
        for ref, _ in encoded(self.host_refs):
            ref.here = ref.tensor
        self._decoded_bytes = keep_dequantized(self._ungrouped)
        self._tables = [table for table in self._tables if encoded(table.refs)]
        self._place_tables()
        self._decode_calls()
        # `_decode_calls` has counted the workspace as device memory; here it is RAM.
        self._decoded_bytes, self.resident_bytes = self._decoded_bytes + self.resident_bytes, 0

    def _remove(self) -> None:
        self._decoded_bytes = 0
