"""The transformers that are known in single files. A table of facts: names that tell one, and shapes that tell sizes.

Names, and the order of the parts of joined projections, are those of the published files; diffusers' own converters
(`diffusers.loaders.single_file_utils`) say which parameter each becomes. Widths are taken from the file.
"""

from __future__ import annotations

from typing import Any

from ..rows import Widths
from . import name_tables, shapes
from .inside import PARTS
from .layouts import Layout, Shapes

_DEPTH = ("num_layers", "num_single_layers", "num_attention_heads")


def _after(width: str) -> Any:
    """Widths of what begins with three projections with as many rows as that weight."""

    def widths(found: Shapes) -> Widths:
        size = found[width][0]
        return lambda rows: (size, size, size, rows - 3 * size)

    return widths


def _grouped(found: Shapes) -> Widths:
    """Split fused rows into queries, and keys and values of fewer heads."""
    size = found["x_embedder.weight"][0]
    return lambda rows: (size, (rows - size) // 2, (rows - size) // 2)


_SCALES = ((r"(_norm|norms\.\d+)\.weight$", r"\1.scale"),)  # as later versions of ComfyUI save norms
_HUNYUAN_IN_COMFYUI = (
    (r"(_mod|modulation)\.lin\.", r"\1.linear."),
    (r"_attn\.(qkv|proj)\.", r"_attn_\1."),
    (r"_attn\.norm\.(q|k)(uery|ey)_norm\.", r"_attn_\1_norm."),
    (r"\.norm\.(q|k)(uery|ey)_norm\.", r".\1_norm."),
    (r"_norm\.scale$", "_norm.weight"),
    (r"(_mlp|blocks\.\d+\.mlp)\.0\.", r"\1.fc1."),
    (r"(_mlp|blocks\.\d+\.mlp)\.2\.", r"\1.fc2."),
    (r"(time_in|time_r_in|guidance_in|t_embedder)\.in_layer\.", r"\1.mlp.0."),
    (r"(time_in|time_r_in|guidance_in|t_embedder)\.out_layer\.", r"\1.mlp.2."),
    (r"c_embedder\.in_layer\.", "c_embedder.linear_1."),
    (r"c_embedder\.out_layer\.", "c_embedder.linear_2."),
)

LAYOUTS = (
    Layout(
        "Chroma",
        ("ChromaTransformer2DModel",),
        ("distilled_guidance_layer.in_proj.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("distilled_guidance_layer.in_proj.weight", "transformer_blocks.0.attn.to_q.weight"),
        "convert_chroma_transformer_checkpoint_to_diffusers",
        shapes.chroma,
        frozenset({*_DEPTH, "approximator_layers", "approximator_hidden_dim"}),
        widths=_after("img_in.weight"),
        renamed=_SCALES,
    ),
    Layout(
        "FLUX.2",
        ("Flux2Transformer2DModel",),
        ("single_stream_modulation.lin.weight", "double_blocks.0.img_attn.qkv.weight"),
        ("single_stream_modulation.linear.weight", "single_transformer_blocks.0.attn.to_qkv_mlp_proj.weight"),
        "convert_flux2_transformer_checkpoint_to_diffusers",
        shapes.flux2,
        frozenset(_DEPTH),
        renamed=_SCALES,
    ),
    Layout(
        "FLUX.1",
        ("FluxTransformer2DModel",),
        ("double_blocks.0.img_attn.qkv.weight", "vector_in.in_layer.weight", "img_in.bias"),
        (
            "single_transformer_blocks.0.proj_mlp.weight",
            "time_text_embed.text_embedder.linear_1.weight",
            "x_embedder.bias",
        ),
        "convert_flux_transformer_checkpoint_to_diffusers",
        shapes.flux1,
        frozenset(_DEPTH),
        widths=_after("img_in.weight"),
        renamed=_SCALES,
    ),
    Layout(
        "Ovis-Image",
        ("OvisImageTransformer2DModel",),
        ("double_blocks.0.img_mlp.gate_proj.weight", "img_in.bias"),
        ("context_embedder_norm.weight", "single_transformer_blocks.0.proj_mlp.weight"),
        name_tables.OVIS,
        shapes.flux,
        frozenset(_DEPTH),
    ),
    Layout(
        "LongCat-Image",
        ("LongCatImageTransformer2DModel",),
        ("double_blocks.0.img_mlp.0.weight", "time_in.in_layer.weight", "img_in.bias"),
        (
            "time_embed.timestep_embedder.linear_1.weight",
            "single_transformer_blocks.0.proj_mlp.weight",
            "x_embedder.bias",
        ),
        name_tables.LONGCAT,
        shapes.longcat,
        frozenset(_DEPTH),
    ),
    Layout(
        "Stable Diffusion 3",
        ("SD3Transformer2DModel",),
        ("joint_blocks.0.x_block.attn.qkv.weight", "y_embedder.mlp.0.weight"),
        ("pos_embed.proj.weight", "transformer_blocks.0.attn.add_q_proj.weight", "context_embedder.bias"),
        "convert_sd3_transformer_checkpoint_to_diffusers",
        shapes.sd3,
        frozenset({*_DEPTH, "caption_projection_dim", "dual_attention_layers", "qk_norm", "pos_embed_max_size"}),
        kernel="pos_embed.proj.weight",
    ),
    Layout(
        "Wan",
        ("WanTransformer3DModel", "SkyReelsV2Transformer3DModel", "ChronoEditTransformer3DModel"),
        ("head.modulation", "blocks.0.self_attn.q.weight"),
        ("condition_embedder.time_proj.weight", "blocks.0.attn1.to_q.weight", "patch_embedding.weight"),
        "convert_wan_transformer_to_diffusers",
        shapes.wan,
        frozenset({*_DEPTH, "ffn_dim"}),
        aside=(("img_emb.emb_pos", "condition_embedder.image_embedder.pos_embed"),),
        kernel="patch_embedding.weight",
    ),
    Layout(
        "Qwen-Image 2.1",
        ("QwenImage21Transformer2DModel",),
        ("txt_in.text_norm.weight", "modulation.1.weight", "transformer_blocks.0.img_mlp.out.weight"),
        (),
        "convert_qwen_image21_transformer_checkpoint_to_diffusers",
        shapes.qwen_image21,
        frozenset(_DEPTH),
    ),
    Layout(
        "Qwen-Image",
        ("QwenImageTransformer2DModel",),
        ("txt_norm.weight", "transformer_blocks.0.img_mod.1.weight"),
        (),
        None,
        shapes.qwen_image,
        frozenset(_DEPTH),
        unread=(shapes.ZERO_TIME,),
    ),
    Layout(
        "Z-Image",
        ("ZImageTransformer2DModel",),
        ("layers.0.adaLN_modulation.0.weight", "x_embedder.weight", "cap_embedder.1.weight"),
        ("layers.0.adaLN_modulation.0.weight", "all_x_embedder.2-1.weight"),
        "convert_z_image_transformer_checkpoint_to_diffusers",
        shapes.z_image,
        frozenset({"n_layers", "n_refiner_layers", "dim", "n_heads", "n_kv_heads"}),
        unread=("norm_final.weight",),
    ),
    Layout(
        "Lumina Image 2.0",
        ("Lumina2Transformer2DModel",),
        ("layers.0.attention.qkv.weight", "layers.0.adaLN_modulation.1.weight", "cap_embedder.0.weight"),
        ("time_caption_embed.caption_embedder.0.weight", "layers.0.attn.to_q.weight"),
        "convert_lumina2_to_diffusers",
        shapes.lumina2,
        frozenset({"num_layers", "num_refiner_layers", "hidden_size", "num_attention_heads", "num_kv_heads"}),
        widths=_grouped,
        unread=("norm_final.weight",),
    ),
    Layout(
        "Krea 2",
        ("Krea2Transformer2DModel",),
        ("txtfusion.projector.weight", "blocks.0.attn.wq.weight"),
        ("text_fusion.projector.weight", "transformer_blocks.0.attn.to_gate.weight"),
        "convert_krea2_transformer_checkpoint_to_diffusers",
        shapes.krea2,
        frozenset({"num_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size"}),
    ),
    Layout(
        "Cosmos Predict2",
        ("CosmosTransformer3DModel",),
        ("blocks.0.adaln_modulation_self_attn.1.weight", "x_embedder.proj.1.weight"),
        ("transformer_blocks.0.norm1.linear_1.weight", "patch_embed.proj.weight", "time_embed.norm.weight"),
        "convert_cosmos_transformer_checkpoint_to_diffusers",
        shapes.cosmos,
        frozenset({"num_layers", "num_attention_heads"}),
        unread=tuple(f"pos_embedder.{name}" for name in ("seq", "dim_spatial_range", "dim_temporal_range")),
        apart=PARTS["text_conditioner"].apart,
    ),
    Layout(
        "MiniMax-H3",
        ("MiniMaxH3Transformer3DModel",),
        ("video_patch_proj.weight", "audio_patch_proj.weight", "blocks.0.attn.qkv_proj.weight"),
        ("token_refiner.refiner_blocks.0.norm1.weight", "transformer_blocks.0.adaln_proj.linear.weight"),
        "convert_minimax_h3_transformer_checkpoint_to_diffusers",
        shapes.minimax_h3,
        frozenset({"num_layers", "num_attention_heads", "num_refiner_layers", "hidden_size", "ffn_dim"}),
        unread=(shapes.ROPE,),
        whole=True,
    ),
    Layout(
        "LTX-2",
        ("LTX2VideoTransformer3DModel",),
        ("patchify_proj.weight", "audio_patchify_proj.weight", "audio_adaln_single.linear.weight"),
        ("audio_proj_in.weight", "av_cross_attn_video_a2v_gate.linear.weight"),
        "convert_ltx2_transformer_to_diffusers",
        shapes.ltx2,
        frozenset({"num_layers"}),
        # of LTX-2.3, which diffusers' converter leaves as they are
        renamed=((r"^(audio_)?prompt_adaln_single\.", r"\1prompt_adaln."),),
        apart=PARTS["connectors"].apart,
    ),
    Layout(
        "LTX-Video",
        ("LTXVideoTransformer3DModel",),
        ("patchify_proj.weight", "adaln_single.linear.weight", "caption_projection.linear_1.weight"),
        ("proj_in.weight", "time_embed.linear.weight", "caption_projection.linear_1.weight"),
        "convert_ltx_transformer_checkpoint_to_diffusers",
        shapes.ltx,
        frozenset({"num_layers"}),
    ),
    Layout(
        "HunyuanVideo 1.5",
        ("HunyuanVideo15Transformer3DModel",),
        ("cond_type_embedding.weight", "byt5_in.fc1.weight"),
        ("cond_type_embed.weight", "context_embedder_2.linear_1.weight"),
        name_tables.HUNYUAN_VIDEO_15,
        shapes.hunyuan_video15,
        frozenset({"num_layers", "num_attention_heads", "num_refiner_layers"}),
        kernel="x_embedder.proj.weight",
        renamed=_HUNYUAN_IN_COMFYUI,
    ),
    Layout(
        "HunyuanVideo",
        ("HunyuanVideoTransformer3DModel",),
        ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight", "vector_in.in_layer.weight"),
        ("context_embedder.proj_in.weight", "time_text_embed.text_embedder.linear_1.weight"),
        "convert_hunyuan_video_transformer_to_diffusers",
        shapes.hunyuan_video,
        frozenset({*_DEPTH, "num_refiner_layers"}),
        widths=_after("img_in.proj.bias"),  # its kernel may be folded
        kernel="x_embedder.proj.weight",
        renamed=_HUNYUAN_IN_COMFYUI,
    ),
    Layout(
        "HunyuanImage",
        ("HunyuanImageTransformer2DModel",),
        ("txt_in.individual_token_refiner.blocks.0.self_attn_qkv.weight", "single_blocks.0.linear1.weight"),
        ("context_embedder.proj_in.weight", "time_guidance_embed.timestep_embedder.linear_1.weight"),
        name_tables.HUNYUAN_IMAGE,
        shapes.hunyuan_image,
        frozenset({*_DEPTH, "num_refiner_layers"}),
        kernel="x_embedder.proj.weight",
        renamed=_HUNYUAN_IN_COMFYUI,
    ),
    Layout(
        "AuraFlow",
        ("AuraFlowTransformer2DModel",),
        ("double_layers.0.attn.w2q.weight", "cond_seq_linear.weight"),
        ("register_tokens", "joint_transformer_blocks.0.attn.add_q_proj.weight"),
        "convert_auraflow_transformer_checkpoint_to_diffusers",
        shapes.auraflow,
        frozenset({"num_mmdit_layers", "num_single_dit_layers", "pos_embed_max_size"}),
    ),
    Layout(
        "Sana",
        ("SanaTransformer2DModel",),
        ("blocks.0.cross_attn.kv_linear.weight", "y_embedder.y_proj.fc1.weight"),
        ("patch_embed.proj.weight", "caption_norm.weight", "transformer_blocks.0.ff.conv_inverted.weight"),
        "convert_sana_transformer_to_diffusers",
        shapes.sana,
        frozenset({"num_layers"}),
        unread=("pos_embed", "y_embedder.y_embedding"),
        kernel="patch_embed.proj.weight",
    ),
    Layout(
        "HiDream-I1",
        ("HiDreamImageTransformer2DModel",),
        ("double_stream_blocks.0.block.attn1.to_q_t.weight", "caption_projection.0.linear.weight"),
        (),
        "convert_hidream_transformer_to_diffusers",
        shapes.hidream,
        frozenset({"num_layers", "num_single_layers"}),
    ),
)
