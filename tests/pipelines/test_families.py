"""Every family, staged on the simulated device, against the unmodified pipeline run whole on the CPU."""

from __future__ import annotations

import functools
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import newbie_folders
import pyramid_folders
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.memory.engine.cached_tensors import clear_cached_tensors
from ballast.memory.planning.fit import sizes_of
from ballast.pipelines.files.keys import key_text
from places import SUPPORT
from selection import THREE, few
from torch.utils._pytree import tree_map_only

REQUIRED = [
    "flux", "sd3", "hidream", "lumina2", "wan", "ltx", "qwenimage", "zimage", "sana", "pixart_sigma", "chroma",
    "cogvideox", "hunyuan_video", "auraflow", "mochi",
]  # fmt: skip
Folders = Callable[[str], Path]
stock = functools.cache(tiny.stock)


def test_all_asked_families_are_there() -> None:
    assert set(REQUIRED) <= set(tiny.FAMILIES)


@pytest.mark.parametrize("name", tiny.FAMILIES)
def test_staged_equals_stock(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    """Equal latents and pictures, no byte left after any stage, no weight copied back, never units of two stages."""
    folder = tiny_folders(name)
    expected_latents, expected_picture = stock(folder)
    pipe, encode, sample, decode = tiny.stages(name, folder, "sim")
    units = (*pipe.encoders, *pipe.denoisers, pipe.decoder)
    copied_back: list[int] = []
    weights_copied_back: list[tuple[int, ...]] = []

    def watch(transfer: Any) -> None:
        if transfer.direction == "d2h":
            copied_back.append(transfer.nbytes)
            held = [t for u in units if u.placement for t in (*u.module.parameters(), *u.module.buffers())]
            held = [t for t in held if t.is_floating_point()]  # ids of positions look up rows in RAM
            if transfer.storage_ptr in {t.untyped_storage().data_ptr() for t in held if t.device.type == "sim"}:
                weights_copied_back.append(transfer.tensor_shape)

    peaks = []
    with sim.watch(watch):
        cond = encode()
        assert sim.stats().allocated_bytes == 0
        peaks.append(sim.stats().peak_bytes)
        sim.reset_stats()
        latents = sample(cond)
        assert sim.stats().allocated_bytes == 0
        peaks.append(sim.stats().peak_bytes)
        sim.reset_stats()
        picture = decode(latents)
        assert sim.stats().allocated_bytes == 0
        peaks.append(sim.stats().peak_bytes)

    assert latents.shape == expected_latents.shape
    assert picture.shape == expected_picture.shape
    torch.testing.assert_close(latents, expected_latents.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(picture, expected_picture, atol=1e-5, rtol=0)
    assert copied_back, "the conditioning and the latents are copied back"
    assert not weights_copied_back
    largest = max(sizes_of(unit).resident_bytes + manager("sim").work.working_bytes(unit) for unit in units)
    assert max(peaks) >= largest * 0.98
    for event in manager("sim").timeline.events:
        assert len({each.role for each in event.residents}) <= 1, f"{event.residents} at once"  # encoders take turns
    torch.testing.assert_close(sample(cond, strategy="streamed"), expected_latents.float(), atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    if name in REQUIRED:
        assert_streamed()


def assert_streamed() -> None:
    assert [unit.placement for unit in manager("sim").timeline.stages[-1].units.values()] == ["streamed"]


@pytest.mark.parametrize("name", few(REQUIRED, *THREE, "sd3", "sana", "auraflow"))
def test_guidance_off_equals_stock(name: str, tiny_folders: Folders) -> None:
    expected, _ = tiny.stock(tiny_folders(name), guidance=1.0)
    _, encode, sample, _ = tiny.stages(name, tiny_folders(name), "cpu")
    torch.testing.assert_close(sample(encode(), guidance=1.0), expected.float(), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", few(REQUIRED, "hidream", "mochi"))
def test_whole_run_peaks_at_its_largest_stage(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    """The peak of a run is that of the stock pipeline's largest stage alone: its unit and its activations."""
    _, encode, sample, decode = tiny.stages(name, tiny_folders(name), "sim")
    cond = encode()
    decode(sample(cond))
    whole = torch.sim.max_memory_allocated()  # type: ignore[attr-defined]
    assert whole <= 1.02 * max(
        _stock_sampling_peak(name, tiny_folders(name), cond, sim), *_stock_peaks(name, tiny_folders(name), sim)
    )


def _stock_sampling_peak(name: str, folder: Path, cond: Any, sim: ModuleType) -> int:
    """Peak of the stock pipeline with only its transformer on the device, given the embeddings there."""
    family = tiny.FAMILIES[name]
    index = json.loads((folder / "model_index.json").read_text("utf-8"))
    none = {part: None for part in index if part.startswith(("text_encoder", "tokenizer"))}
    pipe = tiny.DiffusionPipeline.from_pretrained(folder, **none)
    pipe.set_progress_bar_config(disable=True)
    if family.prepare is not None:
        family.prepare(pipe)
    pipe.transformer.to("sim")
    sim.reset_stats()
    texts = {key: None for key in ("prompt", "negative_prompt") if key in inspect.signature(pipe.__call__).parameters}
    with torch.inference_mode():
        pipe(
            **texts,
            **cond.to(torch.device("sim:0")),
            num_inference_steps=2,
            generator=torch.Generator("cpu").manual_seed(0),
            width=family.size[0],
            height=family.size[1],
            output_type="latent",
            **{family.guidance_name: family.guidance},
            **({"num_frames": family.frames} if family.frames else {}),
            **family.call_kwargs,
        )
    clear_cached_tensors(pipe.transformer, torch.device("sim:0"))
    return sim.stats().peak_bytes


def _stock_peaks(name: str, folder: Path, sim: ModuleType) -> list[int]:
    """For each encoder and the decoder of the stock pipeline, the peak when it alone is on the device and runs."""
    calls: dict[str, tuple[Callable, tuple, dict]] = {}
    modules: dict[str, torch.nn.Module] = {}

    def record(part: str, function: Callable) -> Callable:
        def recording(*args: object, **kwargs: object) -> object:
            calls[part] = (function, args, dict(kwargs))
            return function(*args, **kwargs)

        return functools.wraps(function)(recording)

    from_pretrained = tiny.DiffusionPipeline.from_pretrained

    def open_recorded(*args: object, **kwargs: object) -> tiny.DiffusionPipeline:
        pipe = from_pretrained(*args, **kwargs)
        for part, module in pipe.components.items():
            if isinstance(module, torch.nn.Module) and part != "transformer":
                modules[part] = module
                method = "decode" if part == "vae" else "forward"
                setattr(module, method, record(part, getattr(module, method)))
        return pipe

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiny.DiffusionPipeline, "from_pretrained", open_recorded)
        tiny.stock(folder)
    peaks = []
    for part, (function, args, kwargs) in calls.items():
        modules[part].to("sim")
        with torch.inference_mode():
            moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to("sim"), (args, kwargs))
            sim.reset_stats()
            function(*moved[0], **moved[1])
        peaks.append(sim.stats().peak_bytes)
        modules[part].to("cpu")
        clear_cached_tensors(modules[part], torch.device("sim:0"))
    return peaks


@pytest.mark.parametrize("strategy", few(["streamed", "leafwise"], "streamed"))
@pytest.mark.parametrize("name", few(REQUIRED, *THREE, "zimage"))
def test_other_placements_equal_stock(name: str, strategy: str, tiny_folders: Folders, sim: ModuleType) -> None:
    """In the first run; test_staged_equals_stock streams in a second one."""
    expected, _ = stock(tiny_folders(name))
    _, encode, sample, _ = tiny.stages(name, tiny_folders(name), "sim")
    latents = sample(encode(), strategy=strategy)
    torch.testing.assert_close(latents, expected.float(), atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    assert_streamed()


@pytest.mark.parametrize("name", few(["lumina2", "hidream", "wan", "cogvideox"], "hidream", "wan"))
def test_budget_below_the_transformer_streams_it(name: str, tiny_folders: Folders, sim: ModuleType) -> None:
    """With room for more than the ring and less than the whole: some pieces stay, from the first step on."""
    expected, _ = stock(tiny_folders(name))
    pipe, encode, sample, _ = tiny.stages(name, tiny_folders(name), "sim")
    cond = encode()
    (dit,) = pipe.denoisers
    sample(cond)
    forecast, least = pipe.manager.work.of(dit).forecast, sizes_of(dit).least_streamed_bytes
    assert forecast is not None and least < dit.size_bytes
    pipe.runner = pipe.runner.set(vram_bytes=(least + dit.size_bytes) // 2 + forecast.peak_bytes)
    for _ in range(2):
        latents = sample(cond)
        torch.testing.assert_close(latents, expected.float(), atol=1e-5, rtol=0)
        record = manager("sim").timeline.stages[-1]
        assert record.units["transformer"].placement == "streamed"
        assert record.peak_bytes <= pipe.vram_bytes
    assert sim.stats().allocated_bytes == 0


def test_notes_of_libraries_do_not_count() -> None:
    """Those in a config, and in the configs in it: a list that is made of a set has another order in each process."""
    notes = {"_use_default_values": ["b", "a"], "_name_or_path": "x", "_diffusers_version": "1"}
    config = {"_class_name": "A", "size": 1}
    assert key_text({**config, **notes, "text_config": notes}) == key_text({**config, "text_config": {}})
    for other in ({"size": 2}, {"_class_name": "B"}, {"_sliding_window_pattern": 6}):
        assert key_text(config | other) != key_text(config)


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        pytest.param(("hidream", "wan"), "flux", marks=pytest.mark.long),
        pytest.param(("flux", "sd3", "qwenimage"), "mmdit", marks=pytest.mark.soak),
    ],
)
def test_each_process_has_the_same_keys(
    names: tuple[str, ...], kind: str, tiny_folders: Folders, tmp_path: Path
) -> None:
    """Of models, prompts, forecasts and files of encoded weights, whatever the order of sets."""
    models = [tiny_folders(name) for name in names]
    models.append(pyramid_folders.save(kind, tmp_path / f"pyramid_{kind}"))
    models.append(newbie_folders.official(tmp_path / "newbie"))
    command = [sys.executable, str(SUPPORT / "process_keys.py"), *map(str, models)]
    running = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "XDG_CACHE_HOME": str(tmp_path / seed)}
        running.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
    one, two = (json.loads(process.communicate()[0]) for process in running)
    assert len(one) == len(models)
    for name, keys in one.items():
        assert keys == two[name], name
        assert all(keys.values()), name
