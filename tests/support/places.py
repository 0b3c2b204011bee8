"""Where things lie in this checkout."""

from __future__ import annotations

import shutil
from pathlib import Path

SUPPORT = Path(__file__).resolve().parent
TESTS = SUPPORT.parent
ROOT = TESTS.parent
DATA = TESTS / "data"
STUBS = SUPPORT / "stubs"


def clear(folder: Path) -> None:
    """Take out what is in a folder of ComfyUI's models. The folder itself stays: ComfyUI asks those that it has listed
    for their time."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()
