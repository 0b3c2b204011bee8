"""Tiny pipelines of diffusers whose calls do more, or other things, than encode, sample and decode once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import diffusers
import tiny
import transformers
from diffusers import DiffusionPipeline
from tiny_parts import autoencoder, clip, flow, gemma2, t5, tokenizer


def cogview3() -> DiffusionPipeline:
    """Overwrites the negative embeddings that it is given."""
    return diffusers.CogView3PlusPipeline(
        scheduler=diffusers.CogVideoXDDIMScheduler(rescale_betas_zero_snr=True, prediction_type="v_prediction"),
        vae=autoencoder(),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.CogView3PlusTransformer2DModel(
            patch_size=2,
            in_channels=4,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=2,
            out_channels=4,
            text_embed_dim=32,
            time_embed_dim=8,
            condition_dim=2,
            pos_embed_max_size=8,
            sample_size=8,
        ),
    )


def latte_temporal() -> DiffusionPipeline:
    """Tells its VAE how many frames it decodes."""
    parts = latte().components
    parts["vae"] = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32),
        down_block_types=("DownEncoderBlock2D",) * 2,
        latent_channels=4,
        layers_per_block=1,
        sample_size=16,
    )
    return diffusers.LattePipeline(**parts)


def latte() -> DiffusionPipeline:
    """Decodes the frames of a video as pictures, 14 at a time."""
    return diffusers.LattePipeline(
        scheduler=diffusers.DDIMScheduler(),
        vae=autoencoder(shift_factor=None, latent_channels=4),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.LatteTransformer3DModel(
            sample_size=8,
            num_layers=1,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=32,
            in_channels=4,
            cross_attention_dim=32,
            out_channels=8,
            attention_bias=True,
            num_embeds_ada_norm=1000,
            norm_type="ada_norm_single",
            norm_elementwise_affine=False,
            norm_eps=1e-6,
        ),
    )


def sdxl() -> DiffusionPipeline:
    """Takes zeros, and not the encoded empty text, where it is given no negative prompt."""
    return diffusers.StableDiffusionXLPipeline(
        scheduler=diffusers.EulerDiscreteScheduler(beta_schedule="scaled_linear"),
        vae=autoencoder(shift_factor=None, use_quant_conv=True, use_post_quant_conv=True),
        text_encoder=clip(),
        tokenizer=tokenizer(77),
        text_encoder_2=clip(projection=True),
        tokenizer_2=tokenizer(77),
        unet=diffusers.UNet2DConditionModel(
            block_out_channels=(8, 16),
            norm_num_groups=4,
            layers_per_block=1,
            sample_size=8,
            in_channels=4,
            out_channels=4,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
            attention_head_dim=(2, 4),
            use_linear_projection=True,
            addition_embed_type="text_time",
            addition_time_embed_dim=8,
            transformer_layers_per_block=(1, 1),
            projection_class_embeddings_input_dim=80,
            cross_attention_dim=64,
        ),
    )


def _wan_vae() -> diffusers.AutoencoderKLWan:
    return diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )


def sana_video() -> DiffusionPipeline:
    """Calls its number of frames `frames`."""
    return diffusers.SanaVideoPipeline(
        scheduler=diffusers.DPMSolverMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction"),
        vae=_wan_vae(),
        text_encoder=gemma2(),
        tokenizer=tokenizer(),
        transformer=diffusers.SanaVideoTransformer3DModel(
            in_channels=16,
            out_channels=16,
            num_attention_heads=2,
            attention_head_dim=12,
            num_layers=2,
            num_cross_attention_heads=2,
            cross_attention_head_dim=12,
            cross_attention_dim=24,
            caption_channels=16,
            sample_size=8,
            patch_size=(1, 2, 2),
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ),
    )


def anyflow(far: bool = False) -> DiffusionPipeline:
    """Keeps a table under the name of its device; `far` attends by FlexAttention, which runs on no shapes alone."""
    cls = diffusers.AnyFlowFARPipeline if far else diffusers.AnyFlowPipeline
    return cls(
        scheduler=diffusers.FlowMapEulerDiscreteScheduler(num_train_timesteps=1000, shift=5.0),
        vae=_wan_vae(),
        text_encoder=t5(multilingual=True),
        tokenizer=tokenizer(),
        transformer=(diffusers.AnyFlowFARTransformer3DModel if far else diffusers.AnyFlowTransformer3DModel)(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=32,
            ffn_dim=32,
            num_layers=2,
            cross_attn_norm=True,
            rope_max_seq_len=32,
            gate_value=0.25,
            deltatime_type="r",
        ),
    )


def anyflow_far() -> DiffusionPipeline:
    return anyflow(far=True)


def krea2() -> DiffusionPipeline:
    """Has a setting whose name begins like that of a text encoder."""
    sizes = {"hidden_size": 16, "intermediate_size": 16}
    text = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 8}
    vision = {**sizes, "depth": 2, "num_heads": 2, "out_hidden_size": 16}
    return diffusers.Krea2Pipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=24,
            z_dim=4,
            dim_mult=[1, 2, 4],
            num_res_blocks=1,
            temperal_downsample=[False, True],
            latents_mean=[0.0] * 4,
            latents_std=[1.0] * 4,
        ),
        text_encoder=transformers.Qwen3VLModel(
            transformers.Qwen3VLConfig(text_config=text, vision_config=vision, vocab_size=128)
        ),
        tokenizer=tokenizer(chat=True),
        transformer=diffusers.Krea2Transformer2DModel(
            in_channels=16,
            num_layers=2,
            attention_head_dim=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=32,
            timestep_embed_dim=8,
            text_hidden_dim=16,
            num_text_layers=3,
            text_num_attention_heads=2,
            text_num_key_value_heads=1,
            text_intermediate_size=16,
            num_layerwise_text_blocks=1,
            num_refiner_text_blocks=1,
            axes_dims_rope=(4, 2, 2),
        ),
        text_encoder_select_layers=(0, 1, 2),
    )


def pag() -> DiffusionPipeline:
    """Looks at its transformer's layers before it samples, and changes them."""
    parts = {name: part for name, part in tiny.FAMILIES["sd3"].build().components.items() if part is not None}
    return diffusers.StableDiffusion3PAGPipeline(**parts, pag_applied_layers="blocks.0")


