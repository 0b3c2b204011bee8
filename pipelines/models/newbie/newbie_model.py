"""NewBie-image-Exp0.1: its transformer, its two text encoders, and the loop that draws with them.

No pipeline of diffusers runs it (huggingface/diffusers#12803 is open), so the stages are ours.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ....memory.weights.stored import file_identity
from ...encoding.conditioning import Conditioning, pair
from ...encoding.prompts import Text, as_list
from ...files.components import parse_dtype
from ...options import check_known
from ...sampling.batches import for_batch, seeds_of
from ...sampling.inputs import Inputs, Request
from ...sampling.latents import StepCheck, check_noise
from ...sampling.picture_sizes import PictureSizes
from ...stock.answers import Answers
from ..claims import Claims
from ..loop_model import LoopModel
from ..model import Embeddings, OnStep
from .gemma import gemma_features, with_system_prompt
from .jina import jina_features
from .newbie_layout import find_layout
from .newbie_parts import read_parts
from .sampling import SAMPLERS, start, times
from .sizes import config_of
from .velocity import Velocity

_SIDE, _SPATIAL, _PATCH = 1024, 8, 16  # pixels: of a picture, of a latent pixel, of a token
_MAX_TOKENS = 512
_SAMPLING: dict[str, Any] = {
    "sampler": "euler", "shift": 6.0, "cfg_trunc": 1.0, "renorm_cfg": 0.0, "init_latents": None, "denoise": 1.0,
}  # fmt: skip


class NewbieModel(LoopModel):
    """NewBie-image-Exp0.1, staged, from a folder or from the file of its transformer.

    For a file, `gemma`, `jina` and `vae` are those of the others. `encode` takes `max_sequence_length`, in tokens of
    Gemma. `sample` takes

    - `sampler`: euler, or midpoint with two calls a step; `shift`: above 1 noise gets more of the steps;
    - `cfg_trunc`: the time, 0 for noise and 1 for the picture, from which on there is no guidance;
    - `renorm_cfg`: how many times larger guidance may make the norm of a sample, 0 for any;
    - `init_latents`: a picture to start from, as the decoder takes it, with `denoise` below 1.

    Picture i of several prompts starts from the noise of `seed` + i, as that of a batch does.
    """

    name = "NewbiePipeline"
    default_steps = 28
    default_guidance = 4.5
    titles: Mapping[str, str] = {
        "text_encoder": "Gemma 3 4B",
        "text_encoder_2": "Jina CLIP v2",
        "transformer": "NewBie",
        "vae": "VAE",
    }

    def __init__(
        self,
        folder: Path,
        dtype: str | torch.dtype,
        claims: Claims,
        *,
        gemma: str | Path | None = None,
        jina: str | Path | None = None,
        vae: str | Path | None = None,
    ) -> None:
        files = (None if file is None else Path(file).expanduser() for file in (gemma, jina, vae))
        self.layout = find_layout(folder, *files)
        super().__init__(folder, claims)
        self.parts = read_parts(self.layout, parse_dtype(dtype))
        units = {name: claims.claim(part, self.label) for name, part in self.parts.items()}
        self.encoders = [units["text_encoder"], units["text_encoder_2"]]
        self.denoisers, self.decoder = [units["transformer"]], units["vae"]
        self.decoder_config = dict(self.layout.vae.config)

    # Encode

    def encode_options(self) -> Collection[str]:
        return {"max_sequence_length"}

    def encoding_facts(self, text: Text) -> dict[str, Any]:
        import transformers

        words = (*self.layout.gemma_words.files, *self.layout.jina_words.files)
        return {
            "format": 1,
            "pipeline": self.name,
            "libraries": [transformers.__version__],
            "files": [file_identity(path) for path in words]
            + [self.parts[unit.name].identity() for unit in self.encoders],
            "configs": [self.layout.gemma.config, self.layout.jina.config],
            "dtypes": [str(self.parts[unit.name].run_dtype) for unit in self.encoders],
            "options": text.options,
            **self.words_of(text),
        }

    def encode(self, text: Text, device: torch.device, modules: Mapping[str, nn.Module]) -> Embeddings:
        """Return the embeddings of a prompt pair."""
        positive, negative = as_list(text.prompt), as_list(text.negative_prompt or "")
        texts = [*positive, *negative]  # in one call: a streamed encoder passes through the device once
        longest = text.options.get("max_sequence_length", _MAX_TOKENS)
        gemma, jina = modules["text_encoder"], modules["text_encoder_2"]
        systematic = [with_system_prompt(text) for text in texts]
        embeds, mask = gemma_features(gemma, self._tokenizer("gemma"), systematic, device, longest)
        pooled = jina_features(jina, self._tokenizer("jina"), texts, device)
        named = {"prompt_embeds": embeds, "prompt_attention_mask": mask, "pooled_prompt_embeds": pooled}
        return pair(named, len(positive))

    def _tokenizer(self, name: str) -> Any:
        words = self.layout.gemma_words if name == "gemma" else self.layout.jina_words
        unit = "text_encoder" if name == "gemma" else "text_encoder_2"
        return self.tokenizer(name, words.make, self.titles[unit])

    def facts(self) -> dict[str, Any]:
        import diffusers
        import transformers

        layout = self.layout
        return {
            "pipeline": self.name,
            "libraries": [torch.__version__, diffusers.__version__, transformers.__version__],
            "configs": [dict(p.config) for p in (layout.transformer, layout.gemma, layout.jina, layout.vae)],
            "tokenizers": [[file_identity(path) for path in w.files] for w in (layout.gemma_words, layout.jina_words)],
            "dtypes": {name: str(part.run_dtype) for name, part in self.parts.items()},
        }

    def files(self) -> dict[str, Sequence[str]]:
        words = (*self.layout.gemma_words.files, *self.layout.jina_words.files)
        parts = {name: part.identity() for name, part in self.parts.items()}
        return {**parts, "tokenizers": [file_identity(path) for path in words]}

    # Sample

    def sample_arguments(self, inputs: Inputs, request: Request) -> dict[str, Any]:
        """Check arguments of `sample` and return those of `denoise`."""
        steps, frames, options = request.steps, request.frames, request.options
        width, height, guidance = request.width, request.height, request.guidance
        check_known(self.title, options, _SAMPLING)
        if frames is not None:
            raise ValueError(f"{self.title} makes pictures, not videos: leave frames out.")
        chosen = _SAMPLING | dict(options)
        if chosen["sampler"] not in SAMPLERS:
            raise ValueError(f"unknown sampler {chosen['sampler']!r}. Use {', '.join(SAMPLERS)}.")
        if not 0 < chosen["denoise"] <= 1:
            raise ValueError(f"denoise is {chosen['denoise']}; it takes more than 0, up to 1.")
        if chosen["shift"] <= 0:
            raise ValueError(f"shift is {chosen['shift']}; it takes a number above 0.")
        if (latents := chosen["init_latents"]) is not None:
            width, height = self._size_of(latents, width, height)
        _, rows, columns = config_of(self.layout.transformer.config)["axes_lens"]
        PictureSizes(_PATCH, (rows * _PATCH, columns * _PATCH)).check(self.title, width, height)
        scale = self.default_guidance if guidance is None else guidance
        return {
            "width": width or _SIDE, "height": height or _SIDE, "num_inference_steps": steps, "guidance_scale": scale,
            **chosen,
        }  # fmt: skip

    def unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        if options.get("cfg_trunc", 1.0) <= 0:
            return "The negative prompt has no effect: cfg_trunc is 0, so that no step is guided."
        return super().unguided(guidance, options)

    def _size_of(self, latents: torch.Tensor, width: int | None, height: int | None) -> tuple[int, int]:
        channels = self.decoder_config["latent_channels"]
        if latents.ndim != 4 or latents.shape[1] != channels:
            raise ValueError(
                f"the latents to start from are {list(latents.shape)}; {self.title} takes {channels} channels."
            )
        size = latents.shape[3] * _SPATIAL, latents.shape[2] * _SPATIAL
        if (width or size[0], height or size[1]) != size:
            raise ValueError(f"the latents to start from are of {size[0]} x {size[1]}, not {width} x {height}.")
        return size

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
        steps = arguments["num_inference_steps"]
        dtype = self.parts["transformer"].run_dtype
        tensors = for_batch(cond, arguments["generator"], self.cond_dims).to(device, dtype)
        velocity = Velocity(modules["transformer"], tensors, arguments, dtype)
        schedule = times(steps, arguments["shift"], arguments["denoise"])
        batch = len(velocity.alone[0])
        noise = self._noise(arguments, batch).to(device)
        vae = self.decoder_config
        picture = arguments["init_latents"]
        if picture is not None:
            picture = (picture.to(device, torch.float32) - (vae["shift_factor"] or 0)) * vae["scaling_factor"]
        x = start(noise, picture, schedule[0])
        finite = StepCheck()
        for taken, (after, expected) in enumerate(SAMPLERS[arguments["sampler"]](velocity, x, schedule), 1):
            x = after
            finite.check(x, taken, steps)
            if on_step is not None:
                on_step(taken, steps, expected)
        return x / vae["scaling_factor"] + (vae["shift_factor"] or 0)

    def _noise(self, arguments: dict[str, Any], batch: int) -> torch.Tensor:
        channels = self.decoder_config["latent_channels"]
        shape = (channels, arguments["height"] // _SPATIAL, arguments["width"] // _SPATIAL)
        if (given := arguments["latents"]) is not None:
            check_noise(given, (batch, *shape))
            return given.float()
        drawn = (torch.Generator().manual_seed(seed) for seed in seeds_of(arguments["generator"], batch))
        return torch.stack([torch.randn(*shape, generator=generator) for generator in drawn])
