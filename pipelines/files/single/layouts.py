"""How models lie in single files: by which names one is known, and who turns these into diffusers' names."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from ....memory.weights.encoding import holds
from ..rows import Convert, Rows, Widths, traced

Shape = tuple[int, ...]
Config = Mapping[str, Any]


class Shapes(dict[str, Shape]):
    """The shapes of a model's weights by their names."""

    def count(self, start: str) -> int:
        """Return how many blocks there are whose names begin so, and go on with a number."""
        numbers = (name.removeprefix(start).partition(".")[0] for name in self if name.startswith(start))
        return 1 + max((int(number) for number in numbers if number.isdigit()), default=-1)


@dataclass(frozen=True)
class Layout:
    """One kind of model: the classes of diffusers that run it, and how its files are known and read.

    A file has the `original` names, all of those given, or diffusers' `plain` ones. `converter` is a function of
    `diffusers.loaders.single_file_utils`, or one of ours where diffusers has none; None where the names are the
    same. It gets names that begin with `prefix`, and none that begin as the `aside` do: these, and what diffusers calls
    them. `told` gives the config values that the shapes tell, by diffusers' names and with what else
    the config says; those in `sizes` may be other than a base's: of a model that was made smaller. `unread` are names
    in original files that no class has a place for. `kernel` is diffusers' name of the convolution that makes patches.
    `renamed` are patterns of names that ComfyUI gives the layers, each with the original one. Names that begin as those
    `apart` are of another component, which lies in the same file. One that is read `whole` alone has rows in another
    order in its original shards.
    """

    title: str
    classes: tuple[str, ...]
    original: tuple[str, ...]
    plain: tuple[str, ...]
    converter: str | Convert | None
    told: Callable[[Shapes, Config], dict[str, Any]]
    sizes: frozenset[str]
    widths: Callable[[Shapes], Widths] | None = None
    unread: tuple[str, ...] = ()
    prefix: str = ""
    aside: tuple[tuple[str, str], ...] = ()
    kernel: str = ""
    renamed: tuple[tuple[str, str], ...] = ()
    apart: tuple[str, ...] = ()
    whole: bool = False

    def places(self, shapes: Mapping[str, Rows], config: Config) -> dict[str, Rows]:
        """Where each parameter of the class lies, by diffusers' names, from rows by the names in a file.

        ValueError, in a few words, for what is missing.
        """
        places = dict(shapes)
        if self.is_original(shapes):
            if self.widths:
                widths = self.widths(Shapes({name: rows.shape for name, rows in shapes.items()}))
                places = {name: Rows(rows.shape, rows.runs, widths) for name, rows in places.items()}
            places = traced(places, functools.partial(self.convert, config=config))
        return {name: rows for name, rows in places.items() if name not in self.unread}

    def config(self, shapes: Shapes, config: Config) -> dict[str, Any]:
        """Return the config values that the shapes tell. A `kernel` without its dimensions has those of `config`."""
        stored, (rows, *_) = shapes.get(self.kernel, ()), shapes.get(_beside(self.kernel), (0,))
        if not stored or not rows:
            return self.told(shapes, config)
        patch = config["patch_size"]
        if "patch_size_t" in config:
            patch = (config["patch_size_t"], patch, patch)
        sizes = tuple(patch) if isinstance(patch, (list, tuple)) else (patch, patch)
        whole = (rows, prod(stored) // (rows * prod(sizes)), *sizes)
        if len(stored) < len(whole):
            if not holds(stored, whole, kernel=True):
                return {self.kernel: stored}
            shapes = Shapes(shapes | {self.kernel: whole})
        return self.told(shapes, config)

    def is_original(self, names: Mapping[str, Any]) -> bool:
        """Return whether a file of this kind has the original names."""
        return all(name in names for name in self.original)

    def original_name(self, name: str) -> str:
        """Return the original name of a weight, also where ComfyUI gave it another."""
        for theirs, original in self.renamed:
            name = re.sub(theirs, original, name)
        return name

    def convert(self, weights: dict[str, Any], config: Config) -> Mapping[str, Any]:
        """Convert weights to diffusers' names."""
        if self.renamed:
            for name in [name for name in weights if self.original_name(name) != name]:
                weights[self.original_name(name)] = weights.pop(name)
        if self.converter is None:
            return weights
        if not isinstance(self.converter, str):
            return self.converter(weights)
        from diffusers.loaders import single_file_utils

        made = {
            ours + name.removeprefix(theirs): weights.pop(name)
            for theirs, ours in self.aside
            for name in list(weights)
            if name.startswith(theirs)
        }
        # As it is, where it can be: one with a part of the names tells which others are asked for.
        named = {self.prefix + name: value for name, value in weights.items()} if self.prefix else weights
        return made | dict(getattr(single_file_utils, self.converter)(named, config=config))


def _beside(weight: str) -> str:
    """Return the name of a weight's bias."""
    return f"{weight.removesuffix('.weight')}.bias"


def layout_of(names: Mapping[str, Any], layouts: Sequence[Layout]) -> Layout | None:
    """Return the first layout that has these names, or None."""
    for layout in layouts:
        if any(marks and all(name in names for name in marks) for marks in (layout.original, layout.plain)):
            return layout
    return None
