"""Open a pipeline: find its family, and check its options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from ..collector import paused_collector
from ..memory.files import placed
from .encoding.embedding_cache import shared_cache
from .files.components import read_model_index
from .files.recognition import is_modular_folder
from .files.single.given import GivenFiles
from .files.single.published import KINDS
from .lora.use import Given as Loras
from .models.claims import Claims
from .models.diffusers.diffusers_model import open_diffusers
from .models.hidream import open_hidream
from .models.modular import open_modular
from .models.newbie import NewbieModel, is_newbie
from .models.pyramid_flow import PyramidFlowModel, is_pyramid
from .options import ForeignOptionError, plain_defaults
from .pipeline import Pipeline
from .runner import Runner, Settings

if TYPE_CHECKING:
    from .models.model import Model

# Models with quirks of their own; every other one is driven by its class of diffusers.
MODELS: dict[str, Callable[..., Model]] = {
    "HiDreamImagePipeline": open_hidream,
    "ModularPipeline": open_modular,
    "NewbiePipeline": NewbieModel,
    "PyramidFlow": PyramidFlowModel,
}
_PATHS = ("llama", "gemma", "jina", "text", "vae", "controlnet")  # of the families' own arguments
_COMMON = ("folder", "dtype", "claims", "files")  # arguments of everything that opens a model


@plain_defaults()
def open_pipeline(
    path: str | Path,
    device: str | torch.device = "auto",
    vram: int | str | None = None,
    ram: int | str | None = None,
    dtype: str | torch.dtype = "auto",
    *,
    keep: bool = False,
    cache_dir: str | Path | None = None,
    base: str | Path | None = None,
    text_encoders: Sequence[str | Path] = (),
    vae: str | Path | None = None,
    transformer_2: str | Path | None = None,
    tokenizers: Mapping[str, str | Path] | Iterable[tuple[str, str | Path]] = (),
    loras: Loras | None = (),
    weights: str = "auto",
    cache_encoded: bool = False,
    image_encoder: str | Path | None = None,
    **family: Any,
) -> Pipeline:
    """Open a folder of diffusers, modular ones too, NewBie's, or a single file of a transformer. Reads headers only.

    `device` is any torch device, "auto" for the first GPU, or "sim" for the simulated one. `vram` and `ram` are budgets
    in bytes or as "6GB"; None means what is free, less a reserve. `dtype` "auto" keeps the type of the files. With
    `keep` the transformer stays on the device between runs while there is room. `cache_dir` holds the text embeddings.
    For a file, in diffusers' layout, the original one or ComfyUI's, `base` is the diffusers folder of that model, which
    has all else; weights of its transformer need not be there. Nor need those of what there is a file for as well:
    `text_encoders` in any order, of which each encoder takes the one that fits it, `vae`, `transformer_2`, the expert
    for low noise of Wan 2.2, and `image_encoder`, which Wan 2.1 sees the first frame with. Without a base the configs
    of the published models come with the pack, there is a file for every part, and `tokenizers` are folders by kind:
    "clip", "t5", "qwen", "llama", "gemma".
    `weights` "exact12" holds bfloat16 weights of encoders and transformers in 12 bits without loss, "int8" and "fp8" in
    8 bits with a scale for each row, which changes pictures a little. The first run converts them, once, into files in
    `cache_dir` that take as much disk as the converted weights do, and runs read these. "auto" leaves weights as they
    are stored. `cache_encoded` has no effect any more: what is converted is always kept.
    `loras` are LoRA files with their strengths, see `Pipeline.set_loras`.
    `controlnet` is a ControlNet for the model, a folder in diffusers' layout or a single file, whose picture is
    `control` of `sample`; several are a list, and one may be in it more than once.
    `family` are arguments of the one family: HiDream-I1 takes `llama`, a folder, and `variant`; NewBie, opened by the
    file of its transformer, the files `gemma`, `jina` and `vae`; Pyramid-Flow `variant` and, by the file of its
    transformer, the file `vae` and the folder `text`.
    Raises FileNotFoundError or ValueError, in one line, for a folder that cannot be run.
    """
    folder = placed(path)
    shared: dict[str, Any] = {}
    parts = {
        "text_encoders": text_encoders,
        "transformer_2": transformer_2,
        "tokenizers": tokenizers,
        "image_encoder": image_encoder,
    }
    given = [name for name, files in parts.items() if files]
    # A file of Pyramid-Flow has names of FLUX.1 or Stable Diffusion 3; what is given beside it says which one it is.
    alone = folder.is_file() and not is_newbie(folder) and (bool(given) or not is_pyramid(folder))
    if base is not None or alone:
        files = _given(folder, text_encoders, vae, transformer_2, tokenizers, image_encoder)
        shared["files"] = files
        folder = files.published() if base is None else placed(base)
    elif given:
        raise ValueError(
            f"{folder} takes no {', '.join(given)}, which go with the single file of a transformer. Leave them out."
        )
    elif vae is not None:
        family["vae"] = vae  # of a family that has such a file
    family |= {name: _placed(family[name]) for name in _PATHS if family.get(name)}
    name = _family(folder)
    open_model = MODELS.get(name, open_diffusers)
    parameters = inspect.signature(open_model).parameters
    if shared and "files" not in parameters:
        raise ValueError(f"{folder} is {name}, which is no base for {path}. Give the diffusers folder of that model.")
    if shared and base is not None and not is_modular_folder(folder):
        files.check_base(folder, read_model_index(folder))
    known = [option for option in parameters if option not in _COMMON]
    if unknown := sorted(family.keys() - set(known)):
        raise ForeignOptionError(name, unknown, known)
    cache = shared_cache(placed(cache_dir) if cache_dir else None)
    settings = Settings.of(vram, ram, keep)
    try:
        with paused_collector():  # the first of a family imports its classes
            claims = Claims(device, cache, weights)
            model = open_model(folder, dtype, claims, **shared, **family)
    except (LookupError, AttributeError, TypeError, ArithmeticError, RecursionError) as error:
        # Of code that took a config for whole.
        raise ValueError(
            f"{folder} cannot be opened: its configs lack something, or contradict each other "
            f"({type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}). Download them again."
        ) from error
    pipe = Pipeline(model, Runner(model.title, model.titles, claims, settings))
    pipe.set_loras(loras)
    return pipe


def _placed(given: str | Path | Sequence[str | Path]) -> Path | list[Path]:
    return placed(given) if isinstance(given, str | Path) else [placed(each) for each in given]


def _given(
    path: Path,
    text_encoders: Sequence[str | Path],
    vae: str | Path | None,
    transformer_2: str | Path | None,
    tokenizers: Mapping[str, str | Path] | Iterable[tuple[str, str | Path]],
    image_encoder: str | Path | None,
) -> GivenFiles:
    """Return the files of parts of a model. FileNotFoundError or ValueError for what is no single file."""
    if path.is_dir():
        raise ValueError(f"{path} is a folder, which needs no base. Leave base out, or give a transformer's file.")
    encoders = tuple(placed(each) for each in text_encoders)
    others = (None if each is None else placed(each) for each in (vae, transformer_2, image_encoder))
    decoder, second, seeing = others
    for each in (path, *encoders, decoder, second, seeing):
        if each is not None and not each.is_file():
            raise FileNotFoundError(f"there is no file {each}. Put it back, or name another.")
    folders = {kind: placed(each) for kind, each in dict(tokenizers).items()}
    if unknown := sorted(folders.keys() - KINDS.keys()):
        raise ValueError(f"there are no tokenizers of {', '.join(unknown)}. Known are {', '.join(KINDS)}.")
    return GivenFiles(path, encoders, decoder, second, folders, seeing)


def _family(path: Path) -> str:
    if is_newbie(path):
        return "NewbiePipeline"
    if is_pyramid(path):
        return "PyramidFlow"
    if is_modular_folder(path):
        return "ModularPipeline"
    return read_model_index(path)["_class_name"]


__all__ = ["MODELS", "Pipeline", "open_pipeline"]
