"""Loading a module's weights straight from its files, those of each group into the flat buffer that it streams from."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from .encoding import EncodedWeight, Source, encoding_of, extents, file_bytes, holds, host_tensor, kernels_of
from .groups import CallOrder, Division, divide, unique
from .hostbuffer import allocate, can_pack, layout, place_of
from .reader import Job, Look, Reading, extents_of, read
from .stored import Stored
from .structure import ParameterRef, parameter_refs


def find_stored(module: nn.Module, stored: Mapping[str, Source]) -> dict[int, Source] | None:
    """Return the place of each parameter in files, by the `id` of its host tensor; None if not all are found.

    They are looked up under their own names. A place must hold the parameter whole and in its order of dimensions. Of
    tied parameters one name must be found. Several may have different values, so that the result is None then too.
    """
    found: dict[int, Source] = {}
    parameters, kernels = list(module.named_parameters(remove_duplicate=False)), kernels_of(module)
    for name, parameter in parameters:
        if (at := stored.get(name)) is not None:
            key = id(host_tensor(parameter))
            if not _is_whole(at, parameter, id(parameter) in kernels) or key in found:
                return None
            found[key] = replace(at, shape=tuple(parameter.shape)) if isinstance(at, Stored) else at
    return found if all(id(host_tensor(parameter)) in found for _, parameter in parameters) else None


def _is_whole(at: Source, parameter: torch.Tensor, kernel: bool) -> bool:
    """Return whether a place in a file has all the values of a parameter, in a form that it can be read in."""
    encoding = encoding_of(parameter)
    if isinstance(at, EncodedWeight):
        return encoding is not None and encoding.codec.parts == at.codec.parts
    plain = can_pack(parameter) and parameter.is_contiguous() and holds(at.shape, parameter.shape, kernel)
    castable = at.dtype == parameter.dtype or at.dtype.is_floating_point and parameter.is_floating_point()
    return encoding is None and plain and castable


def load_stored(
    module: nn.Module,
    stored: Mapping[str, Source],
    look: Look = lambda read: None,
    calls: CallOrder | None = None,
    groups: Collection[int] | None = None,
) -> bool:
    """Read weights on `meta` of a module into flat buffers, laid out as `hostbuffer.pack` would.

    All of them, or those of the `groups` of `divide`. False, and nothing is done, if not all places are found. On an
    error the module stays as it was.
    """
    found = find_stored(module, stored)
    if found is None:
        return False
    places = list(parameter_refs(module))
    divided = divide(module, places, calls or CallOrder())
    parts = _parts(divided, found) if groups is None else [divided.groups[i].stored() for i in groups]
    parts = [tensors for tensors in parts if any(tensor.is_meta for tensor in tensors)]
    new, jobs = _buffers(parts, found)
    read([job for some in jobs for job in some], look)
    _keep(places, new)
    return True


def load_behind(
    module: nn.Module,
    stored: Mapping[str, Source],
    look: Look = lambda read: None,
    calls: CallOrder | None = None,
    groups: Collection[int] | None = None,
) -> Reading | None:
    """Begin to read weights on `meta` of a module, as `load_stored` does, and return the reading.

    First come weights in no group, then the groups in call order. If only some `groups` are asked for, the reading
    starts when it is told to `begin`. The module has its buffers at once: their content is undefined until
    `Reading.wait`. None, and nothing is done, if not all places are found.
    """
    found = find_stored(module, stored)
    if found is None:
        return None
    places = list(parameter_refs(module))
    divided = divide(module, places, calls or CallOrder())
    first = len(divided.groups)
    parts = _parts(divided, found)
    parts = parts[first:] + parts[:first] if groups is None else [parts[i] for i in sorted(groups)]
    parts = [tensors for tensors in parts if any(tensor.is_meta for tensor in tensors)]
    new, jobs = _buffers(parts, found)
    _keep(places, new)
    reading = Reading(jobs, look)
    if groups is None:
        reading.begin()
    return reading


def bytes_to_read(
    module: nn.Module,
    stored: Mapping[str, Source],
    calls: CallOrder | None = None,
    groups: Collection[int] | None = None,
) -> int | None:
    """Return the bytes of files that `load_stored` would read; None if not all places are found."""
    found = find_stored(module, stored)
    if found is None:
        return None
    wanted = [ref.tensor for ref in parameter_refs(module)]
    if groups is not None:
        divided = divide(module, list(parameter_refs(module)), calls or CallOrder())
        wanted = [tensor for i in groups for tensor in divided.groups[i].stored()]
    keys = {id(tensor) for tensor in wanted if tensor.is_meta}
    return sum(file_bytes(found[key]) for key in keys & found.keys())


def _parts(divided: Division, found: Mapping[int, Source]) -> list[list[torch.Tensor]]:
    """Return the tensors that are to be read, in one list for each buffer: the groups, the tables, and the rest."""
    others = [tensor for tensor in unique(divided.rest) if id(tensor) in found]
    tables = {id(ref.tensor): [ref.tensor] for table in divided.tables for ref in table.refs}  # tied ones once
    return [*(group.stored() for group in divided.groups), *tables.values(), others]


def _buffers(
    parts: Sequence[Sequence[torch.Tensor]], found: Mapping[int, Source]
) -> tuple[dict[int, torch.Tensor], list[list[Job]]]:
    """Allocate a flat buffer for each part. Return the new tensors, by `id` of the old ones, and the reading jobs."""
    new: dict[int, torch.Tensor] = {}
    jobs: list[list[Job]] = []
    for tensors in parts:
        offsets, total = layout(tensors)
        buffer = allocate(max(1, total))
        jobs.append([])
        for tensor, offset in zip(tensors, offsets, strict=True):
            view = new[id(tensor)] = place_of(buffer, offset, tensor)
            if id(tensor) in found:
                for at, begin in extents(found[id(tensor)]):
                    jobs[-1] += [(extent, buffer) for extent in extents_of(at, tensor.dtype, offset + begin)]
            else:
                view.copy_(tensor)  # a buffer, which the module has already
    return new, jobs


def _keep(places: Sequence[ParameterRef], new: Mapping[int, torch.Tensor]) -> None:
    """Replace the host tensors of the references by the new ones."""
    for ref in places:
        if id(ref.tensor) in new:
            ref.keep(new[id(ref.tensor)])


class Interruptible(TorchDispatchMode):
    """Calls `look` at every operator of this thread: the loaders of diffusers and transformers take no callback."""

    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look
        self._raised: BaseException | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._raised is None:  # else a library is cleaning up after the first error
            try:
                self._look(0)
            except BaseException as error:
                self._raised = error
                raise
        return func(*args, **(kwargs or {}))

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        raised, self._raised = self._raised, None
        if raised is not None and raised is not error:  # a library has caught it and raised another
            raise raised from None
