"""The templates that take model files, planned at the published sizes: what their thumbnails show."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import ballast
import diffusers
import pytest
import thumbnails
import tiny
import torch
import transformers
from ballast.bench.downloads import full_size
from ballast.memory.rates import ASSUMED
from ballast.pipelines.files.components import read_model_index
from ballast.pipelines.files.single import published
from ballast.pipelines.files.trust import component_class
from gguf import GGMLQuantizationType as Type
from host import find_host
from selection import few
from test_weights_plans import quantized

pytestmark = pytest.mark.long

PICTURE = torch.zeros(1, 480, 832, 3)
# By template: the model, what is asked, the budgets, and the files of fp8.
TEMPLATES: dict[str, tuple[str, dict[str, Any], tuple[int, int], dict[str, str]]] = {
    "7 Flux from GGUF files": (
        "FLUX.1-dev",
        {"width": 1024, "height": 1024},
        (4, 8),
        {"text_encoder_2": "t5xxl_fp8_e4m3fn_scaled"},
    ),
    "8 Wan 2.2 picture to video": (
        "Wan2.2-I2V-A14B",
        {"width": 832, "height": 480, "frames": 81, "guidance": 3.5, "image": PICTURE},
        (8, 12),
        {
            "text_encoder": "umt5_xxl_fp8_e4m3fn_scaled",
            "transformer": "wan2.2_i2v_high_noise_14B_fp8_scaled",
            "transformer_2": "wan2.2_i2v_low_noise_14B_fp8_scaled",
        },
    ),
    "9 Qwen-Image-Edit picture": (
        "Qwen-Image-Edit-2509",
        {"images": [torch.zeros(1024, 1024, 3)]},
        (6, 12),
        {"text_encoder": "qwen_2.5_vl_7b_fp8_scaled", "transformer": "qwen_image_edit_2509_fp8_e4m3fn"},
    ),
    "10 Wan 2.2 video in 4 steps": (
        "Wan2.2-T2V-A14B",
        {"width": 832, "height": 480, "frames": 81, "steps": 4, "guidance": 1.0, "shift": 5.0},
        (8, 12),
        {
            "text_encoder": "umt5_xxl_fp8_e4m3fn_scaled",
            "transformer": "wan2.2_t2v_high_noise_14B_fp8_scaled",
            "transformer_2": "wan2.2_t2v_low_noise_14B_fp8_scaled",
        },
    ),
    "11 Qwen-Image with a Lightning LoRA": (
        "Qwen-Image",
        {"width": 1024, "height": 1024, "steps": 8, "guidance": 1.0, "shift": 3.0},
        (6, 12),
        {"text_encoder": "qwen_2.5_vl_7b_fp8_scaled", "transformer": "qwen_image_fp8_e4m3fn"},
    ),
    "12 Flux with a ControlNet": (
        "FLUX.1-dev",
        {
            "width": 1024,
            "height": 1024,
            "control": torch.zeros(1, 1024, 1024, 3),
            "control_strength": 0.7,
            "control_range": (0.0, 0.65),
        },
        (8, 24),
        {"text_encoder_2": "t5xxl_fp8_e4m3fn_scaled"},
    ),
}
UNION_PRO = {"num_layers": 6, "num_single_layers": 0, "guidance_embeds": True}  # the ControlNet of template 12
RANK = 64  # of the Lightning LoRAs


def sparse(module: Any, path: Path, fp8: bool, dtype: torch.dtype) -> Path:
    """The weights of a module by a header alone; matrices in fp8, with their scales where the name says so."""
    scaled = fp8 and path.stem.endswith("scaled")
    tensors = {"scaled_fp8": torch.empty(2, device="meta", dtype=torch.float8_e4m3fn)} if scaled else {}
    for name, weight in module.named_parameters():
        matrix = fp8 and weight.ndim == 2 and name.endswith(".weight") and not ("norm" in name or "embed" in name)
        tensors[name] = weight.to(torch.float8_e4m3fn if matrix else dtype)
        if scaled and matrix:
            tensors[name.removesuffix("weight") + "scale_weight"] = torch.empty((), device="meta")
    full_size._write_sparse(path, tensors)
    return path


def tokenizer(kind: str, folder: Path) -> Path:
    """T5 and CLIP pad every prompt to one length, whatever its words; Qwen's are those of ComfyUI."""
    if kind == "clip":
        return tiny.save("flux", folder) / "tokenizer"
    if kind == "qwen":
        host = find_host()
        if host is None:
            pytest.skip("no ComfyUI, which has Qwen's tokenizer")
        return host / "comfy" / "text_encoders" / "qwen25_tokenizer"
    marks = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    vocab = [*marks, *((letter, -1.0) for letter in ("\u2581", *string.printable))]
    transformers.T5TokenizerFast(vocab=vocab, extra_ids=0).save_pretrained(folder)
    return folder


