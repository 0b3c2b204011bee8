"""The forecast of a stage beside its weights: bytes and operations, as plain data. `dry_run` makes it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from ..rates import Rates
from ..weights.groups import CallOrder


@dataclass(frozen=True)
class Operations:
    """Operations of matrix products and convolutions, and of attention in one fused kernel.

    Attention for which a card has no fused kernel consists of products, and is counted as such.
    """

    products: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """Operations of both kinds."""
        return self.products + self.attention

    def seconds(self, rates: Rates, dtype: str) -> float:
        """Return the seconds that the operations take in `dtype`, named as in safetensors."""
        return self.products / rates.operations_in(dtype) + self.attention / rates.attention_in(dtype)

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.products + other.products, self.attention + other.attention)

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.products - other.products, self.attention - other.attention)

    def __mul__(self, times: float) -> Operations:
        return Operations(self.products * times, self.attention * times)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Operations:
        """Return operations from the plain data of a file.

        Raises KeyError, TypeError or ValueError for anything else.
        """
        found = cls(float(data["products"]), float(data["attention"]))
        if not all(0 <= each < math.inf for each in (found.products, found.attention)):
            raise ValueError("there are operations that are not numbers from 0 up")
        return found


ModuleOperations = tuple[tuple[str, Operations], ...]  # by module path; "" for those before the first module
HeldBytes = tuple[tuple[str, int], ...]  # by module path


_OF_MODULES = ("modules", "whole", "outside", "held")


@dataclass(frozen=True)
class OnceModule:
    """A module with weights whose inputs depend neither on latents nor on anything made of them.

    It takes `weight_bytes` and gives `row_bytes` in a call. Its inputs change with the timestep (`per_step`), or with
    the other arguments of the call, such as text (`per_pass`). They are made by the modules that it `needs`.
    """

    path: str
    weight_bytes: int
    row_bytes: int
    per_step: bool
    per_pass: bool
    needs: tuple[str, ...] = ()


@dataclass(frozen=True)
class UnitForecast:
    """The forecast of one unit in a stage. All bytes are on the device beside the unit's weights.

    - `live_bytes` are held when the unit is first called: what the loop around it keeps there, its arguments included.
    - `working_bytes` is the peak on top of these, from its first call until another unit's call or the end of the
      stage. `first_bytes` is the same for the first call alone.
    - `calls` come in `turns`: between two turns other units are called.
    - `operations` are those of all calls.
    - `modules` gives the operations from the call of each module with weights until that of the next, in the order of
      the first calls.
    - `held` gives the most bytes beyond `live_bytes` when a module that has weights, itself or inside it, is called.
      The path "" stands for the call of the unit itself.
    """

    live_bytes: int
    working_bytes: int
    first_bytes: int
    calls: int
    operations: Operations
    modules: ModuleOperations = ()
    whole: tuple[str, ...] = ()  # modules that read the weights of others inside them
    outside: tuple[str, ...] = ()  # modules whose weights are read elsewhere
    held: HeldBytes = ()
    turns: int = 1
    step_bytes: int = 0  # of a call's arguments that change with the timestep
    argument_bytes: int = 0  # of the others, but for those that change with the latents
    side_bytes: int = 0  # the most that a call makes without latents
    once: tuple[OnceModule, ...] = ()  # in the order of their first calls

    @property
    def repeats(self) -> bool:
        """Return whether calls follow each other while the weights stay.

        Only then does it pay to keep weights dequantized.
        """
        return self.calls > self.turns

    def with_dequantizing(self, decoding: HeldBytes) -> UnitForecast:
        """Return the same forecast with temporary bytes added at the call of each module in `decoding`.

        The path "" stands for the unit's own call. A path that `held` does not know counts as held at the peak.
        """
        held = {"": 0, **dict(self.held)}
        most = max((held.get(path, self.working_bytes) + nbytes for path, nbytes in decoding), default=0)
        first_bytes, working_bytes = max(self.first_bytes, most), max(self.working_bytes, most)
        return replace(self, first_bytes=first_bytes, working_bytes=working_bytes)

    @property
    def called_bytes(self) -> int:
        """The most bytes held when the unit is called."""
        return self.live_bytes + dict(self.held).get("", 0)

    @property
    def peak_bytes(self) -> int:
        """The most bytes on the device beside the weights."""
        return self.live_bytes + self.working_bytes

    @property
    def call_order(self) -> CallOrder:
        """The order of the calls inside, from which weight groups are made."""
        order = tuple(path for path, _ in self.modules if path)
        return CallOrder(order, frozenset(self.whole), frozenset(self.outside))


@dataclass(frozen=True)
class Forecast:
    """The forecast of one stage: its units by name, and its sampling steps.

    `idle_bytes` is the most that the stage holds on the device before any unit is called. `result` is the shape of its
    result, if another stage depends on that, and `sound` that of the latents of one sound drawn with it.
    `kept_in_ram` is the bytes of tensors that the stage keeps in RAM, beside weights.
    """

    idle_bytes: int
    units: Mapping[str, UnitForecast] = field(default_factory=dict)
    steps: int = 1
    result: tuple[int, ...] = ()
    sound: tuple[int, ...] = ()
    kept_in_ram: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the forecast as plain data, for a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Forecast:
        """Return the forecast that `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        units = {}
        for name, facts in data["units"].items():
            # A KeyError for files of earlier versions, which kept none of these.
            numbers = {name: facts[name] for name in ("turns", "step_bytes", "argument_bytes", "side_bytes")}
            numbers |= {key: value for key, value in facts.items() if key not in ("operations", "once", *_OF_MODULES)}
            if not all(type(n) in (int, float) and 0 <= n < math.inf for n in numbers.values()):
                raise ValueError(f"{name} has facts that are not numbers from 0 up")
            once = tuple(OnceModule(**{**each, "needs": tuple(map(str, each["needs"]))}) for each in facts["once"])
            units[name] = UnitForecast(**numbers, **operations_from(facts), once=once)
        result, sound = (tuple(map(int, data[name])) for name in ("result", "sound"))
        steps, kept_in_ram = max(1, int(data["steps"])), int(data["kept_in_ram"])
        return cls(int(data["idle_bytes"]), units, steps, result, sound, kept_in_ram)


def operations_from(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a forecast that tell of operations and modules, from the plain data of a file.

    Raises KeyError, TypeError or ValueError for anything else.
    """
    operations = Operations.from_dict(facts["operations"])
    modules = tuple((str(path), Operations.from_dict(done)) for path, done in facts["modules"])
    held = tuple((str(path), int(nbytes)) for path, nbytes in facts["held"])
    if not all(nbytes >= 0 for _, nbytes in held):
        raise ValueError("modules have bytes that are not numbers from 0 up")
    whole, outside = (tuple(map(str, facts[name])) for name in ("whole", "outside"))
    return {"operations": operations, "modules": modules, "whole": whole, "outside": outside, "held": held}
