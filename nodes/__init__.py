"""The nodes, thin: schema in, call, result out."""

from __future__ import annotations

from comfy_api.latest import ComfyExtension, io

from .apply_controlnet import ApplyControlNet
from .budget import VramBudget
from .decode import VaeDecode
from .encode import TextEncode
from .encode_image import VaeEncode
from .free import FreeVram
from .load import LoadPipeline
from .load_files import LoadModelFiles
from .load_lora import LoadLora
from .load_newbie import LoadNewbie
from .options import ModelOptions, NewbieOptions, PyramidFlowOptions, SamplerOptions
from .plan import VramPlan
from .report import VramReport
from .sample import Sampler
from .sampler_settings import SamplerSettings
from .shared.host_events import listen_for_unload


class BallastExtension(ComfyExtension):
    async def on_load(self) -> None:
        listen_for_unload()

    async def get_node_list(self) -> list[type[io.ComfyNode]]:
        return [
            LoadPipeline,
            LoadNewbie,
            TextEncode,
            Sampler,
            VaeDecode,
            FreeVram,
            VramReport,
            VramPlan,
            SamplerOptions,
            VaeEncode,
            ModelOptions,
            NewbieOptions,
            PyramidFlowOptions,
            LoadLora,
            LoadModelFiles,
            VramBudget,
            SamplerSettings,
            ApplyControlNet,
        ]
