"""Free VRAM: evicts models and passes a value through."""

from __future__ import annotations

from typing import Any

from comfy_api.latest import io, ui

from ..memory import host
from ..memory.manager import managers
from ..memory.sizes import format_bytes
from ..memory.unit import Role
from .progress import show_text


class FreeVram(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        anything = io.MatchType.Template("value")
        return io.Schema(
            node_id="BallastFreeVRAM",
            display_name="Free VRAM",
            category="ballast",
            description="Evicts models from VRAM when its input is ready, and hands the input on. Whatever "
            "left is loaded again when it is needed.",
            search_aliases=["unload models", "clear vram", "empty cache"],
            inputs=[
                io.MatchType.Input(
                    "value",
                    template=anything,
                    optional=True,
                    tooltip="Anything. Put the node between two others to run there.",
                ),
                io.Boolean.Input("text_encoders", default=True, tooltip="Evict Ballast's text encoders."),
                io.Boolean.Input("transformers", default=True, tooltip="Evict Ballast's transformers."),
                io.Boolean.Input("vaes", default=True, tooltip="Evict Ballast's VAEs and other models."),
                io.Boolean.Input("host_models", default=True, tooltip="Ask ComfyUI to unload its own models too."),
            ],
            outputs=[
                io.MatchType.Output(
                    template=anything, id="value_out", display_name="value", tooltip="The input, as it came."
                ),
                io.String.Output("report", tooltip="What was freed."),
            ],
            hidden=[io.Hidden.unique_id],
            is_output_node=True,
            not_idempotent=True,
        )

    @classmethod
    def execute(
        cls, text_encoders: bool, transformers: bool, vaes: bool, host_models: bool, value: Any = None
    ) -> io.NodeOutput:
        chosen = {"text_encoder": text_encoders, "transformer": transformers, "vae": vaes, "other": vaes}
        roles: list[Role] = [role for role, wanted in chosen.items() if wanted]  # type: ignore[misc]
        lines = []
        for manager in managers():
            if manager.accelerator.is_cpu:
                continue
            before = format_bytes(manager.accelerator.allocated_bytes())
            freed = format_bytes(manager.free(roles) if roles else 0)
            after = format_bytes(manager.accelerator.allocated_bytes())
            lines.append(f"{manager.device}: {before} -> {after}, freed {freed}")
        if host_models:
            lines.append(f"ComfyUI's models: freed {format_bytes(host.free_all())}")
        report = "\n".join(lines) or "Nothing to free: no model is in VRAM."
        show_text(cls, report)
        return io.NodeOutput(value, report, ui=ui.PreviewText(report))
