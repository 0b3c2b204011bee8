"""The nodes, run as ComfyUI runs them: on its own modules where there is one, else on the stand-ins in stubs/."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import comfy.latent_formats
import comfy.model_management
import comfy.utils
import folder_paths
import latent_preview
import pytest
import tiny
import torch
from ballast.memory import format_bytes, manager, simulated
from ballast.memory.host import management as host
from ballast.memory.memory_manager import managers
from ballast.memory.reports.timeline import Timeline
from ballast.memory.weights import reader
from ballast.nodes import BallastExtension
from ballast.nodes.decode import VaeDecode
from ballast.nodes.encode import TextEncode
from ballast.nodes.free import FreeVram
from ballast.nodes.load import LoadPipeline
from ballast.nodes.plan import VramPlan
from ballast.nodes.report import VramReport
from ballast.nodes.sample import Sampler
from ballast.nodes.shared import running
from ballast.nodes.shared.folders import DEMO
from ballast.nodes.shared.progress import StepProgress, as_picture, latent_format, show_text_in
from ballast.pipelines.stages import sample as samples
from ballast.pipelines.stock.sound import Sound
from comfy.cli_args import LatentPreviewMethod, args
from comfy_api.latest import io
from comfy_execution.graph_utils import ExecutionBlocker
from conftest import HOST
from host import InputError, page, run_node
from places import DATA, ROOT, SUPPORT, clear

SCHEMAS = DATA / "node_schemas.json"
NODES = asyncio.run(BallastExtension().get_node_list())
WIDTH, HEIGHT = tiny.FAMILIES["lumina2"].size
TITLES = {
    "BallastLoadPipeline": "Load Pipeline",
    "BallastTextEncode": "Staged Text Encode",
    "BallastSampler": "Offloaded Sampler",
    "BallastVAEDecode": "FP32 VAE Decode",
    "BallastFreeVRAM": "Free VRAM",
    "BallastVRAMReport": "VRAM Report",
    "BallastVRAMPlan": "VRAM Plan",
    "BallastLoadNewBie": "Load NewBie (split files)",
    "BallastSamplerOptions": "Sampler Options (all families)",
    "BallastModelOptions": "Sampler Options (any model)",
    "BallastNewbieOptions": "Sampler Options (NewBie)",
    "BallastPyramidFlowOptions": "Sampler Options (Pyramid-Flow)",
    "BallastVAEEncode": "FP32 VAE Encode",
    "BallastLoadLoRA": "Load LoRA (Ballast)",
    "BallastLoadModelFiles": "Load Model Files (Ballast)",
    "BallastVramBudget": "VRAM Budget",
    "BallastSamplerSettings": "Sampler Settings (Ballast)",
    "BallastApplyControlNet": "Apply ControlNet (Ballast)",
}


@pytest.fixture(scope="module", autouse=True)
def models(tiny_folders: Callable[[str], Path]) -> Iterator[Path]:
    """ComfyUI's models/diffusers, with two tiny pipelines in it: one linked, one in a folder of its own."""
    root = Path(folder_paths.get_folder_paths("diffusers")[0])
    (root / "videos").mkdir(parents=True)
    (root / "lumina2").symlink_to(tiny_folders("lumina2"), target_is_directory=True)
    (root / "videos" / "wan").symlink_to(tiny_folders("wan"), target_is_directory=True)
    (root / "empty").mkdir()
    yield root
    clear(root)


@pytest.fixture
def copied(models: Path, tiny_folders: Callable[[str], Path]) -> Iterator[Path]:
    """A pipeline in models/diffusers that a test may change."""
    yield Path(shutil.copytree(tiny_folders("lumina2"), models / "copied"))
    shutil.rmtree(models / "copied")


def load(name: str = "lumina2", device: str = "sim", **more: Any) -> Any:
    return run_node(LoadPipeline, pipeline=name, device=device, **more).result[0]


def encode(reference: Any, prompt: str = "a red boat", negative_prompt: str = "blurry, grey") -> Any:
    return run_node(TextEncode, pipeline=reference, prompt=prompt, negative_prompt=negative_prompt).result[0]


def sample(reference: Any, conditioning: Any, **more: Any) -> dict[str, torch.Tensor]:
    given = {"width": WIDTH, "height": HEIGHT, "steps": 2, **more}
    return run_node(Sampler, pipeline=reference, conditioning=conditioning, **given).result[0]


def decode(reference: Any, latent: dict[str, torch.Tensor]) -> torch.Tensor:
    return run_node(VaeDecode, pipeline=reference, latent=latent).result[0]


def tiers(reference: Any) -> dict[str, str]:
    pipe = reference.open()
    return {unit.name: unit.tier for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder)}


