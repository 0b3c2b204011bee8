"""Cache what dry runs find out, in RAM and on disk: a size has its dry run once, a text encoder one for each length."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...memory.files import read_json, write_cache
from ...memory.planning.forecast import Forecast
from ...memory.planning.known_calls import KnownCalls
from ...memory.striped import StripedForecast

MAX_ENTRIES = 1000

_lock = threading.Lock()

_ram: OrderedDict[str, Any] = OrderedDict()


def get(directory: Path, key: str, stages: Mapping[str, Collection[str]]) -> dict[str, Forecast] | None:
    """Return the forecasts of a key. None if they are not of just these stages, or of other units, by name."""
    found = _get(directory, key, lambda data: {name: Forecast.from_dict(facts) for name, facts in data.items()})
    if found is None or found.keys() != stages.keys():
        return None
    # A unit that is not called has no forecast.
    return found if all(set(found[name].units) <= set(units) for name, units in stages.items()) else None


def put(directory: Path, key: str, forecasts: dict[str, Forecast]) -> None:
    """Keep the forecasts of some stages. A disk that cannot be written costs nothing but the time to make it again."""
    _put(directory, key, forecasts, {stage: forecast.to_dict() for stage, forecast in forecasts.items()})


def calls(directory: Path, key: str) -> KnownCalls:
    """Return the known calls of a module, for `put_calls` to keep with more."""
    found = _get(directory, key, KnownCalls.from_dict)
    return KnownCalls() if found is None else found


def put_calls(directory: Path, key: str, known: KnownCalls) -> None:
    """Keep the calls of a module. As `put`."""
    _put(directory, key, known, known.to_dict())


def stripes(directory: Path, key: str) -> StripedForecast | None:
    """Return the forecast of a VAE in stripes."""
    return _get(directory, key, StripedForecast.from_dict)


def put_stripes(directory: Path, key: str, found: StripedForecast) -> None:
    """Keep the forecast of a VAE in stripes. As `put`."""
    _put(directory, key, found, asdict(found))


def _get(directory: Path, key: str, parse: Callable[[Any], Any]) -> Any:
    with _lock:
        if key not in _ram:
            try:
                _ram[key] = parse(read_json(_path(directory, key)))
            except (OSError, ValueError, KeyError, TypeError, AttributeError):
                return None
        _remember(key, _ram[key])
        return _ram[key]


def _put(directory: Path, key: str, value: Any, facts: Mapping[str, Any]) -> None:
    with _lock:
        _remember(key, value)
        write_cache(_path(directory, key), json.dumps(facts).encode())
        with suppress(OSError):  # other processes remove them as well
            paths = sorted(directory.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
            for path in paths[:-MAX_ENTRIES]:
                path.unlink(missing_ok=True)


def _remember(key: str, value: Any) -> None:
    _ram[key] = value
    _ram.move_to_end(key)
    while len(_ram) > MAX_ENTRIES:
        _ram.popitem(last=False)


def _path(directory: Path, key: str) -> Path:
    return directory / f"{key}.json"
