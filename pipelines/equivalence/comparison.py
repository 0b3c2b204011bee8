"""Rehearse a pipeline on echoes of its modules: by its stock call, and in stages. Both have to end alike."""

from __future__ import annotations

import functools
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from ..decoding.decode import run_decoder, to_images
from ..encoding.conditioning import Conditioning, is_embeddings
from ..encoding.pictures import Frames, as_stock
from ..encoding.prompts import Text
from ..options import TRUE_CFG
from ..sampling.control import CONTROL, CONTROL_MODE, Control
from ..sampling.inputs import Inputs, Request
from ..sampling.latents import check_decodable
from ..stock.answers import NotSeenError, opened
from ..stock.stand_ins import Steps
from ..stock.tasks import EDITED, control_input, reads_pictures, takes_frames
from .fingerprints import Echo
from .sound_check import check_sound, with_sound
from .verdicts import Modules, Verdict, compare, echoes_of

if TYPE_CHECKING:
    from ..models.diffusers.diffusers_model import DiffusersModel

_NONE: Mapping[str, Any] = MappingProxyType({})
Arguments = Callable[..., dict[str, Any]]  # of a call, each time new, for a scale of classifier-free guidance

_PROMPT, NEGATIVE = "a red boat", "blurry, grey"
_SEED = 0
_SIDE, _STEPS = 64, 2  # pixels; or the next size that the pipeline draws
_STRENGTH = 0.8  # by which some steps are left out
CHECKS = ("safety_checker",)  # blackens what it does not like, and is not run
GUIDES = 3.0  # a scale that guides
_CHANNELS = (3, 4)  # of a picture
_HOST = torch.device("cpu")


class StockCallError(Exception):
    """The stock call itself ended with the error that is the cause of this one."""


class Rehearsal:
    """A model that runs on fingerprint stubs, in float32; its prompt is encoded by `texts`, another class of its parts.

    The prompt is encoded with `options` of `encode_prompt`: texts and tensors among them are replaced by others.
    """

    def __init__(self, model: DiffusersModel, texts: DiffusersModel, options: Mapping[str, Any] = _NONE) -> None:
        self.model = model.in_float32()
        self.texts = self.model if texts is model else texts.in_float32()
        self.options = options
        self.fits = False  # whether its pictures have the size that it is asked for
        self.looks = self.model.looks
        self.drawn: tuple[int, ...] = ()  # the size of what was drawn
        self.heard: torch.Tensor | None = None  # the sound that the stock call made
        self.inputs = Inputs(self.model)


def rehearse(model: DiffusersModel, texts: DiffusersModel, options: Mapping[str, Any] = _NONE) -> Verdict:
    """How the stages of a model differ from its stock call, and which negative prompt that has by default.

    The prompt is encoded by `texts`, which may be another one of the same parts, with `options` of `encode_prompt`:
    texts and tensors among them are replaced by others.
    """
    pipe = Rehearsal(model, texts, options)
    units = [unit for unit in model.parts.units.values() if unit.name not in CHECKS]
    echoes = echoes_of(units, model.stand_ins)
    with torch.inference_mode():
        try:
            return _compare_looking(pipe, echoes, small=True)
        except Exception as error:
            if pipe.model.inputs and "strength" in pipe.model.call and isinstance(error, StockCallError):
                pipe.fits = True
                with suppress(Exception):
                    return replace(_compare_looking(pipe, echoes, small=True), own_size=True)
                pipe.fits = False
            with suppress(Exception):  # some draw nothing of that size
                return _compare_looking(pipe, echoes, small=False)
            raise error


def _compare_looking(pipe: Rehearsal, echoes: Mapping[str, Echo], small: bool) -> Verdict:
    pipe.looks = bool(pipe.model.inputs)
    compared = functools.partial(_compare, pipe, echoes, small)
    try:
        verdict = compared()
    except NotSeenError:
        if pipe.looks:
            raise
        pipe.looks = True
        verdict = compared()
    return verdict if pipe.heard is None else with_sound(pipe.model, pipe.model.parts, verdict, compared)


