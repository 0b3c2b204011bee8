"""Sampler Options: how the transformer computes, and the loop of families that have one of their own."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..pipelines.options import OWNERS, UnknownOptionError
from .shared.inputs import AUTO
from .shared.reference import OptionsType

# The values of widgets that ask for nothing.
_NOTHING: dict[str, Any] = {
    "compile": False, "attention": AUTO, "sampler": AUTO, "shift": 0, "cfg_trunc": 1, "renorm_cfg": 0,
    "first_frame_steps": "", "video_steps": "", "video_guidance": 5, "linear_guidance": False, "denoise": 1,
    "true_cfg": 0,
}  # fmt: skip
# Of diffusers' attention backends. A run reports one that this machine lacks.
_ATTENTION = ["native", "flash", "_flash_3", "sage", "xformers", "flex", "_native_cudnn", "_native_efficient"]


class _Options(io.ComfyNode):
    """Passes on the options that are set. Others are left out, since not every pipeline knows them."""

    @classmethod
    def execute(cls, **chosen: Any) -> io.NodeOutput:
        said = {name: value.strip() if isinstance(value, str) else value for name, value in chosen.items()}
        return io.NodeOutput({name: value for name, value in said.items() if value != _NOTHING[name]})


class ModelOptions(_Options):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastModelOptions",
            display_name="Sampler Options (any model)",
            category="Ballast",
            description="How Offloaded Sampler computes, with any model. By default nothing changes.",
            search_aliases=["torch compile", "sage attention", "flash attention", "sampler options"],
            inputs=_compute_inputs(),
            outputs=[OptionsType.Output("options", tooltip="For Offloaded Sampler.")],
        )


class NewbieOptions(_Options):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastNewbieOptions",
            display_name="Sampler Options (NewBie)",
            category="Ballast",
            description="How Offloaded Sampler computes, and NewBie's own loop. By default nothing changes.",
            search_aliases=["torch compile", "sage attention", "cfg trunc", "renorm cfg", "sampler options"],
            inputs=[*_compute_inputs(), *_newbie_inputs()],
            outputs=[OptionsType.Output("options", tooltip="For Offloaded Sampler with NewBie.")],
        )


class PyramidFlowOptions(_Options):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastPyramidFlowOptions",
            display_name="Sampler Options (Pyramid-Flow)",
            category="Ballast",
            description="How Offloaded Sampler computes, and Pyramid-Flow's own loop. By default nothing changes.",
            search_aliases=["torch compile", "sage attention", "video guidance", "sampler options"],
            inputs=[*_compute_inputs(), *_pyramid_flow_inputs()],
            outputs=[OptionsType.Output("options", tooltip="For Offloaded Sampler with Pyramid-Flow.")],
        )


class SamplerOptions(_Options):
    """The options of all families in one node, for graphs that were saved before each family had its own."""

    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastSamplerOptions",
            display_name="Sampler Options (all families)",
            category="Ballast",
            description="The options of all families in one node, for graphs that have it. Take the one of your "
            "model instead. By default nothing changes.",
            search_aliases=["torch compile", "sage attention", "flash attention", "cfg trunc", "renorm cfg"],
            inputs=[*_compute_inputs(), *_newbie_inputs(), *_pyramid_flow_inputs()],
            outputs=[OptionsType.Output("options", tooltip="For Offloaded Sampler.")],
            is_deprecated=True,
        )


def in_widgets(error: UnknownOptionError) -> Exception:
    """Reword the error for the page, where each option is a widget that can be set to nothing."""
    if not all(name in _NOTHING and name in OWNERS for name in error.names):
        return error
    told = []
    for name in error.names:
        nothing = _NOTHING[name]
        way = "turn it off" if nothing is False else f"set it to {nothing}" if nothing != "" else "empty it"
        told.append(f"{name} is for {OWNERS[name]}, not for {error.title}: {way}")
    return ValueError(f"{'; '.join(told)}.")


def _compute_inputs() -> list[io.Input]:
    """Return the inputs for every model."""
    return [
        io.Boolean.Input(
            "compile",
            default=False,
            tooltip="Compile the transformer's blocks (torch.compile), also streamed ones. The first step then "
            "takes a minute or so, later ones less than without. Off by default.",
        ),
        io.Combo.Input(
            "attention",
            options=[AUTO, *_ATTENTION],
            default=AUTO,
            tooltip="auto is PyTorch's own. Others need a package of their own or a certain GPU, and not every "
            "model takes them; the message says which.",
        ),
    ]


def _newbie_inputs() -> list[io.Input]:
    """Return the inputs for NewBie's loop."""
    return [
        io.Combo.Input(
            "sampler",
            options=[AUTO, "euler", "midpoint"],
            default=AUTO,
            tooltip="NewBie only. auto is euler; midpoint, the official one, calls the model twice a step.",
        ),
        io.Float.Input(
            "shift",
            default=0.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="NewBie only: above 1, more of the steps are spent while the picture is still mostly "
            "noise. 0 for its own value, 6.",
        ),
        io.Float.Input(
            "cfg_trunc",
            default=1.0,
            min=0.0,
            max=1.0,
            step=0.01,
            tooltip="NewBie only: the time from which on there is no guidance, 0 for noise, 1 for the picture. "
            "Steps without it take half as long. The official script has 0.25; 1 is guidance in all steps.",
        ),
        io.Float.Input(
            "renorm_cfg",
            default=0.0,
            min=0.0,
            max=10.0,
            step=0.1,
            tooltip="NewBie only: tames guidance, against burnt colours. With 1 the guided prediction may be "
            "no stronger than the unguided one, with 2 twice as strong. 0 sets no limit. Try 1.",
        ),
    ]


def _pyramid_flow_inputs() -> list[io.Input]:
    """Return the inputs for Pyramid-Flow's loop."""
    return [
        io.String.Input(
            "first_frame_steps",
            default="",
            tooltip="Pyramid-Flow only: steps of the three stages of the first frame, such as 20,20,20. Empty "
            "for twice the sampler's steps.",
        ),
        io.String.Input(
            "video_steps",
            default="",
            tooltip="Pyramid-Flow only: steps of the three stages of each later frame, such as 10,10,10 or the "
            "faster 8,8,8. Empty for the sampler's steps.",
        ),
        io.Float.Input(
            "video_guidance",
            default=5.0,
            min=0.0,
            max=100.0,
            step=0.1,
            tooltip="Pyramid-Flow only: guidance of all frames but the first, which takes the sampler's. 4 "
            "suits videos that start with a picture.",
        ),
        io.Boolean.Input(
            "linear_guidance",
            default=False,
            tooltip="Pyramid-Flow only: let guidance fall by 0.5 with each frame, down to 2.",
        ),
    ]
