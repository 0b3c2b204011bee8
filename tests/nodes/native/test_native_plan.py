"""VRAM Plan for ComfyUI's own MODEL: against what the host really takes, and what it says. Nothing is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from ballast.memory.host import management as host
from ballast.nodes.budget import VramBudget
from ballast.nodes.native import plan as native_plan
from ballast.nodes.native.foresee import foresee
from ballast.nodes.native.placing import Part, Placing, in_order, loaded, loading_bytes, shrunk, taken_bytes, unloaded
from ballast.nodes.native.weights import weights_of
from ballast.nodes.plan import VramPlan
from host import page, run_node
from hypothesis import given
from hypothesis import strategies as st
from node_runner import native_models
from test_native_budget import conditionings, sample, unload
from torch import nn

MB = 2**20
on_host = pytest.mark.host


# Rules


SIZES = st.lists(st.tuples(st.integers(1, 100), st.integers(0, 50), st.integers(0, 20)), min_size=1, max_size=30)


@given(sizes=SIZES, room=st.integers(0, 2000), target=st.integers(0, 2000), streams=st.integers(0, 3))
def test_what_stays_fits_beside_its_buffers(sizes: list[Any], room: int, target: int, streams: int) -> None:
    parts = in_order(Part(str(i), *size) for i, size in enumerate(sizes))
    first = loaded(parts, room, streams)
    kept, passing = sum(parts[i].bytes for i in first.held), set(range(len(parts))) - first.held
    if not passing:
        assert first.buffer_bytes == 0 and kept < room
    else:
        assert kept < room or not first.held
        assert first.buffer_bytes >= max(parts[i].bytes + parts[i].beside for i in passing)
    assert kept <= sum(parts[i].bytes for i in loaded(parts, room + 100, streams).held)
    left = shrunk(parts, first, target, streams)
    assert left.held <= first.held and (taken_bytes(parts, left) <= target or not left.held)
    assert taken_bytes(parts, first) > target or left == first
    assert max((i for i in left.held), default=-1) < min(first.held - left.held, default=len(parts))
    assert loading_bytes(parts, first) == kept, "with nothing to merge"


def test_what_leaves_makes_room_for_its_own_buffers_too() -> None:
    parts = in_order(Part(str(size), size) for size in (40, 30, 20, 10))
    whole = Placing(frozenset(range(4)))
    # 10 leaves and needs a buffer of 10, 20 leaves and needs one beside it, and 30 as well, before 5 are free.
    assert unloaded(parts, whole, 5, streams=1) == Placing(frozenset({0}), 50)
    assert unloaded(parts, whole, 5, streams=0) == Placing(frozenset({0, 1}), 20)
    beside = in_order(Part(str(size), size, beside=3) for size in (40, 30, 20, 10))
    assert unloaded(beside, whole, 5, streams=0).buffer_bytes > 20


def test_patches_are_merged_one_by_one_the_largest_weight_first() -> None:
    parts = in_order([Part("a", 100, merging=50), Part("b", 60, merging=90)])
    assert loading_bytes(parts, Placing(frozenset({0, 1}))) == 100 + 90, "b while a is there, and not yet beside itself"
    assert loading_bytes(parts, Placing(frozenset({1}))) == 90
    assert loading_bytes(parts, Placing(frozenset({0}))) == 100


@pytest.mark.parametrize(("at_use", "kept", "most"), [(0, 0, 110), (200, 5, 280), (5, 300, 410)])
def test_peak_counts_a_lora_where_its_weight_passes(
    at_use: int, kept: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Activations of 30 before the product and of 60 in it; of 100 elsewhere. Another weight is on its way."""
    monkeypatch.setattr(host, "copy_streams", lambda: 2)
    weights = SimpleNamespace(parts=in_order([Part("a", 50, at_use=at_use, kept=kept)]))
    facts: Any = native_plan.Facts(weights, None, 100, 0.0, False, {"a": (30, 60)})  # type: ignore[arg-type]
    assert native_plan._peak_bytes(facts, Placing(frozenset())) == 50 + most
    assert native_plan._peak_bytes(facts, Placing(frozenset({0}))) == 50 + 100, "what stays is merged"


