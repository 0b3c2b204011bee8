"""Decoding in the way that fits, and what becomes of latents that cannot be decoded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import folder_paths
import pytest
import torch
from ballast.commands.main import main
from ballast.memory import host_cache as copies
from ballast.memory.errors import DoesNotFitError
from ballast.memory.memory_manager import manager
from ballast.memory.simulated.card import card
from ballast.memory.weights.structure import parameter_refs
from ballast.nodes.decode import VaeDecode
from ballast.nodes.load import LoadPipeline
from ballast.pipelines.decoding import decode, tiling
from ballast.pipelines.decoding.rescue import DecodeError, _claimed, load_latents, save_latents
from ballast.pipelines.planning.plans import Machine, plan_vae
from ballast.pipelines.planning.vae_forecasts import vae_forecasts
from ballast.pipelines.stages.vae_stages import vae_run
from comfy.cli_args import args
from conftest import HOST
from host import page, run_node
from safetensors.torch import load_file, save_file
from selection import few

Folders = Callable[[str], Path]


@pytest.fixture
def pipe(tiny_folders: Folders, sim: ModuleType) -> Any:
    return ballast.open_pipeline(tiny_folders("lumina2"), device="sim")


@pytest.fixture
def in_host(tiny_folders: Folders, sim: ModuleType) -> Any:
    """The same in models/diffusers, as Load Pipeline gives it."""
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    folder = Path(shutil.copytree(tiny_folders("lumina2"), root / "lumina2"))
    yield run_node(LoadPipeline, pipeline="lumina2", device="sim").result[0]
    shutil.rmtree(folder)


def latents(batch: int = 1, height: int = 24, width: int = 17) -> torch.Tensor:
    return torch.randn(batch, 4, height, width, generator=torch.Generator().manual_seed(0))


def ways_taken(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The ways that are tried from now on, with the size of the batch."""
    taken: list[tuple[str, int]] = []
    run = decode.VaeRun._run

    def noted(self: decode.VaeRun, tensor: torch.Tensor, way: decode.Way) -> torch.Tensor:
        taken.append((way.words, len(tensor)))
        return run(self, tensor, way)

    monkeypatch.setattr(decode.VaeRun, "_run", noted)
    return taken


def budget_between(pipe: Any, z: torch.Tensor, share: float) -> int:
    """The weights and part of what decoding whole works in."""
    whole = vae_forecasts(pipe.model, "decode", {}, 0).whole(z)
    return pipe.decoder.size_bytes + int(share * whole.units["vae"].peak_bytes)


def after_weights(pipe: Any) -> int:
    """An allocation that is not one of the weights', for which there is another way to place them."""
    return len(list(parameter_refs(pipe.decoder.module))) + 3


@pytest.mark.parametrize("share", few([1.0, 0.6, 0.3], 1.0, 0.3))
def test_way_is_chosen_beforehand(share: float, pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    z = latents()
    expected = pipe.decode(z)
    taken = ways_taken(monkeypatch)
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, z, share))
    sim.reset_stats()
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert taken == [("whole" if share == 1 else "in stripes", 1)], "and nothing was tried in vain"
    assert sim.stats().peak_bytes <= pipe.vram_bytes
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_peak_does_not_grow_with_the_picture(pipe: Any, sim: ModuleType) -> None:
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, latents(), 0.5))
    peaks = []
    for height in (24, 72):
        sim.reset_stats()
        pipe.decode(latents(1, height, 16))
        peaks.append(sim.stats().peak_bytes)
    assert max(peaks) <= pipe.vram_bytes


