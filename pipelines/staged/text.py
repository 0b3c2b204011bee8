"""TextStage: encoding prompts with the text encoders, or from the cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ...memory.host.flags import host_flags
from ..encoding.conditioning import Conditioning
from ..encoding.embedding_cache import cache_key
from ..encoding.listening import Listener
from ..lora.use import named, refuse_scales
from ..options import check_values, plain_defaults, plain_number
from ..planning.encoding_forecasts import Encoding
from ..planning.forecasts import shapes_in
from ..sampling.latents import check_finite
from .family import Modules
from .pictures import Given, as_pictures
from .prompts import Negative, Prompt, as_list, check_text, match_negatives
from .runner import StageRunner

_WEIGHTS = re.compile(r"\([^()]*[^\W\d_][^()]*:\s*[0-2]?(?:\.\d+)?\)")  # as CLIP Text Encode takes them: (red:1.3)


class TextStage(StageRunner):
    """The stage of a pipeline that its text encoders run."""

    def __init__(self, folder: Path, **shared: Any) -> None:
        super().__init__(folder, **shared)
        self._listener = Listener()
        self._text_files: Any = None  # the digests of the encoders' files, once asked for

    @plain_defaults()
    def encode(
        self, prompt: Prompt, negative_prompt: Negative = None, images: Given = None, **options: Any
    ) -> Conditioning:
        """Return the conditioning of a prompt pair, on the CPU; from the cache if it was ever made before.

        Without a negative prompt it is that of the stock pipeline, which tells none from an empty one in some families.
        `images` [B,H,W,3] in 0..1, or a list of them, are those that an edit model works from; they stay with the
        conditioning. `options` are further arguments of the pipeline's own `encode_prompt`. No encoder stays on the
        device.
        """
        options = {name: plain_number(value) for name, value in options.items()}
        check_text(prompt, negative_prompt)
        prompt = prompt if isinstance(prompt, str) else list(prompt)  # stock tells them from tuples
        check_values(options)
        self._check_options(options)
        refuse_scales(self._loras, options)
        pictures = as_pictures(images, "images")
        return replace(
            self._encoded(prompt, negative_prompt, self._pictures_read(pictures) | options), pictures=pictures
        )

    def _encoded(
        self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any], keep: bool = False
    ) -> Conditioning:
        negative_prompt = self._negative(prompt, negative_prompt)
        key = self._encoding_key(prompt, negative_prompt, options)
        if key and (found := self.cache.get(key)):
            return found

        encoding = self._encoding(prompt, negative_prompt, options)
        strategy = host_flags().strategy("auto", "text_encoder")
        self._listener.start()

        def run(device: torch.device, modules: Modules) -> Conditioning:
            return self._made(prompt, negative_prompt, self._encode(prompt, negative_prompt, options, device, modules))

        with self._wearing(self.encoders):
            expected = self._expected("encode", self.encoders, encoding.forecast, strategy)
            # Prompts that take the same are the same work.
            forecast = expected.get("forecast")
            work = "encode", cache_key(forecast.to_dict()) if forecast else len(as_list(prompt))
            conditioning = self._run_stage("encode", self.encoders, run, strategy, work=work, **expected, keep=keep)
        return self._kept(prompt, negative_prompt, options, conditioning)

    def _made(
        self, prompt: Prompt, negative_prompt: Negative, tensors: Mapping[str, torch.Tensor | list[torch.Tensor]]
    ) -> Conditioning:
        """Return the conditioning that these tensors are, with what was noted while they were made."""
        words = {"prompt": prompt, "negative_prompt": negative_prompt, "pipeline": self.name, "model": self.title}
        info = {name: "" if value is None else str(value) for name, value in words.items()}
        notes = self._encoding_notes(as_list(prompt), as_list(negative_prompt))
        return Conditioning.of(tensors, info | {"notes": "\n".join(notes)})

    def _kept(
        self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any], conditioning: Conditioning
    ) -> Conditioning:
        """Return the conditioning, checked, and kept in the cache."""
        for tensors in conditioning.tensors.values():  # before it is kept for good
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                check_finite(tensor, "the text encoders made")
        key = self._encoding_key(prompt, negative_prompt, options)  # raises where a file was changed meanwhile
        if key:
            self.cache.put(key, conditioning)
        return conditioning

    def _encoding(self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any]) -> Encoding:
        def encode(device: torch.device, modules: Modules) -> Mapping[str, torch.Tensor | list[torch.Tensor]]:
            return self._encode(prompt, negative_prompt, options, device, modules)

        texts = {"prompt": prompt, "negative_prompt": negative_prompt, "options": shapes_in(options)}
        return Encoding(self._forecaster, self.encoders, texts, encode)

    def _negative(self, prompt: Prompt, negative_prompt: Negative) -> Negative:
        return match_negatives(prompt, self.default_negative if negative_prompt is None else negative_prompt)

    def _encoding_key(self, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any]) -> str | None:
        """Return the key of an embedding in the cache.

        Raises ValueError if a file changed since the pipeline was opened.
        """
        facts = self._encoding_facts(prompt, negative_prompt, options)
        if self._text_files not in (None, facts["files"]):
            raise ValueError(f"files in {self.folder} were changed. Open the pipeline again.")
        self._text_files = facts["files"]
        if self.weights not in ("auto", "exact12"):
            facts = facts | {"weights": self.weights}
        if loras := named(self._loras, self.encoders):
            facts = facts | {"loras": loras}
        return cache_key(facts | {"notes": 2})  # which are kept with the embedding

    def _encoding_notes(self, prompts: Sequence[str], negatives: Sequence[str]) -> list[str]:
        """Return what a user should know of how the prompts were read; kept in the conditioning."""
        notes = self._listener.notes(self.title, prompts, negatives, self.knows)
        if not self.takes_negative and any(text.strip() for text in negatives):
            notes.append(f"The negative prompt has no effect: {self.title} takes none.")
        if weights := _WEIGHTS.search("\n".join([*prompts, *negatives])):
            notes.append(f"Prompt weights are read as plain text here, as in {weights[0]}. Remove them.")
        return notes