def tensors_in(thing: object) -> list[torch.Tensor]:
    """Tensors with data that can be reached from an object by attributes and items."""
    found, seen, queue = [], set(), [thing]
    while queue:
        item = queue.pop()
        if id(item) in seen or isinstance(item, type | ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor) and item.device.type != "meta":
            found.append(item)
        elif isinstance(item, dict):
            queue += item.values()
        elif isinstance(item, list | tuple | set):
            queue += item
        elif type(item).__module__.startswith(("ballast", "diffusers", "transformers", "torch.nn")):
            queue += vars(item).values() if hasattr(item, "__dict__") else ()
    return found


# Schemas


def without_files(info: dict[str, Any]) -> None:
    """Leave out the files that other tests put into ComfyUI's folders."""
    if info["name"] == "BallastLoadModelFiles":
        for slot in (slot for group in ("required", "optional") for slot in info["input"][group].values()):
            if slot[1].get("default") in ("none", "choose a file"):
                del slot[1]["options"]


def test_schemas_are_those_of_the_snapshot() -> None:
    """Saved workflows depend on ids, order and values: what was released only grows. UPDATE_SCHEMAS=1 rewrites it."""
    schemas = {}
    for node in NODES:
        info = json.loads(json.dumps(node.GET_NODE_INFO_V1()))
        del info["python_module"]  # where this copy of the pack happens to lie
        if info["name"] == "BallastLoadPipeline":
            assert info["input"]["required"]["pipeline"][1].pop("options") == [DEMO, "lumina2", "videos/wan"]
        without_files(info)
        schemas[info["name"]] = {key: value for key, value in info.items() if value is not None}
    if os.environ.get("UPDATE_SCHEMAS"):
        SCHEMAS.write_text(json.dumps(schemas, indent=1) + "\n", "ascii")
    assert schemas == json.loads(SCHEMAS.read_text("ascii"))


def test_names_are_those_promised() -> None:
    assert {node.GET_SCHEMA().node_id: node.GET_SCHEMA().display_name for node in NODES} == TITLES


@pytest.mark.parametrize("node", NODES, ids=list(TITLES))
def test_every_slot_says_what_it_is_for(node: Any) -> None:
    schema = node.GET_SCHEMA()
    assert schema.description.endswith(".")
    for slot in (*schema.inputs, *schema.outputs):
        assert slot.tooltip and slot.tooltip.endswith("."), slot.id
    required = [not slot.optional for slot in schema.inputs]
    if node is not FreeVram and node is not VramReport:  # what these wait for comes first
        assert required == sorted(required, reverse=True)
    # A plan is decided by its inputs; the other output nodes say what is so now.
    assert schema.not_idempotent == (schema.is_output_node and node is not VramPlan)


@pytest.mark.parametrize("node", NODES, ids=list(TITLES))
def test_advanced_inputs_may_be_left_out(node: Any) -> None:
    """A graph in the API's format has what its author wrote, and the page hides these."""
    arguments = inspect.signature(node.execute).parameters
    for slot in node.GET_SCHEMA().inputs:
        if slot.advanced:
            assert slot.optional, slot.id
            assert arguments[slot.id].default == slot.default, slot.id


def test_an_input_of_another_family_says_whose_it_is() -> None:
    told = "variant is for HiDream-I1 and Pyramid-Flow, not for shapes: set it to auto."
    with pytest.raises(ValueError, match=f"^{re.escape(told)}$"):
        run_node(LoadPipeline, pipeline=DEMO, device="cpu", variant="dev")


def test_what_a_node_says_goes_to_the_page_that_queued_the_run() -> None:
    """Another page shows another graph, whose nodes have the same ids."""
    with page() as seen:
        seen.client_id = "this page"
        show_text_in("3", "done")
    assert seen.texts == [("3", "done")] and seen.told == {"this page"}


