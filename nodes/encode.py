"""Staged Text Encode: prompt to conditioning, no encoder stays."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker

from .shared.inputs import opaque
from .shared.progress import show_text
from .shared.reference import ConditioningType, PipelineReference, PipelineType
from .shared.running import running, shows_failure

if TYPE_CHECKING:
    import torch

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
                    tooltip="From a Ballast loader (Load Pipeline, Load Model Files), or a CLIP from any of "
                    "ComfyUI's own, with its LoRAs and clip skip.",
                ),
                io.String.Input("prompt", multiline=True, dynamic_prompts=True, default="", tooltip="What to show."),
                io.String.Input(
                    "negative_prompt",
                    multiline=True,
                    dynamic_prompts=True,
                    default="",
                    tooltip="What to avoid. Takes effect when the sampler's guidance is above 1; with a model that is "
                    "guidance-distilled (Flux-dev, HunyuanVideo), when its true_cfg is.",
                ),
                io.Image.Input(
                    "images",
                    optional=True,
                    tooltip="For edit models (Flux Kontext, Flux.2, Qwen-Image-Edit): the picture to edit, or several "
                    "to take things from. They stay with the conditioning; the sampler needs no more. Pictures of "
                    "unequal size: connect one here and the others to images_2 and images_3.",
                ),
                *(
                    io.Image.Input(name, optional=True, tooltip="For edit models: further pictures, of another size.")
                    for name in ("images_2", "images_3")
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
    def execute(
        cls,
        pipeline: PipelineReference | Any,
        prompt: str,
        negative_prompt: str,
        images: torch.Tensor | None = None,
        images_2: torch.Tensor | None = None,
        images_3: torch.Tensor | None = None,
    ) -> io.NodeOutput:
        pictures = [opaque(given) for given in (images, images_2, images_3) if given is not None]
        if not isinstance(pipeline, PipelineReference):
            if pictures:
                raise ValueError("images are for Ballast's pipelines, but a CLIP is connected. Disconnect them.")
            return cls._encode_natively(pipeline, prompt, negative_prompt)
        pipe = pipeline.open()
        with running(cls, pipe, "encoding", idle="from the cache, no encoder loaded") as notes:
            conditioning = pipe.encode(prompt, negative_prompt, images=pictures or None)
            notes += conditioning.notes
        blocked = ExecutionBlocker(_FOR_CLIPS)
        return io.NodeOutput(conditioning, blocked, blocked)

    @classmethod
    def _encode_natively(cls, clip: Any, prompt: str, negative_prompt: str) -> io.NodeOutput:
        from ..pipelines.staged.prompts import check_text
        from .native.clip import encode_prompts, is_clip

        if not is_clip(clip):
            raise ValueError(
                f"the input is {type(clip).__name__}, neither a Ballast pipeline nor a CLIP. A checkpoint without a "
                "text encoder gives none: load one with Load CLIP."
            )
        check_text(prompt, negative_prompt)
        encoded = encode_prompts(clip, [prompt, negative_prompt])
        show_text(cls, encoded.summary)
        return io.NodeOutput(ExecutionBlocker(_FOR_PIPELINES), *encoded.conditionings)
