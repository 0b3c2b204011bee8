"""Tiny pipelines of popular classes that diffusers' own tests do not build: edits, ControlNets, the newest models."""

from __future__ import annotations

from typing import Any

import diffusers
import transformers
from diffusers import DiffusionPipeline
from modular import newest
from pictured import pipelines as pictured
from tiny_image import zimage
from tiny_parts import autoencoder, clip, flow, tokenizer
from tiny_video import hunyuan_video, wan

from . import odd_pipelines


def _with_config(model: Any, **more: Any) -> Any:
    return type(model).from_config({**model.config, **more})


def ernie() -> DiffusionPipeline:
    return diffusers.ErnieImagePipeline(**newest.ernie())


def qwenimage21() -> DiffusionPipeline:
    return diffusers.QwenImage21Pipeline(**newest.qwenimage21())


def ideogram4() -> DiffusionPipeline:
    return diffusers.Ideogram4Pipeline(**newest.ideogram4())


def longcat() -> DiffusionPipeline:
    """Rewrites its prompt with its own encoder, as it is told by default."""
    return _longcat(diffusers.LongCatImagePipeline)


def longcat_edit() -> DiffusionPipeline:
    return _longcat(diffusers.LongCatImageEditPipeline)


def _longcat(cls: Any) -> DiffusionPipeline:
    parts = pictured.qwen_edit().components
    return cls(
        scheduler=flow(use_dynamic_shifting=True),
        vae=autoencoder(latent_channels=16),
        text_encoder=parts["text_encoder"],
        tokenizer=parts["tokenizer"],
        text_processor=parts["processor"],
        transformer=diffusers.LongCatImageTransformer2DModel(
            in_channels=64, num_layers=1, num_single_layers=2, attention_head_dim=16, num_attention_heads=2,
            joint_attention_dim=16, pooled_projection_dim=16, axes_dims_rope=[4, 4, 8],
        ),
    )  # fmt: skip


def zimage_omni() -> DiffusionPipeline:
    """Draws from text, or with pictures that a vision model sees, too."""
    parts = zimage().components
    vision = transformers.Siglip2VisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_patches=16, patch_size=8
    )
    return diffusers.ZImageOmniPipeline(
        **{**parts, "transformer": _with_config(parts["transformer"], siglip_feat_dim=16)},
        siglip=transformers.Siglip2VisionModel(vision),
        siglip_processor=transformers.Siglip2ImageProcessor(patch_size=8, max_num_patches=16),
    )


def zimage_controlnet() -> DiffusionPipeline:
    """Its ControlNet calls parts of its transformer."""
    return diffusers.ZImageControlNetPipeline(**zimage().components, controlnet=_zimage_net(4))


def zimage_controlnet_inpaint() -> DiffusionPipeline:
    return diffusers.ZImageControlNetInpaintPipeline(**zimage().components, controlnet=_zimage_net(4 + 1 + 4))


def _zimage_net(channels: int) -> Any:
    return diffusers.ZImageControlNetModel(
        control_layers_places=[0, 2], control_refiner_layers_places=[0], control_in_dim=channels,
        add_control_noise_refiner="control_noise_refiner", dim=32, n_refiner_layers=1, n_heads=2, n_kv_heads=2,
    )  # fmt: skip


def hunyuan_refiner() -> DiffusionPipeline:
    """Draws a picture anew, whose VAE is that of videos."""
    parts = pictured.qwen_edit().components
    return diffusers.HunyuanImageRefinerPipeline(
        scheduler=flow(4.0),
        vae=diffusers.AutoencoderKLHunyuanImageRefiner(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1, spatial_compression_ratio=16,
            temporal_compression_ratio=4,
        ),
        text_encoder=parts["text_encoder"],
        tokenizer=parts["tokenizer"],
        transformer=diffusers.HunyuanImageTransformer2DModel(
            in_channels=16, out_channels=8, num_attention_heads=2, attention_head_dim=16, num_layers=1,
            num_single_layers=2, num_refiner_layers=1, patch_size=(1, 1, 1), guidance_embeds=True, text_embed_dim=16,
            rope_axes_dim=(4, 6, 6),
        ),
    )  # fmt: skip


def lucy() -> DiffusionPipeline:
    """Edits a video, which its transformer is given beside the latents."""
    parts = {name: part for name, part in wan().components.items() if part is not None}
    return diffusers.LucyEditPipeline(**parts)


def sdxl_union(cls: Any = diffusers.StableDiffusionXLControlNetUnionPipeline) -> DiffusionPipeline:
    """Its ControlNet follows pictures of several kinds, each told by a number."""
    parts = odd_pipelines.sdxl().components
    net = diffusers.ControlNetUnionModel(
        conditioning_channels=3, num_control_type=6, num_trans_channel=8, num_trans_head=2, num_trans_layer=1,
        num_proj_channel=8, conditioning_embedding_out_channels=(8, 16, 16, 16),
        **{name: parts["unet"].config[name] for name in _OF_UNET},
    )  # fmt: skip
    return cls(**{name: part for name, part in parts.items() if part is not None}, controlnet=net)


_OF_UNET = (
    "in_channels", "block_out_channels", "layers_per_block", "norm_num_groups", "down_block_types",
    "attention_head_dim", "use_linear_projection", "addition_embed_type", "addition_time_embed_dim",
    "transformer_layers_per_block", "projection_class_embeddings_input_dim", "cross_attention_dim",
)  # fmt: skip


def sdxl_union_image() -> DiffusionPipeline:
    return sdxl_union(diffusers.StableDiffusionXLControlNetUnionImg2ImgPipeline)


def sdxl_union_inpaint() -> DiffusionPipeline:
    return sdxl_union(diffusers.StableDiffusionXLControlNetUnionInpaintPipeline)


def kandinsky6() -> DiffusionPipeline:
    """Draws a video and its sound together."""
    qwen = pictured.qwen_edit().components
    return diffusers.Kandinsky6TI2VAPipeline(
        scheduler=flow(5.0),
        vae=hunyuan_video().vae,
        text_encoder=qwen["text_encoder"],
        tokenizer=qwen["processor"],
        text_encoder_2=clip(),
        tokenizer_2=tokenizer(77),
        audio_vae=diffusers.MMAudioVAE(
            mel_bins=8, latent_channels=4, hidden_channels=16, channel_multipliers=(1,), layers_per_block=1
        ),
        vocoder=diffusers.MMAudioVocoder(
            num_mels=8, upsample_initial_channel=16, upsample_rates=(2,), upsample_kernel_sizes=(4,),
            resblock_kernel_sizes=(3,), resblock_dilation_sizes=((1,),),
        ),
        transformer=diffusers.Kandinsky6Transformer3DModel(
            in_visual_dim=4, out_visual_dim=4, in_text_dim=16, in_text_dim2=32, time_dim=16, model_dim=32, ff_dim=32,
            num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 6, 6), in_audio_dim=4, out_audio_dim=4,
            visual_token_type_num_embeddings=2,
        ),
    )  # fmt: skip
