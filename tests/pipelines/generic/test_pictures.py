"""Runs that start from pictures: equal to the stock pipeline of that task, staged, streamed, and nothing left."""

from __future__ import annotations

import gc
import inspect
import json
import os
import shutil
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import torch
from ballast.memory import manager
from ballast.pipelines.equivalence import check
from diffusers import DiffusionPipeline
from pictured import pipelines as tiny_pictured
from pictured.pictures import mask, picture, pil
from selection import few
from unguided import guided_in

Folders = Callable[[str], Path]
WIDTH, HEIGHT, STEPS, SEED = 48, 32, 5, 3
ONE, OTHER = picture(WIDTH, HEIGHT), picture(HEIGHT, WIDTH, 1)
BIG, TALL = picture(96, 64), picture(64, 96, 1)
MASK = mask(WIDTH, HEIGHT)
FILM = torch.cat([ONE.roll(7 * frame, 2) for frame in range(9)])


@dataclass(frozen=True)
class Task:
    """A run that takes pictures, staged and by the stock class `cls`, by default that of the folder."""

    folder: str
    staged: dict[str, Any]
    stock: dict[str, Any]
    cls: str | None = None
    images: list[torch.Tensor] = field(default_factory=list)
    size: tuple[int, int] | None = (WIDTH, HEIGHT)
    text: dict[str, Any] = field(default_factory=dict)  # options of encode
    negative: bool = True


DISTILLED = {"guidance": 2.0, "true_cfg": 3.0}
STOCK_DISTILLED = {"guidance_scale": 2.0, "true_cfg_scale": 3.0}


def from_picture(folder: str, cls: str, strength: float = 0.7, guidance: str = "") -> Task:
    given = {"image": ONE, "strength": strength, **({"guidance": 3.0} if guidance else DISTILLED)}
    stock = {"image": pil(ONE), "strength": strength, **({guidance: 3.0} if guidance else STOCK_DISTILLED)}
    return Task(folder, given, stock, cls)


def painted(folder: str, cls: str, guidance: str = "") -> Task:
    task = from_picture(folder, cls, 0.8, guidance)
    return Task(folder, task.staged | {"mask": MASK}, task.stock | {"mask_image": pil(MASK)}, cls)


def first_frame(folder: str, frames: int = 9, cls: str | None = None, **more: Any) -> Task:
    given = {"image": ONE, "guidance": 3.0, "frames": frames}
    return Task(folder, given, {"image": pil(ONE), "guidance_scale": 3.0, "num_frames": frames}, cls, **more)


def beside_controlnet(cls: str, mask: bool = False) -> Task:
    image = picture(WIDTH, HEIGHT, 1)
    given = {"control": ONE, "image": image, "strength": 0.7, "guidance": 2.0} | ({"mask": MASK} if mask else {})
    stock = {"control_image": pil(ONE), "image": pil(image), "strength": 0.7, "guidance_scale": 2.0}
    return Task("flux_controlnet", given, stock | ({"mask_image": pil(MASK)} if mask else {}), cls, negative=False)


