"""Tiny models as the pack has the published ones, and as people have their files: no base beside them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from . import state_of, transformer_file
from .original_names import original_vae
from .original_vaes import original_dc_vae, original_flux2_vae

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
    "lumina2": ("Lumina Image 2.0", {"tokenizer": "gemma"}),
    "sana": ("Sana", {"tokenizer": "gemma"}),
    "auraflow": ("AuraFlow", {"tokenizer": "pile_t5"}),
    "ltx": ("LTX-Video", {"tokenizer": "t5"}),
    "hunyuan_video": ("HunyuanVideo", {"tokenizer": "llama", "tokenizer_2": "clip"}),
    "flux2_klein": ("FLUX.2", {"tokenizer": "qwen"}),
}
# Those that start from pictures: the family whose names and tokenizers they have, and weights as it has them.
PICTURED = {
    "flux_fill": "flux", "qwen_edit": "qwenimage", "qwen_edit_plus": "qwenimage", "wan_i2v": "wan", "wan_flf": "wan",
}  # fmt: skip
_VAES = {
    **dict.fromkeys(("flux", "sd3", "lumina2", "auraflow"), original_vae),
    "sana": original_dc_vae,
    "flux2_klein": original_flux2_vae,
}
_PARTS = ("text_encoder", "vae", "image_encoder")
_ALONE = {  # models of text alone, of which the folder has more
    "qwenimage": (["transformers", "Qwen2_5_VLTextModel"], "text_config"),
    "flux2_klein": (["transformers", "Qwen3Model"], None),
    "qwen_edit": (["transformers", "Qwen2_5_VLModel"], None),
    "qwen_edit_plus": (["transformers", "Qwen2_5_VLModel"], None),
}


def facts_of(name: str, folder: Path, at: Path, **told: Any) -> None:
    """A tiny model as the pack has the published ones: configs alone, those of parts apart."""
    title, kinds = TOKENIZERS[PICTURED.get(name, name)]
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    parts = [key for key in index if key.startswith(_PARTS) and (folder / key).is_dir()]
    for key in parts:
        (at / "parts" / key).mkdir(parents=True)
        shutil.copy(folder / key / "config.json", at / "parts" / key)
    if name in _ALONE:
        index["text_encoder"], inner = _ALONE[name]
        path = at / "parts" / "text_encoder" / "config.json"
        config = json.loads(path.read_text("utf-8"))
        path.write_text(json.dumps(config[inner] if inner else config), "utf-8")
    model = at / "models" / name
    for key in {"scheduler", "transformer", "image_processor"} & index.keys():
        shutil.copytree(folder / key, model / key, ignore=shutil.ignore_patterns("*.safetensors"))
    index |= {"_file": {"title": title, **told}, "_parts": {key: [key, f"{key}.safetensors"] for key in parts}}
    index["_tokenizers"] = {key: [kind, {}] for key, kind in kinds.items()}
    if "processor" in index:
        (at / "parts" / "seeing").mkdir()
        config = json.loads((folder / "processor" / "processor_config.json").read_text("utf-8"))["image_processor"]
        (at / "parts" / "seeing" / "preprocessor_config.json").write_text(json.dumps(config), "utf-8")
        index |= {
            "processor": ["transformers", "Qwen2VLProcessor"],
            "_processors": {"processor": ["seeing", "tokenizer"]},
        }
    (model / "model_index.json").write_text(json.dumps(index), "utf-8")


def files_of(name: str, folder: Path, at: Path) -> dict[str, Any]:
    """The parts of a tiny model as single files, and folders of its tokenizers."""
    encoders = sorted(path.name for path in folder.glob("text_encoder*"))
    for key in encoders:
        save_file(state_of(folder, key), at / f"{key}.safetensors")
    family = PICTURED.get(name, name)
    vae = _VAES.get(family, dict)(state_of(folder, "vae"))
    save_file({key: tensor.contiguous() for key, tensor in vae.items()}, at / "vae.safetensors")
    seeing = {}
    if (folder / "image_encoder").is_dir():
        state = {f"vision_model.{key}": value for key, value in state_of(folder, "image_encoder").items()}
        state = {key.replace("vision_model.vision_model.", "vision_model."): value for key, value in state.items()}
        more = {"visual_projection.weight": torch.ones(4, 4), "vision_model.embeddings.position_ids": torch.arange(9)}
        save_file(state | more, at / "clip_vision.safetensors")
        seeing = {"image_encoder": at / "clip_vision.safetensors"}
    return {
        "path": transformer_file(family, folder, at / "model.safetensors", "model.diffusion_model."),
        "text_encoders": [at / f"{key}.safetensors" for key in encoders],
        "vae": at / "vae.safetensors",
        "tokenizers": {kind: folder / key for key, kind in TOKENIZERS[family][1].items()},
        **seeing,
    }
