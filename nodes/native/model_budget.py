"""A VRAM budget for sampling with ComfyUI's own MODEL, by what it offers to packs: wrappers on a clone.

With dynamic VRAM the host leaves more of the card free while the sampler runs, and moves weights out by itself.
Without, the budget is kept when the model is loaded: other models leave, then as many of its weights as it takes.
"""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...memory.accelerator import Accelerator, PeakMeter
from ...memory.host import management as host
from ...memory.host.headroom import headroom
from ...memory.memory_manager import manager
from ...memory.sizes import format_bytes
from .activations import expected

log = logging.getLogger("ballast")

_KEY = "ballast_vram_budget"
_KINDS = ("OUTER_SAMPLE", "PREPARE_SAMPLING", "APPLY_MODEL")  # kinds of the host's wrappers, of `_Budget.wrappers`


@dataclass(frozen=True)
class Budgeted:
    """A MODEL with a budget, or as it came, and what was done, for the node."""

    model: Any
    summary: str


def with_budget(patcher: Any, budget_bytes: int, tell: Callable[[str], None]) -> Budgeted:
    """Return a clone that samples within a budget; the MODEL itself where that cannot be, with the reason.

    `tell` is given a line after each sampling.
    """
    if why := _why_not(patcher):
        return Budgeted(patcher, f"{why}. The model goes on unchanged.")
    from comfy.patcher_extension import WrappersMP

    clone = patcher.clone()
    budget = _Budget(budget_bytes, tell)
    for kind, wrapper in zip(_KINDS, (budget.sample, budget.prepare, budget.run), strict=True):
        clone.remove_wrappers_with_key(getattr(WrappersMP, kind), _KEY)  # the last node counts
        clone.add_wrapper_with_key(getattr(WrappersMP, kind), _KEY, wrapper)
    total, on = Accelerator(clone.load_device).total_bytes(), clone.load_device
    rest = "dynamic VRAM leaves the rest free" if host.is_dynamic(clone) else "weights that do not fit stay in RAM"
    return Budgeted(clone, f"target {format_bytes(budget_bytes)} of {format_bytes(total)} on {on}; {rest}")


def budget_of(patcher: Any) -> int | None:
    """Return the budget of a MODEL in bytes, if it has one."""
    from comfy.patcher_extension import WrappersMP

    wrappers = getattr(patcher, "wrappers", {}).get(getattr(WrappersMP, _KINDS[0], ""), {}).get(_KEY, [])
    return next((wrapper.__self__.bytes for wrapper in wrappers), None)


def _why_not(patcher: Any) -> str:
    """Return why the host cannot keep a budget for this model; empty if it can."""
    from comfy import patcher_extension

    known = getattr(patcher_extension, "WrappersMP", None)
    if not all(hasattr(known, kind) for kind in _KINDS) or not hasattr(patcher, "add_wrapper_with_key"):
        return "This ComfyUI is too old for a budget: it has no wrappers around its samplers"
    if _is_cpu(patcher):
        return "This model runs on the CPU, where there is no VRAM to budget"
    if host.is_dynamic(patcher) and headroom() is None:
        return (
            "The dynamic VRAM of this ComfyUI takes no limit while it runs: update it (comfy-aimdo), or start it with "
            "--disable-dynamic-vram"
        )
    return ""


def _is_cpu(patcher: Any) -> bool:
    return torch.device(patcher.load_device).type == "cpu"


class _Run:
    """One sampling: its model, its guidance, and the most bytes that were seen on the device.

    `working_bytes` are what the host expects activations to take, where it decides by that what stays.
    """

    def __init__(self, patcher: Any, guidance: float | None) -> None:
        self.patcher, self.guidance = patcher, guidance
        self.peak_bytes = self.held_bytes = self.working_bytes = 0
        self._peaks = PeakMeter(Accelerator(torch.device(patcher.load_device)))
        self.begin()

    def begin(self) -> None:
        """Forget the peak so far."""
        self._peaks.take()

    def look(self) -> None:
        """Record what is on the device now, and the peak since the last look."""
        pages = sum(host.page_bytes(model.patcher) for model in host.loaded_models())
        self.peak_bytes = max(self.peak_bytes, self._peaks.take().allocated_bytes + pages)
        self.held_bytes = max(self.held_bytes, int(self.patcher.loaded_size()))


