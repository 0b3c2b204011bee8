"""Run a tiny pipeline whole with unmodified diffusers, and staged, with the same arguments."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from ballast.pipelines.stock.signatures import encoding_of
from diffusers import DiffusionPipeline

from .building import Built
from .quirks import small

PROMPT, NEGATIVE = "a red boat", "blurry, grey"


@dataclass(frozen=True)
class Case:
    """One call. None leaves an argument out, so that the pipeline's default counts."""

    name: str = "plain"
    prompt: str = PROMPT
    negative: str | None = NEGATIVE
    guidance: float | None = 4.0
    true_cfg: float | None = None  # for models that have both
    width: int | None = None
    height: int | None = None
    frames: int | None = None
    strategy: str = "auto"
    more: dict[str, Any] = field(default_factory=dict)


def encoded_with(cls: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of the method that encodes prompts."""
    encode: Any = encoding_of(cls)
    return inspect.signature(encode).parameters


def _inputs(built: Built, case: Case) -> dict[str, Any]:
    inputs = {**copy.deepcopy(built.inputs), **case.more}
    for name in (built.scales.guidance, built.scales.true_cfg):
        inputs.pop(name, None)
    for name, value in (("width", case.width), ("height", case.height), ("num_frames", case.frames)):
        if value is not None:
            inputs[name] = value
    inputs.setdefault("num_inference_steps", 2)
    if _NAMES.keys() & inputs.keys() and "strength" in inspect.signature(built.cls.__call__).parameters:
        inputs.setdefault("strength", 0.8)  # by default some take so little that no step is left of two
    else:
        inputs.pop("strength", None)
    return inputs


class Stock:
    """The pipeline of a folder as stock diffusers loads it."""

    def __init__(self, built: Built) -> None:
        self.built = built
        with small(built.cls):
            self.pipe: Any = DiffusionPipeline.from_pretrained(built.folder, local_files_only=True)
        self.pipe.set_progress_bar_config(disable=True)
        if type(getattr(self.pipe, "vae", None)).__name__ == "AutoencoderKLAllegro":
            self.pipe.vae.enable_tiling()  # it has no other way

    def __call__(self, case: Case) -> torch.Tensor:
        """The picture or video of a case, as the staged pipeline gives it."""
        taken = inspect.signature(self.built.cls.__call__).parameters
        arguments = {k: v for k, v in _inputs(self.built, case).items() if k in taken}
        if "prompt" in taken:
            arguments["prompt"] = case.prompt
        if case.negative is not None and "negative_prompt" in taken:
            arguments["negative_prompt"] = case.negative
        scales = {self.built.scales.guidance: case.guidance, self.built.scales.true_cfg: case.true_cfg}
        arguments |= {name: value for name, value in scales.items() if name and value is not None}
        if "max_area" in taken:  # to which a size is scaled
            arguments["max_area"] = arguments["width"] * arguments["height"]
        for name in ("use_resolution_binning", "use_pe", "enable_prompt_rewrite"):
            if name in taken:  # which draws another size, or rewrites the prompt
                arguments[name] = False
        if "generator" in taken:
            arguments["generator"] = torch.Generator("cpu").manual_seed(0)
        if "output_type" in taken:
            arguments["output_type"] = "np"
        torch.manual_seed(0)
        pipe = copy.copy(self.pipe)
        if (scale := arguments.pop("guider", None)) is not None:
            pipe.guider = pipe.guider.new(guidance_scale=scale)
        with small(self.built.cls), torch.inference_mode():
            return picture_of(pipe(**arguments)[0])


def picture_of(output: Any) -> torch.Tensor:
    if isinstance(output, list):
        parts = [np.asarray(one) for one in output]
        output = np.concatenate(parts) if parts[0].ndim == 4 else np.stack(parts)  # the layers of each picture
    made = torch.as_tensor(np.asarray(output)) if not isinstance(output, torch.Tensor) else output
    return made.float()


@dataclass
class Staged:
    """The staged pipeline of a folder, and the bytes that it left on the card after each stage."""

    pipe: Any
    built: Built
    allocated: Callable[[], int]
    stage: str = ""
    left: dict[str, int] = field(default_factory=dict)

    def __call__(self, case: Case) -> torch.Tensor:
        with small(self.built.cls):
            return self._run(case)

    def encode(self, case: Case) -> Any:
        """Encode the prompts of a case. A pipeline that could be opened may be refused here."""
        inputs = _inputs(self.built, case)
        encodes = encoded_with(self.built.cls)
        self.stage = "encode"
        options = {k: v for k, v in inputs.items() if k in encodes and k not in _OURS}
        takes = "negative_prompt" in inspect.signature(self.built.cls.__call__).parameters
        negative = {} if case.negative is None or not takes else {"negative_prompt": case.negative}
        images = {"images": _tensors(inputs["image"])} if self._reads and "image" in inputs else {}
        cond = self.pipe.encode(case.prompt, **negative, **images, **options)
        self._check()
        return cond

    @property
    def _reads(self) -> bool:
        """Whether its encoder sees the picture."""
        return "image" in encoded_with(self.built.cls) or hasattr(self.built.cls, "encode_prompt_multiple_images")

    def _run(self, case: Case) -> torch.Tensor:
        cond = self.encode(case)
        inputs = _inputs(self.built, case)
        named = {k: v for k, v in inputs.items() if k in _NAMES and not (k == "image" and self._reads)}
        strength = {"strength": inputs["strength"]} if "strength" in inputs else {}
        true_cfg = {} if case.true_cfg is None else {"true_cfg": case.true_cfg}
        self.stage = "sample"
        calls = inspect.signature(self.built.cls.__call__).parameters
        options = {k: v for k, v in inputs.items() if k in calls and _for_sampling(k, self.built)}
        latents = self.pipe.sample(
            cond,
            width=None if self.pipe.model.own_size else inputs.get("width"),
            height=None if self.pipe.model.own_size else inputs.get("height"),
            frames=next((inputs[name] for name in _FRAMES if name in inputs), None),
            steps=inputs["num_inference_steps"],
            guidance=case.guidance if self.built.scales.guidance else None,
            strategy=case.strategy,
            **{_NAMES[k]: _tensors(v) for k, v in named.items()},
            **strength,
            **true_cfg,
            **options,
        )
        self._check()
        self.stage = "decode"
        picture = self.pipe.decode(latents)
        self._check()
        return picture

    def _check(self) -> None:
        if count := self.allocated():
            self.left[self.stage] = count


_FRAMES = ("num_frames", "frames", "video_length")
_OURS = {
    "self", "prompt", "negative_prompt", "width", "height", "num_inference_steps", "num_frames", "guidance_scale",
    "true_cfg_scale", "frames", "video_length", "generator", "latents", "output_type", "return_dict", "device",
    "do_classifier_free_guidance", "image", "images", "mask_image", "last_image", "control_image", "strength",
    "video", "mask_video", "control_video", "control_mask", "conditioning_frames",
    "max_area",  # told by width and height
}  # fmt: skip
_NAMES = {
    "image": "image",
    "images": "image",
    "mask_image": "mask",
    "last_image": "last_image",
    "control_image": "control",
    "control_mask": "mask",
    "video": "video",
    "mask_video": "mask",
    "control_video": "control",
    "conditioning_frames": "control",
}  # by those of diffusers


def _tensors(pictures: Any) -> list[torch.Tensor]:
    """PIL's pictures as Ballast takes them."""
    pictures = pictures if isinstance(pictures, list) else [pictures]
    return [torch.from_numpy(np.asarray(one, dtype=np.float32) / 255) for one in pictures]


def _for_sampling(name: str, built: Built) -> bool:
    if name == built.scales.embedded:  # which guidance does not set, or it would be none of the inputs
        return True
    if name in encoded_with(built.cls):
        return False
    return name not in _OURS and "embeds" not in name and not name.startswith(("prompt_", "negative_prompt"))
