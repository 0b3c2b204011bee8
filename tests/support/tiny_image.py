"""Random-weight image pipelines of a few hundred kilobytes.

Every pipeline is the stock diffusers class with a very small config: the same components, the same layout of
files and the same scale factor of 8 (so the VAEs have four levels), with other numbers.
"""

from __future__ import annotations

import math

import diffusers
import transformers
from diffusers import DiffusionPipeline
from tiny_parts import (
    MULTIMODAL_ROPE,
    SIZE,
    TEXT_TOKENS,
    Family,
    autoencoder,
    clip,
    decoder_sizes,
    flow,
    gemma2,
    t5,
    tokenizer,
    two_streams,
)


def flux() -> DiffusionPipeline:
    return diffusers.FluxPipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=autoencoder(),
        text_encoder=clip(),
        tokenizer=tokenizer(77),
        text_encoder_2=t5(),
        tokenizer_2=tokenizer(),
        transformer=diffusers.FluxTransformer2DModel(
            **two_streams(pooled_projection_dim=32, axes_dims_rope=(4, 4, 8), guidance_embeds=True)
        ),
    )


def flux2_klein() -> DiffusionPipeline:
    pipe = diffusers.Flux2KleinPipeline(
        scheduler=flow(use_dynamic_shifting=True),
        vae=diffusers.AutoencoderKLFlux2(
            block_out_channels=(4, 8, 8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=2
        ),
        text_encoder=transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**decoder_sizes(layers=28, head_dim=8))),
        tokenizer=tokenizer(chat=True),
        transformer=diffusers.Flux2Transformer2DModel(
            **two_streams(
                timestep_guidance_channels=32,
                axes_dims_rope=(4, 4, 4, 4),
                guidance_embeds=False,
                joint_attention_dim=48,  # of three layers of the encoder
            )
        ),
    )
    pipe.vae.bn.running_mean.normal_(std=0.1)
    pipe.vae.bn.running_var.uniform_(0.8, 1.25)
    return pipe


def sd3() -> DiffusionPipeline:
    return diffusers.StableDiffusion3Pipeline(
        scheduler=flow(),
        vae=autoencoder(),
        text_encoder=clip(projection=True),
        tokenizer=tokenizer(77),
        text_encoder_2=clip(projection=True),
        tokenizer_2=tokenizer(77),
        text_encoder_3=t5(64),
        tokenizer_3=tokenizer(),
        transformer=diffusers.SD3Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=64,
            caption_projection_dim=32,
            pooled_projection_dim=64,
            pos_embed_max_size=16,
            qk_norm="rms_norm",
        ),
    )


def hidream() -> DiffusionPipeline:
    return diffusers.HiDreamImagePipeline(
        scheduler=flow(),
        vae=autoencoder(),
        text_encoder=clip(projection=True, positions=248),
        tokenizer=tokenizer(248),
        text_encoder_2=clip(projection=True, positions=248),
        tokenizer_2=tokenizer(248),
        text_encoder_3=t5(),
        tokenizer_3=tokenizer(),
        text_encoder_4=transformers.LlamaForCausalLM(transformers.LlamaConfig(**decoder_sizes(layers=3))),
        tokenizer_4=tokenizer(),
        transformer=diffusers.HiDreamImageTransformer2DModel(
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=2,
            num_single_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            caption_channels=(32, 16),
            text_emb_dim=64,
            num_routed_experts=4,
            num_activated_experts=2,
            axes_dims_rope=(4, 2, 2),
            max_resolution=(16, 16),
            llama_layers=(0, 1, 2, 2, 1),
        ),
    )


def hidream_area(pipe: DiffusionPipeline, width: int = SIZE[0], height: int = SIZE[1]) -> None:
    """HiDream scales every request to one area: make that the area of this size, and a hair to round down."""
    pipe.default_sample_size = math.sqrt(width * height) / pipe.vae_scale_factor * (1 + 1e-9)


def lumina2() -> DiffusionPipeline:
    system = (
        "You are an assistant designed to generate superior images with the superior degree of image-text"
        " alignment based on textual prompts or user prompts."
    )
    return diffusers.Lumina2Pipeline(
        scheduler=flow(6.0),
        vae=autoencoder(),
        text_encoder=gemma2(),
        tokenizer=tokenizer(squeeze=(system, 1)),
        transformer=diffusers.Lumina2Transformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            hidden_size=24,
            num_layers=3,
            num_refiner_layers=2,
            num_attention_heads=3,
            num_kv_heads=1,
            multiple_of=16,
            axes_dim_rope=(4, 2, 2),
            axes_lens=(96, 16, 16),
            cap_feat_dim=16,
        ),
    )


def qwenimage() -> DiffusionPipeline:
    text = decoder_sizes(rope_parameters=MULTIMODAL_ROPE)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, vocab_size=128)
    pipe = diffusers.QwenImagePipeline(
        scheduler=flow(1.0, use_dynamic_shifting=True, shift_terminal=0.02),
        vae=diffusers.AutoencoderKLQwenImage(
            base_dim=8,
            z_dim=4,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0],
            latents_std=[1.1, 0.9, 1.2, 0.8],
        ),
        text_encoder=transformers.Qwen2_5_VLForConditionalGeneration(config),
        tokenizer=tokenizer(),
        transformer=diffusers.QwenImageTransformer2DModel(
            patch_size=2,
            in_channels=16,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=16,
            axes_dims_rope=(8, 4, 4),
        ),
    )
    template = pipe.prompt_template_encode.split("{}")[0]
    pipe.tokenizer = tokenizer(squeeze=(template, pipe.prompt_template_encode_start_idx))
    return pipe


