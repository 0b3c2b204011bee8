"""GenericPipeline: any diffusers pipeline, in three loads: encoders only, transformer only, VAE only.

The pipeline's own code runs unmodified in each. In the sampling stage a stand-in takes the VAE's place: it answers what
the pipeline asks of the VAE and catches what it would have decoded, so no family needs decode code of its own.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..decoding.policy import WayName
from ..encoding.conditioning import Conditioning
from ..encoding.listening import encoder_title
from ..files.components import Component, names_class, parse_dtype, pipeline_class, read_components, read_model_index
from ..options import check_known, check_stage
from ..planning.forecasts import quietly
from ..sampling.picture_sizes import PictureSizes
from ..staged import Negative, OnStep, Prompt, StagedPipeline, no_effect
from . import proof
from .rehearsal import rehearse
from .stand_ins import DecodeCalledError, LateTool, StandIn, StandInVae, Steps, checking_noise, keeping_embeddings
from .stock import (
    asks_for_padding,
    check_frames,
    encode_defaults,
    guides,
    needed_inputs,
    own_words,
    picture_sizes,
    returned_names,
    text_options,
)

_FRAMES = ("num_frames", "frames", "video_length")  # what pipelines call the number of frames
log = logging.getLogger("ballast")

# Arguments that the stages set themselves.
_OURS = {
    "self", "prompt", "negative_prompt", "width", "height", "num_inference_steps", *_FRAMES, "guidance_scale",
    "true_cfg_scale", "generator", "latents", "output_type", "return_dict", "callback", "callback_steps",
    "callback_on_step_end", "callback_on_step_end_tensor_inputs", "device", "do_classifier_free_guidance", "kwargs",
}  # fmt: skip
_FRAME_RATES = {"Wan": 16, "CogVideoX": 8, "Mochi": 30}  # other than 24 a second
_BINNING = "use_resolution_binning"  # draws another size, and shrinks or widens the picture
_HOST = torch.device("cpu")
_STEPS = 28  # where a pipeline has no number of its own
_COMPONENT = re.compile(r"(text_encoder|tokenizer|transformer|scheduler)(_\d+)?")


class GenericPipeline(StagedPipeline):
    """A diffusers pipeline folder, staged."""

    def __init__(self, folder: Path, dtype: str | torch.dtype = "auto", **shared: Any) -> None:
        index, elsewhere = self._contents(folder)
        self.name = index["_class_name"]
        self.pipeline_class: Any = pipeline_class(self.name)
        found = read_components(folder, index, parse_dtype(dtype), elsewhere)
        self.components = {name: self._adapted(component) for name, component in found.items()}
        self._tools: dict[str, Any] = {}
        self._config = {k: v for k, v in index.items() if not k.startswith("_") and not names_class(v)}
        self._init = inspect.signature(self.pipeline_class).parameters
        self._call = inspect.signature(self.pipeline_class.__call__).parameters
        if not hasattr(self.pipeline_class, "encode_prompt") or "vae" not in self.components:
            raise ValueError(f"{self.name} has no text stage or no VAE, and cannot be staged.")
        if needed := needed_inputs(self.pipeline_class):
            raise ValueError(f"{self.name} starts from more than text ({', '.join(needed)}), and cannot be staged yet.")
        self._encode_prompt = inspect.signature(self.pipeline_class.encode_prompt).parameters
        self._frames = next((name for name in _FRAMES if name in self._call), None)
        self.is_video = self._frames is not None
        self.frame_rate = next((rate for name, rate in _FRAME_RATES.items() if self.name.startswith(name)), 24)
        steps = self._call.get("num_inference_steps")
        self.default_steps = steps.default if steps and isinstance(steps.default, int) else _STEPS
        super().__init__(folder, **shared)
        self.title = own_words(index, "_title") or self.title
        self.knows = own_words(index, "_knows")
        returned = returned_names(self.pipeline_class.encode_prompt)
        self.takes_negative = "negative_prompt" in self._encode_prompt or any(
            f"negative_{name}" in self._call for name in returned
        )
        self._check_complete(index)
        units = [self._claim(c, folder.name) for c in self.components.values() if c.is_module]
        self._units = {unit.name: unit for unit in units}
        self.encoders = [unit for unit in units if unit.role == "text_encoder"]
        self.denoisers = [unit for unit in units if unit.role in ("transformer", "other")]
        for unit in self.denoisers:
            unit.batch_dims = self.batch_dims
        self.decoder = self._units["vae"]
        self.decoder_config = self.components["vae"].config
        self._prove()

    def _prove(self) -> None:
        """Raise ValueError, in one line, where the stages would not end as the stock call does."""
        directory, key = self.cache.directory / "proofs", self._forecaster.key(stage="proof")
        verdict = proof.recall(directory, key)
        if verdict is None:
            for name in self._without_weights("tokenizer", "processor"):
                self._tool(name)  # one that cannot be read says so itself
            log.info("Ballast: comparing %s in stages with its own call, once for these versions", self.name)
            try:
                with quietly(), self.manager.between_stages():
                    verdict = rehearse(self)
            except Exception as error:
                verdict = proof.not_compared(error)  # it may have been the machine, and is not kept
            else:
                proof.keep(directory, key, verdict)
        if verdict.differs:
            raise ValueError(f"{self.name} cannot be staged: {verdict.differs}. Run it with diffusers itself.")
        self.default_negative, self.left_out = verdict.negative, verdict.left_out
        self.latent_dimensions = verdict.dimensions

    def _contents(self, folder: Path) -> tuple[dict[str, Any], dict[str, Path]]:
        """The index of the folder, and the folders of components that lie elsewhere."""
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
        if not any(name in self._call for name in returned_names(self.pipeline_class.encode_prompt)):
            raise ValueError(f"{self.name} takes no embeddings that it could be given, and cannot be staged.")

    def _pipeline(self, device: torch.device, modules: Mapping[str, nn.Module], *tools: str, reads: bool = True) -> Any:
        """The stock pipeline with only these modules and the named tools, and a stand-in for the VAE.

        Unless it `reads` texts its tokenizers come when they are asked for something: LTX-2's loop, on which side they
        pad.
        """
        parts: dict[str, Any] = dict.fromkeys(
            name for name, parameter in self._init.items() if parameter.default is inspect.Parameter.empty
        )
        parts |= {name: value for name, value in self._config.items() if name in self._init}
        parts |= modules
        for name in tools:
            later = not reads and name.startswith("tokenizer")
            parts[name] = LateTool(functools.partial(self._tool, name)) if later else self._tool(name)
        parts["vae"] = StandInVae(self.decoder, device, torch.float32)
        for unit in self.denoisers:
            if unit.name not in modules and unit.role == "transformer":
                parts[unit.name] = StandIn(unit, device, self.components[unit.name].run_dtype)
        # The device is the manager's: an offloaded module reports `cpu` or `meta`.
        on_device = property(lambda _: device)
        stock = self.pipeline_class
        namespace: dict[str, Any] = {
            "__module__": stock.__module__,
            "_execution_device": on_device,
            "device": on_device,
        }
        namespace["encode_prompt"] = keeping_embeddings(stock.encode_prompt)
        if "latents" in inspect.signature(getattr(stock, "prepare_latents", str)).parameters:
            namespace["prepare_latents"] = checking_noise(stock.prepare_latents)
        staged = type(stock.__name__, (stock,), namespace)
        pipe = staged(**parts)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def _tool(self, name: str) -> Any:
        """A component without weights. Schedulers and guiders keep state, so each run gets its own."""
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
        """What people call the encoder of that name."""
        component = self.components.get(name)
        return self.titles.get(name) or (encoder_title(component.cls) if component else self.title)

    def _without_weights(self, *prefixes: str) -> list[str]:
        return [n for n, c in self.components.items() if not c.is_module and n.startswith(prefixes)]

    # Encode

    def _check_options(self, options: dict[str, Any]) -> None:
        known = {name for name in self._encode_prompt if not name.endswith("_per_prompt")} - _OURS
        check_known(self.title, options, known)

    def _encoding_facts(self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any]) -> dict[str, Any]:
        import diffusers
        import transformers

        text = [c for c in self.components.values() if not c.is_module or c.role == "text_encoder"]
        files = {c.name: c.identity() for c in text if not c.name.startswith("scheduler")}
        return {
            "format": 1,
            "pipeline": self.name,
            "libraries": [diffusers.__version__, transformers.__version__],
            "files": files,
            "config": self._config,
            "dtypes": {c.name: str(c.run_dtype) for c in text if c.is_module},
            "options": options,
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "negative_prompt": list(negative_prompt) if isinstance(negative_prompt, list | tuple) else negative_prompt,
        }

    def _encode(
        self,
        prompt: Prompt,
        negative_prompt: Negative,
        options: dict[str, Any],
        device: torch.device,
        modules: Mapping[str, nn.Module],
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        tools = [n for n in self._without_weights("") if not n.startswith("scheduler")]
        pipe = self._pipeline(device, modules, *tools)
        arguments = encode_defaults(self._encode_prompt, self._call) | options | {"device": device}
        names = returned_names(self.pipeline_class.encode_prompt)

        def run(**texts: Any) -> dict[str, Any]:
            given = {k: v for k, v in (arguments | texts).items() if k in self._encode_prompt}
            result = pipe.encode_prompt(**given)
            return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))

        if "negative_prompt" in self._encode_prompt:
            named = run(prompt=prompt, negative_prompt=negative_prompt, do_classifier_free_guidance=True)
        else:
            named = run(prompt=prompt)
            if negative_prompt is not None and any(f"negative_{name}" in self._call for name in named):
                named |= {f"negative_{name}": value for name, value in run(prompt=negative_prompt).items()}
        return {name: value for name, value in named.items() if value is not None and name in self._call}

    def facts(self) -> dict[str, Any]:
        import diffusers
        import transformers

        return {
            "format": 2,  # to be raised when dry runs give other results
            "pipeline": self.name,
            "libraries": [torch.__version__, diffusers.__version__, transformers.__version__],
            "config": self._config,
            "components": {c.name: c.config if c.is_module else c.identity() for c in self.components.values()},
            "dtypes": {c.name: str(c.run_dtype) for c in self.components.values() if c.is_module},
        }

    # Sample

    def _sample_arguments(
        self,
        width: int | None,
        height: int | None,
        steps: int,
        guidance: float | None,
        frames: int | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        # How many pictures is settled by how many prompts were encoded.
        known = {k for k in self._call if "embeds" not in k and not k.endswith("_per_prompt")} - _OURS
        check_stage(self.title, options, text_options(self.pipeline_class) & known)
        check_known(self.title, options, known | ({"guidance_scale"} if "true_cfg_scale" in self._call else set()))
        if options.get(_BINNING):
            raise ValueError(f"{_BINNING} is True; sizes are drawn as they are asked for. Leave it out.")
        arguments: dict[str, Any] = {"num_inference_steps": steps, **options}
        if _BINNING in self._call:
            arguments[_BINNING] = False
        for key in ("prompt", "negative_prompt"):
            if key in self._call:
                arguments[key] = None
        guidance = self.default_guidance if guidance is None else guidance
        if guidance is not None:
            if (scale := self._guidance_name()) is None:
                raise ValueError(f"{self.title} takes no guidance.")
            arguments[scale] = guidance
        self.sizes.check(self.title, width, height)
        arguments |= {key: size for key, size in (("width", width), ("height", height)) if size is not None}
        if frames is not None:
            if self._frames is None:
                raise ValueError(f"{self.title} makes pictures, not videos: leave frames out.")
            check_frames(self._pipeline(_HOST, {}), self.title, frames)
            arguments[self._frames] = frames
        return arguments

    def _unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        name = self._guidance_name()
        scale = self.default_guidance if guidance is None else guidance
        if scale is None:
            own = self._call.get(name or "")
            scale = own.default if own and isinstance(own.default, int | float) else None
        if name is None or scale is None or guides(self._pipeline(_HOST, {}), name, scale):
            return ""
        if scale > 1:
            return f"The negative prompt has no effect: {self.title} is distilled, and runs without guidance."
        return no_effect(scale, guidance is None)

    def _guidance_name(self) -> str | None:
        """Which argument is the scale of classifier-free guidance, or the component that has it."""
        names = ("true_cfg_scale", "guidance_scale", "guider")
        return next((name for name in names if name in self._call or name in self.components), None)

    @functools.cached_property
    def sizes(self) -> PictureSizes:
        """The sizes that it draws, by the pipeline's own checks and the transformer's tables."""
        return picture_sizes(self._pipeline(_HOST, {}), self.components)

    def _denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Mapping[str, nn.Module],
    ) -> torch.Tensor:
        pads = asks_for_padding(self.pipeline_class)
        tools = (name for name in self._without_weights("") if pads or not name.startswith("tokenizer"))
        pipe = self._pipeline(device, modules, *tools, reads=False)
        self._prepare(pipe, arguments)
        arguments = dict(arguments)
        if (scale := arguments.pop("guider", None)) is not None:
            pipe.guider = pipe.guider.new(guidance_scale=scale)
        dtype = self.components["transformer"].run_dtype if "transformer" in self.components else None
        pipe.scheduler.step = Steps(pipe.scheduler, arguments["generator"], on_step)
        if arguments["latents"] is not None:
            arguments["latents"] = arguments["latents"].to(device)
        try:
            pipe(**arguments, **self._embeddings(cond, device, dtype), output_type="pt", return_dict=False)
        except DecodeCalledError as caught:
            return caught.latents
        raise RuntimeError(f"{self.name} never called its VAE, and cannot be staged.")

    def _embeddings(self, cond: Conditioning, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """The conditioning as arguments of the pipeline's call."""
        return cond.to(device, dtype)

    def _prepare(self, pipe: Any, arguments: dict[str, Any]) -> None:
        """Adjust the stock pipeline to one run. For families with quirks."""

    # Decode

    def _decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        if self.components["vae"].config.get("timestep_conditioning") and "temb" not in given:
            return {**given, "temb": torch.zeros(latents.shape[0])}
        return given
