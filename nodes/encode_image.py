"""FP32 VAE Encode: a picture to a latent to start from, in float32."""

from __future__ import annotations

from typing import TYPE_CHECKING

from comfy_api.latest import io

from .shared.reference import PipelineReference, PipelineType
from .shared.running import running, shows_failure

if TYPE_CHECKING:
    import torch


class VaeEncode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVAEEncode",
            display_name="FP32 VAE Encode",
            category="Ballast",
            description="Turns a picture into a latent for the sampler's latent input, with the pipeline's own VAE in "
            "float32. The VAE leaves VRAM when it is done.",
            search_aliases=["image to image", "image to video"],
            inputs=[
                PipelineType.Input(
                    "pipeline", tooltip="From a Ballast loader, such as Load Pipeline or Load Model Files."
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
    @shows_failure
    def execute(cls, pipeline: PipelineReference, image: torch.Tensor) -> io.NodeOutput:
        pipe = pipeline.open()
        with running(cls, pipe, "encoding") as notes:
            latents = pipe.encode_image(image[..., :3])
            notes += cropping(image, latents)
        return io.NodeOutput({"samples": latents})


def cropping(image: torch.Tensor, latents: torch.Tensor) -> list[str]:
    """Say which part of a picture its latent leaves out, in a sentence; empty if none."""
    whole, found = image.shape[1:3], latents.shape[-2:]
    # A latent pixel has a power of two on each side; what is left over at the end has none.
    times = [pixels // max(1, count) for pixels, count in zip(whole, found, strict=True)]
    height, width = (count << (most.bit_length() - 1) for count, most in zip(found, times, strict=True))
    if (height, width) == tuple(whole):
        return []
    return [f"The picture is cropped to {width} x {height}, from {whole[1]} x {whole[0]}."]
