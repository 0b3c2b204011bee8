"""The names of text encoders in GGUF files, which are llama.cpp's, as transformers has them.

Those of CLIP are clip.cpp's: llama.cpp has none for it. Tools for pictures keep transformers' own names instead.
Of architectures whose weights llama.cpp stores as they are; with rows in another order, as Llama's queries and keys,
where the two halves of each head take turns; or with 1 added, as Gemma's norms.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch

from ....memory.codecs.raw import Raw
from ....memory.weights.encoding import EncodedWeight
from ....memory.weights.gguf_file import read_gguf_header
from ..rows import Rows, Run

_T5 = (
    ("enc.output_norm.", "encoder.final_layer_norm."),
    ("enc.blk.", "encoder.block."),
    ("dec.", "decoder."),
    ("token_embd.", "shared."),
    (".attn_rel_b.", ".layer.0.SelfAttention.relative_attention_bias."),
    (".attn_norm.", ".layer.0.layer_norm."),
    *((f".attn_{part}.", f".layer.0.SelfAttention.{part}.") for part in "qkvo"),
    (".ffn_norm.", ".layer.1.layer_norm."),
    (".ffn_gate.", ".layer.1.DenseReluDense.wi_0."),
    (".ffn_up.", ".layer.1.DenseReluDense.wi_1."),
    (".ffn_down.", ".layer.1.DenseReluDense.wo."),
)
_QWEN = (
    ("output_norm.", "norm."),
    ("output.", "lm_head."),
    ("token_embd.", "embed_tokens."),
    ("blk.", "layers."),
    (".attn_norm.", ".input_layernorm."),
    (".attn_q_norm.", ".self_attn.q_norm."),
    (".attn_k_norm.", ".self_attn.k_norm."),
    *((f".attn_{part}.", f".self_attn.{part}_proj.") for part in "qkv"),
    (".attn_output.", ".self_attn.o_proj."),
    (".ffn_norm.", ".post_attention_layernorm."),
    *((f".ffn_{part}.", f".mlp.{part}_proj.") for part in ("gate", "up", "down")),
)
_GEMMA = (
    *(each for each in _QWEN if each[0] not in ("output.", ".ffn_norm.")),
    (".post_attention_norm.", ".post_attention_layernorm."),
    (".ffn_norm.", ".pre_feedforward_layernorm."),
    (".post_ffw_norm.", ".post_feedforward_layernorm."),
)
_CLIP = (
    ("t.token_embd.", "embeddings.token_embedding."),
    ("t.position_embd.", "embeddings.position_embedding."),
    ("t.post_ln.", "final_layer_norm."),
    ("t.blk.", "encoder.layers."),
    ("v.", "vision_model."),
    *((f".ln{at}.", f".layer_norm{at}.") for at in (1, 2)),
    *((f".attn_{part}.", f".self_attn.{part}_proj.") for part in ("q", "k", "v", "out")),
    (".ffn_down.", ".mlp.fc1."),  # its names are the other way round
    (".ffn_up.", ".mlp.fc2."),
)
_EMBEDDING = "token_embd.weight"
_CLIP_EMBEDDING = f"t.{_EMBEDDING}"
_ARCHITECTURES = {"t5": _T5, "t5encoder": _T5, "qwen2": _QWEN, "qwen2vl": _QWEN, "qwen3": _QWEN, "llama": _QWEN}
_ARCHITECTURES |= {"gemma2": _GEMMA, "gemma3": _GEMMA}
_CLIPS = "clip"
# Of what llama.cpp stores as it is: by the `model_type` of transformers, where a file does not say what it is of.
_UNALTERED = {"t5": "t5", "umt5": "t5", "qwen": "qwen3", "clip": _CLIPS}
_ADDED = ("gemma2", "gemma3")
_MIXED = {"llama": {"q_proj.weight": "num_attention_heads", "k_proj.weight": "num_key_value_heads"}}


@dataclass(frozen=True)
class LessOne(Raw):
    """A plain tensor to which 1 was added. It is taken off in 32 bits."""

    name: ClassVar[str] = "raw less 1"
    chunk_bytes: ClassVar[int] = 4

    def _decode(self, parts: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        out.copy_(parts[0].to(torch.float32, copy=True).sub_(1))


def architecture_of(path: Path, model_type: str) -> str:
    """Return the architecture of a GGUF file that has llama.cpp's names, for an encoder of that `model_type`.

    ValueError, in one line, for an unknown one, and where the rows may be in another order, which no name tells.
    """
    header = read_gguf_header(path)
    what = str(header.facts.get("general.architecture", ""))
    if what in _ARCHITECTURES:
        return what
    if what == _CLIPS and _CLIP_EMBEDDING not in header.tensors:
        raise ValueError(f"{path} is GGUF of a tower for pictures, and reads no text. Get the text encoder's own file.")
    unaltered = next((of for start, of in _UNALTERED.items() if model_type.startswith(start)), "")
    if unaltered and any(name.endswith(_EMBEDDING) for name in header.tensors):
        return unaltered
    if not what:
        raise ValueError(f"{path} is GGUF without general.architecture, so its rows may be in any order. Get another.")
    known = ", ".join((*_ARCHITECTURES, "CLIP"))
    raise ValueError(f"{path} is GGUF of {what[:40]!r}; of text encoders these are read: {known}. Get safetensors.")


def names_in_gguf(architecture: str, names: Collection[str]) -> dict[str, str]:
    """Map the names in a GGUF file to transformers' names."""
    made = {}
    embeddings = [name for name in names if name.endswith(_EMBEDDING)]
    prefix = embeddings[0].removesuffix(_EMBEDDING).removesuffix("t.") if len(embeddings) == 1 else ""
    for full in names:
        name = full.removeprefix(prefix)
        for theirs, ours in _CLIP if architecture == _CLIPS else _ARCHITECTURES[architecture]:
            at_start = not theirs.startswith(".")
            if at_start and name.startswith(theirs):
                name = ours + name.removeprefix(theirs)
            elif not at_start:
                name = name.replace(theirs, ours)
        made[full] = name
    return made


def weight_in_gguf(architecture: str, name: str, weight: EncodedWeight) -> EncodedWeight:
    """Convert a weight of a GGUF file to transformers' form. Raises ValueError, in a few words, if it cannot be."""
    if architecture not in _ADDED or not name.endswith("norm.weight"):
        return weight
    if not isinstance(weight.codec, Raw):
        raise ValueError(f"{weight.codec.name}, where norms are plain")
    codec = LessOne(weight.codec.shape, weight.codec.dtype, weight.codec.stored)
    return replace(weight, codec=codec)


def rows_in_gguf(architecture: str, name: str, rows: Rows, config: Any) -> Rows:
    """Reorder a weight's rows from GGUF's order to transformers'. `config` has the number of heads.

    ValueError, in a few words, for rows that are no heads.
    """
    for end, heads in _MIXED.get(architecture, {}).items():
        if name.endswith(end):
            return _in_halves(rows, getattr(config, heads))
    return rows


def _in_halves(rows: Rows, heads: int) -> Rows:
    """Put the even rows of each head before the odd ones."""
    size, left = divmod(rows.shape[0], heads)
    if left or size % 2:
        raise ValueError(f"{rows.shape[0]} rows, which are no {heads} heads")
    stored = rows.runs[0].name
    order = (head * size + at for head in range(heads) for half in (0, 1) for at in range(half, size, 2))
    return Rows(rows.shape, tuple(Run(stored, at, at + 1) for at in order))
