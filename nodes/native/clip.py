"""Encode prompts with ComfyUI's own CLIP, which then leaves VRAM."""

from __future__ import annotations

import gc
import time
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...memory.errors import release_frames
from ...memory.host import management as host
from ...memory.sizes import format_bytes
from ...pipelines.sampling.latents import check_finite

Native = list[list[Any]]  # the host's CONDITIONING: [[embeddings, {name: whatever}], ...]

_KEPT = 16  # prompts that are kept for each CLIP

# The host never changes a CLIP: a node with other LoRAs or another clip skip makes a clone. So the object is the key.
_known: weakref.WeakKeyDictionary[Any, OrderedDict[str, Native]] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class Encoded:
    """Native conditionings, in the order of their prompts, and a summary for the node."""

    conditionings: list[Native]
    summary: str


def is_clip(thing: Any) -> bool:
    """Return whether it is a text encoder as the host's loaders make them."""
    return all(hasattr(thing, name) for name in ("tokenize", "encode_from_tokens_scheduled", "patcher"))


def encode_prompts(clip: Any, prompts: Sequence[str]) -> Encoded:
    """Encode prompts as the host does. Prompts that this CLIP has encoded before do not touch the device.

    An encoder that ran is off the device afterwards, whatever happened.
    """
    known = _known.setdefault(clip, OrderedDict())
    missing = [prompt for prompt in dict.fromkeys(prompts) if prompt not in known]
    summary = _encode(clip, missing, known) if missing else "from the cache, no encoder loaded"
    found = [_copied(known[prompt]) for prompt in prompts]
    for prompt in prompts:
        known.move_to_end(prompt)
    on_cpu = all(embeddings.device.type == "cpu" for each in found for embeddings, _ in each)
    while len(known) > (_KEPT if on_cpu else 0):  # with --gpu-only they would take VRAM that nobody counts
        known.popitem(last=False)
    return Encoded(found, summary)


def _encode(clip: Any, prompts: Sequence[str], known: dict[str, Native]) -> str:
    """Encode prompts into `known`. Return what it took."""
    started, held_bytes = time.monotonic(), 0
    try:
        for prompt in prompts:
            host.throw_if_interrupted()
            conditioning = clip.encode_from_tokens_scheduled(clip.tokenize(prompt))
            for embeddings, _ in conditioning:
                check_finite(embeddings, "the text encoder made")
            known[prompt] = _copied(conditioning)
        held_bytes = clip.patcher.loaded_size()
    except BaseException as error:
        release_frames(error)  # they hold its activations
        gc.collect()
        raise
    finally:
        host.evict([clip.patcher])
    on_cpu = clip.patcher.load_device.type == "cpu"
    where = "on the CPU" if on_cpu else f"{format_bytes(held_bytes)} in VRAM, now gone"
    return f"{type(clip.cond_stage_model).__name__} {where}; {time.monotonic() - started:.1f} s"


def _copied(conditioning: Native) -> Native:
    """Return a conditioning whose lists and dictionaries are new: nodes that follow may change theirs."""
    return [[embeddings, dict(beside)] for embeddings, beside in conditioning]
