"""The only file that calls `comfy.model_management`, and its like. Outside ComfyUI every function here does nothing.

Nothing of the host is patched, and its list of loaded models changes through its own functions only.
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

_EVERYTHING = 1e30  # bytes, in the host's own words
_unfit: dict[ModuleType, str] = {}  # why units are not listed there; empty if they are. Found out once


@dataclass(frozen=True)
class HostModel:
    """One of the host's own models, as far as it is on its device."""

    patcher: Any
    name: str
    role: Role
    bytes: int


def model_management() -> ModuleType | None:
    """Return the host's memory manager, if this process is a ComfyUI."""
    return sys.modules.get("comfy.model_management")


def device() -> torch.device | None:
    """Return the device that the host runs models on."""
    mm = model_management()
    return mm.get_torch_device() if mm else None


def reserve_bytes(on: torch.device) -> int | None:
    """VRAM that the host leaves to others (`--reserve-vram`) on its own device; None on any other."""
    mm = _manager_of(on)
    return int(mm.extra_reserved_memory()) if mm else None


def _manager_of(on: torch.device) -> ModuleType | None:
    """Return the host's memory manager, if that is its device."""
    mm = model_management()
    return mm if mm and _is_same(on, mm.get_torch_device()) else None


def _is_same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)  # "mps" is "mps:0"


# Room


def make_room(wanted_bytes: int, wanted_on: torch.device, coming: Sequence[Role] | None = None) -> None:
    """Ask the host to move its own models away until so many bytes are free.

    `coming` are the roles of those that will run again, in order, where that is known: the others go first, then the
    one that is farthest. Dynamic models shrink first: one that is detached loses its pinned RAM too.
    """
    mm = _manager_of(wanted_on)
    if mm is None:
        return
    wanted_on = mm.get_torch_device()  # in the host's words, by which it knows its models
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
    """VRAM that the host's own models hold on a device, and would give up for others."""
    mm = _manager_of(on)
    if mm is None:
        return 0
    # With --gpu-only and the like some have nowhere else to go.
    return sum(m.bytes for m in _on_device(mm, on) if not _is_same(torch.device(m.patcher.offload_device), on))


def loaded_models() -> list[HostModel]:
    """Return the host's own models that are on its device. On the CPU they are in RAM."""
    mm, on = model_management(), device()
    return _on_device(mm, on) if mm and on and on.type != "cpu" else []


def held_bytes(on: torch.device) -> int:
    """Weights on a device in bytes: of all in the host's list, ours too."""
    mm = model_management()
    entries = mm.current_loaded_models if mm else []
    held = [entry.model for entry in list(entries) if entry.model is not None and _is_same(entry.device, on)]
    return sum(int(patcher.loaded_size()) for patcher in held)


def page_bytes(patcher: Any) -> int:
    """Bytes of a dynamic model in pages, which torch does not count; 0 for others, whose weights are tensors."""
    tensors = int(getattr(patcher.model, "model_loaded_weight_memory", 0))
    return int(patcher.loaded_size()) - tensors if is_dynamic(patcher) else 0


def is_dynamic(patcher: Any) -> bool:
    """Return whether the host moves this model's weights page by page. Older hosts have no such models."""
    return bool(getattr(patcher, "is_dynamic", bool)())


def copy_streams() -> int:
    """On how many streams the host copies weights ahead of their use."""
    return int(getattr(model_management(), "NUM_STREAMS", 0))


def shrink_others(bytes: int, on: torch.device, running: Collection[Any]) -> int:
    """Ask the host to move so many bytes of other models than these off a device. Returns those that left."""
    mm = model_management()
    if mm is None or bytes <= 0:
        return 0
    staying = {id(patcher.model) for patcher in running}
    entries = [entry for entry in mm.current_loaded_models if id(getattr(entry.model, "model", None)) in staying]
    before = held_bytes(on)
    mm.free_memory(mm.get_free_memory(on) + bytes, on, entries)
    return before - held_bytes(on)


def evict(patchers: Collection[Any]) -> None:
    """Make models of the host leave its device wholly, and nothing else."""
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
    """RAM that a model of the host takes: what is not on the device, or what a dynamic one has read."""
    if is_dynamic(patcher) and hasattr(patcher, "loaded_ram_size"):
        return int(patcher.loaded_ram_size())
    return max(0, int(patcher.model_size()) - int(patcher.loaded_size()))


