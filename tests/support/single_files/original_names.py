"""Tiny transformers under the names of the original files, with weights joined as there: converters inverted.

`original(name, state)` gives the tensors of an original file; `converted(name, tensors)` runs diffusers' own converter
on them, at the width of the tiny model, so that an inverse that is wrong is seen.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.loaders import single_file_utils

State = dict[str, torch.Tensor]


def _renamed(state: State, names: Mapping[str, str]) -> State:
    """With parts of names replaced, in their order."""
    made = {}
    for name, tensor in state.items():
        for ours, theirs in names.items():
            name = name.replace(ours, theirs)
        made[name] = tensor
    return made


def _join(state: State, parts: tuple[str, ...], joined: str) -> None:
    """Join weights, and their biases, that are called alike but for these parts of their names."""
    for name in [name for name in state if parts[0] in name]:
        tensors = [state.pop(name.replace(parts[0], part)) for part in parts]
        state[name.replace(parts[0], joined)] = torch.cat(tensors)


def _swap(state: State, start: str) -> None:
    """Swap the halves of a modulation."""
    for name in [name for name in state if name.startswith(start)]:
        state[name] = torch.cat(state[name].chunk(2)[::-1])


_FLUX_BLOCKS = {
    "single_transformer_blocks.": "single_blocks.",
    "transformer_blocks.": "double_blocks.",
    "norm1.linear": "img_mod.lin",
    "norm1_context.linear": "txt_mod.lin",
    "attn.norm_added_q.weight": "txt_attn.norm.query_norm.scale",
    "attn.norm_added_k.weight": "txt_attn.norm.key_norm.scale",
    "ff.net.0.proj": "img_mlp.0",
    "ff.net.2": "img_mlp.2",
    "ff_context.net.0.proj": "txt_mlp.0",
    "ff_context.net.2": "txt_mlp.2",
    "attn.to_out.0": "img_attn.proj",
    "attn.to_add_out": "txt_attn.proj",
    "context_embedder.": "txt_in.",
    "x_embedder.": "img_in.",
}


def _flux_streams(state: State) -> State:
    state = dict(state)
    single = {name: state.pop(name) for name in list(state) if name.startswith("single_transformer_blocks.")}
    _join(single, ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear1")
    names = {"proj_out": "linear2", "norm.linear": "modulation.lin", "attn.norm_q.weight": "norm.query_norm.scale"}
    single = _renamed(single, names | {"attn.norm_k.weight": "norm.key_norm.scale"})
    _join(state, ("attn.to_q", "attn.to_k", "attn.to_v"), "img_attn.qkv")
    _join(state, ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "txt_attn.qkv")
    state = _renamed(state, {"attn.norm_q.weight": "img_attn.norm.query_norm.scale"})
    state = _renamed(state, {"attn.norm_k.weight": "img_attn.norm.key_norm.scale"})
    top = {name: tensor for name, tensor in state.items() if name.startswith("proj_out")}
    state = {name: tensor for name, tensor in state.items() if name not in top}
    return _renamed(single | state, _FLUX_BLOCKS) | _renamed(top, {"proj_out": "final_layer.linear"})


def _flux(state: State) -> State:
    state = dict(state)
    _swap(state, "norm_out.linear")
    names = {"norm_out.linear": "final_layer.adaLN_modulation.1"}
    for ours, theirs in (("timestep", "time"), ("text", "vector"), ("guidance", "guidance")):
        names[f"time_text_embed.{ours}_embedder.linear_1"] = f"{theirs}_in.in_layer"
        names[f"time_text_embed.{ours}_embedder.linear_2"] = f"{theirs}_in.out_layer"
    return _flux_streams(_renamed(state, names))


def _chroma(state: State) -> State:
    guidance = {name: tensor for name, tensor in state.items() if name.startswith("distilled_guidance_layer")}
    rest = {name: tensor for name, tensor in state.items() if name not in guidance}
    made = _renamed(guidance, {"linear_1": "in_layer", "linear_2": "out_layer"})
    made = {name.replace(".weight", ".scale") if ".norms." in name else name: t for name, t in made.items()}
    return made | _flux_streams(rest)


def _sd3(state: State) -> State:
    state = dict(state)
    last = max(int(name.split(".")[1]) for name in state if name.startswith("transformer_blocks."))
    _swap(state, "norm_out.linear")
    _swap(state, f"transformer_blocks.{last}.norm1_context.linear")
    _join(state, ("attn.to_q", "attn.to_k", "attn.to_v"), "x_block.attn.qkv")
    _join(state, ("attn2.to_q", "attn2.to_k", "attn2.to_v"), "x_block.attn2.qkv")
    _join(state, ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "context_block.attn.qkv")
    names = {
        "transformer_blocks.": "joint_blocks.",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "norm1.linear": "x_block.adaLN_modulation.1",
        "norm1_context.linear": "context_block.adaLN_modulation.1",
        "attn.norm_added_q": "context_block.attn.ln_q",
        "attn.norm_added_k": "context_block.attn.ln_k",
        ".attn.to_out.0": ".x_block.attn.proj",
        ".attn2.to_out.0": ".x_block.attn2.proj",
        ".attn.to_add_out": ".context_block.attn.proj",
        "ff.net.0.proj": "x_block.mlp.fc1",
        "ff.net.2": "x_block.mlp.fc2",
        "ff_context.net.0.proj": "context_block.mlp.fc1",
        "ff_context.net.2": "context_block.mlp.fc2",
        "pos_embed.proj": "x_embedder.proj",
        "pos_embed.pos_embed": "pos_embed",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder.linear_1": "y_embedder.mlp.0",
        "time_text_embed.text_embedder.linear_2": "y_embedder.mlp.2",
    }
    for letter in "qk":
        names |= {f".attn.norm_{letter}": f".x_block.attn.ln_{letter}"}
        names |= {f".attn2.norm_{letter}": f".x_block.attn2.ln_{letter}"}
    return _renamed(_renamed(state, {"proj_out": "final_layer.linear"}), names)


def _wan(state: State) -> State:
    names = {
        "condition_embedder.time_embedder.linear_1": "time_embedding.0",
        "condition_embedder.time_embedder.linear_2": "time_embedding.2",
        "condition_embedder.text_embedder.linear_1": "text_embedding.0",
        "condition_embedder.text_embedder.linear_2": "text_embedding.2",
        "condition_embedder.image_embedder.norm1": "img_emb.proj.0",
        "condition_embedder.image_embedder.ff.net.0.proj": "img_emb.proj.1",
        "condition_embedder.image_embedder.ff.net.2": "img_emb.proj.3",
        "condition_embedder.image_embedder.norm2": "img_emb.proj.4",
        "condition_embedder.image_embedder.pos_embed": "img_emb.emb_pos",
        "condition_embedder.time_proj": "time_projection.1",
        "attn1": "self_attn",
        "attn2": "cross_attn",
        ".to_out.0.": ".o.",
        ".to_q.": ".q.",
        ".to_k.": ".k.",
        ".to_v.": ".v.",
        ".add_k_proj.": ".k_img.",
        ".add_v_proj.": ".v_img.",
        ".norm_added_k.": ".norm_k_img.",
        "proj_out": "head.head",
        ".scale_shift_table": ".modulation",
        "ffn.net.0.proj": "ffn.0",
        "ffn.net.2": "ffn.2",
        ".norm2.": ".norm3.",
    }
    made = _renamed(state, names)
    made["head.modulation"] = made.pop("scale_shift_table")
    return made


def _flux2(state: State) -> State:
    state = dict(state)
    single = {name: state.pop(name) for name in list(state) if name.startswith("single_transformer_blocks.")}
    single = _renamed(
        single,
        {
            "attn.to_qkv_mlp_proj": "linear1",
            "attn.to_out": "linear2",
            "attn.norm_q.weight": "norm.query_norm.scale",
            "attn.norm_k.weight": "norm.key_norm.scale",
        },
    )
    _swap(state, "norm_out.linear")
    names = {
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "time_guidance_embed.timestep_embedder.linear_1": "time_in.in_layer",
        "time_guidance_embed.timestep_embedder.linear_2": "time_in.out_layer",
        "_modulation_img.linear": "_modulation_img.lin",
        "_modulation_txt.linear": "_modulation_txt.lin",
        "single_stream_modulation.linear": "single_stream_modulation.lin",
        "ff.linear_in": "img_mlp.0",
        "ff.linear_out": "img_mlp.2",
        "ff_context.linear_in": "txt_mlp.0",
        "ff_context.linear_out": "txt_mlp.2",
    }
    return _flux_streams(_renamed(state, names) | single)


def _z_image(state: State) -> State:
    state = dict(state)
    _join(state, ("attention.to_q.weight", "attention.to_k.weight", "attention.to_v.weight"), "attention.qkv.weight")
    names = {
        "all_final_layer.2-1.": "final_layer.",
        "all_x_embedder.2-1.": "x_embedder.",
        "attention.to_out.0": "attention.out",
        "attention.norm_k": "attention.k_norm",
        "attention.norm_q": "attention.q_norm",
    }
    return _renamed(state, names)


def _lumina2(state: State) -> State:
    state = dict(state)
    _join(state, ("attn.to_q", "attn.to_k", "attn.to_v"), "attention.qkv")
    names = {
        "time_caption_embed.caption_embedder": "cap_embedder",
        "time_caption_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_caption_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "norm_out.linear_1": "final_layer.adaLN_modulation.1",
        "norm_out.linear_2": "final_layer.linear",
        "norm1.linear.": "adaLN_modulation.1.",
        "ffn_norm1": "FFN1",
        "ffn_norm2": "FFN2",
        "norm1.norm.": "attention_norm1.",
        ".norm1.": ".attention_norm1.",
        ".norm2.": ".attention_norm2.",
        "FFN1": "ffn_norm1",
        "FFN2": "ffn_norm2",
        "attn.norm_k": "attention.k_norm",
        "attn.norm_q": "attention.q_norm",
        "attn.to_out.0.": "attention.out.",
        "linear_1": "w1",
        "linear_2": "w2",
        "linear_3": "w3",
    }
    made = _renamed(state, names)
    return made | {"norm_final.weight": torch.ones(made["x_embedder.weight"].shape[0])}


def _ltx(state: State) -> State:
    names = {"proj_in": "patchify_proj", "time_embed": "adaln_single", "norm_q": "q_norm", "norm_k": "k_norm"}
    return _renamed(state, names)


def _hunyuan_video(state: State) -> State:
    state = dict(state)
    _swap(state, "norm_out.linear")
    single = {name: state.pop(name) for name in list(state) if name.startswith("single_transformer_blocks.")}
    _join(single, ("attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"), "linear1")
    names = {"single_transformer_blocks": "single_blocks", "proj_out": "linear2", "norm.linear": "modulation.linear"}
    single = _renamed(single, names | {"attn.norm_q": "q_norm", "attn.norm_k": "k_norm"})
    text = {name: state.pop(name) for name in list(state) if name.startswith("context_embedder.")}
    _join(text, ("attn.to_q", "attn.to_k", "attn.to_v"), "self_attn_qkv")
    names = {
        "token_refiner.refiner_blocks": "individual_token_refiner.blocks",
        "norm_out.linear": "adaLN_modulation.1",
        "time_text_embed.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_text_embed.text_embedder": "c_embedder",
        "context_embedder.proj_in": "txt_in.input_embedder",
        "context_embedder": "txt_in",
        "attn.to_out.0": "self_attn_proj",
        "ff.net.0.proj": "mlp.fc1",
        "ff.net.2": "mlp.fc2",
    }
    text = _renamed(text, names)
    _join(state, ("attn.to_q", "attn.to_k", "attn.to_v"), "img_attn_qkv")
    _join(state, ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"), "txt_attn_qkv")
    names = {
        "x_embedder": "img_in",
        "time_text_embed.timestep_embedder.linear_1": "time_in.mlp.0",
        "time_text_embed.timestep_embedder.linear_2": "time_in.mlp.2",
        "time_text_embed.guidance_embedder.linear_1": "guidance_in.mlp.0",
        "time_text_embed.guidance_embedder.linear_2": "guidance_in.mlp.2",
        "time_text_embed.text_embedder.linear_1": "vector_in.in_layer",
        "time_text_embed.text_embedder.linear_2": "vector_in.out_layer",
        "transformer_blocks": "double_blocks",
        "attn.norm_q": "img_attn_q_norm",
        "attn.norm_k": "img_attn_k_norm",
        "attn.to_out.0": "img_attn_proj",
        "attn.norm_added_q": "txt_attn_q_norm",
        "attn.norm_added_k": "txt_attn_k_norm",
        "attn.to_add_out": "txt_attn_proj",
        "norm1.linear": "img_mod.linear",
        "norm1_context.linear": "txt_mod.linear",
        "ff.net.0.proj": "img_mlp.fc1",
        "ff.net.2": "img_mlp.fc2",
        "ff_context.net.0.proj": "txt_mlp.fc1",
        "ff_context.net.2": "txt_mlp.fc2",
        "norm_out.linear": "final_layer.adaLN_modulation.1",
        "proj_out": "final_layer.linear",
    }
    return _renamed(state, names) | single | text


def _auraflow(state: State) -> State:
    state = dict(state)
    _swap(state, "norm_out.linear")
    single = {name: state.pop(name) for name in list(state) if name.startswith("single_transformer_blocks.")}
    feed = {"linear_1": "c_fc1", "linear_2": "c_fc2", "out_projection": "c_proj"}
    ones = {"attn.to_q": "attn.w1q", "attn.to_k": "attn.w1k", "attn.to_v": "attn.w1v", "attn.to_out.0": "attn.w1o"}
    names = {"single_transformer_blocks": "single_layers", "norm1.linear": "modCX.1", ".ff.": ".mlp."}
    single = _renamed(single, names | ones | feed)
    names = {
        "pos_embed.pos_embed": "positional_encoding",
        "pos_embed.proj": "init_x_linear",
        "time_step_proj.linear_1": "t_embedder.mlp.0",
        "time_step_proj.linear_2": "t_embedder.mlp.2",
        "context_embedder": "cond_seq_linear",
        "joint_transformer_blocks": "double_layers",
        "norm1.linear": "modX.1",
        "norm1_context.linear": "modC.1",
        ".ff.": ".mlpX.",
        ".ff_context.": ".mlpC.",
        "norm_out.linear": "modF.1",
        "proj_out": "final_linear",
        "attn.add_q_proj": "attn.w1q",
        "attn.add_k_proj": "attn.w1k",
        "attn.add_v_proj": "attn.w1v",
        "attn.to_add_out": "attn.w1o",
    }
    two = {ours: theirs.replace("w1", "w2") for ours, theirs in ones.items()}
    return _renamed(state, names | two | feed) | single


def _sana(state: State) -> State:
    state = dict(state)
    _join(state, ("attn1.to_q", "attn1.to_k", "attn1.to_v"), "attn.qkv")
    _join(state, ("attn2.to_k", "attn2.to_v"), "cross_attn.kv_linear")
    state["final_layer.scale_shift_table"] = state.pop("scale_shift_table")
    names = {
        "patch_embed.proj": "x_embedder.proj",
        "time_embed.emb.timestep_embedder.linear_1": "t_embedder.mlp.0",
        "time_embed.emb.timestep_embedder.linear_2": "t_embedder.mlp.2",
        "time_embed.linear": "t_block.1",
        "caption_projection.linear_1": "y_embedder.y_proj.fc1",
        "caption_projection.linear_2": "y_embedder.y_proj.fc2",
        "caption_norm": "attention_y_norm",
        "transformer_blocks": "blocks",
        "attn1.to_out.0": "attn.proj",
        "attn2.to_q": "cross_attn.q_linear",
        "attn2.to_out.0": "cross_attn.proj",
        "ff.conv_inverted": "mlp.inverted_conv.conv",
        "ff.conv_depth": "mlp.depth_conv.conv",
        "ff.conv_point": "mlp.point_conv.conv",
    }
    made = _renamed(state, {**names})
    made = {name.replace("proj_out", "final_layer.linear"): tensor for name, tensor in made.items()}
    return made | {"pos_embed": torch.zeros(1, 4, 32), "y_embedder.y_embedding": torch.zeros(300, 16)}


def original_vae(state: State, blocks: int = 4) -> State:
    """The tensors of an `AutoencoderKL` as the files of latent diffusion have them."""
    names = {
        "conv_norm_out": "norm_out",
        "mid_block.attentions.0.group_norm": "mid.attn_1.norm",
        "mid_block.attentions.0.to_q": "mid.attn_1.q",
        "mid_block.attentions.0.to_k": "mid.attn_1.k",
        "mid_block.attentions.0.to_v": "mid.attn_1.v",
        "mid_block.attentions.0.to_out.0": "mid.attn_1.proj_out",
        "mid_block.resnets.0": "mid.block_1",
        "mid_block.resnets.1": "mid.block_2",
        "downsamplers.0.conv": "downsample.conv",
        "upsamplers.0.conv": "upsample.conv",
        "conv_shortcut": "nin_shortcut",
        "down_blocks": "down",
        **{f"up_blocks.{i}": f"up.{blocks - 1 - i}" for i in range(blocks)},
        "resnets": "block",
    }
    made = _renamed(state, names)
    kernels = [name for name in made if ".attn_1." in name and name.endswith(".weight") and made[name].ndim == 2]
    return made | {name: made[name][:, :, None, None] for name in kernels}


def original_wan_vae(state: State) -> State:
    """The tensors of an `AutoencoderKLWan` of four levels with two residual blocks each, as Wan's own file has them."""
    ends = {
        "norm1.gamma": "residual.0.gamma",
        "conv1.": "residual.2.",
        "norm2.gamma": "residual.3.gamma",
        "conv2.": "residual.6.",
        "conv_shortcut": "shortcut",
    }
    middle = {
        "mid_block.resnets.0": "middle.0",
        "mid_block.attentions.0": "middle.1",
        "mid_block.resnets.1": "middle.2",
    }
    made = {}
    for name, tensor in state.items():
        new = name
        if name.startswith("decoder.up_blocks."):
            _, _, block, kind, number, *rest = name.split(".")
            place = 4 * int(block) + (3 if kind == "upsamplers" else int(number))
            new = ".".join(["decoder.upsamples", str(place), *rest])
        new = new.replace("encoder.down_blocks.", "encoder.downsamples.")
        for ours, theirs in middle.items():
            new = new.replace(ours, theirs)
        if "downsamples" in new or "upsamples" in new or "middle" in new:
            for ours, theirs in ends.items():
                new = new.replace("." + ours, "." + theirs)
        for side in ("encoder", "decoder"):
            new = new.replace(f"{side}.conv_in", f"{side}.conv1").replace(f"{side}.norm_out", f"{side}.head.0")
            new = new.replace(f"{side}.conv_out", f"{side}.head.2")
        if new.startswith("quant_conv"):
            new = new.replace("quant_conv", "conv1")
        made[new.replace("post_quant_conv", "conv2")] = tensor
    return made


