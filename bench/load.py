"""`ballast bench load`: weights from a cold disk to RAM, against transformers' own way, side by side."""

from __future__ import annotations

import json
import mmap
import os
import statistics
import struct
import tempfile
import time
from math import prod
from pathlib import Path
from typing import Any

import torch

from ..memory.weights import direct
from . import apart, report
from .load_worker import OURS, STOCK_COPIED, WAYS, config_of, names_of, width_of
from .measure import Meter, environment

_POOL_BYTES = 2**24  # random bytes that the file repeats
_TRIES = 20


def run(gigabytes: float, rounds: int, folder: Path | None, out: Path, timeout: float = 600) -> int:
    """Write a file of so many GB, read it each way in each round, print the table, write load.json. Returns 0.

    Each reading is in a process of its own, and finds nothing of the file in the page cache, where that can be emptied.
    Ways take turns, from the first to the last and back. ValueError for a size or number that is none, RuntimeError if
    a way fails, or ends with other weights than the others.
    """
    if not gigabytes > 0 or rounds < 1:
        raise ValueError(f"--gb is {gigabytes:g} and --rounds {rounds}; both take a number above 0.")
    rows: dict[str, list[dict[str, Any]]] = {name: [] for name in WAYS}
    with tempfile.TemporaryDirectory(dir=folder) as name:
        path = Path(name) / "model.safetensors"
        nbytes = write_weights(path, width_of(gigabytes * 1e9))
        for turn in range(rounds):
            order = list(WAYS)
            for way in order[:: -1 if turn % 2 else 1]:  # none always follows the same one
                is_cold = empty_cache(path)
                found = apart.measure("load_worker", {"path": str(path), "way": way}, Path(name), timeout)
                if "error" in found:
                    raise RuntimeError(f"{way} failed: {found['error']}")
                rows[way].append({**found, "cached_bytes": cached_bytes(path), "cold": is_cold})
                report.say(f"round {turn + 1}: {way}: {report.words('seconds', found['seconds'])} s")
    if len({(row["sum"], row["bytes"]) for all_of in rows.values() for row in all_of}) != 1:
        raise RuntimeError("the ways do not end with the same weights.")
    table = [_row(way, all_of, nbytes) for way, all_of in rows.items()]
    found = environment(Meter(torch.device("cpu")), f"{gigabytes:g} GB")
    cold = all(row["cold"] for all_of in rows.values() for row in all_of)
    report.write_json(
        found | {"weight_bytes": nbytes, "cold": cold, "rounds": rounds, "rows": table}, out / "load.json"
    )
    headings = {"name": "way", "seconds": "seconds", "least": "least", "most": "most", "gbps": "GB/s"}
    headings |= {"peak_bytes": "RAM peak", "over_weights": "of weights", "cached_bytes": "left in cache"}
    report.say("\n" + report.table(headings, table))
    seconds = {row["name"]: row["seconds"] for row in table}
    if STOCK_COPIED in seconds:
        report.say(f"\n{OURS} takes {seconds[OURS] / seconds[STOCK_COPIED]:.2f} of the seconds of {STOCK_COPIED}.")
    report.say("" if cold else "The page cache could not be emptied here: these are not the disk's seconds.")
    report.say(f"wrote {out / 'load.json'}")
    return 0


def _row(way: str, found: list[dict[str, Any]], nbytes: int) -> dict[str, Any]:
    seconds = [row["seconds"] for row in found]
    peak_bytes = max(row["peak_bytes"] for row in found)
    return {
        "name": way, "seconds": statistics.median(seconds), "least": min(seconds), "most": max(seconds),
        "gbps": nbytes / statistics.median(seconds) / 1e9, "peak_bytes": peak_bytes,
        "over_weights": peak_bytes / nbytes, "cached_bytes": max(row["cached_bytes"] for row in found),
    }  # fmt: skip


def write_weights(path: Path, width: int) -> int:
    """Write the worker's module with random bytes, to the disk: config and weights. Returns the bytes of weights."""
    path.with_name("config.json").write_text(config_of(width).to_json_string(), "utf-8")
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
