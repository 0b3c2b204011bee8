"""The layers of Pyramid-Flow's causal video VAE: what a convolution carries from chunk to chunk is in a `Past`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from diffusers.models.attention_processor import Attention
from torch import nn
from torch.nn import functional as F

Past = dict[nn.Module, torch.Tensor]
"""The last frames that each causal convolution has seen. Empty before the first chunk."""

_EPS = 1e-6


class CausalConv3d(nn.Module):
    """A convolution of frames and the `kernel` - 1 before them: `past` knows those, and else they are zero."""

    def __init__(self, came: int, width: int, kernel: int = 3, stride: tuple[int, int, int] = (1, 1, 1)) -> None:
        super().__init__()
        side = kernel // 2
        self.conv = nn.Conv3d(came, width, kernel, stride, padding=(0, side, side))

    def forward(self, x: torch.Tensor, past: Past | None = None, norm: nn.GroupNorm | None = None) -> torch.Tensor:
        """Convolve [B,C,F,H,W]. With `norm`, apply that and SiLU to each frame before, one at a time."""
        before = self.conv.kernel_size[0] - 1
        if not before:
            return self.conv(x)
        frames = x.new_empty(*x.shape[:2], before + x.shape[2], *x.shape[3:])
        frames[:, :, :before] = 0 if past is None or self not in past else past.pop(self)
        for index, frame in enumerate(x.unbind(2), before):
            frames[:, :, index] = frame if norm is None else F.silu(norm(frame), inplace=True)
        if past is not None:
            past[self] = frames[:, :, -before:].clone()
        return self.conv(frames)


class _Resnet(nn.Module):
    def __init__(self, came: int, width: int, groups: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(groups, came, _EPS)
        self.conv1 = CausalConv3d(came, width)
        self.norm2 = nn.GroupNorm(groups, width, _EPS)
        self.conv2 = CausalConv3d(width, width)
        self.conv_shortcut = CausalConv3d(came, width, kernel=1) if came != width else None

    def forward(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        change = self.conv2(self.conv1(x, past, self.norm1), past, self.norm2)
        return change.add_(x if self.conv_shortcut is None else self.conv_shortcut(x))


class _Middle(nn.Module):
    def __init__(self, width: int, groups: int) -> None:
        super().__init__()
        attention = Attention(
            width, heads=1, dim_head=width, norm_num_groups=groups, eps=_EPS, bias=True, residual_connection=True,
            _from_deprecated_attn_block=True,
        )  # fmt: skip
        self.attentions = nn.ModuleList([attention])
        self.resnets = nn.ModuleList([_Resnet(width, width, groups) for _ in range(2)])

    def forward(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        x = self.resnets[0](x, past)
        x = torch.stack([self.attentions[0](frame) for frame in x.unbind(2)], dim=2)
        return self.resnets[1](x, past)


class _Down(nn.Module):
    def __init__(self, width: int, stride: tuple[int, int, int]) -> None:
        super().__init__()
        self.conv = CausalConv3d(width, width, stride=stride)

    def forward(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        return self.conv(x, past)


class _UpInSpace(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(width, 4 * width)

    def forward(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        parts = self.conv(x, past).unflatten(1, (-1, 2, 2))  # [B,C,row,column,F,H,W]
        return parts.permute(0, 1, 4, 5, 2, 6, 3).flatten(5, 6).flatten(3, 4)


class _UpInTime(nn.Module):
    """Two frames of each, but one of the first of all."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = CausalConv3d(width, 2 * width)

    def forward(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        skipped = int(past is None or self.conv not in past)
        parts = self.conv(x, past).unflatten(1, (-1, 2))  # [B,C,earlier or later,F,H,W]
        return parts.transpose(2, 3).flatten(2, 3)[:, :, skipped:]


class _Block(nn.Module):
    """Resnets, then what `samplers` names."""

    def __init__(self, came: int, width: int, layers: int, groups: int, samplers: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([_Resnet(width if index else came, width, groups) for index in range(layers)])
        for name, sampler in samplers.items():
            self.add_module(name, nn.ModuleList([sampler]))

    def forward(self, x: torch.Tensor, past: Past | None) -> torch.Tensor:
        for layers in self.children():
            for layer in cast(nn.ModuleList, layers):
                x = layer(x, past)
        return x


def _blocks(
    widths: Sequence[int],
    layers: Sequence[int],
    groups: int,
    samplers: Mapping[str, tuple[Sequence[bool], Callable[[int], nn.Module]]],
) -> nn.ModuleList:
    blocks = nn.ModuleList()
    for index, (came, width, count) in enumerate(zip((widths[0], *widths[:-1]), widths, layers, strict=True)):
        wanted = {name: make(width) for name, (where, make) in samplers.items() if where[index]}
        blocks.append(_Block(came, width, count, groups, wanted))
    return blocks


class Encoder(nn.Module):
    """Moments [B,32,(F-1)/8+1,H/8,W/8] of a video [B,3,F,H,W]."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        widths, groups = config["encoder_block_out_channels"], config["encoder_norm_num_groups"]
        samplers = {
            "downsamplers": (config["encoder_spatial_down_sample"], lambda width: _Down(width, (1, 2, 2))),
            "temporal_downsamplers": (config["encoder_temporal_down_sample"], lambda width: _Down(width, (2, 1, 1))),
        }
        self.conv_in = CausalConv3d(config["encoder_in_channels"], widths[0])
        self.down_blocks = _blocks(widths, config["encoder_layers_per_block"], groups, samplers)
        self.mid_block = _Middle(widths[-1], groups)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], _EPS)
        self.conv_out = CausalConv3d(widths[-1], 2 * config["encoder_out_channels"])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x, None)
        return self.conv_out(self.mid_block(x, None), None, self.conv_norm_out)


class Decoder(nn.Module):
    """Frames of latents [B,16,f,h,w], after those that `past` knows; `window` frames pass a block at a time."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        widths, groups = config["decoder_block_out_channels"][::-1], config["decoder_norm_num_groups"]
        samplers = {
            "upsamplers": (config["decoder_spatial_up_sample"], _UpInSpace),
            "temporal_upsamplers": (config["decoder_temporal_up_sample"], _UpInTime),
        }
        self.conv_in = CausalConv3d(config["decoder_in_channels"], widths[0])
        self.mid_block = _Middle(widths[0], groups)
        self.up_blocks = _blocks(widths, config["decoder_layers_per_block"], groups, samplers)
        self.conv_norm_out = nn.GroupNorm(groups, widths[-1], _EPS)
        self.conv_out = CausalConv3d(widths[-1], config["decoder_out_channels"])

    def forward(self, z: torch.Tensor, past: Past | None, window: int | None) -> torch.Tensor:
        x = self.mid_block(self.conv_in(z, past), past)
        return torch.cat(list(self._frames(x, past, window, 0)), dim=2)

    def _frames(self, x: torch.Tensor, past: Past | None, window: int | None, depth: int) -> Iterator[torch.Tensor]:
        """Finished frames of what enters a block, which takes `window` at a time: the others wait while still small."""
        if depth == len(self.up_blocks):
            yield self.conv_out(x, past, self.conv_norm_out)
            return
        for part in x.split(window or x.shape[2], dim=2):
            yield from self._frames(self.up_blocks[depth](part, past), past, window, depth + 1)
