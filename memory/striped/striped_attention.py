"""Attention over all positions: a stripe of queries at a time against blocks of keys and values.

Without a mask, if the device has a fused kernel and all keys and values fit there, a stripe calls that kernel once.
Otherwise blocks are merged by an online softmax in float32, as in FlashAttention (arXiv 2205.14135).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from ..planning.stripes import blocks
from .arena import stand_in
from .chunked_calls import NotStripedError, handles, local
from .lazy_tensor import LazyTensor
from .materialize import settle

_SCORE_BYTES = 32 * 2**20  # of the scores of one block in float32, at most
_BLOCKS = 3  # scores, their exponentials, and one temporary
_WHOLES_SHARE = 2  # keys and values may take at most 1/2 of the free budget to be made contiguous for the fused kernel
_BUDGET_SHARE = 16  # the scores of a block take at most 1/16 of the budget


@handles("scaled_dot_product_attention")
def _attended(
    function: Any,
    query: LazyTensor,
    key: LazyTensor,
    value: LazyTensor,
    attn_mask: LazyTensor | torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> LazyTensor:
    nodes = (query, key, value)
    if not all(isinstance(one, LazyTensor) for one in nodes) or len({one.axis - len(one.shape) for one in nodes}) > 1:
        raise NotStripedError
    if query.axis < len(query.shape) - 2 and not isinstance(
        attn_mask, LazyTensor
    ):  # attention within each row, such as over frames
        rest = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return local(function, (query, key, value, attn_mask), rest, operations=4 * key.shape[-2])
    if query.axis != len(query.shape) - 2:
        raise NotStripedError
    if isinstance(attn_mask, LazyTensor) and (attn_mask.axis, attn_mask.length) != (
        len(attn_mask.shape) - 2,
        query.length,
    ):
        raise NotStripedError
    if dropout_p or is_causal or enable_gqa or len({one.shape[:-2] for one in nodes}) > 1:
        raise NotStripedError
    settle(key)
    settle(value)
    return _Attention(query, key, value, attn_mask, scale or query.shape[-1] ** -0.5)


class _Attention(LazyTensor):
    """The result [..., queries, channels] for keys and values [..., length, channels] and a mask that broadcasts."""

    def __init__(
        self,
        query: LazyTensor,
        key: LazyTensor,
        value: LazyTensor,
        mask: LazyTensor | torch.Tensor | None,
        scale: float,
    ) -> None:
        shape = [*query.shape[:-1], value.shape[-1]]
        work = 2 * key.length * (query.shape[-1] + value.shape[-1]) // max(1, value.shape[-1])
        masks = (mask,) if isinstance(mask, LazyTensor) else ()
        super().__init__(query.arena, shape, query.dtype, query.axis, (query, key, value, *masks), work)
        self.wholly = (key, value)
        self._mask, self._scale = mask, scale
        self._fuses = mask is None and len(shape) == 4 and self._has_kernel()
        self._heads = max(1, query.nbytes // (query.length * query.shape[-1] * query.dtype.itemsize))
        self.grain = query.grain

    def _has_kernel(self) -> bool:
        fuses = self.arena.fuses
        return fuses is None or fuses(*(stand_in(one.shape, one.dtype) for one in self.inputs), scale=self._scale)

    @functools.cached_property
    def _is_at_once(self) -> bool:
        """Whether a stripe of queries calls the fused kernel once with all keys, which must fit on the device."""
        wholes = self.inputs[1:3]
        if not self._fuses or any(one.heavy or any(one.needed(0, one.length)) for one in wholes):
            return False
        return self._wholes_bytes() <= self.arena.free_bytes // _WHOLES_SHARE

    def _wholes_bytes(self) -> int:
        """Return the peak bytes of making all keys and values on the device; 0 for materialized ones."""
        return sum(one.peak_bytes(one.length) for one in self.inputs[1:3])

    def _block(self, rows: int) -> int:
        """Return how many keys a block has for `rows` queries."""
        space = min(_SCORE_BYTES, self.arena.budget_bytes // _BUDGET_SHARE)
        return min(self.inputs[1].length, max(1, space // (4 * self._heads * rows)))

    def _peak_bytes(self, rows: int) -> int:
        query, key, value, *masks = self.inputs
        if self._is_at_once:  # the kernel may copy the queries to another layout
            return query.peak_bytes(rows) + rows * (query.row_bytes + self.row_bytes) + self._wholes_bytes()
        block = self._block(rows)
        scores = _BLOCKS * 4 * self._heads * rows * block
        both = max(key.passing_bytes(block), block * key.row_bytes + value.passing_bytes(block))
        both += sum(mask.peak_bytes(rows) for mask in masks)
        # Queries, scaled queries, and the running sum, old and new.
        return query.peak_bytes(rows) + rows * (query.row_bytes + 3 * self.row_bytes) + scores + both

    def _make(self, start: int, stop: int) -> torch.Tensor:
        query, key, value, *masks = self.inputs
        if self._is_at_once:
            keys, values = key.rows(0, key.length), value.rows(0, value.length)
            return functional.scaled_dot_product_attention(query.rows(start, stop), keys, values, scale=self._scale)
        mask = masks[0].rows(start, stop) if masks else self._mask
        if isinstance(mask, torch.Tensor) and not masks and mask.shape[-2] > 1:
            mask = mask[..., start:stop, :]
        asked = query.rows(start, stop).float() * self._scale
        most = total = summed = None
        block = self._block(stop - start)

        spans = blocks(key.length, block)

        def kind(index: int) -> tuple:
            return key.kind(*spans[index]), value.kind(*spans[index])

        for low, high in (spans[index] for index in self.arena.steps(len(spans), kind)):
            scores = asked @ key.rows(low, high).float().transpose(-1, -2)
            if isinstance(mask, torch.Tensor):
                scores = _masked(scores, mask if mask.shape[-1] == 1 else mask[..., low:high])
            peak = scores.amax(-1, keepdim=True).clamp_min(
                torch.finfo(torch.float32).min
            )  # a fully masked row is -inf, and would give NaN
            if most is not None:
                peak = torch.maximum(most, peak)
            scores = (scores - peak).exp()
            amount = scores.sum(-1, keepdim=True)
            part = scores @ value.rows(low, high).float()
            del scores
            if most is None or total is None or summed is None:
                most, total, summed = peak, amount, part
            else:
                less = (most - peak).exp()
                most, total, summed = peak, total * less + amount, torch.addcmul(part, summed, less)
                del less
            del peak, amount, part
        assert summed is not None
        assert total is not None
        return (summed / total).to(query.dtype)

    def _sources(self, start: int, stop: int) -> list[tuple[LazyTensor, int, int]]:
        query, _, _, *masks = self.inputs  # keys and values are read in blocks by `_make` itself
        return [(one, start, stop) for one in (query, *masks)]

    def _let_go(self) -> None:
        self._mask, self.wholly = None, ()


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
