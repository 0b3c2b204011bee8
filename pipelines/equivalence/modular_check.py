"""Compare the stages of a modular pipeline with its own call, on fingerprint stubs, before anything is loaded."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch

from ..decoding.decode import run_decoder, to_images
from ..encoding.conditioning import Conditioning
from ..encoding.pictures import Frames, as_stock, handed
from ..encoding.prompts import Text
from ..planning.forecasts import quietly
from ..sampling.inputs import Inputs, Request
from ..sampling.latents import GENERATOR, check_decodable, noise_of, note_sound, sound_of
from ..stock.answers import NotSeenError, opened
from ..stock.blocks import run_blocks
from ..stock.stand_ins import watch_steps
from ..stock.tasks import VIDEOS
from . import verdicts
from .comparison import GUIDES, NEGATIVE, StockCallError, picture_for
from .sound_check import check_sound, with_sound
from .verdicts import Modules, Verdict, compare, echoes_of

if TYPE_CHECKING:
    from ..models.modular.modular_model import ModularModel

_PROMPT, _SEED, _STEPS, _SIDE = "a red boat", 0, 2, 64  # pixels; or the next size that it draws
_STRENGTH = 0.8  # by which some steps are left out
_CHANNELS = (3, 4)  # of a picture
_SOUND = "audio"  # what blocks call the sound that they make
_AS_MADE_FOR: dict[str, Any] = {"small": False, "short": False}
_WAYS: tuple[dict[str, Any], ...] = (
    {"output": "pil"}, {"steps": None}, {"short": False}, _AS_MADE_FOR, {"output": "pil", **_AS_MADE_FOR},
)  # fmt: skip
_HOST = torch.device("cpu")
log = logging.getLogger("ballast")


def prove_modular(model: ModularModel) -> None:
    """Accept the model. Raise ValueError, in one line, where its stages would not end as its own call does."""
    directory = model.claims.cache.directory / "proofs"
    key = model.forecaster.key(stage="proof")
    verdict = verdicts.recall(directory, key)
    if verdict is None:
        log.info("Ballast: comparing %s in stages with its own call, once for these versions", model.name)
        try:
            with quietly(), model.claims.manager.between_stages(), torch.inference_mode():
                verdict = _compare(model)
        except Exception as error:
            cause = error.__cause__ if isinstance(error, StockCallError) else error
            if type(cause) is NameError:  # of a package that diffusers imports where it is
                raise ImportError(
                    f"{model.name} needs a package for {cause.name}, such as torchvision: pip install torchvision."
                ) from error
            verdict = verdicts.not_compared(cause or error)  # maybe the machine; not kept
            if isinstance(cause, torch.linalg.LinAlgError):  # as of the noise of Helios' pyramid, which a GPU draws
                verdict = Verdict(f"its own call fails on the CPU, where it is compared ({verdicts.words_of(cause)})")
        else:
            verdicts.keep(directory, key, verdict)
    if verdict.differs:
        raise ValueError(f"{model.name} cannot be staged: {verdict.differs}. Run it with diffusers itself.")
    model.accept(verdict)


@dataclass(frozen=True)
class _Run:
    """A run to compare: the smallest size that the model draws, or that which it is made for."""

    model: ModularModel
    small: bool
    looks: bool
    output: str = "pt"
    negative: str | None = None
    scale: float | None = None
    steps: int | None = _STEPS
    short: bool = True  # whether a video has the fewest frames that its VAE makes
    heard: list[torch.Tensor] = field(default_factory=list, compare=False)  # the sound that its own call made last

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of `denoise`, each time new."""
        model = self.model
        width, height = (2 * self.side, self.side) if self.small else (None, None)
        frames = model.fewest_frames() if self.short and model.frames else None
        steps = None if model.own_steps({}) else self.steps
        request = Request(width, height, steps or model.default_steps, self.scale, frames)
        strength = _STRENGTH if model.inputs and "strength" in model.sample_inputs else None
        arguments = model.sample_arguments(Inputs(model, self.pictures, strength), request)
        return arguments | {"generator": torch.Generator("cpu").manual_seed(_SEED), "latents": None}

    @property
    def side(self) -> int:
        """The pixels of a small picture's shorter side."""
        sizes = self.model.sizes
        return -(-max(_SIDE, sizes.least) // sizes.multiple) * sizes.multiple

    @property
    def pictures(self) -> dict[str, tuple[torch.Tensor, ...]]:
        """The pictures that the model is given."""
        frames = range(self.model.fewest_frames())
        made = {name: picture_for(self.side, name) for name in self.model.inputs}
        return {n: Frames(one.roll(at, 0) for at in frames) if n in VIDEOS else (one,) for n, one in made.items()}

    def whole(self, modules: Modules) -> torch.Tensor:
        """Return the pictures of its own call."""
        model, given = self.model, as_stock(self.arguments())
        pipe = model.pipeline(_HOST, modules, reads=True)
        model.set_guidance(pipe, given.pop("guider", None))
        given |= {"prompt": _PROMPT, "output_type": self.output}
        given |= {} if self.negative is None else {"negative_prompt": self.negative}
        watch_steps(pipe, given["generator"], None)  # stages draw all noise by the seed
        state = model.initial_state({name: value for name, value in given.items() if value is not None})
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            try:
                run_blocks([model.blocks], pipe, state)
            except Exception as error:
                raise StockCallError from error
        self.heard[:] = [state.values[_SOUND]] if isinstance(state.values.get(_SOUND), torch.Tensor) else []
        return _pictures_of(model, state.values)

    def staged(self, modules: Modules) -> torch.Tensor:
        """Return the pictures of the stages."""
        model = self.model
        text = Text(_PROMPT, self.negative, {n: v for n, v in self.pictures.items() if n in model.encode_inputs})
        encoders = {unit.name: modules[unit.name] for unit in model.encoders}
        cond = Conditioning.of(model.encode(text, _HOST, encoders))
        see = functools.partial(_see, modules)
        answers = model.encode_images(cond, self.arguments(), see) if self.looks else None
        denoisers = {unit.name: modules[unit.name] for unit in model.denoisers}
        drawn = model.denoise(cond, self.arguments(), None, _HOST, denoisers, answers)
        latents, noise = drawn.float(), dict(zip([GENERATOR], noise_of(drawn), strict=False))
        note_sound(latents, sound_of(drawn))
        model.latent_dimensions = latents.ndim
        check_decodable(model, latents)
        check_sound(model.sound, latents, modules, next(iter(self.heard), None))
        pixels = run_decoder(modules[model.decoder.name], latents, _HOST, noise)
        pictures = to_images(model.colours(pixels.float()), video=model.is_video)
        return (pictures * 255).round() / 255 if self.output == "pil" else pictures


def _compare(model: ModularModel) -> Verdict:
    other = model.in_float32()
    run = _Run(other, small=True, looks=bool(model.inputs))
    told: Exception | None = None
    # Some draw nothing of that size or length, Qwen-Image's inpainting gives pictures in 8 bits only, and Ideogram 4
    # has a schedule of its own for one number of steps.
    for way in ({}, *_WAYS):
        try:
            return _compare_looking(replace(run, **way))
        except Exception as error:
            told = error if told is None or way == _AS_MADE_FOR else told
    assert told is not None
    raise told


def _compare_looking(run: _Run) -> Verdict:
    try:
        verdict = _compare_all(run)
    except NotSeenError:
        if run.looks:
            raise
        run = replace(run, looks=True)
        verdict = _compare_all(run)
    if not run.heard:
        return verdict
    return with_sound(run.model, run.model.folder_parts, verdict, functools.partial(_compare_all, run))


def _compare_all(run: _Run) -> Verdict:
    """Compare with and without guidance, and with and without a negative prompt."""
    model = run.model
    echoes = echoes_of(model.all_units, model.stand_ins)
    negative = NEGATIVE if model.takes_negative else None
    scales = (GUIDES, 1.0) if model.guiders or model.distilled else (None,)
    found: list[Verdict] = []
    needs: dict[str, Any] = {}
    for each in dict.fromkeys([run, *(replace(run, negative=negative, scale=scale) for scale in scales)]):
        try:
            found.append(compare(each.whole, each.staged, echoes))
        except StockCallError:
            if each.scale != 1.0 or not model.guiders:
                raise
            needs["guider"] = True  # Wan's own blocks fail without guidance: a run without is refused
            continue
        if found[-1].differs:
            return found[-1]
    if len({each.tail for each in found}) > 1:
        return Verdict("its call changes what its VAE decodes, in more than one way")
    parts = {unit.name: tuple(sorted(echoes[unit.name].parts_called)) for unit in model.encoders}
    return replace(
        found[0],
        dimensions=model.latent_dimensions,
        looks=run.looks,
        needs=needs,
        parts={name: called for name, called in parts.items() if called},
        draws=echoes[model.decoder.name].draws,
    )


def _see(modules: Modules, name: str, *args: Any, **kwargs: Any) -> Any:
    called: Any = modules[name]
    return opened((called.encode if name == "vae" else called)(*args, **kwargs))


def _pictures_of(model: ModularModel, values: Mapping[str, Any]) -> torch.Tensor:
    """Return the pictures [B,(F),H,W,3] that its last blocks leave in the state."""
    from PIL.Image import Image

    for block in reversed(model.stages.sample):
        for param in block.intermediate_outputs:
            found = values.get(param.name)
            tensors: list[Any] = found if isinstance(found, list) else [found]
            if tensors and all(isinstance(one, Image) for one in tensors):
                return torch.stack([handed(one) for one in tensors])  # type: ignore[misc]
            if tensors and all(isinstance(one, torch.Tensor) and _is_picture(one) for one in tensors):
                pictures: torch.Tensor = torch.cat(tensors)
                return pictures.float() if pictures.shape[-1] in _CHANNELS else pictures.float().movedim(-3, -1)
    raise ValueError("its blocks leave no pictures in the state")


def _is_picture(value: torch.Tensor) -> bool:
    """Return whether a tensor is pictures, and not sound."""
    return value.ndim > 2 and not {value.shape[-1], value.shape[-3]}.isdisjoint(_CHANNELS)
