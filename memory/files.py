"""Small files: JSON of unknown origin read within limits, checks of links, and the pack's own files and caches."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from .errors import is_out_of_memory, is_out_of_ram

log = logging.getLogger("ballast")

_PART = ".ballast-part"  # suffix of unfinished files, ours alone: a user may name any folder for a cache
_LEFT_OVER_SECONDS = 3600  # age from which an unfinished file is left over: none takes that long to write
_LONGEST_NAME = 240  # bytes, of 255 that file systems take: numbers of pictures and frames are added to a name
_PROBE_BYTES = 2**20  # about the size of a picture: a full disk still takes files of 0 bytes
_warned: set[Path] = set()  # folders of caches that could not be written
MAX_JSON_BYTES = 16 * 2**20  # more than an index of 100 000 weights takes

# The host's own model folders, for `check_links`. Users of the library may add folders.
model_roots: set[Path] = set()
_IN_HUB_CACHE = re.compile(r"[/\\]models--[^/\\]+[/\\](blobs|snapshots)[/\\]")


def read_json(path: Path, advice: str = "Download it again.") -> dict[str, Any]:
    """Return the JSON object in a file.

    Raises FileNotFoundError if the file is missing. Raises ValueError if it is larger than `MAX_JSON_BYTES`, or not a
    JSON object. The messages name the file; those of a missing or too large one end with `advice`.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing. {advice}")
    if (size := path.stat().st_size) > MAX_JSON_BYTES:
        raise ValueError(f"{path} has {size} bytes, which no file of its kind has. {advice}")
    try:
        content = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON. Download it again.") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} does not hold a JSON object. Download it again.")
    return content


def check_links(paths: Iterable[Path], model: Path) -> None:
    """Raise ValueError for a file or folder of a model that is, or lies behind, a link out of the model.

    The model's own folder and the folders above it may be links: models often lie on another disk. A path in it must
    really lie in it, or in one of `model_roots` (shared encoders), or in the download cache of Hugging Face. The files
    of that cache are links to its blobs.
    """
    grounds = (model.resolve(), *model_roots)
    for path in paths:
        real = path.resolve()
        if not any(real.is_relative_to(ground) for ground in grounds) and not _IN_HUB_CACHE.search(str(real)):
            raise ValueError(
                f"{path} leads to {real}, out of the model's folder. Put the file itself there, not a link."
            )


@contextmanager
def one_line(where: Path, task: str) -> Iterator[None]:
    """Turn any error of a library about a file into one line that names `where`: a ValueError or ImportError.

    Errors of memory pass as they are, and so do ValueErrors and OSErrors that name the file in one line already. `task`
    completes "cannot be", such as "read".
    """
    try:
        yield
    except Exception as error:
        said = str(error).strip()
        is_clear = isinstance(error, (ValueError, OSError)) and "\n" not in said and str(where) in said
        if is_clear or is_out_of_ram(error) or is_out_of_memory(error):
            raise
        kind = ImportError if isinstance(error, ImportError) else ValueError
        reason = f"{type(error).__name__}: {said.splitlines()[0] if said else 'no more is known'}"
        raise kind(f"{where} cannot be {task} ({reason[:300]}). Check that all of it is downloaded.") from error


def expanded(path: str | Path) -> Path:
    """Return a user's path without its `~`, which a shell leaves in --out=~/x.png and in quotes."""
    return Path(os.path.expanduser(path))  # Path.expanduser raises where nobody has the name behind ~


def placed(path: str | Path) -> Path:
    """Return the absolute path that a user's path means now, whatever the working folder becomes later."""
    return expanded(path).absolute()


def cache_home() -> Path:
    """Return the folder of our caches: `ballast` under XDG_CACHE_HOME, or under ~/.cache."""
    return expanded(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ballast"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically. See `replacing`."""
    with replacing(path) as part:
        part.write_bytes(content)


def write_cache(path: Path, content: bytes) -> None:
    """Write a file of a cache atomically. A disk that cannot be written is a warning, once for each folder."""
    try:
        replace_file(path, content)
    except OSError as error:
        if path.parent not in _warned:
            _warned.add(path.parent)
            log.warning("Ballast: %s cannot be kept in %s (%s): it is found out anew", path.name, path.parent, error)


@contextmanager
def replacing(path: Path, first: bool = False) -> Iterator[Path]:
    """Yield the path of a new file that takes the place of `path` when the block ends well.

    No reader ever sees half a file. With `first` a file that another process has put there meanwhile stays. Makes the
    folder if need be, and removes files that killed processes left there. Raises OSError.

    The contents are synced before the file gets its name. Otherwise a power cut could leave a file of 0 bytes in place
    of the old one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path.parent)
    part = path.parent / f"{path.stem[:8]}{uuid.uuid4().hex}{_PART}"
    try:
        part.touch(exist_ok=False)  # gets the usual permissions, unlike a file of `tempfile`
        yield part
        if first and path.exists():
            part.unlink()
        else:
            _sync(part, os.O_RDWR)  # Windows syncs no file that is open for reading only
            os.replace(part, path)
            if os.name == "posix":
                _sync(path.parent, os.O_RDONLY)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield the path of a new file as `replacing` does. OSError, in one line that names the file."""
    try:
        with replacing(path) as part:
            yield part
    except OSError as error:
        raise OSError(f"{path} cannot be written ({error.strerror or error}).") from error


def check_folder(folder: Path) -> None:
    """Make the folder for results. Raises OSError, in one line, if no file can be written to it."""
    probe = folder / "ballast-probe"
    try:
        with replacing(probe) as part:
            part.write_bytes(bytes(_PROBE_BYTES))
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{folder} takes no results ({error.strerror or error}). Name another folder.") from error


def check_file(path: Path) -> None:
    """Make the folder of a result. Raises OSError or ValueError, in one line, if the result cannot be written."""
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(f"{path.name[:40]}... is too long a name for a file. Take one of 240 letters at most.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Name a file.")
    if path.exists() and not path.stat().st_mode & stat.S_IWUSR:
        raise PermissionError(f"{path} is write-protected. Name another file.")
    check_folder(path.parent)


def _sync(path: Path, flags: int) -> None:
    """Flush a file or folder to the disk."""
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems sync no folders
            raise
    finally:
        os.close(opened)


def _remove_left_over(folder: Path) -> None:
    """Remove the unfinished files of killed processes."""
    for part in folder.glob(f"*{_PART}"):
        with suppress(OSError):  # another process may remove them at the same time
            if time.time() - part.stat().st_mtime > _LEFT_OVER_SECONDS:
                part.unlink()
