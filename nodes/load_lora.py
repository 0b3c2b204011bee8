"""Load LoRA: adds a LoRA to what a pipeline samples with. Reads the file, no weights of the model."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from .shared.folders import file_stamp
from .shared.progress import show_text
from .shared.reference import PipelineReference, PipelineType, with_lora
from .shared.running import shows_failure

_FOLDER = "loras"
AUTO = "auto"


class LoadLora(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastLoadLoRA",
            display_name="Load LoRA (Ballast)",
            category="Ballast",
            description="Adds a LoRA to what a pipeline runs with. It runs beside the weights, which stay as they are, "
            "wherever these lie. Several are chained.",
            search_aliases=["lora loader", "lora stack", "style"],
            inputs=[
                PipelineType.Input("pipeline", tooltip="From a Ballast loader, or from another Load LoRA (Ballast)."),
                io.Combo.Input(
                    "lora",
                    options=folder_paths.get_filename_list(_FOLDER),
                    tooltip="A .safetensors or .sft file in models/loras that was made for this model.",
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=-20.0,
                    max=20.0,
                    step=0.01,
                    tooltip="How much it counts. 0 is without it; another strength reads and moves nothing.",
                ),
                io.Combo.Input(
                    "transformer",
                    options=[AUTO, "transformer_2"],
                    default=AUTO,
                    optional=True,
                    advanced=True,
                    tooltip="Of a model with two transformers, such as Wan 2.2: transformer_2 is the one for low "
                    "noise. auto goes by high or low noise in the file's name, else it is the first.",
                ),
                io.String.Input(
                    "leave_out",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip="Parts that the file has weights for and the model has not, such as k_img, v_img, img_emb "
                    "of Wan 2.1 on Wan 2.2. The rest runs, and the node says so. Empty refuses such a file.",
                ),
            ],
            outputs=[
                PipelineType.Output("pipeline_out", display_name="pipeline", tooltip="What to load, with the LoRA.")
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @shows_failure
    def execute(
        cls,
        pipeline: PipelineReference,
        lora: str,
        strength: float = 1.0,
        transformer: str = AUTO,
        leave_out: str = "",
    ) -> io.NodeOutput:
        if strength == 0:
            return io.NodeOutput(with_lora(cls, pipeline))
        from ..pipelines.lora.file import LoraFile  # here, so that the host starts no slower

        path = Path(folder_paths.get_full_path_or_raise(_FOLDER, lora))
        counts = strength if transformer == AUTO else ((transformer, strength),)
        made = with_lora(cls, pipeline, (str(path), file_stamp(path), counts, leave_out))
        base, words = LoraFile.open(path).about()
        lines = [f"made for {base}"] * bool(base) + [f"trigger words: {words}"] * bool(words)
        if lines := [*lines, *made.open().notes_of_loras()[-1]]:
            show_text(cls, "\n".join(lines))
        return io.NodeOutput(made)

    @classmethod
    def fingerprint_inputs(
        cls, lora: str, strength: float = 1.0, transformer: str = AUTO, leave_out: str = "", **_: object
    ) -> str:
        path = folder_paths.get_full_path(_FOLDER, lora)
        more = f" {transformer}" * (transformer != AUTO) + f" without {leave_out}" * bool(leave_out)
        return f"{strength} {file_stamp(Path(path)) if path else ''}{more}"
