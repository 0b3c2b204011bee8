"""Pyramid-Flow's causal video VAE: 16 channels for 8 frames of 8 x 8 pixels, and for the first frame alone.

Its convolutions see no later frame, so a video decodes in chunks: what they carry from chunk to chunk is handed along
in a `Past`, never kept in a module, and is gone when the iterator is. jy0205/Pyramid-Flow calls it CausalVideoVAE.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import DecoderOutput, DiagonalGaussianDistribution
from diffusers.models.modeling_utils import ModelMixin

from .vae_decode import blended
from .vae_layers import CausalConv3d, Decoder, Encoder, Past

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
        self.encoder, self.decoder = Encoder(self.config), Decoder(self.config)
        self.quant_conv = CausalConv3d(2 * encoder_out_channels, 2 * encoder_out_channels, kernel=1)
        self.post_quant_conv = CausalConv3d(encoder_out_channels, encoder_out_channels, kernel=1)
        self.spatial_compression_ratio = 2 ** sum(decoder_spatial_up_sample)
        self.temporal_compression_ratio = 2 ** sum(decoder_temporal_up_sample)
        self._tile_pixels: int | None = None

    @torch.no_grad()
    def encode(self, x: torch.Tensor) -> DiagonalGaussianDistribution:
        """Encode a video or picture [B,3,F,H,W] in -1..1, F = 8n + 1, to a posterior [B,16,(F-1)/8+1,H/8,W/8]."""
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
        """Yield what `decode` returns, frames after frames [B,3,f,H,W]: of `window` + 1 latents, then of `window` each.

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
