"""LoRAs of a MODEL with a VRAM budget: on weights in RAM they give the numbers of those in VRAM."""

from __future__ import annotations

import contextlib
from types import ModuleType
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from ballast.nodes.budget import VramBudget
from ballast.nodes.native.budget import with_budget
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

TYPES = {
    "bf16": (torch.bfloat16, torch.bfloat16, torch.float16),
    "bf16, merged in fp32": (torch.bfloat16, torch.bfloat16, torch.float32),
    "fp16": (torch.float16, torch.float16, torch.float16),
    "bf16 in fp32": (torch.bfloat16, torch.float32, torch.float16),
    "fp8 in bf16": (torch.float8_e4m3fn, torch.bfloat16, torch.float16),
    "fp8 in fp16": (torch.float8_e5m2, torch.float16, torch.float32),
}


@on_host
@pytest.mark.parametrize("types", TYPES.values(), ids=TYPES)
def test_loras_give_the_picture_of_the_whole_model_in_vram(
    types: tuple[torch.dtype, ...], card: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of types that weights are stored in, computed in, and merged in: fp16 on most cards, fp32 where that is slow."""
    import comfy.float

    rounded = comfy.float.stochastic_rounding
    monkeypatch.setattr(  # this card makes no random numbers
        comfy.float, "stochastic_rounding", lambda x, *a, **k: rounded(x.cpu(), *a, **k).to(x.device)
    )
    monkeypatch.setattr(mm, "lora_compute_dtype", lambda device: types[2])
    card.enable(total="192MB")
    unet = native_models().unet(dtype=types[0], computes_in=types[1])
    unet.model.memory_usage_factor = 0.127
    made = native_models().with_loras(unet, 1, 2)
    control = native_models().control()
    plain = sample(made, control)
    assert not torch.equal(plain, sample(unet, control)), "there are LoRAs"
    unload()
    with page() as shown:
        budgeted = run_node(VramBudget, model=made, vram_gb=1 / 1024).result[0]
        assert torch.equal(sample(budgeted, control), plain)
    assert budgeted.loaded_size() <= 8000 and "LoRAs" not in shown.texts[-1][1]
    assert set(functions_on(made.model)) == {"LowVramPatch"}, "those of the host"


@on_host
def test_loras_that_cannot_be_as_in_vram_are_told(card: ModuleType) -> None:
    import comfy.ops

    class Packs(comfy.ops.disable_weight_init.Linear):
        """A layer that may compute otherwise where there is a function on its weight."""

    card.enable(total="192MB")
    for dtype, count in ((torch.float32, 80), (torch.bfloat16, 1)):
        unet = native_models().unet(dtype=dtype, computes_in=torch.bfloat16)
        linears = [part for part in unet.model.modules() if isinstance(part, torch.nn.Linear)]
        linears[5].__class__ = Packs
        made = native_models().with_loras(unet, 1)
        with page() as shown:
            assert sample(run_node(VramBudget, model=made, vram_gb=1 / 1024).result[0]).isfinite().all()
        said = f"LoRAs on {count} weights in RAM as ComfyUI computes them: the picture can differ slightly"
        assert shown.texts[-1][1].endswith(said), shown.texts[-1]


@on_host
def test_loras_that_come_after_the_budget_count_alike(made: Any, card: ModuleType) -> None:
    """In a clone of the clone, and in two of these by turns, which no change of the model's weights parts."""
    more = native_models().with_loras
    plain = sample(more(made, 3))
    unload()
    budgeted = run_node(VramBudget, model=made, vram_gb=12 / 1024).result[0]
    added = more(budgeted, 3)
    with page() as shown:
        assert torch.equal(sample(added), plain)
        first, second = added.clone(), added.clone()
        assert torch.equal(sample(first), plain)
        loaded, uuid = added.model.model_loaded_weight_memory, added.model.current_weight_patches_uuid
        assert torch.equal(sample(second), plain) and torch.equal(sample(first), plain)
    assert added.model.model_loaded_weight_memory == loaded and added.model.current_weight_patches_uuid == uuid
    assert not any("LoRAs" in text for _, text in shown.texts)


@on_host
def test_a_changed_budget_does_not_read_the_weights_anew(made: Any, card: ModuleType) -> None:
    plain = sample(made)
    unload()
    first = run_node(VramBudget, model=made, vram_gb=16 / 1024).result[0]
    assert torch.equal(sample(first), plain)
    moved = made.model.model_loaded_weight_memory
    card.reset_stats()
    second = run_node(VramBudget, model=made, vram_gb=15.5 / 1024).result[0]
    assert second.patches_uuid == first.patches_uuid != made.patches_uuid
    with page() as shown:
        assert torch.equal(sample(second), plain)
    assert 0 < made.model.model_loaded_weight_memory < moved and "LoRAs" not in shown.texts[-1][1]


@on_host
def test_weights_that_the_host_moves_for_a_clone_that_is_gone(made: Any, card: ModuleType) -> None:
    """It asks the parent, whose patches are as they were."""
    plain = sample(made)
    unload()
    for budget in (60, 22, 14, 18, 12):  # the last clone goes as the next one comes
        budgeted = run_node(VramBudget, model=made, vram_gb=budget / 1024).result[0]
        with page() as shown:
            assert torch.equal(sample(budgeted), plain), budget
        assert "LoRAs" not in shown.texts[-1][1]
        moved = made.partially_unload(torch.device("cpu"), 2 * MB) if budget == 22 else 0
        assert (moved > 0) == (budget == 22)


@on_host
@pytest.mark.parametrize("dtype", [torch.float32, torch.float8_e4m3fn], ids=str)
def test_merging_and_saving_find_the_patches_as_they_were(
    dtype: torch.dtype, card: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nodes that look into the patches of a MODEL with a budget: none of them samples."""
    import comfy.float

    rounded = comfy.float.stochastic_rounding
    monkeypatch.setattr(comfy.float, "stochastic_rounding", lambda x, *a, **k: rounded(x.cpu(), *a, **k).to(x.device))
    unet = native_models().unet(dtype=dtype, computes_in=torch.float32)
    made, other = native_models().with_loras(unet, 1, 2), native_models().unet(5)
    budgeted = run_node(VramBudget, model=made, vram_gb=1 / 1024).result[0]
    key = next(iter(made.patches))
    assert [type(patch[1]).__name__ for patch in budgeted.patches[key]] == ["AsMerged"]

    def merged(model: Any) -> Any:
        clone = other.clone()
        clone.add_patches({key: model.get_key_patches("diffusion_model.")[key]}, 0.4, 0.6)
        return clone

    results = []
    for model in (made, budgeted):
        saved = model.patch_weight_to_device(key, device_to=model.load_device, return_weight=True)
        both = merged(model).patch_weight_to_device(key, device_to=model.load_device, return_weight=True)
        results.append((saved.float().cpu(), both.float().cpu()))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])
    twice = run_node(VramBudget, model=merged(budgeted), vram_gb=1 / 1024).result[0]
    (patch,) = twice.patches[key][0][1].patches
    assert [type(each[1]).__name__ for each in patch[1][1:]] == ["LoRAAdapter", "LoRAAdapter"]


@on_host
def test_lora_without_memory_is_an_error(made: Any, card: ModuleType) -> None:
    """The host logs it and goes on without that LoRA."""
    import comfy.model_patcher
    from ballast.nodes.native.at_use import sampling
    from ballast.nodes.native.lora import as_merged

    clone = made.clone()
    as_merged(clone)
    linear = next(part for part in made.model.diffusion_model.modules() if isinstance(part, torch.nn.Linear))
    key = next(name for name, part in made.model.named_modules() if part is linear) + ".weight"
    function, weight = comfy.model_patcher.LowVramPatch(key, clone.patches), linear.weight.to(made.load_device)
    assert not torch.equal(function(weight.clone()), weight)
    with sampling(), card.fail_after(1), pytest.raises(torch.OutOfMemoryError):
        function(weight.clone())


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
    control_net = native_models().control(ch=64)
    plain = sample(made, control_net)
    unload()
    monkeypatch.setattr(type(made), "is_dynamic", lambda self: self.model is made.model)
    control, seen = Control(2 * MB), []
    dynamic(monkeypatch, control)
    budgeted = run_node(VramBudget, model=made, vram_gb=40 / 1024).result[0]
    assert budgeted.patches == made.patches and budgeted.patches_uuid == made.patches_uuid

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