def put(name: str, root: Path, fp8: dict[str, str]) -> dict[str, Path]:
    """The files of a model's parts."""
    folder = published.FACTS / "models" / name
    index = read_model_index(folder)
    parts = {key: (published.FACTS / "parts" / where, file) for key, (where, file) in index["_parts"].items()}
    parts |= {key: (folder / "transformer", name) for key in ("transformer", "transformer_2") if key in index}
    files = {}
    for key, (where, file) in parts.items():
        cls: Any = component_class(*index[key])
        config = json.loads((where / "config.json").read_text("utf-8"))
        if not issubclass(cls, transformers.PreTrainedModel):
            config = {field: value for field, value in cls.load_config(where).items() if not field.startswith("_")}
        dtype = torch.float32 if (key, name[:3]) == ("vae", "Wan") else torch.bfloat16
        stem = fp8.get(key) or file.removesuffix(".safetensors")
        files[key] = sparse(full_size.empty(cls, config), root / f"{stem}.safetensors", key in fp8, dtype)
    return files


def lightning(name: str, key: str, root: Path) -> tuple[Path, dict[str, float]]:
    """A LoRA for all layers of a model's blocks, by a header alone."""
    folder = published.FACTS / "models" / name
    cls: Any = component_class(*read_model_index(folder)[key])
    config = {field: value for field, value in cls.load_config(folder / "transformer").items() if field[0] != "_"}
    tensors = {}
    for path, layer in full_size.empty(cls, config).named_modules():
        if isinstance(layer, torch.nn.Linear) and "blocks." in path:
            for part, shape in (("A", (RANK, layer.in_features)), ("B", (layer.out_features, RANK))):
                tensors[f"transformer.{path}.lora_{part}.weight"] = torch.empty(
                    shape, device="meta", dtype=torch.bfloat16
                )
    full_size._write_sparse(file := root / f"lightning_{key}.safetensors", tensors)
    return file, {key: 1.0}


def beside(template: str, name: str, root: Path) -> dict[str, Any]:
    """The LoRAs or the ControlNet of a template, as `open_pipeline` takes them."""
    if "ControlNet" in template:
        net = full_size.empty(diffusers.FluxControlNetModel, UNION_PRO)
        return {"controlnet": sparse(net, root / "union.safetensors", False, torch.bfloat16)}
    keys = {"10": ("transformer", "transformer_2"), "11": ("transformer",)}.get(template[:2], ())
    return {"loras": [lightning(name, key, root) for key in keys]}


@pytest.mark.parametrize("template", few(TEMPLATES, *(name for name in TEMPLATES if name.split()[0] == "7")))
def test_the_thumbnail_shows_what_the_planner_says(template: str, tmp_path: Path) -> None:
    name, asked, budgets, fp8 = TEMPLATES[template]
    kinds = [kind for kind, _ in read_model_index(published.FACTS / "models" / name)["_tokenizers"].values()]
    tokenizers = {kind: tokenizer(kind, tmp_path / kind) for kind in kinds}
    files = put(name, tmp_path, fp8)
    if name.startswith("FLUX"):
        (apart := tmp_path / "quantized").mkdir()
        files["transformer"].rename(apart / "model.safetensors")
        quantized(apart, Type.Q4_K)
        files["transformer"] = (apart / "model.gguf").rename(tmp_path / "flux1-dev-Q4_K_S.gguf")
    pipe = ballast.open_pipeline(
        files["transformer"],
        transformer_2=files.get("transformer_2"),
        text_encoders=[path for key, path in files.items() if key.startswith("text_encoder")],
        vae=files["vae"],
        tokenizers=tokenizers,
        device="cpu",
        cache_dir=tmp_path / "cache",
        **beside(template, name, tmp_path),
    )
    thumbnails.check(template, [pipe.plan(**asked, vram=f"{size}GB", ram="64GB", rates=ASSUMED) for size in budgets])
