"""Step caching: the latents of diffusers' hooks, no weights moved in skipped steps, and plans that count them."""

from __future__ import annotations

import functools
import gc
import inspect
import itertools
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from adapters import lora_files
from ballast.memory import manager
from ballast.pipelines.sampling.cached_calls import _CachedCalls
from ballast.pipelines.sampling.step_cache import block_paths, mag_steps, metadata_of, static_steps
from diffusers.hooks import FirstBlockCacheConfig, MagCacheConfig, SeaCacheConfig
from diffusers.hooks._helpers import TransformerBlockRegistry
from diffusers.hooks.first_block_cache import apply_first_block_cache
from diffusers.hooks.hooks import CacheContext, _set_cache_context
from diffusers.hooks.mag_cache import FLUX_MAG_RATIOS, apply_mag_cache
from diffusers.hooks.sea_cache import apply_sea_cache
from diffusers.models.transformers.transformer_z_image import ZImageTransformerBlock
from selection import few

Folders = Callable[[str], Path]
STEPS = 10
FAMILIES = (
    "auraflow", "chroma", "cogvideox", "flux", "flux2_klein", "hunyuan_video", "ltx", "lumina2", "mochi", "qwenimage",
    "sd3", "wan", "zimage",
)  # fmt: skip
MORE = {"flux": ["magcache:0.06", "firstblock:0.4"], "wan": ["seacache:0.4", "firstblock:0.2"]}


HOOKS = {
    FirstBlockCacheConfig: apply_first_block_cache,
    MagCacheConfig: apply_mag_cache,
    SeaCacheConfig: apply_sea_cache,
}


def hook_of(kind: str) -> Any:
    """Return diffusers' configuration of the same cache."""
    name, _, amount = kind.partition(":")
    if name == "static":
        once = {"threshold": 1e9, "max_skip_steps": int(amount) - 1, "mag_ratios": torch.ones(STEPS)}
        return MagCacheConfig(num_inference_steps=STEPS, **once)
    if name == "magcache":
        return MagCacheConfig(threshold=float(amount), num_inference_steps=STEPS, mag_ratios=FLUX_MAG_RATIOS)
    return {"firstblock": FirstBlockCacheConfig, "seacache": SeaCacheConfig}[name](threshold=float(amount))


def apart(module: Any, passes: int) -> None:
    """Give each pass of guidance a cache of its own, where the pipeline's class does not say which runs."""
    forward, calls = module.forward, itertools.count()

    @functools.wraps(forward)
    def call(*args: Any, **kwargs: Any) -> Any:
        _set_cache_context(module, CacheContext(name=str(next(calls) % passes)))
        return forward(*args, **kwargs)

    module.forward = call