WAN_LAST = first_frame("wan_i2v")
TASKS = {
    "flux": from_picture("flux", "FluxImg2ImgPipeline"),
    "sd3": from_picture("sd3", "StableDiffusion3Img2ImgPipeline", 0.5, "guidance_scale"),
    "qwenimage": from_picture("qwenimage", "QwenImageImg2ImgPipeline", 1.0, "true_cfg_scale"),
    "zimage": from_picture("zimage", "ZImageImg2ImgPipeline", guidance="guidance_scale"),
    "chroma": from_picture("chroma", "ChromaImg2ImgPipeline", guidance="guidance_scale"),
    "flux inpaint": painted("flux", "FluxInpaintPipeline"),
    "sd3 inpaint": painted("sd3_16", "StableDiffusion3InpaintPipeline", "guidance_scale"),
    "qwenimage inpaint": painted("qwenimage", "QwenImageInpaintPipeline", "true_cfg_scale"),
    "zimage inpaint": painted("zimage", "ZImageInpaintPipeline", "guidance_scale"),
    "klein inpaint": Task(
        "flux2_klein",
        {"image": BIG, "mask": mask(96, 64), "strength": 0.8, "guidance": 3.0},
        {"image": pil(BIG), "mask_image": pil(mask(96, 64)), "strength": 0.8, "guidance_scale": 3.0},
        "Flux2KleinInpaintPipeline",
        size=None,
    ),
    "control": Task("flux_control", {"control": ONE}, {"control_image": pil(ONE)}),
    "control, from a picture": Task(
        "flux_control",
        {"control": ONE, "image": OTHER, "strength": 0.6},
        {"control_image": pil(ONE), "image": pil(OTHER), "strength": 0.6},
        "FluxControlImg2ImgPipeline",
    ),
    "controlnet": Task(
        "flux_controlnet", {"control": ONE, **DISTILLED}, {"control_image": pil(ONE), **STOCK_DISTILLED}
    ),
    "controlnet, from a picture": beside_controlnet("FluxControlNetImg2ImgPipeline"),
    "controlnet inpaint": beside_controlnet("FluxControlNetInpaintPipeline", mask=True),
    "fill": Task(
        "flux_fill",
        {"image": ONE, "mask": MASK, "guidance": 3.0},
        {"image": pil(ONE), "mask_image": pil(MASK), "guidance_scale": 3.0},
    ),
    "kontext": Task(
        "kontext",
        DISTILLED,
        {"image": pil(ONE), "max_area": WIDTH * HEIGHT, **STOCK_DISTILLED},
        images=[ONE],
    ),
    "kontext inpaint": Task(
        "kontext",
        {"image": ONE, "mask": MASK, "strength": 0.5},
        {"image": pil(ONE), "image_reference": pil(OTHER), "mask_image": pil(MASK), "strength": 0.5},
        "FluxKontextInpaintPipeline",
        images=[OTHER],
        size=None,
    ),
    "klein, two references": Task(
        "flux2_klein",
        {"guidance": 3.0, "steps": 2},
        {"image": [pil(BIG), pil(TALL)], "guidance_scale": 3.0, "num_inference_steps": 2},
        images=[BIG, TALL],
    ),
    "wan 2.1": first_frame("wan_i2v"),
    "wan 2.1, first and last": Task(
        "wan_flf", WAN_LAST.staged | {"last_image": OTHER}, WAN_LAST.stock | {"last_image": pil(OTHER)}
    ),
    "wan 2.2 5B": first_frame("wan_ti2v", cls="WanImageToVideoPipeline"),
    "ltx": first_frame("ltx", 17, "LTXImageToVideoPipeline", size=(96, 64)),
    "hunyuan video": Task(
        "hunyuan_video_i2v",
        {**DISTILLED, "frames": 9},
        {"image": pil(ONE), "num_frames": 9, **STOCK_DISTILLED},
        images=[ONE],
    ),
    "hunyuan video 1.5": Task(
        "hunyuan_video15_i2v", {"image": ONE, "frames": 9}, {"image": pil(ONE), "num_frames": 9}, size=None
    ),
    "qwen edit": Task("qwen_edit", {"guidance": 3.0}, {"image": pil(ONE), "true_cfg_scale": 3.0}, images=[ONE]),
    "wan video": Task(
        "wan",
        {"video": FILM, "strength": 0.6, "guidance": 3.0},
        {"video": [pil(frame[None]) for frame in FILM], "strength": 0.6, "guidance_scale": 3.0},
        "WanVideoToVideoPipeline",
    ),
    "cogvideox": first_frame("cogvideox_i2v", text={"max_sequence_length": 48}),
}


@pytest.fixture(autouse=True, scope="module")
def _without_videos() -> Iterator[None]:
    with tiny_pictured.without_videos():
        yield


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Folders) -> Folders:
    return tiny_pictured.folders_in(tmp_path_factory.mktemp("pictured"), tiny_folders)


def stock(task: Task, folder: Path, listen: Callable[[Any], Any] = id, **more: Any) -> torch.Tensor:
    """What the unmodified class makes, whole, on the CPU. `listen` sees it first."""
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    if task.cls:
        cls = getattr(diffusers, task.cls)
        takes = inspect.signature(cls.__init__).parameters
        settings = {k: v for k, v in pipe.config.items() if k in takes and not k.startswith("_")}
        pipe = cls(**settings | {k: v for k, v in pipe.components.items() if k in takes})
    pipe.set_progress_bar_config(disable=True)
    negative = {"negative_prompt": "blurry"} if takes_negative(type(pipe)) else {}
    size = dict(zip(("width", "height"), task.size, strict=True)) if task.size else {}
    generator = torch.Generator("cpu").manual_seed(SEED)
    given: dict[str, Any] = {
        "num_inference_steps": STEPS,
        **task.stock,
        **task.text,
        **size,
        **negative,
        "generator": generator,
        **more,
    }
    listen(pipe)
    made = pipe(prompt="a boat", output_type="np", **given)
    return torch.as_tensor(made.images if hasattr(made, "images") else made.frames).float()


