"""Convert plain weights to another form: written once to an ordinary safetensors file, which the module then runs from.

The file is in ComfyUI's layout (see `codecs.comfy`). Until it exists, the places of its weights are planned from their
shapes, so that a run can be planned without writing anything.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import shutil
import struct
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..codecs.codec import Codec
from ..codecs.comfy import METADATA, stored_form
from ..codecs.converters import Converter
from ..errors import is_out_of_ram
from ..files import replacing
from ..sizes import format_bytes
from . import direct
from .encoded import sources_of
from .encoding import EncodedWeight, Source, file_bytes
from .hostbuffer import allocate, view_of
from .reader import batches, extents_of, fill_batch
from .stored import DTYPE_NAMES, Stored

log = logging.getLogger("ballast")

_LAYERS = (nn.Linear, nn.Conv2d, nn.Conv3d)  # whose weights are worth converting
_UNWRITTEN = (-1, -1)  # stamp of weights in a file that is not written yet: no file ever has it
_MOST_THREADS = 4
_AT_ONCE_BYTES = 256 * 2**20  # of plain weights that are read and encoded at the same time, or one larger weight
_ENTRY_BYTES = 128  # of the header for one tensor or configuration, without its name
_SPARE_BYTES = 2**30  # to leave free on the disk
_NAME = re.compile("-[0-9a-f]{32}$")
MAX_BYTES = 64 * 2**30  # of all files in the cache: several of the largest models
_IN_USE_SECONDS = 3600  # another process that began a run within this time may still read its file

# Of one weight: the configuration of its layer if it is encoded, and (dtype, shape, content) of each tensor by name.
_Written = tuple[dict[str, Any], dict[str, tuple[str, tuple[int, ...], torch.Tensor]]]
# Called with the bytes to read and, about, those to write. Returns a call that is told of the bytes read so far.
Begin = Callable[[int, int], Callable[[int], None]]


@dataclass(frozen=True)
class Conversion:
    """The form that the plain weights of a unit are converted to, and the file in the cache that holds them then."""

    converter: Converter
    path: Path

    def places(self, module: nn.Module, stored: Mapping[str, Source]) -> dict[str, Source]:
        """Return `stored` with the converted weights in place of the plain ones: from the file, or as planned.

        A damaged file is deleted with a warning.
        """
        planned = _planned(module, stored, self.converter)
        found: Mapping[str, Source] | None = None
        try:
            found = sources_of(self.path, torch.bfloat16) if planned else {}
            note_use(self.path)
        except FileNotFoundError:
            pass
        except (ValueError, OSError) as error:
            log.warning("Ballast: dropping damaged weights, %s (%s)", self.path.name, error)
            with contextlib.suppress(OSError):
                self.path.unlink()
        if found is None:
            found = {name: _unwritten(self.path, codec) for name, (_, codec) in planned.items()}
        tied = _tied_names(module)
        replaced = {other for name in found for other in tied.get(name, ())}
        return {name: at for name, at in stored.items() if name not in replaced} | dict(found)


def unwritten_bytes(places: Mapping[str, Source]) -> int:
    """Return the bytes of the places that are planned in a file which is not written yet."""
    return sum(file_bytes(at) for at in places.values() if at.stamp == _UNWRITTEN)


def planned_codecs(module: nn.Module, converter: Converter) -> dict[str, Codec]:
    """Return the codec of each weight that converting makes smaller, by name; that of exact12 is an estimate.

    They are the weights of linear layers and convolutions. A module that is one itself is left as it is.
    """
    found: dict[int, tuple[str, Codec]] = {}
    for path, owner in module.named_modules():
        weight = owner._parameters.get("weight")
        if isinstance(owner, _LAYERS) and path and weight is not None and weight.is_contiguous():
            found.setdefault(id(weight), (f"{path}.weight", converter.planned(tuple(weight.shape), weight.dtype)))
    return {name: codec for name, codec in found.values() if codec.name != "raw"}


def _planned(module: nn.Module, stored: Mapping[str, Source], converter: Converter) -> dict[str, tuple[Stored, Codec]]:
    """Return the place and the codec of each weight that is to be converted: of those that are stored plain."""
    tied = _tied_names(module)
    found = {}
    for name, codec in planned_codecs(module, converter).items():
        at = next((stored[other] for other in tied[name] if other in stored), None)
        if isinstance(at, Stored):
            found[name] = at, codec
    return found


def note_use(path: Path) -> None:
    """Set the file's access time to now, for `trim`. The modification time stays: it is part of the file's stamp.

    Does nothing where this process may not write.
    """
    with contextlib.suppress(OSError):
        os.utime(path, ns=(time.time_ns(), path.stat().st_mtime_ns))


def trim(folder: Path, in_use: Collection[Path]) -> None:
    """Remove the least recently used files of `folder` beyond `MAX_BYTES`.

    Files in use here, or used within the last hour by any process, are kept.
    """
    entries = []
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(OSError):  # another process trims as well
            stat = path.stat()
            if _NAME.search(path.stem):  # ours: somebody may keep other files in the folder
                entries.append((max(stat.st_atime, stat.st_mtime), stat.st_size, path))
    held = sum(size for _, size, _ in entries)
    for used, size, path in sorted(entries):
        if held <= MAX_BYTES:
            break
        if path not in in_use and time.time() - used > _IN_USE_SECONDS:
            with contextlib.suppress(OSError):
                path.unlink()
                held -= size
                log.warning("Ballast: removed %s, converted weights that were not used for long", path)


def write_conversion(
    path: Path, module: nn.Module, stored: Mapping[str, Source], converter: Converter, begin: Begin, whole: bool = False
) -> int:
    """Convert the weights of a module into a file, a few at a time. Return the bytes of the file.

    `stored` has their places in the model's own files. With `whole` the file holds those too that stay as they are. An
    error from what `begin` returns ends the writing, and leaves no file. Raises OSError, in one line, if the disk has
    no room. ValueError for a `whole` file of weights that are encoded already.
    """
    planned = _planned(module, stored, converter)
    jobs = [
        _Job(name, at, torch.empty(codec.shape, dtype=codec.dtype, device="meta"), codec)
        for name, (at, codec) in planned.items()
    ]
    if whole:
        jobs = _as_it_is(module, stored, planned) + jobs
    wanted = sum(job.written_bytes for job in jobs)
    _check_room(path, wanted)
    tell = begin(sum(job.plain_bytes for job in jobs), wanted)
    reserved = _ENTRY_BYTES + sum(job.entries * (_ENTRY_BYTES + len(job.name)) for job in jobs)
    header: dict[str, Any] = {}
    layers: dict[str, Any] = {}
    end = so_far = 0
    try:
        # `first`: if another process has written the same file meanwhile, it may be reading it already.
        with replacing(path, first=not whole) as part, part.open("wb") as file:
            file.seek(8 + reserved)
            with contextlib.closing(_converted(jobs, converter, whole)) as found:
                for job, (config, tensors) in found:
                    if config:
                        layers[job.name.removesuffix(".weight")] = config
                    for name, (kind, shape, content) in tensors.items():
                        if content.numel():  # torch shows no empty tensor as bytes
                            file.write(content.contiguous().view(-1).view(torch.uint8).numpy().data)
                        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + content.nbytes]}
                        end += content.nbytes
                    so_far += job.plain_bytes
                    tell(so_far)
            metadata = {"format": "pt", METADATA: json.dumps({"layers": layers})}
            text = json.dumps({"__metadata__": metadata, **header}, separators=(",", ":")).encode()
            if len(text) > reserved:
                raise ValueError(f"the header of {path} has {len(text)} bytes, more than the {reserved} planned.")
            file.seek(0)
            file.write(struct.pack("<Q", reserved) + text.ljust(reserved))
    except OSError as error:
        if error.errno is None or is_out_of_ram(error):  # it says in one line which file cannot be read
            raise
        raise _refused(path, wanted, error.strerror or str(error)) from error
    return 8 + reserved + end


@dataclass(frozen=True)
class _Job:
    """One weight to write: its place in the model's own files, and a tensor of the shape and dtype to read it in.

    `codec` is the planned one, None for a weight that stays as it is.
    """

    name: str
    at: Stored
    like: torch.Tensor
    codec: Codec | None = None

    @property
    def plain_bytes(self) -> int:
        return self.like.nbytes

    @property
    def entries(self) -> int:
        """Entries of the header: one for each tensor, and one for the configuration."""
        return 1 + len(self.codec.parts) if self.codec else 1

    @property
    def written_bytes(self) -> int:
        return self.codec.encoded_bytes if self.codec else self.plain_bytes


def _as_it_is(module: nn.Module, stored: Mapping[str, Source], others: Collection[str]) -> list[_Job]:
    """Return the weights beside `others`, and the saved buffers, in the dtype of their file, the widest dtype first.

    So all of them lie at multiples of their items.
    """
    found = []
    done = {id(module.get_parameter(name)) for name in others}
    for name, tensor in (*module.named_parameters(remove_duplicate=False), *module.named_buffers()):
        if id(tensor) in done or (at := stored.get(name)) is None:
            continue
        if isinstance(at, EncodedWeight):
            raise ValueError(f"{at.path} is quantized already: {name} is {at.codec.name}. Convert the plain model.")
        done.add(id(tensor))
        found.append(_Job(name, at, torch.empty(tensor.shape, dtype=at.dtype, device="meta")))
    return sorted(found, key=lambda job: -job.like.itemsize)


def _converted(jobs: Sequence[_Job], converter: Converter, whole: bool) -> Generator[tuple[_Job, _Written], None, None]:
    """Yield each job with what is to be written, in order. A few threads share the work.

    At any time `_AT_ONCE_BYTES` of plain weights are in RAM with their encoded form, or one that is larger.
    """
    waiting: deque[tuple[_Job, Future[_Written]]] = deque()
    threads, held = min(_MOST_THREADS, os.cpu_count() or 1), 0
    pool = ThreadPoolExecutor(threads, "ballast-converter")
    try:
        for job in jobs:
            while waiting and (len(waiting) > threads or held + job.plain_bytes > _AT_ONCE_BYTES):
                done, future = waiting.popleft()
                held -= done.plain_bytes
                yield done, future.result()
            held += job.plain_bytes
            waiting.append((job, pool.submit(_convert, job, converter, whole)))
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


@torch.inference_mode(False)
@torch.no_grad()
def _convert(job: _Job, converter: Converter, whole: bool) -> _Written:
    """Read one weight, and encode it. One that encoding does not shrink is written as it is in a `whole` file."""
    flat = allocate(max(1, job.plain_bytes))
    work = batches((extent, flat) for extent in extents_of(job.at, job.like.dtype, 0))
    room = direct.chunk_bytes(sum(extent.stored_bytes for batch in work for extent, _ in batch))
    for batch in work:
        fill_batch(batch, room)
    weight = view_of(flat, 0, job.like)
    if job.codec:
        codec, parts = converter.encode(weight)
        if codec.name != "raw":
            return stored_form(job.name.removesuffix(".weight"), codec, parts)
        if not whole:
            return {}, {}
    return {}, {job.name: (DTYPE_NAMES[weight.dtype], tuple(weight.shape), weight)}


def _check_room(path: Path, wanted: int) -> None:
    """Make the folder of the file. Raises OSError, in one line, if its disk has no room for the file."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(path.parent).free
    except OSError as error:
        raise _refused(path, wanted, error.strerror or str(error)) from error
    if free < wanted + _SPARE_BYTES:
        raise _refused(path, wanted, f"{format_bytes(free)} are free, of which 1 GB is left to others")


def _refused(path: Path, wanted: int, why: str) -> OSError:
    return OSError(
        f"the converted weights, {format_bytes(wanted, up=True)}, cannot be written to {path.parent} ({why}). Make "
        "room there, name another folder, or leave the weights as they are stored."
    )


def _unwritten(path: Path, codec: Codec) -> EncodedWeight:
    """Return the place of a weight in a file that is not written yet."""
    return EncodedWeight(codec, tuple(Stored(path, 0, part.dtype, (part.count,), _UNWRITTEN) for part in codec.parts))


def _tied_names(module: nn.Module) -> dict[str, list[str]]:
    """Return all names of each parameter of a module, by each of them."""
    names: dict[int, list[str]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return {name: same for same in names.values() for name in same}
