"""Transformers since 2025: tiny configs, published ones, and their weights under the names of the original files.

The names are written down from those files and from ComfyUI, apart from the tables that read them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import diffusers
import torch

from .original_names import State, _flux_streams, _join, _renamed, _swap

_QKV = ("attn.to_q", "attn.to_k", "attn.to_v")
_ADDED = ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")


@dataclass(frozen=True)
class Newer:
    """A class of diffusers, the config of a tiny model and of the published one, and what makes original names."""

    cls: str
    tiny: dict[str, Any]
    published: dict[str, Any]
    original: Callable[[State], State]
    beside: State = field(default_factory=dict)  # what original files hold beside what the class has

    def config(self, size: str = "tiny") -> dict[str, Any]:
        """The config of a size: `tiny` or `published`."""
        return {"_class_name": self.cls, **getattr(self, size)}

    def build(self, size: str = "tiny") -> Any:
        """A module with weights of a seed, each of which is another."""
        torch.manual_seed(0)
        made = getattr(diffusers, self.cls).from_config(self.config(size))
        for parameter in made.parameters():
            if not parameter.is_meta:
                parameter.data = torch.randn_like(parameter)
        return made.eval().requires_grad_(False)


def _hunyuan_in_repository(state: State) -> State:
    """Tencent's names: fused projections of text and single blocks, and of the two streams."""
    state = dict(state)
    _swap(state, "norm_out.linear")
    refiner = {name: state.pop(name) for name in list(state) if name.startswith("context_embedder.")}
    _join(refiner, _QKV, "self_attn_qkv")
    refiner = _renamed(
        refiner,
        {
            "context_embedder.": "txt_in.",
            "token_refiner.refiner_blocks": "individual_token_refiner.blocks",
            "attn.to_out.0": "self_attn_proj",
            "norm_out.linear": "adaLN_modulation.1",
            "ff.net.0.proj": "mlp.fc1",
            "ff.net.2": "mlp.fc2",
            "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
            "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
            "time_text_embed.text_embedder": "c_embedder",
            "proj_in": "input_embedder",
        },
    )
    single = {name: state.pop(name) for name in list(state) if name.startswith("single_transformer_blocks.")}
    _join(single, (*_QKV, "proj_mlp"), "linear1")
    single = _renamed(
        single,
        {
            "single_transformer_blocks": "single_blocks",
            "norm.linear": "modulation.linear",
            "attn.norm_q": "q_norm",
            "attn.norm_k": "k_norm",
            "proj_out": "linear2",
        },
    )
    _join(state, _QKV, "img_attn_qkv")
    _join(state, _ADDED, "txt_attn_qkv")
    for time in ("time_guidance_embed", "time_embed"):
        for ours, theirs in (
            ("timestep_embedder_r", "time_r"),
            ("timestep_embedder", "time"),
            ("guidance_embedder", "guidance"),
        ):
            names = {f"{time}.{ours}.linear_1": f"{theirs}_in.mlp.0", f"{time}.{ours}.linear_2": f"{theirs}_in.mlp.2"}
            state = _renamed(state, names)
    return refiner | single | _renamed(
        state,
        {
            "transformer_blocks": "double_blocks",
            "norm1.linear": "img_mod.linear",
            "norm1_context.linear": "txt_mod.linear",
            "attn.norm_added_q": "txt_attn_q_norm",
            "attn.norm_added_k": "txt_attn_k_norm",
            "attn.norm_q": "img_attn_q_norm",
            "attn.norm_k": "img_attn_k_norm",
            "attn.to_out.0": "img_attn_proj",
            "attn.to_add_out": "txt_attn_proj",
            "ff.net.0.proj": "img_mlp.fc1",
            "ff.net.2": "img_mlp.fc2",
            "ff_context.net.0.proj": "txt_mlp.fc1",
            "ff_context.net.2": "txt_mlp.fc2",
            "x_embedder": "img_in",
            "norm_out.linear": "final_layer.adaLN_modulation.1",
            "proj_out": "final_layer.linear",
            "context_embedder_2.norm": "byt5_in.layernorm",
            "context_embedder_2.linear_": "byt5_in.fc",
            "cond_type_embed.": "cond_type_embedding.",
            "image_embedder.norm_in": "vision_in.proj.0",
            "image_embedder.linear_1": "vision_in.proj.1",
            "image_embedder.linear_2": "vision_in.proj.3",
            "image_embedder.norm_out": "vision_in.proj.4",
        },
    )  # fmt: skip


