"""Models of published size from generated files, in little VRAM and RAM: planned is what ran, and lists resume.

    BALLAST_SOAK=full .venv/bin/python -m pytest tests/pipelines/test_published_size.py -s -o faulthandler_timeout=0

The files are sparse: real headers, zeros that take no disk. What that needs is told first; `-k newbie` runs one model.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import psutil
import pytest
import torch
from ballast.bench import report
from ballast.bench.downloads import full_size
from ballast.memory import manager
from ballast.memory.sizes import parse_bytes
from gguf import GGMLQuantizationType as Type
from places import TESTS
from safetensors.torch import save_file
from sparse_gguf import quantized

pytestmark = pytest.mark.full

DISK_BYTES = 2 * 2**30  # for LoRA, tokenizers, latents and the sparse files' own blocks
SYSTEM_BYTES = 4 * 2**30  # of RAM for Python, activations and the page cache
PROMPTS = "a weathered fishing boat on a beach", "a row of narrow houses under heavy clouds"
NEAR = 0.002  # that a measured peak may differ from the planned one
READ_NEAR = 0.05


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, how its folder is made, the card and RAM that it gets, and a small run."""

    build: Callable[[Path], Path]
    vram: str
    ram: str
    run: dict[str, Any]
    text: dict[str, Any] = dataclasses.field(default_factory=dict)
    lora_rank: int = 0

    @property
    def ram_bytes(self) -> int:
        """RAM that the run takes, with the card's."""
        return parse_bytes(self.vram) + parse_bytes(self.ram) + SYSTEM_BYTES


def in_q4_k(name: str) -> Callable[[Path], Path]:
    """Make a folder whose transformer is a GGUF file."""

    def build(folder: Path) -> Path:
        quantized(full_size.build(name, folder) / "transformer", Type.Q4_K)
        return folder

    return build