def _compare(pipe: Rehearsal, echoes: Mapping[str, Echo], small: bool) -> Verdict:
    arguments = functools.partial(arguments_of, pipe, small)
    pairs: list[tuple[str | None, str | None]] = []
    takes = "negative_prompt" in pipe.model.call
    default: str | None = None
    try:
        if not pipe.texts.replays:
            default = _default_negative(pipe, {name: echo.face for name, echo in echoes.items()}, arguments)
        pairs.append((None, default))
    except Exception:
        if not takes:
            raise
        default = ""  # EasyAnimate's own call fails without one
    if takes:
        pairs.append((NEGATIVE, NEGATIVE))
        if any(name.startswith("negative_") for name in pipe.options):  # which count beside a negative prompt
            pairs = pairs[-1:]
    runs = [(arguments, *pair) for pair in pairs]
    tails: set[str] = set()
    scales: list[tuple[Arguments, str | None, str | None]] = []
    cfg = pipe.model.scales.cfg
    # It may see another picture when it guides, and read other options; a distilled one does not guide by default.
    if takes and cfg in pipe.model.call and (pipe.model.inputs or pipe.options or pipe.model.distilled):
        scales.append((functools.partial(arguments, GUIDES), NEGATIVE, NEGATIVE))
    if pipe.texts.replays and cfg in pipe.model.call:
        scales += [(functools.partial(arguments, scale), None, None) for scale in (1.0, GUIDES)]
    for given, negative, staged_negative in runs + scales:
        whole = functools.partial(_run_whole, pipe, given, negative)
        stages = functools.partial(_run_stages, pipe, given, staged_negative)
        try:
            verdict = compare(whole, stages, echoes)
        except Exception as error:
            if given is arguments or not _fails_alike(error, stages, echoes):
                raise
            continue  # HunyuanDiT's perturbed attention has no way without guidance
        if verdict.differs:
            return verdict
        tails.add(verdict.tail)
    if len(tails) > 1:
        return Verdict("its call changes what its VAE decodes, in more than one way")
    unchecked = tuple(name for name in CHECKS if name in pipe.model.parts.units)
    left_out = verdict.left_out + unchecked
    asked = arguments()
    sides = asked.get("height"), asked.get("width")
    own_size = bool(pipe.model.inputs) and None not in sides and sides != pipe.drawn
    found = replace(verdict, negative=default, left_out=left_out, own_size=own_size, looks=pipe.looks)
    return replace(found, dimensions=pipe.model.latent_dimensions)


def _fails_alike(error: Exception, stages: Callable[[Modules], Any], echoes: Mapping[str, Echo]) -> bool:
    """Return whether the stages end with the error that the stock call ended with."""
    try:
        stages({name: echo.face for name, echo in echoes.items()})
    except Exception as other:
        return (type(other), str(other)) == (type(error.__cause__), str(error.__cause__))
    return False


def _default_negative(pipe: Rehearsal, modules: Modules, arguments: Arguments) -> str | None:
    """Return the negative prompt that the stock call encodes by default when it guides, or None."""
    asked: list[Mapping[str, Any]] = []
    guides = pipe.model.scales.cfg in pipe.model.call
    _run_whole(pipe, functools.partial(arguments, GUIDES if guides else None), None, modules, asked)
    if not asked:
        raise ValueError("it never encodes its prompt")
    if "negative_prompt" in pipe.model.encode_prompt:
        text = asked[0].get("negative_prompt")
    else:
        text = (asked[1].get("prompt") or "") if len(asked) > 1 else None
    return text[0] if isinstance(text, list | tuple) else text


