"""What LoRAs of a pipeline cost, what a change of them moves, and what is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from adapters import lora_files
from ballast.memory import manager
from ballast.memory.rates import ASSUMED
from ballast.pipelines.models.diffusers.diffusers_model import DiffusersModel
from ballast.pipelines.sampling.kernels import kernels

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What was found out of a pipeline once."""
    return tmp_path_factory.mktemp("loras")


def opened(folder: Path, cache: Path, **more: Any) -> tuple[Any, Callable[..., torch.Tensor]]:
    pipe, encode, sample, _ = tiny.stages("flux", folder, "sim", cache_dir=cache, **more)
    cond = encode()
    return pipe, lambda **given: sample(cond, **given)


def test_what_a_lora_costs_is_planned(tiny_folders: Folders, cache: Path, tmp_path: Path, sim: ModuleType) -> None:
    """The plan counts the branches' weights and what they compute; the least that is named for a budget is kept."""
    folder = tiny_folders("flux")
    loras = lora_files.two(folder, tmp_path)
    pipe, sample = opened(folder, cache)
    family = tiny.FAMILIES["flux"]
    cond = pipe.encode("a red boat", "blurry, grey" if family.negative else "", **family.encode_kwargs)
    run = {"width": family.size[0], "height": family.size[1], "steps": 2, "guidance": family.guidance}
    size = {**run, "cond": cond, "vram": "1GB", "rates": ASSUMED}
    plain = pipe.plan(**size).sampling
    pipe.set_loras(loras)
    whole = pipe.plan(**size)
    planned = whole.sampling
    nbytes = sum(file.stat().st_size for file, _ in loras)
    assert 0.9 * nbytes < planned.weights_bytes - plain.weights_bytes < nbytes
    assert planned.step_seconds > plain.step_seconds
    (cost,) = re.findall(r"LoRAs take ([\d.]+) ([KM]B) of the weights, and ([\d.]+) us of each step\.", str(whole))
    weights_bytes = float(cost[0]) * 1024 ** "_KM".index(cost[1][0])
    assert abs(weights_bytes - (planned.weights_bytes - plain.weights_bytes)) < 0.01 * weights_bytes
    more = planned.step_seconds - plain.step_seconds
    assert abs(1e-6 * float(cost[2]) - more) < 0.02 * more + 1e-6
    least = pipe.plan(**size, strategy="leafwise").sampling.peak_vram_bytes
    pipe.runner = pipe.runner.set(vram_bytes=least)
    sample()
    assert 0.95 * least <= manager("sim").timeline.stages[-1].peak_bytes <= least
    pipe.runner = pipe.runner.set(vram_bytes=least // 2)
    with pytest.raises(ballast.DoesNotFitError, match="Raise the vram budget"):
        sample()
    pipe.set_loras([])
    again = pipe.plan(**size).sampling
    assert "LoRA" not in str(pipe.plan(**size))
    assert (again.peak_vram_bytes, again.step_seconds) == (plain.peak_vram_bytes, plain.step_seconds)


def test_another_strength_reads_and_moves_nothing(
    tiny_folders: Folders, cache: Path, tmp_path: Path, sim: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of the weights, and not of the LoRAs; and strength 0 is none, to the bit."""
    folder = tiny_folders("flux")
    loras = lora_files.two(folder, tmp_path)
    pipe, sample = opened(folder, cache, keep=True)
    plain = sample()
    pipe.set_loras(loras)
    first = sample()
    on = manager("sim")
    read, moved = on.disk_bytes_read, on.device_bytes_in
    monkeypatch.setattr("ballast.pipelines.lora.file.read_tensors", pytest.fail)
    pipe.set_loras([(loras[0][0], 0.5), (loras[1][0], 0.1)])
    changed = sample()
    pipe.set_loras([(path, 0.0) for path, _ in loras])
    assert torch.equal(sample(), plain)
    pipe.set_loras(loras)
    assert torch.equal(sample(), first)
    assert not torch.equal(first, changed)
    assert (on.disk_bytes_read, on.device_bytes_in) == (read, moved)
    torch.testing.assert_close(
        changed, lora_files.stock(folder, [(loras[0][0], 0.5), (loras[1][0], 0.1)]), atol=1e-5, rtol=0
    )


def test_the_digest_tells_loras_and_their_strengths(tiny_folders: Folders, cache: Path, tmp_path: Path) -> None:
    """By which `ballast batch` knows what it has made."""
    folder = tiny_folders("flux")
    (one, strength), *_ = loras = lora_files.two(folder, tmp_path)
    pipe = ballast.open_pipeline(folder, device="cpu", cache_dir=cache)
    plain = pipe.digest()
    found = []
    for worn in ([(one, strength)], [(one, 0.5 * strength)], loras):
        pipe.set_loras(worn)
        found.append(pipe.digest())
    assert len({plain, *found}) == 4
    pipe.set_loras([])
    assert pipe.digest() == plain


def test_the_weights_stay_in_ram_while_loras_come_and_go(
    tiny_folders: Folders, cache: Path, tmp_path: Path, sim: ModuleType
) -> None:
    """They are neither read again nor copied, and pipelines that share them each have their own LoRAs."""
    folder = tiny_folders("flux")
    loras = lora_files.two(folder, tmp_path)
    one, sample_one = opened(folder, cache)
    plain = sample_one(strategy="streamed")
    (unit,) = one.denoisers
    read = manager("sim").disk_bytes_read
    at = {name: parameter.data_ptr() for name, parameter in unit.module.named_parameters()}
    other, sample_other = opened(folder, cache, loras=loras)
    assert other.denoisers == [unit]
    read_text = manager("sim").disk_bytes_read - read
    changed = sample_other(strategy="streamed")
    assert torch.equal(sample_one(strategy="streamed"), plain)
    assert torch.equal(sample_other(strategy="streamed"), changed)
    assert not torch.equal(plain, changed)
    assert manager("sim").disk_bytes_read - read == read_text
    assert at == {name: parameter.data_ptr() for name, parameter in unit.module.named_parameters()}
    del other, sample_other
    assert torch.equal(sample_one(strategy="streamed"), plain)
    assert not unit.active_adapters


def test_what_cannot_be_run_leaves_the_loras_of_before(
    tiny_folders: Folders, cache: Path, tmp_path: Path, sim: ModuleType
) -> None:
    folder = tiny_folders("flux")
    loras = lora_files.two(folder, tmp_path)
    pipe, sample = opened(folder, cache, loras=loras)
    before = sample()
    for strength, why in (
        ("much", "is 'much', which is no number"),
        (float("nan"), "is nan, which is no number"),
        (True, "is True, which is no number"),
        (10**400, "which is no number"),
        ({}, "names no model"),
        ({"unet": 1.0}, "has a strength for unet. Name one of transformer"),
    ):
        with pytest.raises(ValueError, match=why):
            pipe.set_loras([(loras[0][0], strength)])
    for given in (loras[0][0], str(loras[0][0]), (loras[0][0],), 3):
        with pytest.raises(ValueError, match=r"is no LoRA with its strength\. Give pairs") as why:
            pipe.set_loras([given])  # type: ignore[list-item]
        assert "\n" not in str(why.value)
    with pytest.raises(FileNotFoundError, match="there is no file .*none.safetensors"):
        pipe.set_loras([*loras, (tmp_path / "none.safetensors", 1.0)])
    assert torch.equal(sample(), before)
    pipe.set_loras([(path, {"transformer": strength}) for path, strength in loras])
    assert torch.equal(sample(), before)


def test_two_experts_each_have_their_own(tiny_folders: Folders, cache: Path, tmp_path: Path, sim: ModuleType) -> None:
    """As with `load_into_transformer_2` of the library; a number alone is for the first."""
    folder = tmp_path / "wan22"
    pipe = tiny.FAMILIES["wan"].build()
    second = type(pipe.transformer).from_config(pipe.transformer.config)
    second.load_state_dict({name: 0.9 * value for name, value in pipe.transformer.state_dict().items()})
    pipe.register_modules(transformer_2=second)
    pipe.register_to_config(boundary_ratio=0.9)
    pipe.save_pretrained(folder)
    high, low = (path for path, _ in lora_files.two(folder, tmp_path))
    expected = {}
    for both in (True, False):
        whole = tiny.DiffusionPipeline.from_pretrained(folder)
        whole.load_lora_weights(str(tmp_path), weight_name=high.name, adapter_name="high")
        whole.transformer.set_adapters(["high"], [0.8])
        if both:
            whole.load_lora_weights(
                str(tmp_path), weight_name=low.name, adapter_name="low", load_into_transformer_2=True
            )
            whole.transformer_2.set_adapters(["low"], [-0.3])
        whole.set_progress_bar_config(disable=True)
        generator = torch.Generator().manual_seed(0)
        expected[both] = whole("a red boat", "", 32, 32, 5, 3, 3.0, generator=generator, output_type="latent").frames
    ours = ballast.open_pipeline(folder, device="sim", cache_dir=cache)
    cond = ours.encode("a red boat", "")
    for both, loras in ((True, [(high, {"transformer": 0.8}), (low, {"transformer_2": -0.3})]), (False, [(high, 0.8)])):
        ours.set_loras(loras)
        found = ours.sample(cond, width=32, height=32, frames=5, steps=3, guidance=3.0)
        config = ours.decoder_config
        mean, std = (torch.tensor(config[f"latents_{key}"]).view(1, -1, 1, 1, 1) for key in ("mean", "std"))
        torch.testing.assert_close((found - mean) / std, expected[both].float(), atol=1e-5, rtol=1e-5)
    assert not torch.equal(expected[True], expected[False])


COMPILED = ["wan", "sd3", "qwenimage", "lumina2", "zimage", "ltx"]


@pytest.mark.long
@pytest.mark.parametrize("name", ["flux", *(pytest.param(name, marks=pytest.mark.soak) for name in COMPILED)])
def test_compiled_they_are_those_of_stock(
    name: str, tiny_folders: Folders, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where LoRAs come, go and count otherwise between runs, which compiles little anew."""
    torch._dynamo.reset()
    folder, graphs = tiny_folders(name), []
    denoise = DiffusersModel.denoise

    def compiler(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    def within(
        self: Any, cond: Any, arguments: Any, on_step: Any, device: Any, modules: Any, answers: Any = None
    ) -> torch.Tensor:
        with kernels(modules.values(), compile=True, backend=compiler):
            return denoise(self, cond, arguments, on_step, device, modules, answers)

    monkeypatch.setattr(DiffusersModel, "denoise", within)
    loras = lora_files.two(folder, tmp_path)
    pipe, encode, sample, _ = tiny.stages(name, folder, "cpu", cache_dir=tmp_path)
    cond = encode()
    plain = sample(cond)
    bare = len(graphs)
    assert bare
    pipe.set_loras(loras)
    torch.testing.assert_close(sample(cond), lora_files.stock(folder, loras), atol=1e-5, rtol=0)
    found = []
    for i in range(4):
        pipe.set_loras([(path, strength + 0.1 * i) for path, strength in loras])
        found.append(sample(cond))
    assert len({each.sum().item() for each in found}) == 4
    assert len(graphs) <= 4 * bare, "each strength compiles anew"
    pipe.set_loras([])
    assert torch.equal(sample(cond), plain)
    torch._dynamo.reset()


def test_scales_of_stock_diffusers_are_refused(
    tiny_folders: Folders, cache: Path, tmp_path: Path, sim: ModuleType
) -> None:
    folder = tiny_folders("flux")
    pipe, _ = opened(folder, cache, loras=lora_files.two(folder, tmp_path))
    with pytest.raises(ValueError, match=r"^lora_scale says how much LoRAs count\. Say it by their strengths"):
        pipe.encode("a boat", lora_scale=0.5)
    cond = pipe.encode("a boat")
    with pytest.raises(ValueError, match="^joint_attention_kwargs says how much LoRAs count"):
        pipe.sample(cond, width=32, height=32, steps=1, joint_attention_kwargs={"scale": 0.5})
