"""What a model is asked for in one run, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from ..models.model import Model


@dataclass(frozen=True)
class Request:
    """Arguments of `sample` that a model checks: sizes in pixels, and `options` of its own."""

    width: int | None = None
    height: int | None = None
    steps: int = 1
    guidance: float | None = None
    frames: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """The pictures of one run, by arguments of its call, and the model that takes them.

    `own` names the arguments that may hold something for each picture of a batch, with the words that users know.
    """

    model: Model
    pictures: Mapping[str, tuple[torch.Tensor, ...]] = field(default_factory=dict)
    strength: float | None = None
    own: Mapping[str, str] = field(default_factory=dict)
