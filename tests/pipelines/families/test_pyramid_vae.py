"""Pyramid-Flow's causal video VAE: the reference's numbers, chunks and tiles, and what they leave behind: nothing."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import places
import pytest
import torch
from ballast.memory import manager
from ballast.memory.errors import release_frames
from ballast.memory.simulated.dry import dry_card
from ballast.memory.weights.stored import stored_tensors
from ballast.memory.weights.unit import ManagedModel
from ballast.pipelines.files.checkpoint import Checkpoint
from ballast.pipelines.models.pyramid_flow.vae import CausalVideoVAE
from ballast.pipelines.models.pyramid_flow.vae_decode import cache_bytes, choose, decode_bytes, from_vae, spans, to_vae
from safetensors.torch import load_file, save_file
from selection import few

DATA = places.DATA / "pyramid_flow"
CONFIG = json.loads((DATA / "vae.config.json").read_text("utf-8"))
MIB = 2**20


def whole_config(**changed: Any) -> dict[str, Any]:
    """With the defaults, which are the published sizes."""
    parameters = inspect.signature(CausalVideoVAE.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.name != "self"} | changed


TINY, PUBLISHED = whole_config(**CONFIG), whole_config()


def checkpoint(file: Path = DATA / "vae.safetensors") -> Checkpoint:
    return Checkpoint("vae", "vae", (file,), lambda: CausalVideoVAE(**CONFIG), lambda stored: stored, torch.float32)


def loaded() -> ManagedModel:
    unit = checkpoint().unit("golden")
    unit.load()
    return unit


@pytest.fixture(scope="module")
def vae() -> Any:
    return loaded().module


@pytest.fixture(scope="module")
def golden() -> dict[str, torch.Tensor]:
    return load_file(DATA / "vae.codec.safetensors")


@pytest.fixture
def on_sim(sim: ModuleType) -> Iterator[tuple[Any, int]]:
    """The VAE on the device, and the bytes of its weights."""
    unit = loaded()
    with manager("sim").use(unit, "resident", alone=True) as module, torch.inference_mode():
        yield module, sim.stats().allocated_bytes
    manager("sim").free()


def relative(ours: torch.Tensor, golden: torch.Tensor) -> float:
    return float((ours - golden).abs().max() / golden.abs().max())


def latents(frames: int, height: int = 4, width: int = 4, device: str = "cpu") -> torch.Tensor:
    return torch.randn(1, 16, frames, height, width, generator=torch.Generator().manual_seed(0)).to(device)


def difference(ours: torch.Tensor, whole: torch.Tensor) -> float:
    assert ours.shape == whole.shape
    return float((ours - whole).abs().max())


# Against the reference


def test_encodes_and_decodes_as_the_reference(vae: Any, golden: dict[str, torch.Tensor]) -> None:
    with torch.inference_mode():
        posterior = vae.encode(golden["video"])
        assert relative(posterior.mean, golden["mean"]) <= 1e-4
        assert relative(posterior.logvar, golden["logvar"]) <= 1e-4
        assert relative(vae.decode(golden["latent"], return_dict=False)[0], golden["decoded"]) <= 1e-4
        chunks = list(vae.decode_chunks(golden["latent"]))
    assert [chunk.shape[2] for chunk in chunks] == [9, 8]
    assert relative(torch.cat(chunks, dim=2), golden["decoded_chunked_window1"]) <= 1e-4


@pytest.mark.parametrize("kind", ["flux", "mmdit"])
def test_scales_and_shifts_of_both_kinds(kind: Any) -> None:
    shift, scale = {"flux": (-0.04, 1 / 1.8726), "mmdit": (0.1490, 1 / 1.8415)}[kind]
    made, kept = latents(3), latents(3)
    scaled = to_vae(made, kind)
    torch.testing.assert_close(scaled[:, :, :1], kept[:, :, :1] / scale + shift)
    torch.testing.assert_close(scaled[:, :, 1:], kept[:, :, 1:] * 3.0986 - 0.2343)
    torch.testing.assert_close(from_vae(scaled, kind), kept)
    assert torch.equal(to_vae(made[:, :, :1], kind), scaled[:, :, :1])
    assert to_vae(made.bfloat16(), kind).dtype == torch.bfloat16
    assert torch.equal(made, kept)


# Loading


def test_published_config_and_names(tmp_path: Path) -> None:
    """All arguments of the published file are known, and the sizes are those published."""
    named = {"_class_name": "CausalVideoVAE", "_diffusers_version": "0.29.2", **CONFIG, "decoder_act_fn": "silu"}
    (tmp_path / "config.json").write_text(json.dumps(named), "utf-8")
    (tmp_path / "diffusion_pytorch_model.safetensors").write_bytes((DATA / "vae.safetensors").read_bytes())
    config = CausalVideoVAE.load_config(tmp_path)
    module, info = CausalVideoVAE.from_pretrained(tmp_path, output_loading_info=True)
    assert dict(module.config).items() >= {k: v for k, v in config.items() if not k.startswith("_")}.items()
    assert not any(info.values())
    with torch.device("meta"):
        published = CausalVideoVAE()
    assert sum(weight.numel() for weight in published.parameters()) == 335_402_067
    assert checkpoint().stored == stored_tensors([DATA / "vae.safetensors"])
    with pytest.raises(ValueError, match="UpDecoderBlock2D"):
        CausalVideoVAE(**CONFIG, decoder_up_block_types=("UpDecoderBlock2D",) * 4)


@pytest.mark.parametrize("change", ["lacks", "holds"])
def test_loading_is_strict(change: str, tmp_path: Path) -> None:
    weights = load_file(DATA / "vae.safetensors")
    if change == "lacks":
        del weights["decoder.conv_out.conv.bias"]
    else:
        weights["decoder.more"] = torch.zeros(1)
    save_file(weights, tmp_path / "vae.safetensors")
    with pytest.raises(ValueError, match=change):
        _ = checkpoint(tmp_path / "vae.safetensors").stored


# Chunks


@pytest.mark.parametrize("frames", [1, 2, 3, 6])
def test_chunks_are_the_whole(frames: int, vae: Any) -> None:
    given = latents(frames, 2, 3)
    kept = given.clone()
    whole = vae.decode(given, return_dict=False)[0]
    assert whole.shape == (1, 3, 8 * (frames - 1) + 1, 16, 24)
    assert torch.equal(vae.decode(given).sample, whole)
    for window in (1, 2, 4):
        chunks = list(vae.decode_chunks(given, window))
        assert [chunk.shape[2] for chunk in chunks][:1] == [8 * (min(window + 1, frames) - 1) + 1]
        assert all(chunk.shape[2] <= 8 * window for chunk in chunks[1:])
        assert difference(torch.cat(chunks, dim=2), whole) <= 1e-5
    assert torch.equal(given, kept) and not whole.requires_grad


def test_picture_is_encoded_and_decoded(vae: Any, golden: dict[str, torch.Tensor]) -> None:
    """The first frame of a video knows nothing of the others."""
    first = vae.encode(golden["video"][:, :, :1]).mean
    assert difference(first, golden["mean"][:, :, :1]) <= 1e-5
    shown = vae.decode(golden["latent"][:, :, :1], return_dict=False)[0]
    assert difference(shown, golden["decoded"][:, :, :1]) <= 1e-5


def test_two_iterators_do_not_meet(vae: Any) -> None:
    """What one carries is not seen by another that runs between its chunks."""
    first, second = latents(3, 2, 2), -latents(3, 2, 2)
    pairs = list(zip(vae.decode_chunks(first), vae.decode_chunks(second), strict=True))
    for given, chunks in zip((first, second), zip(*pairs, strict=True), strict=True):
        assert difference(torch.cat(chunks, dim=2), vae.decode(given).sample) <= 1e-5


def test_half_precision_latents_decode_in_float32(vae: Any) -> None:
    given = latents(2, 2, 2).bfloat16()
    assert torch.equal(vae.decode(given).sample, vae.decode(given.float()).sample)


@pytest.mark.parametrize("shape", [(8, 16, 16), (9, 12, 16), (9, 16, 20)])
def test_what_cannot_be_encoded_is_named(shape: tuple[int, ...], vae: Any) -> None:
    with pytest.raises(ValueError, match="multiple"):
        vae.encode(torch.zeros(1, 3, *shape))


def test_windows_and_tiles_too_small_are_named(vae: Any) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        next(vae.decode_chunks(latents(2), 0))
    with pytest.raises(ValueError, match="too small"):
        next(vae.decode_chunks(latents(2, 8, 8), 1, 16))


# Tiles


@pytest.mark.parametrize(("size", "tile"), [(8, 8), (8, 4), (9, 8), (20, 8), (96, 32), (160, 32), (23, 6), (12, 4)])
def test_tiles_overlap_by_a_quarter_and_weigh_one(size: int, tile: int) -> None:
    found = spans(size, tile, 8)
    total = torch.zeros(size * 8)
    for start, weight in found:
        total[start * 8 : (start + tile) * 8] += weight
    torch.testing.assert_close(total, torch.ones(size * 8))
    starts = [start for start, _ in found]
    assert starts[0] == 0 and starts[-1] + tile == size
    assert all(0 < later - start <= tile - tile // 4 for start, later in zip(starts, starts[1:], strict=False))


@pytest.mark.parametrize("size", [(4, 4), (9, 4), (7, 10)])
def test_blending_alone_changes_nothing(size: tuple[int, int], vae: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a decoder whose pixels depend on one latent each, tiles equal the whole."""

    def plain(z: torch.Tensor, past: dict | None, window: int | None) -> torch.Tensor:
        first = past is None or not past
        if past is not None:
            past[vae] = z
        for axis, count in ((2, 8), (3, 8), (4, 8)):
            z = z.repeat_interleave(count, dim=axis)
        return z[:, :3, 7 * first :]

    monkeypatch.setattr(vae, "_decoded", plain)
    given = latents(4, *size)
    whole = vae.decode(given).sample
    tiled = list(vae.decode_chunks(given, 2, 32))
    assert [chunk.shape[2] for chunk in tiled] == [17, 8]
    torch.testing.assert_close(torch.cat(tiled, dim=2), whole)


