"""Encode prompts with the text encoders, or take them from the cache."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ...memory.host.flags import host_flags
from ..encoding.conditioning import Conditioning
from ..encoding.embedding_cache import cache_key
from ..encoding.prompt_weights import PROMPT_WEIGHTS, WEIGHTED, WeightedPrompt, Weighting, weights_note
from ..encoding.prompts import Negative, Prompt, Text, as_list, match_negatives
from ..lora.use import named, refuse_scales
from ..planning.encoding_forecasts import Encoding
from ..planning.forecasts import shapes_in
from ..runner import Runner, Stage
from ..sampling.latents import check_finite

if TYPE_CHECKING:
    from ..models.model import Embeddings, Model, Modules

_PROMPT = re.compile(r"(negative_)?prompt_\d")  # options that are prompts too
_UNREAD = re.compile(r"(?P<embedding>(?<!\S)embedding:\S+)|(?P<wildcard>\{[^{}|]*\|[^{}]*\})")
_UNREAD_WHY = {
    "embedding": "Pipelines load no embeddings. Remove it.",
    "wildcard": "Only ComfyUI's page chooses among words. Write one of them.",
}
_WEIGHTS = re.compile(r"\([^()]*[^\W\d_][^()]*:\s*[0-2]?(?:\.\d+)?\)")  # as CLIP Text Encode takes them: (red:1.3)


def check_text_options(model: Model, runner: Runner, options: Mapping[str, Any]) -> None:
    """Raise TypeError or ValueError for options that encoding does not take."""
    own = {name: value for name, value in options.items() if name != PROMPT_WEIGHTS}
    model.check_options(own)
    refuse_scales(runner.loras, own)


def text_of(model: Model, prompt: Prompt, negative_prompt: Negative, options: Mapping[str, Any]) -> Text:
    """Return a prompt pair to encode, with the negative prompt of the stock pipeline where none is given.

    Brackets are read as weights where all encoders of the model have a rule for these, unless `prompt_weights` is
    False. Raises ValueError, in one line, for weights that are none.
    """
    own = dict(options)
    told, weighted = own.pop(PROMPT_WEIGHTS, True), list[WeightedPrompt]()

    def plain(given: Prompt) -> Prompt:
        read = [WeightedPrompt.read(prompt) for prompt in as_list(given)]
        weighted.extend(read)
        return read[0].text if isinstance(given, str) else [each.text for each in read]

    texts = [given for name, given in own.items() if _PROMPT.fullmatch(name) and isinstance(given, str | list | tuple)]
    written = [*as_list(prompt), *as_list(negative_prompt), *(each for given in texts for each in as_list(given))]
    if told and any("(" in text or "\\)" in text for text in written if isinstance(text, str)) and has_weights(model):
        prompt, negative_prompt = plain(prompt), negative_prompt if negative_prompt is None else plain(negative_prompt)
        own = {name: plain(given) if given and _PROMPT.fullmatch(name) else given for name, given in own.items()}
    negative_prompt = model.default_negative if negative_prompt is None else negative_prompt
    weights = tuple(weighted) if any(each.spans for each in weighted) else ()
    if (
        weights
        and own.get("clip_skip")
        and "final_layer_norm(" in inspect.getsource(model.pipeline_class.encode_prompt)
    ):
        raise ValueError(
            f"clip_skip and prompt weights: {model.title} norms the states after they are weighted. Leave one out."
        )
    return Text(prompt, match_negatives(prompt, negative_prompt), own, weights)


def has_weights(model: Model) -> bool:
    """Return whether all its encoders have a rule for weights."""
    return all(type(unit.module).__name__ in WEIGHTED for unit in model.encoders)


def embeddings_of(model: Model, text: Text, device: torch.device, modules: Modules) -> Embeddings:
    """Return the embeddings that the model makes of a prompt pair with these encoders, weights included."""
    if not text.weighted:
        return model.encode(text, device, modules)
    weighting = Weighting(text.weighted, clears_padding="Cosmos" in model.name)
    model.truncation.weighting = weighting
    try:
        with weighting.within(modules):
            return model.encode(text, device, modules)
    finally:
        model.truncation.weighting = None


def encode_text(model: Model, runner: Runner, text: Text, keep: bool = False) -> Conditioning:
    """Return the conditioning of a prompt pair, from the cache if it was ever made before."""
    key = encoding_key(model, runner, text)
    if key and (found := model.claims.cache.get(key)):
        return found

    encoding = encoding_of(model, text)
    strategy = host_flags().strategy("auto", "text_encoder")
    model.truncation.start()

    def run(device: torch.device, modules: Modules) -> Conditioning:
        return conditioning_of(model, text, embeddings_of(model, text, device, modules))

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
    notes = _notes(model, text, as_list(text.prompt), as_list(text.negative_prompt))
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
        return embeddings_of(model, text, device, modules)

    texts: dict[str, Any] = {
        "prompt": text.prompt,
        "negative_prompt": text.negative_prompt,
        "options": shapes_in(text.options),
    }
    texts |= {PROMPT_WEIGHTS: True} if text.weighted else {}
    return Encoding(model.forecaster, model.encoders, texts, encode)


def encoding_key(model: Model, runner: Runner, text: Text) -> str | None:
    """Return the key of an embedding in the cache.

    Raises ValueError if a file changed since the pipeline was opened.
    """
    facts = model.encoding_facts(text)
    model.claims.check_unchanged(facts["files"], model.folder)
    if model.claims.weights not in ("auto", "exact12"):
        facts = facts | {"weights": model.claims.weights}
    if text.weighted:
        facts = facts | {PROMPT_WEIGHTS: [[each.text, *each.spans] for each in text.weighted]}
    if loras := named(runner.loras, model.encoders):
        facts = facts | {"loras": loras}
    return cache_key(facts | {"notes": 2})  # which are kept with the embedding


def _notes(model: Model, text: Text, prompts: Sequence[str], negatives: Sequence[str]) -> list[str]:
    """Return what a user should know of how the prompts were read; kept in the conditioning."""
    notes = model.truncation.notes(model.title, prompts, negatives, model.knows)
    if not model.takes_negative and any(each.strip() for each in negatives):
        notes.append(f"The negative prompt has no effect: {model.title} takes none.")
    words = "\n".join([*prompts, *negatives])
    if text.weighted:
        notes.append(weights_note(text.weighted))
    elif (weights := _WEIGHTS.search(words)) and not has_weights(model):
        notes.append(f"Prompt weights are read as plain text here, as in {weights[0]}. Remove them.")
    if found := _UNREAD.search(words):
        notes.append(f"This is read as plain text: {found[0]}. {_UNREAD_WHY[found.lastgroup or '']}")
    return notes
