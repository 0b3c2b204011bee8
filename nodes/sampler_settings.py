"""Sampler Settings: by which sampler, shift and schedule a model of diffusers draws."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io

from ..pipelines.sampling.guidance_range import GUIDANCE_RANGE
from ..pipelines.sampling.guider_choice import GUIDER, GUIDERS
from ..pipelines.sampling.scheduler_choice import CLASSES, SAMPLERS, SCHEDULER, SHIFT, SIGMAS
from ..pipelines.sampling.schedules import SCHEDULES
from ..pipelines.sampling.step_cache import CACHE, DEFAULTS, OFF
from ..pipelines.sampling.step_range import END_STEP, START_STEP
from .shared.inputs import AUTO
from .shared.reference import OptionsType


class SamplerSettings(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastSamplerSettings",
            display_name="Sampler Settings (Ballast)",
            category="Ballast",
            description="By which sampler, schedule and shift Offloaded Sampler draws, with models of diffusers. "
            "By default nothing changes.",
            search_aliases=[
                "scheduler",
                "sampler name",
                "cache",
                "teacache",
                "easycache",
                "model sampling",
                "shift",
                "sigmas",
                "few steps",
                "start at step",
                "end at step",
                "two samplers",
                "apg",
                "cfg zero star",
            ],  # fmt: skip
            inputs=[
                io.Combo.Input(
                    "sampler",
                    options=[AUTO, *SAMPLERS, *CLASSES],
                    default=AUTO,
                    tooltip="auto is the model's own. The others are ComfyUI's samplers, then classes of diffusers. "
                    "heun runs the model twice a step. A plan counts that.",
                ),
                io.Combo.Input(
                    "schedule",
                    options=[AUTO, *SCHEDULES],
                    default=AUTO,
                    tooltip="How the noise falls from step to step, by ComfyUI's names. auto is the model's own.",
                ),
                io.Float.Input(
                    "shift",
                    default=0.0,
                    min=0.0,
                    max=100.0,
                    step=0.1,
                    round=0.01,
                    tooltip="Above 1 more of the steps are at high noise. 0 for the model's own, which may depend on "
                    "the size. LoRAs for few steps say which they need, such as 3.",
                ),
                io.Float.Input(
                    "guidance_start",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    optional=True,
                    tooltip="The part of the steps after which guidance begins. Steps before it run the model once.",
                ),
                io.Float.Input(
                    "guidance_end",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.05,
                    round=0.001,
                    optional=True,
                    tooltip="The part of the steps after which guidance ends, such as 0.6. Later steps run the model "
                    "once. A plan counts that. Not for Wan with two transformers: guide each of two samplers alone.",
                ),
                io.Combo.Input(
                    "cache",
                    options=[OFF, *DEFAULTS],
                    default=OFF,
                    optional=True,
                    tooltip="Skip most of the model in some steps, and reuse what it did before: faster, but another "
                    "picture. static skips steps by their number. The others skip where little changes.",
                ),
                io.Float.Input(
                    "cache_amount",
                    default=0.0,
                    min=0.0,
                    max=20.0,
                    step=0.01,
                    round=0.001,
                    optional=True,
                    tooltip="For static: of how many steps one is computed, such as 2. For the others: the change up "
                    "to which steps are skipped. 0 for the usual: 2 for static, 0.05 for easycache and firstblock, "
                    "0.06 for magcache, 0.25 for seacache.",
                ),
                io.Boolean.Input(
                    "once",
                    default=False,
                    optional=True,
                    tooltip="Compute the parts of the model that see no latents once for all steps, where that takes "
                    "less time: their weights need not come again. The picture is the same.",
                ),
                io.Boolean.Input(
                    "lockstep",
                    default=False,
                    optional=True,
                    tooltip="Let the passes of guidance share each copy of streamed weights, where that takes less "
                    "time. The picture is the same.",
                ),
                io.Int.Input(
                    "start_step",
                    default=0,
                    min=0,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip="Go on at this step, counted from 0, with the latent of a sampler that ended there: "
                    "connect it to latent. Its steps, size and schedule are the same. With sampler euler or heun.",
                ),
                io.Int.Input(
                    "end_step",
                    default=0,
                    min=0,
                    max=10000,
                    optional=True,
                    advanced=True,
                    tooltip="End before this step; 0 for all steps. The latent is noisy still: another Offloaded "
                    "Sampler goes on from it, with another model, LoRA or guidance.",
                ),
                io.Boolean.Input(
                    "measure",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="With a cache: sample without it first, and say by how many dB the latents differ. Takes "
                    "both times, of which a plan counts one.",
                ),
                io.Combo.Input(
                    "guider",
                    options=[AUTO, *GUIDERS],
                    default=AUTO,
                    optional=True,
                    advanced=True,
                    tooltip="How the predictions with and without the prompt are combined. auto is the model's own. "
                    "The others are for models that have a guider: modular pipelines, HunyuanVideo 1.5, HunyuanImage.",
                ),
            ],
            outputs=[OptionsType.Output("settings", tooltip="For sampler_settings of Offloaded Sampler or VRAM Plan.")],
        )

    @classmethod
    def execute(
        cls,
        sampler: str,
        schedule: str,
        shift: float,
        guidance_start: float = 0.0,
        guidance_end: float = 1.0,
        cache: str = OFF,
        cache_amount: float = 0.0,
        once: bool = False,
        lockstep: bool = False,
        start_step: int = 0,
        end_step: int = 0,
        measure: bool = False,
        guider: str = AUTO,
    ) -> io.NodeOutput:
        chosen: dict[str, Any] = {SCHEDULER: sampler, SIGMAS: schedule, SHIFT: shift, GUIDER: guider}
        settings = {name: value for name, value in chosen.items() if value not in (AUTO, 0)}
        if (part := (guidance_start, guidance_end)) != (0.0, 1.0):
            settings[GUIDANCE_RANGE] = part
        if cache != OFF:
            settings[CACHE] = f"{cache}:{cache_amount:g}" if cache_amount else cache
        more = {"once": once, "lockstep": lockstep, START_STEP: start_step, END_STEP: end_step, "measure": measure}
        return io.NodeOutput(settings | {name: value for name, value in more.items() if value})