def takes_negative(cls: Any) -> bool:
    return "negative_prompt" in inspect.signature(cls.__call__).parameters


def encoded(task: Task, pipe: Any) -> Any:
    negative = "blurry" if task.negative and takes_negative(pipe.model.pipeline_class) else None
    return pipe.encode("a boat", negative, **({"images": task.images} if task.images else {}), **task.text)


def run_of(task: Task) -> dict[str, Any]:
    width, height = task.size or (None, None)
    return {"width": width, "height": height, "steps": STEPS, "seed": SEED, **task.staged}


# One of each kind, and all with BALLAST_SOAK=1.
NAMES = ["flux inpaint", "ltx", "wan video", pytest.param("klein, two references", marks=pytest.mark.long)]


@pytest.mark.parametrize("name", TASKS if os.environ.get("BALLAST_SOAK") else NAMES)
def test_staged_equals_stock(name: str, folders: Folders, sim: ModuleType) -> None:
    task = TASKS[name]
    expected = stock(task, folders(task.folder))
    pipe = ballast.open_pipeline(folders(task.folder), device="sim")
    cond = encoded(task, pipe)
    for strategy in ("resident", "streamed"):
        latents = pipe.sample(cond, strategy=strategy, **run_of(task))
        assert sim.stats().allocated_bytes == 0
        made = pipe.decode(latents)
        assert sim.stats().allocated_bytes == 0
        assert made.shape == expected.shape
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    for event in manager("sim").timeline.events:
        # A ControlNet runs beside the transformer, and encoders take turns.
        together = {resident.role for resident in event.residents if resident.name != "controlnet"}
        assert len(together) <= 1, f"{event.residents} at once"


@pytest.mark.long
def test_a_prompt_is_recorded_beside_a_picture(folders: Folders, sim: ModuleType) -> None:
    """Of a class whose call takes no embeddings, which Wan's is taken for: the encoder reads no picture there."""
    task = TASKS["wan 2.1"]
    pipe: Any = ballast.open_pipeline(folders(task.folder), device="sim")
    pipe.model.replays = True
    check.prove(pipe.model)
    made = pipe.decode(pipe.sample(encoded(task, pipe), **run_of(task)))
    torch.testing.assert_close(made, stock(task, folders(task.folder)), atol=1e-5, rtol=0)


GUIDED = [
    "flux", "wan video",
    *(pytest.param(name, marks=pytest.mark.soak) for name in (
        "cogvideox", "sd3", "qwenimage", "zimage", "chroma", "flux inpaint", "sd3 inpaint", "qwenimage inpaint",
        "zimage inpaint", "klein inpaint", "kontext", "klein, two references", "wan 2.2 5B", "ltx", "qwen edit",
        "wan 2.1",
    )),
]  # fmt: skip


@pytest.mark.parametrize("name", GUIDED)
def test_guidance_in_part_of_the_steps_is_a_stock_loop_without_the_other_pass(name: str, folders: Folders) -> None:
    task, part = TASKS[name], (0.3, 0.7)
    scale = next(key for key in ("true_cfg_scale", "guidance_scale") if key in task.stock)
    off = {scale: 0.0 if name.startswith("zimage") else 1.0}

    def run(listen: Callable[[Any], None], is_guided: bool) -> torch.Tensor:
        return stock(task, folders(task.folder), listen, **({} if is_guided else off))

    expected = guided_in(run, part)
    pipe = ballast.open_pipeline(folders(task.folder), device="cpu")
    cond = encoded(task, pipe)
    told: list[tuple[int, int]] = []

    def tell(step: int, steps: int, latents: torch.Tensor) -> None:
        told.append((step, steps))

    made = pipe.decode(pipe.sample(cond, guidance_range=part, on_step=tell, **run_of(task)))
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    assert told == [(step, len(told)) for step in range(1, len(told) + 1)]
    assert not torch.allclose(made, pipe.decode(pipe.sample(cond, **run_of(task))), atol=2e-5)


