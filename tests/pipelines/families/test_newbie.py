"""NewBie: its transformer and its loop against the reference numbers, and its three layouts."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import newbie_folders
import pytest
import torch
from ballast.memory import manager
from ballast.pipelines.files.checkpoint import Checkpoint
from ballast.pipelines.models.newbie.sampling import euler, guide, midpoint, start, times
from ballast.pipelines.models.newbie.sizes import config_of
from ballast.pipelines.models.newbie.transformer import NewbieTransformer2DModel, transformer_names
from diffusers.models.attention_dispatch import dispatch_attention_fn
from newbie_folders import DATA
from safetensors.torch import load_file, save_file
from selection import few

PROMPT = "<character_1>\n<n>mika</n>\n<appearance>red boat</appearance>\n</character_1>"
RUN = {"width": 64, "height": 48, "steps": 3, "guidance": 4.0}


def relative(ours: torch.Tensor, golden: torch.Tensor) -> float:
    return float((ours - golden).abs().max() / golden.abs().max())


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(DATA / "forward_and_trajectory.safetensors")


def checkpoint(file: Path) -> Checkpoint:
    config = config_of(json.loads((DATA / "transformer.config.json").read_text("utf-8")))
    return Checkpoint(
        "transformer",
        "transformer",
        (file,),
        lambda: NewbieTransformer2DModel(**config),
        lambda stored: transformer_names(stored, config),
        torch.float32,
    )


@pytest.fixture(scope="module")
def transformer() -> Any:
    unit = checkpoint(DATA / "transformer.safetensors").unit("golden")
    unit.load()
    return unit.module


# Against the reference


def test_forward_is_the_references(transformer: Any, golden: dict[str, torch.Tensor]) -> None:
    """Two prompts of different lengths at different times."""
    given = [golden[name] for name in ("x", "t", "cap_feats", "cap_mask", "clip_text_pooled")]
    with torch.inference_mode():
        velocity = transformer(*given, return_dict=False)[0]
    assert relative(velocity, golden["velocity"]) <= 1e-4


def test_trajectory_is_the_references(transformer: Any, golden: dict[str, torch.Tensor]) -> None:
    schedule = times(6, 6.0)
    torch.testing.assert_close(1 - torch.tensor(schedule), golden["sigmas"], atol=1e-6, rtol=0)

    def velocity(x: torch.Tensor, time: float) -> torch.Tensor:
        at = torch.tensor([time])
        found = []
        for sign in ("positive", "negative"):
            text = golden[f"{sign}_cap"]
            whole = torch.ones(text.shape[:2], dtype=torch.int64)
            found.append(transformer(x, at, text, whole, golden[f"{sign}_pooled"], return_dict=False)[0])
        return guide(found[0], found[1], 4.5, 0.0)

    with torch.inference_mode():
        *_, (last, _) = euler(velocity, golden["noise"], schedule)
    assert relative(last, golden["euler6_shift6_cfg4_5"]) <= 1e-4


def test_pipeline_draws_the_references_trajectory(
    folder: Path, golden: dict[str, torch.Tensor], sim: ModuleType, tmp_path: Path
) -> None:
    """The whole sampling stage, with the golden weights and embeddings, the negative prompt shorter than the prompt."""
    copied = Path(shutil.copytree(folder, tmp_path / "golden"))
    shutil.copy(DATA / "transformer.safetensors", copied / "transformer" / "diffusion_pytorch_model.safetensors")
    config = json.loads((DATA / "transformer.config.json").read_text("utf-8"))
    newbie_folders.write_json(copied / "transformer" / "config.json", config | {"axes_lens": [1024, 32, 32]})
    pipe: Any = ballast.open_pipeline(copied, device="sim")
    named = {}
    for sign, ours in (("positive", ""), ("negative", "negative_")):
        text = golden[f"{sign}_cap"]
        named[f"{ours}prompt_embeds"] = text
        named[f"{ours}prompt_attention_mask"] = torch.ones(text.shape[:2], dtype=torch.int64)
        named[f"{ours}pooled_prompt_embeds"] = golden[f"{sign}_pooled"]
    cond = type(pipe.encode("a"))(named, {})
    latents = pipe.sample(cond, 64, 64, steps=6, guidance=4.5, noise=golden["noise"])
    expected = golden["euler6_shift6_cfg4_5"] / 0.3611 + 0.1159
    assert relative(latents, expected) <= 1e-4


# Layouts


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return newbie_folders.official(tmp_path_factory.mktemp("newbie") / "NewBie-image-Exp0.1")


@pytest.fixture(scope="module")
def layouts(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Path]]]:
    root = tmp_path_factory.mktemp("layouts")
    files = newbie_folders.split_files(root / "models", folder)
    return {
        "official": (folder, {}),
        "diffusers": (newbie_folders.diffusers_style(root / "NewBie-Diffusers", folder), {}),
        "split": (files.pop("transformer"), files),
    }


def open_layout(path: Path, files: dict[str, Path], device: str = "sim", **more: Any) -> Any:
    pipe = ballast.open_pipeline(path, device=device, **files, **more)
    if files:  # tokenizers inside files of weights have tests of their own
        from tiny_parts import tokenizer

        pipe.model._tokenizers = {"gemma": tokenizer(), "jina": tokenizer()}
    return pipe


@pytest.fixture(scope="module")
def picture(layouts: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    pipe = open_layout(*layouts["official"], device="cpu", cache_dir=tmp_path_factory.mktemp("expected"))
    return pipe.decode(pipe.sample(pipe.encode(PROMPT, "blurry"), **RUN))


@pytest.mark.parametrize("layout", few(["official", "diffusers", "split"], "diffusers", "split"))
def test_layouts_give_the_same_picture(
    layout: str, layouts: dict[str, Any], picture: torch.Tensor, sim: ModuleType, tmp_path: Path
) -> None:
    """Each is loaded whole, in each stage nothing is left, and no weight is copied back."""
    assert picture.shape == (1, 48, 64, 3) and picture.std() > 0.01
    pipe = open_layout(*layouts[layout], cache_dir=tmp_path / layout)
    cond = pipe.encode(PROMPT, "blurry")
    assert sim.stats().allocated_bytes == 0
    latents = pipe.sample(cond, **RUN)
    assert sim.stats().allocated_bytes == 0
    torch.testing.assert_close(pipe.decode(latents), picture, atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    for unit in (*pipe.encoders, *pipe.denoisers, pipe.decoder):
        assert unit.source() is not None, "read straight from its files"


def test_official_folder_with_jinas_adapters(folder: Path, layouts: dict[str, Any], tmp_path: Path) -> None:
    """As Jina publishes its tower: each matrix with an adapter beside it. These add nothing, so nothing changes."""
    copied = Path(shutil.copytree(folder, tmp_path / "adapted"))
    file = copied / "clip_model" / "model.safetensors"
    plain, found = load_file(file), {"logit_scale": torch.zeros(())}
    for name, weight in plain.items():
        full = f"text_model.transformer.roberta.{name}"
        if weight.ndim < 2:
            found[full] = weight
            continue
        stem, _, _ = full.rpartition(".")
        found[f"{stem}.parametrizations.weight.original"] = weight
        (rows, columns), rank = weight.shape, 2
        shapes = ((rows, rank), (rank, columns)) if "_embeddings" in name else ((rank, columns), (rows, rank))
        found[f"{stem}.parametrizations.weight.0.lora_A"] = torch.ones(5, *shapes[0])
        found[f"{stem}.parametrizations.weight.0.lora_B"] = torch.zeros(5, *shapes[1])
    save_file(found, file)
    expected, adapted = (
        open_layout(path, {}, device="cpu", cache_dir=tmp_path / path.name) for path in (folder, copied)
    )
    cond, other = (pipe.encode(PROMPT, "blurry") for pipe in (expected, adapted))
    for name, value in cond.tensors.items():
        torch.testing.assert_close(other.tensors[name], value, atol=1e-6, rtol=0)
    assert adapted.plan(width=64, height=48, vram="64MB").fits


def test_vision_tower_never_arrives(layouts: dict[str, Any], sim: ModuleType) -> None:
    pipe = open_layout(*layouts["official"])
    names = [name for unit in pipe.encoders for name, _ in unit.module.named_parameters()]
    assert names and not any("vision" in name or "projector" in name or "lm_head" in name for name in names)


@pytest.mark.parametrize("strategy", ["streamed", "leafwise"])
def test_other_placements_give_the_same(strategy: str, layouts: dict[str, Any], sim: ModuleType) -> None:
    pipe = open_layout(*layouts["official"])
    cond = pipe.encode(PROMPT, "blurry")
    expected = pipe.sample(cond, **RUN)
    assert torch.equal(pipe.sample(cond, **RUN, strategy=strategy), expected)
    record = manager("sim").timeline.stages[-1]
    assert [unit.placement for unit in record.units.values()] == ["streamed"]
    assert record.planned.peak_vram_bytes >= record.peak_bytes


def test_tables_do_not_travel_in_each_step(layouts: dict[str, Any], sim: ModuleType) -> None:
    """Lumina's own are copied to the device in every call, and wait there behind streamed blocks."""
    pipe = open_layout(*layouts["official"])
    cond = pipe.encode(PROMPT, "blurry")
    arrived: list[torch.dtype] = []
    with sim.watch(lambda transfer: arrived.append(transfer.dtype) if transfer.direction == "h2d" else None):
        pipe.sample(cond, **RUN)
    assert arrived.count(torch.complex128) == 3


