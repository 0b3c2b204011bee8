"""VRAM Report: which models are where, and the timeline as a picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from comfy_api.latest import io, ui

from ..memory.manager import managers
from .progress import show_text

_DRAWN_STAGES = 6


class VramReport(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVRAMReport",
            display_name="VRAM Report",
            category="ballast",
            description="Shows which models are in VRAM and RAM, what each stage took, and VRAM over time "
            "as a picture.",
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
                    advanced=True,
                    tooltip="How many of the newest stages to show.",
                ),
            ],
            outputs=[
                io.Image.Output("timeline", tooltip="VRAM over time, by model and stage."),
                io.String.Output("report", tooltip="The same as a table."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(cls, stages: int, after: Any = None) -> io.NodeOutput:
        # One picture: of the device that ran last.
        used = [manager for manager in managers() if manager.timeline.stages]
        if not used:
            text = "Nothing has run yet."
            show_text(cls, text)
            return io.NodeOutput(torch.ones(1, 450, 900, 3), text, ui=ui.PreviewText(text))
        manager = max(used, key=lambda m: m.timeline.stages[-1].started)
        state = str(manager.report())
        report = f"{state}\n\n{manager.timeline.table(stages)}"
        # The page draws a proportional font and no runs of spaces: lines here, where the output has columns.
        newest = list(manager.timeline.stages)[-min(stages, _DRAWN_STAGES) :]
        show_text(cls, "\n".join([state.splitlines()[0], *(f"{s.name}: {s.summary()}" for s in newest)]))
        picture = np.asarray(manager.timeline.picture(900, 450, stages), dtype=np.float32) / 255
        return io.NodeOutput(torch.from_numpy(picture)[None], report, ui=ui.PreviewText(report))
