"""DiffusersModel: any class of diffusers, in three loads: encoders only, transformer only, VAE only.

The class's own code runs unmodified in each. In the sampling stage a stand-in takes the VAE's place: it answers what
the pipeline asks of the VAE and catches what it would have decoded, so no class needs decode code of its own.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ....memory.weights.unit import ManagedModel
from ...decoding.policy import WayName
from ...encoding.conditioning import Conditioning, is_embeddings
from ...encoding.pictures import Frames, Pictures, as_handed, as_stock, handed
from ...encoding.prompts import COUNTS, TOLD, Text, as_list, as_plain, no_effect
from ...equivalence import check
from ...equivalence.verdicts import Verdict
from ...files.components import read_model_index
from ...files.single.given import GivenFiles
from ...lora.weight_names import Converters
from ...options import TRUE_CFG, check_known, check_stage
from ...planning.forecasts import Forecaster, quietly
from ...planning.sampling_forecasts import dry_run_arguments
from ...sampling.batches import Dims, for_batch
from ...sampling.cached_calls import caching
from ...sampling.control import (
    CONTROL,
    CONTROL_MODE,
    CONTROL_RANGE,
    CONTROL_STRENGTH,
    Control,
    check_mode,
    control_of,
    following,
)
from ...sampling.guidance_range import GUIDANCE_RANGE, GuidanceRange, guided_within, range_of
from ...sampling.guider_choice import CHOICE, GUIDER, guider_for, guider_of
from ...sampling.inputs import Inputs, Request
from ...sampling.picture_sizes import PictureSizes
from ...sampling.scheduler_choice import SCHEDULER, SHIFT, SIGMAS, SchedulerChoice, choice_of, is_flow
from ...sampling.step_cache import CACHE, OFF, StepCache, cache_of
from ...sampling.step_range import END_STEP, START_STEP, STEP_RANGE, StepRange, steps_between
from ...stock.answers import Answers, Run
from ...stock.imagined import imagine
from ...stock.module_call import ModuleCall
from ...stock.postprocess import OF_ONE, TAILS
from ...stock.recording import Recorded, Recording
from ...stock.signatures import (
    Scales,
    as_given,
    asks_for_padding,
    check_frames,
    check_sections,
    embeddings_of,
    encode_defaults,
    encoding_of,
    fewest_frames,
    frame_rate_of,
    guides,
    needed_inputs,
    negative_arguments,
    passes,
    picture_sizes,
    returned_names,
    rewriting_note,
    scales_of,
    takes_noise,
    text_options,
)
from ...stock.sound import SoundDecoder
from ...stock.stand_ins import (
    DecodeCalledError,
    Entering,
    LateTool,
    LoopReachedError,
    StandIn,
    StandInEncoder,
    StandInSound,
    StandInVae,
    Steps,
    checking_noise,
    keeping_embeddings,
    keeping_processors,
)
from ...stock.tasks import (
    EDITED,
    INPUTS,
    VIDEOS,
    WORDS,
    control_input,
    edits,
    reads_pictures,
    several_controlnets,
    task_of,
)
from ..claims import Claims
from ..model import Embeddings, Model, OnStep, See
from .folder_parts import CONTROLNET, HOST, SEEING, Components, Source

FRAMES = ("num_frames", "frames", "video_length")  # what pipelines call the number of frames
_STEPS = 28  # where a pipeline has no number of its own
_GUIDES = 3.0  # a scale of guidance that guides
_OWN = INPUTS - {"images", "image_reference", "reference_images"}
_FOLLOWED = {"control_image", "control_mask"}  # which a result need not start from
_SIDE = 64  # pixels of a picture that is not read
_AREA = "max_area"
_AT_ONCE = "decode_chunk_size"  # how many frames a VAE of pictures decodes at once
_AT_STEP = "callback_on_step_end"  # is told the latents of the loop

# Arguments that the stages set themselves.
_OURS = {
    "self", "prompt", "negative_prompt", "width", "height", "num_inference_steps", *FRAMES, "guidance_scale",
    "distilled_guidance_scale", "true_cfg_scale", "generator", "latents", "output_type", "return_dict", "callback",
    "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs", "device",
    "do_classifier_free_guidance", "kwargs", *INPUTS, "strength", _AREA, _AT_ONCE, "padding_mask_crop",
    "masked_image_latents", "image_embeds",
}  # fmt: skip


class DiffusersModel:
    """A class of diffusers that drives the components of a folder, in stages.

    `inputs` are the pictures that it is compared with its own call for, by default those without which the call does
    not run. Prompts are encoded by `text_class`, by default the class itself.
    """

    titles: Mapping[str, str] = MappingProxyType({})
    default_guidance: float | None = None
    default_negative: str | None = ""
    starts_from_latents = False
    looks = False  # whether every run encodes images, also one without pictures
    left_out: tuple[str, ...] = ()
    sound: SoundDecoder | None = None
    latent_dimensions = 4
    decodes_to_host = False
    decoder_draws = False
    batch_dims: Mapping[str, int] = MappingProxyType({})
    cond_dims: Dims = MappingProxyType({})
    stand_ins: Mapping[tuple[str, str], Any] = MappingProxyType({})
    forecast_caveat = ""
    tail = ""  # what its call does with what the VAE decodes, by its name in TAILS
    own_size = False  # whether it draws the size of its picture, whatever it is asked for
    text_options: Mapping[str, Any] = MappingProxyType({})  # of `encode`, without which the stock call fails
    fails = ""  # the stock call with its default arguments: the refusal, until a run gives those that it needs
    is_compared = True  # with its own call, when it is opened
    controlled: Any = None  # the class that runs it with ControlNets that lie elsewhere
    follows = 0  # pictures that they follow then

    def __init__(
        self, parts: Components, cls: Any, inputs: Collection[str] | None = None, text_class: Any = None
    ) -> None:
        text_class = text_class or cls
        self.parts, self.pipeline_class, self.text_class = parts, cls, text_class
        self.inputs = frozenset(needed_inputs(cls) if inputs is None else inputs)
        self.name, self.title, self.knows, self.folder = parts.name, parts.title, parts.knows, parts.folder
        self.claims, self.truncation, self.components = parts.claims, parts.truncation, parts.components
        self._init = inspect.signature(cls).parameters
        self.call: Mapping[str, inspect.Parameter] = inspect.signature(cls.__call__).parameters
        self.frames = next((name for name in FRAMES if name in self.call), None)
        encode: Any = encoding_of(text_class)
        self.encode_prompt: Mapping[str, inspect.Parameter] = inspect.signature(encode).parameters
        call = inspect.signature(text_class.__call__).parameters
        self.is_video = not call.keys().isdisjoint({*FRAMES, *VIDEOS})
        self.frame_rate = frame_rate_of(self.name)
        steps = call.get("num_inference_steps")
        self.default_steps = steps.default if steps and isinstance(steps.default, int) else _STEPS
        self.edits = edits(text_class)
        returned = embeddings_of(text_class)
        self.replays = not returned
        self.takes_negative = "negative_prompt" in (call if self.replays else self.encode_prompt) or any(
            f"negative_{name}" in call for name in returned
        )
        self.encoders, self.denoisers, self.decoder = parts.encoders, parts.denoisers, parts.units["vae"]
        self.decoder_config = parts.components["vae"].config
        self.controls = len(parts.controlnets) if CONTROLNET in self._init else 0  # pictures that ControlNets follow
        self._tasks: dict[Any, DiffusersModel] = {}
        self._task_of: weakref.ref[DiffusersModel] | None = None  # the model that encodes the prompt, for a task
        for unit in self.denoisers:
            unit.batch_dims = self.batch_dims

    @property
    def picture_encoder(self) -> ManagedModel:
        """The unit that encodes pictures to latents."""
        return self.decoder

    @property
    def forecaster(self) -> Forecaster:
        """Forecasts its stages on its device."""
        return self.claims.forecaster(self.name, self.facts, self.stand_ins)

    # Equivalence

    def accept(self, verdict: Verdict) -> None:
        """Take what the comparison with its own call found."""
        self.default_negative, self.left_out = verdict.negative, verdict.left_out
        self.latent_dimensions, self.own_size = verdict.dimensions, verdict.own_size
        self.tail, self.looks = verdict.tail, verdict.looks
        self.text_options, self.fails = verdict.needs, ""
        self.set_sound(SoundDecoder.of(verdict.sound, verdict.sound_tail, self.parts))

    def set_sound(self, sound: SoundDecoder | None) -> None:
        """Set what makes sound after the pictures are decoded. Its units do not sample."""
        self.sound, units = sound, sound.units if sound else []
        self.denoisers = [unit for unit in self.parts.denoisers if unit not in units]

    def in_float32(self) -> DiffusersModel:
        """Return the same model in float32, to be compared with its own call."""
        components = {
            name: replace(component, dtype=torch.float32) if component.is_module else component
            for name, component in self.components.items()
        }
        other = type(self)(
            replace(self.parts, components=components), self.pipeline_class, self.inputs, self.text_class
        )
        other.replays, other.default_negative, other.left_out = self.replays, self.default_negative, self.left_out
        other.latent_dimensions, other.own_size, other.tail = self.latent_dimensions, self.own_size, self.tail
        other.text_options, other.looks, other.controls = self.text_options, self.looks, self.controls
        other.set_sound(self.sound)
        return other

    def check_ready(self) -> None:
        """Raise ValueError, in one line, where no run has given what the stock call needs."""
        check.check_proven(self)

    def batch_differs(self, texts: Model, own: Collection[str]) -> str:
        """Return how pictures drawn at once would differ from each drawn alone, in a few words."""
        assert isinstance(texts, DiffusersModel)
        return check.batch_differs(self, texts, own)

    def fewest_frames(self) -> int:
        """Return the fewest frames that its VAE makes."""
        return fewest_frames(self.stock_pipeline(HOST, {})) if self.is_video else 1

    # Its own call

    def stock_pipeline(
        self,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        *tools: str,
        reads: bool = True,
        ask: Callable[[str], Callable[..., Any]] | None = None,
        answers: Answers | None = None,
        entering: Entering | None = None,
    ) -> Any:
        """Return the stock pipeline with these modules, the named tools, and stand-ins for the VAE and others.

        Unless it `reads` texts its tokenizers come when they are asked for something: LTX-2's loop, on which side they
        pad. `ask` gives the call of a module that sees a picture, by its name, or that comes before one which does; by
        default the `answers` are told again. Its loop begins at latents that are `entering`, if any.
        """
        telling, looks = (answers or Answers()).tell(), ask is not None
        parts: dict[str, Any] = dict.fromkeys(
            name for name, parameter in self._init.items() if parameter.default is inspect.Parameter.empty
        )
        parts |= {name: value for name, value in self.parts.config.items() if name in self._init}
        parts |= modules
        processors = (name for name in self.parts.without_weights("") if "processor" in name)  # asked by constructors
        for name in {*tools, *processors} & self._init.keys():
            later = name not in tools or (not reads and name.startswith("tokenizer"))
            parts[name] = LateTool(functools.partial(self.parts.tool, name)) if later else self.parts.tool(name)
        ask = ask or functools.partial(functools.partial, telling.answer)
        heard: StandInSound | None = None
        for unit in reversed(self.sound.units if self.sound else []):
            parts[unit.name] = heard = StandInSound(unit, device, self.components[unit.name].run_dtype)
        parts["vae"] = StandInVae(self.decoder, device, torch.float32, ask("vae"), after=heard)
        for unit in self.parts.units.values():
            in_loop = unit.role == "transformer" or unit.name.startswith(CONTROLNET)
            asked = unit.name in SEEING or (looks and unit.name in self.parts.beside)
            dtype = self.components[unit.name].run_dtype
            if unit.name in modules:
                continue
            if in_loop or asked:
                parts[unit.name] = StandIn(unit, device, dtype, ask(unit.name) if asked else None)
            elif self.replays and unit in self.encoders:
                part_of = functools.partial(_asking_part, ask, unit.name)
                parts[unit.name] = StandInEncoder(unit, device, dtype, part_of)
        if self.controls > 1:
            parts[CONTROLNET] = several_controlnets([parts[name] for name in self.parts.controlnets])
        if self.parts.controlnets:  # which the class may run without
            parts = {name: value for name, value in parts.items() if name in self._init}
        # The device is the manager's: an offloaded module reports `cpu` or `meta`.
        on_device = property(lambda _: device)
        stock = self.pipeline_class
        namespace: dict[str, Any] = {
            "__module__": stock.__module__,
            "_execution_device": on_device,
            "device": on_device,
        }
        if not self.replays:
            namespace["encode_prompt"] = keeping_embeddings(stock.encode_prompt)
        if takes_noise(stock):
            namespace["prepare_latents"] = checking_noise(stock.prepare_latents, telling)
        if entering is not None:
            namespace["prepare_latents"] = entering.in_place_of_noise(stock.prepare_latents)
        staged = type(stock.__name__, (stock,), namespace)
        pipe = staged(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    @property
    def scales(self) -> Scales:
        """The arguments of its call that `guidance` and `true_cfg` set."""
        return scales_of(self.pipeline_class, "guider" in self.components, self._embeds_guidance)

    @property
    def _embeds_guidance(self) -> bool:
        """Return whether the transformer embeds a scale of guidance: Flux-dev's does, Flux-schnell's does not."""
        transformer = self.components.get("transformer")
        name = "guidance_embeds"
        if transformer is None or name in transformer.config:
            return bool(transformer and transformer.config[name])
        taken = inspect.signature(transformer.cls).parameters
        return name not in taken or bool(taken[name].default)

    @property
    def control_modes(self) -> list[int | None]:
        """How many kinds of pictures each picture's ControlNet tells by a number, None for one that follows one."""
        configs = (self.components[name].config for name in self.parts.controlnets)
        known = [config.get("num_mode") or config.get("num_control_type") for config in configs]
        return known if len(known) == self.controls else known * self.controls

    @property
    def distilled(self) -> bool:
        return self.scales.distilled

    @functools.cached_property
    def sizes(self) -> PictureSizes:
        """The sizes that it draws, by the pipeline's own checks and the transformer's tables."""
        return picture_sizes(self.stock_pipeline(HOST, {}), self.components)

    def converters(self) -> Converters:
        """Return no names: those of its files are the modules'."""
        return {}

    def facts(self) -> dict[str, Any]:
        import diffusers
        import transformers

        return {
            "pipeline": self.pipeline_class.__name__,
            "libraries": [torch.__version__, diffusers.__version__, transformers.__version__],
            "config": self.parts.config,
            "components": {c.name: c.config if c.is_module else c.identity() for c in self.components.values()},
            "dtypes": {c.name: str(c.run_dtype) for c in self.components.values() if c.is_module},
        }

    def files(self) -> dict[str, Sequence[str]]:
        return {name: component.identity() for name, component in self.components.items()}

    # Encode

    def encode_options(self) -> Collection[str]:
        negative = {name for name in negative_arguments(self.pipeline_class).values() if name.startswith("negative_")}
        known = {name for name in {*self.encode_prompt, *negative} if not name.endswith("_per_prompt")} - _OURS
        if self.replays:
            known = {name for name in known & self.call.keys() if "embeds" not in name}
        return known

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for options that `encode` does not take, or that count otherwise in stock."""
        check_known(self.title, options, self.encode_options())
        check.prove_options(self, options)

    def pictures_read(self, pictures: Sequence[torch.Tensor]) -> dict[str, Any]:
        cls = self.pipeline_class
        if pictures and not self.edits:
            raise ValueError(
                f"{self.title} reads no pictures with its prompt. Leave images out, or give one to sample."
            )
        if not pictures and reads_pictures(cls) and needed_inputs(cls):
            raise ValueError(f"{self.title} reads a picture with its prompt. Give images.")
        if self.replays:
            return {"images": tuple(pictures)} if pictures else {}
        return {"handed": self.handed(pictures)} if pictures and reads_pictures(cls) else {}

    def encoding_facts(self, text: Text) -> dict[str, Any]:
        """Return everything that decides the embeddings, as plain data."""
        import diffusers
        import transformers

        negative = text.negative_prompt
        read = [c for c in self.components.values() if not c.is_module or c.role == "text_encoder"]
        files = {c.name: c.identity() for c in read if not c.name.startswith("scheduler")}
        return {
            "format": 2,  # to be raised when the same facts give other embeddings
            "pipeline": self.name,
            "libraries": [diffusers.__version__, transformers.__version__],
            "files": files,
            "config": self.parts.config,
            "dtypes": {c.name: str(c.run_dtype) for c in read if c.is_module},
            "options": text.options,
            "prompt": text.prompt if isinstance(text.prompt, str) else list(text.prompt),
            "negative_prompt": list(negative) if isinstance(negative, list | tuple) else negative,
        }

    def encode(self, text: Text, device: torch.device, modules: Mapping[str, nn.Module]) -> Embeddings:
        """Return the embeddings that `encode_prompt` of the class makes with these encoders."""
        if self.replays:
            return self.record(text, device, modules)
        prompt, negative_prompt, options = text.prompt, text.negative_prompt, text.options
        tools = [n for n in self.parts.without_weights("") if not n.startswith("scheduler")]
        pipe = self.stock_pipeline(device, modules, *tools)
        usual = encode_defaults(self.encode_prompt, self.call) | {"device": device}
        # The first is for the prompt, the last for the negative one.
        handed = [own | {"image": as_handed(own["image"])} for own in options.get("handed", ())] or [{}]
        names = returned_names(self.pipeline_class.encode_prompt)

        def run(own: Mapping[str, Any], **texts: Any) -> dict[str, Any]:
            given = {k: v for k, v in (usual | texts | dict(own)).items() if k in self.encode_prompt}
            result = pipe.encode_prompt(**given)
            return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))

        if "negative_prompt" in self.encode_prompt:
            both = {"negative_prompt": negative_prompt, "do_classifier_free_guidance": True}
            named = run(options | handed[0], prompt=prompt, **both)
        else:
            named = run(options | handed[0], prompt=prompt)
            words = negative_arguments(self.pipeline_class)
            own = {name: options[word] for name, word in words.items() if word in options}
            instead = any(is_embeddings(v) and words[k].startswith("negative_") for k, v in own.items())
            if (negative_prompt is not None or instead) and any(f"negative_{name}" in self.call for name in named):
                negative = run(own | handed[-1], prompt=negative_prompt)
                named |= {f"negative_{name}": value for name, value in negative.items()}
        return {name: value for name, value in named.items() if value is not None and name in self.call}

    # Image conditioning

    def inputs_of(self, pictures: Pictures) -> Inputs:
        """Return the pictures as arguments of the call of the class that takes them."""
        if self.controlled is not None and not (pictures.control or _follows_image(self.controlled, pictures)):
            raise ValueError(f"{self.title} has a ControlNet, but no picture for it. Give it: control.")
        if not pictures:
            return Inputs(self)
        task = task_of(self.controlled or self.pipeline_class, self.title, pictures)
        follows = self.follows or self.controls
        several = follows > 1
        if several and len(pictures.control) != follows:
            raise ValueError(
                f"{self.title} follows {follows} pictures with its ControlNets, and control has "
                f"{len(pictures.control)}. Give one for each."
            )
        key = task.cls, frozenset(task.pictures)
        if key != (self.pipeline_class, self.inputs) and key not in self._tasks:
            self._tasks[key] = self._for_task(*key)
        model = self._tasks.get(key, self)
        own: Mapping[str, str] = {}
        starts = pictures.image and ("strength" in model.call or model.frames is not None)
        if starts or (len(pictures.control) > 1 and not several):  # one is the same for all that are drawn at once
            kept = (_OWN if starts else _FOLLOWED) - (_FOLLOWED if several else set())
            each = (n for n, given in task.pictures.items() if n in kept and not isinstance(given, Frames))
            own = {name: WORDS.get(name, name) for name in each}
        return Inputs(model, task.pictures, pictures.strength, own)

    def _for_task(self, cls: Any, inputs: frozenset[str]) -> DiffusersModel:
        """Return the model that another class drives, or that takes other pictures, compared with its own call."""
        self.check_ready()
        task = type(self)(self.parts, cls, inputs, self.text_class)
        task.replays, task.text_options, task._task_of = self.replays, self.text_options, weakref.ref(self)
        task.default_steps, task.default_guidance = self.default_steps, self.default_guidance
        task.controls = self.follows or self.controls
        if self.is_compared:
            check.prove(task, self)
        return task

    def encode_images(self, cond: Conditioning, arguments: Mapping[str, Any], see: See) -> Answers:
        """Run the stock call until it samples, on the CPU. What it asks of modules that see a picture, `see` answers.

        `see(name, *args, **kwargs)` gives the answer opened.
        """
        if "strength" in self.call and arguments["latents"] is not None:
            raise ValueError("noise: this run starts from a picture, and its noise from a seed. Give seed instead.")
        answers = Answers()

        def ask(name: str) -> Run:
            if name in self.parts.beside:  # which sees no picture: LTX-2's connectors
                return functools.partial(self._imagine, name)
            return answers.ask(name, functools.partial(see, name))

        try:
            self._call_stock(cond, arguments, None, HOST, {}, Answers(), ask)
        except LoopReachedError:
            return answers
        raise RuntimeError(f"{self.name} never samples")

    def module_call(self, name: str, args: Any, kwargs: Any) -> ModuleCall:
        """Return the call of a module that sees pictures: of a unit, or of a part in it, as in "unit.part"."""
        unit, _, part = name.partition(".")
        return ModuleCall(name, self.parts.units[unit], part, args, kwargs)

    def _imagine(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Return zeros in the shape of a module's answer."""
        return imagine(self, name, args, kwargs)[1]

    def handed(self, pictures: Sequence[torch.Tensor]) -> tuple[dict[str, Any], ...]:
        """Return what the stock call hands to `encode_prompt` for these pictures: the pictures, and numbers of its own.

        Once for the prompt and, where it guides, once for the negative one. The call runs on the CPU; what it asks of
        other modules before is imagined.
        """
        heard: list[dict[str, Any]] = []
        usual = encode_defaults(self.encode_prompt, self.call)

        def ask(name: str) -> Run:
            return Answers().ask(name, functools.partial(self._imagine, name))

        tools = [name for name in self.parts.without_weights("") if not name.startswith("scheduler")]
        pipe = self.stock_pipeline(HOST, {}, *tools, ask=ask)
        names, signature = returned_names(self.pipeline_class.encode_prompt), inspect.signature(pipe.encode_prompt)

        def encode_prompt(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            given = {name: value for name, value in bound.arguments.items() if isinstance(value, int | float)}
            own = {name: value for name, value in given.items() if name in usual and value != usual[name]}
            heard.append(own | {"image": handed(bound.arguments["image"])})
            if len(heard) > 1:
                raise LoopReachedError
            return tuple(torch.zeros(1, 1, 1) for _ in names) if len(names) > 1 else torch.zeros(1, 1, 1)

        pipe.encode_prompt = encode_prompt
        given: dict[str, Any] = {"prompt": "", **as_given(self.call), **as_stock({"image": tuple(pictures)})}
        if "negative_prompt" in self.call:
            given["negative_prompt"] = ""
        if (scale := self.scales.cfg) in self.call:
            given[str(scale)] = _GUIDES
        try:
            pipe(**given)
        except Exception:
            if not heard:
                raise
        return tuple(heard)

    def record(self, text: Text, device: torch.device, modules: Mapping[str, nn.Module]) -> Recorded:
        """Record what the encoders make of a prompt in the stock call, with guidance and without, before it samples."""
        prompt, negative_prompt, options = text.prompt, text.negative_prompt, text.options
        recording = Recording()
        texts = {"prompt": as_plain(prompt), **{k: v for k, v in options.items() if k != "images"}}
        if "negative_prompt" in self.call and negative_prompt is not None:
            texts["negative_prompt"] = as_plain(negative_prompt)
        missing = {name: (torch.full((_SIDE, _SIDE, 3), 0.5),) for name in needed_inputs(self.pipeline_class)}
        edited = next((name for name in EDITED if name in missing), EDITED[0])
        pictures = {edited: options["images"]} if "images" in options else {}
        if "images" in pictures and len(as_list(prompt)) > 1:  # its call takes a list of them for each prompt
            raise ValueError(f"{self.title} edits pictures by one prompt at a time. Encode one.")
        scale = self.scales.cfg
        for guidance in (_GUIDES, 1.0) if scale in self.call else (None,):
            before = recording.asked

            def ask(name: str, before: int = before) -> Run:
                return Answers().ask(name, functools.partial(self._imagined_first, recording, before, name))

            pipe = self.stock_pipeline(device, modules, *self.parts.without_weights(""), ask=ask)
            recording.listen(pipe)
            scaled = {} if guidance is None else {str(scale): guidance}
            given = texts | as_given(self.call) | as_stock(missing | pictures) | scaled
            try:
                pipe(**given, output_type="pt")
            except LoopReachedError:
                continue
            except Exception:
                if recording.asked == before:
                    raise
        if recording.sees and missing.keys() - pictures.keys():
            raise ValueError(f"{self.title} reads a picture with its prompt. Give images.")
        return recording.tensors(len(as_list(prompt)), **texts)

    def _imagined_first(self, recording: Recording, before: int, name: str, *args: Any, **kwargs: Any) -> Any:
        """Make up the answer of a module that sees pictures before the prompt is encoded. After that none is needed."""
        if recording.asked > before:
            raise LoopReachedError
        return self._imagine(name, *args, **kwargs)

    # Sample

    def passes(self, arguments: Mapping[str, Any]) -> int:
        """Return how many steps a run with these arguments takes: calls of its scheduler, two of Heun's a step."""
        if (part := arguments.get(STEP_RANGE)) is not None:
            calls: int = part.calls
            return calls
        steps = passes(self.call, arguments)
        choice: SchedulerChoice | None = arguments.get(SCHEDULER)
        if choice is None:
            return steps
        own, asked = self.parts.tool("scheduler"), arguments["num_inference_steps"]
        left_out = (asked - steps) * getattr(choice.make(own), "order", 1)
        return max(1, choice.calls(own, asked) - left_out)

    def dry_run_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `denoise` for a dry run: few steps, or all of a scheduler that is given them."""
        choice: SchedulerChoice | None = arguments.get(SCHEDULER)
        all_steps = {"num_inference_steps": arguments["num_inference_steps"]} if choice and choice.sigmas else {}
        in_part = (GUIDANCE_RANGE, STEP_RANGE, CONTROL)
        every_step = {name: value for name, value in arguments.items() if name not in in_part}
        if (cache := every_step.get(CACHE)) is not None:
            every_step[CACHE] = replace(cache, dry=True)
        return dry_run_arguments(every_step) | all_steps

    def sample_arguments(self, inputs: Inputs, request: Request) -> dict[str, Any]:
        """Check arguments of `sample` and return those of the stock call."""
        steps, frames, options = request.steps, request.frames, request.options
        width, height, guidance = request.width, request.height, request.guidance
        self.check_ready()
        if missing := ", ".join(WORDS.get(name, name) for name in sorted(self.inputs - inputs.pictures.keys())):
            if "controlnet" in self.components and missing == "control":
                raise ValueError(f"{self.title} has a ControlNet, but no picture for it. Give it: control.")
            raise ValueError(f"{self.title} starts from more than text. Give it: {missing}.")
        own = self.parts.tool("scheduler") if "scheduler" in self.components else None
        choice, chosen = None, set[str]()
        if options.keys() & {SCHEDULER, SHIFT, SIGMAS}:
            choice, chosen = choice_of(self.title, self.pipeline_class, own, options)
        config = own.config if own is not None else {}
        if config.get("shift_terminal"):  # where the last step begins at pure noise it divides zero by zero
            sigmas = options.get(SIGMAS)
            if sigmas is None and steps == 1:
                raise ValueError(f"steps is 1; the scheduler of {self.title} (shift_terminal) takes at least 2.")
            if sigmas is not None and not isinstance(sigmas, str) and float(sigmas[-1]) == 1.0:
                raise ValueError(
                    f"sigmas end with 1; the scheduler of {self.title} (shift_terminal) needs a lower end."
                )
        # How many pictures is settled by how many prompts were encoded.
        known = {k for k in self.call if "embeds" not in k and not k.endswith("_per_prompt")} - _OURS
        scales = self.scales
        known |= {TRUE_CFG} if scales.true_cfg else set()
        known |= {scales.embedded} if scales.embedded and not scales.distilled else set()
        check_stage(self.title, options, text_options(self.pipeline_class) & known)
        if TRUE_CFG in options and scales.distilled and not scales.true_cfg:
            raise ValueError(
                f"{self.title} takes no true_cfg: {self.pipeline_class.__name__} has no classifier-free guidance. "
                "Leave it out; guidance is its own scale."
            )
        takes = own is not None and {SCHEDULER, SHIFT, SIGMAS}
        of_control, control = {CONTROL_STRENGTH, CONTROL_RANGE}, None
        if self.controls or options.keys() & of_control:
            control = control_of(self.title, self.pipeline_class, self.controls, self.call, options)
        ours = {GUIDANCE_RANGE, CACHE, START_STEP, END_STEP} | of_control
        ours |= {GUIDER} if scales.cfg == "guider" else set()
        check_known(self.title, options, known | (takes or set()) | ours)
        if CONTROL_MODE in self.call and self.controls:
            check_mode(self.title, self.control_modes, options.get(CONTROL_MODE))
        in_part = bool(options.get(START_STEP)) or options.get(END_STEP) is not None
        if in_part and CONTROL_RANGE in options:
            raise ValueError(
                "start_step and end_step do not go together with control_range, which counts all steps. Leave one out."
            )
        between = self._steps_between(inputs, choice, own, steps, options) if in_part else None
        part: GuidanceRange | None = None
        if options.get(GUIDANCE_RANGE) is not None:
            part = range_of(self.title, self.pipeline_class.__name__, len(self.denoisers), options)
        cache: StepCache | None = None
        if options.get(CACHE, OFF) not in (OFF, None):
            flow = own is not None and is_flow(own)
            cache = cache_of(self.title, {unit.name: unit for unit in self.denoisers}, flow, options)
        chosen, guider = chosen | ours, options.get(GUIDER)
        options = {k: v for k, v in options.items() if k not in chosen and (v is not None or k in known)}
        plain = as_given(self.call, options)
        arguments: dict[str, Any] = {"num_inference_steps": steps, **options, **plain, **inputs.pictures}
        if choice is not None:
            arguments[SCHEDULER] = choice
        if guider is not None:
            arguments[CHOICE] = guider_of(self.title, [self.parts.tool("guider")], guider)
        if scales.true_cfg and TRUE_CFG in options:
            arguments[scales.true_cfg] = arguments.pop(TRUE_CFG)
        if inputs.strength is not None:
            arguments["strength"] = inputs.strength
        if _AT_ONCE in self.call:
            arguments[_AT_ONCE] = sys.maxsize  # all reach the VAE together, and the decoder's stage divides them
        for key in ("prompt", "negative_prompt"):
            if key in self.call:
                arguments[key] = None
        guidance = self.default_guidance if guidance is None else guidance
        if guidance is not None:
            if scales.guidance is None:
                raise ValueError(f"{self.title} takes no guidance.")
            arguments[scales.guidance] = guidance
        if part is not None:
            self._check_guided(arguments)
            arguments[GUIDANCE_RANGE] = part
        if cache is not None:
            arguments[CACHE] = cache
        if control is not None:
            arguments[CONTROL] = control
        if between is not None:
            arguments[STEP_RANGE] = between
        if self.own_size and (width or height) and not self._is_of_picture(inputs, width, height):
            raise ValueError(f"{self.title} draws the size of its picture. Leave width and height out.")
        self._check_size(inputs, width, height)
        width, height = self._size(inputs, width, height)
        if _AREA in self.call and width and height:
            arguments[_AREA] = width * height  # to which it brings every size
        sides = (("width", width), ("height", height))
        arguments |= {key: size for key, size in sides if size is not None and key in self.call}
        if frames is not None:
            if self.frames is None and self.is_video:
                raise ValueError(f"{self.title} makes as many frames as it is given. Leave frames out.")
            if self.frames is None:
                raise ValueError(f"{self.title} makes pictures, not videos: leave frames out.")
            check_frames(self.stock_pipeline(HOST, {}), self.title, frames)
            arguments[self.frames] = frames
        return arguments

    def _steps_between(
        self, inputs: Inputs, choice: SchedulerChoice | None, own: Any, steps: int, options: Mapping[str, Any]
    ) -> StepRange | None:
        """Return the part of the steps that is asked for. Raises ValueError, in one line, where it is not taken."""
        if own is None or not hasattr(self.pipeline_class, "prepare_latents") or not self.is_compared:
            raise ValueError(f"{self.title} takes no start_step and no end_step. Leave them out.")
        if "strength" in self.call:
            raise ValueError(
                f"start_step and end_step do not go together with strength, which leaves out steps of "
                f"{self.pipeline_class.__name__} itself. Leave one of them out."
            )
        scheduler = own if choice is None else choice.make(own)
        if choice is not None:
            steps = -(-choice.calls(own, steps) // getattr(scheduler, "order", 1))
        between = steps_between(self.title, scheduler, steps, options)
        if between is None:
            return None
        if differs := check.cut_differs(self, (self._task_of and self._task_of()) or self):
            raise ValueError(f"{self.title} takes no start_step and no end_step: {differs}. Leave them out.")
        return replace(between, model=self.components[self.denoisers[0].name].run_dtype)

    def _check_guided(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError, in one line, where no step of a run is guided."""
        name = self.scales.cfg
        own = self.call.get(name or "")
        scale = arguments.get(name or "", own.default if own else None)
        if name is None or scale is None or not guides(self.stock_pipeline(HOST, {}), name, scale):
            asked = TRUE_CFG if self.distilled else "guidance"
            raise ValueError(
                f"guidance_range has no effect: this run of {self.title} is not guided. Set {asked} above 1, or leave "
                "guidance_range out."
            )

    def _check_size(self, inputs: Inputs, width: int | None, height: int | None) -> None:
        """Raise ValueError, in one line, for a size that cannot be drawn: that asked for, or that of the picture."""
        if width or height or not (drawn := self._drawn_of_picture(inputs)):
            self.sizes.check(self.title, width, height)
            return
        try:
            self.sizes.check(self.title, *drawn)
        except ValueError as error:
            high, wide = (inputs.pictures.get("image") or inputs.pictures["video"])[0].shape[:2]
            words = f"the picture is {wide} wide and {high} high: scale it, or set width and height."
            if self.own_size:
                words = f"the picture is {wide} wide and {high} high: scale it."
            raise ValueError(f"{words} ({error})") from None

    def _is_of_picture(self, inputs: Inputs, width: int | None, height: int | None) -> bool:
        """Return whether a size is that of the picture to start from, which a call that is told it draws as well."""
        first = inputs.pictures.get("image") or inputs.pictures.get("video")
        if "strength" not in self.call or not first:
            return False
        return (height, width) == tuple(first[0].shape[:2])

    def _size(self, inputs: Inputs, width: int | None, height: int | None) -> tuple[int | None, int | None]:
        """Return the size asked for, or that of the picture to start from."""
        drawn = self._drawn_of_picture(inputs)
        return (width, height) if self.own_size or width or height or not drawn else drawn

    def _drawn_of_picture(self, inputs: Inputs) -> tuple[int, int] | None:
        """Return the width and height that are drawn of the picture to start from, where no other size is asked for."""
        first = inputs.pictures.get("image") or inputs.pictures.get("video")
        if "strength" not in self.call or not first:
            return None
        multiple = self.sizes.multiple
        rows, columns = first[0].shape[:2]
        return columns // multiple * multiple, rows // multiple * multiple

    def picture_size(self, inputs: Inputs, width: int | None, height: int | None) -> tuple[int | None, int | None]:
        if self.own_size or "reference_images" in self.call:  # which keep the shape of a picture
            return None, None
        asked = zip(("width", "height"), self._size(inputs, width, height), strict=True)
        width, height = (side or getattr(self.call.get(name), "default", None) for name, side in asked)
        return (width, height) if isinstance(width, int) and isinstance(height, int) else (None, None)

    def unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        scales = self.scales
        if scales.true_cfg:
            given = options.get(TRUE_CFG)
            counts = scales.true_cfg == "guider" if given is None else given > 1
            return "" if counts else "The negative prompt has no effect without true_cfg. " + COUNTS
        if scales.distilled:
            return f"The negative prompt has no effect: {self.title} takes none."
        name, scale = scales.cfg, self.default_guidance if guidance is None else guidance
        if scale is None:
            own = self.call.get(name or "")
            scale = own.default if own and isinstance(own.default, int | float) else None
        if name is None or scale is None or guides(self.stock_pipeline(HOST, {}), name, scale):
            return ""
        if scale > 1:
            return f"The negative prompt has no effect: {self.title} is distilled, and runs without guidance."
        return no_effect(scale, guidance is None)

    def scale_notes(self, guidance: float | None, true_cfg: float | None) -> list[str]:
        scales, notes = self.scales, rewriting_note(self.title, self.call)
        if not scales.distilled:
            return notes
        if not self._embeds_guidance and guidance is not None:
            way = " Set true_cfg above 1 instead; each step then runs twice." if scales.true_cfg else ""
            notes.append(f"guidance has no effect: {self.title} embeds none, as Flux-schnell.{way}")
        elif scales.true_cfg and true_cfg is None and guidance is not None and guidance > 1:
            own = f"guidance is now the scale of {self.title} itself."
            changed = f"{own} For classifier-free guidance, as before, set true_cfg."
            notes += [changed] * (changed not in TOLD)
        if true_cfg is not None and true_cfg > 1:
            notes.append(f"true_cfg is {true_cfg:g}: each step runs twice.")
        return notes

    def check_count(self, count: int) -> None:
        if count > 1 and self.tail in OF_ONE:
            raise ValueError(f"{self.title} draws one at a time. Encode one prompt, and leave batch out.")

    def denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        answers: Answers | None = None,
    ) -> torch.Tensor:
        """Return the latents that the stock call would decode, whose VAE is a stand-in."""
        with keeping_processors(modules.values()):
            latents = self._call_stock(cond, arguments, on_step, device, modules, answers or Answers())
        if latents is None:
            raise RuntimeError(f"{self.name} never called its VAE, and cannot be staged.")
        if self.frames:
            asked = arguments.get(self.frames, self.call[self.frames].default)
            check_sections(self.stock_pipeline(HOST, {}), self.title, latents, asked)
        if len(latents) % int(cond.info.get("prompts") or 1):
            raise ValueError(f"{self.title} draws one prompt at a time. Encode one.")
        return latents

    def _call_stock(
        self,
        cond: Conditioning,
        arguments: Mapping[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        answers: Answers,
        ask: Callable[[str], Callable[..., Any]] | None = None,
    ) -> torch.Tensor | None:
        """Run the stock call until it decodes, and return what; None if it never does.

        The stand-in for its VAE ends the call by an error: there is no other way out of its code.
        """
        pads = asks_for_padding(self.pipeline_class)
        tools = (name for name in self.parts.without_weights("") if pads or not name.startswith("tokenizer"))
        arguments = as_stock(arguments)
        between: StepRange | None = arguments.pop(STEP_RANGE, None)
        entering: Entering | None = None
        noise = arguments.pop("latents")
        if "latents" in self.call:
            arguments["latents"] = None if noise is None else noise.to(device)
        elif noise is not None:
            raise ValueError(f"{self.title} takes no noise: its call draws its own. Give seed instead.")
        if between is not None and between.start:
            entering, arguments["latents"] = Entering(noise.to(device), between.loop), None
        pipe = self.stock_pipeline(device, modules, *tools, reads=False, ask=ask, answers=answers, entering=entering)
        if (choice := arguments.pop(SCHEDULER, None)) is not None:
            pipe.scheduler = choice.make(pipe.scheduler)
        part: GuidanceRange | None = arguments.pop(GUIDANCE_RANGE, None)
        if between is not None:
            between.cut(pipe.scheduler)
        cache: StepCache | None = arguments.pop(CACHE, None)
        control: Control | None = arguments.pop(CONTROL, None)
        arguments |= {} if control is None else control.arguments(self.call)
        self.adjust(pipe, arguments)
        scale, chosen = arguments.pop("guider", None), arguments.pop(CHOICE, None)
        if scale is not None or chosen is not None:
            with quietly():  # guiders log that they may change
                pipe.guider = guider_for(pipe.guider, chosen, scale)
        dtype = self.components["transformer"].run_dtype if "transformer" in self.components else None
        pipe.scheduler.step = steps = Steps(pipe, arguments["generator"], on_step, between, entering)
        if between is not None and between.ends_early:
            steps.leaves = _AT_STEP not in self.call
            arguments |= {} if steps.leaves else {_AT_STEP: steps.leave}
        if self.replays:
            recording, texts = Recording.of(cond, device)
            recording.replay(pipe)
            arguments = {name: value for name, value in arguments.items() if name not in ("prompt", "negative_prompt")}
        else:
            texts = self.embeddings(for_batch(cond, arguments["generator"], self.cond_dims), device, dtype)
            untaken = {name for name in texts.keys() - self.call.keys() if name.startswith("negative_")}
            if untaken and cond.info.get("negative_prompt", "").strip():
                raise ValueError(f"{self.title} takes no negative prompt with these pictures. Encode an empty one.")
            texts = {name: value for name, value in texts.items() if name not in untaken}
        drawing = arguments["generator"]
        with torch.random.fork_rng(devices=[]):  # some draw noise without the generator
            torch.manual_seed((drawing[0] if isinstance(drawing, list) else drawing).initial_seed())
            try:
                at, prompt = steps.position, texts.get("prompt_embeds")
                tell = self.claims.manager.timeline.count_calls
                cached = {unit: modules[unit.name] for unit in self.denoisers if unit.name in modules}
                nets = {name: modules[name] for name in self.parts.controlnets if name in modules}
                with (
                    nullcontext() if control is None else following(control, nets, at, self._leave),
                    nullcontext() if cache is None else caching(cache, cached, steps.moment, tell),
                    nullcontext() if part is None else guided_within(part, modules.values(), at, prompt),
                ):
                    pipe(**arguments | texts, output_type="pt", return_dict=False)
            except DecodeCalledError as caught:
                steps.finite.finish()  # of a call that took fewer steps than its scheduler has
                return caught.latents
        return None

    def _leave(self, name: str) -> None:
        """Evict a unit that this run calls no more."""
        self.claims.manager.evict(self.parts.units[name])

    def embeddings(self, cond: Conditioning, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """Return the conditioning as arguments of the pipeline's call."""
        return cond.to(device, dtype)

    def adjust(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        """Adjust the stock pipeline to one run. For families with quirks."""

    # Decode

    def colours(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels as they are: in -1..1."""
        return pixels

    def finish(self, images: torch.Tensor) -> torch.Tensor:
        """Finish decoded pictures as the stock call does."""
        return TAILS[self.tail](images)

    def decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        """Return arguments of the VAE's `decode`, those given included."""
        if self.components["vae"].config.get("timestep_conditioning") and "temb" not in given:
            return {**given, "temb": torch.zeros(latents.shape[0])}
        return given

    def decode_sample(self, latents: torch.Tensor) -> torch.Tensor:
        """Return all latents: a dry run decodes the whole."""
        return latents


def _follows_image(controlled: Any, pictures: Pictures) -> bool:
    return bool(pictures.image) and control_input(controlled) == "image"


def _asking_part(ask: Callable[[str], Callable[..., Any]], unit: str, part: str) -> Callable[..., Any]:
    return ask(f"{unit}.{part}")


def open_diffusers(
    folder: Path,
    dtype: str | torch.dtype,
    claims: Claims,
    files: GivenFiles | None = None,
    *,
    controlnet: str | Path | Sequence[str | Path] | None = None,
) -> DiffusersModel:
    """Open a diffusers folder, and compare the class with its own call."""
    source = Source(folder, read_model_index(folder), files=files)
    paths = [controlnet] if isinstance(controlnet, str | Path) else list(controlnet or ())
    if paths:
        source = source.with_controlnets([Path(path) for path in paths])
    model = DiffusersModel(*source.read(dtype, claims))
    model.controlled, model.follows = source.controlled, len(paths)
    check.prove_some(model)
    if paths:
        model.inputs_of(Pictures(control=(torch.full((_SIDE, _SIDE, 3), 0.5),) * len(paths)))
    return model
