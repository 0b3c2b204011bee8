"""Infer the config of a model of the loop from the shapes of its weights, by diffusers' names: one function a kind."""

from __future__ import annotations

from math import isqrt, prod
from typing import Any

from .layouts import Config, Shapes

ROPE = "rope.inv_freq"  # frequencies that follow from their number
ZERO_TIME = "__index_timestep_zero__"  # an empty tensor that ComfyUI's files have: the references are at time 0


def flux(shapes: Shapes, config: Config) -> dict[str, Any]:
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


def longcat(shapes: Shapes, config: Config) -> dict[str, Any]:
    return {name: value for name, value in flux(shapes, config).items() if name != "out_channels"}  # as many as in


def flux1(shapes: Shapes, config: Config) -> dict[str, Any]:
    return flux(shapes, config) | {
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def flux2(shapes: Shapes, config: Config) -> dict[str, Any]:
    return flux(shapes, config) | {
        "timestep_guidance_channels": shapes["time_guidance_embed.timestep_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
    }


def chroma(shapes: Shapes, config: Config) -> dict[str, Any]:
    return flux(shapes, config) | {
        "approximator_layers": shapes.count("distilled_guidance_layer.layers."),
        "approximator_hidden_dim": shapes["distilled_guidance_layer.in_proj.weight"][0],
        "approximator_num_channels": shapes["distilled_guidance_layer.in_proj.weight"][1],
    }


def sd3(shapes: Shapes, config: Config) -> dict[str, Any]:
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
        told["pos_embed_max_size"] = isqrt(shapes["pos_embed.pos_embed"][-2])
    return told


def wan(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, *patch = shapes["patch_embedding.weight"]
    image = shapes.get("condition_embedder.image_embedder.norm1.weight", (None,))
    added = shapes.get("blocks.0.attn2.add_k_proj.weight", (None, None))
    seen = shapes.get("condition_embedder.image_embedder.pos_embed", (None, None))  # of a first and a last frame
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
        "pos_embed_seq_len": seen[-2],
    }


def qwen_image(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, head = shapes["img_in.weight"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    told = {
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": shapes["img_in.weight"][1],
        "out_channels": shapes["proj_out.weight"][0] // config["patch_size"] ** 2,
        "joint_attention_dim": shapes["txt_in.weight"][1],
    }
    added = "time_text_embed.addition_t_embedding.weight"  # of Layered
    told["use_additional_t_cond"] = added in shapes
    return told | ({"zero_cond_t": True} if ZERO_TIME in shapes else {})


def qwen_image21(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, head = shapes["img_in.weight"][0], shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": shapes["img_in.weight"][1] // config["patch_size"] ** 2,
        "out_channels": shapes["proj_out.weight"][0] // config["patch_size"] ** 2,
        "context_in_dim": shapes["txt_in.in_layer.weight"][1],
        "mlp_ratio": shapes["transformer_blocks.0.img_mlp.out.weight"][1] // width,
    }


def krea2(shapes: Shapes, config: Config) -> dict[str, Any]:
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    text = "text_fusion.layerwise_blocks.0."
    text_head = shapes[f"{text}attn.norm_q.weight"][0]
    return {
        "in_channels": shapes["img_in.weight"][1],
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": shapes["transformer_blocks.0.attn.to_q.weight"][0] // head,
        "num_key_value_heads": shapes["transformer_blocks.0.attn.to_k.weight"][0] // head,
        "intermediate_size": shapes["transformer_blocks.0.ff.gate.weight"][0],
        "timestep_embed_dim": shapes["time_embed.linear_1.weight"][1],
        "text_hidden_dim": shapes["txt_in.linear_1.weight"][1],
        "num_text_layers": shapes["text_fusion.projector.weight"][1],
        "text_num_attention_heads": shapes[f"{text}attn.to_q.weight"][0] // text_head,
        "text_num_key_value_heads": shapes[f"{text}attn.to_k.weight"][0] // text_head,
        "text_intermediate_size": shapes[f"{text}ff.gate.weight"][0],
        "num_layerwise_text_blocks": shapes.count("text_fusion.layerwise_blocks."),
        "num_refiner_text_blocks": shapes.count("text_fusion.refiner_blocks."),
    }


def cosmos(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs = shapes["patch_embed.proj.weight"]
    patch, head = prod(config["patch_size"]), shapes["transformer_blocks.0.attn1.norm_q.weight"][0]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": inputs // patch - bool(config["concat_padding_mask"]),
        "out_channels": shapes["proj_out.weight"][0] // patch,
        "mlp_ratio": shapes["transformer_blocks.0.ff.net.0.proj.weight"][0] / width,
        "text_embed_dim": shapes["transformer_blocks.0.attn2.to_k.weight"][1],
        "adaln_lora_dim": shapes["transformer_blocks.0.norm1.linear_1.weight"][0],
        "extra_pos_embed_type": "learnable" if "learnable_pos_embed.pos_emb_t" in shapes else None,
    }


def minimax_h3(shapes: Shapes, config: Config) -> dict[str, Any]:
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    told = {
        "num_layers": shapes.count("transformer_blocks."),
        "num_refiner_layers": shapes.count("token_refiner.refiner_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": shapes["transformer_blocks.0.attn.to_q.weight"][0] // head,
        "hidden_size": shapes["proj_in.weight"][0],
        "ffn_dim": shapes["transformer_blocks.0.ff.net.2.weight"][1],
        "in_channels": shapes["proj_out.weight"][0] // prod(config["patch_size"]),
        "audio_in_channels": shapes["audio_proj_out.weight"][0],
        "text_dim": shapes["context_embedder.weight"][1],
        "freq_dim": shapes["time_embedder.linear_1.weight"][1],
        "time_embed_hidden_dim": shapes["time_embedder.linear_1.weight"][0],
        "time_embed_dim": shapes["time_embedder.linear_2.weight"][0],
    }
    return told | ({"rope_freq_dim": shapes[ROPE][0]} if ROPE in shapes else {})


def ltx2(shapes: Shapes, config: Config) -> dict[str, Any]:
    captions = shapes.get("caption_projection.linear_1.weight")
    block = "transformer_blocks.0."
    told = {
        "num_layers": shapes.count("transformer_blocks."),
        "use_prompt_embeddings": captions is not None,
        "use_keyframes_abs_pos_embedding": "keyframes_abs_pos_embedding" in shapes,
        "ff_bias": f"{block}ff.net.2.bias" in shapes,
        "audio_ff_bias": f"{block}audio_ff.net.2.bias" in shapes,
    }
    for kind in ("", "audio_"):
        told |= {
            f"{kind}num_attention_heads": shapes[f"{kind}proj_in.weight"][0] // config[f"{kind}attention_head_dim"],
            f"{kind}in_channels": shapes[f"{kind}proj_in.weight"][1],
            f"{kind}out_channels": shapes[f"{kind}proj_out.weight"][0],
            f"{kind}cross_attention_dim": shapes[f"{block}{kind}attn2.to_k.weight"][1],
            f"{kind}gated_attn": f"{block}{kind}attn1.to_gate_logits.weight" in shapes,
            f"{kind}cross_attn_mod": shapes[f"{block}{kind}scale_shift_table"][0] == 9,
        }
    if told["cross_attn_mod"] or told["audio_cross_attn_mod"]:
        told["use_prompt_adaln_single"] = "prompt_adaln.linear.weight" in shapes
    return told | ({"caption_channels": captions[1]} if captions else {})


def z_image(shapes: Shapes, config: Config) -> dict[str, Any]:
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


def lumina2(shapes: Shapes, config: Config) -> dict[str, Any]:
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


def ltx(shapes: Shapes, config: Config) -> dict[str, Any]:
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_attention_heads": shapes["proj_in.weight"][0] // config["attention_head_dim"],
        "in_channels": shapes["proj_in.weight"][1],
        "out_channels": shapes["proj_out.weight"][0],
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
        "cross_attention_dim": shapes["transformer_blocks.0.attn2.to_k.weight"][1],
    }


def hunyuan_video(shapes: Shapes, config: Config) -> dict[str, Any]:
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


def hunyuan_video15(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, *_ = shapes["x_embedder.proj.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_refiner_layers": shapes.count("context_embedder.token_refiner.refiner_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": channels,
        "text_embed_dim": shapes["context_embedder.proj_in.weight"][1],
        "text_embed_2_dim": shapes["context_embedder_2.linear_1.weight"][1],
        "image_embed_dim": shapes["image_embedder.linear_1.weight"][1],
        "use_meanflow": "time_embed.timestep_embedder_r.linear_1.weight" in shapes,
    }


def hunyuan_image(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, *patch = shapes["x_embedder.proj.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    glyphs = shapes.get("context_embedder_2.linear_1.weight")
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_single_layers": shapes.count("single_transformer_blocks."),
        "num_refiner_layers": shapes.count("context_embedder.token_refiner.refiner_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // prod(patch),
        "patch_size": patch,
        "text_embed_dim": shapes["context_embedder.proj_in.weight"][1],
        "text_embed_2_dim": glyphs and glyphs[1],
        "guidance_embeds": "time_guidance_embed.guidance_embedder.linear_1.weight" in shapes,
        "use_meanflow": "time_guidance_embed.timestep_embedder_r.linear_1.weight" in shapes,
    }


def auraflow(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs = shapes["pos_embed.proj.weight"]
    return {
        "num_mmdit_layers": shapes.count("joint_transformer_blocks."),
        "num_single_dit_layers": shapes.count("single_transformer_blocks."),
        "num_attention_heads": width // config["attention_head_dim"],
        "in_channels": inputs // config["patch_size"] ** 2,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pos_embed_max_size": shapes["pos_embed.pos_embed"][-2],
    }


def sana(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels, patch, _ = shapes["patch_embed.proj.weight"]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_attention_heads": width // config["attention_head_dim"],
        "in_channels": channels,
        "out_channels": shapes["proj_out.weight"][0] // patch**2,
        "patch_size": patch,
        "caption_channels": shapes["caption_projection.linear_1.weight"][1],
    }


def hidream(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs = shapes["x_embedder.proj.weight"]
    return {
        "num_layers": shapes.count("double_stream_blocks."),
        "num_single_layers": shapes.count("single_stream_blocks."),
        "num_attention_heads": width // config["attention_head_dim"],
        "in_channels": inputs // config["patch_size"] ** 2,
        "text_emb_dim": shapes["p_embedder.pooled_embedder.linear_1.weight"][1],
        "num_routed_experts": shapes.count("single_stream_blocks.0.block.ff_i.experts."),
    }


def flux_controlnet(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels = shapes["x_embedder.weight"]
    head = (
        shapes.get("transformer_blocks.0.attn.norm_q.weight")
        or shapes["single_transformer_blocks.0.attn.norm_q.weight"]
    )
    modes, hint = shapes.get("controlnet_mode_embedder.weight"), shapes.get("input_hint_block.conv_out.weight")
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "num_single_layers": shapes.count("single_transformer_blocks."),
        "attention_head_dim": head[0],
        "num_attention_heads": width // head[0],
        "in_channels": channels,
        "joint_attention_dim": shapes["context_embedder.weight"][1],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "guidance_embeds": "time_text_embed.guidance_embedder.linear_1.weight" in shapes,
        "num_mode": modes and modes[0],
        "conditioning_embedding_channels": hint and hint[0],
    }


def qwen_controlnet(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, channels = shapes["img_in.weight"]
    head = shapes["transformer_blocks.0.attn.norm_q.weight"][0]
    return {
        "num_layers": shapes.count("transformer_blocks."),
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": channels,
        "joint_attention_dim": shapes["txt_in.weight"][1],
        "extra_condition_channels": shapes["controlnet_x_embedder.weight"][1] - channels,
    }


def sd3_controlnet(shapes: Shapes, config: Config) -> dict[str, Any]:
    width, inputs, patch, _ = shapes["pos_embed_input.proj.weight"]
    normed, context = "transformer_blocks.0.attn.norm_q.weight", shapes.get("context_embedder.weight")
    head = shapes[normed][0] if normed in shapes else config["attention_head_dim"]
    own = shapes.get("pos_embed.proj.weight")
    channels, layers = own[1] if own else config["in_channels"], shapes.count("transformer_blocks.")
    told = {
        "num_layers": layers,
        "attention_head_dim": head,
        "num_attention_heads": width // head,
        "in_channels": channels,
        "out_channels": channels,
        "patch_size": patch,
        "extra_conditioning_channels": inputs - channels,
        "joint_attention_dim": context and context[1],
        "caption_projection_dim": context and context[0],
        "pooled_projection_dim": shapes["time_text_embed.text_embedder.linear_1.weight"][1],
        "qk_norm": "rms_norm" if normed in shapes else None,
        "dual_attention_layers": [i for i in range(layers) if f"transformer_blocks.{i}.attn2.to_q.weight" in shapes],
        "use_pos_embed": own is not None,
        # Those of Stable Diffusion 3.5 by its makers read no text; the others were trained without a pooled prompt.
        "force_zeros_for_pooled_projection": context is not None,
    }
    if "pos_embed.pos_embed" in shapes:
        told["pos_embed_max_size"] = isqrt(shapes["pos_embed.pos_embed"][-2])
    return told
