"""The memory manager of a ComfyUI source tree, on the simulated device, without the rest of ComfyUI.

`python host_trees.py TREE` runs our units through it and prints what happened as JSON. In a process of its own: a tree
cannot be imported twice, and another tree not beside it.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import os
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
from import_pack import import_pack
from torch import nn

MB = 2**20
TOTAL_BYTES, RESERVE_BYTES, INFERENCE_BYTES = 16 * MB, 1 * MB, 1 * MB


def find_trees() -> list[Path]:
    """The trees to test: those in COMFYUI_TREES, and the host's."""
    from host import find_host

    named = [Path(name).expanduser() for name in os.environ.get("COMFYUI_TREES", "").split(os.pathsep) if name]
    return list(dict.fromkeys([*named, *([host] if (host := find_host()) else [])]))


class _Absent(MetaPathFinder, Loader):
    """Stands in for what model_management.py imports and does not use here."""

    NAMES = ("comfy.utils", "comfy.quant_ops", "comfy.windows", "comfy.windows_arm", "comfy_aimdo", "comfy_kitchen")

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == known or name.startswith(f"{known}.") for known in self.NAMES):
            return importlib.util.spec_from_loader(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = MagicMock(spec=None, __path__=[], __spec__=spec)
        module.__name__ = spec.name
        return module

    def exec_module(self, module: Any) -> None: ...


def model_management(tree: Path) -> Any:
    """The tree's `comfy.model_management`, which takes the simulated device for its card."""
    from ballast.memory import simulated
    from ballast.memory.accelerator import Accelerator

    simulated.enable(total=TOTAL_BYTES)
    sys.path.insert(0, str(tree))
    sys.meta_path.insert(0, _Absent())
    from comfy.cli_args import args

    args.cpu = True
    import comfy.model_management as mm

    card = torch.device("sim:0")

    def free_memory(dev: Any = None, torch_free_too: bool = False) -> Any:
        free = Accelerator(card).free_bytes()
        return (free, 0) if torch_free_too else free

    mm.cpu_state, mm.vram_state, mm.lowvram_available = mm.CPUState.GPU, mm.VRAMState.NORMAL_VRAM, True
    mm.get_torch_device, mm.get_free_memory = lambda: card, free_memory
    mm.get_all_torch_devices = lambda *_: [card]
    mm.extra_reserved_memory, mm.minimum_inference_memory = lambda: RESERVE_BYTES, lambda: INFERENCE_BYTES
    mm.EXTRA_RESERVED_VRAM, mm.soft_empty_cache = RESERVE_BYTES, lambda force=False: None
    return mm


class Native:
    """A model of the host's own, as far as its manager looks at one: all of it on the card, or what is wanted of it."""

    parent = None

    def __init__(self, nbytes: int) -> None:
        self.model = nn.Identity()
        self.load_device, self.offload_device = torch.device("sim:0"), torch.device("cpu")
        self.clone_base_uuid = object()
        self.parts = nbytes // MB
        self.held: list[torch.Tensor] = []

    def model_size(self) -> int:
        return self.parts * MB

    def loaded_size(self) -> int:
        return len(self.held) * MB

    def current_loaded_device(self) -> torch.device:
        return self.load_device if self.held else self.offload_device

    def partially_load(self, device: Any, extra_memory: float = 0, force_patch_weights: bool = False) -> int:
        more = min(self.parts - len(self.held), int(extra_memory // MB))
        self.held += [torch.empty(MB, dtype=torch.uint8, device="sim:0") for _ in range(more)]
        return max(0, more) * MB

    def partially_unload(self, device: Any, memory_to_free: float = 0, *_: Any, **__: Any) -> int:
        count = min(len(self.held), int(-(-memory_to_free // MB)))
        del self.held[len(self.held) - count :]
        return count * MB

    def detach(self, unpatch_all: bool = True) -> Any:
        if unpatch_all:
            self.held.clear()
        return self.model

    def is_clone(self, other: Any) -> bool:
        return other is self

    def is_dynamic(self) -> bool:
        return False

    def model_patches_models(self) -> list:
        return []

    get_nested_additional_models = model_patches_models

    def nothing(self, *_: Any, **__: Any) -> Any:
        return 0

    model_dtype = model_patches_to = lowvram_patch_counter = pinned_memory_size = partially_unload_ram = nothing

    def model_mmap_residency(self, free: bool = False) -> tuple[int, int]:
        return 0, 0


class Blocks(nn.Module):
    """Twelve blocks of half a MB."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(512, 256, bias=False) for _ in range(12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.cat([block(x), x[..., :256]], dim=-1)
        return x


def scenario(mm: Any) -> dict[str, Any]:
    """What the host's manager and ours do to each other, as numbers that no version may change."""
    from ballast.memory.host import contract as host_contract
    from ballast.memory.host import management as host
    from ballast.memory.memory_manager import manager
    from ballast.memory.weights.unit import ManagedModel
    from ballast.memory.workload import Workload

    ours = manager("sim")
    unit = ManagedModel.from_module("blocks", "transformer", Blocks())
    found: dict[str, Any] = {"unknown": sorted(host_contract.unknown_members(Path(mm.__file__).parents[1]))}
    x = torch.ones(4, 512)
    expected = unit.module(x)

    def entries() -> list[str]:
        return sorted(type(entry.model).__name__ for entry in mm.current_loaded_models)

    def note(step: str, **more: Any) -> None:
        real = ours.accelerator.allocated_bytes()
        listed = ours._patchers.get(unit) if unit else None
        found[step] = {
            "listed": entries(),
            "resident": unit.resident_bytes if unit else 0,
            "said": listed.loaded_size() if listed else 0,
            "size": listed.model_size() if listed else 0,
            "native": native.loaded_size(),
            "counted": real - native.loaded_size(),
            **more,
        }

    def run(strategy: str) -> bool:
        with ours.use(unit, strategy) as module:
            result = module(x.to("sim:0")).cpu()
        return bool(torch.equal(result, expected))

    native = Native(12 * MB)
    note("nothing")
    note("whole", equal=run("resident"))
    mm.load_models_gpu([native], memory_required=2 * MB)
    note("native wants room")
    note("whole again", equal=run("resident"))
    patcher = ours._patchers[unit]
    note("clones are sorted", moved=patcher.detach(unpatch_all=False) is patcher.model)
    note("some leaves", freed=patcher.partially_unload(patcher.offload_device, MB + 1))
    note("some comes back", added=patcher.partially_load(patcher.load_device, 1e32))
    note("less by a negative number", added=patcher.partially_load(patcher.load_device, -MB))
    note("what is left runs", equal=run("resident"))
    mm.load_models_gpu([patcher], memory_required=0)
    note("loaded once more by the host")
    mm.unload_all_models()
    note("all unloaded")
    ours.work.begin(unit, Workload("a"))
    ours.work.took(unit, MB)
    ours.limit(vram=5 * MB)
    note("streamed", equal=run("streamed"))
    with ours.use(unit, "streamed") as module:
        half = module.blocks[0](x.to("sim:0"))
        mm.free_memory(1e30, patcher.load_device)
        note("everything is taken while it runs")
        equal = bool(torch.equal(module(x.to("sim:0")).cpu(), expected))
        del half
    note("and it runs on", equal=equal)
    ours.limit()
    try:
        with ours.use(unit, "streamed"):
            raise KeyError("in the middle")
    except KeyError:
        mm.unload_all_models()
    note("unloaded after an error")
    mm.load_models_gpu([native], memory_required=0)
    ours.budget.ask_host(10 * MB)
    note("room is asked for")
    note("streamed beside", equal=run("streamed"))
    host.evict([native])
    note("the native one alone is evicted")
    module = patcher = unit = None  # type: ignore[assignment]
    gc.collect()
    mm.cleanup_models_gc()
    note("the unit is gone")
    return found


if __name__ == "__main__":
    import_pack()
    torch.set_num_threads(1)
    with torch.inference_mode():
        print(json.dumps(scenario(model_management(Path(sys.argv[1])))))
