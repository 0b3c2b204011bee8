"""Encode prompts with the text encoders, or take them from the cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...memory.host.flags import host_flags
from ..encoding.conditioning import Conditioning
from ..encoding.embedding_cache import cache_key
from ..encoding.prompts import Negative, Prompt, Text, as_list, match_negatives
from ..lora.use import named
from ..planning.encoding_forecasts import Encoding
from ..planning.forecasts import shapes_in
from ..runner import Runner, Stage
from ..sampling.latents import check_finite

if TYPE_CHECKING:
    from ..models.model import Embeddings, Model, Modules

_WEIGHTS = re.compile(r"\([^()]*[^\W\d_][^()]*:\s*[0-2]?(?:\.\d+)?\)")  # as CLIP Text Encode takes them: (red:1.3)


def text_of(model: Model, prompt: Prompt, negative_prompt: Negative, options: dict[str, Any]) -> Text:
    """Return a prompt pair to encode, with the negative prompt of the stock pipeline where none is given."""
    negative_prompt = model.default_negative if negative_prompt is None else negative_prompt
    return Text(prompt, match_negatives(prompt, negative_prompt), options)


def encode_text(model: Model, runner: Runner, text: Text, keep: bool = False) -> Conditioning:
    """Return the conditioning of a prompt pair, from the cache if it was ever made before."""
    key = encoding_key(model, runner, text)
    if key and (found := model.claims.cache.get(key)):
        return found

    encoding = encoding_of(model, text)
    strategy = host_flags().strategy("auto", "text_encoder")
    model.truncation.start()

    def run(device: torch.device, modules: Modules) -> Conditioning:
        return conditioning_of(model, text, model.encode(text, device, modules))

    with runner.adapters(model.encoders):
        expected = runner.expected("encode", model.encoders, encoding.forecast, strategy)
        # Prompts that take the same are the same work.
        forecast = expected.get("forecast")
        work = "encode", cache_key(forecast.to_dict()) if forecast else len(as_list(text.prompt))
        stage = Stage("encode", model.encoders, run, strategy, work, **expected, keep=keep)
        conditioning = runner.run(stage)
    return kept(model, runner, text, conditioning)


def conditioning_of(model: Model, text: Text, tensors: Mapping[str, torch.Tensor | list[torch.Tensor]]) -> Conditioning:
    """Return the conditioning that these tensors are, with what was noted while they were made."""
    words = {"prompt": text.prompt, "negative_prompt": text.negative_prompt, "pipeline": model.name}
    info = {name: "" if value is None else str(value) for name, value in (words | {"model": model.title}).items()}
    notes = _notes(model, as_list(text.prompt), as_list(text.negative_prompt))
    return Conditioning.of(tensors, info | {"notes": "\n".join(notes)})


def kept(model: Model, runner: Runner, text: Text, conditioning: Conditioning) -> Conditioning:
    """Return the conditioning, checked, and kept in the cache."""
    for tensors in conditioning.tensors.values():  # before it is kept for good
        for tensor in tensors if isinstance(tensors, list) else [tensors]:
            check_finite(tensor, "the text encoders made")
    key = encoding_key(model, runner, text)  # raises where a file was changed meanwhile
    if key:
        model.claims.cache.put(key, conditioning)
    return conditioning


def encoding_of(model: Model, text: Text) -> Encoding:
    """Return the stage that encodes a prompt pair, to forecast."""

    def encode(device: torch.device, modules: Modules) -> Embeddings:
        return model.encode(text, device, modules)

    texts = {"prompt": text.prompt, "negative_prompt": text.negative_prompt, "options": shapes_in(text.options)}
    return Encoding(model.forecaster, model.encoders, texts, encode)


def encoding_key(model: Model, runner: Runner, text: Text) -> str | None:
    """Return the key of an embedding in the cache.

    Raises ValueError if a file changed since the pipeline was opened.
    """
    facts = model.encoding_facts(text)
    model.claims.check_unchanged(facts["files"], model.folder)
    if model.claims.weights not in ("auto", "exact12"):
        facts = facts | {"weights": model.claims.weights}
    if loras := named(runner.loras, model.encoders):
        facts = facts | {"loras": loras}
    return cache_key(facts | {"notes": 2})  # which are kept with the embedding


def _notes(model: Model, prompts: Sequence[str], negatives: Sequence[str]) -> list[str]:
    """Return what a user should know of how the prompts were read; kept in the conditioning."""
    notes = model.truncation.notes(model.title, prompts, negatives, model.knows)
    if not model.takes_negative and any(text.strip() for text in negatives):
        notes.append(f"The negative prompt has no effect: {model.title} takes none.")
    if weights := _WEIGHTS.search("\n".join([*prompts, *negatives])):
        notes.append(f"Prompt weights are read as plain text here, as in {weights[0]}. Remove them.")
    return notes
