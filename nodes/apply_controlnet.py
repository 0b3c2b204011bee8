"""Apply ControlNet: adds a ControlNet and its picture to what a pipeline samples with. Reads no weights."""

from __future__ import annotations

from pathlib import Path

import torch
from comfy_api.latest import io

from .shared.folders import file_stamp, find_controlnets
from .shared.inputs import NONE, controlnet_folder, opaque
from .shared.reference import ControlPicture, PipelineReference, PipelineType, with_control
from .shared.running import shows_failure


class ApplyControlNet(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastApplyControlNet",
            display_name="Apply ControlNet (Ballast)",
            category="Ballast",
            description="Adds a ControlNet and the picture that it follows to what a pipeline samples with. It runs "
            "within the same budget, and leaves VRAM when its part of the steps is over. Several are chained.",
            search_aliases=["controlnet apply advanced", "controlnet loader", "canny", "depth", "pose", "union"],
            inputs=[
                PipelineType.Input(
                    "pipeline", tooltip="From a Ballast loader, Load LoRA (Ballast), or another of these nodes."
                ),
                io.Combo.Input(
                    "controlnet",
                    options=[NONE, *find_controlnets()],
                    default=NONE,
                    tooltip="A ControlNet in models/controlnet that was made for this model: a .safetensors file with "
                    "diffusers' names (FLUX.1, Qwen-Image, Stable Diffusion 3), or a folder in diffusers' layout.",
                ),
                io.Image.Input(
                    "image", tooltip="The picture to follow: edges, depth, a pose, as that ControlNet was made for."
                ),
                io.Float.Input(
                    "strength",
                    default=1.0,
                    min=0.0,
                    max=10.0,
                    step=0.01,
                    round=0.001,
                    tooltip="How much the picture counts. At 0 it is not followed, and the ControlNet does not run.",
                ),
                io.Float.Input(
                    "start",
                    default=0.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.001,
                    tooltip="The part of the steps after which the picture is followed.",
                ),
                io.Float.Input(
                    "end",
                    default=1.0,
                    min=0.0,
                    max=1.0,
                    step=0.01,
                    round=0.001,
                    tooltip="The part of the steps after which it is followed no more, such as 0.6. The ControlNet "
                    "then leaves VRAM.",
                ),
                io.String.Input(
                    "path",
                    default="",
                    optional=True,
                    advanced=True,
                    tooltip="A file or folder that is not in models/controlnet, in place of the one chosen above.",
                ),
                io.Int.Input(
                    "union_mode",
                    default=-1,
                    min=-1,
                    max=64,
                    optional=True,
                    advanced=True,
                    tooltip="For union ControlNets of FLUX.1 that are told what the picture shows, by the number on "
                    "their page, such as 0 for edges and 2 for depth. -1 for all others.",
                ),
            ],
            outputs=[
                PipelineType.Output(
                    "pipeline_out",
                    display_name="pipeline",
                    tooltip="What to load, with the ControlNet: for Offloaded Sampler and VRAM Plan.",
                )
            ],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @shows_failure
    def execute(
        cls,
        pipeline: PipelineReference,
        controlnet: str,
        image: torch.Tensor,
        strength: float = 1.0,
        start: float = 0.0,
        end: float = 1.0,
        path: str = "",
        union_mode: int = -1,
    ) -> io.NodeOutput:
        found = _chosen(controlnet, path)
        if found is None:
            raise ValueError("no ControlNet is chosen. Choose one in controlnet, or name a file or folder in path.")
        if not start < end:
            raise ValueError(f"start is {start:g} and end is {end:g}. Set end above start.")
        mode = None if union_mode < 0 else union_mode
        control = ControlPicture(str(found), file_stamp(found), opaque(image), strength, (start, end), mode)
        return io.NodeOutput(with_control(cls, pipeline, control))

    @classmethod
    def fingerprint_inputs(cls, controlnet: str = NONE, path: str = "", **_: object) -> str:
        return file_stamp(Path(path.strip()) if path.strip() else find_controlnets().get(controlnet))


def _chosen(controlnet: str, path: str) -> Path | None:
    return Path(path.strip()).expanduser() if path.strip() else controlnet_folder(controlnet)
