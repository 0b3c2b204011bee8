"""Facts about models as text, to tell them apart by: for one model the same text in every process."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

# Begin with `_`, and change what a model is: its class, its attention, Gemma's windows, an encoder as a file holds it.
_COUNT = frozenset({"_class_name", "_attn_implementation", "_sliding_window_pattern", "_unprojected"})


def key_text(facts: Any, default: Callable[[Any], Any] | None = None) -> str:
    """Return plain data as text, without the notes that libraries make in a config.

    They begin with `_`: their version, a folder's name, `_use_default_values` in the order of a set. `default` makes
    plain data of anything else, for which there is a TypeError.
    """
    return json.dumps(_counted(facts), sort_keys=True, default=default)


def _counted(facts: Any) -> Any:
    if isinstance(facts, Mapping):
        return {k: _counted(v) for k, v in facts.items() if not str(k).startswith("_") or k in _COUNT}
    return [_counted(fact) for fact in facts] if isinstance(facts, list | tuple) else facts
