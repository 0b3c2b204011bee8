"""Encode prompts with ComfyUI's own CLIP: from the embedding cache, or by the encoder, which then leaves VRAM."""

from __future__ import annotations

import gc
import json
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import folder_paths
import torch

from ...memory.errors import release_frames
from ...memory.host import management as host
from ...memory.sizes import format_bytes
from ...pipelines.encoding.conditioning import Conditioning
from ...pipelines.encoding.embedding_cache import EmbeddingCache, shared_cache
from ...pipelines.sampling.latents import check_finite
from .key import encoding_keys

log = logging.getLogger("ballast")

Native = list[list[Any]]  # the host's CONDITIONING: [[embeddings, {name: whatever}], ...]
_LAYOUT = "native"  # in the info of a stored one: names of the host's dictionary, with where each value is


@dataclass(frozen=True)
class Encoded:
    """Native conditionings, in the order of their prompts, and a summary for the node."""

    conditionings: list[Native]
    summary: str


def native_cache() -> EmbeddingCache:
    """Return the embedding cache that pipelines in this host use too."""
    return shared_cache(Path(folder_paths.get_user_directory()) / "ballast" / "embeddings")


def is_clip(thing: Any) -> bool:
    """Return whether it is a text encoder as the host's loaders make them."""
    return all(hasattr(thing, name) for name in ("tokenize", "encode_from_tokens_scheduled", "patcher"))


def encode_prompts(clip: Any, prompts: Sequence[str], cache: EmbeddingCache) -> Encoded:
    """Encode prompts as the host does. Prompts in the cache do not touch the device.

    An encoder that ran is off the device afterwards, whatever happened.
    """
    tokens = [clip.tokenize(prompt) for prompt in prompts]
    keys = encoding_keys(clip, tokens)
    found: list[Native | None] = [_known(cache, key) for key in keys]
    missing = [i for i, conditioning in enumerate(found) if conditioning is None]
    if not missing:
        return Encoded([each for each in found if each is not None], "from the cache, no encoder loaded")
    started = time.monotonic()
    held_bytes = 0
    try:
        for i in missing:
            host.throw_if_interrupted()
            found[i] = _encode(clip, tokens[i], prompts[i], keys[i], cache)
        held_bytes = clip.patcher.loaded_size()
    except BaseException as error:
        release_frames(error)  # they hold its activations
        gc.collect()
        raise
    finally:
        host.evict([clip.patcher])
    took = f"{time.monotonic() - started:.1f} s"
    where = "on the CPU" if clip.patcher.load_device.type == "cpu" else f"{format_bytes(held_bytes)} in VRAM, now gone"
    summary = f"{type(clip.cond_stage_model).__name__} {where}; {took}" + ("" if all(keys) else "; not cached")
    return Encoded([each for each in found if each is not None], summary)


def _encode(clip: Any, tokens: Any, prompt: str, key: str | None, cache: EmbeddingCache) -> Native:
    conditioning: Native = clip.encode_from_tokens_scheduled(tokens)
    for embeddings, _ in conditioning:
        check_finite(embeddings, "the text encoder made")
    packed = pack(conditioning, prompt)
    if packed is None:
        return conditioning
    if key:
        cache.put(key, packed)
    return unpack(packed)


def pack(conditioning: Native, prompt: str = "") -> Conditioning | None:
    """Convert a native conditioning for the cache; None if some of it cannot be stored exactly."""
    if len(conditioning) != 1:
        return None
    embeddings, extras = conditioning[0]
    tensors: dict[str, Any] = {"embeddings": embeddings}
    layout: list[tuple[str, str | None, Any]] = []
    for i, (name, value) in enumerate(extras.items()):
        if type(name) is not str:
            return None
        if value is None or type(value) in (bool, int, float, str):
            layout.append((name, None, value))
        elif _is_stored(value) or (type(value) is list and value and all(map(_is_stored, value))):
            tensors[f"extra{i}"] = value
            layout.append((name, f"extra{i}", None))
        else:
            return None
    return Conditioning.of(tensors, {"prompt": prompt, _LAYOUT: json.dumps(layout)}) if _is_stored(embeddings) else None


def _known(cache: EmbeddingCache, key: str | None) -> Native | None:
    """Read a conditioning from the cache; None for a file that this pack did not write."""
    kept = cache.get(key) if key else None
    try:
        return unpack(kept) if kept else None
    except (KeyError, ValueError, TypeError):
        log.warning("Ballast: an entry of the embedding cache is not what it should be; encoding anew")
        return None


def unpack(packed: Conditioning) -> Native:
    """Convert a conditioning of the cache to the host's, on the device where it keeps those."""
    mm = host.model_management()
    on = mm.intermediate_device() if mm else torch.device("cpu")
    tensors = packed.to(on)
    extras = {name: tensors[slot] if slot else value for name, slot, value in json.loads(packed.info[_LAYOUT])}
    return [[tensors["embeddings"], extras]]


def _is_stored(value: Any) -> bool:
    """Return whether a file can store the value exactly: any plain tensor."""
    return isinstance(value, torch.Tensor) and value.layout == torch.strided and not value.is_meta
