"""Cache forecasts of stages in RAM and on disk: a size has its dry run once."""

from __future__ import annotations

import json
import logging
import threading
from collections import OrderedDict
from collections.abc import Collection, Mapping
from pathlib import Path

from ...memory.files import read_json, replace_file
from ...memory.planning.forecast import Forecast

log = logging.getLogger("ballast")

MAX_ENTRIES = 1000

_lock = threading.Lock()

_ram: OrderedDict[str, dict[str, Forecast]] = OrderedDict()


def get(directory: Path, key: str, stages: Mapping[str, Collection[str]]) -> dict[str, Forecast] | None:
    """The forecasts of a key; None if there are none of just these stages and units, by name."""
    with _lock:
        found = _ram.get(key) or _read(_path(directory, key))
        if found is None or {name: set(forecast.units) for name, forecast in found.items()} != {
            name: set(units) for name, units in stages.items()
        }:
            return None
        _remember(key, found)
        return found


def put(directory: Path, key: str, forecasts: dict[str, Forecast]) -> None:
    """Keep the forecasts of some stages. A disk that cannot be written costs nothing but the time to make it again."""
    facts = {stage: forecast.to_dict() for stage, forecast in forecasts.items()}
    with _lock:
        _remember(key, forecasts)
        try:
            replace_file(_path(directory, key), json.dumps(facts).encode())
            paths = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in paths[:-MAX_ENTRIES]:
                path.unlink(missing_ok=True)
        except OSError as error:
            log.debug("Ballast: forecasts cannot be kept in %s: %s", directory, error)


def _read(path: Path) -> dict[str, Forecast] | None:
    try:
        return {stage: Forecast.from_dict(facts) for stage, facts in read_json(path).items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None


def _remember(key: str, forecasts: dict[str, Forecast]) -> None:
    _ram[key] = forecasts
    _ram.move_to_end(key)
    while len(_ram) > MAX_ENTRIES:
        _ram.popitem(last=False)


def _path(directory: Path, key: str) -> Path:
    return directory / f"{key}.json"
