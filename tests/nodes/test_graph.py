"""What the running graph tells: the order of its nodes, and which models they need."""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import folder_paths
import pytest
import tiny
import torch
from ballast.memory.memory_manager import MemoryManager, manager
from ballast.memory.planning.fit import sizes_of
from ballast.memory.weights.unit import ManagedModel
from ballast.nodes.budget import VramBudget
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import FreeVram
from ballast.nodes.load import LoadPipeline
from ballast.nodes.sample import Sampler
from ballast.nodes.shared.graph import coming_host_roles, execution_order
from conftest import HOST
from host import run_node

CLASSES = {
    "BallastLoadPipeline": LoadPipeline,
    "BallastTextEncode": TextEncode,
    "BallastSampler": Sampler,
    "BallastVAEDecode": VaeDecode,
}
OUTPUTS = {"PreviewImage", "BallastFreeVRAM"}


def node(class_type: str, **inputs: Any) -> dict[str, Any]:
    return {"class_type": class_type, "inputs": inputs}


def branch(name: str) -> dict[str, Any]:
    """One picture, from a loader to a preview."""
    return {
        f"load{name}": node("BallastLoadPipeline", pipeline="lumina2"),
        f"encode{name}": node("BallastTextEncode", pipeline=[f"load{name}", 0]),
        f"sample{name}": node("BallastSampler", pipeline=[f"load{name}", 0], conditioning=[f"encode{name}", 0]),
        f"decode{name}": node("BallastVAEDecode", pipeline=[f"load{name}", 0], latent=[f"sample{name}", 0]),
        f"show{name}": node("PreviewImage", images=[f"decode{name}", 0]),
    }


def order(prompt: dict[str, Any]) -> list[str]:
    return execution_order(prompt, OUTPUTS.__contains__)


def test_order_of_a_chain() -> None:
    assert order(branch("A")) == ["loadA", "encodeA", "sampleA", "decodeA", "showA"]


def test_nodes_that_no_output_needs_do_not_run() -> None:
    prompt = branch("A") | {"idle": node("BallastTextEncode", pipeline=["loadA", 0])}
    assert "idle" not in order(prompt)


def test_one_branch_is_done_before_the_next_is_far() -> None:
    found = order(branch("A") | branch("B"))
    assert found.index("showA") < found.index("decodeB")


def test_cycles_and_broken_links_end() -> None:
    loop = {"a": node("PreviewImage", x=["b", 0]), "b": node("X", x=["a", 0])}
    assert order(loop) == []
    assert order({"a": node("PreviewImage", x=["gone", 0], y=[["odd"], 1], z="text")}) == ["a"]


