"""VRAM Plan for ComfyUI's own MODEL: against what the host really takes, and what it says. Nothing is loaded."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from ballast.memory.host import management as host
from ballast.memory.sizes import format_bytes
from ballast.nodes.budget import VramBudget
from ballast.nodes.native import model_plan as native_plan
from ballast.nodes.native.activations import dry_run_bytes
from ballast.nodes.native.model_plan import ModelPlan, Work
from ballast.nodes.native.model_weights import Weights, weights_of
from ballast.nodes.plan import VramPlan
from host import page, run_node
from node_runner import native_models
from test_native_budget import conditionings, sample, unload
from torch import nn

MB = 2**20
on_host = pytest.mark.host


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
    found = weights_of(SimpleNamespace(model=module, patches=patches))
    assert dict(found.by_type) == {"float32": 256, "bfloat16": 32, "float8_e4m3fn": 16, "GGUF Q4_K": 10}
    assert found.total_bytes == 314
    assert found.patched == 2 and found.patch_bytes == 32
    assert found.describe() == (
        "Weights: 314 B: 256 B float32, 32 B bfloat16, 16 B float8_e4m3fn, 10 B GGUF Q4_K; patches (LoRA) on 2 "
        "weights, 32 B."
    )


def test_each_budget_is_held_against_what_is_known() -> None:
    """32 MB of weights and 8 MB of activations, of which the host expects 12."""
    weights = Weights((("float16", 32 * MB),), 0, 0)
    plan = ModelPlan("Flux", torch.device("cuda:0"), weights, 12 * MB, 8 * MB, 50 * MB, ())
    assert plan.verdict(44 * MB) == "44.0 MB: weights and activations take 40.0 MB: all of it fits."
    assert plan.verdict(40 * MB) == (
        "40.0 MB: weights and activations take 40.0 MB, which fits, but ComfyUI expects more and may keep fewer "
        "weights there."
    )
    assert plan.verdict(30 * MB) == (
        "30.0 MB: weights and activations take 40.0 MB, so at least 10.0 MB of weights pass through in each step."
    )
    assert plan.verdict(7 * MB) == "7.00 MB: it does not fit, activations alone take 8.00 MB."
    unknown = dataclasses.replace(plan, dry_run_bytes=None)
    assert "take 44.0 MB: all of it fits" in unknown.verdict(44 * MB)
    assert "so at least 4.00 MB" in unknown.verdict(40 * MB)
    assert unknown.facts()[1] == ("Activations: 12.0 MB as ComfyUI expects; the model's code allows no dry run.")
    drawn = dataclasses.replace(plan, budgets=(44 * MB, 30 * MB)).picture(450, 265, 2.0)
    assert drawn.size == (900, 1060) and len(drawn.getcolors(2**20)) > 10


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
        output = run_node(VramPlan, pipeline=patcher, latent=latent, **{"vram_gb": "", **more})
    assert output.result[0].shape[-1] == 3
    return output.result[1], shown.texts[-1][1]


@on_host
@pytest.mark.parametrize(("size", "budget"), [(16, None), (16, 24), (16, 12), (32, None), (32, 28)])
def test_plan_holds_for_what_the_host_takes(size: int, budget: int | None, model: Any, card: Any) -> None:
    if budget:
        model = run_node(VramBudget, model=model, vram_gb=budget / 1024).result[0]
    before = [id(tensor) for tensor in model.model.parameters()]
    text, said = plan(model, size)
    assert card.stats().allocated_bytes == 0 and card.stats().h2d_bytes == 0, "nothing is loaded"
    assert [id(tensor) for tensor in model.model.parameters()] == before
    shape = native_plan.shape_of(model, {"samples": torch.zeros(1, 4, size, size)})
    made = native_plan.plan_model(model, Work(shape, 4.0), [None])
    card.reset_stats()
    sample(model, size=size)
    peak, whole = card.stats().peak_bytes, made.weights.total_bytes + made.activation_bytes
    limit = made.budgets[0]
    assert limit == (budget * MB if budget else made.free_bytes)
    if "all of it fits" in text:
        assert abs(whole - peak) <= 0.05 * peak, (whole / MB, peak / MB)
        assert model.loaded_size() == model.model_size()
    else:
        assert "pass through in each step" in text and model.loaded_size() <= limit - made.activation_bytes
    assert ("all of it fits" in text) == (budget in (None, 24))
    assert said.startswith(f"BaseModel, {8 * size} x {8 * size}.\nWeights: 16.0 MB: 16.0 MB float32")
    assert "ComfyUI runs this model and decides which weights stay in VRAM; no seconds are foretold." in text
    assert "Weights: 16.0 MB: 16.0 MB float32; patches (LoRA) on 80 weights, 760 KB." in text
    assert f"Free for models: {format_bytes(made.free_bytes)} on sim:0, " in text


@on_host
@pytest.mark.parametrize(
    ("stored", "batch", "loras", "size"),
    [
        (torch.bfloat16, 3, 1, (16, 16)),
        (torch.float8_e4m3fn, 2, 0, (16, 16)),
        (torch.float16, 1, 1, (12, 36)),
        (torch.float32, 1, 3, (20, 12)),
    ],
)
def test_peak_with_types_batches_and_loras(
    stored: torch.dtype, batch: int, loras: int, size: tuple[int, int], model: Any, card: Any
) -> None:
    from comfy.ldm.modules.attention import attention_pytorch

    computes_in = torch.bfloat16 if stored == torch.float8_e4m3fn else stored
    unet = native_models().unet(ch=64, dtype=stored, computes_in=computes_in)
    unet.model.memory_usage_factor = 0.042
    unet.set_model_optimized_attention(attention_pytorch)
    made = native_models().with_loras(unet, *range(loras)) if loras else unet
    shape = native_plan.shape_of(made, {"samples": torch.zeros(batch, 4, *size)})
    planned = native_plan.plan_model(made, Work(shape, 4.0), [None])
    card.reset_stats()
    sample(made, size=size, batch=batch)
    peak, whole = card.stats().peak_bytes, planned.weights.total_bytes + planned.activation_bytes
    assert abs(whole - peak) <= 0.05 * peak, (whole / MB, peak / MB)


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
    assert "Activations: 3.23 MB as ComfyUI expects; the model's code allows no dry run." in text


@on_host
def test_quantized_weights_count_as_stored_and_run_on_shapes(model: Any) -> None:
    from comfy.quant_ops import QuantizedTensor

    plain = dry_run_bytes(model.model, [2, 4, 16, 16])
    linear = next(part for part in model.model.diffusion_model.modules() if isinstance(part, nn.Linear))
    weight = QuantizedTensor.from_float(linear.weight.detach(), "TensorCoreFP8E4M3Layout")
    before = weights_of(model).total_bytes
    linear.weight = nn.Parameter(weight, requires_grad=False)
    found = weights_of(model)
    assert dict(found.by_type)["quantized FP8E4M3"] == weight.numel() == (before - found.total_bytes) / 3
    assert dry_run_bytes(model.model, [2, 4, 16, 16]) == plain is not None
    assert type(linear.weight) is type(weight), "the model itself is as it was"


@on_host
def test_several_budgets_and_a_model_that_is_in_place(model: Any, card: ModuleType) -> None:
    sample(model)
    held, patcher = card.stats().allocated_bytes, model.model.current_patcher
    latent = {"samples": torch.zeros(2, 4, 16, 16)}
    output = run_node(VramPlan, pipeline=model, latent=latent, vram_gb="10MB, 30MB")
    assert output.result[1].startswith("BaseModel, 128 x 128; batch 2\n\n")
    assert "\n10.0 MB: weights and activations take " in output.result[1] and "\n30.0 MB: " in output.result[1]
    assert card.stats().allocated_bytes == held and model.model.current_patcher is patcher
    assert torch.isfinite(sample(model)).all()


@on_host
def test_bad_input_is_one_line(model: Any) -> None:
    for more, message in (
        ({"strategy": "streamed"}, "strategy: only for Ballast's pipelines, but a MODEL is connected."),
        ({"image": torch.zeros(1, 8, 8, 3)}, "image: only for Ballast's pipelines"),
        ({"batch": 2}, "batch: only for Ballast's pipelines"),
        ({"compare_weights": True}, "compare_weights is for a Ballast pipeline."),
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
        [1, 16, 128, 128], torch.float8_e4m3fn, (11.0, 11.2), (0.3, 0.6),
    ),
    "WAN21_T2V": (
        {"image_model": "wan2.1", "model_type": "t2v", "dim": 5120, "ffn_dim": 13824, "num_heads": 40,
         "num_layers": 40, "in_dim": 16, "out_dim": 16, "text_dim": 4096, "freq_dim": 256, "patch_size": (1, 2, 2),
         "window_size": (-1, -1), "qk_norm": True, "cross_attn_norm": True, "eps": 1e-6},
        [2, 16, 21, 60, 104], torch.bfloat16, (26.5, 26.7), (6.0, 8.0),
    ),
    "QwenImage": (
        {"image_model": "qwen_image", "in_channels": 64, "num_layers": 60},
        [2, 16, 1, 128, 128], torch.bfloat16, (38.0, 38.2), (0.5, 3.0),
    ),
}  # fmt: skip


@on_host
@pytest.mark.parametrize("name", FULL_SIZE)
def test_models_of_full_size_are_run_on_shapes(name: str, card: ModuleType) -> None:
    """Published sizes, without weights: what their activations take."""
    import comfy.supported_models

    config, shape, dtype, size, activations = FULL_SIZE[name]
    chosen = getattr(comfy.supported_models, name)(dict(config))
    chosen.set_inference_dtype(dtype, None if dtype == torch.bfloat16 else torch.bfloat16)
    chosen.unet_config["dtype"] = dtype
    made = chosen.get_model({}, "", device="meta")
    assert size[0] < sum(weight.nbytes for weight in made.parameters()) / 2**30 < size[1]
    seen = dry_run_bytes(made, shape)
    assert seen is not None and activations[0] < seen / 2**30 < activations[1]
    assert host.loaded_models() == []
    unload()
