"""The calls into `comfy.model_management` and its like. No other file makes them.

Outside ComfyUI every function here does nothing, and returns None, 0, False or an empty list. Nothing of the host is
patched. Its list of loaded models changes only through its own functions.
"""

from __future__ import annotations

import inspect
import logging
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from ..vocabulary import Role
from .contract import unknown_members
from .flags import host_flags
from .patcher import HostPatcher

log = logging.getLogger("ballast")

_EVERYTHING = 1e30  # bytes: the number by which the host itself asks for all memory
_unfit: dict[ModuleType, str] = {}  # why the host's list takes none of our units, "" if it does; checked once


@dataclass(frozen=True)
class HostModel:
    """One of the host's own models, with the bytes of it that are on its device."""

    patcher: Any
    name: str
    role: Role
    bytes: int


def model_management() -> ModuleType | None:
    """Return the host's memory manager; None outside ComfyUI."""
    return sys.modules.get("comfy.model_management")


def device() -> torch.device | None:
    """Return the device that the host runs models on."""
    mm = model_management()
    return mm.get_torch_device() if mm else None


def reserve_bytes(on: torch.device) -> int | None:
    """Return the VRAM that the host leaves to others (`--reserve-vram`) on its own device; None on any other device."""
    mm = _manager_of(on)
    return int(mm.extra_reserved_memory()) if mm else None


def _manager_of(on: torch.device) -> ModuleType | None:
    """Return the host's memory manager if `on` is its device, else None."""
    mm = model_management()
    return mm if mm and _is_same(on, mm.get_torch_device()) else None


def _is_same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)  # without an index it is the first one


# Room


def evict_host_models(wanted_bytes: int, wanted_on: torch.device, coming: Sequence[Role] | None = None) -> None:
    """Ask the host to evict its own models until `wanted_bytes` are free, beside its own reserve.

    `coming` lists the roles of the models that will run again, in order, where that is known. Others leave first, then
    those with the farthest next use. Dynamic models shrink before any model is detached: a detached one loses its
    pinned RAM too.
    """
    mm = _manager_of(wanted_on)
    if mm is None:
        return
    wanted_on = mm.get_torch_device()  # the host compares devices by equality, and "mps" is not "mps:0"
    wanted_bytes += mm.extra_reserved_memory()
    if mm.get_free_memory(wanted_on) >= wanted_bytes:
        return
    roles = list(dict.fromkeys(coming or ()))

    def next_use(model: HostModel) -> int:
        return roles.index(model.role) if model.role in roles else len(roles)

    models = sorted(_on_device(mm, wanted_on), key=next_use, reverse=True)
    for model in models:
        missing = wanted_bytes - mm.get_free_memory(wanted_on)
        if missing > 0 and is_dynamic(model.patcher):
            model.patcher.partially_unload(None, missing)
    for latest in sorted({next_use(model) for model in models}, reverse=True) if roles else [0]:
        if mm.get_free_memory(wanted_on) < wanted_bytes:
            sooner = {id(model.patcher) for model in models if next_use(model) < latest}
            staying = [entry for entry in mm.current_loaded_models if id(entry.model) in sooner]
            mm.free_memory(wanted_bytes, wanted_on, [*_entries_of_ours(mm), *staying])


def movable_bytes(on: torch.device) -> int:
    """Return the VRAM that the host's own models hold on a device, and would give up for others."""
    mm = _manager_of(on)
    if mm is None:
        return 0
    # With flags such as --gpu-only some models have the device itself as offload device: they cannot leave it.
    return sum(m.bytes for m in _on_device(mm, on) if not _is_same(torch.device(m.patcher.offload_device), on))


def loaded_models() -> list[HostModel]:
    """Return the host's own models that are on its device. Empty if that device is the CPU."""
    mm, on = model_management(), device()
    return _on_device(mm, on) if mm and on and on.type != "cpu" else []


def held_bytes(on: torch.device) -> int:
    """Return the bytes of weights on a device of all models in the host's list, ours included."""
    mm = model_management()
    entries = mm.current_loaded_models if mm else []
    held = [entry.model for entry in list(entries) if entry.model is not None and _is_same(entry.device, on)]
    return sum(int(patcher.loaded_size()) for patcher in held)


