"""Choose the modules of a unit that are computed once for a whole schedule, and forecast both parts of the work.

The choice is a pure function of the forecast. [Note: Modules computed once] in `memory.once` tells how they run.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..planning.forecast import Forecast, OnceModule, Operations, UnitForecast
from ..sizes import format_bytes

# Seconds of the host for each module with weights in each call of a rehearsal and of the recording before it, as
# measured for FLUX and Qwen-Image of full depth on two slow cores.
HOST_SECONDS = 4e-4


@dataclass(frozen=True)
class Schedule:
    """The calls of a unit in a stage: `passes` in each of its `steps`, one for each prompt that guidance compares."""

    steps: int
    passes: int

    @classmethod
    def of(cls, forecast: Forecast, steps: int) -> Schedule:
        """Return a schedule of `steps` that holds for each unit of a forecast.

        Experts share the steps among them, so the calls of all units together tell the passes. That is more than there
        are beside a ControlNet.
        """
        calls = sum(work.calls for work in forecast.units.values() if work.once)
        return cls(max(1, steps), max(1, -(-calls // max(1, forecast.steps))))

    def argument_bytes(self, work: UnitForecast) -> int:
        """Return the bytes of the arguments of all calls, but for those that change with the latents."""
        return self.passes * (work.argument_bytes + self.steps * work.step_bytes)

    def rows(self, module: OnceModule) -> int:
        """Return how many results of a module differ."""
        return (self.steps if module.per_step else 1) * (self.passes if module.per_pass else 1)


@dataclass(frozen=True)
class Once:
    """The modules of a unit that are computed once, by path, and their bytes: of weights, and of the results kept.

    `argument_bytes` are those of the calls that the results are of. The host takes `host_seconds` to find the inputs.
    """

    paths: frozenset[str] = frozenset()
    weight_bytes: int = 0
    table_bytes: int = 0
    argument_bytes: int = 0
    host_seconds: float = 0.0

    @property
    def held_bytes(self) -> int:
        """Bytes on the device in the loop."""
        return self.table_bytes + self.argument_bytes

    def reason(self, total_bytes: int) -> str:
        """Return what it does in a sentence for plans, for a unit of `total_bytes` of weights."""
        share = f"{self.weight_bytes / max(1, total_bytes):.0%} of the weights are computed once"
        return f"{share}, into {format_bytes(self.table_bytes)} of results."


def choose_once(work: UnitForecast, paths: Collection[str], schedule: Schedule) -> Once:
    """Return the modules to compute once, out of `paths`: those whose results take fewer bytes than their weights.

    With each come the modules that it needs. Properties:

    - What a chosen module needs is chosen too.
    - The tables together take fewer bytes than the weights. Otherwise nothing is chosen.
    - A module that no other needs is chosen only if its own table is smaller than its weights.
    """
    known = {module.path: module for module in work.once if module.path in paths}
    gain = {path: module.weight_bytes - schedule.rows(module) * module.row_bytes for path, module in known.items()}
    possible: set[str] = set()
    for path, module in known.items():  # in the order of the calls: what a module needs is before it
        possible |= {path} if possible.issuperset(module.needs) else set()
    wanted = {path for path in possible if gain[path] > 0}
    # What costs more than all that is gained with it goes, together with what needs it.
    for path in sorted((p for p in possible if gain[p] < 0), key=lambda p: gain[p]):
        users = {each for each in wanted if path in known[each].needs}
        if users and sum(gain[each] for each in users) + gain[path] <= 0:
            wanted -= users
    chosen = _with_needs(wanted, known)
    table_bytes = sum(schedule.rows(known[path]) * known[path].row_bytes for path in chosen)
    weight_bytes = sum(known[path].weight_bytes for path in chosen)
    if table_bytes >= weight_bytes:
        return Once()
    host_seconds = HOST_SECONDS * len(work.modules) * schedule.steps * schedule.passes
    return Once(frozenset(chosen), weight_bytes, table_bytes, schedule.argument_bytes(work), host_seconds)


def _with_needs(paths: Collection[str], known: Mapping[str, OnceModule]) -> set[str]:
    """Return the modules with all that they need, and what that needs."""
    found: set[str] = set()
    waiting = list(paths)
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            waiting += known[path].needs
    return found


def first_part(work: UnitForecast, once: Once, schedule: Schedule, dry_steps: int) -> UnitForecast:
    """Return the forecast of computing the modules `once`, in one call, with their results in device memory."""
    modules = tuple(
        (path, done * (schedule.steps / max(1, dry_steps))) for path, done in work.modules if path in once.paths
    )
    largest = max((each.row_bytes for each in work.once if each.path in once.paths), default=0)
    # Beside the results lie the inputs of each: at most as many bytes as the results of what made them.
    working_bytes = 2 * once.table_bytes + 2 * largest + work.side_bytes
    operations = sum((done for _, done in modules), Operations())
    return UnitForecast(
        live_bytes=once.argument_bytes,
        working_bytes=working_bytes,
        first_bytes=working_bytes,
        calls=1,
        operations=operations,
        modules=modules,
        whole=work.whole,
        outside=work.outside,
    )


def other_part(work: UnitForecast, once: Once, held_bytes: int) -> UnitForecast:
    """Return the forecast of the calls that take the results of the modules `once` from tables.

    All tables of the stage take `held_bytes` on the device.
    """
    spared = sum((done for path, done in work.modules if path in once.paths), Operations())
    return replace(
        work,
        live_bytes=work.live_bytes + held_bytes,
        operations=work.operations - spared,
        modules=tuple((path, done) for path, done in work.modules if path not in once.paths),
        once=(),
    )


def called_paths(groups: Sequence[tuple[str, ...]]) -> frozenset[str]:
    """Return the paths of the modules in weight groups."""
    return frozenset(path for paths in groups for path in paths)
