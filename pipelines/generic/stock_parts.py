"""The components of a diffusers folder, the class that drives them, and its own call with some of them."""

from __future__ import annotations

import copy
import functools
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ..encoding.conditioning import Conditioning
from ..encoding.listening import encoder_title
from ..files.components import Component, names_class, parse_dtype, pipeline_class, read_components, read_model_index
from ..files.recognition import title_of
from ..files.single.given import GivenFiles
from ..sampling.batches import for_batch
from ..sampling.picture_sizes import PictureSizes
from ..staged import OnStep, as_stock
from .answers import Answers
from .proving import ProvenPipeline
from .recording import Recording
from .stand_ins import (
    DecodeCalledError,
    LateTool,
    StandIn,
    StandInEncoder,
    StandInVae,
    Steps,
    checking_noise,
    keeping_embeddings,
)
from .stock import (
    Scales,
    asks_for_padding,
    embeddings_of,
    encoding_of,
    needed_inputs,
    own_words,
    picture_sizes,
    scales_of,
)
from .tasks import INPUTS, VIDEOS, edits, with_controlnet

FRAMES = ("num_frames", "frames", "video_length")  # what pipelines call the number of frames
HOST = torch.device("cpu")
SEEING = ("image_encoder",)  # modules that see a picture before the loop begins, as the VAE does
_IN_LOOP = ("controlnet",)  # modules of the loop that come before the transformer
_FRAME_RATES = {"Wan": 16, "CogVideoX": 8, "Mochi": 30}  # other than 24 a second
_STEPS = 28  # where a pipeline has no number of its own
_COMPONENT = re.compile(r"(text_encoder|tokenizer|transformer|controlnet|scheduler)(_\d+)?")


