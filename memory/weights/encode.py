"""Plain weights that are encoded while they are read, a group at a time in each of a few threads."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from ..codecs.codec import Codec, Encoded
from . import direct
from .encoding import Encoding, Source, extents, part_spans
from .hostbuffer import allocate, layout, pack, place_of
from .reader import batches, extents_of, fill_batch
from .structure import ParameterRef

_MOST_THREADS = 4  # each holds a group both plain and encoded

Made = tuple[Codec | None, torch.Tensor]  # the codec, None for a plain tensor, and the host's tensor


def making(
    groups: Sequence[Sequence[torch.Tensor]],
    places: Sequence[ParameterRef],
    found: Mapping[int, Source],
    look: Callable[[int], None],
) -> Generator[dict[int, Made], None, None]:
    """Yield the host's new tensors for each of `groups`, in one flat buffer, by `id` of the old ones. Changes nothing.

    `places` are references to all weights, `found` has the place in files by `id`. `look` is called between groups with
    the bytes read so far. An error that it raises ends the reading, and so does closing the generator.
    """
    encodings = {id(ref.tensor): (ref.encoding, ref.shown) for ref in places if ref.encoding}
    waiting: deque[Future[tuple[dict[int, Made], int]]] = deque()
    so_far, threads = 0, min(_MOST_THREADS, os.cpu_count() or 1)
    pool = ThreadPoolExecutor(threads, "ballast-encoder")

    def finish() -> dict[int, Made]:
        nonlocal so_far
        made, nbytes = waiting.popleft().result()
        so_far += nbytes
        look(so_far)
        return made

    try:
        for tensors in groups:
            waiting.append(pool.submit(_make, tensors, encodings, found))
            if len(waiting) > threads:
                yield finish()
        while waiting:
            yield finish()
    finally:
        pool.shutdown(cancel_futures=True)


@torch.inference_mode(False)
@torch.no_grad()
def _make(
    tensors: Sequence[torch.Tensor],
    encodings: Mapping[int, tuple[Encoding, torch.Tensor | None]],
    found: Mapping[int, Source],
) -> tuple[dict[int, Made], int]:
    """Read the plain weights of one group and encode those that have a maker. Return them, and the bytes read."""
    plain = []  # shapes and types as in the files; the module's own buffers as they are
    for tensor in tensors:
        encoding, shown = encodings.get(id(tensor), (None, None))
        plain.append(shown if encoding and encoding.maker and shown is not None else tensor)
    offsets, total = layout(plain)
    buffer, jobs = allocate(max(1, total)), []
    for tensor, like, offset in zip(tensors, plain, offsets, strict=True):
        if id(tensor) not in found:
            place_of(buffer, offset, like).copy_(like)
            continue
        for at, begin in extents(found[id(tensor)]):
            jobs += [(extent, buffer) for extent in extents_of(at, like.dtype, offset + begin)]
    work = batches(jobs)
    room = direct.chunk_bytes(sum(extent.stored_bytes for batch in work for extent, _ in batch))
    for batch in work:
        fill_batch(batch, room)
    views = [place_of(buffer, offset, like) for like, offset in zip(plain, offsets, strict=True)]
    codecs: list[Codec | None] = []
    for i, tensor in enumerate(tensors):
        encoding, _ = encodings.get(id(tensor), (None, None))
        codecs.append(encoding.codec if encoding else None)
        if encoding and encoding.maker:
            codecs[i], views[i] = _flat(encoding.maker.encode(views[i]))
    held = pack(views)[1]
    read = sum(extent.stored_bytes for extent, _ in jobs)
    return {id(tensor): made for tensor, made in zip(tensors, zip(codecs, held, strict=True), strict=True)}, read


def _flat(encoded: Encoded) -> tuple[Codec, torch.Tensor]:
    """Return an encoded weight as its codec and one flat tensor of its parts."""
    codec, parts = encoded
    spans, total = part_spans(codec)
    flat = torch.zeros(total, dtype=torch.uint8)
    for part, (begin, end) in zip(parts, spans, strict=True):
        if part.numel():
            flat[begin:end] = part.contiguous().view(-1).view(torch.uint8)
    return codec, flat
