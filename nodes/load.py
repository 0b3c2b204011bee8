"""Load Pipeline: chooses a diffusers pipeline. Loads nothing."""

from __future__ import annotations

from comfy_api.latest import io

from ..pipelines.options import ForeignOptionError
from .shared.folders import DEMO, file_stamp, find_controlnets, find_llamas, find_pipelines
from .shared.inputs import (
    AUTO,
    NONE,
    LoaderSettings,
    Option,
    controlnet_folder,
    controlnet_input,
    late_inputs,
    loader_inputs,
)
from .shared.reference import PipelineType, make_reference
from .shared.running import shows_failure

_FAMILIES = {"llama": "HiDream-I1", "variant": "HiDream-I1 and Pyramid-Flow"}  # whose these inputs are


class LoadPipeline(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastLoadPipeline",
            display_name="Load Pipeline",
            category="Ballast",
            description="Chooses a diffusers pipeline folder. Weights are loaded by the nodes that need "
            "them, and given back.",
            search_aliases=["diffusers loader", "low vram"],
            inputs=[
                io.Combo.Input(
                    "pipeline",
                    options=list(find_pipelines()),
                    default=DEMO,
                    tooltip="A model's whole folder in models/diffusers: a diffusers pipeline, NewBie-image or "
                    "Pyramid-Flow as downloaded. Or the bundled demo model, which draws simple "
                    "shapes on any machine and knows few words, in English only.",
                ),
                *loader_inputs(),
                io.Combo.Input(
                    "llama",
                    options=[AUTO, *find_llamas()],
                    default=AUTO,
                    optional=True,
                    advanced=True,
                    tooltip="HiDream-I1 only: the folder of Llama 3.1 8B Instruct in models/text_encoders, which its "
                    "own download does not hold. auto takes text_encoder_4 in the pipeline's folder.",
                ),
                io.Combo.Input(
                    "variant",
                    options=[AUTO, "full", "dev", "fast", "768p", "384p", "image"],
                    default=AUTO,
                    optional=True,
                    advanced=True,
                    tooltip="HiDream-I1: full, dev or fast, for steps, guidance and scheduler. Pyramid-Flow: which of "
                    "its transformers to use, 768p, 384p or image. auto: HiDream's by its scheduler and the folder's "
                    "name, Pyramid-Flow's largest that is there.",
                ),
                *late_inputs(),
                controlnet_input(),
            ],
            outputs=[
                PipelineType.Output("pipeline_out", display_name="pipeline", tooltip="What to load, not the weights.")
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @shows_failure
    def execute(
        cls,
        pipeline: str,
        vram_gb: float,
        dtype: str = AUTO,
        keep_loaded: bool = True,
        device: str = AUTO,
        llama: str = AUTO,
        variant: str = AUTO,
        ram_gb: float = 0.0,
        weights: str = AUTO,
        cache_encoded: bool = False,
        controlnet: str = NONE,
    ) -> io.NodeOutput:
        folder = find_pipelines().get(pipeline)
        if folder is None:
            raise ValueError(
                f"pipeline {pipeline!r} is not in models/diffusers any more. Choose another, or put it back."
            )
        llama_folder = None if llama == AUTO else find_llamas().get(llama)
        if llama != AUTO and llama_folder is None:
            raise ValueError(
                f"llama {llama!r} is not in models/text_encoders any more. Choose another, or put it back."
            )
        beside = controlnet_folder(controlnet)
        parts = {"llama": llama_folder, "variant": None if variant == AUTO else variant, "controlnet": beside}
        family: dict[str, Option] = {name: str(value) for name, value in parts.items() if value}
        settings = LoaderSettings(vram_gb, dtype, keep_loaded, device, ram_gb, weights, cache_encoded)
        try:
            made = make_reference(cls, folder, family, settings, llama_folder, beside)
        except ForeignOptionError as error:
            if not set(error.names) <= _FAMILIES.keys():
                raise
            told = [f"{name} is for {_FAMILIES[name]}, not for {folder.name}: set it to auto" for name in error.names]
            raise ValueError(f"{'; '.join(told)}.") from None
        return io.NodeOutput(made)

    @classmethod
    def fingerprint_inputs(cls, pipeline: str, llama: str = AUTO, controlnet: str = NONE, **_: object) -> str:
        return file_stamp(find_pipelines().get(pipeline), find_llamas().get(llama), find_controlnets().get(controlnet))