def test_encoding_goes_in_stripes_too(pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    picture = torch.rand(2, 160, 136, 3, generator=torch.Generator().manual_seed(0))
    expected = pipe.encode_image(picture)
    taken = ways_taken(monkeypatch)
    whole = vae_forecasts(pipe.model, "encode", {}, 0).whole(picture[:1].permute(0, 3, 1, 2))
    pipe.runner = pipe.runner.set(vram_bytes=pipe.decoder.size_bytes + whole.units["vae"].peak_bytes // 2)
    sim.reset_stats()
    torch.testing.assert_close(pipe.encode_image(picture), expected, atol=1e-5, rtol=0)
    assert taken == [("in stripes", 1), ("in stripes", 1)]
    assert sim.stats().peak_bytes <= pipe.vram_bytes


@pytest.mark.parametrize("way", ["", "in stripes"])
def test_vae_that_comes_from_disk_is_kept_when_the_decode_ends(
    way: str, pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with ComfyUI's --highvram: what the decode has not called comes as it ends, and stays."""
    expected, size = pipe.decode(latents()), pipe.decoder.size_bytes
    monkeypatch.setattr(args, "highvram", True)
    within = pipe.within(ram=size // 2, vram=size + 400_000 if way else None)
    for _ in range(2):
        torch.testing.assert_close(within.decode(latents()), expected, atol=1e-4, rtol=0)
        assert manager("sim").timeline.stages[-1].note == way
        assert pipe.decoder.resident_bytes == size == sim.stats().allocated_bytes


def test_batch_that_does_not_fit_is_decoded_one_by_one(
    pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = latents(3)
    expected = pipe.decode(z)
    taken = ways_taken(monkeypatch)
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, z[:1], 1.0))
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert taken == [("whole", 1)] * 3


def test_batch_that_runs_out_of_memory_is_decoded_one_by_one(
    pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though it was thought to fit: whole one by one, not all of it in stripes."""
    z = latents(3)
    expected = pipe.decode(z)
    taken = ways_taken(monkeypatch)
    run = decode.VaeRun._run

    def short(self: decode.VaeRun, tensor: torch.Tensor, way: decode.Way) -> torch.Tensor:
        if len(tensor) == 3:
            with sim.fail_after(after_weights(pipe)):
                return run(self, tensor, way)
        return run(self, tensor, way)

    monkeypatch.setattr(decode.VaeRun, "_run", short)
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert taken == [("whole", 3), *[("whole", 1)] * 3]
    assert sim.stats().allocated_bytes == 0


def test_pictures_that_are_done_are_kept(pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory runs out in the second of three: the first is not decoded again, the third in the way that did it."""
    z = latents(3)
    expected = pipe.decode(z)
    taken = ways_taken(monkeypatch)
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, z[:1], 1.0))
    run, count = decode.VaeRun._run, 0

    def short(self: decode.VaeRun, tensor: torch.Tensor, way: decode.Way) -> torch.Tensor:
        nonlocal count
        count += 1
        if count == 2:
            with sim.fail_after(after_weights(pipe)):
                return run(self, tensor, way)
        return run(self, tensor, way)

    monkeypatch.setattr(decode.VaeRun, "_run", short)
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert taken == [("whole", 1), ("whole", 1), ("in stripes", 1), ("in stripes", 1)]
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_tiles_where_ram_is_short(pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    z = latents(1, 40, 40)
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, z, 0.9))
    monkeypatch.setattr(copies, "spare_ram_bytes", lambda: 0)
    taken = ways_taken(monkeypatch)
    assert pipe.decode(z).isfinite().all()
    assert taken[0][0] in ("in tiles", "on the CPU")


@pytest.mark.soak
def test_tiles_are_told_where_one_looks(
    pipe: Any, in_host: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the plan, in the node, and in the report: their picture is another."""
    z = latents(1, 80, 80)
    told = "in tiles, which may show faint seams"
    monkeypatch.setattr(decode.VaeRun, "_ram_room", lambda self: 0)
    forecasts = vae_forecasts(pipe.model, "decode", {}, 0)
    budget = pipe.decoder.size_bytes + forecasts.tiles(z).units["vae"].peak_bytes
    assert budget < pipe.decoder.size_bytes + forecasts.whole(z).units["vae"].peak_bytes
    run = vae_run(pipe.model, pipe.runner, "decode", {}, budget, planned=True)
    planned = plan_vae("decode", run, z, Machine(budget, 2**40))
    assert planned.note == told and planned.peak_vram_bytes <= budget
    opened = in_host.open()
    opened.runner = opened.runner.set(vram_bytes=budget)
    monkeypatch.setattr(type(in_host), "open", lambda self: opened)
    with page() as shown:
        run_node(VaeDecode, pipeline=in_host, latent={"samples": z})
    assert shown.texts[-1][1].startswith(told)
    assert f"decode, {told}" in manager("sim").timeline.table()
    assert manager("sim").timeline.stages[-1].peak_bytes <= planned.peak_vram_bytes


def failing_stripes(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: Any, **more: Any) -> Any:
        raise RuntimeError("a striped tensor was asked for what it cannot do")

    monkeypatch.setattr(decode.striped, "run", failing)


def test_error_in_stripes_does_not_change_the_picture(
    pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    z = latents(2, 80, 80)  # more than a tile
    expected = pipe.decode(z)
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, z[:1], 0.8))
    taken = ways_taken(monkeypatch)
    failing_stripes(monkeypatch)
    torch.testing.assert_close(pipe.decode(z), expected, atol=5e-4, rtol=0)
    assert taken == [("in stripes", 1), ("on the CPU", 1), ("on the CPU", 1)]
    assert "in stripes failed (a striped tensor was asked for what it cannot do); trying on the CPU" in caplog.text
    record = manager("sim").timeline.stages[-1]
    assert record.summary().startswith("on the CPU; ")
    assert sim.stats().allocated_bytes == 0


def test_error_in_stripes_is_told_where_nothing_else_gives_the_same_picture(
    pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = latents(1, 80, 80)
    whole = vae_forecasts(pipe.model, "decode", {}, 0).whole(z).units["vae"].peak_bytes
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, z, 0.8))
    taken = ways_taken(monkeypatch)
    failing_stripes(monkeypatch)
    monkeypatch.setattr(decode.VaeRun, "_ram_room", lambda self: whole - 1)
    with pytest.raises(RuntimeError, match=r"^decode in stripes failed \(a striped tensor .* Raise the vram") as caught:
        pipe.decode(z)
    assert "\n" not in str(caught.value)
    assert taken == [("in stripes", 1)]
    assert sim.stats().allocated_bytes == 0


def test_copies_of_weights_in_ram_make_room_for_maps(
    pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    z = latents()
    expected = pipe.decode(z)
    pipe.encode("a boat")
    pipe.runner = pipe.runner.set(vram_bytes=budget_between(pipe, z, 0.3))
    pipe.decoder.load()
    encoder = pipe.encoders[0]
    assert encoder.host_bytes > 0
    wanted = (
        vae_forecasts(pipe.model, "decode", {}, 0).stripes(z, pipe.vram_bytes - pipe.decoder.size_bytes).host_peak_bytes
    )
    held = encoder.host_bytes
    monkeypatch.setattr(copies, "spare_ram_bytes", lambda: wanted - 1 + held - encoder.host_bytes)
    taken = ways_taken(monkeypatch)
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert taken == [("in stripes", 1)]
    assert encoder.host_bytes < held and not encoder.in_ram, "whole pieces of it have gone"


def test_cpu_takes_no_more_ram_than_there_is(
    pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Decoding whole takes more of it than stripes do."""
    z = latents(1, 64, 64)
    expected = pipe.decode(z)
    monkeypatch.setattr(decode, "choose", lambda *_: decode.Way("cpu"))
    budgets: list[int] = []
    run = decode.striped.run

    def noted(*args: Any, **more: Any) -> Any:
        budgets.append(more["budget_bytes"])
        return run(*args, **more)

    monkeypatch.setattr(decode.striped, "run", noted)
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert budgets == []
    whole = vae_forecasts(pipe.model, "decode", {}, 0).whole(z).units["vae"].peak_bytes
    for spare in (whole - 1, 0):
        monkeypatch.setattr(copies, "spare_ram_bytes", lambda spare=spare: spare)
        torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert budgets == [int((whole - 1) / 8), 0]
    assert "trying whole" in caplog.text, "what has no room at all is tried whole"


def test_float32_is_not_rounded_meanwhile(pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    seen = []
    forward = type(pipe.decoder.module).decode

    def noted(self: Any, *args: Any, **more: Any) -> Any:
        seen.append((torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark))
        return forward(self, *args, **more)

    pipe.decode(latents())  # with a dry run
    monkeypatch.setattr(type(pipe.decoder.module), "decode", noted)
    pipe.decode(latents())
    assert seen == [(False, False)]
    assert torch.backends.cudnn.allow_tf32 and torch.backends.cudnn.benchmark, "as they were"


def test_tile_of_pixels_is_a_tile_of_pixels(pipe: Any) -> None:
    vae = pipe.decoder.skeleton()
    vae.enable_tiling()
    vae.tile_sample_min_size, vae.tile_latent_min_size = 64, 8
    assert tiling.first_tile(vae, torch.empty(1, 4, 40, 5, device="meta")).shape == (1, 4, 8, 5)
    assert tiling.first_tile(vae, torch.empty(1, 3, 320, 40, device="meta"), pixels=True).shape == (1, 3, 64, 40)


def test_all_ways_down_to_the_cpu(pipe: Any, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    z = latents()
    expected = pipe.decode(z)
    taken = ways_taken(monkeypatch)
    run = decode.VaeRun._run

    def short(self: decode.VaeRun, tensor: torch.Tensor, way: decode.Way) -> torch.Tensor:
        """Nothing more than the weights."""
        allocate, left = card.allocate, iter(range(after_weights(pipe) - 1))

        def allocated(*args: Any) -> Any:
            if next(left, None) is None:
                raise torch.OutOfMemoryError("sim out of memory")
            return allocate(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(card, "allocate", allocated)
            return run(self, tensor, way)

    monkeypatch.setattr(decode.VaeRun, "_run", short)
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    assert [way for way, _ in taken] == [
        "whole",
        "in stripes",
        "in stripes of 1/8 of the room",
        "in tiles",
        "on the CPU",
    ]
    assert sim.stats().allocated_bytes == 0


# Nothing is lost


@pytest.fixture
def broken(in_host: Any) -> Any:
    """A pipeline whose VAE has lost its weights since."""
    (in_host.open().folder / "vae" / "diffusion_pytorch_model.safetensors").unlink()
    return in_host


def test_latent_that_cannot_be_decoded_is_saved(broken: Any) -> None:
    z = latents()
    prompt = {"1": {"class_type": "BallastVAEDecode", "inputs": {}}}
    with pytest.raises(DecodeError) as caught:
        run_node(
            VaeDecode,
            pipeline=broken,
            latent={"samples": z},
            hidden={"prompt": prompt, "extra_pnginfo": {"workflow": {"nodes": []}}},
        )
    message = str(caught.value)
    assert "\n" not in message and "open it with Load Latent" in message
    (saved,) = Path(folder_paths.get_output_directory()).glob("ballast_*_.latent")
    try:
        assert str(saved) in message
        assert torch.equal(load_latents(saved), z)
        from safetensors import safe_open

        with safe_open(saved, framework="pt") as file:
            metadata = file.metadata()
        assert json.loads(metadata["prompt"]) == prompt
        assert json.loads(metadata["workflow"]) == {"nodes": []}
    finally:
        saved.unlink()


@pytest.mark.skipif(HOST is None, reason="needs a real ComfyUI's Load Latent")
def test_load_latent_opens_it() -> None:
    from nodes import LoadLatent

    z = latents()
    path = Path(folder_paths.get_input_directory()) / "kept.latent"
    save_latents(z, path, {"prompt": "{}"})
    (opened,) = LoadLatent().load(path.name)
    assert torch.equal(opened["samples"], z)
    path.unlink()


def test_second_latent_does_not_replace_the_first(broken: Any) -> None:
    folder = Path(folder_paths.get_output_directory())
    try:
        for _ in range(2):
            with pytest.raises(DecodeError):
                run_node(VaeDecode, pipeline=broken, latent={"samples": latents()})
        assert sorted(path.name for path in folder.glob("*.latent")) == [
            "ballast_00001_.latent",
            "ballast_00002_.latent",
        ]
    finally:
        for path in folder.glob("*.latent"):
            path.unlink()


def test_what_is_no_latent_is_not_saved(broken: Any) -> None:
    with pytest.raises(ValueError, match="NaN"):
        run_node(VaeDecode, pipeline=broken, latent={"samples": torch.full((1, 4, 4, 4), torch.nan)})
    assert not list(Path(folder_paths.get_output_directory()).glob("*.latent"))


def test_command_line_saves_it_and_decodes_it_later(
    tiny_folders: Folders, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(tiny_folders("lumina2"), tmp_path / "lumina2"))
    weights = folder / "vae" / "diffusion_pytorch_model.safetensors"
    given = ["generate", "--model", str(folder), "--device", "cpu", "--out", str(tmp_path / "boat.png")]
    content = load_file(weights)
    save_file({name: tensor * torch.nan for name, tensor in content.items()}, weights)
    assert main([*given, "--prompt", "a boat", "--width", "48", "--height", "32", "--steps", "2"]) == 1
    saved = tmp_path / "boat_00001_.latent"
    said = capsys.readouterr().err
    assert "the decoder made NaN" in said and f"it is in {saved}" in said
    save_file(content, weights)
    assert main([*given, "--latent", str(saved)]) == 0
    assert (tmp_path / "boat.png").is_file()


@pytest.mark.parametrize("content", [b"", b"\x80\x04.", b"\xff" * 64, b"\x02\0\0\0\0\0\0\0{}"])
def test_file_that_is_no_latent_is_refused_in_one_line(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "odd.latent"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="odd.latent") as caught:
        load_latents(path)
    assert "\n" not in str(caught.value)


# Values that are not finite


def test_step_at_which_values_stop_being_finite_is_named(pipe: Any, sim: ModuleType) -> None:
    """The run ends at the next step, while the device would have gone on, and not after the last."""
    cond = pipe.encode("a boat")
    seen: list[int] = []
    transformer = pipe.denoisers[0].module
    forward = type(transformer).forward

    def overflowing(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        result = forward(self, *args, **kwargs)
        return (result[0] * (float("inf") if len(seen) >= 2 else 1.0),)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(transformer), "forward", overflowing)
        with pytest.raises(ValueError, match=r"step 3 of 6 made NaN or infinite values.*bfloat16"):
            pipe.sample(cond, width=48, height=32, steps=6, on_step=lambda step, steps, x: seen.append(step))
    assert seen == [1, 2, 3]
    assert sim.stats().allocated_bytes == 0
    assert manager("sim").timeline.stages[-1].name == "sample"


def test_a_budget_that_holds_nothing_goes_to_the_cpu(pipe: Any, sim: ModuleType) -> None:
    z = latents()
    expected = pipe.decode(z)
    pipe.runner = pipe.runner.set(vram_bytes=1000)
    torch.testing.assert_close(pipe.decode(z), expected, atol=1e-5, rtol=0)
    with pytest.raises(DoesNotFitError):
        pipe.encode("another boat")


def test_latents_of_several_processes_have_numbers_of_their_own(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        paths = list(pool.map(lambda _: _claimed(tmp_path / "output", "boat"), range(40)))
    assert sorted(paths) == sorted({*paths}) == sorted((tmp_path / "output").iterdir())
    assert min(paths).name == "boat_00001_.latent" and max(paths).name == "boat_00040_.latent"
