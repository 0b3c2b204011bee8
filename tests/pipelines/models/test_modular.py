"""Modular pipelines in stages, against their own call: the same bits, no byte left, peaks as planned, or refused."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import torch
from adapters import lora_files
from ballast.memory.sizes import format_bytes
from ballast.pipelines.files.recognition import is_modular_folder
from ballast.pipelines.models.modular.block_state import restored
from ballast.pipelines.sampling.guider_choice import GUIDERS as NAMED_GUIDERS
from diffusers.models.transformers.transformer_wan_animate_2 import WanAnimate2KVLayerCache
from modular import made_up_blocks, modular_folders, newest
from modular.modular_folders import FAMILIES, REFUSED, Family, as_modular
from pictured import pipelines as pictured
from places import ROOT
from selection import few

Folders = Callable[[str], Path]
PROMPT, NEGATIVE = "a red boat", "blurry, grey"
FAST = ("flux", "wan")
LONG = (
    "flux_image", "klein", "ltx_image", "qwen", "sd3", "zimage", "sdxl", "anima", "flux3", "krea2_turbo",
    "qwen21_turbo", "ernie", "minimax_h3",
)  # fmt: skip
BUDGET = "1GB"


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found out of a pipeline once."""
    return tmp_path_factory.mktemp("modular")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    root = tmp_path_factory.mktemp("modular_folders")

    def folder(name: str) -> Path:
        return root / name if (root / name).is_dir() else modular_folders.save(name, root / name)

    return folder


@dataclass(frozen=True)
class Case:
    """One run of a family, in words of Ballast and of the pipeline's own call."""

    family: Family
    folder: Path
    pipe: Any
    guidance: float | None = None

    @property
    def negative(self) -> str | None:
        return NEGATIVE if self.pipe.takes_negative else None

    @property
    def run(self) -> dict[str, Any]:
        shown = {word: one for word, one in self.family.given().items() if word != "images"}
        run = {
            **self.family.sides(),
            "steps": self.family.steps,
            "frames": self.family.frames,
            **shown,
            **dict(self.family.more),
        }
        return run if self.guidance is None else run | {"guidance": self.guidance}

    def encode(self, prompt: Any = PROMPT) -> Any:
        return self.pipe.encode(prompt, self.negative, images=self.family.given().get("images"))

    def stock(self, prompt: Any = PROMPT, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
        family = self.family
        given = {**family.sides(), **family.stock_pictures(), "prompt": prompt}
        given |= {"num_inference_steps": family.steps} if family.steps else {}
        given |= {family.counts: family.frames} if family.frames else {}
        given |= {"guidance_scale": self.guidance} if self.pipe.distilled and self.guidance else {}
        given |= {"negative_prompt": self.negative} if self.negative else {}
        given |= {"output_type": family.output, **dict(family.more), **more}
        return modular_folders.stock(self.folder, None if self.pipe.distilled else self.guidance, **given)


def opened(name: str, folders: Folders, cache: Path, guidance: float | None = None, **how: Any) -> Case:
    pipe = ballast.open_pipeline(folders(name), cache_dir=cache, **({"device": "sim"} | how))
    return Case(FAMILIES[name], folders(name), pipe, guidance)


def marked(name: str) -> Any:
    mark = pytest.mark.long if name in LONG else pytest.mark.soak
    return name if name in FAST else pytest.param(name, marks=mark)


@pytest.mark.parametrize("name", list(map(marked, FAMILIES)))
def test_stages_equal_its_own_call(name: str, folders: Folders, cache: Path, sim: ModuleType) -> None:
    """Resident and streamed: equal latents and pictures, nothing left, and the peaks that were planned."""
    with pictured.without_videos(), newest.resizing():
        case = opened(name, folders, cache, 4.0 if FAMILIES[name].guides else None)
        latents, pictures = case.stock()
        cond = case.encode()
        assert sim.stats().allocated_bytes == 0
        made = {}
        for strategy in ("resident", "leafwise"):
            sim.reset_stats()
            made[strategy] = case.pipe.sample(cond, strategy=strategy, **case.run)
            assert sim.stats().allocated_bytes == 0
        peak = sim.stats().peak_bytes
        decoded = case.pipe.decode(made["leafwise"])
        assert sim.stats().allocated_bytes == 0
        for mine in made.values():
            torch.testing.assert_close(mine, latents.float(), atol=1e-5, rtol=0)
        rounding = 0.5 / 255 + 1e-5 if case.family.output == "pil" else 1e-5
        torch.testing.assert_close(decoded, pictures, atol=rounding, rtol=0)
        plan = case.pipe.plan(cond=cond, vram=BUDGET, strategy="leafwise", **case.run)
        seen = bool(case.family.pictures) if case.family.sees is None else case.family.sees
        assert ("encode picture" in [stage.name for stage in plan.stages]) == seen
        if not seen:  # else the stage of the picture may be the largest
            assert 0.95 * plan.sampling.peak_vram_bytes <= peak <= plan.sampling.peak_vram_bytes


def test_a_picture_changes_the_result(folders: Folders, cache: Path) -> None:
    """Its strength counts; a run without it is another workflow of the same pipeline."""
    case = opened("flux_image", folders, cache, device="cpu")
    cond, run = case.encode(), case.run
    started, stronger = case.pipe.sample(cond, **run), case.pipe.sample(cond, strength=0.9, **run)
    latents, _ = case.stock(strength=0.9)
    torch.testing.assert_close(stronger, latents.float(), atol=1e-5, rtol=0)
    plain = case.pipe.sample(cond, **{name: value for name, value in run.items() if name != "image"})
    assert not torch.equal(started, stronger) and not torch.equal(started, plain)


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"image": 2}, "takes one image at a time"),
        ({"image": 1, "mask": 1}, "takes no mask"),
        ({"control": 1}, "takes no control"),
        ({"image": 1, "last_image": 1}, "takes no last_image"),
    ],
)
def test_pictures_that_no_block_takes_are_refused(
    given: dict[str, int], reason: str, folders: Folders, cache: Path
) -> None:
    case = opened("flux_image", folders, cache, device="cpu")
    shown = {
        word: torch.rand((count, 32, 48) if word == "mask" else (count, 32, 48, 3)) for word, count in given.items()
    }
    with pytest.raises(ValueError, match=reason) as refused:
        case.pipe.sample(case.encode(), **case.run | {"image": None} | shown)
    assert "\n" not in str(refused.value)