SMALL = {"width": 64, "height": 64, "steps": 2}
CASES = {
    "newbie": Case(full_size.build_newbie, "4GB", "3GB", SMALL),
    "pyramid": Case(full_size.build_pyramid, "3GB", "3GB", {"width": 128, "height": 128, "frames": 9, "steps": 2}),
    "flux": Case(in_q4_k("flux"), "4GB", "6GB", SMALL, {"max_sequence_length": 32}, lora_rank=32),
    "hidream": Case(in_q4_k("hidream"), "4GB", "6GB", SMALL),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("published")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else CASES[name].build(root / name)

    return folder


def need(case: Case, folder: Path) -> None:
    """Tell what a case takes, and skip it where that is not there."""
    disk, free = shutil.disk_usage(folder).free, psutil.virtual_memory().available
    words = report.words
    report.say(f"\nneeds {words('_bytes', DISK_BYTES)} of disk and {words('_bytes', case.ram_bytes)} of RAM")
    if disk < DISK_BYTES or free < case.ram_bytes:
        pytest.skip(f"{words('_bytes', disk)} of disk and {words('_bytes', free)} of RAM are free")


def lora(pipe: Any, rank: int, path: Path) -> Path:
    """Write a LoRA for the attention of a transformer."""
    tensors, draw = {}, torch.Generator().manual_seed(0)
    for name, module in pipe.denoisers[0].skeleton().named_modules():
        if name.endswith(("to_q", "to_k", "to_v")):
            down, up = (rank, module.in_features), (module.out_features, rank)
            tensors[f"transformer.{name}.lora_A.weight"] = 1e-3 * torch.randn(down, generator=draw)
            tensors[f"transformer.{name}.lora_B.weight"] = 1e-3 * torch.randn(up, generator=draw)
    save_file(tensors, path)
    return path


@pytest.mark.parametrize("name", CASES)
def test_planned_is_what_ran(name: str, folders: Callable[[str], Path], sim: ModuleType, tmp_path: Path) -> None:
    case, folder, on = CASES[name], folders(name), manager("sim")
    need(case, folder)
    ram = parse_bytes(case.ram)
    sim.enable(total=case.vram)
    pipe = ballast.open_pipeline(folder, device="sim", ram=ram, cache_dir=tmp_path)
    if case.lora_rank:
        pipe.set_loras([(lora(pipe, case.lora_rank, tmp_path / "lora.safetensors"), 1.0)])
    rows: list[dict[str, Any]] = []
    held: list[int] = []
    for i, prompt in enumerate(PROMPTS):
        begun = time.perf_counter()
        cond = pipe.encode(prompt, **case.text)
        plan = pipe.plan(cond=cond, vram=case.vram, **case.run)
        calls = [on.disk_bytes_read]

        def step(*_: Any, calls: list[int] = calls) -> None:
            calls.append(on.disk_bytes_read)
            held.append(on.report().host_bytes)

        latents = pipe.sample(cond, **case.run, seed=i, on_step=step)
        sampled = on.timeline.stages[-1]
        unit = plan.sampling
        steps = [after - before for before, after in zip(calls, calls[1:], strict=False)]
        later = steps[1:]
        pipe.decode(latents)
        rows.append(
            {
                "name": f"{name}, prompt {i + 1}", "planned_bytes": unit.peak_vram_bytes,
                "peak_bytes": sampled.peak_bytes, "ram_bytes": max(held), "first_bytes": steps[0],
                "first_planned_bytes": unit.disk_bytes - len(later) * unit.step_read_bytes,
                "step_bytes": sum(later) / len(later),
                "step_planned_bytes": unit.step_read_bytes, "seconds": time.perf_counter() - begun,
            }
        )  # fmt: skip
        report.say(report.table({key: key for key in rows[0]}, rows))
        assert sampled.peak_bytes == pytest.approx(unit.peak_vram_bytes, rel=NEAR)
        size_bytes = pipe.denoisers[0].size_bytes
        assert steps[0] == pytest.approx(rows[-1]["first_planned_bytes"], rel=READ_NEAR, abs=NEAR * size_bytes)
        assert max(held) <= ram
        assert sim.stats().allocated_bytes == 0
    again = on.disk_bytes_read
    pipe.encode(PROMPTS[0], **case.text)
    assert on.disk_bytes_read == again, "a prompt that was seen is read again"
    row = rows[1]
    assert row["step_bytes"] == pytest.approx(row["step_planned_bytes"], rel=READ_NEAR)
    del pipe
    on.free()


_COMMAND = """
import sys
sys.path.insert(0, sys.argv[1])
from import_pack import import_pack
import_pack()
from ballast.commands.main import main
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL")
@pytest.mark.parametrize("name", CASES)
def test_killed_list_goes_on_at_the_latent_that_waits(
    name: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    case, folder, out = CASES[name], folders(name), tmp_path / "out"
    need(case, folder)
    lines = tmp_path / "list.jsonl"
    lines.write_text("\n".join(json.dumps({"prompt": PROMPTS[0], "seed": seed}) for seed in range(2)), "utf-8")
    command = [sys.executable, "-c", _COMMAND, str(TESTS / "support"), "batch", str(lines), "--model", str(folder)]
    command += ["--out", str(out), "--device", "sim", "--vram", case.vram, "--ram", case.ram]
    command += [f"--{key}={value}" for key, value in case.run.items()]
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None and not (waiting := list(out.glob("latents/*.latent"))):
        time.sleep(0.1)
    process.kill()
    process.wait()
    assert waiting, "it ended before"
    before = {path.name: path.stat().st_mtime_ns for path in out.glob("latents/*.latent")}
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None:
        for path in out.glob("latents/*.latent"):
            if path.name in before and path.exists():
                assert path.stat().st_mtime_ns == before[path.name], "drawn again"
        time.sleep(0.1)
    assert process.returncode == 0
    assert len([path for path in out.iterdir() if path.suffix in (".png", ".webp")]) == 2
    assert not list(out.glob("latents/*.latent"))
