"""Check that the packages in requirements.txt are installed and new enough, without importing them."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

_FILE = Path(__file__).resolve().parent / "requirements.txt"
_MODULES = {"pillow": "PIL"}  # that are named otherwise than their packages
_OPTIONAL = ("av", "ftfy", "matplotlib")  # without which only films, Wan's pipelines, and charts say that it is missing


def wanted() -> dict[str, str]:
    """Return the packages with the lowest version of each."""
    return dict(line.split(">=") for line in _FILE.read_text("ascii").split())


def installed(name: str) -> str | None:
    """Return the installed version of a package, "" if it does not say, or None if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None if find_spec(_MODULES.get(name, name)) is None else ""


def at_least(found: str, lowest: str) -> bool:
    """Return whether a version is not below another."""

    def numbers(text: str) -> list[int]:
        return [int(part) for part in text.split("+")[0].split(".") if part.isdigit()]

    return not found or numbers(found) >= numbers(lowest)


def complaint(optional: bool = True) -> str | None:
    """Return one line about what is missing or too old, with the command that this Python needs; None if all is there.

    Without `optional`, only about what nothing runs without.
    """
    names = {name: lowest for name, lowest in wanted().items() if optional or name not in _OPTIONAL}
    found = {name: (installed(name), lowest) for name, lowest in names.items()}
    missing = [name for name, (has, _) in found.items() if has is None]
    old = [
        f"{name} is {has} and must be {lowest} or newer"
        for name, (has, lowest) in found.items()
        if has is not None and not at_least(has, lowest)
    ]
    if not missing and not old:
        return None
    what = [f"not installed: {', '.join(missing)}"] if missing else []
    return f'{"; ".join([*what, *old])}. Run "{sys.executable}" -m pip install -r "{_FILE}" and start ComfyUI again.'
