"""Made-up answers of modules that see pictures: zeros of the right shapes, which a dry run tells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from ...memory.planning.forecast import Forecast
from ..planning.vae_forecasts import vae_forecasts
from .answers import Posterior

if TYPE_CHECKING:
    from ..models.model import Model


def imagine(model: Model, name: str, args: Any, kwargs: Any) -> tuple[Forecast, Any]:
    """Return the forecast of a module's call by a dry run, and zeros in the shape of its answer."""
    if name == "vae":
        posterior = Posterior()
        forecast, made = vae_forecasts(model, "encode", {}, 0, posterior).dry_run(*args)
        return forecast, posterior.whole(torch.zeros(made.shape))
    forecast, made = model.module_call(name, args, kwargs).dry_run(model.forecaster)
    return forecast, tree_map_only(torch.Tensor, lambda tensor: torch.zeros(tensor.shape, dtype=tensor.dtype), made)