def _hunyuan(state: State) -> State:
    glyphs = {name: tensor for name, tensor in state.items() if name.startswith("context_embedder_2.")}
    rest = {name: tensor for name, tensor in state.items() if name not in glyphs}
    names = {"context_embedder_2.norm": "byt5_in.layernorm", "context_embedder_2.linear_": "byt5_in.fc"}
    return _hunyuan_in_repository(rest) | _renamed(glyphs, names)


def apart(state: State) -> State:
    """Tencent's own files of HunyuanVideo 1.5: queries, keys and values of the two streams each alone."""
    made = {}
    for name, tensor in state.items():
        if "_attn_qkv." in name and "self" not in name:
            made |= {
                name.replace("_qkv.", f"_{part}."): each for part, each in zip("qkv", tensor.chunk(3), strict=True)
            }
        else:
            made[name] = tensor
    return {name: tensor.contiguous() for name, tensor in made.items()}


def _flux_like(state: State, time: str) -> State:
    state = dict(state)
    _swap(state, "norm_out.linear")
    names = {
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        f"{time}.linear_1": "time_in.in_layer",
        f"{time}.linear_2": "time_in.out_layer",
    }
    return _flux_streams(_renamed(state, names))


def _longcat(state: State) -> State:
    return _flux_like(state, "time_embed.timestep_embedder")


def _ovis(state: State) -> State:
    """A gated feed-forward apart; diffusers has the value first, then the gate."""
    made = {}
    for name, tensor in _flux_like(
        _renamed(state, {"context_embedder_norm.": "norm_of_text."}), "timestep_embedder"
    ).items():
        if "_mlp.0." in name:
            up, gate = tensor.chunk(2)
            made |= {name.replace("_mlp.0", "_mlp.up_proj"): up, name.replace("_mlp.0", "_mlp.gate_proj"): gate}
        else:
            made[name.replace("_mlp.2", "_mlp.down_proj").replace("norm_of_text.weight", "txt_norm.scale")] = tensor
    return made


def _krea2(state: State) -> State:
    made = {}
    for name, tensor in state.items():
        if name.endswith("scale_shift_table") and name.startswith("transformer_blocks"):
            tensor = tensor.flatten()
        made[name] = tensor
    return _renamed(
        made,
        {
            "final_layer.scale_shift_table": "last.modulation.lin",
            "final_layer.norm.weight": "last.norm.scale",
            "final_layer.": "last.",
            "text_fusion.": "txtfusion.",
            "txt_in.norm.weight": "txtmlp.0.scale",
            "txt_in.linear_1": "txtmlp.1",
            "txt_in.linear_2": "txtmlp.3",
            "time_embed.linear_1": "tmlp.0",
            "time_embed.linear_2": "tmlp.2",
            "time_mod_proj": "tproj.1",
            "img_in": "first",
            "transformer_blocks": "blocks",
            "scale_shift_table": "mod.lin",
            "attn.to_gate": "attn.gate",
            "attn.to_out.0": "attn.wo",
            "attn.to_": "attn.w",
            "attn.norm_q.weight": "attn.qknorm.qnorm.scale",
            "attn.norm_k.weight": "attn.qknorm.knorm.scale",
            ".ff.": ".mlp.",
            ".norm1.weight": ".prenorm.scale",
            ".norm2.weight": ".postnorm.scale",
        },
    )


def _qwen_image21(state: State) -> State:
    """As ComfyUI has it: the gate and the value of a feed-forward in one."""
    made = dict(state)
    _join(made, ("img_mlp.gate_layer", "img_mlp.proj"), "img_mlp.gate_up")
    return made


def _ltx2(state: State) -> State:
    names = {
        "av_cross_attn_video_scale_shift": "av_ca_video_scale_shift_adaln_single",
        "av_cross_attn_audio_scale_shift": "av_ca_audio_scale_shift_adaln_single",
        "av_cross_attn_video_a2v_gate": "av_ca_a2v_gate_adaln_single",
        "av_cross_attn_audio_v2a_gate": "av_ca_v2a_gate_adaln_single",
        "video_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_video",
        "audio_a2v_cross_attn_scale_shift_table": "scale_shift_table_a2v_ca_audio",
        "prompt_adaln.": "prompt_adaln_single.",
        "time_embed.": "adaln_single.",
        "audio_proj_in": "audio_patchify_proj",
        "norm_q": "q_norm",
        "norm_k": "k_norm",
    }
    made = _renamed(state, names)
    return {
        "patchify_proj" + name.removeprefix("proj_in") if name.startswith("proj_in.") else name: tensor
        for name, tensor in made.items()
    }


