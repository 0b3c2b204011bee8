"""FP32 VAE Decode: latents to pictures, always in float32."""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING

from comfy_api.latest import InputImpl, Types, io

from .progress import show_text
from .reference import PipelineReference, PipelineType

if TYPE_CHECKING:
    import torch


class VaeDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVAEDecode",
            display_name="FP32 VAE Decode",
            category="ballast",
            description="Decodes latents with weights and latents in float32: whole; in tiles if memory "
            "runs out; then on the CPU. Stops with a clear error instead of saving a black picture.",
            search_aliases=["vae decode", "tiled"],
            inputs=[
                PipelineType.Input("pipeline", tooltip="From Load Pipeline (Ballast); its VAE decodes."),
                io.Latent.Input("latent", tooltip="Latents of this pipeline, or of any model with the same VAE."),
            ],
            outputs=[
                io.Image.Output("image", tooltip="Pictures in RAM; the frames of a video as a batch."),
                io.Video.Output(
                    "video", tooltip="A video in its model's frames a second, for Save Video; else nothing."
                ),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    def execute(cls, pipeline: PipelineReference, latent: dict[str, torch.Tensor]) -> io.NodeOutput:
        pipe = pipeline.open()
        images = pipe.decode(latent["samples"])
        show_text(cls, pipe.manager.timeline.stages[-1].summary())
        if images.ndim == 4:
            return io.NodeOutput(images, None)
        frames = images.flatten(0, 1)
        components = Types.VideoComponents(images=frames, frame_rate=Fraction(pipe.frame_rate))
        return io.NodeOutput(frames, InputImpl.VideoFromComponents(components))
