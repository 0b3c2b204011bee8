"""Tiny folders of modular pipelines, and their own call."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import tiny
import torch
from ballast.pipelines.encoding.pictures import as_stock
from diffusers import DiffusionPipeline, ModularPipeline
from pictured import pipelines as pictured
from pictured.pictures import picture

Build = Callable[[], DiffusionPipeline]


@dataclass(frozen=True)
class Family:
    """A modular pipeline and one of its workflows: the parts that it runs, and the pictures that it is given.

    `pictures` are the words of `sample` for them; "images" are given to `encode`. It draws the size of `size` None.
    """

    class_name: str
    build: Build
    workflow: str = "text2image"
    pictures: tuple[str, ...] = ()
    size: tuple[int, int] | None = (48, 32)
    frames: int | None = None
    guides: bool = True
    output: str = "pt"
    config: tuple[tuple[str, Any], ...] = ()

    def sides(self) -> dict[str, int]:
        return dict(zip(("width", "height"), self.size, strict=True)) if self.size else {}

    def given(self) -> dict[str, torch.Tensor]:
        """The pictures and masks of a run, by Ballast's words."""
        width, height = self.size or (64, 32)
        shown = {word: picture(width, height) for word in self.pictures}
        if "last_image" in shown:
            shown["last_image"] = 1 - shown["last_image"]
        if "mask" in shown:
            shown["mask"] = (torch.arange(width) > width // 3).float().expand(1, height, width).contiguous()
        return shown

    def stock_pictures(self) -> dict[str, Any]:
        """The same, by the words of the blocks."""
        names = {"images": "image", "mask": "mask_image", "control": "control_image"}
        return as_stock({names.get(word, word): (one[0],) for word, one in self.given().items()})


def _two_experts() -> DiffusionPipeline:
    pipe: Any = tiny.FAMILIES["wan"].build()
    pipe.register_modules(transformer_2=type(pipe.transformer).from_config(dict(pipe.transformer.config)))
    return pipe


def _edit_plus() -> DiffusionPipeline:
    return pictured.qwen_edit(diffusers.QwenImageEditPlusPipeline)


def _of(name: str) -> Build:
    return tiny.FAMILIES[name].build


_seeded = tiny.seeded
_VIDEO: dict[str, Any] = {"workflow": "text2video", "size": (48, 32), "frames": 9}
_IMAGE: dict[str, Any] = {"workflow": "image2image", "pictures": ("image",)}
_MOVES: dict[str, Any] = {**_VIDEO, "workflow": "image2video", "pictures": ("image",)}
_EDIT: dict[str, Any] = {"workflow": "image_conditioned", "pictures": ("images",), "size": None}

FAMILIES: dict[str, Family] = {
    "flux": Family("FluxModularPipeline", _of("flux"), guides=False),
    "flux_image": Family("FluxModularPipeline", _of("flux"), guides=False, **_IMAGE),
    "kontext": Family(
        "FluxKontextModularPipeline",
        _seeded(pictured.kontext),
        guides=False,
        **_IMAGE | {"workflow": "image_conditioned", "size": (64, 32)},
    ),
    "klein": Family("Flux2KleinModularPipeline", _of("flux2_klein"), guides=False),
    "klein_image": Family(
        "Flux2KleinModularPipeline",
        _of("flux2_klein"),
        guides=False,
        **_IMAGE | {"workflow": "image_conditioned", "size": (64, 64)},
    ),
    "klein_base": Family("Flux2KleinBaseModularPipeline", _of("flux2_klein")),
    "hunyuan": Family("HunyuanVideo15ModularPipeline", _of("hunyuan_video15"), **_VIDEO),
    "hunyuan_image": Family("HunyuanVideo15ModularPipeline", _seeded(pictured.hunyuan_video15_i2v), **_MOVES),
    "ltx": Family("LTXModularPipeline", _of("ltx"), **_VIDEO | {"size": (64, 32)}),
    "ltx_image": Family("LTXModularPipeline", _of("ltx"), **_MOVES | {"size": (64, 32)}),
    "qwen": Family("QwenImageModularPipeline", _of("qwenimage")),
    "qwen_image": Family("QwenImageModularPipeline", _of("qwenimage"), **_IMAGE),
    "qwen_inpaint": Family(
        "QwenImageModularPipeline", _of("qwenimage"), "inpainting", ("image", "mask"), (64, 32), output="pil"
    ),
    "qwen_control": Family(
        "QwenImageModularPipeline", _seeded(pictured.qwen_controlnet), "controlnet_text2image", ("control",)
    ),
    "qwen_edit": Family("QwenImageEditModularPipeline", _seeded(pictured.qwen_edit), **_EDIT),
    "qwen_plus": Family("QwenImageEditPlusModularPipeline", _seeded(_edit_plus), **_EDIT),
    "sd3": Family("StableDiffusion3ModularPipeline", _of("sd3")),
    "sd3_image": Family("StableDiffusion3ModularPipeline", _of("sd3"), **_IMAGE),
    "wan": Family("WanModularPipeline", _of("wan"), **_VIDEO),
    "wan_image": Family("WanImage2VideoModularPipeline", _seeded(pictured.wan_i2v), **_MOVES),
    "wan22": Family(
        "Wan22ModularPipeline", _seeded(_two_experts), **_VIDEO, config=(("boundary_ratio", 0.9),)
    ),
    "zimage": Family("ZImageModularPipeline", _of("zimage")),
    "zimage_image": Family("ZImageModularPipeline", _of("zimage"), **_IMAGE | {"size": (64, 32)}),
}  # fmt: skip


def save(name: str, folder: Path) -> Path:
    """Write a family's folder."""
    family = FAMILIES[name]
    with pictured.without_videos():
        family.build().save_pretrained(folder.with_name(f"{folder.name}_class"), safe_serialization=True)
    return as_modular(folder.with_name(f"{folder.name}_class"), folder, family.class_name, None, **dict(family.config))


def as_modular(family: Path, folder: Path, class_name: str, blocks: str | None = None, **config: Any) -> Path:
    """Copy a tiny pipeline of a class into a folder that names a modular pipeline of the same components."""
    shutil.copytree(family, folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").unlink()
    named = {
        name: [*kind, {"type_hint": kind, "pretrained_model_name_or_path": "org/model", "subfolder": name}]
        for name, kind in index.items()
        if isinstance(kind, list) and None not in kind
    }
    blocks = blocks or getattr(diffusers, class_name).default_blocks_name
    text = json.dumps({"_class_name": class_name, "_blocks_class_name": blocks, **named, **config})
    (folder / "modular_model_index.json").write_text(text, encoding="utf-8")
    return folder


def stock(
    folder: Path, guidance: float | None = None, prepare: Callable[[Any], None] | None = None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a folder's own call on the CPU: the latents that its VAE decodes, and the pictures [B,(F),H,W,3] in 0..1."""
    pipe: Any = ModularPipeline.from_pretrained(folder, local_files_only=True)
    pipe.load_components(local_files_only=True)
    for name in ("guider", "guider_2") if guidance is not None else ():
        if hasattr(pipe, name):
            pipe.update_components(**{name: getattr(pipe, name).new(guidance_scale=guidance, enabled=True)})
    if prepare is not None:
        prepare(pipe)
    seen: list[torch.Tensor] = []
    decode = pipe.vae.decode

    @functools.wraps(decode)
    def recorded(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(z.detach().clone())
        return decode(z, *args, **kwargs)

    pipe.vae.decode = recorded
    made = pipe(generator=torch.Generator("cpu").manual_seed(0), **{"output_type": "pt"} | inputs)
    pictures = made.get("videos") if made.get("videos") is not None else made.get("images")
    (latents,) = seen
    if isinstance(pictures, list):
        pictures = torch.stack([torch.from_numpy(np.array(one)) / 255 for one in pictures]).movedim(-1, -3)
    return latents, pictures.float().movedim(-3, -1)


def rows() -> list[str]:
    """The rows of the table of modular pipelines in the docs."""
    found: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        found.setdefault(family.class_name, []).append(f"`{family.workflow}`")
    return [f"| `{name}` | {', '.join(workflows)} |" for name, workflows in sorted(found.items())]
