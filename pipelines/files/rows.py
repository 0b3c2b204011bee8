"""Where a converter takes each tensor from: rows of the stored ones. Found by running it on `Rows`, not on tensors.

A converter renames, splits, joins and reshapes. All of that is done here with names and numbers of rows, and no byte is
read or copied for it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

Widths = Callable[[int], Sequence[int]]  # of the parts that so many rows are split into
Convert = Callable[[dict[str, Any]], Mapping[str, Any]]


class Run(NamedTuple):
    """The rows from `begin` to `end` of the stored tensor of that name. A tensor without dimensions has one."""

    name: str
    begin: int
    end: int


@dataclass(frozen=True)
class Rows:
    """Runs of rows, one after another, that make a tensor of `shape`. Converters take it for the tensor.

    What is split into parts of fixed sizes is split by `widths` instead, where these are given: the sizes in diffusers'
    converters are those of the published models.
    """

    shape: tuple[int, ...]
    runs: tuple[Run, ...]
    widths: Widths | None = field(default=None, compare=False, repr=False)

    @property
    def ndim(self) -> int:
        """Dimensions."""
        return len(self.shape)

    def size(self, dim: int) -> int:
        """As a tensor's."""
        return self.shape[dim]

    def chunk(self, count: int, dim: int = 0) -> list[Rows]:
        """As a tensor's, into equal parts."""
        rows = self._rows(dim)
        if rows % count:
            raise ValueError(f"{rows} rows are no {count} equal parts")
        return self.split([rows // count] * count, exactly=True)

    def split(self, sizes: Sequence[int], dim: int = 0, exactly: bool = False) -> list[Rows]:
        """As a tensor's, into parts of `sizes`, or of `widths`."""
        rows = self._rows(dim)
        if self.widths and not exactly:
            sizes = self.widths(rows)
        if sum(sizes) != rows or min(sizes) < 0:
            raise ValueError(f"{rows} rows are no parts of {list(sizes)}")
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        return [self._part(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def reshape(self, *sizes: int) -> Rows:
        """As a tensor's. One of the sizes may be -1."""
        known = prod(size for size in sizes if size != -1)
        shape = tuple(prod(self.shape) // max(1, known) if size == -1 else size for size in sizes)
        if prod(shape) != prod(self.shape):
            raise ValueError(f"a tensor of {list(self.shape)} is none of {list(sizes)}")
        return Rows(shape, self.runs, self.widths)

    def squeeze(self) -> Rows:
        """As a tensor's: without dimensions of 1."""
        return Rows(tuple(size for size in self.shape if size != 1), self.runs, self.widths)

    def __getitem__(self, key: Any) -> Rows:
        first, *others = key if isinstance(key, tuple) else (key,)
        if isinstance(first, slice):
            begin, end, step = first.indices(self._rows(0))
            if step != 1:
                raise ValueError("rows are taken with a step")
            taken, shape = self._part(begin, max(begin, end)), [max(0, end - begin)]
        elif first == 0 and self.shape[0] == 1:
            taken, shape = self, []
        else:
            raise ValueError(f"rows are taken by {first!r}")
        sizes = self.shape[1:]
        for index, size in zip(others, sizes, strict=False):
            if index == slice(None):
                shape.append(size)
            elif index != 0 or size != 1:
                raise ValueError(f"columns are taken by {index!r}")
        return Rows((*shape, *sizes[len(others) :]), taken.runs, self.widths)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.__name__
        if name == "cat":
            return _joined(*args, **kwargs)
        if name in ("chunk", "split"):
            return getattr(args[0], name)(*args[1:], **kwargs)
        raise ValueError(f"weights are computed ({name})")

    def _rows(self, dim: int) -> int:
        if dim != 0 or not self.shape or sum(run.end - run.begin for run in self.runs) != self.shape[0]:
            raise ValueError(f"a tensor of {list(self.shape)} is taken apart by its dimension {dim}")
        return self.shape[0]

    def _part(self, begin: int, end: int) -> Rows:
        runs, at = [], 0
        for run in self.runs:
            size = run.end - run.begin
            first, last = max(begin - at, 0), min(end - at, size)
            if first < last:
                runs.append(Run(run.name, run.begin + first, run.begin + last))
            at += size
        return Rows((end - begin, *self.shape[1:]), tuple(runs), self.widths)


def _joined(parts: Sequence[Rows], dim: int = 0) -> Rows:
    rows = sum(part._rows(dim) for part in parts)
    if len({part.shape[1:] for part in parts}) != 1:
        raise ValueError("tensors of other columns are joined")
    runs: list[Run] = []
    for run in (run for part in parts for run in part.runs):
        if runs and runs[-1].name == run.name and runs[-1].end == run.begin:
            runs[-1] = Run(run.name, runs[-1].begin, run.end)
        else:
            runs.append(run)
    return Rows((rows, *parts[0].shape[1:]), tuple(runs), parts[0].widths)


def whole(name: str, shape: tuple[int, ...], widths: Widths | None = None) -> Rows:
    """All rows of a stored tensor."""
    return Rows(shape, (Run(name, 0, shape[0] if shape else 1),), widths)


def traced(rows: Mapping[str, Rows], convert: Convert) -> dict[str, Rows]:
    """Return what a converter makes of the rows. Raises ValueError, in a few words, if it does more than move them."""
    try:
        made = convert(dict(rows))
    except KeyError as error:
        raise ValueError(f"it lacks {error.args[0]}") from error
    columns = {each.runs[0].name: prod(each.shape[1:]) for each in rows.values()}
    found = {}
    for name, value in made.items():
        if value is None:
            continue  # of a weight that is not there: whoever needs it says so
        taken = value.runs if isinstance(value, Rows) else ()
        if not taken or prod(value.shape) != sum((run.end - run.begin) * columns[run.name] for run in taken):
            raise ValueError(f"{name} is more than rows of what is stored")
        found[name] = value
    return found


def left_over(stored: Mapping[str, tuple[int, ...]], taken: Iterable[Rows]) -> Collection[str]:
    """Return the names of stored tensors with rows that nothing takes."""
    spent: dict[str, int] = {}
    for run in {run for rows in taken for run in rows.runs}:
        spent[run.name] = spent.get(run.name, 0) + run.end - run.begin
    return [name for name, shape in stored.items() if spent.get(name, 0) < (shape[0] if shape else 1)]