@pytest.mark.skipif(HOST is None, reason="needs the modules of a real ComfyUI")
def test_order_is_the_hosts_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random graphs, against the list that ComfyUI itself executes from."""
    from comfy_execution.graph import DynamicPrompt, ExecutionList

    import nodes

    class Plain:
        FUNCTION, OUTPUT_NODE = "run", False

        @classmethod
        def INPUT_TYPES(cls) -> dict:  # noqa: N802
            return {"required": {}}

        def run(self) -> None: ...

    class Output(Plain):
        OUTPUT_NODE = True

    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "X", Plain)
    monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, "PreviewImage", Output)

    class NoCache:
        def get_local(self, name: str) -> None: ...

    async def of_the_host(prompt: dict[str, Any]) -> list[str]:
        listed = ExecutionList(DynamicPrompt(prompt), NoCache())
        for name in prompt:
            if prompt[name]["class_type"] == "PreviewImage":
                listed.add_node(name)
        found = []
        while not listed.is_empty():
            name, *_ = await listed.stage_node_execution()
            found.append(name)
            listed.complete_node_execution()
        return found

    rng = random.Random(0)
    for _ in range(200):
        count = rng.randint(2, 12)
        prompt = {
            str(i): node(
                rng.choice(["X", "X", "PreviewImage"]),
                **{f"in{k}": [str(rng.randrange(i)), 0] for k in range(rng.randint(0, 3)) if i},
            )
            for i in range(count)
        }
        assert order(prompt) == asyncio.run(of_the_host(prompt))


# Through the nodes


NAMES = ("first", "second", "third")


@pytest.fixture(scope="module")
def folders() -> Iterator[None]:
    """Three pipelines of one size in models/diffusers, most of which is blocks."""
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    pipe = tiny.FAMILIES["lumina2"].build()
    torch.manual_seed(0)
    config = dict(pipe.transformer.config) | {"num_layers": 24}
    pipe.register_modules(transformer=type(pipe.transformer).from_config(config))
    for name in NAMES:
        pipe.save_pretrained(root / name, safe_serialization=True)
    yield
    for name in NAMES:
        shutil.rmtree(root / name)


def run_graph(prompt: dict[str, Any]) -> dict[str, Any]:
    """Run our nodes of a prompt in its order, as the host does: every node is given the whole prompt."""
    results: dict[str, Any] = {}
    for name in order(prompt):
        cls = CLASSES.get(prompt[name]["class_type"])
        if cls is not None:
            given = {
                key: results[value[0]][value[1]] if isinstance(value, list) else value
                for key, value in prompt[name]["inputs"].items()
                if key != "after"  # a link for the order alone
            }
            results[name] = run_node(cls, node_id=name, hidden={"prompt": prompt}, **given).result
    return results


def alternating(names: Sequence[str], runs: int) -> dict[str, Any]:
    prompt: dict[str, Any] = {}
    for name in names:
        prompt[f"load {name}"] = node("BallastLoadPipeline", pipeline=name, device="sim")
        prompt[f"encode {name}"] = node("BallastTextEncode", pipeline=[f"load {name}", 0], prompt="boat")
    for run in range(runs):
        name = names[run % len(names)]
        prompt[f"sample {run}"] = node(
            "BallastSampler",
            pipeline=[f"load {name}", 0],
            conditioning=[f"encode {name}", 0],
            width=48,
            height=32,
            steps=2,
            seed=run,
        )
        if run:
            prompt[f"sample {run}"]["inputs"]["after"] = [f"sample {run - 1}", 0]
        prompt[f"show {run}"] = node("PreviewImage", images=[f"sample {run}", 0])
    return prompt


@pytest.fixture
def ours(folders: None, sim: ModuleType) -> Iterator[MemoryManager]:
    yield manager("sim")
    manager("sim").limit()


def transformers(ours: MemoryManager) -> list[ManagedModel]:
    return [unit for unit in ours.units() if unit.role == "transformer" and unit.label in NAMES]


@pytest.mark.soak
def test_alternating_pipelines_reload_what_the_optimum_does(ours: MemoryManager) -> None:
    """Room for one and a half: each switch takes half a transformer of the other, and brings half of the own back."""
    runs = 6
    prompt = alternating(NAMES[:2], runs)
    free = run_graph(prompt)  # what sampling works in is known from now on
    ours.free()
    first, second = transformers(ours)
    size, works = first.size_bytes, max(map(ours.work.working_bytes, (first, second)))
    ours.limit(vram=size + size // 2 + works)
    before = ours.device_bytes_in
    results = run_graph(prompt)
    loaded = ours.device_bytes_in - before
    optimum = 2 * size + (runs - 2) * (size - size // 2)
    group = max(group.held_bytes for group in sizes_of(first).groups)
    assert optimum <= loaded <= optimum + (runs - 2) * 2 * group, "whole pieces leave, and the loop's own tensors count"
    assert loaded < 0.75 * runs * size, "which is what whole transformers would take"
    for name in (name for name in results if name.startswith("sample")):
        assert torch.equal(results[name][0]["samples"], free[name][0]["samples"])


@pytest.mark.soak
def test_what_later_nodes_need_stays(ours: MemoryManager) -> None:
    """When the third comes, the first is the least recently used, and the one that the next node needs."""
    prompt = alternating(NAMES, 4)
    kept = run_graph(prompt)
    ours.free()
    size, works = transformers(ours)[0].size_bytes, max(map(ours.work.working_bytes, transformers(ours)))
    ours.limit(vram=2 * size + size // 8 + works)
    before = ours.device_bytes_in
    run_graph(prompt)
    assert ours.device_bytes_in - before == 3 * size
    del kept


# ComfyUI's own models


def native(control: bool = False) -> dict[str, Any]:
    """ComfyUI's own graph around one of our encoders, with a LoRA and a budget, and perhaps a ControlNet."""
    links = {"positive": ["encode", 1], "negative": ["encode", 2], "latent_image": ["empty", 0]}
    found = {
        "load": node("CheckpointLoaderSimple", ckpt_name="x"),
        "lora": node("LoraLoader", model=["load", 0], clip=["load", 1], lora_name="x"),
        "budget": node("BallastVramBudget", model=["lora", 0]),
        "encode": node("BallastTextEncode", pipeline=["lora", 1]),
        "empty": node("EmptyLatentImage"),
        "sample": node("KSampler", model=["budget", 0], **links),
        "free": node("BallastFreeVRAM", value=["sample", 0]),
        "decode": node("VAEDecode", vae=["load", 2], samples=["free", 0]),
        "show": node("PreviewImage", images=["decode", 0]),
    }
    if control:
        found["net"] = node("ControlNetLoader", control_net_name="x")
        found["apply"] = node("ControlNetApply", conditioning=["encode", 1], control_net=["net", 0])
        found["sample"]["inputs"]["positive"] = ["apply", 0]
    return found


@pytest.mark.skipif(HOST is None, reason="needs the nodes of a real ComfyUI")
def test_models_of_the_host_that_later_nodes_use(monkeypatch: pytest.MonkeyPatch) -> None:
    import nodes

    for one in (TextEncode, FreeVram, VramBudget):
        monkeypatch.setitem(nodes.NODE_CLASS_MAPPINGS, one.GET_SCHEMA().node_id, one)

    def coming(here: str, **more: Any) -> list[str] | None:
        hidden = SimpleNamespace(prompt=native(**more), unique_id=here)
        return coming_host_roles(SimpleNamespace(hidden=hidden))  # type: ignore[arg-type]

    assert coming("load") == ["text_encoder", "transformer", "vae"], "neither LoRA nor budget runs a model"
    assert coming("encode") == ["transformer", "vae"]
    assert coming("sample") == ["vae"] and coming("decode") == []
    assert coming("encode", control=True) == ["other", "transformer", "other", "vae"]
    assert coming("apply", control=True) == ["transformer", "other", "vae"]
    assert coming("not there") is None
