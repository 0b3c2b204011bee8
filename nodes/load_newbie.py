"""Load NewBie (split files): NewBie from the files that ComfyUI's own loaders take. Loads nothing."""

from __future__ import annotations

from pathlib import Path

import folder_paths
from comfy_api.latest import io

from .folders import file_stamp
from .reference import PipelineType, make_reference, ram_input, shared_inputs

_FOLDERS = {"diffusion_model": "diffusion_models", "gemma": "text_encoders", "jina": "text_encoders", "vae": "vae"}
_TOOLTIPS = {
    "diffusion_model": "NewBie's transformer in models/diffusion_models, such as NewBie-Image-Exp0.1-bf16.",
    "gemma": "Its first text encoder in models/text_encoders: gemma_3_4b_it_bf16.",
    "jina": "Its second text encoder in models/text_encoders: jina_clip_v2_bf16.",
    "vae": "The VAE of FLUX.1 in models/vae: ae.",
}


class LoadNewbie(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        files = [
            io.Combo.Input(name, options=folder_paths.get_filename_list(folder), tooltip=_TOOLTIPS[name])
            for name, folder in _FOLDERS.items()
        ]
        return io.Schema(
            node_id="BallastLoadNewBie",
            display_name="Load NewBie (split files)",
            category="ballast",
            description="Chooses NewBie-image by the four files that ComfyUI's own graph for it uses. Weights are "
            "loaded by the nodes that need them, and given back. Its folders go into Load Pipeline (Ballast).",
            search_aliases=["newbie loader", "anime"],
            inputs=[*files, *shared_inputs(), ram_input()],
            outputs=[PipelineType.Output("pipeline", tooltip="What to load, not the weights.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    def execute(
        cls,
        diffusion_model: str,
        gemma: str,
        jina: str,
        vae: str,
        vram_gb: float,
        dtype: str,
        keep_loaded: bool,
        device: str,
        ram_gb: float = 0.0,
    ) -> io.NodeOutput:
        names = {"diffusion_model": diffusion_model, "gemma": gemma, "jina": jina, "vae": vae}
        files = {
            name: Path(folder_paths.get_full_path_or_raise(_FOLDERS[name], chosen)) for name, chosen in names.items()
        }
        path, stamp = files.pop("diffusion_model"), file_stamp(*files.values())
        family = {name: str(file) for name, file in files.items()}
        stamp += file_stamp(path)
        return io.NodeOutput(make_reference(cls, path, stamp, vram_gb, dtype, keep_loaded, device, family, ram_gb))

    @classmethod
    def fingerprint_inputs(cls, diffusion_model: str, gemma: str, jina: str, vae: str, **_: object) -> str:
        names = {"diffusion_model": diffusion_model, "gemma": gemma, "jina": jina, "vae": vae}
        found = (folder_paths.get_full_path(_FOLDERS[name], chosen) for name, chosen in names.items())
        return file_stamp(*(Path(path) for path in found if path))
