"""ControlNets: strength, part of the steps, several, and single files, equal to the stock pipelines."""

from __future__ import annotations

import inspect
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import diffusers
import pytest
import tiny
import torch
from ballast.memory import manager
from ballast.memory.rates import Rates
from ballast.pipelines.sampling.control import Control
from diffusers import DiffusionPipeline
from pictured import pipelines as tiny_pictured
from pictured.pictures import mask, picture, pil
from pipeline_classes import odd_pipelines
from safetensors.torch import load_file, save_file
from selection import few

Folders = Callable[[str], Path]
WIDTH, HEIGHT, STEPS, SEED = 48, 32, 5, 3
ONE, OTHER, IMAGE, MASK = (*(picture(WIDTH, HEIGHT, seed) for seed in range(3)), mask(WIDTH, HEIGHT))
SIZE: dict[str, Any] = {"width": WIDTH, "height": HEIGHT}
# The settings of a run: of `sample`, and of the stock call.
SETTINGS = {
    "whole": ({}, {}),
    "none": ({"control_strength": 0}, {"controlnet_conditioning_scale": 0.0}),
    "half": ({"control_strength": 0.5}, {"controlnet_conditioning_scale": 0.5}),
    "early": ({"control_range": (0.0, 0.6)}, {"control_guidance_end": 0.6}),
    "late": (
        {"control_strength": 0.8, "control_range": (0.3, 1.0)},
        {"controlnet_conditioning_scale": 0.8, "control_guidance_start": 0.3},
    ),
    "middle": ({"control_range": (0.3, 0.7)}, {"control_guidance_start": 0.3, "control_guidance_end": 0.7}),
}
PLAIN = {"flux_controlnet": "FluxPipeline", "sd3_controlnet": "StableDiffusion3Pipeline"}
PLAIN["qwen_controlnet"] = "QwenImagePipeline"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_folders: Folders) -> Folders:
    return tiny_pictured.folders_in(tmp_path_factory.mktemp("control"), tiny_folders)


