"""A plan of sampling with ComfyUI's own MODEL: what stays in VRAM, what passes through, and how long a step takes.

ComfyUI places the weights by its own rules, which are imitated here; activations come from a dry run. Nothing is
loaded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import psutil
import torch

from ...memory.accelerator import Accelerator
from ...memory.budget import spare_ram_bytes
from ...memory.host import management as host
from ...memory.host.flags import host_flags
from ...memory.planning.forecast import Operations
from ...memory.planning.planner import Plan
from ...memory.planning.runplan import RunPlan, StagePlan
from ...memory.probe import rates as measured_rates
from ...memory.rates import ASSUMED, Rates
from ...memory.sizes import format_bytes
from ...pipelines.planning.plans import NoBudgetError
from .budget import budget_of
from .estimate import Expected, expected
from .foresee import Foreseen, foresee
from .placing import Placing, batches_expected, loaded, loading_bytes, shrunk, taken_bytes
from .weights import Weights, weights_of

_SIZE = 1024  # pixels, where nothing says otherwise
_STEPS = 20
_CAVEAT = "An estimate: ComfyUI runs the model and places its weights."


@dataclass(frozen=True)
class Asked:
    """The work asked of a MODEL: latents of `shape`, batch first, in `steps` with a scale of guidance."""

    shape: tuple[int, ...]
    steps: int
    guidance: float
    prompt: Any = None

    @property
    def batch(self) -> tuple[int, ...]:
        """The shape of one call: with guidance the host runs both prompts in one batch."""
        return self.shape if self.guidance == 1 else (2 * self.shape[0], *self.shape[1:])


@dataclass(frozen=True)
class Facts:
    """The facts of a MODEL and its work, whatever the budget."""

    weights: Weights
    expects: Expected
    working_bytes: int
    operations: Operations
    dynamic: bool
    around: Mapping[str, tuple[int, int]] | None  # of a dry run, see `Foreseen`

    def describe(self, guidance: float) -> str:
        """Lines beside the tables: the weights by type, the host's figure beside ours."""
        theirs = format_bytes(self.expects.of(guidance))
        ours = f"{format_bytes(self.working_bytes)} by a dry run; ComfyUI expects {theirs}"
        if self.around is None:
            ours = f"{theirs} as ComfyUI expects; its code allows no dry run, so seconds count copies alone"
        return f"{self.weights.describe()}\nActivations: {ours}."


def is_model(thing: Any) -> bool:
    """Return whether it is a diffusion model as the host's loaders make them."""
    return hasattr(getattr(thing, "model", None), "diffusion_model") and hasattr(thing, "patches")


def plan_native(
    patcher: Any,
    budgets: Sequence[int | None],
    latent: Mapping[str, Any] | None,
    prompt: Any,
    *,
    width: int | None,
    height: int | None,
    frames: int | None,
    steps: int | None,
    guidance: float | None,
    strategy: str,
    **pictures: Any,
) -> tuple[list[RunPlan], str]:
    """Return the plan for each budget, and what is known of the model whatever the budget.

    Raises ValueError for what is no MODEL, for what only pipelines of ours take, and without a GPU and a budget.
    """
    if not is_model(patcher):
        raise ValueError(f"the input is {type(patcher).__name__}, neither a Ballast pipeline nor a MODEL.")
    if prompt is not None and not isinstance(prompt, list):
        raise ValueError("conditioning is Ballast's, but a MODEL is connected. Use positive of Staged Text Encode.")
    if pictures or strategy != "auto":
        wrong = ", ".join(pictures) or "strategy"
        raise ValueError(f"{wrong}: only for Ballast's pipelines, but a MODEL is connected. Leave it as it was.")
    if torch.device(patcher.load_device).type == "cpu" and None in budgets:
        raise NoBudgetError("8, 12, 24")
    size = width or 0, height or 0, frames or 0
    asked = asked_of(patcher, latent, *size, steps=steps or 0, guidance=guidance or 0.0, prompt=prompt)
    facts = facts_of(patcher, asked)
    return [plan_model(patcher, asked, facts, budget) for budget in budgets], facts.describe(asked.guidance)


