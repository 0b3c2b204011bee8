"""How a leased unit sits: put in place, and taken away without copying a weight back.

`cpu`: the unit runs where its weights are. `resident` and `streamed`, by the `engine`: all weights on the device, or
some groups resident and the rest through a ring. Tables of embeddings are never on the device.
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
    """For tensors that outlive a run: quantized ones cannot be made in inference mode, and others not be written to."""
    with torch.inference_mode(False), torch.no_grad():
        yield


class Placement:
    """Base of all placements: remembers the host tensors, so that taking away is putting them back.

    `calls` says which modules are called in which order.
    """

    name: PlacementName
    layout = Layout()

    def __init__(self, module: nn.Module, device: torch.device, calls: CallOrder | None = None) -> None:
        self.module = module
        self.device = device
        self.host_refs: list[ParameterRef] = list(parameter_refs(module))
        self.resident_bytes = 0
        self.calls = calls or CallOrder()
        self._last_resort: weakref.finalize | None = None
        divided = divide(module, self.host_refs, self.calls)
        self._groups = [WeightGroup.of(weights) for weights in divided.groups]
        self._tables, self._rest = divided.tables, divided.rest
        self._encoded = [owner for owner in divided.owners if encoded(owner.refs)]
        self._workspace = Workspace(self._encoded, device)
        self._queues = Queues(device)
        self._undo: list[Callable[[], None]] = []

    def place(self) -> None:
        """Put the unit in place. On any failure, out of memory included, everything is taken away again."""
        try:
            with outside_inference():
                self._place()
        except BaseException:
            self.remove()
            raise

    @property
    def host_bytes(self) -> int:
        """RAM taken beside the module's own tensors."""
        return 0

    @property
    def on_device(self) -> bool:
        """Return whether the weights are on a device of their own."""
        return self.name != "cpu"

    @property
    def is_whole(self) -> bool:
        """Return whether nothing has to come before a call."""
        return True

    @property
    def dequantized(self) -> frozenset[int]:
        """The groups that are plain tensors on the device for good."""
        return frozenset()

    def describe(self) -> str:
        """Return how the unit sits, in words."""
        return self.name

    def apply(self, layout: Layout) -> None:
        """Lie on the device as a layout says."""

    def grow(self, bytes: int) -> int:
        """Keep up to `bytes` more of the groups. Return the bytes taken."""
        return 0

    def shrink(self, bytes: int) -> int:
        """Evict whole groups until `bytes` are free, or as many as can be. Return the bytes freed."""
        return 0

    def complete(self, alone: bool = True) -> None:
        """Make ready for a call. `alone` says that no other is under way."""

    def rest(self, failed: bool = False) -> None:
        """Note that a call has ended; what follows one that `failed` is not what followed before."""

    def settle(self) -> None:
        """Wait for the copies under way."""

    def time_call(self) -> bool:
        """Time the groups of the call that begins now, if they can be timed. Return whether they are."""
        return False

    def take_seconds(self) -> Measured | None:
        """Return what the groups of the timed call computed, once."""
        return None

    def take_bytes_in(self) -> int:
        """Return the bytes of weights copied to the device since this was last asked."""
        return 0

    def take_bytes_read(self) -> int:
        """Return the bytes of files that were read for them."""
        return 0

    def goes_with(self, unit: object) -> None:
        """Remove the module from the device as soon as its unit is deleted."""
        self._last_resort = weakref.finalize(unit, self.remove)
        self._last_resort.atexit = False

    def remove(self) -> None:
        """Take the unit off the device, with every tensor that its runs cached."""
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
            clear_cached_tensors(self.module, self.device)

    def _place(self) -> None: ...

    def _remove(self) -> None: ...

    def _close_gates(self) -> None: ...

    def _place_tables(self) -> None:
        """Look up the rows of the tables in RAM, or in the files."""
        for table in self._tables:
            self._undo.append(interpose(table.module, functools.partial(self._look_up, table)))

    def _look_up(self, table: Owner, forward: Forward, args: tuple, kwargs: dict) -> Any:
        (ref,) = table.refs
        with LookUp(ref.holder[ref.key], functools.partial(self._rows, ref)):
            return forward(*args, **kwargs)

    def _rows(self, ref: ParameterRef, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of a table, on the device."""
        return rows_of(ref, None, ids.cpu()).to(self.device)

    def _decode_calls(self) -> None:
        """Show modules their encoded weights dequantized during their calls."""
        self._workspace.open()
        self.resident_bytes += self._workspace.nbytes
        for owner in self._encoded:
            self._undo.append(interpose(owner.module, functools.partial(self._decoded, owner)))

    def _decoded(self, owner: Owner, forward: Forward, args: tuple, kwargs: dict) -> Any:
        with self._workspace.decoded(owner):
            return self._kept(forward(*args, **kwargs))

    def _kept(self, result: Any) -> Any:
        """Return what a module gave, without views of its weights, which others will take the place of."""
        if isinstance(result, torch.Tensor):
            return result.clone() if self._passes(result) else result
        return tree_map_only(torch.Tensor, self._kept, result)

    def _passes(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies where other weights come to."""
        return self._workspace.holds(tensor)


def decode_for_good(refs: Sequence[ParameterRef]) -> int:
    """Decode for good what of the encoded parameters is on the device. Returns the bytes of the plain tensors."""
    decoded: dict[int, nn.Parameter] = {}
    for ref, codec in encoded(refs):
        if id(ref.tensor) not in decoded:
            assert ref.here is not None
            decoded[id(ref.tensor)] = decode(codec, ref.here)
        ref.here, ref.holder[ref.key] = None, decoded[id(ref.tensor)]
    return sum(tensor.nbytes for tensor in decoded.values())


class Cpu(Placement):
    """The unit runs where its weights are. Encoded ones are decoded there, those of one module at a time."""

    name = "cpu"
    _decoded_bytes = 0

    @property
    def host_bytes(self) -> int:
        return self._decoded_bytes

    def _place(self) -> None:
        for ref, _ in encoded(self.host_refs):
            ref.here = ref.tensor
        self._decoded_bytes = decode_for_good(self._rest)
        self._tables = [table for table in self._tables if encoded(table.refs)]
        self._place_tables()
        self._decode_calls()
        self._decoded_bytes, self.resident_bytes = self._decoded_bytes + self.resident_bytes, 0

    def _remove(self) -> None:
        self._decoded_bytes = 0
