"""Pyramid-Flow: its scheduler and its loop against the reference numbers, their noise, history and guidance."""

from __future__ import annotations

import gc
import json
import weakref
from functools import partial
from pathlib import Path
from typing import Any

import places
import pytest
import torch
from ballast.memory.errors import release_frames
from ballast.memory.planning.dry_run import dry_run
from ballast.pipelines.files.checkpoint import Checkpoint
from ballast.pipelines.models.pyramid_flow.loop import (
    GuidedVelocity,
    History,
    SeededNoise,
    Settings,
    Step,
    block_noise,
    check_size,
    generate,
    halve,
)
from ballast.pipelines.models.pyramid_flow.scheduler import PyramidFlowMatchEulerDiscreteScheduler
from ballast.pipelines.models.pyramid_flow.transformer_classes import TRANSFORMERS
from safetensors.torch import load_file
from torch import nn

DATA = places.DATA / "pyramid_flow"
IMAGE_LATENTS = {"flux": (-0.04, 1.8726), "mmdit": (0.149, 1.8415)}  # shift, and what the VAE's latents are divided by
FEW = Settings((2, 1, 2), (1, 2, 1))
Tensors = dict[str, torch.Tensor]


def relative(ours: torch.Tensor, golden: torch.Tensor) -> float:
    return float((ours - golden).abs().max() / golden.abs().max())


class Recorded:
    """Block noise that was drawn before."""

    def __init__(self, tensors: Tensors) -> None:
        self.left = [tensors[f"block_noise_{i}"] for i in range(sum(name.startswith("block") for name in tensors))]

    def __call__(self, shape: tuple[int, ...]) -> torch.Tensor:
        noise = self.left.pop(0)
        assert tuple(noise.shape) == shape
        return noise


class Leaning:
    """Stands for a transformer: leans on the frame before, and remembers what it was called with."""

    def __init__(self) -> None:
        self.calls: list[tuple[list[tuple[int, ...]], float, float]] = []

    def __call__(self, clips: list[torch.Tensor], timestep: float, scale: float) -> torch.Tensor:
        self.calls.append(([tuple(clip.shape) for clip in clips], timestep, scale))
        before = clips[-2][:, :, -1:] if len(clips) > 1 else 0
        return 0.3 * clips[-1] - 0.5 * before


def make(kind: str) -> nn.Module:
    known = TRANSFORMERS[kind]  # type: ignore[index]
    config = known.config(json.loads((DATA / f"{kind}.config.json").read_text("utf-8")))
    return known.make(**config)


@pytest.fixture(scope="module", params=["flux", "mmdit"])
def model(request: pytest.FixtureRequest) -> tuple[str, Any]:
    kind = request.param
    file, names = DATA / f"{kind}.safetensors", TRANSFORMERS[kind].names
    unit = Checkpoint("transformer", "transformer", (file,), partial(make, kind), names, torch.float32).unit("golden")
    unit.load()
    return kind, unit.module


def velocity_of(transformer: Any, tensors: Tensors) -> GuidedVelocity:
    names = ("prompt_embeds", "prompt_attention_mask", "pooled_prompt_embeds")
    positive, negative = ([tensors[f"{sign}{name}"] for name in names] for sign in ("", "negative_"))
    return GuidedVelocity(transformer, tuple(positive), tuple(negative))  # type: ignore[arg-type]


def run(noise: torch.Tensor, settings: Settings = FEW, velocity: Any = None, **arguments: Any) -> torch.Tensor:
    draw = arguments.pop("draw", None) or SeededNoise(range(len(noise)))
    given: dict[str, Any] = {"device": "cpu", "dtype": torch.float32} | arguments
    return generate(velocity or Leaning(), noise, draw, settings, **given)


# Against the reference


@pytest.mark.parametrize("kind", ["generate", "generate_i2v"])
def test_generation_is_the_references(model: tuple[str, Any], kind: str) -> None:
    name, transformer = model
    golden = load_file(DATA / f"{name}.{kind}.safetensors")
    facts = json.loads((DATA / "generate.json").read_text("utf-8"))
    settings = Settings(**{key: value for key, value in facts.items() if key in Settings.__dataclass_fields__})
    first = None
    if kind == "generate_i2v":
        settings = Settings(settings.num_inference_steps, settings.video_num_inference_steps, video_guidance_scale=4.0)
        shift, divided = IMAGE_LATENTS[name]
        first = (golden["image_latent_mean"] - shift) / divided
    draw = Recorded(golden)
    latents = run(golden["initial_noise"], settings, velocity_of(transformer, golden), draw=draw, first=first)
    assert not draw.left
    assert relative(latents, golden["latents"]) <= 1e-4


