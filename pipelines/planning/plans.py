"""Plans of a run: a dry run forecasts each stage, then its units are placed on paper. Nothing is loaded."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from ...memory.accelerator import Accelerator
from ...memory.planning import learned
from ...memory.planning.batches import best_batch, scaled
from ...memory.planning.fit import ram_left, reads_groups, sizes_of, turns_of
from ...memory.planning.forecast import Forecast, Operations, UnitForecast
from ...memory.planning.measured import Measured, Overhead
from ...memory.planning.planner import Plan, least_call_seconds, make_plan, plan_on_cpu
from ...memory.planning.ram_state import RamState, ram_of
from ...memory.planning.room import HeldWeights, PlanRequest, Room
from ...memory.planning.runplan import RunPlan, StagePlan, seconds
from ...memory.planning.turns import beside_each_other
from ...memory.probe import card_of
from ...memory.probe import rates as measured_rates
from ...memory.rates import ASSUMED, Rates
from ...memory.sizes import format_bytes
from ...memory.weights.unit import ManagedModel
from ..decoding.decode import VaeRun, in_stripes
from ..encoding.conditioning import Conditioning
from ..lora.use import branches
from ..sampling.batches import halvings
from . import forecast_cache
from .encoding_forecasts import Encoding
from .forecasts import RefusedError, names_of, quietly
from .once_plans import PRECOMPUTE, best_of, first_strategy
from .sampling_forecasts import Sampling

if TYPE_CHECKING:
    from ..stock.answers import Answers

# As many words as people write. Some families keep as many tokens as there are words.
TYPICAL_PROMPT = (
    "a weathered fishing boat with a faded red hull lies on the wet sand of a wide bay at low tide, ropes and nets "
    "over its side, gulls on the mast, behind it a row of narrow houses climbing a green hill under heavy clouds, one "
    "beam of evening light on the water, fine detail, soft colours, seen from a low angle"
)


SEEING = "encode picture"  # the name of a stage


@dataclass(frozen=True)
class PlanSound:
    """The stage that decodes sound, called `name`: `forecast` tells what its `units` take for latents of one."""

    name: str
    units: Sequence[ManagedModel]
    forecast: Callable[[torch.Tensor], Forecast | None]


class NoBudgetError(ValueError):
    """Without a GPU a plan needs a stated budget."""

    def __init__(self, such_as: str) -> None:
        super().__init__(f"there is no GPU here to plan for. State a budget, such as {such_as}.")


@dataclass(frozen=True)
class Sight:
    """A call of a module that sees a picture: of the VAE on `pixels`, by `vae`, or of `units` as in `forecast`."""

    vae: VaeRun | None = None
    pixels: torch.Tensor | None = None
    units: Sequence[ManagedModel] = ()
    forecast: Forecast | None = None


@dataclass(frozen=True)
class Run:
    """A run to plan: its stages, on `device`, with checked arguments. `cond` is what it samples from, if known.

    `model` and `size` are words for the plan, `caveat` a sentence, and `strategy` is that of sampling. `foresee` says
    what sees the run's pictures, if it has any. It makes `pictures`, of which it samples some at once. It
    may be for a machine of so many `machine_bytes` of RAM, more than are free here. `sound` is the stage that decodes
    the sound of each video, if there is any.
    """

    model: str
    size: str
    caveat: str
    device: torch.device
    strategy: str
    cond: Conditioning | None
    encoding: Encoding
    sampling: Sampling
    decoding: VaeRun
    foresee: Callable[[Conditioning], tuple[Answers, list[Sight]]] | None = None
    pictures: int = 1
    machine_bytes: int = 0
    ram_stated: bool = True
    once: bool = False
    lockstep: bool = False
    sound: PlanSound | None = None


def plan_batch(plan_of: Callable[[int, int], RunPlan], pictures: int, together: Callable[[], bool]) -> RunPlan:
    """Return the plan of a run of several pictures: all at once, or halves of them until they fit.

    `plan_of(pictures, at_once)` plans a run, `together()` says whether several may be sampled at once at all.
    """
    one = plan_of(1, 1)
    several = pictures > 1 or (one.best is not None and one.best.pictures > 1)
    proved = not several or together()
    if not proved:
        one = replace(one, best=None)
    if pictures == 1:
        return one
    for at_once in halvings(pictures) if proved else [1]:
        plan = plan_of(pictures, at_once)
        if plan.samples:
            break
    return replace(plan, best=one.best)


def plan_run(
    run: Run,
    budget_bytes: int,
    ram_bytes: int,
    rates: Rates | None,
    ram: RamState,
) -> RunPlan:
    """Return the plan of a whole run, without loading anything. Raises ValueError for what the pipeline cannot run.

    `ram` is what RAM holds now.
    """
    forecasts, sights = _forecast_run(run)
    used = rates or measured_rates(run.device, run.sampling.units[0].disk)
    unified = Accelerator(run.device).is_unified
    machine = Machine(budget_bytes, ram_bytes, used, run.ram_stated, unified, reads=functools.cache(reads_groups))
    vae_machine = replace(machine, unified=False)
    if rates is None:
        machine = replace(machine, card=card_of(run.device), least=learned.least_overhead(Accelerator(run.device)))
    place = functools.partial(plan_stage, machine=machine)
    on_cpu = run.strategy == "cpu" and run.device.type == "cpu"  # all of it; on a card sampling alone
    if on_cpu:
        place = functools.partial(place, strategy="cpu")
    stages = []

    def planned(stage: StagePlan, units: Sequence[ManagedModel]) -> None:
        nonlocal ram
        stages.append(stage)
        ram = ram.after_stage(stage, units)

    if "encode" in forecasts:
        planned(place("encode", forecasts["encode"], run.encoding.units, ram=ram), run.encoding.units)
    place_vae = functools.partial(plan_vae, machine=vae_machine, on_cpu=on_cpu)
    for sight in sights:
        if sight.forecast is not None:
            planned(place(SEEING, sight.forecast, sight.units, ram=ram), sight.units)
        else:
            assert sight.vae is not None and sight.pixels is not None
            vae = replace(sight.vae, machine_bytes=run.machine_bytes, recalls=rates is None)
            planned(place_vae(SEEING, vae, sight.pixels, ram=ram), [vae.vae])
    steps, at_once = run.sampling.steps, run.sampling.pictures
    sampling = run.sampling.with_all_steps(forecasts["sample"])
    sample = functools.partial(place, "sample", sampling, run.sampling.units, strategy=run.strategy, ram=ram)
    best = None
    if run.pictures == 1 and run.strategy != "cpu":
        best = best_batch(lambda pictures: sample(steps=steps, pictures=pictures))
    all_steps = steps * -(-run.pictures // at_once)
    if (run.once or run.lockstep) and run.strategy != "cpu":

        def place_part(name: str, part: Forecast, units: Sequence[ManagedModel], steps: int) -> StagePlan:
            how = first_strategy(run.strategy) if name == PRECOMPUTE else run.strategy
            return place(name, part, units, strategy=how, by_user=how == run.strategy, ram=ram, steps=steps)

        best_way = functools.partial(best_of, once=run.once, lockstep=run.lockstep)
        thread_bytes = machine.least.workspace_bytes
        for stage in best_way(sampling, run.sampling.units, all_steps, place_part, thread_bytes=thread_bytes)[1]:
            planned(stage, run.sampling.units)
    else:
        planned(sample(steps=all_steps), run.sampling.units)
    shape = sampling.result if run.pictures == 1 else (run.pictures, *sampling.result[1:])
    vae = replace(run.decoding, machine_bytes=run.machine_bytes, recalls=rates is None)
    planned(place_vae("decode", vae, torch.zeros(shape), ram=ram), [vae.vae])
    if run.sound is not None and sampling.sound and (found := run.sound.forecast(torch.zeros(sampling.sound))):
        planned(place(run.sound.name, found, run.sound.units, steps=run.pictures, ram=ram), run.sound.units)
    words = " ".join(
        filter(
            None,
            (
                run.caveat,
                _of_cache(run.sampling),
                _kept_in_ram(forecasts["sample"], run.pictures),
                _cost_of_converting(run),
                _cost_of_loras(run, forecasts["sample"], used),
            ),
        )
    )
    return RunPlan(
        run.model, str(run.device), run.size, steps, ram_bytes if on_cpu else budget_bytes, used, tuple(stages), words,
        run.pictures, at_once, best,
    )  # fmt: skip


def _of_cache(sampling: Sampling) -> str:
    """Tell in a sentence which steps a cache computes; "" without one."""
    if (cache := sampling.cache) is None:
        return ""
    if cache.computed(sampling.steps) is None:
        return f"The cache {cache} skips steps where little changes; the plan counts all."
    count = cache.count(sampling.steps, len(sampling.units))
    return f"The cache {cache} computes {count} of {sampling.steps} steps."


def _kept_in_ram(forecast: Forecast, pictures: int) -> str:
    """Tell in a sentence the bytes of RAM that sampling takes beside weights; "" where it takes none."""
    if not (nbytes := forecast.kept_in_ram * pictures):
        return ""
    return f"Sampling keeps {format_bytes(nbytes)} in RAM beside the weights."


def _cost_of_converting(run: Run) -> str:
    """Tell in a sentence the bytes of disk that weights take which the run converts first; "" where none are."""
    units = [*([] if run.cond else run.encoding.units), *run.sampling.units]
    if not (nbytes := sum(unit.unconverted_bytes for unit in units)):
        return ""
    return f"The first run converts weights, once, into files of about {format_bytes(nbytes)}."


def _cost_of_loras(run: Run, forecast: Forecast, rates: Rates) -> str:
    """Tell in a sentence the bytes and the seconds a step that the LoRAs of a run take; "" without LoRAs."""
    units = [*([] if run.cond else run.encoding.units), *run.sampling.units]
    if not (nbytes := sum(unit.branch_bytes for unit in units)):
        return ""
    taken = f"LoRAs take {format_bytes(nbytes)} of the weights"
    if run.foresee or math.isinf(rates.operations_per_second):  # which would be foreseen once more
        return f"{taken}."
    with contextlib.ExitStack() as exits:
        for unit in units:
            exits.enter_context(unit.without_adapters())
        bare = _forecast_run(run)[0]["sample"]
    more = 0.0
    for unit in run.sampling.units:
        if unit.name in forecast.units:
            operations = forecast.units[unit.name].operations - bare.units[unit.name].operations
            more += operations.seconds(rates, sizes_of(unit).dtype)
    return f"{taken}, and {seconds(max(0.0, more) / forecast.steps)} of each step."


@dataclass(frozen=True)
class Machine:
    """The machine that stages are planned for, as a run finds it.

    - `vram_bytes` is the most that the driver may count, `ram_bytes` the most that weights may take in RAM. Without
      `ram_stated` nobody stated the latter, so RAM refuses nothing.
    - An `overhead` that is not None replaces what was measured.
    - A device is `unified` whose memory is the system's.
    - Measurements of a `card` are used. Any run on it takes at least the overhead `least`.
    - `reads` is `reads_groups`, or remembers what that said.
    """

    vram_bytes: int
    ram_bytes: int
    rates: Rates = ASSUMED
    ram_stated: bool = True
    unified: bool = False
    card: str = ""
    least: Overhead = Overhead()
    overhead: Overhead | None = None
    reads: Callable[[ManagedModel], bool] = reads_groups

    def overhead_of(self, unit: ManagedModel, work: UnitForecast, pictures: int) -> Overhead:
        """Return the bytes beside the tensors of a unit that samples `pictures` at once."""
        if self.overhead is not None or not self.card:
            return self.overhead or self.least
        return learned.recall_overhead(self.card, sizes_of(unit), work, pictures).over(self.least)

    def measured(self, unit: ManagedModel, work: UnitForecast, pictures: int) -> Measured | None:
        """Return the seconds that this card took for the groups of a unit, if it ran before."""
        found = learned.recall(self.card, sizes_of(unit), work) if self.card else None
        return found and found.scaled(pictures)

    def room(self, unit: ManagedModel, overhead: Overhead, free_ram_bytes: int) -> Room:
        """Return the room of a unit, while `free_ram_bytes` of RAM can be had without taking any from others."""
        ram_bytes = ram_left(unit, self.ram_bytes, self.unified)
        free = ram_left(unit, max(0, free_ram_bytes), self.unified)
        return Room(self.vram_bytes, ram_bytes, self.ram_stated, free, overhead)


def plan_stage(
    name: str,
    forecast: Forecast,
    units: Sequence[ManagedModel],
    machine: Machine,
    *,
    strategy: str = "auto",
    by_user: bool = True,
    steps: int = 1,
    pictures: int = 1,
    ram: RamState | None = None,
) -> StagePlan:
    """Return the plan of one stage, from its forecast. `by_user` says whether the user chose the `strategy`.

    `ram` is what RAM holds when it begins, by default of these units alone, and as now. Of a forecast for one picture
    it may be the plan for several at once.
    """
    named, state = {unit.name: unit for unit in units}, ram_of(units) if ram is None else ram
    known = {each: machine.measured(named[each], work, pictures) for each, work in forecast.units.items()}
    overheads = {each: machine.overhead_of(named[each], work, pictures) for each, work in forecast.units.items()}
    forecast = scaled(forecast, pictures) if pictures > 1 else forecast
    note = ""
    if kept := forecast.kept_in_ram:
        note = f"{format_bytes(kept)} of its own in RAM"
        machine = replace(machine, ram_bytes=max(0, machine.ram_bytes - kept))
        state = replace(state, ram_bytes=max(0, state.ram_bytes - kept))
    for name_of, work in forecast.units.items():
        named[name_of].learn(work.call_order)
    rooms = {}  # for the weights of all units, while each of them runs
    for each, work in forecast.units.items():
        takes = overheads[each].on(work.with_dequantizing(sizes_of(named[each]).dequantizing_beside())).peak_bytes
        rooms[each] = overheads[each].tensors_within(machine.vram_bytes) - takes
    turning = {each: work for each, work in forecast.units.items() if work.turns > 1}
    held = (
        {}
        if strategy in ("leafwise", "cpu")
        else beside_each_other(
            {each: turns_of(sizes_of(named[each]), work, strategy, rooms[each]) for each, work in turning.items()}
        )
    )
    request = PlanRequest(strategy, by_user, forecast.steps, steps / forecast.steps, forecast.idle_bytes)

    def plan(each: str, work: UnitForecast) -> Plan:
        nonlocal state
        unit, sizes = named[each], sizes_of(named[each])
        if strategy == "cpu":
            room = Room(0, machine.ram_bytes, machine.ram_stated)
            weights = HeldWeights(None if unit.in_ram else frozenset(), machine.reads(unit))
            return plan_on_cpu(each, sizes, work, room, machine.rates, forecast.steps, weights)
        room = machine.room(unit, overheads[each], state.free_for(unit))
        weights = HeldWeights(state.there(unit), sizes.total_bytes > room.ram_bytes and machine.reads(unit))
        made = make_plan(each, sizes, work, room, machine.rates, request, weights, known[each])
        state = state.after(unit, made.kept, made.windows_bytes)
        return made

    plans: dict[str, Plan] = {}
    left: dict[str, int] = {}  # to the others beside a unit, and not always taken
    for each, work in forecast.units.items():
        if each in held:
            others = sum(held[other] for other in held if other != each)
            left[each] = others + rooms[each] - min(rooms[other] for other in held)
            plans[each] = plan(each, replace(work, turns=1, live_bytes=work.live_bytes + left[each]))
            held[each] = max(held[each], plans[each].weights_bytes)
        else:
            plans[each] = plan(each, work)
    for each in turning:
        names = " and ".join(other for other in turning if other != each and strategy != "cpu")
        others = sum(held[other] for other in held if other != each)
        if names:
            plans[each] = plans[each].taking_turns(names, others - left.get(each, 0), forecast.idle_bytes)
    computing = sum(
        work.calls
        * steps
        / forecast.steps
        * least_call_seconds(sizes_of(named[each]), work, machine.rates, known[each])
        for each, work in forecast.units.items()
    )
    return StagePlan(name, tuple(plans.values()), forecast.idle_bytes, note, steps, machine.rates, computing)


def plan_vae(
    name: str,
    run: VaeRun,
    latents: torch.Tensor,
    machine: Machine,
    *,
    on_cpu: bool = False,
    ram: RamState | None = None,
) -> StagePlan:
    """Return the plan of a call of a VAE on `latents`, or on pixels. With `on_cpu` the whole run is on the CPU.

    Raises ValueError for a VAE that has no dry run.
    """
    assert run.forecasts is not None
    rates = machine.rates
    if on_cpu and (whole := run.forecasts.whole(latents)):
        return plan_stage(name, whole, [run.vae], machine, strategy="cpu")
    way, latents = run.start(latents, rates)
    work = (run.forecasts.tiles if way.name == "tiles" else run.forecasts.whole)(latents)
    if work is None:
        raise ValueError(f"{name} cannot be planned: {run.vae.name} has no dry run, and is measured as it runs.")
    note, overhead, pace = way.note, run.overhead(work.units[run.vae.name]), rates
    if way.name == "cpu":
        ram_bytes = machine.ram_bytes if machine.ram_stated else max(machine.ram_bytes, run.vae.size_bytes)
        plan = _cpu_plan(run.vae, work.units[run.vae.name], machine.vram_bytes, ram_bytes, rates)
        there = (ram or ram_of([run.vae])).there(run.vae)
        plan = replace(plan, disk_bytes=sizes_of(run.vae).missing_bytes(there))
        return StagePlan(name, (plan,), note=f"{note}, slower than it says here", rates=rates)
    if way.name == "stripes":
        overhead = run.overhead(in_stripes(0))
        peak = (way.peak_bytes or 0) - run.vae.size_bytes - overhead.workspace_bytes
        # Its seconds are known, copies included. They are planned as operations, one a second: a simulated card that
        # computes in no time has no finite rate to divide by.
        pace = replace(rates, operations_per_second=1.0, float32=1.0, float16=1.0)
        takes = UnitForecast(0, peak, peak, 1, Operations(way.seconds or 0.0))
        work = Forecast(0, {run.vae.name: takes})
        note += f", {format_bytes(way.ram_bytes)} of feature maps in RAM"
    strategy = "auto" if way.name == "whole" else "resident"
    machine = replace(machine, rates=pace, overhead=overhead)
    planned = plan_stage(name, work, [run.vae], machine, strategy=strategy, by_user=False, ram=ram)
    return replace(planned, note=note, rates=rates)


def _cpu_plan(vae: ManagedModel, work: UnitForecast, budget_bytes: int, ram_bytes: int, rates: Rates) -> Plan:
    """Return the plan of a VAE on the CPU, whose rate is not known: its seconds are those of the device."""
    fits = vae.size_bytes <= ram_bytes
    read = 0.0 if vae.tier != "disk" else vae.size_bytes / rates.disk_bytes_per_second
    seconds = work.operations.seconds(rates, sizes_of(vae).dtype)
    why = "it fits the VRAM in no way" if fits else f"{format_bytes(vae.size_bytes)} do not fit the RAM budget"
    return Plan(
        "cpu", 0, 0, vae.size_bytes + work.peak_bytes, (), 0, seconds, read + seconds, seconds, 0.0,
        unit=vae.name, budget_bytes=budget_bytes, reason=f"On the CPU: {why}.", fits=fits,
    )  # fmt: skip


def _forecast_run(run: Run) -> tuple[dict[str, Forecast], list[Sight]]:
    forecaster = run.sampling.forecaster
    stages = {"sample": names_of(run.sampling.units)}
    if run.cond:
        key = run.sampling.key(run.cond)
        key = key and f"{key}-run"
    else:
        own = {
            "arguments": run.sampling.dry_arguments,
            **run.sampling.size,
            **branches([*run.encoding.units, *run.sampling.units]),
        }
        key = forecaster.key(**run.encoding.texts, stage="run", **own)
        stages["encode"] = names_of(run.encoding.units)
    key = None if run.foresee else key  # what sees pictures is told by a dry run
    forecasts = forecast_cache.get(forecaster.directory, key, stages) if key else None
    sights: list[Sight] = []
    if forecasts is None:
        try:
            with quietly():
                forecasts, sights = _dry_run(run)
        except RefusedError:
            raise
        except Exception as error:
            why = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(
                f"{run.model} cannot be planned at {run.size}: the dry run ends with an error ({why})."
            ) from error
        if key:
            forecast_cache.put(forecaster.directory, key, forecasts)
    return forecasts, sights


def _dry_run(run: Run) -> tuple[dict[str, Forecast], list[Sight]]:
    forecasts, cond = {}, run.cond
    if cond is None:
        forecasts["encode"], cond = run.encoding.dry_run()
    if not run.foresee:
        forecasts["sample"], _ = run.sampling.dry_run(cond)
        return forecasts, []
    answers, sights = run.foresee(cond)
    denoise = functools.partial(run.sampling.denoise, answers=answers)
    forecasts["sample"] = _known_or_dry_run(replace(run.sampling, denoise=denoise), cond)
    return forecasts, sights


def _known_or_dry_run(sampling: Sampling, cond: Conditioning) -> Forecast:
    """Return the forecast of sampling, which a run of the same shapes keeps under the same key."""
    directory, key = sampling.forecaster.directory, sampling.key(cond)
    found = forecast_cache.get(directory, key, {"sample": names_of(sampling.units)}) if key else None
    if found:
        return found["sample"]
    forecast, _ = sampling.dry_run(cond)
    if key:
        forecast_cache.put(directory, key, {"sample": forecast})
    return forecast
