"""The LoRAs of a pipeline: files and strengths in, the adapters of each of its transformers out."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ...memory.files import placed
from ...memory.weights.branches import ActiveAdapters, Adapter
from ...memory.weights.unit import ManagedModel
from ..options import plain_number
from .build import Branches, LeaveOut, build
from .file import LoraFile
from .weight_names import Converters

log = logging.getLogger("ballast")

Strength = float | Mapping[str, float]  # for all models that a file is for, or for those that are named
Parts = str | Sequence[str]  # of models, to be left out where a model has none: "k_img, v_img"
Given = Iterable[tuple[str | Path, Strength] | tuple[str | Path, Strength, Parts]]

_EXPERTS = {"high": "transformer", "low": "transformer_2"}  # of noise
_NOISE = re.compile(r"(high|low)[\W_]*noise")
# Ends of the names of files, after "high" or "low": of other words nobody knows what is low.
_TECHNICAL = re.compile(r"(?:(?:v|r|e|fp|bf|rank|epoch|step)?\d+\w*|lora|model|comfy(?:ui)?|steps?|rank|epoch)")


@dataclass(frozen=True, eq=False)
class Lora:
    """A file that was read: its adapters, and the strength of each, by the name of their unit."""

    path: Path
    digest: str
    adapters: Mapping[str, Adapter]
    strengths: Mapping[str, float]
    named: bool  # whether strengths were given by name
    leave_out: LeaveOut


def open_loras(
    given: Given | None,
    units: Sequence[ManagedModel],
    pipeline_class: Any,
    known: Sequence[Lora] = (),
    converters: Converters | None = None,
) -> tuple[Lora, ...]:
    """Read LoRA files for these models, see `build`; those `known` are not read again.

    Raises FileNotFoundError, or ValueError in one line that names the file.
    """
    make = functools.partial(build, pipeline_class=pipeline_class, converters=converters)
    return tuple(_open(*each, units, make, known) for each in map(_spec, given or ()))


def expert_of(path: Path) -> str | None:
    """Which of two transformers a file is for, by the words high noise or low noise in its name; None without."""
    name = path.stem.lower()
    found = set(_NOISE.findall(name))
    if not found:
        words = re.split(r"[\W_]+", name)
        ends = [i for i, word in enumerate(words) if not _TECHNICAL.fullmatch(word)]
        found = {words[i] for i in ends[-1:]} & _EXPERTS.keys()
    return _EXPERTS[found.pop()] if len(found) == 1 else None


def adapters_of(loras: Sequence[Lora], unit: ManagedModel) -> ActiveAdapters:
    """Return the adapters of a unit, with their strengths."""
    return tuple((lora.adapters[unit.name], lora.strengths[unit.name]) for lora in loras if unit.name in lora.adapters)


def notes_of(lora: Lora, units: Sequence[ManagedModel]) -> list[str]:
    """Return notes on a LoRA among these models: which of two transformers it is for, and parts left out."""
    told = []
    if set(_EXPERTS.values()) <= {unit.name for unit in units}:
        noise = {name: level for level, name in _EXPERTS.items()}
        ours = " and ".join(f"{name} ({noise[name]} noise)" for name in lora.adapters if name in noise)
        by = ", by the file's name" if not lora.named and list(lora.adapters) == [expert_of(lora.path)] else ""
        told.append(f"used for {ours}{by}")
    return told + [lora.leave_out.told()] * bool(lora.leave_out.names)


def refuse_scales(loras: Sequence[Lora], options: Mapping[str, Any]) -> None:
    """Raise ValueError for an option of stock diffusers that says how much LoRAs count: branches do not follow it."""
    for name, value in options.items():
        inside = name.endswith("attention_kwargs") and isinstance(value, Mapping) and value.get("scale") is not None
        if loras and (inside or (name == "lora_scale" and value is not None)):
            raise ValueError(f"{name} says how much LoRAs count. Say it by their strengths, and leave it out.")


def named(loras: Sequence[Lora], units: Sequence[ManagedModel]) -> list[list[Any]]:
    """Return the units' LoRAs as plain data: unit, digest of the file, strength. Those of strength 0 are left out."""
    names = [(unit.name, lora) for unit in units for lora in loras if lora.strengths.get(unit.name)]
    return [[name, lora.digest, lora.strengths[name], *sorted(lora.leave_out.names)] for name, lora in names]


