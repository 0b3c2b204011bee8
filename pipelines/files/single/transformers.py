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


def _z_image(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs = shapes["all_x_embedder.2-1.weight"]
    head = shapes["layers.0.attention.norm_q.weight"][0]
    return {
        "n_layers": shapes.count("layers."),
        "n_refiner_layers": shapes.count("noise_refiner."),
        "dim": width,
        "n_heads": shapes["layers.0.attention.to_q.weight"][0] // head,
        "n_kv_heads": shapes["layers.0.attention.to_k.weight"][0] // head,
        "in_channels": inputs // 4,
        "cap_feat_dim": shapes["cap_embedder.1.weight"][1],
    }


def _lumina2(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs = shapes["x_embedder.weight"]
    head = shapes["layers.0.attn.norm_q.weight"][0]
    return {
        "num_layers": shapes.count("layers."),
        "num_refiner_layers": shapes.count("noise_refiner."),
        "hidden_size": width,
        "num_attention_heads": shapes["layers.0.attn.to_q.weight"][0] // head,
        "num_kv_heads": shapes["layers.0.attn.to_k.weight"][0] // head,
        "in_channels": inputs // config["patch_size"] ** 2,
        "cap_feat_dim": shapes["time_caption_embed.caption_embedder.1.weight"][1],
    }


def _ltx(shapes: Shapes, config: Config) -> dict[str, Any]:
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_attention_heads": shapes["proj_in.weight"][0] // config["attention_head_dim"],
        "in_channels": shapes["proj_in.weight"][1],
        "out_channels": shapes["proj_out.weight"][0],
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        "cross_attention_dim": shapes["transformer_blocks.0.attn2.to_k.weight"][1],
    }


def _hunyuan_video(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, frames, patch, _ = shapes["x_embedder.proj.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_single_layers": shapes.count("single_transformer_blocks."),
        "num_refiner_layers": shapes.count("context_embedder.token_refiner.refiner_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // (patch**2 * frames),
        "patch_size": patch,
        "patch_size_t": frames,
        "text_embed_dim": shapes["context_embedder.proj_in.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def _auraflow(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs = shapes["pos_embed.proj.weight"]
    return {
        "num_mmdit_layers": shapes.count("joint_transformer_blocks."),
        "num_single_dit_layers": shapes.count("single_transformer_blocks."),
        "num_attention_heads": width // config["attention_head_dim"],
        "in_channels": inputs // config["patch_size"] ** 2,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pos_embed_max_size": shapes["pos_embed.pos_embed"][1],
    }


def _sana(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_attention_heads": width // config["attention_head_dim"],
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "patch_size": patch,
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
    }


def _hidream(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs = shapes["x_embedder.proj.weight"]
    return {
        "num_layers": shapes.count("double_stream_blocks."),
        "num_single_layers": shapes.count("single_stream_blocks."),
        "num_attention_heads": width // config["attention_head_dim"],
        "in_channels": inputs // config["patch_size"] ** 2,
        "text_emb_dim": shapes["p_embedder.pooled_embedder.linear_1.weight"][1],
        "num_routed_experts": shapes.count("single_stream_blocks.0.block.ff_i.experts."),
    }


def _after(width: str) -> Any:
    """Widths of what begins with three projections as wide as that weight."""

    def widths(shapes: Shapes) -> Widths:
        size = shapes[width][0]
        return lambda rows: (size, size, size, rows - 3 * size)

    return widths


def _grouped(shapes: Shapes) -> Widths:
    """Queries, and keys and values of fewer heads."""
    size = shapes["x_embedder.weight"][0]
    return lambda rows: (size, (rows - size) // 2, (rows - size) // 2)


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
    Layout(
        "Z-Image",
        ("ZImageTransformer2DModel",),
        ("layers.0.adaLN_modulation.0.weight", "x_embedder.weight", "cap_embedder.1.weight"),
        ("layers.0.adaLN_modulation.0.weight", "all_x_embedder.2-1.weight"),
        "convert_z_image_transformer_checkpoint_to_diffusers",
        _z_image,
        frozenset({"n_layers", "n_refiner_layers", "dim", "n_heads", "n_kv_heads"}),
        unread=("norm_final.weight",),
    ),
    Layout(
        "Lumina Image 2.0",
        ("Lumina2Transformer2DModel",),
        ("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight", "cap_embedder.0.weight"),
        ("time_caption_embed.caption_embedder.0.weight", "layers.0.attn.to_q.weight"),
        "convert_lumina2_to_diffusers",
        _lumina2,
        frozenset({"num_layers", "num_refiner_layers", "hidden_size", "num_attention_heads", "num_kv_heads"}),
        widths=_grouped,
        unread=("norm_final.weight",),
    ),
    Layout(
        "LTX-Video",
        ("LTXVideoTransformer3DModel",),
        ("patchify_proj.weight", "adaln_single.linear.weight", "caption_projection.linear_1.weight"),
        ("proj_in.weight", "time_embed.linear.weight", "caption_projection.linear_1.weight"),
        "convert_ltx_transformer_checkpoint_to_diffusers",
        _ltx,
        frozenset({"num_layers"}),
    ),
    Layout(
        "HunyuanVideo",
        ("HunyuanVideoTransformer3DModel",),
        ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight", "double_blocks.0.img_attn_qkv.weight"),
        ("context_embedder.proj_in.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        "convert_hunyuan_video_transformer_to_diffusers",
        _hunyuan_video,
        frozenset({*_DEPTH, "num_refiner_layers"}),
        widths=_after("img_in.proj.weight"),
    ),
    Layout(
        "AuraFlow",
        ("AuraFlowTransformer2DModel",),
        ("double_layers.0.attn.w2q.weight", "cond_seq_linear.weight"),
        ("register_tokens", "joint_transformer_blocks.0.attn.add_q_proj.weight"),
        "convert_auraflow_transformer_checkpoint_to_diffusers",
        _auraflow,
        frozenset({"num_mmdit_layers", "num_single_dit_layers", "pos_embed_max_size"}),
    ),
    Layout(
        "Sana",
        ("SanaTransformer2DModel",),
        ("blocks.0.cross_attn.kv_linear.weight", "y_embedder.y_proj.fc1.weight"),
        ("patch_embed.proj.weight", "caption_norm.weight", "transformer_blocks.0.ff.conv_inverted.weight"),
        "convert_sana_transformer_to_diffusers",
        _sana,
        frozenset({"num_layers"}),
        unread=("pos_embed", "y_embedder.y_embedding"),
    ),
    Layout(
        "HiDream-I1",
        ("HiDreamImageTransformer2DModel",),
        ("double_stream_blocks.0.block.attn1.to_q_t.weight", "caption_projection.0.linear.weight"),
        (),
        "convert_hidream_transformer_to_diffusers",
        _hidream,
        frozenset({"num_layers", "num_single_layers"}),
    ),
)