# By the name of the family: its inverse, its converter, and numbers in that one for those of the tiny model.
_Numbers = Mapping[int, int]
ORIGINALS: dict[str, tuple[Callable[[State], State], str, _Numbers]] = {
    "flux": (_flux, "convert_flux_transformer_checkpoint_to_diffusers", {3072: 32}),
    "chroma": (_chroma, "convert_chroma_transformer_checkpoint_to_diffusers", {3072: 32}),
    "sd3": (_sd3, "convert_sd3_transformer_checkpoint_to_diffusers", {}),
    "wan": (_wan, "convert_wan_transformer_to_diffusers", {}),
    "qwenimage": (dict, "", {}),
    "flux2_klein": (_flux2, "convert_flux2_transformer_checkpoint_to_diffusers", {}),
    "zimage": (_z_image, "convert_z_image_transformer_checkpoint_to_diffusers", {}),
    "lumina2": (_lumina2, "convert_lumina2_to_diffusers", {2304: 24, 768: 8}),
    "ltx": (_ltx, "convert_ltx_transformer_checkpoint_to_diffusers", {}),
    "hunyuan_video": (_hunyuan_video, "convert_hunyuan_video_transformer_to_diffusers", {3072: 32}),
    "auraflow": (_auraflow, "convert_auraflow_transformer_checkpoint_to_diffusers", {}),
    "sana": (_sana, "convert_sana_transformer_to_diffusers", {}),
    "hidream": (dict, "convert_hidream_transformer_to_diffusers", {}),
}