def branches(units: Sequence[ManagedModel]) -> dict[str, Any]:
    """Return the structure of the units' adapters as a part of a key; empty without adapters."""
    adapters = {
        unit.name: [adapter.structure() for adapter, _ in unit.active_adapters]
        for unit in units
        if unit.active_adapters
    }
    return {"loras": adapters} if adapters else {}


def _spec(given: Any) -> tuple[Path, Strength, tuple[str, ...]]:
    """Return a file, its strength, and the parts to leave out. Raises ValueError, in one line, for anything else."""
    try:
        path, strength, *others = given
        (parts,) = others or ("",)
        parts = re.split(r"[,\s]+", parts) if isinstance(parts, str) else parts
        return placed(path), plain_number(strength), tuple(part.strip(".") for part in parts if part.strip("."))
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{str(given)[:200]!r} is no LoRA with its strength. Give pairs, such as ('detail.safetensors', 0.8)."
        ) from error


def _is_number(value: Any) -> bool:
    with contextlib.suppress(OverflowError):
        return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    return False


def _open(
    path: Path,
    strength: Strength,
    parts: tuple[str, ...],
    units: Sequence[ManagedModel],
    make: Callable[..., Branches],
    known: Sequence[Lora],
) -> Lora:
    names = [unit.name for unit in units]
    by_name = {name: plain_number(value) for name, value in strength.items()} if isinstance(strength, Mapping) else {}
    for value in by_name.values() if isinstance(strength, Mapping) else [strength]:
        if not _is_number(value):
            told = repr(value)[:40]
            raise ValueError(f"the strength of {path} is {told}, which is no number. Give one, such as 0.8.")
    if isinstance(strength, Mapping) and not by_name:
        raise ValueError(f"the strength of {path} names no model. Give a number, or name one of {', '.join(names)}.")
    if unknown := sorted(by_name.keys() - set(names)):
        raise ValueError(f"{path} has a strength for {', '.join(unknown)}. Name one of {', '.join(names)}.")
    file, expert, leave_out = LoraFile.open(path), expert_of(path), LeaveOut(parts)
    for lora in known:
        wanted = set(by_name) if isinstance(strength, Mapping) else set(lora.adapters)
        same = lora.digest == file.digest and lora.leave_out.parts == parts and expert_of(lora.path) == expert
        if same and lora.named == isinstance(strength, Mapping) and set(lora.adapters) == wanted:
            return replace(lora, path=path, strengths=_strengths(strength, lora.adapters))
    has_text = file.changes_text  # encoders are built for no other
    modules = {u.name: u.module for u in units if has_text or u.role != "text_encoder"}
    found = make(file, modules=modules, leave_out=leave_out)
    if not by_name and len(found) == 1 and names[0] in found and expert in modules:
        by_name = dict.fromkeys([expert], 0.0)
    if by_name.keys() <= found.keys():
        found = {name: parts for name, parts in found.items() if name in (by_name or found)}
    else:
        # Each is what the file is for: one for the second transformer is mostly named as one for the first.
        leave_out.names.clear()
        found = {
            u.name: make(file, modules={names[0]: u.module}, leave_out=leave_out)[names[0]]
            for u in units
            if u.name in by_name
        }
    if leave_out.names:
        log.warning("Ballast: %s: %s.", path, leave_out.told())
    adapters = {name: Adapter((file.digest, name, *leave_out.names), parts) for name, parts in found.items()}
    return Lora(path, file.digest, adapters, _strengths(strength, adapters), isinstance(strength, Mapping), leave_out)


def _strengths(strength: Strength, adapters: Iterable[str]) -> dict[str, float]:
    return {name: float(strength[name] if isinstance(strength, Mapping) else strength) for name in adapters}