class Ggml(torch.Tensor):
    """As a pack for GGUF has its weights."""

    tensor_type = SimpleNamespace(name="Q4_K")


def test_weights_are_told_by_type_each_once() -> None:
    module = nn.Module()
    module.a, module.b = nn.Linear(8, 8, bias=False), nn.Linear(4, 4, bias=False, dtype=torch.bfloat16)
    module.tied = module.a
    module.c = nn.Module()
    module.c.register_parameter("weight", nn.Parameter(torch.ones(16, dtype=torch.float8_e4m3fn), False))
    module.c.register_buffer("packed", torch.ones(10, dtype=torch.uint8).as_subclass(Ggml))
    shared = torch.ones(6)
    adapter = SimpleNamespace(weights=(shared, torch.ones(2), 4.0, None))
    patches = {"a.weight": [(1.0, adapter, 1.0, None, None)], "b.weight": [(1.0, ("diff", (shared,)), 1.0, None, None)]}
    found = weights_of(SimpleNamespace(model=module, patches=patches, load_device=torch.device("cpu")))
    assert dict(found.by_type) == {"float32": 256, "bfloat16": 32, "float8_e4m3fn": 16, "GGUF Q4_K": 10}
    assert found.total_bytes == 314 and [part.bytes for part in found.parts] == [256, 32, 26]
    assert found.patched == 2 and found.patch_bytes == 32
    assert found.describe() == (
        "Weights: 314 B: 256 B float32, 32 B bfloat16, 16 B float8_e4m3fn, 10 B GGUF Q4_K; patches (LoRA) on 2 "
        "weights, 32 B."
    )


# On a real ComfyUI in this process, whose device is the simulated card


