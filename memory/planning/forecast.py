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
    """Operations of products and convolutions, and of attention in one kernel.

    Attention that a card has no kernel for is made of products, and counted as such.
    """

    products: float = 0.0
    attention: float = 0.0

    @property
    def total(self) -> float:
        """All, whatever they are of."""
        return self.products + self.attention

    def seconds(self, rates: Rates, dtype: str) -> float:
        """Return how long they take in a type, named as in safetensors."""
        return self.products / rates.operations_in(dtype) + self.attention / rates.attention_in(dtype)

    def __add__(self, other: Operations) -> Operations:
        return Operations(self.products + other.products, self.attention + other.attention)

    def __sub__(self, other: Operations) -> Operations:
        return Operations(self.products - other.products, self.attention - other.attention)

    def __mul__(self, times: float) -> Operations:
        return Operations(self.products * times, self.attention * times)

    @classmethod
    def from_dict(cls, data: Mapping[str, float]) -> Operations:
        """From plain data of a file. Raises KeyError, TypeError or ValueError for anything else."""
        found = cls(float(data["products"]), float(data["attention"]))
        if not all(0 <= each < math.inf for each in (found.products, found.attention)):
            raise ValueError("there are operations that are not numbers from 0 up")
        return found


ModuleOperations = tuple[tuple[str, Operations], ...]  # by path; "" before the first
HeldBytes = tuple[tuple[str, int], ...]  # by path


_OF_MODULES = ("modules", "whole", "outside", "held")


@dataclass(frozen=True)
class UnitForecast:
    """One unit in a stage. Bytes are those on the device beside the unit's weights.

    `live_bytes` are held when it is first called: what the loop around it keeps there, its arguments included. The
    others come on top of these, from its first call until another unit's or the end: `working_bytes` at most,
    `first_bytes` in the first call alone. Its calls come in so many `turns`: between two of these others are called.
    `operations` are those of all calls; `modules` tells those
    from the call of each module with weights until that of the next, in the order of the first calls, and `held` what
    is there beyond `live_bytes` when each module with weights, its own or inside it, is called, at most, and when the
    unit itself is, by the path "".
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

    @property
    def repeats(self) -> bool:
        """Return whether a call follows another while the weights stay: weights decoded for good are of use then."""
        return self.calls > self.turns

    def with_decoding(self, decoding: HeldBytes) -> UnitForecast:
        """Return the same where the call of each of these modules takes so many bytes first; "" is that of the unit."""
        held = {"": 0, **dict(self.held)}
        most = max((held.get(path, self.working_bytes) + nbytes for path, nbytes in decoding), default=0)
        first_bytes, working_bytes = max(self.first_bytes, most), max(self.working_bytes, most)
        return replace(self, first_bytes=first_bytes, working_bytes=working_bytes)

    @property
    def called_bytes(self) -> int:
        """The most bytes that are there when the unit is called."""
        return self.live_bytes + dict(self.held).get("", 0)

    @property
    def peak_bytes(self) -> int:
        """The most on the device beside the weights."""
        return self.live_bytes + self.working_bytes

    @property
    def call_order(self) -> CallOrder:
        """The order of the calls inside, as groups are made by."""
        order = tuple(path for path, _ in self.modules if path)
        return CallOrder(order, frozenset(self.whole), frozenset(self.outside))


@dataclass(frozen=True)
class Forecast:
    """One stage: its units by name, the most that it holds before any of them is called, and its sampling steps.

    `result` is the shape of what it makes, where another stage depends on that.
    """

    idle_bytes: int
    units: Mapping[str, UnitForecast] = field(default_factory=dict)
    steps: int = 1
    result: tuple[int, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Plain data, for a file."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Forecast:
        """Return what `to_dict` gave. Raises KeyError, TypeError or ValueError for anything else."""
        units = {}
        for name, facts in data["units"].items():
            numbers = {"turns": facts["turns"]}  # earlier versions kept none
            numbers |= {key: value for key, value in facts.items() if key not in ("operations", *_OF_MODULES)}
            if not all(type(n) in (int, float) and 0 <= n < math.inf for n in numbers.values()):
                raise ValueError(f"{name} has facts that are not numbers from 0 up")
            units[name] = UnitForecast(**numbers, **operations_from(facts))
        return cls(int(data["idle_bytes"]), units, max(1, int(data["steps"])), tuple(map(int, data["result"])))


def operations_from(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file tells of operations, and of the modules inside.

    KeyError, TypeError or ValueError for others.
    """
    operations = Operations.from_dict(facts["operations"])
    modules = tuple((str(path), Operations.from_dict(done)) for path, done in facts["modules"])
    held = tuple((str(path), int(nbytes)) for path, nbytes in facts["held"])
    if not all(nbytes >= 0 for _, nbytes in held):
        raise ValueError("modules have bytes that are not numbers from 0 up")
    whole, outside = (tuple(map(str, facts[name])) for name in ("whole", "outside"))
    return {"operations": operations, "modules": modules, "whole": whole, "outside": outside, "held": held}
