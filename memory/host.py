"""The only file that talks to `comfy.model_management`. Outside ComfyUI every function here does nothing."""

from __future__ import annotations

import ast
import logging
import sys
from pathlib import Path
from types import ModuleType

import torch

log = logging.getLogger("ballast")

# What the host reads on the model patchers in its list, as known from ComfyUI 0.3.64 to 0.33.0.
KNOWN_MEMBERS = frozenset(
    {
        "clone",
        "clone_base_uuid",
        "current_loaded_device",
        "detach",
        "dynamic_pins",
        "get_free_memory",
        "get_nested_additional_models",
        "get_ram_usage",
        "is_clone",
        "is_dynamic",
        "load_device",
        "loaded_ram_size",
        "loaded_size",
        "lowvram_patch_counter",
        "model",
        "model_dtype",
        "model_mmap_residency",
        "model_patches_models",
        "model_patches_to",
        "model_size",
        "offload_device",
        "parent",
        "partially_load",
        "partially_unload",
        "partially_unload_ram",
        "pinned_memory_size",
        "unregister_inactive_pins",
    }
)


def model_management() -> ModuleType | None:
    """The host's memory manager, if this process is a ComfyUI."""
    return sys.modules.get("comfy.model_management")


def device() -> torch.device | None:
    """The device that the host runs models on."""
    mm = model_management()
    return mm.get_torch_device() if mm else None


def reserve_bytes(on: torch.device) -> int | None:
    """VRAM that the host leaves to others (`--reserve-vram`) on its own device; None on any other."""
    mm = model_management()
    return int(mm.extra_reserved_memory()) if mm and _is_same(on, mm.get_torch_device()) else None


def _is_same(one: torch.device, other: torch.device) -> bool:
    return one.type == other.type and (one.index or 0) == (other.index or 0)  # "mps" is "mps:0"


def make_room(wanted_bytes: int, wanted_on: torch.device) -> None:
    """Ask the host to move its own models away until so many bytes are free."""
    mm = model_management()
    if mm and _is_same(wanted_on, mm.get_torch_device()) and mm.get_free_memory(wanted_on) < wanted_bytes:
        mm.free_memory(wanted_bytes + mm.extra_reserved_memory(), wanted_on)


def free_all() -> int:
    """Ask the host to unload all its models. Returns the bytes of its device that became free."""
    mm = model_management()
    if not mm:
        return 0
    on = mm.get_torch_device()
    before = mm.get_free_memory(on)
    mm.unload_all_models()
    mm.soft_empty_cache()
    return max(0, int(mm.get_free_memory(on) - before))


def pin_memory(tensor: torch.Tensor) -> bool | None:
    """Have the host pin a tensor's memory in place, within its own cap and as its flags say.

    None where there is no host, or one that does not pin for others.
    """
    mm = model_management()
    if not mm or not (hasattr(mm, "pin_memory") and hasattr(mm, "unpin_memory")):
        return None
    # It makes room for a pin without asking whether there was enough.
    make_room = getattr(mm, "ensure_pin_registerable", None)
    if make_room and make_room(tensor.nbytes) is False:
        return False
    # Some versions pin nothing but parameters.
    return mm.pin_memory(torch.nn.Parameter(tensor, requires_grad=False)) is True


def unpin_memory(tensor: torch.Tensor) -> None:
    """Undo `pin_memory`, before the memory goes."""
    if mm := model_management():
        mm.unpin_memory(torch.nn.Parameter(tensor, requires_grad=False))


def throw_if_interrupted() -> None:
    """Raise the host's own exception if the user pressed stop."""
    if mm := model_management():
        mm.throw_exception_if_processing_interrupted()


def version(root: Path) -> str | None:
    """The version of the ComfyUI in a folder, read without importing it."""
    file = root / "comfyui_version.py"
    if not file.is_file():
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return None


def unknown_members(root: Path) -> set[str]:
    """Members that the ComfyUI in a folder reads on its model patchers and that this pack does not know.

    Its `model_management.py` is read as text, never imported.
    """
    tree = ast.parse((root / "comfy" / "model_management.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        # A patcher is what the host calls `model`, or the `.model` of an entry of its list of loaded models.
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if name == "model" and not hasattr(torch.nn.Module, node.attr):
                found.add(node.attr)
    return found - KNOWN_MEMBERS
