"""ManagedModel: one module whose weights move between disk, host and device. The project calls it a unit.

The module object itself stays. On the disk tier its parameters are on `meta`. On the host tier they are CPU tensors,
all or those of some weight groups, which stay the truth. On the device tier they are, wholly or in part, device copies.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import threading
import weakref
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ...collector import paused_collector
from ..errors import release_frames
from ..vocabulary import ROLES, Role, Tier
from .branches import ActiveAdapters, attach, attach_shapes, detach, keys_of, set_strengths
from .conversion import Begin, Conversion, note_use, unwritten_bytes, write_conversion
from .encoding import Source, file_bytes, host_tensor, mark_encoded, unmark_encoded
from .groups import CallOrder, GroupWeights, divide
from .loading import Interruptible, bytes_to_read, find_stored, load_behind, load_stored
from .reader import Look, Reading
from .stored import disk_number, is_unchanged
from .structure import ParameterRef, empty_on_meta, parameter_refs

if TYPE_CHECKING:
    from ..codecs.converters import Converter
    from ..engine.placement import Placement

# Hold this while building a module on `meta`: accelerate and the libraries' loaders patch torch for the whole process.
building = threading.RLock()


class ManagedModel:
    """A unit: a module, its role, where its weights are now, and how to read them again.

    `build` returns the module's structure with parameters on `meta`. `read` returns a module of the same structure with
    its weights on the CPU. It is None for a module that exists in memory only, which is never dropped. `stored` returns
    the places of weights in files, by name. If it names them all they are read from there, and `read` is not called.
    All three are called when they are first needed.

    `label` tells units of several pipelines apart. `key` identifies the model, so that all pipelines that run it share
    one unit (see `MemoryManager.claim`).

    With a `conversion`, plain weights are converted once, into a file that the unit runs from. `convert` writes it.
    """

    def __init__(
        self,
        name: str,
        role: Role,
        build: Callable[[], nn.Module],
        read: Callable[[], nn.Module] | None = None,
        label: str = "",
        stored: Callable[[], Mapping[str, Source]] | None = None,
        key: Hashable = None,
    ) -> None:
        if role not in ROLES:
            raise ValueError(f"unknown role {role!r} of {name!r}. Roles are {', '.join(ROLES)}.")
        self.name = name
        self.role: Role = role
        self.label = label
        self.key = key
        self.owners: weakref.WeakSet[Any] = weakref.WeakSet()  # pipelines that have claimed it
        self.placement: Placement | None = None
        self.pinned = False
        self.leases = 0
        self.last_use = 0
        self.stages = 0  # stages that run it now, one inside the other
        self.runs_partly = False  # the present call leaves modules out: no other call is to be judged by it
        self.calls = CallOrder()  # as far as dry runs have seen the calls
        self.batch_dims: Mapping[str, int] = {}  # argument -> its batch dimension, where it is not the first
        self._build = build
        self._read = read
        self._stored = stored
        self._calls_parts = False
        self.conversion: Conversion | None = None  # set before the module is first asked for
        self._converted: Mapping[str, Source] | None = None  # the places of weights, those of the conversion included
        self._module: nn.Module | None = None
        self._on_host = False
        self._held: dict[int, int] = {}  # group in RAM -> its bytes, where RAM does not hold all weights
        self._held_calls = CallOrder()  # the calls that these groups were divided by
        self._coming: frozenset[int] = frozenset()  # groups of `_held` that the reading brings
        self.reading: Reading | None = None  # the reading to RAM that is under way
        self._adapters: ActiveAdapters = ()
        self._size_bytes: int | None = None  # cached: it is asked for often, and modules have thousands of parameters

    @classmethod
    def from_module(cls, name: str, role: Role, module: nn.Module) -> ManagedModel:
        """Return a unit around a module that is in memory already, on the CPU."""
        unit = cls(name, role, build=lambda: module)
        unit.module.requires_grad_(False)
        unit._on_host = True
        return unit

    @property
    def module(self) -> nn.Module:
        """The one module object of this unit, on every tier. Built at the first call."""
        with building:
            if self._module is None:
                stored = self._stored() if self._stored else {}  # here: in `_apart`'s thread it would wait for the lock
                module = _apart(lambda: self._mark(self._build(), stored)).eval()
                module.__class__ = _located(type(module), self._calls_parts)  # type: ignore[arg-type]
                self._module = module
                self.runs_on(torch.device("cpu"))
        return self._module

    def _mark(self, module: nn.Module, stored: Mapping[str, Source]) -> nn.Module:
        """Mark the parameters that are stored encoded, or are to be. `stored` are places in the model's own files."""
        mark_encoded(module, stored)
        if self.conversion and find_stored(module, stored) is not None:
            self._converted = self.conversion.places(module, stored)
            mark_encoded(module, self._converted)
        return module

    def _places(self) -> Mapping[str, Source]:
        """Return the places of weights in files, by name; empty if they are not known."""
        if self._converted is not None:
            return self._converted
        return self._stored() if self._stored else {}

    @property
    def unconverted_bytes(self) -> int:
        """Bytes of the converted weights that are to be written, as planned; 0 if the file is there or none wanted."""
        _ = self.module  # which looks for the file
        return unwritten_bytes(self._places())

    def is_converted(self) -> bool:
        """Return whether the file of the conversion, if there is one, is written and unchanged. Note its use."""
        if self.conversion is None:
            return True
        _, path = self.module, self.conversion.path
        note_use(path)
        return all(is_unchanged(path, at.stamp) for at in self._places().values() if at.path == path)

    def convert(self, begin: Begin) -> None:
        """Write the file of the conversion if it is missing, and run from it from now on. The host copy is dropped.

        `begin` is as in `write_conversion`. Raises OSError, in one line, if the disk has no room. RuntimeError for a
        unit in place.
        """
        if self.conversion is None or self._stored is None:
            return
        stored = self._stored()
        self.drop()
        self._mark_again(stored)  # another process may have written it
        if self.unconverted_bytes:
            write_conversion(self.conversion.path, self.module, stored, self.conversion.converter, begin)
            self._mark_again(stored)
            if self.unconverted_bytes:
                raise OSError(f"{self.conversion.path} was damaged as soon as it was written. Check the disk.")

    def _mark_again(self, stored: Mapping[str, Source]) -> None:
        """Mark the encoded parameters by what is in the files now. No weights may be in RAM."""
        module = self.module
        unmark_encoded(module)
        _apart(lambda: self._mark(module, stored))
        self._size_bytes = None

    def write_converted(self, path: Path, converter: Converter, begin: Begin) -> int:
        """Write all weights to a file, converted where that makes them smaller. Return its bytes.

        For a unit without a `conversion`. Raises ValueError, in one line, for weights that are quantized already.
        """
        stored = self._stored() if self._stored else {}
        if find_stored(self.module, stored) is None:
            raise ValueError(f"{self.name} is not read from its files as they are, and cannot be converted.")
        return write_conversion(path, self.module, stored, converter, begin, whole=True)

    def skeleton(self) -> nn.Module:
        """Return the structure once more, with parameters on `meta`, for a run on shapes.

        RuntimeError for a unit made of a module in memory, which cannot be built again.
        """
        if self._on_host and self._read is None:
            raise RuntimeError(f"{self.name} is a module in memory, and cannot be built once more.")
        with building:
            module = _apart(self._shapes).eval()
        module.__class__ = _located(type(module), self._calls_parts)  # type: ignore[arg-type]
        vars(module)["_runs_on"] = torch.device("meta")
        return module

    def _shapes(self) -> nn.Module:
        """Build the structure with the branches of the active adapters."""
        module = self._build()
        attach_shapes(module, self._adapters)
        return module

    def call_parts(self) -> None:
        """Let a call of the module with `call_part="model"` run that part of it alone, as any call of this unit runs.

        Code of diffusers calls parts by themselves, and weights come when the module is called.
        """
        if not self._calls_parts:
            self._calls_parts, module = True, self.module
            module.__class__ = _located(type(module), True)  # type: ignore[arg-type]

    def double(self) -> nn.Module:
        """Return a shallow copy of the module without wrappers of its `forward`, for a run on shapes."""
        double = copy.copy(self.module)
        vars(double).pop("forward", None)
        vars(double)["_runs_on"] = torch.device("meta")
        return double

    @property
    def active_adapters(self) -> ActiveAdapters:
        """The adapters that the unit runs with, each with its strength."""
        return self._adapters

    def set_adapters(self, adapters: ActiveAdapters) -> None:
        """Run with these adapters, which must fit, and no others. A new strength alone moves nothing.

        Their bytes count with the weights, and stay in RAM as long as they are active. RuntimeError if other adapters
        are set while the unit is on the device.
        """
        if keys_of(adapters) != keys_of(self._adapters):
            if self.placement is not None:
                raise RuntimeError(f"{self.name} is in use, and keeps its LoRAs meanwhile.")
            before = self.size_bytes - self.branch_bytes
            detach(self.module)
            attach(self.module, adapters)
            self._adapters = tuple(adapters)
            self._size_bytes = before + self.branch_bytes
        elif adapters:
            set_strengths(self.module, adapters)
        self._adapters = tuple(adapters)

    def clear_adapters(self) -> None:
        """Run with no adapters. The garbage collector may call this in any thread, so it takes no lock.

        Does nothing for a unit in place.
        """
        if self._adapters and self._module is not None and self.placement is None:
            left = self._size_bytes and self._size_bytes - self.branch_bytes
            detach(self._module)
            self._adapters, self._size_bytes = (), left

    @contextlib.contextmanager
    def without_adapters(self) -> Iterator[None]:
        """Show dry runs the unit without adapters, until the block ends. No other stage may run meanwhile.

        The module itself keeps its branches.
        """
        adapters, self._adapters = self._adapters, ()
        try:
            yield
        finally:
            self._adapters = adapters

    @property
    def branch_bytes(self) -> int:
        """Bytes of the active adapters."""
        return sum(adapter.nbytes for adapter, _ in self._adapters)

    def learn(self, seen: CallOrder) -> None:
        """Add the calls that a dry run saw to those known. The known order stays, and new paths come behind it."""
        known, there = self.calls, set(self.calls.order)
        order = (*known.order, *(path for path in seen.order if path not in there))
        self.calls = replace(known, order=order, whole=known.whole | seen.whole, outside=known.outside | seen.outside)

    def runs_on(self, device: torch.device) -> None:
        """Set the device that `module.device` reports: callers send inputs there, wherever the weights are."""
        vars(self.module)["_runs_on"] = device

    @property
    def reported_device(self) -> torch.device:
        """The device that `module.device` reports, as set by `runs_on`."""
        return vars(self.module)["_runs_on"]

    @property
    def tier(self) -> Tier:
        """Where the weights are now."""
        if self.placement is not None and self.placement.on_device:
            return "device"
        return "host" if self._on_host or self._held else "disk"

    @property
    def size_bytes(self) -> int:
        """Bytes of all weights and buffers as they are held, adapters included; tied ones count once."""
        if self._size_bytes is None:
            self._size_bytes = sum({id(ref.tensor): ref.tensor.nbytes for ref in self._host_refs()}.values())
        return self._size_bytes

    @property
    def resident_bytes(self) -> int:
        """Bytes of weights on the device now."""
        return self.placement.resident_bytes if self.placement and self.placement.on_device else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of RAM taken now, staging buffers of the placement included."""
        weights = self.size_bytes if self._on_host else sum(self._held.values())
        return weights + (self.placement.host_bytes if self.placement else 0)

    @property
    def disk(self) -> int | None:
        """The device number of the disk that the weights are read from; None if no file is known, or it is gone."""
        numbers = (disk_number(path) for path in {at.path: None for at in self._places().values()})
        return next((number for number in numbers if number is not None), None)  # a file may not be written yet

    @property
    def in_ram(self) -> bool:
        """Return whether RAM holds all weights, or is being filled with all."""
        return self._on_host

    @property
    def held(self) -> frozenset[int]:
        """The numbers of the weight groups in RAM, or being read to it, where it does not hold all weights.

        Empty if the module is divided by other calls now.
        """
        return frozenset(self._held if self._held_calls == self.calls else ())

    @property
    def is_cached(self) -> bool:
        """Return whether all its claimants are gone, so that it is only kept in case somebody claims it again."""
        return self.key is not None and next(iter(self.owners), None) is None

    @property
    def reloadable(self) -> bool:
        """Return whether the host copy may be dropped, since it can be read again."""
        return self._read is not None

    def load(self, look: Look = lambda read: None, behind: bool = False) -> int:
        """Bring all weights from disk to RAM. Return the bytes of files that are read; 0 if they are there already.

        `look` is called meanwhile with the bytes read so far, or 0 where they are not known. An error that it raises
        ends the reading, and nothing read stays.

        With `behind` this returns at once where it can, with a `reading` under way. Wait for that before weights are
        used.
        """
        if self._on_host or self._read is None:
            if not behind:
                self.await_reading()
            return 0
        if behind and (coming := self.read_ahead(look)):
            return coming
        coming = self.bytes_to_read()
        try:
            if not self._places() or not load_stored(self.module, self._places(), look, self.calls):
                with building, torch.inference_mode(), Interruptible(look):
                    _adopt_tensors(self.module, self._read(), self.name)
        except BaseException as error:
            release_frames(error)  # the traceback would keep the weights read so far in RAM
            raise
        self._is_in_ram()
        return coming

    def bytes_to_read(self, groups: Collection[int] | None = None) -> int:
        """Return the bytes of files that `load` would read, or `hold` for these groups.

        The bytes of weights if the places in files are not known.
        """
        if self._on_host or self._read is None:
            return 0
        missing = None if groups is None else set(groups) - self.held
        told = bytes_to_read(self.module, self._places(), self.calls, missing) if self._places() else None
        return self.size_bytes - self.branch_bytes if told is None else told

    def read_ahead(self, look: Look = lambda read: None) -> int:
        """Begin to read all weights to RAM, and return the bytes of files that come.

        0, and nothing is done, if they are there or only `load` can read them.
        """
        if self._on_host or self._read is None or not self._places() or self.unconverted_bytes:
            return 0
        coming = self.bytes_to_read()
        self.reading = load_behind(self.module, self._places(), look, self.calls)
        if not self.reading:
            return 0
        self._is_in_ram()
        return coming

    def _is_in_ram(self) -> None:
        """Note that RAM holds all weights, or will when the reading ends."""
        self._on_host, self._size_bytes, self._held_calls = True, None, self.calls
        self._held.clear()

    def await_reading(self) -> None:
        """Wait until the reading has ended. Raises its error, after giving up the reading."""
        if self.reading is None:
            return
        try:
            self.reading.wait()
        except BaseException:
            self.give_up_reading()
            raise
        self.forget_reading()

    def forget_reading(self) -> None:
        """Forget the reading if it has ended well."""
        if self.reading and self.reading.done:
            self.reading = None

    def give_up_reading(self) -> None:
        """Cancel a reading, with all that it has read. Does nothing if it has ended well, or the unit is in place."""
        self.forget_reading()
        if self.reading and self.placement is None:
            there = set(self._held) - self._coming
            self.reading.close()
            self.reading = None
            self.keep(there) if there else self.drop()

    def hold(self, groups: Collection[int], look: Look = lambda read: None, behind: bool = False) -> int:
        """Bring these weight groups to RAM, beside those that are there. Return the bytes of files that are read.

        `groups` are numbers in the division by `calls`; `look` and `behind` are as in `load`. For units with a `source`
        whose weights are not all in RAM.
        """
        if self._held and self._held_calls != self.calls:
            self.drop()
        if set(groups) - set(self._held) or not behind:
            self.await_reading()
        missing = sorted(set(groups) - set(self._held))
        if self._on_host or not missing or not self._places():
            return 0
        coming = self.bytes_to_read(missing)
        if behind:
            self.reading = load_behind(self.module, self._places(), look, self.calls, missing)
            self._coming = frozenset(missing)
        if self.reading is None:
            try:
                load_stored(self.module, self._places(), look, self.calls, missing)
            except BaseException as error:
                release_frames(error)
                raise
        divided = self._groups()
        self._held |= {i: divided[i].stored_bytes for i in missing}
        self._held_calls = self.calls
        return coming

    def keep(self, groups: Collection[int]) -> int:
        """Drop everything in RAM but these weight groups. Return the bytes freed.

        Everything is dropped if the division has changed, or a reading brings other groups. RuntimeError for a unit in
        place.
        """
        if not (self._on_host or self._held) or self._held_calls != self.calls or self.source() is None:
            return self.drop()
        self._refuse_if_placed()
        self.forget_reading()
        if self.reading and not self._on_host and set(self._held) <= set(groups):
            return 0
        if self.reading:
            return self.drop()
        before, divided = self.host_bytes, self._groups()
        kept = {i: divided[i].stored_bytes for i in groups if self._on_host or i in self._held}
        self._leave([ref for i in kept for ref in divided[i].refs])
        self._held, self._held_calls, self._on_host = kept, self.calls, False
        return before - self.host_bytes

    def _groups(self) -> list[GroupWeights]:
        """Return the weight groups of the module by the calls known now."""
        return divide(self.module, list(parameter_refs(self.module)), self.calls).groups

    def source(self) -> Mapping[str, Source] | None:
        """Return the places of the weights in files, for an engine that runs from there.

        None if only `load` can read them. Raises ValueError if a file is damaged.
        """
        stored = self._places()
        return stored if stored and find_stored(self.module, stored) is not None else None

    def file_bytes(self) -> dict[int, int]:
        """Return the bytes of files of each tensor that has a place there, by the `id` of its host tensor."""
        stored = self._places()
        named = self.module.named_parameters(remove_duplicate=False)
        return {id(host_tensor(each)): file_bytes(at) for name, each in named if (at := stored.get(name)) is not None}

    def is_stale(self) -> bool:
        """Return whether a file that it is read from has changed or is gone."""
        places = {(at.path, at.stamp) for at in self._places().values()}
        return any(not is_unchanged(path, stamp) for path, stamp in places)

    def drop(self, nbytes: int | None = None) -> int:
        """Drop the host copy, or whole weight groups of it until `nbytes` are free. Return the bytes freed.

        They are read again when needed. 0 for a module that exists in memory only. RuntimeError for a unit in place.
        """
        if not (self._on_host or self._held) or self._read is None:
            return 0
        self._refuse_if_placed()
        freed = self.host_bytes
        self.forget_reading()
        if self.reading:
            self.reading.close()
            self.reading = None
        elif nbytes is not None and nbytes < freed and self.source() is not None:
            return self._drop_some(nbytes)
        self._leave([])
        self._on_host, self._size_bytes = False, None
        self._held.clear()
        return freed

    def _drop_some(self, nbytes: int) -> int:
        """Drop `nbytes`: first the weights in no group, then groups from the last."""
        if self._held_calls != self.calls:
            return self.drop()
        divided, left = self._groups(), self.host_bytes - nbytes
        kept: list[int] = []
        for i in sorted(range(len(divided)) if self._on_host else self._held):
            if (left := left - divided[i].stored_bytes) < 0:
                break
            kept.append(i)
        return self.keep(kept)

    def _refuse_if_placed(self) -> None:
        if self.placement is not None:
            raise RuntimeError(f"{self.name} is in use and cannot be dropped to disk.")

    def _leave(self, staying: list[ParameterRef]) -> None:
        """Put all weights on `meta` but those of the `staying` references and of adapters."""
        stay = {id(ref.tensor) for ref in staying}
        left: dict[int, torch.Tensor] = {}  # tied ones stay tied
        for ref in list(parameter_refs(self.module)):
            if id(ref.tensor) in stay or ref.is_branch:
                continue
            if id(ref.tensor) not in left:
                left[id(ref.tensor)] = _without_weights(ref)
            ref.keep(left[id(ref.tensor)])

    def _host_refs(self) -> Iterator[ParameterRef]:
        return iter(self.placement.host_refs) if self.placement else parameter_refs(self.module)

    def __repr__(self) -> str:
        return f"<{self.role} {self.label + '/' if self.label else ''}{self.name}, {self.tier}>"


def _apart(build: Callable[[], nn.Module]) -> nn.Module:
    """Build in a thread of its own, without the torch modes of the caller.

    In a dry run these would take tensors made on `meta` for tensors of the simulated card.
    """
    with paused_collector(), ThreadPoolExecutor(1) as thread:
        return thread.submit(build).result()


@functools.cache
def _located(cls: type[nn.Module], calls_parts: bool) -> type[nn.Module]:
    """Return a subclass of `cls` whose `device` is the one set by `runs_on`; for `calls_parts` see `call_parts`.

    Diffusers' own device is that of the first parameter, which may be on `meta`.
    """
    device = property(lambda module: vars(module)["_runs_on"])
    own = {"__module__": cls.__module__, "__doc__": cls.__doc__, "device": device}

    @functools.wraps(cls.forward)
    def forward(module: nn.Module, *args: Any, call_part: str = "", **kwargs: Any) -> Any:
        return module.get_submodule(call_part)(*args, **kwargs) if call_part else cls.forward(module, *args, **kwargs)

    return type(cls.__name__, (cls,), own | ({"forward": forward} if calls_parts else {}))


def _without_weights(ref: ParameterRef) -> torch.Tensor:
    """Return the stand-in of a tensor on the disk tier: a parameter on `meta`, or a buffer in memory of its own."""
    tensor = ref.tensor
    with torch.inference_mode(False), torch.no_grad():
        if ref.shown is not None:
            return empty_on_meta(tensor)
        if isinstance(tensor, nn.Parameter):
            return nn.Parameter(empty_on_meta(tensor), requires_grad=False)
        return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _adopt_tensors(module: nn.Module, source: nn.Module, name: str) -> None:
    """Make `module` hold the tensors of `source`, not copies. ValueError if their structures differ."""
    ours, theirs = dict(module.named_modules()), dict(source.named_modules())
    for path, owner in theirs.items():
        target = ours.get(path)
        if target is None or target._parameters.keys() != owner._parameters.keys():
            raise ValueError(f"the weights of {name} do not match its config at {path or 'the top'!r}.")
        target._parameters.update(owner._parameters)
        target._buffers.update(owner._buffers)
    module.requires_grad_(False)
