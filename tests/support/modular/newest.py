"""Tiny parts of models that diffusers has as modular pipelines, by the names of their components."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import diffusers
import torch
import transformers
from diffusers.models.transformers import transformer_cosmos
from diffusers.pipelines.ltx2 import LTX2TextConnectors
from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder
from pictured import pipelines as pictured
from pipeline_classes import words
from tiny_parts import MULTIMODAL_ROPE, decoder_sizes, flow, t5, tokenizer, two_streams
from tiny_video import wan

Parts = dict[str, Any]

GEMMA_IDS = {"image_token_index": 124, "boi_token_index": 125, "eoi_token_index": 126}
_CANVAS = {"latent_channels": 4, "block_out_channels": (8, 16), "norm_num_groups": 8}


@contextmanager
def resizing() -> Iterator[None]:
    """Let Cosmos' transformer resize a mask, for which it needs torchvision."""

    def resize(mask: torch.Tensor, size: list[int], interpolation: str) -> torch.Tensor:
        return torch.nn.functional.interpolate(mask, size=size, mode=interpolation)

    made = SimpleNamespace(
        functional=SimpleNamespace(resize=resize), InterpolationMode=SimpleNamespace(NEAREST="nearest")
    )
    with mock.patch.object(transformer_cosmos, "transforms", made, create=True):
        yield


def _image_vae() -> diffusers.AutoencoderKLFlux2:
    """Packs 2 x 2 of its four channels; of 8 x 8 pixels each."""
    vae = diffusers.AutoencoderKLFlux2(
        block_out_channels=(4, 8, 8, 8), layers_per_block=1, latent_channels=4, norm_num_groups=2
    )
    vae.bn.running_mean.normal_(std=0.1)
    vae.bn.running_var.uniform_(0.8, 1.25)
    return vae


def _qwen3_vl(layers: int, cls: Any = transformers.Qwen3VLForConditionalGeneration) -> Parts:
    """An encoder that sees pictures, and what prepares its words and pictures."""
    read, ids = pictured._reads_pictures()
    read.chat_template = words.CHAT
    config = transformers.Qwen3VLConfig(
        text_config={**decoder_sizes(layers=layers), "head_dim": 8, "rope_parameters": MULTIMODAL_ROPE},
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "deepstack_visual_indexes": [1], "num_position_embeddings": 16,
        },
        **ids,
    )  # fmt: skip
    seeing = transformers.Qwen2VLImageProcessor(min_pixels=32 * 32, max_pixels=4 * 32 * 32, patch_size=16)
    with pictured.without_videos():
        processor = transformers.Qwen3VLProcessor(seeing, read, chat_template=words.CHAT)
    return {"text_encoder": cls(config), "tokenizer": read, "processor": processor}