def model_pinned_bytes(patcher: Any) -> int:
    """Return the bytes of that which are pinned."""
    if is_dynamic(patcher):
        return int(getattr(patcher, "pinned_memory_size", int)())
    pinned = getattr(patcher, "pinned", ())
    return sum(tensor.nbytes for name, tensor in patcher.model.named_parameters() if name in pinned) if pinned else 0


def _on_device(mm: ModuleType, on: torch.device) -> list[HostModel]:
    return [model for model in known_models(on) if model.bytes]


def _role(patcher: Any) -> Role:
    if getattr(patcher, "is_clip", False):
        return "text_encoder"
    if hasattr(patcher.model, "diffusion_model"):
        return "transformer"
    return "vae" if hasattr(patcher.model, "decode") else "other"


def _entries_of_ours(mm: ModuleType) -> list[Any]:
    """Which of ours leave is our own decision."""
    return [entry for entry in mm.current_loaded_models if isinstance(entry.model, HostPatcher)]


def ram_bytes() -> tuple[int, int] | None:
    """RAM in all and free, as the host counts it; None where it leaves that to psutil."""
    memory = sys.modules.get("comfy.system_memory")
    if not memory or not (hasattr(memory, "virtual_memory_total") and hasattr(memory, "virtual_memory_available")):
        return None
    return int(memory.virtual_memory_total()), int(memory.virtual_memory_available())


# Our units in the host's list


def lists_units(on: torch.device) -> bool:
    """Return whether our units on a device are to be in the host's list. Says once why not."""
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
    if not mm.__file__:
        return "this ComfyUI has no source to read"
    unknown = unknown_members(Path(mm.__file__).parents[1])
    return f"this ComfyUI asks models for {', '.join(sorted(unknown))}, unknown here" if unknown else ""


def replaced_by() -> str | None:
    """Return the module that has put its own `load_models_gpu` in the place of the host's, as some packs do."""
    mm = model_management()
    owner = getattr(getattr(mm, "load_models_gpu", None), "__module__", None)
    return owner if mm and owner != mm.__name__ else None


def list_unit(patcher: HostPatcher, working_bytes: int) -> None:
    """Put a unit that is on the device in the host's list, if it is not there. `working_bytes` it takes beside."""
    mm = model_management()
    if not mm or any(entry.model is patcher for entry in mm.current_loaded_models):
        return
    patcher.is_being_listed = True
    try:
        mm.load_models_gpu([patcher], memory_required=working_bytes)
    except (AttributeError, TypeError, NotImplementedError) as error:
        _unfit[mm] = f"this ComfyUI does not take other models ({error})"
        log.warning("Ballast: %s. It cannot move Ballast's.", _unfit[mm])
    except Exception as error:  # of another model that was to make room; the next call tries again
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
    """Have the host pin a tensor's memory in place, within its own cap and as its flags say.

    None where there is no host, or one that does not pin for others.
    """
    if host_flags().unpinned:
        return False
    mm = model_management()
    if not mm or not (hasattr(mm, "pin_memory") and hasattr(mm, "unpin_memory")):
        return None
    # It makes room for a pin without asking whether there was enough.
    make_room = getattr(mm, "ensure_pin_registerable", None)
    if make_room and make_room(tensor.nbytes, **_sparing(make_room)) is False:
        return False
    # Some versions pin nothing but parameters.
    return mm.pin_memory(torch.nn.Parameter(tensor, requires_grad=False), **_sparing(mm.pin_memory)) is True


def _sparing(pin: Callable[..., Any]) -> dict[str, bool]:
    """Return the argument that spares the pins of a model that is running, where a version has it."""
    return {"evict_active": False} if "evict_active" in inspect.signature(pin).parameters else {}


def unpin_memory(tensor: torch.Tensor) -> None:
    """Undo `pin_memory`, before the memory goes."""
    if mm := model_management():
        mm.unpin_memory(torch.nn.Parameter(tensor, requires_grad=False))


def throw_if_interrupted() -> None:
    """Raise the host's own exception if the user pressed stop."""
    if mm := model_management():
        mm.throw_exception_if_processing_interrupted()


def is_interrupt(error: BaseException) -> bool:
    """Return whether an error is the host's word that the user pressed stop; in older versions that is an Exception."""
    mm = model_management()
    return bool(mm) and isinstance(error, getattr(mm, "InterruptProcessingException", ()))
