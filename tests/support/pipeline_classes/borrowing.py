"""Pipelines that diffusers does not test, built of the parts of one that it does."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
from PIL import Image

from .catalogue import Testers, public_classes


def wanted(cls: Any) -> dict[str, str]:
    """What a pipeline class must be given, and the name of each class."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return {p.name: _type(p) for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}


def _type(parameter: inspect.Parameter) -> str:
    name = getattr(parameter.annotation, "__name__", str(parameter.annotation)).split(".")[-1]
    return "scheduler" if "Scheduler" in name else name.removesuffix("Fast").removesuffix("Pil")


def lenders(cls: Any, testers: Testers) -> list[Any]:
    """The test classes whose parts a pipeline class can be built of, the nearest relative first."""
    needs, public = wanted(cls), public_classes()
    found = []
    for name, candidates in testers.items():
        has = wanted(public[name])
        near = _package(public[name]) == _package(cls)
        fits = needs.keys() <= has.keys() if near else needs.items() <= has.items()
        if needs and fits:
            found += [(not near, len(has), name, tester) for tester in candidates]
    return [tester for *_, tester in sorted(found, key=lambda entry: entry[:3])]


def _package(cls: Any) -> str:
    return cls.__module__.rpartition(".")[0]


def picture(side: int = 32) -> Image.Image:
    return Image.fromarray(np.random.RandomState(0).randint(0, 255, (side, side, 3), dtype=np.uint8))


def further_inputs(cls: Any, given: dict[str, Any]) -> dict[str, Any]:
    """Pictures for the arguments of a call that have no default, and of those that are nothing without."""
    side = given.get("height") or 32
    made = {
        "image": picture(side),
        "control_image": picture(side),
        "mask_image": picture(side).convert("L"),
        "mask": picture(side).convert("L"),
        "control_mask": picture(side).convert("L"),
        "video": [picture(side)] * 5,
        "mask_video": [picture(side).convert("L")] * 5,
        "control_video": [picture(side)] * 5,
    }
    calls = inspect.signature(cls.__call__).parameters
    return {name: value for name, value in made.items() if name in calls and name not in given}
