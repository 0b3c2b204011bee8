"""Sampler Options: how the transformer computes, and the loop of families that have one of their own."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..pipelines.options import OWNERS, UnknownOptionError
from .shared.option_inputs import AUTO, compute_inputs, newbie_inputs, pyramid_flow_inputs
from .shared.reference import OptionsType

# What widgets have where they ask for nothing.
_NOTHING: dict[str, Any] = {
    "compile": False, "attention": AUTO, "sampler": AUTO, "shift": 0, "cfg_trunc": 1, "renorm_cfg": 0,
    "first_frame_steps": "", "video_steps": "", "video_guidance": 5, "linear_guidance": False, "denoise": 1,
    "true_cfg": 0,
}  # fmt: skip


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
            inputs=compute_inputs(),
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
            inputs=[*compute_inputs(), *newbie_inputs()],
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
            inputs=[*compute_inputs(), *pyramid_flow_inputs()],
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
            inputs=[*compute_inputs(), *newbie_inputs(), *pyramid_flow_inputs()],
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
