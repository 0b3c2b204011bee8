"""The call of a module that sees a picture before the stock call samples, to run in a stage of its own."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from ...memory.planning.forecast import Forecast
from ...memory.weights.interpose import interpose
from ...memory.weights.unit import ManagedModel
from ..planning.forecasts import Forecaster, shapes_in
from ..planning.plans import SEEING


@dataclass(frozen=True)
class ModuleCall:
    """The call of a unit, or of a `part` in it, called `name` in keys."""

    name: str
    unit: ManagedModel
    part: str
    args: Any
    kwargs: Any

    def run(self, device: torch.device, module: nn.Module) -> Any:
        """Return what the unit answers on the device."""
        given = (self.args, self.kwargs)
        args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), given)
        return module(*args, **kwargs)

    @contextmanager
    def entered(self, module: nn.Module) -> Iterator[None]:
        """Redirect the calls of the unit to the part until the block ends, so that its weights come too."""
        part = self.part
        undo = interpose(module, lambda _, args, kwargs: module.get_submodule(part)(*args, **kwargs)) if part else None
        try:
            yield
        finally:
            if undo:
                undo()

    def key(self, forecaster: Forecaster) -> str | None:
        """Return the key of the call's forecast."""
        return forecaster.key(stage=SEEING, unit=self.name, **shapes_in({"args": self.args, **self.kwargs}))

    def dry_run(self, forecaster: Forecaster) -> tuple[Forecast, Any]:
        """Return the call's forecast by a dry run, and the answer, which has shapes only."""
        module = self.unit.skeleton()
        with self.entered(module):
            return forecaster.dry_run({self.unit.name: module}, functools.partial(self.run, module=module))