def test_importing_the_pack_is_quick_and_loads_no_library() -> None:
    """Beside torch, which ComfyUI has imported already: how fast a machine imports says nothing of the pack."""
    code = f"""
import asyncio, sys, time
import torch
torch_seconds = time.process_time()
sys.path[:0] = [{str(SUPPORT)!r}]
from node_runner import use_modules
from pathlib import Path
use_modules({f"Path({str(HOST)!r})" if HOST else None})
import server, latent_preview, comfy.latent_formats, comfy.utils, folder_paths, comfy_api.latest, numpy, torch
before = set(sys.modules)
start = time.process_time()
import importlib.util
spec = importlib.util.spec_from_file_location("/a_x_b/Pack", {str(ROOT / "__init__.py")!r},
                                              submodule_search_locations=[{str(ROOT)!r}])
pack = sys.modules["/a_x_b/Pack"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(pack)
async def nodes():
    return await (await pack.comfy_entrypoint()).get_node_list()
print(len(asyncio.run(nodes())), (time.process_time() - start) / torch_seconds)
print(*sorted({{name.split(".")[0] for name in set(sys.modules) - before}}))
print("/a_x_b/Pack.memory.memory_manager" in sys.modules)
"""
    # As from the second start on: the first compiles the files, and Python keeps what it has compiled.
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    how: dict[str, Any] = {"env": kept, "timeout": 120, "check": True}
    for _ in range(2):
        ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, **how)
    first, second, loaded = ran.stdout.strip().splitlines()[-3:]
    count, share = first.split()
    assert int(count) == len(NODES)
    assert float(share) < 0.1
    assert loaded == "False", "the manager waits for a node that runs"
    assert not set(second.split()) & {"diffusers", "transformers", "accelerate", "PIL", "ballast", "nodes", "cli"}


# The loader and what it hands out


def test_loader_offers_the_demo_and_the_folders_of_the_host() -> None:
    options = LoadPipeline.INPUT_TYPES()["required"]["pipeline"][1]["options"]
    assert options == [DEMO, "lumina2", "videos/wan"]


def test_loader_loads_nothing(sim: ModuleType) -> None:
    reference = load()
    reference.open().cache.clear()  # of what other tests have encoded
    assert set(tiers(reference).values()) == {"disk"}
    assert sum(tensor.nbytes for tensor in tensors_in(reference)) < 4096, "a buffer of a config, never a weight"
    assert sim.stats().h2d_bytes == sim.stats().allocated_bytes == 0
    assert len(str(reference)) < 80


def test_reference_is_immutable_and_equal_ones_share_a_pipeline() -> None:
    one, other = load(), load()
    assert one == other and hash(one) == hash(other)
    assert one.open() is other.open()
    assert one.open() is not load(keep_loaded=False).open()
    with pytest.raises(AttributeError):
        one.folder = "elsewhere"


def test_changed_budget_in_the_loader_reads_nothing_and_leaves_no_copy(sim: ModuleType) -> None:
    """The host lets go of the old reference before or after it makes the new one; the collector is not asked."""
    conditioning, read, seen = encode(load(DEMO)), set(), []
    gc.collect()
    gc.disable()
    try:
        reference = None
        for number, vram_gb in enumerate((0, 0.0018, 0.0034, 0, 0.0052, 0.0018)):
            if number % 2:
                reference = None
            reference = load(DEMO, vram_gb=vram_gb)
            sample(reference, conditioning, width=64, height=64)
            report = manager("sim").report()
            (unit,) = (unit for unit in report.units if unit.role == "transformer")
            seen.append(unit.placement)
            read.add(report.disk_bytes_read)
            assert sim.stats().allocated_bytes == report.resident_bytes <= (vram_gb * 2**30 or 2**32)
            assert unit.host_bytes == unit.size_bytes and not unit.cached
    finally:
        gc.enable()
    assert seen == ["resident", "streamed", "streamed", "resident", "resident", "streamed"]
    assert len(read) == 1, "all from RAM after the first"
    del reference


def test_weights_go_when_the_host_drops_the_reference(sim: ModuleType) -> None:
    reference = load()
    sample(reference, encode(reference))
    assert sim.stats().allocated_bytes > 0, "keep_loaded keeps the transformer"
    pipe = weakref.ref(reference.open())
    del reference
    gc.collect()
    assert pipe() is None
    assert sim.stats().allocated_bytes == 0
    report = manager("sim").report()
    assert report.host_bytes and all(unit.cached for unit in report.units), "copies in RAM, for the next workflow"
    manager("sim").free()
    assert not manager("sim").report().units


def test_changed_folder_is_another_pipeline(copied: Path) -> None:
    assert LoadPipeline.fingerprint_inputs(pipeline="lumina2") == LoadPipeline.fingerprint_inputs(pipeline="lumina2")
    before, fingerprint = load("copied"), LoadPipeline.fingerprint_inputs(pipeline="copied", device="sim")
    index = copied / "model_index.json"
    index.write_text(index.read_text("utf-8") + "\n", "utf-8")
    assert LoadPipeline.fingerprint_inputs(pipeline="copied", device="sim") != fingerprint
    after = load("copied")
    assert after != before
    assert after.open() is not before.open()


