"""Batches: each picture is the one that its seed makes alone, and the weights come once for all of them."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import hidream_folders
import newbie_folders
import pyramid_folders
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.memory.planning.fit import sizes_of
from ballast.pipelines.equivalence import check as proving
from ballast.pipelines.equivalence import verdicts as proof
from ballast.pipelines.planning.vae_forecasts import VaeForecasts
from ballast.pipelines.sampling.batches import batch_of, halvings
from selection import few

Folders = Callable[[str], Path]
Stages = tuple[Any, Any, dict[str, Any]]  # a pipeline, its conditioning, further arguments of `sample`
SHORT = ("wan", "hidream dev")
FAMILIES = few((*SHORT, "newbie", "pyramid_flow", *(n for n in tiny.FAMILIES if n not in SHORT)), *SHORT)
SEED = 2**64 - 2  # after which it begins again at 0


@pytest.fixture
def opened(tiny_folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Stages]:
    def open_family(name: str) -> Stages:
        root = tmp_path_factory.mktemp("batch")
        if name == "newbie":
            pipe: Any = ballast.open_pipeline(newbie_folders.official(root / "newbie"), device="sim")
            return pipe, pipe.encode("a boat", "blurry"), {"width": 48, "height": 32, "steps": 2}
        if name == "pyramid_flow":
            pipe = ballast.open_pipeline(pyramid_folders.save("flux", root / "pyramid"), device="sim")
            return pipe, pipe.encode("a boat", "blurry"), {"width": 128, "height": 64, "frames": 1, "steps": 1}
        kind = name.split()[0]
        folder = tiny_folders(kind)
        if name == "hidream dev":  # its scheduler draws noise in each step
            folder = hidream_folders.complete(folder, root / "hidream", "dev")
        pipe, encode, _, _ = tiny.stages(kind, folder, "sim")
        family = tiny.FAMILIES[kind]
        size = {"width": family.size[0], "height": family.size[1], "frames": family.frames}
        return pipe, encode(), {**size, "steps": 2, "guidance": family.guidance, **family.call_kwargs}

    return open_family


@pytest.fixture
def sampling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans without what decoding takes in stripes, which needs a dry run for each budget."""
    monkeypatch.setattr(VaeForecasts, "stripes", lambda *_: None)


@pytest.mark.parametrize("name", FAMILIES)
def test_picture_is_the_one_made_alone(name: str, opened: Callable[[str], Stages], sim: ModuleType) -> None:
    """Resident and streamed, drawn at once: as many calls as for one, and as many bytes of weights."""
    pipe, cond, run = opened(name)
    last = pipe.sample(cond, **run, seed=(SEED + 2) % 2**64)
    for strategy in ("resident", "streamed") if name != "wan" or os.environ.get("BALLAST_SOAK") else ("streamed",):
        run["strategy"] = strategy
        first = pipe.sample(cond, **run, seed=SEED)
        calls, bytes_in = _seen(pipe)
        three = pipe.sample(cond, **run, seed=SEED, batch=3)
        assert len(three) == 3 and not torch.allclose(first, last, atol=1e-2)
        torch.testing.assert_close(three[:1], first, atol=1e-4, rtol=0)
        torch.testing.assert_close(three[2:], last, atol=1e-4, rtol=0)
        assert _seen(pipe) == (calls, bytes_in), "a picture of three costs a third of the weights"
    assert sim.stats().allocated_bytes == 0


def _seen(pipe: Any) -> tuple[int, int]:
    """The calls of the transformer in the last stage, and the bytes of weights that came in."""
    record = pipe.manager.timeline.stages[-1]
    return sum(event.kind == "ran" for event in record.events), sum(unit.bytes_in for unit in record.units.values())


def test_own_noise_for_each(opened: Callable[[str], Stages], sim: ModuleType) -> None:
    pipe, cond, run = opened("flux")
    shape = (3, run["width"] // 16 * run["height"] // 16, 4 * pipe.decoder_config["latent_channels"])
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7))
    both = pipe.sample(cond, **run, noise=noise, batch=3)
    alone = [pipe.sample(cond, **run, noise=noise[i : i + 1]) for i in range(3)]
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-4, rtol=0)


