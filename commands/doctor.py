"""`ballast doctor`: says what this machine has, and what is missing."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path

import torch

from .. import requirements
from ..memory import ram, simulated
from ..memory.accelerator import Accelerator, resolve_device
from ..memory.charts.text_tables import format_table
from ..memory.host import contract as host_contract
from ..memory.sizes import format_bytes
from ..pipelines.encoding.embedding_cache import default_directory
from .planned_models import Computer, computer_of, summary

_MIN_RAM_BYTES = 8 * 2**30


@dataclass(frozen=True)
class Finding:
    """The result of one check; if not `ok`, `detail` says what to do."""

    what: str
    ok: bool
    detail: str


def examine() -> list[Finding]:
    """Check the device, torch, libraries, RAM, pinning, and a ComfyUI if one is near."""
    device = resolve_device()
    accelerator = Accelerator(device)
    total_bytes, available = ram.total_bytes(), format_bytes(ram.available_bytes())
    memory = f"{format_bytes(accelerator.free_bytes())} of {format_bytes(accelerator.total_bytes())} free"
    return [
        Finding("python", True, platform.python_version()),
        Finding(
            "torch", requirements.at_least(torch.__version__, "2.6"), f"{torch.__version__} (2.6 or newer is needed)"
        ),
        Finding(
            "device", True, "cpu only: no GPU" if accelerator.is_cpu else f"{device}, {accelerator.name}, {memory}"
        ),
        Finding(
            "RAM",
            total_bytes >= _MIN_RAM_BYTES,
            f"{available} of {format_bytes(total_bytes)} available, for copies of the weights",
        ),
        _pinning(device),
        *(_library(name, lowest) for name, lowest in requirements.wanted().items()),
        _comfyui(),
        _cache(),
        # Last: to find out makes it known to torch, which then has another idea of pinned memory.
        Finding("simulated", True, simulated.supported() or "the simulated GPU works (--device sim)"),
    ]


def run() -> int:
    """Print what was found, and what this machine runs. Returns 1 if something is missing."""
    findings = examine()
    rows = [("ok" if finding.ok else "MISS", finding.what, finding.detail) for finding in findings]
    print(format_table(rows, heading=False))
    accelerator = Accelerator(resolve_device())
    if not accelerator.is_cpu:
        print(f"\n{_will_run(computer_of(accelerator.total_bytes(), ram.total_bytes()))}")
    return 0 if all(finding.ok for finding in findings) else 1


def _will_run(on: Computer | None) -> str:
    """Return the rows of docs/will-it-run.md for a machine, in one line where it is smaller than all of that page."""
    if on is None:
        return "Published models are planned for cards of 6 GB and 16 GB of RAM, or more. Run ballast plan for yours."
    return (
        f"Published models on a card of {on.vram_gb} GB and {on.ram_gb} GB of RAM, each in its fastest form, planned "
        f"for a PC of that kind and not measured on this one:\n\n{summary(on)}"
    )


def _library(name: str, lowest: str) -> Finding:
    found = requirements.installed(name)
    if found is None:
        return Finding(name, False, f"is not installed: pip install '{name}>={lowest}'")
    ok = requirements.at_least(found, lowest)
    return Finding(name, ok, found if ok else f"{found} is too old: pip install '{name}>={lowest}'")


def _pinning(device: torch.device) -> Finding:
    if device.type not in ("cuda", "xpu"):
        return Finding("pinning", True, "not used on this device")
    try:
        torch.empty(64 * 2**20, dtype=torch.uint8).pin_memory()
    except RuntimeError as error:
        return Finding("pinning", False, f"the driver refuses pinned memory, transfers will be slow: {error}")
    return Finding("pinning", True, "64 MB pinned and released")


def _comfyui() -> Finding:
    pack = Path(__file__).resolve().parents[1]
    places = [Path(os.environ[name]) for name in ("COMFYUI_PATH",) if os.environ.get(name)]
    places += [pack.parents[1]] if pack.parent.name == "custom_nodes" else []
    root = next((place for place in (*places, Path.home() / "ComfyUI") if host_contract.version(place)), None)
    if root is None:
        return Finding("ComfyUI", True, "none found (COMFYUI_PATH names one); the command line works without")
    unknown = host_contract.unknown_members(root)
    state = (
        f"unknown to this version of Ballast: {', '.join(sorted(unknown))}"
        if unknown
        else "its memory contract is known"
    )
    return Finding("ComfyUI", not unknown, f"{host_contract.version(root)} in {root}; {state}")


def _cache() -> Finding:
    folder = default_directory()
    files = list(folder.glob("*.safetensors")) if folder.is_dir() else []
    held = sum(file.stat().st_size for file in files)
    writable = os.access(next(p for p in (folder, *folder.parents) if p.exists()), os.W_OK)
    state = f"{len(files)} embeddings, {format_bytes(held)} in {folder}"
    return Finding("cache", writable, state if writable else f"{folder} cannot be written; set XDG_CACHE_HOME")
