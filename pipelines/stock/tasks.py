"""Which class of diffusers runs a task: the folder's own, or its sister that takes pictures, on the same components."""

from __future__ import annotations

import inspect
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..encoding.pictures import Frames, Pictures
from ..files.trust import named_class
from .signatures import encoding_of, needed_inputs

VIDEOS = frozenset(
    {"video", "mask_video", "control_video", "conditioning_frames", "driving_video"}
)  # which calls take as a list of frames
# Pictures that calls take.
INPUTS = VIDEOS | {
    "image", "images", "mask_image", "mask", "last_image", "image_reference", "reference_images",
    "control_image", "control_mask",
}  # fmt: skip
EDITED = ("image", "images")  # what calls name the pictures that they edit
_KINDS = ("", "Img2Img", "Inpaint", "Inpainting", "ImageToVideo", "VideoToVideo")
_KIND = re.compile("(?:Img2Img|Inpaint(?:ing)?|ImageToVideo|VideoToVideo)?Pipeline$")
_MASKS = ("mask_image", "control_mask", "mask_video", "mask")  # what calls name it, the first that is there
_CONTROLS = ("control_image", "control_video", "conditioning_frames")
# What inputs are called here.
WORDS = {
    "mask_image": "mask", "mask_video": "mask", "control_image": "control", "control_video": "control",
    "control_mask": "mask", "conditioning_frames": "control", "driving_video": "video",
}  # fmt: skip


@dataclass(frozen=True)
class Task:
    """The class that runs a task, and the pictures by the arguments of its call."""

    cls: Any
    pictures: dict[str, tuple[torch.Tensor, ...]]


def task_of(cls: type, title: str, pictures: Pictures) -> Task:
    """Return the task of class `cls` for these pictures. Raises ValueError, in one line, if there is none."""
    own = parameters(cls)
    references, image = pictures.references, pictures.image
    if reads_pictures(cls) and image:
        raise ValueError(f"{title} reads its pictures with the prompt. Give them to encode, and none to sample.")
    ways: list[dict[str, tuple[torch.Tensor, ...]]] = [{"image": image or references}]
    if references and "image" not in own:
        ways = [{"images": references}]
    if references and (image or "image_reference" in own):
        ways = [{"image": image, "image_reference": references}]
    if references and "reference_images" in own:
        ways = [{"image": image, "reference_images": references}]
    wanted = {"image", *_CONTROLS[:1]}
    for way in ways:
        way |= {"last_image": pictures.last_image, "video": pictures.video}
        for found in _candidates(cls):
            call = parameters(found)
            mask = next((name for name in _MASKS if name in call), _MASKS[0])
            control = control_input(found)
            if pictures.control and way.get(control):
                continue  # one picture to follow, and another to start from
            followed = {control: pictures.control} if pictures.control else {}
            given = {k: v for k, v in (way | {mask: pictures.mask} | followed).items() if v}
            wanted = {*given, *({"strength"} if pictures.strength is not None else ())}
            missing = set(needed_inputs(found)) - given.keys()
            if wanted <= call.keys() and (not missing or (missing == {"image"} and "video" in given)):
                return Task(found, {k: Frames(v) if takes_frames(k, call) else v for k, v in given.items()})
    words = {**WORDS, "image_reference": "images with the prompt and image beside them"}
    names = ", ".join(words.get(name, name) for name in sorted(wanted))
    raise ValueError(f"{title} takes no {names}: diffusers has no pipeline of its parts that does. Leave it out.")


def control_input(cls: Any) -> str:
    """Return the argument of the class's call that is the picture to follow: `image` of Stable Diffusion's classes."""
    call = parameters(cls)
    usual = next((name for name in _CONTROLS if name in call), _CONTROLS[0])
    return "image" if usual not in call and "ControlNet" in cls.__name__ else usual


def takes_frames(name: str, call: Mapping[str, Any]) -> bool:
    """Return whether an argument of a call is the frames of one video."""
    return name in VIDEOS or (name == "mask" and "video" in call)


def controlnet_class(index: Mapping[str, Any], kinds: Mapping[Path, str]) -> Any:
    """Return the class that runs a model with ControlNets of these classes.

    ValueError, in one line, where there is none.
    """
    import diffusers

    own = index["_class_name"]
    cls: Any = named_class(diffusers, _KIND.sub("ControlNetPipeline", own))
    if "ControlNet" in own or cls is None:
        raise ValueError(f"diffusers has no pipeline for {own} with a ControlNet. Leave it out.")
    takes = set(re.findall(r"\w*ControlNet\w*", str(inspect.signature(cls).parameters["controlnet"].annotation)))
    for path, kind in kinds.items():
        if takes and kind not in takes:
            family = kind.partition("ControlNet")[0] or "Stable Diffusion"
            raise ValueError(f"{path} holds a {kind}: this ControlNet is for {family}, not for {own}.")
    return cls


def several_controlnets(nets: Sequence[Any]) -> Any:
    """Return a module of diffusers that calls several ControlNets of one kind, and adds what they make.

    ValueError, in one line, where diffusers has none.
    """
    import diffusers

    kind = nets[0].__class__.__name__  # of a stand-in that of its unit
    cls: Any = named_class(diffusers, kind.replace("ControlNetModel", "MultiControlNetModel"))
    if cls is None:
        raise ValueError(f"diffusers runs one {kind} at a time. Leave the others out.")
    return cls(list(nets))


def parameters(cls: Any) -> dict[str, inspect.Parameter]:
    """Return the parameters of the class's call."""
    return dict(inspect.signature(cls.__call__).parameters)


def reads_pictures(cls: Any) -> bool:
    """Return whether the text encoder is given pictures with the prompt."""
    encode: Any = encoding_of(cls)
    return "image" in inspect.signature(encode).parameters


def edits(cls: Any) -> bool:
    """Return whether pictures belong to the prompt: those to edit, or to take something from."""
    call = parameters(cls)
    frames = any("frames" in name or name == "video_length" for name in call)
    return (
        reads_pictures(cls)
        or "image_reference" in call
        or (not call.keys().isdisjoint(EDITED) and "strength" not in call and not frames)
    )


def _candidates(cls: type) -> Collection[Any]:
    import diffusers

    stem = _KIND.sub("", cls.__name__)
    sisters = (named_class(diffusers, f"{stem}{kind}Pipeline") for kind in _KINDS)
    return [cls, *(sister for sister in sisters if sister is not None and sister is not cls)]
