"""Attention over a whole map: a stripe of queries at a time, and of keys and values as many as there is room for.

Where all keys and values lie on the device, and that has a fused kernel, it is the kernel that the whole would take.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch.nn import functional

from ..planning.stripes import blocks
from .arena import stand_in
from .chunked_calls import NotStripedError, handles, local
from .lazy_tensor import Map
from .materialize import settle

_SCORE_BYTES = 32 * 2**20  # of one block of queries by keys, where the budget leaves that much
_BLOCKS = 3  # scores, what softmax makes of them, and either once more in between
_WHOLES_SHARE = 2  # the part of the room, one in so many, that keys and values take at most that are copied
_BUDGET_SHARE = 16  # the part of the budget, one in so many, that a block takes at most


@handles("scaled_dot_product_attention")
def _attended(
    function: Any,
    query: Map,
    key: Map,
    value: Map,
    attn_mask: Map | torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Map:
    maps = (query, key, value)
    if not all(isinstance(one, Map) for one in maps) or len({one.axis - len(one.shape) for one in maps}) > 1:
        raise NotStripedError
    if query.axis < len(query.shape) - 2 and not isinstance(attn_mask, Map):  # a row's own places look at each other
        rest = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        return local(function, (query, key, value, attn_mask), rest, operations=4 * key.shape[-2])
    if query.axis != len(query.shape) - 2:
        raise NotStripedError
    if isinstance(attn_mask, Map) and (attn_mask.axis, attn_mask.length) != (len(attn_mask.shape) - 2, query.length):
        raise NotStripedError
    if dropout_p or is_causal or enable_gqa or len({one.shape[:-2] for one in maps}) > 1:
        raise NotStripedError
    settle(key)
    settle(value)
    return _Attention(query, key, value, attn_mask, scale or query.shape[-1] ** -0.5)


class _Attention(Map):
    """[..., queries, channels] of queries, keys and values [..., length, channels], and a mask that fits to them."""

    def __init__(self, query: Map, key: Map, value: Map, mask: Map | torch.Tensor | None, scale: float) -> None:
        shape = [*query.shape[:-1], value.shape[-1]]
        work = 2 * key.length * (query.shape[-1] + value.shape[-1]) // max(1, value.shape[-1])
        masks = (mask,) if isinstance(mask, Map) else ()
        super().__init__(query.room, shape, query.dtype, query.axis, (query, key, value, *masks), work)
        self.wholly = (key, value)
        self._mask, self._scale = mask, scale
        self._fuses = mask is None and len(shape) == 4 and self._has_kernel()
        self._heads = max(1, query.nbytes // (query.length * query.shape[-1] * query.dtype.itemsize))
        self.grain = query.grain

    def _has_kernel(self) -> bool:
        fuses = self.room.fuses
        return fuses is None or fuses(*(stand_in(one.shape, one.dtype) for one in self.inputs), scale=self._scale)

    @functools.cached_property
    def _is_at_once(self) -> bool:
        """Return whether a stripe of queries looks at all keys in one kernel: they lie on the device, or nearly so."""
        wholes = self.inputs[1:3]
        if not self._fuses or any(one.heavy or any(one.needed(0, one.length)) for one in wholes):
            return False
        return self._wholes_bytes() <= self.room.free_bytes // _WHOLES_SHARE

    def _wholes_bytes(self) -> int:
        """Return what keys and values take that do not lie on the device as the kernel wants them."""
        return sum(one.peak_bytes(one.length) for one in self.inputs[1:3])

    def _block(self, rows: int) -> int:
        """Return how many keys are looked at together by so many queries."""
        room = min(_SCORE_BYTES, self.room.budget_bytes // _BUDGET_SHARE)
        return min(self.inputs[1].length, max(1, room // (4 * self._heads * rows)))

    def _peak_bytes(self, rows: int) -> int:
        query, key, value, *masks = self.inputs
        if self._is_at_once:  # queries once more where the kernel wants them otherwise
            return query.peak_bytes(rows) + rows * (query.row_bytes + self.row_bytes) + self._wholes_bytes()
        block = self._block(rows)
        scores = _BLOCKS * 4 * self._heads * rows * block
        both = max(key.passing_bytes(block), block * key.row_bytes + value.passing_bytes(block))
        both += sum(mask.peak_bytes(rows) for mask in masks)
        # Queries, scaled ones, and what has been summed up, as it was and as it is.
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

        for low, high in (spans[index] for index in self.room.steps(len(spans), kind)):
            scores = asked @ key.rows(low, high).float().transpose(-1, -2)
            if isinstance(mask, torch.Tensor):
                scores = _masked(scores, mask if mask.shape[-1] == 1 else mask[..., low:high])
            peak = scores.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)  # all of it masked
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

    def _sources(self, start: int, stop: int) -> list[tuple[Map, int, int]]:
        query, _, _, *masks = self.inputs  # keys and values pass by
        return [(one, start, stop) for one in (query, *masks)]

    def _let_go(self) -> None:
        self._mask, self.wholly = None, ()


def _masked(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
