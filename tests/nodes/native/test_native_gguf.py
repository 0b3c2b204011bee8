"""A MODEL of the pack ComfyUI-GGUF through VRAM Budget, VRAM Plan and VRAM Report, where that pack is beside the host.

It is looked for in COMFYUI_GGUF, then in the host's custom_nodes.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import comfy.model_management as mm
import pytest
import torch
from ballast.memory.reports.host_models import host_model_reports
from ballast.nodes.budget import VramBudget
from ballast.nodes.native import model_budget as native_budget
from ballast.nodes.plan import VramPlan
from conftest import HOST
from host import page, run_node
from test_native_budget import unload

pytestmark = pytest.mark.host

MB = 2**20
WIDTH = 64  # of tokens
SHAPE = {
    "image_model": "flux", "in_channels": 16, "patch_size": 2, "out_channels": 16, "vec_in_dim": WIDTH,
    "context_in_dim": WIDTH, "hidden_size": 256, "mlp_ratio": 4.0, "num_heads": 2, "depth": 1,
    "depth_single_blocks": 3, "axes_dim": [16, 56, 56], "theta": 10000, "qkv_bias": True, "guidance_embed": False,
    "txt_ids_dims": [],
}  # fmt: skip


@pytest.fixture(scope="module")
def pack() -> ModuleType:
    """The nodes of ComfyUI-GGUF."""
    if HOST is None:
        pytest.skip("needs the modules of a real ComfyUI")
    pytest.importorskip("gguf")
    folder = Path(os.environ.get("COMFYUI_GGUF") or HOST / "custom_nodes" / "ComfyUI-GGUF")
    if not (folder / "nodes.py").is_file():
        pytest.skip("no ComfyUI-GGUF: set COMFYUI_GGUF")
    spec = importlib.util.spec_from_file_location(
        "gguf_pack", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    made = sys.modules["gguf_pack"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return importlib.import_module("gguf_pack.nodes")


@pytest.fixture(scope="module", params=["Q4_0"])
def file(pack: ModuleType, request: pytest.FixtureRequest) -> Iterator[str]:
    """A tiny Flux whose large weights are quantized."""
    import comfy.ops
    import folder_paths
    import gguf
    from comfy.ldm.flux.model import Flux

    torch.manual_seed(0)
    model = Flux(**SHAPE, dtype=torch.float32, device="cpu", operations=comfy.ops.manual_cast)
    path = Path(folder_paths.get_folder_paths("diffusion_models")[0]) / f"tiny {request.param}.gguf"
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = gguf.GGUFWriter(str(path), "flux")
    for name, weight in model.state_dict().items():
        value = (torch.randn(weight.shape) * (0.04 if weight.ndim > 1 else 0.02) + name.endswith("scale")).numpy()
        kind = getattr(gguf.GGMLQuantizationType, request.param if weight.ndim > 1 else "F32")
        stored = gguf.quants.quantize(value, kind)
        writer.add_tensor(name, stored, raw_dtype=kind)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    yield path.name
    path.unlink()


@pytest.fixture
def model(file: str, pack: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """As its loader makes it, on a CPU that the host takes for a card: it has plain tensors."""
    (made,) = pack.UnetLoaderGGUF().load_unet(file)
    made.model.memory_usage_factor = 0.052  # 8 MB, as the dry run says
    made.load_device = torch.device("cpu", 0)

    def free(dev: Any = None, torch_free_too: bool = False) -> Any:
        left = 64 * MB - sum(entry.model.loaded_size() for entry in mm.current_loaded_models)
        return (left, 0) if torch_free_too else left

    replacements = {
        "get_torch_device": lambda: made.load_device, "is_device_cpu": lambda device: False, "get_free_memory": free,
        "vram_state": mm.VRAMState.NORMAL_VRAM, "extra_reserved_memory": lambda: MB, "MIN_WEIGHT_MEMORY_RATIO": 0.0,
        "minimum_inference_memory": lambda: 2 * MB, "is_device_cuda": lambda device: False,
    }  # fmt: skip
    for name, value in replacements.items():
        monkeypatch.setattr(mm, name, value)
    monkeypatch.setattr(native_budget, "_is_cpu", lambda patcher: False)
    yield made
    unload()


def with_lora(model: Any) -> Any:
    """As Load LoRA puts one on the linear layers of the blocks."""
    import comfy.lora

    generator, state = torch.Generator().manual_seed(1), {}
    for name, part in model.model.diffusion_model.named_modules():
        if "blocks" in name and isinstance(part, torch.nn.Linear):
            key = f"diffusion_model.{name}"
            rows, columns = part.weight.shape
            state[f"{key}.lora_up.weight"] = torch.randn(rows, 4, generator=generator) * 0.1
            state[f"{key}.lora_down.weight"] = torch.randn(4, columns, generator=generator) * 0.1
    patched = model.clone()
    keys = {key.removesuffix(".lora_up.weight"): f"{key.removesuffix('.lora_up.weight')}.weight" for key in state}
    assert patched.add_patches(comfy.lora.load_lora(state, keys), 0.7)
    return patched


def sample(model: Any, **more: Any) -> torch.Tensor:
    import comfy.sample

    latent = torch.zeros(1, 16, 32, 32)
    noise = comfy.sample.prepare_noise(latent, 3, None)
    prompt = torch.randn(1, 77, WIDTH, generator=torch.Generator().manual_seed(0))
    pooled = {"pooled_output": torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(1))}
    given = {"positive": [[prompt, pooled]], "negative": [[prompt * 0.5, pooled]], "disable_pbar": True, **more}
    with torch.inference_mode():
        return comfy.sample.sample(model, noise, 2, 1.0, "euler", "simple", latent_image=latent, **given)


@pytest.mark.parametrize("lora", [False, True], ids=["plain", "lora"])
def test_budget_keeps_the_picture(lora: bool, model: Any) -> None:
    made = with_lora(model) if lora else model
    plain = sample(made)
    whole = made.loaded_size()
    assert whole > 3 * MB
    if lora:
        assert not torch.equal(plain, sample(model)), "there is a LoRA"
    held = []
    for share in (1.3, 0.9, 0.5, 1.3):
        with page() as shown:
            budgeted = run_node(VramBudget, model=made, vram_gb=(8 * MB + share * whole) / 2**30).result[0]
            assert type(budgeted) is type(made)
            assert torch.equal(sample(budgeted), plain), share
        held.append(budgeted.loaded_size())
        assert "LoRAs on" not in shown.texts[-1][1], "which this pack applies as it decodes, wherever a weight lies"
    assert held[2] < held[1] < whole >= held[0] == held[3], held
    assert held[1] <= 0.9 * whole and held[2] <= 0.5 * whole
    unload()
    assert torch.equal(sample(made), plain)


def test_plan_is_of_what_is_stored(file: str, model: Any) -> None:
    latent = {"samples": torch.zeros(1, 16, 32, 32)}
    text = run_node(VramPlan, pipeline=model, latent=latent, steps=2, guidance=1.0, vram_gb="10MB, 40MB").result[1]
    assert model.loaded_size() == 0
    assert "3.06 MB GGUF Q4_0, 71.2 KB GGUF F32, 8.91 KB float32." in text
    assert "Activations: 7.95 MB by a dry run; ComfyUI expects 7.99 MB." in text
    streamed, resident = text.splitlines()[4:6]
    assert "streamed" in streamed and "resident" in resident, text


def test_report_tells_it(model: Any) -> None:
    sample(model)
    (told,) = host_model_reports(model.load_device)
    assert (told.name, told.role, told.resident_bytes) == ("Flux (ComfyUI)", "transformer", model.loaded_size())
