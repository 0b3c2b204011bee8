"""Forecasts of stages by key, in RAM and on disk: a size that was ever planned is planned at once."""

from __future__ import annotations

import json
import logging
from collections import OrderedDict
from pathlib import Path

from ..memory.files import replace_file
from ..memory.forecast import Forecast

log = logging.getLogger("ballast")

MAX_ENTRIES = 1000

_ram: OrderedDict[str, dict[str, Forecast]] = OrderedDict()


def get(directory: Path, key: str) -> dict[str, Forecast] | None:
    """The forecasts of a key, by stage; None if there are none, or damaged ones."""
    if key not in _ram:
        try:
            stored = json.loads(_path(directory, key).read_text("utf-8"))
            _ram[key] = {stage: Forecast.from_dict(facts) for stage, facts in stored.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            return None
    _ram.move_to_end(key)
    return _ram[key]


def put(directory: Path, key: str, forecasts: dict[str, Forecast]) -> None:
    """Keep the forecasts of some stages. A disk that cannot be written costs nothing but the time to make it again."""
    _ram[key] = forecasts
    while len(_ram) > MAX_ENTRIES:
        _ram.popitem(last=False)
    facts = {stage: forecast.to_dict() for stage, forecast in forecasts.items()}
    try:
        replace_file(_path(directory, key), json.dumps(facts).encode())
        paths = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        for path in paths[:-MAX_ENTRIES]:
            path.unlink(missing_ok=True)
    except OSError as error:
        log.debug("Ballast: forecasts cannot be kept in %s: %s", directory, error)


def _path(directory: Path, key: str) -> Path:
    return directory / f"{key}.json"
