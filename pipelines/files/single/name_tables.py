"""Converters for models that diffusers has none for: which of its names each original name becomes.

A table, not a program: names are renamed, fused rows are split, parts are joined, and the halves of a modulation are
swapped. What a table does not name keeps its name, and whoever reads the file says that no class has a place for it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

_BLOCK = re.compile(r"(?<=blocks\.)\d+")  # the number of a block
_LAST = "final_layer.adaLN_modulation.1"


@dataclass(frozen=True)
class NameTable:
    """Names of layers, with `*` for a block's number, by the original ones; weights, biases and scales follow them.

    Rows of a layer with several names are split: into equal parts, or of four names into three of as many rows as the
    weight `width` has, and the rest. Layers with the same name are joined in the order of the table. The halves of
    those in `swapped` change places: diffusers has a scale first, and the original layers a shift.
    """

    names: Mapping[str, str | tuple[str, ...]]
    width: str = ""
    swapped: frozenset[str] = frozenset()

    def __call__(self, weights: Mapping[str, Any], config: Any = None) -> dict[str, Any]:
        """Return weights by diffusers' names. KeyError for a missing `width`, ValueError for rows of another count."""
        found: dict[str, list[tuple[int, Any]]] = {}
        made = {}
        for name, value in weights.items():
            layer, _, kind = name.rpartition(".")
            block = _BLOCK.search(layer)
            general = _BLOCK.sub("*", layer, count=1)
            if general not in self._order:
                made[name] = value
                continue
            order, ours = self._order[general]
            kind = "weight" if kind == "scale" else kind  # of norms
            for each, part in zip(ours, self._parts(value, len(ours), weights), strict=True):
                own = each.replace("*", block[0]) if block else each
                found.setdefault(f"{own}.{kind}", []).append((order, part))
        for name, parts in found.items():
            values = [value for _, value in sorted(parts, key=lambda pair: pair[0])]
            if name.rpartition(".")[0] in self.swapped:
                values = [half for value in values for half in value.chunk(2)[::-1]]
            made[name] = torch.cat(values) if len(values) > 1 else values[0]
        return made

    @cached_property
    def _order(self) -> dict[str, tuple[int, tuple[str, ...]]]:
        rows = ((theirs, (ours,) if isinstance(ours, str) else ours) for theirs, ours in self.names.items())
        return {theirs: (order, ours) for order, (theirs, ours) in enumerate(rows)}

    def _parts(self, value: Any, count: int, weights: Mapping[str, Any]) -> Sequence[Any]:
        if count == 1:
            return [value]
        if count < 4:
            return value.chunk(count)  # type: ignore[no-any-return]
        size = weights[self.width].shape[0]
        return value.split([size, size, size, value.shape[0] - 3 * size])  # type: ignore[no-any-return]


def _in_order(start: str, *names: str) -> tuple[str, ...]:
    return tuple(start + name for name in names)


_STREAMS = {  # the two streams of a block: what diffusers calls the parts of each
    "img": ("norm1", ("to_q", "to_k", "to_v"), "to_out.0", "norm_q", "norm_k", "ff"),
    "txt": (
        "norm1_context", ("add_q_proj", "add_k_proj", "add_v_proj"), "to_add_out", "norm_added_q", "norm_added_k",
        "ff_context",
    ),
}  # fmt: skip


