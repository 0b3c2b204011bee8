"""Folders of a tiny HiDream-I1: whole, or as its repositories hold it, with Llama in a folder of its own."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import diffusers
import tiny
import transformers
from ballast.pipelines.models.hidream.variants import VARIANTS

LLAMA_PARTS = ("text_encoder_4", "tokenizer_4")
PUBLISHED_GIB = {"text_encoder": 0.23, "text_encoder_2": 1.29, "text_encoder_3": 8.87, "text_encoder_4": 13.98}


def scheduler_of(variant: str) -> Any:
    chosen = VARIANTS[variant]
    return getattr(diffusers, chosen.scheduler)(**chosen.scheduler_config())


def complete(source: Path, folder: Path, variant: str | None = None) -> Path:
    """A copy of the tiny pipeline, all its parts in one folder, with the scheduler of a variant."""
    shutil.copytree(source, folder)
    if variant:
        scheduler = scheduler_of(variant)
        shutil.rmtree(folder / "scheduler")
        scheduler.save_pretrained(folder / "scheduler")
        write_index(folder, {"scheduler": ["diffusers", type(scheduler).__name__]})
    return folder


def write_index(folder: Path, entries: dict[str, Any], *without: str) -> None:
    path = folder / "model_index.json"
    index = {k: v for k, v in json.loads(path.read_text("utf-8")).items() if k not in without}
    path.write_text(json.dumps(index | entries), encoding="utf-8")


def published(source: Path, root: Path, variant: str | None = None) -> tuple[Path, Path]:
    """The same as its repositories hold it: the pipeline without its fourth encoder, and Llama in a folder."""
    folder, llama = complete(source, root / "model", variant), root / "Meta-Llama-3.1-8B-Instruct"
    write_index(folder, {}, *LLAMA_PARTS)
    shutil.move(folder / "text_encoder_4", llama)
    shutil.copytree(folder / "tokenizer_4", llama, dirs_exist_ok=True)
    shutil.rmtree(folder / "tokenizer_4")
    return folder, llama


def in_proportion(root: Path) -> tuple[Path, Path]:
    """The tiny pipeline with its encoders in the proportions of the published ones, by their bytes."""
    pipe: Any = tiny.FAMILIES["hidream"].build()
    clip = {"vocab_size": 128, "hidden_size": 32, "projection_dim": 32, "num_attention_heads": 4}
    clip |= {"max_position_embeddings": 248, "bos_token_id": 0, "eos_token_id": 3}
    llama = {**pipe.text_encoder_4.config.to_dict(), "num_hidden_layers": 32, "intermediate_size": 3160}
    t5 = {**pipe.text_encoder_3.config.to_dict(), "num_layers": 24, "d_ff": 1299}
    sizes = {
        "text_encoder": transformers.CLIPTextConfig(**clip, num_hidden_layers=12, intermediate_size=20),
        "text_encoder_2": transformers.CLIPTextConfig(**clip, num_hidden_layers=32, intermediate_size=143),
    }
    for name, config in sizes.items():
        pipe.register_modules(**{name: transformers.CLIPTextModelWithProjection(config).eval()})
    pipe.register_modules(text_encoder_3=transformers.T5EncoderModel(transformers.T5Config(**t5)).eval())
    pipe.register_modules(text_encoder_4=transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)).eval())
    pipe.save_pretrained(root / "source")
    return published(root / "source", root)
