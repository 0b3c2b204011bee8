"""Offloaded Sampler: conditioning to latents within the budget."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from comfy_api.latest import io

from .options import in_widgets
from .shared.empty_latent import is_empty, size_of
from .shared.inputs import (
    SETTINGS_TOOLTIP,
    batch_input,
    control_input,
    frames_input,
    given_pictures,
    picture_inputs,
    size_inputs,
    step_inputs,
    true_cfg_input,
    video_input,
)
from .shared.progress import StepProgress, latent_format
from .shared.reference import ConditioningType, OptionsType, PipelineReference, PipelineType
from .shared.running import running, shows_failure

if TYPE_CHECKING:
    from ..pipelines.encoding.conditioning import Conditioning


class Sampler(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastSampler",
            display_name="Offloaded Sampler",
            category="Ballast",
            description="Runs the diffusion transformer within the VRAM budget: whole if it fits, else streamed.",
            search_aliases=["ksampler", "denoise"],
            inputs=[
                PipelineType.Input(
                    "pipeline", tooltip="From a Ballast loader, such as Load Pipeline or Load Model Files."
                ),
                ConditioningType.Input("conditioning", tooltip="From Staged Text Encode, with the same pipeline."),
                *size_inputs(),
                *step_inputs(
                    "Denoising steps, for Pyramid-Flow those of each stage; 0 for as many as it was made for.",
                    "Scale of guidance; 0 for what the pipeline was made for. Flux-dev, HunyuanVideo and others that "
                    "are guidance-distilled have a scale of their own, as in FluxGuidance, and each step runs once. "
                    "For all others it is classifier-free guidance: above 1 the negative prompt counts, and each step "
                    "runs twice.",
                ),
                io.Int.Input(
                    "seed",
                    default=0,
                    min=0,
                    max=0xFFFFFFFFFFFFFFFF,
                    control_after_generate=True,
                    tooltip="The noise to start from: the same as diffusers draws on the CPU from this seed.",
                ),
                frames_input(),
                io.Combo.Input(
                    "strategy",
                    options=["auto", "resident", "streamed", "leafwise", "cpu"],
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="auto takes the fastest that fits. resident: the whole transformer in VRAM. streamed: what "
                    "fits stays in VRAM, the rest passes through. leafwise: all passes through, nothing else stays: "
                    "slow, least VRAM. cpu: on the CPU, very slow.",
                ),
                OptionsType.Input("options", optional=True, tooltip="From Sampler Options."),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="An empty latent gives the size, the frames and the batch: leave those widgets as they "
                    "are. Or a picture to start from, from FP32 VAE Encode, for NewBie (image to image: set denoise "
                    "below 1, too) and Pyramid-Flow (it becomes the first frame). Width and height are 0 or its size. "
                    "With start_step of Sampler Settings: what another sampler left.",
                ),
                io.Float.Input(
                    "denoise",
                    default=1.0,
                    min=0.01,
                    max=1.0,
                    step=0.01,
                    optional=True,
                    advanced=True,
                    tooltip="NewBie with a latent connected: 0.3 keeps most of the picture, 0.7 changes much, 1 "
                    "ignores it. Leave it at 1 for everything else.",
                ),
                *picture_inputs(),
                batch_input(),
                control_input(),
                video_input(),
                true_cfg_input(),
                OptionsType.Input("sampler_settings", optional=True, tooltip=SETTINGS_TOOLTIP),
            ],
            outputs=[
                io.Latent.Output(
                    "latent",
                    tooltip="For FP32 VAE Decode, or ComfyUI's own VAE Decode with the same VAE. With end_step of "
                    "Sampler Settings: for another Offloaded Sampler.",
                )
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @shows_failure
    def execute(
        cls,
        pipeline: PipelineReference,
        conditioning: Conditioning,
        width: int,
        height: int,
        steps: int,
        guidance: float,
        seed: int,
        frames: int = 0,
        strategy: str = "auto",
        options: Mapping[str, Any] | None = None,
        latent: Mapping[str, Any] | None = None,
        denoise: float = 1.0,
        strength: float = 0.0,
        batch: int = 1,
        true_cfg: float = 0.0,
        sampler_settings: Mapping[str, Any] | None = None,
        **pictures: Any,
    ) -> io.NodeOutput:
        from ..pipelines.options import UnknownOptionError
        from ..pipelines.sampling.latents import samples_of
        from ..pipelines.sampling.step_range import START_STEP

        further = {**(options or {}), **(sampler_settings or {}), **({"true_cfg": true_cfg} if true_cfg else {})}
        pipe = pipeline.open()
        notes = []
        if latent is not None and is_empty(latent):
            widgets = {"width": width, "height": height, "frames": frames, "batch": batch}
            size = widgets | size_of(latent, latent_format(pipe.decoder_config), widgets)
            width, height, frames, batch = size.values()
            notes = [f"The empty latent gives the size: {width} x {height}{f', {frames} frames' if frames else ''}."]
            latent = None
        if latent is not None and further.get(START_STEP):
            further["latents"], latent = samples_of(latent), None
        if latent is not None:
            further |= {"init_latents": samples_of(latent), **({"denoise": denoise} if denoise < 1 else {})}
        elif denoise < 1:
            raise ValueError(
                f"denoise is {denoise}, but no latent is connected to start from. Connect one, or set it to 1."
            )
        if latent is not None and not pipe.starts_from_latents:
            raise ValueError(f"{pipe.title} starts from noise only. Disconnect latent.")
        given = pipeline.following(given_pictures(strength, **pictures))
        try:
            notes += pipe.sampling_notes(conditioning, guidance or None, **further)
            notes += pipe.picture_notes(conditioning, width or None, height or None, **given)
            with running(cls, pipe, "sampling", notes=notes):
                latents = pipe.sample(
                    conditioning,
                    width=width or None,
                    height=height or None,
                    steps=steps or None,
                    guidance=guidance or None,
                    seed=seed,
                    frames=frames or None,
                    strategy=strategy,
                    batch=batch,
                    on_step=StepProgress(cls, pipe, steps or pipe.default_steps, width, height),
                    **given,
                    **further,
                )
        except UnknownOptionError as error:
            raise in_widgets(error) from None
        return io.NodeOutput({"samples": latents})