def stock(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """Return the latents of the unmodified pipeline with diffusers' hook."""
    read = diffusers.DiffusionPipeline.from_pretrained

    def hooked(*args: Any, **kwargs: Any) -> Any:
        pipe = read(*args, **kwargs)
        config = hook_of(kind)
        for path in block_paths(pipe.transformer):  # diffusers does not know all of them
            block = pipe.transformer.get_submodule(path)
            TransformerBlockRegistry.register(type(block), replace(metadata_of(block)))
        HOOKS[type(config)](pipe.transformer, config)
        if "cache_context" not in inspect.getsource(type(pipe).__call__):
            apart(pipe.transformer, 2 if tiny.family_of(folder).name in ("chroma", "lumina2") else 1)
        return pipe

    with monkeypatch.context() as patch:
        patch.setattr(TransformerBlockRegistry.get(ZImageTransformerBlock), "hidden_states_argument_name", "x")
        patch.setattr(tiny, "DiffusionPipeline", type("Hooked", (), {"from_pretrained": staticmethod(hooked)}))
        return tiny.stock(folder, steps=STEPS)[0].float()


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found out of a pipeline once."""
    return tmp_path_factory.mktemp("step_cache")


class Opened:
    """A tiny pipeline with its prompt encoded, and how many calls its last run made and skipped."""

    def __init__(
        self, name: str, folder: Path, device: str, monkeypatch: pytest.MonkeyPatch, cache: Path, **opening: Any
    ) -> None:
        family = tiny.FAMILIES[name]
        self.pipe = ballast.open_pipeline(folder, device=device, cache_dir=cache, **opening)
        self.cond = self.pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)
        width, height = family.size
        size = {"width": width, "height": height, "frames": family.frames}
        self.run = {**size, "steps": STEPS, "guidance": family.guidance, **family.call_kwargs}
        self.seen: list[Any] = []
        made = _CachedCalls.__init__

        def noted(calls: Any, *args: Any) -> None:
            made(calls, *args)
            if not calls.cache.dry:
                self.seen.append(calls)

        monkeypatch.setattr(_CachedCalls, "__init__", noted)

    def __call__(self, **more: Any) -> torch.Tensor:
        self.seen.clear()
        latents = self.pipe.sample(self.cond, **self.run | more)
        gc.collect()
        return latents

    @property
    def skipped(self) -> tuple[int, int]:
        """Calls that the last run skipped, and all."""
        return sum(each.skipped for each in self.seen), sum(each.calls for each in self.seen)


@pytest.mark.parametrize("name", few(FAMILIES, "flux", "lumina2", "wan"))
def test_skipped_steps_are_those_of_the_hook_of_diffusers(
    name: str, tiny_folders: Folders, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Opened(name, tiny_folders(name), "cpu", monkeypatch, cache)
    whole = run()
    for kind in ["static:2", *MORE.get(name, [])]:
        latents = run(cache=kind)
        skipped, calls = run.skipped
        assert 0 < skipped < calls, kind
        assert not torch.equal(latents, whole)
        # The stock VAE is given latents in its own scale: HunyuanVideo's are rounded on the way back.
        torch.testing.assert_close(latents, stock(tiny_folders(name), kind, monkeypatch), atol=2e-6, rtol=0)


KINDS = ("static:2", "easycache:0.5", "firstblock:0.4")


def block_bytes(module: torch.nn.Module) -> int:
    lists = [child for child in module.children() if isinstance(child, torch.nn.ModuleList)]
    return sum(weight.nbytes for blocks in lists for weight in blocks.parameters())


@pytest.mark.parametrize("kind", few(KINDS, "firstblock:0.4"))
def test_a_skipped_step_moves_no_weights(
    kind: str, tiny_folders: Folders, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the least room: weights outside of the blocks come once, and the blocks once for each computed call."""
    run = Opened("flux", tiny_folders("flux"), "sim", monkeypatch, cache)
    on, unit = manager("sim"), run.pipe.denoisers[0]
    resident = run(cache=kind, strategy="resident")
    before = on.device_bytes_in
    assert torch.equal(run(cache=kind, strategy="leafwise"), resident)
    skipped, calls = run.skipped
    assert 0 < skipped < calls == STEPS
    blocks, once = block_bytes(unit.skeleton()), 0
    if kind.startswith("firstblock"):
        once = sum(weight.nbytes for weight in unit.skeleton().transformer_blocks[0].parameters())
    expected = unit.size_bytes - blocks + once + (calls - skipped) * (blocks - once)
    ahead = 0.1 * blocks  # what is brought for a call that does not come
    assert expected <= on.device_bytes_in - before <= expected + ahead
    assert sim.stats().allocated_bytes == 0


def test_reports_say_what_was_computed(
    tiny_folders: Folders, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table, the line of the stage and the report, for as long as no later run goes without a cache."""
    run, on = Opened("flux", tiny_folders("flux"), "sim", monkeypatch, cache), manager("sim")
    monkeypatch.setattr("ballast.pipelines.stages.sample.most_at_once", lambda *_: 1)  # a batch is drawn in parts
    for given, calls in (({}, STEPS), ({"batch": 2, "strategy": "leafwise"}, 2 * STEPS)):
        run(cache="static:2", **given)
        skipped = run.skipped[0]
        words = f"{calls - skipped} of {calls}"
        assert 0 < skipped < calls
        assert f"computed {words} calls, cache static:2" in on.timeline.stages[-1].summary()
        assert words in on.timeline.table(1) and "computed" in on.timeline.table(1).splitlines()[0]
        counted = on.report().counted["transformer"]
        assert (counted.cache, counted.calls, counted.skipped) == ("static:2", calls, skipped)
        assert f"transformer computed {words} calls with the cache static:2." in str(on.report())
    run()
    assert not on.report().counted and "computed" not in on.timeline.table(1)


def test_a_measured_run_tells_its_distance(
    tiny_folders: Folders, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From a run without a cache, which is made first. The latents are those of the cache."""
    run, on, seen = Opened("flux", tiny_folders("flux"), "sim", monkeypatch, cache), manager("sim"), []
    plain, cached = run(), run(cache="static:2")
    assert "dB" not in on.timeline.table() and on.report().cache_decibels is None
    made = run(cache="static:2", measure=True, on_step=lambda step, steps, _: seen.append((step, steps)))
    assert torch.equal(made, cached) and seen == [(step, 2 * STEPS) for step in range(1, 2 * STEPS + 1)]
    error, peak = (cached - plain).square().mean(), plain.max() - plain.min()
    told = float(10 * (peak**2 / error).log10())
    assert on.report().cache_decibels == pytest.approx(told, abs=1e-3)
    assert f"{told:.1f} dB against a run without a cache" in on.timeline.stages[-1].summary()
    assert f"at {told:.1f} dB against" in str(on.report()) and f"{told:.1f}" in on.timeline.table(1)
    assert on.timeline.stages[-2].cache_decibels is None
    with pytest.raises(ValueError, match="it has none. Give cache, or leave measure out"):
        run(measure=True)


WAYS: dict[str, dict[str, Any]] = {
    "int8": {"weights": "int8"}, "from disk": {}, "a LoRA": {}, "two pictures": {}, "resident": {},
    "a picture to start from": {},
}  # fmt: skip


@pytest.mark.parametrize("way", few(WAYS, "from disk", "a LoRA"))
def test_latents_are_the_same_however_weights_are_kept(
    way: str, tiny_folders: Folders, tmp_path: Path, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on the CPU, where nothing streams."""
    given: dict[str, Any] = {"cache": "static:2"}
    if way == "two pictures":
        given["batch"] = 2
    if way == "a picture to start from":
        width, height = tiny.FAMILIES["qwenimage"].size
        given |= {"image": torch.rand(1, height, width, 3), "strength": 0.7}
    found = []
    for device, strategy in (("cpu", "auto"), ("sim", "resident" if way == "resident" else "leafwise")):
        run = Opened("qwenimage", tiny_folders("qwenimage"), device, monkeypatch, cache, **WAYS[way])
        if way == "a LoRA":
            run.pipe.set_loras(lora_files.two(tiny_folders("qwenimage"), tmp_path))
        if way == "from disk" and device == "sim":
            run.pipe = run.pipe.within(ram=run.pipe.denoisers[0].size_bytes // 2)
        found.append(run(**given, strategy=strategy))
        skipped, calls = run.skipped
        assert 0 < skipped < calls
    assert torch.allclose(*found, atol=1e-5)
    assert sim.stats().allocated_bytes == 0


def test_each_pass_and_each_expert_has_a_cache(
    tiny_folders: Folders, tmp_path: Path, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two passes of guidance, of two transformers that follow each other; then a range of guidance."""
    pipe: Any = tiny.FAMILIES["wan"].build()
    second = type(pipe.transformer).from_config(pipe.transformer.config).eval().requires_grad_(False)
    type(pipe)(**pipe.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(tmp_path)
    run = Opened("wan", tmp_path, "sim", monkeypatch, cache)
    whole = run()
    assert not torch.equal(run(cache="static:2"), whole)
    mask = static_steps(STEPS, 2)
    assert [each.calls > 0 for each in run.seen] == [True, True]
    assert 2 * (mask.count(False) - 1) <= run.skipped[0] <= 2 * mask.count(False)
    run = Opened("qwenimage", tiny_folders("qwenimage"), "sim", monkeypatch, cache)
    run(cache="static:2", guidance_range=(0.0, 0.5))
    assert run.skipped == (sum(1 if step >= 5 else 2 for step in range(STEPS) if not mask[step]), 15)


def test_plans_count_the_computed_steps_and_hold(
    tiny_folders: Folders, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps and seconds of the card's clock; the residuals are in the peak.

    The clock counts the copies of the prompt too, which a plan does not.
    """
    sim.enable(total="4GB", h2d_gbps=1e-3, tflops=1e-3)
    run = Opened("qwenimage", tiny_folders("qwenimage"), "sim", monkeypatch, cache)
    least = run.pipe.plan(cond=run.cond, vram=1, cache="static:2", **run.run).stages[0].peak_vram_bytes
    run.pipe = run.pipe.within(vram=least + 20_000)
    plain = run.pipe.plan(cond=run.cond, **run.run).stages[0]
    sim.reset_stats()
    run()
    beside = sim.stats().clock_seconds - plain.seconds
    assert 0 <= beside < 0.1 * plain.seconds
    for kind, words in (("static:2", "computes 6 of 10 steps"), ("easycache:0.5", "the plan counts all")):
        plan = run.pipe.plan(cond=run.cond, cache=kind, **run.run)
        planned = plan.stages[0]
        assert words in str(plan)
        sim.reset_stats()
        run(cache=kind)
        stage = manager("sim").timeline.stages[-1]
        assert stage.peak_bytes <= planned.peak_vram_bytes <= least + 20_000
        if kind == "static:2":
            assert stage.peak_bytes >= 0.95 * planned.peak_vram_bytes
            assert planned.seconds < 0.7 * plain.seconds
            assert sim.stats().clock_seconds - beside == pytest.approx(planned.seconds, rel=0.05)


def test_faults_leave_nothing_and_the_next_run_is_the_same(
    tiny_folders: Folders, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Opened("wan", tiny_folders("wan"), "sim", monkeypatch, cache)
    for kind in ("firstblock:0.4", "static:2") if os.environ.get("BALLAST_SOAK") else ("firstblock:0.4",):
        again = functools.partial(run, cache=kind, strategy="streamed")
        expected = again()
        sim.reset_stats()
        again()
        allocations = sim.stats().allocation_count
        for count in range(
            1, allocations, allocations // 2 if os.environ.get("BALLAST_SOAK") else allocations * 2 // 3
        ):
            with sim.fail_after(count):
                again()  # a residual may be lost: its step is computed
            assert sim.stats().allocated_bytes == 0
            assert torch.equal(again(), expected)

        def stopped(step: int, steps: int, latents: torch.Tensor) -> None:
            if step == 4:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            again(on_step=stopped)
        assert sim.stats().allocated_bytes == 0
        assert torch.equal(again(), expected)


def test_times_of_skipped_calls_are_not_learned(
    tiny_folders: Folders, sim: ModuleType, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan after runs with a cache is that of before."""
    sim.enable(total="4GB", h2d_gbps=1e-3, tflops=1e-3)
    run = Opened("flux", tiny_folders("flux"), "sim", monkeypatch, cache)
    run()
    before = run.pipe.plan(cond=run.cond, **run.run).stages[0].seconds
    for kind in KINDS:
        run(cache=kind)
    assert run.pipe.plan(cond=run.cond, **run.run).stages[0].seconds == pytest.approx(before, rel=0.01)


def test_what_is_not_taken_is_refused(tiny_folders: Folders, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one line, which says what is wrong."""
    run = Opened("qwenimage", tiny_folders("qwenimage"), "cpu", monkeypatch, cache)
    for given, words in (
        ({"cache": "teacache"}, "it takes off, or one such as static:2"),
        ({"cache": "static:1"}, "it takes off, or one such as static:2"),
        ({"cache": "easycache:-1"}, "it takes off, or one such as static:2"),
        ({"cache": 2}, "it takes off, or one such as static:2"),
        ({"cache": "magcache"}, "magcache has ratios for FluxTransformer2DModel"),
        ({"cache": "seacache"}, "seacache compares latents of flow matching that are not packed"),
        ({"cache": "static:2", "once": True}, "cache does not go together with once"),
        ({"cache": "static:2", "lockstep": True}, "cache does not go together with lockstep"),
    ):
        for call in (run, functools.partial(run.pipe.plan, vram="64MB")):
            with pytest.raises(ValueError, match=f"^[^\n]*{re.escape(words)}[^\n]*$"):
                call(**given)
    with pytest.raises(ValueError, match="cache does not go together with compile"):
        run(cache="static:2", compile=True)
    other = ballast.open_pipeline(tiny_folders("hidream"), device="cpu")
    with pytest.raises(ValueError, match="takes no cache: HiDreamImageTransformer2DModel is none of Aura"):
        other.plan(cache="static:2", vram="64MB")
    assert torch.equal(run(cache="off"), run())


def test_which_steps_are_computed() -> None:
    assert static_steps(10, 2) == (True, True, False, True, False, True, False, True, False, True)
    assert static_steps(4, 3) == (True, False, False, True)
    assert static_steps(1, 2) == (True,)
    for steps in (1, 7, 28, 50):
        mask = mag_steps(steps, FLUX_MAG_RATIOS.tolist(), 0.06)
        assert len(mask) == steps
        assert all(mask[: max(1, round(0.2 * steps))])
        assert all(any(mask[i : i + 4]) for i in range(steps - 3))
    assert all(mag_steps(28, [1.1] * 28, 0.06))