# The loop


def test_pictures_of_a_batch_are_those_made_alone(layouts: dict[str, Any], sim: ModuleType) -> None:
    pipe = open_layout(*layouts["official"])
    prompts, run = ["a red boat", "x", PROMPT], RUN | {"steps": 2}
    alone = [
        pipe.decode(pipe.sample(pipe.encode(prompt, "blurry"), **run, seed=7 + i)) for i, prompt in enumerate(prompts)
    ]
    both = pipe.decode(pipe.sample(pipe.encode(prompts, "blurry"), **run, seed=7))
    torch.testing.assert_close(both, torch.cat(alone), atol=1e-4, rtol=0)


def test_negative_prompt_and_guidance_count(layouts: dict[str, Any]) -> None:
    pipe = open_layout(*layouts["official"], device="cpu")
    one, other = (pipe.encode("a boat", negative) for negative in ("", "blurry"))
    assert not torch.equal(pipe.sample(one, **RUN), pipe.sample(other, **RUN))
    off = RUN | {"guidance": 1.0}
    assert torch.equal(pipe.sample(one, **off), pipe.sample(other, **off))
    # From the middle of the run on there is none: not the same as with it, nor as without.
    cut = pipe.sample(one, **RUN, cfg_trunc=0.05)
    assert not torch.equal(cut, pipe.sample(one, **RUN)) and not torch.equal(cut, pipe.sample(one, **off))
    assert torch.equal(pipe.sample(one, **RUN, cfg_trunc=0.0), pipe.sample(one, **off))


