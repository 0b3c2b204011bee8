"""The interface of a model family: facts about the model, and the code of each stage."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import torch
from torch import nn

from ...memory.planning.dry_run import StandIns
from ...memory.weights.batch import BatchDims
from ...memory.weights.unit import ManagedModel
from ..decoding.policy import WayName
from ..encoding.conditioning import Conditioning
from ..lora.weight_names import Converters
from ..options import check_known
from ..planning.plans import Sight
from ..planning.sampling_forecasts import dry_run_arguments
from ..sampling.batches import Dims
from .pictures import Pictures
from .prompts import Negative, Prompt, no_effect

OnStep = Callable[[int, int, torch.Tensor], None]
StageName = Literal["encode", "sample", "decode"]
Modules = Mapping[str, nn.Module]  # by name of their unit


class Part(Protocol):
    """A part of a pipeline that has weights."""

    @property
    def key(self) -> Hashable:
        """Identifies the model, so that all pipelines that run it share it."""

    def unit(self, label: str) -> ManagedModel:
        """Make the managed model. Loads nothing."""


class ModelFamily(ABC):
    """A model family. Each one sets the attributes and overrides the methods."""

    name: str  # of the pipeline's class; `title` is what people call the model
    title: str
    titles: ClassVar[Mapping[str, str]] = {}  # what people call the models, by the name of their unit
    knows = ""  # a sentence on the words that it knows, where those are few
    is_video = False
    frame_rate = 24  # of a video, frames a second
    takes_negative = True
    default_negative: str | None = ""  # None where the stock pipeline tells no negative prompt from an empty one
    starts_from_latents: ClassVar[bool] = False  # whether `sample` takes `init_latents`
    edits: bool = False  # whether pictures belong to the prompt
    looks: bool = False  # whether `_see` belongs to every run, also to those without pictures
    replays: bool = False  # whether it is told its prompts again while it samples, and takes no embeddings
    left_out: tuple[str, ...] = ()  # modules of the stock pipeline that make what no stage does, as sound
    default_steps: int
    default_guidance: float | None = None  # None for that of the stock pipeline
    latent_dimensions = 4
    decodes_to_host: ClassVar[bool] = False  # whether what is decoded leaves the device part by part
    batch_dims: ClassVar[BatchDims] = {}  # arguments of the transformer whose batch is not their first dimension
    cond_dims: ClassVar[Dims] = {}
    # Arguments of `_denoise` that may hold something for each picture, and what they are called here.
    own: Mapping[str, str] = MappingProxyType({"init_latents": "init_latents"})
    stand_ins: ClassVar[StandIns] = {}  # for code that reads values, of which a dry run has none
    forecast_caveat: ClassVar[str] = ""  # a sentence for plans, where a stand-in makes the forecast a bound

    encoders: list[ManagedModel]
    denoisers: list[ManagedModel]
    decoder: ManagedModel
    decoder_config: dict[str, Any]

    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """Everything that decides the activations of the stages, beside their arguments, as plain data."""

    @abstractmethod
    def _files(self) -> dict[str, Sequence[str]]:
        """Digests of all files that it runs, by component."""

    # Encode

    def encodes_with(self, name: str) -> bool:
        """Return whether an option of this name is one of `encode`, and not of `sample`."""
        return name in self._encode_options()

    @abstractmethod
    def _encode_options(self) -> Collection[str]:
        """Return the names of the options that `_encode` takes."""

    def _check_options(self, options: dict[str, Any]) -> None:
        """Raise TypeError for options that `_encode` does not take."""
        check_known(self.title, options, self._encode_options())

    def _pictures_read(self, pictures: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the pictures that `_encode` reads with a prompt, as its options. ValueError if it takes none."""
        if pictures:
            raise ValueError(f"{self.title} reads no pictures with its prompt. Leave images out.")
        return {}

    @abstractmethod
    def _encoding_facts(self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any]) -> dict[str, Any]:
        """Everything that decides the embeddings, as plain data; under "files" the digests of all files among it."""

    @abstractmethod
    def _encode(
        self,
        prompt: Prompt,
        negative_prompt: Negative,
        options: dict[str, Any],
        device: torch.device,
        modules: Modules,
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        """Named embeddings, on any device, made by these encoders."""

    # Pictures

    def with_pictures(self, pictures: Pictures) -> Any:
        """Return this pipeline for a run with these pictures. Raises ValueError, in one line, if it takes none such."""
        if self.starts_from_latents:
            raise ValueError(f"{self.title} starts from a latent: encode the picture first, and give it that.")
        raise ValueError(f"{self.title} takes no picture to start from. Leave it out.")

    def _picture_size(self, width: int | None, height: int | None) -> tuple[int | None, int | None]:
        """Return the width and height to which the pictures of a run are brought, or None if not known."""
        return None, None

    def _see(self, cond: Conditioning, arguments: Mapping[str, Any]) -> None:
        """Run what sees the pictures of this run before it samples, each module in a stage of its own."""
        raise NotImplementedError

    def _foresee(self, cond: Conditioning, arguments: Mapping[str, Any], room_bytes: int) -> list[Sight]:
        """As `_see`, on shapes: what it will run."""
        raise NotImplementedError

    def _passes(self, arguments: Mapping[str, Any]) -> int:
        """Return how many steps a run with these arguments takes."""
        return arguments["num_inference_steps"]

    # Sample

    def _converters(self) -> Converters:
        """Return how names in the files of transformers become those of the modules, by unit.

        Of those that have such.
        """
        return {}

    @abstractmethod
    def _sample_arguments(
        self,
        width: int | None,
        height: int | None,
        steps: int,
        guidance: float | None,
        frames: int | None,
        options: dict[str, Any],
    ) -> dict[str, Any]:
        """Check arguments of `sample` and return those of `_denoise`. Loads nothing."""

    def _dry_run_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `_denoise` for a dry run: few steps. Runs with equal activations share them."""
        return dry_run_arguments(arguments)

    def _unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        """Return why the negative prompt has no effect, in a sentence; empty where it has one."""
        scale = self.default_guidance if guidance is None else guidance
        return no_effect(scale, guidance is None) if scale is not None and scale <= 1 else ""

    @property
    def distilled(self) -> bool:
        """Return whether `guidance` is a scale that the model was distilled with, and not classifier-free guidance."""
        return False

    def _scale_notes(self, guidance: float | None, true_cfg: float | None) -> list[str]:
        """Return notes for the user on these scales, a sentence each."""
        return []

    def _batch_differs(self, texts: ModelFamily) -> str:
        """How pictures drawn at once would differ from each drawn alone, in a few words; empty where they do not.

        Prompts are encoded by `texts`.
        """
        return ""

    def check_count(self, count: int) -> None:
        """Raise ValueError, in one line, for more results of one run than this pipeline tells apart."""
        return

    @abstractmethod
    def _denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Modules,
    ) -> torch.Tensor:
        """Latents as the decoder takes them, on any device, made by these transformers.

        `arguments` have a "generator" for the noise, or a list of them: one for each picture of a batch, all of `cond`.
        """

    # Decode

    def _finish(self, images: torch.Tensor) -> torch.Tensor:
        """Finish decoded pictures [B,(F),H,W,3] in 0..1 as the stock pipeline does."""
        return images

    def _decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        """Arguments of the decoder's `decode`, those given included. `room_bytes` on the device include the weights."""
        return given

    def _decode_sample(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the part of the latents that a dry run decodes, to forecast the decoding of all of them."""
        return latents
