"""Knobs that are turned between two runs of ComfyUI's own graph, over HTTP: the picture, the card, the host itself."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from typing import Any

import pytest
from host import HostServer, missing
from host_graphs import encoding, loaded, node, seen, summary

pytestmark = pytest.mark.host

MB = 2**20


@pytest.fixture(scope="module")
def server() -> Iterator[HostServer]:
    if reason := missing():
        pytest.skip(reason)
    with HostServer(sim="64MB") as server:
        server.request("/sim_device", {"total": "64MB", "weights": 0.0})
        yield server


@pytest.fixture
def host(server: HostServer) -> HostServer:
    server.free()
    assert server.device()["allocated_bytes"] == 0
    server.events.clear()
    return server


def graph(budget: float | None = None, seed: int = 0, strength: float | None = None) -> dict[str, Any]:
    """A checkpoint, two LoRAs unless strength is None, a ControlNet and KSampler, with a budget in MB.

    None where the node is muted.
    """
    sampling = {"steps": 2, "cfg": 4.0, "sampler_name": "euler", "scheduler": "normal", "denoise": 1.0}
    patched = "unet" if strength is None else "second"
    last = patched if budget is None else "budget"
    control = {"strength": 0.9, "start_percent": 0.0, "end_percent": 1.0}
    conditionings = {"positive": ["encode", 1], "negative": ["encode", 2]}
    applied = {"positive": ["apply", 0], "negative": ["apply", 1], "latent_image": ["empty", 0]}
    found = {
        "clip": loaded("Clip"),
        "encode": encoding(),
        "unet": loaded("HalfUnet", seed, width=64),
        "net": loaded("Control", width=64),
        "hint": node("EmptyImage", width=64, height=64, batch_size=1, color=0x336699),
        "apply": node("ControlNetApplyAdvanced", control_net=["net", 0], image=["hint", 0], **control, **conditionings),
        "empty": node("EmptyLatentImage", width=64, height=64, batch_size=1),
        "sample": node("KSampler", model=[last, 0], seed=5, **sampling, **applied),
        "seen": seen("sample", 0),
    }
    if strength is not None:
        found["first"] = node("TestAddLora", model=["unet", 0], seed=1, strength=0.7)
        found["second"] = node("TestAddLora", model=["first", 0], seed=2, strength=strength)
    if budget is not None:
        found["budget"] = node("BallastVramBudget", model=[patched, 0], vram_gb=budget / 1024)
    return found


def latents(entry: dict[str, Any]) -> Any:
    return summary(entry, "seen")


def said(server: HostServer) -> str:
    texts = [data["text"] for kind, data in server.events if kind == "progress_text" and data["node"] == "budget"]
    return texts[-1]


def peak(text: str) -> float:
    """In MB."""
    found = re.match(r"peak ([\d.]+) MB of", text)
    assert found, text
    return float(found[1])


def test_budget_turned_between_runs(host: HostServer) -> None:
    """8 MB of weights in bfloat16, and 9.4 MB of the ControlNet's."""
    before = host.get("/sim_device/host")
    plain = latents(host.run(graph()))
    whole = sum(host.device()["loaded"].values())
    assert whole > 17 * MB
    for budget in (18, 22, 14, 6, 60, 14, 0):
        host.events.clear()
        entry = host.run(graph(budget))
        assert latents(entry) == plain, budget
        if not budget:
            assert said(host) == "no budget"
            continue
        text, held = said(host), host.device()["loaded"]
        assert peak(text) <= budget + 1.2, "what was there before has left"
        assert ("over the target" in text) == (peak(text) > budget)
        assert (held["BaseModel"] + held["ControlNet"] < whole) == (budget < 20), (budget, text)
    # Muted: all comes from the cache but the sampler, which runs as ever.
    assert latents(host.run(graph())) == plain
    assert sum(host.device()["loaded"].values()) == whole
    after = host.get("/sim_device/host")
    assert {name: after.get(name) for name in before} == before, "nothing of the host is replaced"


def test_model_and_loras_turned_between_runs(host: HostServer) -> None:
    """All of the model fits the budget: where some of it does not, LoRAs are computed by ComfyUI as it likes."""
    turns: list[dict[str, Any]] = [{"seed": 0, "strength": 0.7}, {"seed": 3, "strength": 0.7}]
    turns += [{"seed": 3, "strength": -0.4}, {"seed": 0, "strength": 0.7}]
    with_budget = [latents(host.run(graph(40, **turn))) for turn in turns]
    host.free()
    without = []
    for turn in turns[:3]:
        without.append(latents(host.run(graph(**turn))))
        host.free()
    assert with_budget == [*without, without[0]]
    assert len({str(each) for each in without}) == 3
    assert host.device()["allocated_bytes"] == 0


def test_stopped_run_leaves_all_in_order(host: HostServer) -> None:
    plain = latents(host.run(graph()))
    nodes = graph(14)
    nodes["sample"]["inputs"]["steps"] = 900
    host.events.clear()
    queued = host.queue(nodes)
    while not any(kind == "progress" and data.get("node") == "sample" for kind, data in host.events):
        time.sleep(0.01)
    host.interrupt()
    assert HostServer.error(host.wait(queued)) == "KSampler: interrupted"
    assert latents(host.run(graph(14))) == plain == latents(host.run(graph()))
    host.free()
    assert host.device()["allocated_bytes"] == 0
