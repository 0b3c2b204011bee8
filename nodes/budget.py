"""VRAM Budget: a limit in GB for sampling with ComfyUI's own MODEL."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from .shared.progress import show_text, show_text_in
from .shared.running import shows_failure


class VramBudget(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastVramBudget",
            display_name="VRAM Budget",
            category="Ballast",
            description="A VRAM budget in GB for sampling with ComfyUI's own MODEL, whatever loaded it and whatever "
            "samples: LoRA, GGUF, fp8 and ControlNet work as before. ComfyUI still runs the model, so this is a "
            "target, not a cap; the node says what was reached.",
            search_aliases=["vram limit", "reserve vram", "low vram", "offload", "block swap"],
            inputs=[
                io.Model.Input(
                    "model",
                    tooltip="A MODEL from any of ComfyUI's loaders. It stays as it is; its clone has the budget.",
                ),
                io.Float.Input(
                    "vram_gb",
                    default=8.0,
                    min=0.0,
                    max=1024.0,
                    step=0.1,
                    tooltip="VRAM in GB that ComfyUI may hold while this model samples: weights and activations, with "
                    "what other models keep there. 0 sets no budget.",
                ),
            ],
            outputs=[
                io.Model.Output("model_out", display_name="model", tooltip="For KSampler, or any sampler or patch."),
                io.String.Output("report", tooltip="What was set, or why nothing was."),
            ],
            hidden=[io.Hidden.unique_id],
        )

    @classmethod
    @shows_failure
    def execute(cls, model: Any, vram_gb: float) -> io.NodeOutput:
        from .native.model_budget import with_budget

        if not vram_gb:
            text = "no budget"
            show_text(cls, text)
            return io.NodeOutput(model, text, ui=ui.PreviewText(text))
        own = cls.hidden.unique_id if cls.hidden else None
        budgeted = with_budget(model, int(vram_gb * 2**30), lambda text: show_text_in(own, text))
        show_text(cls, budgeted.summary)
        return io.NodeOutput(budgeted.model, budgeted.summary, ui=ui.PreviewText(budgeted.summary))