def test_schedule() -> None:
    schedule = times(18, 6.0)
    assert len(schedule) == 19 and schedule[0] == 0 and schedule[-1] == 1
    u = 5 / 18
    assert schedule[5] == pytest.approx(u / (u + 6 - 6 * u)), "time_shifting_factor of the reference"
    assert times(4, 1.0) == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    partial = times(10, 6.0, denoise=0.5)
    assert len(partial) == 11 and partial == pytest.approx(times(20, 6.0)[10:])


def test_midpoint_is_of_second_order() -> None:
    """On dx/dt = x its error falls by four when the steps are doubled; Euler's by two."""
    errors = {}
    for method in (euler, midpoint):
        for steps in (20, 40):
            *_, (last, expected) = method(lambda x, t: x, torch.ones(1, dtype=torch.float64), times(steps, 1.0))
            assert expected.shape == last.shape
            errors[method, steps] = abs(float(last) - torch.e)
    assert errors[euler, 20] / errors[euler, 40] == pytest.approx(2, rel=0.1)
    assert errors[midpoint, 20] / errors[midpoint, 40] == pytest.approx(4, rel=0.1)


def test_renormalised_guidance_keeps_the_norm_of_the_whole_sample() -> None:
    conditional, unconditional = torch.randn(2, 3, 4, 4), torch.randn(2, 3, 4, 4)
    plain = guide(conditional, unconditional, 6.0, 0.0)
    torch.testing.assert_close(plain, unconditional + 6 * (conditional - unconditional))
    kept = guide(conditional, unconditional, 6.0, 1.0)
    for i in range(2):
        assert float(kept[i].norm()) == pytest.approx(float(conditional[i].norm()), rel=1e-5)
        torch.testing.assert_close(kept[i] / kept[i].norm(), plain[i] / plain[i].norm())
    torch.testing.assert_close(guide(conditional, unconditional, 6.0, 100.0), plain)