@pytest.mark.usefixtures("sampling_alone")
@pytest.mark.parametrize("name", few(["flux", "hidream", "newbie", "wan"], "flux"))
def test_plan_is_what_is_measured(name: str, opened: Callable[[str], Stages], sim: ModuleType) -> None:
    """Never below, at most 5 % above, at once and in parts; and seconds for each picture."""
    pipe, cond, run = opened(name)
    budgets = []
    for batch in (1, 2, 4):
        plan = pipe.plan(cond=cond, vram="1GB", batch=batch, **run)
        assert (plan.pictures, plan.at_once) == (batch, batch)
        budgets.append(plan.stages[-2].peak_vram_bytes)
    for batch, budget in ((4, budgets[2]), (4, budgets[1]), (3, budgets[1]), (4, budgets[0])):
        plan = pipe.plan(cond=cond, vram=budget, batch=batch, strategy="resident", **run)
        pipe.runner = pipe.runner.set(vram_bytes=budget)
        pipe.sample(cond, **run, batch=batch, strategy="resident", on_step=lambda *_: None)
        record = manager("sim").timeline.stages[-1]
        predicted = plan.stages[-2].peak_vram_bytes
        most = 1.3 if name == "hidream" else 1.05  # an upper bound, for any routing
        assert record.peak_bytes <= predicted <= most * record.peak_bytes, (batch, budget)
        assert record.peak_bytes <= budget
        assert plan.at_once == {budgets[2]: 4, budgets[1]: 2, budgets[0]: 1}[budget]
        assert plan.picture_seconds == pytest.approx(plan.stages[-2].seconds / batch)
    assert f"{plan.at_once} at once" in str(plan)


def test_parts_where_it_does_not_fit(opened: Callable[[str], Stages], sim: ModuleType) -> None:
    """Five in parts of three and two, in one stage: weights come once, steps are counted through."""
    pipe, cond, run = opened("flux")
    run["strategy"] = "resident"
    alone = [pipe.sample(cond, **run, seed=i) for i in range(5)]
    pipe.runner = pipe.runner.set(
        vram_bytes=pipe.plan(cond=cond, vram="1GB", batch=3, **run).stages[-2].peak_vram_bytes
    )
    steps: list[tuple[int, int, int]] = []
    before = len(pipe.manager.timeline.stages)
    made = pipe.sample(cond, **run, batch=5, on_step=lambda step, of, latents: steps.append((step, of, len(latents))))
    torch.testing.assert_close(made, torch.cat(alone), atol=1e-4, rtol=0)
    assert steps == [(1, 4, 3), (2, 4, 3), (3, 4, 2), (4, 4, 2)]
    assert len(pipe.manager.timeline.stages) == before + 1
    (dit,) = pipe.denoisers
    assert pipe.manager.timeline.stages[-1].units[dit.name].bytes_in == pytest.approx(dit.size_bytes, rel=0.02)


def test_out_of_memory_keeps_what_is_drawn(opened: Callable[[str], Stages], sim: ModuleType) -> None:
    """Of parts of two the second does not come through: the first is kept, the rest drawn one by one."""
    pipe, cond, run = opened("flux")
    run["strategy"] = "resident"
    alone = [pipe.sample(cond, **run, seed=i) for i in range(4)]
    pipe.runner = pipe.runner.set(
        vram_bytes=pipe.plan(cond=cond, vram="1GB", batch=2, **run).stages[-2].peak_vram_bytes
    )
    drawn: list[tuple[int, int]] = []

    def fail(step: int, steps: int, latents: torch.Tensor) -> None:
        drawn.append((step, len(latents)))
        if len(drawn) == 4:
            raise torch.OutOfMemoryError("out of memory, as asked")

    made = pipe.sample(cond, **run, batch=4, on_step=fail)
    assert drawn == [(1, 2), (2, 2), (3, 2), (4, 2), (3, 1), (4, 1), (5, 1), (6, 1)]
    torch.testing.assert_close(made, torch.cat(alone), atol=1e-4, rtol=0)
    assert sim.stats().allocated_bytes == 0


