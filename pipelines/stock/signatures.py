"""Facts in a stock pipeline's code and configs: the names it returns, the sizes it draws, whether it guides."""

from __future__ import annotations

import ast
import functools
import inspect
import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ..files.components import Component
from ..planning.forecasts import RefusedError
from ..sampling.picture_sizes import PictureSizes, most_tokens, multiple_of

if TYPE_CHECKING:
    import torch

_SPATIAL = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_spatial_scale_factor", "vae_scale_factor")
_PICTURES = (
    "image", "images", "control_image", "mask_image", "control_mask", "video", "mask_video", "control_video",
    "pose_video", "conditioning_frames",
)  # fmt: skip
_FROM_PICTURES = re.compile(
    "Img2Img|ImageToImage|Inpaint|Edit|Upscale|Control|ImageToVideo|VideoToVideo|VideoToWorld|Adapter|Pix2Pix|Redux"
    "|Fill|Layered|Refiner"
)
_ENCODES = re.compile(r"encode_prompt(_\w+)?")
_FRAME_RATES = {"Wan": 16, "CogVideoX": 8, "Mochi": 30}  # other than 24 a second
_FIXED = "video_length"  # what Latte's transformer calls the only number of frames that it takes beside 1
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio", "vae_temporal_scale_factor")

_AS_ENCODED = "prompts are encoded as they are given"
# Arguments of calls that change what was asked for, which are False here.
_CHANGES = {
    "use_resolution_binning": "sizes are drawn as they are asked for",
    **dict.fromkeys(("use_pe", "enable_prompt_rewrite", "prompt_upsampling", "expand_prompts"), _AS_ENCODED),
}


def own_words(index: Mapping[str, Any], key: str) -> str:
    """Read what a folder's index says of its model under `key`, as that of the demo does; empty if nothing."""
    words = index.get(key)
    return words if isinstance(words, str) and words.isprintable() and len(words) <= 160 else ""


@functools.lru_cache(maxsize=32)
def tree_of(part: Any) -> ast.Module:
    """Parse the code of a class or function. The tree is kept: do not change it.

    Not by `textwrap.dedent`: texts in the code may have lines at column 0.
    """
    source = inspect.getsource(part)
    return ast.parse(f"if True:\n{source}" if source[0].isspace() else source)


@functools.cache
def returned_names(function: Callable[..., Any]) -> tuple[str, ...]:
    """Return the names of a function's results, read from its last `return a, b, c`."""
    tree = tree_of(function)
    returns = [node.value for node in ast.walk(tree) if isinstance(node, ast.Return) and node.value is not None]
    last = max(returns, key=lambda value: value.lineno)
    values = last.elts if isinstance(last, ast.Tuple) else [last]
    if not all(isinstance(value, ast.Name) for value in values):
        raise ValueError(f"{function.__qualname__} returns values without names, and cannot be staged.")
    return tuple(value.id for value in values)  # type: ignore[attr-defined]


def encoding_methods(cls: Any) -> list[str]:
    """Return the names of the methods that encode prompts; InstructPix2Pix has a private one alone."""
    found = [name for name in dir(cls) if _ENCODES.fullmatch(name)]
    return found or [name for name in ("_encode_prompt",) if hasattr(cls, name)]


def encoding_of(cls: Any) -> Callable[..., Any] | None:
    """Return the method that encodes prompts. None if there is none, or several and no `encode_prompt`."""
    found = encoding_methods(cls)
    return getattr(cls, found[0] if len(found) == 1 else "encode_prompt", None)


def embeddings_of(cls: Any) -> tuple[str, ...]:
    """Return the names of `encode_prompt`'s results if the pipeline's call takes any of them, else none."""
    try:
        names = returned_names(cls.encode_prompt) if hasattr(cls, "encode_prompt") else ()
    except ValueError:
        return ()
    return names if any(name in inspect.signature(cls.__call__).parameters for name in names) else ()


