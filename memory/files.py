"""Small files: the JSON of strangers, read within limits, where links may lead, and the pack's own files."""

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

_PART = ".ballast-part"  # no other program's: a user may name any folder for a cache
_LEFT_OVER_SECONDS = 3600  # none of our files takes that long to write
_LONGEST_NAME = 240  # bytes, of 255 that file systems take: numbers of pictures and frames come beside
_PROBE_BYTES = 2**20  # about as much as a picture takes: a disk that is full takes files of 0 bytes
_warned: set[Path] = set()  # folders of caches that cannot be written
MAX_JSON_BYTES = 16 * 2**20  # an index of 100 000 weights has less

# The host's own folders of models, for `check_links`. A library's user may add folders too.
model_roots: set[Path] = set()
_IN_HUB_CACHE = re.compile(r"[/\\]models--[^/\\]+[/\\](blobs|snapshots)[/\\]")


def read_json(path: Path, advice: str = "Download it again.") -> dict[str, Any]:
    """Return a JSON object from a file.

    ValueError or FileNotFoundError, naming the file, if there is none of usual size.
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
    """Raise ValueError for a file or folder of a model that is a link, or lies behind one, which leads out of it.

    The model's own folder may be a link, and so may the folders above it: models often lie on another disk. What is in
    it must really lie in it, or in one of `model_roots` (encoders that models share), or in the download cache of
    Hugging Face, whose files are links to its blobs wherever the model's folder is.
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
    """Whatever a library says of a stranger's files becomes one line that names them: a ValueError or ImportError.

    Errors of memory pass as they are, and so do those that say it that way already.
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


def placed(path: str | Path) -> Path:
    """Return a path that a user gave, as it is from now on, whatever the working folder becomes."""
    return Path(path).expanduser().absolute()


def cache_home() -> Path:
    """`ballast` under XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ballast"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file as `replacing` does."""
    with replacing(path) as part:
        part.write_bytes(content)


def write_cache(path: Path, content: bytes) -> None:
    """Write a file of a cache as `replacing` does. A disk that cannot be written is a warning, once for each folder."""
    try:
        replace_file(path, content)
    except OSError as error:
        if path.parent not in _warned:
            _warned.add(path.parent)
            log.warning("Ballast: %s cannot be kept in %s (%s): it is found out anew", path.name, path.parent, error)


@contextmanager
def replacing(path: Path, first: bool = False) -> Iterator[Path]:
    """Yield a new file beside `path`, which takes its place when the block ends well: no reader sees half of one.

    With `first` one stays that another process has put there by then. Makes the folder if need be, and removes what
    processes that were killed left there. Raises OSError.

    Its bytes are on the disk before its name is: else a power cut leaves a file of 0 bytes in place of the old one.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_left_over(path.parent)
    part = path.parent / f"{path.stem[:8]}{uuid.uuid4().hex}{_PART}"
    try:
        part.touch(exist_ok=False)  # with the rights of any new file, unlike tempfile's
        yield part
        if first and path.exists():
            part.unlink()
        else:
            _sync(part, os.O_RDWR)  # Windows syncs nothing that is open for reading only
            os.replace(part, path)
            if os.name == "posix":
                _sync(path.parent, os.O_RDONLY)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        raise


def check_folder(folder: Path) -> None:
    """Make the folder for results. OSError, in one line, where nothing can be written to it."""
    probe = folder / "ballast-probe"
    try:
        with replacing(probe) as part:
            part.write_bytes(bytes(_PROBE_BYTES))
        probe.unlink(missing_ok=True)
    except OSError as error:
        raise OSError(f"{folder} takes no results ({error.strerror or error}). Name another folder.") from error


def check_file(path: Path) -> None:
    """Make the folder of a result. OSError or ValueError, in one line, where the result cannot be written."""
    if len(os.fsencode(path.name)) > _LONGEST_NAME:
        raise ValueError(f"{path.name[:40]}... is too long a name for a file. Take one of 240 letters at most.")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder. Name a file.")
    if path.exists() and not path.stat().st_mode & stat.S_IWUSR:
        raise PermissionError(f"{path} is write-protected. Name another file.")
    check_folder(path.parent)


def _sync(path: Path, flags: int) -> None:
    opened = os.open(path, flags)
    try:
        os.fsync(opened)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # of file systems that sync no folders
            raise
    finally:
        os.close(opened)


def _remove_left_over(folder: Path) -> None:
    for part in folder.glob(f"*{_PART}"):
        with suppress(OSError):  # another process removes them as well
            if time.time() - part.stat().st_mtime > _LEFT_OVER_SECONDS:
                part.unlink()
