"""Attention of a video's frames to their reference: exact, without a mask, a compiler, or scores of all with all.

The transformer of Wan-Animate 2 attends by FlexAttention. Without a compiler that takes the scores of all positions
with all others: 282 GB for 81 frames of 640 x 800 pixels. Devices that FlexAttention does not know cannot run it.

The reference's keys and values have 32 GB then. They lie in RAM, and each layer brings them a frame at a time: that is
1.4 s of a pass at 25 GB/s, in which attention takes 50 s at 60 TFLOPS.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from ...memory.simulated.dry import counted, keep_in_ram

_OWN = "WanAnimate2AttnProcessor"  # of diffusers


class FramesWithReference:
    """Attends as diffusers' processor does: each frame to all frames, and to that of the reference at its time.

    The first frame is the picture's, and has no reference. `own` is diffusers' processor, which reads the reference.
    """

    def __init__(self, own: Any) -> None:
        self._own = own

    def __call__(
        self, attn: Any, hidden_states: torch.Tensor, *, kv_cache: Any, kv_cache_mode: str, **given: Any
    ) -> torch.Tensor:
        """Return the attention of hidden states [B,tokens,C]; keys and values of the reference are in `kv_cache`."""
        grid, reference = given["grid_sizes"], given.get("reference_grid_sizes")
        if kv_cache_mode != "cached":
            given |= {"kv_cache": _InRam(kv_cache), "kv_cache_mode": kv_cache_mode}
            return self._own(attn, hidden_states, **given)  # type: ignore[no-any-return]
        if not _is_full(grid, reference, given):
            raise ValueError("a video's frames fill a part of their grid, which only FlexAttention runs")
        from diffusers.models.transformers.transformer_wan_animate_2 import rope_apply

        frames, rows, columns = grid[0].tolist()
        query, key, value = (
            part.unflatten(2, (attn.heads, -1)).contiguous()
            for part in (
                attn.norm_q(attn.to_q(hidden_states)),
                attn.norm_k(attn.to_k(hidden_states)),
                attn.to_v(hidden_states),
            )
        )
        old_keys, old_values = kv_cache.get()
        stride, size = given.get("reference_rope_stride", 1), rows * columns
        of_frame, dry = torch.tensor([[1, rows, columns]]), hidden_states.is_meta

        def turned(part: torch.Tensor, angles: torch.Tensor, time: int) -> torch.Tensor:
            return rope_apply(part, of_frame, _at(angles, time)).type_as(value)  # type: ignore[no-any-return]

        for frame in range(1 if dry else frames):  # for its numbers of 64 bits
            at = slice(frame * size, (frame + 1) * size)
            with counted(frames if dry else 1):
                for part in (query, key):
                    part[:, at] = turned(part[:, at], given["rotary_emb"], frame)
        made = torch.empty_like(query)
        made[:, :size] = _attended(query[:, :size], key, value)
        # A dry run makes one frame, and counts the others with it.
        for frame in range(1, 2 if dry else frames):
            at, then = slice(frame * size, (frame + 1) * size), slice((frame - 1) * size, frame * size)
            with counted(frames - 1 if dry else 1):
                old_key, old_value = (old[:, then].contiguous().to(value.device) for old in (old_keys, old_values))
                old_key = turned(old_key, given["reference_rotary_emb"], (frame - 1) * stride)
                keys, values = torch.cat([key, old_key], dim=1), torch.cat([value, old_value], dim=1)
                made[:, at] = _attended(query[:, at], keys, values)
        made = made.flatten(2, 3)
        return attn.to_out[1](attn.to_out[0](made))  # type: ignore[no-any-return]


class _InRam:
    """A layer's cache that keeps what it is handed in RAM."""

    def __init__(self, cache: Any) -> None:
        self._cache = cache

    def store(self, key: torch.Tensor, value: torch.Tensor) -> None:
        self._cache.store(*(_in_ram(part) for part in (key, value)))


def _in_ram(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor in RAM. In a dry run it takes none, but counts."""
    if not part.is_meta:
        return part.to("cpu")
    keep_in_ram(part.nbytes)
    return torch.zeros((), dtype=part.dtype).expand(part.shape)


def attend_to_frames(module: nn.Module) -> None:
    """Let a module attend to its reference frame by frame, where it would need FlexAttention."""
    found = False
    for layer in module.modules():
        if type(own := getattr(layer, "processor", None)).__name__ == _OWN:
            layer.processor, found = FramesWithReference(own), True  # type: ignore[assignment]
    if found and hasattr(module, "create_mask"):
        module.__class__ = _without_mask(type(module))  # type: ignore[arg-type]


@functools.cache
def _without_mask(cls: Any) -> type[nn.Module]:
    """Return a subclass that makes no mask, and keeps its angles where it runs and not where its weights lie."""

    def create_mask(module: Any, *size: Any) -> None:
        return None

    def angles(module: Any, offsets: tuple[int, ...], device: torch.device) -> torch.Tensor:
        return cls._rope_freqs(module, offsets, module.device)  # type: ignore[no-any-return]

    made = {"__module__": cls.__module__, "create_mask": create_mask, "_rope_freqs": angles}
    return type(cls.__name__, (cls,), made)


def _is_full(grid: torch.Tensor, reference: torch.Tensor | None, given: dict[str, Any]) -> bool:
    (frames, *sides), frame = grid[0].tolist(), given.get("origin_latent_hw")
    return (
        reference is not None
        and len(grid) == 1
        and reference[0].tolist() == [frames - 1, *sides]
        and frames - 1 == given.get("origin_latent_frames")
        and sides[0] * sides[1] == frame
    )


def _at(angles: torch.Tensor, time: int) -> torch.Tensor:
    """Return the angles of a frame at this time, which are then those of the first. The others tell row and column."""
    now, times = angles.clone(), angles.shape[1] - 2 * (angles.shape[1] // 3)
    now[0, :times] = angles[time, :times]
    return now


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attend [B,tokens,heads,C]."""
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)