@pytest.fixture(scope="module")
def apart(folders: Folders, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A pipeline without its ControlNet, and that, by the name of both together."""
    root = tmp_path_factory.mktemp("apart")

    def parts(name: str) -> tuple[Path, Path]:
        if not (plain := root / name).is_dir():
            shutil.copytree(folders(name), plain)
            shutil.move(plain / "controlnet", root / f"{name}_net")
            index = json.loads((plain / "model_index.json").read_text("utf-8"))
            del index["controlnet"]
            (plain / "model_index.json").write_text(json.dumps(index | {"_class_name": PLAIN[name]}))
        return plain, root / f"{name}_net"

    return parts


def file_of(net: Path, at: Path) -> Path:
    """The weights of a ControlNet's folder alone, with diffusers' names, as people have them."""
    return Path(shutil.copy(net / "diffusion_pytorch_model.safetensors", at))


def stock(folder: Path, cls: str | None = None, nets: Any = None, **given: Any) -> torch.Tensor:
    """What the unmodified class makes, whole, on the CPU."""
    pipe: Any = DiffusionPipeline.from_pretrained(folder, local_files_only=True)
    kind = getattr(diffusers, cls) if cls else type(pipe)
    takes = inspect.signature(kind.__init__).parameters
    parts = {k: v for k, v in pipe.components.items() if k in takes}
    pipe = kind(**parts | ({"controlnet": nets} if nets is not None else {}))
    pipe.set_progress_bar_config(disable=True)
    generator = torch.Generator("cpu").manual_seed(SEED)
    torch.manual_seed(SEED)  # by which Stable Diffusion 3 encodes the picture
    given = {"control_image": pil(ONE), "num_inference_steps": STEPS, **SIZE, **given, "generator": generator}
    given = {name: value for name, value in given.items() if value is not None}
    return torch.as_tensor(pipe(prompt="a boat", output_type="np", **given).images).float()


def made(pipe: Any, cond: Any = None, **given: Any) -> torch.Tensor:
    given = {"control": ONE, "steps": STEPS, "seed": SEED, **SIZE, **given}
    result: torch.Tensor = pipe.decode(pipe.sample(cond or pipe.encode("a boat"), **given))
    return result


def same(one: torch.Tensor, other: torch.Tensor) -> None:
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def seen_calls(unit: str) -> int:
    stage = next(stage for stage in reversed(manager("sim").timeline.stages) if stage.name == "sample")
    return sum(event.unit == unit and event.kind == "ran" for event in stage.events)


@pytest.mark.parametrize(
    ("name", "all_words"),
    [
        ("flux_controlnet", ["middle"]),
        pytest.param("qwen_controlnet", ["late", "middle"], marks=pytest.mark.long),
        *(pytest.param(n, list(SETTINGS), marks=pytest.mark.soak) for n in PLAIN),
    ],
)
def test_strength_and_part_of_the_steps_equal_stock(
    name: str, all_words: list[str], folders: Folders, sim: ModuleType
) -> None:
    pipe = ballast.open_pipeline(folders(name), device="sim")
    cond, whole = pipe.encode("a boat"), stock(folders(name))
    for words in all_words:
        ours, theirs = SETTINGS[words]
        expected = stock(folders(name), **theirs)
        assert words == "whole" or not torch.equal(expected, whole), f"{words} changes nothing"
        for strategy in ("resident", "streamed"):
            same(made(pipe, cond, strategy=strategy, **ours), expected)
            assert sim.stats().allocated_bytes == 0


@pytest.mark.long
@pytest.mark.parametrize("cls", ["FluxControlNetImg2ImgPipeline", "FluxControlNetInpaintPipeline"])
def test_from_a_picture_equals_stock(cls: str, folders: Folders, sim: ModuleType) -> None:
    """Steps are then counted in those that run."""
    folder = folders("flux_controlnet")
    given: dict[str, Any] = {"image": IMAGE, "strength": 0.8}
    theirs: dict[str, Any] = {"image": pil(IMAGE), "strength": 0.8}
    if "Inpaint" in cls:
        given, theirs = given | {"mask": MASK}, theirs | {"mask_image": pil(MASK)}
    pipe = ballast.open_pipeline(folder, device="sim")
    for words in ("none", "half", "middle")[0 if os.environ.get("BALLAST_SOAK") else 1 :]:
        ours, own = SETTINGS[words]
        same(made(pipe, **given, **ours), stock(folder, cls, **theirs, **own))


SEVERAL: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "whole": ({}, {"controlnet_conditioning_scale": [1.0, 1.0]}),
    "weak": ({"control_strength": [0.5, 0.9]}, {"controlnet_conditioning_scale": [0.5, 0.9]}),
    "one": ({"control_strength": [0, 0.9]}, {"controlnet_conditioning_scale": [0.0, 0.9]}),
    "in turn": (
        {"control_range": [(0.0, 0.4), (0.6, 1.0)]},
        {
            "controlnet_conditioning_scale": [1.0, 1.0],
            "control_guidance_start": [0.0, 0.6],
            "control_guidance_end": [0.4, 1.0],
        },
    ),
}


@pytest.mark.parametrize(
    ("name", "all_words"),
    [
        pytest.param("flux_controlnet", ["one", "in turn"], marks=pytest.mark.long),
        pytest.param("sd3_controlnet", list(SEVERAL), marks=pytest.mark.long),
        pytest.param("flux_controlnet", list(SEVERAL), marks=pytest.mark.soak),
    ],
)
def test_several_equal_stock(
    name: str,
    all_words: list[str],
    apart: Callable[[str], tuple[Path, Path]],
    folders: Folders,
    sim: ModuleType,
    tmp_path: Path,
) -> None:
    """Each with a strength and a part of its own; the first is over before the second begins."""
    plain, net = apart(name)
    second = shutil.copytree(net, tmp_path / "second")
    weights = load_file(net / "diffusion_pytorch_model.safetensors")
    changed = {key: value * 1.25 for key, value in weights.items()}
    save_file(changed, second / "diffusion_pytorch_model.safetensors", {"format": "pt"})
    kind = getattr(diffusers, json.loads((net / "config.json").read_text("utf-8"))["_class_name"])
    nets = [kind.from_pretrained(each) for each in (net, second)]
    both = {"control_image": [pil(ONE), pil(OTHER)]}
    pipe = ballast.open_pipeline(plain, device="sim", controlnet=[net, second])
    assert [unit.name for unit in pipe.denoisers][-2:] == ["controlnet", "controlnet_2"]
    for ours, theirs in map(SEVERAL.__getitem__, all_words):
        expected = stock(folders(name), nets=nets, **both, **theirs)
        same(made(pipe, control=[ONE, OTHER], **ours), expected)
    assert (seen_calls("controlnet"), seen_calls("controlnet_2")) == (2, 2)
    with pytest.raises(ValueError, match="follows 2 pictures with its ControlNets, and control has 1"):
        made(pipe)
    assert sim.stats().allocated_bytes == 0


@pytest.mark.long
def test_one_follows_several_pictures(apart: Callable[[str], tuple[Path, Path]], folders: Folders, sim: ModuleType
                                      ) -> None:  # fmt: skip
    """A union ControlNet, which is loaded once."""
    plain, net = apart("qwen_controlnet")
    nets = diffusers.QwenImageMultiControlNetModel([diffusers.QwenImageControlNetModel.from_pretrained(net)])
    pipe = ballast.open_pipeline(plain, device="sim", controlnet=[net, net])
    expected = stock(folders("qwen_controlnet"), nets=nets, control_image=[pil(ONE), pil(OTHER)],
                     controlnet_conditioning_scale=[0.5, 0.9], control_guidance_start=[0.0, 0.6],
                     control_guidance_end=[0.4, 1.0])  # fmt: skip
    ours = {"control_strength": [0.5, 0.9], "control_range": [(0.0, 0.4), (0.6, 1.0)]}
    same(made(pipe, control=[ONE, OTHER], **ours), expected)
    assert seen_calls("controlnet") == 4


@pytest.mark.parametrize(
    "name",
    [
        "flux_controlnet",
        pytest.param("sd3_controlnet", marks=pytest.mark.soak),
        pytest.param("qwen_controlnet", marks=pytest.mark.soak),
    ],
)
def test_a_single_file_is_its_folder(name: str, apart: Callable[[str], tuple[Path, Path]], sim: ModuleType,
                                     tmp_path: Path) -> None:  # fmt: skip
    plain, net = apart(name)
    file = file_of(net, tmp_path / "union.safetensors")
    (whole, alone) = (ballast.open_pipeline(plain, device="sim", controlnet=each) for each in (net, file))
    cond = ballast.open_pipeline(plain, device="sim").encode("a boat")  # the prompt is the model's, with it or without
    assert torch.equal(made(whole, cond, steps=2), made(alone, cond, steps=2))
    configs = [pipe.model.components["controlnet"].config for pipe in (whole, alone)]
    built = [dict(pipe.denoisers[-1].module.config) for pipe in (whole, alone)]
    told = {key: value for key, value in built[1].items() if not key.startswith("_")}
    assert {key: built[0][key] for key in told} == told, configs


def test_other_files_are_refused_in_a_line(apart: Callable[[str], tuple[Path, Path]], tmp_path: Path) -> None:
    plain, net = apart("flux_controlnet")
    weights = load_file(net / "diffusion_pytorch_model.safetensors")
    known = "Known are FLUX.1, Qwen-Image, Stable Diffusion 3"
    cases: dict[str, tuple[dict[str, torch.Tensor], str]] = {
        "xlabs": ({"double_blocks.0.img_attn.qkv.weight": torch.zeros(3, 1)}, f"holds no ControlNet.*{known}"),
        "z_image": ({"control_all_x_embedder.2-1.weight": torch.zeros(3, 1)}, f"holds no ControlNet.*{known}"),
        "cut": ({k: v for k, v in weights.items() if k != "controlnet_blocks.0.bias"}, "lacks 1 weights"),
        "more": (weights | {"lora.weight": torch.zeros(1)}, "no place for"),
        "sd3": ({"pos_embed_input.proj.weight": torch.zeros(4, 4, 2, 2), "controlnet_blocks.0.weight": torch.zeros(1)},
                "is for SD3, not for FluxPipeline"),
    }  # fmt: skip
    for name, (tensors, words) in cases.items():
        save_file(tensors, tmp_path / f"{name}.safetensors")
        with pytest.raises(ValueError, match=words) as raised:
            ballast.open_pipeline(plain, device="cpu", controlnet=tmp_path / f"{name}.safetensors")
        assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    "range_", [(0.25, 0.75), *(pytest.param(r, marks=pytest.mark.soak) for r in ((0, 0.5), (0.5, 1)))]
)
def test_one_whose_share_is_over_leaves(range_: tuple[float, float], folders: Folders, sim: ModuleType) -> None:
    """It is not called outside of it, comes no sooner and is evicted; the plan counts its calls."""
    pipe = ballast.open_pipeline(folders("flux_controlnet"), device="sim")
    cond, rates = pipe.encode("a boat"), Rates(1e7, 1e7, 1e9, 1e12)
    given: dict[str, Any] = {"control": ONE, "steps": 8, **SIZE}
    pipe.sample(cond, control_range=range_, **given)
    stage = manager("sim").timeline.stages[-1]
    active = Control((None,), (range_,)).steps(0, 8)
    assert seen_calls("controlnet") == len(active)
    step, held = -1, dict[int, bool]()
    for event in stage.events:
        step += event.unit == "transformer" and event.kind == "call"
        if event.unit == "transformer" and event.kind == "ran":
            held[step] = any(resident.name == "controlnet" for resident in event.residents)
    assert [at for at, there in held.items() if there] == active
    sampled = [next(s for s in pipe.plan(cond=cond, rates=rates, vram="64MB", **given, **more).stages
                    if s.name == "sample") for more in ({}, {"control_range": range_})]  # fmt: skip
    whole, part = ({unit.unit: unit for unit in each.units} for each in sampled)
    assert stage.peak_bytes <= sampled[1].peak_vram_bytes
    assert part["transformer"].step_seconds == pytest.approx(whole["transformer"].step_seconds)
    assert part["controlnet"].step_seconds == pytest.approx(
        whole["controlnet"].step_seconds * len(active) / 8, rel=0.05
    )


@pytest.mark.long
@pytest.mark.parametrize("vram", few([1_220_000, 1_700_000], 1_220_000))
def test_it_runs_in_part_of_the_steps_in_any_budget(vram: int, folders: Folders, sim: ModuleType) -> None:
    """Also where both take turns, and with what is computed once."""
    whole = ballast.open_pipeline(folders("flux_controlnet"), device="sim")
    cond, pipe = whole.encode("a boat"), whole.within(vram=vram)
    given: dict[str, Any] = {"control": ONE, "steps": 6, "control_range": (0.2, 0.7), "control_strength": 0.7, **SIZE}
    expected = whole.sample(cond, **given)
    for more in ({}, {"once": True}, {"lockstep": True}, {"strategy": "leafwise"}):
        assert torch.equal(pipe.sample(cond, **given, **more), expected), more
    assert sim.stats().allocated_bytes == 0


def test_what_is_not_taken_is_told_in_a_line(
    folders: Folders, tiny_folders: Folders, apart: Callable[[str], tuple[Path, Path]], sim: ModuleType
) -> None:
    pipe, plain = (
        ballast.open_pipeline(each, device="sim") for each in (folders("flux_controlnet"), tiny_folders("flux"))
    )
    sana = ballast.open_pipeline(folders("flux_control"), device="sim")
    for which, given, words in (
        (plain, {"control": None, "control_strength": 0.5}, "control_strength: .* runs without a ControlNet here"),
        (sana, {"control_range": (0.0, 0.5)}, "control_range: .* runs without a ControlNet here"),
        (pipe, {"control_strength": "much"}, "control_strength is 'much'; it takes a number"),
        (pipe, {"control_strength": [1, 1]}, "it takes a number, such as 0.7"),
        (pipe, {"control_range": (0.6, 0.2)}, "it takes where it starts and ends"),
        (pipe, {"control_strength": 1, "controlnet_conditioning_scale": 1.0}, "Give one of them"),
        (pipe, {"control_mode": 1}, "control_mode is for a union ControlNet"),
        (pipe, {"control_range": (0.0, 0.5), "end_step": 2}, "do not go together with control_range"),
        (pipe, {"cache": "static:2"}, "cache does not go together with a ControlNet"),
    ):
        with pytest.raises(ValueError, match=words) as raised:
            made(which, **given)
        assert "\n" not in str(raised.value)


@pytest.mark.long
def test_stable_diffusion_calls_it_image(sim: ModuleType, tmp_path: Path) -> None:
    """Its ControlNets follow `control` as others do, and start from `image` beside it."""
    tiny.seeded(odd_pipelines.sdxl)().save_pretrained(tmp_path / "sdxl")
    plain = DiffusionPipeline.from_pretrained(tmp_path / "sdxl")
    torch.manual_seed(0)
    net = diffusers.ControlNetModel.from_unet(
        plain.unet, conditioning_embedding_out_channels=(4,) * len(plain.vae.config.block_out_channels)
    )
    for parameter in net.parameters():
        parameter.data = torch.randn_like(parameter) * 0.1
    net.save_pretrained(tmp_path / "net")
    pipe = ballast.open_pipeline(tmp_path / "sdxl", device="sim", controlnet=tmp_path / "net")
    cond, given = pipe.encode("a boat"), {"width": 64, "height": 64}
    ours, theirs = {"control_strength": 0.5, "control_range": (0.0, 0.6), **given}, {**given}
    theirs |= {"controlnet_conditioning_scale": 0.5, "control_guidance_end": 0.6}
    followed = picture(64, 64)
    expected = stock(tmp_path / "sdxl", "StableDiffusionXLControlNetPipeline", net, image=pil(followed),
                     control_image=None, **theirs)  # fmt: skip
    same(made(pipe, cond, control=followed, **ours), expected)
    started = {"image": picture(64, 64, 1), "strength": 0.8}
    expected = stock(tmp_path / "sdxl", "StableDiffusionXLControlNetImg2ImgPipeline", net, image=pil(started["image"]),
                     strength=0.8, control_image=pil(followed), **theirs)  # fmt: skip
    same(made(pipe, cond, control=followed, **started, **ours), expected)


@pytest.mark.long
def test_a_union_is_told_what_its_picture_shows(
    apart: Callable[[str], tuple[Path, Path]], folders: Folders, sim: ModuleType, tmp_path: Path
) -> None:
    plain, net = apart("flux_controlnet")
    config = json.loads((net / "config.json").read_text("utf-8"))
    torch.manual_seed(0)
    union = diffusers.FluxControlNetModel.from_config(config | {"num_mode": 3})
    state = load_file(net / "diffusion_pytorch_model.safetensors")
    union.load_state_dict(state, strict=False)
    union.save_pretrained(tmp_path / "union")
    file = file_of(tmp_path / "union", tmp_path / "union.safetensors")
    pipe = ballast.open_pipeline(plain, device="sim", controlnet=file)
    with pytest.raises(ValueError, match="a number from 0 to 2"):
        made(pipe)
    for mode in (0, 2):
        same(made(pipe, control_mode=mode), stock(folders("flux_controlnet"), nets=union, control_mode=mode))
