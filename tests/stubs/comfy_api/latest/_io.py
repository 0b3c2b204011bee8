"""What a pack sees as `comfy_api.latest.io`."""

from ._base import (
    AnyType,
    Audio,
    Clip,
    ClipVision,
    ComfyTypeIO,
    Conditioning,
    ControlAfterGenerate,
    ControlNet,
    Custom,
    FolderType,
    Guider,
    Image,
    Input,
    Latent,
    Mask,
    Model,
    Noise,
    NumberDisplay,
    Output,
    Sampler,
    Sigmas,
    UploadType,
    Vae,
    Video,
    WidgetInput,
)
from ._multi import MatchType, MultiType
from ._node import ComfyNode, Hidden, HiddenHolder, NodeInfoV1, NodeOutput, Schema
from ._widgets import Boolean, Combo, Float, Int, String

__all__ = [
    "AnyType", "Audio", "Boolean", "Clip", "ClipVision", "ComfyNode", "ComfyTypeIO", "Combo", "Conditioning",
    "ControlAfterGenerate", "ControlNet", "Custom", "Float", "FolderType", "Guider", "Hidden", "HiddenHolder",
    "Image", "Input", "Int", "Latent", "Mask", "MatchType", "Model", "MultiType", "NodeInfoV1", "NodeOutput",
    "Noise", "NumberDisplay", "Output", "Sampler", "Schema", "Sigmas", "String", "UploadType", "Vae", "Video",
    "WidgetInput",
]
