"""Model: what one kind of model knows, its facts and the code of its stages. It runs nothing by itself."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import nn

from ...memory.planning.dry_run import StandIns
from ...memory.weights.batch import BatchDims
from ...memory.weights.unit import ManagedModel
from ..decoding.policy import WayName
from ..encoding.conditioning import Conditioning
from ..encoding.pictures import Pictures
from ..encoding.prompts import Text
from ..encoding.truncation import Truncation
from ..lora.weight_names import Converters
from ..planning.forecasts import Forecaster
from ..sampling.batches import Dims
from ..sampling.inputs import Inputs, Request

if TYPE_CHECKING:
    from ..stock.answers import Answers
    from ..stock.module_call import ModuleCall
    from ..stock.sound import SoundDecoder
    from .claims import Claims

OnStep = Callable[[int, int, torch.Tensor], None]
Modules = Mapping[str, nn.Module]  # by name of their unit
Embeddings = dict[str, torch.Tensor | list[torch.Tensor]]
See = Callable[..., Any]  # answers `name, *args, **kwargs`: the call of a module that sees pictures


class Model(Protocol):
    """A model in stages. `DiffusersModel`, `NewbieModel` and `PyramidFlowModel` are such."""

    name: str  # of the pipeline's class; `title` is what people call the model
    title: str
    titles: Mapping[str, str]  # what people call the parts, by the name of their unit
    knows: str  # a sentence on the words that it knows, where those are few
    is_video: bool
    frame_rate: int  # of a video, frames a second
    takes_negative: bool
    default_negative: str | None  # None where the stock pipeline tells no negative prompt from an empty one
    starts_from_latents: bool  # whether `sample` takes `init_latents`
    edits: bool  # whether pictures belong to the prompt
    looks: bool  # whether every run encodes images, also one without pictures
    replays: bool  # whether it is told its prompts again while it samples, and takes no embeddings
    left_out: tuple[str, ...]  # modules of the stock pipeline that make what no stage does
    sound: SoundDecoder | None  # which makes the sound of its latents
    default_steps: int
    latent_dimensions: int
    decodes_to_host: bool  # whether what is decoded leaves the device part by part
    decoder_draws: bool  # whether the decoder draws noise of the run's generator
    batch_dims: BatchDims  # arguments of the transformer whose batch is not their first dimension
    cond_dims: Dims
    stand_ins: StandIns  # for code that reads values, of which a dry run has none
    forecast_caveat: str  # a sentence for plans, where a stand-in makes the forecast a bound

    folder: Path
    claims: Claims
    truncation: Truncation
    encoders: list[ManagedModel]
    denoisers: list[ManagedModel]
    decoder: ManagedModel
    decoder_config: dict[str, Any]
    pipeline_class: Any  # of diffusers, or None

    @property
    def default_guidance(self) -> float | None:
        """The guidance of a run where none is given; None for that of the stock pipeline."""

    @property
    def picture_encoder(self) -> ManagedModel:
        """The unit that encodes pictures to latents."""

    @property
    def forecaster(self) -> Forecaster:
        """Forecasts its stages on its device."""

    @property
    def distilled(self) -> bool:
        """Return whether `guidance` is a scale that the model was distilled with, and not classifier-free guidance."""

    def facts(self) -> dict[str, Any]:
        """Return everything that decides the activations of the stages, beside their arguments, as plain data."""

    def files(self) -> dict[str, Sequence[str]]:
        """Return the digests of all files that it runs, by component."""

    def converters(self) -> Converters:
        """Return how names in the files of transformers become those of the modules, by unit that has such names."""

    # Encode

    def encode_options(self) -> Collection[str]:
        """Return the names of the options that `encode` takes."""

    def check_options(self, options: dict[str, Any]) -> None:
        """Raise TypeError or ValueError for options that `encode` does not take."""

    def pictures_read(self, pictures: Sequence[torch.Tensor]) -> dict[str, Any]:
        """Return the pictures that `encode` reads with a prompt, as its options. ValueError if it takes none."""

    def encoding_facts(self, text: Text) -> dict[str, Any]:
        """Return everything that decides the embeddings; under "files" the digests of all files among it."""

    def encode(self, text: Text, device: torch.device, modules: Modules) -> Embeddings:
        """Return named embeddings, on any device, made by these encoders."""

    # Image conditioning

    def inputs_of(self, pictures: Pictures) -> Inputs:
        """Return the pictures as arguments of its call. Raises ValueError, in one line, if it takes none such."""

    def picture_size(self, inputs: Inputs, width: int | None, height: int | None) -> tuple[int | None, int | None]:
        """Return the width and height to which the pictures of a run are brought, or None if not known."""

    def encode_images(self, cond: Conditioning, arguments: Mapping[str, Any], see: See) -> Answers:
        """Return what modules that see pictures answer before sampling; `see` runs each of them."""

    def module_call(self, name: str, args: Any, kwargs: Any) -> ModuleCall:
        """Return the call of a module that sees pictures."""

    # Sample

    def sample_arguments(self, inputs: Inputs, request: Request) -> dict[str, Any]:
        """Check arguments of `sample` and return those of `denoise`. Loads nothing."""

    def dry_run_arguments(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of `denoise` for a dry run: few steps. Runs with equal activations share them."""

    def passes(self, arguments: Mapping[str, Any]) -> int:
        """Return how many steps a run with these arguments takes."""

    def unguided(self, guidance: float | None, options: Mapping[str, Any]) -> str:
        """Return why the negative prompt has no effect, in a sentence; empty where it has one."""

    def scale_notes(self, guidance: float | None, true_cfg: float | None) -> list[str]:
        """Return notes for the user on these scales, a sentence each."""

    def batch_differs(self, texts: Model, own: Collection[str]) -> str:
        """Return how pictures drawn at once would differ from each drawn alone, in a few words; empty if not.

        Prompts are encoded by `texts`; `own` are the arguments that hold something for each picture.
        """

    def check_count(self, count: int) -> None:
        """Raise ValueError, in one line, for more results of one run than this model tells apart."""

    def denoise(
        self,
        cond: Conditioning,
        arguments: dict[str, Any],
        on_step: OnStep | None,
        device: torch.device,
        modules: Modules,
        answers: Answers | None = None,
    ) -> torch.Tensor:
        """Return latents as the decoder takes them, on any device, made by these transformers.

        `arguments` have a "generator" for the noise, or a list of them: one for each picture of a batch, all of `cond`.
        `answers` are those of `encode_images`. Latents of sound, if any, are noted on them by `note_sound`.
        """

    # Decode

    def check_ready(self) -> None:
        """Raise ValueError, in one line, where what the model needs is not known yet."""

    def colours(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return decoded pixels [B,3,(F),H,W] in -1..1, of those that the decoder gives in units of its own."""

    def finish(self, images: torch.Tensor) -> torch.Tensor:
        """Finish decoded pictures [B,(F),H,W,3] in 0..1 as the stock pipeline does."""

    def decode_arguments(
        self, latents: torch.Tensor, given: Mapping[str, Any], way: WayName, room_bytes: int
    ) -> Mapping[str, Any]:
        """Return arguments of the decoder's `decode`, those given included.

        `room_bytes` on the device include the weights.
        """

    def decode_sample(self, latents: torch.Tensor) -> torch.Tensor:
        """Return the part of the latents that a dry run decodes, to forecast the decoding of all of them."""