def test_tiles_are_near_the_whole(vae: Any, golden: dict[str, torch.Tensor]) -> None:
    """Norms and attention see a tile alone, so it is near, not equal; this model's weights are random."""
    given = latents(2, 8, 16)
    whole = vae.decode(given).sample
    sizes = []

    def to_host(frames: torch.Tensor) -> torch.Tensor:
        sizes.append(tuple(frames.shape[2:]))
        return frames.double()

    tiled = torch.cat(list(vae.decode_chunks(given, 1, 64, to_host)), dim=2)
    assert tiled.dtype == torch.float64 and sizes == [(9, 64, 64)] * 3
    error = (tiled - whole).abs()
    assert error.mean() <= 0.15 * whole.abs().mean()
    assert error.max() <= 0.4 * whole.abs().max()
    same = torch.cat(list(vae.decode_chunks(given, 1, 128)), dim=2)
    assert torch.equal(same, torch.cat(list(vae.decode_chunks(given)), dim=2))


# Memory


def test_nothing_stays_on_the_device(on_sim: tuple[Any, int], sim: ModuleType) -> None:
    module, weights = on_sim
    whole = module.decode(latents(3, device="sim")).sample.cpu()
    for tile in (None, 32):
        given = latents(3, 4, 8, device="sim")
        shown = torch.cat(list(module.decode_chunks(given, 1, tile, torch.Tensor.cpu)), dim=2)
        assert shown.device.type == "cpu" and shown.shape == (1, 3, 17, 32, 64)
        del given
        assert sim.stats().allocated_bytes == weights
    assert difference(torch.cat([*module.decode_chunks(latents(3, device="sim"))], dim=2).cpu(), whole) <= 1e-5
    posterior = module.encode(torch.zeros(1, 3, 1, 16, 16, device="sim"))
    assert posterior.mean.device.type == "sim"
    del posterior
    assert sim.stats().allocated_bytes == weights