def zimage() -> DiffusionPipeline:
    transformer = diffusers.ZImageTransformer2DModel(
        in_channels=4,
        dim=32,
        n_layers=3,
        n_refiner_layers=1,
        n_heads=2,
        n_kv_heads=2,
        cap_feat_dim=16,
        axes_dims=[8, 4, 4],
        axes_lens=[256, 32, 32],
    )
    transformer.x_pad_token.data.normal_(std=0.02)
    transformer.cap_pad_token.data.normal_(std=0.02)
    return diffusers.ZImagePipeline(
        scheduler=flow(),
        vae=autoencoder(),
        text_encoder=transformers.Qwen3Model(transformers.Qwen3Config(**decoder_sizes(layers=3, head_dim=8))),
        tokenizer=tokenizer(chat=True),
        transformer=transformer,
    )


def sana() -> DiffusionPipeline:
    kinds = ("ResBlock", "ResBlock", "ResBlock", "EfficientViTBlock")
    return diffusers.SanaPipeline(
        scheduler=diffusers.DPMSolverMultistepScheduler(
            use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0
        ),
        vae=diffusers.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=4,
            encoder_block_types=kinds,
            decoder_block_types=kinds,
            encoder_block_out_channels=(8, 8, 8, 8),
            decoder_block_out_channels=(8, 8, 8, 8),
            encoder_layers_per_block=(1, 1, 1, 1),
            decoder_layers_per_block=(1, 1, 1, 1),
            encoder_qkv_multiscales=((), (), (), (5,)),
            decoder_qkv_multiscales=((), (), (), (5,)),
            upsample_block_type="interpolate",
            downsample_block_type="conv",
            scaling_factor=0.41407,
        ),
        text_encoder=gemma2(),
        tokenizer=tokenizer(),
        transformer=diffusers.SanaTransformer2DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=4,
            attention_head_dim=8,
            num_layers=3,
            num_cross_attention_heads=4,
            cross_attention_head_dim=8,
            cross_attention_dim=32,
            caption_channels=16,
            sample_size=8,
        ),
    )


def pixart_sigma() -> DiffusionPipeline:
    return diffusers.PixArtSigmaPipeline(
        scheduler=diffusers.DPMSolverMultistepScheduler(beta_end=0.002),
        vae=autoencoder(shift_factor=None, scaling_factor=0.5, use_quant_conv=True, use_post_quant_conv=True),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.PixArtTransformer2DModel(
            sample_size=8,
            in_channels=4,
            out_channels=8,
            num_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            cross_attention_dim=32,
            caption_channels=32,
            attention_bias=True,
            use_additional_conditions=False,
        ),
    )


def chroma() -> DiffusionPipeline:
    return diffusers.ChromaPipeline(
        scheduler=flow(),
        vae=autoencoder(),
        text_encoder=t5(),
        tokenizer=tokenizer(),
        transformer=diffusers.ChromaTransformer2DModel(
            **two_streams(axes_dims_rope=(4, 4, 8)),
            approximator_num_channels=8,
            approximator_hidden_dim=32,
            approximator_layers=1,
        ),
    )


def auraflow() -> DiffusionPipeline:
    pipe = diffusers.AuraFlowPipeline(
        scheduler=flow(1.73),
        vae=autoencoder(shift_factor=None, use_quant_conv=True, use_post_quant_conv=True),
        text_encoder=t5(multilingual=True),
        tokenizer=tokenizer(),
        transformer=diffusers.AuraFlowTransformer2DModel(
            sample_size=8,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_mmdit_layers=1,
            num_single_dit_layers=3,
            attention_head_dim=8,
            num_attention_heads=4,
            joint_attention_dim=32,
            caption_projection_dim=32,
            pos_embed_max_size=64,
        ),
    )
    # It gates every block; as small as it starts, the text would move the picture hardly more than rounding.
    pipe.transformer.time_step_proj.linear_2.weight *= 10
    return pipe


PLAIN = {"use_resolution_binning": False}

IMAGES = [
    Family("flux", "FluxPipeline", flux, distilled=True),
    Family(
        "flux2_klein",
        "Flux2KleinPipeline",
        flux2_klein,
        negative=False,
    ),
    Family("sd3", "StableDiffusion3Pipeline", sd3),
    Family("hidream", "HiDreamImagePipeline", hidream, prepare=hidream_area),
    Family("lumina2", "Lumina2Pipeline", lumina2),
    Family("qwenimage", "QwenImagePipeline", qwenimage, guidance_name="true_cfg_scale"),
    Family("zimage", "ZImagePipeline", zimage),
    Family(
        "sana",
        "SanaPipeline",
        sana,
        size=(64, 32),
        encode_kwargs={"max_sequence_length": TEXT_TOKENS, "complex_human_instruction": None},
        call_kwargs=PLAIN,
    ),
    Family(
        "pixart_sigma",
        "PixArtSigmaPipeline",
        pixart_sigma,
        encode_kwargs={"max_sequence_length": TEXT_TOKENS, "clean_caption": False},
        call_kwargs=PLAIN,
    ),
    Family("chroma", "ChromaPipeline", chroma),
    Family("auraflow", "AuraFlowPipeline", auraflow),
]
