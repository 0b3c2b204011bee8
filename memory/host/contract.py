"""The members that the installed ComfyUI asks its model patchers for, read from its source as text.

If it asks for a member that `HostPatcher` lacks, `management.lists_units` keeps our units out of its list.
"""

from __future__ import annotations

import ast
from pathlib import Path

import torch

from .patcher import HostPatcher

# The host asks only dynamic patchers for these. Ours return False from `is_dynamic`.
_OF_DYNAMIC = {"dynamic_pins", "loaded_ram_size", "unregister_inactive_pins"}
KNOWN_MEMBERS = frozenset(
    {name for name in dir(HostPatcher) if not name.startswith("_")}
    | {"load_device", "offload_device", "model", "clone_base_uuid"}
    | _OF_DYNAMIC
)


def version(root: Path) -> str | None:
    """Return the version of the ComfyUI in the folder `root`, read without importing it.

    None if it has no version file.
    """
    file = root / "comfyui_version.py"
    if not file.is_file():
        return None
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            return str(node.value.value)
    return None


def members_read(source: str) -> set[str]:
    """Return the members that the text of a `model_management.py` reads on model patchers."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        # The host names a patcher `model`, or reaches it as `.model` of an entry of its list of loaded models.
        if isinstance(node, ast.Attribute):
            owner = node.value
            name = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", None)
            if name == "model" and not hasattr(torch.nn.Module, node.attr):
                found.add(node.attr)
    return found


def unknown_members(root: Path) -> set[str]:
    """Return the members that the ComfyUI in `root` reads on its model patchers and that ours lack.

    Raises OSError if it has no `comfy/model_management.py`.
    """
    return members_read((root / "comfy" / "model_management.py").read_text(encoding="utf-8")) - KNOWN_MEMBERS
