"""Load Pipeline (Ballast): chooses a diffusers pipeline. Loads nothing."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from ..memory import host
from .reference import DEMO, PipelineReference, PipelineType, file_stamp, find_llamas, find_pipelines

AUTO = "auto"


class LoadPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastLoadPipeline",
            display_name="Load Pipeline (Ballast)",
            category="ballast",
            description="Chooses a diffusers pipeline folder. Weights are loaded by the nodes that need "
            "them, and given back.",
            search_aliases=["diffusers loader", "low vram"],
            inputs=[
                io.Combo.Input(
                    "pipeline",
                    options=list(find_pipelines()),
                    default=DEMO,
                    tooltip="A folder with a model_index.json in models/diffusers, or the bundled demo "
                    "model, which draws simple shapes on any machine.",
                ),
                io.Float.Input(
                    "vram_gb",
                    default=0.0,
                    min=0.0,
                    max=1024.0,
                    step=0.1,
                    tooltip="VRAM that the models may take, in GB. 0 means all that is free, less ComfyUI's reserve.",
                ),
                io.Combo.Input(
                    "dtype",
                    options=["auto", "bfloat16", "float16", "float32"],
                    default="auto",
                    advanced=True,
                    tooltip="The type that encoders and transformer run in; auto keeps that of the files. "
                    "The VAE always runs in float32.",
                ),
                io.Boolean.Input(
                    "keep_loaded",
                    default=True,
                    advanced=True,
                    tooltip="Keep the transformer in VRAM between runs while nothing else needs the room. "
                    "Text encoders and VAE always leave when their node is done.",
                ),
                io.Combo.Input(
                    "device",
                    options=["auto", "cpu", "sim"],
                    default="auto",
                    advanced=True,
                    tooltip="auto is the device that ComfyUI uses. sim is a simulated GPU run by the CPU, "
                    "which shows what would happen in VRAM on a machine that has none.",
                ),
                io.Combo.Input(
                    "llama",
                    options=[AUTO, *find_llamas()],
                    default=AUTO,
                    tooltip="HiDream-I1 only: the folder of Llama 3.1 8B Instruct in models/text_encoders, which its "
                    "own download does not hold. auto takes text_encoder_4 in the pipeline's folder.",
                ),
                io.Combo.Input(
                    "variant",
                    options=[AUTO, "full", "dev", "fast"],
                    default=AUTO,
                    advanced=True,
                    tooltip="HiDream-I1 only: which of its models this is, for steps, guidance and scheduler. "
                    "auto tells it by the folder.",
                ),
            ],
            outputs=[
                PipelineType.Output("pipeline_out", display_name="pipeline", tooltip="What to load, not the weights.")
            ],
        )

    @classmethod
    def execute(
        cls,
        pipeline: str,
        vram_gb: float,
        dtype: str,
        keep_loaded: bool,
        device: str,
        llama: str = AUTO,
        variant: str = AUTO,
    ) -> io.NodeOutput:
        folder = find_pipelines().get(pipeline)
        if folder is None:
            raise ValueError(
                f"pipeline {pipeline!r} is not in models/diffusers any more. Choose another, or put it back."
            )
        own = host.device()
        if device == "sim" and own is not None and own.type != "cpu":
            # torch knows one accelerator in a process; a simulated one beside a real one would take its place.
            raise ValueError(f"device is sim, but ComfyUI runs on {own}. Choose auto, or start ComfyUI with --cpu.")
        on = str(own or "auto") if device == "auto" else device
        vram_bytes = int(vram_gb * 2**30) or None
        llama_folder = None if llama == AUTO else find_llamas().get(llama)
        if llama != AUTO and llama_folder is None:
            raise ValueError(
                f"llama {llama!r} is not in models/text_encoders any more. Choose another, or put it back."
            )
        reference = PipelineReference(
            str(folder),
            _stamp(folder, llama_folder),
            dtype,
            vram_bytes,
            on,
            keep_loaded,
            str(llama_folder or ""),
            "" if variant == AUTO else variant,
        )
        reference.open()  # reads configs only, so that a bad folder fails here and not after minutes
        return io.NodeOutput(reference)

    @classmethod
    def fingerprint_inputs(cls, pipeline: str, llama: str = AUTO, **_: object) -> str:
        folder = find_pipelines().get(pipeline)
        return _stamp(folder, find_llamas().get(llama)) if folder else ""


def _stamp(folder: Path, llama: Path | None) -> str:
    return file_stamp(folder) + (file_stamp(llama) if llama else "")