def _minimax_h3(state: State) -> State:
    state = dict(state)
    _join(state, _QKV, "attn.qkv_proj")
    for name in [name for name in state if "ff.net.0.proj" in name]:
        state[name] = torch.cat(state[name].chunk(2)[::-1])
    return _renamed(
        state,
        {
            "transformer_blocks.": "blocks.",
            "token_refiner.refiner_blocks.": "token_refiner.blocks.",
            "time_embedder.linear_1": "time_embedder.proj_in",
            "time_embedder.linear_2": "time_embedder.proj_out",
            "norm_out.norm": "final_layer.norm",
            "norm_out.linear": "final_layer.adaln_proj.linear",
            "audio_proj_out": "final_layer.audio_out",
            "proj_out.weight": "final_layer.video_out.weight",
            "proj_out.bias": "final_layer.video_out.bias",
            "audio_proj_in": "audio_patch_proj",
            "proj_in.weight": "video_patch_proj.weight",
            "proj_in.bias": "video_patch_proj.bias",
            "time_embedder.video_patch_proj": "time_embedder.proj_in",
            "time_embedder.final_layer.video_out": "time_embedder.proj_out",
            "context_embedder": "condition_proj",
            "attn.norm_q": "attn.q_norm",
            "attn.norm_k": "attn.k_norm",
            "attn.to_out.0": "attn.out_proj",
            "ff.net.0.proj": "mlp.fc1",
            "ff.net.2": "mlp.fc2",
        },
    )


def _cosmos(state: State) -> State:
    return _renamed(
        state,
        {
            "transformer_blocks": "blocks",
            "norm_out.linear_": "final_layer.adaln_modulation.",
            "proj_out": "final_layer.linear",
            "patch_embed.proj": "x_embedder.proj.1",
            "time_embed.t_embedder": "t_embedder.1",
            "time_embed.norm": "t_embedding_norm",
            "norm1.linear_": "adaln_modulation_self_attn.",
            "norm2.linear_": "adaln_modulation_cross_attn.",
            "norm3.linear_": "adaln_modulation_mlp.",
            "attn1.": "self_attn.",
            "attn2.": "cross_attn.",
            "to_out.0": "output_proj",
            "norm_q": "q_norm",
            "norm_k": "k_norm",
            "to_q": "q_proj",
            "to_k": "k_proj",
            "to_v": "v_proj",
            "ff.net.0.proj": "mlp.layer1",
            "ff.net.2": "mlp.layer2",
        },
    )


_FLUX_TINY = {
    "in_channels": 8, "num_layers": 2, "num_single_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
    "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6),
}  # fmt: skip
_HUNYUAN_TINY = {
    "in_channels": 8, "out_channels": 8, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
    "num_refiner_layers": 2, "text_embed_dim": 24, "text_embed_2_dim": 20, "mlp_ratio": 2.0,
}  # fmt: skip
_IMAGE_TINY = {**_HUNYUAN_TINY, "num_single_layers": 2, "patch_size": (1, 1), "rope_axes_dim": (8, 8)}
_LTX2_TINY = {
    "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 8, "cross_attention_dim": 16,
    "audio_in_channels": 4, "audio_out_channels": 4, "audio_num_attention_heads": 2, "audio_attention_head_dim": 4,
    "audio_cross_attention_dim": 8, "num_layers": 2, "caption_channels": 16, "rope_double_precision": False,
}  # fmt: skip
_LTX23 = {
    "gated_attn": True, "cross_attn_mod": True, "audio_gated_attn": True, "audio_cross_attn_mod": True,
    "use_prompt_embeddings": False, "perturbed_attn": True,
}  # fmt: skip
_IMAGE = {"patch_size": (1, 1), "rope_axes_dim": (64, 64), "text_embed_2_dim": 1472}
_REFINER = {"patch_size": (1, 1, 1), "rope_axes_dim": (16, 56, 56), "in_channels": 128, "num_attention_heads": 26}
_VIDEO_TINY = {**_HUNYUAN_TINY, "rope_axes_dim": (4, 6, 6), "image_embed_dim": 12}