@pytest.mark.parametrize("name", ["../../../etc", "/etc", "lumina2/../lumina2", "empty", "gone"])
def test_loader_refuses_what_is_not_on_its_list(name: str) -> None:
    with pytest.raises(InputError, match="not in"):
        load(name)
    with pytest.raises(ValueError, match="is not in models/diffusers any more") as caught:
        LoadPipeline.execute(name, 0.0, "auto", True, "auto")  # chosen while it was there
    assert one_line(caught.value)
    LoadPipeline.fingerprint_inputs(pipeline=name)  # is asked first, and must not fail


@pytest.mark.parametrize(
    ("broken", "message"),
    [("transformer/config.json", "config.json is missing"), ("text_encoder", "has no text_encoder/")],
)
def test_incomplete_folder_fails_in_the_loader(broken: str, message: str, copied: Path) -> None:
    path = copied / broken
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    with pytest.raises(FileNotFoundError, match=message) as caught:
        load("copied")
    assert one_line(caught.value)


# Encode, sample, decode


@pytest.mark.parametrize("device", ["auto", "cpu", "sim"])
def test_graph_equals_the_stock_pipeline(device: str, sim: ModuleType, tiny_folders: Callable[[str], Path]) -> None:
    expected, picture = tiny.stock(tiny_folders("lumina2"), max_sequence_length=256)
    reference = load(device=device)
    conditioning = encode(reference)
    latent = sample(reference, conditioning)
    image = decode(reference, latent)
    assert set(latent) == {"samples"}
    torch.testing.assert_close(latent["samples"], expected.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(image, picture, atol=1e-5, rtol=0)
    assert image.shape == (1, HEIGHT, WIDTH, 3) and image.dtype == torch.float32
    assert image.min() >= 0 and image.max() <= 1
    for tensor in (*conditioning.tensors.values(), latent["samples"], image):
        assert tensor.device.type == "cpu", "the host caches it"


def test_video_comes_as_a_batch_of_frames(sim: ModuleType, tiny_folders: Callable[[str], Path]) -> None:
    family = tiny.FAMILIES["wan"]
    expected, picture = tiny.stock(tiny_folders("wan"), max_sequence_length=512)
    reference = load("videos/wan")
    run = {"frames": family.frames, "width": family.size[0], "height": family.size[1], "guidance": family.guidance}
    latent = sample(reference, encode(reference), **run)
    image = decode(reference, latent)
    torch.testing.assert_close(latent["samples"], expected.float(), atol=1e-5, rtol=0)
    torch.testing.assert_close(image, picture[0], atol=1e-5, rtol=0)
    assert image.shape == (family.frames, *reversed(family.size), 3)
    film = run_node(VaeDecode, pipeline=reference, latent=latent).result[1]
    assert film.get_components().frame_rate == 16, "as Wan was trained"


def test_the_sound_of_videos_comes_as_audio_and_in_the_video(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each video in AUDIO; one after the other in VIDEO, as the frames are. Who has none gets no output."""
    reference = load("videos/wan")
    pipe = reference.open()
    latent = {"samples": torch.zeros(2, 16, 1, 4, 6)}
    sound = Sound(torch.rand(2, 2, 3000), 8000)
    made = {"images": torch.rand(2, 4, 8, 8, 3), "sound": sound}  # of a quarter of a second each
    monkeypatch.setattr(type(pipe), "decode_all", lambda *_: dict(made))
    image, video, audio = run_node(VaeDecode, pipeline=reference, latent=latent).result
    assert torch.equal(image, made["images"].flatten(0, 1))
    assert audio == {"waveform": sound.waveform, "sample_rate": 8000} and audio["waveform"] is sound.waveform
    heard = video.get_components().audio
    assert heard["sample_rate"] == 8000
    assert torch.equal(heard["waveform"], torch.cat([sound.waveform[:1, :, :2000], sound.waveform[1:, :, :2000]], -1))
    del made["sound"]
    for word, own in (("this model draws no sound", None), ("this latent has no sound", object())):
        monkeypatch.setattr(pipe.model, "sound", own)
        _, video, silent = run_node(VaeDecode, pipeline=reference, latent=latent).result
        assert isinstance(silent, ExecutionBlocker) and word in silent.message
        assert video.get_components().audio is None


def test_size_of_nothing_is_that_of_the_pipeline(sim: ModuleType) -> None:
    reference = load()
    latent = sample(reference, encode(reference), width=0, height=0)
    side = reference.open().model.components["transformer"].config["sample_size"]
    assert latent["samples"].shape[-2:] == (side, side)


def test_what_the_host_caches_is_never_changed(sim: ModuleType) -> None:
    reference = load()
    conditioning = encode(reference)
    before = {name: tensor.clone() for name, tensor in conditioning.tensors.items()}
    latent = sample(reference, conditioning) | {"batch_index": [0]}
    samples, kept = latent["samples"], latent["samples"].clone()
    decode(reference, latent)
    run_node(FreeVram, value=latent)
    assert set(latent) == {"samples", "batch_index"} and latent["samples"] is samples
    assert torch.equal(samples, kept)
    assert all(torch.equal(conditioning.tensors[name], tensor) for name, tensor in before.items())


def test_texts_in_the_nodes(sim: ModuleType) -> None:
    texts = []
    with page() as shown:
        reference = load(keep_loaded=False)
        for _ in range(2):
            conditioning = encode(reference, "texts in the nodes")
            texts.append(shown.texts[-1][1])
        latent = sample(reference, conditioning)
        texts.append(shown.texts[-1][1])
        decode(reference, latent)
    encoded, again, sampled, decoded = *texts, shown.texts[-1][1]
    pattern = r"{} resident, [\d.]+ KB in; peak [\d.]+ [KM]B{}; [\d.]+ s"
    assert re.fullmatch(pattern.format("text_encoder", r" \(planned [\d.]+ [KM]B\)"), encoded)
    assert again == "from the cache, no encoder loaded"
    beside = r" \(planned [\d.]+ [KM]B\); [\d.]+ m?s a step"
    assert re.fullmatch(pattern.format("transformer", beside), sampled)
    assert re.fullmatch(pattern.format("vae", ""), decoded)


def test_cached_prompt_is_told_from_a_fresh_one_after_many_stages(sim: ModuleType) -> None:
    """The timeline keeps only so many stages: their number says nothing once it is full."""
    reference = load()
    encode(reference, "the first prompt")
    stages = manager("sim").timeline.stages
    stages.extend([stages[-1]] * (stages.maxlen or 0))
    with page() as shown:
        encode(reference, "one more prompt")
    assert "resident" in shown.texts[-1][1]


def test_steps_move_the_progress_bar(sim: ModuleType) -> None:
    reference = load()
    conditioning = encode(reference)
    with page() as shown:
        sample(reference, conditioning, steps=3)
    steps = [entry[:2] for entry in shown.progress if entry[1] == 3]  # the others are of what is read
    assert steps[:: len(steps) - 1] == [(1, 3), (3, 3)]
    if HOST is None:
        bar = next(bar for bar in reversed(comfy.utils.ProgressBar.bars) if bar.total == 3)
        assert [entry[:2] for entry in bar.updates] == [(1, 3), (2, 3), (3, 3)]


# Previews


def test_preview_where_the_host_has_a_format(copied: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    config = copied / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"scaling_factor": 0.18215}), "utf-8")
    if HOST is None:
        monkeypatch.setattr(latent_preview, "previewer", latent_preview.LatentPreviewer())
    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Latent2RGB)
    reference = load("copied")
    conditioning = encode(reference)
    with page() as shown:
        sample(reference, conditioning, steps=3)
    previews = [preview for _, total, preview in shown.progress if total == 3]  # not of what is read
    kinds = {(preview[0], preview[1].mode) for preview in previews}
    assert kinds == {("JPEG", "RGB")}


def test_preview_unpacks_tokens() -> None:
    from diffusers import FluxPipeline

    flux = latent_format({"_class_name": "AutoencoderKL", "scaling_factor": 0.3611, "latent_channels": 16})
    picture = torch.randn(2, 16, 6, 10)
    tokens = FluxPipeline._pack_latents(picture, 2, 16, 6, 10)
    assert torch.equal(as_picture(tokens, flux, 80, 48), picture[:1])
    square = torch.randn(1, 16, 8, 8)
    assert torch.equal(as_picture(FluxPipeline._pack_latents(square, 1, 16, 8, 8), flux, 0, 0), square)
    assert torch.equal(as_picture(picture, flux, 80, 48), picture[:1])
    assert as_picture(picture[:, :4], flux, 80, 48) is None
    assert as_picture(tokens, flux, 8000, 48) is None


@pytest.mark.skipif(HOST is None, reason="needs the formats of a real ComfyUI")
def test_preview_formats_fit_their_models(monkeypatch: pytest.MonkeyPatch) -> None:
    from diffusers import LTXPipeline

    monkeypatch.setattr(args, "preview_method", LatentPreviewMethod.Latent2RGB)
    wan = latent_format({"_class_name": "AutoencoderKLWan", "z_dim": 16})
    wan22 = latent_format({"_class_name": "AutoencoderKLWan", "z_dim": 48})
    ltx = latent_format({"_class_name": "AutoencoderKLLTXVideo", "scaling_factor": 1.0, "latent_channels": 128})
    flux2 = latent_format({"_class_name": "AutoencoderKLFlux2", "latent_channels": 32})
    video = torch.randn(1, 128, 3, 4, 6)
    shapes = {
        "wan": (wan, torch.randn(1, 16, 3, 4, 6), (6, 4)),
        "wan22": (wan22, torch.randn(1, 48, 3, 4, 6), (6, 4)),
        "ltx": (ltx, LTXPipeline._pack_latents(video), (6, 4)),
        "flux2": (flux2, torch.randn(1, 24, 128), (12, 8)),
    }
    for name, (form, latents, size) in shapes.items():
        side = form.spacial_downscale_ratio
        picture = as_picture(latents, form, 6 * side, 4 * side)
        shown = latent_preview.get_previewer(torch.device("cpu"), form).decode_latent_to_preview_image("JPEG", picture)
        assert shown[1].size == size, name
    assert torch.equal(
        as_picture(LTXPipeline._pack_latents(video), ltx, 192, 128), video[:, :, :1].flatten(2, 3).unsqueeze(2)
    )


# Stop


def test_interrupt_stops_within_a_step_and_leaves_nothing(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load()
    conditioning = encode(reference)
    expected = sample(reference, conditioning)["samples"]
    taken = []
    report = StepProgress.__call__

    def counted(self: StepProgress, step: int, steps: int, latents: torch.Tensor) -> None:
        taken.append(step)
        report(self, step, steps, latents)

    monkeypatch.setattr(StepProgress, "__call__", counted)
    with page():
        moved = comfy.utils.PROGRESS_BAR_HOOK

        def stop(*values: Any, **more: Any) -> None:
            moved(*values, **more)
            comfy.model_management.interrupt_current_processing(True)

        comfy.utils.set_progress_bar_global_hook(stop)
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            sample(reference, conditioning, steps=8)
    assert taken == [1], "the next block or model that would run"
    assert sim.stats().allocated_bytes == 0
    assert not comfy.model_management.processing_interrupted(), "it is spent"
    assert torch.equal(sample(reference, conditioning)["samples"], expected)


def test_interrupt_stops_reading_and_leaves_nothing(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load()
    monkeypatch.setattr(reader, "BATCH_BYTES", 1024)
    whole, done = reader.fill_batch, []

    def then_stop(batch: list, room: int) -> None:
        whole(batch, room)
        done.append(batch)
        time.sleep(0.5)  # in which who waits looks
        comfy.model_management.interrupt_current_processing(True)

    with pytest.MonkeyPatch.context() as patch, page() as recorded:
        patch.setattr(reader, "fill_batch", then_stop)
        patch.setattr(Timeline, "tell", lambda *_: None)  # the bar would look too
        with pytest.raises(comfy.model_management.InterruptProcessingException):
            encode(reference, "a boat that is not read")
    comfy.model_management.interrupt_current_processing(False)
    assert len(done) <= 2 * reader.RAM_THREADS
    assert recorded.texts[-1] == ("1", "stopped")
    assert set(tiers(reference).values()) == {"disk"}
    assert sum(unit.host_bytes for unit in reference.open().encoders) == 0
    assert sim.stats().allocated_bytes == 0
    encode(reference, "a boat that is not read")


def test_reading_moves_a_bar(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    reference = load()
    fill = reader.fill_batch
    monkeypatch.setattr(reader, "BATCH_BYTES", 1024)
    monkeypatch.setattr(reader, "fill_batch", lambda *batch: (time.sleep(0.05), fill(*batch))[1])  # so that calls wait
    monkeypatch.setattr(running, "_SECONDS", 0.0)
    with page() as recorded:
        encode(reference, "a boat that is read")
    (unit,) = reference.open().encoders
    total = tiny.proportions(Path(folder_paths.get_folder_paths("diffusers")[0]) / "lumina2")["text_encoder"]
    bar = [value for value, of, _ in recorded.progress if of == total]
    assert bar[0] == 0 and bar[-1] == total and len(set(bar)) > 3
    read = [text for _, text in recorded.texts if ": reading, " in text]
    assert len(read) > 3 and all(text.endswith(f" of {format_bytes(total)}") for text in read)
    assert len(set(read)) == len(read)


# What went wrong is said in the node


def test_a_failed_node_shows_why_and_no_old_text(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    with page() as recorded:
        reference = load()
        conditioning = encode(reference)
        latent = {"samples": sample(reference, conditioning)["samples"]}
        with pytest.raises(ValueError, match="latents"):
            decode(reference, {"samples": latent["samples"][0]})
        assert recorded.texts[-1][1].startswith("failed: ") and "\n" not in recorded.texts[-1][1]
        decode(reference, latent)
        assert "peak" in recorded.texts[-1][1]
        with pytest.raises(ValueError, match="not in models/diffusers"):
            asyncio.run(load_missing())
        assert recorded.texts[-1] == ("1", "failed: pipeline 'gone' is not in models/diffusers any more. Choose "
                                      "another, or put it back.")  # fmt: skip
        count = len(recorded.texts)
        load()
        assert [text for _, text in recorded.texts[count:]] == ["done"], "it has nothing else to say"
        load()
        assert len(recorded.texts) == count + 1


async def load_missing() -> None:
    node = LoadPipeline.PREPARE_CLASS_CLONE({"hidden_inputs": {io.Hidden.unique_id: "1"}})
    node.execute(pipeline="gone", vram_gb=0.0, dtype="auto", keep_loaded=True, device="sim")


def test_errors_are_of_no_path() -> None:
    for error in (ballast.DoesNotFitError, ballast.DecodeError):
        assert (error.__module__, error.__qualname__) == ("ballast", error.__name__)
        assert pickle.loads(pickle.dumps(error("why"))).args == ("why",)  # noqa: S301


@pytest.fixture
def cpu() -> Iterator[None]:
    """Nothing stays in RAM of what ran on the CPU."""
    yield
    manager("cpu").free()


def test_batches_go_in_and_out(sim: ModuleType) -> None:
    """LATENT of three and IMAGE of three."""
    reference = load()
    conditioning = encode(reference)
    latent = sample(reference, conditioning, seed=4, batch=3)
    images = decode(reference, latent)
    assert len(latent["samples"]) == len(images) == 3
    last = sample(reference, conditioning, seed=6)["samples"]
    torch.testing.assert_close(latent["samples"][2:], last, atol=1e-4, rtol=0)
    given = {"pipeline": reference, "conditioning": conditioning, "width": WIDTH, "height": HEIGHT, "vram_gb": "1"}
    text = run_node(VramPlan, **given, batch=3).result[1]
    assert "not predicted on the simulated card. It samples 3 at once." in text
    simulated.enable(total="4GB", tflops=1.0)
    text = run_node(VramPlan, **given, batch=3).result[1]
    assert "a picture, 3 at once. For this budget the best batch is" in text


@pytest.mark.usefixtures("sim", "cpu")
def test_compiling_is_said_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = functools.partial(samples.kernels, backend="eager")
    monkeypatch.setattr(samples, "kernels", compiled)
    monkeypatch.setattr(running, "_SECONDS", 0.0)
    reference = load(device="cpu")
    conditioning = encode(reference)
    torch._dynamo.reset()
    with page() as recorded:
        sample(reference, conditioning, options={"compile": True})
    texts = [text for _, text in recorded.texts]
    at = next(i for i, text in enumerate(texts) if ": compiling, which cannot be stopped" in text)
    assert texts[at + 1].endswith("sampling, on the CPU"), "and no longer"
    torch._dynamo.reset()


@pytest.mark.usefixtures("cpu")
def test_sim_goes_on_on_the_cpu_where_it_does_not_work(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    why = "the simulated accelerator does not work on torch 9.9 (attention: other values than on the CPU)"
    monkeypatch.setattr(simulated, "supported", lambda: why)
    with page() as recorded, caplog.at_level("WARNING", "ballast"):
        reference = load()
    said = f"device is sim, but this runs on the CPU: {why}."
    assert recorded.texts == [("1", said)]
    assert [record.getMessage() for record in caplog.records] == [f"Ballast: {said}"]
    assert reference.device == "cpu"
    assert sample(reference, encode(reference))["samples"].isfinite().all()


def one_line(error: BaseException) -> bool:
    text = str(error)
    return "\n" not in text and len(text) < 400 and text.endswith(".")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"width": 63, "height": 65}, "width is 63; lumina2 takes multiples of 16 up to 256, such as 64"),
        ({"width": 64, "height": 65}, "height is 65.*multiples of 16 up to 256, such as 64"),
        ({"frames": 5}, "makes pictures, not videos"),
    ],
)
def test_impossible_size_is_one_clear_line(given: dict[str, int], message: str, sim: ModuleType) -> None:
    reference = load(keep_loaded=False)
    conditioning = encode(reference)
    with pytest.raises(ValueError, match=message) as caught:
        sample(reference, conditioning, **given)
    assert one_line(caught.value)
    assert tiers(reference)["transformer"] == "disk", "nothing was loaded for it"


def test_conditioning_of_another_pipeline_is_one_clear_line(sim: ModuleType) -> None:
    """Wan's embeddings would pass for Lumina's by their names."""
    reference = load()
    conditioning = encode(load("videos/wan"))
    with pytest.raises(ValueError, match="conditioning was made by wan, not lumina2") as caught:
        sample(reference, conditioning)
    assert one_line(caught.value)
    assert tiers(reference)["transformer"] == "disk", "nothing was loaded for it"


def test_latents_of_another_model_are_one_clear_line(sim: ModuleType) -> None:
    reference = load()
    with pytest.raises(ValueError, match=r"latents.*16 channels.*takes 4") as caught:
        decode(reference, {"samples": torch.zeros(1, 16, 8, 8)})
    assert one_line(caught.value)
    with pytest.raises(ValueError, match="NaN"):
        decode(reference, {"samples": torch.full((1, 4, 8, 8), float("nan"))})
    assert tiers(reference)["vae"] == "disk", "nothing was loaded for it"


def test_the_reserve_of_the_host_counts_on_its_own_device_only(sim: ModuleType) -> None:
    """400 MB less would leave nothing of a simulated device of 256 MB."""
    sim.enable(total="256MB")
    assert manager("sim").budget_bytes == 256 * 2**20
    assert sample(load(), encode(load()))["samples"].isfinite().all()


# Free VRAM and VRAM Report


def test_free_vram_evicts_by_role_and_says_so(sim: ModuleType) -> None:
    reference = load()
    value = sample(reference, encode(reference))
    held = sim.stats().allocated_bytes
    assert held > 0
    with page() as shown:
        kept = run_node(FreeVram, value=value, transformers=False, node_id="7")
        assert sim.stats().allocated_bytes == held
        freed = run_node(FreeVram, value=value, text_encoders=False, vaes=False, node_id="7")
    assert sim.stats().allocated_bytes == 0
    assert kept.result[0] is value and freed.result[0] is value
    line = rf"sim:0: {held / 1024:.0f} KB -> 0 B, freed {held / 1024:.0f} KB"
    assert re.search(line, freed.result[1])
    assert re.search(r"^lumina2, transformer: [\d.]+ KB -> 0 B$", freed.result[1], re.MULTILINE)
    assert "-> 0 B" not in kept.result[1]
    assert shown.texts[-1] == ("7", freed.result[1].replace("\n", ".\n") + ".")
    assert freed.ui.as_dict()["text"] == (freed.result[1],), "for users of the API"
    sample(reference, encode(reference))  # what left is loaded again


@pytest.mark.parametrize("value", [None, 3, "text", {"samples": torch.zeros(1)}], ids=repr)
def test_free_vram_hands_any_value_on(value: Any) -> None:
    assert run_node(FreeVram, value=value).result[0] is value
    assert run_node(FreeVram).result[0] is None


def test_free_vram_leaves_the_host_alone_when_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(host, "evict", lambda patchers: asked.append(list(patchers)))
    run_node(FreeVram)
    run_node(FreeVram, host_models=False)
    assert asked == [[]], "of the host's own there is none"


def test_report_is_a_picture_and_a_table(sim: ModuleType) -> None:
    reference = load()
    decode(reference, sample(reference, encode(reference, "a prompt for the report")))
    with page() as shown:
        output = run_node(VramReport, node_id="9")
    picture, report = output.result
    assert picture.ndim == 4 and picture.shape[0] == 1 and picture.shape[3] == 3
    assert picture.dtype == torch.float32 and picture.min() >= 0 and picture.max() <= 1
    assert picture.std() > 0.02, "something is drawn"
    for word in ("encode", "sample", "decode", "text_encoder", "transformer", "vae", "sim:0"):
        assert word in report
    ((_, drawn),) = shown.texts
    first, *stages = drawn.splitlines()
    assert first == report.splitlines()[0] + "."
    assert [line.split(":")[0] for line in stages] == ["encode", "sample", "decode"]
    assert output.ui.as_dict()["text"] == (report,)


def test_report_before_anything_ran() -> None:
    for known in managers():
        known.timeline.clear()
    picture, report = run_node(VramReport).result
    assert report == "Nothing has run yet."
    assert picture.shape[3] == 3


def test_simulated_device_beside_a_real_one_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comfy.model_management, "get_torch_device", lambda: torch.device("cuda:0"))
    with pytest.raises(ValueError, match="device is sim, but ComfyUI runs on cuda:0"):
        run_node(LoadPipeline, pipeline=DEMO, device="sim")


def test_a_graph_may_ask_for_a_gpu_or_a_simulated_one(sim: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(DEMO, device="gpu or sim").device == "sim", "this ComfyUI is on the CPU"
    monkeypatch.setattr(comfy.model_management, "get_torch_device", lambda: torch.device("cuda:0"))
    with pytest.raises(ValueError, match="device 'cuda:0' (is not available|does not exist)"):
        load(DEMO, device="gpu or sim")  # which is not here
