"""LoRAs on weights that lie in RAM, with the numbers of those that stay in VRAM.

ComfyUI merges LoRAs into the weights that it keeps in VRAM, in one type, and computes them at each use for the others,
in another: the picture would depend on how much fits. Here a clone's patches are given to the host in a form that
computes the second as the first. The model itself and the host's functions stay as they are.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from .at_use import unexpected_bytes

# Layers of the host that compute alike with and without functions on their weights. Others have kernels of their own.
_LAYERS = ("disable_weight_init", "manual_cast")


def as_merged(patcher: Any) -> None:
    """Make the patches of a clone compute alike in RAM and in VRAM, wherever its layers allow it.

    Clones of one model with the same patches go on counting as alike, so that none makes the host load it anew.
    """
    if not patcher.patches:
        return
    from .merged import AsMerged

    changed = False
    for name, layer in patcher.model.named_modules():
        for key in (f"{name}.weight", f"{name}.bias"):
            patches = patcher.patches.get(key)
            if not patches or _is_merged(patches, patcher):
                continue
            set_aside = patcher.backup.get(key)  # where patches have been merged into the weight
            stored = set_aside.weight if set_aside else getattr(layer, key.rpartition(".")[2])
            if not _is_plain(layer, stored) or _resizes(patches, key, stored):
                continue
            merged = AsMerged(set(), (_plain(patches), stored.dtype, patcher.backup, _seed(key)))
            patcher.patches[key] = [(1.0, merged, 1.0, None, None)]
            changed = True
    if changed:
        patcher.patches_uuid = uuid.uuid5(patcher.patches_uuid, "ballast")


def was_moved_by_others(patcher: Any) -> bool:
    """Return whether weights were moved to RAM with patches in another form, as its parent has them."""
    return any(ours is None and _is_merged(patches, patcher) for patches, ours, _ in _in_ram(patcher))


def unequal(patcher: Any) -> int:
    """Weights in RAM with patches that were not computed as those in VRAM."""
    return sum(ours is None or not ours.is_equal for _, ours, _ in _in_ram(patcher))


def most_unexpected_bytes(patcher: Any, computes_in: torch.dtype) -> int:
    """Return the most that one of those in RAM takes on the device beyond what the host expects."""
    on = torch.device(patcher.load_device)
    found = [unexpected_bytes(stored.numel(), on, computes_in) for _, ours, stored in _in_ram(patcher) if ours]
    return max(found, default=0)


def _in_ram(patcher: Any) -> Iterator[tuple[Any, Any, torch.Tensor]]:
    """Yield the weights that the host computes patches for at each use.

    A clone's patches, ours in use, and the tensor.
    """
    for layer in patcher.model.modules():
        for name in ("weight", "bias"):
            for function in vars(layer).get(f"{name}_function") or ():
                stored = getattr(layer, name)
                # Those of GGUF are applied by its pack as it decodes, wherever the weight lies.
                if getattr(function, "key", None) in patcher.patches and not getattr(stored, "patches", None):
                    in_use = getattr(function, "patches", {}).get(function.key)
                    yield patcher.patches[function.key], _ours(in_use), stored


def _ours(patches: Any) -> Any:
    from .merged import AsMerged

    return patches[0][1] if patches and len(patches) == 1 and isinstance(patches[0][1], AsMerged) else None


def _is_merged(patches: Sequence[Any], patcher: Any) -> bool:
    ours = _ours(patches)
    return ours is not None and ours.merged is patcher.backup


def _plain(patches: Sequence[Any]) -> list[Any]:
    """Return the patches without ours, which another node has added to or merged with another model's."""
    from .merged import AsMerged

    found: list[Any] = []
    for strength, value, *rest in patches:
        if isinstance(value, AsMerged):
            found += value.patches
        else:
            nested = [value[0], *_plain(value[1:])] if isinstance(value, list) else value
            found.append((strength, nested, *rest))
    return found


def _is_plain(layer: nn.Module, stored: Any) -> bool:
    return type(layer).__qualname__.split(".")[0] in _LAYERS and type(stored) in (torch.Tensor, nn.Parameter)


def _resizes(patches: Sequence[Any], key: str, stored: torch.Tensor) -> bool:
    from comfy import lora

    shape_of = getattr(lora, "calculate_shape", None)
    return shape_of is not None and shape_of(patches, stored, key) != stored.shape


def _seed(key: str) -> int:
    """Return the seed of the rounding to fp8."""
    from comfy import model_patcher, utils

    return (getattr(utils, "string_to_seed", None) or model_patcher.string_to_seed)(key)
