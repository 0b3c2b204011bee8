"""Frames of several resolutions as one row of tokens, behind the text, and attention that is causal in time.

A token attends to those of its own time and earlier ones; the text has the time of the first frame. So each frame
attends to a prefix of the row, and no mask is needed: attention runs frame by frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers.models.attention_dispatch import dispatch_attention_fn

PATCH = 2


class Frames(NamedTuple):
    """Where things lie in a row of tokens: text, then frames, oldest first."""

    pads: tuple[int, ...]  # for each sample, how many tokens the row begins with that are none of its text
    ends: tuple[int, ...]  # of each frame, the text being with the first

    @classmethod
    def of(cls, sample: Sequence[torch.Tensor], lengths: Sequence[int]) -> Frames:
        """For clips [B,C,t,h,w] behind texts of so many tokens each."""
        end = longest = max(lengths)
        ends = []
        for clip in sample:
            frames, height, width = clip.shape[-3:]
            for _ in range(frames):
                end += (height // PATCH) * (width // PATCH)
                ends.append(end)
        return cls(tuple(longest - length for length in lengths), tuple(ends))


def text_at_the_end(text: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """Texts [B,L,C] without the pads that all of them have [B,longest,C], and how long each is.

    A shorter one comes after its pads, so that it and the frames behind it are one piece. Waits for the device, if the
    mask [B,L] is there.
    """
    valid = mask != 0
    lengths = valid.sum(1).tolist()
    order = torch.argsort(valid.to(torch.int32), dim=1, stable=True)[:, mask.shape[1] - max(lengths) :]
    return text.gather(1, order.to(text.device)[..., None].expand(-1, -1, text.shape[-1])), lengths


def positions(sample: Sequence[torch.Tensor], text_tokens: int) -> torch.Tensor:
    """Time, row and column of each token [tokens,3]; those of text are 0.

    Rows and columns are the last clip's: the pixels of a coarser one lie between them.
    """
    device = sample[-1].device
    height, width = (size // PATCH for size in sample[-1].shape[-2:])
    found, time = [torch.zeros(text_tokens, 3, device=device)], 0
    for clip in sample:
        frames, rows, columns = clip.shape[-3], clip.shape[-2] // PATCH, clip.shape[-1] // PATCH
        times = torch.arange(time, time + frames, device=device, dtype=torch.float32)
        grid = torch.meshgrid(times, _spread(rows, height, device), _spread(columns, width, device), indexing="ij")
        found.append(torch.stack(grid, dim=-1).flatten(0, 2))
        time += frames
    return torch.cat(found)


def _spread(count: int, size: int, device: torch.device) -> torch.Tensor:
    """Return the centres of `count` pixels on an axis of `size` finer ones [count]."""
    centres = (torch.arange(count, device=device, dtype=torch.float32) + 0.5) * (size / count) - 0.5
    return centres.clamp(0, size - 1)


def patches(clip: torch.Tensor) -> torch.Tensor:
    """Return a clip [B,C,t,h,w] as tokens [B,t*h*w/4,4*C], channels last."""
    cut = clip.unflatten(4, (-1, PATCH)).unflatten(3, (-1, PATCH))
    return cut.permute(0, 2, 3, 5, 4, 6, 1).flatten(4).flatten(1, 3)


def unpatched(tokens: torch.Tensor, clip: torch.Tensor) -> torch.Tensor:
    """Return the last tokens [B,tokens,4*C] as a clip of the size of `clip`."""
    _, _, frames, height, width = clip.shape
    cut = tokens.unflatten(2, (PATCH, PATCH, -1)).unflatten(1, (frames, height // PATCH, width // PATCH))
    return cut.permute(0, 6, 1, 2, 4, 3, 5).flatten(5).flatten(3, 4)


class FrameAttnProcessor:
    """Attention of Flux and SD3 over frames, by whichever of diffusers' attention backends is asked for."""

    _attention_backend = None
    _parallel_config = None

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: None = None,
        image_rotary_emb: tuple[torch.Tensor, torch.Tensor] | None = None,
        frames: Frames | None = None,
    ) -> Any:
        """[B,tokens,channels] of the same, and the text's where it comes apart; rotations are [tokens,head].

        All samples share the projections, so that weights are read once.
        """
        if frames is None or image_rotary_emb is None:
            raise ValueError("FrameAttnProcessor needs `frames` and `image_rotary_emb`.")
        query, key, value = (_projected(attn, part, hidden_states, encoder_hidden_states) for part in "qkv")
        for item, pads in enumerate(frames.pads):
            own = slice(item, item + 1)
            turned, keys = (_turned(x[own], image_rotary_emb) for x in (query, key))
            query[item, :pads] = 0  # where the queries were, the results come
            begin = pads
            for end in frames.ends:
                query[own, begin:end] = dispatch_attention_fn(
                    turned[:, begin:end], keys[:, pads:end], value[own, pads:end], backend=self._attention_backend
                )
                begin = end
        result = query.flatten(2)
        del query, key, value, turned, keys
        if encoder_hidden_states is None:
            return result
        text_tokens = encoder_hidden_states.shape[1]
        text = result[:, :text_tokens]
        # The last block of SD3 has no use for its text.
        return attn.to_out[0](result[:, text_tokens:]), text if attn.to_add_out is None else attn.to_add_out(text)


def _projected(attn: Any, part: str, image: torch.Tensor, text: torch.Tensor | None) -> torch.Tensor:
    """Project to queries, keys or values [B,tokens,heads,head], the text's first."""

    def heads(x: torch.Tensor, project: str, norm: str) -> torch.Tensor:
        x = getattr(attn, project)(x).unflatten(-1, (attn.heads, -1))
        return x if part == "v" else getattr(attn, norm)(x)

    found = heads(image, f"to_{part}", f"norm_{part}")
    if text is None:
        return found
    return torch.cat([heads(text, f"add_{part}_proj", f"norm_added_{part}"), found], dim=1)


def _turned(x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """Heads [B,tokens,heads,head], each pair of channels turned in float32, in less memory than diffusers does it."""
    cos, sin = (table[:, None, ::2] for table in rotary)
    even, odd = x[..., ::2].float(), x[..., 1::2].float()
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(-2).type_as(x)