def test_a_controlnet_comes_beside_any_folder(folders: Folders, sim: ModuleType, tmp_path: Path) -> None:
    """As if it was in the folder, which samples as before without one; what is none is refused."""
    whole, task = folders("flux_controlnet"), TASKS["controlnet"]
    expected = stock(task, whole)
    plain = shutil.copytree(whole, tmp_path / "flux")
    shutil.move(plain / "controlnet", tmp_path / "controlnet")
    index = json.loads((plain / "model_index.json").read_text("utf-8"))
    del index["controlnet"]
    (plain / "model_index.json").write_text(json.dumps(index | {"_class_name": "FluxPipeline"}))
    pipe = ballast.open_pipeline(plain, device="sim", controlnet=tmp_path / "controlnet")
    cond = encoded(task, pipe)
    made = pipe.decode(pipe.sample(cond, **run_of(task)))
    torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
    plan = pipe.plan(**{k: v for k, v in run_of(task).items() if k != "seed"}, cond=cond, vram="1GB")
    stage = next(stage for stage in manager("sim").timeline.stages if stage.name == "sample")
    assert stage.peak_bytes <= plan.peak_vram_bytes and {unit.unit for unit in plan.stages[-2].units} >= {"controlnet"}
    with pytest.raises(ValueError, match="Give it: control"):
        pipe.sample(cond, steps=2)
    with pytest.raises(ValueError, match="takes no control: diffusers has no pipeline"):
        ballast.open_pipeline(plain, device="sim").sample(cond, steps=2, control=ONE)
    other = shutil.copytree(tmp_path / "controlnet", tmp_path / "other")
    config = json.loads((other / "config.json").read_text("utf-8"))
    (other / "config.json").write_text(json.dumps(config | {"_class_name": "SD3ControlNetModel"}))
    foreign = "holds a SD3ControlNetModel: this ControlNet is for SD3, not for FluxPipeline.$"
    for folder, error, words in (
        (tmp_path / "none", FileNotFoundError, "there is no folder"),
        (plain / "transformer", ValueError, "holds no ControlNet"),
        (other, ValueError, foreign),
    ):
        with pytest.raises(error, match=words):
            ballast.open_pipeline(plain, device="sim", controlnet=folder)
    with pytest.raises(ValueError, match="no pipeline for FluxControlNetPipeline with a ControlNet"):
        ballast.open_pipeline(whole, device="sim", controlnet=tmp_path / "controlnet")


def test_a_negative_prompt_that_a_controlnet_cannot_take_is_refused(folders: Folders, sim: ModuleType) -> None:
    """It counts without a picture, and is told in a line with one; an empty one is none."""
    task = TASKS["controlnet, from a picture"]
    pipe = ballast.open_pipeline(folders(task.folder), device="sim")
    words = "takes no negative prompt with these pictures. Encode an empty one"
    with pytest.raises(ValueError, match=words) as raised:
        pipe.sample(pipe.encode("a boat", "blurry"), **run_of(task))
    assert "\n" not in str(raised.value)
    made, plain = (pipe.sample(pipe.encode("a boat", negative), **run_of(task)) for negative in ("", None))
    assert torch.equal(made, plain)
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_a_picture_is_one_run_s(folders: Folders, sim: ModuleType) -> None:
    """Pictures change between runs of one pipeline, and one without any is as before; the prompt is encoded once."""
    pipe = ballast.open_pipeline(folders("flux"), device="sim")
    cond = pipe.encode("a boat", "blurry")
    run: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "steps": STEPS, "guidance": 3.0}
    plain = pipe.sample(cond, **run)
    made = {
        key: pipe.sample(cond, **run, image=image, strength=0.6)
        for key, image in (("one", ONE), ("other", OTHER), ("again", ONE))
    }
    assert torch.equal(made["one"], made["again"]) and torch.equal(pipe.sample(cond, **run), plain)
    assert not torch.allclose(made["one"], made["other"], atol=1e-2)
    assert not torch.allclose(made["one"], plain, atol=1e-2)
    inside = pipe.sample(cond, **run, image=ONE, mask=MASK, strength=1.0)
    kept = pipe.sample(cond, **run, image=ONE, mask=torch.zeros_like(MASK), strength=1.0)
    assert not torch.allclose(inside, kept, atol=1e-2)
    assert pipe.model.inputs == frozenset()