def test_a_picture_to_start_from() -> None:
    noise, picture = torch.randn(1, 4), torch.randn(1, 4)
    assert start(noise, None, 0.0) is noise
    torch.testing.assert_close(start(noise, picture, 0.25), 0.75 * noise + 0.25 * picture)


@pytest.mark.long  # test_newbie_surface.py has one of the nodes
@pytest.mark.parametrize("sampler", few(["euler", "midpoint"], "midpoint"))
def test_image_to_image(sampler: str, layouts: dict[str, Any], sim: ModuleType) -> None:
    """The less it denoises, the nearer it stays."""
    pipe = open_layout(*layouts["official"])
    cond = pipe.encode("a boat", "blurry")
    first = pipe.sample(cond, **RUN, seed=1)
    run = {key: value for key, value in RUN.items() if key not in ("width", "height")}
    distances = [
        float((pipe.sample(cond, **run, seed=2, init_latents=first, denoise=d, sampler=sampler) - first).abs().mean())
        for d in (0.1, 0.4, 1.0)
    ]
    assert distances == sorted(distances) and distances[0] < 0.5 * distances[2]
    assert sim.stats().allocated_bytes == 0


def test_seed_settles_the_picture(layouts: dict[str, Any]) -> None:
    pipe = open_layout(*layouts["official"], device="cpu")
    cond = pipe.encode("a boat")
    one, again, other = (pipe.sample(cond, **RUN, seed=seed) for seed in (5, 5, 6))
    assert torch.equal(one, again) and not torch.equal(one, other)


def test_steps_are_reported_with_what_they_will_become(layouts: dict[str, Any]) -> None:
    pipe = open_layout(*layouts["official"], device="cpu")
    seen: list[tuple[int, int, torch.Tensor]] = []
    latents = pipe.sample(pipe.encode("a boat"), **RUN, on_step=lambda *report: seen.append(report))
    assert [report[:2] for report in seen] == [(1, 3), (2, 3), (3, 3)]
    torch.testing.assert_close(seen[-1][2] / 0.3611 + 0.1159, latents)


def test_plan(layouts: dict[str, Any]) -> None:
    pipe = open_layout(*layouts["official"], device="cpu")
    plan = pipe.plan(width=64, height=64, vram="64MB")
    assert plan.steps == 28 and plan.fits and [stage.name for stage in plan.stages] == ["encode", "sample", "decode"]