def encode_defaults(encode: Mapping[str, inspect.Parameter], call: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return what `__call__` passes to `encode_prompt` by default, and None for arguments without a default."""
    defaults = {}
    for name, parameter in encode.items():
        if name in call and call[name].default is not inspect.Parameter.empty:
            defaults[name] = call[name].default
        elif parameter.default is inspect.Parameter.empty and name != "self":
            defaults[name] = 1 if name.endswith("_per_prompt") else None
    return defaults


@functools.cache
def negative_arguments(cls: type) -> Mapping[str, str]:
    """Map the parameters of `encode_prompt` for the negative prompt to the call's names for them.

    Of Flux: `prompt_2` is its `negative_prompt_2`, and `max_sequence_length` that of both prompts. Empty where one call
    of `encode_prompt` encodes both, or its arguments have no names.
    """
    encode: Any = encoding_of(cls)
    names = [name for name in inspect.signature(encode).parameters if name != "self"]
    for node in ast.walk(tree_of(cls.__call__)):
        if not isinstance(node, ast.Call) or getattr(node.func, "attr", "") != encode.__name__:
            continue
        given = [*zip(names, node.args, strict=False), *((word.arg, word.value) for word in node.keywords)]
        found = {str(name): value.id for name, value in given if isinstance(value, ast.Name)}
        if found.get("prompt") == "negative_prompt":
            return found
    return {}


def needed_inputs(cls: type) -> list[str]:
    """Return the inputs other than texts that `__call__` cannot do without: a picture, a mask, poses."""
    call = inspect.signature(cls.__call__).parameters  # type: ignore[operator]
    words = [
        name for name, parameter in call.items() if name != "self" and parameter.default is inspect.Parameter.empty
    ]
    words = [name for name in words if "prompt" not in name and name not in ("args", "kwargs")]
    pictures = [name for name in call if name in _PICTURES]
    if "image" in pictures and "video" in pictures:
        pictures.remove("video")  # which is taken in place of the picture
    return words or (pictures if _FROM_PICTURES.search(cls.__name__) else [])


def as_given(
    call: Mapping[str, inspect.Parameter], options: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, bool]:
    """Return the arguments that keep a call from changing prompts and sizes. ValueError where one is asked to."""
    for name, reason in _CHANGES.items():
        if name in call and options.get(name):
            raise ValueError(f"{name} is True; {reason}. Leave it out.")
    return dict.fromkeys(call.keys() & _CHANGES.keys(), False)


def rewriting_note(title: str, call: Mapping[str, inspect.Parameter]) -> list[str]:
    """Say that a call rewrites prompts by default, and that it does not here."""
    names = [n for n, reason in _CHANGES.items() if n in call and call[n].default is True and reason == _AS_ENCODED]
    return [f"In diffusers {title} rewrites its prompt first ({name}); here {_AS_ENCODED}." for name in names]


def takes_noise(cls: type) -> bool:
    """Return whether a pipeline has a `prepare_latents` that is given noise: ERNIE-Image's call draws its own."""
    prepare = getattr(cls, "prepare_latents", None)
    return prepare is not None and "latents" in inspect.signature(prepare).parameters


@functools.cache
def asks_for_padding(cls: type) -> bool:
    """Return whether a pipeline asks on which side its tokenizer pads, as the loop of LTX-2 does."""
    return "padding_side" in inspect.getsource(cls)


@functools.cache
def text_options(cls: type) -> frozenset[str]:
    """Return the arguments that `__call__` only checks, or hands to `encode_prompt`.

    Some go by a property: `self._clip_skip = clip_skip`, and then `clip_skip=self.clip_skip`.
    """
    tree = tree_of(cls.__call__)
    encode: Any = encoding_of(cls)
    handing = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in (encode.__name__, "check_inputs")
    ]
    storing = [node for node in ast.walk(tree) if isinstance(node, ast.Assign) and _stores_argument(node)]
    handed = _names(handing)
    used = _names([tree]) - handed - _names(storing)
    taken = {*inspect.signature(encode).parameters, *negative_arguments(cls).values()}
    return frozenset(name for name in taken if name in handed and name not in used)


def _stores_argument(node: ast.Assign) -> bool:
    target, value = node.targets[0], node.value
    return isinstance(target, ast.Attribute) and isinstance(value, ast.Name) and target.attr == f"_{value.id}"


