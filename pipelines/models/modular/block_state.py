"""The state of a modular pipeline between its stages: tensors on the CPU, and plain values beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from ...encoding.conditioning import Conditioning
from ...stock.recording import Recorded

STATE = "state"  # the name in `Conditioning.info`


def carried(values: Mapping[str, Any], before: Mapping[str, Any]) -> Recorded:
    """Return what blocks have changed in the state since `before`.

    Raises ValueError, in one line, for a value that is neither a tensor, nor a list of them, nor plain.
    """
    made, plain = Recorded(), dict[str, Any]()
    for name, value in values.items():
        if name in before and value is before[name]:
            continue
        if isinstance(value, torch.Tensor) or _is_list(value):
            made[name] = value
        elif _is_plain(value):
            plain[name] = value
        else:
            raise ValueError(f"its blocks pass {name} on from encoding to sampling, as {type(value).__name__}")
    made.info = {STATE: json.dumps(plain)}
    return made


def restored(cond: Conditioning, device: torch.device) -> dict[str, Any]:
    """Return the values of the state, tensors on a device. Raises ValueError if the conditioning holds no state."""
    if STATE not in cond.info:
        raise ValueError("the conditioning was made by another class. Encode the prompt with this pipeline.")
    return {**json.loads(cond.info[STATE]), **cond.to(device)}


def _is_list(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, torch.Tensor) for one in value)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)