def test_the_schedule_is_the_references() -> None:
    golden = json.loads((DATA / "scheduler.json").read_text("utf-8"))
    scheduler = PyramidFlowMatchEulerDiscreteScheduler()
    for key in ("start_sigmas", "end_sigmas", "ori_start_sigmas"):
        assert getattr(scheduler, key) == golden[key]
    for steps in (8, 10, 20):
        for stage in range(3):
            scheduler.set_timesteps(steps, stage)
            assert scheduler.timesteps == golden[f"timesteps_{steps}_{stage}"]
            assert scheduler.sigmas == golden[f"sigmas_{steps}_{stage}"]


def test_a_later_stage_starts_with_fresh_noise() -> None:
    scheduler = PyramidFlowMatchEulerDiscreteScheduler()
    assert scheduler.renoise(1) == pytest.approx((0.59988, 0.69303), abs=1e-5)
    assert scheduler.renoise(2) == pytest.approx((0.74963, 0.43366), abs=1e-5)
    for stage in (1, 2):  # what enlarging makes alike in a block, the noise makes white again
        alpha, beta = scheduler.renoise(stage)
        enlarged, start = alpha * scheduler.end_sigmas[stage - 1], scheduler.start_sigmas[stage]
        assert enlarged**2 + beta**2 == pytest.approx(start**2, rel=1e-3)
        assert enlarged**2 == pytest.approx(beta**2 / 3, rel=1e-3)


def test_one_step_is_a_stage() -> None:
    scheduler = PyramidFlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(1, 0)
    assert (scheduler.timesteps, scheduler.sigmas) == ([1000.0], [1.0, 0.0])


def test_the_scheduler_is_saved_and_loaded(tmp_path: Path) -> None:
    PyramidFlowMatchEulerDiscreteScheduler(shift=2.0).save_pretrained(tmp_path)
    loaded = PyramidFlowMatchEulerDiscreteScheduler.from_pretrained(tmp_path)
    assert loaded.config["shift"] == 2.0
    assert loaded.start_sigmas == PyramidFlowMatchEulerDiscreteScheduler(shift=2.0).start_sigmas


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_expected_is_the_frame_without_noise(stage: int) -> None:
    scheduler = PyramidFlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(5, stage)
    start, end = scheduler.start_sigmas[stage], scheduler.end_sigmas[stage]
    clean, noise = torch.full((1, 16, 1, 4, 4), 0.7), torch.randn(1, 16, 1, 4, 4)
    x, direction = start * noise + (1 - start) * clean, (start - end) * (noise - clean)
    for _ in scheduler.timesteps:
        assert torch.allclose(scheduler.expected(direction, x), clean, atol=1e-5)
        x = scheduler.step(direction, x)
    assert torch.allclose(x, end * noise + (1 - end) * clean, atol=1e-5)


# Noise


@pytest.mark.parametrize("gamma", [1 / 3, 0.2, 0.0])
def test_block_noise_is_correlated_in_its_blocks(gamma: float) -> None:
    noise = block_noise((2, 3, 200, 240), gamma, torch.Generator().manual_seed(0))
    blocks = noise.unflatten(-1, (-1, 2)).unflatten(-3, (-1, 2)).permute(0, 1, 2, 4, 3, 5).reshape(-1, 4)
    expected = (1 + gamma) * torch.eye(4) - gamma
    assert torch.allclose(torch.cov(blocks.T), expected, atol=0.02)
    assert torch.allclose(blocks.mean(0), torch.zeros(4), atol=0.02)
    beside = torch.cov(torch.stack([noise[..., 1:-1:2].flatten(), noise[..., 2::2].flatten()]))
    assert abs(float(beside[0, 1])) < 0.02  # not with those of the next block


def test_halved_and_doubled_noise_stays_white() -> None:
    noise = 2 * halve(SeededNoise([0]).initial(16, 3, 64, 64))
    assert noise.shape == (1, 16, 3, 32, 32)
    assert float(noise.std()) == pytest.approx(1, abs=0.02)


def test_the_seed_settles_a_run_and_each_of_its_videos() -> None:
    def video(seed: int, batch: int = 1) -> torch.Tensor:
        noise = SeededNoise(range(seed, seed + batch))
        return run(noise.initial(16, 3, 8, 16), draw=noise)

    assert torch.equal(video(5), video(5))
    assert not torch.equal(video(5), video(6))
    assert torch.equal(video(5, batch=2), torch.cat([video(5), video(6)]))


# History