def _flux(time: str, mlp: Mapping[str, str]) -> dict[str, str | tuple[str, ...]]:
    """Return the names of FLUX.1's layout without its pooled text; `mlp` has those of the layers of feed-forwards."""
    made: dict[str, str | tuple[str, ...]] = {
        "img_in": "x_embedder",
        "txt_in": "context_embedder",
        "time_in.in_layer": f"{time}.linear_1",
        "time_in.out_layer": f"{time}.linear_2",
        _LAST: "norm_out.linear",
        "final_layer.linear": "proj_out",
    }
    start = "transformer_blocks.*."
    for stream, (norm, joined, out, norm_q, norm_k, forward) in _STREAMS.items():
        theirs = f"double_blocks.*.{stream}_"
        made |= {
            f"{theirs}mod.lin": f"{start}{norm}.linear",
            f"{theirs}attn.qkv": _in_order(f"{start}attn.", *joined),
            f"{theirs}attn.proj": f"{start}attn.{out}",
            f"{theirs}attn.norm.query_norm": f"{start}attn.{norm_q}",
            f"{theirs}attn.norm.key_norm": f"{start}attn.{norm_k}",
            **{f"{theirs}mlp.{layer}": f"{start}{forward}.{ours}" for layer, ours in mlp.items()},
        }
    start = "single_transformer_blocks.*."
    return made | {
        "single_blocks.*.modulation.lin": f"{start}norm.linear",
        "single_blocks.*.linear1": _in_order(start, "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "single_blocks.*.linear2": f"{start}proj_out",
        "single_blocks.*.norm.query_norm": f"{start}attn.norm_q",
        "single_blocks.*.norm.key_norm": f"{start}attn.norm_k",
    }


def _hunyuan(time: str) -> dict[str, str | tuple[str, ...]]:
    """Return the names that Hunyuan's models since HunyuanImage 2.1 share, which begin their embedders of time so."""
    made: dict[str, str | tuple[str, ...]] = {
        "img_in.proj": "x_embedder.proj",
        "txt_in.input_embedder": "context_embedder.proj_in",
        _LAST: "norm_out.linear",
        "final_layer.linear": "proj_out",
        "byt5_in.layernorm": "context_embedder_2.norm",
        **{f"byt5_in.fc{number}": f"context_embedder_2.linear_{number}" for number in (1, 2, 3)},
    }
    for number, layer in ((1, 0), (2, 2)):
        text = "context_embedder.time_text_embed"
        made |= {
            f"time_in.mlp.{layer}": f"{time}.timestep_embedder.linear_{number}",
            f"time_r_in.mlp.{layer}": f"{time}.timestep_embedder_r.linear_{number}",
            f"guidance_in.mlp.{layer}": f"{time}.guidance_embedder.linear_{number}",
            f"txt_in.t_embedder.mlp.{layer}": f"{text}.timestep_embedder.linear_{number}",
            f"txt_in.c_embedder.linear_{number}": f"{text}.text_embedder.linear_{number}",
        }
    theirs, ours = "txt_in.individual_token_refiner.blocks.*.", "context_embedder.token_refiner.refiner_blocks.*."
    made |= {
        f"{theirs}norm1": f"{ours}norm1",
        f"{theirs}norm2": f"{ours}norm2",
        f"{theirs}self_attn_qkv": _in_order(f"{ours}attn.", "to_q", "to_k", "to_v"),
        f"{theirs}self_attn_proj": f"{ours}attn.to_out.0",
        f"{theirs}mlp.fc1": f"{ours}ff.net.0.proj",
        f"{theirs}mlp.fc2": f"{ours}ff.net.2",
        f"{theirs}adaLN_modulation.1": f"{ours}norm_out.linear",
    }
    for stream, (norm, joined, out, norm_q, norm_k, forward) in _STREAMS.items():
        theirs, ours = f"double_blocks.*.{stream}_", "transformer_blocks.*."
        made |= {
            f"{theirs}mod.linear": f"{ours}{norm}.linear",
            f"{theirs}attn_qkv": _in_order(f"{ours}attn.", *joined),
            **{f"{theirs}attn_{each}": f"{ours}attn.{name}" for each, name in zip("qkv", joined, strict=True)},
            f"{theirs}attn_q_norm": f"{ours}attn.{norm_q}",
            f"{theirs}attn_k_norm": f"{ours}attn.{norm_k}",
            f"{theirs}attn_proj": f"{ours}attn.{out}",
            f"{theirs}mlp.fc1": f"{ours}{forward}.net.0.proj",
            f"{theirs}mlp.fc2": f"{ours}{forward}.net.2",
        }
    return made


_SWAPPED = frozenset({"norm_out.linear"})
_SINGLE = "single_transformer_blocks.*."

# Gated feed-forwards: the value's layer before the gate's, as diffusers' SwiGLU reads them.
OVIS = NameTable(
    _flux("timestep_embedder", {"up_proj": "net.0.proj", "gate_proj": "net.0.proj", "down_proj": "net.2"})
    | {"txt_norm": "context_embedder_norm"},
    "img_in.weight",
    _SWAPPED,
)
LONGCAT = NameTable(_flux("time_embed.timestep_embedder", {"0": "net.0.proj", "2": "net.2"}), "img_in.weight", _SWAPPED)
HUNYUAN_IMAGE = NameTable(
    _hunyuan("time_guidance_embed")
    | {
        "single_blocks.*.modulation.linear": f"{_SINGLE}norm.linear",
        "single_blocks.*.linear1": _in_order(_SINGLE, "attn.to_q", "attn.to_k", "attn.to_v", "proj_mlp"),
        "single_blocks.*.linear2": f"{_SINGLE}proj_out",
        "single_blocks.*.q_norm": f"{_SINGLE}attn.norm_q",
        "single_blocks.*.k_norm": f"{_SINGLE}attn.norm_k",
    },
    "img_in.proj.bias",
    _SWAPPED,
)
HUNYUAN_VIDEO_15 = NameTable(
    _hunyuan("time_embed")
    | {
        "cond_type_embedding": "cond_type_embed",
        "vision_in.proj.0": "image_embedder.norm_in",
        "vision_in.proj.1": "image_embedder.linear_1",
        "vision_in.proj.3": "image_embedder.linear_2",
        "vision_in.proj.4": "image_embedder.norm_out",
    },
    "img_in.proj.bias",
    _SWAPPED,
)