def test_part_of_the_steps_is_refused(folders: Folders, cache: Path) -> None:
    case = opened("flux_image", folders, cache, device="cpu")
    with pytest.raises(TypeError, match="has no argument end_step"):
        case.pipe.sample(case.encode(), **case.run, end_step=1)


@pytest.mark.parametrize(
    ("name", "guidance"), [("flux", 7.0), ("qwen", 1.0), pytest.param("sd3", 2.0, marks=pytest.mark.long)]
)
def test_guidance_is_that_of_its_own_call(name: str, guidance: float, folders: Folders, cache: Path) -> None:
    case = opened(name, folders, cache, guidance, device="cpu")
    latents, _ = case.stock()
    usual, _ = replace(case, guidance=None).stock()
    assert not torch.equal(latents, usual)
    mine = case.pipe.sample(case.encode(), **case.run)
    torch.testing.assert_close(mine, latents.float(), atol=1e-5, rtol=0)


GUIDERS: dict[str, Any] = {
    "apg": functools.partial(diffusers.AdaptiveProjectedGuidance, eta=0.5),
    "cfg_zero_star": diffusers.ClassifierFreeZeroStarGuidance,
    "tcfg": diffusers.TangentialClassifierFreeGuidance,
    "layers skipped": functools.partial(
        diffusers.SkipLayerGuidance, skip_layer_config=diffusers.LayerSkipConfig([1]), skip_layer_guidance_stop=0.7
    ),
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param("sd3", "cfg_zero_star", marks=pytest.mark.soak),
        ("wan", "cfg_zero_star"),
        *(pytest.param("wan", kind, marks=pytest.mark.long) for kind in ("layers skipped", "apg")),
        pytest.param("wan", "tcfg", marks=pytest.mark.soak),
    ],
)
def test_a_guider_is_that_of_its_own_call(name: str, kind: str, folders: Folders, cache: Path, sim: ModuleType) -> None:
    """As an object and by its name, resident and streamed."""
    case, make = opened(name, folders, cache), functools.partial(GUIDERS[kind], guidance_scale=4.0)
    cond = case.encode()

    def latents(guider: Any) -> torch.Tensor:
        return case.stock(prepare=lambda stock: stock.update_components(guider=guider))[0].float()

    expected, usual = latents(make()), case.pipe.sample(cond, **case.run, guidance=4.0)
    assert not torch.allclose(expected, usual, atol=1e-3)
    for strategy in ("resident", "leafwise"):
        made = case.pipe.sample(cond, **case.run, guider=make(), strategy=strategy)
        torch.testing.assert_close(made, expected, atol=1e-5, rtol=0)
        assert sim.stats().allocated_bytes == 0
    assert torch.equal(case.pipe.sample(cond, **case.run, guidance=4.0), usual)
    case.pipe.plan(cond=cond, vram=BUDGET, guider=make(), **case.run)
    if kind in NAMED_GUIDERS:
        made = case.pipe.sample(cond, **case.run, guider=kind, guidance=4.0)
        torch.testing.assert_close(made, latents(type(make())(guidance_scale=4.0)), atol=1e-5, rtol=0)


