"""Step caching: skip the blocks of a transformer in some steps, and reuse what they added in an earlier one.

It is lossy. This module has the settings, and which steps are computed where that is known before a run.
`cached_calls` runs the calls, and `cache_decisions` decides while they run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from diffusers.hooks._helpers import TransformerBlockMetadata

    from ...memory.weights.unit import ManagedModel

CACHE = "cache"  # option of `sample`
OFF = "off"

_STATIC, _MAG, _EASY, _SEA, _FIRST = "static", "magcache", "easycache", "seacache", "firstblock"
DEFAULTS = {_STATIC: 2.0, _MAG: 0.06, _EASY: 0.05, _SEA: 0.25, _FIRST: 0.05}  # those of diffusers and of EasyCache
_WARM_UP = 0.2  # part of the steps that are all computed: they decide what the picture shows
_MAG_MOST = 3  # steps in a row that MagCache skips, as in diffusers

# Transformers whose blocks hand their results on unchanged, so that a skipped run of blocks is its residual.
_TRANSFORMERS = (
    "AuraFlowTransformer2DModel",
    "ChromaTransformer2DModel",
    "CogVideoXTransformer3DModel",
    "FluxTransformer2DModel",
    "Flux2Transformer2DModel",
    "HunyuanVideoTransformer3DModel",
    "LTXVideoTransformer3DModel",
    "Lumina2Transformer2DModel",
    "MochiTransformer3DModel",
    "QwenImageTransformer2DModel",
    "SD3Transformer2DModel",
    "WanTransformer3DModel",
    "ZImageTransformer2DModel",
)
# Blocks that diffusers tells nothing of: where their results have the picture and the text.
_RESULTS: dict[str, tuple[int, int | None]] = {
    "AuraFlowJointTransformerBlock": (1, 0),
    "AuraFlowSingleTransformerBlock": (0, None),
    "ChromaTransformerBlock": (1, 0),
    "ChromaSingleTransformerBlock": (0, None),
    "Lumina2TransformerBlock": (0, None),
}
_WITH_RATIOS = ("FluxTransformer2DModel",)  # that diffusers has MagCache's ratios for
_AGAINST = ("skip_guidance_layers",)  # options that change what blocks hand on


@dataclass(frozen=True)
class StepCache:
    """How steps are skipped. `amount` is every how many steps are computed (static), or the threshold of the others.

    A `dry` one skips none, and holds what one that skips would.
    """

    kind: str
    amount: float
    dry: bool = False

    def __str__(self) -> str:
        return f"{self.kind}:{self.amount:g}"

    def computed(self, steps: int) -> tuple[bool, ...] | None:
        """Return which of the steps are computed; None if that shows in the run."""
        if self.kind == _STATIC:
            return static_steps(steps, int(self.amount))
        return mag_steps(steps, flux_ratios(), self.amount) if self.kind == _MAG else None

    def count(self, steps: int, transformers: int = 1) -> int:
        """Return how many steps are computed, or the most where that shows in the run.

        Each of several transformers that follow each other computes its first step.
        """
        mask = self.computed(steps)
        return steps if mask is None else min(steps, sum(mask) + transformers - 1)

    @property
    def runs_first(self) -> bool:
        """Return whether the first block runs in each step, and decides."""
        return self.kind == _FIRST

    @property
    def order(self) -> int:
        """The number of residuals beside the latest that a skipped step is extrapolated from."""
        return 1 if self.kind == _SEA else 0

    @contextmanager
    def keeping(self, units: Iterable[ManagedModel]) -> Iterator[None]:
        """Keep the weights that run in skipped steps too on the device, until the block ends.

        These are all outside of the blocks, and those of a first block that decides.
        """
        before = {unit: unit.calls for unit in units}
        for unit, calls in before.items():
            unit.calls = replace(calls, outside=calls.outside | frozenset(self._kept(unit.module)))
        try:
            yield
        finally:
            for unit, calls in before.items():
                unit.calls = replace(unit.calls, outside=calls.outside)

    def _kept(self, module: nn.Module) -> Iterator[str]:
        blocks = list(block_paths(module))
        skipped = tuple(f"{path}." for path in blocks[1 if self.runs_first else 0 :])
        for path, _ in module.named_modules():
            if path and not f"{path}.".startswith(skipped):
                yield path


def static_steps(steps: int, every: int) -> tuple[bool, ...]:
    """Return which steps are computed: all in the warm-up, then the last of each `every`.

    For example 10 steps and every 2: computed are 0, 1, 3, 5, 7, 9.
    """
    first = warm_up(steps)
    return tuple(step < first or (step - first + 1) % every == 0 for step in range(steps))


def mag_steps(steps: int, ratios: Sequence[float], threshold: float) -> tuple[bool, ...]:
    """Return which steps MagCache computes, by the ratios of one step's residual to the last one's.

    The error that a skipped step adds is how far the product of the ratios since the last computed one is from 1.
    """
    from diffusers.hooks.mag_cache import nearest_interp  # heavy: loads the models

    scales = torch.tensor(ratios)
    if len(scales) != steps:
        scales = nearest_interp(scales, steps)
    first, computed, skipped = warm_up(steps), list[bool](), 0
    product, error = torch.tensor(1.0), torch.tensor(0.0)
    for step in range(steps):
        if step < first:
            computed.append(True)
            continue
        product, skipped = product * scales[step], skipped + 1
        error = error + abs(1.0 - product)
        computed.append(not (error <= threshold and skipped <= _MAG_MOST))
        if computed[-1]:
            product, error, skipped = torch.tensor(1.0), torch.tensor(0.0), 0
    return tuple(map(bool, computed))


def flux_ratios() -> list[float]:
    """Return MagCache's ratios for FLUX.1, as diffusers has them."""
    from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS

    return FLUX_MAG_RATIOS.tolist()