def page_bytes(patcher: Any) -> int:
    """Return the bytes of a dynamic model that lie in pages, which torch does not count. 0 for other models."""
    tensors = int(getattr(patcher.model, "model_loaded_weight_memory", 0))
    return int(patcher.loaded_size()) - tensors if is_dynamic(patcher) else 0


def is_dynamic(patcher: Any) -> bool:
    """Return whether the host moves this model's weights page by page. Older hosts have no such models."""
    return bool(getattr(patcher, "is_dynamic", bool)())


def copy_streams() -> int:
    """Return the number of streams on which the host copies weights ahead of their use."""
    return int(getattr(model_management(), "NUM_STREAMS", 0))


def shrink_others(bytes: int, on: torch.device, running: Collection[Any]) -> int:
    """Ask the host to evict `bytes` of models other than those in `running`. Return the bytes that left the device."""
    mm = model_management()
    if mm is None or bytes <= 0:
        return 0
    staying = {id(patcher.model) for patcher in running}
    entries = [entry for entry in mm.current_loaded_models if id(getattr(entry.model, "model", None)) in staying]
    before = held_bytes(on)
    mm.free_memory(mm.get_free_memory(on) + bytes, on, entries)
    return before - held_bytes(on)


def evict(patchers: Collection[Any]) -> None:
    """Make the host evict exactly these models of its own, wholly."""
    mm = model_management()
    leaving = {id(patcher.model) for patcher in patchers}
    if not mm or not leaving:
        return
    for on in {patcher.load_device for patcher in patchers if patcher.load_device.type != "cpu"}:
        staying = [
            entry for entry in mm.current_loaded_models if id(getattr(entry.model, "model", None)) not in leaving
        ]
        mm.free_memory(_EVERYTHING, on, staying)
    mm.soft_empty_cache()


def known_models(on: torch.device) -> list[HostModel]:
    """Return the host's own models that it has loaded for a device, wherever their weights are now."""
    mm = model_management()
    found = []
    for entry in list(mm.current_loaded_models) if mm else []:
        patcher = entry.model
        if patcher is None or isinstance(patcher, HostPatcher) or not _is_same(entry.device, on):
            continue
        found.append(HostModel(patcher, type(patcher.model).__name__, _role(patcher), int(patcher.loaded_size())))
    return found


def model_ram_bytes(patcher: Any) -> int:
    """Return the RAM that a model of the host takes.

    That is the part that is not on the device. A dynamic model tells how much it has read.
    """
    if is_dynamic(patcher) and hasattr(patcher, "loaded_ram_size"):
        return int(patcher.loaded_ram_size())
    return max(0, int(patcher.model_size()) - int(patcher.loaded_size()))


def model_pinned_bytes(patcher: Any) -> int:
    """Return the bytes of a host model's RAM that are pinned."""
    if is_dynamic(patcher):
        return int(getattr(patcher, "pinned_memory_size", int)())
    pinned = getattr(patcher, "pinned", ())
    return sum(tensor.nbytes for name, tensor in patcher.model.named_parameters() if name in pinned) if pinned else 0


def _on_device(mm: ModuleType, on: torch.device) -> list[HostModel]:
    """Return the host's own models that have weights on a device."""
    return [model for model in known_models(on) if model.bytes]


def _role(patcher: Any) -> Role:
    """Return the role of a host model, guessed from its attributes."""
    if getattr(patcher, "is_clip", False):
        return "text_encoder"
    if hasattr(patcher.model, "diffusion_model"):
        return "transformer"
    return "vae" if hasattr(patcher.model, "decode") else "other"


def _entries_of_ours(mm: ModuleType) -> list[Any]:
    """Return the entries of our units, for the host to leave alone: we decide which of ours leave."""
    return [entry for entry in mm.current_loaded_models if isinstance(entry.model, HostPatcher)]


def ram_bytes() -> tuple[int, int] | None:
    """Return RAM in all and free RAM in bytes, as the host counts them. None if it leaves that to psutil."""
    memory = sys.modules.get("comfy.system_memory")
    if not memory or not (hasattr(memory, "virtual_memory_total") and hasattr(memory, "virtual_memory_available")):
        return None
    return int(memory.virtual_memory_total()), int(memory.virtual_memory_available())


# Our units in the host's list


