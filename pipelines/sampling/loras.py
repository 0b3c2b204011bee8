"""The LoRAs of a pipeline: files and strengths in, what each of its transformers wears out."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...memory.units.branches import Adapter, Worn
from ...memory.units.unit import ManagedModel
from ..files.lora import Branches, changes_text, check_lora, identity, read_lora
from ..files.lora_layouts import Converters

Strength = float | Mapping[str, float]  # for all models that a file is for, or for those that are named
Given = Iterable[tuple[str | Path, Strength]]


@dataclass(frozen=True, eq=False)
class Lora:
    """A file that was read: its adapters, and the strength of each, by the name of their unit."""

    path: Path
    digest: str
    adapters: Mapping[str, Adapter]
    strengths: Mapping[str, float]
    named: bool  # whether strengths were given by name


def open_loras(
    given: Given,
    units: Sequence[ManagedModel],
    pipeline_class: Any,
    known: Sequence[Lora] = (),
    converters: Converters | None = None,
) -> tuple[Lora, ...]:
    """Read LoRA files for these models, see `read_lora`; those `known` are not read again.

    Raises FileNotFoundError, or ValueError in one line that names the file.
    """
    reader = functools.partial(read_lora, pipeline_class=pipeline_class, converters=converters)
    return tuple(_open(path, strength, units, reader, known) for path, strength in map(_pair, given))


def worn_by(loras: Sequence[Lora], unit: ManagedModel) -> Worn:
    """What a model runs with."""
    return tuple((lora.adapters[unit.name], lora.strengths[unit.name]) for lora in loras if unit.name in lora.adapters)


def refuse_scales(loras: Sequence[Lora], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of stock diffusers that says how much LoRAs count: branches do not follow it."""
    for name, value in options.items():
        inside = name.endswith("attention_kwargs") and isinstance(value, Mapping) and value.get("scale") is not None
        if loras and (inside or (name == "lora_scale" and value is not None)):
            raise ValueError(f"{name} says how much LoRAs count. Say it by their strengths, and leave it out.")


def named(loras: Sequence[Lora], units: Sequence[ManagedModel]) -> list[list[Any]]:
    """What models run with, as plain data: unit, digest of the file, and strength; without what counts for nothing."""
    names = [(unit.name, lora) for unit in units for lora in loras if lora.strengths.get(unit.name)]
    return [[name, lora.digest, lora.strengths[name]] for name, lora in names]


def branches(units: Sequence[ManagedModel]) -> dict[str, Any]:
    """What models wear now, as far as it decides activations, as a part of a key; empty where they wear nothing."""
    worn = {unit.name: [adapter.structure() for adapter, _ in unit.worn] for unit in units if unit.worn}
    return {"loras": worn} if worn else {}


def _pair(given: Any) -> tuple[Path, Strength]:
    """A file and its strength. ValueError, in one line, for anything else."""
    try:
        path, strength = given
        return Path(path).expanduser(), strength
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{str(given)[:200]!r} is no LoRA with its strength. Give pairs, such as ('detail.safetensors', 0.8)."
        ) from error


def _is_number(value: Any) -> bool:
    with contextlib.suppress(OverflowError):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return False


def _open(
    path: Path, strength: Strength, units: Sequence[ManagedModel], read: Callable[..., Branches], known: Sequence[Lora]
) -> Lora:
    names = [unit.name for unit in units]
    by_name = dict(strength) if isinstance(strength, Mapping) else {}
    for value in by_name.values() if isinstance(strength, Mapping) else [strength]:
        if not _is_number(value):
            told = repr(value)[:40]
            raise ValueError(f"the strength of {path} is {told}, which is no number. Give one, such as 0.8.")
    if isinstance(strength, Mapping) and not by_name:
        raise ValueError(f"the strength of {path} names no model. Give a number, or name one of {', '.join(names)}.")
    if unknown := sorted(by_name.keys() - set(names)):
        raise ValueError(f"{path} has a strength for {', '.join(unknown)}. Name one of {', '.join(names)}.")
    check_lora(path)
    digest = identity(path)
    for lora in known:
        wanted = set(by_name) if isinstance(strength, Mapping) else set(lora.adapters)
        if lora.digest == digest and lora.named == isinstance(strength, Mapping) and set(lora.adapters) == wanted:
            return replace(lora, path=path, strengths=_strengths(strength, lora.adapters))
    has_text = changes_text(path)  # encoders are built for no other
    found = read(path, modules={u.name: u.module for u in units if has_text or u.role != "text_encoder"})
    if by_name.keys() <= found.keys():
        found = {name: parts for name, parts in found.items() if name in (by_name or found)}
    else:
        # Each is what the file is for: one for the second transformer is mostly named as one for the first.
        found = {u.name: read(path, modules={names[0]: u.module})[names[0]] for u in units if u.name in by_name}
    adapters = {name: Adapter((digest, name), parts) for name, parts in found.items()}
    return Lora(path, digest, adapters, _strengths(strength, adapters), isinstance(strength, Mapping))


def _strengths(strength: Strength, adapters: Iterable[str]) -> dict[str, float]:
    return {name: float(strength[name] if isinstance(strength, Mapping) else strength) for name in adapters}
