"""VRAM Report: which models are where, and the timeline as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from .. import memory
from ..memory.host import management as host
from .free import ON_CPU
from .shared.graph import runs_stages
from .shared.host_events import observe_prompt
from .shared.progress import show_text
from .shared.running import prompt_id, shows_failure

_DRAWN_STAGES = 6
_WIDTH, _HEIGHT, _SCALE = 400, 300, 2.25  # the chart's pixels, and how much larger it is drawn
_OLDER = "Nothing of Ballast ran in this prompt: all came from the cache. The stages are those of the prompt before."


class VramReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVRAMReport",
            display_name="VRAM Report",
            category="Ballast",
            description="Shows which models are in VRAM and RAM, Ballast's and ComfyUI's, what each stage took, and "
            "VRAM over time as a picture.",
            search_aliases=["memory", "timeline", "profile"],
            inputs=[
                io.AnyType.Input(
                    "after",
                    optional=True,
                    tooltip="The last thing that the graph makes, such as the picture: the report is made after it. "
                    "Unconnected it is made at any time, perhaps before anything has run.",
                ),
                io.Int.Input(
                    "stages",
                    default=12,
                    min=1,
                    max=64,
                    optional=True,
                    advanced=True,
                    tooltip="How many of the newest stages to show.",
                ),
                io.Int.Input(
                    "prompts",
                    default=1,
                    min=1,
                    max=64,
                    optional=True,
                    advanced=True,
                    tooltip="How many prompts to show: 1 for this one alone, more for those before it too.",
                ),
            ],
            outputs=[
                io.Image.Output("timeline", tooltip="VRAM over time, by model and stage."),
                io.String.Output("report", tooltip="The same as a table."),
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def fingerprint_inputs(cls, **_: object) -> str:
        # Which the host asks of every node before the first one of a prompt runs.
        observe_prompt()
        return ""

    @classmethod
    @shows_failure
    def execute(cls, stages: int = 12, after: Any = None, prompts: int = 1) -> io.NodeOutput:
        # One picture: of the device that ran last.
        used = [manager for manager in memory.managers() if manager.timeline.stages]
        manager = max(used, key=lambda m: m.timeline.stages[-1].started, default=None)
        is_older = manager is None or manager.timeline.stages[-1].run != prompt_id()
        on = host.device()
        is_on_cpu = is_older and on is not None and on.type == "cpu" and not runs_stages(cls)
        if manager is None or is_on_cpu:
            text = ON_CPU if is_on_cpu else "Nothing has run yet."
            show_text(cls, text)
            blank = torch.ones(1, round(_HEIGHT * _SCALE), round(_WIDTH * _SCALE), 3)
            return io.NodeOutput(blank, text, ui=ui.PreviewText(text))
        state = "\n".join([*[ON_CPU] * manager.accelerator.is_cpu, str(manager.report())])
        timeline = manager.timeline
        remark = f"{_OLDER}\n\n" * is_older
        report = f"{state}\n\n{remark}{timeline.table(stages, prompts)}"
        # The page draws a proportional font and no runs of spaces: lines here, where the output has columns.
        newest = timeline.newest(min(stages, _DRAWN_STAGES), prompts)
        lines = [state.splitlines()[0], *(f"{stage.name}: {stage.summary()}" for stage in newest)]
        show_text(cls, "\n".join([*lines, *[_OLDER] * bool(remark)]))
        picture = np.asarray(timeline.picture(_WIDTH, _HEIGHT, stages, prompts, _SCALE), dtype=np.float32) / 255
        return io.NodeOutput(torch.from_numpy(picture)[None], report, ui=ui.PreviewText(report))