def _names(nodes: Iterable[ast.AST]) -> Counter[str]:
    """Return how often each argument is read, by its name or as an attribute of the pipeline."""
    found: Counter[str] = Counter()
    for top in nodes:
        for node in ast.walk(top):
            if isinstance(node, ast.Name):
                found[node.id] += 1
            elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "self":
                found[node.attr] += 1
    return found


def spatial_factors(pipe: Any) -> list[int]:
    """Return the factors by which a pipeline says that its VAE shrinks pictures; its processor's is among some."""
    return [int(value) for name in _SPATIAL if (value := getattr(pipe, name, None))]


def picture_sizes(pipe: Any, components: Mapping[str, Component], latent: int | None = None) -> PictureSizes:
    """Return the sizes that a pipeline draws, by its own checks and the transformer's tables.

    `latent` are the pixels on a side of one of its VAE's latents.
    """
    patch, latent = _patch_size(components), latent or _attribute(pipe, _SPATIAL, 8)
    transformer = components.get("transformer")
    tokens = transformer and most_tokens(transformer.cls, transformer.config)
    most = tokens and (tokens[0] * patch * latent, tokens[1] * patch * latent)
    return PictureSizes(multiple_of(pipe, latent * patch), most or None)


def fewest_frames(pipe: Any, latents: int = 2) -> int:
    """Return the least number of frames that make more than one latent frame, or so many where it may choose."""
    step = _attribute(pipe, _TEMPORAL, 1)
    config = getattr(getattr(pipe, "transformer", None), "config", {})
    if chunks := config.get("chunk_partition"):  # of AnyFlow, whose transformer takes so many alone
        return 1 + (sum(chunks) - 1) * step
    if fixed := config.get(_FIXED):
        return int(fixed)
    return 1 + (latents - 1) * step if _first_alone(pipe) else latents * step


def check_sections(pipe: Any, title: str, latents: torch.Tensor, frames: int | None) -> None:
    """Raise RefusedError where the latents of a video are fewer than its frames: Helios decodes as it samples."""
    step = _attribute(pipe, _TEMPORAL, 0)  # MiniMax-H3 has none, and other latents
    if frames and step and latents.ndim == 5 and latents.shape[2] * step < frames:
        raise RefusedError(
            f"frames is {frames}; {title} draws so many in sections, and decodes each while it samples. Stages decode "
            f"once: give at most {(latents.shape[2] - 1) * step + 1}, which are one section."
        )


def frame_rate_of(name: str) -> int:
    """Return the frames a second of a pipeline class, by its name."""
    return next((rate for start, rate in _FRAME_RATES.items() if name.startswith(start)), 24)


def _first_alone(pipe: Any) -> bool:
    """Return whether the first frame of a video has latents of its own, as in all but Allegro."""
    return not type(pipe).__name__.startswith("Allegro")


def check_frames(pipe: Any, title: str, frames: int) -> None:
    """Raise ValueError for a number of frames that the VAE cannot decode."""
    step = _attribute(pipe, _TEMPORAL, 1)
    fixed = getattr(getattr(pipe, "transformer", None), "config", {}).get(_FIXED, frames)
    if frames not in (1, fixed):
        raise ValueError(f"frames is {frames}; {title} takes {fixed} frames, or 1.")
    if not _first_alone(pipe):
        if frames < step or frames % step:
            near = max(1, round(frames / step)) * step
            raise ValueError(f"frames is {frames}; {title} takes multiples of {step}, such as {near}.")
    elif frames < 1 or (frames - 1) % step:
        near = max(0, round((frames - 1) / step)) * step + 1
        raise ValueError(f"frames is {frames}; {title} takes multiples of {step} and one more, such as {near}.")


@dataclass(frozen=True)
class Scales:
    """The arguments of a stock call that scale guidance; "guider" stands for the component of that name.

    `embedded` is what the transformer is told, where it was distilled to guide by itself, `cfg` the scale of
    classifier-free guidance. `distilled` says which of the two users of the model know as guidance.
    """

    embedded: str | None
    cfg: str | None
    distilled: bool

    @property
    def guidance(self) -> str | None:
        """The argument that `guidance` sets."""
        return self.embedded if self.distilled else self.cfg

    @property
    def true_cfg(self) -> str | None:
        """The argument that `true_cfg` sets: of a distilled model alone, and not of each."""
        return self.cfg if self.distilled else None