@pytest.mark.parametrize("tile", [None, 32])
def test_closing_half_way_frees_all(tile: int | None, on_sim: tuple[Any, int], sim: ModuleType) -> None:
    module, weights = on_sim
    given = latents(4, 4, 8, device="sim")
    chunks = module.decode_chunks(given, 1, tile)
    next(chunks)
    assert sim.stats().allocated_bytes > weights + given.nbytes
    chunks.close()
    assert sim.stats().allocated_bytes == weights + given.nbytes


@pytest.mark.parametrize("tile", [None, 32])
@pytest.mark.parametrize("fails", [60, 300])
def test_an_error_inside_frees_all(tile: int | None, fails: int, on_sim: tuple[Any, int], sim: ModuleType) -> None:
    module, weights = on_sim
    given = latents(4, 4, 8, device="sim")
    with sim.fail_after(fails), pytest.raises(torch.OutOfMemoryError) as caught:
        for _ in module.decode_chunks(given, 1, tile):
            pass
    release_frames(caught.value)
    assert sim.stats().allocated_bytes == weights + given.nbytes


def test_an_interrupt_of_the_caller_frees_all(on_sim: tuple[Any, int], sim: ModuleType) -> None:
    """`to_host` may raise; what the error's traceback still holds is no feature."""
    module, weights = on_sim
    given = latents(4, 4, 8, device="sim")
    made = []

    def to_host(frames: torch.Tensor) -> torch.Tensor:
        made.append(frames.nbytes)
        if len(made) == 2:
            raise InterruptedError
        return frames.cpu()

    with pytest.raises(InterruptedError) as caught:
        list(module.decode_chunks(given, 1, 32, to_host))
    assert sim.stats().allocated_bytes <= weights + given.nbytes + made[-1]
    release_frames(caught.value)
    assert sim.stats().allocated_bytes == weights + given.nbytes


