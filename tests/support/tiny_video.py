"""Random-weight video pipelines of a few hundred kilobytes."""

from __future__ import annotations

import diffusers
import transformers
from diffusers import DiffusionPipeline
from diffusers.pipelines.hunyuan_video import pipeline_hunyuan_video
from tiny_parts import MULTIMODAL_ROPE, TEXT_TOKENS, Family, clip, decoder_sizes, flow, t5, tokenizer
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLTextModel


def wan() -> DiffusionPipeline:
    return diffusers.WanPipeline(
        scheduler=diffusers.UniPCMultistepScheduler(
            prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0
        ),
        vae=diffusers.AutoencoderKLWan(
            base_dim=4,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        text_encoder=t5(multilingual=True),
        tokenizer=tokenizer(),
        transformer=diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2),
            num_attention_heads=2,
            attention_head_dim=12,
            in_channels=16,
            out_channels=16,
            text_dim=32,
            freq_dim=64,
            ffn_dim=32,
            num_layers=3,
            cross_attn_norm=True,
            qk_norm="rms_norm_across_heads",
            rope_max_seq_len=32,
        ),
    )


def ltx(timestep_conditioning: bool = False) -> DiffusionPipeline:
    return diffusers.LTXPipeline(
        scheduler=flow(1.0, use_dynamic_shifting=True, base_shift=0.95, max_shift=2.05, shift_terminal=0.1),
        vae=diffusers.AutoencoderKLLTXVideo(
            latent_channels=8,
            block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            layers_per_block=(1, 1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1, 1),
            timestep_conditioning=timestep_conditioning,
        ),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.LTXVideoTransformer3DModel(
            in_channels=8,
            out_channels=8,
            num_attention_heads=4,
            attention_head_dim=8,
            cross_attention_dim=32,
            num_layers=3,
            caption_channels=32,
        ),
    )


def ltx_timestep() -> DiffusionPipeline:
    """The later LTX VAEs want a timestep at decode, and noise mixed in before it."""
    return ltx(timestep_conditioning=True)


def cogvideox() -> DiffusionPipeline:
    return diffusers.CogVideoXPipeline(
        scheduler=diffusers.CogVideoXDDIMScheduler(),
        vae=diffusers.AutoencoderKLCogVideoX(
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
            sample_height=32,
            sample_width=48,
        ),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.CogVideoXTransformer3DModel(
            num_attention_heads=2,
            attention_head_dim=16,
            in_channels=4,
            out_channels=4,
            time_embed_dim=16,
            text_embed_dim=32,
            num_layers=3,
            sample_width=6,
            sample_height=4,
            sample_frames=9,
            max_text_seq_length=TEXT_TOKENS,
            use_rotary_positional_embeddings=True,
        ),
    )


def hunyuan_video() -> DiffusionPipeline:
    template = pipeline_hunyuan_video.DEFAULT_PROMPT_TEMPLATE
    head = template["template"].split("{}")[0]
    return diffusers.HunyuanVideoPipeline(
        scheduler=flow(7.0),
        vae=diffusers.AutoencoderKLHunyuanVideo(
            latent_channels=4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            norm_num_groups=4,
        ),
        text_encoder=transformers.LlamaModel(transformers.LlamaConfig(**decoder_sizes(layers=4))),
        tokenizer=tokenizer(squeeze=(head, template["crop_start"])),
        text_encoder_2=clip(),
        tokenizer_2=tokenizer(77),
        transformer=diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=2,
            num_single_layers=3,
            num_refiner_layers=1,
            patch_size=2,
            text_embed_dim=16,
            pooled_projection_dim=32,
            rope_axes_dim=(4, 6, 6),
        ),
    )


def mochi() -> DiffusionPipeline:
    return diffusers.MochiPipeline(
        scheduler=flow(1.0, invert_sigmas=True),
        vae=diffusers.AutoencoderKLMochi(
            encoder_block_out_channels=(32, 32, 32, 32),
            decoder_block_out_channels=(32, 32, 32, 32),
            layers_per_block=(1, 1, 1, 1, 1),
        ),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.MochiTransformer3DModel(
            patch_size=2,
            num_attention_heads=2,
            attention_head_dim=8,
            num_layers=3,
            pooled_projection_dim=16,
            in_channels=12,
            text_embed_dim=32,
            time_embed_dim=16,
            max_sequence_length=TEXT_TOKENS,
        ),
    )


def hunyuan_video15() -> DiffusionPipeline:
    qwen = transformers.Qwen2_5_VLTextConfig(**decoder_sizes(layers=4, rope_parameters=MULTIMODAL_ROPE))
    pipe = diffusers.HunyuanVideo15Pipeline(
        scheduler=flow(7.0),
        vae=diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(8, 8, 8, 8, 8), layers_per_block=1
        ),
        text_encoder=Qwen2_5_VLTextModel(qwen),
        tokenizer=tokenizer(2048, chat=True),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
        guider=diffusers.ClassifierFreeGuidance(guidance_scale=6.0),
        transformer=diffusers.HunyuanVideo15Transformer3DModel(
            in_channels=9,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=16,
            num_layers=3,
            num_refiner_layers=1,
            text_embed_dim=16,
            text_embed_2_dim=32,
            image_embed_dim=12,
            rope_axes_dim=(4, 6, 6),
            task_type="t2v",
        ),
    )
    pipe.tokenizer = tokenizer(2048, (pipe.system_message, pipe.prompt_template_encode_start_idx), chat=True)
    return pipe


VIDEOS = [
    Family("wan", "WanPipeline", wan, frames=9),
    Family("ltx", "LTXPipeline", ltx, size=(96, 64), frames=17),
    Family(
        "ltx_timestep",
        "LTXPipeline",
        ltx_timestep,
        size=(96, 64),
        frames=17,
        call_kwargs={"decode_timestep": 0.05, "decode_noise_scale": 0.025},
    ),
    Family("cogvideox", "CogVideoXPipeline", cogvideox, frames=9),
    Family("hunyuan_video", "HunyuanVideoPipeline", hunyuan_video, frames=9, distilled=True),
    Family("mochi", "MochiPipeline", mochi, frames=7),
    Family(
        "hunyuan_video15",
        "HunyuanVideo15Pipeline",
        hunyuan_video15,
        frames=9,
        guidance_name="guider",
        encode_kwargs={},
    ),
]
