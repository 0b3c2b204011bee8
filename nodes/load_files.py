"""Load Model Files: chooses a model by the files of its parts, as ComfyUI's own graphs do. Loads nothing."""

from __future__ import annotations

from pathlib import Path

from comfy_api.latest import io

from .shared.folders import DEMO, file_stamp, find_controlnets, find_files, find_pipelines, find_tokenizers
from .shared.inputs import NONE, LoaderSettings, Option, controlnet_folder, controlnet_input, late_inputs, loader_inputs
from .shared.progress import show_text
from .shared.reference import PipelineType, make_reference
from .shared.running import shows_failure

_CHOOSE = "choose a file"
_MODELS, _TEXTS, _FOLDERS = "diffusion_models", "text_encoders", "diffusers"
_MORE = "One more text encoder, for models that have several. Their order does not matter."
# Where each part lies, and what it is.
_PARTS = {
    "transformer": (_MODELS, "The model in models/diffusion_models or models/unet, such as flux1-dev-Q4_K_S.gguf."),
    "text_encoder": (
        _TEXTS,
        "A text encoder in models/text_encoders or models/clip, such as t5xxl_fp8_e4m3fn_scaled for Flux. none takes "
        "that of base.",
    ),
    "text_encoder_2": (_TEXTS, _MORE.replace(".", ", such as clip_l for Flux.", 1)),
    "vae": ("vae", "The VAE in models/vae, such as ae for Flux. none takes that of base."),
    "base": (
        _FOLDERS,
        "none for the configs that come with Ballast; each part then has a file. Or the model's diffusers folder in "
        "models/diffusers, which needs no weights of the parts that a file is chosen for.",
    ),
}
_SEEING = {
    "image_encoder": (
        "clip_vision",
        "Wan 2.1 from a picture only: what sees the first frame, in models/clip_vision, such as clip_vision_h. none "
        "takes that of base.",
    ),
}
_LATE = {
    "text_encoder_3": (_TEXTS, _MORE),
    "text_encoder_4": (_TEXTS, _MORE),
    "transformer_2": (_MODELS, "Wan 2.2 only: its model for low noise. That for high noise is the transformer."),
}
_ALL = _PARTS | _LATE | _SEEING
_ENCODERS = tuple(part for part in _ALL if part.startswith("text_encoder"))


class LoadModelFiles(io.ComfyNode):
    @classmethod
    def define_schema(cls) -> io.Schema:
        return io.Schema(
            node_id="BallastLoadModelFiles",
            display_name="Load Model Files (Ballast)",
            category="Ballast",
            description="Chooses a model by the files of its parts, safetensors or GGUF, as ComfyUI's own graphs use "
            "them. Weights are loaded by the nodes that need them, as they are stored, and given back. Whole folders "
            "go into Load Pipeline.",
            search_aliases=["gguf loader", "unet loader", "load diffusion model", "fp8", "checkpoint", "low vram"],
            inputs=[
                *_combos(_PARTS),
                *loader_inputs(),
                *_combos(_LATE, optional=True),
                *late_inputs(),
                controlnet_input(),
                *_combos(_SEEING, optional=True),
            ],
            outputs=[PipelineType.Output("pipeline", tooltip="What to load, not the weights.")],
            hidden=[io.Hidden.unique_id, io.Hidden.prompt],
        )

    @classmethod
    @shows_failure
    def execute(
        cls,
        transformer: str,
        text_encoder: str,
        text_encoder_2: str,
        vae: str,
        base: str,
        vram_gb: float,
        dtype: str = "auto",
        keep_loaded: bool = True,
        device: str = "auto",
        text_encoder_3: str = NONE,
        text_encoder_4: str = NONE,
        transformer_2: str = NONE,
        ram_gb: float = 0.0,
        weights: str = "auto",
        cache_encoded: bool = False,
        controlnet: str = NONE,
        image_encoder: str = NONE,
    ) -> io.NodeOutput:
        chosen = (transformer, text_encoder, text_encoder_2, vae, base)
        late = (text_encoder_3, text_encoder_4, transformer_2, image_encoder)
        names = dict(zip(_ALL, (*chosen, *late), strict=True))
        found = {part: file for part, name in names.items() if (file := _found(part, name))}
        path = found.pop("transformer", None)
        if path is None:
            raise ValueError(
                f"transformer is not chosen. {_PARTS['transformer'][1]} Put it there, press R, and choose it."
            )
        texts = [found.pop(part) for part in _ENCODERS if part in found]
        beside = controlnet_folder(controlnet)
        found |= {"controlnet": beside} if beside else {}
        family: dict[str, Option] = {part: str(file) for part, file in found.items()}
        if texts:
            family["text_encoders"] = tuple(map(str, texts))
        if "base" not in found:
            family["tokenizers"] = tuple((kind, str(folder)) for kind, folder in find_tokenizers().items())
        settings = LoaderSettings(vram_gb, dtype, keep_loaded, device, ram_gb, weights, cache_encoded)
        made = make_reference(cls, path, family, settings, *texts, *found.values())
        if "base" not in found:
            show_text(cls, f"configs of {made.open().folder.name}")
        return io.NodeOutput(made)

    @classmethod
    def fingerprint_inputs(cls, **chosen: object) -> str:
        found = [_offered(part).get(str(name)) for part, name in chosen.items() if part in _ALL]
        found.append(find_controlnets().get(str(chosen.get("controlnet", NONE))))
        return file_stamp(*found)


def _combos(parts: dict[str, tuple[str, str]], optional: bool = False) -> list[io.Input]:
    """Return a list of files for each part. The first entry is none: the order of a folder says nothing."""
    made: list[io.Input] = []
    for part, (_, tooltip) in parts.items():
        nothing = _CHOOSE if part == "transformer" else NONE
        options = [nothing, *_offered(part)]
        made.append(io.Combo.Input(part, options=options, default=nothing, optional=optional, tooltip=tooltip))
    return made


def _offered(part: str) -> dict[str, Path]:
    """Return what there is to choose from for a part, by name."""
    kind = _ALL[part][0]
    if kind == _FOLDERS:
        return {name: path for name, path in find_pipelines().items() if name != DEMO}
    return find_files(kind)


def _found(part: str, name: str) -> Path | None:
    """Return the file or folder that is chosen for a part; None if none is. ValueError if it is gone."""
    if name in (_CHOOSE, NONE):
        return None
    if (path := _offered(part).get(name)) is None:
        kind = _ALL[part][0]
        raise ValueError(f"{part}: models/{kind} has no {name!r} any more. Choose another, or put it back.")
    return path
