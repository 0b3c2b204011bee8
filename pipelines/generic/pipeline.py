"""GenericPipeline: any diffusers pipeline, in three loads: encoders only, transformer only, VAE only.

The pipeline's own code runs unmodified in each. In the sampling stage a stand-in takes the VAE's place: it answers what
the pipeline asks of the VAE and catches what it would have decoded, so no family needs decode code of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..decoding.policy import WayName
from ..encoding.conditioning import Conditioning
from ..options import TRUE_CFG, check_known, check_stage
from ..staged import COUNTS, TOLD, Negative, OnStep, Prompt, as_handed, no_effect
from .seeing import SeeingPipeline
from .stand_ins import DecodeCalledError, keeping_processors
from .stock import check_frames, encode_defaults, guides, negative_arguments, returned_names, text_options
from .stock_parts import FRAMES, HOST
from .tails import OF_ONE, TAILS
from .tasks import INPUTS, WORDS, reads_pictures

_AREA = "max_area"
_AT_ONCE = "decode_chunk_size"  # how many frames a VAE of pictures decodes at once
_BINNING = "use_resolution_binning"  # draws another size, and shrinks or widens the picture

# Arguments that the stages set themselves.
_OURS = {
    "self", "prompt", "negative_prompt", "width", "height", "num_inference_steps", *FRAMES, "guidance_scale",
    "distilled_guidance_scale", "true_cfg_scale", "generator", "latents", "output_type", "return_dict", "callback",
    "callback_steps", "callback_on_step_end", "callback_on_step_end_tensor_inputs", "device",
    "do_classifier_free_guidance", "kwargs", *INPUTS, "strength", _AREA, _AT_ONCE, "padding_mask_crop",
    "masked_image_latents", "image_embeds",
}  # fmt: skip


class GenericPipeline(SeeingPipeline):
    """A diffusers pipeline folder, staged."""

    # Encode

    def _encode_options(self) -> Collection[str]:
        negative = {name for name in negative_arguments(self.pipeline_class).values() if name.startswith("negative_")}
        known = {name for name in {*self._encode_prompt, *negative} if not name.endswith("_per_prompt")} - _OURS
        if self.replays:
            known = {name for name in known & self._call.keys() if "embeds" not in name}
        return known

    def _check_options(self, options: dict[str, Any]) -> None:
        super()._check_options(options)
        self._prove_options(options)

    def _pictures_read(self, pictures: Sequence[torch.Tensor]) -> dict[str, Any]:
        cls = self.pipeline_class
        if pictures and not self.edits:
            raise ValueError(
                f"{self.title} reads no pictures with its prompt. Leave images out, or give one to sample."
            )
        if not pictures and reads_pictures(cls):
            raise ValueError(f"{self.title} reads a picture with its prompt. Give images.")
        if self.replays:
            return {"images": tuple(pictures)} if pictures else {}
        return {"handed": self.handed(pictures)} if reads_pictures(cls) else {}

    def _encoding_facts(self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any]) -> dict[str, Any]:
        import diffusers
        import transformers

        text = [c for c in self.components.values() if not c.is_module or c.role == "text_encoder"]
        files = {c.name: c.identity() for c in text if not c.name.startswith("scheduler")}
        return {
            "format": 2,  # to be raised when the same facts give other embeddings
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
        if self.replays:
            return self.record(prompt, negative_prompt, options, device, modules)
        tools = [n for n in self._without_weights("") if not n.startswith("scheduler")]
        pipe = self._pipeline(device, modules, *tools)
        usual = encode_defaults(self._encode_prompt, self._call) | {"device": device}
        # The first is for the prompt, the last for the negative one.
        handed = [own | {"image": as_handed(own["image"])} for own in options.get("handed", ())] or [{}]
        names = returned_names(self.pipeline_class.encode_prompt)

        def run(own: Mapping[str, Any], **texts: Any) -> dict[str, Any]:
            given = {k: v for k, v in (usual | texts | dict(own)).items() if k in self._encode_prompt}
            result = pipe.encode_prompt(**given)
            return dict(zip(names, result if isinstance(result, tuple) else (result,), strict=True))

        if "negative_prompt" in self._encode_prompt:
            both = {"negative_prompt": negative_prompt, "do_classifier_free_guidance": True}
            named = run(options | handed[0], prompt=prompt, **both)
        else:
            named = run(options | handed[0], prompt=prompt)
            words = negative_arguments(self.pipeline_class)
            own = {name: options[word] for name, word in words.items() if word in options}
            instead = any(isinstance(v, torch.Tensor) and words[k].startswith("negative_") for k, v in own.items())
            if (negative_prompt is not None or instead) and any(f"negative_{name}" in self._call for name in named):
                negative = run(own | handed[-1], prompt=negative_prompt)
                named |= {f"negative_{name}": value for name, value in negative.items()}
        return {name: value for name, value in named.items() if value is not None and name in self._call}

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
        self._check_proven()
        if missing := ", ".join(WORDS.get(name, name) for name in sorted(self.inputs - self.pictures.keys())):
            if "controlnet" in self.components and missing == "control":
                raise ValueError(f"{self.title} has a ControlNet, but no picture for it. Give it: control.")
            raise ValueError(f"{self.title} starts from more than text. Give it: {missing}.")
        config = self._tool("scheduler").config if "scheduler" in self.components else {}
        if config.get("shift_terminal"):  # where the last step begins at pure noise it divides zero by zero
            sigmas = options.get("sigmas")
            if sigmas is None and steps == 1:
                raise ValueError(f"steps is 1; the scheduler of {self.title} (shift_terminal) takes at least 2.")
            if sigmas is not None and float(sigmas[-1]) == 1.0:
                raise ValueError(
                    f"sigmas end with 1; the scheduler of {self.title} (shift_terminal) needs a lower end."
                )
        # How many pictures is settled by how many prompts were encoded.
        known = {k for k in self._call if "embeds" not in k and not k.endswith("_per_prompt")} - _OURS
        scales = self.scales
        known |= {TRUE_CFG} if scales.true_cfg else set()
        known |= {scales.embedded} if scales.embedded and not scales.distilled else set()
        check_stage(self.title, options, text_options(self.pipeline_class) & known)
        if TRUE_CFG in options and scales.distilled and not scales.true_cfg:
            raise ValueError(
                f"{self.title} takes no true_cfg: {self.pipeline_class.__name__} has no classifier-free guidance. "
                "Leave it out; guidance is its own scale."
            )
        check_known(self.title, options, known)
        if options.get(_BINNING):
            raise ValueError(f"{_BINNING} is True; sizes are drawn as they are asked for. Leave it out.")
        arguments: dict[str, Any] = {"num_inference_steps": steps, **options, **self.pictures}
        if scales.true_cfg and TRUE_CFG in options:
            arguments[scales.true_cfg] = arguments.pop(TRUE_CFG)
        if self.strength is not None:
            arguments["strength"] = self.strength
        if _BINNING in self._call:
            arguments[_BINNING] = False
        if _AT_ONCE in self._call:
            arguments[_AT_ONCE] = sys.maxsize  # all reach the VAE together, and the decoder's stage divides them
        for key in ("prompt", "negative_prompt"):
            if key in self._call:
                arguments[key] = None
        guidance = self.default_guidance if guidance is None else guidance
        if guidance is not None:
            if scales.guidance is None:
                raise ValueError(f"{self.title} takes no guidance.")
            arguments[scales.guidance] = guidance
        if self.own_size and (width or height) and not self._is_of_picture(width, height):
            raise ValueError(f"{self.title} draws the size of its picture. Leave width and height out.")
        self._check_size(width, height)
        width, height = self._size(width, height)
        if _AREA in self._call and width and height:
            arguments[_AREA] = width * height  # to which it brings every size
        sides = (("width", width), ("height", height))
        arguments |= {key: size for key, size in sides if size is not None and key in self._call}
        if frames is not None:
            if self._frames is None and self.is_video:
                raise ValueError(f"{self.title} makes as many frames as it is given. Leave frames out.")
            if self._frames is None:
                raise ValueError(f"{self.title} makes pictures, not videos: leave frames out.")
            check_frames(self._pipeline(HOST, {}), self.title, frames)
            arguments[self._frames] = frames
        return arguments

    def _check_size(self, width: int | None, height: int | None) -> None:
        """Raise ValueError, in one line, for a size that cannot be drawn: that asked for, or that of the picture."""
        if width or height or not (drawn := self._drawn_of_picture()):
            self.sizes.check(self.title, width, height)
            return
        try:
            self.sizes.check(self.title, *drawn)
        except ValueError as error:
            high, wide = (self.pictures.get("image") or self.pictures["video"])[0].shape[:2]
            words = f"the picture is {wide} wide and {high} high: scale it, or set width and height."
            if self.own_size:
                words = f"the picture is {wide} wide and {high} high: scale it."
            raise ValueError(f"{words} ({error})") from None

    def _is_of_picture(self, width: int | None, height: int | None) -> bool:
        """Return whether a size is that of the picture to start from, which a call that is told it draws as well."""
        first = self.pictures.get("image") or self.pictures.get("video")
        if "strength" not in self._call or not first:
            return False
        return (height, width) == tuple(first[0].shape[:2])

    def _size(self, width: int | None, height: int | None) -> tuple[int | None, int | None]:
        """Return the size asked for, or that of the picture to start from."""
        drawn = self._drawn_of_picture()
        return (width, height) if self.own_size or width or height or not drawn else drawn

    def _drawn_of_picture(self) -> tuple[int, int] | None:
        """Return the width and height that are drawn of the picture to start from, where no other size is asked for."""
        first = self.pictures.get("image") or self.pictures.get("video")
        if "strength" not in self._call or not first:
            return None
        multiple = self.sizes.multiple
        rows, columns = first[0].shape[:2]
        return columns // multiple * multiple, rows // multiple * multiple

    def _picture_size(self, width: int | None, height: int | None) -> tuple[int | None, int | None]:
        if self.own_size or "reference_images" in self._call:  # which keep the shape of a picture
            return None, None
        asked = zip(("width", "height"), self._size(width, height), strict=True)
        width, height = (side or getattr(self._call.get(name), "default", None) for name, side in asked)
        return (width, height) if isinstance(width, int) and isinstance(height, int) else (None, None)

    def _unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        scales = self.scales
        if scales.true_cfg:
            given = options.get(TRUE_CFG)
            counts = scales.true_cfg == "guider" if given is None else given > 1
            return "" if counts else "The negative prompt has no effect without true_cfg. " + COUNTS
        if scales.distilled:
            return f"The negative prompt has no effect: {self.title} takes none."
        name, scale = scales.cfg, self.default_guidance if guidance is None else guidance
        if scale is None:
            own = self._call.get(name or "")
            scale = own.default if own and isinstance(own.default, int | float) else None
        if name is None or scale is None or guides(self._pipeline(HOST, {}), name, scale):
            return ""
        if scale > 1:
            return f"The negative prompt has no effect: {self.title} is distilled, and runs without guidance."
        return no_effect(scale, guidance is None)

    def _scale_notes(self, guidance: float | None, true_cfg: float | None) -> list[str]:
        scales, notes = self.scales, []
        if not scales.distilled:
            return []
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

    def _denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Mapping[str, nn.Module],
    ) -> torch.Tensor:
        try:
            with keeping_processors(modules.values()):
                self._call_stock(cond, arguments, on_step, device, modules)
        except DecodeCalledError as caught:
            if len(caught.latents) % int(cond.info.get("prompts") or 1):
                raise ValueError(f"{self.title} draws one prompt at a time. Encode one.") from None
            return caught.latents
        raise RuntimeError(f"{self.name} never called its VAE, and cannot be staged.")

    # Decode

    def check_latents(self, latents: Any) -> None:
        self._check_proven()
        super().check_latents(latents)

    def _finish(self, images: torch.Tensor) -> torch.Tensor:
        return TAILS[self.tail](images)

    def _decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        if self.components["vae"].config.get("timestep_conditioning") and "temb" not in given:
            return {**given, "temb": torch.zeros(latents.shape[0])}
        return given