def test_what_each_stage_sees_of_the_frames_before() -> None:
    history = History()
    seen: dict[tuple[int, int], list[list[int]]] = {}  # by unit and stage: frames and height of each clip
    for unit in range(6):
        for stage in range(3):
            clips = history.clips(stage)
            seen[unit, stage] = [[clip.shape[2], clip.shape[3]] for clip in clips]
            frames = torch.cat([clip.mean((1, 3, 4)) for clip in clips], dim=1)[0].tolist() if clips else []
            assert frames == list(range(unit))  # each of them once, the oldest first
        history.add(torch.full((1, 16, 1, 16, 32), float(unit)))
    assert seen == {
        (0, 0): [], (0, 1): [], (0, 2): [],
        (1, 0): [[1, 4]], (1, 1): [[1, 8]], (1, 2): [[1, 16]],
        (2, 0): [[1, 4], [1, 4]], (2, 1): [[1, 4], [1, 8]], (2, 2): [[1, 8], [1, 16]],
        (3, 0): [[2, 4], [1, 4]], (3, 1): [[2, 4], [1, 8]], (3, 2): [[1, 4], [1, 8], [1, 16]],
        (4, 0): [[3, 4], [1, 4]], (4, 1): [[3, 4], [1, 8]], (4, 2): [[2, 4], [1, 8], [1, 16]],
        (5, 0): [[4, 4], [1, 4]], (5, 1): [[4, 4], [1, 8]], (5, 2): [[3, 4], [1, 8], [1, 16]],
    }  # fmt: skip


def test_the_loop_passes_history_and_then_the_frame_at_work() -> None:
    velocity = Leaning()
    run(torch.randn(1, 16, 3, 8, 16), FEW, velocity)
    shapes = [[shape[2:] for shape in call[0]] for call in velocity.calls]
    assert shapes == [
        *[[(1, 2, 4)]] * 2, [(1, 4, 8)], *[[(1, 8, 16)]] * 2,
        *[[(1, 2, 4)] * 2], *[[(1, 4, 8)] * 2] * 2, [(1, 8, 16)] * 2,
        [(1, 2, 4)] * 3, *[[(1, 2, 4), (1, 4, 8), (1, 4, 8)]] * 2, [(1, 4, 8), (1, 8, 16), (1, 8, 16)],
    ]  # fmt: skip


# Guidance


def test_linear_guidance_falls_frame_by_frame() -> None:
    settings = Settings(guidance_scale=4.0, use_linear_guidance=True)
    assert [settings.scale(unit) for unit in range(7)] == [4.0, 3.5, 3.0, 2.5, 2.0, 2.0, 2.0]
    velocity = Leaning()
    run(torch.randn(1, 16, 3, 8, 16), Settings((1, 1, 1), (1, 1, 1), 3.0, use_linear_guidance=True), velocity)
    assert [scale for _, _, scale in velocity.calls] == [3.0] * 3 + [2.5] * 3 + [2.0] * 3


def test_the_first_frame_has_a_scale_of_its_own() -> None:
    velocity = Leaning()
    run(torch.randn(1, 16, 2, 8, 16), Settings((1, 1, 1), (1, 1, 1), 7.0, 5.0), velocity)
    assert [scale for _, _, scale in velocity.calls] == [7.0] * 3 + [5.0] * 3
    velocity.calls.clear()
    first = torch.randn(1, 16, 1, 8, 16)
    latents = run(torch.randn(1, 16, 2, 8, 16), Settings((1, 1, 1), (1, 1, 1), 7.0, 4.0), velocity, first=first)
    assert [scale for _, _, scale in velocity.calls] == [4.0] * 3
    assert torch.equal(latents[:, :, :1], first)


def test_the_negative_prompt_comes_first_and_only_with_guidance() -> None:
    got: list[tuple[list[int], torch.Tensor, torch.Tensor]] = []

    def transformer(sample: Any, timestep: Any, embeds: Any, mask: Any, pooled: Any, return_dict: bool) -> Any:
        got.append(([len(clip) for clip in sample], timestep, embeds.flatten()))
        return (embeds.mean((1, 2)).view(-1, 1, 1, 1, 1).expand_as(sample[-1]),)

    def text(value: float) -> Any:
        return torch.full((1, 4, 1), value), torch.ones(1, 4), torch.zeros(1, 2)

    velocity = GuidedVelocity(transformer, text(3.0), text(1.0))  # type: ignore[arg-type]
    clips = [torch.zeros(1, 16, 1, 2, 2, dtype=torch.bfloat16), torch.zeros(1, 16, 1, 4, 4, dtype=torch.bfloat16)]
    assert float(velocity(clips, 971.584, 5.0).mean()) == 1 + 5 * (3 - 1)
    lengths, at, embeds = got.pop()
    assert lengths == [2, 2] and embeds.tolist() == [1.0] * 4 + [3.0] * 4
    assert at.dtype == torch.bfloat16 and at.tolist() == [972.0, 972.0]
    assert float(velocity(clips, 971.584, 0.0).mean()) == 3
    assert got.pop()[0] == [1, 1]


