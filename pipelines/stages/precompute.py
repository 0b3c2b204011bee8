"""Compute the modules that see no latents before the sampling loop, for all of its steps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from torch import nn

from ...memory.errors import release_frames
from ...memory.once.recording import Recorder, ShapesOf
from ...memory.once.rehearsal import Rehearsal
from ...memory.once.tables import Tables
from ...memory.weights.unit import ManagedModel
from ..planning.once_plans import Split
from ..runner import Runner, Stage

if TYPE_CHECKING:
    from ..models.model import Model

log = logging.getLogger("ballast")

# Errors of code that is run on shapes, where it wants values. Interrupts are none of these.
_FAILS = (RuntimeError, TypeError, ValueError, AttributeError, LookupError)

Loops = Callable[[torch.device, Mapping[str, nn.Module]], None]


def precompute(
    runner: Runner, found: Split, model: Model, loops: Loops, stage: Stage[None]
) -> dict[ManagedModel, Tables] | None:
    """Return the known calls of the units, with results for those of the `stage`.

    None where the model cannot be run so, and is to run with all its weights.

    `loops` runs the sampling loops of the stage, for the calls that they make. `stage` calls each unit once.
    """
    manager, units = runner.manager, model.denoisers
    device = manager.execution_device(stage.strategy)
    tables = {unit: Tables(found.once[unit.name].paths if unit.name in found.once else ()) for unit in units}
    try:
        shapes = {unit: ShapesOf(unit.skeleton(), device, model.stand_ins) for unit in units}
        with manager.between_stages(), torch.inference_mode(), ExitStack() as exits:
            for unit in units:
                unit.runs_on(device)
                exits.enter_context(Recorder(unit.module, tables[unit], shapes[unit]).recording())
            loops(device, {unit.name: unit.module for unit in units})
            for each in shapes.values():
                each.clear()
        with found.calling(units, computes_once=True), ExitStack() as exits:
            for unit in stage.units:
                exits.enter_context(Rehearsal(unit.module, tables[unit], shapes[unit]).instead())
            if stage.units:
                runner.run(stage)
    except BaseException as error:
        release_frames(error)
        for table in tables.values():  # this frame is in the traceback too
            table.forget()
        if not isinstance(error, _FAILS):
            raise
        log.info("Ballast: all weights come in each step: %s", " ".join(str(error).split())[:200])
        return None
    return tables
