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


# By the name of the family: its inverse, its converter, and numbers in that one for those of the tiny model.
_Numbers = Mapping[int, int]
ORIGINALS: dict[str, tuple[Callable[[State], State], str, _Numbers]] = {
    "flux": (_flux, "convert_flux_transformer_checkpoint_to_diffusers", {3072: 32}),
    "chroma": (_chroma, "convert_chroma_transformer_checkpoint_to_diffusers", {3072: 32}),
    "sd3": (_sd3, "convert_sd3_transformer_checkpoint_to_diffusers", {}),
    "wan": (_wan, "convert_wan_transformer_to_diffusers", {}),
    "qwenimage": (dict, "", {}),
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
