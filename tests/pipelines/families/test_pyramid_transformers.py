"""Pyramid-Flow's two transformers against the reference numbers, in every placement, and what they take."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import places
import pytest
import torch
from ballast.memory.planning.dry_run import dry_run
from ballast.memory.weights.stored import stored_tensors
from ballast.memory.weights.structure import block_lists
from ballast.pipelines.files.checkpoint import Checkpoint
from ballast.pipelines.models.pyramid_flow.frames import patches, unpatched
from ballast.pipelines.models.pyramid_flow.kinds import Kind, kind_of
from ballast.pipelines.models.pyramid_flow.transformer_classes import TRANSFORMERS
from ballast.pipelines.sampling.kernels import kernels
from diffusers import FluxTransformer2DModel
from safetensors.torch import load_file
from selection import few
from streamed_models import least_bytes, resident_engine, rests, streamed_engine
from torch import nn
from torch.nn import functional as F

DATA = places.DATA / "pyramid_flow"
SIM = "sim:0"
CLIPS = ("history_0", "history_1", "current")
OTHERS = ("timestep", "encoder_hidden_states", "encoder_attention_mask", "pooled_projections")
kinds = pytest.mark.parametrize("kind", list(TRANSFORMERS))


def config(kind: Kind) -> dict[str, Any]:
    published = json.loads((DATA / f"{kind}.config.json").read_text("utf-8"))
    assert kind_of(published) == kind
    return TRANSFORMERS[kind].config(published)


def build(kind: Kind) -> Any:
    """With the golden weights, loaded strictly."""
    transformer = TRANSFORMERS[kind]
    file = DATA / f"{kind}.safetensors"
    unit = Checkpoint(
        "transformer",
        "transformer",
        (file,),
        lambda: transformer.make(**config(kind)),
        transformer.names,
        torch.float32,
    ).unit("golden")
    unit.load()
    return unit.module


@pytest.fixture(scope="module", params=list(TRANSFORMERS))
def both(request: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A transformer and its golden call."""
    return build(request.param), load_file(DATA / f"{request.param}.forward.safetensors")


def call(module: nn.Module, given: dict[str, torch.Tensor], clips: Sequence[torch.Tensor] = ()) -> torch.Tensor:
    with torch.inference_mode():
        sample = list(clips) or [given[name] for name in CLIPS]
        return module(sample, *(given[name] for name in OTHERS), return_dict=False)[0]