def scales_of(cls: type, guider: bool, embeds: bool) -> Scales:
    """Return the scales of a pipeline class. It may have a `guider`; its transformer may embed guidance (`embeds`).

    A class that guides by default is called with that scale, although its transformer may be told one as well: SkyReels
    (6) and Qwen-Image (4). HunyuanImage is both: its distilled transformer embeds guidance, the other has a guider.
    """
    embedded, cfg = _scales_in_call(cls)
    if cfg is None and guider:
        cfg = "guider"
    if embedded is None or cfg is None:
        return Scales(embedded, cfg, embedded is not None)
    if cfg == "guider":
        return Scales(embedded, cfg, embeds)
    default = inspect.signature(cls.__call__).parameters[cfg].default  # type: ignore[operator]
    return Scales(embedded, cfg, not (isinstance(default, int | float) and default > 1))


@functools.cache
def _scales_in_call(cls: type) -> tuple[str | None, str | None]:
    """Return the argument that becomes the transformer's `guidance`, and the one that guides a prediction.

    Read from the code: Chroma's inpainting has a `true_cfg_scale` that it never uses, and makes a `guidance` that its
    transformer is not told.
    """
    call = inspect.signature(cls.__call__).parameters  # type: ignore[operator]
    tree = tree_of(cls.__call__)
    told = any(isinstance(node, ast.keyword) and node.arg == "guidance" for node in ast.walk(tree))
    made = [
        name.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and told and getattr(node.targets[0], "id", "") == "guidance"
        for name in ast.walk(node.value)
        if isinstance(name, ast.Name) and name.id.endswith("guidance_scale") and name.id in call
    ]
    embedded = made[0] if made else None
    read = _names(node for node in ast.walk(tree) if isinstance(node, ast.BinOp | ast.Compare))
    if "true_cfg_scale" in call and read["true_cfg_scale"]:
        return embedded, "true_cfg_scale"
    return embedded, "guidance_scale" if "guidance_scale" in call and embedded != "guidance_scale" else None


def guides(pipe: Any, name: str, scale: float) -> bool:
    """Return whether a pipeline's own code guides with this scale, which is its argument or component `name`."""
    if name == "guider":
        return not math.isclose(scale, 1)
    if name == "guidance_scale" and hasattr(type(pipe), "do_classifier_free_guidance"):
        pipe._guidance_scale = scale
        with suppress(AttributeError):
            return bool(pipe.do_classifier_free_guidance)
    return scale > 1


def passes(call: Mapping[str, inspect.Parameter], arguments: Mapping[str, Any]) -> int:
    """Return how many steps a stock call with these arguments takes: fewer where it keeps some of a picture."""
    steps, strength = arguments["num_inference_steps"], arguments.get("strength")
    if strength is None and "strength" in call:
        strength = call["strength"].default
    return steps if not isinstance(strength, int | float) else max(1, math.ceil(min(1.0, strength) * steps))


def _patch_size(components: Mapping[str, Component]) -> int:
    """Latent pixels on a side of one token."""
    transformer, vae = (components[n].config if n in components else {} for n in ("transformer", "vae"))
    patch = transformer.get("patch_size") or transformer.get("all_patch_size") or 1
    patch = patch[-1] if isinstance(patch, list) and patch else patch
    if type(patch) is not int or patch < 1:
        where = components["transformer"].folder / "config.json"
        raise ValueError(f"{where} has the patch size {str(patch)[:80]!r}, which is no number. Download it again.")
    packed = transformer.get("in_channels") == 4 * vae.get("latent_channels", 0)
    return 2 if patch == 1 and packed else patch


def _attribute(pipe: Any, names: tuple[str, ...], default: int) -> int:
    return next((int(value) for name in names if (value := getattr(pipe, name, None))), default)
