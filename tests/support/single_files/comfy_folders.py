"""Tiny models in ComfyUI's folders, under the names of the files that the templates choose."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import diffusers
import gguf
import hidream_folders
import newbie_folders
import pyramid_folders
import tiny
import torch
from adapters import lora_files
from pictured import pipelines
from PIL import Image
from safetensors.torch import save_file

from . import base_of, state_of
from .original_names import original, original_vae


def write_gguf(at: Path, tensors: dict[str, torch.Tensor], architecture: str = "flux") -> None:
    """A GGUF file whose weights are plain."""
    writer = gguf.GGUFWriter(at, architecture)
    for name, value in tensors.items():
        writer.add_tensor(name, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def put_templates(base: Path, folders: Callable[[str], Path]) -> None:
    """All that the templates choose, in ComfyUI's `base`: folders, files, and the picture."""
    models = base / "models"
    for name in ("diffusers", "text_encoders"):
        (models / name).mkdir(parents=True, exist_ok=True)
    folder, llama = hidream_folders.published(folders("hidream"), base / "hidream", "fast")
    (models / "diffusers" / "HiDream-I1-Fast").symlink_to(folder, target_is_directory=True)
    (models / "text_encoders" / llama.name).symlink_to(llama, target_is_directory=True)
    newbie_folders.official(models / "diffusers" / "NewBie-image-Exp0.1")
    pyramid_folders.save("flux", models / "diffusers" / "pyramid-flow-miniflux")
    put_files(models, folders)
    (base / "input").mkdir()
    Image.new("RGB", (96, 64), "teal").save(base / "input" / "example.png")


def put_files(models: Path, folders: Callable[[str], Path]) -> None:
    """The files of the templates, and a base for each, named as `base_for` says."""
    for name in ("diffusion_models", "text_encoders", "vae", "diffusers", "loras", "controlnet"):
        (models / name).mkdir(parents=True, exist_ok=True)
    flux = folders("flux")
    write_gguf(models / "diffusion_models" / "flux1-dev-Q4_K_S.gguf", original("flux", state_of(flux)))
    save_file(state_of(flux, "text_encoder_2"), models / "text_encoders" / "t5xxl_fp8_e4m3fn_scaled.safetensors")
    save_file(state_of(flux, "text_encoder"), models / "text_encoders" / "clip_l.safetensors")
    save_file(original_vae(state_of(flux, "vae")), models / "vae" / "ae.safetensors")
    base_of(flux, models / "diffusers" / "tiny-flux", "text_encoder", "text_encoder_2", "vae")
    wan = models.parent / "wan22_i2v"
    tiny.seeded(wan22_i2v)().save_pretrained(wan)
    for part, noise in (("transformer", "high"), ("transformer_2", "low")):
        path = models / "diffusion_models" / f"wan2.2_i2v_{noise}_noise_14B_fp8_scaled.safetensors"
        save_file(original("wan", state_of(wan, part)), path)
    save_file(state_of(wan, "text_encoder"), models / "text_encoders" / "umt5_xxl_fp8_e4m3fn_scaled.safetensors")
    save_file(state_of(wan, "vae"), models / "vae" / "wan_2.1_vae.safetensors")
    base_of(wan, models / "diffusers" / "tiny-wan", "transformer_2", "text_encoder", "vae")
    with pipelines.without_videos():
        plus = partial(pipelines.qwen_edit, diffusers.QwenImageEditPlusPipeline)
        edits: Any = tiny.seeded(plus)()
        edits.save_pretrained(edit := models.parent / "qwen_edit")
    for part, kind, name in (
        ("transformer", "diffusion_models", "qwen_image_edit_2509_fp8_e4m3fn"),
        ("text_encoder", "text_encoders", "qwen_2.5_vl_7b_fp8_scaled"),
        ("vae", "vae", "qwen_image_vae"),
    ):
        save_file(state_of(edit, part), models / kind / f"{name}.safetensors")
    base = base_of(edit, models / "diffusers" / "tiny-qwen_image_edit", "text_encoder", "vae")
    videos = {"video_processor_type": "Qwen2VLVideoProcessor"}  # which the host's Python can make, and nothing asks
    (base / "processor" / "video_preprocessor_config.json").write_text(json.dumps(videos), "utf-8")
    _put_few_step_files(models, edits)
    whole = pipelines.save("flux_controlnet", models.parent / "flux_controlnet")
    save_file(state_of(whole, "controlnet"), models / "controlnet" / "diffusion_pytorch_model.safetensors")


def _put_few_step_files(models: Path, edits: Any) -> None:
    """The transformers of Wan and Qwen-Image from text, and their Lightning LoRAs."""
    parts = ("transformer", "transformer_2")
    tiny.seeded(wan22_t2v)().save_pretrained(wan := models.parent / "wan22_t2v")
    for part, noise in zip(parts, ("high", "low"), strict=True):
        path = models / "diffusion_models" / f"wan2.2_t2v_{noise}_noise_14B_fp8_scaled.safetensors"
        save_file(original("wan", state_of(wan, part)), path)
        lora = models / "loras" / f"wan2.2_t2v_lightx2v_4steps_lora_v1.1_{noise}_noise.safetensors"
        lora_files.write(lora, lora_files.weights(lora_files.transformer_of(wan), 4))
    base_of(wan, models / "diffusers" / base_for("wan2.2_t2v"), "transformer_2", "text_encoder", "vae")
    names = ("scheduler", "vae", "text_encoder", "tokenizer", "transformer")
    plain = diffusers.QwenImagePipeline(**{name: getattr(edits, name) for name in names})
    plain.save_pretrained(qwen := models.parent / "qwen_image")
    save_file(state_of(qwen), models / "diffusion_models" / "qwen_image_fp8_e4m3fn.safetensors")
    base_of(qwen, models / "diffusers" / base_for("qwen_image_fp8"), "text_encoder", "vae")
    lora = models / "loras" / "Qwen-Image-Lightning-8steps-V1.0.safetensors"
    lora_files.write(lora, lora_files.weights(lora_files.transformer_of(qwen), 4))


def base_for(transformer: str) -> str:
    """Return the name of the base of a template's transformer: the configs of tiny models do not come with the pack."""
    kind = "_t2v" if "_t2v" in transformer else ""
    return f"tiny-{re.split('_?[0-9]', transformer)[0]}{kind}"


def wan22_t2v() -> Any:
    """Wan 2.2 A14B of text: two transformers."""
    pipe: Any = tiny.FAMILIES["wan"].build()
    made = [diffusers.WanTransformer3DModel.from_config(dict(pipe.transformer.config)) for _ in range(2)]
    parts = {name: part for name, part in pipe.components.items() if not name.startswith("transformer")}
    return diffusers.WanPipeline(**parts, transformer=made[0], transformer_2=made[1], boundary_ratio=0.875)


def wan22_i2v() -> Any:
    """Wan 2.2 A14B of pictures: two transformers, and no image encoder."""
    pipe: Any = tiny.FAMILIES["wan"].build()
    config = dict(pipe.transformer.config) | {"in_channels": 16 + 16 + 4}
    made = [diffusers.WanTransformer3DModel.from_config(config) for _ in range(2)]
    parts = {name: part for name, part in pipe.components.items() if not name.startswith("transformer")}
    return diffusers.WanImageToVideoPipeline(
        **parts, transformer=made[0], transformer_2=made[1], image_encoder=None, image_processor=None,
        boundary_ratio=0.9,
    )  # fmt: skip