def hunyuandit() -> DiffusionPipeline:
    """Encodes its prompt twice, by one method and with another encoder each time."""
    bert = transformers.BertConfig(
        vocab_size=128, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    return diffusers.HunyuanDiTPipeline(
        scheduler=diffusers.DDPMScheduler(),
        vae=autoencoder(shift_factor=None),
        text_encoder=transformers.BertModel(bert),
        tokenizer=tokenizer(77),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
        transformer=diffusers.HunyuanDiT2DModel(
            sample_size=16,
            num_layers=2,
            patch_size=2,
            attention_head_dim=8,
            num_attention_heads=3,
            in_channels=4,
            cross_attention_dim=16,
            cross_attention_dim_t5=32,
            pooled_projection_dim=16,
            hidden_size=24,
            activation_fn="gelu-approximate",
        ),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def hunyuandit_pag() -> DiffusionPipeline:
    """Cannot run without guidance."""
    settings = {"safety_checker": None, "feature_extractor": None, "requires_safety_checker": False}
    return diffusers.HunyuanDiTPAGPipeline(**hunyuandit().components | settings, pag_applied_layers="blocks.0")


BUILDERS: dict[str, Callable[[], DiffusionPipeline]] = {
    build.__name__: build
    for build in (
        cogview3,
        latte,
        latte_temporal,
        sdxl,
        sana_video,
        anyflow,
        anyflow_far,
        krea2,
        pag,
        hunyuandit,
        hunyuandit_pag,
    )
}


def save(name: str, folder: Path) -> Path:
    """Write the pipeline in the diffusers layout, with no weight that is zero, and return the folder."""
    tiny.seeded(BUILDERS[name])().save_pretrained(folder, safe_serialization=True)
    return folder
