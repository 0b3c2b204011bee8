"""A dry run that walks calls alike once tells what one tells that walks them all."""

from __future__ import annotations

from typing import Any

import diffusers
import pytest
import striped_vaes
import torch
from ballast.bench.downloads import full_size
from ballast.memory.planning import modules
from ballast.memory.planning.dry_run import dry_run
from ballast.memory.planning.forecast import Forecast
from ballast.memory.planning.repeats import Repeats, Walked
from ballast.pipelines.decoding.tiling import can_tile, first_tile, set_tiling
from ballast.pipelines.files.neighborhood import attend_in_blocks
from diffusers import LTX2VideoDiffusionDecoderModel
from selection import few
from torch import nn

# Latents [B,C,F,H,W] of more frames than a VAE decodes at once, and than one tile.
VIDEOS: dict[str, tuple[type, dict[str, Any], tuple[int, ...]]] = {
    "wan": (diffusers.AutoencoderKLWan, {}, (1, 16, 7, 40, 52)),
    "hunyuan video 1.5": (diffusers.AutoencoderKLHunyuanVideo15, {}, (1, 32, 5, 22, 26)),
    "mochi": (diffusers.AutoencoderKLMochi, {}, (1, 12, 5, 40, 34)),
    "cogvideox": (diffusers.AutoencoderKLCogVideoX, {"latent_channels": 16}, (1, 16, 5, 32, 46)),
    "ltx 2.5": (LTX2VideoDiffusionDecoderModel, {}, (1, 128, 9, 14, 13)),
    "minimax h3": (diffusers.AutoencoderKLMiniMaxH3, {}, (1, 24, 9, 20, 18)),
}


@pytest.fixture
def hits(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Gets an entry for each call that may be answered from memory: whether it is."""
    seen: list[bool] = []
    find = Repeats.find

    def watched(self: Repeats, key: Any) -> Walked | None:
        found = find(self, key)
        seen.append(found is not None)
        return found

    monkeypatch.setattr(modules.Repeats, "find", watched)
    return seen


def told(vae: Any, latents: torch.Tensor, repeats: bool, tiled: bool = False) -> Forecast:
    """`latents` have the shape to decode."""
    set_tiling(vae, tiled)
    forecast, _ = dry_run(
        {"vae": vae},
        lambda device: vae.decode(torch.empty(latents.shape, device=device), return_dict=False)[0].cpu(),
        method="decode",
        repeats=repeats,
    )
    return forecast


@pytest.mark.parametrize("tiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", few(VIDEOS, "wan", "minimax h3"))
def test_published_decoders_take_the_same(name: str, tiled: bool, hits: list[bool]) -> None:
    cls, config, shape = VIDEOS[name]
    with torch.device("meta"):
        latents, vaes = torch.empty(shape), [full_size.empty(cls, config) for _ in range(2)]
    for vae in vaes:
        attend_in_blocks(vae)
    assert told(vaes[0], latents, True, tiled) == told(vaes[1], latents, False, tiled)
    assert any(hits)


@pytest.mark.parametrize("name", few(striped_vaes.VAES, "wan 2.2", "sana"))
def test_tiny_decoders_take_the_same(name: str) -> None:
    """Whose values are known."""
    vae, latents = striped_vaes.build(name)
    other, _ = striped_vaes.build(name)
    latents = torch.cat([latents] * 3, dim=2)
    assert told(vae.to("meta"), latents, True) == told(other.to("meta"), latents, False)
    if can_tile(vae):
        vae, other = (striped_vaes.build(name)[0].to("meta") for _ in range(2))
        large = torch.empty(*latents.shape[:-2], 99, 99, device="meta")
        height, width = first_tile(vae, large).shape[-2:]
        latents = torch.empty(*latents.shape[:-2], 2 * height + 3, width + 1, device="meta")
        assert told(vae, latents, True, tiled=True) == told(other, latents, False, tiled=True)


class Block(nn.Module):
    """Makes more, the more often it was called, by what is told in `how`."""

    def __init__(self, how: str, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.how, self.count, self.kept, self.options = how, 0, [], {"times": 0}

    def forward(self, x: torch.Tensor, counts: list[int], flags: torch.Tensor | None = None) -> torch.Tensor:
        times, given = 1, x
        if self.how == "attribute":
            self.count += 1
            times = self.count
        elif self.how == "inside":
            self.options["times"] += 1
            times = self.options["times"]
        elif self.how == "list":
            counts[0] += 1
            times = counts[0]
        elif self.how == "kept":
            self.kept.append(x * 2)
        elif self.how == "flags" and flags is not None:
            times = 1 + int(flags.sum())
        for layer in self.layers:
            x = x + layer(torch.cat([x] * times)).sum(0, keepdim=True)
        return given if self.how == "given" else x


class Blocks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(Block(how) for _ in range(3))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        counts = [0]
        for round_ in range(3):
            flags = (torch.arange(4, device=x.device) < round_)[None] if self.how == "flags" else None
            for block in self.blocks:
                x = block(x, counts, flags=flags)
        return x + counts[0]


@pytest.mark.parametrize("how", ["plain", "attribute", "inside", "list", "kept", "flags", "given"])
def test_what_changes_from_call_to_call_is_walked(how: str, hits: list[bool]) -> None:
    x = torch.empty(1, 2**10, 8)
    found = []
    for repeats in (True, False):
        with torch.device("meta"):
            module = Blocks(how)
        forecast, result = dry_run(
            {"vae": module}, lambda device, of=module: of.decode(x.to(device)), method="decode", repeats=repeats
        )
        found.append((forecast, result.shape))
    assert found[0] == found[1]
    assert any(hits) == (how not in ("attribute", "inside", "list", "kept", "given")), hits
    if how == "plain":
        assert hits == [False, *[True] * 8]


def test_other_widths_and_weights_are_told_apart(hits: list[bool]) -> None:
    with torch.device("meta"):
        module = Blocks("plain")
        module.blocks[1] = Block("plain")
        module.blocks[1].layers[2] = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    x = torch.empty(1, 2**10, 8)
    dry_run({"vae": module}, lambda device: module.decode(x.to(device)), method="decode", repeats=True)
    assert hits == [False, False, True] + [True] * 6
