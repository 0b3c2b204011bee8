"""The state of a modular pipeline between its stages: tensors and pictures on the CPU, and plain values beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ...encoding.conditioning import Conditioning
from ...encoding.pictures import as_handed, handed
from ...stock.recording import Recorded

STATE, PICTURED, ON_HOST = "state", "pictured", "on host"  # the names in `Conditioning.info`
_DTYPE = "torch."  # how the text begins that stands for a dtype


def carried(values: Mapping[str, Any], before: Mapping[str, Any], device: torch.device) -> Recorded:
    """Return what blocks that ran on a device have changed in the state since `before`.

    What they left on the CPU beside that, as MiniMax-H3 its tags of tokens, is there for the next blocks, too.
    Raises ValueError, in one line, for a value that is no data.
    """
    made, plain, pictured = Recorded(), dict[str, Any](), list[str]()
    for name, value in values.items():
        if name in before and value is before[name]:
            continue
        if isinstance(value, torch.Tensor) or _all(value, torch.Tensor):
            made[name] = value
        elif _is_picture(value):
            pictured.append(name)
            shown = handed(value)
            made[name] = list(shown) if isinstance(shown, tuple) else shown
        elif isinstance(value, torch.dtype):
            plain[name] = {_DTYPE: str(value).removeprefix(_DTYPE)}
        elif _is_plain(value):
            plain[name] = value
        else:
            raise ValueError(f"its blocks pass {name} on from encoding to sampling, as {type(value).__name__}")
    tensors = {name: value[0] if isinstance(value, list) else value for name, value in made.items()}
    left = [n for n, one in tensors.items() if device.type != "cpu" == one.device.type and n not in pictured]
    made.info = {STATE: json.dumps(plain), PICTURED: json.dumps(pictured), ON_HOST: json.dumps(left)}
    return made


def restored(cond: Conditioning, device: torch.device) -> dict[str, Any]:
    """Return the values of the state, tensors on a device. Raises ValueError if the conditioning holds no state."""
    if STATE not in cond.info:
        raise ValueError("the conditioning was made by another class. Encode the prompt with this pipeline.")
    pictured = json.loads(cond.info[PICTURED])
    left = json.loads(cond.info.get(ON_HOST, "[]"))
    tensors = replace(cond, tensors={n: v for n, v in cond.tensors.items() if n not in (*pictured, *left)}).to(device)
    tensors |= {name: cond.tensors[name] for name in left}
    shown = {name: cond.tensors[name] for name in pictured}
    pictures = {name: as_handed(tuple(one) if isinstance(one, list) else one) for name, one in shown.items()}
    plain = json.loads(cond.info[STATE])
    dtypes = {name: getattr(torch, one[_DTYPE]) for name, one in plain.items() if isinstance(one, dict)}
    return {**plain, **dtypes, **tensors, **pictures}


def _all(value: Any, kind: type) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, kind) for one in value)


def _is_picture(value: Any) -> bool:
    from PIL.Image import Image

    return isinstance(value, Image) or _all(value, Image)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | bool | int | float)
