"""Batches: several pictures of one prompt, drawn at once, each from the noise of its own seed. Pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..encoding.conditioning import Conditioning

Dims = Mapping[str, int]  # by name of an embedding: the dimension of its prompts, where it is not the first
Generators = torch.Generator | list[torch.Generator]  # one for a picture alone, and for several prompts

MOST = 64  # pictures of a run
_SEEDS = 2**64


@dataclass(frozen=True)
class Batch:
    """The pictures of a run: how many, the seed of the first, and the noise of all [count,...] if it is given.

    `own` names those arguments of the run that hold something for each picture, or one thing for all.
    """

    count: int
    seed: int = 0
    noise: torch.Tensor | None = None
    own: tuple[str, ...] = ()

    def arguments(self, arguments: Mapping[str, Any], begin: int, count: int) -> dict[str, Any]:
        """Return the arguments for `count` pictures from `begin` on, fewer at the run's end, with their generators."""
        end = min(begin + count, self.count)
        part = dict(arguments) | {"generator": generators(self.seed, begin, end), "latents": self.noise}
        if self.count == 1:
            return part
        if self.noise is not None:
            part["latents"] = self.noise[begin:end]
        for name in self.own:
            value = arguments[name]
            if len(value) > 1:
                part[name] = value[begin:end]
            elif isinstance(value, tuple):
                part[name] = value * (end - begin)
            else:
                part[name] = torch.cat([value] * (end - begin))
        return part


def batch_of(
    batch: int,
    seed: int,
    noise: torch.Tensor | None,
    prompts: int,
    arguments: Mapping[str, Any],
    own: Mapping[str, str],
) -> Batch:
    """Return the batch of a run. Raises ValueError, in one line, for numbers that do not go together.

    Pictures to start from or to follow make as many. Several prompts have a picture each, whose noise one generator
    draws. `own` names arguments that may hold something for each picture, by what users call them.
    """
    if isinstance(batch, bool) or not isinstance(batch, int) or not 1 <= batch <= MOST:
        raise ValueError(f"batch is {str(batch)[:80]}; it takes a whole number from 1 to {MOST}.")
    names = tuple(name for name in own if arguments.get(name) is not None)
    if prompts > 1 and batch > 1:
        raise ValueError(f"batch is {batch}, but there are {prompts} prompts. Encode one, or leave batch at 1.")
    count = prompts if prompts > 1 else max([batch, *(len(arguments[name]) for name in names)])
    for name in names:
        if (given := len(arguments[name])) not in (1, count):
            many = f"{count} prompts" if prompts > 1 else f"a batch of {count}"
            raise ValueError(f"{own[name]} has {given} for {many}. Give one, or as many.")
        if count > 1 and len({tuple(one.shape) for one in arguments[name]}) > 1:
            raise ValueError(f"{own[name]} has pictures of several sizes. Give them one size, or take them one by one.")
    if prompts > 1:
        return Batch(1, seed, noise)
    if count > MOST:
        raise ValueError(f"there are {count} pictures; a run takes up to {MOST}. Give fewer.")
    if noise is not None and count > 1 and noise.shape[:1] != (count,):
        raise ValueError(f"the noise is {list(noise.shape)}, for a batch of {count}. Give noise for each, or a seed.")
    return Batch(count, seed, noise, names)


def halvings(count: int) -> list[int]:
    """Return how many pictures are drawn at once: all, or the half of them, down to one."""
    found = [count]
    while found[-1] > 1:
        found.append(-(-found[-1] // 2))
    return found


def generators(seed: int, begin: int, end: int) -> Generators:
    """Return generators for the noise of pictures `begin` to `end`, each as if it were made alone from `seed` + i."""
    made = [torch.Generator("cpu").manual_seed((seed + i) % _SEEDS) for i in range(begin, end)]
    return made[0] if len(made) == 1 else made


def seeds_of(drawing: Generators, pictures: int) -> list[int]:
    """Return the seeds of pictures, for loops that draw noise themselves. Several prompts count on from the first's."""
    if isinstance(drawing, list):
        return [generator.initial_seed() for generator in drawing]
    return [(drawing.initial_seed() + i) % _SEEDS for i in range(pictures)]


def for_batch(cond: Conditioning, drawing: Generators, dims: Dims) -> Conditioning:
    """Repeat the conditioning of one prompt for each picture to draw."""
    if not isinstance(drawing, list):
        return cond
    tensors: dict[str, Any] = {
        name: value * len(drawing) if isinstance(value, list) else torch.cat([value] * len(drawing), dims.get(name, 0))
        for name, value in cond.tensors.items()
    }
    return replace(cond, tensors=tensors)


def prompts_of(cond: Conditioning, dims: Dims) -> int:
    """Return how many prompts a conditioning is of."""
    if (known := cond.info.get("prompts", "")).isdecimal():
        return int(known)
    sizes: Sequence[int] = [
        len(value) if isinstance(value, list) else value.shape[dims.get(name, 0)]
        for name, value in cond.tensors.items()
        if isinstance(value, list) or value.ndim > dims.get(name, 0)
    ]
    return sizes[0] if sizes else 1
