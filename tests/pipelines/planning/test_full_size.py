"""The full-size folders are what they say: of published sizes, without weights, and the pack opens them."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import bare_models
import psutil
import pytest
import torch
from ballast import open_pipeline
from ballast.bench.downloads import full_size
from ballast.memory.weights.stored import find_weights, read_header
from safetensors import safe_open

# Parameters in billions.
PUBLISHED = {
    "hidream": {
        "text_encoder": 0.1238,
        "text_encoder_2": 0.6948,
        "text_encoder_3": 4.762,
        "text_encoder_4": 8.030,
        "transformer": 17.106,
        "vae": 0.0838,
    },
    "flux": {"text_encoder": 0.1231, "text_encoder_2": 4.762, "transformer": 11.901, "vae": 0.0838},
    "wan": {"text_encoder": 5.681, "transformer": 14.288, "vae": 0.1269},
    "qwenimage": {"text_encoder": 8.292, "transformer": 20.430, "vae": 0.1269},
}
SHARDS = {
    "hidream": {"text_encoder_3": 2, "text_encoder_4": 4, "transformer": 7},
    "flux": {"text_encoder_2": 2, "transformer": 3},
    "wan": {"text_encoder": 3, "transformer": 6},
    "qwenimage": {"text_encoder": 4, "transformer": 9},
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A full-size folder, written when first asked for."""
    root = tmp_path_factory.mktemp("full_size")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else full_size.build(name, root / name)

    return folder


@pytest.mark.parametrize("name", full_size.FULL_SIZE)
def test_files_have_the_published_parameters(name: str, folders: Callable[[str], Path]) -> None:
    found = {}
    for part in PUBLISHED[name]:
        files, _ = find_weights(folders(name) / part)
        assert len(files) == SHARDS[name].get(part, 1)
        assert all(file.stat().st_size < 10.1e9 for file in files)
        found[part] = sum(math.prod(e["shape"]) for file in files for e in read_header(file).values()) / 1e9
    assert found == pytest.approx(PUBLISHED[name], rel=1e-3)


@pytest.mark.parametrize("name", full_size.FULL_SIZE)
def test_they_take_no_disk(name: str, folders: Callable[[str], Path]) -> None:
    stats = [file.stat() for file in folders(name).rglob("*")]
    assert sum(stat.st_size for stat in stats) > 30e9
    if not hasattr(stats[0], "st_blocks"):
        pytest.skip("this system does not tell what a file takes")
    assert sum(stat.st_blocks * 512 for stat in stats) < 50e6


@pytest.mark.long
@pytest.mark.parametrize("name", full_size.FULL_SIZE)
def test_they_open_without_weights(name: str, folders: Callable[[str], Path]) -> None:
    folder = folders(name)
    gc.collect()
    before = psutil.Process().memory_info().rss
    pipe: Any = open_pipeline(folder, device="cpu")
    sizes = {part: unit.size_bytes for part, unit in pipe.model.parts.units.items()}
    assert psutil.Process().memory_info().rss - before < 1.5e9, "structures, and what the proof made up"
    assert all(unit.tier == "disk" for unit in pipe.model.parts.units.values())
    # The decoder runs in float32, everything else in bfloat16.
    bytes_each = {part: 4 if part == "vae" else 2 for part in sizes}
    used = PUBLISHED[name] | ({"text_encoder_4": 8.030 - 128256 * 4096 / 1e9} if name == "hidream" else {})
    assert sizes == pytest.approx({part: n * 1e9 * bytes_each[part] for part, n in used.items()}, rel=0.01)
    for part, unit in pipe.model.parts.units.items():
        stored = pipe.model.components[part].stored
        for key, parameter in unit.module.named_parameters():
            assert stored[key].shape == parameter.shape


@pytest.mark.long
def test_the_tools_of_a_folder_can_be_made(folders: Callable[[str], Path]) -> None:
    for name in full_size.FULL_SIZE:
        pipe: Any = open_pipeline(folders(name), device="cpu")
        tools = {part: pipe.model.parts.tool(part) for part in pipe.model.parts.without_weights("")}
        assert type(tools["scheduler"]) is type(full_size.SCHEDULERS[name]())
        assert tools["tokenizer"]("a red boat").input_ids


def test_safetensors_takes_the_files(folders: Callable[[str], Path]) -> None:
    file = folders("hidream") / "text_encoder" / "model.safetensors"
    with safe_open(file, framework="pt") as opened:
        assert set(opened.keys()) == set(read_header(file))
        name = next(iter(opened.keys()))
        assert opened.get_tensor(name).dtype is torch.bfloat16
        assert not opened.get_tensor(name).any()


@pytest.mark.parametrize(("name", "billions", "shape"), [("newbie", 3.48, (2, 16, 128, 128)), ("pyramid", 1.972, None)])
def test_bare_modules_run_on_meta(name: str, billions: float, shape: tuple[int, ...] | None) -> None:
    module, arguments = bare_models.BARE[name]()
    assert sum(p.numel() for p in module.parameters()) / 1e9 == pytest.approx(billions, rel=2e-3)
    assert all(t.is_meta for t in [*module.parameters(), *arguments.values()])
    with torch.no_grad():
        result = module(**arguments, return_dict=False)[0]
    assert result.shape == (shape or (2, 2700, 64))
