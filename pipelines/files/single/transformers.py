"""The transformers that are known in single files. A table of facts: names that tell one, and shapes that tell sizes.

Names, and the order of the parts of joined projections, are those of the published files; diffusers' own converters
(`diffusers.loaders.single_file_utils`) say which parameter each becomes. Widths are taken from the file.
"""

from __future__ import annotations

from math import isqrt, prod
from typing import Any

from .layouts import Config, Layout, Shapes
from .rows import Widths

_DEPTH = ("num_layers", "num_single_layers", "num_attention_heads")


def _flux(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, head = shapes["x_embedder.weight"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_single_layers": shapes.count("single_transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": shapes["x_embedder.weight"][1],
        "out_channels": shapes["proj_out.weight"][0],
        "joint_attention_dim": shapes["context_embedder.weight"][1],
    }


def _flux1(shapes: Shapes, config: Config) -> dict[str, Any]:
    return _flux(shapes, config) | {
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def _flux2(shapes: Shapes, config: Config) -> dict[str, Any]:
    return _flux(shapes, config) | {
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def _chroma(shapes: Shapes, config: Config) -> dict[str, Any]:
    return _flux(shapes, config) | {
        "approximator_layers": shapes.count("distilled_guidance_layer.layers."),
        "approximator_hidden_dim": shapes["distilled_guidance_layer.in_proj.weight"][0],
        "approximator_num_channels": shapes["distilled_guidance_layer.in_proj.weight"][1],
    }


def _sd3(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, patch, _ = shapes["pos_embed.proj.weight"]
    normed = "transformer_blocks.0.attn.norm_q.weight"
    head = shapes[normed][0] if normed in shapes else config["attention_head_dim"]
    layers = shapes.count("transformer_blocks.")
    told = {
        "num_layers": layers,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "patch_size": patch,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "caption_projection_dim": shapes["context_embedder.weight"][0],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "qk_norm": "rms_norm" if normed in shapes else None,
        "dual_attention_layers": [i for i in range(layers) if f"transformer_blocks.{i}.attn2.to_q.weight" in shapes],
    }
    if "pos_embed.pos_embed" in shapes:
        told["pos_embed_max_size"] = isqrt(shapes["pos_embed.pos_embed"][1])
    return told


def _wan(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, *patch = shapes["patch_embedding.weight"]
    image = shapes.get("condition_embedder.image_embedder.norm1.weight", (None,))
    added = shapes.get("blocks.0.attn2.add_k_proj.weight", (None, None))
    return {
        "num_layers": shapes.count("blocks."),
        "num_attention_heads": width // config["attention_head_dim"],
        "ffn_dim": shapes["blocks.0.ffn.net.0.proj.weight"][0],
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // prod(patch),
        "patch_size": patch,
        "text_dim": shapes["condition_embedder.text_embedder.linear_1.weight"][1],
        "freq_dim": shapes["condition_embedder.time_embedder.linear_1.weight"][1],
        "image_dim": image[0],
        "added_kv_proj_dim": added[1],
    }


def _qwen_image(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, head = shapes["img_in.weight"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    told = {
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["proj_out.weight"][0] // config["patch_size"] ** 2,
        "joint_attention_dim": shapes["txt_in.weight"][1],
    }
    return told | ({"zero_cond_t": True} if _ZERO_TIME in shapes else {})


def _after(width: str) -> Any:
    """Widths of what begins with three projections as wide as that weight."""

    def widths(shapes: Shapes) -> Widths:
        size = shapes[width][0]
        return lambda rows: (size, size, size, rows - 3 * size)

    return widths


_ZERO_TIME = "__index_timestep_zero__"  # an empty tensor that ComfyUI's files have: the references are at time 0

LAYOUTS = (
    Layout(
        "Chroma",
        ("ChromaTransformer2DModel",),
        ("distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("distilled_guidance_layer.in_proj.weight", "transformer_blocks.0.attn.to_q.weight"),
        "convert_chroma_transformer_checkpoint_to_diffusers",
        _chroma,
        frozenset({*_DEPTH, "approximator_layers", "approximator_hidden_dim"}),
        widths=_after("img_in.weight"),
    ),
    Layout(
        "FLUX.2",
        ("Flux2Transformer2DModel",),
        ("single_stream_modulation.lin.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("single_stream_modulation.linear.weight", "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"),
        "convert_flux2_transformer_checkpoint_to_diffusers",
        _flux2,
        frozenset(_DEPTH),
    ),
    Layout(
        "FLUX.1",
        ("FluxTransformer2DModel",),
        ("double_blocks.0.img_attn.norm.key_norm.scale", "vector_in.in_layer.weight"),
        ("single_transformer_blocks.0.proj_mlp.weight", "context_embedder.weight"),
        "convert_flux_transformer_checkpoint_to_diffusers",
        _flux1,
        frozenset(_DEPTH),
        widths=_after("img_in.weight"),
    ),
    Layout(
        "Stable Diffusion 3",
        ("SD3Transformer2DModel",),
        ("joint_blocks.0.x_block.attn.qkv.weight", "y_embedder.mlp.0.weight"),
        ("pos_embed.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight", "context_embedder.bias"),
        "convert_sd3_transformer_checkpoint_to_diffusers",
        _sd3,
        frozenset({*_DEPTH, "caption_projection_dim", "dual_attention_layers", "qk_norm", "pos_embed_max_size"}),
    ),
    Layout(
        "Wan",
        ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
        ("head.modulation", "blocks.0.self_attn.q.weight"),
        ("condition_embedder.time_proj.weight", "blocks.0.attn1.to_q.weight", "patch_embedding.weight"),
        "convert_wan_transformer_to_diffusers",
        _wan,
        frozenset({*_DEPTH, "ffn_dim"}),
    ),
    Layout(
        "Qwen-Image",
        ("QwenImageTransformer2DModel",),
        ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"),
        (),
        None,
        _qwen_image,
        frozenset(_DEPTH),
        unread=(_ZERO_TIME,),
    ),
)