def noise(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative(ours: torch.Tensor, golden: torch.Tensor) -> float:
    return float((ours - golden).abs().max() / golden.abs().max())


# Against the reference


def test_forward_is_the_references(both: Any) -> None:
    """Three clips, of two resolutions, and two prompts of different lengths."""
    module, golden = both
    velocity = call(module, golden)
    assert velocity.shape == golden["current"].shape
    assert relative(velocity, golden["output"]) <= 1e-4
    with torch.inference_mode():
        named = module([golden[n] for n in CLIPS], **{name: golden[name] for name in OTHERS})
    torch.testing.assert_close(named.sample, velocity, atol=0, rtol=0)


def test_pads_change_nothing_wherever_they_are(both: Any) -> None:
    module, golden = both
    expected = call(module, golden)
    mask, text = golden["encoder_attention_mask"], golden["encoder_hidden_states"]
    other = text.masked_fill(mask[..., None] == 0, 1e3)
    wide = {
        "encoder_hidden_states": F.pad(other, (0, 0, 2, 3), value=7.0),
        "encoder_attention_mask": F.pad(mask, (2, 3)),
    }
    torch.testing.assert_close(call(module, golden | wide), expected, atol=0, rtol=0)


def test_samples_do_not_see_each_other(both: Any) -> None:
    module, golden = both
    expected = call(module, golden)
    for item in range(2):
        alone = call(module, {name: tensor[item : item + 1] for name, tensor in golden.items()})
        torch.testing.assert_close(alone, expected[item : item + 1], atol=1e-5, rtol=1e-5)


def test_clip_of_several_frames_is_as_many_clips(both: Any) -> None:
    module, golden = both
    old, current = noise(2, 16, 3, 4, 6), noise(2, 16, 2, 8, 12, seed=1)
    velocity = call(module, golden, [old, current])
    split = call(module, golden, [*old.split(1, dim=2), *current.split(1, dim=2)])
    assert velocity.shape == current.shape
    torch.testing.assert_close(velocity[:, :, -1:], split, atol=0, rtol=0)
    changed = torch.cat([current[:, :, :1], current[:, :, 1:] + 1], dim=2)
    later = call(module, golden, [old, changed])
    torch.testing.assert_close(later[:, :, :1], velocity[:, :, :1], atol=0, rtol=0)
    assert not torch.equal(later[:, :, 1:], velocity[:, :, 1:])


def test_flux_is_the_stock_one_with_a_mask() -> None:
    """At an odd ratio of sizes, with several frames in a clip."""
    module, given = build("flux"), load_file(DATA / "flux.forward.safetensors")
    stock = FluxTransformer2DModel(**config("flux"))
    stock.load_state_dict(module.state_dict())
    clips = [noise(2, 16, 3, 4, 4), noise(2, 16, 1, 8, 8, seed=1), noise(2, 16, 1, 12, 12, seed=2)]
    ids = [torch.zeros(6, 3)]
    for time, side in enumerate((2, 2, 2, 4, 6)):
        axis = F.interpolate(torch.arange(6.0)[None, None], side, mode="linear")[0, 0]
        ids.append(torch.cartesian_prod(torch.tensor([float(time)]), axis, axis))
    places = torch.cat(ids)
    whole = F.pad(given["encoder_attention_mask"], (0, len(places) - 6), value=1)
    mask = (whole[:, None, :, None] == whole[:, None, None]) & (places[:, None, 0] >= places[None, :, 0])
    with torch.inference_mode():
        (tokens,) = stock(
            torch.cat([patches(clip) for clip in clips], dim=1),
            given["encoder_hidden_states"],
            given["pooled_projections"],
            given["timestep"] / 1000,
            places[6:],
            places[:6],
            joint_attention_kwargs={"attention_mask": mask},
            return_dict=False,
        )
    expected = unpatched(tokens[:, -36:], clips[-1])
    torch.testing.assert_close(call(module, given, clips), expected, atol=1e-5, rtol=1e-5)


def test_times_are_rounded_to_the_latents(both: Any) -> None:
    module, golden = both
    half = {name: tensor.bfloat16() if tensor.is_floating_point() else tensor for name, tensor in golden.items()}
    made = copy.deepcopy(module)
    for parameter in made.parameters():
        parameter.data = parameter.data.bfloat16()
    times = [
        call(made, half | {"timestep": torch.tensor([t, t], dtype=torch.float64)}) for t in (971.584, 972.0, 976.0)
    ]
    assert times[0].dtype == torch.bfloat16
    assert torch.equal(times[0], times[1]) and not torch.equal(times[0], times[2])


def test_patches_come_back() -> None:
    clip = noise(2, 16, 3, 4, 6)
    tokens = patches(clip)
    assert tokens.shape == (2, 18, 64)
    assert torch.equal(tokens[0, 0], clip[0, :, 0, :2, :2].permute(1, 2, 0).flatten())
    assert torch.equal(unpatched(tokens, clip), clip)


# What is published


@kinds
def test_kind_is_known_from_config_or_weights(kind: Kind) -> None:
    name = {"flux": "PyramidFluxTransformer", "mmdit": "PyramidDiffusionMMDiT"}[kind]
    assert kind_of({"_class_name": name}) == kind
    assert kind_of(stored_tensors((DATA / f"{kind}.safetensors",))) == kind


def test_other_models_are_refused() -> None:
    with pytest.raises(ValueError, match="FluxTransformer2DModel is no transformer of Pyramid-Flow"):
        kind_of({"_class_name": "FluxTransformer2DModel"})
    with pytest.raises(ValueError, match="no weights"):
        kind_of({"encoder.weight": None})


def test_frames_larger_than_the_table_are_refused() -> None:
    module, given = build("mmdit"), load_file(DATA / "mmdit.forward.safetensors")
    with pytest.raises(ValueError, match="25 patches .* larger than the model's 24"):
        call(module, given, [noise(2, 16, 1, 8, 50)])


def test_table_of_places_is_the_published_one() -> None:
    published = load_file(DATA / "mmdit.safetensors")["pos_embed.pos_embed"]
    embed = build("mmdit").pos_embed
    clip = noise(1, 16, 1, 48, 48)
    with torch.inference_mode():
        expected = embed.proj(clip[:, :, 0]).flatten(2).mT + published
        torch.testing.assert_close(embed(clip, (48, 48)), expected, atol=0, rtol=0)


# On the device


def on_device(given: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to(SIM) for name, tensor in given.items()}


@kinds
def test_every_placement_gives_the_same(kind: Kind, sim: ModuleType) -> None:
    """Pieces that stream come once a call for all samples, nothing else is copied, and nothing is left."""
    torch.manual_seed(0)
    module: Any = TRANSFORMERS[kind].make(**config(kind) | {"num_layers": 5}).requires_grad_(False)
    golden = load_file(DATA / f"{kind}.forward.safetensors")
    blocks = ["transformer_blocks", "single_transformer_blocks"]
    assert [path for path, _ in block_lists(module)] == (blocks if kind == "flux" else blocks[:1])
    structure = copy.deepcopy(module)
    forecast, _ = dry_run({kind: structure}, lambda to: call(structure, {n: t.to(to) for n, t in golden.items()}))
    calls = forecast.units[kind].call_order
    least, whole = least_bytes(module, calls), sum(t.nbytes for t in (*module.parameters(), *module.buffers()))
    device = torch.device(SIM)
    found = []
    for placement in (
        resident_engine(module, device),
        *(streamed_engine(module, device, least + int(share * (whole - least)), calls=calls) for share in (0, 0.3)),
    ):
        placement.place()
        rests(placement)
        given = on_device(golden)
        call(module, given)
        read: list[int] = []
        sim.reset_stats()
        with sim.watch(lambda transfer, read=read: transfer.direction == "d2h" and read.append(transfer.nbytes)):
            velocity = call(module, given)
        assert read == [2 * 8], "the lengths of the texts, once"
        if placement.name == "streamed":
            assert sim.stats().h2d_bytes == placement.layout.copied_bytes > 0
        else:
            assert sim.stats().h2d_bytes == 0
        found.append(velocity.cpu())
        del given, velocity
        placement.remove()
        assert sim.stats().allocated_bytes == 0
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], atol=0, rtol=0)


