"""`guidance` and `true_cfg` against the scales of diffusers, and what each class of diffusers takes for them."""

from __future__ import annotations

import ast
import inspect
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import ballast.commands.main
import diffusers
import folder_paths
import numpy as np
import pytest
import tiny
import torch
from ballast.memory.rates import ASSUMED
from ballast.nodes.encode import TextEncode
from ballast.nodes.load import LoadPipeline
from ballast.nodes.sample import Sampler
from ballast.pipelines.encoding.prompts import TOLD
from ballast.pipelines.options import UnknownOptionError
from ballast.pipelines.stock.obstacles import obstacle
from ballast.pipelines.stock.signatures import scales_of, tree_of
from diffusers import DiffusionPipeline
from node_runner import run_node
from PIL import Image
from selection import few

Folders = Callable[[str], Path]
GUIDANCE = "guidance_scale"
BOTH = {"guidance": GUIDANCE, "true_cfg": "true_cfg_scale"}
OWN = {"guidance": GUIDANCE, "true_cfg": None}
CFG = {"guidance": "true_cfg_scale", "true_cfg": None}  # on by default: the distilled scale is an option
# Classes of diffusers whose transformer may be told a scale, or that have two.
CLASSES: dict[str, dict[str, str | None]] = {
    "ChromaInpaintPipeline": OWN,  # classifier-free guidance, beside an argument of no use
    "Flux2Pipeline": OWN,
    "FluxControlImg2ImgPipeline": OWN,
    "FluxControlInpaintPipeline": OWN,
    "FluxControlNetImg2ImgPipeline": OWN,
    "FluxControlNetInpaintPipeline": OWN,
    "FluxControlNetPipeline": BOTH,
    "FluxControlPipeline": OWN,
    "FluxFillPipeline": OWN,
    "FluxImg2ImgPipeline": BOTH,
    "FluxInpaintPipeline": BOTH,
    "FluxKontextInpaintPipeline": BOTH,
    "FluxKontextPipeline": BOTH,
    "FluxPipeline": BOTH,
    "HunyuanImagePipeline": {"guidance": "distilled_guidance_scale", "true_cfg": "guider"},
    "HunyuanImageRefinerPipeline": {"guidance": "distilled_guidance_scale", "true_cfg": "guider"},
    "HunyuanSkyreelsImageToVideoPipeline": CFG,
    "HunyuanVideoFramepackPipeline": BOTH,
    "HunyuanVideoImageToVideoPipeline": BOTH,
    "HunyuanVideoPipeline": BOTH,
    "QwenImage21Pipeline": CFG,
    "QwenImageControlNetInpaintPipeline": CFG,
    "QwenImageControlNetPipeline": CFG,
    "QwenImageEditInpaintPipeline": CFG,
    "QwenImageEditPipeline": CFG,
    "QwenImageEditPlusPipeline": CFG,
    "QwenImageImg2ImgPipeline": CFG,
    "QwenImageInpaintPipeline": CFG,
    "QwenImageLayeredPipeline": CFG,
    "QwenImagePipeline": CFG,
    "SanaSprintImg2ImgPipeline": OWN,
    "SanaSprintPipeline": OWN,
    "VisualClozeGenerationPipeline": OWN,
}
# Which of them are told their scale, where the transformer embeds it.
NOT_DISTILLED = {"ChromaInpaintPipeline"} | {name for name, takes in CLASSES.items() if takes is CFG}


def pipeline_classes() -> Iterator[Any]:
    for name in dir(diffusers):
        cls = getattr(diffusers, name, None) if name.endswith("Pipeline") else None
        if isinstance(cls, type) and issubclass(cls, DiffusionPipeline) and inspect.isfunction(cls.__call__):
            yield cls


