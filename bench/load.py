"""Weights from a cold disk, each way side by side: seconds, and how high RAM rose.

To RAM, by Ballast and by transformers; and through staging buffers, as they stream, beside plain direct reads of as
many threads.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from transformers import T5Config, T5EncoderModel

from ..memory import ManagedModel, simulated
from ..memory.engine.staging_buffers import StagingBuffers
from ..memory.engine.streams import Queues
from ..memory.weights import direct, hostbuffer
from ..memory.weights.reader import STAGING_THREADS
from ..memory.weights.stored import Stored, stored_tensors
from . import report
from .harness import Run, apart
from .measure import Meter, environment
from .rss import peak_rss_bytes
from .wording import words

_POOL_BYTES = 2**24  # random bytes that the file repeats
_TRIES = 20
_SECONDS = 600  # for one reading
_LAYERS, _WORDS = 24, 32128  # of T5-XXL
_SQUARES = 11.5 * _LAYERS  # of the width, that the products of all layers make up


def measure(to: Run) -> None:
    """Write a file of so many GB, and read it each way in each round.

    Each reading is in a process of its own, and finds nothing of the file in the page cache, where that can be emptied.
    Ways take turns, from the first to the last and back. ValueError for a size or number that is none, RuntimeError if
    a way fails, or ends with other weights than the others.
    """
    gigabytes, rounds = to.request["gb"], to.request["rounds"]
    if not gigabytes > 0 or rounds < 1:
        raise ValueError(f"--gb is {gigabytes:g} and --rounds {rounds}; both take a number above 0.")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=to.request.get("folder")) as name:
        path = Path(name) / "model.safetensors"
        nbytes = write_weights(path, width_of(gigabytes * 1e9))
        for turn in range(rounds):
            for way in list(WAYS)[:: -1 if turn % 2 else 1]:  # none always follows the same one
                is_cold = empty_cache(path)
                one = apart("load.reading", {"path": str(path), "way": way}, Path(name), _SECONDS)
                if "error" in one:
                    raise RuntimeError(f"{way} failed: {one['error']}")
                found[way].append({**one["rows"][0], "cached_bytes": cached_bytes(path), "cold": is_cold})
                report.say(f"round {turn + 1}: {way}: {words('seconds', found[way][-1]['seconds'])} s")
    readings = [reading for way in found.values() for reading in way]
    if len({(reading["sum"], reading["bytes"]) for reading in readings if "sum" in reading}) != 1:
        raise RuntimeError("the ways do not end with the same weights.")
    cold = all(reading["cold"] for reading in readings)
    about = environment(Meter(torch.device("cpu")), f"{gigabytes:g} GB")
    to.tell(**about, weight_bytes=nbytes, cold=cold, rounds=rounds)
    to.add([_row(way, of, nbytes) for way, of in found.items()])
    seconds = {row["name"]: row["seconds"] for row in to.rows}
    report.say(f"\n{_OURS} takes {seconds[_OURS] / seconds[_COPIED]:.2f} of the seconds of {_COPIED}.")
    report.say(f"{_STREAMED} weights come {seconds[_DIRECT] / seconds[_STREAMED]:.2f} times as fast as {_DIRECT}.")
    if not cold:
        to.note("The page cache could not be emptied here: these are not the disk's seconds.")


def _row(way: str, found: list[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    seconds = [reading["seconds"] for reading in found]
    peak_bytes = max(reading["peak_bytes"] for reading in found)
    return {
        "name": way, "seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds),
        "gbps": nbytes / statistics.median(seconds) / 1e9, "peak_bytes": peak_bytes,
        "over_weights": peak_bytes / nbytes, "cached_bytes": max(reading["cached_bytes"] for reading in found),
    }  # fmt: skip


# The file


def width_of(nbytes: float) -> int:
    """Return the width with which the weights take about so many bytes."""
    half = _WORDS / _SQUARES / 2
    return max(16, 16 * round(((nbytes / 2 / _SQUARES + half**2) ** 0.5 - half) / 16))


def _config(width: int) -> T5Config:
    """Return the config of a text encoder as T5-XXL is, of another width."""
    return T5Config(
        vocab_size=_WORDS, d_model=width, d_kv=16, d_ff=width * 5 // 2, num_layers=_LAYERS, num_heads=width // 16,
        feed_forward_proj="gated-gelu", architectures=["T5EncoderModel"],
    )  # fmt: skip


def _skeleton(width: int) -> nn.Module:
    with torch.device("meta"):
        module: nn.Module = T5EncoderModel(_config(width))
    return module.to(torch.bfloat16).requires_grad_(False)


def names_of(width: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all weights, in the order in which a file has them."""
    return {name: tuple(tensor.shape) for name, tensor in sorted(_skeleton(width).named_parameters())}


