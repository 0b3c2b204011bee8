"""Neighborhood attention of a video in blocks: exact, in memory that grows with the length and not with its square.

diffusers' own processor for any device makes a mask of all positions by all others. For 121 frames of 512 x 704 pixels
that of LTX-2.5's decoder would have 7 TB.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ...memory.simulated.dry import counted

_OWN = "LTX2VideoVaeNeighborhoodAttnProcessor"  # of diffusers, the one that runs anywhere
_BLOCK = 8  # positions along each axis that attend at once
_ALL = slice(None)  # of the batch


class NeighborhoodInBlocks:
    """Attends as diffusers' processor does: each position to the `kernel_size` around it, moved inward at borders."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, block_mask: None = None) -> torch.Tensor:
        """Return the attention of hidden states [B,T,H,W,C], a block of positions at a time."""
        query, key, value = attn.project_qkv(hidden_states)  # [B,T,H,W,heads,C/heads]; the query is scaled
        made = torch.empty_like(value)
        spans = [list(_spans(n, k)) for n, k in zip(hidden_states.shape[1:4], attn.kernel_size, strict=True)]
        masks: dict[tuple[tuple[int, ...], ...], torch.Tensor] = {}
        # A dry run makes one block of each shape, and counts the others with it.
        counts = [Counter(span.shape for span in axis) if hidden_states.is_meta else {} for axis in spans]
        axes = [
            list({span.shape: span for span in axis}.values()) if of else axis
            for axis, of in zip(spans, counts, strict=True)
        ]
        seen = [{span.shape: span.seen(value.device) for span in {s.shape: s for s in axis}.values()} for axis in axes]
        for block in itertools.product(*axes):
            shape = tuple(span.shape for span in block)
            if shape not in masks:
                masks[shape] = _mask([of[part] for of, part in zip(seen, shape, strict=True)])
            at, near = (_ALL, *(span.attending for span in block)), (_ALL, *(span.near for span in block))
            with counted(math.prod(of.get(part, 1) for of, part in zip(counts, shape, strict=True))):
                found = nn.functional.scaled_dot_product_attention(
                    _of_heads(query[at]),
                    _of_heads(key[near]),
                    _of_heads(value[near]),
                    attn_mask=masks[shape],
                    scale=1.0,
                )
            made[at] = found.transpose(1, 2).unflatten(1, [span.end - span.begin for span in block])
        return attn.to_out[0](made.flatten(4))  # type: ignore[no-any-return]


def attend_in_blocks(module: nn.Module) -> None:
    """Let neighborhood attention within a module run in blocks, where it would take diffusers' own for any device."""
    for layer in module.modules():
        if type(getattr(layer, "processor", None)).__name__ == _OWN:
            layer.processor = NeighborhoodInBlocks()  # type: ignore[assignment]


def least_latents(config: Mapping[str, Any]) -> tuple[int, int, int]:
    """Return the fewest latent frames, rows and columns that the decoder of this config takes: 1 each of any other.

    No axis may be shorter than the neighborhood on it. The decoder repeats the last frame as often as the first
    neighborhood reaches, until it denoises.
    """
    if not (kernels := config.get("decoder_stage_kernels")):
        return 1, 1, 1
    strides, last = config["decoder_upsample_strides"], config["decoder_stage5_kernel"]

    def fits(axis: int, size: int) -> bool:
        repeated = kernels[0][0] // 2 * 2 if axis == 0 else 0
        now = size + repeated
        for kernel, stride in zip(kernels, strides, strict=True):
            if now < kernel[axis]:
                return False
            now = now * stride[axis] - (axis == 0 and stride[axis] == 2)
        return bool(now - repeated * config["temporal_compression_ratio"] >= last[axis])

    frames, rows, columns = (next(n for n in itertools.count(1) if fits(axis, n)) for axis in range(3))
    return frames, rows, columns


@dataclass(frozen=True)
class _Span:
    """The positions from `begin` to `end` along an axis of `length`, each of which sees `size` of them."""

    begin: int
    end: int
    length: int
    size: int

    def _first_seen(self, position: int) -> int:
        return min(max(position - self.size // 2, 0), self.length - self.size)

    @property
    def attending(self) -> slice:
        """The positions that attend."""
        return slice(self.begin, self.end)

    @property
    def near(self) -> slice:
        """The positions that any of them sees."""
        return slice(self._first_seen(self.begin), self._first_seen(self.end - 1) + self.size)

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The first that each position sees, counted from the first of all: spans of one shape have one mask."""
        first = self._first_seen(self.begin)
        return tuple(self._first_seen(position) - first for position in range(self.begin, self.end))

    def seen(self, device: torch.device) -> torch.Tensor:
        """Return which of the positions that any sees each one sees, [positions, seen]."""
        first = torch.tensor(self.shape, device=device).unsqueeze(1)
        all_seen = torch.arange(self.shape[-1] + self.size, device=device)
        return (all_seen >= first) & (all_seen < first + self.size)


def _spans(length: int, size: int) -> Iterator[_Span]:
    for begin in range(0, length, _BLOCK):
        yield _Span(begin, min(begin + _BLOCK, length), length, min(size, length))


def _mask(axes: list[torch.Tensor]) -> torch.Tensor:
    """Return which positions see which others, [positions, seen], of masks along three axes."""
    t, h, w = axes
    seen = t[:, None, None, :, None, None] & h[None, :, None, None, :, None] & w[None, None, :, None, None, :]
    return seen.flatten(3).flatten(0, 2)


def _of_heads(part: torch.Tensor) -> torch.Tensor:
    """[B,T,H,W,heads,C] -> [B,heads,T*H*W,C]."""
    return part.flatten(1, 3).transpose(1, 2)