def tells_its_transformer(cls: Any) -> bool:
    """Whether the call gives a module a `guidance` that is not None, or mentions such an embedding."""
    code = inspect.getsource(cls.__call__)
    keywords = (node for node in ast.walk(tree_of(cls.__call__)) if isinstance(node, ast.keyword))
    given = any(word.arg == "guidance" and not isinstance(word.value, ast.Constant) for word in keywords)
    return given or "guidance_embeds" in code or "distilled_guidance_scale" in code


@pytest.mark.long
@pytest.mark.parametrize("every", few([1, 5], 5))
def test_the_code_of_every_class_can_be_read(every: int) -> None:
    """That of Qwen-Image-Layered has texts over several lines that begin at column 0."""
    classes = list(pipeline_classes())
    assert len(classes) > 200
    named = [diffusers.QwenImageLayeredPipeline, diffusers.HeliosPipeline]
    found = {cls.__name__: obstacle(cls) for cls in (*classes[::every], *named)}
    assert found["QwenImageLayeredPipeline"].startswith("its text_encoder writes tokens")
    assert found["HeliosPipeline"].startswith("it draws a video in sections")


@pytest.mark.long
def test_every_class_with_a_scale_of_its_own_is_known() -> None:
    """A class of another diffusers that has such a scale is to be looked at, and to be added here."""
    found = {
        cls.__name__
        for cls in pipeline_classes()
        if tells_its_transformer(cls) or "true_cfg_scale" in inspect.signature(cls.__call__).parameters
    }
    assert found - {"LongCatImagePipeline", "LongCatImageEditPipeline"} == set(CLASSES)  # tell it None, always


@pytest.mark.parametrize("name", CLASSES)
def test_what_sets_which_argument(name: str) -> None:
    cls = getattr(diffusers, name)
    guider = "guider" in inspect.signature(cls.__init__).parameters
    scales = scales_of(cls, guider, embeds=True)
    assert {"guidance": scales.guidance, "true_cfg": scales.true_cfg} == CLASSES[name]
    assert scales.distilled == (name not in NOT_DISTILLED)
    if guider:  # that of HunyuanImage which was not distilled
        assert scales_of(cls, guider, embeds=False).guidance == "guider"
        assert scales_of(cls, False, embeds=True).true_cfg is None


# As diffusers has it


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Folders) -> Folders:
    """Tiny models that are told a scale, and one that embeds none."""
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name in tiny.FAMILIES:
            return tiny_folders(name)
        if name not in made:
            made[name] = tmp_path_factory.mktemp("distilled") / name
            tiny.seeded(BUILDERS[name])().save_pretrained(made[name], safe_serialization=True)
        return made[name]

    return folder


def schnell() -> DiffusionPipeline:
    parts = dict(tiny.FAMILIES["flux"].build().components)
    config = {name: value for name, value in parts["transformer"].config.items() if not name.startswith("_")}
    parts["transformer"] = diffusers.FluxTransformer2DModel.from_config(config | {"guidance_embeds": False})
    return diffusers.FluxPipeline(**parts)


def sana_sprint() -> DiffusionPipeline:
    parts = dict(tiny.FAMILIES["sana"].build().components)
    config = {name: value for name, value in parts["transformer"].config.items() if not name.startswith("_")}
    more = {"guidance_embeds": True, "qk_norm": "rms_norm_across_heads"}
    parts |= {
        "transformer": diffusers.SanaTransformer2DModel.from_config(config | more),
        "scheduler": diffusers.SCMScheduler(),
    }
    return diffusers.SanaSprintPipeline(**parts)


BUILDERS = {"schnell": schnell, "sana_sprint": sana_sprint}
SIZES: dict[str, dict[str, Any]] = {"hunyuan_video": {"frames": 9}, "sana_sprint": {"width": 64, "height": 32}}


def opened(folder: Path, **more: Any) -> Any:
    return ballast.open_pipeline(folder, device="cpu", **more)


def run_of(name: str) -> dict[str, Any]:
    return {"width": 48, "height": 32, "steps": 2, **SIZES.get(name, {})}


