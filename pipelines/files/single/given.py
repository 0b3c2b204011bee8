"""The files that a user gives for parts of a pipeline, the rest of which a base has: a diffusers folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..components import Component
from .component import transformer_component
from .contents import read_single, type_of
from .transformers import LAYOUTS

_TRANSFORMER = "transformer"


@dataclass(frozen=True)
class GivenFiles:
    """Single files of the transformer and, if given, of other parts."""

    transformer: Path

    def components(self) -> dict[str, Callable[[Component], Component]]:
        """What makes of a component of the base, by its name, the same with its weights from the file given for it.

        It raises FileNotFoundError, or ValueError in one line, for a file that is damaged, or not of that model.
        """
        return {_TRANSFORMER: self._transformer}

    def _transformer(self, base: Component) -> Component:
        single = read_single(self.transformer, LAYOUTS, "transformer", base.dtype or type_of(self.transformer))
        return transformer_component(base, single)
