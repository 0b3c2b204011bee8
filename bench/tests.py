"""The tests that run on a card; where there is none, the same tests on the simulated one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from .harness import Run

_ROOT = Path(__file__).resolve().parents[1]
_FILES = ("tests/memory/test_gpu.py",)
_CASE = re.compile(r"^\S+::(\S+) (PASSED|FAILED|ERROR|SKIPPED|)(?: \((.*)\))?", re.MULTILINE)
_WHY = re.compile(r"^(?:FAILED|ERROR) \S+::(\S+) - (.*)$", re.MULTILINE)


def measure(to: Run) -> None:
    """Add a row for each test. Those that the time was over for did not fail: a note tells of them."""
    if find_spec("pytest") is None or not all((_ROOT / path).is_file() for path in _FILES):
        raise RuntimeError('the tests are not part of this install: clone the repository, pip install -e ".[test]"')
    marks = "not gpu and not long" if to.dry else "gpu"
    command = [sys.executable, "-m", "pytest", *_FILES, "-m", marks, "-v", "-p", "no:cacheprovider"]
    command += [f"--basetemp={Path('pytest').resolve()}", "-k", to.request.get("select", "")]
    said = Path("said.txt").resolve()
    with said.open("w", encoding="utf-8") as file:
        try:
            settings = {**os.environ, "COLUMNS": "300", "BALLAST_SOAK": "1"}
            subprocess.run(command, cwd=_ROOT, stdout=file, stderr=file, env=settings, timeout=max(1.0, to.left()))
        except subprocess.TimeoutExpired:
            to.note(f"stopped after {to.request['seconds']:.0f} s")
    sys.stderr.write(text := said.read_text("utf-8", errors="replace"))
    for row in outcomes(text):
        to.row(**row)
    if bad := [row["name"] for row in to.rows if row["outcome"] in ("failed", "error")]:
        raise RuntimeError(f"{len(bad)} of {len(to.rows)} did not pass: {', '.join(bad)}")


def outcomes(said: str) -> Iterator[dict[str, Any]]:
    """Yield what became of each test that pytest tells of in `said`, and why where it did not pass.

    The one that ran when pytest was stopped has no outcome of its own: it was stopped.
    """
    why = dict(_WHY.findall(said))
    for name, outcome, reason in _CASE.findall(said):
        yield {"name": name, "outcome": outcome.lower() or "stopped", "why": why.get(name, reason)[:200]}