def test_what_is_no_guider_is_refused(folders: Folders, cache: Path, tiny_folders: Folders) -> None:
    """In one line, by a run and by a plan."""
    modular, cls = opened("qwen", folders, cache).pipe, ballast.open_pipeline(tiny_folders("hunyuan_video15"))
    for pipe in (modular, cls):
        for asked in ("ap", 4.0, diffusers.AdaptiveProjectedGuidance):
            with pytest.raises(
                ValueError, match=r"^guider is [^\n]* it takes cfg, cfg_zero_star, apg, tcfg, or an [^\n]*$"
            ):
                pipe.plan(guider=asked, vram=BUDGET)
    with pytest.raises(TypeError, match="guider"):
        ballast.open_pipeline(tiny_folders("flux")).plan(guider="apg", vram=BUDGET)


def test_a_run_whose_own_call_fails_is_refused(folders: Folders, cache: Path) -> None:
    """Wan's own blocks fail without guidance."""
    case = opened("wan", folders, cache, 1.0, device="cpu")
    with pytest.raises(UnboundLocalError):
        case.stock()
    with pytest.raises(ValueError, match="fail without"):
        case.pipe.sample(case.encode(), **case.run)


def test_several_prompts_and_seeds(folders: Folders, cache: Path) -> None:
    """A list of prompts is that of its own call; `run` and `batch` draw what each seed draws alone."""
    case = opened("flux", folders, cache, device="cpu")
    prompts = [PROMPT, "two small cats"]
    latents, _ = case.stock(list(prompts))
    cond = case.encode(prompts)
    torch.testing.assert_close(case.pipe.sample(cond, **case.run), latents.float(), atol=1e-5, rtol=0)
    alone = [case.pipe.sample(case.encode(p), seed=seed, **case.run) for seed, p in enumerate(prompts)]
    for picture, one in zip(case.pipe.run(prompts, seeds=[0, 1], **case.run), alone, strict=True):
        torch.testing.assert_close(picture, case.pipe.decode(one), atol=1e-5, rtol=0)
    both = case.pipe.sample(case.encode(), batch=2, **case.run)
    assert torch.equal(both[:1], alone[0]) and not torch.equal(both[1], both[0])


def test_once_and_lockstep_keep_the_bits(folders: Folders, cache: Path, sim: ModuleType) -> None:
    case = opened("qwen", folders, cache, 4.0)
    cond = case.encode()
    usual = case.pipe.sample(cond, **case.run)
    for way in ({"once": True}, {"lockstep": True}):
        assert torch.equal(case.pipe.sample(cond, strategy="leafwise", **case.run, **way), usual)


@pytest.mark.parametrize("weights", ["exact12", pytest.param("int8", marks=pytest.mark.long)])
def test_converted_weights(weights: str, folders: Folders, cache: Path, sim: ModuleType) -> None:
    """Without loss the bits are the same; in 8 bits they differ a little."""
    runs = [opened("flux", folders, cache, dtype="bf16", weights=way) for way in ("auto", weights)]
    plain, other = (case.pipe.sample(case.encode(), **case.run) for case in runs)
    assert torch.equal(plain, other) == (weights == "exact12")
    assert (plain - other).abs().max() < 0.1
    assert sim.stats().allocated_bytes == 0


