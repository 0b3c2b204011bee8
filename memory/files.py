"""The pack's own small files: where they lie, and writing them so that no reader sees half of one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache_home() -> Path:
    """`ballast` under XDG_CACHE_HOME, or ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ballast"


def replace_file(path: Path, content: bytes) -> None:
    """Write a file beside its name and rename it, making its folder if need be. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem[:8], suffix=".part")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
