"""Cache text embeddings in RAM and on disk: the same prompt never loads an encoder again.

Files are written beside their name and then renamed, so a reader never sees half of one; a damaged one is dropped. Both
tiers give up the least recently used entries beyond their caps.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
import threading
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from ...memory.files import cache_home, replacing
from ...memory.sizes import format_bytes
from ...memory.weights.stored import read_header
from ..files.keys import key_text
from .conditioning import Conditioning

log = logging.getLogger("ballast")

RAM_BYTES = 512 * 2**20
DISK_BYTES = 4 * 2**30
_KEY = re.compile("[0-9a-f]{64}")
# What pipelines call embeddings and their masks. They become arguments of a pipeline's call, where nothing else may
# get in.
_NAMES = re.compile("embed|mask")

_shared: dict[Path, EmbeddingCache] = {}


def default_directory() -> Path:
    """`ballast/embeddings` under XDG_CACHE_HOME, or ~/.cache."""
    return cache_home() / "embeddings"


def shared_cache(directory: Path | None = None) -> EmbeddingCache:
    """Return the one cache of a folder in this process."""
    folder = directory or default_directory()
    return _shared.setdefault(folder, EmbeddingCache(folder))


def cache_key(facts: dict[str, Any]) -> str | None:
    """Return the digest of everything that decides an embedding: plain data and tensors.

    None if there is anything else among it (pictures, say), for which no safe digest is known.
    """
    try:
        return hashlib.sha256(key_text(facts, _digest).encode()).hexdigest()
    except TypeError:
        return None


def _digest(value: Any) -> list[Any]:
    if not isinstance(value, torch.Tensor):
        raise TypeError
    content = value.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return [str(value.dtype), list(value.shape), hashlib.sha256(content).hexdigest()]


class EmbeddingCache:
    """Conditionings by key, within `ram_bytes` in memory and `disk_bytes` in `directory`."""

    def __init__(self, directory: Path, ram_bytes: int = RAM_BYTES, disk_bytes: int = DISK_BYTES) -> None:
        self.directory = directory
        self.ram_bytes = ram_bytes
        self.disk_bytes = disk_bytes
        self._ram: OrderedDict[str, Conditioning] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Conditioning | None:
        """Return the conditioning of a key from RAM or disk, or None."""
        with self._lock:
            if key in self._ram:
                self._ram.move_to_end(key)
                return self._ram[key].copy()
        path = self._path(key)
        try:
            if path.is_symlink() or path.stat().st_size > self.disk_bytes:
                raise ValueError("it is a link, or larger than the cache")
            read_header(path)
            found = Conditioning.load(path)
            if not all(map(_NAMES.search, found.tensors)):
                raise ValueError("it has names that no embedding has")
            with suppress(OSError):  # a folder that others fill, and this process may only read
                os.utime(path)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("Ballast: the embedding cache cannot be read: %s", error)
            return None
        except RuntimeError as error:  # what safetensors says of a file that another process has removed meanwhile
            if path.exists() and "No such file" not in str(error):  # another may have written it again by now
                raise
            return None
        except (SafetensorError, ValueError) as error:
            log.warning("Ballast: dropping a damaged entry of the embedding cache, %s (%s)", path.name, error)
            self._unlink(path)
            return None
        self._remember(key, found.copy())
        return found

    def put(self, key: str, conditioning: Conditioning) -> None:
        """Keep a conditioning. A disk that cannot be written costs a warning, never the run."""
        self._remember(key, conditioning.copy())
        try:
            with replacing(self._path(key)) as part:
                conditioning.save(part)
            self._trim_disk()
        except (OSError, SafetensorError) as error:
            log.warning("Ballast: the embedding cache in %s cannot be written: %s", self.directory, error)

    def clear(self) -> None:
        """Forget everything, in RAM and on disk."""
        with self._lock:
            self._ram.clear()
        for path in self._entries():
            self._unlink(path)

    def _remember(self, key: str, conditioning: Conditioning) -> None:
        with self._lock:
            self._ram[key] = conditioning
            self._ram.move_to_end(key)
            while len(self._ram) > 1 and sum(c.nbytes for c in self._ram.values()) > self.ram_bytes:
                self._ram.popitem(last=False)

    def _trim_disk(self) -> None:
        entries = []
        for path in self._entries():
            try:
                stat = path.stat()
            except FileNotFoundError:  # another process trims as well
                continue
            entries.append((stat.st_mtime_ns, stat.st_size, path))
        held = sum(size for _, size, _ in entries)
        for _, size, path in sorted(entries)[:-1]:
            if held <= self.disk_bytes:
                break
            if self._unlink(path):
                held -= size

    def _entries(self) -> list[Path]:
        """Return the entries on disk, and no other file that somebody keeps in the folder."""
        return [path for path in self.directory.glob("*.safetensors") if _KEY.fullmatch(path.stem)]

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.safetensors"

    @staticmethod
    def _unlink(path: Path) -> bool:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            log.warning("Ballast: cannot remove %s: %s", path, error)
            return False
        return True

    def __repr__(self) -> str:
        return f"EmbeddingCache({self.directory}, up to {format_bytes(self.disk_bytes)})"
