"""Where a run can be broken off, for the tests: errors raised out of the device, out of files, out of the host's calls.

Nothing of the pack is replaced: what is put in between calls it as it was called, or raises in its place.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.memory import manager, simulated
from ballast.memory.host import management as host
from ballast.memory.planning.fit import sizes_of
from ballast.memory.planning.planner import window_bytes
from ballast.memory.simulated import card as cards
from ballast.memory.simulated.tensor import SimTensor
from ballast.memory.weights import reader
from ballast.pipelines import Pipeline
from places import ROOT

KINDS = ("operator", "allocation", "copy", "read", "block")
STAGES = ("encode", "sample", "decode")
DEMO = ROOT / "demo" / "shapes"


class InterruptProcessingException(BaseException):  # noqa: N818 (the host's name)
    """What a new host raises when the user presses stop."""


class FaultError(Exception):
    """What no code of the pack expects."""


class _Point:
    """Calls through, and raises at the n-th call; 0 for never."""

    def __init__(self, at: int = 0, error: BaseException | None = None) -> None:
        self.at, self.error, self.passed = at, error, 0
        self._lock = threading.Lock()

    def __call__(self, *_: Any) -> None:
        with self._lock:
            self.passed += 1
            mine = self.passed == self.at
        if mine and self.error is not None:
            raise self.error

    def before(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def passing(*args: Any, **kwargs: Any) -> Any:
            self()
            return function(*args, **kwargs)

        return passing


@contextmanager
def _armed(kind: str, point: _Point) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if kind == "operator":
            dispatch = SimTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]
            patch.setattr(SimTensor, "__torch_dispatch__", classmethod(point.before(dispatch)))
        elif kind == "allocation":
            patch.setattr(cards.card, "allocate", point.before(cards.card.allocate))
        elif kind == "read":
            patch.setattr(reader, "_read_extent", point.before(reader._read_extent))
        elif kind == "block":  # what the host is asked at each block
            patch.setattr(host, "throw_if_interrupted", point.before(host.throw_if_interrupted))
        if kind == "copy":
            with simulated.watch(point):
                yield
        else:
            yield


@contextmanager
def raised_at(kind: str, at: int, error: BaseException) -> Iterator[None]:
    """Let the n-th pass of a kind of point from now raise."""
    with _armed(kind, _Point(at, error)):
        yield


def ram_for_windows(folder: Path) -> int:
    """RAM in which each model of a folder can be run from disk, whatever the order of its calls, and hardly more."""
    pipe = ballast.open_pipeline(folder, device="sim")
    units = (*pipe.encoders, *pipe.denoisers, pipe.decoder)
    return int(1.3 * max(window_bytes(sizes_of(unit), "streamed") for unit in units))


@dataclass
class Run:
    """A pipeline, the arguments of its stages, and what they gave when nothing disturbed them."""

    pipe: Pipeline
    encoding: dict[str, Any]
    sampling: dict[str, Any]
    expected: dict[str, Any]
    vram: int | None = None  # bytes, for sampling
    sat: str = ""  # how the transformer sat while it ran
    wrapped: set[str] = field(default_factory=set)  # by the libraries, for good
    held: BaseException | None = None  # the last error that was raised

    @classmethod
    def of(
        cls,
        name: str,
        folder: Path,
        strategy: str = "auto",
        tight: bool = False,
        from_disk: bool = False,
        **opening: Any,
    ) -> Run:
        """An open pipeline of a tiny family, or of the bundled model, which has run once.

        `tight` in the least VRAM, `from_disk` in RAM for little more than windows.
        """
        if from_disk:
            opening["ram"] = ram_for_windows(folder)
        pipe = ballast.open_pipeline(folder, device="sim", **opening)
        if name == "demo":
            run = cls(pipe, {"prompt": "a red circle on a blue background, left"}, {"steps": 1}, {})
        else:
            family = tiny.FAMILIES[name]
            width, height = family.size
            words = {"prompt": "a red boat", "negative_prompt": "grey" if family.negative else ""}
            size = {"width": width, "height": height, "steps": 1, "guidance": family.guidance, "frames": family.frames}
            run = cls(pipe, words | family.encode_kwargs, size | family.call_kwargs, {})
        run.sampling["strategy"] = strategy
        run.expected["encode"] = cond = run("encode")
        if tight:
            given = {key: value for key, value in run.sampling.items() if value is not None}
            run.vram = pipe.plan(**given | {"strategy": "streamed"}, cond=cond, vram=1).sampling.peak_vram_bytes
        run.expected["sample"] = run("sample", on_step=run._note)
        assert run.is_same("sample", run("sample"))
        run.expected["decode"] = run("decode")
        manager("sim").free()
        run.wrapped = {name for unit in run.units for name in _wrapped(unit.module, unit.name)}
        return run

    def __call__(self, stage: str, **more: Any) -> Any:
        """Run one stage on what the undisturbed one before it gave. Encoding is never taken from the cache."""
        if stage == "encode":
            self.pipe.cache.clear()
            return self.pipe.encode(**self.encoding)
        if stage == "sample":
            return self._sample(self.expected["encode"], **more)
        return self.pipe.decode(self.expected["sample"])

    def whole(self) -> Any:
        """Encode, sample and decode, each on what the one before it gives."""
        self.pipe.cache.clear()
        return self.pipe.decode(self._sample(self.pipe.encode(**self.encoding)))

    def _sample(self, cond: Any, **more: Any) -> torch.Tensor:
        self.pipe.runner = self.pipe.runner.set(vram_bytes=self.vram)
        try:
            return self.pipe.sample(cond, **self.sampling, **more)
        finally:
            self.pipe.runner = self.pipe.runner.set(vram_bytes=None)

    def _note(self, *_: Any) -> None:
        placement = self.pipe.denoisers[0].placement
        self.sat = placement.describe() if placement else ""

    def passes(self, stage: str, kind: str) -> int:
        """How often a stage passes such a point."""
        point = _Point()
        with _armed(kind, point):
            self(stage)
        return point.passed

    def broken(self, stage: str, kind: str, at: int, error: type[BaseException]) -> str:
        """Run a stage that a point of a kind raises in. Returns how it ended: with the error "raised", or otherwise.

        What is read ahead of a run that ends meanwhile, nobody waits for: then the result is the same.
        """
        self.held = raised = error("fault")
        point = _Point(at, raised)
        try:
            with _armed(kind, point):
                result = self(stage)
        except BaseException as caught:
            if not isinstance(caught, error | FaultError | InterruptProcessingException):
                raise
            return "raised" if caught is raised else f"another error came out: {caught!r}"
        ahead = kind == "read" or point.passed < at
        return "not needed" if ahead and self.is_same(stage, result) else "swallowed"

    def is_same(self, stage: str, result: Any) -> bool:
        """Whether a stage gave what it gave undisturbed, bit for bit."""
        expected = self.expected[stage]
        if stage != "encode":
            return torch.equal(result, expected)
        same = [torch.equal(result.tensors[name], tensor) for name, tensor in expected.tensors.items()]
        return all(same) and result.tensors.keys() == expected.tensors.keys()

    @property
    def units(self) -> list[Any]:
        return [*self.pipe.encoders, *self.pipe.denoisers, self.pipe.decoder]

    def left_over(self) -> list[str]:
        """What a broken run has left behind; nothing, unless something is wrong."""
        ours, found = manager("sim"), []
        held = sum(unit.resident_bytes for unit in self.units)
        if (allocated := simulated.stats().allocated_bytes) != held:
            found.append(f"{allocated - held} bytes on the device")
        for unit in self.units:
            if unit.leases or unit in ours._residency.leaving:
                found.append(f"{unit.name} has {unit.leases} leases")
            if unit.placement is None:
                found += [f"{unit.name}.{name} on the device" for name in _on_device(unit.module)]
                found += [f"{name} is wrapped" for name in sorted(_wrapped(unit.module, unit.name) - self.wrapped)]
            elif not self.pipe.keep:
                found.append(f"{unit.name} is in place")
        found += [thread.name for thread in threading.enumerate() if thread.name.startswith("ballast")]
        if (
            any(seat.before for seat in ours._residency._seats.values())
            or ours.budget._uncounted is not None
            or ours.timeline._stage is not None
        ):
            found.append("the manager is in a stage")
        if ours._lock._is_owned() or ours._stage_lock.is_owned():  # type: ignore[attr-defined]
            found.append("a lock is held")
        return found


def _on_device(module: torch.nn.Module) -> list[str]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return [name for name, tensor in tensors if tensor.device.type == "sim"]


def _wrapped(module: torch.nn.Module, unit: str) -> set[str]:
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    return {
        f"{unit}.{name}"
        for name, owner in module.named_modules()
        if "forward" in vars(owner) or any(vars(owner).get(hook) for hook in hooks)
    }
