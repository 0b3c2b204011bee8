"""Offloaded Sampler: conditioning to latents within the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .progress import StepProgress, show_text
from .reference import ConditioningType, PipelineReference, PipelineType

if TYPE_CHECKING:
    from ..pipelines.conditioning import Conditioning


class Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastSampler",
            display_name="Offloaded Sampler",
            category="ballast",
            description="Runs the diffusion transformer within the VRAM budget: whole if it fits, else streamed.",
            search_aliases=["ksampler", "denoise"],
            inputs=[
                PipelineType.Input("pipeline", tooltip="From Load Pipeline (Ballast)."),
                ConditioningType.Input("conditioning", tooltip="From Staged Text Encode, with the same pipeline."),
                io.Int.Input(
                    "width",
                    default=0,
                    min=0,
                    max=16384,
                    step=8,
                    tooltip="Width of the picture in pixels; 0 for the one that the pipeline was made for.",
                ),
                io.Int.Input(
                    "height",
                    default=0,
                    min=0,
                    max=16384,
                    step=8,
                    tooltip="Height of the picture in pixels; 0 for the one that the pipeline was made for.",
                ),
                io.Int.Input(
                    "steps",
                    default=0,
                    min=0,
                    max=1000,
                    tooltip="Denoising steps; 0 for as many as the pipeline was made for.",
                ),
                io.Float.Input(
                    "guidance",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Scale of classifier-free guidance; 0 for what the pipeline was made for. Above 1 the "
                    "negative prompt counts, and each step runs twice. Use 1 for Flux-dev and HunyuanVideo.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The noise to start from: the same as diffusers draws on the CPU from this seed.",
                ),
                io.Int.Input(
                    "frames",
                    default=0,
                    min=0,
                    max=16384,
                    advanced=True,
                    tooltip="Frames of a video; 0 for the pipeline's own number, and for pictures.",
                ),
                io.Combo.Input(
                    "strategy",
                    options=["auto", "resident", "streamed", "leafwise", "cpu"],
                    default="auto",
                    advanced=True,
                    tooltip="auto chooses what fits. resident: the whole transformer in VRAM. streamed: some blocks in "
                    "VRAM, the others pass through. leafwise: one layer at a time, slow, in least memory. cpu: none.",
                ),
            ],
            outputs=[
                io.Latent.Output(
                    "latent", tooltip="For FP32 VAE Decode, or ComfyUI's own VAE Decode with the same VAE."
                )
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(
        cls,
        pipeline: PipelineReference,
        conditioning: Conditioning,
        width: int,
        height: int,
        steps: int,
        guidance: float,
        seed: int,
        frames: int,
        strategy: str,
    ) -> io.NodeOutput:
        pipe = pipeline.open()
        latents = pipe.sample(
            conditioning,
            width=width or None,
            height=height or None,
            steps=steps or None,
            guidance=guidance or None,
            seed=seed,
            frames=frames or None,
            strategy=strategy,
            on_step=StepProgress(cls, pipe, steps or pipe.default_steps, width, height),
        )
        show_text(cls, pipe.manager.timeline.stages[-1].summary())
        return io.NodeOutput({"samples": latents})
