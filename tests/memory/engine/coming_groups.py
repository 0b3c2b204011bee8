"""Modules whose groups stay, and have yet to come."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import pytest
import torch
from ballast.memory import ManagedModel
from ballast.memory.engine.deferred_uploads import DeferredUploads
from ballast.memory.engine.engine import Engine
from ballast.memory.engine.pending_reads import DiskTimes, PendingReads
from ballast.memory.engine.ring import RingSlot, WeightGroup
from ballast.memory.simulated import clock
from ballast.memory.weights.groups import CallOrder
from ballast.memory.weights.reader import Look
from ballast.memory.weights.stored import Stored, stored_tensors
from safetensors.torch import save_file
from streamed_models import Blocks, nbytes, noise, run, unit_engine
from torch import nn

COUNT = 8
PATHS = tuple(f"blocks.{i}.{layer}" for i in range(COUNT) for layer in ("up", "down"))  # a group each
ALL = nbytes(Blocks(COUNT))


def expected() -> torch.Tensor:
    return run(Blocks(COUNT), noise().cpu())


def stored(folder: Path, module: nn.Module, in_ram: Collection[str] = ()) -> dict[str, Stored]:
    """Write a module's weights to a file, and put on `meta` what is of none of the modules `in_ram`."""
    save_file(dict(module.state_dict()), folder / "dit.safetensors")
    for path, part in module.named_modules():
        for key, weight in part._parameters.items():
            if weight is not None and path not in in_ram:
                part._parameters[key] = nn.Parameter(weight.to("meta"), requires_grad=False)
    return stored_tensors([folder / "dit.safetensors"])


def coming(
    folder: Path, kind: str, weights_bytes: int = ALL, look: Look = lambda read: None, timed: bool = False
) -> tuple[ManagedModel, Engine]:
    """A module in place, of which the disk was let give what is in no group. Who waits for more calls `look`."""
    save_file(dict(Blocks(COUNT).state_dict()), folder / "dit.safetensors")

    def build() -> Blocks:
        with torch.device("meta"):
            return Blocks(COUNT)

    unit = ManagedModel(
        "dit", "transformer", build, Blocks, stored=lambda: stored_tensors([folder / "dit.safetensors"])
    )
    unit.learn(CallOrder(PATHS))
    unit.load(look, behind=True)
    assert unit.reading
    times = DiskTimes(unit.reading.order, clock.read_from_disk) if timed else None
    incoming = PendingReads(unit.reading, times)
    placement = unit_engine(unit, kind, weights_bytes, incoming)
    placement.place()
    return unit, placement


def end(unit: ManagedModel, placement: Engine) -> None:
    placement.remove()
    unit.await_reading()
    unit.drop()


def followed(placement: Engine, monkeypatch: pytest.MonkeyPatch) -> list[WeightGroup]:
    """The groups in the order in which their copies are asked for."""
    asked: list[WeightGroup] = []
    send, load = DeferredUploads._send, getattr(placement, "_load", None)

    def sent(self: DeferredUploads, group: WeightGroup) -> None:
        asked.append(group)
        send(self, group)

    def loaded(slot: RingSlot) -> None:
        asked.append(slot.group)
        load(slot)

    monkeypatch.setattr(DeferredUploads, "_send", sent)
    if load:
        monkeypatch.setattr(placement, "_load", loaded)
    return asked
