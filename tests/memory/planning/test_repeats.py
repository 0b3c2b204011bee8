"""A dry run that walks calls alike once tells what one tells that walks them all."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
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


@contextlib.contextmanager
def walking(all_calls: bool) -> Iterator[None]:
    """Walk each call of all, as if none were like another, or leave it to `Repeats`."""
    with pytest.MonkeyPatch.context() as patch:
        if all_calls:
            patch.setattr(Repeats, "find", lambda self, key: None)
        yield


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


def told(vae: Any, latents: torch.Tensor, all_calls: bool, tiled: bool = False) -> Forecast:
    """`latents` have the shape to decode."""
    set_tiling(vae, tiled)
    with walking(all_calls):
        forecast, _ = dry_run(
            {"vae": vae},
            lambda device: vae.decode(torch.empty(latents.shape, device=device), return_dict=False)[0].cpu(),
            method="decode",
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
    assert told(vaes[0], latents, False, tiled) == told(vaes[1], latents, True, tiled)
    assert any(hits)


@pytest.mark.parametrize("name", few(striped_vaes.VAES, "wan 2.2", "sana"))
def test_tiny_decoders_take_the_same(name: str) -> None:
    """Whose values are known."""
    vae, latents = striped_vaes.build(name)
    other, _ = striped_vaes.build(name)
    latents = torch.cat([latents] * 3, dim=2)
    assert told(vae.to("meta"), latents, False) == told(other.to("meta"), latents, True)
    if can_tile(vae):
        vae, other = (striped_vaes.build(name)[0].to("meta") for _ in range(2))
        large = torch.empty(*latents.shape[:-2], 99, 99, device="meta")
        height, width = first_tile(vae, large).shape[-2:]
        latents = torch.empty(*latents.shape[:-2], 2 * height + 3, width + 1, device="meta")
        assert told(vae, latents, False, tiled=True) == told(other, latents, True, tiled=True)


UNKNOWN = (1, 2**18, 8)  # the shape of a tensor that is too large for a dry run to know its values


class Block(nn.Module):
    """Makes more, the more often it was called, by what is told in `how`."""

    def __init__(self, how: str, width: int = 8, number: int = 0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.how, self.count, self.kept, self.options = how, 0, [], {"times": 0, "of": {"times": 0}}
        self.layer_idx = number

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
        elif self.how == "deep":
            self.options["of"]["times"] += 1
            times = self.options["of"]["times"]
        elif self.how == "number":
            times = 1 + self.layer_idx
        elif self.how == "flags" and flags is not None:
            times = 1 + int(flags.sum())
        for layer in self.layers:
            x = x + layer(torch.cat([x] * times)).sum(0, keepdim=True)
        return given if self.how == "given" else x


class Blocks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.blocks = how, nn.ModuleList(Block(how, number=number) for number in range(3))

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        counts = [0]
        for round_ in range(3):
            flags = (torch.arange(4, device=x.device) < round_)[None] if self.how == "flags" else None
            for block in self.blocks:
                x = block(x, counts, flags=flags)
        return x + counts[0]


@pytest.mark.parametrize("how", ["plain", "attribute", "inside", "deep", "list", "kept", "flags", "given", "number"])
def test_what_changes_from_call_to_call_is_walked(how: str, hits: list[bool]) -> None:
    x, found = torch.empty(UNKNOWN), []
    for all_calls in (False, True):
        with torch.device("meta"):
            module = Blocks(how)
        with walking(all_calls):
            forecast, result = dry_run(
                {"vae": module}, lambda device, of=module: of.decode(x.to(device)), method="decode"
            )
        found.append((forecast, result.shape))
    assert found[0] == found[1]
    assert any(hits) == (how not in ("attribute", "inside", "deep", "list", "kept", "number")), hits
    if how in ("plain", "given"):
        assert hits == [False, *[True] * 8]


def test_other_widths_and_weights_are_told_apart(hits: list[bool]) -> None:
    with torch.device("meta"):
        module = Blocks("plain")
        module.blocks[1] = Block("plain")
        module.blocks[1].layers[2] = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 8))
    x = torch.empty(UNKNOWN)
    dry_run({"vae": module}, lambda device: module.decode(x.to(device)), method="decode")
    assert hits == [False, False, True] + [True] * 6


# Transformers of published width, of a few blocks: class, config, and the arguments of a call.
TRANSFORMERS: dict[str, tuple[type, dict[str, Any], dict[str, Any]]] = {
    "qwenimage": (
        diffusers.QwenImageTransformer2DModel,
        {"num_layers": 4},
        {
            "hidden_states": torch.empty(1, 256, 64),
            "encoder_hidden_states": torch.empty(1, 40, 3584),
            "timestep": torch.empty(1),
            "img_shapes": [[(1, 16, 16)]],
            "encoder_hidden_states_mask": None,
        },
    ),
    "flux": (
        diffusers.FluxTransformer2DModel,
        {"num_layers": 3, "num_single_layers": 4, "guidance_embeds": True},
        {
            "hidden_states": torch.empty(1, 256, 64),
            "encoder_hidden_states": torch.empty(1, 64, 4096),
            "pooled_projections": torch.empty(1, 768),
            "timestep": torch.empty(1),
            "guidance": torch.empty(1),
            "img_ids": torch.zeros(256, 3),
            "txt_ids": torch.zeros(64, 3),
        },
    ),
    "wan": (
        diffusers.WanTransformer3DModel,
        {"num_layers": 4, "num_attention_heads": 12, "ffn_dim": 8960},
        {
            "hidden_states": torch.empty(1, 16, 3, 16, 20),
            "encoder_hidden_states": torch.empty(1, 64, 4096),
            "timestep": torch.empty(1),
        },
    ),
}


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_take_the_same(name: str, hits: list[bool]) -> None:
    """Also what runs once, and what it needs."""
    cls, config, arguments = TRANSFORMERS[name]
    found = []
    for all_calls in (False, True):
        model = full_size.empty(cls, config)

        def run(device: torch.device, model: Any = model) -> torch.Tensor:
            given = {key: one.to(device) if isinstance(one, torch.Tensor) else one for key, one in arguments.items()}
            return model(**given, return_dict=False)[0].cpu()

        with walking(all_calls):
            found.append(dry_run({"dit": model}, run)[0])
    assert found[0] == found[1]
    assert any(hits) and found[0].units["dit"].once


def test_what_runs_once_is_told_apart(hits: list[bool]) -> None:
    """A block whose rows come from a table of the timestep, one whose rows come from text, and one of the latents."""

    class Given(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block("plain") for _ in range(3))

        def forward(self, hidden_states: Any, timestep: Any, encoder_hidden_states: Any) -> Any:
            rows = self.blocks[0](timestep, []), self.blocks[1](encoder_hidden_states, [])
            return self.blocks[2](hidden_states, []) + rows[0] + rows[1]

    found, given = [], [torch.empty(UNKNOWN)] * 3
    for all_calls in (False, True):
        with torch.device("meta"):
            module = Given()
        with walking(all_calls):
            forecast, _ = dry_run({"dit": module}, lambda device, of=module: of(*(x.to(device) for x in given)))
        found.append(forecast)
    assert found[0] == found[1] and not any(hits)
    once = {one.path: (one.per_step, one.per_pass) for one in found[0].units["dit"].once}
    assert once == {f"blocks.{i}.layers.{k}": (i == 0, i == 1) for i in range(2) for k in range(4)}
