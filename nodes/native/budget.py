"""A VRAM budget for sampling with ComfyUI's own MODEL, by what it offers to packs: wrappers on a clone.

With dynamic VRAM the host leaves more of the card free while the sampler runs, and moves weights out by itself.
Without, the budget is kept when the model is loaded: other models leave, then as many of its weights as it takes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...memory.accelerator import Accelerator, PeakMeter
from ...memory.host import management as host
from ...memory.host.headroom import headroom
from ...memory.sizes import format_bytes
from .estimate import expected

log = logging.getLogger("ballast")

_KEY = "ballast_vram_budget"
_KINDS = ("OUTER_SAMPLE", "PREPARE_SAMPLING", "APPLY_MODEL")  # of the host's wrappers


@dataclass(frozen=True)
class Budgeted:
    """A MODEL with a budget, or as it came, and what was done, for the node."""

    model: Any
    summary: str


def with_budget(patcher: Any, budget_bytes: int, tell: Callable[[str], None]) -> Budgeted:
    """A clone that samples within a budget; the MODEL itself where that cannot be, with the reason.

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
    """The budget of a MODEL in bytes, if it has one."""
    from comfy.patcher_extension import WrappersMP

    wrappers = getattr(patcher, "wrappers", {}).get(getattr(WrappersMP, _KINDS[0], ""), {}).get(_KEY, [])
    return next((wrapper.__self__.bytes for wrapper in wrappers), None)


def _why_not(patcher: Any) -> str:
    """Why the host cannot keep a budget for this model; empty if it can."""
    from comfy import patcher_extension

    known = getattr(patcher_extension, "WrappersMP", None)
    if not all(hasattr(known, kind) for kind in _KINDS) or not hasattr(patcher, "add_wrapper_with_key"):
        return "This ComfyUI is too old for a budget: it has no wrappers around its samplers"
    if torch.device(patcher.load_device).type == "cpu":
        return "This model runs on the CPU, where there is no VRAM to budget"
    if host.is_dynamic(patcher) and headroom() is None:
        return (
            "The dynamic VRAM of this ComfyUI takes no limit while it runs: update it (comfy-aimdo), or start it with "
            "--disable-dynamic-vram"
        )
    return ""


class _Run:
    """One sampling: its model, its guidance, and the most that was seen on the device."""

    def __init__(self, patcher: Any, guidance: float | None) -> None:
        self.patcher, self.guidance = patcher, guidance
        self.peak_bytes = self.held_bytes = 0
        self._peaks = PeakMeter(Accelerator(torch.device(patcher.load_device)))
        self._peaks.take()  # from which on it counts

    def look(self) -> None:
        pages = sum(host.page_bytes(model.patcher) for model in host.loaded_models())
        self.peak_bytes = max(self.peak_bytes, self._peaks.take() + pages)
        self.held_bytes = max(self.held_bytes, int(self.patcher.loaded_size()))


class _Budget:
    """The wrappers of one budget, and the run that they are in."""

    def __init__(self, bytes: int, tell: Callable[[str], None]) -> None:
        self.bytes, self._tell = bytes, tell
        self._run: _Run | None = None

    def sample(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around the whole sampling: the headroom of dynamic VRAM, and what the run took."""
        guider = executor.class_obj
        on = torch.device(guider.model_patcher.load_device)
        if on.type == "cpu":
            return executor(*args, **kwargs)
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
        """Around the loading of the models: without dynamic VRAM, no more weights on the card than the budget has."""
        if torch.device(patcher.load_device).type == "cpu" or host.is_dynamic(patcher):
            return executor(patcher, shape, conditionings, *args, **kw)
        guidance = self._run.guidance if self._run else None
        working = expected(patcher, shape, conditionings).of(guidance)
        shape = _filling(patcher, shape, conditionings, self.bytes - working)
        made = executor(patcher, shape, conditionings, *args, **kw)
        # It knows the free memory only roughly, and not at all with --highvram.
        on, buffers = patcher.load_device, int(getattr(patcher.model, "model_offload_buffer_memory", 0))
        over = host.held_bytes(on) + buffers + working - self.bytes
        over -= host.shrink_others(over, on, [patcher, *made[2]])
        if over > 0:
            patcher.partially_unload(patcher.offload_device, over)
            Accelerator(on).empty_cache()
        return made

    def run(self, executor: Any, *args: Any, **kwargs: Any) -> Any:
        """Around each call of the model: pages come and go."""
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
        text = "; ".join(said)
        log.info("Ballast: VRAM budget: %s", text)
        self._tell(text)


def _filling(patcher: Any, shape: Sequence[int], conditionings: Mapping[str, Any], room: int) -> Sequence[int]:
    """The shape of latents by whose estimate the host fills `room` bytes of its device with weights, and no more.

    It loads as many weights as are free beside that estimate. The models that share the sampling take theirs first.
    """
    from comfy import sampler_helpers

    beside = sampler_helpers.get_additional_models(conditionings, patcher.model_dtype())[0]
    mm = host.model_management()
    if mm is None or sum(int(each.model_size()) for each in (patcher, *beside)) <= room:
        return shape
    on = patcher.load_device
    could_be_free = mm.get_free_memory(on) + host.held_bytes(on)
    wanted = could_be_free - max(0, room) - mm.extra_reserved_memory()
    one, two = (expected(patcher, [count * shape[0], *shape[1:]], conditionings).one_bytes for count in (1, 2))
    count = 1 + int(max(0, wanted - one) // (two - one)) if two > one else 1
    return [count * shape[0], *shape[1:]]