def _mistral() -> transformers.Mistral3Config:
    text = {"model_type": "mistral", **decoder_sizes(layers=31), "head_dim": 8}
    vision = {
        "model_type": "pixtral", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 16, "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    return transformers.Mistral3Config(text_config=text, vision_config=vision, image_token_index=120)


def flux2() -> Parts:
    read = tokenizer()
    read.chat_template = "{% for m in messages %}{% for c in m['content'] %}{{ c['text'] }}{% endfor %}{% endfor %}"
    return {
        "scheduler": flow(use_dynamic_shifting=True),
        "vae": _image_vae(),
        "text_encoder": transformers.Mistral3ForConditionalGeneration(_mistral()),
        "tokenizer": read,
        "transformer": diffusers.Flux2Transformer2DModel(
            **two_streams(timestep_guidance_channels=32, axes_dims_rope=(4, 4, 4, 4), joint_attention_dim=48)
        ),
    }


def flux3_distilled() -> Parts:
    return flux3(flow_map=True)


def flux3(flow_map: bool = False) -> Parts:
    """Reads eight layers of an encoder of 33."""
    text = _qwen3_vl(34)
    return {
        "scheduler": flow(),
        "vae": _image_vae(),
        "text_encoder": text["text_encoder"],
        "tokenizer": text["processor"],
        "transformer": diffusers.Flux3Transformer2DModel(
            in_channels=16, cond_in_channels=16, num_layers=1, num_single_layers=2, attention_head_dim=16,
            num_attention_heads=2, joint_attention_dim=8 * 16, timestep_channels=32, axes_dims_rope=(4, 4, 4, 4),
            flow_map=flow_map,
        ),
    }  # fmt: skip


def qwenimage21() -> Parts:
    text = _qwen3_vl(2)
    return {
        "scheduler": flow(1.0, use_dynamic_shifting=True, shift_terminal=0.02),
        "vae": diffusers.AutoencoderKLQwenImage21(
            base_dim=4, decoder_base_dim=4, z_dim=8, dim_mult=[1, 1, 1, 1, 1], num_res_blocks=1,
            latents_mean=[0.1] * 8, latents_std=[1.2] * 8,
        ),
        "text_encoder": text["text_encoder"],
        "processor": text["processor"],
        "transformer": diffusers.QwenImage21Transformer2DModel(
            in_channels=8, out_channels=8, num_layers=2, attention_head_dim=16, num_attention_heads=2,
            context_in_dim=16, axes_dims_rope=(8, 4, 4),
        ),
    }  # fmt: skip


def anima() -> Parts:
    """A conditioner between its encoder and its transformer reads the words of a second tokenizer, too."""
    qwen = transformers.Qwen3Config(**decoder_sizes(head_dim=8))
    return {
        "scheduler": flow(),
        "vae": diffusers.AutoencoderKLQwenImage(
            base_dim=8, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True],
            latents_mean=[0.1, -0.2, 0.3, 0.0], latents_std=[1.1, 0.9, 1.2, 0.8],
        ),
        "text_encoder": transformers.Qwen3Model(qwen),
        "tokenizer": tokenizer(),
        "t5_tokenizer": tokenizer(),
        "text_conditioner": diffusers.AnimaTextConditioner(
            source_dim=16, target_dim=16, model_dim=16, num_layers=2, num_attention_heads=2, target_vocab_size=128,
            min_sequence_length=16,
        ),
        "transformer": diffusers.CosmosTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=12, num_layers=2, mlp_ratio=2,
            text_embed_dim=16, adaln_lora_dim=4, max_size=(4, 32, 32), patch_size=(1, 2, 2),
            rope_scale=(1.0, 4.0, 4.0), concat_padding_mask=True, extra_pos_embed_type=None,
        ),
    }  # fmt: skip


def ernie() -> Parts:
    return {
        "scheduler": flow(),
        "vae": _image_vae(),
        "text_encoder": transformers.Mistral3Model(_mistral()),
        "tokenizer": tokenizer(),
        "transformer": diffusers.ErnieImageTransformer2DModel(
            hidden_size=32, num_attention_heads=2, num_layers=2, ffn_hidden_size=32, in_channels=16, out_channels=16,
            text_in_dim=16, rope_axes_dim=(8, 4, 4),
        ),
    }  # fmt: skip


def ideogram4() -> Parts:
    """Has a transformer for each of the two passes."""
    text = _qwen3_vl(36, transformers.Qwen3VLModel)

    def transformer() -> Any:
        return diffusers.Ideogram4Transformer2DModel(
            in_channels=16, num_layers=2, attention_head_dim=16, num_attention_heads=2, intermediate_size=32,
            adaln_dim=16, llm_features_dim=13 * 16, rope_theta=10000, mrope_section=(4, 2, 2),
        )  # fmt: skip

    return {
        "scheduler": flow(),
        "vae": _image_vae(),
        "text_encoder": text["text_encoder"],
        "tokenizer": text["tokenizer"],
        "transformer": transformer(),
        "unconditional_transformer": transformer(),
    }


