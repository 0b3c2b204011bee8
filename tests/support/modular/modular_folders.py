"""Tiny folders of modular pipelines, and their own call."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import diffusers
import numpy as np
import tiny
import torch
from ballast.pipelines.encoding.pictures import Frames, as_stock
from ballast.pipelines.stock.tasks import VIDEOS
from diffusers import DiffusionPipeline, ModularPipeline
from diffusers.models.transformers import transformer_wan_animate_2
from pictured import pipelines as pictured
from pictured.pictures import picture
from pipeline_classes import odd_pipelines
from torch.nn.attention import flex_attention

from . import newest

Build = Callable[[], Any]


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
    sees: bool | None = None  # whether a model sees a picture before the loop, by default where one is given
    more: tuple[tuple[str, Any], ...] = ()  # further arguments, by words that Ballast and the blocks have in common
    steps: int | None = 3  # None for blocks that have a number of their own
    counts: str = "num_frames"  # what the blocks call the number of frames

    def sides(self) -> dict[str, int]:
        return dict(zip(("width", "height"), self.size, strict=True)) if self.size else {}

    def given(self) -> dict[str, torch.Tensor]:
        """The pictures and masks of a run, by Ballast's words."""
        width, height = self.size or (64, 32)
        shown = {word: picture(width, height) for word in self.pictures}
        for word in VIDEOS & shown.keys():
            shown[word] = torch.stack([shown[word][0].roll(at, 0) for at in range(self.frames or 1)])
        if "last_image" in shown:
            shown["last_image"] = 1 - shown["last_image"]
        if "mask" in shown:
            shown["mask"] = (torch.arange(width) > width // 3).float().expand(1, height, width).contiguous()
        return shown

    def stock_pictures(self) -> dict[str, Any]:
        """The same, by the words of the blocks."""
        names = {"images": "image", "mask": "mask_image", "control": "control_image"}
        if self.counts != "num_frames":
            names["video"] = "driving_video"
        pictures = {names.get(word, word): (one[0],) for word, one in self.given().items() if word not in VIDEOS}
        return as_stock(pictures | {names.get(w, w): Frames(one) for w, one in self.given().items() if w in VIDEOS})


def _two_experts() -> DiffusionPipeline:
    pipe: Any = tiny.FAMILIES["wan"].build()
    pipe.register_modules(transformer_2=type(pipe.transformer).from_config(dict(pipe.transformer.config)))
    return pipe


def _edit_plus() -> DiffusionPipeline:
    return pictured.qwen_edit(diffusers.QwenImageEditPlusPipeline)


def _wan22_image() -> DiffusionPipeline:
    pipe: Any = _two_experts()
    config = dict(pipe.transformer.config) | {"in_channels": 16 + 16 + 4}
    parts = {name: type(pipe.transformer).from_config(config) for name in ("transformer", "transformer_2")}
    pipe.register_modules(**parts)
    return pipe


def _wan_vace() -> DiffusionPipeline:
    pipe: Any = _two_experts()
    config = dict(pipe.transformer.config) | {"vace_layers": [0, 2], "vace_in_channels": 96}
    kind = diffusers.WanVACETransformer3DModel
    pipe.register_modules(**{name: kind.from_config(config) for name in ("transformer", "transformer_2")})
    return pipe


def _krea2() -> DiffusionPipeline:
    """Its blocks read twelve layers of an encoder of 36, whichever the folder names."""
    pipe: Any = odd_pipelines.krea2()
    config = pipe.text_encoder.config
    config.text_config.num_hidden_layers = 36
    shape = dict(pipe.transformer.config) | {"num_text_layers": 12}
    pipe.register_modules(
        text_encoder=type(pipe.text_encoder)(config), transformer=type(pipe.transformer).from_config(shape)
    )
    return pipe


def _sdxl_control() -> DiffusionPipeline:
    pipe: Any = odd_pipelines.sdxl()
    control = diffusers.ControlNetModel.from_unet(pipe.unet, conditioning_channels=3)
    return diffusers.StableDiffusionXLControlNetPipeline(**pipe.components, controlnet=control)


def _of(name: str) -> Build:
    return tiny.FAMILIES[name].build


_seeded = tiny.seeded
_VIDEO: dict[str, Any] = {"workflow": "text2video", "size": (48, 32), "frames": 9}
_IMAGE: dict[str, Any] = {"workflow": "image2image", "pictures": ("image",)}
_MOVES: dict[str, Any] = {**_VIDEO, "workflow": "image2video", "pictures": ("image",)}
_STRONG = (("strength", 0.9),)
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
    "klein_base_image": Family(
        "Flux2KleinBaseModularPipeline",
        _of("flux2_klein"),
        **_IMAGE | {"workflow": "image_conditioned", "size": (64, 64)},
    ),
    "kontext_text": Family("FluxKontextModularPipeline", _seeded(pictured.kontext), guides=False),
    "qwen_control_image": Family(
        "QwenImageModularPipeline", _seeded(pictured.qwen_controlnet), "controlnet_image2image", ("image", "control")
    ),
    "qwen_control_inpaint": Family(
        "QwenImageModularPipeline", _seeded(pictured.qwen_controlnet), "controlnet_inpainting",
        ("image", "mask", "control"), (64, 32), output="pil",
    ),
    "qwen_edit_inpaint": Family(
        "QwenImageEditModularPipeline", _seeded(pictured.qwen_edit), "image_conditioned_inpainting",
        ("images", "mask"), None, output="pil",
    ),
    "qwen_layered": Family("QwenImageLayeredModularPipeline", _seeded(pictured.qwen_layered), **_EDIT),
    "krea2": Family("Krea2ModularPipeline", _seeded(_krea2)),
    "krea2_turbo": Family("Krea2TurboModularPipeline", _seeded(_krea2), guides=False),
    "wan22_image": Family(
        "Wan22Image2VideoModularPipeline", _seeded(_wan22_image), config=(("boundary_ratio", 0.9),), **_MOVES
    ),
    "wan_vace": Family("Wan22VaceModularPipeline", _seeded(_wan_vace), sees=True, **_VIDEO),
    "sdxl": Family("StableDiffusionXLModularPipeline", _seeded(odd_pipelines.sdxl)),
    "sdxl_image": Family("StableDiffusionXLModularPipeline", _seeded(odd_pipelines.sdxl), more=_STRONG, **_IMAGE),
    "sdxl_inpaint": Family(
        "StableDiffusionXLModularPipeline", _seeded(odd_pipelines.sdxl), "inpainting", ("image", "mask"), more=_STRONG
    ),
    "sdxl_control": Family(
        "StableDiffusionXLModularPipeline", _seeded(_sdxl_control), "controlnet_text2image", ("control",), sees=False
    ),
    "sdxl_control_image": Family(
        "StableDiffusionXLModularPipeline", _seeded(_sdxl_control), "controlnet_image2image", ("image", "control"),
        more=_STRONG,
    ),
    "sdxl_control_inpaint": Family(
        "StableDiffusionXLModularPipeline", _seeded(_sdxl_control), "controlnet_inpainting",
        ("image", "mask", "control"), more=_STRONG,
    ),
    "flux3_distilled_image": Family(
        "Flux3DistilledModularPipeline", newest.flux3_distilled, guides=False,
        **_IMAGE | {"workflow": "image_conditioned", "size": (64, 64)},
    ),
    "flux2": Family("Flux2ModularPipeline", newest.flux2, guides=False),
    "flux2_image": Family(
        "Flux2ModularPipeline", newest.flux2, guides=False,
        **_IMAGE | {"workflow": "image_conditioned", "size": (64, 64)},
    ),
    "flux3": Family("Flux3ModularPipeline", newest.flux3),
    "flux3_image": Family(
        "Flux3ModularPipeline", newest.flux3, **_IMAGE | {"workflow": "image_conditioned", "size": (64, 64)}
    ),
    "flux3_distilled": Family("Flux3DistilledModularPipeline", newest.flux3_distilled, guides=False),
    "qwen21": Family("QwenImage21ModularPipeline", newest.qwenimage21),
    "qwen21_turbo": Family("QwenImage21TurboModularPipeline", newest.qwenimage21, guides=False),
    "anima": Family("AnimaModularPipeline", newest.anima),
    "anima_image": Family("AnimaModularPipeline", newest.anima, **_IMAGE | {"workflow": "img2img"}),
    "ernie": Family("ErnieImageModularPipeline", newest.ernie, size=(64, 32)),
    "helios": Family("HeliosModularPipeline", newest.helios, **_VIDEO),
    "helios_image": Family("HeliosModularPipeline", newest.helios, **_MOVES),
    "ideogram4": Family(
        "Ideogram4ModularPipeline", newest.ideogram4, guides=False, more=(("guidance_schedule", [7.0, 7.0, 3.0]),)
    ),
    "echo": Family("EchoModularPipeline", newest.echo, guides=False, steps=None, **_VIDEO | {"size": (64, 32)}),
    "echo_image": Family("EchoModularPipeline", newest.echo, guides=False, steps=None, **_MOVES | {"size": (64, 32)}),
    "ltx2": Family("LTX2ModularPipeline", newest.ltx2, **_VIDEO | {"size": (64, 32)}),
    "ltx2_image": Family("LTX2ModularPipeline", newest.ltx2, **_MOVES | {"size": (64, 32)}),
    "ltx25": Family("LTX25ModularPipeline", newest.ltx25, **_VIDEO | {"size": (32, 16), "frames": 7}),
    "ltx25_image": Family("LTX25ModularPipeline", newest.ltx25, **_MOVES | {"size": (32, 32), "frames": 3}),
    "minimax_h3": Family(
        "MiniMaxH3ModularPipeline", newest.minimax_h3, workflow="t2va", size=(64, 32), frames=124, guides=False
    ),
    "sd3": Family("StableDiffusion3ModularPipeline", _of("sd3")),
    "sd3_image": Family("StableDiffusion3ModularPipeline", _of("sd3"), **_IMAGE),
    "wan": Family("WanModularPipeline", _of("wan"), **_VIDEO),
    "wan_image": Family("WanImage2VideoModularPipeline", _seeded(pictured.wan_i2v), **_MOVES),
    "wan22": Family(
        "Wan22ModularPipeline", _seeded(_two_experts), **_VIDEO, config=(("boundary_ratio", 0.9),)
    ),
    **{
        name: Family(
            f"WanAnimate2{name.removeprefix('wan_animate2').title().strip('_')}ModularPipeline", newest.wan_animate2,
            "animation", ("image", "video"), (64, 32), frames=9, counts="segment_frame_length",
        )
        for name in ("wan_animate2", "wan_animate2_distilled")
    },
    "zimage": Family("ZImageModularPipeline", _of("zimage")),
    "zimage_image": Family("ZImageModularPipeline", _of("zimage"), **_IMAGE | {"size": (64, 32)}),
}  # fmt: skip


