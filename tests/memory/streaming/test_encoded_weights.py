"""Weights that stream as they are stored: any codec, in any placement, gives what plain weights of its values do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import gguf
import pytest
import torch
from ballast.memory import manager
from ballast.memory.codecs import fp8, int8
from ballast.memory.planning.fit import sizes_of
from ballast.memory.units.encoded import encoded_weights
from ballast.memory.units.encoding import EncodedWeight
from gguf import GGMLQuantizationType as Type
from gguf import quants
from places import ROOT
from safetensors.torch import load_file, save_file

SIZE: dict[str, Any] = {"width": 32, "height": 32, "steps": 2, "guidance": 1.0}
Folders = Callable[[str], Path]
BF16 = torch.bfloat16


def is_quantised(name: str, value: torch.Tensor) -> bool:
    return name.endswith(".weight") and value.ndim == 2 and value.shape[1] % 32 == 0


def write_gguf(kind: Type, file: Path, weights: dict[str, torch.Tensor]) -> Path:
    writer = gguf.GGUFWriter(path := file.with_name("model.gguf"), "flux")
    for name, value in weights.items():
        values = value.float().numpy()
        if is_quantised(name, value):
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file.unlink()
    return path


def write_scaled(codec: Any, kind: str, file: Path, weights: dict[str, torch.Tensor]) -> Path:
    found: dict[str, torch.Tensor] = {}
    for name, value in weights.items():
        if not is_quantised(name, value):
            found[name] = value
            continue
        made, (values, scales) = codec.encode(value.to(BF16))
        layer = name.removesuffix(".weight")
        found |= {name: values.view(made.shape), f"{layer}.weight_scale": scales.view(-1, 1)}
        note = json.dumps({"format": kind}).encode()
        found[f"{layer}.comfy_quant"] = torch.frombuffer(bytearray(note), dtype=torch.uint8)
    save_file(found, file, metadata={"format": "pt"})
    return file


def write_cast(file: Path, weights: dict[str, torch.Tensor]) -> Path:
    """Floats of 8 bits without scales."""
    save_file({name: value.to(torch.float8_e4m3fn) for name, value in weights.items()}, file)
    return file


WRITERS: dict[str, Callable[[Path, dict[str, torch.Tensor]], Path]] = {
    "q8_0": lambda *args: write_gguf(Type.Q8_0, *args),
    "q4_0": lambda *args: write_gguf(Type.Q4_0, *args),
    "int8": lambda *args: write_scaled(int8, "int8_tensorwise", *args),
    "fp8": lambda *args: write_scaled(fp8, "float8_e4m3fn", *args),
    "fp8 without scales": write_cast,
}


def decoded(weight: EncodedWeight) -> torch.Tensor:
    parts = []
    for at in weight.parts:
        with at.path.open("rb") as file:
            file.seek(at.offset)
            count = at.shape[0]
            parts.append(torch.frombuffer(bytearray(file.read(count * at.dtype.itemsize)), dtype=at.dtype))
    out = torch.empty(weight.codec.shape, dtype=weight.codec.dtype)
    weight.codec.decode(parts, out)
    return out.to(BF16)


class Pair:
    """A folder whose weights are encoded, and one of the plain weights that they are decoded to."""

    def __init__(self, folder: Path, parts: list[str], how: str, root: Path) -> None:
        self.encoded = Path(shutil.copytree(folder, root / "encoded"))
        self.plain = Path(shutil.copytree(folder, root / "plain"))
        for part in parts:
            (file,) = (self.encoded / part).glob("*.safetensors")
            made = WRITERS[how](file, load_file(file))
            values = {name: decoded(weight) for name, weight in encoded_weights(made, BF16).items()}
            (file,) = (self.plain / part).glob("*.safetensors")
            save_file(values, file, metadata={"format": "pt"})

    def open(self, encoded: bool = True, device: str = "sim", **more: Any) -> Any:
        return ballast.open_pipeline(self.encoded if encoded else self.plain, device=device, dtype="bf16", **more)


@pytest.mark.parametrize("how", list(WRITERS))
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
        assert sim.stats().allocated_bytes == 0
        assert dit.host_bytes == dit.size_bytes
    from_disk = pair.open(ram=3 * max(piece.packed_bytes for piece in sizes_of(dit).pieces) + 20000)
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


@pytest.mark.parametrize("how", ["q8_0", "fp8", "fp8 without scales"])
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


@pytest.mark.parametrize("how", ["q8_0", "int8"])
def test_runs_are_as_planned_at_any_budget(how: str, tmp_path: Path, sim: ModuleType) -> None:
    pair = Pair(ROOT / "demo" / "shapes", ["transformer"], how, tmp_path)
    size = {"width": 320, "height": 320, "steps": 1, "guidance": 1.0}
    pipe = pair.open()
    cond = pipe.encode("a red circle")
    expected = pair.open(encoded=False).sample(cond, **size)
    most = pipe.plan(**size, cond=cond, strategy="resident").sampling.peak_vram_bytes
    least = pipe.plan(**size, cond=cond, vram=1).sampling.peak_vram_bytes
    assert least < most
    for share in (0.0, 0.5, 1.0):
        one = pipe.within(vram=least + int(share * (most - least)))
        plan = one.plan(**size, cond=cond).sampling
        assert torch.equal(one.sample(cond, **size), expected)
        stage = manager("sim").timeline.stages[-1]
        assert stage.peak_bytes <= plan.peak_vram_bytes <= min(one.vram_bytes, 1.05 * stage.peak_bytes)
        assert sim.stats().allocated_bytes == 0