# Steps and sizes


def test_every_step_is_reported_and_can_end_the_run() -> None:
    reports: list[Step] = []
    run(torch.randn(2, 16, 3, 8, 16), on_step=reports.append)
    told = [(report.unit, report.stage, report.step) for report in reports]
    steps = [(unit, stage, i) for unit in range(3) for stage in range(3) for i in range(FEW.steps(unit)[stage])]
    assert told == steps
    assert [report.taken for report in reports] == list(range(1, 14))
    assert {(report.units, report.total) for report in reports} == {(3, 13)} and FEW.calls(3) == 13
    assert [report.expected.shape[3] for report in reports][:5] == [2, 2, 4, 8, 8]
    assert all(report.expected.shape[:3] == (2, 16, 1) for report in reports)

    velocity = Leaning()
    taken: list[int] = []

    def interrupt(step: Step) -> None:
        taken.append(step.taken)
        if step.taken == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(torch.randn(1, 16, 3, 8, 16), velocity=velocity, on_step=interrupt)
    assert len(velocity.calls) == len(taken) == 6


def test_an_error_keeps_no_tensor_once_its_frames_are_released() -> None:
    held: list[weakref.ref[torch.Tensor]] = []

    def transformer(sample: Any, *_: Any, **__: Any) -> Any:
        held.extend(weakref.ref(clip) for clip in sample)
        raise RuntimeError("out of memory")

    text = torch.ones(1, 2, 4), torch.ones(1, 2), torch.ones(1, 4)
    held.extend(weakref.ref(tensor) for tensor in text)
    velocity = GuidedVelocity(transformer, text, text)  # type: ignore[arg-type]
    del text
    try:
        run(torch.randn(1, 16, 2, 8, 16), velocity=velocity, first=torch.randn(1, 16, 1, 8, 16))
    except RuntimeError as error:
        caught = error
        release_frames(error)
    del velocity
    gc.collect()
    assert caught and len(held) == 5 and not any(ref() is not None for ref in held)


def test_runs_in_the_models_dtype_and_rests_in_ram() -> None:
    noise = SeededNoise([0])
    start = noise.initial(16, 3, 8, 16)
    latents = run(start, dtype=torch.bfloat16, draw=noise)
    again = SeededNoise([0])
    assert again.initial(16, 3, 8, 16).equal(start)
    whole = run(start, draw=again)
    assert latents.dtype == torch.bfloat16 and latents.device.type == "cpu"
    assert 0 < relative(latents.float(), whole) < 0.02


def test_runs_on_shapes_for_a_plan() -> None:
    def sample(device: torch.device) -> torch.Tensor:
        text = tuple(torch.ones(shape, device=device) for shape in ((1, 6, 24), (1, 6), (1, 20)))
        velocity = GuidedVelocity(pull, text, text)  # type: ignore[arg-type]
        return run(torch.randn(1, 16, 4, 8, 16), Settings((1, 1, 1), (1, 1, 1)), velocity, device=device)

    pull = _Pull()
    forecast, latents = dry_run({"transformer": pull}, sample)
    assert latents.shape == (1, 16, 4, 8, 16)
    assert forecast.units["transformer"].calls == 12


class _Pull(nn.Module):
    def forward(self, sample: Any, timestep: Any, *text: Any, return_dict: bool) -> Any:
        return (sample[-1] * timestep.view(-1, 1, 1, 1, 1),)


def test_sizes_are_checked_in_one_line() -> None:
    assert check_size(1280, 768, 121) == (16, 96, 160)
    assert check_size(64, 64, 1) == (1, 8, 8)
    with pytest.raises(ValueError, match=r"^width is 650; Pyramid-Flow takes multiples of 64, such as 640\.$"):
        check_size(650, 384, 9)
    with pytest.raises(ValueError, match=r"^height is 0; .* such as 64\.$"):
        check_size(640, 0, 9)
    with pytest.raises(ValueError, match=r"^frames is 120; .* 1 more than a multiple of 8, such as 121\.$"):
        check_size(640, 384, 120)
    with pytest.raises(ValueError, match=r"^frames is -3; .* such as 1\.$"):
        check_size(640, 384, -3)
    with pytest.raises(ValueError, match="num_inference_steps is .* 3 numbers of at least 1"):
        Settings(num_inference_steps=[20, 20])
