"""Pyramid-Flow's causal video VAE: 16 channels for 8 frames of 8 x 8 pixels, and for the first frame alone.

Its convolutions see no later frame, so a video decodes in chunks: what they carry from chunk to chunk is handed along
in a `Past`, never kept in a module, and is gone when the iterator is. jy0205/Pyramid-Flow calls it CausalVideoVAE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.attention_processor import Attention
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_utils import ModelMixin
from torch import nn
from torch.nn import functional as F

from .vae_decode import blended

Past = dict[nn.Module, torch.Tensor]
"""The last frames that each causal convolution has seen. Empty before the first chunk."""

_EPS = 1e-6
_SMALL_TILE = 128  # pixels
_FOUR = (True, True, True, False)


class CausalVideoVAE(ModelMixin, ConfigMixin):  # type: ignore[misc]  # as diffusers' own are
    """The defaults are the published sizes; arguments that change nothing are taken for the published configs."""

    @register_to_config
    def __init__(
        self,
        encoder_in_channels: int = 3,
        encoder_out_channels: int = 16,
        encoder_layers_per_block: tuple[int, ...] = (2, 2, 2, 2),
        encoder_down_block_types: tuple[str, ...] = ("DownEncoderBlockCausal3D",) * 4,
        encoder_block_out_channels: tuple[int, ...] = (128, 256, 512, 512),
        encoder_spatial_down_sample: tuple[bool, ...] = _FOUR,
        encoder_temporal_down_sample: tuple[bool, ...] = _FOUR,
        encoder_block_dropout: tuple[float, ...] = (0.0,) * 4,
        encoder_act_fn: str = "silu",
        encoder_norm_num_groups: int = 32,
        encoder_double_z: bool = True,
        encoder_type: str = "causal_vae_conv",
        decoder_in_channels: int = 16,
        decoder_out_channels: int = 3,
        decoder_layers_per_block: tuple[int, ...] = (3, 3, 3, 3),
        decoder_up_block_types: tuple[str, ...] = ("UpDecoderBlockCausal3D",) * 4,
        decoder_block_out_channels: tuple[int, ...] = (128, 256, 512, 512),
        decoder_spatial_up_sample: tuple[bool, ...] = _FOUR,
        decoder_temporal_up_sample: tuple[bool, ...] = _FOUR,
        decoder_block_dropout: tuple[float, ...] = (0.0,) * 4,
        decoder_act_fn: str = "silu",
        decoder_norm_num_groups: int = 32,
        decoder_type: str = "causal_vae_conv",
        sample_size: int = 256,
        scaling_factor: float = 0.13025,
        add_post_quant_conv: bool = True,
        interpolate: bool = False,
        downsample_scale: int = 8,
    ) -> None:
        super().__init__()
        types = {*encoder_down_block_types, *decoder_up_block_types, encoder_act_fn, decoder_act_fn}
        if unknown := sorted(types - {"DownEncoderBlockCausal3D", "UpDecoderBlockCausal3D", "silu"}):
            raise ValueError(f"CausalVideoVAE is not known with {unknown[0]}. Get the published config.json.")
        self.encoder, self.decoder = _Encoder(self.config), _Decoder(self.config)
        self.quant_conv = CausalConv3d(2 * encoder_out_channels, 2 * encoder_out_channels, kernel=1)
        self.post_quant_conv = CausalConv3d(encoder_out_channels, encoder_out_channels, kernel=1)
        self.spatial_compression_ratio = 2 ** sum(decoder_spatial_up_sample)
        self.temporal_compression_ratio = 2 ** sum(decoder_temporal_up_sample)
        self._tile_pixels: int | None = None

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> DiagonalGaussianDistribution:
        """The posterior [B,16,(F-1)/8+1,H/8,W/8] of a video or picture [B,3,F,H,W] in -1..1, where F is 8n + 1."""
        space, time = self.spatial_compression_ratio, self.temporal_compression_ratio
        if (x.shape[2] - 1) % time or x.shape[3] % space or x.shape[4] % space:
            raise ValueError(
                f"{x.shape[2]} frames of {x.shape[4]} x {x.shape[3]} cannot be encoded: frames are 1 more than a "
                f"multiple of {time}, width and height multiples of {space}."
            )
        return DiagonalGaussianDistribution(self.quant_conv(self.encoder(x)))

    def decode(
        self, z: torch.Tensor, window: int | None = None, tile_pixels: int | None = None, return_dict: bool = True
    ) -> Any:
        """[B,3,8(f-1)+1,8h,8w] of latents [B,16,f,h,w].

        With `window`, in chunks and tiles as `decode_chunks` makes them; what is done is then on the CPU.
        """
        if window is None and self._tile_pixels is None:
            frames = self._decoded(z, None, None)
        else:
            tiles = tile_pixels or self._tile_pixels
            frames = torch.cat(list(self.decode_chunks(z, window or 1, tiles, torch.Tensor.cpu)), dim=2)
        return DecoderOutput(sample=frames) if return_dict else (frames,)

    def enable_tiling(self) -> None:
        """From now on decode in the smallest tiles that are of use."""
        self._tile_pixels, self.tile_latent_min_size = _SMALL_TILE, _SMALL_TILE // self.spatial_compression_ratio

    def disable_tiling(self) -> None:
        """From now on decode as `decode` is asked to."""
        self._tile_pixels = None

    def decode_chunks(
        self,
        z: torch.Tensor,
        window: int = 1,
        tile_pixels: int | None = None,
        to_host: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> Iterator[torch.Tensor]:
        """What `decode` returns, frames after frames [B,3,f,H,W]: of `window` + 1 latents, then of `window` each.

        With `tile_pixels`, tiles of that size (a multiple of 32) overlap by a quarter and are blended, which differs
        from `decode`. Each tile runs all chunks, so that one tile's features are held at a time; the frames come when
        all tiles are done. `to_host` is called with whatever is decoded, and what it returns is kept; it may raise.
        """
        if window < 1:
            raise ValueError(f"at least 1 latent is decoded at a time, not {window}")
        space, time = self.spatial_compression_ratio, self.temporal_compression_ratio

        def chunks(part: torch.Tensor) -> Iterator[torch.Tensor]:
            return map(to_host or _as_it_is, self._chunks(part, window))

        if tile_pixels is None or tile_pixels >= space * max(z.shape[-2:]):
            yield from chunks(z)
        else:
            yield from blended(z, chunks, tile_pixels // space, space, time)

    def _chunks(self, z: torch.Tensor, window: int) -> Iterator[torch.Tensor]:
        if z.shape[2] == 1:  # a picture, which nothing follows
            yield self._decoded(z, None, None)
            return
        past: Past = {}
        try:
            for start in (0, *range(window + 1, z.shape[2], window)):
                end = start + window if start else window + 1
                yield self._decoded(z[:, :, start:end], past, window)
        finally:
            past.clear()  # an error's traceback holds this frame

    @torch.no_grad()  # here, since around a generator it would hold what that yields
    def _decoded(self, z: torch.Tensor, past: Past | None, window: int | None) -> torch.Tensor:
        return self.decoder(self.post_quant_conv(z.float()), past, window)


def _as_it_is(frames: torch.Tensor) -> torch.Tensor:
    return frames


class CausalConv3d(nn.Module):
    """A convolution of frames and the `kernel` - 1 before them: `past` knows those, and else they are zero."""

    def __init__(self, came: int, width: int, kernel: int = 3, stride: tuple[int, int, int] = (1, 1, 1)) -> None:
        super().__init__()
        side = kernel // 2
        self.conv = nn.Conv3d(came, width, kernel, stride, padding=(0, side, side))

    def forward(self, x: torch.Tensor, past: Past | None = None, norm: nn.GroupNorm | None = None) -> torch.Tensor:
        """Of [B,C,F,H,W]; with `norm` of what that and SiLU make of each frame, one at a time."""
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


class _Encoder(nn.Module):
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


class _Decoder(nn.Module):
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