REFUSED: dict[str, tuple[Family, str]] = {
    "cosmos3": (
        Family("Cosmos3OmniModularPipeline", newest.cosmos3, **_VIDEO), "has no blocks that encode a prompt"
    ),
    "minimax_music3": (
        Family("MiniMaxMusic3ModularPipeline", newest.minimax_music3), "makes sound and no picture"
    ),
    "helios_pyramid": (
        Family("HeliosPyramidModularPipeline", newest.helios_pyramid, **_VIDEO), "its own call fails on the CPU"
    ),
}  # fmt: skip


def save(name: str, folder: Path) -> Path:
    """Write a family's folder."""
    family = FAMILIES[name] if name in FAMILIES else REFUSED[name][0]
    with pictured.without_videos():
        if family.build.__module__ == newest.__name__:
            return _of_parts(newest.seeded(family.build), folder, family.class_name, **dict(family.config))
        family.build().save_pretrained(folder.with_name(f"{folder.name}_class"), safe_serialization=True)
    return as_modular(folder.with_name(f"{folder.name}_class"), folder, family.class_name, None, **dict(family.config))


def _of_parts(parts: dict[str, Any], folder: Path, class_name: str, **config: Any) -> Path:
    """Write parts into a folder that names a modular pipeline of them."""
    named = {}
    for name, part in parts.items():
        part.save_pretrained(folder / name)
        named[name] = library_and_class(part)
    return with_index(folder, named, class_name, getattr(diffusers, class_name).default_blocks_name, **config)


