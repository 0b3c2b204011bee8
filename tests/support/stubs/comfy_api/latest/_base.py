"""Slots of a node, and the plain socket types."""

from __future__ import annotations

from enum import Enum
from typing import Any


def drop_none(entries: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entries.items() if value is not None}


class NumberDisplay(str, Enum):
    number = "number"
    slider = "slider"
    gradient_slider = "gradientslider"


class ControlAfterGenerate(str, Enum):
    fixed = "fixed"
    increment = "increment"
    decrement = "decrement"
    randomize = "randomize"


class FolderType(str, Enum):
    input = "input"
    output = "output"
    temp = "temp"


class UploadType(str, Enum):
    image = "image_upload"
    audio = "audio_upload"
    video = "video_upload"
    model = "file_upload"


class _Slot:
    Parent: Any = None

    @property
    def io_type(self) -> str:
        return self.Parent.io_type

    @property
    def Type(self) -> Any:
        return self.Parent.Type

    def get_io_type(self) -> str:
        return self.io_type

    def validate(self) -> None:
        pass


class Input(_Slot):
    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        self.id = id
        self.display_name = display_name
        self.optional = optional
        self.tooltip = tooltip
        self.lazy = lazy
        self.extra_dict = extra_dict or {}
        self.rawLink = raw_link
        self.advanced = advanced

    def as_dict(self) -> dict[str, Any]:
        own = {
            name: getattr(self, name) for name in ("display_name", "optional", "tooltip", "lazy", "rawLink", "advanced")
        }
        return drop_none(own) | drop_none(self.extra_dict)

    def get_all(self) -> list[Input]:
        return [self]


class WidgetInput(Input):
    def __init__(
        self,
        id: str,
        display_name: str | None = None,
        optional: bool = False,
        tooltip: str | None = None,
        lazy: bool | None = None,
        default: Any = None,
        socketless: bool | None = None,
        widget_type: str | None = None,
        force_input: bool | None = None,
        extra_dict: dict | None = None,
        raw_link: bool | None = None,
        advanced: bool | None = None,
    ):
        super().__init__(id, display_name, optional, tooltip, lazy, extra_dict, raw_link, advanced)
        self.default = default
        self.socketless = socketless
        self.widget_type = widget_type
        self.force_input = force_input

    def get_io_type(self) -> str:
        return self.io_type if self.widget_type is None else self.widget_type

    def as_dict(self) -> dict[str, Any]:
        return super().as_dict() | drop_none(
            {
                "default": self.default,
                "socketless": self.socketless,
                "widgetType": self.widget_type,
                "forceInput": self.force_input,
            }
        )


class Output(_Slot):
    def __init__(
        self,
        id: str | None = None,
        display_name: str | None = None,
        tooltip: str | None = None,
        is_output_list: bool = False,
    ):
        self.id = id
        self.display_name = display_name or id
        self.tooltip = tooltip
        self.is_output_list = is_output_list

    def as_dict(self) -> dict[str, Any]:
        return drop_none(
            {
                "display_name": self.display_name or self.id,
                "tooltip": self.tooltip,
                "is_output_list": self.is_output_list,
            }
        )


class ComfyTypeIO:
    """A socket type. A subclass made with `io_type=` gets Input and Output classes of its own."""

    io_type: str | None = None
    Type: Any = Any
    Input: type = Input
    Output: type = Output

    def __init_subclass__(cls, io_type: str | None = None, **kwargs: Any):
        super().__init_subclass__(**kwargs)
        if io_type is None:
            return
        cls.io_type = io_type
        for name in ("Input", "Output"):
            base = getattr(cls, name)
            setattr(cls, name, type(name, (base,), {"Parent": cls, "__module__": cls.__module__}))


def Custom(io_type: str) -> type[ComfyTypeIO]:
    class CustomComfyType(ComfyTypeIO, io_type=io_type):
        pass

    return CustomComfyType


def _declare(name: str, io_type: str) -> type[ComfyTypeIO]:
    return type(ComfyTypeIO)(name, (ComfyTypeIO,), {"__module__": __name__}, io_type=io_type)


AnyType = _declare("AnyType", "*")
Audio = _declare("Audio", "AUDIO")
Clip = _declare("Clip", "CLIP")
ClipVision = _declare("ClipVision", "CLIP_VISION")
Conditioning = _declare("Conditioning", "CONDITIONING")
ControlNet = _declare("ControlNet", "CONTROL_NET")
Guider = _declare("Guider", "GUIDER")
Image = _declare("Image", "IMAGE")
Latent = _declare("Latent", "LATENT")
Mask = _declare("Mask", "MASK")
Model = _declare("Model", "MODEL")
Noise = _declare("Noise", "NOISE")
Sampler = _declare("Sampler", "SAMPLER")
Sigmas = _declare("Sigmas", "SIGMAS")
Vae = _declare("Vae", "VAE")
Video = _declare("Video", "VIDEO")
