"""A pipeline opened from the one file of its transformer, in every layout, against the stock pipeline."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import ballast
import pytest
import tiny
import torch
from ballast.pipelines.files.components import read_components, read_model_index
from ballast.pipelines.files.single.component import FileComponent
from ballast.pipelines.files.single.given import GivenFiles
from safetensors.torch import save_file
from selection import few
from single_files import base_of, state_of, transformer_file
from single_files.comfy_folders import write_gguf
from single_files.original_names import ORIGINALS, converted, in_comfyui, original

Folders = Callable[[str], Path]
COMFY = "model.diffusion_model."


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what the tests of this file share."""
    return tmp_path_factory.mktemp("kept")


def component(path: Path, base: Path, dtype: torch.dtype | None = None) -> FileComponent:
    index = {"transformer": read_model_index(base)["transformer"]}
    found = read_components(base, index, dtype, None, GivenFiles(path).components(index))["transformer"]
    assert isinstance(found, FileComponent)
    return found


@pytest.mark.parametrize("name", ORIGINALS)
def test_the_original_names_are_those_that_diffusers_converts(name: str, tiny_folders: Folders) -> None:
    state = state_of(tiny_folders(name))
    back = converted(name, original(name, state))
    assert back.keys() == state.keys()
    assert all(torch.equal(back[key], tensor) for key, tensor in state.items())


@pytest.mark.parametrize("layout", few(["original", "comfy", "plain"], "comfy", "plain"))
@pytest.mark.parametrize("name", ORIGINALS)
def test_every_layout_gives_the_same_weights(
    name: str, layout: str, tiny_folders: Folders, tmp_path: Path, kept: Path
) -> None:
    """Bit for bit, of a module with the config of the folder."""
    folder = tiny_folders(name)
    prefix = COMFY if layout == "comfy" else ""
    path = transformer_file(name, folder, tmp_path / "model.safetensors", prefix, layout == "plain")
    found = component(path, base_of(folder, kept / name))
    unit = found.unit("")
    unit.load()
    state = unit.module.state_dict()
    expected = state_of(folder)
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], tensor) for key, tensor in expected.items())
    index = {"transformer": read_model_index(folder)["transformer"]}
    assert _plain(unit.module.config) == _plain(read_components(folder, index, None)["transformer"]._build().config)


@pytest.mark.parametrize(
    "wrapped",
    [
        lambda name: f"{COMFY}_orig_mod.{name}",
        lambda name: f"module.{name}",
        lambda name: name.replace("blocks.0.", "blocks.0._orig_mod."),
    ],
)
def test_names_of_wrappers_count_for_nothing(
    wrapped: Callable[[str], str], tiny_folders: Folders, tmp_path: Path
) -> None:
    """As a compiled or a distributed model saves them."""
    folder, path = tiny_folders("flux"), tmp_path / "model.safetensors"
    save_file({wrapped(name): t.contiguous() for name, t in original("flux", state_of(folder)).items()}, path)
    unit = component(path, base_of(folder, tmp_path / "base")).unit("")
    unit.load()
    state, expected = unit.module.state_dict(), state_of(folder)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


@pytest.mark.parametrize("prefix", ["", COMFY, "model.model."])
@pytest.mark.parametrize("name", ["hunyuan_video", "flux", "flux2_klein", "chroma"])
def test_names_that_comfyui_gives_layers(name: str, prefix: str, tiny_folders: Folders, tmp_path: Path) -> None:
    """In files that it writes: those of HunyuanVideo, and the weights of norms."""
    folder, path = tiny_folders(name), tmp_path / "model.safetensors"
    state = original(name, state_of(folder))
    change = in_comfyui if name == "hunyuan_video" else lambda key: key.replace(".scale", ".weight")
    renamed = {change(key): tensor.contiguous() for key, tensor in state.items()}
    assert renamed.keys() != state.keys()
    save_file({prefix + name: tensor for name, tensor in renamed.items()}, path)
    unit = component(path, base_of(folder, tmp_path / "base")).unit("")
    unit.load()
    state, expected = unit.module.state_dict(), state_of(folder)
    assert state.keys() == expected.keys() and all(torch.equal(state[name], expected[name]) for name in expected)


def test_two_copies_of_a_weight_are_refused(tiny_folders: Folders, tmp_path: Path) -> None:
    folder, path = tiny_folders("flux"), tmp_path / "model.safetensors"
    state = {name: tensor.contiguous() for name, tensor in original("flux", state_of(folder)).items()}
    save_file(state | {"_orig_mod.img_in.bias": state["img_in.bias"] * 2}, path)
    with pytest.raises(ValueError, match=r"^[^\n]*holds 1 weights that FLUX.1 has no place for, such as .*img_in.bias"):
        component(path, base_of(folder, tmp_path / "base"))


def _plain(config: Any) -> dict[str, Any]:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in config.items()}