def warm_up(steps: int) -> int:
    """Return how many steps at the beginning are computed in any case."""
    return max(1, int(_WARM_UP * steps + 0.5))


def block_paths(module: nn.Module) -> Iterator[str]:
    """Yield the paths of a transformer's blocks in the order of their calls, as diffusers' hooks find them."""
    from diffusers.hooks._common import _ALL_TRANSFORMER_BLOCK_IDENTIFIERS

    for name, child in module.named_children():
        if name in _ALL_TRANSFORMER_BLOCK_IDENTIFIERS and isinstance(child, nn.ModuleList):
            yield from (f"{name}.{i}" for i in range(len(child)))


def metadata_of(block: nn.Module) -> TransformerBlockMetadata:
    """Return where a block's arguments and results have the states. Raises ValueError if that is not known."""
    from diffusers.hooks._helpers import TransformerBlockMetadata, TransformerBlockRegistry

    if (results := _RESULTS.get(type(block).__name__)) is not None:
        return TransformerBlockMetadata(*results)  # type: ignore[arg-type]  # diffusers' own are None too
    return TransformerBlockRegistry.get(type(block))


def cache_of(title: str, units: Mapping[str, ManagedModel], is_flow: bool, options: Mapping[str, Any]) -> StepCache:
    """Return the cache that options of `sample` ask for. Raises ValueError, in one line, where it is not taken.

    `units` are those that draw, by name, and `is_flow` says whether their scheduler is one of flow matching.
    """
    cache = _parsed(options[CACHE])
    for name, unit in units.items():
        kind = type(unit.module).__name__
        if name.startswith("controlnet"):
            raise ValueError("cache does not go together with a ControlNet. Leave one of them out.")
        if kind not in _TRANSFORMERS:
            raise ValueError(f"{title} takes no cache: {kind} is none of {', '.join(_TRANSFORMERS)}. Leave it out.")
        if cache.kind == _MAG and kind not in _WITH_RATIOS:
            raise ValueError(
                f"magcache has ratios for {', '.join(_WITH_RATIOS)}, and none for {kind}. Use easycache, or another."
            )
        if cache.kind == _SEA and (not is_flow or not _takes_maps(unit.module)):
            raise ValueError(f"seacache compares latents of flow matching that are not packed; {title} has others. Use "
                             "easycache, or another.")  # fmt: skip
        if sum(1 for _ in block_paths(unit.module)) < 2:
            raise ValueError(f"{title} takes no cache: it has fewer than 2 blocks. Leave it out.")
    if against := ", ".join(name for name in _AGAINST if options.get(name)):
        raise ValueError(f"cache does not go together with {against}. Leave one of them out.")
    return cache


def _takes_maps(module: nn.Module) -> bool:
    """Return whether a transformer takes latents as maps [B,C,F,H,W] and predicts as many channels."""
    config: Any = module.config
    return type(module).__name__ == "WanTransformer3DModel" and config.in_channels == config.out_channels


def _parsed(asked: Any) -> StepCache:
    kind, _, amount = str(asked).partition(":")
    if isinstance(asked, str) and kind in DEFAULTS:
        try:
            number = float(amount) if amount else DEFAULTS[kind]
        except ValueError:
            number = math.nan
        if math.isfinite(number) and (number >= 2 and number == int(number) if kind == _STATIC else number > 0):
            return StepCache(kind, number)
    known = ", ".join(f"{name}:{default:g}" for name, default in DEFAULTS.items())
    raise ValueError(f"cache is {str(asked)[:80]!r}; it takes off, or one such as {known}.")