class _Budget:
    """The wrappers of one budget, and the run that they are in."""

    def __init__(self, bytes: int, tell: Callable[[str], None]) -> None:
        self.bytes, self._tell = bytes, tell
        self._run: _Run | None = None

    def sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap the whole sampling: raise the headroom of dynamic VRAM, and report what the run took."""
        guider = executor.class_obj
        if _is_cpu(guider.model_patcher):
            return executor(*args, **kwargs)
        on = torch.device(guider.model_patcher.load_device)
        manager(on).timeline.target_bytes = self.bytes
        before, self._run = self._run, _Run(guider.model_patcher, getattr(guider, "cfg", None))
        control = headroom() if host.is_dynamic(guider.model_patcher) else None
        free_bytes = max(0, Accelerator(on).total_bytes() - self.bytes)
        try:
            with control.at_least(free_bytes) if control else contextlib.nullcontext():
                return executor(*args, **kwargs)
        finally:
            run, self._run = self._run, before
            run.look()
            self._report(run)

    def prepare(
        self, executor: Any, patcher: Any, shape: Sequence[int], conditionings: Mapping[str, Any], *args: Any, **kw: Any
    ) -> Any:
        """Wrap the loading of the models: without dynamic VRAM, let no more weights on the card than the budget has."""
        if _is_cpu(patcher) or host.is_dynamic(patcher):
            return executor(patcher, shape, conditionings, *args, **kw)
        from comfy import sampler_helpers

        run = self._run
        working_bytes = expected(patcher, shape, conditionings).with_guidance(run.guidance if run else None)
        room = self.bytes - working_bytes
        beside = sampler_helpers.get_additional_models(conditionings, patcher.model_dtype())[0]  # such as a ControlNet
        _shrink([patcher, *beside], room)  # what was there before
        if run:
            run.begin()
            run.working_bytes = working_bytes
        shape = _filling([patcher, *beside], shape, conditionings, room)
        made = executor(patcher, shape, conditionings, *args, **kw)
        _shrink([patcher, *made[2]], room)  # the host knows the free memory only roughly, with --highvram not at all
        return made

    def run(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Wrap each call of the model: pages come and go."""
        made = executor(*args, **kwargs)
        if self._run and host.is_dynamic(self._run.patcher):
            self._run.look()
        return made

    def _report(self, run: _Run) -> None:
        size, peak = int(run.patcher.model_size()), run.peak_bytes
        held = format_bytes(min(run.held_bytes, size))
        said = [f"peak {format_bytes(peak)} of {format_bytes(self.bytes)}", f"{held} of {format_bytes(size)} stayed"]
        if peak > self.bytes:
            said.append(f"{format_bytes(peak - self.bytes)} over the target")
        elif run.held_bytes < size and run.working_bytes:
            said.append(f"ComfyUI expects {format_bytes(run.working_bytes)} of activations")
        if run.held_bytes < size and not host.is_dynamic(run.patcher) and run.patcher.lowvram_patch_counter():
            said.append("LoRAs on weights in RAM as ComfyUI computes them: the picture can differ slightly")
        text = "; ".join(said)
        log.info("Ballast: VRAM budget: %s", text)
        self._tell(text)


def _shrink(models: Sequence[Any], room_bytes: int) -> None:
    """Let weights leave the device of `models` until no more than `room_bytes` stay: those of other models first."""
    on = models[0].load_device
    host.shrink_others(host.held_bytes(on) - room_bytes, on, models)
    for model in models:
        while (over := host.held_bytes(on) - room_bytes) > 0:
            if model.partially_unload(model.offload_device, over) <= 0:
                break
    Accelerator(on).empty_cache()


def _filling(
    models: Sequence[Any], shape: Sequence[int], conditionings: Mapping[str, Any], room_bytes: int
) -> Sequence[int]:
    """Return the shape of latents for which the host keeps all but `room_bytes` of its device free.

    The host asks the model what latents take, and loads the weights that fit beside that. A larger batch takes more.
    `models`: the one that samples, then those that are loaded with it.
    """
    mm, patcher = host.model_management(), models[0]
    if mm is None or sum(int(each.model_size()) for each in models) <= room_bytes:
        return shape
    on = patcher.load_device
    wanted = mm.get_free_memory(on) + host.held_bytes(on) - max(0, room_bytes) - mm.extra_reserved_memory()
    one, two = (expected(patcher, [count * shape[0], *shape[1:]], conditionings).one_bytes for count in (1, 2))
    more = math.floor(max(0, wanted - one) / (two - one)) if two > one else 0
    return [(1 + more) * shape[0], *shape[1:]]
