"""Digests of the host's models, by their weights and facts. Anything without a safe digest is refused."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from enum import Enum
from numbers import Integral
from types import FunctionType
from typing import Any

import torch
from torch import nn

_HOSTS = ("comfy.", "comfy_kitchen.")  # code that the host's version stands for


class NoDigestError(TypeError):
    """There is no safe digest of something."""


def digest(value: Any) -> str:
    """Return the digest of plain data and tensors. Raises NoDigestError for anything else."""
    return hashlib.sha256(json.dumps(plain(value)).encode()).hexdigest()


def plain(value: Any) -> Any:
    """Return data as JSON holds it, with its types, and tensors as digests. Raises NoDigestError for anything else."""
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if isinstance(value, torch.Tensor):
        return tensor_digest(value)
    if isinstance(value, dict):
        return ["dict", sorted(([plain(k), plain(v)] for k, v in value.items()), key=json.dumps)]
    if isinstance(value, set | frozenset):
        return ["set", sorted((plain(item) for item in value), key=json.dumps)]
    if kind in (list, tuple, torch.Size):
        return [kind.__name__, *map(plain, value)]
    if isinstance(value, torch.dtype | torch.device):
        return ["torch", str(value)]
    if isinstance(value, Enum):
        return ["enum", path(kind), value.name]
    if isinstance(value, Integral):  # numpy's
        return int(value)
    return _plain_code(value, kind)


def _plain_code(value: Any, kind: type) -> Any:
    if isinstance(value, type) and value.__module__.startswith(_HOSTS):
        return ["class", path(value)]
    if isinstance(value, FunctionType):
        if value.__module__.startswith(_HOSTS) and not (
            value.__closure__ or value.__defaults__ or value.__kwdefaults__
        ):
            return ["function", path(value)]
    elif kind.__module__.startswith("comfy.weight_adapter") or (
        dataclasses.is_dataclass(value) and kind.__module__.startswith(_HOSTS)
    ):
        return ["object", path(kind), plain(vars(value))]
    raise NoDigestError(path(kind))


def tensor_digest(tensor: torch.Tensor) -> list[Any]:
    """Type, shape and content. NoDigestError for kinds of tensor that only their own code can read."""
    if type(tensor).__module__.startswith("comfy_kitchen."):  # quantized: plain tensors, and how to read them
        names, how = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        return ["quantized", plain(how), *(tensor_digest(getattr(tensor, name)) for name in names)]
    with torch.inference_mode():
        held = tensor if tensor.is_meta else tensor.detach().cpu()
        if type(held) not in (torch.Tensor, nn.Parameter) or held.is_meta or held.layout != torch.strided:
            raise NoDigestError(path(type(tensor)))
        content = held.contiguous().view(-1).view(torch.uint8).numpy()
    return ["tensor", str(tensor.dtype), list(tensor.shape), hashlib.sha256(content.data).hexdigest()]


def base_tensors(patcher: Any) -> dict[str, torch.Tensor]:
    """Return a model's weights and buffers by name, as they were before any patch or cast."""
    model = patcher.model
    named = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }
    originals = {name: kept.weight for name, kept in patcher.backup.items()}
    originals |= getattr(patcher, "backup_buffers", {})
    originals |= {name: kept[0] for name, kept in getattr(patcher, "hook_backup", {}).items()}
    return {name: originals.get(name, tensor) for name, tensor in named.items()}


def path(thing: Any) -> str:
    """Return the module and name of a class or function."""
    return f"{thing.__module__}.{thing.__qualname__}"
