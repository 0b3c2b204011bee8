"""The cache key of a native encoder's embeddings: everything that decides them, or None if anything is uncertain.

Weights count by their content, wherever they were loaded from, and code by where it is from: only the host's own and
torch's, which their versions stand for. The rest is plain data.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import nn

from ...pipelines.encoding.embedding_cache import cache_key
from .digest import NoDigestError, base_tensors, digest, path, plain, tensor_digest

_THREADS = 4
_OWN_CODE = ("comfy.", "torch.nn.")
_FLAGS = (
    "fast", "deterministic", "force_upcast_attention", "dont_upcast_attention", "use_split_cross_attention",
    "use_quad_cross_attention", "use_pytorch_cross_attention", "use_sage_attention", "use_flash_attention",
    "disable_xformers",
)  # fmt: skip
# What a patcher may carry that changes how its model runs, in code. None of it has a digest.
_CODE_HOLDERS = (
    "weight_wrapper_patches", "hook_patches", "forced_hooks", "current_hooks", "injections", "additional_models",
    "attachments", "callbacks", "wrappers",
)  # fmt: skip
# Of modules: where and how their weights lie, and what each encoding sets anew.
_PASSING = frozenset(
    {
        "device", "execution_device", "layer", "layer_idx", "return_projected_pooled", "can_assign_sd", "seed_key",
        "model_loaded_weight_memory", "lowvram_patch_counter", "model_lowvram", "model_offload_buffer_memory",
        "current_weight_patches_uuid", "comfy_cast_weights", "prev_comfy_cast_weights", "comfy_force_cast_weights",
        "comfy_patched_weights", "weight_function", "bias_function", "_v", "_v_block", "_v_signature", "_pins",
        "_pin_state", "dynamic_vbars", "dynamic_pins", "dynamic_patchers",
    }
)  # fmt: skip
_OF_ANY_MODULE = frozenset(vars(nn.Module()))

_weights: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
_patches: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def encoding_keys(clip: Any, tokens: Iterable[Any]) -> list[str | None]:
    """Return the key of each prompt's tokens; None where no key is safe."""
    try:
        encoder = _encoder_facts(clip)
    except NoDigestError:
        return [None for _ in tokens]
    return [_key(encoder, each) for each in tokens]


def _key(encoder: list[Any], tokens: Any) -> str | None:
    try:
        return cache_key({"encoder": encoder, "tokens": plain(tokens)})
    except NoDigestError:
        return None


def _encoder_facts(clip: Any) -> list[Any]:
    from comfy.cli_args import args
    from comfyui_version import __version__

    patcher, model = clip.patcher, clip.cond_stage_model
    for thing in (clip, patcher):
        _check_code(thing)
    if any(_holds(getattr(patcher, name, None)) for name in _CODE_HOLDERS):
        raise NoDigestError("hooks or callbacks")
    model.reset_clip_options()  # as each encoding does first
    held = {"cond_stage_model", "patcher", "tokenizer"}  # of which the last shows in the tokens
    set_aside = patcher.object_patches_backup  # while another's patches are in place
    attributes = {name: value for name, value in set_aside.items() if value is not None} | patcher.object_patches
    runs = [attributes, patcher.model_options, patcher.model_dtype(), patcher.load_device.type]
    return [
        ["native", 1, __version__, torch.__version__],
        plain([getattr(args, name, None) for name in _FLAGS]),
        plain({name: value for name, value in vars(clip).items() if name not in held}),
        plain(runs),
        [
            _module_facts(name, module, {*set_aside, *patcher.object_patches})
            for name, module in model.named_modules(remove_duplicate=False)
        ],
        _patches_digest(patcher),
        weights_digest(patcher),
    ]


def weights_digest(patcher: Any) -> str:
    """Return the digest of all weights as they were before any patch. Computed once for each model."""
    if patcher.model not in _weights:
        tensors = base_tensors(patcher)
        with ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1)) as pool:
            found = dict(zip(tensors, pool.map(tensor_digest, tensors.values()), strict=True))
        _weights[patcher.model] = digest(found)
    return _weights[patcher.model]


def _patches_digest(patcher: Any) -> str:
    """Return the digest of LoRAs and other patches, with their strengths. The host gives a changed set another UUID."""
    version = patcher.patches_uuid
    if patcher not in _patches or _patches[patcher][0] != version:
        _patches[patcher] = (version, digest(patcher.patches))
    return _patches[patcher][1]


def _module_facts(name: str, module: nn.Module, patched: Collection[str]) -> list[Any]:
    """Return a module's class and plain attributes without those that patches set. Others follow from these."""
    _check_code(module)
    if module._forward_hooks or module._forward_pre_hooks:
        raise NoDigestError("hooks")
    facts = {}
    for attribute, value in vars(module).items():
        # None is what the host leaves where there was nothing.
        if value is None or attribute in _PASSING or attribute in _OF_ANY_MODULE:
            continue
        if isinstance(value, torch.Tensor) or f"{name}.{attribute}".lstrip(".") in patched:
            continue
        try:
            facts[attribute] = plain(value)
        except NoDigestError:
            continue
    return [name, path(type(module)), module.training, sorted(facts.items())]


def _check_code(thing: Any) -> None:
    """Raise NoDigestError for code outside the host and torch: no version says what it does."""
    kind = type(thing)
    methods = (getattr(kind, name, None) for name in ("forward", "encode_token_weights", "encode_from_tokens"))
    for code in (kind, *(method for method in methods if method is not None)):
        if not f"{code.__module__}.".startswith(_OWN_CODE):
            raise NoDigestError(path(code))
    if any(callable(value) and callable(getattr(kind, name, None)) for name, value in vars(thing).items()):
        raise NoDigestError("a method that was replaced")


def _holds(value: Any) -> bool:
    """Return whether nested dicts and lists hold anything."""
    if isinstance(value, dict | list | tuple | set):
        return any(map(_holds, value.values() if isinstance(value, dict) else value))
    return value is not None