@pytest.mark.parametrize(
    ("name", "given"),
    [
        ("flux", {"image": ONE}),
        pytest.param("kontext", {"image": ONE}, marks=pytest.mark.soak),
        ("wan_i2v", {}),
    ],
)
def test_a_pipeline_that_took_pictures_is_gone_at_once(name: str, given: dict[str, Any], folders: Folders) -> None:
    """Not when garbage is collected: its models would stay claimed until then."""
    pipe = ballast.open_pipeline(folders(name), device="cpu")
    task = next(task for task in TASKS.values() if task.folder == name)
    pipe.sample(pipe.encode("a boat"), **{**run_of(task), "steps": 1, **given})
    gone = weakref.ref(pipe.model.claims._owner)
    gc.disable()
    try:
        del pipe
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("strength", "steps", "taken"),
    [*(pytest.param(*case, marks=pytest.mark.soak) for case in ((1.0, 5, 5), (0.5, 4, 2))), (0.7, 5, 4), (0.2, 5, 1)],
)
def test_steps_are_those_that_are_taken(strength: float, steps: int, taken: int, folders: Folders) -> None:
    """A run that keeps some of its picture leaves out the first ones, in reports and in plans."""
    pipe = ballast.open_pipeline(folders("flux"), device="cpu")
    seen: list[tuple[int, int]] = []
    run: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "steps": steps, "image": ONE, "strength": strength}
    pipe.sample(pipe.encode("a boat"), **run, on_step=lambda step, of, latents: seen.append((step, of)))
    assert seen == [(step, taken) for step in range(1, taken + 1)]
    assert next(stage.steps for stage in pipe.plan(vram="1GB", **run).stages if stage.name == "sample") == taken


def test_the_size_is_the_picture_s(folders: Folders) -> None:
    """Where none is asked for, and down to what the model draws."""
    pipe = ballast.open_pipeline(folders("flux"), device="cpu")
    latents = pipe.sample(pipe.encode("a boat"), steps=1, image=picture(70, 50), strength=1.0)
    assert pipe.decode(latents).shape == (1, 48, 64, 3)


def test_several_prompts_share_a_picture(folders: Folders) -> None:
    pipe = ballast.open_pipeline(folders("flux"), device="cpu")
    run: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "steps": STEPS, "strength": 0.6}
    two = pipe.encode(["a boat", "a cat"])
    assert pipe.sample(two, **run, image=ONE).shape[0] == 2
    several = pipe.sample(two, **run, image=torch.cat([ONE, ONE.flip(1)]))
    assert not torch.allclose(several[1], pipe.sample(two, **run, image=ONE)[1], atol=1e-2)


OTHERS = ("sd3_controlnet", "qwen_controlnet", "flux_control")
OFTEN = dict.fromkeys(OTHERS[1:], pytest.mark.soak)


@pytest.mark.parametrize(
    "name", ["flux_controlnet", *(pytest.param(n, marks=OFTEN.get(n, pytest.mark.long)) for n in OTHERS)]
)
def test_several_to_follow_make_a_batch(name: str, folders: Folders, sim: ModuleType) -> None:
    """Each is the stock call's result of that picture and seed; one for each of several prompts as in its own lists."""
    follow, run = torch.cat([ONE, ONE.flip(1)]), {"width": WIDTH, "height": HEIGHT, "steps": 2}
    pipe: Any = DiffusionPipeline.from_pretrained(folders(name), local_files_only=True)
    pipe.set_progress_bar_config(disable=True)

    def drawn(prompt: Any, pictures: Any, seed: int) -> torch.Tensor:
        torch.manual_seed(seed)  # which SD3's VAE draws from
        size = {"width": WIDTH, "height": HEIGHT, "generator": torch.Generator("cpu").manual_seed(seed)}
        return torch.as_tensor(
            pipe(prompt=prompt, control_image=pictures, num_inference_steps=2, output_type="np", **size).images
        )

    alone = torch.cat([drawn("a boat", pil(picture[None]), SEED + i) for i, picture in enumerate(follow)])
    staged = ballast.open_pipeline(folders(name), device="sim")
    cond, texts = staged.encode("a boat"), ["a boat", "a cat"]
    made = staged.decode(staged.sample(cond, **run, seed=SEED, control=follow))
    torch.testing.assert_close(made, alone, atol=1e-4, rtol=0)
    assert not torch.allclose(*alone, atol=1e-2)
    assert staged.plan(cond=cond, vram="1GB", **run, control=follow).pictures == 2
    several = drawn(texts, [pil(picture[None]) for picture in follow], SEED)
    made = staged.decode(staged.sample(staged.encode(texts), **run, seed=SEED, control=follow))
    torch.testing.assert_close(made, several, atol=1e-4, rtol=0)
    assert sim.stats().allocated_bytes == 0