class StockParts(ProvenPipeline):
    """The parts of a diffusers pipeline folder, and how its own class runs with some of them.

    `inputs` are the pictures that it is compared with its own call for, `pictures` those of one run.
    """

    pictures: Mapping[str, tuple[torch.Tensor, ...]] = MappingProxyType({})  # by arguments of its call
    strength: float | None = None
    own: Mapping[str, str] = MappingProxyType({})  # those of one run, and what users call them
    answers = Answers()  # of what saw them

    def __init__(
        self,
        folder: Path,
        dtype: str | torch.dtype = "auto",
        *,
        files: GivenFiles | None = None,
        controlnet: str | Path | None = None,
        **shared: Any,
    ) -> None:
        index, elsewhere = self._contents(folder)
        if controlnet is not None:
            beside = Path(controlnet).expanduser()
            index, elsewhere = with_controlnet(index, beside), {**elsewhere, "controlnet": beside}
        self.name = index["_class_name"]
        self.pipeline_class: Any = pipeline_class(self.name)
        given = files.components(index) if files else {}
        elsewhere |= files.folders(index) if files else {}
        found = read_components(folder, index, parse_dtype(dtype), elsewhere, given)
        if files:
            files.check_read(found.values())
        self.components = {name: self._adapted(component) for name, component in found.items()}
        self._tools: dict[str, Any] = {}
        self._config = {k: v for k, v in index.items() if not k.startswith("_") and not names_class(v)}
        self._init = inspect.signature(self.pipeline_class).parameters
        self._call = inspect.signature(self.pipeline_class.__call__).parameters
        if (encode := encoding_of(self.pipeline_class)) is None or "vae" not in self.components:
            raise ValueError(f"{self.name} has no text stage or no VAE, and cannot be staged.")
        needed = needed_inputs(self.pipeline_class)
        if not INPUTS.issuperset(needed):
            raise ValueError(f"{self.name} starts from more than text ({', '.join(needed)}), and cannot be staged yet.")
        self.inputs = frozenset(needed)
        self._encode_prompt = inspect.signature(encode).parameters
        self._frames = next((name for name in FRAMES if name in self._call), None)
        self.is_video = self._frames is not None or bool(VIDEOS & self._call.keys())
        self.frame_rate = next((rate for name, rate in _FRAME_RATES.items() if self.name.startswith(name)), 24)
        steps = self._call.get("num_inference_steps")
        self.default_steps = steps.default if steps and isinstance(steps.default, int) else _STEPS
        super().__init__(folder, **shared)
        self.edits = edits(self.pipeline_class)
        self.title = own_words(index, "_title") or (title_of(files.transformer) if files else self.title)
        self.knows = own_words(index, "_knows")
        returned = embeddings_of(self.pipeline_class)
        self.replays = not returned
        self.takes_negative = "negative_prompt" in (self._call if self.replays else self._encode_prompt) or any(
            f"negative_{name}" in self._call for name in returned
        )
        self._check_complete(index)
        label = files.transformer.stem if files else folder.name
        units = [self._claim(c, label) for c in self.components.values() if c.is_module]
        self._units = {unit.name: unit for unit in units}
        self.encoders = [unit for unit in units if unit.role == "text_encoder"]
        self.denoisers = [u for u in units if u.role in ("transformer", "other") and u.name not in SEEING]
        self._beside = [u.name for u in self.denoisers if u.role == "other" and u.name not in _IN_LOOP]
        self._tasks: dict[Any, StockParts] = {}
        for unit in self.denoisers:
            unit.batch_dims = self.batch_dims
        self.decoder = self._units["vae"]
        self.decoder_config = self.components["vae"].config
        self._prove_some()

    def _contents(self, folder: Path) -> tuple[dict[str, Any], dict[str, Path]]:
        """Return the index of the folder, and the folders of components that lie elsewhere."""
        return read_model_index(folder), {}

    def _adapted(self, component: Component) -> Component:
        """Adapt a component to this family."""
        return component

    def _check_complete(self, index: dict[str, Any]) -> None:
        """Raise ValueError for what would only fail when it is used."""
        optional = self.pipeline_class._optional_components
        parts = {n: found for n in self._init if (found := _COMPONENT.fullmatch(n))}
        absent = [n for n in parts if n not in self.components and n not in optional]
        # A second or third one may be left out by [null, null], such as T5 of Stable Diffusion 3.
        if missing := [n for n in absent if not parts[n][2] or index.get(n) != [None, None]]:
            raise ValueError(
                f"{self.folder} lacks {', '.join(missing)}, which {self.name} needs. Put each into a folder of that "
                "name and list it in model_index.json."
            )

    def _pipeline(
        self,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        *tools: str,
        reads: bool = True,
        ask: Callable[[str], Callable[..., Any]] | None = None,
    ) -> Any:
        """Return the stock pipeline with these modules, the named tools, and stand-ins for the VAE and others.

        Unless it `reads` texts its tokenizers come when they are asked for something: LTX-2's loop, on which side they
        pad. `ask` gives the call of a module that sees a picture, by its name, or that comes before one which does; by
        default the answers are told again.
        """
        telling, looks = self.answers.tell(), ask is not None
        parts: dict[str, Any] = dict.fromkeys(
            name for name, parameter in self._init.items() if parameter.default is inspect.Parameter.empty
        )
        parts |= {name: value for name, value in self._config.items() if name in self._init}
        parts |= modules
        for name in tools:
            later = not reads and name.startswith("tokenizer")
            parts[name] = LateTool(functools.partial(self._tool, name)) if later else self._tool(name)
        ask = ask or functools.partial(functools.partial, telling.answer)
        parts["vae"] = StandInVae(self.decoder, device, torch.float32, ask("vae"))
        for unit in self._units.values():
            in_loop = unit.role == "transformer" or unit.name in _IN_LOOP
            asked = unit.name in SEEING or (looks and unit.name in self._beside)
            dtype = self.components[unit.name].run_dtype
            if unit.name in modules:
                continue
            if in_loop or asked:
                parts[unit.name] = StandIn(unit, device, dtype, ask(unit.name) if asked else None)
            elif self.replays and unit in self.encoders:
                part_of = functools.partial(_asking_part, ask, unit.name)
                parts[unit.name] = StandInEncoder(unit, device, dtype, part_of)
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
        if "latents" in inspect.signature(getattr(stock, "prepare_latents", str)).parameters:
            namespace["prepare_latents"] = checking_noise(stock.prepare_latents, telling)
        staged = type(stock.__name__, (stock,), namespace)
        pipe = staged(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _tool(self, name: str) -> Any:
        """Return a component without weights. Schedulers and guiders keep state, so each run gets its own."""
        if name.startswith("scheduler"):
            return self.components[name].create()
        if name not in self._tools:
            tool = self.components[name].create()
            if name.startswith("tokenizer"):
                tool = self._listener.attach(tool, self._encoder_title(name.replace("tokenizer", "text_encoder")))
            self._tools[name] = tool
        tool = self._tools[name]
        # Making a guider logs a line. Tokenizers are large, and code of LTX-2 sets the side on which its own pads.
        return copy.deepcopy(tool) if name.endswith("guider") else copy.copy(tool)

    def _encoder_title(self, name: str) -> str:
        """Return the common name of an encoder."""
        component = self.components.get(name)
        return self.titles.get(name) or (encoder_title(component.cls) if component else self.title)

    def _without_weights(self, *prefixes: str) -> list[str]:
        return [n for n, c in self.components.items() if not c.is_module and n.startswith(prefixes)]

    def facts(self) -> dict[str, Any]:
        import diffusers
        import transformers

        return {
            "format": 3,  # to be raised when dry runs give other results
            "pipeline": self.pipeline_class.__name__,
            "libraries": [torch.__version__, diffusers.__version__, transformers.__version__],
            "config": self._config,
            "components": {c.name: c.config if c.is_module else c.identity() for c in self.components.values()},
            "dtypes": {c.name: str(c.run_dtype) for c in self.components.values() if c.is_module},
        }

    def _files(self) -> dict[str, Sequence[str]]:
        return {name: component.identity() for name, component in self.components.items()}

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
    def distilled(self) -> bool:
        return self.scales.distilled

    @functools.cached_property
    def sizes(self) -> PictureSizes:
        """The sizes that it draws, by the pipeline's own checks and the transformer's tables."""
        return picture_sizes(self._pipeline(HOST, {}), self.components)

    def _call_stock(
        self,
        cond: Conditioning,
        arguments: Mapping[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        ask: Callable[[str], Callable[..., Any]] | None = None,
    ) -> None:
        """Run the stock call, which a stand-in ends by an error."""
        pads = asks_for_padding(self.pipeline_class)
        tools = (name for name in self._without_weights("") if pads or not name.startswith("tokenizer"))
        pipe = self._pipeline(device, modules, *tools, reads=False, ask=ask)
        self._prepare(pipe, arguments)
        arguments = as_stock(arguments)
        if (scale := arguments.pop("guider", None)) is not None:
            pipe.guider = pipe.guider.new(guidance_scale=scale)
        dtype = self.components["transformer"].run_dtype if "transformer" in self.components else None
        pipe.scheduler.step = steps = Steps(pipe.scheduler, arguments["generator"], on_step)
        if arguments["latents"] is not None:
            arguments["latents"] = arguments["latents"].to(device)
        if self.replays:
            recording, texts = Recording.of(cond, device)
            recording.replay(pipe)
            arguments = {name: value for name, value in arguments.items() if name not in ("prompt", "negative_prompt")}
        else:
            texts = self._embeddings(for_batch(cond, arguments["generator"], self.cond_dims), device, dtype)
            untaken = {name for name in texts.keys() - self._call.keys() if name.startswith("negative_")}
            if untaken and cond.info.get("negative_prompt", "").strip():
                raise ValueError(f"{self.title} takes no negative prompt with these pictures. Encode an empty one.")
            texts = {name: value for name, value in texts.items() if name not in untaken}
        drawing = arguments["generator"]
        with torch.random.fork_rng(devices=[]):  # some draw noise without the generator
            torch.manual_seed((drawing[0] if isinstance(drawing, list) else drawing).initial_seed())
            try:
                pipe(**arguments | texts, output_type="pt", return_dict=False)
            except DecodeCalledError:
                steps.finite.finish()  # of a call that took fewer steps than its scheduler has
                raise

    def _embeddings(self, cond: Conditioning, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """Return the conditioning as arguments of the pipeline's call."""
        return cond.to(device, dtype)

    def _prepare(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        """Adjust the stock pipeline to one run. For families with quirks."""


def _asking_part(ask: Callable[[str], Callable[..., Any]], unit: str, part: str) -> Callable[..., Any]:
    return ask(f"{unit}.{part}")