def library_and_class(part: Any) -> list[str]:
    """What an index calls a part."""
    kind = type(part)
    if "pipelines.ltx2" in kind.__module__:
        return ["ltx2", kind.__name__]
    return ["diffusers" if kind.__module__.startswith("diffusers") else "transformers", kind.__name__]


def as_modular(family: Path, folder: Path, class_name: str, blocks: str | None = None, **config: Any) -> Path:
    """Copy a tiny pipeline of a class into a folder that names a modular pipeline of the same components."""
    shutil.copytree(family, folder)
    index = json.loads((folder / "model_index.json").read_text(encoding="utf-8"))
    (folder / "model_index.json").unlink()
    kinds = {name: kind for name, kind in index.items() if isinstance(kind, list) and None not in kind}
    return with_index(folder, kinds, class_name, blocks or getattr(diffusers, class_name).default_blocks_name, **config)


def with_index(folder: Path, kinds: dict[str, list[str]], class_name: str, blocks: str, **config: Any) -> Path:
    """Write the index of a folder of parts, by their libraries and classes."""
    named = {
        name: [*kind, {"type_hint": kind, "pretrained_model_name_or_path": "org/model", "subfolder": name}]
        for name, kind in kinds.items()
    }
    text = json.dumps({"_class_name": class_name, "_blocks_class_name": blocks, **named, **config})
    (folder / "modular_model_index.json").write_text(text, encoding="utf-8")
    return folder