@kinds
def test_memory_grows_as_the_frames_do(kind: Kind, sim: ModuleType) -> None:
    """256 tokens each: of all tokens with all, a mask alone would show."""
    module, golden = build(kind), load_file(DATA / f"{kind}.forward.safetensors")
    placement = resident_engine(module, torch.device(SIM))
    placement.place()
    given = on_device(golden)
    peaks = []
    for frames in (3, 6, 9):
        clips = [noise(2, 16, frames - 1, 32, 32).to(SIM), noise(2, 16, 1, 32, 32).to(SIM)]
        sim.reset_stats()
        before = sim.stats().allocated_bytes
        call(module, given, clips)
        peaks.append(sim.stats().peak_bytes - before)
    tokens = 9 * 256
    assert peaks[2] - peaks[1] == pytest.approx(peaks[1] - peaks[0], rel=0.01)
    assert peaks[2] < 30 * 2 * tokens * 32 * 4
    del given, clips
    placement.remove()


@pytest.mark.parametrize(("kind", "fewer", "peak"), [("flux", {}, 1.40e9), ("mmdit", {"num_layers": 2}, 0.96e9)])
def test_published_size_has_a_dry_run(kind: Kind, fewer: dict[str, int], peak: float) -> None:
    """1280 x 768 at its last stage, after 15 latent frames: 11 888 tokens."""
    with torch.device("meta"):
        module: Any = TRANSFORMERS[kind].make(**TRANSFORMERS[kind].config(fewer))
    for parameter in module.parameters():
        parameter.data = parameter.data.bfloat16()
    if not fewer:
        assert sum(p.numel() for p in module.parameters()) == pytest.approx(1.972e9, rel=1e-3)
    assert sum(buffer.nbytes for buffer in module.buffers()) < 2**20

    def run(device: torch.device) -> None:
        def made(*shape: int) -> torch.Tensor:
            return torch.zeros(*shape, device=device, dtype=torch.bfloat16)

        sizes = [(13, 24, 40), (1, 48, 80), (1, 96, 160), (1, 96, 160)]
        mask = (torch.arange(128) < torch.tensor([[3], [128]])).long().to(device)
        pooled = made(2, module.config.pooled_projection_dim)
        time = torch.full((2,), 500.0, device=device)
        clips = [made(2, 16, *size) for size in sizes]
        (velocity,) = module(clips, time, made(2, 128, 4096), mask, pooled, return_dict=False)
        assert velocity.shape == (2, 16, 1, 96, 160)

    forecast, _ = dry_run({"transformer": module}, run)
    unit = forecast.units["transformer"]
    print(f"{kind}: {unit.peak_bytes / 1e9:.3f} GB")
    assert 0.9 * peak < unit.peak_bytes <= peak


@pytest.mark.parametrize("kind", few(TRANSFORMERS, "mmdit"))
def test_compiled_blocks_and_another_attention(kind: Kind, caplog: pytest.LogCaptureFixture) -> None:
    module, golden = build(kind), load_file(DATA / f"{kind}.forward.safetensors")
    expected = call(module, golden)
    with kernels([module], compile=True, attention="_native_math", backend="eager"):
        compiled = call(module, golden)
    torch.testing.assert_close(compiled, expected, atol=1e-5, rtol=1e-5)
    assert "uncompiled" not in caplog.text
