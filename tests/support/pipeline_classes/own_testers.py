"""Classes of which diffusers' tests build no pipeline whose parts fit: our own tiny ones, in the form of its tests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import diffusers
from diffusers import DiffusionPipeline
from pictured import pipelines
from pictured.pictures import mask, picture, pil

from . import newest_classes as newest

_SIZE = {"width": 48, "height": 32}
_WIDE = {"width": 64, "height": 32}
_CONTROL = _SIZE | {"control_image": pil(picture(48, 32)), "control_mode": 0}
_MASK = {"mask_image": pil(mask(48, 32))}
# By the class: its builder, and the arguments of its call beside a picture.
_OWN: dict[str, tuple[Callable[[], DiffusionPipeline], dict[str, Any]]] = {
    # The tests' encoder makes more of a picture than the template has words for.
    "HunyuanVideoImageToVideoPipeline": (pipelines.hunyuan_video_i2v, _SIZE),
    "HunyuanVideo15ImageToVideoPipeline": (pipelines.hunyuan_video15_i2v, {}),  # it draws the size of its picture
    "ErnieImagePipeline": (newest.ernie, _WIDE),
    "HunyuanImageRefinerPipeline": (newest.hunyuan_refiner, _WIDE),
    "Ideogram4Pipeline": (newest.ideogram4, _WIDE | {"max_sequence_length": 64, "guidance_schedule": [7.0, 3.0]}),
    "Kandinsky6TI2VAPipeline": (newest.kandinsky6, _SIZE),
    "LongCatImageEditPipeline": (newest.longcat_edit, _WIDE),
    "LongCatImagePipeline": (newest.longcat, _WIDE),
    "LucyEditPipeline": (newest.lucy, _SIZE | {"video": [pil(picture(48, 32))] * 9}),
    "QwenImage21Pipeline": (newest.qwenimage21, _WIDE),
    "StableDiffusionXLControlNetUnionImg2ImgPipeline": (newest.sdxl_union_image, _CONTROL),
    "StableDiffusionXLControlNetUnionInpaintPipeline": (newest.sdxl_union_inpaint, _CONTROL | _MASK),
    "StableDiffusionXLControlNetUnionPipeline": (newest.sdxl_union, _CONTROL),
    "ZImageControlNetInpaintPipeline": (newest.zimage_controlnet_inpaint, _WIDE | _CONTROL | _MASK),
    "ZImageControlNetPipeline": (newest.zimage_controlnet, _WIDE | _CONTROL),
    "ZImageOmniPipeline": (newest.zimage_omni, _WIDE),
}


def own_testers() -> dict[str, list[Any]]:
    """Test classes, by the name of the pipeline class that they build."""
    return {name: [_tester(getattr(diffusers, name), *made)] for name, made in _OWN.items()}


def _tester(cls: Any, build: Callable[[], DiffusionPipeline], arguments: dict[str, Any]) -> Any:
    def components(self: Any) -> dict[str, Any]:
        return dict(build().components)

    def inputs(self: Any) -> dict[str, Any]:
        return {"image": pil(picture(48, 32)), "num_frames": 9, "num_inference_steps": 2, **arguments}

    made = {"pipeline_class": cls, "get_dummy_components": components, "get_dummy_inputs": inputs}
    return type(f"{cls.__name__}Own", (), made)