def test_nothing_is_left_by_an_error_that_is_held(layouts: dict[str, Any], sim: ModuleType) -> None:
    pipe = open_layout(*layouts["official"])
    cond = pipe.encode("a boat")

    def stop(step: int, steps: int, latents: torch.Tensor) -> None:
        raise RuntimeError("stopped")

    for sampler in ("euler", "midpoint"):
        with pytest.raises(RuntimeError, match="stopped") as caught:
            pipe.sample(cond, **RUN, on_step=stop, sampler=sampler)
        gc.collect()
        assert sim.stats().allocated_bytes == 0, caught


def test_one_prompt_serves_a_batch_of_latents(layouts: dict[str, Any], sim: ModuleType) -> None:
    """As ComfyUI's empty latents ask for several pictures."""
    pipe = open_layout(*layouts["official"])
    cond = pipe.encode("a boat", "blurry")
    run = {key: value for key, value in RUN.items() if key not in ("width", "height")}
    made = pipe.sample(cond, **run, init_latents=torch.zeros(3, 16, 6, 8), seed=2)
    for i in range(3):
        torch.testing.assert_close(made[i : i + 1], pipe.sample(cond, **RUN, seed=2 + i), atol=1e-4, rtol=0)
    two = pipe.encode(["a boat", "a car"], "blurry")
    with pytest.raises(ValueError, match="init_latents has 3 for 2 prompts"):
        pipe.sample(two, **run, init_latents=torch.zeros(3, 16, 6, 8))
    assert sim.stats().allocated_bytes == 0


def test_attention_that_takes_no_mask_is_used_where_none_is_needed(
    layouts: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts of different lengths need one; the layers that do keep PyTorch's."""
    asked: list[tuple[str, bool]] = []

    def dispatched(*args: Any, attn_mask: Any = None, backend: Any = None, **kwargs: Any) -> torch.Tensor:
        asked.append((str(getattr(backend, "value", backend)), attn_mask is not None))
        return dispatch_attention_fn(*args, attn_mask=attn_mask, backend="native", **kwargs)

    monkeypatch.setattr("ballast.pipelines.models.newbie.transformer.dispatch_attention_fn", dispatched)
    pipe = open_layout(*layouts["official"], device="cpu")
    pipe.sample(pipe.encode("a boat", "a long negative prompt of other words"), **RUN, attention="_native_math")
    assert {backend for backend, masked in asked if masked} == {"native"}
    assert {backend for backend, masked in asked if not masked} == {"_native_math"}


def test_embeddings_that_are_no_numbers_are_not_kept(layouts: dict[str, Any], tmp_path: Path) -> None:
    pipe = open_layout(*layouts["official"], device="cpu", cache_dir=tmp_path / "cache")
    pipe.encoders[0].load()
    pipe.encoders[0].module.embed_tokens.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="the text encoders made NaN or infinite values"):
        pipe.encode("a boat")
    assert not list((tmp_path / "cache").glob("*.safetensors"))


# Bad input


def test_weights_in_a_type_that_nothing_runs_in(layouts: dict[str, Any], tmp_path: Path) -> None:
    path, files = layouts["split"]
    small = tmp_path / "newbie_fp64.safetensors"
    save_file({name: value.to(torch.float64) for name, value in load_file(path).items()}, small)
    with pytest.raises(ValueError, match=r"newbie_fp64.safetensors is stored in torch.float64; give a dtype"):
        ballast.open_pipeline(small, device="cpu", **files)
    assert open_layout(small, files, device="cpu", dtype="bf16").denoisers[0].source() is not None


