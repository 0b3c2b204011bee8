"""LoopModel: a model that no pipeline class of diffusers runs, so that its stages are ours."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import torch

from ...memory.weights.unit import ManagedModel
from ..decoding.policy import WayName
from ..encoding.conditioning import Conditioning
from ..encoding.pictures import Pictures
from ..encoding.prompts import Text, no_effect
from ..encoding.truncation import Truncation
from ..files.recognition import title_of
from ..lora.weight_names import Converters
from ..options import check_known
from ..planning.forecasts import Forecaster
from ..planning.sampling_forecasts import dry_run_arguments
from ..sampling.batches import Dims
from ..sampling.inputs import Inputs, Request
from ..stock.answers import Answers
from ..stock.sound import SoundDecoder
from .claims import Claims
from .model import Embeddings, Model, Modules, OnStep, See


class LoopModel(ABC):
    """A model with stages of ours. Each one sets the attributes, and adds how it encodes and denoises."""

    name: str
    titles: Mapping[str, str]
    default_steps: int
    default_guidance: float | None
    knows = ""
    is_video = False
    frame_rate = 24
    takes_negative = True
    default_negative: str | None = ""
    starts_from_latents = True
    edits = looks = replays = distilled = False
    left_out: tuple[str, ...] = ()
    sound: SoundDecoder | None = None
    latent_dimensions = 4
    decodes_to_host = False
    decoder_draws = False
    batch_dims: Mapping[str, int] = MappingProxyType({})
    cond_dims: Dims = MappingProxyType({})
    stand_ins: Mapping[tuple[str, str], Any] = MappingProxyType({})
    forecast_caveat = ""
    pipeline_class: Any = None

    denoisers: list[ManagedModel]
    encoders: list[ManagedModel]
    decoder: ManagedModel
    decoder_config: dict[str, Any]
    parts: Mapping[str, Any]  # its transformer among them

    def __init__(self, folder: Path, claims: Claims) -> None:
        self.folder, self.claims, self.title = folder, claims, title_of(folder)
        self.truncation = Truncation()
        self._tokenizers: dict[str, Any] = {}

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Return everything that decides the activations of the stages, beside their arguments, as plain data."""

    @abstractmethod
    def files(self) -> dict[str, Sequence[str]]:
        """Return the digests of all files that it runs, by component."""

    @abstractmethod
    def encoding_facts(self, text: Text) -> dict[str, Any]:
        """Return everything that decides the embeddings; under "files" the digests of all files among it."""

    @abstractmethod
    def encode(self, text: Text, device: torch.device, modules: Modules) -> Embeddings:
        """Return named embeddings, on any device, made by these encoders."""

    @abstractmethod
    def sample_arguments(self, inputs: Inputs, request: Request) -> dict[str, Any]:
        """Check arguments of `sample` and return those of `denoise`. Loads nothing."""

    @abstractmethod
    def denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Modules,
        answers: Answers | None = None,
    ) -> torch.Tensor:
        """Return latents as the decoder takes them, on any device, made by these transformers."""

    @property
    def picture_encoder(self) -> ManagedModel:
        """The unit that encodes pictures to latents."""
        return self.decoder

    @property
    def forecaster(self) -> Forecaster:
        """Forecasts its stages on its device."""
        return self.claims.forecaster(self.name, self.facts, self.stand_ins)

    @property
    def label(self) -> str:
        """The name of its folder or file, for reports."""
        return self.folder.name if self.folder.is_dir() else self.folder.stem

    def converters(self) -> Converters:
        """Return how names in the file of the transformer become those of the module."""
        return {"transformer": self.parts["transformer"].rename}

    # Encode

    def encode_options(self) -> Collection[str]:
        """Return the names of the options that `encode` takes."""
        return ()

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise TypeError for options that `encode` does not take."""
        check_known(self.title, options, self.encode_options())

    def pictures_read(self, pictures: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return no options. Raises ValueError for pictures, which it does not read."""
        if pictures:
            raise ValueError(f"{self.title} reads no pictures with its prompt. Leave images out.")
        return {}

    def words_of(self, text: Text) -> dict[str, Any]:
        """Return the prompts as plain data."""
        prompt, negative = text.prompt, text.negative_prompt
        return {
            "prompt": prompt if isinstance(prompt, str) else list(prompt),
            "negative_prompt": list(negative) if isinstance(negative, list | tuple) else negative,
        }

    def tokenizer(self, name: str, make: Callable[[], Any], title: str) -> Any:
        """Return a tokenizer, made when it is first asked for, which notes what it cuts."""
        if name not in self._tokenizers:
            self._tokenizers[name] = self.truncation.attach(make(), title)
        return self._tokenizers[name]

    # Image conditioning

    def inputs_of(self, pictures: Pictures) -> Inputs:
        """Return the inputs of a run without pictures. Raises ValueError, in one line, for any."""
        if pictures:
            raise ValueError(f"{self.title} starts from a latent: encode the picture first, and give it that.")
        return Inputs(self, own={"init_latents": "init_latents"})

    def picture_size(self, inputs: Inputs, width: int | None, height: int | None) -> tuple[int | None, int | None]:
        """Return no size: it takes no pictures."""
        return None, None

    def encode_images(self, cond: Conditioning, arguments: Mapping[str, Any], see: See) -> NoReturn:
        """Raise: nothing in it sees pictures."""
        raise NotImplementedError

    def module_call(self, name: str, args: Any, kwargs: Any) -> NoReturn:
        """Raise: nothing in it sees pictures."""
        raise NotImplementedError

    # Sample

    def passes(self, arguments: Mapping[str, Any]) -> int:
        """Return how many steps a run with these arguments takes."""
        return arguments["num_inference_steps"]

    def dry_run_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `denoise` for a dry run: few steps."""
        return dry_run_arguments(arguments)

    def unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        """Return why the negative prompt has no effect, in a sentence; empty where it has one."""
        scale = self.default_guidance if guidance is None else guidance
        return no_effect(scale, guidance is None) if scale is not None and scale <= 1 else ""

    def scale_notes(self, guidance: float | None, true_cfg: float | None) -> list[str]:
        """Return no notes."""
        return []

    def batch_differs(self, texts: Model, own: Collection[str]) -> str:
        """Return nothing: each picture has noise of its own seed."""
        return ""

    def check_count(self, count: int) -> None:
        """Accept any number of results."""
        return

    # Decode

    def check_ready(self) -> None:
        """Accept every run: nothing is left to be known."""
        return

    def colours(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the pixels as they are: in -1..1."""
        return pixels

    def finish(self, images: torch.Tensor) -> torch.Tensor:
        """Return the pictures as they are."""
        return images

    def decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        """Return the arguments that are given."""
        return given

    def decode_sample(self, latents: torch.Tensor) -> torch.Tensor:
        """Return all latents: a dry run decodes the whole."""
        return latents