def test_as_many_to_follow_as_results(folders: Folders) -> None:
    pipe = ballast.open_pipeline(folders("flux_controlnet"), device="cpu")
    run: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "steps": 1, "control": ONE.repeat(2, 1, 1, 1)}
    with pytest.raises(ValueError, match=r"^control has 2 for a batch of 3. Give one, or as many.$"):
        pipe.sample(pipe.encode("a boat"), **run, batch=3)
    with pytest.raises(ValueError, match=r"^control has 2 for 3 prompts. Give one, or as many.$"):
        pipe.sample(pipe.encode(["a boat", "a cat", "a red"]), **run)
    with pytest.raises(ValueError, match=r"^control has pictures of several sizes."):
        pipe.sample(pipe.encode("a boat"), **run | {"control": [ONE, OTHER]})


def test_references_belong_to_the_prompt(folders: Folders) -> None:
    """They stay with the conditioning, also with one from the cache; a model that reads none refuses them."""
    pipe = ballast.open_pipeline(folders("kontext"), device="cpu")
    run: dict[str, Any] = {"width": WIDTH, "height": HEIGHT, "steps": 2, "_auto_resize": False}
    first, second = (pipe.encode("a boat", images=image) for image in (ONE, OTHER))
    assert torch.equal(first.tensors["prompt_embeds"], second.tensors["prompt_embeds"])
    made = [pipe.sample(cond, **run) for cond in (first, second, pipe.encode("a boat"))]
    assert not torch.allclose(made[0], made[1], atol=1e-4) and not torch.allclose(made[0], made[2], atol=1e-4)
    assert torch.equal(made[0], pipe.sample(pipe.encode("a boat"), **run, image=ONE))
    with pytest.raises(ValueError, match="^flux reads no pictures with its prompt. Leave images out, or give one to"):
        ballast.open_pipeline(folders("flux"), device="cpu").encode("a boat", images=ONE)


@pytest.mark.parametrize("name", few(["qwen_edit", "hunyuan_video_i2v"], "qwen_edit"))
def test_an_encoder_that_sees_pictures_is_cached_by_them(name: str, folders: Folders, sim: ModuleType) -> None:
    """The same prompt with the same picture loads no encoder, with another one it does; a plan counts its tokens."""
    pipe = ballast.open_pipeline(folders(name), device="sim")
    conds = {}
    for key, image, loads in (("one", ONE, True), ("other", OTHER, True), ("again", ONE.clone(), False)):
        sim.reset_stats()
        conds[key] = pipe.encode("a boat", "blurry", images=image)
        assert (sim.stats().h2d_bytes > 0) is loads, key
    embeds = {key: cond.tensors["prompt_embeds"] for key, cond in conds.items()}
    assert torch.equal(embeds["one"], embeds["again"]) and torch.equal(conds["again"].pictures[0], ONE[0])
    assert embeds["one"].shape != embeds["other"].shape or not torch.allclose(embeds["one"], embeds["other"])
    with pytest.raises(ValueError, match=f"^{name} reads a picture with its prompt. Give images.$"):
        pipe.encode("a boat")
    with pytest.raises(ValueError, match=f"^{name} reads its pictures with the prompt. Give them to encode"):
        pipe.sample(conds["one"], image=ONE)


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "a path": ({"image": "cat.png"}, "image is str; give a tensor, [pictures, height, width, 3]."),
    "channels first": ({"image": torch.zeros(1, 3, 32, 48)}, "image is [1, 3, 32, 48]; it takes [pictures, height"),
    "with alpha": ({"image": torch.zeros(1, 32, 48, 4)}, "image is [1, 32, 48, 4]; it takes"),
    "none in it": ({"image": torch.zeros(0, 32, 48, 3)}, "image is [0, 32, 48, 3]; it takes"),
    "bytes": ({"image": torch.zeros(1, 32, 48, 3, dtype=torch.uint8)}, "image is no dense tensor of floating-point"),
    "to 255": ({"image": ONE * 255}, "image holds values from"),
    "NaN": ({"image": ONE * torch.nan}, "image holds values from nan to nan; it takes those from 0 to 1."),
    "a mask alone": ({"mask": MASK}, "there is a mask, but no picture to paint into."),
    "a mask of another size": ({"image": OTHER, "mask": MASK}, "the mask is 48 x 32, the picture 32 x 48."),
    "a mask with channels": (
        {"image": ONE, "mask": ONE},
        "mask is [1, 32, 48, 3]; it takes [pictures, height, width].",
    ),
    "strength alone": ({"strength": 0.5}, "strength is 0.5, but there is no picture to start from."),
    "strength of nothing": ({"image": ONE, "strength": 0.0}, "strength is 0.0; it takes a number above 0 and up to 1."),
    "strength above": ({"image": ONE, "strength": 1.5}, "strength is 1.5; it takes a number above 0 and up to 1."),
    "noise beside": ({"image": ONE, "noise": torch.zeros(1, 6, 16)}, "noise: this run starts from a picture"),
    "a last frame": ({"image": ONE, "last_image": ONE}, "flux takes no image, last_image: diffusers has no pipeline"),
    "a crop": ({"image": ONE, "mask": MASK, "padding_mask_crop": 8}, "flux has no argument padding_mask_crop."),
}