def original(name: str, state: State) -> State:
    """The tensors of a family's transformer as its original files have them."""
    return {key: tensor.contiguous() for key, tensor in ORIGINALS[name][0](state).items()}


def converted(name: str, tensors: State) -> State:
    """What diffusers' converter makes of the tensors of an original file."""
    _, converter, numbers = ORIGINALS[name]
    if not converter:
        return dict(tensors)
    function = getattr(single_file_utils, converter)
    code = _with_numbers(function.__code__, numbers)
    made: Any = types.FunctionType(code, function.__globals__, argdefs=function.__defaults__)
    return made(dict(tensors))


def _with_numbers(code: types.CodeType, numbers: _Numbers) -> types.CodeType:
    def changed(value: Any) -> Any:
        if isinstance(value, types.CodeType):
            return _with_numbers(value, numbers)
        return numbers.get(value, value) if type(value) is int else value

    return code.replace(co_consts=tuple(changed(value) for value in code.co_consts))


# What ComfyUI calls layers of HunyuanVideo, by a part of their original names.
_IN_COMFYUI = (
    ("txt_in.t_embedder.mlp.0.", "txt_in.t_embedder.in_layer."),
    ("txt_in.t_embedder.mlp.2.", "txt_in.t_embedder.out_layer."),
    ("txt_in.c_embedder.linear_1.", "txt_in.c_embedder.in_layer."),
    ("txt_in.c_embedder.linear_2.", "txt_in.c_embedder.out_layer."),
    ("_mod.linear.", "_mod.lin."),
    ("_attn_qkv.", "_attn.qkv."),
    ("mlp.fc1.", "mlp.0."),
    ("mlp.fc2.", "mlp.2."),
    ("_attn_q_norm.", "_attn.norm.query_norm."),
    ("_attn_k_norm.", "_attn.norm.key_norm."),
    (".q_norm.", ".norm.query_norm."),
    (".k_norm.", ".norm.key_norm."),
    ("_attn_proj.", "_attn.proj."),
    (".modulation.linear.", ".modulation.lin."),
    ("_in.mlp.0.", "_in.in_layer."),
    ("_in.mlp.2.", "_in.out_layer."),
)


def in_comfyui(name: str) -> str:
    """The name of a weight of HunyuanVideo in files that ComfyUI writes, or was trained in."""
    for theirs, ours in _IN_COMFYUI:
        name = name.replace(theirs, ours)
    return name