@pytest.mark.parametrize("size", few([(32, 32), (48, 80)], (48, 80)))
@pytest.mark.parametrize("window", [1, 2])
def test_bytes_are_foretold(window: int, size: tuple[int, int], on_sim: tuple[Any, int], sim: ModuleType) -> None:
    """What is carried to the byte, the peak from above; no module holds any of it."""
    module, weights = on_sim
    given = latents(5, size[0] // 8, size[1] // 8, device="sim")
    chunks = module.decode_chunks(given, window)
    sim.reset_stats()
    next(chunks)
    assert sim.stats().allocated_bytes == weights + given.nbytes + cache_bytes(TINY, *size)
    assert not any(isinstance(held, torch.Tensor) for part in module.modules() for held in vars(part).values())
    for _ in chunks:
        pass
    peak = sim.stats().peak_bytes - weights - given.nbytes
    assert peak <= decode_bytes(TINY, *size, window) <= 1.2 * peak


def test_a_picture_carries_nothing(on_sim: tuple[Any, int], sim: ModuleType) -> None:
    module, weights = on_sim
    given = latents(1, device="sim")
    chunks = module.decode_chunks(given)
    next(chunks)
    assert sim.stats().allocated_bytes == weights + given.nbytes
    assert list(chunks) == []


def test_published_sizes_are_foretold() -> None:
    """A dry run of a tile of 256 pixels on shapes. The reference keeps 1358 MiB there, padding and all."""
    assert cache_bytes(PUBLISHED, 256, 256) == 1132.125 * MIB
    assert cache_bytes(PUBLISHED, 512, 512) == 4 * 1132.125 * MIB
    with torch.inference_mode(), dry_card() as card:
        with torch.device("meta"):
            module = CausalVideoVAE()
        given = torch.zeros(1, 16, 3, 32, 32, device="meta")
        before = card.allocated_bytes()
        chunks = module.decode_chunks(given)
        next(chunks)
        assert card.allocated_bytes() - before == cache_bytes(module.config, 256, 256)
        for _ in chunks:
            pass
        peak = card.peak_bytes() - before
    assert peak <= decode_bytes(PUBLISHED, 256, 256) <= 1.05 * peak


# The choice


def test_choice_prefers_no_tiles_then_large_ones_then_windows() -> None:
    config, size = PUBLISHED, (384, 640)

    def chosen(budget: float) -> tuple[int, int | None] | None:
        return choose(config, *size, int(budget))

    assert chosen(1e12) == (4, None)
    for window in (4, 2, 1):
        needed = decode_bytes(config, *size, window)
        assert chosen(needed) == (window, None)
        assert chosen(needed - 1) != (window, None)
    assert chosen(decode_bytes(config, *size, 1) - 1) == (2, 512)
    assert chosen(decode_bytes(config, 256, 256, 2)) == (2, 256)
    assert chosen(decode_bytes(config, 128, 128, 1)) == (1, 128)
    assert chosen(decode_bytes(config, 128, 128, 1) - 1) is None


@pytest.mark.parametrize("size", [(384, 640), (768, 1280), (64, 64)])
def test_choice_stays_within_the_budget_and_grows_with_it(size: tuple[int, int]) -> None:
    last = 0
    for budget in (2**power for power in range(28, 40)):
        if found := choose(PUBLISHED, *size, budget):
            window, tile = found
            shown = size if tile is None else (min(tile, size[0]), min(tile, size[1]))
            assert decode_bytes(PUBLISHED, *shown, window) <= budget
            assert shown[0] * shown[1] >= last
            last = shown[0] * shown[1]
    assert last == size[0] * size[1]
