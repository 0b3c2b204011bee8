"""Staged Text Encode: prompt to conditioning, no encoder stays."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from .shared.progress import show_text
from .shared.reference import ConditioningType, PipelineReference, PipelineType
from .shared.running import running, shows_failure

_FOR_PIPELINES = (
    "conditioning is for Ballast's loaders, but a CLIP is connected. Use positive and negative, or connect a Ballast "
    "pipeline."
)
_FOR_CLIPS = (
    "positive and negative are for ComfyUI's own CLIP, but a Ballast pipeline is connected. Use conditioning, or "
    "connect a CLIP."
)


class TextEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastTextEncode",
            display_name="Staged Text Encode",
            category="Ballast",
            description="Turns a prompt into conditioning, one text encoder at a time. None of them stays in VRAM. The "
            "same prompt and negative prompt, encoded before, come from the cache and load none.",
            search_aliases=["clip text encode", "prompt"],
            inputs=[
                io.MultiType.Input(
                    "pipeline",
                    [PipelineType, io.Clip],
                    tooltip="From a Ballast loader (Load Pipeline, Load NewBie), or a CLIP from any of ComfyUI's own, "
                    "with its LoRAs and clip skip.",
                ),
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
                    "conditioning",
                    tooltip="With a Ballast pipeline: both prompts as tensors in RAM, for Offloaded Sampler.",
                ),
                io.Conditioning.Output(
                    "positive", tooltip="With a CLIP: what CLIP Text Encode makes of the prompt, for KSampler."
                ),
                io.Conditioning.Output(
                    "negative", tooltip="With a CLIP: what CLIP Text Encode makes of the negative prompt."
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @shows_failure
    def execute(cls, pipeline: PipelineReference | Any, prompt: str, negative_prompt: str) -> io.NodeOutput:
        if not isinstance(pipeline, PipelineReference):
            return cls._encode_natively(pipeline, prompt, negative_prompt)
        pipe = pipeline.open()
        with running(cls, pipe, "encoding", idle="from the cache, no encoder loaded") as notes:
            conditioning = pipe.encode(prompt, negative_prompt)
            notes += conditioning.notes
        blocked = ExecutionBlocker(_FOR_CLIPS)
        return io.NodeOutput(conditioning, blocked, blocked)

    @classmethod
    def _encode_natively(cls, clip: Any, prompt: str, negative_prompt: str) -> io.NodeOutput:
        from .native.clip import encode_prompts, is_clip, native_cache

        if not is_clip(clip):
            raise ValueError(
                f"the input is {type(clip).__name__}, neither a Ballast pipeline nor a CLIP. A checkpoint without a "
                "text encoder gives none: load one with Load CLIP."
            )
        encoded = encode_prompts(clip, [prompt, negative_prompt], native_cache())
        show_text(cls, encoded.summary)
        return io.NodeOutput(ExecutionBlocker(_FOR_PIPELINES), *encoded.conditionings)
