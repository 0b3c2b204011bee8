"""LoRAs of a MODEL with a VRAM budget: merged in VRAM as ever, and at each use where ComfyUI leaves weights in RAM."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from ballast.nodes.budget import VramBudget
from ballast.nodes.native.model_budget import with_budget
from host import page, run_node
from node_runner import native_models
from test_native_budget import (
    MB,
    TOTAL,
    Control,
    DynamicPatcher,
    dynamic,
    fail,
    fake,
    functions_on,
    made,
    run_through,
    sample,
    stop,
    unload,
)

__all__ = ["fake", "made"]  # fixtures

on_host = pytest.mark.host


def assert_near(picture: torch.Tensor, plain: torch.Tensor, without: torch.Tensor) -> None:
    """Compare a picture with that of the whole model in VRAM, by what the LoRAs themselves change."""
    assert (picture - plain).abs().mean() < 0.02 * (without - plain).abs().mean()


TYPES = {
    "fp32": (torch.float32, torch.float32),
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp8 in bf16": (torch.float8_e4m3fn, torch.bfloat16),
}


@on_host
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_picture_is_the_same_where_the_host_loads_wholly(
    types: tuple[torch.dtype, ...], card: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    import comfy.float

    rounded = comfy.float.stochastic_rounding
    monkeypatch.setattr(  # this card makes no random numbers
        comfy.float, "stochastic_rounding", lambda x, *a, **k: rounded(x.cpu(), *a, **k).to(x.device)
    )
    card.enable(total="192MB")
    unet = native_models().unet(dtype=types[0], computes_in=types[1])
    unet.model.memory_usage_factor = 0.127
    model = native_models().with_loras(unet, 1, 2)
    control = native_models().control()
    plain = sample(model, control)
    assert not torch.equal(plain, sample(unet, control)), "there are LoRAs"
    unload()
    with page() as shown:
        budgeted = run_node(VramBudget, model=model, vram_gb=64 / 1024).result[0]
        assert torch.equal(sample(budgeted, control), plain)
    assert "LoRAs" not in shown.texts[-1][1]
    assert budgeted.patches == model.patches and budgeted.patches_uuid == model.patches_uuid


@on_host
def test_loras_on_weights_in_ram_are_the_hosts_and_told(made: Any, card: ModuleType) -> None:
    """It merges in float16 here, and computes in float32: no number may differ by more than rounding."""
    model = native_models().with_loras(made, 1, 2)
    without, plain = sample(made), sample(model)
    unload()
    with page() as shown:
        budgeted = run_node(VramBudget, model=model, vram_gb=12 / 1024).result[0]
        assert_near(sample(budgeted), plain, without)
    assert set(functions_on(made.model)) == {"LowVramPatch"}, "those of the host"
    told = "LoRAs on weights in RAM as ComfyUI computes them: the picture can differ slightly"
    assert shown.texts[-1][1].endswith(told)
    with page() as shown:
        whole = run_node(VramBudget, model=model, vram_gb=64 / 1024).result[0]
        assert_near(sample(whole), plain, without)
    assert "LoRAs" not in shown.texts[-1][1], "all of it is in VRAM again"


@on_host
def test_loras_that_come_after_the_budget_run_too(made: Any, card: ModuleType) -> None:
    more = native_models().with_loras
    plain = sample(more(made, 3))
    unload()
    budgeted = run_node(VramBudget, model=made, vram_gb=60 / 1024).result[0]
    assert torch.equal(sample(more(budgeted, 3)), plain)


# Dynamic VRAM, whose patches the host gives to each page as it comes


ENDS = {"success": lambda: None, "error": fail, "interrupt": stop}


@pytest.mark.parametrize("end", ENDS)
def test_headroom_with_loras_is_set_before_and_put_back_after(
    end: str, fake: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fakes of the dynamic memory's control and of a patcher: its patches stay as they are."""
    control, seen = Control(), []
    dynamic(monkeypatch, control)
    patcher, lora = DynamicPatcher(), [(0.7, object(), 1.0, None, None)]
    patcher.patches = {"diffusion_model.linear.weight": lora}
    clone = with_budget(patcher, 24 * MB, print).model
    clone.patches = {key: [*each] for key, each in patcher.patches.items()}  # as the host's own clone has them

    def look() -> None:
        seen.append(control.value)
        ENDS[end]()

    with contextlib.suppress(torch.OutOfMemoryError, mm.InterruptProcessingException):
        run_through(clone, look)
    assert seen == [TOTAL - 24 * MB] and control.written == [TOTAL - 24 * MB, MB]
    assert clone.patches == patcher.patches and clone.patches["diffusion_model.linear.weight"] == lora
    assert clone.unloads == []


@on_host
@pytest.mark.parametrize("end", ENDS)
def test_dynamic_model_with_loras_on_the_hosts_own_sampler(
    end: str, made: Any, card: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A MODEL that says it is dynamic, with two LoRAs and a ControlNet: the host does all the rest."""
    model = native_models().with_loras(made, 1, 2)
    control_net = native_models().control(ch=64)
    plain = sample(model, control_net)
    unload()
    monkeypatch.setattr(type(made), "is_dynamic", lambda self: self.model is made.model)
    control, seen = Control(2 * MB), []
    dynamic(monkeypatch, control)
    budgeted = run_node(VramBudget, model=model, vram_gb=40 / 1024).result[0]
    assert budgeted.patches == model.patches and budgeted.patches_uuid == model.patches_uuid

    def look(*_: Any) -> None:
        seen.append(control.value)
        ENDS[end]()

    with page() as shown:
        if end == "success":
            assert torch.equal(sample(budgeted, control_net, callback=look), plain)
        else:
            with pytest.raises(mm.InterruptProcessingException if end == "interrupt" else torch.OutOfMemoryError):
                sample(budgeted, control_net, callback=look)
    assert seen and set(seen) == {152 * MB}, "192 MB less 40"
    assert control.written == [152 * MB, 2 * MB]
    assert " of 40.0 MB; " in shown.texts[-1][1] and "LoRAs" not in shown.texts[-1][1]