def write_weights(path: Path, width: int) -> int:
    """Write the module with random bytes, to the disk: config and weights. Returns the bytes of weights."""
    path.with_name("config.json").write_text(_config(width).to_json_string(), "utf-8")
    header, end = {}, 0
    for name, shape in names_of(width).items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    # Numbers in bf16 that are neither NaN nor infinite: without the highest bit of the exponent.
    pool = (torch.randint(0, 2**16, (_POOL_BYTES // 2,), dtype=torch.int32) & 0xBFFF).to(torch.uint16).numpy().tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for at in range(0, end, _POOL_BYTES):
            file.write(pool[: end - at])
        file.flush()
        os.fsync(file.fileno())
    return end


def empty_cache(path: Path) -> bool:
    """Drop a file from the page cache. Return False if that cannot be done, or was not."""
    for _ in range(_TRIES):
        with path.open("rb") as file:
            direct.forget(file, 0, path.stat().st_size)
            pages = direct.cached_pages(file, 0, path.stat().st_size)
        if pages is None or not any(pages):
            return pages is not None
        time.sleep(0.1)  # some are still on another core's list
    return False


def cached_bytes(path: Path) -> int:
    """Return how much of a file the page cache holds, in whole pages; 0 where that is not told."""
    with path.open("rb") as file:
        return sum(direct.cached_pages(file, 0, path.stat().st_size) or b"") * mmap.PAGESIZE


# The ways


def _by_ballast(path: Path, width: int) -> nn.Module:
    def never() -> nn.Module:
        raise RuntimeError("not read straight from the file")

    unit = ManagedModel("load", "transformer", lambda: _skeleton(width), never, stored=lambda: stored_tensors([path]))
    unit.load()
    return unit.module


def _by_stock(path: Path, width: int) -> nn.Module:
    return T5EncoderModel.from_pretrained(path.parent, dtype=torch.bfloat16)


def _by_stock_copied(path: Path, width: int) -> nn.Module:
    module = _by_stock(path, width)
    for parameter in module.parameters():
        parameter.data = parameter.data.clone()
    return module


def _by_staging(path: Path, width: int) -> None:
    """Bring all weights through staging buffers to a simulated card, layer by layer to the same place."""
    device = torch.device(simulated.DEVICE_TYPE, 0)
    layers: dict[str, list[Stored]] = {}
    for name, stored in stored_tensors([path]).items():
        layers.setdefault(name.rpartition(".layer.")[0], []).append(stored)
    likes = [[torch.empty(each.shape, dtype=each.dtype, device="meta") for each in layer] for layer in layers.values()]
    laid_out = [hostbuffer.layout(layer) for layer in likes]
    most = max(nbytes for _, nbytes in laid_out)
    place = torch.empty(most, dtype=torch.uint8, device=device)
    groups = [
        [(stored, hostbuffer.view_of(place, at, like)) for stored, at, like in zip(layer, offsets, its, strict=True)]
        for layer, (offsets, _), its in zip(layers.values(), laid_out, likes, strict=True)
    ]
    staging = StagingBuffers(Queues(device), most)
    for _ in staging.bringing(groups):
        pass
    staging.close()


def _by_direct_reads(path: Path, width: int) -> None:
    """Read the file from its begin to its end in `STAGING_THREADS` threads, past the page cache, and use nothing."""
    size = path.stat().st_size
    room = direct.CHUNK_BYTES - 2 * direct.SECTOR_BYTES

    def chunk(at: int) -> None:
        with path.open("rb", buffering=0) as file:
            direct.read_chunk(file, at, min(at + room, size), direct.CHUNK_BYTES)

    with ThreadPoolExecutor(STAGING_THREADS) as pool:
        list(pool.map(chunk, range(0, size, room)))


_OURS, _COPIED = "ballast", "from_pretrained, copied"  # to anonymous memory, as ours lies; else it maps the file
_STREAMED, _DIRECT = "streamed", "direct reads"
WAYS: dict[str, Callable[[Path, int], nn.Module | None]] = {
    _OURS: _by_ballast, "from_pretrained": _by_stock, _COPIED: _by_stock_copied,
    _STREAMED: _by_staging, _DIRECT: _by_direct_reads,
}  # fmt: skip


def reading(to: Run) -> None:
    """Add one row: seconds until each page of the weights was looked at, as mapped ones are read then. RAM in bytes."""
    path, way = Path(to.request["path"]), to.request["way"]
    width = stored_tensors([path])["encoder.final_layer_norm.weight"].shape[0]
    _skeleton(width)
    simulated.enable(total="100GB")
    with contextlib.suppress(OSError):  # the peak starts anew, where the system can do that
        Path("/proc/self/clear_refs").write_text("5", "ascii")
    before, start = psutil.Process().memory_info().rss, time.perf_counter()
    module = WAYS[way](path, width)
    for parameter in module.parameters() if module else ():
        parameter.reshape(-1)[:: 4096 // parameter.itemsize].sum()
    found: dict[str, Any] = {"seconds": time.perf_counter() - start, "peak_bytes": peak_rss_bytes() - before}
    if module:
        values = list(module.state_dict().values())
        found["sum"] = sum(int(value.view(torch.int16).sum(dtype=torch.int64)) for value in values)
        found["bytes"] = sum(value.nbytes for value in values)
    to.row(**found)