def test_lora_is_that_of_diffusers(folders: Folders, cache: Path, sim: ModuleType, tmp_path: Path) -> None:
    case = opened("flux", folders, cache)
    transformer = diffusers.FluxTransformer2DModel.from_pretrained(case.folder / "transformer")
    path = lora_files.write(tmp_path / "lora.safetensors", lora_files.weights(transformer, 4))

    def load(stock: Any) -> None:
        stock.load_lora_weights(path, adapter_name="one")
        stock.set_adapters(["one"], [0.7])

    latents, _ = case.stock(prepare=load)
    cond = case.encode()
    plain = case.pipe.sample(cond, **case.run)
    case.pipe.set_loras([(path, 0.7)])
    mine = case.pipe.sample(cond, strategy="leafwise", **case.run)
    torch.testing.assert_close(mine, latents.float(), atol=1e-5, rtol=0)
    assert not torch.allclose(mine, plain, atol=1e-3)
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("name", few(REFUSED, "cosmos3", "minimax_music3"))
def test_families_that_cannot_be_staged_are_refused(name: str, folders: Folders, cache: Path) -> None:
    """When they are opened, for the reason that the docs give."""
    with pictured.without_videos(), pytest.raises(ValueError, match=REFUSED[name][1]) as refused:
        ballast.open_pipeline(folders(name), device="cpu", cache_dir=cache)
    assert "\n" not in str(refused.value)


# A family of blocks that no line of Ballast names


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch, tiny_folders: Folders, tmp_path: Path) -> Callable[..., Path]:
    """Return a folder whose index names made-up blocks, as if diffusers had them."""
    for name, kind in vars(made_up_blocks).items():
        if name.endswith(("Blocks", "ModularPipeline")) and isinstance(kind, type):
            monkeypatch.setattr(diffusers, name, kind, raising=name in vars(diffusers))

    def folder(blocks: str = "MadeUpBlocks") -> Path:
        return as_modular(tiny_folders("pixart_sigma"), tmp_path / blocks, "MadeUpModularPipeline", blocks)

    return folder