def helios() -> Parts:
    return {
        "scheduler": diffusers.HeliosScheduler(stage_range=[0, 1], stages=1),
        "vae": wan().vae,
        "text_encoder": t5(multilingual=True),
        "tokenizer": tokenizer(),
        "transformer": diffusers.HeliosTransformer3DModel(
            num_attention_heads=2, attention_head_dim=12, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=2,
            rope_dim=(4, 4, 4),
        ),
    }  # fmt: skip


def wan_animate2() -> Parts:
    """Draws a person as another moves. Its transformer keeps what it saw of the video."""
    pipe: Any = wan()
    vision = transformers.CLIPVisionConfig(
        hidden_size=1280,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=224,
        patch_size=112,
    )
    return {
        **{name: getattr(pipe, name) for name in ("vae", "text_encoder", "tokenizer")},
        "scheduler": flow(),
        "image_encoder": transformers.CLIPVisionModel(vision),
        "transformer": diffusers.WanAnimate2Transformer3DModel(
            in_dim=36, dim=24, ffn_dim=32, freq_dim=32, text_dim=32, num_heads=2, num_layers=11
        ),
    }


def ltx25() -> Parts:
    """Decodes with a model that denoises."""
    return ltx2() | {
        "diffusion_decoder": diffusers.LTX2VideoDiffusionDecoderModel(
            latent_channels=4,
            patch_size=1,
            decoder_head_dim=8,
            decoder_stage_channels=(16, 16, 16, 16, 16),
            decoder_stage_depths=(1, 1, 1, 1, 1),
            decoder_stage_kernels=((3, 3, 3),) * 4,
            decoder_stage5_kernel=(3, 3, 3),
            decoder_upsample_strides=((1, 1, 1), (1, 1, 1), (1, 1, 1), (2, 2, 2)),
            decoder_upsample_channel_reductions=(1, 1, 1, 1),
            decoder_t_emb_dim=16,
            spatial_compression_ratio=2,
            temporal_compression_ratio=2,
        )
    }


def ltx2() -> Parts:
    """Draws a video and its sound together."""
    text = {**decoder_sizes(layers=2), "head_dim": 8, "sliding_window": 16}
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 32, "patch_size": 8,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4, **GEMMA_IDS)
    return {
        "scheduler": flow(),
        "vae": diffusers.AutoencoderKLLTX2Video(
            latent_channels=4, block_out_channels=(8,), decoder_block_out_channels=(8,), layers_per_block=(1,),
            decoder_layers_per_block=(1, 1), spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False), downsample_type=("spatial",), upsample_residual=(False,),
            upsample_factor=(1,), patch_size=1, decoder_causal=False,
        ),
        "audio_vae": diffusers.AutoencoderKLLTX2Audio(
            base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None, in_channels=2,
            resolution=32, latent_channels=2, norm_type="pixel", causality_axis="height", dropout=0.0,
            mid_block_add_attention=False, sample_rate=16000, mel_hop_length=160, is_causal=True, mel_bins=8,
        ),
        "text_encoder": transformers.Gemma3ForConditionalGeneration(config),
        "tokenizer": tokenizer(),
        "connectors": LTX2TextConnectors(
            caption_channels=16, text_proj_in_factor=3, video_connector_num_attention_heads=2,
            video_connector_attention_head_dim=8, video_connector_num_layers=1,
            video_connector_num_learnable_registers=None, audio_connector_num_attention_heads=2,
            audio_connector_attention_head_dim=8, audio_connector_num_layers=1,
            audio_connector_num_learnable_registers=None, connector_rope_base_seq_len=32, rope_double_precision=False,
            rope_type="split",
        ),
        "transformer": diffusers.LTX2VideoTransformer3DModel(
            in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
            audio_in_channels=4, audio_out_channels=4, audio_num_attention_heads=2, audio_attention_head_dim=4,
            audio_cross_attention_dim=8, num_layers=2, caption_channels=16, rope_double_precision=False,
            rope_type="split",
        ),
        "vocoder": LTX2Vocoder(
            in_channels=16, hidden_channels=32, upsample_kernel_sizes=[4, 4], upsample_factors=[2, 2],
            resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]], output_sampling_rate=16000,
        ),
    }  # fmt: skip