def test_bad_pictures_are_refused_in_one_line(folders: Folders, sim: ModuleType) -> None:
    pipe = ballast.open_pipeline(folders("flux"), device="sim")
    cond = pipe.encode("a boat")
    sim.reset_stats()
    for case, (given, words) in BAD.items():
        with pytest.raises((TypeError, ValueError)) as caught:
            pipe.sample(cond, width=WIDTH, height=HEIGHT, steps=STEPS, **given)
        assert words in str(caught.value) and "\n" not in str(caught.value).strip(), case
    assert sim.stats().h2d_bytes == 0


def test_what_takes_no_picture_says_so(tiny_folders: Folders, folders: Folders) -> None:
    for name in ("auraflow", "mochi") if os.environ.get("BALLAST_SOAK") else ("auraflow",):
        pipe = ballast.open_pipeline(tiny_folders(name), device="cpu")
        with pytest.raises(
            ValueError, match=f"^{name} takes no image: diffusers has no pipeline of its parts that does"
        ):
            pipe.sample(pipe.encode("a boat"), steps=1, image=ONE)
    pipe = ballast.open_pipeline(folders("wan_i2v"), device="cpu")
    with pytest.raises(ValueError, match=r"^wan_i2v starts from more than text. Give it: image.$"):
        pipe.sample(pipe.encode("a boat"), steps=1)
    with pytest.raises(
        ValueError, match="^WanImageToVideoPipeline cannot be staged: .* Run it with diffusers itself.$"
    ):
        wan = ballast.open_pipeline(tiny_folders("wan"), device="cpu")  # which has no room for a first frame
        wan.sample(wan.encode("a boat"), steps=1, image=ONE)


HALVES = ["flux", "qwenimage", "wan_i2v", "sd3", "ltx", "cogvideox_i2v", "kontext"]


@pytest.mark.parametrize("name", few(HALVES, "flux"))
def test_half_precision_runs(name: str, folders: Folders) -> None:
    """The VAE stays in float32: what it makes of a picture comes in the type of the picture that it was asked for."""
    task = next(task for task in TASKS.values() if task.folder == name)
    pipe = ballast.open_pipeline(folders(name), device="cpu", dtype="bf16")
    made = pipe.decode(pipe.sample(encoded(task, pipe), **run_of(task)))
    torch.testing.assert_close(made, stock(task, folders(name)), atol=0.2, rtol=0)


def test_size_that_is_not_the_pictures_is_refused_where_the_call_draws_that(folders: Folders) -> None:
    """Z-Image's own call ends with an error of torch."""
    task = TASKS["zimage"]
    pipe = ballast.open_pipeline(folders(task.folder), device="cpu")
    with pytest.raises(ValueError, match="draws the size of its picture. Leave width and height out"):
        pipe.sample(encoded(task, pipe), **run_of(task) | {"width": 16, "height": 16})
