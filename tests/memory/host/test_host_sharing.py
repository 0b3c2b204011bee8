"""One model, one copy, in a real ComfyUI over HTTP: the loader's knobs are turned between two runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from ballast.nodes.shared.reference import PipelineReference
from ballast.pipelines.encoding.conditioning import Conditioning
from host import HostServer, missing
from host_graphs import node, our_run, summary

pytestmark = pytest.mark.host

MB = 2**20
TRANSFORMER = 3949536  # bytes of the demo's


@pytest.fixture(scope="module")
def server(tiny_folders: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[HostServer]:
    if reason := missing():
        pytest.skip(reason)
    base = tmp_path_factory.mktemp("comfyui")
    models = base / "models" / "diffusers"
    models.mkdir(parents=True)
    (models / "lumina2").symlink_to(tiny_folders("lumina2"), target_is_directory=True)
    with HostServer(base=base, sim="64MB") as server:
        yield server


@pytest.fixture
def host(server: HostServer) -> HostServer:
    server.free()
    assert server.device()["allocated_bytes"] == 0
    assert gone(server)
    server.events.clear()
    return server


def test_cache_of_outputs_sees_what_a_conditioning_holds_and_nothing_in_a_reference() -> None:
    """As ComfyUI 0.38.1 asks: for tensors, and of models whether they are dynamic."""
    items = [torch.ones(2), torch.ones(3)]
    conditioning = Conditioning({"embeds": torch.ones(4), "texts": items}, pictures=(torch.ones(5),))
    assert [tensor.numel() for tensor in conditioning._comfy_cache_tensors()] == [4, 2, 3, 5]
    reference = PipelineReference("a", "b", "auto", None, "cpu", True)
    for output in (conditioning, reference):
        assert not hasattr(output, "is_dynamic")
    assert not hasattr(reference, "_comfy_cache_tensors")


def graph(seed: int = 1, **loading: Any) -> dict[str, Any]:
    nodes = our_run(seed=seed)
    nodes["load"]["inputs"] |= loading
    return nodes


def placement(server: HostServer) -> str:
    (text,) = [data["text"] for kind, data in server.events if kind == "progress_text" and data["node"] == "sample"][
        -1:
    ]
    return text


def test_changed_budget_sits_otherwise_reads_nothing_and_leaves_no_copy(host: HostServer) -> None:
    expected = summary(host.run(graph()), "seen sample")
    before = host.device()
    assert before["in_ram"]["shapes transformer"] == TRANSFORMER
    # In GB: hardly any group stays, some do, all of them.
    for vram_gb, how in ((0.0018, "streamed"), (0.0034, "streamed"), (0, "resident"), (0.0034, "streamed")):
        host.events.clear()
        entry = host.run(graph(vram_gb=vram_gb))
        assert summary(entry, "seen sample") == expected
        assert how in placement(host), (vram_gb, placement(host))
        card = host.device()
        assert card["allocated_bytes"] <= (vram_gb * 2**30 or 64 * MB)
        assert card["allocated_bytes"] == sum(card["loaded"].values()), "each says what it holds"
        assert (card["in_ram"], card["read_bytes"]) == (before["in_ram"], before["read_bytes"])


def test_ram_budget_holds(host: HostServer) -> None:
    expected = summary(host.run(graph()), "seen sample")
    for strategy in ("auto", "leafwise", "streamed"):
        nodes = graph(ram_gb=0.002)
        nodes["sample"]["inputs"]["strategy"] = strategy
        assert summary(host.run(nodes), "seen sample") == expected
        assert sum(host.device()["in_ram"].values()) <= 0.002 * 2**30
        host.free()


def test_another_workflow_in_between_reads_nothing(host: HostServer) -> None:
    host.run(graph())
    before = host.device()
    host.run({"nothing": node("TestSummary", value="")})  # the host lets go of our loader
    between = host.device()
    assert between["allocated_bytes"] == 0 and between["in_ram"] == before["in_ram"]
    host.run(graph(seed=2))
    assert host.device()["read_bytes"] == before["read_bytes"]
    assert host.device()["in_ram"] == before["in_ram"]


def test_changed_model_leaves_one_on_the_card(host: HostServer) -> None:
    host.run(graph())
    nodes = graph(pipeline="lumina2")
    nodes["sample"]["inputs"] |= {"width": 32, "height": 32}
    host.run(nodes)
    card = host.device()
    assert not card["loaded"].get("shapes transformer") and card["loaded"]["lumina2 transformer"]
    assert card["allocated_bytes"] == sum(card["loaded"].values())


def test_unload_models_lets_copies_go_that_nobody_refers_to(host: HostServer) -> None:
    host.run(graph())
    host.request("/free", {"unload_models": True, "free_memory": False})  # and no other prompt, whose cache drops ours
    end = time.monotonic() + 20
    while host.device()["allocated_bytes"] and time.monotonic() < end:
        time.sleep(0.1)
    card = host.device()
    assert card["allocated_bytes"] == 0 and card["in_ram"]["shapes transformer"] == TRANSFORMER, "the graph has them"
    host.run({"nothing": node("TestSummary", value="")})
    host.free(unload_models=True, free_memory=False)
    assert gone(host)


def test_unload_and_free_memory_lets_all_copies_go(host: HostServer) -> None:
    host.run(graph())
    host.request("/free", {"unload_models": True, "free_memory": True})
    assert gone(host)


def gone(server: HostServer) -> bool:
    """Whether the copies in RAM go soon."""
    end = time.monotonic() + 20
    while server.device()["in_ram"] and time.monotonic() < end:
        time.sleep(0.1)
    return not server.device()["in_ram"]
