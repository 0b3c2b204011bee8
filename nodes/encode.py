"""Staged Text Encode: prompt to conditioning, no encoder stays."""

from __future__ import annotations

from comfy_api.latest import io

from .progress import show_text
from .reference import ConditioningType, PipelineReference, PipelineType


class TextEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastTextEncode",
            display_name="Staged Text Encode",
            category="ballast",
            description="Turns a prompt into conditioning, one text encoder at a time. None of them stays "
            "in VRAM, and a prompt that was ever encoded before loads none at all.",
            search_aliases=["clip text encode", "prompt"],
            inputs=[
                PipelineType.Input("pipeline", tooltip="From Load Pipeline (Ballast)."),
                io.String.Input("prompt", multiline=True, dynamic_prompts=True, default="", tooltip="What to show."),
                io.String.Input(
                    "negative_prompt",
                    multiline=True,
                    dynamic_prompts=True,
                    default="",
                    tooltip="What to avoid. Takes effect when the sampler's guidance is above 1.",
                ),
            ],
            outputs=[
                ConditioningType.Output(
                    "conditioning", tooltip="Both prompts as tensors in RAM, for Offloaded Sampler."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: PipelineReference, prompt: str, negative_prompt: str) -> io.NodeOutput:
        pipe = pipeline.open()
        stages = pipe.manager.timeline.stages
        before = stages[-1] if stages else None
        conditioning = pipe.encode(prompt, negative_prompt)
        ran = bool(stages) and stages[-1] is not before
        show_text(cls, stages[-1].summary() if ran else "from the cache, no encoder loaded")
        return io.NodeOutput(conditioning)
