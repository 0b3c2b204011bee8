"""Plain weights that are converted: to 12 bits without loss, or to 8 with one that is known."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import torch
from ballast.memory import manager
from ballast.memory.codecs.converters import CONVERTERS
from diffusers import Lumina2Transformer2DModel
from places import ROOT
from selection import few

SIZE: dict[str, Any] = {"width": 64, "height": 64, "steps": 2, "guidance": 2.0}
Folders = Callable[[str], Path]
DEMO = ROOT / "demo" / "shapes"


def opened(folder: Path, device: str = "sim", **more: Any) -> Any:
    return ballast.open_pipeline(folder, device=device, dtype="bf16", **more)


def rounded(folder: Path, weights: str, root: Path) -> Path:
    """The folder with the values that its transformer's weights have after encoding."""
    made = Path(shutil.copytree(folder, root / "rounded"))
    module = Lumina2Transformer2DModel.from_pretrained(made / "transformer", torch_dtype=torch.bfloat16)
    with torch.no_grad():
        for owner in module.modules():
            if isinstance(owner, torch.nn.Linear | torch.nn.Conv2d):
                codec, parts = CONVERTERS[weights].encode(owner.weight)
                codec.decode(parts, owner.weight)
    shutil.rmtree(made / "transformer")
    module.save_pretrained(made / "transformer")
    return made


@pytest.mark.long
@pytest.mark.parametrize("weights", few(["exact12", "int8", "fp8"], "int8"))
def test_every_placement_gives_what_the_decoded_weights_give(weights: str, tmp_path: Path, sim: ModuleType) -> None:
    plain = opened(DEMO)
    cond = plain.encode("a red circle")
    whole = plain.denoisers[0].size_bytes
    folder = DEMO if weights == "exact12" else rounded(DEMO, weights, tmp_path)
    expected = opened(folder).sample(cond, **SIZE)
    same = torch.equal(expected, plain.sample(cond, **SIZE))
    assert same == (weights == "exact12")
    del plain
    pipe = opened(DEMO, weights=weights)
    (dit,) = pipe.denoisers
    planned = dit.size_bytes
    for strategy in ("resident", "streamed", "leafwise"):
        assert torch.equal(pipe.sample(cond, **SIZE, strategy=strategy), expected), strategy
        assert sim.stats().allocated_bytes == 0 and sim.stats().hazards == 0
    assert 0.98 * planned < dit.size_bytes < 1.01 * planned
    assert dit.host_bytes == dit.size_bytes < (0.78 if weights == "exact12" else 0.56) * whole
    dit.drop()
    assert dit.host_bytes == 0
    assert torch.equal(pipe.sample(cond, **SIZE), expected)
    manager("sim").free()


def test_on_the_cpu_and_with_encoders(sim: ModuleType) -> None:
    expected = opened(DEMO, "cpu").encode("a red circle")
    found = opened(DEMO, "cpu", weights="exact12", cache_dir=None).encode("a red square")
    assert found.tensors.keys() == expected.tensors.keys()
    plain = opened(DEMO, "cpu").encode("a red square")
    for name, value in plain.tensors.items():
        assert torch.equal(found.tensors[name], value)
    lossy = opened(DEMO, "cpu", weights="int8").encode("a red square")
    assert any(not torch.equal(lossy.tensors[name], value) for name, value in plain.tensors.items()), (
        "not from the cache"
    )


@pytest.mark.long
def test_runs_are_as_planned(sim: ModuleType) -> None:
    pipe = opened(DEMO, weights="exact12")
    cond = pipe.encode("a red circle")
    size = SIZE | {"width": 320, "height": 320, "steps": 1}
    least = pipe.plan(**size, cond=cond, vram=1).sampling.peak_vram_bytes
    one = pipe.within(vram=int(1.02 * least))
    plan = one.plan(**size, cond=cond).sampling
    for _ in range(2):  # planned as it is about going to be, then as it is
        one.sample(cond, **size)
        peak = manager("sim").timeline.stages[-1].peak_bytes
        assert peak <= plan.peak_vram_bytes <= min(one.vram_bytes, 1.05 * peak)
        plan = one.plan(**size, cond=cond).sampling


def test_what_cannot_be_is_one_line(sim: ModuleType) -> None:
    with pytest.raises(ValueError, match=r"^unknown weights 'q4'. Use auto, exact12, int8, fp8.$"):
        opened(DEMO, weights="q4")