def echo() -> Parts:
    """As LTX-2, but few steps of its own without a scheduler."""
    return {name: part for name, part in ltx2().items() if name != "scheduler"}


def helios_pyramid() -> Parts:
    return helios() | {"scheduler": diffusers.HeliosScheduler(stage_range=[0, 1 / 3, 2 / 3, 1], stages=3)}


def minimax_music3() -> Parts:
    """Part of what makes music, which is enough to be refused."""
    return {
        "tokenizer": tokenizer(),
        "vocoder": diffusers.MiniMaxMusic3Vocoder(
            latent_channels=4, decoder_input_dim=4, decoder_hidden_dim=8, upsampling_ratios=(2, 2)
        ),
    }


def ltx2_class(folder: Path) -> Path:
    """Write a folder of the class, whose tokenizer pads as that of the real one."""
    parts = seeded(ltx2)
    parts["tokenizer"].padding_side = "left"
    diffusers.LTX2Pipeline(**parts).save_pretrained(folder)
    return folder


def minimax_h3() -> Parts:
    """Draws video and sound as one sequence; reads the 50th layer of its encoder."""

    def transformer() -> Any:
        return diffusers.MiniMaxH3Transformer3DModel(
            num_attention_heads=2, attention_head_dim=16, hidden_size=24, num_layers=2, num_refiner_layers=1,
            ffn_dim=32, in_channels=4, audio_in_channels=8, text_dim=16, freq_dim=8, time_embed_hidden_dim=24,
            time_embed_dim=16, rope_freq_dim=2,
        )  # fmt: skip

    return {
        "scheduler": diffusers.MiniMaxH3Scheduler(),
        "audio_scheduler": diffusers.MiniMaxH3Scheduler(shift=3.0),
        "vae": diffusers.AutoencoderKLMiniMaxH3(
            **_CANVAS, layers_per_block=1, spatial_downsample_factors=(2, 2), temporal_downsample_factors=(2, 2),
            decoder_num_layers=2, decoder_num_attention_heads=2, decoder_attention_head_dim=8,
            decoder_num_register_tokens=2, decoder_ffn_mult=2, latents_mean=(0.1,) * 4, latents_std=(1.1,) * 4,
        ),
        "audio_vae": diffusers.AutoencoderKLMiniMaxH3Audio(
            encoder_dim=4, encoder_rates=(2, 2), latent_dim=32, latent_channels=8, num_attention_heads=2,
            decoder_dim=16, decoder_rates=(2, 2), decoder_kernel_sizes=(4, 4), resblock_kernel_sizes=(3, 7),
            resblock_dilation_sizes=((1, 3), (1, 3)), latents_mean=[0.1] * 8, latents_std=[1.1] * 8,
        ),
        **_qwen3_vl(51),
        "transformer": transformer(),
        "transformer_ref": transformer(),
    }  # fmt: skip


def cosmos3() -> Parts:
    """Has no text encoder: its transformer reads the words."""
    read, _ = pictured._reads_pictures()
    read.chat_template = words.CHAT
    return {
        "scheduler": diffusers.UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True),
        "vae": wan().vae,
        "text_tokenizer": read,
        "transformer": diffusers.Cosmos3OmniTransformer(
            head_dim=6, hidden_act="relu2", hidden_size=12, intermediate_size=12, latent_channel=16,
            latent_patch_size=1, num_attention_heads=2, num_hidden_layers=2, num_key_value_heads=1,
            patch_latent_dim=16, qk_norm_for_text=False, rope_axes_dim=[1, 1, 1], vocab_size=128, dtype="float32",
        ),
    }  # fmt: skip


def seeded(parts: Any) -> Parts:
    """Build parts in a way that repeats, with no weight that is zero."""
    from tiny import _fill_zeros

    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = parts()
        for part in made.values():
            if isinstance(part, torch.nn.Module):
                _fill_zeros(part)
                part.float().eval().requires_grad_(False)
    return made
