"""Measured speeds of this machine, kept in the user's cache folder. Plain data by key; `learned` and `probe` use it.

A file that cannot be read or written is no error: the next process measures again.
"""

from __future__ import annotations

import json
import platform
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .files import cache_home, read_json, write_cache
from .rates import ASSUMED

MAX_LISTS = 400  # entries kept in groups.json: seconds of groups, and overheads of runs
OBSERVED_BYTES = 256 * 2**20  # bytes below which a read is too short to tell the speed of a disk

_lock = threading.RLock()
_known: dict[str, dict[str, float]] = {}  # numbers noted in this process, in case the file cannot be written
_groups: dict[tuple[Path, str], Any] = {}  # facts noted in this process, by file and key, for the same reason


def remembered(key: str, names: Sequence[str]) -> dict[str, float] | None:
    """Return the numbers that were noted under a key; None if there are none.

    Numbers from the file count only if all of `names` are there.
    """
    with _lock:
        return _known.get(key) or _in_file(key, names)


def note(key: str, numbers: Mapping[str, float], file: bool = True) -> None:
    """Remember numbers under a key, in this process and, with `file`, in later ones."""
    with _lock:
        if _known.get(key) == numbers:
            return
        _known[key] = dict(numbers)
        if file:
            write_cache(_file(), json.dumps(_read() | {key: _known[key]}, indent=1).encode())


def observe_disk(nbytes: int, seconds: float, disk: int | None) -> None:
    """Note that reading `nbytes` of weights took `seconds`, from the disk with the device number `disk`.

    The rate is averaged with the known one, half and half. Reads of less than 256 MB do not count, nor do reads from an
    unknown disk.
    """
    if nbytes < OBSERVED_BYTES or seconds <= 0 or disk is None:
        return
    with _lock:
        note(_disk_key(disk), {"disk": (disk_rate(disk, nbytes / seconds) + nbytes / seconds) / 2})


def disk_rate(disk: int | None, otherwise: float = ASSUMED.disk_bytes_per_second) -> float:
    """Return the bytes per second that were seen from a disk, `otherwise` if none were."""
    found = None if disk is None else remembered(_disk_key(disk), ("disk",))
    return found["disk"] if found else otherwise


def groups(key: str) -> Any:
    """Return the plain data noted for a model's groups or runs under a key; None if there is none.

    It may come from a damaged file: callers check it.
    """
    with _lock:
        known = path, _ = _groups_file(), key
        return _groups[known] if known in _groups else _lists(path).get(key)


def note_groups(key: str, facts: Any) -> None:
    """Remember plain data for a model's groups or runs, in this process and in later ones. None forgets it."""
    with _lock:
        path = _groups_file()
        _groups[path, key] = facts
        lists = _lists(path)
        lists.pop(key, None)
        if facts is not None:
            lists[key] = facts
        write_cache(path, json.dumps(dict(list(lists.items())[-MAX_LISTS:])).encode())


def _disk_key(disk: int) -> str:
    return f"{platform.node()}, disk {disk}"


def _file() -> Path:
    return cache_home() / "rates.json"


def _groups_file() -> Path:
    return cache_home() / "groups.json"


def _lists(path: Path) -> dict[str, Any]:
    try:
        found = read_json(path)
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _read() -> dict[str, Any]:
    try:
        found = json.loads(_file().read_text("utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _in_file(key: str, names: Sequence[str]) -> dict[str, float] | None:
    entry = _read().get(key)
    return entry if _is_whole(entry, names) else None


def _is_whole(entry: Any, names: Sequence[str]) -> bool:
    return isinstance(entry, dict) and all(
        type(entry.get(name)) in (int, float) and 0 < entry[name] < 1e30 for name in names
    )
