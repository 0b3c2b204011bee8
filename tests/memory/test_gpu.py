"""On a real accelerator: the same result, and nothing left. Skips where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import ballast
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.memory.accelerator import resolve_device

HAS_GPU = resolve_device().type != "cpu"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason="torch sees no accelerator")]


@pytest.mark.parametrize("name", ["lumina2", "flux", "hidream", "wan", "qwenimage"])
@pytest.mark.parametrize("strategy", ["resident", "leafwise"])
def test_staged_on_the_accelerator_equals_stock(
    name: str, strategy: str, tiny_folders: Callable[[str], Path], tmp_path: Path
) -> None:
    family = tiny.FAMILIES[name]
    expected, _ = tiny.stock(tiny_folders(name))
    accelerator = manager().accelerator
    start = accelerator.allocated_bytes()
    pipe = ballast.open_pipeline(tiny_folders(name), cache_dir=tmp_path)
    cond = pipe.encode("a red boat", "blurry, grey", **family.encode_kwargs)
    assert accelerator.allocated_bytes() == start
    width, height = family.size
    latents = pipe.sample(
        cond, width=width, height=height, steps=2, guidance=family.guidance, frames=family.frames, strategy=strategy,
        **family.call_kwargs,
    )  # fmt: skip
    assert accelerator.allocated_bytes() == start
    picture = pipe.decode(latents)
    assert accelerator.allocated_bytes() == start
    assert picture.isfinite().all()
    torch.testing.assert_close(latents, expected.float(), atol=1e-2, rtol=1e-2)
