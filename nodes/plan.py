"""VRAM Plan: what a run will take, and why, before it runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from .. import memory
from .options import in_widgets
from .shared.inputs import (
    SETTINGS_TOOLTIP,
    batch_input,
    budgets_of,
    control_input,
    frames_input,
    given_pictures,
    picture_inputs,
    size_inputs,
    step_inputs,
    true_cfg_input,
    video_input,
)
from .shared.progress import show_text
from .shared.reference import ConditioningType, OptionsType, PipelineReference, PipelineType
from .shared.running import shows_failure

if TYPE_CHECKING:
    from PIL.Image import Image

    from ..memory.planning.runplan import RunPlan
    from ..pipelines.encoding.conditioning import Conditioning

# Pixels of a chart, alone or of several, drawn twice as large: nodes show it at about half of that, letters included.
_WIDTH, _ALONE, _EACH, _SCALE = 450, 320, 265, 2.0
_FREE_STEP_BYTES = 2**28  # free memory differs by less from one moment to the next


class VramPlan(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVRAMPlan",
            display_name="VRAM Plan",
            category="Ballast",
            description="Says what a run would take and why: VRAM, RAM and seconds, for one VRAM budget or several. "
            "Loads nothing and needs no GPU. The plan is made again when an input changes or, as long as no budget is "
            "stated here, when the free VRAM does.",
            search_aliases=["memory", "estimate", "forecast", "fits"],
            inputs=[
                io.MultiType.Input(
                    "pipeline",
                    [PipelineType, io.Model],
                    tooltip="From a Ballast loader (Load Pipeline, Load Model Files), or a MODEL from any of "
                    "ComfyUI's own, with its LoRAs and VRAM Budget: the plan is then for ComfyUI's samplers, an "
                    "estimate.",
                ),
                *size_inputs(),
                *step_inputs(
                    "Denoising steps; 0 for as many as the pipeline was made for.",
                    "Scale of guidance; 0 for what the pipeline was made for. Above 1 each step runs twice, but for "
                    "models that are guidance-distilled (Flux-dev, HunyuanVideo).",
                ),
                io.String.Input(
                    "vram_gb",
                    default="",
                    tooltip="VRAM budgets to plan for, in GB with commas between them, such as 8, 12, 24; a unit may "
                    "be given, as in 512MB. 0 for all that is free, as in the loader. Empty for the loader's own "
                    "budget.",
                ),
                frames_input(),
                io.Combo.Input(
                    "strategy",
                    options=["auto", "resident", "streamed", "leafwise"],
                    default="auto",
                    optional=True,
                    advanced=True,
                    tooltip="As in Offloaded Sampler: auto chooses what is fastest of what fits.",
                ),
                io.MultiType.Input(
                    "conditioning",
                    [ConditioningType, io.Conditioning],
                    optional=True,
                    tooltip="From Staged Text Encode: the plan is then for sampling from it and decoding. Without, it "
                    "is for a prompt of usual length, encoding included. With a MODEL, ComfyUI's own conditioning.",
                ),
                *picture_inputs(),
                io.Boolean.Input(
                    "compare_weights",
                    default=False,
                    optional=True,
                    advanced=True,
                    tooltip="Also say what each choice of weights in the loader would take and gain: as they are "
                    "stored, exact12, int8 and fp8.",
                ),
                batch_input(),
                control_input(),
                video_input(),
                io.Latent.Input(
                    "latent",
                    optional=True,
                    tooltip="With a MODEL: the latents that it is to sample, which give size, frames and batch.",
                ),
                true_cfg_input(),
                OptionsType.Input("sampler_settings", optional=True, tooltip=SETTINGS_TOOLTIP),
            ],
            outputs=[
                io.Image.Output("timeline", tooltip="Predicted VRAM over time, one picture above the other."),
                io.String.Output("plan", tooltip="The plan as tables, with the reasons."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
        )

    @classmethod
    @shows_failure
    def execute(
        cls,
        pipeline: PipelineReference | Any,
        width: int,
        height: int,
        steps: int,
        guidance: float,
        vram_gb: str,
        frames: int = 0,
        strategy: str = "auto",
        conditioning: Conditioning | Any = None,
        strength: float = 0.0,
        compare_weights: bool = False,
        batch: int = 1,
        latent: dict[str, Any] | None = None,
        true_cfg: float = 0.0,
        sampler_settings: Mapping[str, Any] | None = None,
        **pictures: Any,
    ) -> io.NodeOutput:
        from ..pipelines.options import UnknownOptionError
        from ..pipelines.planning.plans import NoBudgetError

        budgets = budgets_of(vram_gb)
        size = {"width": width or None, "height": height or None, "frames": frames or None}
        further: dict[str, Any] = {} if strategy == "auto" else {"strategy": strategy}
        further |= {"batch": batch} if batch > 1 else {}
        further |= {"true_cfg": true_cfg} if true_cfg else {}
        further |= given_pictures(strength, **pictures)
        try:
            if isinstance(pipeline, PipelineReference):
                if latent is not None:
                    raise ValueError("latent is for ComfyUI's MODEL. Set width and height for a Ballast pipeline.")
                asked = {"cond": conditioning, "steps": steps or None, "guidance": guidance or None, **size, **further}
                asked = pipeline.following(asked)
                asked |= {name: value for name, value in (sampler_settings or {}).items() if name != "measure"}
                return cls._plan_pipeline(pipeline, budgets, asked, compare_weights)
            if compare_weights:
                raise ValueError("compare_weights is for a Ballast pipeline. ComfyUI's MODEL runs as it is stored.")
            if true_cfg:
                raise ValueError("true_cfg is for a Ballast pipeline. Set it to 0: guidance is MODEL's cfg.")
            if sampler_settings:
                raise ValueError("sampler_settings is for a Ballast pipeline. MODEL has a sampler of its own.")
            from .native.model_plan import Work, check_inputs, plan_model, shape_of

            check_inputs(pipeline, conditioning, further)
            shape = shape_of(pipeline, latent, width, height, frames)
            plan = plan_model(pipeline, Work(shape, guidance, conditioning), budgets)
        except NoBudgetError:
            raise NoBudgetError("8, 12, 24 in vram_gb") from None
        except UnknownOptionError as error:
            raise in_widgets(error) from None
        picture = plan.picture(_WIDTH, _height(budgets), _SCALE)
        return cls._shown(str(plan), "\n".join([plan.title, *plan.facts(), *plan.verdicts()]), picture)

    @classmethod
    def _plan_pipeline(
        cls, reference: PipelineReference, budgets: list[int | None], asked: dict[str, Any], compare_weights: bool
    ) -> io.NodeOutput:
        from ..memory.planning.runplan import compare, draw_plans

        pipe = reference.open()
        asked = {**asked, "negative_prompt": ""}  # as Staged Text Encode encodes at least
        plans = [pipe.plan(vram=budget, **asked) for budget in budgets]
        text = str(plans[0]) if len(plans) == 1 else compare(plans)
        if compare_weights:
            text = "\n\n".join([text, *_choices(reference, budgets, asked)])
        return cls._shown(text, _lines(plans), draw_plans(plans, _WIDTH, _height(budgets), _SCALE))

    @classmethod
    def _shown(cls, text: str, lines: str, drawn: Image) -> io.NodeOutput:
        show_text(cls, lines)
        picture = np.asarray(drawn, dtype=np.float32) / 255
        return io.NodeOutput(torch.from_numpy(picture)[None], text, ui=ui.PreviewText(text))

    @classmethod
    def fingerprint_inputs(cls, vram_gb: str, **_: object) -> str:
        # Without a budget it may be what is free. The pipeline, which knows, cannot be seen from here.
        gpus = [manager for manager in memory.managers() if not manager.accelerator.is_cpu]
        free = [f"{manager.device}: {manager.budget_bytes // _FREE_STEP_BYTES}" for manager in gpus]
        try:
            return "" if all(budgets_of(vram_gb)) else "; ".join(free)
        except ValueError:  # which `execute` reports
            return ""


def _height(budgets: list[int | None]) -> int:
    return _ALONE if len(budgets) == 1 else _EACH


def _choices(reference: PipelineReference, budgets: list[int | None], asked: dict[str, Any]) -> Iterator[str]:
    """Yield a table for each budget: what each choice of weights would take and gain."""
    from ..pipelines.planning.choices import CHOICES, compare_weights

    opened = {choice: reference.holding(choice).open() for choice in CHOICES}
    for budget in budgets:
        yield compare_weights({choice: pipe.plan(vram=budget, **asked) for choice, pipe in opened.items()})


def _lines(plans: list[RunPlan]) -> str:
    """Summarise plans in short lines: the page draws a proportional font in a narrow node."""
    one = plans[0]
    lines = [f"{one.model}, {one.work}, {one.steps} steps", *(plan.brief() for plan in plans)]
    return "\n".join(lines if len(plans) > 1 else [*lines, one.reason, f"{one.batch_words()}{one.disk_words()}"])