def stock(folder: Path, negative: str | None = None, **scales: float) -> torch.Tensor:
    """The latents of the unmodified pipeline."""
    pipe = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    pipe.set_progress_bar_config(disable=True)
    size = dict(run_of(folder.name))
    named = {"steps": "num_inference_steps", "frames": "num_frames"}
    given = {named.get(name, name): value for name, value in size.items()} | scales
    given |= {} if negative is None else {"negative_prompt": negative}
    if folder.name == "sana_sprint":
        given |= {"use_resolution_binning": False}
    seen: list[torch.Tensor] = []
    decode = pipe.vae.decode
    pipe.vae.decode = lambda latents, *args, **more: seen.append(latents.clone()) or decode(latents, *args, **more)
    pipe("a boat", generator=torch.Generator("cpu").manual_seed(0), output_type="np", max_sequence_length=48, **given)
    return seen[0]


def encoded(pipe: Any, negative: str | None = None) -> Any:
    return pipe.encode("a boat", negative, max_sequence_length=48)


SCALES = [None, 1.0, 5.0]


@pytest.mark.parametrize("name", ["flux", "schnell", "hunyuan_video", "sana_sprint"])
def test_guidance_is_the_scale_of_a_distilled_model(name: str, distilled: Folders) -> None:
    pipe, made = opened(distilled(name)), []
    assert pipe.distilled
    cond = encoded(pipe)
    for scale in SCALES:
        expected = stock(distilled(name), **({} if scale is None else {GUIDANCE: scale}))
        made.append(pipe.sample(cond, guidance=scale, **run_of(name)))
        torch.testing.assert_close(made[-1], expected.float(), atol=1e-5, rtol=0)
    changed = [not torch.equal(made[1], other) for other in made[2:]]
    assert changed == [name != "schnell"]


@pytest.mark.parametrize("name", few(["flux", "schnell", "hunyuan_video"], "flux"))
def test_true_cfg_guides_beside_it(name: str, distilled: Folders, sim: ModuleType) -> None:
    """By the negative prompt; streamed and leafwise as well."""
    expected = stock(distilled(name), "blurry", guidance_scale=2.0, true_cfg_scale=4.0).float()
    pipe = ballast.open_pipeline(distilled(name), device="sim")
    cond = encoded(pipe, "blurry")
    run = {**run_of(name), "guidance": 2.0}
    for strategy in ("auto", "streamed", "leafwise"):
        made = pipe.sample(cond, **run, true_cfg=4.0, strategy=strategy)
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    off = pipe.sample(cond, **run)
    assert torch.equal(off, pipe.sample(cond, **run, true_cfg=1.0)) and not torch.equal(off, made)
    assert torch.equal(off, pipe.sample(encoded(pipe), **run)), "the negative prompt is for true_cfg alone"
    assert sim.stats().allocated_bytes == 0


