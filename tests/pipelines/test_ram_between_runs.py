"""RAM goes to what the next run of the same kind needs, before what the last ones have left; plans say what is read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import newbie_folders
import pyramid_folders
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.memory.planning.fit import sizes_of
from ballast.memory.sizes import format_bytes

Folders = Callable[[str], Path]


class Runs:
    """Runs of a pipeline, with RAM for a share of its transformer beside windows and the VAE."""

    def __init__(self, name: str, folder: Path, cache: Path, share: float) -> None:
        family = tiny.FAMILIES.get(name)
        self.encoding, self.given = {}, {"width": 64, "height": 64, "steps": 4}
        if family is not None:
            size = dict(zip(("width", "height"), family.size, strict=True))
            self.encoding = {"negative_prompt": "grey" if family.negative else "", **family.encode_kwargs}
            self.given |= {**size, "frames": family.frames, "guidance": family.guidance, **family.call_kwargs}
        elif name == "pyramid":
            self.given |= {"frames": 9, "guidance": 2.0}
        whole = ballast.open_pipeline(folder, device="sim", cache_dir=cache)
        for unit in (*whole.encoders, *whole.denoisers, whole.decoder):
            unit.drop()
        (self.dit,) = whole.denoisers
        windows = 3 * max(group.packed_bytes for group in sizes_of(self.dit).groups)
        self.pipe = whole.within(ram=int(share * self.dit.size_bytes) + windows + whole.decoder.size_bytes)
        self.conds: dict[str, Any] = {}

    def __call__(self, prompt: str, seed: int) -> int:
        """Run once. Returns the bytes read from disk, which are those planned."""
        pipe, mgr = self.pipe, manager("sim")
        known = {"cond": self.conds[prompt]} if prompt in self.conds else {"prompt": prompt, **self.encoding}
        plan, begun = pipe.plan(**known, **self.given), mgr.disk_bytes_read
        cond = self.conds[prompt] = pipe.encode(prompt, **self.encoding)
        encoded = mgr.disk_bytes_read
        latents = pipe.sample(cond, seed=seed, **self.given)
        planned, read = mgr.timeline.stages[-1].planned, mgr.disk_bytes_read - encoded
        pipe.decode(latents)
        assert planned is not None and planned.disk_bytes == read
        assert plan.disk_bytes == mgr.disk_bytes_read - begun
        return mgr.disk_bytes_read - begun


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("runs")


@pytest.fixture
def runs(tiny_folders: Folders, sim: ModuleType, root: Path) -> Callable[[str, float], Runs]:
    def opened(name: str, share: float) -> Runs:
        ours = {"newbie": newbie_folders.official, "pyramid": lambda folder: pyramid_folders.save("mmdit", folder)}
        folder = root / name
        if name not in ours:
            folder = tiny_folders(name)
        elif not folder.exists():
            ours[name](folder)
        return Runs(name, folder, root / "cache", share)

    return opened


FAMILIES = [pytest.param(name, marks=pytest.mark.soak) for name in ("wan", "newbie", "pyramid")]


@pytest.mark.long
@pytest.mark.parametrize("name", ["flux", "sd3", *FAMILIES])
def test_encoders_whose_prompt_is_known_leave_ram_to_what_runs_again(
    name: str, runs: Callable[[str, float], Runs]
) -> None:
    """All else is read again only where RAM cannot hold both the transformer and the VAE."""
    run = runs(name, 0.5)
    encoders, dit = run.pipe.encoders, run.dit
    read = [run("a boat", seed) for seed in range(4)]
    assert sum(unit.host_bytes for unit in encoders) < 0.1 * sum(unit.size_bytes for unit in encoders)
    assert read[2] == read[3] and (read[2] < 0.65 * dit.size_bytes or name == "newbie")
    for number in range(2):
        run(f"boat {number}", number)
    assert all(unit.in_ram for unit in encoders) or name != "flux", "they stay where each prompt is new"


def test_all_steps_and_all_parts_of_a_batch_are_read(runs: Callable[[str, float], Runs]) -> None:
    """A dry run is of 4 steps, for one part; the stage has more."""
    run, mgr = runs("flux", 0.5), manager("sim")
    cond = run.pipe.encode("a boat in parts")
    ram = run.pipe.ram_bytes
    for steps, batch in ((9, 1), (4, 2)):
        given = {**run.given, "cond": cond, "steps": steps}
        least = run.pipe.plan(**given, vram=1000).stages[-2].peak_vram_bytes
        pipe = run.pipe.within(vram=least + least // 50, ram=ram)
        plan, begun = pipe.plan(**given, batch=batch), mgr.disk_bytes_read
        pipe.sample(**given, batch=batch)
        assert plan.samples and (plan.at_once < batch or batch == 1)
        assert plan.stages[-2].disk_bytes == pytest.approx(mgr.disk_bytes_read - begun, rel=0.005)
        assert f"It reads {format_bytes(plan.disk_bytes)} from disk." in str(plan)


def test_second_run_reads_nothing_where_the_transformer_fits(runs: Callable[[str, float], Runs]) -> None:
    run = runs("flux", 1.0)
    run("a car", 1)
    assert run("a car", 2) == run("a car", 3) == 0


def test_kept_vae_is_read_once(runs: Callable[[str, float], Runs]) -> None:
    """With RAM for half of it: it lies whole on the device, with what decoding does not call, too."""
    run = runs("flux", 0.5)
    latents, vae, mgr = run.pipe.sample(run.pipe.encode("a car"), **run.given), run.pipe.decoder, manager("sim")
    vae.drop()
    pipe, read = run.pipe.within(ram=vae.size_bytes // 2), mgr.disk_bytes_read
    pipe.runner = pipe.runner.set(keeps_vae=True)
    first = pipe.decode(latents)
    assert vae.resident_bytes == vae.size_bytes
    assert mgr.disk_bytes_read - read == sum(parameter.nbytes for parameter in vae.module.parameters())
    read = mgr.disk_bytes_read
    assert torch.equal(pipe.decode(latents), first) and mgr.disk_bytes_read == read
    mgr.evict(vae)