def test_a_new_family_opens(made_up: Callable[..., Path], cache: Path, sim: ModuleType) -> None:
    folder = made_up()
    pipe = ballast.open_pipeline(folder, device="sim", cache_dir=cache)
    latents, pictures = modular_folders.stock(folder, prompt=PROMPT, width=48, height=32, longest=24)
    cond = pipe.encode(PROMPT, longest=24)
    mine = pipe.sample(cond, width=48, height=32, strategy="leafwise")
    assert pipe.default_steps == 3
    torch.testing.assert_close(mine, latents, atol=1e-5, rtol=0)
    torch.testing.assert_close(pipe.decode(mine), pictures, atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    with pytest.raises(TypeError, match="has no argument colour"):
        pipe.sample(cond, colour="red")
    with pytest.raises(TypeError, match="Give it to encode"):
        pipe.sample(cond, longest=24)
    with pytest.raises(ValueError, match="takes no guidance"):
        pipe.sample(cond, guidance=3.0)


@pytest.mark.parametrize("guidance", [None, 1.0, 5.0])
def test_a_new_family_is_guided_as_its_own_call(
    guidance: float | None, made_up: Callable[..., Path], cache: Path
) -> None:
    """What only a guided run encodes does not reach one without guidance."""
    folder = made_up("GuidedBlocks")
    pipe = ballast.open_pipeline(folder, device="cpu", cache_dir=cache)
    run = {"width": 48, "height": 32}
    latents, _ = modular_folders.stock(folder, guidance, prompt=PROMPT, negative_prompt=NEGATIVE, **run)
    mine = pipe.sample(pipe.encode(PROMPT, NEGATIVE), guidance=guidance, **run)
    torch.testing.assert_close(mine, latents, atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("blocks", "reason"),
    [
        ("DarkBlocks", "its call changes what its VAE decodes"),
        ("RereadingBlocks", "its text_encoder"),
        pytest.param(
            "HandingBlocks",
            "its blocks pass palette on from encoding to sampling, as object",
            marks=pytest.mark.long,
        ),
        ("WordlessBlocks", "no blocks that encode a prompt"),
        ("UndecodedBlocks", "decodes with no vae"),
    ],
)
def test_blocks_that_cannot_run_in_stages_are_refused(
    blocks: str, reason: str, made_up: Callable[..., Path], cache: Path
) -> None:
    with pytest.raises(ValueError, match=reason) as refused:
        ballast.open_pipeline(made_up(blocks), device="cpu", cache_dir=cache)
    assert "\n" not in str(refused.value)


def test_a_block_that_rewrites_the_prompt_may_lack_its_model(made_up: Callable[..., Path], cache: Path) -> None:
    """As FLUX.3's upsampler, which lies in a repository of its own. The prompt is encoded as given."""
    run = {"width": 48, "height": 32}
    plain, rewriting = (
        ballast.open_pipeline(made_up(blocks), device="cpu", cache_dir=cache)
        for blocks in ("MadeUpBlocks", "RewritingBlocks")
    )
    assert torch.equal(plain.sample(plain.encode(PROMPT), **run), rewriting.sample(rewriting.encode(PROMPT), **run))


def test_blocks_may_call_parts_of_an_encoder(made_up: Callable[..., Path], cache: Path, sim: ModuleType) -> None:
    """As those of Ideogram 4 call its layers one by one. Their weights come as they do when the whole is called."""
    folder, run = made_up("PartlyReadingBlocks"), {"width": 48, "height": 32}
    latents, _ = modular_folders.stock(folder, prompt=PROMPT, **run)
    pipe = ballast.open_pipeline(folder, device="sim", cache_dir=cache)
    cond = pipe.encode(PROMPT)
    assert sim.stats().allocated_bytes == 0
    torch.testing.assert_close(pipe.sample(cond, **run), latents, atol=1e-5, rtol=0)


@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "given", "words"),
    [
        ("helios", {"frames": 37}, "give at most 33, which are one section"),
        ("wan_animate2", {"frames": 5}, "video has 9 frames, and frames is 5"),
        ("wan_animate2", {"width": 48, "height": 48}, "keeps the picture's shape"),
    ],
)
def test_what_stages_would_cut_is_refused(
    name: str, given: dict[str, int], words: str, folders: Folders, cache: Path
) -> None:
    """A video of several sections, each decoded while the next is drawn, and pictures of another shape."""
    case = opened(name, folders, cache, 4.0, device="cpu")
    with pytest.raises(ValueError, match=words) as refused:
        case.pipe.sample(case.encode(), **case.run | given)
    assert "\n" not in str(refused.value)


@pytest.mark.long
def test_a_plan_counts_keys_and_values_of_the_reference_in_ram(folders: Folders, cache: Path) -> None:
    """Of 3 frames of 4 x 2 tokens, 24 wide, in float32, for each of 11 layers."""
    nbytes = 11 * 2 * (3 * 4 * 2) * 24 * 4
    with pictured.without_videos(), newest.resizing():
        case = opened("wan_animate2", folders, cache)
        plan = case.pipe.plan(cond=case.encode(), **case.run, vram=BUDGET)
    assert f"Sampling keeps {format_bytes(nbytes)} in RAM beside the weights." in str(plan)


