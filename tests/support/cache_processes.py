"""Processes that write to one folder of caches: killed, side by side, out of disk. `python cache_processes.py HOW DIR`.

Prints what happened as JSON. In a process of its own, which forks: the tests' has threads.
"""

from __future__ import annotations

import json
import logging
import os
import random
import resource
import signal
import sys
import time
from pathlib import Path

import torch
from import_pack import import_pack

KEYS = [f"{number:064x}" for number in range(12)]


def made(key: str) -> dict[str, torch.Tensor]:
    """What belongs to a key, of some ten or hundred kilobytes."""
    number = int(key, 16)
    return {"prompt_embeds": torch.full((1, 4000 * (number + 1)), float(number)), "prompt_mask": torch.ones(1, 8)}


def is_right(key: str, found: object) -> bool:
    tensors, expected = found.tensors, made(key)  # type: ignore[attr-defined]
    return tensors.keys() == expected.keys() and all(torch.equal(tensors[name], t) for name, t in expected.items())


def write(folder: Path, keys: list[str], turns: int, disk_bytes: int = 2**30, ram_bytes: int = 1) -> list[str]:
    """Put and get entries of all caches, at random. Returns what is wrong."""
    from ballast.memory import speeds
    from ballast.memory.planning.forecast import Forecast
    from ballast.pipelines.encoding.conditioning import Conditioning
    from ballast.pipelines.encoding.embedding_cache import EmbeddingCache
    from ballast.pipelines.equivalence import verdicts as proof
    from ballast.pipelines.planning import forecast_cache

    os.environ["XDG_CACHE_HOME"] = str(folder)
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ballast").addHandler(handler)
    order = random.Random(os.getpid())
    cache = EmbeddingCache(folder, ram_bytes=ram_bytes, disk_bytes=disk_bytes)
    for _ in range(turns):
        key = order.choice(keys)
        cache._ram.clear()
        if (found := cache.get(key)) is not None and not is_right(key, found):
            said.append(f"{key} is another")
        cache.put(key, Conditioning(made(key), {"prompt": key}))
        forecast_cache._ram.clear()
        kept = forecast_cache.get(folder / "forecasts", key, {"sample": []})
        if kept is not None and kept["sample"].idle_bytes != int(key, 16):
            said.append(f"the forecast of {key} is another")
        forecast_cache.put(folder / "forecasts", key, {"sample": Forecast(int(key, 16), {})})
        proof._known.clear()
        if (verdict := proof.recall(folder / "verdicts", key)) not in (None, proof.Verdict(key)):
            said.append(f"the verdict of {key} is another: {verdict}")
        proof.keep(folder / "verdicts", key, proof.Verdict(key))
        speeds._known.clear()
        speeds._groups.clear()
        if speeds.groups(key) not in (None, [key]) or speeds.remembered(key, ["h2d"]) not in (None, {"h2d": 1.0}):
            said.append(f"what was measured for {key} is another")
        speeds.note_groups(key, [key])
        speeds.note(key, {"h2d": 1.0})
    return said


def files(folder: Path) -> dict[str, int]:
    found = [path for path in folder.rglob("*") if path.is_file()]
    parts = sum(path.suffix == ".ballast-part" for path in found)
    return {"entries": len(found) - parts, "parts": parts}


def killed(folder: Path, times: int = 60) -> dict[str, object]:
    """Kill a writer again and again; each time another process reads all that is there."""
    order, left, said = random.Random(0), [], []
    for _ in range(times):
        pid = os.fork()
        if pid == 0:
            write(folder, KEYS, 10**6)
        time.sleep(order.uniform(0.002, 0.05))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        left.append(files(folder)["parts"])
        said += write(folder, KEYS, 3)
    before = files(folder)
    for path in folder.rglob("*.ballast-part"):
        os.utime(path, (time.time() - 7200,) * 2)
    said += write(folder, KEYS, 1)
    return {"kills": times, "said": said, "left": before["parts"], **files(folder)}


def together(folder: Path, turns: int = 150) -> dict[str, object]:
    """Four writers, two of them with room for a few entries only: on the same keys, and on their own."""
    pids = []
    for number in range(4):
        pid = os.fork()
        if pid == 0:
            keys = KEYS if number % 2 else KEYS[number : number + 3]
            said = write(folder, keys, turns, disk_bytes=400_000 if number > 1 else 2**30)
            sys.stderr.write("\n".join(said))
            os._exit(len(said) > 0)
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return {"codes": codes, "said": write(folder, KEYS, 20), **files(folder)}


def full(folder: Path) -> dict[str, object]:
    """No file may grow beyond a few kilobytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, limits[1]))
    said = write(folder, KEYS, 20)
    while_full = files(folder)
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return {
        "said": sorted({line.split(" in ")[0] for line in said}),
        "full": while_full,
        "after": write(folder, KEYS, 5),
    }


if __name__ == "__main__":
    import_pack()
    torch.set_num_threads(1)
    print(json.dumps({"killed": killed, "together": together, "full": full}[sys.argv[1]](Path(sys.argv[2]))))