def test_one_after_the_other_where_it_is_not_proved(
    opened: Callable[[str], Stages], sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that draws the noise of all pictures from the first generator."""
    pipe, cond, run = opened("sd3")

    class Wrong(pipe.model.pipeline_class):  # type: ignore[name-defined, misc]
        def prepare_latents(self, *args: Any, **kwargs: Any) -> Any:
            parts = [part[0] if isinstance(part, list) else part for part in args]
            return super().prepare_latents(*parts, **{k: v[0] if isinstance(v, list) else v for k, v in kwargs.items()})

    Wrong.__name__ = "Wrong"
    alone = [pipe.sample(cond, **run, seed=i) for i in range(2)]
    monkeypatch.setattr(pipe.model, "pipeline_class", Wrong)
    assert "not those that are drawn alone" in pipe.model.batch_differs(pipe.model, ())
    sizes: list[int] = []
    made = pipe.sample(cond, **run, batch=2, on_step=lambda step, steps, latents: sizes.append(len(latents)))
    assert torch.equal(made, torch.cat(alone)) and sizes == [1] * 4
    assert pipe.plan(cond=cond, vram="1GB", batch=2, **run).at_once == 1
    assert pipe.plan(cond=cond, vram="1GB", **run).best is None


def test_what_cannot_be_compared_runs_one_by_one(
    opened: Callable[[str], Stages], sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe, cond, run = opened("sd3")
    asked: list[int] = []

    def fail(*_: object) -> None:
        asked.append(1)
        raise RuntimeError("no")

    monkeypatch.setattr(proving, "compare_batch", fail)
    monkeypatch.setattr(proof, "_known", OrderedDict())
    for _ in range(2):
        assert len(pipe.sample(cond, **run, batch=2)) == 2
    assert len(asked) == 1, "asked once a process"


def test_best_batch_of_a_budget(opened: Callable[[str], Stages], sim: ModuleType) -> None:
    """No batch that fits takes 5 % less for a picture than the one that is named, and that one fits at once."""
    pipe, cond, run = opened("flux")
    sim.enable(total="4GB", h2d_gbps=0.05, tflops=1000)
    (dit,) = pipe.denoisers
    one = pipe.plan(cond=cond, vram="1GB", **run).stages[-2].peak_vram_bytes
    for budget in (one - sizes_of(dit).resident_bytes // 2, 2 * one):
        named = pipe.plan(cond=cond, vram=budget, **run).best
        assert named.pictures > 1
        plan = pipe.plan(cond=cond, vram=budget, batch=named.pictures, **run)
        assert plan.samples and plan.at_once == named.pictures and plan.best == named
        assert plan.picture_seconds <= 1.05 * named.seconds
        for other in (1, 2, 4, 8):
            fitting = pipe.plan(cond=cond, vram=budget, batch=other, **run)
            assert plan.picture_seconds <= 1.06 * fitting.picture_seconds or other > named.pictures
    assert f"the best batch is {named.pictures}" in str(plan)


@pytest.mark.soak
@pytest.mark.usefixtures("sampling_alone")
def test_pictures_to_start_from_make_a_batch(opened: Callable[[str], Stages], sim: ModuleType) -> None:
    pipe, cond, run = opened("flux")
    pictures = torch.rand(3, run["height"], run["width"], 3, generator=torch.Generator().manual_seed(1))
    mask = torch.zeros(1, run["height"], run["width"])
    mask[:, :, : run["width"] // 2] = 1
    for further in ({}, {"mask": mask}):
        given = {**run, "strength": 0.6, "steps": 4, **further}
        alone = [pipe.sample(cond, **given, image=pictures[i : i + 1], seed=i) for i in range(3)]
        torch.testing.assert_close(pipe.sample(cond, **given, image=pictures), torch.cat(alone), atol=1e-4, rtol=0)
        alone = [pipe.sample(cond, **given, image=pictures[:1], seed=i) for i in range(2)]
        both = pipe.sample(cond, **given, image=pictures[:1], batch=2)
        torch.testing.assert_close(both, torch.cat(alone), atol=1e-4, rtol=0)
        plan = pipe.plan(cond=cond, vram="1GB", image=pictures, **given)
        assert (plan.pictures, plan.at_once) == (3, 3)
    assert sim.stats().allocated_bytes == 0


def test_first_frames_make_a_batch_of_videos(opened: Callable[[str], Stages], sim: ModuleType) -> None:
    pipe, cond, run = opened("pyramid_flow")
    frames = pipe.encode_image(torch.rand(2, 64, 128, 3, generator=torch.Generator().manual_seed(1)))
    run["frames"] = 9
    alone = [pipe.sample(cond, **run, init_latents=frames[i : i + 1], seed=i) for i in range(2)]
    torch.testing.assert_close(pipe.sample(cond, **run, init_latents=frames), torch.cat(alone), atol=1e-4, rtol=0)
    both = pipe.sample(cond, **run, init_latents=frames[:1], batch=2)
    torch.testing.assert_close(both[:1], alone[0], atol=1e-4, rtol=0)


def test_on_the_cpu_they_are_drawn_one_by_one(tiny_folders: Folders) -> None:
    pipe, encode, sample, decode = tiny.stages("sd3", tiny_folders("sd3"), "cpu")
    cond = encode()
    alone = torch.cat([sample(cond, seed=i) for i in range(2)])
    both = sample(cond, batch=2)
    assert torch.equal(both, alone)
    assert decode(both).shape[0] == 2


def test_bad_numbers_are_told_in_a_line(opened: Callable[[str], Stages], sim: ModuleType) -> None:
    pipe, cond, run = opened("sd3")
    for batch in (0, -1, 65, 2.0, True, "four", None):
        with pytest.raises(ValueError, match="batch is .*; it takes a whole number from 1 to 64"):
            pipe.sample(cond, **run, batch=batch)
        with pytest.raises(ValueError, match="batch is .*; it takes a whole number from 1 to 64"):
            pipe.plan(cond=cond, vram="1GB", **run, batch=batch)
    two = pipe.encode(["a boat", "a car"], "blurry")
    with pytest.raises(ValueError, match="batch is 2, but there are 2 prompts"):
        pipe.sample(two, **run, batch=2)
    with pytest.raises(ValueError, match=r"the noise is \[1, 4, 4, 4\], for a batch of 2"):
        pipe.sample(cond, **run, batch=2, noise=torch.zeros(1, 4, 4, 4))
    pictures = torch.rand(3, run["height"], run["width"], 3)
    with pytest.raises(ValueError, match="image has 3 for a batch of 4"):
        pipe.sample(cond, **run, image=pictures, strength=0.5, batch=4)
    with pytest.raises(ValueError, match="image has pictures of several sizes"):
        pipe.sample(cond, **run, image=[pictures[0], pictures[0, :16]], strength=0.5)
    assert pipe.manager.report() and sim.stats().allocated_bytes == 0


def test_batch_of_arguments() -> None:
    latents = torch.arange(3.0)[:, None]
    own = {"init_latents": "init_latents", "mask_image": "mask"}
    batch = batch_of(1, 5, None, 1, {"init_latents": latents, "mask_image": (latents[0],)}, own)
    part = batch.arguments({"init_latents": latents, "mask_image": (latents[0],), "steps": 4}, 1, 2)
    assert part["init_latents"].tolist() == [[1], [2]] and len(part["mask_image"]) == 2 and part["steps"] == 4
    assert [generator.initial_seed() for generator in part["generator"]] == [6, 7]
    last = batch.arguments({"init_latents": latents, "mask_image": (latents[0],)}, 2, 2)
    assert last["generator"].initial_seed() == 7 and last["init_latents"].tolist() == [[2]]
    assert halvings(6) == [6, 3, 2, 1] and halvings(5) == [5, 3, 2, 1] and halvings(1) == [1]
