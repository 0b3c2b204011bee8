"""Inputs that several nodes have, and what their values mean."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from ...memory.sizes import parse_bytes
from .folders import find_controlnets

if TYPE_CHECKING:
    import torch

GPU_OR_SIM = "gpu or sim"  # for graphs that show what happens in VRAM on any machine

AUTO = "auto"
NONE = "none"

Option = str | bool | tuple[Any, ...]  # an argument of `open_pipeline` as a reference holds it


def loader_inputs() -> list[io.Input]:
    """Return the inputs of every loader: budget, type, device."""
    return [
        io.Float.Input(
            "vram_gb",
            default=0.0,
            min=0.0,
            max=1024.0,
            step=0.1,
            tooltip="VRAM that Ballast may use, in GB: weights and what they work in. 0 means all that is free, less "
            "ComfyUI's reserve.",
        ),
        io.Combo.Input(
            "dtype",
            options=["auto", "bfloat16", "float16", "float32"],
            default="auto",
            optional=True,
            advanced=True,
            tooltip="The type that encoders and transformer run in; auto keeps that of the files. "
            "The VAE always runs in float32.",
        ),
        io.Boolean.Input(
            "keep_loaded",
            default=True,
            optional=True,
            advanced=True,
            tooltip="Keep the transformer in VRAM between runs while nothing else needs the room. "
            "Text encoders and VAE leave when their node is done, unless ComfyUI runs with --highvram or --gpu-only.",
        ),
        io.Combo.Input(
            "device",
            options=["auto", "cpu", "sim", GPU_OR_SIM],
            default="auto",
            optional=True,
            advanced=True,
            tooltip="auto is the device that ComfyUI uses. sim is a simulated GPU run by the CPU, "
            "which shows what would happen in VRAM on a machine that has none. gpu or sim is auto where ComfyUI uses a "
            "GPU, else sim.",
        ),
    ]


def late_inputs() -> list[io.Input]:
    """Return the last inputs of every loader: saved graphs know inputs by their order, and these came later."""
    return [
        io.Float.Input(
            "ram_gb",
            default=0.0,
            min=0.0,
            max=4096.0,
            step=0.5,
            optional=True,
            advanced=True,
            tooltip="RAM that Ballast's weights may hold, in GB. 0 means all that is free but 2 GB. What does not fit "
            "is read from disk in every step.",
        ),
        io.Combo.Input(
            "weights",
            options=["auto", "exact12", "int8", "fp8"],
            default="auto",
            optional=True,
            advanced=True,
            tooltip="How encoders and transformer are held in RAM and come to the card. auto: as they are stored. "
            "exact12: bfloat16 in 12 bits, the same picture. int8, fp8: 8 bits, a slightly different picture. The "
            "first run converts them, once, into files in ComfyUI's user folder.",
        ),
        io.Boolean.Input(
            "cache_encoded",
            default=False,
            optional=True,
            advanced=True,
            tooltip="Has no effect any more: what exact12, int8 or fp8 makes is always kept in files.",
        ),
    ]


def controlnet_input() -> io.Input:
    """Return the input for a ControlNet beside the model."""
    return io.Combo.Input(
        "controlnet",
        options=[NONE, *find_controlnets()],
        default=NONE,
        optional=True,
        advanced=True,
        tooltip="A ControlNet in models/controlnet, a folder in diffusers' layout or a file, for models such as Flux "
        "and Stable Diffusion 3. Its picture goes into control of Offloaded Sampler. Apply ControlNet (Ballast) has "
        "strength, start and end as well.",
    )


def controlnet_folder(name: str) -> Path | None:
    """Return the folder or file of the ControlNet that is chosen; None if none is. ValueError if it is gone."""
    folder = find_controlnets().get(name)
    if folder is None and name != NONE:
        raise ValueError(f"controlnet {name!r} is not in models/controlnet any more. Choose another, or put it back.")
    return folder


@dataclass(frozen=True)
class LoaderSettings:
    """The values of the inputs that every loader has."""

    vram_gb: float = 0.0
    dtype: str = AUTO
    keep_loaded: bool = True
    device: str = AUTO
    ram_gb: float = 0.0
    weights: str = AUTO
    cache_encoded: bool = False

    def weights_options(self) -> dict[str, Option]:
        """Return the choice of weights as `open_pipeline` takes it; nothing for those as stored."""
        kept: dict[str, Option] = {"cache_encoded": True} if self.cache_encoded else {}
        return kept if self.weights == AUTO else {"weights": self.weights, **kept}


SETTINGS_TOOLTIP = "From Sampler Settings: sampler, schedule and shift, with models of diffusers."


def size_inputs() -> list[io.Input]:
    """Return the inputs for the width and height of a picture."""
    return [
        io.Int.Input(
            "width",
            default=0,
            min=0,
            max=16384,
            step=16,
            tooltip="Width of the picture in pixels; 0 for the one that the pipeline was made for.",
        ),
        io.Int.Input(
            "height",
            default=0,
            min=0,
            max=16384,
            step=16,
            tooltip="Height of the picture in pixels; 0 for the one that the pipeline was made for.",
        ),
    ]


def step_inputs(steps: str, guidance: str) -> list[io.Input]:
    """Return the inputs for steps and guidance, with these tooltips."""
    return [
        io.Int.Input("steps", default=0, min=0, max=1000, tooltip=steps),
        io.Float.Input("guidance", default=0.0, min=0.0, max=100.0, step=0.1, round=0.01, tooltip=guidance),
    ]


def true_cfg_input() -> io.Input:
    """Return the input for classifier-free guidance of a model that was distilled to do without."""
    return io.Float.Input(
        "true_cfg",
        default=0.0,
        min=0.0,
        max=100.0,
        step=0.1,
        round=0.01,
        optional=True,
        advanced=True,
        tooltip="Only for guidance-distilled models (Flux-dev, HunyuanVideo): classifier-free guidance beside their "
        "own. Above 1 the negative prompt counts, and each step runs twice. 0 is off, and right for most pictures.",
    )


def frames_input() -> io.Input:
    """Return the input for the number of frames of a video."""
    return io.Int.Input(
        "frames",
        default=0,
        min=0,
        max=16384,
        optional=True,
        advanced=True,
        tooltip="Frames of a video; 0 for the pipeline's own number, and for pictures.",
    )


def batch_input() -> io.Input:
    """Return the input for the number of pictures."""
    return io.Int.Input(
        "batch",
        default=1,
        min=1,
        max=64,
        optional=True,
        tooltip="Pictures of this prompt, with the seeds from seed on. They are drawn at once as far as they fit the "
        "budget, and share the copies of weights. Several images or latents to start from make a batch by themselves.",
    )


def picture_inputs() -> list[io.Input]:
    """Return the inputs, all optional: those of saved graphs come before them."""
    return [
        io.Image.Input(
            "image",
            optional=True,
            tooltip="A picture to start from (image to image), to paint into (with mask), or the first frame of a "
            "video. Ballast takes the pipeline of diffusers for that, with the same weights. What an edit model works "
            "from goes to Staged Text Encode instead. Several pictures make a batch, or are for as many prompts.",
        ),
        io.Mask.Input(
            "mask", optional=True, tooltip="What to paint anew: 1 is new, 0 stays. It has the size of the picture."
        ),
        io.Float.Input(
            "strength",
            default=0.0,
            min=0.0,
            max=1.0,
            step=0.01,
            optional=True,
            advanced=True,
            tooltip="With an image connected, how much of it is replaced: 0.3 keeps most of it, 1 nearly nothing; so "
            "many of the steps run. 0 for the pipeline's own default. For NewBie's latent, set denoise.",
        ),
        io.Image.Input(
            "last_image",
            optional=True,
            tooltip="The last frame of a video, for models of a first and a last frame, such as Wan's.",
        ),
    ]


def control_input() -> io.Input:
    """Return the input for a picture that the model follows."""
    return io.Image.Input(
        "control",
        optional=True,
        tooltip="A picture of edges, depth or the like, for models that follow one, such as FLUX.1 Canny and Depth. "
        "Several make a batch, or are for as many prompts.",
    )


def video_input() -> io.Input:
    """Return the input for the frames of a video to start from."""
    return io.Image.Input(
        "video",
        optional=True,
        tooltip="The frames of a video to start from, for models such as Wan: strength is how much is replaced. mask "
        "and control may have as many frames.",
    )


def given_pictures(
    strength: float,
    image: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    last_image: torch.Tensor | None = None,
    control: torch.Tensor | None = None,
    video: torch.Tensor | None = None,
) -> dict[str, Any]:
    """Return the arguments of `sample` and `plan` for these inputs; none for what is not connected."""
    pictures = {"image": image, "last_image": last_image, "control": control, "video": video}
    given: dict[str, Any] = {name: opaque(value) for name, value in pictures.items() if value is not None}
    given |= {} if mask is None else {"mask": mask}
    return given | ({"strength": strength} if strength else {})


def opaque(image: torch.Tensor) -> torch.Tensor:
    """Return a picture without its alpha channel, which some loaders add."""
    return image[..., :3]


def budgets_of(words: str) -> list[int | None]:
    """Parse the budgets of VRAM Plan to bytes; 0 is all that is free, None the own budget of what is planned."""
    sizes: list[int | None] = []
    for word in filter(None, map(str.strip, words.split(","))):
        try:
            sizes.append(parse_bytes(f"{word}GB" if re.fullmatch(r"[\d.]+", word) else word))
        except ValueError:
            raise ValueError(f"vram_gb has {word!r}, which is no size. Write GB, such as 8, 12, 24.") from None
    return sizes or [None]
