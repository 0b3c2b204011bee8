"""A tiny Pyramid-Flow of either kind under the published names, in its folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import places
import torch
import transformers
from tiny_parts import tokenizer

DATA = places.DATA / "pyramid_flow"
CLASSES = {"flux": "PyramidFluxTransformer", "mmdit": "PyramidDiffusionMMDiT"}
TEXT_CHANNELS, POOLED = 24, 20  # of the golden transformers


def clip(width: int, projected: bool) -> Any:
    config = transformers.CLIPTextConfig(
        vocab_size=128, hidden_size=width, projection_dim=width, intermediate_size=24, num_hidden_layers=2,
        num_attention_heads=2, max_position_embeddings=77, bos_token_id=0, eos_token_id=3,
    )  # fmt: skip
    return (transformers.CLIPTextModelWithProjection if projected else transformers.CLIPTextModel)(config).eval()


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=128, d_model=TEXT_CHANNELS, d_kv=8, d_ff=40, num_layers=2, num_heads=4,
        feed_forward_proj="gated-gelu",
    )  # fmt: skip
    return transformers.T5EncoderModel(config).eval()


def save(kind: str, folder: Path, variants: tuple[str, ...] = ("384p",)) -> Path:
    """Write the folders: a transformer for each variant, the VAE, the text encoders with their tokenizers."""
    for variant in variants:
        _copy(kind, folder / f"diffusion_transformer_{variant}", CLASSES[kind])
    _copy("vae", folder / "causal_video_vae", "CausalVideoVAE")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        encoders = [clip(POOLED, False), t5()] if kind == "flux" else [clip(10, True), clip(10, True), t5()]
    for number, encoder in enumerate(encoders, 1):
        suffix = f"_{number}" if number > 1 else ""
        encoder.save_pretrained(folder / f"text_encoder{suffix}")
        tokenizer(77 if number < len(encoders) else 512).save_pretrained(folder / f"tokenizer{suffix}")
    return folder


def _copy(name: str, folder: Path, cls: str) -> None:
    folder.mkdir(parents=True)
    config = json.loads((DATA / f"{name}.config.json").read_text("utf-8"))
    (folder / "config.json").write_text(json.dumps({"_class_name": cls, **config}), encoding="utf-8")
    shutil.copy(DATA / f"{name}.safetensors", folder / "diffusion_pytorch_model.safetensors")
