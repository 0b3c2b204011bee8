"""FP32 VAE Decode: latents to pictures, always in float32."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import folder_paths
from comfy.cli_args import args
from comfy_api.latest import InputImpl, Types, io
from comfy_execution.graph_utils import ExecutionBlocker

from ..memory.host import management as host
from .shared.progress import show_text
from .shared.reference import PipelineReference, PipelineType
from .shared.running import running, shows_failure

if TYPE_CHECKING:
    import torch

_NO_VIDEO = "this pipeline makes pictures, not videos. Use image."
_ADVICE = "Move it to ComfyUI's input folder and open it with Load Latent, to decode it in another way."
_NO_SOUND = "this model draws no sound. Use image."
_LOST = "this latent has no sound. Save Latent, and nodes that change a latent, keep the pictures alone. Use image."
_NO_RATE = "a VAE does not know how many frames a second its video has. Use image, with Create Video."


class VaeDecode(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVAEDecode",
            display_name="FP32 VAE Decode",
            category="Ballast",
            description="Decodes latents with weights and latents in float32: whole if that fits, else in stripes "
            "that give the same picture in little memory; tiles and the CPU are the last resorts. What cannot be "
            "decoded is saved as a latent file; NaN or infinite values stop the run instead of giving a black picture.",
            search_aliases=["vae decode", "tiled"],
            inputs=[
                io.MultiType.Input(
                    "pipeline",
                    [PipelineType, io.Vae],
                    tooltip="From a Ballast loader (Load Pipeline, Load Model Files), or a VAE from any of "
                    "ComfyUI's own, which stays as it is: the node works on a float32 copy in RAM.",
                ),
                io.Latent.Input("latent", tooltip="Latents of this pipeline, or of any model with the same VAE."),
            ],
            outputs=[
                io.Image.Output("image", tooltip="Pictures in RAM; the frames of a video as a batch."),
                io.Video.Output(
                    "video",
                    tooltip="With a video pipeline: a video in its frames a second, with its sound, for Save Video.",
                ),
                io.Audio.Output(
                    "audio",
                    tooltip="The sound of a video, of a pipeline that draws one, such as LTX-2: for Save Audio.",
                ),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt, io.Hidden.extra_pnginfo],
        )

    @classmethod
    @shows_failure
    def execute(cls, pipeline: PipelineReference | Any, latent: dict[str, torch.Tensor]) -> io.NodeOutput:
        from ..pipelines.sampling.latents import samples_of
        from ..pipelines.stock.sound import one_after_the_other

        if not isinstance(pipeline, PipelineReference):
            return cls._decode_natively(pipeline, samples_of(latent))
        pipe, samples = pipeline.open(), samples_of(latent)
        pipe.check_latents(samples)
        with running(cls, pipe, "decoding"), _kept(cls, samples):
            made = pipe.decode_all(samples)
        images, sound = made["images"], made.get("sound")
        silent = ExecutionBlocker(_LOST if pipe.makes_sound else _NO_SOUND)
        if images.ndim == 4:
            return io.NodeOutput(images, ExecutionBlocker(_NO_VIDEO), silent)
        frames = images.flatten(0, 1)
        audio = heard = None
        if sound is not None:
            audio = {"waveform": sound.waveform, "sample_rate": sound.sample_rate}
            heard = audio | {"waveform": one_after_the_other(sound, images.shape[1] / pipe.frame_rate)}
        components = Types.VideoComponents(images=frames, audio=heard, frame_rate=Fraction(pipe.frame_rate))
        return io.NodeOutput(frames, InputImpl.VideoFromComponents(components), audio or silent)

    @classmethod
    def _decode_natively(cls, vae: Any, latents: torch.Tensor) -> io.NodeOutput:
        from .native.vae import decode_native, is_vae

        if not is_vae(vae):
            raise ValueError(
                f"the input is {type(vae).__name__}, neither a Ballast pipeline nor a VAE. A checkpoint without a VAE "
                "gives none: load one with Load VAE."
            )
        if getattr(latents, "is_nested", False):  # several kinds in one latent, pictures first
            latents = latents.unbind()[0]
        with _kept(cls, latents):
            decoded = decode_native(vae, latents)
        show_text(cls, decoded.summary)
        return io.NodeOutput(decoded.images, ExecutionBlocker(_NO_RATE), ExecutionBlocker(_NO_SOUND))


@contextmanager
def _kept(node: type[io.ComfyNode], latents: torch.Tensor) -> Iterator[None]:
    """Save `latents` in the output folder, with prompt and workflow, if the block that decodes them fails."""
    from ..pipelines.decoding.rescue import rescued

    metadata = {}
    if not args.disable_metadata:
        facts = {"prompt": node.hidden.prompt, **(node.hidden.extra_pnginfo or {})}
        metadata = {name: json.dumps(value) for name, value in facts.items()}
    folder = Path(folder_paths.get_output_directory())
    with rescued(latents, folder, "ballast", metadata, _ADVICE, host.is_interrupt):
        yield
