"""VRAM Report and the timeline see the host's own models too: which, where, how much, and drawn over time."""

from __future__ import annotations

import re
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from ballast.memory.host import management as host
from ballast.memory.memory_manager import manager
from ballast.memory.reports.observed import Observation
from ballast.memory.sizes import format_bytes
from ballast.nodes.budget import VramBudget
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.report import VramReport
from ballast.nodes.sample import Sampler
from ballast.nodes.shared.folders import DEMO
from host import page, run_node
from node_runner import native_models
from pictured.bands import MODELS, drawn
from test_native_budget import sample, unload

on_host = pytest.mark.host


def test_ram_of_dynamic_models_is_what_they_have_read_and_pinned() -> None:
    pages = SimpleNamespace(
        is_dynamic=lambda: True, loaded_ram_size=lambda: 30, pinned_memory_size=lambda: 20, model_size=lambda: 100
    )
    assert (host.model_ram_bytes(pages), host.model_pinned_bytes(pages)) == (30, 20)
    module = torch.nn.Linear(4, 2)
    tensors = SimpleNamespace(model=module, pinned={"weight"}, model_size=lambda: 40, loaded_size=lambda: 10)
    assert (host.model_ram_bytes(tensors), host.model_pinned_bytes(tensors)) == (30, 32)


# On a real ComfyUI in this process, whose device is the simulated card


@pytest.fixture
def models(card: ModuleType) -> Iterator[list[Any]]:
    """The patchers of a CLIP, a UNet and a VAE."""
    manager("sim").timeline.clear()
    unet = native_models().unet()
    unet.model.memory_usage_factor = 0.01  # or the host would make room for more than there is
    yield [native_models().clip().patcher, unet, native_models().vae().patcher]


def load(*patchers: Any) -> None:
    with torch.inference_mode():
        mm.load_models_gpu(list(patchers))


@on_host
def test_every_model_of_the_host_is_told_with_role_and_bytes(models: list[Any]) -> None:
    load(*models)
    with torch.inference_mode():
        models[0].partially_unload(torch.device("cpu"), 2**21)
    told = {guest.name: guest for guest in manager("sim").report().guests}
    assert {name: guest.role for name, guest in told.items()} == MODELS
    for patcher in models:
        guest = told[f"{type(patcher.model).__name__} (ComfyUI)"]
        assert guest.resident_bytes == patcher.loaded_size() > 0
        assert guest.resident_bytes + guest.host_bytes == guest.size_bytes == patcher.model_size()
        assert (guest.placement, guest.tier) == ("streamed" if patcher is models[0] else "resident", "device")
    text = run_node(VramReport).result[1]
    assert all(name in text for name in MODELS) or text == "Nothing has run yet."
    said, report = str(manager("sim").report()), manager("sim").report()
    there, kept = (
        format_bytes(sum(getattr(guest, name) for guest in report.guests)) for name in ("resident_bytes", "host_bytes")
    )
    assert said.startswith(f"sim:0: {there} of ComfyUI's models, ") and f"; RAM: {kept} of ComfyUI's models\n" in said
    assert " of weights" not in said, "there are none of Ballast's"
    run_node(
        TextEncode,
        pipeline=run_node(LoadPipeline, pipeline=DEMO, device="auto").result[0],
        prompt="a red square",
        negative_prompt="",
    )
    assert re.match(r"\S+ .* of weights in a budget of .*; ComfyUI's models: .* there, ", str(manager("sim").report()))


@on_host
def test_nodes_are_observed_while_they_run(models: list[Any], card: ModuleType) -> None:
    timeline = manager("sim").timeline
    for name, patcher in zip(("encode", "sample", "decode"), models, strict=True):
        observed = Observation(timeline, name, "prompt", 2**26)
        load(patcher)
        if name == "sample":
            sample(patcher)
            observed.look()
        observed.finish()
    assert [stage.name for stage in timeline.stages] == ["encode", "sample", "decode"]
    encode, denoise, _ = timeline.stages
    assert encode.units["SD1ClipModel (ComfyUI)"].bytes_in == models[0].loaded_size()
    assert denoise.units["SD1ClipModel (ComfyUI)"].bytes_in == 0
    assert denoise.peak_bytes > models[0].loaded_size() + models[1].loaded_size()
    assert all(count > 20 for count in drawn(timeline.picture(900, 450)).values())