@pytest.mark.soak
def test_keys_and_values_of_the_reference_count_in_ram(
    folders: Folders, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plan tells their bytes, those of the run, and leaves the rest of RAM to weights; so does the run."""
    kept, left, store = [], [], WanAnimate2KVLayerCache.store

    def storing(layer: WanAnimate2KVLayerCache, key: torch.Tensor, value: torch.Tensor) -> None:
        if key.is_contiguous():  # in a dry run it takes no bytes
            kept.append(key.nbytes + value.nbytes)
            left.append(case.pipe.runner.manager.budget.ram_bytes)
        store(layer, key, value)

    with pictured.without_videos(), newest.resizing():
        case = opened("wan_animate2", folders, cache, ram="1GB")
        cond = case.encode()
        monkeypatch.setattr(WanAnimate2KVLayerCache, "store", storing)
        case.pipe.sample(cond, **case.run)
        assert kept and set(left) == {2**30 - sum(kept)}
        plan = case.pipe.plan(cond=cond, **case.run, vram=BUDGET)
        short = case.pipe.plan(cond=cond, **case.run, vram=BUDGET, ram=sum(kept))
    told = f"{format_bytes(sum(kept))} of its own in RAM"
    assert [stage.note for stage in plan.stages if stage.name == "sample"] == [told]
    assert f"Sampling keeps {format_bytes(sum(kept))} in RAM beside the weights." in str(plan)
    assert not short.samples and "0 B of RAM" in short.reason


def test_a_dtype_crosses_the_stages(made_up: Callable[..., Path], cache: Path) -> None:
    """As that of LTX-2's text encoder, which its decoder takes."""
    pipe = ballast.open_pipeline(made_up("DtypeBlocks"), device="cpu", cache_dir=cache)
    cond = pipe.encode(PROMPT)
    assert restored(cond, torch.device("cpu"))["dtype"] == torch.float32
    pipe.sample(cond, width=48, height=32)


def test_a_pipeline_that_may_choose_its_frames_is_told_them(folders: Folders, cache: Path) -> None:
    """LTX-2 has blocks that predict how long a video is; a run that says so does not run them."""
    case = opened("ltx2", folders, cache, device="cpu")
    with pytest.raises(ValueError, match="Set frames") as refused:
        case.pipe.plan(**case.run | {"frames": None})
    assert "\n" not in str(refused.value)


# Folders


def changed(folder: Path, **entries: Any) -> Path:
    path = folder / "modular_model_index.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | entries), encoding="utf-8")
    return folder


@pytest.mark.parametrize(
    ("entries", "error", "words"),
    [
        ({"_class_name": "Unheard"}, ValueError, "names the pipeline 'Unheard'"),
        ({"_class_name": "FluxPipeline"}, ValueError, "names the pipeline 'FluxPipeline'"),
        ({"vae": [None, None, {"type_hint": ["diffusers", "AutoencoderKL"]}]}, FileNotFoundError, "has no vae/"),
        (
            {"vae": [None, None, {"type_hint": ["diffusers", "AutoencoderKL"], "subfolder": "../vae"}]},
            ValueError,
            "outside its folder",
        ),
        ({"vae": ["os", "system", {"subfolder": "vae"}]}, ValueError, "Other code is never loaded"),
    ],
)
def test_bad_indices(
    entries: dict[str, Any], error: type[Exception], words: str, tiny_folders: Folders, tmp_path: Path
) -> None:
    folder = changed(as_modular(tiny_folders("flux"), tmp_path / "flux", "FluxModularPipeline"), **entries)
    with pytest.raises(error, match=re.escape(words)) as refused:
        ballast.open_pipeline(folder, device="cpu")
    assert "\n" not in str(refused.value)


_OTHER = ({"image_latents": torch.zeros(1)}, {"output_type": "np"})  # selects other blocks; has no effect


def test_what_is_not_offered_is_refused(folders: Folders, cache: Path) -> None:
    case = opened("flux", folders, cache, device="cpu")
    cond = case.encode()
    for given in ({"noise": torch.zeros(1, 6, 16)}, {"scheduler": "unipc"}, {"width": 50}, *_OTHER):
        with pytest.raises((TypeError, ValueError)) as refused:
            case.pipe.sample(cond, **case.run | given)
        assert "\n" not in str(refused.value)


def test_options_that_change_decoded_pictures_are_refused(folders: Folders, cache: Path) -> None:
    """With a crop, its blocks paste the result into the picture after the VAE."""
    case = opened("qwen_inpaint", folders, cache, device="cpu")
    with pytest.raises(TypeError, match="has no argument padding_mask_crop"):
        case.pipe.sample(case.encode(), padding_mask_crop=8, **case.run)


def test_a_folder_of_both_kinds_opens_as_its_class(tiny_folders: Folders, tmp_path: Path) -> None:
    folder = as_modular(tiny_folders("flux"), tmp_path / "flux", "FluxModularPipeline")
    index = (tiny_folders("flux") / "model_index.json").read_text(encoding="utf-8")
    (folder / "model_index.json").write_text(index, encoding="utf-8")
    assert not is_modular_folder(folder)
    (folder / "model_index.json").unlink()
    assert is_modular_folder(folder)


@pytest.mark.parametrize("page", ["docs/pipelines.md", "docs/zh/pipelines.md"])
def test_the_docs_have_every_workflow_that_is_tested(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if "ModularPipeline` | `" in line]
    assert rows == modular_folders.rows() + modular_folders.refused_rows()