@pytest.mark.parametrize("name", ["flux", "sd3"])
def test_a_file_runs_as_the_stock_pipeline_does(
    name: str, tiny_folders: Folders, tmp_path: Path, kept: Path, sim: ModuleType
) -> None:
    """Streamed from disk, and resident: equal latents, and nothing left on the device."""
    folder = tiny_folders(name)
    path = transformer_file(name, folder, tmp_path / "my-model.safetensors", COMFY)
    expected, _ = tiny.stock(folder)
    pipe, encode, sample, _ = tiny.stages(
        name, path, "sim", base=base_of(folder, kept / name), ram=130_000, cache_dir=kept
    )
    cond = encode()
    for strategy in ("streamed", "resident"):
        torch.testing.assert_close(sample(cond, strategy=strategy), expected.float(), atol=1e-5, rtol=0)
        assert sim.stats().allocated_bytes == 0
        assert not pipe.denoisers[0].in_ram
    assert pipe.title == "my-model"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_type_of_the_file_is_kept(dtype: torch.dtype, tiny_folders: Folders, tmp_path: Path, kept: Path) -> None:
    folder = tiny_folders("flux")

    def halved(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {name: tensor.to(dtype) for name, tensor in tensors.items()}

    path = transformer_file("flux", folder, tmp_path / "model.safetensors", change=halved)
    for asked in (None, torch.float32):
        unit = component(path, base_of(folder, kept / "flux"), asked).unit("")
        unit.load()
        for key, tensor in state_of(folder).items():
            found = unit.module.state_dict()[key]
            assert found.dtype == (asked or dtype)
            assert torch.equal(found, tensor.to(dtype).to(found.dtype)), key


def test_float64_runs_in_float32(tiny_folders: Folders, tmp_path: Path, kept: Path) -> None:
    """Nothing runs in float64, and diffusers' own default is float32."""
    folder = tiny_folders("flux")
    change = lambda state: {name: tensor.double() for name, tensor in state.items()}  # noqa: E731
    path = transformer_file("flux", folder, tmp_path / "model.safetensors", change=change)
    (unit := component(path, base_of(folder, kept / "flux")).unit("")).load()
    state = unit.module.state_dict()
    assert all(
        torch.equal(state[key], value) and state[key].dtype == value.dtype for key, value in state_of(folder).items()
    )


@pytest.mark.parametrize("ending", ["safetensors", "gguf"])
def test_any_shard_stands_for_all(ending: str, tiny_folders: Folders, tmp_path: Path, kept: Path) -> None:
    """As the original repositories hold large models; one that is missing is named."""
    folder = tiny_folders("flux")
    state = {name: tensor.contiguous() for name, tensor in original("flux", state_of(folder)).items()}
    names = sorted(state)
    paths = [tmp_path / f"model-0000{number}-of-00003.{ending}" for number in (1, 2, 3)]
    for number, path in enumerate(paths):
        some = {name: state[name] for name in names[number::3]}
        write_gguf(path, some) if ending == "gguf" else save_file(some, path)
    for path in paths[:2]:
        found = component(path, base_of(folder, kept / "flux"), torch.float32)
        (unit := found.unit("")).load()
        got = unit.module.state_dict()
        assert all(torch.equal(got[key], value) for key, value in state_of(folder).items())
        assert len(found.identity()) == 4
    paths[2].unlink()
    with pytest.raises(FileNotFoundError, match=r"^[^\n]*model-00003-of-00003[^\n]* is missing beside"):
        component(paths[0], base_of(folder, kept / "flux"))


def test_two_experts_from_two_files(tiny_folders: Folders, tmp_path: Path, kept: Path, sim: ModuleType) -> None:
    """Wan 2.2: the latents of the stock pipeline, which changes from one to the other at a boundary."""
    folder = tmp_path / "wan"
    pipe: Any = tiny.FAMILIES["wan"].build()
    torch.manual_seed(1)
    second = type(pipe.transformer).from_config(pipe.transformer.config).eval().requires_grad_(False)
    type(pipe)(**pipe.components | {"transformer_2": second}, boundary_ratio=0.9).save_pretrained(folder)
    expected, _ = tiny.stock(folder, steps=2)
    files = {}
    for part in ("transformer", "transformer_2"):
        files[part] = tmp_path / f"{part}.safetensors"
        save_file(
            {f"{COMFY}{k}": t.contiguous() for k, t in original("wan", state_of(folder, part)).items()}, files[part]
        )
    path, base = files.pop("transformer"), base_of(folder, tmp_path / "base", "transformer_2")
    _, encode, sample, _ = tiny.stages("wan", path, "sim", base=base, cache_dir=kept, **files)
    torch.testing.assert_close(sample(encode()), expected.float(), atol=1e-5, rtol=0)
    assert sim.stats().allocated_bytes == 0
    swapped = path.rename(tmp_path / "wan2.2_Low_noise.safetensors")
    high = files["transformer_2"].rename(tmp_path / "wan2.2_high-noise.safetensors")
    with pytest.raises(ValueError, match="is the model for low noise. Give it as transformer_2"):
        ballast.open_pipeline(swapped, device="sim", base=base, transformer_2=high)
    files, path = {"transformer_2": high}, swapped.rename(tmp_path / "wan.safetensors")
    with pytest.raises(ValueError, match="given as transformer_2, and the base has none"):
        ballast.open_pipeline(path, device="sim", base=base_of(tiny_folders("wan"), kept / "wan"), **files)
