"""ModularModel: any modular pipeline of diffusers. Its stages are its own blocks.

Blocks tell by the components that they ask for in which stage they run. Each stage runs its blocks unmodified, on the
units of that stage; stand-ins answer for the others. What blocks leave in the pipeline's state crosses stages on the
CPU. The stand-in for the VAE catches what the last stage would decode.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch
from torch import nn

from ....memory.weights.unit import ManagedModel
from ...decoding.policy import WayName
from ...encoding.conditioning import Conditioning
from ...encoding.pictures import Frames, Pictures, as_stock
from ...encoding.prompts import COUNTS, Text, no_effect
from ...equivalence.modular_check import prove_modular
from ...equivalence.verdicts import Verdict
from ...files.components import parse_dtype
from ...files.neighborhood import least_latents
from ...files.recognition import title_of
from ...files.single.given import GivenFiles
from ...lora.weight_names import Converters
from ...options import check_known, check_stage
from ...planning.forecasts import quietly
from ...sampling.batches import for_batch
from ...sampling.guider_choice import CHOICE, GUIDER, guider_for, guider_of
from ...sampling.inputs import Inputs, Request
from ...sampling.latents import GENERATOR
from ...sampling.picture_sizes import PictureSizes
from ...stock.answers import Answers
from ...stock.blocks import run_blocks
from ...stock.module_call import ModuleCall
from ...stock.postprocess import OF_ONE, TAILS
from ...stock.signatures import (
    check_frames,
    check_sections,
    fewest_frames,
    frame_rate_of,
    passes,
    picture_sizes,
    spatial_factors,
)
from ...stock.sound import SoundDecoder
from ...stock.stand_ins import (
    DecodeCalledError,
    LateTool,
    LoopReachedError,
    PartCaller,
    StandIn,
    StandInSound,
    StandInVae,
    watch_steps,
)
from ...stock.tasks import WORDS
from ..claims import Claims
from ..diffusers.diffusers_model import FRAMES
from ..diffusers.folder_parts import HOST, SEEING, Components
from ..loop_model import LoopModel
from ..model import Embeddings, Modules, OnStep, See
from .block_stages import VAE, BlockStages, asked, inputs_of, outputs_of, stages_of
from .block_state import carried, restored
from .modular_folder import ModularFolder, read_modular

_STEPS = 28  # where the blocks have no number of their own
_GUIDES = 3.0  # a scale of guidance that guides
_SCALE = "guidance_scale"
_LATENTS = "latents"  # what blocks call that which is decoded
_GUIDER = "guider"
_NEGATIVE = "negative"  # how names of the state begin that a run without guidance lacks
_STRENGTH = "strength"
_TEXTS = ("prompt", "negative_prompt")
IMAGE = "image"  # what blocks call the picture to start from, or to edit
VIDEO_NAMES = ("video", "driving_video")  # what blocks call a video, the first that they take
# Inputs that select a workflow.
PICTURES = frozenset({IMAGE, "mask_image", "last_image", "control_image", *VIDEO_NAMES})
_FRAMES = (*FRAMES, "segment_frame_length")  # what blocks call the number of frames, or that of one section
_STEP_COUNT = "num_inference_steps"

_SHOWN = {"images", "videos"}  # what blocks call the pictures that they make
_SOUNDS = {"audio", "audios"}

# Inputs that say by a list how many steps a run takes, in place of a number.
_COUNTED: Mapping[str, Callable[[Sequence[Any]], int]] = {
    "sigmas": lambda levels: len(levels) - 1,
    "pyramid_num_inference_steps_list": sum,
}

# Inputs of blocks that the stages set themselves.
_OURS = {
    *_TEXTS, "width", "height", _STEP_COUNT, *_FRAMES, _SCALE, "generator", "latents", "output_type",
    "num_images_per_prompt", "num_videos_per_prompt", *PICTURES, _STRENGTH,
}  # fmt: skip

Ask = Callable[[str], Callable[..., Any]]  # gives the call of a module by its name


class ModularModel(LoopModel):
    """The blocks of a modular pipeline, in stages: the workflow that diffusers selects for the `inputs` given."""

    default_guidance: float | None = None
    default_negative: str | None = None
    starts_from_latents = False
    must_guide = False  # whether its own call fails without guidance
    called_parts: Mapping[str, tuple[str, ...]] = MappingProxyType({})  # of encoders, by their names, by themselves
    tail = ""  # what its call does with what the VAE decodes, by its name in TAILS

    def __init__(self, source: ModularFolder, parts: Components, inputs: Collection[str] = ()) -> None:
        super().__init__(source.folder, parts.claims)
        self.source, self.folder_parts, self.inputs = source, parts, frozenset(inputs)
        self.name, self.pipeline_class, self.blocks = parts.name, source.pipeline_class, source.blocks
        self.truncation, self.titles, self.components = parts.truncation, parts.titles, parts.components
        self.stages = self._stages()
        self.encode_inputs = inputs_of(self.stages.encode)
        made = outputs_of(self.stages.encode).keys()
        taken = inputs_of(self.stages.all)
        self.sample_inputs = {n: v for n, v in inputs_of(self.stages.sample).items() if n in taken and n not in made}
        self.edits = IMAGE in self.encode_inputs or self._reads_when_given()
        self._tasks: dict[frozenset[str], ModularModel] = {self.inputs: self}
        self.frames = next((name for name in _FRAMES if name in taken), None)
        self.is_video = self.frames is not None
        self.frame_rate = frame_rate_of(self.name)
        steps = self.sample_inputs.get(_STEP_COUNT)
        self.default_steps = steps if isinstance(steps, int) else self.own_steps({}) or _STEPS
        self.takes_negative = _TEXTS[1] in self.encode_inputs
        self.guiders = sorted(name for name in asked(self.stages.sample) if _GUIDER in name)
        self.distilled = not self.guiders and _SCALE in self.sample_inputs
        units, asking = parts.units, asked(self.stages.sample[: self._decoding])
        self.encoders = [u for u in units.values() if u.name in self.stages.encoders and u.role in _ENCODE]
        self._sampling = asking - {unit.name for unit in self.encoders} - {VAE, source.decoder, *SEEING}
        self.set_sound(None)
        self.decoder, self.decoder_config = units[source.decoder], dict(parts.components[source.decoder].config)
        for block in self.stages.all:
            if hasattr(block, "set_progress_bar_config"):
                block.set_progress_bar_config(disable=True)

    def _stages(self) -> BlockStages:
        """Return its stages. Raises ValueError or FileNotFoundError, in one line, where it has not all of them."""
        source, name = self.source, self.name
        stages = stages_of(self.blocks, self._given(*self.inputs), self.components)
        made = outputs_of(stages.all).keys()
        if made & _SOUNDS and not made & _SHOWN:
            raise ValueError(f"{name} makes sound and no picture, and cannot be staged. Use diffusers itself.")
        wanted = [
            spec.name
            for block in stages.all
            for spec in block.expected_components
            if spec.default_creation_method == "from_pretrained"
        ]
        needed = {n for n in wanted if source.missing.get(n) or n.startswith(_NEEDED) or n == source.decoder}
        if missing := sorted(needed - self._there):
            where = next((source.missing[each] for each in missing if source.missing.get(each)), "")
            raise FileNotFoundError(
                f"{self.folder} has no {missing[0]}/, which {name} runs with. "
                f"{f'Its index has it in {where}: download' if where else 'Download'} it into that folder."
            )
        modules = {each for each, component in self.components.items() if component.is_module}
        if not modules & stages.encoders:
            raise ValueError(f"{name} has no blocks that encode a prompt, and cannot be staged. Use diffusers itself.")
        if source.decoder not in asked(stages.sample):
            raise ValueError(f"{name} decodes with no vae, and cannot be staged. Run it with diffusers itself.")
        if not any(self._is_denoiser(each) for each in asked(stages.sample)):
            raise ValueError(f"{name} has no blocks that denoise, and cannot be staged. Run it with diffusers itself.")
        return stages

    def _given(self, *pictures: str) -> set[str]:
        """Return the inputs that a run with these pictures has. A run says how many frames it is to have."""
        return {_TEXTS[0], *pictures, *(name for name in FRAMES if name in self.blocks._get_trigger_inputs())}

    @property
    def _there(self) -> set[str]:
        return set(self.components)

    def _is_denoiser(self, name: str) -> bool:
        return name in self.components and self.components[name].role == "transformer"

    @property
    def _decoding(self) -> int:
        """The place among the blocks that sample of the one that decodes: the first with the decoder after the loop.

        Where there is none, it is what comes after a loop that decodes itself.
        """
        blocks, decoder = self.stages.sample, self.source.decoder
        last = max(n for n, block in enumerate(blocks) if any(map(self._is_denoiser, asked([block]))))
        after = last + 1 if decoder in asked([blocks[last]]) else len(blocks)
        return next((n for n in range(last + 1, len(blocks)) if decoder in asked([blocks[n]])), after)

    def own_steps(self, options: Mapping[str, Any]) -> int | None:
        """Return how many steps a list among its inputs asks for: noise levels, or steps of each size.

        None where the number of steps is an input of its own.
        """
        if _STEP_COUNT not in self.sample_inputs:
            for name, default in self.sample_inputs.items():
                given = options.get(name) or default
                if isinstance(given, list | tuple) and (count := _COUNTED.get(name)):
                    return count(given)
        return None

    @property
    def _fixed(self) -> set[str]:
        """The inputs that are no options: they select other blocks, or decide what becomes of decoded pictures.

        No stage would do that: Qwen-Image's `padding_mask_crop` pastes what was painted into the whole picture.
        """
        sampling, decoding = self.stages.sample[: self._decoding], self.stages.sample[self._decoding :]
        found = {*self.blocks._get_trigger_inputs(), *inputs_of(decoding)}
        told = inputs_of(decoding).keys() - {_LATENTS}
        for block in self.stages.encode + sampling:
            found |= inputs_of([block]).keys() if told & outputs_of([block]).keys() else set()
        return found

    @property
    def _video(self) -> str:
        """What its blocks call a video."""
        names = {param.name for param in self.blocks.inputs}
        return next((name for name in VIDEO_NAMES if name in names), VIDEO_NAMES[0])

    def _reads_when_given(self) -> bool:
        """Return whether the encoding blocks read a picture that they can do without."""
        if IMAGE not in {param.name for param in self.blocks.inputs}:
            return False
        stages = stages_of(self.blocks, self._given(*self.inputs, IMAGE), self.components)
        return IMAGE in inputs_of(stages.encode)

    def task(self, inputs: frozenset[str]) -> ModularModel:
        """Return the model of the workflow that these pictures select, compared with its own call.

        Raises ValueError, in one line, where there is none.
        """
        if inputs not in self._tasks:
            made = ModularModel(self.source, self.folder_parts, inputs)
            taken = {*made.encode_inputs, *made.sample_inputs}
            if untaken := ", ".join(WORDS.get(name, name) for name in sorted(inputs - taken)):
                raise ValueError(f"{self.title} takes no {untaken}: its blocks have no use for it. Leave it out.")
            self._check_encoding(made)
            prove_modular(made)
            self._tasks[inputs] = made
        return self._tasks[inputs]

    def _check_encoding(self, made: ModularModel) -> None:
        """Raise ValueError where a workflow encodes its prompt otherwise than `encode`, which knows one picture."""
        reads, with_image = PICTURES & made.encode_inputs.keys(), self.inputs | {IMAGE}
        same = made.encoders == self.encoders and reads <= {IMAGE}
        if same and not (reads and made.inputs == with_image):
            texts = self.task(with_image) if reads else self
            same = list(map(type, texts.stages.encode)) == list(map(type, made.stages.encode))
        if not same:
            raise ValueError(f"{self.title} encodes its prompt otherwise with these pictures. Leave them out.")

    # Equivalence

    def accept(self, verdict: Verdict) -> None:
        """Take what the comparison with its own call found."""
        self.left_out, self.latent_dimensions = verdict.left_out, verdict.dimensions
        self.tail, self.looks, self.must_guide = verdict.tail, verdict.looks, _GUIDER in verdict.needs
        self.decoder_draws = verdict.draws
        self.set_sound(SoundDecoder.of(verdict.sound, verdict.sound_tail, self.folder_parts))
        self.called_parts = verdict.parts
        for name in verdict.parts:
            self.folder_parts.units[name].call_parts()

    def set_sound(self, sound: SoundDecoder | None) -> None:
        """Set what makes sound after the pictures are decoded. Its units do not sample."""
        self.sound, names = sound, self._sampling - {unit.name for unit in (sound.units if sound else ())}
        self.denoisers = [unit for unit in self.folder_parts.units.values() if unit.name in names]

    def in_float32(self) -> ModularModel:
        """Return the same model in float32, to be compared with its own call."""
        components = {
            name: replace(component, dtype=torch.float32) if component.is_module else component
            for name, component in self.components.items()
        }
        return ModularModel(self.source, replace(self.folder_parts, components=components), self.inputs)

    @property
    def all_units(self) -> list[ManagedModel]:
        """The units that its own call runs."""
        return [unit for unit in self.folder_parts.units.values() if unit.name in asked(self.stages.all)]

    def batch_differs(self, texts: Any, own: Collection[str]) -> str:
        """Return that no batch is compared: pictures are drawn one after the other."""
        return "its blocks are compared for one picture"

    def fewest_frames(self) -> int:
        """Return the fewest frames that its VAE makes."""
        return fewest_frames(self.pipeline(HOST, {}), max(2, self._least[0])) if self.is_video else 1

    # Its own pipeline

    def pipeline(self, device: torch.device, modules: Modules, *, reads: bool = False, ask: Ask | None = None) -> Any:
        """Return the modular pipeline with these modules, and stand-ins for the others, which `ask` gives calls for.

        Unless it `reads` texts its tokenizers come when they are asked for something.
        """
        ask = ask or _absent
        on_device = property(lambda _: device)
        cls = self.pipeline_class
        staged = type(
            cls.__name__,
            (cls,),
            {"__module__": cls.__module__, "_execution_device": on_device, "device": on_device},
        )
        with quietly():  # guiders log that they may change
            pipe = staged(blocks=self.blocks, modular_config_dict=dict(self.source.config))
        for name, component in self.components.items():
            if not component.is_module:
                later = not reads and name.startswith("tokenizer")
                tool = functools.partial(self.folder_parts.tool, name)
                setattr(pipe, name, LateTool(tool) if later else tool())
        first = self.sound.units[0] if self.sound else None
        heard = StandInSound(first, device, self.components[first.name].run_dtype) if first else None
        for unit in self.folder_parts.units.values():
            module = heard if unit is first else self._stand_in(unit, device, ask, heard)
            setattr(pipe, unit.name, modules.get(unit.name) or module)
        return pipe

    def _stand_in(self, unit: ManagedModel, device: torch.device, ask: Ask, heard: StandInSound | None) -> StandIn:
        given = unit, device, self.components[unit.name].run_dtype, ask(unit.name)
        return StandInVae(*given, after=heard) if unit.role == "vae" else StandIn(*given)

    def initial_state(self, given: Mapping[str, Any]) -> Any:
        """Return the state that its own call begins with, for these inputs."""
        from diffusers.modular_pipelines.modular_pipeline import PipelineState

        state = PipelineState()
        for param in self.blocks.inputs:
            if param.name:
                state.set(param.name, given.get(param.name, param.default), param.kwargs_type)
        return state

    def set_guidance(self, pipe: Any, scale: float | None, choice: str | None = None) -> None:
        """Replace its guiders by that of a choice, and set their scale, unless it is None: all guide then."""
        for name in self.guiders:
            with quietly():  # guiders log that they may change
                setattr(pipe, name, guider_for(getattr(pipe, name), choice, scale))

    def guides(self, scale: float | None, choice: str | None = None) -> bool:
        """Return whether its guiders, or that of a choice, guide with this scale, by default their own."""
        pipe = self.pipeline(HOST, {})
        self.set_guidance(pipe, scale, choice)
        return self._is_guided(pipe)

    def _is_guided(self, pipe: Any) -> bool:
        return any(getattr(pipe, name).num_conditions > 1 for name in self.guiders)

    @property
    def picture_encoder(self) -> ManagedModel:
        """The unit that encodes pictures to latents: the VAE, beside which another may decode."""
        return self.folder_parts.units.get(VAE, self.decoder)

    @functools.cached_property
    def sizes(self) -> PictureSizes:
        """The sizes that it draws."""
        pipe = self.pipeline(HOST, {})
        latent = min(spatial_factors(pipe), default=None)
        return replace(picture_sizes(pipe, self.components, latent), least=max(self._least[1:]) * (latent or 1))

    @property
    def _least(self) -> tuple[int, int, int]:
        return least_latents(getattr(self.decoder.module, "config", {}))

    def converters(self) -> Converters:
        """Return no names: those of its files are the modules'."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Return everything that decides the activations of the stages, beside their arguments, as plain data."""
        import diffusers
        import transformers

        return {
            "pipeline": self.name,
            "blocks": type(self.blocks).__name__,
            "inputs": sorted(self.inputs),
            "libraries": [torch.__version__, diffusers.__version__, transformers.__version__],
            "config": dict(self.source.config),
            "components": {c.name: c.config if c.is_module else c.identity() for c in self.components.values()},
            "dtypes": {c.name: str(c.run_dtype) for c in self.components.values() if c.is_module},
        }

    def files(self) -> dict[str, Sequence[str]]:
        """Return the digests of all files that it runs, by component."""
        return {name: component.identity() for name, component in self.components.items()}

    # Encode

    def encode_options(self) -> Collection[str]:
        """Return the names of the options that `encode` takes: the other inputs of the encoding blocks."""
        return self.encode_inputs.keys() - _OURS - self._fixed

    def encoding_facts(self, text: Text) -> dict[str, Any]:
        """Return everything that decides the embeddings; under "files" the digests of all files among it."""
        import diffusers
        import transformers

        read = [c for c in self.components.values() if c.name in self.stages.encoders]
        return {
            "format": 2,  # to be raised when the same facts give other embeddings
            "pipeline": self.name,
            "blocks": type(self.blocks).__name__,
            "inputs": sorted(self.inputs),
            "libraries": [diffusers.__version__, transformers.__version__],
            "files": {c.name: c.identity() for c in read},
            "config": dict(self.source.config),
            "dtypes": {c.name: str(c.run_dtype) for c in read if c.is_module},
            "on host": self.claims.manager.accelerator.is_cpu,  # which cannot tell what blocks leave on the CPU
            "options": text.options,
            **self.words_of(text),
        }

    def pictures_read(self, pictures: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the pictures that the encoding blocks read, as options. ValueError if they read none, or need one."""
        if not self.edits:
            return super().pictures_read(pictures)
        if not pictures and IMAGE in self.encode_inputs:
            raise ValueError(f"{self.title} reads a picture with its prompt. Give images.")
        return {IMAGE: tuple(pictures)} if pictures else {}

    def encode(self, text: Text, device: torch.device, modules: Modules) -> Embeddings:
        """Return what the encoding blocks leave in the state, with guidance."""
        if IMAGE in text.options and IMAGE not in self.inputs:
            return self.task(self.inputs | {IMAGE}).encode(text, device, modules)
        pipe = self.pipeline(device, modules, reads=True)
        for name, parts in self.called_parts.items():
            setattr(pipe, name, PartCaller(modules[name], parts))
        if self.guiders and not self._is_guided(pipe):
            self.set_guidance(pipe, _GUIDES)  # else nothing of the negative prompt is encoded
        given = {**as_stock(text.options), **{k: v for k, v in self.words_of(text).items() if v is not None}}
        state = self.initial_state(given)
        before = {name: value for name, value in state.values.items() if name not in given or name in PICTURES}
        run_blocks(self.stages.encode, pipe, state)
        made = carried(state.values, before, device)
        made.info = {**made.info, "prompts": str(1 if isinstance(text.prompt, str) else len(text.prompt))}
        return made

    # Image conditioning

    def inputs_of(self, pictures: Pictures) -> Inputs:
        """Return the pictures as inputs of the blocks that they select. Raises ValueError, in one line, for others."""
        if self.edits and pictures.image:
            raise ValueError(
                f"{self.title} reads its pictures with the prompt. Give them to encode, and none to sample."
            )
        given: dict[str, tuple[torch.Tensor, ...]] = {
            IMAGE: pictures.image or pictures.references,
            "mask_image": pictures.mask,
            "last_image": pictures.last_image,
            "control_image": pictures.control,
            self._video: Frames(pictures.video),
        }
        given = {name: each for name, each in given.items() if each}
        for name, each in given.items():
            if len(each) > 1 and not isinstance(each, Frames) and not (name == IMAGE and pictures.references):
                raise ValueError(f"{self.title} takes one {WORDS.get(name, name)} at a time. Give one.")
        model = self.task(frozenset(given)) if given else self
        if pictures.strength is not None and _STRENGTH not in model.sample_inputs:
            raise ValueError(f"{self.title} takes no strength with these pictures. Leave it out.")
        return Inputs(model, given, pictures.strength)

    def encode_images(self, cond: Conditioning, arguments: Mapping[str, Any], see: See) -> Answers:  # type: ignore[override]
        """Run the blocks until they sample, on the CPU. What they ask of modules that see a picture, `see` answers."""
        answers = Answers()
        loop = {unit.name for unit in self.denoisers}

        def ask(name: str) -> Callable[..., Any]:
            return _reach if name in loop else answers.ask(name, functools.partial(see, name))

        try:
            self._run_blocks(cond, arguments, None, HOST, {}, ask)
        except LoopReachedError:
            return answers
        raise RuntimeError(f"{self.name} never samples")

    def module_call(self, name: str, args: Any, kwargs: Any) -> ModuleCall:  # type: ignore[override]
        """Return the call of a module that sees pictures."""
        return ModuleCall(name, self.folder_parts.units[name], "", args, kwargs)

    # Sample

    def passes(self, arguments: Mapping[str, Any]) -> int:
        """Return how many steps a run with these arguments takes."""
        return passes({}, {_STRENGTH: self.sample_inputs.get(_STRENGTH), **arguments})

    def sample_arguments(self, inputs: Inputs, request: Request) -> dict[str, Any]:
        """Check arguments of `sample` and return those of its blocks."""
        taken, options = self.sample_inputs, request.options
        if missing := ", ".join(WORDS.get(name, name) for name in sorted(self.inputs - inputs.pictures.keys())):
            raise ValueError(f"{self.title} starts from more than text. Give it: {missing}.")
        check_stage(self.title, options, self.encode_options())
        choice = {}
        if self.guiders and options.get(GUIDER) is not None:
            pipe = self.pipeline(HOST, {})
            own = [getattr(pipe, name) for name in self.guiders]
            choice = {CHOICE: guider_of(self.title, own, options[GUIDER])}
        options = {name: value for name, value in options.items() if name != GUIDER or not self.guiders}
        check_known(self.title, options, taken.keys() - _OURS - self._fixed - self.encode_inputs.keys())
        if (steps := self.own_steps(options)) and request.steps not in (steps, self.default_steps):
            names = " or ".join(_COUNTED.keys() & taken.keys())
            raise ValueError(f"steps is {request.steps}; {self.title} takes {steps}. Leave it out, or give {names}.")
        arguments: dict[str, Any] = {_STEP_COUNT: steps or request.steps, **options, **inputs.pictures, **choice}
        arguments |= {} if inputs.strength is None else {_STRENGTH: inputs.strength}
        if request.guidance is not None:
            if not self.guiders and _SCALE not in taken:
                raise ValueError(f"{self.title} takes no guidance.")
            arguments[_GUIDER if self.guiders else _SCALE] = request.guidance
        if self.must_guide and not self.guides(request.guidance, choice.get(CHOICE)):
            raise ValueError(f"guidance is off; the own blocks of {self.title} fail without. Set guidance above 1.")
        self.sizes.check(self.title, request.width, request.height)
        for name, size in (("width", request.width), ("height", request.height)):
            if size is not None and name not in taken:
                raise ValueError(f"{self.title} takes no {name}. Leave it out.")
            arguments |= {} if size is None else {name: size}
        if request.frames is None and self.frames in self._given():
            raise ValueError(f"{self.title} draws as many frames as it is asked for. Set frames.")
        if request.frames is not None:
            if self.frames is None or self.frames not in taken:
                raise ValueError(f"{self.title} makes pictures, not videos: leave frames out.")
            check_frames(self.pipeline(HOST, {}), self.title, request.frames)
            if self._least[0] > 1 and request.frames < self.fewest_frames():
                raise ValueError(f"frames is {request.frames}; {self.title} takes {self.fewest_frames()} or more.")
            arguments[self.frames] = request.frames
        self._check_uncut(arguments)
        return arguments

    def _check_uncut(self, arguments: Mapping[str, Any]) -> None:
        """Raise ValueError for pictures to whose shape or number its own call cuts what its VAE decodes."""
        cut = self._fixed & arguments.keys()
        frames, width, height = (
            arguments.get(name) or self.sample_inputs.get(name) for name in (self.frames or "", "width", "height")
        )
        if IMAGE in cut and isinstance(width, int) and isinstance(height, int):
            high, wide = arguments[IMAGE][0].shape[:2]
            if wide * height != high * width:
                raise ValueError(
                    f"image is {wide} x {high}, and the size {width} x {height}. {self.title} keeps the picture's "
                    "shape: crop it, or choose a size of its shape."
                )
        if self._video in cut and frames and len(arguments[self._video]) != frames:
            raise ValueError(
                f"video has {len(arguments[self._video])} frames, and frames is {frames}. {self.title} draws a longer "
                "video in sections, and decodes each while it samples: stages decode once. Give as many as frames says."
            )

    def unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        """Return why the negative prompt has no effect, in a sentence; empty where it has one."""
        if not self.guiders or self.guides(guidance):
            return ""
        if guidance is None:
            return f"The negative prompt has no effect: guidance is off by default. {COUNTS}"
        return no_effect(guidance, False)

    def check_count(self, count: int) -> None:
        """Raise ValueError, in one line, for more results of one run than this model tells apart."""
        if count > 1 and self.tail in OF_ONE:
            raise ValueError(f"{self.title} draws one at a time. Encode one prompt, and leave batch out.")

    def denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Modules,
        answers: Answers | None = None,
    ) -> torch.Tensor:
        """Return the latents that the blocks would decode, whose VAE is a stand-in."""
        telling = (answers or Answers()).tell()

        def ask(name: str) -> Callable[..., Any]:
            return functools.partial(telling.answer, name)

        latents = self._run_blocks(cond, arguments, on_step, device, modules, ask)
        if self.frames:
            asked_for = arguments.get(self.frames) or self.sample_inputs.get(self.frames)
            check_sections(self.pipeline(HOST, {}), self.title, latents, asked_for)
        if len(latents) % int(cond.info.get("prompts") or 1):
            raise ValueError(f"{self.title} draws one prompt at a time. Encode one.")
        return latents

    def _run_blocks(
        self,
        cond: Conditioning,
        arguments: Mapping[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        ask: Ask,
    ) -> torch.Tensor:
        """Run the blocks that come after the encoding ones until one decodes, and return what.

        The stand-in for its VAE ends them by an error: there is no other way out of a block.
        """
        if arguments["latents"] is not None:
            raise ValueError(f"noise: the blocks of {self.title} do not check it. Give seed instead.")
        pipe = self.pipeline(device, modules, ask=ask)
        given = {name: value for name, value in as_stock(arguments).items() if value is not None}
        self.set_guidance(pipe, given.pop(_GUIDER, None), given.pop(CHOICE, None))
        drawing = given["generator"]
        values = restored(for_batch(cond, drawing, self.cond_dims), device)
        if self.guiders and not self._is_guided(pipe):  # a run of its own would not have encoded these
            values = {n: v for n, v in values.items() if not n.startswith(_NEGATIVE) or n in self.encode_inputs}
        state = self.initial_state({**values, **given})
        for name, kind in outputs_of(self.stages.encode).items():
            state.set(name, values.get(name), kind)
        steps = watch_steps(pipe, drawing, on_step)
        with torch.random.fork_rng(devices=[]):  # some draw noise without the generator
            torch.manual_seed((drawing[0] if isinstance(drawing, list) else drawing).initial_seed())
            try:
                run_blocks(self.stages.sample, pipe, state)
            except DecodeCalledError as caught:
                if steps is not None:
                    steps.finite.finish()  # of a call that took fewer steps than its scheduler has
                return caught.latents
        raise RuntimeError(f"{self.name} never called its VAE, and cannot be staged.")

    # Decode

    def decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        """Return the arguments that are given, and noise of seed 0 for a decoder that draws where none is."""
        return {GENERATOR: torch.Generator().manual_seed(0).get_state(), **given} if self.decoder_draws else given

    def colours(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return pixels in -1..1. Those of MiniMax-H3's VAE have a mean and a deviation, which its pipeline tells."""
        pipe = self.pipeline(HOST, {})
        mean, deviation = (getattr(pipe, name, None) for name in ("pixel_mean", "pixel_std"))
        if mean is None or deviation is None:
            return pixels
        shape = (1, -1, *[1] * (pixels.ndim - 2))
        return 2 * (pixels * torch.tensor(deviation).view(shape) + torch.tensor(mean).view(shape)) - 1

    def finish(self, images: torch.Tensor) -> torch.Tensor:
        """Finish decoded pictures as its own blocks do."""
        return TAILS[self.tail](images)


_ENCODE = ("text_encoder", "other")  # roles of units that encode
_NEEDED = ("vae", "transformer", "unet", "scheduler")  # how names of components begin that no blocks go without


def _reach(*args: Any, **kwargs: Any) -> NoReturn:
    raise LoopReachedError


def _absent(name: str) -> Callable[..., NoReturn]:
    """Return the call of a module that is not there to run."""

    def call(*args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(f"its {name} is called while another stage runs")

    return call


def open_modular(
    folder: Path, dtype: str | torch.dtype, claims: Claims, files: GivenFiles | None = None
) -> ModularModel:
    """Open a folder with `modular_model_index.json`, and compare its blocks in stages with its own call."""
    source = read_modular(folder, parse_dtype(dtype), files)
    label = files.transformer.stem if files else folder.name
    units = {c.name: claims.claim(c, label) for c in source.components.values() if c.is_module}
    parts = Components(
        folder,
        source.pipeline_class.__name__,
        title_of(files.transformer if files else folder),
        "",
        source.components,
        source.config,
        claims,
        units,
        {},
    )
    first: Exception | None = None
    for inputs in _ways(source.blocks):
        try:
            model = ModularModel(source, parts, inputs)
            prove_modular(model)
        except (ValueError, FileNotFoundError) as error:
            first = first or error
        else:
            return model
    assert first is not None
    raise first


def _ways(blocks: Any) -> list[frozenset[str]]:
    """Return the pictures that blocks may need to run at all: those of a workflow, the fewest first, or none."""
    ways: list[frozenset[str]] = []
    for triggers in (blocks._workflow_map or {}).values():
        named = triggers[0] if isinstance(triggers, tuple) else triggers
        ways.append(PICTURES & set(named))
    if not ways:
        ways = [PICTURES & set(blocks.required_inputs)]
    return sorted(dict.fromkeys(ways), key=len)