def arguments_of(pipe: Rehearsal, small: bool, cfg: float | None = None) -> dict[str, Any]:
    """Arguments of `_denoise` for a run that is as small as can be, or of the size that the pipeline is made for.

    `cfg` is a scale of classifier-free guidance.
    """
    side = -(-_SIDE // pipe.model.sizes.multiple) * pipe.model.sizes.multiple
    some = pipe.model.fewest_frames()
    pictures = {name: _pictures(side, name, some, pipe.model.call) for name in pipe.model.inputs}
    if pipe.model.controls > 1 and (followed := control_input(pipe.model.pipeline_class)) in pictures:
        pictures[followed] = tuple(picture_for(side + at, "") for at in range(pipe.model.controls))
    strength = _STRENGTH if pipe.model.inputs and "strength" in pipe.model.call else None
    pipe.inputs = Inputs(pipe.model, pictures, strength)
    sides = {"width": 2 * side if pipe.fits else side, "height": side}
    width, height = (value if small and name in pipe.model.call else None for name, value in sides.items())
    frames = some if small and pipe.model.frames else None
    true_cfg = {TRUE_CFG: cfg} if pipe.model.distilled and cfg is not None else {}
    known = pipe.model.control_modes if CONTROL_MODE in pipe.model.call else []
    modes = [0 if each else -1 for each in known]  # of union ControlNets
    kinds = {CONTROL_MODE: modes if len(modes) > 1 else 0} if any(known) else {}
    request = Request(width, height, _STEPS, None if true_cfg else cfg, frames, true_cfg | kinds)
    arguments = pipe.model.sample_arguments(pipe.inputs, request)
    if "image_crf" in pipe.model.call and importlib.util.find_spec("av") is None:
        arguments["image_crf"] = 0  # no video codec is run on the picture: there is none
    return arguments | {"generator": torch.Generator("cpu").manual_seed(_SEED)}


def _run_whole(
    pipe: Rehearsal,
    arguments: Arguments,
    negative: str | None,
    modules: Modules,
    asked: list[Mapping[str, Any]] | None = None,
) -> torch.Tensor:
    """Pictures by the stock call. `asked` gets the arguments of each call of its `encode_prompt`."""
    stock = pipe.model.stock_pipeline(_HOST, modules, *pipe.model.parts.without_weights(""))
    stock.vae = modules["vae"]
    for name in modules.keys() - {"vae"} - {unit.name for unit in (*pipe.model.encoders, *pipe.model.denoisers)}:
        setattr(stock, name, modules[name])
    if asked is not None:
        encode, signature = stock.encode_prompt, inspect.signature(stock.encode_prompt)

        def listened(*args: Any, **kwargs: Any) -> Any:
            asked.append(signature.bind(*args, **kwargs).arguments)
            return encode(*args, **kwargs)

        stock.encode_prompt = listened
    given = as_stock(arguments()) | {"prompt": _PROMPT, "output_type": "pt"}
    control: Control | None = given.pop(CONTROL, None)
    given |= {} if control is None else control.arguments(pipe.model.call)
    given.pop("negative_prompt", None)
    given |= {} if negative is None else {"negative_prompt": negative}
    for name, value in _options_of(pipe, modules).items():
        if name in ("prompt_embeds", "negative_prompt_embeds"):  # which a call takes in place of the prompt
            given[name.removesuffix("_embeds")] = None
        given |= {name: value} if name in pipe.model.call else {}
    stock.scheduler.step = Steps(stock, given["generator"], None)  # stages draw all noise by the seed
    with torch.random.fork_rng(devices=[]):  # the caller's own noise stays as it is
        torch.manual_seed(_SEED)
        try:
            made = stock(**given)
        except Exception as error:
            raise StockCallError from error
    pictures = _pictures_of(made)
    pipe.drawn = tuple(pictures.shape[-3:-1])
    pipe.heard = None if isinstance(made, tuple) else made.get("audio")
    return pictures


def _options_of(pipe: Rehearsal, modules: Modules) -> dict[str, Any]:
    """Return the arguments that the prompt is encoded with: made by these modules where they are tensors."""
    given = pipe.options
    made: Mapping[str, Any] = {}
    if any(is_embeddings(value) for value in given.values()):
        made = encoded(pipe, NEGATIVE if pipe.model.takes_negative else None, modules, {}).tensors

    def other(name: str, value: Any) -> Any:
        if not is_embeddings(value):
            return f"{_PROMPT}, {name}" if isinstance(value, str | list) and "prompt" in name else value
        found = made.get(name, value)
        tensors = found if isinstance(found, list) is isinstance(value, list | tuple) else value
        return [changed(one) for one in tensors] if isinstance(tensors, list | tuple) else changed(tensors)

    def changed(tensor: torch.Tensor) -> torch.Tensor:
        return tensor * 1.25 if tensor.is_floating_point() else tensor

    return {name: other(name, value) for name, value in given.items()}


def _pictures_of(made: Any) -> torch.Tensor:
    """Return the pictures [B,(F),H,W,3] of a call's result, a class whose fields have many names.

    Qwen-Image-Layered gives a list of each prompt's, and LTX-2's HDR its channels last.
    """
    found = made[0] if isinstance(made, tuple) else next(iter(made.values()))
    pictures: torch.Tensor = torch.cat(found) if isinstance(found, list) else found
    return pictures.float() if pictures.shape[-1] in _CHANNELS else pictures.float().movedim(-3, -1)


def _run_stages(pipe: Rehearsal, arguments: Arguments, negative: str | None, modules: Modules) -> torch.Tensor:
    cond = encoded(pipe, negative, modules)
    latents = drawn(pipe, cond, lambda: arguments() | {"latents": None}, modules)
    pipe.model.latent_dimensions = latents.ndim
    check_decodable(pipe.model, latents)
    check_sound(pipe.model.sound, latents, modules, pipe.heard)
    pixels = run_decoder(modules["vae"], latents, _HOST, pipe.model.decode_arguments(latents, {}, "whole", 0))
    return to_images(pixels.float(), video=pipe.model.is_video)


def encoded(
    pipe: Rehearsal, negative: str | None, modules: Modules, options: Mapping[str, Any] | None = None
) -> Conditioning:
    """Encode a prompt with these modules and `options`, by default those of the pipeline."""
    encoders = {unit.name: modules[unit.name] for unit in pipe.model.encoders}
    texts, pictured = pipe.texts, pipe.inputs.pictures
    sees = texts.edits if texts.replays else reads_pictures(texts.pipeline_class)
    pictures = next((pictured[name] for name in EDITED if name in pictured), ())
    read = texts.pictures_read(pictures) if sees else {}
    read = {**read, **(_options_of(pipe, modules) if options is None else options)}
    return Conditioning.of(texts.encode(Text(_PROMPT, negative, read), _HOST, encoders))


def drawn(
    pipe: Rehearsal, cond: Conditioning, arguments: Callable[[], dict[str, Any]], modules: Modules
) -> torch.Tensor:
    """Latents made by these modules. `arguments` gives those of `_denoise`, each time new."""

    def see(name: str, *args: Any, **kwargs: Any) -> Any:
        unit, _, part = name.partition(".")
        called: Any = modules[unit].get_submodule(part)
        return opened((called.encode if name == "vae" else called)(*args, **kwargs))

    denoisers = {unit.name: modules[unit.name] for unit in pipe.model.denoisers}
    answers = pipe.model.encode_images(cond, arguments(), see) if pipe.looks else None
    return pipe.model.denoise(cond, arguments(), None, _HOST, denoisers, answers).float()


def _pictures(side: int, name: str, frames: int, call: Mapping[str, Any]) -> tuple[torch.Tensor, ...]:
    one = picture_for(side, name)
    return Frames(one.roll(at, 0) for at in range(frames)) if takes_frames(name, call) else (one,)


def picture_for(side: int, name: str) -> torch.Tensor:
    """Return a picture that is not square and has no two equal neighbours, or a mask that is half set."""
    rows, columns = torch.meshgrid(torch.arange(side), torch.arange(2 * side), indexing="ij")
    if "mask" in name:
        return (columns > rows).float()
    return torch.stack([(rows * 7 + columns * of) % 256 / 255 for of in (3, 5, 11)], dim=2)