def lists_units(on: torch.device) -> bool:
    """Return whether our units on a device belong in the host's list. Logs once why they do not."""
    mm = _manager_of(on)
    if mm is None or on.type == "cpu":
        return False
    if mm not in _unfit:
        _unfit[mm] = _why_unfit(mm)
        if _unfit[mm]:
            log.warning("Ballast: %s. Ballast's models are not in its list: it cannot move them.", _unfit[mm])
        if (other := replaced_by()) is not None:
            log.warning("Ballast: %s has replaced ComfyUI's load_models_gpu; both may move models.", other)
    return not _unfit[mm]


def _why_unfit(mm: ModuleType) -> str:
    """Return why the host's list cannot take our units, "" if it can."""
    if not mm.__file__:
        return "this ComfyUI has no source to read"
    unknown = unknown_members(Path(mm.__file__).parents[1])
    return f"this ComfyUI asks models for {', '.join(sorted(unknown))}, unknown here" if unknown else ""


def replaced_by() -> str | None:
    """Return the name of the module that has replaced the host's `load_models_gpu`, as some packs do.

    None if none has.
    """
    mm = model_management()
    owner = getattr(getattr(mm, "load_models_gpu", None), "__module__", None)
    return owner if mm and owner != mm.__name__ else None


def list_unit(patcher: HostPatcher, working_bytes: int) -> None:
    """Put a unit that is on the device in the host's list, if it is not there.

    `working_bytes` is its working memory, for which the host makes room. An error of the host is logged, never raised.
    """
    mm = model_management()
    if not mm or any(entry.model is patcher for entry in mm.current_loaded_models):
        return
    patcher.is_being_listed = True
    try:
        mm.load_models_gpu([patcher], memory_required=working_bytes)
    except (AttributeError, TypeError, NotImplementedError) as error:
        _unfit[mm] = f"this ComfyUI does not take other models ({error})"
        log.warning("Ballast: %s. It cannot move Ballast's.", _unfit[mm])
    except Exception as error:  # another model failed to make room; the next call tries again
        log.warning("Ballast: ComfyUI could not list %r (%s)", patcher, error)
    finally:
        patcher.is_being_listed = False


def is_busy() -> bool:
    """Return whether the host is working on a prompt, or has yet to obey a request to unload."""
    server = getattr(sys.modules.get("server"), "PromptServer", None)
    queue = getattr(getattr(server, "instance", None), "prompt_queue", None)
    return bool(getattr(queue, "currently_running", False) or getattr(queue, "flags", False))


# Pinned memory


def pin_memory(tensor: torch.Tensor) -> bool | None:
    """Ask the host to pin a tensor's memory in place. It keeps within its own cap, and obeys its flags.

    Return whether it is pinned. None if there is no host, or one that does not pin for others.
    """
    if host_flags().unpinned:
        return False
    mm = model_management()
    if not mm or not (hasattr(mm, "pin_memory") and hasattr(mm, "unpin_memory")):
        return None
    # `mm.pin_memory` itself makes room, but ignores whether there was enough. So ask first.
    make_room = getattr(mm, "ensure_pin_registerable", None)
    if make_room and make_room(tensor.nbytes, **_sparing(make_room)) is False:
        return False
    # Some versions of the host pin only parameters.
    return mm.pin_memory(torch.nn.Parameter(tensor, requires_grad=False), **_sparing(mm.pin_memory)) is True


def _sparing(pin: Callable[..., Any]) -> dict[str, bool]:
    """Return the argument that spares the pins of running models, if this version of the host has it."""
    return {"evict_active": False} if "evict_active" in inspect.signature(pin).parameters else {}


def unpin_memory(tensor: torch.Tensor) -> None:
    """Undo `pin_memory`. Must be called before the memory is freed."""
    if mm := model_management():
        mm.unpin_memory(torch.nn.Parameter(tensor, requires_grad=False))


def throw_if_interrupted() -> None:
    """Raise the host's own exception if the user pressed stop."""
    if mm := model_management():
        mm.throw_exception_if_processing_interrupted()


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is the host's exception for a pressed stop. In older versions it is an Exception."""
    mm = model_management()
    return bool(mm) and isinstance(error, getattr(mm, "InterruptProcessingException", ()))
