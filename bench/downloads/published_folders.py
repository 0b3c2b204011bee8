"""Folders of the published models whose configs come with the pack: real headers, zeros that take no disk."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import nn
from transformers import PreTrainedModel

from ...pipelines.files.components import read_model_index
from ...pipelines.files.single.published import FACTS
from ...pipelines.files.trust import component_class
from . import full_size

MODELS = sorted(folder.name for folder in (FACTS / "models").iterdir())
MARKS = {"qwen": {"<|vision_start|>": 151652, "<|vision_end|>": 151653, "<|image_pad|>": 151655}}  # by kind
ONE_FILE = "1TB"  # a shard, which is more than a part has
TOKENIZER = ["transformers", "PreTrainedTokenizerFast"]  # in place of theirs, which do not come with the pack


def build(name: str, folder: Path, transformer: Mapping[str, Any] | None = None, characters: int = 1) -> Path:
    """Write one of MODELS with tokenizers of one token for so many characters, and return the folder.

    `transformer` are fields of its config for a model of the family that has other sizes.
    """
    index = read_model_index(FACTS / "models" / name)
    settled = {**index["_parts"], **index.get("_processors", {})}
    shared = {part: FACTS / "parts" / where for part, (where, _) in settled.items()}
    tokenizers = {
        part: full_size.tokenizer(settings.get("model_max_length", 512), None, True, characters, MARKS.get(kind))
        for part, (kind, settings) in index["_tokenizers"].items()
    }
    kept = {key: value for key, value in index.items() if key == "_class_name" or not key.startswith("_")}
    for part in [key for key, value in kept.items() if isinstance(value, list) and len(value) == 2 and value[0]]:
        at = shared.get(part, FACTS / "models" / name / part)
        if part in tokenizers:
            tokenizers[part].save_pretrained(folder / part)
            kept[part] = TOKENIZER
            continue
        cls: Any = component_class(*kept[part])
        if issubclass(cls, nn.Module):
            config = json.loads((at / "config.json").read_text("utf-8"))
            config |= (transformer or {}) if part.startswith("transformer") else {}
            full_size.save(_empty(cls, config), folder / part, torch.bfloat16, ONE_FILE)
        else:
            (folder / part).mkdir(parents=True)
            for file in at.iterdir():
                (folder / part / file.name).write_bytes(file.read_bytes())
    (folder / "model_index.json").write_text(json.dumps(kept), "utf-8")
    return folder


def opening(name: str, folder: Path) -> dict[str, Any]:
    """Return the arguments of `open_pipeline` for a folder of `build`: itself, or files for what has a processor.

    In a folder the processor of Qwen2.5-VL needs torchvision, behind files it does not.
    """
    index = read_model_index(FACTS / "models" / name)
    if not index.get("_processors"):
        return {"path": folder}
    files = {path.parent.name: path for path in folder.glob("*/*") if path.suffix in (".safetensors", ".gguf")}
    transformer = files.pop("transformer")
    return {
        "path": transformer.rename(transformer.with_stem(name)),
        "vae": files.pop("vae"),
        "text_encoders": sorted(files.values()),
        "tokenizers": {kind: folder / part for part, (kind, _) in index["_tokenizers"].items()},
    }


def _empty(cls: Any, config: dict[str, Any]) -> nn.Module:
    if issubclass(cls, PreTrainedModel):
        return full_size.empty(cls, config)
    with init_empty_weights(include_buffers=False):
        return cls.from_config(config)