def asked_of(
    patcher: Any,
    latent: Mapping[str, Any] | None,
    width: int,
    height: int,
    frames: int,
    steps: int,
    guidance: float,
    prompt: Any = None,
) -> Asked:
    """Return what a MODEL is asked: of latents, or of a size in pixels; 0 for what is usual."""
    form = patcher.model.latent_format
    ratio, channels = getattr(form, "spacial_downscale_ratio", 8), form.latent_channels
    if latent is not None:
        samples = latent["samples"]
        given = list(samples.shape) if not getattr(samples, "is_nested", False) else list(samples.unbind()[0].shape)
        given[1] = channels  # which the host gives to empty ones
    else:
        given = [1, channels, (height or _SIZE) // ratio, (width or _SIZE) // ratio]
    if form.latent_dimensions == 3 and len(given) == 4:
        given.insert(2, 1 + max(0, frames - 1) // getattr(form, "temporal_downscale_ratio", 4))
    return Asked(tuple(given), steps or _STEPS, guidance, prompt)


def facts_of(patcher: Any, asked: Asked) -> Facts:
    """Return the facts of a MODEL. Takes a second or two for a large one."""
    expects = expected(patcher, asked.shape)
    facts = Facts(weights_of(patcher), expects, 0, Operations(), host.is_dynamic(patcher), None)
    return _with(facts, _foreseen(patcher, asked.batch, asked.prompt), expects.of(asked.guidance))


def _foreseen(patcher: Any, shape: Sequence[int], prompt: Any) -> Foreseen | None:
    return foresee(patcher.model, shape, prompt, Accelerator(torch.device(patcher.load_device)).fuses)


def _with(facts: Facts, seen: Foreseen | None, expected_bytes: int, times: int = 1) -> Facts:
    """Return the facts where a step makes so many calls like the one that was foreseen, if one could be."""
    if seen is None:
        return replace(facts, working_bytes=expected_bytes)
    return replace(facts, working_bytes=seen.peak_bytes, operations=seen.operations * times, around=seen.around)


def plan_model(patcher: Any, asked: Asked, facts: Facts, budget_bytes: int | None) -> RunPlan:
    """Return the plan for a budget in bytes; None for that of VRAM Budget, or for all that could be free."""
    on = torch.device(patcher.load_device)
    if budget_bytes is None:
        budget_bytes = budget_of(patcher)
    is_budget = budget_bytes is not None
    limit = budget_bytes if budget_bytes is not None else _could_be_free(on)
    rates = ASSUMED if on.type == "cpu" else measured_rates(on)
    first, placing = _placings(patcher, facts, asked.guidance, limit, is_budget)
    if not facts.dynamic and not _runs_both(patcher, facts, asked, placing):
        facts = _with(facts, _foreseen(patcher, asked.shape, asked.prompt), facts.expects.one_bytes, times=2)
    unit = _placed(facts, first, placing, limit, facts.expects.of(asked.guidance), _ram_room(), rates)
    stage = StagePlan("sample", (unit,), note="", steps=asked.steps, rates=rates)
    name = type(patcher.model).__name__
    return RunPlan(name, str(on), _work(patcher, asked), asked.steps, limit, rates, (stage,), _CAVEAT)


def _work(patcher: Any, asked: Asked) -> str:
    ratio = getattr(patcher.model.latent_format, "spacial_downscale_ratio", 8)
    size = f"{asked.shape[-1] * ratio} x {asked.shape[-2] * ratio}"
    several = f", {asked.shape[2]} latent frames" if len(asked.shape) == 5 and asked.shape[2] > 1 else ""
    return f"{size}{several}{f', batch {asked.shape[0]}' if asked.shape[0] > 1 else ''}"


def _could_be_free(on: torch.device) -> int:
    card = Accelerator(on)
    return max(0, card.free_bytes() + host.movable_bytes(on) - (host.reserve_bytes(on) or 0))


def _ram_room() -> int:
    """RAM that weights could have: what is spare, and what this process holds already, files that it maps aside."""
    memory = psutil.Process().memory_info()
    return spare_ram_bytes() + max(0, memory.rss - getattr(memory, "shared", 0))


def _room(patcher: Any, expects: Expected, target_bytes: int | None) -> float | None:
    """Return what the host will see free for weights, as VRAM Budget has it see that with a target.

    None without a card.
    """
    mm, on = host.model_management(), torch.device(patcher.load_device)
    if mm is None or on.type == "cpu":
        return None
    free = mm.get_free_memory(patcher.load_device) + host.held_bytes(on)
    reserve, least = mm.extra_reserved_memory(), mm.minimum_inference_memory()
    one, more, count = expects.one_bytes, expects.both_bytes - expects.one_bytes, 1
    if target_bytes is not None:
        count = batches_expected(free - max(0, target_bytes) - reserve, one, more)
    ratio = getattr(mm, "MIN_WEIGHT_MEMORY_RATIO", 0.4)
    return max(free - max(least, one + (count - 1) * more + reserve), min(free * ratio, free - least))


def _runs_both(patcher: Any, facts: Facts, asked: Asked, placing: Placing) -> bool:
    """Return whether a call gets both prompts: the host asks for half as much again as it expects them to take."""
    mm, on = host.model_management(), torch.device(patcher.load_device)
    if asked.guidance == 1 or mm is None or on.type == "cpu":
        return True
    held = sum(facts.weights.parts[i].bytes for i in placing.held)
    return 1.5 * facts.expects.both_bytes < mm.get_free_memory(patcher.load_device) + host.held_bytes(on) - held


def _placings(
    patcher: Any, facts: Facts, guidance: float, budget_bytes: int, is_budget: bool
) -> tuple[Placing, Placing]:
    """Return what the host loads at first, and what it keeps then."""
    parts, streams = facts.weights.parts, host.copy_streams()
    if facts.dynamic:  # gives way as activations come
        return (loaded(parts, budget_bytes - facts.working_bytes, streams),) * 2
    target = budget_bytes - facts.expects.of(guidance)
    if is_budget and facts.weights.total_bytes <= target:
        return (loaded(parts, math.inf, streams),) * 2
    room = _room(patcher, facts.expects, target if is_budget else None)
    first = loaded(parts, target if room is None else room, streams)
    return first, shrunk(parts, first, target, streams) if is_budget else first


def _peak_bytes(facts: Facts, placing: Placing) -> int:
    """Return the peak on the device: activations, weights that stay, and weights that pass through just then."""
    parts, streams = facts.weights.parts, host.copy_streams()
    passing = [part for i, part in enumerate(parts) if i not in placing.held]
    staying = sum(part.bytes for part in parts) - sum(part.bytes for part in passing)
    if not facts.around or facts.dynamic:
        return taken_bytes(parts, placing) + facts.working_bytes
    ahead = sum(sorted((part.bytes for part in passing), reverse=True)[:streams])
    most = facts.working_bytes
    for part in passing:
        before, during = facts.around.get(part.name, (0, 0))
        if during:
            most = max(most, part.bytes + max(before + part.at_use, during + part.kept))
    return staying + ahead + most


def _placed(
    facts: Facts,
    first: Placing,
    placing: Placing,
    budget_bytes: int,
    aside_bytes: int,
    ram_bytes: int,
    rates: Rates,
) -> Plan:
    weights, flags = facts.weights, host_flags()
    staying = sum(weights.parts[i].bytes for i in placing.held)
    passing = weights.total_bytes - staying
    while_it_runs = _peak_bytes(facts, placing)
    buffers = max(0, while_it_runs - staying - facts.working_bytes)
    peak = max(while_it_runs, 0 if facts.dynamic else loading_bytes(weights.parts, first))
    read = max(0, passing - ram_bytes)
    rate = rates.paged_bytes_per_second if flags.unpinned else rates.pinned_bytes_per_second
    compute, copies = facts.operations.seconds(rates, "BF16"), passing / rate
    from_disk = read / rates.disk_bytes_per_second
    bound = max(compute, copies, from_disk)
    step = compute + max(copies, from_disk) if flags.blocking else bound
    fits = peak <= budget_bytes
    return Plan(
        placement="streamed" if passing else "resident",
        weights_bytes=staying + buffers,
        peak_vram_bytes=peak,
        ram_bytes=min(weights.total_bytes, ram_bytes) if read else weights.total_bytes,
        streamed=tuple(i for i in range(len(weights.parts)) if i not in placing.held),
        groups=len(weights.parts),
        step_seconds=step,
        first_step_seconds=staying / rate + step,
        bound_seconds=bound,
        transfer_seconds=max(copies, from_disk),
        from_disk=bool(read),
        ring_bytes=buffers,
        stay_bytes=staying,
        whole_bytes=weights.total_bytes,
        read_bytes=read,
        read_seconds=from_disk,
        unit="model",
        budget_bytes=budget_bytes,
        reason=_reason(
            facts, aside_bytes, budget_bytes, staying, passing, peak, read, compute < max(copies, from_disk)
        ),
        fits=fits,
    )


def _reason(
    facts: Facts,
    aside_bytes: int,
    budget_bytes: int,
    staying: int,
    passing: int,
    peak: int,
    read: int,
    copies_first: bool,
) -> str:
    budget, whole = format_bytes(budget_bytes), format_bytes(facts.weights.total_bytes)
    if peak > budget_bytes:
        least = format_bytes(peak, up=True)
        return f"It does not fit {budget}: activations and the largest weights alone take {least}."
    if not passing:
        return f"All {whole} of weights fit {budget} with their activations."
    pace = "the copies set the pace" if copies_first else "the copies hide behind the computing"
    disk = f"; {format_bytes(read)} of that are read from disk in each step, since RAM does not hold them"
    why = f"{whole} of weights do not fit {budget}"
    if facts.weights.total_bytes <= budget_bytes - facts.working_bytes and not facts.dynamic:
        why = (
            f"ComfyUI sets {format_bytes(aside_bytes)} aside for activations, so {whole} of weights do not fit {budget}"
        )
    return (
        f"{why}: {format_bytes(staying)} stay, {format_bytes(passing)} pass through "
        f"in each step, and {pace}{disk if read else ''}."
    )