@on_host
def test_budget_and_timeline_see_the_same_peak(models: list[Any], card: ModuleType) -> None:
    """A device has one peak, and both ask for it, again and again while the sampler runs."""
    timeline = manager("sim").timeline
    with page() as shown:
        budgeted = run_node(VramBudget, model=models[1], vram_gb=0.05).result[0]
        observed = Observation(timeline, "KSampler", "prompt", 2**26)
        sample(budgeted, callback=lambda *_: observed.look())
        observed.finish()
    assert card.stats().peak_bytes == timeline.stages[-1].peak_bytes > 2**22
    assert shown.texts[-1][1].startswith(f"peak {format_bytes(card.stats().peak_bytes)} of ")


@on_host
def test_a_node_that_does_nothing_there_is_left_out(models: list[Any]) -> None:
    load(models[1])
    timeline = manager("sim").timeline
    observed = Observation(timeline, "EmptyLatentImage", "prompt", 2**26)
    torch.zeros(100, 100)
    observed.finish()
    assert list(timeline.stages) == []


@on_host
def test_our_stages_show_the_models_beside_them(models: list[Any], card: ModuleType) -> None:
    load(models[0])
    timeline = manager("sim").timeline
    reference = run_node(LoadPipeline, pipeline=DEMO, device="auto").result[0]
    observed = Observation(timeline, "BallastTextEncode", "prompt", 2**26)
    conditioning = run_node(TextEncode, pipeline=reference, prompt="a blue square", negative_prompt="").result[0]
    observed.finish()
    run_node(Sampler, pipeline=reference, conditioning=conditioning, steps=2)
    assert [stage.name for stage in timeline.stages] == ["encode", "sample"], "ours tell more"
    (guest,) = timeline.stages[-1].events[-1].guests
    assert (guest.name, guest.bytes) == ("SD1ClipModel (ComfyUI)", models[0].loaded_size())
    ours = {unit.name: unit.role for event in timeline.stages[-1].events for unit in event.residents}
    roles = {**{name: ours[name] for name in ours}, "SD1ClipModel (ComfyUI)": "text_encoder"}
    assert drawn(timeline.picture(900, 450, stages=1), roles)["SD1ClipModel (ComfyUI)"] > 1000
    unload()


@on_host
def test_listener_to_the_hosts_progress_never_disturbs_it(models: list[Any], caplog: Any) -> None:
    from comfy_execution.graph import DynamicPrompt
    from comfy_execution.progress import get_progress_state, reset_progress_state

    prompt = {"1": {"class_type": "CLIPTextEncode", "inputs": {}}, "2": {"class_type": "Other", "inputs": {}}}
    reset_progress_state("prompt", DynamicPrompt(prompt))
    assert VramReport.fingerprint_inputs() == VramReport.fingerprint_inputs() == ""
    progress = get_progress_state()
    progress.start_progress("1")
    load(models[0])
    progress.update_progress("1", 1, 2)
    progress.finish_progress("1")
    progress.finish_progress("2")  # from the host's cache
    (stage,) = manager("sim").timeline.stages
    assert (stage.name, stage.run) == ("CLIPTextEncode", "prompt")
    assert len(stage.events) == 3, "at its start, at its step, and at its end"
    progress.finish_progress("1")
    assert list(manager("sim").timeline.stages) == [stage], "once"
    progress.start_progress("not in the graph")
    progress.update_progress("not in the graph", 1, 1)
    progress.finish_progress("not in the graph")
    assert "cannot tell what a node did with VRAM" in caplog.text
