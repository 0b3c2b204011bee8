"""What Free VRAM says: on the CPU, alone after a run, and of copies in RAM that nothing uses any more."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import comfy.model_management as mm
import folder_paths
import pytest
import torch
from ballast import memory
from ballast.memory import manager
from ballast.memory.memory_manager import managers
from ballast.memory.sizes import format_bytes
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import FreeVram
from ballast.nodes.load import LoadPipeline
from ballast.nodes.sample import Sampler
from host import run_node

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def name(tiny_folders: Folders) -> Iterator[str]:
    link = Path(folder_paths.get_folder_paths("diffusers")[0]) / "freed"
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(tiny_folders("lumina2"), target_is_directory=True)
    yield "freed"
    link.unlink()


def run(name: str, device: str) -> Any:
    reference = run_node(LoadPipeline, pipeline=name, device=device, keep_loaded=True).result[0]
    cond = run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="").result[0]
    run_node(Sampler, pipeline=reference, conditioning=cond, width=48, height=32, steps=1)
    return reference


def report(**more: Any) -> list[str]:
    return run_node(FreeVram, **more).result[1].splitlines()


def only(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has that device alone."""
    for one in managers():
        one.free()
    monkeypatch.setattr(memory, "managers", lambda: [manager(device)])


def test_on_the_cpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    only("cpu", monkeypatch)
    reference = run(name, "cpu")
    assert report() == ["On the CPU: nothing in VRAM."], "an open model keeps its copies in RAM"
    held = sum(unit.host_bytes for unit in manager("cpu").units())
    assert held > 0
    del reference
    gc.collect()
    first, second = report()
    assert first == "On the CPU: nothing in VRAM."
    freed = format_bytes(held)
    assert second == f"RAM: {freed} -> 0 B, freed {freed} of copies that no open model uses"
    assert report() == ["On the CPU: nothing in VRAM."]


def test_on_a_host_without_a_card(name: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's own models are in RAM then, and another prompt's card is no matter of this one."""
    reference = run(name, "sim")
    cpu = torch.device("cpu")
    unet = SimpleNamespace(
        model=torch.nn.Linear(4, 2), load_device=cpu, offload_device=cpu, is_dynamic=bool, loaded_size=lambda: 40
    )
    monkeypatch.setattr(mm, "current_loaded_models", [SimpleNamespace(model=unet, device=cpu)])
    nbytes = format_bytes(sim.stats().allocated_bytes)
    assert report(prompt_id="two")[0] == f"sim:0: {nbytes} -> 0 B, freed {nbytes}"
    assert report(prompt_id="two") == ["On the CPU: nothing in VRAM."]
    del reference


def test_alone_after_a_run_that_kept_its_model(name: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host has let go of the loader, which is in no graph any more: the transformer left VRAM, not RAM."""
    only("sim", monkeypatch)
    reference = run(name, "sim")
    assert sim.stats().allocated_bytes > 0
    pipe = reference.open()
    nbytes = sum(unit.host_bytes for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder))
    in_all = sum(unit.host_bytes for unit in manager("sim").units())  # what other tests have open stays
    before, after, copies = map(format_bytes, (in_all, in_all - nbytes, nbytes))
    del pipe, reference
    gc.collect()
    assert report() == [
        "Nothing to free in VRAM: what no open workflow uses had left it.",
        f"RAM: {before} -> {after}, freed {copies} of copies that no open model uses",
    ]
    assert sim.stats().allocated_bytes == 0
    assert report() == ["Nothing to free in VRAM: no model is there."]


def test_copies_of_an_open_model_stay(name: str, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    only("sim", monkeypatch)
    reference = run(name, "sim")
    lines = report()
    assert not [line for line in lines if line.startswith("RAM")] and "-> 0 B" in lines[0]
    assert sum(unit.host_bytes for unit in reference.open().denoisers) > 0
