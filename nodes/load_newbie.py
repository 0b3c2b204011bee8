"""Load NewBie (split files): NewBie from the files that ComfyUI's own loaders take. Loads nothing."""

from __future__ import annotations

import re
from pathlib import Path

import folder_paths
from comfy_api.latest import io

from .shared.folders import file_stamp
from .shared.inputs import LoaderSettings, Option, late_inputs, loader_inputs
from .shared.reference import PipelineType, make_reference
from .shared.running import shows_failure

_FOLDERS = {"diffusion_model": "diffusion_models", "gemma": "text_encoders", "jina": "text_encoders", "vae": "vae"}
_TOOLTIPS = {
    "diffusion_model": "NewBie's transformer in models/diffusion_models, such as NewBie-Image-Exp0.1-bf16.",
    "gemma": "Its first text encoder in models/text_encoders: gemma_3_4b_it_bf16.",
    "jina": "Its second text encoder in models/text_encoders: jina_clip_v2_bf16.",
    "vae": "The VAE of FLUX.1 in models/vae: ae.",
}
# How the names of each file are known; the longer match is the better one.
_NAMES = {
    "diffusion_model": re.compile(r"newbie", re.IGNORECASE),
    "gemma": re.compile(r"gemma.?3.?4b|gemma", re.IGNORECASE),
    "jina": re.compile(r"jina", re.IGNORECASE),
    "vae": re.compile(r"(?<![a-z])ae(?![a-z])|flux(?!.?2)", re.IGNORECASE),
}
_NONE = "choose a file"


class LoadNewbie(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        files = []
        for name, folder in _FOLDERS.items():
            options = offered(name, folder_paths.get_filename_list(folder))
            files.append(io.Combo.Input(name, options=options, default=options[0], tooltip=_TOOLTIPS[name]))
        return io.Schema(
            node_id="BallastLoadNewBie",
            display_name="Load NewBie (split files)",
            category="Ballast",
            description="Chooses NewBie-image by the four files that ComfyUI's own graph for it uses. Weights are "
            "loaded by the nodes that need them, and given back. Its folders go into Load Pipeline.",
            search_aliases=["newbie loader", "anime"],
            inputs=[*files, *loader_inputs(), *late_inputs()],
            outputs=[PipelineType.Output("pipeline", tooltip="What to load, not the weights.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @shows_failure
    def execute(
        cls,
        diffusion_model: str,
        gemma: str,
        jina: str,
        vae: str,
        vram_gb: float,
        dtype: str = "auto",
        keep_loaded: bool = True,
        device: str = "auto",
        ram_gb: float = 0.0,
        weights: str = "auto",
        cache_encoded: bool = False,
    ) -> io.NodeOutput:
        names = {"diffusion_model": diffusion_model, "gemma": gemma, "jina": jina, "vae": vae}
        for name, chosen in names.items():
            if chosen == _NONE:
                raise ValueError(f"{name} is not chosen. {_TOOLTIPS[name]} Put it there, press R, and choose it.")
        files = {
            name: Path(folder_paths.get_full_path_or_raise(_FOLDERS[name], chosen)) for name, chosen in names.items()
        }
        path = files.pop("diffusion_model")
        family: dict[str, Option] = {name: str(file) for name, file in files.items()}
        settings = LoaderSettings(vram_gb, dtype, keep_loaded, device, ram_gb, weights, cache_encoded)
        return io.NodeOutput(make_reference(cls, path, family, settings, *files.values()))

    @classmethod
    def fingerprint_inputs(cls, **chosen: object) -> str:
        found = (folder_paths.get_full_path(folder, str(chosen[name])) for name, folder in _FOLDERS.items())
        return file_stamp(*(Path(path) for path in found if path))


def offered(name: str, files: list[str]) -> list[str]:
    """Return the files to choose from. The first one, which the page preselects, is the best match by name, else none.

    The order of a folder says nothing: any text encoder may come before Gemma.
    """
    matches = {file: match[0] for file in files if (match := _NAMES[name].search(Path(file).name))}
    found = max(matches, key=lambda file: len(matches[file]), default=_NONE)
    return [found, *(file for file in files if file != found)]
