"""HiDream-I1: the generic pipeline, with Llama from its own folder, in three variants, at the requested size.

Its four text encoders take turns. Llama's 32 hidden states, 32 MiB for a prompt, are read at the start of a step
only, so they stay in RAM, and go to the device when they are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import nn

from ....memory.files import read_json
from ....memory.weights.interpose import interpose
from ...encoding.conditioning import Conditioning
from ...files.components import Component
from ...files.single.published import comes_with_pack
from ...generic import GenericPipeline
from ...sampling.picture_sizes import PictureSizes
from ...staged import Negative, Prompt
from .llama import FOLDER, TOKENIZER_FOLDER, find_llama
from .routing import any_routing
from .states import HiddenStates, at_their_places, reading_from_ram
from .variants import VARIANTS, Variant, detect

_SIDE, _VAE_SCALE = 1024, 8  # pixels


class HiDreamPipeline(GenericPipeline):
    """`HiDreamImagePipeline`, staged.

    `llama` is the folder of Llama 3.1 8B Instruct, a checkpoint of `LlamaForCausalLM` or of `LlamaModel`; by default
    `text_encoder_4` in the pipeline's own. `variant` is full, dev or fast; auto tells it by the folder.
    """

    stand_ins: ClassVar = {("MOEFeedForwardSwiGLU", "moe_infer"): any_routing}
    forecast_caveat: ClassVar = "The transformer's peak is an upper bound, for any routing among its experts."
    titles: ClassVar = {
        "text_encoder": "CLIP-L",
        "text_encoder_2": "CLIP-G",
        "text_encoder_3": "T5-XXL",
        "text_encoder_4": "Llama 3.1 8B",
        "transformer": "HiDream-I1",
        "vae": "VAE",
    }
    cond_dims: ClassVar = {"prompt_embeds_llama3": 1, "negative_prompt_embeds_llama3": 1}
    batch_dims: ClassVar = {"encoder_hidden_states_llama3": 1}  # [layers, batch, tokens, channels]

    def __init__(
        self,
        folder: Path,
        dtype: str | torch.dtype = "auto",
        *,
        llama: str | Path | None = None,
        variant: str = "auto",
        **shared: Any,
    ) -> None:
        if variant != "auto" and variant not in VARIANTS:
            raise ValueError(f"unknown variant {variant!r} of HiDream-I1. Use auto, {', '.join(VARIANTS)}.")
        self._llama = llama
        self._chosen = VARIANTS.get(variant)
        super().__init__(folder, dtype, **shared)
        # Those of Llama's layers whose states the transformer reads.
        self._layers = sorted(set(self.components["transformer"].config["llama_layers"]))
        if self.variant is not None:
            self.default_steps, self.default_guidance = self.variant.steps, self.variant.guidance

    def _prove(self, texts: Any = None) -> None:
        """Its stock call draws other sizes than it is asked for; the stages are compared with it in the tests."""

    def _batch_differs(self, texts: Any) -> str:
        """Nothing, as the tests show; on echoes of its encoders, which are large, that would take long."""
        return ""

    def _contents(self, folder: Path) -> tuple[dict[str, Any], dict[str, Path]]:
        import diffusers

        index, elsewhere = super()._contents(folder)
        if not comes_with_pack(index):  # else Llama is one of the files
            config = read_json(folder / "transformer" / "config.json")
            layers, channels = max(config["llama_layers"]) + 1, config["caption_channels"][1]
            model, tokenizer = find_llama(folder, self._llama, layers, channels)
            elsewhere |= {FOLDER: model, TOKENIZER_FOLDER: tokenizer}
        # The states are the same as those of LlamaForCausalLM, without a projection to 128256 logits for each token.
        index |= {FOLDER: ["transformers", "LlamaModel"]}
        index |= {TOKENIZER_FOLDER: ["transformers", "PreTrainedTokenizerFast"]}
        self._choose(folder, index.get("scheduler", ["", ""])[1])
        if self.variant is not None and not hasattr(diffusers, index["scheduler"][1]):
            index["scheduler"] = ["diffusers", self.variant.scheduler]
        return index, elsewhere

    def _choose(self, folder: Path, scheduler: str) -> None:
        """Choose the variant, and whether to use the scheduler in the folder."""
        stored = read_json(folder / "scheduler" / "scheduler_config.json")
        self.variant: Variant | None = self._chosen or detect(folder, scheduler, stored)
        # Early copies of the repositories have another scheduler than the model is to be run with. One of its class,
        # whatever its numbers, is somebody's choice, unless a variant is named.
        self._is_as_stored = self.variant is None or (
            self.variant.is_scheduled_by(scheduler, stored) if self._chosen else scheduler == self.variant.scheduler
        )

    def _adapted(self, component: Component) -> Component:
        return replace(component, cls=reading_from_ram(component.cls)) if component.name == "transformer" else component

    def _tool(self, name: str) -> Any:
        if name != "scheduler" or self.variant is None or self._is_as_stored:
            return super()._tool(name)
        import diffusers

        return getattr(diffusers, self.variant.scheduler)(**self.variant.scheduler_config())

    def facts(self) -> dict[str, Any]:
        return super().facts() | {"scheduler": type(self._tool("scheduler")).__name__}

    # Encode

    def _encoding_facts(self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any]) -> dict[str, Any]:
        return super()._encoding_facts(prompt, negative_prompt, options) | {"llama_layers": self._layers}

    def _encode(
        self,
        prompt: Prompt,
        negative_prompt: Negative,
        options: dict[str, Any],
        device: torch.device,
        modules: Mapping[str, nn.Module],
    ) -> dict[str, torch.Tensor | list[torch.Tensor]]:
        undo = interpose(modules[FOLDER], HiddenStates(self._layers))
        try:
            return super()._encode(prompt, negative_prompt, options, device, modules)
        finally:
            undo()

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
        arguments = super()._sample_arguments(width, height, steps, guidance, frames, options)
        width, height = arguments.get("width", _SIDE), arguments.get("height", _SIDE)
        self.sizes.check(self.title, width, height)
        # Both: a side that is left out the stock pipeline takes from the area, which is changed below.
        return arguments | {"width": width, "height": height}

    @cached_property
    def sizes(self) -> PictureSizes:
        across, down = self.components["transformer"].config["max_resolution"]
        return replace(super().sizes, area=across * down * _VAE_SCALE**2)

    def _prepare(self, pipe: Any, arguments: Mapping[str, Any]) -> None:
        # The stock pipeline rescales every size to the area of default_sample_size squared: make that the area asked.
        width, height = arguments["width"], arguments["height"]
        # A hair more, since it rounds the result down.
        pipe.default_sample_size = (width * height) ** 0.5 / pipe.vae_scale_factor * (1 + 1e-9)

    def _embeddings(self, cond: Conditioning, device: torch.device, dtype: torch.dtype | None) -> dict[str, Any]:
        states = {name: value for name, value in cond.tensors.items() if name.endswith("llama3")}
        others = {name: value for name, value in cond.tensors.items() if name not in states}
        on_host = Conditioning(states).to(torch.device("cpu"), dtype)
        placed = {name: at_their_places(value, self._layers) for name, value in on_host.items()}  # type: ignore[arg-type]
        return Conditioning(others).to(device, dtype) | placed
