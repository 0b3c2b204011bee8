"""Weights that stream as they are stored: any codec, in any placement, gives what plain weights of its values do."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from adapters import lora_files
from ballast.memory import manager
from ballast.memory.planning.fit import sizes_of
from ballast.memory.weights.encoding import encoding_of
from encoded_folders import WRITERS, Pair
from fault_points import Run
from places import ROOT
from safetensors.torch import load_file, save_file
from selection import few

SIZE: dict[str, Any] = {"width": 32, "height": 32, "steps": 2, "guidance": 1.0}
Folders = Callable[[str], Path]
POINTS = 20 if os.environ.get("BALLAST_SOAK") else 2  # of each stage


@pytest.mark.parametrize("how", few(WRITERS, "q8_0"))
def test_every_placement_gives_what_plain_weights_give(
    how: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    pair = Pair(tiny_folders("flux"), ["transformer"], how, tmp_path)
    plain = pair.open(encoded=False)
    cond = plain.encode("a red boat")
    expected = plain.sample(cond, **SIZE)
    whole = plain.denoisers[0].size_bytes
    del plain
    pipe = pair.open()
    (dit,) = pipe.denoisers
    assert dit.size_bytes < 0.75 * whole
    for strategy in ("resident", "streamed", "leafwise"):
        assert torch.equal(pipe.sample(cond, **SIZE, strategy=strategy), expected), strategy
        record = manager("sim").timeline.stages[-1]
        assert record.peak_bytes <= record.planned.peak_vram_bytes <= 1.05 * record.peak_bytes, strategy
        assert sim.stats().allocated_bytes == 0
        assert dit.host_bytes == dit.size_bytes
    from_disk = pair.open(ram=3 * max(group.packed_bytes for group in sizes_of(dit).groups) + 20000)
    manager("sim").free()
    assert torch.equal(from_disk.sample(cond, **SIZE, strategy="streamed"), expected)
    assert sim.stats().d2h_bytes < 2**20 and sim.stats().hazards == 0 and sim.stats().allocated_bytes == 0


def test_on_the_cpu_too(tiny_folders: Folders, tmp_path: Path) -> None:
    pair = Pair(tiny_folders("flux"), ["transformer"], "q8_0", tmp_path)
    plain = pair.open(encoded=False, device="cpu")
    cond = plain.encode("a red boat")
    expected = plain.sample(cond, **SIZE)
    pipe = pair.open(device="cpu")
    assert torch.equal(pipe.sample(cond, **SIZE), expected)
    (dit,) = pipe.denoisers
    assert dit.size_bytes < 0.75 * plain.denoisers[0].size_bytes
    manager("cpu").free()


@pytest.mark.parametrize("how", few(["q8_0", "fp8", "fp8 without scales", "4 bit"], "q8_0", "4 bit"))
def test_encoders_and_their_tables_too(how: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    pair = Pair(tiny_folders("flux"), ["text_encoder_2"], how, tmp_path)
    expected = pair.open(encoded=False).encode("a red boat")
    manager("sim").free()
    for ram in (None, "400KB"):
        for vram in (None, "120KB"):
            pipe = pair.open(ram=ram, vram=vram)
            found = pipe.encode("a red boat")
            for name, value in expected.tensors.items():
                assert torch.equal(found.tensors[name], value)
            assert sim.stats().allocated_bytes == 0
            del pipe
            manager("sim").free()


@pytest.mark.long
@pytest.mark.parametrize("how", few(["q8_0", "int8"], "q8_0"))
def test_runs_are_as_planned_at_any_budget(how: str, tmp_path: Path, sim: ModuleType) -> None:
    pair = Pair(ROOT / "demo" / "shapes", ["transformer"], how, tmp_path)
    size = {"width": 192, "height": 192, "steps": 2, "guidance": 1.0}
    pipe = pair.open()
    cond = pipe.encode("a red circle")
    expected = pair.open(encoded=False).sample(cond, **size)
    least = pipe.plan(**size, cond=cond, vram=1).sampling.peak_vram_bytes
    whole = pipe.plan(**size, cond=cond, vram=1, strategy="resident").sampling.peak_vram_bytes
    decoded = pipe.plan(**size, cond=cond, strategy="resident").sampling.peak_vram_bytes
    assert least < whole < decoded
    first, again = (pipe.within(vram=decoded).sample(cond, **size) for _ in range(2))
    assert torch.equal(first, expected) and torch.equal(again, expected)
    peaks = [stage.peak_bytes for stage in list(manager("sim").timeline.stages)[-2:]]
    assert peaks[0] == peaks[1], "what is decoded for good in the first call is no activation"
    peaks = []
    for vram in (least, (least + whole) // 2, whole, (whole + decoded) // 2, decoded):
        one = pipe.within(vram=vram)
        plan = one.plan(**size, cond=cond).sampling
        assert plan.placement == ("resident" if vram >= whole else "streamed")
        assert torch.equal(one.sample(cond, **size), expected)
        peaks.append(peak := manager("sim").timeline.stages[-1].peak_bytes)
        assert peak <= plan.peak_vram_bytes <= min(vram, 1.05 * peak)
        assert sim.stats().allocated_bytes == 0
    assert peaks == sorted(set(peaks)), "what there is room for is used"


PLANNED = [
    ("sd3", "q8_0"),
    *(
        pytest.param(name, how, marks=pytest.mark.soak)
        for name in ("flux", "sd3", "wan", "zimage")
        for how in (*WRITERS, "exact12")
        if (name, how) != ("sd3", "q8_0")
    ),
]


@pytest.mark.parametrize(("name", "how"), PLANNED)
def test_tiny_models_take_what_is_planned(
    name: str, how: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """All decoded for good, some of it, none; some of it streamed, or all: what is planned, or up to 5 % less."""
    sim.enable(total="4GB", tflops=1.0)
    folder, family, planned = tiny_folders(name), tiny.FAMILIES[name], set()
    ours = folder if how == "exact12" else Pair(folder, ["transformer"], how, tmp_path).encoded
    weights = "exact12" if how == "exact12" else "auto"
    pipe, encode, _, _ = tiny.stages(name, ours, "sim", dtype="bf16", weights=weights, cache_dir=tmp_path)
    cond, size = encode(), {"width": family.size[0], "height": family.size[1], "frames": family.frames, "steps": 2}

    def peak(strategy: str, vram: int | None = None) -> int:
        pipe.within(vram=vram).sample(cond, **size, **family.call_kwargs, strategy=strategy)
        record = manager("sim").timeline.stages[-1]
        found = record.peak_bytes, record.planned.peak_vram_bytes, strategy, vram
        assert found[0] <= found[1] <= 1.05 * found[0], found
        assert vram is None or found[1] <= vram, found
        planned.add(found[1])
        return found[1]

    least, most = peak("leafwise"), peak("resident")
    peak("streamed")
    peak("auto", (least + most) // 2)
    assert peak("resident", most) == most and len(planned) > 1, "what there is room for is used"


@pytest.mark.parametrize("way", few(["resident", "streamed", "from disk"], "from disk"))
def test_out_of_memory_at_any_allocation_leaves_nothing(way: str, tmp_path: Path, sim: ModuleType) -> None:
    pair = Pair(ROOT / "demo" / "shapes", ["transformer", "text_encoder"], "q8_0", tmp_path)
    ways: dict[str, dict[str, Any]] = {
        "resident": {},
        "streamed": {"strategy": "streamed", "tight": True},
        "from disk": {"from_disk": True, "tight": True},
    }
    run = Run.of("demo", pair.encoded, **ways[way])
    for stage in ("encode", "sample"):
        sim.reset_stats()
        run(stage)
        for count in random.Random(way).sample(range(1, sim.stats().allocation_count + 1), POINTS):
            with sim.fail_after(count):
                result = run(stage)
            assert run.is_same(stage, result), (way, stage, count)
            assert not run.left_over(), (way, stage, count)
            assert sim.stats().allocated_bytes == 0 and sim.stats().hazards == 0


@pytest.mark.parametrize("how", few(["q8_0", "int8"], "int8"))
def test_loras_on_encoded_weights_are_those_on_plain_ones(
    how: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    pair = Pair(tiny_folders("flux"), ["transformer"], how, tmp_path)
    loras = lora_files.two(tiny_folders("flux"), tmp_path)
    plain = pair.open(encoded=False, loras=loras)
    cond = plain.encode("a red boat")
    expected = plain.sample(cond, **SIZE)
    without_loras = pair.open(encoded=False).sample(cond, **SIZE)
    assert not torch.equal(expected, without_loras)
    pipe = pair.open(loras=loras)
    for strategy in ("resident", "streamed", "leafwise"):
        assert torch.equal(pipe.sample(cond, **SIZE, strategy=strategy), expected), strategy
        assert sim.stats().allocated_bytes == 0
    pipe.set_loras(())
    assert torch.equal(pipe.sample(cond, **SIZE), without_loras)


@pytest.mark.parametrize("weights", few(["exact12", "int8"], "exact12"))
def test_loras_on_converted_weights(weights: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType) -> None:
    """Wherever they are: of 12 bits what plain ones give, of 8 bits the same everywhere."""
    folder = tiny_folders("flux")
    loras = lora_files.two(folder, tmp_path)
    given: dict[str, Any] = {"device": "sim", "dtype": "bf16", "cache_dir": tmp_path}
    plain = ballast.open_pipeline(folder, **given, loras=loras)
    cond = plain.encode("a red boat")
    expected = plain.sample(cond, **SIZE)
    pipe = ballast.open_pipeline(folder, **given, loras=loras, weights=weights)
    found = pipe.sample(cond, **SIZE, strategy="resident")
    assert torch.equal(found, expected) == (weights == "exact12")
    for strategy, ram in (("streamed", None), ("leafwise", None), ("leafwise", 0.6)):
        pipe.runner = pipe.runner.set(ram_bytes=ram and int(ram * pipe.denoisers[0].size_bytes))
        assert torch.equal(pipe.sample(cond, **SIZE, strategy=strategy), found), strategy
        assert sim.stats().allocated_bytes == 0


@pytest.mark.soak
@pytest.mark.parametrize("how", ["q8_0", "int8", "exact12"])
@pytest.mark.parametrize("name", ["flux", "sd3", "qwenimage", "wan", "lumina2", "zimage", "hidream", "ltx"])
def test_loras_on_encoded_weights_of_each_family(
    name: str, how: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    """In files or converted: the latents of LoRAs on plain weights of the same values, bit for bit."""
    folder = tiny_folders(name)
    given: dict[str, Any] = {"loras": lora_files.two(folder, tmp_path), "cache_dir": tmp_path, "dtype": "bf16"}
    pair = None if how == "exact12" else Pair(folder, ["transformer"], how, tmp_path)
    plain, ours = (folder, folder) if pair is None else (pair.plain, pair.encoded)
    _, encode, sample, _ = tiny.stages(name, plain, "sim", **given)
    expected = sample(cond := encode(), strategy="resident")
    pipe, _, sample, _ = tiny.stages(name, ours, "sim", **given, **({"weights": how} if pair is None else {}))
    for strategy in ("resident", "streamed", "leafwise"):
        assert torch.equal(sample(cond, strategy=strategy), expected), strategy
        assert sim.stats().allocated_bytes == 0
    assert any(encoding_of(each) for unit in pipe.denoisers for each in unit.module.parameters())
    pipe.set_loras(())
    assert not torch.equal(sample(cond), expected)


def without(file: Path, end: str) -> None:
    weights = load_file(file)
    del weights[next(name for name in sorted(weights) if name.endswith(end))]
    save_file(weights, file)


def noted(file: Path) -> None:
    weights = load_file(file)
    name = next(name for name in sorted(weights) if name.endswith(".comfy_quant"))
    save_file(weights | {name: torch.tensor(list(b'{"format": "int3"}'), dtype=torch.uint8)}, file)


BAD: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "cut": ("q8_0", lambda file: file.write_bytes(file.read_bytes()[:-100]), "damaged header"),
    "of a new version": ("q8_0", lambda file: file.write_bytes(b"GGUF" + b"\xff" * 100), "GGUF of version"),
    "two": ("q8_0", lambda file: shutil.copy(file, file.with_name("b.gguf")), "has 2 GGUF files"),
    "no scale": ("int8", lambda file: without(file, ".weight_scale"), "weight_scale is missing"),
    "unknown": ("int8", noted, "'int3'; Ballast decodes float8_e4m3fn"),
    "missing": ("int8", lambda file: without(file, ".bias"), "lacks 1 weights of FluxTransformer2DModel, such as "),
}


@pytest.mark.parametrize("case", list(BAD))
def test_bad_files_get_one_line_and_nothing_stays(
    case: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType
) -> None:
    how, spoil, words = BAD[case]
    pair = Pair(tiny_folders("flux"), ["transformer"], how, tmp_path)
    (file,) = (file for file in (pair.encoded / "transformer").iterdir() if file.name != "config.json")
    spoil(file)
    with pytest.raises(ValueError, match=words) as why:
        pipe = pair.open()
        pipe.sample(pipe.encode("a red boat"), **SIZE)
    assert str(file.parent) in str(why.value) and "\n" not in str(why.value)
    assert sim.stats().allocated_bytes == 0