def stock(
    folder: Path, guidance: float | None = None, prepare: Callable[[Any], None] | None = None, **inputs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a folder's own call on the CPU: the latents that its VAE decodes, and the pictures [B,(F),H,W,3] in 0..1."""
    pipe: Any = ModularPipeline.from_pretrained(folder, local_files_only=True)
    pipe.load_components(local_files_only=True)
    for name in ("guider", "guider_2", "audio_guider") if guidance is not None else ():
        if hasattr(pipe, name):
            pipe.update_components(**{name: getattr(pipe, name).new(guidance_scale=guidance, enabled=True)})
    if prepare is not None:
        prepare(pipe)
    if getattr(pipe, "prompt_upsampler", True) is None:  # FLUX.3's own way to encode a prompt as given
        pipe._blocks.sub_blocks.pop("prompt_upsampler")
    seen: list[torch.Tensor] = []
    decoder = getattr(pipe, "diffusion_decoder", None) or pipe.vae
    decode = decoder.decode

    @functools.wraps(decode)
    def recorded(z: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen.append(z.detach().clone())
        return decode(z, *args, **kwargs)

    decoder.decode = recorded
    plain = mock.patch.object(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)  # compiling takes 40 s
    with plain, mock.patch.object(transformer_wan_animate_2, "create_block_mask", uncompiled_mask):
        made = pipe(generator=torch.Generator("cpu").manual_seed(0), **{"output_type": "pt"} | inputs)
    pictures = made.get("videos") if made.get("videos") is not None else made.get("images")
    (latents,) = seen
    if isinstance(pictures, list) and isinstance(pictures[0], torch.Tensor):
        pictures = torch.cat(pictures)  # the layers of each prompt
    if isinstance(pictures, list):
        pictures = torch.stack([torch.from_numpy(np.array(one)) / 255 for one in pictures]).movedim(-1, -3)
    return latents, pictures.float().movedim(-3, -1)


def uncompiled_mask(*size: Any, _compile: bool, **more: Any) -> Any:
    """Take the place of `create_block_mask`, without the compiler."""
    return flex_attention.create_block_mask(*size, **more)


def rows() -> list[str]:
    """The rows of the table of modular pipelines in the docs."""
    found: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        found.setdefault(family.class_name, []).append(f"`{family.workflow}`")
    return [f"| `{name}` | {', '.join(workflows)} |" for name, workflows in sorted(found.items())]


def refused_rows() -> list[str]:
    """The rows of the table of modular pipelines that are refused."""
    return sorted(f"| `{family.class_name}` | `{reason}` |" for family, reason in REFUSED.values())
