"""Tiny models as the pack has the published ones, and as people have their files: no base beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from . import state_of, transformer_file
from .original_names import original_vae

# Which tokenizers the tiny models have, by kind, and what the families' files are called by their weights.
TOKENIZERS = {
    "flux": ("FLUX.1", {"tokenizer": "clip", "tokenizer_2": "t5"}),
    "sd3": ("Stable Diffusion 3", {"tokenizer": "clip", "tokenizer_2": "clip", "tokenizer_3": "t5"}),
    "qwenimage": ("Qwen-Image", {"tokenizer": "qwen"}),
    "zimage": ("Z-Image", {"tokenizer": "qwen"}),
    "chroma": ("Chroma", {"tokenizer": "t5"}),
    "wan": ("Wan", {"tokenizer": "umt5"}),
    "hidream": (
        "HiDream-I1",
        {"tokenizer": "clip", "tokenizer_3": "t5", "tokenizer_4": "llama", "tokenizer_2": "clip"},
    ),
}


def facts_of(name: str, folder: Path, at: Path, **told: Any) -> None:
    """A tiny model as the pack has the published ones: configs alone, those of parts apart."""
    title, kinds = TOKENIZERS[name]
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    parts = [key for key in index if key.startswith(("text_encoder", "vae")) and (folder / key).is_dir()]
    for key in parts:
        (at / "parts" / key).mkdir(parents=True)
        shutil.copy(folder / key / "config.json", at / "parts" / key)
    if name == "qwenimage":  # of Qwen2.5-VL the model of text alone
        index["text_encoder"] = ["transformers", "Qwen2_5_VLTextModel"]
        path = at / "parts" / "text_encoder" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text("utf-8"))["text_config"]), "utf-8")
    model = at / "models" / name
    for key in ("scheduler", "transformer"):
        shutil.copytree(folder / key, model / key, ignore=shutil.ignore_patterns("*.safetensors"))
    index |= {"_file": {"title": title, **told}, "_parts": {key: [key, f"{key}.safetensors"] for key in parts}}
    index["_tokenizers"] = {key: [kind, {}] for key, kind in kinds.items()}
    (model / "model_index.json").write_text(json.dumps(index), "utf-8")


def files_of(name: str, folder: Path, at: Path) -> dict[str, Any]:
    """The parts of a tiny model as single files, and folders of its tokenizers."""
    encoders = sorted(path.name for path in folder.glob("text_encoder*"))
    for key in encoders:
        save_file(state_of(folder, key), at / f"{key}.safetensors")
    vae = state_of(folder, "vae")
    save_file(original_vae(vae) if name in ("flux", "sd3") else vae, at / "vae.safetensors")
    return {
        "path": transformer_file(name, folder, at / "model.safetensors", "model.diffusion_model."),
        "text_encoders": [at / f"{key}.safetensors" for key in encoders],
        "vae": at / "vae.safetensors",
        "tokenizers": {kind: folder / key for key, kind in TOKENIZERS[name][1].items()},
    }
