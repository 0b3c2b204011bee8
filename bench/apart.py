"""Measures in a process of its own: what they do to torch, to RAM and to its counters ends with it."""

from __future__ import annotations

import json
import subprocess
import sys
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


def measure(worker: str, request: dict[str, Any], folder: Path, timeout: float) -> dict[str, Any]:
    """What the `main` of a module of bench found, or `error`: one line. `folder` is for the process to work in.

    `main` gets the request as JSON, and the path of a file to write its answer to, as JSON too.
    """
    answer = folder / "answer.json"
    answer.unlink(missing_ok=True)
    command = [sys.executable, "-c", _START, str(_ROOT), worker, json.dumps(request), str(answer)]
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, errors="replace", timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {timeout:.0f} s"}
    if answer.is_file():
        return json.loads(answer.read_text("utf-8"))
    last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
    return {"error": f"ended with status {done.returncode}: {last}"}
