"""HiDream-I1: its diffusers class, with Llama from its own folder, in three variants, at the requested size.

Its four text encoders take turns. Llama's 32 hidden states, 32 MiB for a prompt, are read at the start of a step
only, so they stay in RAM, and go to the device when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from ....memory.files import read_json
from ....memory.weights.interpose import interpose
from ...encoding.conditioning import Conditioning
from ...encoding.prompts import Text
from ...files.components import Component, read_model_index
from ...files.single.given import GivenFiles
from ...files.single.published import comes_with_pack
from ...sampling.inputs import Inputs, Request
from ...sampling.picture_sizes import PictureSizes
from ..claims import Claims
from ..diffusers.diffusers_model import DiffusersModel
from ..diffusers.folder_parts import Components, Source
from ..model import Embeddings, Model
from .llama import FOLDER, TOKENIZER_FOLDER, find_llama
from .routing import any_routing
from .states import HiddenStates, at_their_places, reading_from_ram
from .variants import VARIANTS, Variant, detect

_SIDE, _VAE_SCALE = 1024, 8  # pixels
_TITLES = {
    "text_encoder": "CLIP-L",
    "text_encoder_2": "CLIP-G",
    "text_encoder_3": "T5-XXL",
    "text_encoder_4": "Llama 3.1 8B",
    "transformer": "HiDream-I1",
    "vae": "VAE",
}


class HiDreamModel(DiffusersModel):
    """`HiDreamImagePipeline`, staged. Its stages are compared with its own call in the tests.

    The stock call draws other sizes than it is asked for, so that no comparison is made when it is opened.
    """

    stand_ins: Mapping[tuple[str, str], Any] = MappingProxyType({("MOEFeedForwardSwiGLU", "moe_infer"): any_routing})
    forecast_caveat = "The transformer's peak is an upper bound, for any routing among its experts."
    titles: Mapping[str, str] = _TITLES
    cond_dims: Mapping[str, int] = MappingProxyType({"prompt_embeds_llama3": 1, "negative_prompt_embeds_llama3": 1})
    # [layers, batch, tokens, channels]
    batch_dims: Mapping[str, int] = MappingProxyType({"encoder_hidden_states_llama3": 1})
    is_compared = False
    variant: Variant | None = None

    def __init__(
        self, parts: Components, cls: Any, inputs: Collection[str] | None = None, text_class: Any = None
    ) -> None:
        super().__init__(parts, cls, inputs, text_class)
        # The layers of Llama whose states the transformer reads.
        self._layers = sorted(set(self.components["transformer"].config["llama_layers"]))

    def batch_differs(self, texts: Model, own: Collection[str]) -> str:
        """Return nothing, as the tests show; on stubs of its encoders, which are large, that would take long."""
        return ""

    def facts(self) -> dict[str, Any]:
        """Return everything that decides the activations, the scheduler in use among it."""
        return super().facts() | {"scheduler": type(self.parts.tool("scheduler")).__name__}

    # Encode

    def encoding_facts(self, text: Text) -> dict[str, Any]:
        """Return everything that decides the embeddings, the layers of Llama among it."""
        return super().encoding_facts(text) | {"llama_layers": self._layers}

    def encode(self, text: Text, device: torch.device, modules: Mapping[str, nn.Module]) -> Embeddings:
        """Return the embeddings of a prompt pair, with the states of those layers of Llama that are read."""
        undo = interpose(modules[FOLDER], HiddenStates(self._layers))
        try:
            return super().encode(text, device, modules)
        finally:
            undo()

    # Sample

    def sample_arguments(self, inputs: Inputs, request: Request) -> dict[str, Any]:
        """Check arguments of `sample` and return those of the stock call, both sides among them."""
        arguments = super().sample_arguments(inputs, request)
        width, height = arguments.get("width", _SIDE), arguments.get("height", _SIDE)
        self.sizes.check(self.title, width, height)
        # Both: a side that is left out the stock pipeline takes from the area, which is changed below.
        return arguments | {"width": width, "height": height}

    @cached_property
    def sizes(self) -> PictureSizes:
        """The sizes that it draws."""
        across, down = self.components["transformer"].config["max_resolution"]
        return replace(super().sizes, area=across * down * _VAE_SCALE**2)

    def adjust(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        """Let the stock pipeline draw the size that is asked for."""
        # The stock pipeline rescales every size to the area of default_sample_size squared: make that the area asked.
        width, height = arguments["width"], arguments["height"]
        # A hair more, since it rounds the result down.
        pipe.default_sample_size = (width * height) ** 0.5 / pipe.vae_scale_factor * (1 + 1e-9)

    def embeddings(self, cond: Conditioning, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        """Return the conditioning as arguments of the call; Llama's states stay in RAM."""
        states = {name: value for name, value in cond.tensors.items() if name.endswith("llama3")}
        others = {name: value for name, value in cond.tensors.items() if name not in states}
        on_host = Conditioning(states).to(torch.device("cpu"), dtype)
        placed = {name: at_their_places(value, self._layers) for name, value in on_host.items()}  # type: ignore[arg-type]
        return Conditioning(others).to(device, dtype) | placed


