"""Pyramid-Flow: text and pictures to video, by its transformers, its VAE and a loop that samples frame by frame.

No pipeline of diffusers runs it, so the stages are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...decoding.policy import WayName
from ...encoding.conditioning import Conditioning, pair, text_of
from ...encoding.prompts import Text, as_list, no_effect
from ...encoding.truncation import encoder_title
from ...files.components import parse_dtype, read_components
from ...options import check_known
from ...sampling.batches import for_batch, seeds_of
from ...sampling.inputs import Inputs, Request
from ...sampling.latents import check_noise
from ...stock.answers import Answers
from ..claims import Claims
from ..loop_model import LoopModel
from ..model import Embeddings, OnStep
from .arguments import CHANNELS, size_of, three_stages
from .loop import GuidedVelocity, SeededNoise, Settings, Step, check_size, generate
from .pyramid_layout import Layout, find_layout
from .pyramid_parts import config_of, read_parts
from .text import SUFFIX, encode_texts
from .vae_decode import TILES, choose, from_vae, to_vae

_SIZES = {"768p": (1280, 768), "384p": (640, 384), "image": (1024, 1024)}
_FRAMES = {"768p": 121, "384p": 121, "image": 1}  # 5 seconds
_TILE = 512  # pixels, where it was thought to decode without tiles
_TOKEN = 16  # pixels on a side
_SAMPLING: dict[str, Any] = {
    "first_frame_steps": None, "video_steps": None, "video_guidance": 5.0, "linear_guidance": False,
    "guidance_alpha": 0.5, "min_guidance": 2.0, "init_latents": None,
}  # fmt: skip


class PyramidFlowModel(LoopModel):
    """Pyramid-Flow, staged: miniFlux or the SD3 model, from its folder or from single files.

    `variant` is 768p, 384p or image; auto takes the largest that is there. For the file of a transformer, `vae` is the
    file of the VAE and `text` a folder with the text encoders' folders. `sample` takes

    - `steps`: of each of the three stages of a frame, the first one twice as many; or `first_frame_steps` and
      `video_steps`, three numbers each;
    - `guidance` for the first frame, `video_guidance` for the others; with `linear_guidance` frame t has
      `guidance` - `guidance_alpha` * t, at least `min_guidance`; 0 for none;
    - `init_latents`: the first frame, as `encode_image` makes it. The video then goes on from it.

    Video i of several prompts starts from the noise of `seed` + i, as that of a batch does.
    """

    name = "PyramidFlow"
    is_video = True
    latent_dimensions = 5
    decodes_to_host = True
    default_steps = 10
    default_guidance = 7.0
    titles: Mapping[str, str] = {"transformer": "Pyramid-Flow", "vae": "causal VAE"}

    def __init__(
        self,
        folder: Path,
        dtype: str | torch.dtype,
        claims: Claims,
        *,
        variant: str = "auto",
        text: str | Path | None = None,
        vae: str | Path | None = None,
    ) -> None:
        text, vae = (None if path is None else Path(path).expanduser() for path in (text, vae))
        self.layout: Layout = find_layout(folder, variant, text, vae)
        super().__init__(folder, claims)
        wanted = parse_dtype(dtype)
        self.texts = read_components(self.layout.text, self.layout.text_index(), wanted)
        self.parts = read_parts(self.layout, wanted)
        modules: list[Any] = [*(part for part in self.texts.values() if part.is_module), *self.parts.values()]
        label = self.label
        units = {part.name: claims.claim(part, label) for part in modules}
        self.encoders = [unit for unit in units.values() if unit.role == "text_encoder"]
        self.denoisers, self.decoder = [units["transformer"]], units["vae"]
        self.decoder_config = config_of(self.decoder) | {"latent_channels": CHANNELS}

    # Encode

    def encode_options(self) -> Collection[str]:
        return ()

    def encoding_facts(self, text: Text) -> dict[str, Any]:
        import transformers

        return {
            "format": 1,
            "pipeline": self.name,
            "libraries": [transformers.__version__],
            "files": {name: part.identity() for name, part in self.texts.items()},
            "dtypes": [str(part.run_dtype) for part in self.texts.values() if part.is_module],
            **self.words_of(text),
        }

    def encode(self, text: Text, device: torch.device, modules: Mapping[str, nn.Module]) -> Embeddings:
        """Return the embeddings of a prompt pair."""
        positive, negative = as_list(text.prompt), as_list(text.negative_prompt or "")
        # In one call: a streamed encoder passes through the device once.
        texts = [*(text + SUFFIX for text in positive), *negative]
        tokenizers = {name: self._tokenizer(name.replace("text_encoder", "tokenizer")) for name in modules}
        return pair(encode_texts(modules, tokenizers, texts, device), len(positive))

    def _tokenizer(self, name: str) -> Any:
        encoder = self.texts[name.replace("tokenizer", "text_encoder")]
        return self.tokenizer(name, self.texts[name].create, encoder_title(encoder.cls))

    def facts(self) -> dict[str, Any]:
        import diffusers
        import transformers

        return {
            "pipeline": self.name,
            "libraries": [torch.__version__, diffusers.__version__, transformers.__version__],
            "transformer": config_of(self.denoisers[0]),
            "vae": config_of(self.decoder),
            "texts": {n: t.config if t.is_module else t.identity() for n, t in self.texts.items()},
            "dtypes": {unit.name: str(self._dtype(unit.name)) for unit in (*self.encoders, *self.denoisers)},
        }

    def files(self) -> dict[str, Sequence[str]]:
        parts: dict[str, Any] = {**self.texts, **self.parts}
        return {name: part.identity() for name, part in parts.items()}

    def _dtype(self, name: str) -> torch.dtype:
        part: Any = self.texts.get(name) or self.parts[name]
        return part.run_dtype

    # Sample

    def sample_arguments(self, inputs: Inputs, request: Request) -> dict[str, Any]:
        """Check arguments of `sample` and return those of `denoise`."""
        steps, frames, options = request.steps, request.frames, request.options
        width, height, guidance = request.width, request.height, request.guidance
        check_known(self.title, options, _SAMPLING)
        chosen = _SAMPLING | dict(options)
        first = chosen["init_latents"]
        if first is not None:
            width, height = size_of(first, width, height)
        usual = _SIZES[self.layout.variant]
        # miniFlux computes its positions; the SD3 model has a table of them.
        tokens = config_of(self.denoisers[0]).get("pos_embed_max_size")
        most = tokens and (tokens * _TOKEN, tokens * _TOKEN)
        size = width or usual[0], height or usual[1]
        count, rows, columns = check_size(*size, frames or _FRAMES[self.layout.variant], most, self.title)
        settings = Settings(
            three_stages("first_frame_steps", chosen["first_frame_steps"], 2 * steps),
            three_stages("video_steps", chosen["video_steps"], steps),
            self.default_guidance if guidance is None else guidance,
            chosen["video_guidance"],
            chosen["linear_guidance"],
            chosen["guidance_alpha"],
            chosen["min_guidance"],
        )
        given = 0 if first is None else first.shape[2]
        if count <= given:
            raise ValueError(f"frames is {frames}, which the picture to start from makes already. Take 9 or more.")
        return {
            "shape": (CHANNELS, count, rows, columns), "settings": asdict(settings), "init_latents": first,
            "num_inference_steps": settings.calls(count, given),
        }  # fmt: skip

    def unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        # Frames are guided at every scale above 0; at 1 the two predictions cancel out.
        chosen = {**_SAMPLING, **options}
        first = self.default_guidance if guidance is None else guidance
        later = () if self.layout.variant == "image" else (chosen["video_guidance"],)
        if chosen["linear_guidance"] or any(scale > 0 and scale != 1 for scale in (first, *later)):
            return ""
        return no_effect(first, guidance is None)

    def dry_run_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the first frame and the last, which attends to most, with two steps a stage."""
        units = arguments["shape"][1]
        begin = 0 if arguments["init_latents"] is None else 1
        some = sorted({begin, units - 1})
        brief = {**arguments["settings"], "num_inference_steps": (2, 2, 2), "video_num_inference_steps": (2, 2, 2)}
        return {**arguments, "settings": brief, "units": some, "num_inference_steps": 6 * len(some)}

    def denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Mapping[str, nn.Module],
        answers: Answers | None = None,
    ) -> torch.Tensor:
        """Return latents as the VAE decodes them."""
        dtype = self._dtype("transformer")
        tensors = for_batch(cond, arguments["generator"], self.cond_dims).to(device, dtype)
        velocity = GuidedVelocity(modules["transformer"], text_of(tensors), text_of(tensors, "negative_"))
        batch = len(velocity.positive[0])
        draw = SeededNoise(seeds_of(arguments["generator"], batch))
        noise = draw.initial(*arguments["shape"]) if arguments["latents"] is None else arguments["latents"].float()
        check_noise(noise, (batch, *arguments["shape"]))
        first = arguments["init_latents"]
        if first is not None:
            first = from_vae(first.float(), self.layout.kind).expand(batch, -1, -1, -1, -1)
        settings = Settings(**arguments["settings"])
        run: dict[str, Any] = {"device": device, "dtype": dtype}
        run["on_step"] = None if on_step is None else _Report(on_step)
        if (units := arguments.get("units")) is not None:
            for unit in units:
                done = noise[:, :, :unit] if unit else None
                latents = generate(velocity, noise[:, :, : unit + 1], draw, settings, first=done, **run)
            latents = noise  # a dry run needs the shape only
        else:
            latents = generate(velocity, noise, draw, settings, first=first, **run)
        return to_vae(latents.float(), self.layout.kind)

    # Decode

    def decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        check_known(self.title, given, {"window", "tile_pixels"})
        if given or way in ("stripes", "cpu"):
            return {"window": 1, "tile_pixels": None, **given}
        height, width = (8 * size for size in latents.shape[-2:])
        work_bytes = room_bytes - self.decoder.size_bytes
        window, tile = choose(self.decoder_config, height, width, work_bytes) or (1, TILES[-1])
        if way == "whole":
            return {"window": window if tile is None else 1, "tile_pixels": None}
        return {"window": window, "tile_pixels": tile or _TILE}

    def decode_sample(self, latents: torch.Tensor) -> torch.Tensor:
        return latents[:, :, :3]  # from the second chunk on they are alike


class _Report:
    """Passes the loop's steps to `on_step`."""

    def __init__(self, on_step: OnStep) -> None:
        self.on_step = on_step

    def __call__(self, step: Step) -> None:
        self.on_step(step.taken, step.total, step.expected)