def test_numbers_of_prompts_that_do_not_match(layouts: dict[str, Any]) -> None:
    pipe = open_layout(*layouts["official"], device="cpu")
    with pytest.raises(ValueError, match=r"there are 1 prompts and 2 negative ones\. Give one, or as many\."):
        pipe.encode("a boat", ["blurry", "grey"])


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "size": ({"width": 40}, "; NewBie-image-Exp0.1 takes multiples of 16 up to 1024, such as 32."),
    "too large": (
        {"height": 1040},
        "height is 1040; NewBie-image-Exp0.1 takes multiples of 16 up to 1024",
    ),
    "frames": ({"frames": 9}, "makes pictures, not videos"),
    "sampler": ({"sampler": "heun"}, "unknown sampler 'heun'. Use euler, midpoint"),
    "denoise": ({"denoise": 0.0}, "denoise is 0.0"),
    "shift": ({"shift": 0.0}, "shift is 0.0"),
    "part of the steps": ({"end_step": 1}, "has no argument end_step. It takes: "),
    "latents of a loop": ({"latents": torch.zeros(1, 16, 8, 8)}, "latents are given, but no start_step"),
    "unknown": ({"eta": 1.0}, "has no argument eta. It takes: cfg_trunc, denoise"),
    "latents": ({"init_latents": torch.zeros(1, 4, 8, 8)}, "takes 16 channels"),
    "other size": ({"init_latents": torch.zeros(1, 16, 8, 8), "width": 128}, "are of 64 x 64, not 128 x"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_arguments_are_one_clear_line(case: str, layouts: dict[str, Any]) -> None:
    pipe = open_layout(*layouts["official"], device="cpu")
    given, says = REFUSED[case]
    with pytest.raises((ValueError, TypeError)) as caught:
        pipe.sample(pipe.encode("a boat"), steps=1, **given)
    assert says in str(caught.value) and "\n" not in str(caught.value)
    assert pipe.denoisers[0].tier == "disk"


def test_unknown_argument_of_encode(layouts: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="has no argument clip_skip. It takes: max_sequence_length"):
        open_layout(*layouts["official"], device="cpu").encode("a boat", clip_skip=2)


def edited(source: Path, target: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    weights = load_file(source)
    change(weights)
    save_file(weights, target)
    return target


CHANGES: dict[str, tuple[Callable[[dict[str, torch.Tensor]], Any], str]] = {
    "missing": (lambda w: w.pop("layers.1.ffn_norm1.weight"), r"lacks 1 weights .* layers\.1\.ffn_norm1\.weight"),
    "surplus": (lambda w: w.update({"lora_a": torch.zeros(1)}), r"holds 1 weights .* no place for, such as lora_a"),
    "shape": (lambda w: w.update({"x_embedder.bias": torch.zeros(7)}), r"x_embedder\.bias as \[7\] where .* \[48\]"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_loading_is_strict(case: str, tmp_path: Path) -> None:
    change, says = CHANGES[case]
    file = edited(DATA / "transformer.safetensors", tmp_path / "model.safetensors", change)
    with pytest.raises(ValueError, match=says) as caught:
        checkpoint(file).unit("edited").load()
    assert str(file) in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("part", ["transformer", "text_encoder", "clip_model", "vae"])
def test_folder_that_is_not_there(part: str, folder: Path, tmp_path: Path) -> None:
    copied = Path(shutil.copytree(folder, tmp_path / "model"))
    shutil.rmtree(copied / part)
    with pytest.raises(FileNotFoundError, match="Download all of NewBie-AI/NewBie-image-Exp0.1 again"):
        ballast.open_pipeline(copied, device="cpu")


def test_split_files_that_are_not_there(layouts: dict[str, Any], tmp_path: Path) -> None:
    path, files = layouts["split"]
    with pytest.raises(ValueError, match=r"is the transformer alone\. Name the files of its jina, vae as well"):
        ballast.open_pipeline(path, device="cpu", gemma=files["gemma"])
    with pytest.raises(FileNotFoundError, match=r"there is no file .*gone\.safetensors"):
        ballast.open_pipeline(path, device="cpu", **files | {"vae": tmp_path / "gone.safetensors"})
    with pytest.raises(ValueError, match="has its own vae. Leave it out"):
        ballast.open_pipeline(layouts["official"][0], device="cpu", vae=files["vae"])
    with pytest.raises(ValueError, match=r"has no .*it is another model than its place says"):
        ballast.open_pipeline(path, device="cpu", **files | {"vae": files["jina"]})