def open_hidream(
    folder: Path,
    dtype: str | torch.dtype,
    claims: Claims,
    files: GivenFiles | None = None,
    *,
    llama: str | Path | None = None,
    variant: str = "auto",
) -> HiDreamModel:
    """Open HiDream-I1.

    `llama` is the folder of Llama 3.1 8B Instruct, a checkpoint of `LlamaForCausalLM` or of `LlamaModel`; by default
    `text_encoder_4` in the pipeline's own. `variant` is full, dev or fast; auto tells it by the folder.
    """
    if variant != "auto" and variant not in VARIANTS:
        raise ValueError(f"unknown variant {variant!r} of HiDream-I1. Use auto, {', '.join(VARIANTS)}.")
    source, chosen = _source(folder, files, llama, VARIANTS.get(variant))
    model = HiDreamModel(*source.read(dtype, claims, _adapted))
    model.variant = chosen
    if chosen is not None:
        model.default_steps, model.default_guidance = chosen.steps, chosen.guidance
    return model


def _source(
    folder: Path, files: GivenFiles | None, llama: str | Path | None, named: Variant | None
) -> tuple[Source, Variant | None]:
    """Return what to read, and the variant that it is."""
    import diffusers

    index, elsewhere = read_model_index(folder), dict[str, Path]()
    if not comes_with_pack(index):  # else Llama is one of the files
        config = read_json(folder / "transformer" / "config.json")
        layers, channels = max(config["llama_layers"]) + 1, config["caption_channels"][1]
        model, tokenizer = find_llama(folder, llama, layers, channels)
        elsewhere |= {FOLDER: model, TOKENIZER_FOLDER: tokenizer}
    # The states are the same as those of LlamaForCausalLM, without a projection to 128256 logits for each token.
    index |= {FOLDER: ["transformers", "LlamaModel"]}
    index |= {TOKENIZER_FOLDER: ["transformers", "PreTrainedTokenizerFast"]}
    scheduler = index.get("scheduler", ["", ""])[1]
    stored = read_json(folder / "scheduler" / "scheduler_config.json")
    variant = named or detect(folder, scheduler, stored)
    makers: dict[str, Callable[[], Any]] = {}
    if variant is not None:
        # Early copies of the repositories have another scheduler than the model is to be run with. One of its class,
        # whatever its numbers, is somebody's choice, unless a variant is named.
        as_stored = variant.is_scheduled_by(scheduler, stored) if named else scheduler == variant.scheduler
        makers = {} if as_stored else {"scheduler": partial(_scheduler, variant)}
        if not hasattr(diffusers, index["scheduler"][1]):
            index["scheduler"] = ["diffusers", variant.scheduler]
    return Source(folder, index, elsewhere, files, makers, _TITLES), variant


def _scheduler(variant: Variant) -> Any:
    import diffusers

    return getattr(diffusers, variant.scheduler)(**variant.scheduler_config())


def _adapted(component: Component) -> Component:
    return replace(component, cls=reading_from_ram(component.cls)) if component.name == "transformer" else component