def test_batches_and_many_prompts_take_it(distilled: Folders, sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(distilled("flux"), device="sim")
    run = {**run_of("flux"), "guidance": 2.0, "true_cfg": 3.0}
    cond = pipe.encode("a boat", "blurry")
    both = pipe.sample(cond, **run, batch=2)
    alone = torch.cat([pipe.sample(cond, **run, seed=seed) for seed in (0, 1)])
    torch.testing.assert_close(both, alone, atol=1e-4, rtol=0)
    (image,) = pipe.run(["a boat"], negative_prompt="blurry", **run)
    torch.testing.assert_close(image, pipe.decode(alone[:1]), atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", few(["flux", "hunyuan_video"], "flux"))
def test_a_step_runs_twice_with_true_cfg_alone(name: str, distilled: Folders, sim: ModuleType) -> None:
    """In the plan as in the run."""
    pipe = ballast.open_pipeline(distilled(name), device="sim")
    calls: list[int] = []
    plan: dict[str, Any] = {"vram": "1GB", "rates": ASSUMED}
    (transformer,) = (unit for unit in pipe.denoisers if unit.role == "transformer")
    transformer.module.register_forward_pre_hook(lambda *_: calls.append(1))
    plain = pipe.plan(**run_of(name), **plan)
    for guidance in (3.5, 5.0):
        made = pipe.plan(**run_of(name), guidance=guidance, **plan)
        assert made.step_seconds == plain.step_seconds and "twice" not in str(made)
    twice = pipe.plan(**run_of(name), true_cfg=4.0, **plan)
    assert "each step twice" in twice.headline() and "each step twice" in twice.work
    assert twice.step_seconds == pytest.approx(2 * plain.step_seconds, rel=0.1)
    cond = encoded(pipe, "blurry")
    assert "twice" not in pipe.plan(**run_of(name), cond=encoded(pipe), true_cfg=4.0, **plan).work
    for given, count in (({}, 2), ({"guidance": 3.5}, 2), ({"true_cfg": 4.0}, 4)):
        calls.clear()
        pipe.sample(cond, **run_of(name), **given)
        assert len(calls) == count, given


@pytest.mark.long
def test_node_and_command_line_take_it(
    distilled: Folders, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the library does; left out, it is off."""
    (tmp_path / "flux").symlink_to(distilled("flux"), target_is_directory=True)
    monkeypatch.setitem(folder_paths.folder_names_and_paths, "diffusers", ([str(tmp_path)], {"folder"}))
    pipe = ballast.open_pipeline(tmp_path / "flux", device="sim")
    cond, run = pipe.encode("a boat", "blurry"), {"width": 48, "height": 32, "steps": 2, "guidance": 2.0}
    reference = run_node(LoadPipeline, pipeline="flux", device="sim").result[0]
    prompts = run_node(TextEncode, pipeline=reference, prompt="a boat", negative_prompt="blurry").result[0]
    command = ["generate", "--model", str(tmp_path / "flux"), "--prompt", "a boat", "--negative", "blurry"]
    command += ["--device", "sim", *(f"--{name}={value}" for name, value in run.items())]
    pictures = []
    for given in ({}, {"true_cfg": 4.0}):
        expected = pipe.sample(cond, **run, **given)
        node = run_node(Sampler, pipeline=reference, conditioning=prompts, **run, seed=0, **given)
        assert torch.equal(node.result[0]["samples"], expected)
        out = tmp_path / f"{len(given)}.png"
        options = [f"--true-cfg={value}" for value in given.values()]
        assert ballast.commands.main.main([*command, *options, "--out", str(out)]) == 0
        pictures.append(np.asarray(Image.open(out).convert("RGB")) / 255)
        np.testing.assert_allclose(pictures[-1], pipe.decode(expected)[0].numpy(), atol=1 / 254)
    assert not np.array_equal(*pictures)


# What users are told


@pytest.fixture(autouse=True)
def _untold() -> Iterator[None]:
    TOLD.clear()
    yield
    TOLD.clear()


def test_what_is_told_of_a_distilled_model(distilled: Folders, caplog: pytest.LogCaptureFixture) -> None:
    pipe = opened(distilled("flux"))
    none, both = encoded(pipe), encoded(pipe, "blurry")
    run = run_of("flux")
    (changed,) = pipe.sampling_notes(none, 3.5)
    assert changed == (
        "guidance is now the scale of flux itself. For classifier-free guidance, as before, set true_cfg."
    )
    assert pipe.sampling_notes(none, 3.5) == pipe.sampling_notes(none) == [], "once"
    (ignored,) = pipe.sampling_notes(both, 3.5)
    assert ignored == (
        "The negative prompt has no effect without true_cfg. Above 1 it counts, and each step runs twice."
    )
    assert pipe.sampling_notes(both, true_cfg=4.0) == ["true_cfg is 4: each step runs twice."]
    words = "true_cfg has no effect without a negative prompt. Encode one; it may be empty."
    assert pipe.sampling_notes(none, true_cfg=4.0) == [words]
    TOLD.clear()
    with caplog.at_level(logging.WARNING, "ballast"):
        for _ in range(2):
            pipe.sample(both, **run, guidance=2.0)
            pipe.sample(both, **run, true_cfg=2.0)
    said = [record.getMessage() for record in caplog.records if record.name == "ballast"]
    assert sorted(said) == sorted(
        f"Ballast: {note}" for note in (changed, ignored, "true_cfg is 2: each step runs twice.")
    )


def test_guidance_of_a_model_that_embeds_none_is_told(distilled: Folders) -> None:
    pipe = opened(distilled("schnell"))
    cond = encoded(pipe)
    (note,) = pipe.sampling_notes(cond, 2.0)
    assert note == (
        "guidance has no effect: schnell embeds none, as Flux-schnell. Set true_cfg above 1 instead; each step then "
        "runs twice."
    )
    assert pipe.sampling_notes(cond) == []
    sprint = opened(distilled("sana_sprint"))
    assert sprint.sampling_notes(encoded(sprint), 2.0) == []


@pytest.mark.parametrize("name", ["sd3", "qwenimage"])
def test_true_cfg_of_another_model_is_refused(name: str, tiny_folders: Folders) -> None:
    pipe = opened(tiny_folders(name))
    words = "true_cfg is for guidance-distilled models .others take guidance., not for "
    with pytest.raises(UnknownOptionError, match=words):
        pipe.sample(pipe.encode("a boat", ""), true_cfg=4.0)
    with pytest.raises(UnknownOptionError, match=words):
        pipe.plan(true_cfg=4.0, vram="1GB")
    with pytest.raises(UnknownOptionError, match="true_cfg_scale: give guidance instead"):
        pipe.sample(pipe.encode("a boat", ""), true_cfg_scale=4.0)


def test_what_else_is_refused(distilled: Folders) -> None:
    pipe, sprint = opened(distilled("flux")), opened(distilled("sana_sprint"))
    cond = encoded(pipe, "blurry")
    for wrong in (float("nan"), "4", True):
        with pytest.raises(ValueError, match="true_cfg is .*; it takes a number"):
            pipe.sample(cond, true_cfg=wrong)
    with pytest.raises(UnknownOptionError, match="true_cfg_scale: give true_cfg instead"):
        pipe.sample(cond, true_cfg_scale=4.0)
    with pytest.raises(UnknownOptionError, match="guidance_scale: give guidance instead"):
        pipe.sample(cond, guidance_scale=4.0)
    with pytest.raises(ValueError, match="SanaSprintPipeline has no classifier-free guidance. Leave it out"):
        sprint.sample(encoded(sprint), true_cfg=4.0)


def test_a_guider_takes_the_place_of_that_of_a_class(tiny_folders: Folders, sim: ModuleType) -> None:
    folder, family = tiny_folders("hunyuan_video15"), tiny.FAMILIES["hunyuan_video15"]
    pipe, encode, _, _ = tiny.stages("hunyuan_video15", folder, "sim")
    width, height = family.size
    run = {"width": width, "height": height, "frames": family.frames, "steps": 2, **family.call_kwargs}
    cond, guider = encode(), diffusers.AdaptiveProjectedGuidance(guidance_scale=4.0, eta=0.5)
    expected, _ = tiny.stock(folder, steps=2, listen=lambda stock: setattr(stock, "guider", guider.new()))
    for strategy in ("resident", "leafwise"):
        made = pipe.sample(cond, guider=guider, strategy=strategy, **run)
        torch.testing.assert_close(made, expected.float().reshape(made.shape), atol=1e-5, rtol=1e-5)
        assert sim.stats().allocated_bytes == 0
    assert not torch.allclose(made, pipe.sample(cond, guidance=4.0, **run), atol=1e-4)
