"""Measures in a process of its own: what they do to torch, to RAM and to its counters ends with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[1]
# This checkout as `ballast`, installed or not.
_START = """
import importlib, importlib.util, sys
root = sys.argv[1]
spec = importlib.util.spec_from_file_location("ballast", root + "/__init__.py", submodule_search_locations=[root])
sys.modules["ballast"] = module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
importlib.import_module("ballast.bench." + sys.argv[2]).main(sys.argv[3:])
"""


def measure(
    worker: str,
    request: dict[str, Any],
    folder: Path,
    timeout: float,
    environment: Mapping[str, str] | None = None,
    log: Path | None = None,
) -> dict[str, Any]:
    """Return what the `main` of a module of bench found, or `error`: one line. `folder` is for the process to work in.

    `main` gets the request as JSON, and the path of a file to write its answer to, as JSON too. One that writes it anew
    as it goes leaves what it had when its time is over; that has the error then. `environment` is for the process,
    beside what is there. What it prints goes to the end of `log`.
    """
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-c", _START, str(_ROOT), worker, json.dumps(request), str(answer)]
    try:
        done = subprocess.run(
            command, cwd=folder, env={**os.environ, **(environment or {})}, capture_output=True, text=True,
            errors="replace", timeout=timeout, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        _append(log, worker, _text(late.stdout), _text(late.stderr))
        return {**_read(answer), "error": f"not done after {timeout:.0f} s"}
    _append(log, worker, done.stdout, done.stderr)
    if found := _read(answer):
        return found
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"ended with status {done.returncode}: {last}"}


def _read(answer: Path) -> dict[str, Any]:
    return json.loads(answer.read_text("utf-8")) if answer.is_file() else {}


def _text(said: str | bytes | None) -> str:
    return said.decode(errors="replace") if isinstance(said, bytes) else said or ""


def _append(log: Path | None, worker: str, *said: str) -> None:
    if log:
        with log.open("a", encoding="utf-8") as file:
            file.write("\n".join([f"== {worker}", *filter(None, said), ""]))