@pytest.fixture
def model(card: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A MODEL with two LoRAs and the attention of a card. What the host expects it to take is about right."""
    from comfy.ldm.modules.attention import attention_pytorch

    monkeypatch.setattr(mm, "MIN_WEIGHT_MEMORY_RATIO", 0.0)
    card.enable(total="192MB")
    unet = native_models().unet(ch=64)
    unet.model.memory_usage_factor = 0.042
    made = native_models().with_loras(unet, 1, 2)
    made.set_model_optimized_attention(attention_pytorch)
    yield made


def plan(patcher: Any, size: int = 16, **more: Any) -> tuple[str, str]:
    """What the plan says, and what its node does."""
    latent = {"samples": torch.zeros(1, 4, size, size)}
    with page() as shown:
        output = run_node(VramPlan, pipeline=patcher, latent=latent, steps=2, vram_gb="", **more)
    assert output.result[0].shape[-1] == 3
    return output.result[1], shown.texts[-1][1]


@on_host
@pytest.mark.parametrize(("size", "budget"), [(16, None), (16, 16), (16, 12), (32, None), (32, 28), (32, 20)])
def test_peak_is_what_the_host_takes(size: int, budget: int | None, model: Any, card: Any) -> None:
    if budget:
        model = run_node(VramBudget, model=model, vram_gb=budget / 1024).result[0]
    before = [id(tensor) for tensor in model.model.parameters()]
    text, said = plan(model, size)
    assert card.stats().allocated_bytes == 0 and card.stats().h2d_bytes == 0, "nothing is loaded"
    assert [id(tensor) for tensor in model.model.parameters()] == before
    card.reset_stats()
    sample(model, size=size)
    peak = card.stats().peak_bytes
    asked = native_plan.asked_of(model, {"samples": torch.zeros(1, 4, size, size)}, 0, 0, 0, 2, 4.0)
    made = native_plan.plan_model(model, asked, native_plan.facts_of(model, asked), None)
    assert abs(made.peak_vram_bytes - peak) <= 0.05 * peak, (made.peak_vram_bytes / MB, peak / MB)
    assert abs(made.sampling.stay_bytes - model.loaded_size()) <= 0.02 * MB
    assert f"peak {made.peak_vram_bytes / MB:.1f} MB" in text and said.startswith(f"BaseModel, {8 * size} x {8 * size}")
    assert ("resident" if budget is None else "streamed") in said
    assert "An estimate: ComfyUI runs the model and places its weights." in text
    assert "Weights: 16.0 MB: 16.0 MB float32; patches (LoRA) on 80 weights, 760 KB." in text


@on_host
@pytest.mark.parametrize(
    ("stored", "batch", "loras", "size", "budget", "card_mb"),
    [
        (torch.bfloat16, 1, 1, (16, 16), 7.5, 192),
        (torch.bfloat16, 3, 1, (16, 16), 12, 192),
        (torch.bfloat16, 2, 0, (16, 16), 9, 192),
        (torch.float8_e4m3fn, 1, 0, (16, 16), 6, 192),
        (torch.float8_e4m3fn, 2, 0, (16, 16), None, 192),
        (torch.float16, 1, 3, (16, 16), 8.5, 192),
        (torch.bfloat16, 1, 1, (16, 16), 6, 192),  # the most is on the card while the host loads
        (torch.bfloat16, 2, 2, (20, 20), 10, 192),  # nothing stays
        (torch.float16, 1, 1, (12, 36), 8, 192),
        (torch.float32, 1, 3, (20, 12), 14, 192),
        (torch.bfloat16, 1, 1, (8, 8), 7, 192),
        (torch.bfloat16, 1, 1, (16, 16), None, 9),  # the card is too small for both prompts in one call
        (torch.float32, 1, 0, (24, 24), None, 16),
    ],
)
def test_peak_with_types_batches_and_loras(
    stored: torch.dtype, batch: int, loras: int, size: tuple[int, int], budget: float | None, card_mb: int,
    model: Any, card: Any,
) -> None:  # fmt: skip
    from comfy.ldm.modules.attention import attention_pytorch

    card.enable(total=card_mb * MB)
    computes_in = torch.bfloat16 if stored == torch.float8_e4m3fn else stored
    unet = native_models().unet(ch=64, dtype=stored, computes_in=computes_in)
    unet.model.memory_usage_factor = 0.042
    unet.set_model_optimized_attention(attention_pytorch)
    made = native_models().with_loras(unet, *range(loras)) if loras else unet
    if budget:
        made = run_node(VramBudget, model=made, vram_gb=budget / 1024).result[0]
    latent = {"samples": torch.zeros(batch, 4, *size)}
    asked = native_plan.asked_of(made, latent, 0, 0, 0, 2, 4.0)
    planned = native_plan.plan_model(made, asked, native_plan.facts_of(made, asked), None)
    assert (planned.sampling.stay_bytes < made.model_size()) == bool(budget or card_mb < 192)
    card.reset_stats()
    sample(made, size=size, batch=batch)
    peak = card.stats().peak_bytes
    assert abs(planned.peak_vram_bytes - peak) <= 0.05 * peak, (planned.peak_vram_bytes / MB, peak / MB)
    assert abs(planned.sampling.stay_bytes - made.loaded_size()) <= 0.02 * MB


@on_host
def test_host_figure_stands_beside_ours(model: Any) -> None:
    text, _ = plan(model)
    assert "Activations: 3.20 MB by a dry run; ComfyUI expects 3.23 MB." in text
    one, _ = plan(model, guidance=1.0)
    assert "ComfyUI expects 1.61 MB." in one
    given, _ = plan(model, conditioning=conditionings()["positive"])
    assert "Activations: 3.20 MB by a dry run" in given


@on_host
def test_where_no_dry_run_is_possible_the_host_is_asked(model: Any) -> None:
    def needs_values(**given: Any) -> Any:
        return {} if given["noise"].sum().item() > 0 else {}

    model.model.extra_conds = needs_values
    text, _ = plan(model)
    assert "Activations: 3.23 MB as ComfyUI expects; its code allows no dry run, so seconds count copies alone." in text


@on_host
def test_quantized_weights_count_as_stored_and_run_on_shapes(model: Any) -> None:
    from comfy.quant_ops import QuantizedTensor

    plain = foresee(model.model, [2, 4, 16, 16])
    linear = next(part for part in model.model.diffusion_model.modules() if isinstance(part, nn.Linear))
    weight = QuantizedTensor.from_float(linear.weight.detach(), "TensorCoreFP8E4M3Layout")
    before = weights_of(model).total_bytes
    linear.weight = nn.Parameter(weight, requires_grad=False)
    found = weights_of(model)
    assert dict(found.by_type)["quantized FP8E4M3"] == weight.numel() == (before - found.total_bytes) / 3
    seen = foresee(model.model, [2, 4, 16, 16])
    assert seen is not None and plain is not None
    assert (seen.peak_bytes, seen.operations) == (plain.peak_bytes, plain.operations)
    assert type(linear.weight) is type(weight), "the model itself is as it was"


@on_host
def test_weights_that_ram_does_not_hold_come_from_disk(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_plan, "_ram_room", lambda: 4 * MB)
    budgeted = run_node(VramBudget, model=model, vram_gb=10 / 1024).result[0]
    text, said = plan(budgeted)
    assert "are read from disk in each step, since RAM does not hold them" in text
    assert "come from disk" in said


@on_host
def test_several_budgets_and_a_model_that_is_in_place(model: Any, card: ModuleType) -> None:
    sample(model)
    held, patcher = card.stats().allocated_bytes, model.model.current_patcher
    latent = {"samples": torch.zeros(2, 4, 16, 16)}
    output = run_node(VramPlan, pipeline=model, latent=latent, vram_gb="10MB, 30MB")
    assert output.result[1].startswith("BaseModel, 128 x 128, batch 2, 20 steps")
    assert card.stats().allocated_bytes == held and model.model.current_patcher is patcher
    assert torch.isfinite(sample(model)).all()


@on_host
def test_bad_input_is_one_line(model: Any) -> None:
    for more, message in (
        ({"strategy": "streamed"}, "strategy: only for Ballast's pipelines, but a MODEL is connected."),
        ({"image": torch.zeros(1, 8, 8, 3)}, "image: only for Ballast's pipelines"),
        ({"conditioning": object()}, "conditioning is Ballast's, but a MODEL is connected."),
    ):
        with pytest.raises(ValueError, match=message):
            plan(model, **more)
    with pytest.raises(ValueError, match="the input is NoneType, neither a Ballast pipeline nor a MODEL"):
        run_node(VramPlan, pipeline=None)


FULL_SIZE = {
    "Flux": (
        {"image_model": "flux", "in_channels": 16, "patch_size": 2, "out_channels": 16, "vec_in_dim": 768,
         "context_in_dim": 4096, "hidden_size": 3072, "mlp_ratio": 4.0, "num_heads": 24, "depth": 19,
         "depth_single_blocks": 38, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True,
         "guidance_embed": True, "txt_ids_dims": []},
        [1, 16, 128, 128], torch.float8_e4m3fn, (11.0, 11.2), (0.3, 0.6), 6.5e13,
    ),
    "WAN21_T2V": (
        {"image_model": "wan2.1", "model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40,
         "num_layers": 40, "in_dim": 16, "out_dim": 16, "text_dim": 4096, "freq_dim": 256, "patch_size": (1, 2, 2),
         "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6},
        [2, 16, 21, 60, 104], torch.bfloat16, (26.5, 26.7), (6.0, 8.0), 3.3e15,
    ),
    "QwenImage": (
        {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60},
        [2, 16, 1, 128, 128], torch.bfloat16, (38.0, 38.2), (0.5, 3.0), 1.46e14,
    ),
}  # fmt: skip


@on_host
@pytest.mark.parametrize("name", FULL_SIZE)
def test_models_of_full_size_are_run_on_shapes(name: str, card: ModuleType) -> None:
    """Published sizes, without weights: what their activations take, and how much they compute."""
    import comfy.supported_models

    config, shape, dtype, size, activations, operations = FULL_SIZE[name]
    chosen = getattr(comfy.supported_models, name)(dict(config))
    chosen.set_inference_dtype(dtype, None if dtype == torch.bfloat16 else torch.bfloat16)
    chosen.unet_config["dtype"] = dtype
    made = chosen.get_model({}, "", device="meta")
    assert size[0] < sum(weight.nbytes for weight in made.parameters()) / 2**30 < size[1]
    seen = foresee(made, shape)
    assert seen is not None
    assert activations[0] < seen.peak_bytes / 2**30 < activations[1]
    assert seen.operations.total == pytest.approx(operations, rel=0.2)
    assert host.loaded_models() == []
    unload()