NEWER: dict[str, Newer] = {
    "hunyuan_image": Newer("HunyuanImageTransformer2DModel", _IMAGE_TINY, _IMAGE, _hunyuan),
    "hunyuan_image_distilled": Newer(
        "HunyuanImageTransformer2DModel",
        {**_IMAGE_TINY, "guidance_embeds": True, "use_meanflow": True},
        {**_IMAGE, "guidance_embeds": True, "use_meanflow": True},
        _hunyuan,
    ),
    "hunyuan_image_refiner": Newer(
        "HunyuanImageTransformer2DModel",
        {**_IMAGE_TINY, "patch_size": (1, 1, 1), "rope_axes_dim": (4, 6, 6), "text_embed_2_dim": None},
        {**_REFINER, "text_embed_2_dim": None},
        _hunyuan,
    ),
    "hunyuan_video15": Newer(
        "HunyuanVideo15Transformer3DModel", _VIDEO_TINY, {}, _hunyuan
    ),
    "hunyuan_video15_meanflow": Newer(
        "HunyuanVideo15Transformer3DModel",
        {**_VIDEO_TINY, "use_meanflow": True},
        {"use_meanflow": True},
        _hunyuan,
    ),
    "ovis": Newer("OvisImageTransformer2DModel", {**_FLUX_TINY, "out_channels": 8}, {}, _ovis),
    "longcat": Newer(
        "LongCatImageTransformer2DModel", _FLUX_TINY, {"num_layers": 10, "num_single_layers": 20}, _longcat
    ),
    "krea2": Newer(
        "Krea2Transformer2DModel",
        {
            "in_channels": 8, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "num_key_value_heads": 1, "intermediate_size": 48, "timestep_embed_dim": 16, "text_hidden_dim": 24,
            "num_text_layers": 3, "text_num_attention_heads": 2, "text_num_key_value_heads": 1,
            "text_intermediate_size": 40, "num_layerwise_text_blocks": 2, "num_refiner_text_blocks": 2,
            "axes_dims_rope": (4, 6, 6),
        },  # fmt: skip
        {},
        _krea2,
    ),
    "qwen_image21": Newer(
        "QwenImage21Transformer2DModel",
        {
            "in_channels": 8, "out_channels": 8, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "context_in_dim": 24, "axes_dims_rope": (4, 6, 6),
        },  # fmt: skip
        {},
        _qwen_image21,
    ),
    "qwen_image_layered": Newer(
        "QwenImageTransformer2DModel",
        {
            "in_channels": 8, "out_channels": 2, "num_layers": 2, "attention_head_dim": 16, "num_attention_heads": 2,
            "joint_attention_dim": 24, "axes_dims_rope": (4, 6, 6), "use_additional_t_cond": True,
            "use_layer3d_rope": True,
        },  # fmt: skip
        {"use_additional_t_cond": True, "use_layer3d_rope": True},
        dict,
    ),
    "ltx2": Newer("LTX2VideoTransformer3DModel", _LTX2_TINY, {}, _ltx2),
    "ltx23": Newer("LTX2VideoTransformer3DModel", {**_LTX2_TINY, **_LTX23}, _LTX23, _ltx2),
    "minimax_h3": Newer(
        "MiniMaxH3Transformer3DModel",
        {
            "num_attention_heads": 2, "attention_head_dim": 16, "hidden_size": 24, "num_layers": 2,
            "num_refiner_layers": 2, "ffn_dim": 40, "in_channels": 4, "audio_in_channels": 6, "text_dim": 20,
            "freq_dim": 16, "time_embed_hidden_dim": 24, "time_embed_dim": 12, "rope_freq_dim": 2,
        },  # fmt: skip
        {},
        _minimax_h3,
        beside={"rope.inv_freq": torch.ones(2)},
    ),
    "cosmos": Newer(
        "CosmosTransformer3DModel",
        {
            "in_channels": 4, "out_channels": 4, "num_attention_heads": 2, "attention_head_dim": 16, "num_layers": 2,
            "mlp_ratio": 2.0, "text_embed_dim": 24, "adaln_lora_dim": 4, "max_size": (4, 32, 32),
            "extra_pos_embed_type": None,
        },  # fmt: skip
        {"num_attention_heads": 16, "extra_pos_embed_type": None, "rope_scale": (1.0, 4.0, 4.0)},
        _cosmos,
    ),
}  # fmt: skip
