"""Stock diffusers and transformers models on the simulated accelerator give what they give on the CPU."""

from __future__ import annotations

import gc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import tiny
import torch
from accelerate import cpu_offload
from ballast.memory import simulated
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from selection import THREE, few

if simulated.supported():
    pytest.skip(simulated.supported() or "", allow_module_level=True)


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    """A card of 64 MB and one CPU thread, which such small models run fastest on."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    forget_rope()
    gc.collect()
    simulated.enable("64MB")
    yield
    torch.set_num_threads(threads)


def run(pipe: Any, family: tiny.Family) -> torch.Tensor:
    """Two steps of a stock pipeline."""
    pipe.set_progress_bar_config(disable=True)
    if family.prepare is not None:
        family.prepare(pipe)
    arguments: dict[str, Any] = {
        "prompt": "a red boat",
        "num_inference_steps": 2,
        "generator": torch.Generator("cpu").manual_seed(0),
        "width": family.size[0],
        "height": family.size[1],
        "output_type": "np",
        **({"negative_prompt": "grey"} if family.negative else {}),
        **({"num_frames": family.frames} if family.frames else {}),
    }
    if family.guidance_name == "guider":
        pipe.guider = pipe.guider.new(guidance_scale=family.guidance)
    else:
        arguments[family.guidance_name] = family.guidance
    taken = inspect.signature(pipe.__call__).parameters
    arguments.update({key: value for key, value in family.encode_kwargs.items() if key in taken})
    output = pipe(**{**arguments, **family.call_kwargs})
    return torch.as_tensor(output.images if family.frames is None else output.frames)


def forget_rope() -> None:
    """Empty the caches at QwenImage's class, which keep a model and its rotary tables on the device for good."""
    for function in vars(QwenEmbedRope).values():
        for cell in getattr(function, "__closure__", None) or ():
            if hasattr(cell.cell_contents, "cache_clear"):
                cell.cell_contents.cache_clear()


def weights(pipe: Any) -> int:
    modules = [part for part in pipe.components.values() if isinstance(part, torch.nn.Module)]
    return sum(p.nbytes for module in modules for p in (*module.parameters(), *module.buffers()))


@pytest.mark.parametrize("name", few(tiny.FAMILIES, *THREE, "mochi"))
def test_whole_pipelines_equal_the_cpu(name: str) -> None:
    family = tiny.FAMILIES[name]
    pipe = family.build()
    expected = run(pipe, family)
    before = simulated.stats().allocated_bytes
    size = weights(pipe)
    pipe.to("sim")
    resident = simulated.stats().allocated_bytes - before
    assert resident == size, "weights and buffers, shared ones once"
    torch.testing.assert_close(run(pipe, family), expected, rtol=0, atol=1e-5)
    del pipe
    forget_rope()
    gc.collect()
    assert simulated.stats().allocated_bytes == before


def test_nothing_is_left_after_three_runs() -> None:
    family = tiny.FAMILIES["flux"]
    before = simulated.stats().allocated_bytes
    for _ in range(3):
        pipe = family.build().to("sim")
        run(pipe, family)
        del pipe
        gc.collect()
        assert simulated.stats().allocated_bytes == before


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_text_encoders_and_transformers_equal_the_cpu(mode: Any) -> None:
    pipe = tiny.FAMILIES["flux"].build()
    ids = torch.tensor([[0, 5, 9, 2]])
    for encoder in (pipe.text_encoder, pipe.text_encoder_2):
        with mode():
            expected = encoder(ids)[0]
            found = encoder.to("sim")(ids.to("sim"))[0]
            torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=1e-6)


def test_leafwise_offload_by_accelerate() -> None:
    family = tiny.FAMILIES["sd3"]
    pipe = family.build()
    expected = run(pipe, family)
    before = simulated.stats().allocated_bytes
    size = sum(p.nbytes for p in pipe.transformer.parameters())
    with torch.inference_mode():
        model = pipe.transformer
        x = torch.randn(1, 4, 8, 8)
        text = torch.randn(1, 6, model.config.joint_attention_dim)
        pooled = torch.randn(1, model.config.pooled_projection_dim)
        on_cpu = model(x, text, pooled, torch.tensor([3.0]), return_dict=False)[0]
        cpu_offload(model, torch.device("sim"))
        buffers = sum(b.nbytes for b in model.buffers())
        assert simulated.stats().allocated_bytes == before + buffers, "accelerate leaves buffers on the device"
        simulated.reset_stats()
        on_sim = model(x, text, pooled, torch.tensor([3.0]), return_dict=False)[0]
        stats = simulated.stats()
        torch.testing.assert_close(on_sim.cpu(), on_cpu, rtol=0, atol=1e-6)
        assert stats.peak_bytes - before < size / 2, "one leaf at a time"
        assert stats.h2d_bytes >= size
    offloaded = family.build()
    offloaded.enable_sequential_cpu_offload(device="sim")
    torch.testing.assert_close(run(offloaded, family), expected, rtol=0, atol=1e-5)
    del on_sim, model, pipe, offloaded
    gc.collect()
    assert simulated.stats().allocated_bytes == before


def test_model_offload_by_diffusers() -> None:
    family = tiny.FAMILIES["flux"]
    pipe = family.build()
    expected = run(pipe, family)
    size = weights(pipe)
    pipe.enable_model_cpu_offload(device="sim")
    simulated.reset_stats()
    torch.testing.assert_close(run(pipe, family), expected, rtol=0, atol=1e-5)
    stats = simulated.stats()
    assert stats.h2d_bytes >= size
    assert stats.d2h_bytes >= size, "diffusers copies weights back; ours must not"
