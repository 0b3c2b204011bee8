"""VAE Encode (Ballast): a picture to a latent to start from, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .reference import PipelineReference, PipelineType
from .running import running

if TYPE_CHECKING:
    import torch


class VaeEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVAEEncode",
            display_name="VAE Encode (Ballast)",
            category="ballast",
            description="Turns a picture into a latent for the sampler's latent input, with the pipeline's own VAE in "
            "float32. The VAE leaves VRAM when it is done.",
            search_aliases=["image to image", "image to video"],
            inputs=[
                PipelineType.Input(
                    "pipeline", tooltip="From a Ballast loader: Load Pipeline (Ballast) or Load NewBie (split files)."
                ),
                io.Image.Input(
                    "image",
                    tooltip="Its size is that of the result: multiples of 64 for Pyramid-Flow, of 16 for NewBie.",
                ),
            ],
            outputs=[io.Latent.Output("latent", tooltip="For Offloaded Sampler, with the same pipeline.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(cls, pipeline: PipelineReference, image: torch.Tensor) -> io.NodeOutput:
        pipe = pipeline.open()
        with running(cls, pipe, "encoding"):
            latents = pipe.encode_image(image[..., :3])
        return io.NodeOutput({"samples": latents})
